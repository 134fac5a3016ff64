"""A progress bar on terminals, and nothing elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Callable

import keras


def progress(total: int, unit: str) -> Callable[[], None]:
    """Returns what moves a bar on by one step."""
    if not sys.stdout.isatty():
        return lambda: None
    bar = keras.utils.Progbar(total, unit_name=unit)
    return lambda: bar.add(1)
