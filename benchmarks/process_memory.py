"""The memory of this process: what it holds, and the most it held since a moment."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

_STATUS, _RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def reset_peak() -> None:
    """Begins a new peak where the system can; elsewhere it is that since the process started."""
    if _RESET.exists():
        _RESET.write_text("5", encoding="ascii")


def resident() -> int:
    """Bytes of memory that the process holds now; its peak where the system reports only that."""
    return _status("VmRSS") or peak()


def peak() -> int:
    """The most bytes it held since `reset_peak`."""
    found = _status("VmHWM")
    if found is not None:
        return found
    unit = 1 if sys.platform == "darwin" else 1024
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _status(key: str) -> int | None:
    if not _STATUS.exists():
        return None
    for line in _STATUS.read_text(encoding="ascii").splitlines():
        name, _, value = line.partition(":")
        if name == key:
            return 1024 * int(value.split()[0])
    return None
