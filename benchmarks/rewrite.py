"""Training steps under `tfamp.rewrite` and its peers, in ratios to float32.

python -m benchmarks.rewrite [--small] [--rounds N] [--dtype D] [--workload W ...]
"""

from __future__ import annotations

import argparse

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.interleaved import Measured, measure

WORKLOADS = ("mlp", "transformer", "resnet50")
SYSTEMS = {
    "float32": "float32",
    "keras_policy": "Keras policy",
    "tensorflow_amp": "TensorFlow auto_mixed_precision",
    "tfamp_policy": "tfamp policy",
    "rewrite_lists": "tfamp.rewrite, lists",
    "rewrite": "tfamp.rewrite, min_cut",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--small", action="store_true", help="a quick run of small models")
    parser.add_argument("--rounds", type=int, default=20, help="how many steps each is timed for")
    parser.add_argument("--dtype", choices=["float16", "bfloat16"], default="bfloat16")
    parser.add_argument("--workload", nargs="+", choices=WORKLOADS, default=WORKLOADS)
    args = parser.parse_args()
    console = Console()
    for workload in args.workload:
        with Progress(console=console, transient=True) as progress:
            task = progress.add_task(workload, total=args.rounds * len(SYSTEMS))
            found = measure(
                workload,
                tuple(SYSTEMS),
                dtype=args.dtype,
                rounds=args.rounds,
                small=args.small,
                progress=lambda task=task, progress=progress: progress.advance(task),
            )
        console.print(table(workload, args.dtype, found))


def table(workload: str, dtype: str, found: dict[str, Measured]) -> Table:
    result = Table(title=f"{workload}, {dtype}: training step")
    result.add_column("", no_wrap=True)
    for title in ("times as fast as float32", "ms", "first step, s", "peak MiB", "loss"):
        result.add_column(title, justify="right")
    base = found["float32"].median
    for name, each in found.items():
        result.add_row(
            SYSTEMS[name],
            f"{base / each.median:.2f}",
            f"{1e3 * each.median:.1f}",
            f"{each.first_step:.1f}",
            f"{each.peak_kib / 1024:.0f}",
            f"{each.losses[-1]:.4f}",
        )
    return result


if __name__ == "__main__":
    main()
