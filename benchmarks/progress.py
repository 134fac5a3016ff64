"""Reports the progress of a measurement in lines on stderr."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_SECONDS_BETWEEN_LINES = 20


@contextmanager
def reporting(title: str, stages: int) -> Iterator[Callable[[str], None]]:
    """Yields a function to call with a few words before each stage."""
    done, last = 0, -float("inf")

    def report(words: str) -> None:
        nonlocal done, last
        done, now = done + 1, time.monotonic()
        if now - last > _SECONDS_BETWEEN_LINES:
            last = now
            print(f"{title} {done}/{stages}: {words}", file=sys.stderr, flush=True)

    yield report
