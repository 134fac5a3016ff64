"""Trains a small GAN on scikit-learn's digits as a PyTorch program does: autocast, one scaler.

Two optimizers share one `GradScaler`. In each iteration the discriminator's gradients are unscaled
and clipped, the generator's go to `step` unchanged, and one `update` at the end considers both. The
whole iteration is one `tf.function`; `tfamp.autocast` applies while it is traced.

    python examples/torch_style_loop.py [--dtype float16|bfloat16] [--plot digits.png] [--small]
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # log lines break the progress bar

import keras
import numpy as np
import tensorflow as tf
from _common import load_digits, make_parser, parse, progress
from rich.console import Console

import tfamp

NOISE = 16
BATCH = 128
SHADES = " .:-=+*#%@"


class Gan:
    """A generator, a discriminator, their optimizers and the scaler both share.

    Args:
        dtype: Dtype that autocast lowers to.
        seed: Runs of the same seed start from the same weights.
    """

    def __init__(self, dtype: str, seed: int) -> None:
        keras.utils.set_random_seed(seed)
        self.dtype = dtype
        self.generator = mlp(NOISE, [128, 256], keras.layers.Dense(64, activation="sigmoid"))
        self.discriminator = mlp(64, [256, 128], keras.layers.Dense(1))
        self.d_optimizer = keras.optimizers.Adam(4e-4, beta_1=0.5)
        self.g_optimizer = keras.optimizers.Adam(4e-4, beta_1=0.5)
        # bfloat16 and float32 need no scaling: a disabled scaler passes everything through. With
        # the short interval the scale grows until it overflows, even in this short run.
        self.scaler = tfamp.GradScaler(growth_interval=50, enabled=dtype == "float16")
        self.skipped = tf.Variable([0, 0])

    @tf.function
    def step(self, real: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Does one iteration; returns the losses of discriminator and generator."""
        noise = tf.random.normal((2, BATCH, NOISE))
        with tf.GradientTape() as tape, tfamp.autocast(self.dtype, enabled=self.dtype != "float32"):
            judged_real = self.discriminator(real, training=True)
            judged_fake = self.discriminator(self.generator(noise[0]), training=True)
            d_loss = (cross_entropy(0.9, judged_real) + cross_entropy(0.0, judged_fake)) / 2.0
            scaled_loss = self.scaler.scale(d_loss)
        variables = self.discriminator.trainable_variables
        gradients = tape.gradient(scaled_loss, variables)
        gradients = self.scaler.unscale(self.d_optimizer, gradients)
        gradients, _ = tf.clip_by_global_norm(gradients, 1.0)
        d_applied = self.scaler.step(self.d_optimizer, zip(gradients, variables, strict=True))

        with tf.GradientTape() as tape, tfamp.autocast(self.dtype, enabled=self.dtype != "float32"):
            g_loss = cross_entropy(1.0, self.discriminator(self.generator(noise[1])))
            scaled_loss = self.scaler.scale(g_loss)
        variables = self.generator.trainable_variables
        gradients = tape.gradient(scaled_loss, variables)
        g_applied = self.scaler.step(self.g_optimizer, zip(gradients, variables, strict=True))

        self.scaler.update()
        self.skipped.assign_add(1 - tf.cast([d_applied, g_applied], tf.int32))
        return d_loss, g_loss


def mlp(inputs: int, widths: Sequence[int], output: keras.layers.Layer) -> keras.Model:
    """Returns a multi-layer perceptron with leaky ReLUs."""
    hidden = [keras.layers.Dense(width, activation="leaky_relu") for width in widths]
    return keras.Sequential([keras.Input((inputs,)), *hidden, output])


def cross_entropy(target: float, logits: tf.Tensor) -> tf.Tensor:
    """Returns the mean binary cross-entropy against one target for all."""
    targets = tf.fill(tf.shape(logits), tf.cast(target, logits.dtype))
    return tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(targets, logits))


def as_text(images: np.ndarray) -> str:
    """Returns images side by side, two characters to a pixel."""
    shades = (images * len(SHADES)).astype(int).clip(0, len(SHADES) - 1)
    rows = np.concatenate(list(shades), axis=1)
    return "\n".join("".join(SHADES[pixel] * 2 for pixel in row) for row in rows)


def plot(images: np.ndarray, path: str) -> None:
    """Draws images in rows of ten."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(len(images) // 10, 10, figsize=(8, 0.8 * len(images) // 10))
    for axis, image in zip(axes.flat, images, strict=True):
        axis.imshow(image, cmap="gray_r")
        axis.axis("off")
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


def main(argv: Sequence[str] | None = None) -> int:
    """Trains, then prints losses, scale, skipped steps and some generated digits."""
    parser = make_parser(__doc__, epochs=300, small_epochs=10)
    parser.add_argument("--plot", metavar="PATH", help="also draw 50 digits; needs matplotlib")
    args = parse(parser, argv)
    digits = load_digits().x_train.reshape(-1, 64)
    batches = tf.data.Dataset.from_tensor_slices(digits).shuffle(2000, seed=args.seed)
    batches = batches.batch(BATCH, drop_remainder=True)
    gan, console = Gan(args.dtype, args.seed), Console()
    with progress(console) as display:
        task = display.add_task(f"GAN, {args.dtype}", total=args.epochs, note="")
        for _ in range(args.epochs):
            for real in batches:
                d_loss, g_loss = gan.step(real)
            note = f"losses {float(d_loss):.3f} {float(g_loss):.3f}"
            note += f"  scale {float(gan.scaler.get_scale()):,.0f}"
            display.update(task, advance=1, note=note)
    d_skipped, g_skipped = gan.skipped.numpy()
    console.print(
        f"loss scale {float(gan.scaler.get_scale()):,.0f}  iterations {args.epochs * len(batches)}"
        f"  skipped: discriminator {d_skipped}, generator {g_skipped}",
        highlight=False,
    )
    images = gan.generator.predict(np.random.randn(50, NOISE), verbose=0).reshape(-1, 8, 8)
    console.print(as_text(images[:5]), markup=False, highlight=False, soft_wrap=True)
    if args.plot:
        plot(images, args.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
