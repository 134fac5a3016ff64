"""Trains on scikit-learn's digits with a `GradientTape`, clipping and gradient accumulation.

Each step sums the gradients of a few micro-batches, clips their global norm and applies them once.
Loss and gradients are scaled and unscaled per micro-batch, so the sum and the clipping use the true
float32 gradients. An overflow in any micro-batch skips the whole step.

    python examples/digits_custom_loop.py [--dtype float16|bfloat16] [--micro-batches 4] [--small]
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # log lines break the progress bar

import keras
import tensorflow as tf
from _common import Digits, load_digits, make_parser, parse, policies, progress
from digits_fit import build_model
from rich.console import Console
from rich.progress import Progress

import tfamp

MICRO_BATCH = 32


class Trainer:
    """The two halves of a training step, each a `tf.function`.

    Args:
        model: The model to train.
        optimizer: The wrapped optimizer.
        micro_batches: Number of micro-batches per step.
    """

    def __init__(
        self, model: keras.Model, optimizer: tfamp.LossScaleOptimizer, micro_batches: int
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.micro_batches = micro_batches
        self.loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        self.sums = [tf.Variable(tf.zeros(v.shape)) for v in model.trainable_variables]
        optimizer.build(model.trainable_variables)

    @tf.function
    def accumulate(self, x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        """Adds the gradients of one micro-batch to the sums; returns its loss."""
        with tf.GradientTape() as tape:
            loss = self.loss_fn(y, self.model(x, training=True))
            scaled_loss = self.optimizer.get_scaled_loss(loss / self.micro_batches)
        scaled = tape.gradient(scaled_loss, self.model.trainable_variables)
        for total, gradient in zip(
            self.sums, self.optimizer.get_unscaled_gradients(scaled), strict=True
        ):
            total.assign_add(gradient)
        return loss

    @tf.function
    def apply(self) -> None:
        """Clips and applies the sums, then resets them."""
        clipped, _ = tf.clip_by_global_norm([total.value() for total in self.sums], 1.0)
        self.optimizer.apply_gradients(zip(clipped, self.model.trainable_variables, strict=True))
        for total in self.sums:
            total.assign(tf.zeros_like(total))


def train(policy: str, data: Digits, args: Any, display: Progress) -> Trainer:
    """Returns a trainer that has trained a new model under `policy`."""
    keras.utils.set_random_seed(args.seed)
    with tfamp.policy_scope(policy):
        model = build_model()
    # The scale grows every 10 steps, so that it overflows even in this short run. In float32 a
    # scale of 1 changes nothing.
    rule = {"dynamic_growth_steps": 10} if policy == "mixed_float16" else {"loss_scale": 1.0}
    optimizer = tfamp.LossScaleOptimizer(keras.optimizers.Adam(2e-3), **rule)
    trainer = Trainer(model, optimizer, args.micro_batches)
    step_size = args.micro_batches * MICRO_BATCH
    batches = tf.data.Dataset.from_tensor_slices((data.x_train, data.y_train))
    batches = batches.shuffle(2000, seed=args.seed).batch(step_size, drop_remainder=True)
    task = display.add_task(policy, total=args.epochs, note="")
    for _ in range(args.epochs):
        for x, y in batches:
            for xs, ys in zip(
                tf.split(x, args.micro_batches), tf.split(y, args.micro_batches), strict=True
            ):
                loss = trainer.accumulate(xs, ys)
            trainer.apply()
        note = f"loss {float(loss):.3f} scale {float(optimizer.loss_scale):,.0f}"
        display.update(task, advance=1, note=note)
    return trainer


def main(argv: Sequence[str] | None = None) -> int:
    """Trains once per policy and prints accuracy, loss scale and skipped steps."""
    parser = make_parser(__doc__, epochs=30, small_epochs=2)
    parser.add_argument("--micro-batches", type=int, default=4, help="micro-batches per step")
    args = parse(parser, argv)
    data = load_digits()
    most = len(data.x_train) // MICRO_BATCH
    if not 1 <= args.micro_batches <= most:
        parser.error(f"--micro-batches must be 1 to {most}; got {args.micro_batches}")
    console = Console()
    with progress(console) as display:
        trainers = {p: train(p, data, args, display) for p in policies(args.dtype)}
    for policy, trainer in trainers.items():
        predicted = keras.ops.argmax(trainer.model.predict(data.x_test, verbose=0), axis=-1)
        accuracy = float(keras.ops.mean(keras.ops.equal(predicted, data.y_test)))
        optimizer = trainer.optimizer
        console.print(
            f"{policy:<15} accuracy {accuracy:.2%}  loss scale {float(optimizer.loss_scale):,.0f}"
            f"  steps {int(optimizer.iterations)}  skipped {int(optimizer.skipped_steps)}",
            highlight=False,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
