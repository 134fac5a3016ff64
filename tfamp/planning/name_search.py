"""Searches for regular expressions in node names, for no longer than whoever asks allows.

Python's matcher tries every way to match, which with `(a+)+$` takes for ever on a name of forty
letters. A program that compiles its own expressions may do so; the command line sets a limit.
"""

from __future__ import annotations

import contextlib
import re
import signal
import threading
from collections.abc import Iterator
from contextvars import ContextVar
from types import FrameType

# Seconds that one search may take; None outside of `limited`.
_LIMIT: ContextVar[float | None] = ContextVar("tfamp_search_limit", default=None)


class _TooLongError(Exception):
    """The timer rang."""


@contextlib.contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Bounds every search inside: one that takes longer is a ValueError.

    The timer is the process's alarm signal, which interrupts Python's matcher. It exists in the
    main thread of a Unix process; elsewhere searches have no bound.

    Args:
        seconds: How long one search in one name may take.

    Example:
        >>> with limited(0.1):
        ...     is_found(re.compile("(a+)+$"), "a" * 40 + "b")
        Traceback (most recent call last):
        ...
        ValueError: The regular expression '(a+)+$' takes more than 0.1 s to search for in ...
    """
    token = _LIMIT.set(seconds)
    try:
        yield
    finally:
        _LIMIT.reset(token)


def is_found(pattern: re.Pattern[str], name: str) -> bool:
    """Returns whether an expression is found in a name.

    Raises:
        ValueError: It takes longer than `limited` allows.
    """
    seconds = _LIMIT.get()
    if seconds is None or not _has_alarm():
        return pattern.search(name) is not None
    before = signal.signal(signal.SIGALRM, _ring)
    # Taken from here on: an alarm of somebody else's would be lost, and a command line has none.
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        return pattern.search(name) is not None
    except _TooLongError:
        raise ValueError(
            f"The regular expression {pattern.pattern!r} takes more than {seconds:g} s to search "
            f"for in the name {name[:80]!r}. Repetitions inside one another, as in (a+)+, take a "
            "time that doubles with every letter; write it without them."
        ) from None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _ring(number: int, frame: FrameType | None) -> None:
    raise _TooLongError


def _has_alarm() -> bool:
    return hasattr(signal, "setitimer") and threading.current_thread() is threading.main_thread()
