"""Where mixed precision starts to pay: a workload at growing batches and widths."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.interleaved import Options, Progress, workers
from benchmarks.results import Cell, ScalingRun
from benchmarks.workloads import Sizes, Workload

BATCHES, WIDTHS = (1, 2, 4, 8), (1, 2, 4)
SYSTEMS = ("float32", "tfamp_policy", "rewrite")


def sizes(workload: Workload, *, small: bool) -> list[Sizes]:
    """The sizes of the table: from the workload's smallest, the batch up to 8-fold, the width 4."""
    if workload.smallest is None:
        raise ValueError(f"{workload.name} has no width to scale; mlp and transformer have.")
    base = workload.sizes["small" if small else "full"]
    start = base if small else workload.smallest
    batches, widths = (BATCHES[:2], WIDTHS[:1]) if small else (BATCHES, WIDTHS)
    return [
        {**base, **start, "width": width * start["width"], "batch": batch * start["batch"]}
        for width in widths
        for batch in batches
    ]


def measure_scaling(
    workload: Workload, grid: Sequence[Sizes], options: Options, progress: Progress
) -> ScalingRun:
    """Times the steps of float32 and of tfamp at each size, by turns.

    Args:
        workload: The workload.
        grid: The sizes.
        options: How to measure.
        progress: Is told each size before it is measured.
    """
    run = ScalingRun(workload.name)
    with workers(SYSTEMS, options) as group:
        for size in grid:
            progress(f"width {size['width']}, batch {size['batch']}")
            list(group.in_turn("start", workload=workload.name, size=size))
            cell = Cell(size["width"], size["batch"], {name: [] for name in SYSTEMS})
            for number in range(options.rounds):
                for name, found in group.in_turn("step", first=number):
                    cell.seconds[name].append(found["seconds"])
            run.cells.append(cell)
        if group.failed:
            raise RuntimeError(f"Systems failed while scaling {workload.name}: {group.failed}")
    return run
