"""Files and directories are replaced as a whole or not at all."""

import os
import signal
import stat
import subprocess
import sys

import pytest

from tfamp.machine.file_replacing import new_directory, replace_text


def test_a_file_is_written_in_a_new_folder_and_replaced_or_stays(tmp_path):
    path = tmp_path / "new" / "file.txt"
    replace_text(path, "one ²")
    replace_text(path, "two")
    with pytest.raises(UnicodeEncodeError, match="surrogates not allowed"):
        replace_text(path, "new \ud800")
    assert path.read_text(encoding="utf-8") == "two"
    assert [each.name for each in path.parent.iterdir()] == ["file.txt"]
    (tmp_path / "other").write_text("")  # It is as open as other new files.
    modes = {stat.S_IMODE(os.stat(each).st_mode) for each in (path, tmp_path / "other")}
    assert len(modes) == 1


def content(directory):
    return {path.name: path.read_text() for path in directory.iterdir()}


def test_a_directory_takes_the_place_of_another_or_that_is_back(tmp_path, monkeypatch):
    dst = tmp_path / "above" / "dst"
    for text in ("one", "two"):
        with new_directory(dst) as work:
            (work / "file").write_text(text)
        assert content(dst) == {"file": text}
        assert list(dst.parent.iterdir()) == [dst]
    rename = type(dst).rename

    def refuse(path, target):
        if path.suffix == ".tmp":
            raise OSError("no")
        return rename(path, target)

    monkeypatch.setattr(type(dst), "rename", refuse)
    for other in (dst, tmp_path / "new" / "deep" / "dst"):
        with pytest.raises(OSError, match="no"), new_directory(other) as work:
            (work / "file").write_text("new")
    assert content(dst) == {"file": "two"}
    assert list(tmp_path.rglob("*")) == [dst.parent, dst, dst / "file"]


_KILLED = """
import os, signal, sys
from pathlib import Path
from tfamp.machine.file_replacing import new_directory

rename = Path.rename
def rename_and_die(path, target):
    rename(path, target)
    os.kill(os.getpid(), signal.SIGKILL)
Path.rename = rename_and_die
with new_directory(Path(sys.argv[1])) as work:
    (work / "file").write_text("new")
"""


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs Unix")
def test_killed_between_the_renames_both_directories_are_complete(tmp_path):
    dst = tmp_path / "dst"
    with new_directory(dst) as work:
        (work / "file").write_text("old")
    done = subprocess.run([sys.executable, "-c", _KILLED, str(dst)], check=False)
    assert done.returncode == -signal.SIGKILL
    assert not dst.exists()
    (old,), (new,) = (list(tmp_path.glob(f".dst-*{end}")) for end in (".old", ".tmp"))
    assert (content(old), content(new)) == ({"file": "old"}, {"file": "new"})
    old.rename(dst)  # As docs/guides/distributed.md says.
    with new_directory(dst) as work:
        (work / "file").write_text("again")
    assert content(dst) == {"file": "again"}
