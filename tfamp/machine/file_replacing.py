"""Writing files so that half of one is never seen; framework-free."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path


def replace_text(path: Path, text: str) -> None:
    """Writes a text file, in the place of one that is there.

    It is written next to its place, on the same disk, and moved there in one step. If anything goes
    wrong, what was there stays.

    Args:
        path: The file; its folder is made if need be.
        text: What to write, as UTF-8.

    Raises:
        OSError: It cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.stem, suffix=".tmp")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        # A temporary file is its owner's alone; this one is as open as other new files.
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(name, 0o666 & ~umask)
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise
