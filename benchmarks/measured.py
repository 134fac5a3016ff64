"""What `placement="measured"` measures of the workloads' train steps, and what comes of it.

    python -m benchmarks.measured [--workloads NAME ...] [--size SIZE] [--rounds N]
    python -m benchmarks.measured --plans [--workloads NAME ...] [--size SIZE]

For each workload: how many seconds measuring took, of how much of the step's time the plan says
that it was measured, how many nodes a second measurement of everything decides otherwise, and the
time of a step, all placements by turns. With `--plans` no step is timed: what two measurements of
everything decide, and how many of the workloads have the same plan twice.
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


def _step_of(workload: Workload, size: str) -> tuple[Any, tuple[Any, ...]]:
    """The train step of a workload, whose variables are there, and a batch for it."""
    keras.utils.clear_session()
    keras.utils.set_random_seed(0)
    batch = tuple(map(tf.constant, workload.batch(workload.sizes[size], 0)))
    model = models.MODELS[workload.name](workload.sizes[size])
    optimizer = keras.optimizers.SGD(workload.learning_rate, momentum=0.9)
    step = models.train_step(model, tfamp.LossScaleOptimizer(optimizer, loss_scale=1.0))
    step(*batch)  # The first trace is another one: it makes the optimizer's variables.
    return step, batch


def _options(dtype: str, seconds: float) -> dict[str, Any]:
    profile = find_profile().profile
    return {"dtype": dtype, "profile": profile, "measure_seconds": seconds}


def _measured_anew(step: Any, batch: Any, options: dict[str, Any]) -> tuple[Any, float]:
    """The plan of a step by times measured now, and the seconds that this took."""
    with fresh_times() as taken:
        plan = tfamp.rewrite(step, placement="measured", **options).plan(*batch)
    return plan, sum(taken)


def measure(workload: Workload, size: str, dtype: str, rounds: int, seconds: float) -> Row:
    """Rewrites the step of a workload by each placement, and takes steps by turns."""
    step, batch = _step_of(workload, size)
    options = _options(dtype, seconds)
    steps = {"float32": step}
    for placement in PLACEMENTS:
        with fresh_times() as taken:
            steps[placement] = tfamp.rewrite(step, placement=placement, **options)
            steps[placement](*batch)
    plan = steps["measured"].plan(*batch)
    again, _ = _measured_anew(step, batch, options)
    costs = [(node.cost or 0.0, node.measured) for node in plan.nodes]
    return Row(
        name=workload.name,
        taken=sum(taken),
        timed=len(taken),
        share=sum(cost for cost, measured in costs if measured) / sum(cost for cost, _ in costs),
        differing=(_decisions(plan) - _decisions(again)).total(),
        steps=_by_turns(steps, batch, rounds),
    )


@dataclass(frozen=True)
class Twice:
    """Two plans of one step, everything measured for each of them.

    Attributes:
        name: The workload.
        seconds: What measuring took, for each.
        low: Nodes that are low, in each.
        differing: Nodes that the second decides otherwise.
        share: How much of the step's time these have.
    """

    name: str
    seconds: tuple[float, float]
    low: tuple[int, int]
    differing: int
    share: float


def measure_twice(workload: Workload, size: str, dtype: str, seconds: float) -> Twice:
    """Plans the step of a workload twice, each time by times that are measured for it."""
    step, batch = _step_of(workload, size)
    (one, first), (other, second) = (
        _measured_anew(step, batch, _options(dtype, seconds)) for _ in range(2)
    )
    differing = _decisions(one) - _decisions(other)
    costs = [(_decision(node) in differing, node.cost or 0.0) for node in one.nodes]
    return Twice(
        name=workload.name,
        seconds=(first, second),
        low=(one.summary.low_nodes, other.summary.low_nodes),
        differing=differing.total(),
        share=sum(cost for differs, cost in costs if differs) / sum(cost for _, cost in costs),
    )


def _decision(node: Any) -> tuple[str, ...]:
    return re.sub(r"\d+", "", f"{node.scope}/{node.name}"), node.op, node.dtype


def _decisions(plan: Any) -> Counter[tuple[str, ...]]:
    """The nodes' dtypes. Names have numbers of the trace, by which functions are in order."""
    return Counter(map(_decision, plan.nodes))


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


def plans_table(rows: Sequence[Twice], dtype: str, size: str) -> Table:
    """How far two plans of each workload agree, and of how many they are the same."""
    same = sum(not row.differing for row in rows)
    title = f"Measured twice, {dtype}, size {size}: the same plan for {same} of {len(rows)}"
    cells = [
        (
            row.name,
            *(f"{each:.1f}" for each in row.seconds),
            *map(str, row.low),
            str(row.differing),
            f"{row.share:.2%}",
        )
        for row in rows
    ]
    headers = ("workload", "s", "s again", "low", "low again", "differ", "of the step")
    return Table(title, headers, tuple(cells))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workloads", nargs="+", choices=tuple(WORKLOADS), default=DEFAULT)
    parser.add_argument("--size", choices=SIZES, default="full")
    parser.add_argument("--dtype", choices=("bfloat16", "float16"), default="bfloat16")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--measure-seconds", type=float, default=10.0)
    parser.add_argument("--plans", action="store_true", help="only compare two plans of each")
    args = parser.parse_args(arguments)
    named = [WORKLOADS[name] for name in args.workloads]
    if args.plans:
        plans = []
        for workload in named:
            plans.append(measure_twice(workload, args.size, args.dtype, args.measure_seconds))
            print(f"{workload.name}: {plans[-1].differing} nodes differ", flush=True)
        print(to_text(plans_table(plans, args.dtype, args.size)))
        return
    rows = []
    for workload in named:
        options = (args.size, args.dtype, args.rounds, args.measure_seconds)
        rows.append(measure(workload, *options))
        print(to_text(table(rows[-1:], args.dtype, args.size)), flush=True)
    print(to_text(table(rows, args.dtype, args.size)))


if __name__ == "__main__":
    main()
