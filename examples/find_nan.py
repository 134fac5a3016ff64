"""Trains a classifier whose loss is NaN in float16, finds the failing op, and fixes it.

Each column of an image is standardized: the mean is subtracted, and the rest is divided by the
standard deviation. An epsilon of 1e-8 prevents a division by zero in float32. In float16 1e-8
rounds to zero, and the outer columns of digit images are often empty.

    python examples/find_nan.py [--dtype bfloat16] [--small]
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # log lines break the progress bar

import keras
from _common import Digits, ProgressBar, load_digits, make_parser, parse, policies, progress
from rich.console import Console
from rich.table import Table

import tfamp
from tfamp.diagnostics import find_nonfinite

MENDED = 1e-4


class Standardize(keras.layers.Layer):
    """Standardizes the columns of images to mean 0 and standard deviation 1.

    Args:
        epsilon: Added to the variance.
        **kwargs: As for any layer.
    """

    def __init__(self, epsilon: float, **kwargs):
        super().__init__(**kwargs)
        self.epsilon = epsilon

    def call(self, x):
        """Standardizes a batch."""
        x = x - keras.ops.mean(x, axis=1, keepdims=True)
        variance = keras.ops.mean(keras.ops.square(x), axis=1, keepdims=True)
        return x * keras.ops.rsqrt(variance + self.epsilon)


def make_model(policy: str, epsilon: float, seed: int) -> keras.Model:
    """Returns a compiled classifier; the same seed gives the same weights."""
    keras.utils.set_random_seed(seed)
    with tfamp.policy_scope(policy):
        model = keras.Sequential(
            [
                keras.Input((8, 8, 1)),
                keras.layers.Reshape((8, 8)),
                Standardize(epsilon, name="standardize"),
                keras.layers.Flatten(),
                keras.layers.Dense(64, activation="relu"),
                keras.layers.Dense(10),
            ]
        )
    optimizer = keras.optimizers.Adam(3e-3)
    model.compile(
        tfamp.LossScaleOptimizer(optimizer) if policy == "mixed_float16" else optimizer,
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


def train(model: keras.Model, data: Digits, epochs: int, bar: ProgressBar) -> tuple[float, float]:
    """Trains a model; returns its last loss and its accuracy on the test digits."""
    history = model.fit(data.x_train, data.y_train, 64, epochs, verbose=0, callbacks=[bar])
    accuracy = model.evaluate(data.x_test, data.y_test, verbose=0, return_dict=True)["accuracy"]
    return history.history["loss"][-1], accuracy


def main(argv: Sequence[str] | None = None) -> int:
    """Trains in float32 and in low precision, finds the NaN, and trains the fixed model."""
    args = parse(make_parser(__doc__, epochs=30, small_epochs=3), argv)
    data = load_digits()
    runs = [(policy, 1e-8) for policy in policies(args.dtype)]
    runs.append((runs[-1][0], MENDED))
    table = Table(title="Digits, each column standardized")
    table.add_column("policy, epsilon", no_wrap=True)
    table.add_column("last loss", justify="right")
    table.add_column("test accuracy", justify="right")
    console = Console()
    reports = {}
    with progress(console) as display:
        for policy, epsilon in runs:
            name = f"{policy}, {epsilon:g}"
            model = make_model(policy, epsilon, args.seed)
            batch = data.x_train[:64], data.y_train[:64]
            reports[name] = find_nonfinite(model, *batch)
            loss, accuracy = train(model, data, args.epochs, ProgressBar(display, name))
            table.add_row(name, f"{loss:.3f}", f"{accuracy:.1%}")
    for name, report in reports.items():
        found = "all is finite" if report is None else report.to_text()
        console.print(f"{name}: {found}", markup=False, highlight=False, soft_wrap=True)
    console.print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
