"""Shows a model stored in float16 that stops learning until its optimizer keeps float32 masters.

Weights, activations and gradients of the model are float16. Its updates are the learning rate times
a gradient; those smaller than half the distance between two float16 numbers, at most a 2048th of
the weight, leave the weight where it was. With `master_weights=True` the optimizer adds them up in
float32 copies and rounds the copies into the model.

    python examples/master_weights.py [--dtype bfloat16] [--small]
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # TensorFlow's notes would tear the progress bar

import keras
import numpy as np
from _common import Digits, ProgressBar, load_digits, make_parser, parse, progress
from rich.console import Console
from rich.table import Table

import tfamp

LEARNING_RATE = 3e-4


def train(
    dtype: str, masters: bool, data: Digits, epochs: int, bar: ProgressBar
) -> tuple[keras.Model, float]:
    """Trains an MLP whose variables are of `dtype`; returns it and what share of it moved."""
    with tfamp.policy_scope(dtype):
        model = keras.Sequential(
            [
                keras.Input((8, 8, 1)),
                keras.layers.Flatten(),
                keras.layers.Dense(256, activation="relu"),
                keras.layers.Dense(10),
            ]
        )
    before = model.get_weights()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    # Adam's slots are float32 with the masters and float16 without, where its second moments are
    # zero; SGD with momentum has no such trouble, so that the difference here is the updates'.
    inner = keras.optimizers.SGD(LEARNING_RATE, momentum=0.9)
    optimizer = tfamp.LossScaleOptimizer(inner, master_weights=masters)
    model.compile(optimizer, loss, metrics=["accuracy"])
    model.fit(data.x_train, data.y_train, batch_size=32, epochs=epochs, verbose=0, callbacks=[bar])
    pairs = zip(before, model.get_weights(), strict=True)
    moved = np.concatenate([(old != new).ravel() for old, new in pairs])
    return model, float(np.mean(moved))


def main(argv: Sequence[str] | None = None) -> int:
    """Trains in float32, in low precision, and in low precision with masters."""
    args = parse(make_parser(__doc__, epochs=60, small_epochs=12), argv)
    data = load_digits()
    runs = {"float32": ("float32", False)}
    if args.dtype != "float32":
        runs[args.dtype] = (args.dtype, False)
        runs[f"{args.dtype}, masters"] = (args.dtype, True)
    table = Table(title="MLP on digits, stored in low precision")
    table.add_column("weights", no_wrap=True)
    for column in ("test accuracy", "test loss", "weights that moved", "bytes of the model"):
        table.add_column(column, justify="right")
    console = Console()
    with progress(console) as display:
        for name, (dtype, masters) in runs.items():
            keras.utils.set_random_seed(args.seed)
            bar = ProgressBar(display, name)
            model, moved = train(dtype, masters, data, args.epochs, bar)
            loss, accuracy = model.evaluate(data.x_test, data.y_test, verbose=0)
            size = sum(v.numpy().nbytes for v in model.variables)
            table.add_row(name, f"{accuracy:.1%}", f"{loss:.3f}", f"{moved:.0%}", f"{size:,}")
    console.print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
