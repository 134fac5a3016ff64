"""Compares the test accuracy on digits of three policies over several seeds.

Prints a Markdown table for float32, mixed_float16 and mixed_bfloat16. The exit code is 1 if the
mean accuracy of a mixed policy differs from float32's by more than 0.7 points.

    python examples/accuracy_table.py [--seeds 3] [--epochs 20] [--output table.md] [--small]
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # log lines break the progress bar

from _common import Digits, load_digits, progress
from digits_fit import train
from rich.console import Console

POLICIES = ("float32", "mixed_float16", "mixed_bfloat16")
MOST_POINTS = 0.7


def measure(data: Digits, seeds: int, epochs: int) -> dict[str, list[float]]:
    """Returns the test accuracy in percent of each policy and seed."""
    accuracies: dict[str, list[float]] = {policy: [] for policy in POLICIES}
    with progress(Console(stderr=True)) as display:
        for seed in range(seeds):
            for policy in POLICIES:
                model = train(policy, data, epochs, seed, display)
                result = model.evaluate(data.x_test, data.y_test, verbose=0, return_dict=True)
                accuracies[policy].append(100 * result["accuracy"])
    return accuracies


def markdown(accuracies: dict[str, list[float]]) -> str:
    """Returns the accuracies, their means and the means' distances from float32's as a table."""
    seeds = range(len(accuracies["float32"]))
    heading = ["policy", *(f"seed {seed}" for seed in seeds), "mean", "points from float32"]
    lines = [heading, ["---", *["---:"] * (len(heading) - 1)]]
    for policy, values in accuracies.items():
        points = fmean(values) - fmean(accuracies["float32"])
        numbers = [f"{value:.2f} %" for value in (*values, fmean(values))]
        lines.append([f"`{policy}`", *numbers, f"{points:+.2f}" if policy != "float32" else ""])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the table; returns 1 if an accuracy is too far off."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds (default: 3)")
    parser.add_argument("--epochs", type=int, default=20, help="passes over the data (default: 20)")
    parser.add_argument("--output", type=Path, help="also write the table to this file")
    parser.add_argument("--small", action="store_true", help="one seed, one epoch, no judgement")
    args = parser.parse_args(argv)
    if args.seeds < 1 or args.epochs < 1:
        parser.error("--seeds and --epochs must be at least 1")
    seeds, epochs = (1, 1) if args.small else (args.seeds, args.epochs)
    accuracies = measure(load_digits(), seeds, epochs)
    table = markdown(accuracies)
    print(table, end="")
    if args.output:
        args.output.write_text(table, encoding="utf-8")
    means = [fmean(values) for values in accuracies.values()]
    worst = max(abs(mean - means[0]) for mean in means)
    return int(worst > MOST_POINTS and not args.small)


if __name__ == "__main__":
    sys.exit(main())
