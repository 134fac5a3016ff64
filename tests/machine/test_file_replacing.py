"""Files and directories are replaced as a whole or not at all."""

import os
import signal
import stat
import subprocess
import sys

import pytest

from tfamp.machine.file_replacing import new_directory, replace_text, restore_directory


def test_a_file_is_written_in_a_new_folder_and_replaced_or_stays(tmp_path):
    path = tmp_path / "new" / "file.txt"
    replace_text(path, "one ²")
    replace_text(path, "two")
    with pytest.raises(UnicodeEncodeError):
        replace_text(path, "new \ud800")
    assert path.read_text(encoding="utf-8") == "two"
    assert [each.name for each in path.parent.iterdir()] == ["file.txt"]
    (tmp_path / "other").write_text("")  # It is as open as other new files.
    modes = {stat.S_IMODE(os.stat(each).st_mode) for each in (path, tmp_path / "other")}
    assert len(modes) == 1


def content(directory):
    return {path.name: path.read_text() for path in directory.iterdir()}


def test_a_directory_takes_the_place_of_another_and_leaves_nothing_beside(tmp_path):
    for text in ("one", "two"):
        with new_directory(tmp_path / "above" / "dst") as work:
            (work / "file").write_text(text)
        assert content(tmp_path / "above" / "dst") == {"file": text}
        assert [path.name for path in (tmp_path / "above").iterdir()] == ["dst"]


def test_where_the_second_rename_fails_the_old_directory_is_back(tmp_path, monkeypatch):
    dst = tmp_path / "dst"
    with new_directory(dst) as work:
        (work / "file").write_text("old")
    rename = type(dst).rename

    def refuse(path, target):
        if path.suffix == ".tmp":
            raise OSError("no")
        return rename(path, target)

    monkeypatch.setattr(type(dst), "rename", refuse)
    with pytest.raises(OSError, match="no"), new_directory(dst) as work:
        (work / "file").write_text("new")
    assert content(dst) == {"file": "old"}
    assert list(tmp_path.iterdir()) == [dst]


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
def test_killed_between_the_renames_loses_nothing_and_the_old_directory_is_found_again(tmp_path):
    dst = tmp_path / "dst"
    with new_directory(dst) as work:
        (work / "file").write_text("old")
    done = subprocess.run([sys.executable, "-c", _KILLED, str(dst)], check=False)
    assert done.returncode == -signal.SIGKILL
    assert not dst.exists()
    assert sorted(content(path)["file"] for path in tmp_path.iterdir()) == ["new", "old"]
    for other in ("ds", "dst-x"):  # What was put aside is of another name.
        restore_directory(tmp_path / other)
        assert not (tmp_path / other).exists()
    restore_directory(dst)
    restore_directory(dst)
    assert content(dst) == {"file": "old"}
