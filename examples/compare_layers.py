"""Finds the layer that fails in float16, and repairs the model without training it again.

A CNN is trained in float32 on scikit-learn's digits, with pixels from 0 to 255. One layer divides
by the root of a sum of squares, which exceeds 65504, float16's largest number. In float16 that sum
is inf, the layer returns zeros, and the predictions are finite and wrong.

`tfamp.diagnostics.compare` runs the trained model in both precisions, names the layer, finds a
short list of layers to keep in float32 and confirms it by a run. The table shows the accuracy
before and after.

    python examples/compare_layers.py [--bound 0.05] [--small]
"""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Sequence

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # log lines break the table

import keras
import numpy as np
from _common import Digits, load_digits, make_parser, parse
from rich.console import Console
from rich.table import Table

import tfamp

BATCH = 64


class EnergyNorm(keras.layers.Layer):
    """Divides every image by the root of the sum of its squares."""

    def call(self, x):
        """Returns images of energy 1."""
        energy = keras.ops.sum(keras.ops.square(x), axis=(1, 2, 3), keepdims=True)
        return x / keras.ops.sqrt(energy + 1e-6)


def build_model(policy: str, keep_float32: Collection[str] = ()) -> keras.Model:
    """Returns an untrained CNN.

    Args:
        policy: Name of the policy.
        keep_float32: Paths of layers that compute in float32 whatever the policy.
    """

    def dtype(name: str) -> str | None:
        return "float32" if f"digits/{name}" in keep_float32 else None

    layers = keras.layers
    with tfamp.policy_scope(policy):
        return keras.Sequential(
            [
                keras.Input((8, 8, 1)),
                layers.Conv2D(16, 3, activation="relu", name="edges", dtype=dtype("edges")),
                EnergyNorm(name="energy", dtype=dtype("energy")),
                layers.Rescaling(16.0, name="gain", dtype=dtype("gain")),
                layers.Conv2D(32, 3, activation="relu", name="shapes", dtype=dtype("shapes")),
                layers.Flatten(name="flat", dtype=dtype("flat")),
                layers.Dense(64, activation="relu", name="hidden", dtype=dtype("hidden")),
                layers.Dense(10, name="scores"),
            ],
            name="digits",
        )


def accuracy(model: keras.Model, data: Digits) -> float:
    """Returns the share of test digits that a model gets right."""
    scores = model.predict(data.x_test, batch_size=BATCH, verbose=0)
    return float(np.mean(np.argmax(scores, -1) == data.y_test))


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the example."""
    parser = make_parser(__doc__, epochs=30, small_epochs=4)
    parser.add_argument("--bound", type=float, default=0.05, help="error of the outputs to allow")
    args = parse(parser, argv)
    if args.dtype == "float32":
        parser.error("--dtype float32 leaves nothing to compare; give float16 or bfloat16")
    console = Console()
    digits = load_digits()
    data = digits._replace(x_train=digits.x_train * 255, x_test=digits.x_test * 255)
    keras.utils.set_random_seed(args.seed)
    model = build_model("float32")
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(2e-3), loss)
    model.fit(data.x_train, data.y_train, batch_size=BATCH, epochs=args.epochs, verbose=0)

    found = tfamp.diagnostics.compare(
        model, data.x_test[:BATCH], dtype=args.dtype, bound=args.bound
    )
    console.print(found.to_text(), markup=False, highlight=False, soft_wrap=True)
    if found.keep_float32 is None:
        return 1

    table = Table(title="The same weights in other precisions")
    table.add_column("model")
    table.add_column("test accuracy", justify="right")
    table.add_row("float32", f"{accuracy(model, data):.1%}")
    mixed = f"mixed_{args.dtype}"
    for name, kept in ((mixed, ()), (f"{mixed}, list in float32", found.keep_float32)):
        other = build_model(mixed, kept)
        other.set_weights(model.get_weights())
        table.add_row(name, f"{accuracy(other, data):.1%}")
    console.print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
