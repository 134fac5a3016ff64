"""The cache of machine profiles: whole files, or none."""

import dataclasses
import json
from pathlib import Path

import platformdirs
import pytest

from tfamp.core.profile import builtin_profile
from tfamp.machine import profile_choice

KEY = {"cpu": "My CPU", "tensorflow": "2.21.0"}
PROFILE = dataclasses.replace(builtin_profile("cpu"), name="mine", op_overhead=1e-6)


def test_what_is_put_in_the_users_cache_is_got_for_the_same_key_only(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "not"))
    folder = profile_choice.cache_folder()
    assert folder == Path(platformdirs.user_cache_dir("tfamp", False))
    assert profile_choice.get_profile(folder, KEY) is None
    path = profile_choice.put_profile(folder, KEY, PROFILE)
    assert path == profile_choice.profile_path(folder, KEY)
    assert list(folder.iterdir()) == [path]  # nothing temporary is left
    assert profile_choice.get_profile(folder, dict(reversed(KEY.items()))) == PROFILE
    for other in ({**KEY, "tensorflow": "2.22.0"}, {"cpu": "My CPU"}, {**KEY, "gpus": "A100"}):
        assert profile_choice.get_profile(folder, other) is None


def changed(**changes):
    return lambda text: json.dumps(json.loads(text) | changes)


FIELDS = json.loads(PROFILE.to_json())
SPOILT = [
    *(lambda text, spoilt=spoilt: spoilt for spoilt in ("", "\0" * 100, "[]", "3")),
    lambda text: text[: len(text) // 2],
    *(changed(profile=each) for each in (None, {"name": "half"}, {**FIELDS, "peaks": 3})),
    changed(profile={**FIELDS, "bandwidth": -1}),
    changed(format=0),
    changed(key={}),
]


@pytest.mark.parametrize("spoil", SPOILT)
def test_what_cannot_be_read_counts_as_not_there_and_is_replaced(spoil, tmp_path):
    path = profile_choice.put_profile(tmp_path, KEY, PROFILE)
    path.write_text(spoil(path.read_text("utf-8")), "utf-8")
    assert profile_choice.get_profile(tmp_path, KEY) is None
    profile_choice.put_profile(tmp_path, KEY, PROFILE)
    assert profile_choice.get_profile(tmp_path, KEY) == PROFILE
    path.write_bytes(b"\xff\xfe\x00")
    assert profile_choice.get_profile(tmp_path, KEY) is None
    path.unlink()
    path.mkdir()
    assert profile_choice.get_profile(tmp_path, KEY) is None


def test_what_cannot_be_written_is_an_oserror_and_leaves_nothing(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        profile_choice.put_profile(tmp_path / "file" / "tfamp", KEY, PROFILE)
    with pytest.raises(OSError, match="no home folder"):
        profile_choice.put_profile(Path("~/.cache/tfamp"), KEY, PROFILE)

    def full(*_):
        raise OSError("no space left")

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(OSError, match="no space left"):
        profile_choice.put_profile(tmp_path / "folder", KEY, PROFILE)
    assert list((tmp_path / "folder").iterdir()) == []
