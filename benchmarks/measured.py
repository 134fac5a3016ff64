"""What `placement="measured"` measures of the workloads' train steps, and what comes of it.

    python -m benchmarks.measured [--workloads NAME ...] [--size SIZE] [--rounds N]

For each workload: how many seconds measuring took, of how much of the step's time the plan says
that it was measured, how many nodes a second measurement of everything decides otherwise, and the
time of a step, all placements by turns.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import tensorflow as tf

import tfamp
from benchmarks import models
from benchmarks.tables import Table, to_text
from benchmarks.workloads import DEFAULT, SIZES, WORKLOADS, Workload
from tfamp.machine import op_times
from tfamp.machine.profile_choice import find_profile

PLACEMENTS = ("lists", "min_cut", "measured")


@dataclass(frozen=True)
class Row:
    """What was found for a workload.

    Attributes:
        name: Its name.
        taken: Seconds that measuring took.
        timed: Works that were timed.
        share: How much of the time of the planned step was measured.
        differing: Nodes that a second measurement of everything decides otherwise.
        steps: Median seconds of a step, by system.
    """

    name: str
    taken: float
    timed: int
    share: float
    differing: int
    steps: dict[str, float]


@contextmanager
def fresh_times() -> Iterator[list[float]]:
    """A cache of its own, so that everything is measured anew; collects the seconds of each."""
    seconds: list[float] = []
    original = op_times.op_timing.time_by_turns

    def timed(turns: Any) -> Any:
        start = time.perf_counter()
        try:
            return original(turns)
        finally:
            seconds.append(time.perf_counter() - start)

    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.object(op_times, "cache_folder", return_value=Path(folder)),
        mock.patch.object(op_times.op_timing, "time_by_turns", timed),
    ):
        yield seconds


def measure(workload: Workload, size: str, dtype: str, rounds: int, seconds: float) -> Row:
    """Rewrites the step of a workload by each placement, and takes steps by turns."""
    keras.utils.clear_session()
    keras.utils.set_random_seed(0)
    batch = tuple(map(tf.constant, workload.batch(workload.sizes[size], 0)))
    model = models.MODELS[workload.name](workload.sizes[size])
    optimizer = keras.optimizers.SGD(workload.learning_rate, momentum=0.9)
    step = models.train_step(model, tfamp.LossScaleOptimizer(optimizer, loss_scale=1.0))
    step(*batch)  # The first trace is another one: it makes the optimizer's variables.
    profile = find_profile().profile
    options = {"dtype": dtype, "profile": profile, "measure_seconds": seconds}
    steps = {"float32": step}
    for placement in PLACEMENTS:
        with fresh_times() as taken:
            steps[placement] = tfamp.rewrite(step, placement=placement, **options)
            steps[placement](*batch)
    plan = steps["measured"].plan(*batch)
    with fresh_times():
        again = tfamp.rewrite(step, placement="measured", **options).plan(*batch)
    costs = [(node.cost or 0.0, node.measured) for node in plan.nodes]
    return Row(
        name=workload.name,
        taken=sum(taken),
        timed=len(taken),
        share=sum(cost for cost, measured in costs if measured) / sum(cost for cost, _ in costs),
        differing=(_decisions(plan) - _decisions(again)).total(),
        steps=_by_turns(steps, batch, rounds),
    )


def _decisions(plan: Any) -> Counter[tuple[str, ...]]:
    """The nodes' dtypes. Names have numbers of the trace, by which functions are in order."""
    names = ((node, re.sub(r"\d+", "", f"{node.scope}/{node.name}")) for node in plan.nodes)
    return Counter((name, node.op, node.dtype) for node, name in names)


def _by_turns(steps: dict[str, Any], batch: Any, rounds: int) -> dict[str, float]:
    times: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(rounds + 2):
        for name, step in steps.items():
            start = time.perf_counter()
            step(*batch)
            tf.test.experimental.sync_devices()
            if number > 1:
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(each) for name, each in times.items()}


def table(rows: Sequence[Row], dtype: str, size: str) -> Table:
    """The rows as a table."""
    headers = ("workload", "timed", "s", "of the step", "differ", "float32 ms", *PLACEMENTS)
    cells = [
        (
            row.name,
            str(row.timed),
            f"{row.taken:.1f}",
            f"{row.share:.0%}",
            str(row.differing),
            f"{1e3 * row.steps['float32']:.1f}",
            *(f"{row.steps['float32'] / row.steps[name]:.2f}x" for name in PLACEMENTS),
        )
        for row in rows
    ]
    return Table(f"Measured placement, {dtype}, size {size}", headers, tuple(cells))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workloads", nargs="+", choices=tuple(WORKLOADS), default=DEFAULT)
    parser.add_argument("--size", choices=SIZES, default="full")
    parser.add_argument("--dtype", choices=("bfloat16", "float16"), default="bfloat16")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--measure-seconds", type=float, default=10.0)
    args = parser.parse_args(arguments)
    rows = []
    for name in args.workloads:
        options = (args.size, args.dtype, args.rounds, args.measure_seconds)
        rows.append(measure(WORKLOADS[name], *options))
        print(to_text(table(rows[-1:], args.dtype, args.size)), flush=True)
    print(to_text(table(rows, args.dtype, args.size)))


if __name__ == "__main__":
    main()
