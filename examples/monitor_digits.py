"""Monitors a CNN on scikit-learn's digits that trains in float16: is float16 enough?

A `NumericsMonitor` counts the gradients by size every few steps and writes a file of JSON lines and
two pictures. The loss scale starts too high on purpose, so that some steps are skipped.

    python examples/monitor_digits.py [--out monitor_digits] [--every 20] [--small]

The pictures of docs/guides/monitor.md come from

    python examples/monitor_digits.py --docs docs/assets
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # log lines break the progress bar

import keras
from _common import ProgressBar, load_digits, make_parser, parse, progress
from digits_fit import BATCH, build_model
from rich.console import Console

import tfamp
from tfamp.diagnostics import NumericsMonitor, plot_exponents, plot_loss_scale

INITIAL_SCALE = 2.0**24


def train(monitor: NumericsMonitor, dtype: str, epochs: int, seed: int, console: Console) -> None:
    """Trains a model with a monitor."""
    keras.utils.set_random_seed(seed)
    data = load_digits()
    policy = "float32" if dtype == "float32" else f"mixed_{dtype}"
    with tfamp.policy_scope(policy):
        model = build_model()
    model.compile(
        tfamp.LossScaleOptimizer(
            keras.optimizers.Adam(2e-3), initial_scale=INITIAL_SCALE, dynamic_growth_steps=100
        ),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    with progress(console) as display:
        model.fit(
            data.x_train,
            data.y_train,
            batch_size=BATCH,
            epochs=epochs,
            validation_data=(data.x_test, data.y_test),
            verbose=0,
            callbacks=[ProgressBar(display, policy, "accuracy"), monitor],
        )


def main(argv: Sequence[str] | None = None) -> int:
    """Trains, prints the summary and writes the files."""
    parser = make_parser(__doc__, epochs=20, small_epochs=2)
    parser.add_argument("--out", type=Path, default=Path("monitor_digits"), help="folder to fill")
    parser.add_argument("--every", type=int, help="steps from record to record; default: 20")
    parser.add_argument("--docs", type=Path, help="folder to write the guide's pictures to")
    args = parse(parser, argv)
    args.out.mkdir(parents=True, exist_ok=True)
    log = args.out / "numerics.jsonl"
    log.unlink(missing_ok=True)  # A monitor appends.
    console = Console()
    every = args.every or (5 if args.small else 20)
    monitor = NumericsMonitor(every, jsonl=log)
    train(monitor, args.dtype, args.epochs, args.seed, console)
    console.print(monitor.to_text(), highlight=False)
    for folder, prefix in [(args.out, ""), *([(args.docs, "monitor_")] if args.docs else [])]:
        plot_loss_scale(monitor).savefig(folder / f"{prefix}loss_scale.png")
        plot_exponents(monitor).savefig(folder / f"{prefix}exponents.png")
    console.print(f"{len(monitor.history)} records in {log}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
