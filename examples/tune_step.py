"""Measures whether low precision makes a train step faster here, and keeps the fastest way.

`tfamp.tune` alternates the step in float32, rewritten and compiled, on a real batch. Model,
optimizer and random numbers are unchanged afterwards. Training continues with the fastest, which is
float32 if nothing is faster.

    python examples/tune_step.py [--dtype float16|bfloat16] [--width N] [--html FILE] [--small]
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import tensorflow as tf
from _common import load_digits, make_parser, parse
from rich.console import Console

import tfamp

BATCH = 128


def build_model(width: int, seed: int) -> keras.Model:
    """Returns a classifier of digits, the same for the same seed."""
    keras.utils.set_random_seed(seed)
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Flatten(),
            keras.layers.Dense(width, activation="relu"),
            keras.layers.Dropout(0.2),
            keras.layers.Dense(width, activation="relu"),
            keras.layers.Dense(10),
        ]
    )


def make_step(model: keras.Model) -> Callable[[tf.Tensor, tf.Tensor], tf.Tensor]:
    """Returns one step of training with Adam."""
    optimizer = keras.optimizers.Adam(1e-3)
    loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    @tf.function
    def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = loss_fn(y, model(x, training=True))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    return step


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser(__doc__, epochs=6, small_epochs=1)
    parser.set_defaults(dtype="bfloat16")
    parser.add_argument("--width", type=int, help="default: 1024; with --small 64")
    parser.add_argument("--max-error", type=float, help="choose nothing less exact than this")
    parser.add_argument("--html", type=Path, help="write the report as a page")
    args = parse(parser, argv)
    if args.dtype == "float32":
        parser.error("--dtype must be float16 or bfloat16: float32 is always measured")
    digits, console = load_digits(), Console()
    model = build_model(args.width or (64 if args.small else 1024), args.seed)
    step = make_step(model)

    x, y = tf.constant(digits.x_train[:BATCH]), tf.constant(digits.y_train[:BATCH])
    before = [np.asarray(each) for each in model.variables]
    report = tfamp.tune(step, x, y, dtype=args.dtype, max_error=args.max_error)
    console.print(report.to_text(), highlight=False, soft_wrap=True)
    same = all(np.array_equal(a, b) for a, b in zip(before, model.variables, strict=True))
    console.print(f"the model is as before: {same}")

    random = np.random.default_rng(args.seed)
    for _ in range(args.epochs):
        order = random.permutation(len(digits.x_train))
        for start in range(0, len(order) - BATCH + 1, BATCH):
            chosen = order[start : start + BATCH]
            report.best(tf.constant(digits.x_train[chosen]), tf.constant(digits.y_train[chosen]))
    predicted = np.argmax(model(digits.x_test, training=False), axis=-1)
    console.print(f"{100 * np.mean(predicted == digits.y_test):.2f} % of the test digits")
    if args.html:
        args.html.write_text(f"<!doctype html>{report._repr_html_()}", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
