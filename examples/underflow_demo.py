"""Shows a network that learns nothing in float16 unless its loss is scaled.

The setting is data-parallel training with a global batch of 2**24 tokens or pixels. Each device
divides its loss by the global count, as `tf.nn.compute_average_loss` does, so that the all-reduced
sum of gradients is the gradient of the mean. At the logits no gradient is then larger than 2**-24,
float16's smallest number, and in the layers before they are rounded to zero. Summing zeros over
16,384 devices does not help, nor does Adam, although it normalizes small gradients.

Here one device trains its part on scikit-learn's digits. Multiplying by the number of devices
replaces the all-reduce: the result is the same if all devices hold the same digits.

    python examples/underflow_demo.py [--plot gradients.png] [--dtype bfloat16] [--small]
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # log lines break the progress bar

import keras
import numpy as np
import tensorflow as tf
from _common import load_digits, make_parser, parse, policies, progress
from rich.console import Console
from rich.table import Table

import tfamp

GLOBAL_BATCH = 2**24
LOCAL_BATCH = 2**10
DEVICES = GLOBAL_BATCH // LOCAL_BATCH
DEPTH = 12


class Run:
    """A deep MLP, its optimizer and its training step, under one policy.

    Args:
        policy: Name of the policy.
        scaling: Whether to scale the loss.
        seed: Runs of the same seed start from the same weights.
    """

    def __init__(self, policy: str, scaling: bool, seed: int) -> None:
        keras.utils.set_random_seed(seed)
        with tfamp.policy_scope(policy):
            hidden = [keras.layers.Dense(128, activation="relu") for _ in range(DEPTH)]
            self.model = keras.Sequential(
                [keras.Input((8, 8, 1)), keras.layers.Flatten(), *hidden, keras.layers.Dense(10)]
            )
        self.scaling = scaling
        adam = keras.optimizers.Adam(1e-3)
        self.optimizer = tfamp.LossScaleOptimizer(adam) if scaling else adam
        self.optimizer.build(self.model.trainable_variables)

    def gradients(self, x: tf.Tensor, y: tf.Tensor) -> list[tf.Tensor]:
        """Returns this device's gradients, unscaled if the loss was scaled."""
        with tf.GradientTape() as tape:
            loss = average_loss(y, self.model(x, training=True))
            if self.scaling:
                loss = self.optimizer.get_scaled_loss(loss)
        gradients = tape.gradient(loss, self.model.trainable_variables)
        return self.optimizer.get_unscaled_gradients(gradients) if self.scaling else gradients

    @tf.function
    def step(self, x: tf.Tensor, y: tf.Tensor) -> None:
        """Does one step of training."""
        reduced = [gradient * DEVICES for gradient in self.gradients(x, y)]
        self.optimizer.apply_gradients(zip(reduced, self.model.trainable_variables, strict=True))


def average_loss(y: tf.Tensor, logits: tf.Tensor) -> tf.Tensor:
    """Returns this device's share of the mean loss over the global batch."""
    losses = keras.losses.sparse_categorical_crossentropy(y, logits, from_logits=True)
    return tf.nn.compute_average_loss(losses, global_batch_size=GLOBAL_BATCH)


def plot(run: Run, x: np.ndarray, y: np.ndarray, path: str) -> None:
    """Draws the exponents of the gradients inside the network against float16's range."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    probe = keras.Model(run.model.inputs, [layer.output for layer in run.model.layers[1:]])
    with tf.GradientTape() as tape:
        *hidden, logits = probe([x])
        loss = average_loss(y, logits)
    values = np.concatenate([g.numpy().ravel() for g in tape.gradient(loss, hidden)])
    exponents = np.log2(np.abs(values[values != 0]))
    figure, axes = pyplot.subplots(figsize=(9, 4), layout="constrained")
    bins = np.arange(-44, 17)
    axes.axvspan(-14, 16, color="tab:green", alpha=0.15, label="float16, full precision")
    axes.axvspan(-24, -14, color="tab:olive", alpha=0.15, label="float16, subnormal")
    for name, shift in (("as they are", 0), ("loss scaled by 32768", 15)):
        lost = np.mean(exponents + shift < -25)
        axes.hist(exponents + shift, bins, alpha=0.7, label=f"{name}: {lost:.1%} become zero")
    axes.set(xlabel="log2 of the absolute gradient", ylabel="number of values")
    axes.set_title("Gradients of the hidden layers' outputs, computed in float32")
    axes.legend(loc="upper right")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def main(argv: Sequence[str] | None = None) -> int:
    """Trains in float32, and in low precision without and with loss scaling."""
    parser = make_parser(__doc__, epochs=100, small_epochs=3)
    parser.add_argument("--plot", metavar="PATH", help="also draw the gradients; needs matplotlib")
    args = parse(parser, argv)
    data = load_digits()
    x, y = data.x_train[:LOCAL_BATCH], data.y_train[:LOCAL_BATCH]
    runs = {"float32": Run("float32", False, args.seed)}
    for policy in policies(args.dtype)[1:]:
        runs[f"{policy}, no scaling"] = Run(policy, False, args.seed)
        runs[f"{policy}, tfamp"] = Run(policy, True, args.seed)
    if args.plot:
        plot(runs["float32"], x, y, args.plot)
    table = Table(
        title="Deep MLP on digits, global batch 2**24",
        caption="Flushed: of the weights' gradient values that are not zero in float32,\n"
        "those that are exactly zero, at the same weights before training.",
    )
    table.add_column("run", no_wrap=True)
    table.add_column("test accuracy", justify="right")
    table.add_column("gradients flushed to zero", justify="right")
    console = Console()
    nonzero = [g.numpy() != 0 for g in runs["float32"].gradients(x, y)]
    with progress(console) as display:
        for name, run in runs.items():
            zero = [g.numpy() == 0 for g in tf.function(run.gradients)(x, y)]
            flushed = sum(np.sum(z & n) for z, n in zip(zero, nonzero, strict=True))
            share = flushed / sum(np.sum(n) for n in nonzero)
            task = display.add_task(name, total=args.epochs, note="")
            for _ in range(args.epochs):
                run.step(x, y)
                display.advance(task)
            predicted = np.argmax(run.model.predict(data.x_test, verbose=0), axis=-1)
            table.add_row(name, f"{np.mean(predicted == data.y_test):.1%}", f"{share:.1%}")
    console.print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
