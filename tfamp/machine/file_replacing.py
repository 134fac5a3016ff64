"""Writing files and directories so that half of one is never seen; framework-free."""

from __future__ import annotations

import contextlib
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path


def replace_text(path: Path, text: str) -> None:
    """Writes a text file, in the place of one that is there.

    It is written next to its place, on the same disk, and moved there in one step. If anything goes
    wrong, what was there stays. Its folder is made if need be.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    work = _beside(path)
    try:
        work.write_text(text, encoding="utf-8")
        work.replace(path)
    finally:
        with contextlib.suppress(OSError):  # The error that led here is the one to see.
            work.unlink(missing_ok=True)


@contextlib.contextmanager
def new_directory(dst: Path) -> Iterator[Path]:
    """Gives a directory to fill, which takes the place of `dst` at the end.

    It is next to `dst`, on the same disk, and is removed if anything goes wrong, an interrupt
    included; a `dst` that was there stays until then. Directories above `dst` are made.

    A `dst` that is there is renamed to ".NAME-….old" and the new one to its name: a process killed
    between the two leaves both, complete.
    """
    made = [path for path in dst.parents if not path.exists()]
    dst.parent.mkdir(parents=True, exist_ok=True)
    work = _beside(dst)
    old = work.with_suffix(".old")
    try:
        work.mkdir()
        yield work
        if os.path.lexists(dst):
            dst.rename(old)
        work.rename(dst)
    finally:
        if old.exists() and not dst.exists():
            old.rename(dst)
        for path in (work, old):
            shutil.rmtree(path, ignore_errors=True)
        with contextlib.suppress(OSError):  # Where there is a `dst` now they are not empty.
            for path in made:
                path.rmdir()


def _beside(path: Path) -> Path:
    """A path next to another that nothing has yet."""
    return path.with_name(f".{path.name}-{uuid.uuid4().hex[:8]}.tmp")
