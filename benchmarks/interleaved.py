"""Runs systems by turns, each in a process of its own, so that a busy machine slows all of them."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field


@dataclass
class Measured:
    """What was measured of a system on a workload.

    Attributes:
        first_step: Seconds of the first step, tracing included.
        seconds: Seconds of each step after the warm-up.
        losses: Loss of each of these.
        peak_kib: Largest resident size of the process, in KiB.
    """

    first_step: float
    seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    peak_kib: int = 0

    @property
    def median(self) -> float:
        """Median of the step times, in seconds."""
        return statistics.median(self.seconds)


def measure(
    workload: str,
    systems: Sequence[str],
    *,
    dtype: str,
    rounds: int,
    small: bool,
    progress: Callable[[], None] = lambda: None,
) -> dict[str, Measured]:
    """Takes `rounds` steps of each system, by turns."""
    with ExitStack() as stack:
        workers = {
            name: stack.enter_context(_Worker(name, workload, dtype, small)) for name in systems
        }
        found = {name: Measured(worker.read()["first_step"]) for name, worker in workers.items()}
        for _ in range(rounds):
            for name, worker in workers.items():
                result = worker.step()
                found[name].seconds.append(result["seconds"])
                found[name].losses.append(result["loss"])
                found[name].peak_kib = result["peak_kib"]
                progress()
    return found


class _Worker:
    def __init__(self, system: str, workload: str, dtype: str, small: bool) -> None:
        command = [sys.executable, "-m", "benchmarks.worker", system, workload, dtype]
        self._process = subprocess.Popen(
            command + ["--small"] * small,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def __enter__(self) -> _Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()

    def step(self) -> dict[str, float]:
        self._process.stdin.write("step\n")
        self._process.stdin.flush()
        return self.read()

    def read(self) -> dict[str, float]:
        while line := self._process.stdout.readline():
            if line.startswith("{"):
                return json.loads(line)
        raise RuntimeError(f"{self._process.args} ended early; run it by hand to see why.")
