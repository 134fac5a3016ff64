"""Tells how far a measurement is: a bar in a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_SECONDS_BETWEEN_LINES = 20


@contextmanager
def reporting(title: str, stages: int) -> Iterator[Callable[[str], None]]:
    """Yields a function to call with a few words before each stage."""
    from rich.console import Console

    console = Console(stderr=True)
    if console.is_terminal:
        with _bar(console, title, stages) as tell:
            yield tell
    else:
        yield _Lines(title, stages).tell


@contextmanager
def _bar(console: object, title: str, stages: int) -> Iterator[Callable[[str], None]]:
    from rich.progress import Progress

    with Progress(console=console, transient=True) as progress:
        task = progress.add_task(title, total=stages)
        told = 0

        def tell(words: str) -> None:
            nonlocal told
            progress.update(task, description=f"{title}: {words}", completed=told)
            told += 1

        yield tell


class _Lines:
    def __init__(self, title: str, stages: int) -> None:
        self._title, self._stages, self._told, self._last = title, stages, 0, 0.0

    def tell(self, words: str) -> None:
        """Writes a line, unless there was one just now."""
        self._told += 1
        now = time.monotonic()
        if self._told == 1 or now - self._last > _SECONDS_BETWEEN_LINES:
            self._last = now
            print(
                f"{self._title} {self._told}/{self._stages}: {words}", file=sys.stderr, flush=True
            )
