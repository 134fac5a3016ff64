"""Times functions in interleaved rounds, so that a busy machine slows all of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.progress import reporting


@dataclass
class Times:
    """Seconds of one function.

    Attributes:
        first: The first call, tracing and compiling included.
        wall: Each timed call, by the clock.
        cpu: Processor seconds of the same, of all threads.
    """

    first: float = 0.0
    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)


def rotated(items: Sequence[Any], number: int) -> list[Any]:
    """The items, another one first for each number: the one before leaves its caches."""
    first = number % max(1, len(items))
    return [*items[first:], *items[:first]]


def interleaved(
    calls: Mapping[str, Callable[[], object]], rounds: int, title: str
) -> dict[str, Times]:
    """Calls every function twice, then times each once in every round."""
    found = {name: Times() for name in calls}
    with reporting(title, 1 + rounds) as progress:
        progress("first calls")
        for name, call in calls.items():
            found[name].first = _timed(call)[0]
            call()
        for number in range(rounds):
            progress(f"round {number + 1}")
            for name in rotated(list(calls), number):
                wall, cpu = _timed(calls[name])
                found[name].wall.append(wall)
                found[name].cpu.append(cpu)
    return found


def _timed(call: Callable[[], object]) -> tuple[float, float]:
    wall, cpu = time.perf_counter(), time.process_time()
    call()
    return time.perf_counter() - wall, time.process_time() - cpu
