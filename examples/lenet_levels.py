"""Trains LeNet-5 on handwritten digits at every level of mixed precision, and compares them.

The data are scikit-learn's digits; nothing is downloaded. All levels start from the same weights
and use the same batches. The table shows the accuracy on test digits, its difference from O0's, and
the time of one training step.

    python examples/lenet_levels.py [--dtype float16|bfloat16|both] [--epochs 30] [--small]
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # log lines break the progress bar

import keras
import numpy as np
from _common import Digits, ProgressBar, load_digits, progress
from keras import layers
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import tfamp

BATCH = 32
# Level, and other arguments of `prepare`. Masters: level O2 with weights stored in the low dtype.
LEVELS: dict[str, dict[str, Any]] = {
    "O0": {"level": "O0"},
    "O1": {"level": "O1"},
    "O2": {"level": "O2"},
    "O2 + masters": {"level": "O2", "master_weights": True},
    "O3": {"level": "O3"},
}


class Result(NamedTuple):
    """Results of one training run."""

    accuracy: float
    milliseconds: float
    settings: Any


def lenet5() -> keras.Model:
    """Returns LeNet-5 for 32 x 32 pixels, as in LeCun et al. (1998), with ReLU and max-pooling."""
    return keras.Sequential(
        [
            keras.Input((32, 32, 1)),
            layers.Conv2D(6, 5, activation="relu"),
            layers.MaxPooling2D(),
            layers.Conv2D(16, 5, activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(120, activation="relu"),
            layers.Dense(84, activation="relu"),
            layers.Dense(10),
        ]
    )


def enlarged(images: np.ndarray) -> np.ndarray:
    """Returns images of 8 x 8 pixels with every pixel four times as wide and high."""
    return images.repeat(4, axis=1).repeat(4, axis=2)


def train(name: str, dtype: str, data: Digits, epochs: int, seed: int, display: Progress) -> Result:
    """Trains at one level and returns the results."""
    keras.utils.set_random_seed(seed)
    model = lenet5()
    optimizer = keras.optimizers.SGD(0.01, momentum=0.9)
    prepared = tfamp.prepare(model, optimizer, dtype=dtype, **LEVELS[name])
    model, optimizer = prepared
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, metrics=["accuracy"], jit_compile=False)
    bar = ProgressBar(display, f"{name} {dtype}", "accuracy")
    model.fit(
        enlarged(data.x_train), data.y_train, batch_size=BATCH, epochs=epochs, verbose=0,
        callbacks=[bar],
    )  # fmt: skip
    accuracy = model.evaluate(enlarged(data.x_test), data.y_test, verbose=0, return_dict=True)
    return Result(accuracy["accuracy"], 1e3 * step_seconds(model, data), prepared.settings)


def step_seconds(model: keras.Model, data: Digits, steps: int = 30) -> float:
    """Returns the median time of a training step on one batch."""
    x, y = enlarged(data.x_train[:BATCH]), data.y_train[:BATCH]
    times = []
    for _ in range(steps):
        start = time.perf_counter()
        model.train_on_batch(x, y)
        times.append(time.perf_counter() - start)
    return float(np.median(times))


def make_parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dtype", choices=("float16", "bfloat16", "both"), default="both")
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--settings", action="store_true", help="print each level's settings too")
    parser.add_argument("--small", action="store_true", help="a few seconds, to see that it runs")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Trains at every level and prints the comparison."""
    parser = make_parser()
    args = parser.parse_args(argv)
    if args.epochs < 1:
        parser.error(f"--epochs must be at least 1; got {args.epochs}")
    dtypes = ("float16", "bfloat16") if args.dtype == "both" else (args.dtype,)
    epochs = args.epochs
    if args.small:
        dtypes, epochs = dtypes[-1:], 2
    data, console = load_digits(), Console()
    steps = -(-len(data.x_train) // BATCH)
    table = Table(
        title="LeNet-5 on scikit-learn's digits",
        caption=f"Seed {args.seed}, {epochs} epochs of {steps} steps. Step: median time of one."
        "\nMost CPUs emulate float16, which takes longer than float32.",
    )
    for heading in ("level", "dtype"):
        table.add_column(heading, no_wrap=True)
    for heading in ("accuracy", "to O0", "loss scale", "step"):
        table.add_column(heading, justify="right", no_wrap=True)
    runs = [("O0", "float32"), *((name, d) for d in dtypes for name in LEVELS if name != "O0")]
    reference: float | None = None
    with progress(console) as display:
        for name, dtype in runs:
            result = train(name, dtype, data, epochs, args.seed, display)
            reference = result.accuracy if reference is None else reference
            scale = result.settings.loss_scale
            shown = "none" if scale is None else "dynamic"
            if isinstance(scale, tfamp.FixedLossScale):
                shown = f"{scale.scale:g}"
            table.add_row(
                name,
                dtype,
                f"{result.accuracy:.2%}",
                f"{100 * (result.accuracy - reference):+.2f} points",
                shown,
                f"{result.milliseconds:.1f} ms",
            )
            if args.settings:
                console.print(f"\n{result.settings}\n", highlight=False)
    console.print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
