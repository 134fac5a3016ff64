"""Writing files and directories so that half of one is never seen; framework-free."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

# How the name of a directory ends that is put aside while another takes its place.
_ASIDE = ".tmp.old"


def replace_text(path: Path, text: str) -> None:
    """Writes a text file, in the place of one that is there.

    It is written next to its place, on the same disk, and moved there in one step. If anything goes
    wrong, what was there stays. Its folder is made if need be.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.stem, suffix=".tmp")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        _open_to_others(name, 0o666)
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


@contextlib.contextmanager
def new_directory(dst: Path) -> Iterator[Path]:
    """Gives a directory to fill, which takes the place of `dst` at the end.

    It is next to `dst`, on the same disk, and is removed if anything goes wrong, an interrupt
    included; a `dst` that was there stays until then. Directories above `dst` are made.

    A `dst` that is there is put aside in one step, and the new one put in its place in the next: a
    process killed between them leaves both, complete, under names that begin with a dot and the
    name of `dst`. `restore_directory` puts the old one back.
    """
    made = [path for path in (dst.parent, *dst.parent.parents) if not path.exists()]
    dst.parent.mkdir(parents=True, exist_ok=True)
    work: Path | None = None
    try:
        work = Path(tempfile.mkdtemp(prefix=f".{dst.name}-", suffix=".tmp", dir=dst.parent))
        yield work
        _open_to_others(work, 0o777)
        _put_in_place(work, dst)
    except BaseException:
        if work is not None:
            shutil.rmtree(work, ignore_errors=True)
        for parent in made:
            with contextlib.suppress(OSError):
                parent.rmdir()
        raise


def restore_directory(dst: Path) -> None:
    """Puts a directory back that was put aside by a process killed before it put in another."""
    if os.path.lexists(dst) or not dst.parent.is_dir():
        return
    name = re.compile(rf"\.{re.escape(dst.name)}-\w+{re.escape(_ASIDE)}")
    aside = [path for path in dst.parent.iterdir() if name.fullmatch(path.name)]
    if aside:
        max(aside, key=lambda path: path.stat().st_mtime).rename(dst)


def _put_in_place(work: Path, dst: Path) -> None:
    old = work.with_suffix(_ASIDE)
    try:
        if os.path.lexists(dst):
            dst.rename(old)
        work.rename(dst)
    finally:
        if old.exists() and not dst.exists():
            old.rename(dst)
        shutil.rmtree(old, ignore_errors=True)


def _open_to_others(path: str | Path, mode: int) -> None:
    """Makes what is temporary, and its owner's alone, as open as other new files."""
    umask = os.umask(0)
    os.umask(umask)
    os.chmod(path, mode & ~umask)
