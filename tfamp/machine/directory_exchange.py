"""Two directories that change places in one step, where the system can do that."""

from __future__ import annotations

import ctypes
import errno
import os
import sys
from pathlib import Path

# Of linux/fs.h and fcntl.h.
_RENAME_EXCHANGE = 2
_AT_FDCWD = -100
_CANNOT = frozenset({errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EPERM})


def exchange(first: Path, second: Path) -> bool:
    """Exchanges two directories, so that nobody ever sees a name without one.

    Python can only rename, and a directory that is not empty cannot be renamed onto: between
    renaming the old one away and the new one to its place there would be none. Linux exchanges
    both in one step on most file systems; macOS and Windows are not asked.

    Args:
        first: A directory.
        second: Another on the same file system.

    Returns:
        Whether they were exchanged; False if this system or this file system cannot.

    Raises:
        OSError: It can, and it failed: one is missing, or may not be written.

    Example:
        >>> import tempfile
        >>> here = Path(tempfile.mkdtemp())
        >>> (here / "a").mkdir(), (here / "b").mkdir(), (here / "a" / "file").touch()
        (None, None, None)
        >>> (here / ("b" if exchange(here / "a", here / "b") else "a") / "file").exists()
        True
    """
    rename = _renameat2()
    if rename is None:
        return False
    names = os.fsencode(first), os.fsencode(second)
    if rename(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in _CANNOT:
        return False
    raise OSError(number, os.strerror(number), str(first), None, str(second))


def _renameat2() -> ctypes._NamedFuncPointer | None:
    if sys.platform != "linux":
        return None
    function = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if function is not None:
        function.argtypes = (
            ctypes.c_int,
            ctypes.c_char_p,
            ctypes.c_int,
            ctypes.c_char_p,
            ctypes.c_uint,
        )
    return function
