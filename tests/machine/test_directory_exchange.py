"""Two directories that change places in one step."""

import errno
import sys

import pytest

from tfamp.machine import directory_exchange
from tfamp.machine.directory_exchange import exchange


def make(path, content):
    path.mkdir()
    (path / "file").write_text(content)
    return path


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")
def test_they_are_exchanged_with_what_is_in_them(tmp_path):
    first, second = make(tmp_path / "a", "first"), make(tmp_path / "b", "second")
    if not exchange(first, second):
        pytest.skip("this file system cannot")
    assert (first / "file").read_text() == "second"
    assert (second / "file").read_text() == "first"
    with pytest.raises(FileNotFoundError, match="nowhere"):
        exchange(first, tmp_path / "nowhere")


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOSYS])
def test_a_file_system_that_cannot_is_told_by_false(tmp_path, monkeypatch, number):
    def refuse(*_):
        directory_exchange.ctypes.set_errno(number)
        return -1

    monkeypatch.setattr(directory_exchange, "_renameat2", lambda: refuse)
    assert not exchange(make(tmp_path / "a", "first"), make(tmp_path / "b", "second"))
    assert (tmp_path / "a" / "file").read_text() == "first"


def test_a_system_that_cannot_is_told_by_false(tmp_path, monkeypatch):
    monkeypatch.setattr(directory_exchange.sys, "platform", "darwin")
    assert not exchange(make(tmp_path / "a", "first"), make(tmp_path / "b", "second"))
