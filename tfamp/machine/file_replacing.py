"""Atomic replacement of files and directories; framework-free."""

from __future__ import annotations

import contextlib
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path


def replace_text(path: Path, text: str) -> None:
    """Writes a text file, which replaces an existing one.

    It is written to a temporary file in the same folder, and renamed in one step. After an
    error the existing file is unchanged. The folder is created if it is missing.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    work = _beside(path)
    try:
        work.write_text(text, encoding="utf-8")
        work.replace(path)
    finally:
        with contextlib.suppress(OSError):  # The first error is the one to raise.
            work.unlink(missing_ok=True)


@contextlib.contextmanager
def new_directory(dst: Path) -> Iterator[Path]:
    """Yields a directory to fill, which replaces `dst` at the end.

    It is next to `dst`, and is removed after an error or an interrupt; until the end an
    existing `dst` stays. Missing parent directories are created.

    An existing `dst` is renamed to ".NAME-….old" and the new directory to its name: a process
    killed between the two leaves both, complete.
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
        with contextlib.suppress(OSError):  # They are not empty once `dst` exists.
            for path in made:
                path.rmdir()


def _beside(path: Path) -> Path:
    """An unused path next to another."""
    return path.with_name(f".{path.name}-{uuid.uuid4().hex[:8]}.tmp")
