"""Files are replaced as a whole or not at all."""

import os
import stat

import pytest

from tfamp.machine.file_replacing import replace_text


def test_a_file_is_written_in_a_new_folder_and_replaced(tmp_path):
    path = tmp_path / "new" / "file.txt"
    replace_text(path, "one ²")
    replace_text(path, "two")
    assert path.read_text(encoding="utf-8") == "two"
    assert [each.name for each in path.parent.iterdir()] == ["file.txt"]


def test_it_is_as_open_as_other_new_files(tmp_path):
    (tmp_path / "other").write_text("")
    replace_text(tmp_path / "file", "")
    modes = {stat.S_IMODE(os.stat(tmp_path / name).st_mode) for name in ("other", "file")}
    assert len(modes) == 1


def test_what_was_there_stays_if_it_cannot_be_written(tmp_path):
    path = tmp_path / "file"
    path.write_text("old")
    with pytest.raises(UnicodeEncodeError):
        replace_text(path, "new \ud800")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]
