"""Shows a model stored in float16 that stops learning, and two ways to make it learn.

Weights, activations and gradients of the model are float16. An update smaller than half the
distance between two float16 numbers, at most a 2048th of the weight, does not change the weight.
With `master_weights=True` the optimizer accumulates updates in float32 copies and rounds the copies
into the model. With `weight_rounding="stochastic"` it keeps no copies: weights are rounded up or
down at random, so that small updates count on average.

    python examples/master_weights.py [--dtype bfloat16] [--small]
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # log lines break the progress bar

import keras
import numpy as np
from _common import Digits, ProgressBar, load_digits, make_parser, parse, progress
from rich.console import Console
from rich.table import Table

import tfamp

LEARNING_RATE = 3e-4


def train(
    dtype: str, data: Digits, epochs: int, bar: ProgressBar, **options: Any
) -> tuple[keras.Model, float, int]:
    """Trains an MLP whose variables are of `dtype`.

    Returns:
        The model, the share of its weights that moved, and the bytes of model and optimizer.
    """
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
    # Adam's second moments are zero in float16 slots. SGD with momentum has no such slots, so only
    # the rounding of updates differs here.
    inner = keras.optimizers.SGD(LEARNING_RATE, momentum=0.9)
    optimizer = tfamp.LossScaleOptimizer(inner, **options)
    model.compile(optimizer, loss, metrics=["accuracy"])
    model.fit(data.x_train, data.y_train, batch_size=32, epochs=epochs, verbose=0, callbacks=[bar])
    pairs = zip(before, model.get_weights(), strict=True)
    moved = np.concatenate([(old != new).ravel() for old, new in pairs])
    size = sum(v.numpy().nbytes for v in (*model.trainable_variables, *optimizer.variables))
    return model, float(np.mean(moved)), size


def main(argv: Sequence[str] | None = None) -> int:
    """Trains in float32, and in low precision in each way."""
    args = parse(make_parser(__doc__, epochs=60, small_epochs=12), argv)
    data = load_digits()
    runs: dict[str, tuple[str, dict[str, Any]]] = {"float32": ("float32", {})}
    if args.dtype != "float32":
        runs[args.dtype] = (args.dtype, {})
        runs[f"{args.dtype}, masters"] = (args.dtype, {"master_weights": True})
        runs[f"{args.dtype}, stochastic"] = (args.dtype, {"weight_rounding": "stochastic"})
    table = Table(title="MLP on digits, stored in low precision")
    table.add_column("weights", no_wrap=True)
    for column in ("test accuracy", "test loss", "weights that moved", "bytes"):
        table.add_column(column, justify="right")
    console = Console()
    with progress(console) as display:
        for name, (dtype, options) in runs.items():
            keras.utils.set_random_seed(args.seed)
            bar = ProgressBar(display, name)
            model, moved, size = train(dtype, data, args.epochs, bar, **options)
            loss, accuracy = model.evaluate(data.x_test, data.y_test, verbose=0)
            table.add_row(name, f"{accuracy:.1%}", f"{loss:.3f}", f"{moved:.0%}", f"{size:,}")
    console.print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
