"""Times training steps with and without each of the passes before a plan.

python -m benchmarks.transforms [--workload W ...] [--transform T ...]
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping, Sequence
from unittest import mock

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

from benchmarks import results
from benchmarks.rounds import Times, interleaved
from benchmarks.tables import Table, show
from benchmarks.workloads import WORKLOADS, Workload

# Of `tfamp.graph.rewrite.PASSES`.
TRANSFORMS = {
    "loop_sums": "one product for the gradient of a weight in a loop",
    "filter_gradients": "other ops for gradients of convolutions by their filters",
}
_ALL = "all"
_HEADERS = ("workload", "without", "times as long", "quartiles", "step, ms")


def calls(
    workload: Workload, size: str, dtype: str, transforms: Sequence[str]
) -> dict[str, Callable[[], object]]:
    """A step by the whole rewrite, and one without each of the transforms."""
    from benchmarks.keras_side import Trainer
    from tfamp.graph import rewrite

    found: dict[str, Callable[[], object]] = {}
    for name in (_ALL, *transforms):
        left = tuple(each for each in rewrite.PASSES if each.file != name)
        with mock.patch.object(rewrite, "PASSES", left):
            trainer = Trainer("rewrite", dtype)
            batch = trainer.put(workload.batch(workload.sizes[size], 0))
            trainer.build(workload, workload.sizes[size])
            trainer.first_step(batch)
        found[name] = lambda trainer=trainer, batch=batch: trainer.step(batch)
    return found


def rows(workload: str, found: Mapping[str, Times]) -> list[tuple[str, ...]]:
    """One for each transform that was left out."""
    whole = found[_ALL].wall
    step = f"{1e3 * results.spread(whole).median:.1f}"
    cells = []
    for name, title in TRANSFORMS.items():
        if name in found:
            times = results.ratio(found[name].wall, whole)
            spread = f"{times.low:.3f} to {times.high:.3f}"
            cells.append((workload, title, f"{times.median:.3f}", spread, step))
    return cells


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--workload", nargs="+", choices=tuple(WORKLOADS), default=("transformer", "resnet50"))
    add("--transform", nargs="+", choices=tuple(TRANSFORMS), default=list(TRANSFORMS))
    add("--dtype", choices=("float16", "bfloat16"), default="bfloat16")
    add("--rounds", type=int, default=30, help="steps to time of each")
    add("--small", action="store_true", help="tiny models, to see that everything runs")
    args = parser.parse_args()
    size, found = "small" if args.small else "full", []
    for name in args.workload:
        steps = calls(WORKLOADS[name], size, args.dtype, args.transform)
        found += rows(name, interleaved(steps, args.rounds, name))
    show([Table(f"Steps without a transform, {args.dtype}", _HEADERS, tuple(found), left=2)])


if __name__ == "__main__":
    main()
