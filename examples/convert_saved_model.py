"""Trains a CNN on scikit-learn's digits in float32 and converts it with `tfamp rewrite`.

The model is exported once and converted twice with the command: with its variables, and frozen,
with weights stored in the low dtype. The table shows the accuracy and size of each SavedModel.

    python examples/convert_saved_model.py [--dtype bfloat16|float16] [--epochs 20] [--small]
"""

from __future__ import annotations

import os
import shlex
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # log lines break the progress bar

import keras
import numpy as np
import tensorflow as tf
from _common import Digits, ProgressBar, load_digits, make_parser, parse, progress
from rich.console import Console
from rich.table import Table

from tfamp.cli import main as tfamp_command

BATCH = 64


def train(data: Digits, epochs: int, seed: int, console: Console) -> keras.Model:
    """Returns a small CNN, trained in float32."""
    keras.utils.set_random_seed(seed)
    layers = keras.layers
    model = keras.Sequential(
        [
            keras.Input((8, 8, 1), name="image"),
            layers.Conv2D(32, 3, padding="same"),
            layers.BatchNormalization(momentum=0.9),
            layers.ReLU(),
            layers.MaxPooling2D(),
            layers.Conv2D(64, 3, padding="same", activation="relu"),
            layers.Flatten(),
            layers.Dense(256, activation="relu"),
            layers.Dropout(0.3),
            layers.Dense(10),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(2e-3), loss, metrics=["accuracy"])
    with progress(console) as display:
        bar = ProgressBar(display, "float32", "accuracy")
        model.fit(data.x_train, data.y_train, BATCH, epochs=epochs, verbose=0, callbacks=[bar])
    return model


def accuracy(directory: Path, data: Digits) -> float:
    """Returns the test accuracy of a SavedModel, loaded as a server does."""
    serve = tf.saved_model.load(str(directory)).signatures["serving_default"]
    (scores,) = serve(image=tf.constant(data.x_test)).values()
    return float(np.mean(np.argmax(scores, axis=-1) == data.y_test))


def size(directory: Path) -> int:
    """Returns the bytes of all files in a directory."""
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


def convert(console: Console, *arguments: str) -> None:
    """Runs `tfamp rewrite` as the shell does."""
    console.print(f"$ {shlex.join(['tfamp', 'rewrite', *arguments])}", soft_wrap=True)
    if tfamp_command(["rewrite", *arguments]):
        raise SystemExit(1)


def main(argv: Sequence[str] | None = None) -> int:
    """Trains, exports, converts and compares."""
    parser = make_parser(__doc__, epochs=20, small_epochs=2)
    parser.set_defaults(dtype="bfloat16")
    args = parse(parser, argv)
    if args.dtype == "float32":
        parser.error("--dtype must be float16 or bfloat16: the model is float32 already")
    console = Console()
    data = load_digits()
    model = train(data, args.epochs, args.seed, console)
    table = Table(title="Digits classifier, as it was written")
    table.add_column("SavedModel", no_wrap=True)
    for heading in ("test accuracy", "kB"):
        table.add_column(heading, justify="right")
    with tempfile.TemporaryDirectory() as work:
        names = ["float32", args.dtype, f"{args.dtype}_frozen"]
        source, converted, frozen = (Path(work) / name for name in names)
        model.export(str(source), verbose=False)
        convert(console, str(source), str(converted), "--dtype", args.dtype)
        convert(console, str(source), str(frozen), "--dtype", args.dtype, "--freeze")
        for path in (source, converted, frozen):
            table.add_row(path.name, f"{accuracy(path, data):.2%}", f"{size(path) / 1000:.0f}")
    console.print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
