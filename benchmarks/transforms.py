"""What the transforms of graphs take from a training step: with and without them, by turns.

    python -m benchmarks.transforms [--workload W ...] [--transform T ...]

docs/performance.md says what they do.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

from benchmarks import results
from benchmarks.tables import Table, show
from benchmarks.workloads import WORKLOADS, Workload

TRANSFORMS = {
    "join_products": "one product for the gradient of a projection",
    "as_batches": "batches of products for Einsums of attention",
    "as_zeros": "zeros for biases in front of BatchNormalization",
    "sums_behind_loops": "one product for the gradient of a weight in a loop",
    "gradients_by_filters": "other ops for gradients of convolutions by their filters",
}
_HEADERS = ("workload", "without", "times as long", "quartiles", "step, ms")


@contextmanager
def _without(transform: str | None) -> Iterator[None]:
    if transform is None:
        yield
    else:
        with mock.patch(f"tfamp.graph.rewrite.{transform}", return_value=None):
            yield


def measure(
    workload: Workload, size: str, dtype: str, without: list[str], rounds: int
) -> dict[str | None, list[float]]:
    """Seconds of each step, by the transform that is left out; None for the whole rewrite."""
    from benchmarks.keras_side import Trainer

    trainers, batch = {}, None
    for each in (None, *without):
        with _without(each):
            trainer = trainers[each] = Trainer("rewrite", dtype)
            batch = trainer.put(workload.batch(workload.sizes[size], 0))
            trainer.build(workload, workload.sizes[size])
            trainer.first_step(batch)
            trainer.step(batch)
    seconds: dict[str | None, list[float]] = {each: [] for each in trainers}
    for number in range(rounds):
        order = list(trainers)
        for each in order[number % len(order) :] + order[: number % len(order)]:
            start = time.perf_counter()
            trainers[each].step(batch)
            seconds[each].append(time.perf_counter() - start)
    return seconds


def rows(name: str, seconds: dict[str | None, list[float]]) -> list[tuple[str, ...]]:
    """One for each transform that was left out."""
    found = []
    for each, taken in seconds.items():
        if each is not None:
            times = results.ratio(taken, seconds[None])
            spread = f"{times.low:.3f} to {times.high:.3f}"
            step = f"{1e3 * results.spread(seconds[None]).median:.1f}"
            found.append((name, TRANSFORMS[each], f"{times.median:.3f}", spread, step))
    return found


def main() -> None:
    args = _arguments()
    size = "small" if args.small else "full"
    found = []
    for name in args.workload:
        seconds = measure(WORKLOADS[name], size, args.dtype, args.transform, args.rounds)
        found += rows(name, seconds)
    show([Table(f"Steps without a transform, {args.dtype}", _HEADERS, tuple(found), left=2)])


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--workload", nargs="+", choices=tuple(WORKLOADS), default=("transformer", "resnet50"))
    add("--transform", nargs="+", choices=tuple(TRANSFORMS), default=list(TRANSFORMS))
    add("--dtype", choices=("float16", "bfloat16"), default="bfloat16")
    add("--rounds", type=int, default=30, help="steps to time of each")
    add("--small", action="store_true", help="tiny models, to see that everything runs")
    return parser.parse_args()


if __name__ == "__main__":
    main()
