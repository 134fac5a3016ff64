"""Trains a CNN on digits with its whole train step rewritten, tape and optimizer included.

The model is a plain float32 model without a policy. `tfamp.rewrite` decides node by node in the
forward pass, the backward pass and the update. The table shows its decisions and reasons, and
--report writes the plan as a page to open in a browser.

    python examples/rewrite_train_step.py [--dtype float16|bfloat16] [--report FILE.html] [--small]
"""

from __future__ import annotations

import collections
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # log lines break the progress bar

import keras
import numpy as np
import tensorflow as tf
from _common import Digits, load_digits, make_parser, parse, progress
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import tfamp

BATCH = 64
Step = Callable[[tf.Tensor, tf.Tensor], tf.Tensor]


def build_model(seed: int) -> keras.Model:
    """Returns a small CNN, the same for the same seed."""
    keras.utils.set_random_seed(seed)
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Conv2D(32, 3, padding="same", activation="relu"),
            keras.layers.BatchNormalization(),
            keras.layers.Conv2D(64, 3, strides=2, padding="same", activation="relu"),
            keras.layers.Flatten(),
            keras.layers.Dense(128, activation="relu"),
            keras.layers.Dense(10),
        ]
    )


def make_step(model: keras.Model, scaled: bool) -> Step:
    """Returns one step of training; float16 needs its loss scaled."""
    optimizer = keras.optimizers.Adam(1e-3)
    loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    if scaled:
        optimizer = tfamp.LossScaleOptimizer(optimizer)

    @tf.function
    def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = loss_fn(y, model(x, training=True))
            target = optimizer.get_scaled_loss(loss) if scaled else loss
        gradients = tape.gradient(target, model.trainable_variables)
        if scaled:
            gradients = optimizer.get_unscaled_gradients(gradients)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    return step


def train(
    model: keras.Model, step: Step, digits: Digits, epochs: int, display: Progress, name: str
) -> float:
    """Trains a model; returns its accuracy on the test digits."""
    task = display.add_task(name, total=epochs, note="")
    random = np.random.default_rng(0)
    for _ in range(epochs):
        order = random.permutation(len(digits.x_train))
        for start in range(0, len(order) - BATCH + 1, BATCH):
            chosen = order[start : start + BATCH]
            loss = step(tf.constant(digits.x_train[chosen]), tf.constant(digits.y_train[chosen]))
        display.update(task, advance=1, note=f"loss {float(loss):.3f}")
    predicted = np.argmax(model(digits.x_test, training=False), axis=-1)
    return float(np.mean(predicted == digits.y_test))


def decisions(plan: tfamp.graph.RewritePlan) -> Table:
    """Returns a table of how many nodes each rule decided, and for which dtype."""
    counted = collections.Counter((node.dtype, node.reason.rule) for node in plan.nodes)
    examples = {(node.dtype, node.reason.rule): node for node in plan.nodes}
    table = Table("dtype", "rule", "nodes", "for example")
    for (dtype, rule), number in sorted(counted.items()):
        node = examples[dtype, rule]
        table.add_row(dtype, rule, str(number), f"{node.name} ({node.op}): {node.reason.text}")
    return table


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser(__doc__, epochs=12, small_epochs=2)
    parser.add_argument("--report", type=Path, help="write the plan as an HTML page")
    args = parse(parser, argv)
    if args.dtype == "float32":
        parser.error("--dtype must be float16 or bfloat16: float32 is what it is compared with")
    digits, console = load_digits(), Console()

    model = build_model(args.seed)
    step = make_step(model, scaled=args.dtype == "float16")
    fast = tfamp.rewrite(step, dtype=args.dtype)
    reference = build_model(args.seed)
    with progress(console) as display:
        accuracies = {
            "float32": train(
                reference, make_step(reference, False), digits, args.epochs, display, "float32"
            ),
            args.dtype: train(model, fast, digits, args.epochs, display, f"{args.dtype} rewrite"),
        }

    plan = fast.plan(tf.constant(digits.x_train[:BATCH]), tf.constant(digits.y_train[:BATCH]))
    console.print(decisions(plan))
    totals = plan.summary
    console.print(
        f"{totals.low_nodes} of {totals.nodes} float nodes in {args.dtype}, "
        f"{totals.casts} Casts inserted ({totals.cast_bytes / 2**20:.1f} MiB a step)"
    )
    for name, accuracy in accuracies.items():
        console.print(f"{name:<10} {100 * accuracy:.2f} % of the test digits")
    if args.report:
        args.report.write_text(plan.to_html(), encoding="utf-8")
        console.print(f"The graph: {args.report}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
