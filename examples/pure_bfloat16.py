"""Trains a model stored in bfloat16 as well as in float32, without float32 copies of its weights.

The character transformer of `char_transformer.py` learns with AdamW in float32, and stored in
bfloat16 with four ways to round the updates of its weights: to nearest, which loses the small ones;
stochastically; and split, whose lower halves the optimizer keeps, with slots of either dtype.
Printed are bits per character on unseen files and the bytes of weights and optimizer for each
parameter; the losses are plotted in one picture.

    python examples/pure_bfloat16.py [--dtype bfloat16] [--ways stochastic split] [--epochs 2]
        [--small] [--plot curves.png]
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # TensorFlow's notes would tear the progress bar

import keras
import numpy as np
from _common import ProgressBar, make_parser, parse, progress
from char_transformer import build_model, standard_library, windows
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import tfamp

WAYS: dict[str, dict[str, Any]] = {
    "float32": {"level": "O0"},
    "to nearest": {"level": "O3", "master_weights": False},
    "stochastic": {"level": "O3", "weight_rounding": "stochastic"},
    "split": {"level": "O3", "weight_rounding": "split"},
    "split, low slots": {"level": "O3", "weight_rounding": "split", "slots": "bfloat16"},
}


class Losses(keras.callbacks.Callback):
    """Keeps the loss of every step, of which Keras tells the mean of the epoch so far."""

    def __init__(self) -> None:
        super().__init__()
        self.values: list[float] = []
        self._sum = 0.0

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Keeps it."""
        before = self._sum if batch else 0.0
        self._sum = float((logs or {}).get("loss", math.nan)) * (batch + 1)
        self.values.append(self._sum - before)


def train(
    name: str, text: np.ndarray, args: Any, display: Progress
) -> tuple[keras.Model, Any, list[float]]:
    """Returns a model that was trained in one way, its optimizer and its losses."""
    keras.utils.set_random_seed(args.seed)
    batches = windows(text)
    steps = args.epochs * int(batches.cardinality())
    optimizer = keras.optimizers.AdamW(keras.optimizers.schedules.CosineDecay(3e-3, steps))
    model = build_model(1 if args.small else 2)
    model, optimizer = tfamp.prepare(model, optimizer, dtype=args.dtype, **WAYS[name])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, auto_scale_loss=False)
    losses = Losses()
    callbacks = [ProgressBar(display, name), losses]
    model.fit(batches, epochs=args.epochs, shuffle=False, verbose=0, callbacks=callbacks)
    return model, optimizer, losses.values


def plot(curves: dict[str, list[float]], sizes: dict[str, float], path: Path) -> None:
    """Draws the losses of all ways in one picture, means of some steps, and tells their bytes."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    for number, (name, losses) in enumerate(curves.items()):
        window = max(1, min(20, len(losses) // 10))
        means = np.convolve(losses, np.full(window, 1 / window), "valid")
        label = f"{name}: {sizes[name]:.0f} bytes a parameter"
        # Most lie on each other: a later one is thinner.
        steps, width = np.arange(len(means)) + window / 2, 1.4 * (len(curves) - number)
        axes.plot(steps, means, label=label, linewidth=width, solid_capstyle="butt")
    axes.set(xlabel="step", ylabel="loss", title="Character transformer, AdamW")
    axes.grid(color="#d5dae1", linewidth=0.7)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)


def main(argv: Sequence[str] | None = None) -> int:
    """Trains in every way and prints a table."""
    parser = make_parser(__doc__, epochs=2, small_epochs=1)
    parser.add_argument("--plot", type=Path, help="a file for the picture of the losses")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=[*WAYS], help="default: all")
    parser.set_defaults(dtype="bfloat16")
    args = parse(parser, argv)
    # What all others are compared with, and what the dtype has.
    ways = [n for n in WAYS if n == "float32" or n in args.ways]
    ways = [n for n in ways if args.dtype == "bfloat16" or "split" not in n]
    text = standard_library(40_000 if args.small else 1_000_000)
    held_out = len(text) // 10
    table = Table(title=f"character transformer, AdamW, stored in {args.dtype}")
    table.add_column("weight updates", no_wrap=True)
    for column in ("bits per character", "of float32", "bytes a parameter"):
        table.add_column(column, justify="right")
    console, reference = Console(), None
    curves: dict[str, list[float]] = {}
    sizes: dict[str, float] = {}
    with progress(console) as display:
        for name in ways:
            model, optimizer, curves[name] = train(name, text[:-held_out], args, display)
            bits = model.evaluate(windows(text[-held_out:]), verbose=0) / math.log(2)
            reference = bits if reference is None else reference
            kept = [*model.trainable_variables, *optimizer.variables]
            sizes[name] = sum(each.numpy().nbytes for each in kept) / model.count_params()
            apart = f"{bits / reference - 1:+.2%}"
            table.add_row(name, f"{bits:.3f}", apart, f"{sizes[name]:.1f}")
    console.print(table)
    if args.plot is not None:
        plot(curves, sizes, args.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
