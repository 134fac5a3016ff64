"""A progress bar on terminals, and nothing elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import keras


def progress(total: int, unit: str, after: float = 0.0) -> Callable[[], None]:
    """Returns what moves a bar on by one step; it is shown when so many seconds are over."""
    if not sys.stdout.isatty():
        return lambda: None
    bar, begin, done = keras.utils.Progbar(total, unit_name=unit), time.monotonic(), 0

    def move_on() -> None:
        nonlocal done
        done += 1
        if time.monotonic() - begin >= after:
            bar.update(min(done, total))

    return move_on
