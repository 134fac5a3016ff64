"""Runs one system: each line on stdin is a request, each answer a line of JSON.

    python -m benchmarks.worker SYSTEM DTYPE

The first answer, to no line, says that everything is imported. A request is a JSON object with the
name of a method under "do" and its arguments as further keys.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

from benchmarks import process_memory
from benchmarks.systems import SYSTEMS
from benchmarks.workloads import WORKLOADS

WARM_UP_STEPS = 2


class Worker:
    """Answers requests."""

    def __init__(self, system: str, dtype: str) -> None:
        if system in SYSTEMS and SYSTEMS[system].torch:
            from benchmarks import torch_side as side
        else:
            from benchmarks import keras_side as side
        self._side = side
        self._trainer = side.Trainer(system, dtype)
        self._steps = 0

    def start(self, workload: str, size: dict[str, int]) -> dict[str, Any]:
        """Builds a model and takes the first steps."""
        self._workload, self._size, self._steps = WORKLOADS[workload], size, 0
        self._note_memory()
        batch = self._batch()
        start = time.perf_counter()
        self._trainer.build(self._workload, size)
        built = time.perf_counter()
        loss = self._trainer.first_step(batch)
        first = time.perf_counter() - built
        losses, steps = zip(
            (loss, first), *(self._take() for _ in range(WARM_UP_STEPS - 1)), strict=True
        )
        return {
            "build": built - start,
            "first_call": first,
            "rewrite": self._trainer.rewrite_seconds or None,
            "warm": steps[-1],
            "losses": list(losses),
        }

    def step(self) -> dict[str, Any]:
        """Takes one step."""
        loss, seconds = self._take()
        return {"seconds": seconds, "loss": loss, "memory": self._more_memory()}

    def steps(self, count: int) -> dict[str, Any]:
        """Takes as many steps, for their losses."""
        return {"losses": [self._take()[0] for _ in range(count)]}

    def casts(self) -> dict[str, Any]:
        """Counts Casts; this runs a copy of the step."""
        found = self._trainer.casts(self._batch())
        return {"casts": None if found is None else found.count, "bytes": found and found.bytes}

    def _take(self) -> tuple[float, float]:
        batch = self._batch()
        start = time.perf_counter()
        loss = self._trainer.step(batch)
        return loss, time.perf_counter() - start

    def _batch(self) -> Any:
        batch = self._trainer.put(self._workload.batch(self._size, self._steps))
        self._steps += 1
        return batch

    def _note_memory(self) -> None:
        self._workload.batch(self._size, 0)  # Reads the data, which is kept.
        process_memory.reset_peak()
        self._side.reset_device_peak()
        on_device = self._side.device_bytes()
        self._before = process_memory.resident() if on_device is None else on_device["current"]

    def _more_memory(self) -> int:
        on_device = self._side.device_bytes()
        most = process_memory.peak() if on_device is None else on_device["peak"]
        return most - self._before


def main() -> None:
    worker = Worker(*sys.argv[1:])
    answers, sys.stdout = sys.stdout, sys.stderr  # Nothing else may come between the answers.
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        found = getattr(worker, request.pop("do"))(**request)
        print(json.dumps(found), file=answers, flush=True)


if __name__ == "__main__":
    main()
