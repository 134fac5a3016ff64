"""Models, data and training steps of tests/gpu: real layers, digits and no downloads."""

from __future__ import annotations

import contextlib
import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass

import keras
import numpy as np
import tensorflow as tf
from keras import layers

import tfamp
from helpers.acceptance import interleaved_seconds

CLASSES = 10
WAYS = ("float32", "policy", "rewrite")
Step = Callable[[tf.Tensor, tf.Tensor], tf.Tensor]


def mlp(width: int, depth: int = 2, inputs: int = 64) -> keras.Model:
    """Dense layers."""
    hidden = [layers.Dense(width, activation="relu") for _ in range(depth)]
    return keras.Sequential([keras.Input((inputs,)), *hidden, layers.Dense(CLASSES)])


def cnn(filters: int, pixels: int = 8, blocks: int = 2) -> keras.Model:
    """Convolutions with BatchNormalization and shortcuts, as in a ResNet."""
    inputs = keras.Input((pixels, pixels, 1))
    x = layers.Conv2D(filters, 3, padding="same")(inputs)
    for _ in range(blocks):
        y = layers.Conv2D(filters, 3, padding="same", use_bias=False)(x)
        y = layers.ReLU()(layers.BatchNormalization()(y))
        x = layers.ReLU()(x + layers.BatchNormalization()(layers.Conv2D(filters, 1)(y)))
    return keras.Model(inputs, layers.Dense(CLASSES)(layers.GlobalAveragePooling2D()(x)))


class Positions(layers.Layer):
    """Adds a trainable embedding of positions."""

    def build(self, shape):
        self.table = self.add_weight(shape=shape[1:], initializer="random_normal")

    def call(self, x):
        return x + self.table


def encoder(
    depth: int, width: int, heads: int, *, tokens: int, vocabulary: int, classes: int = CLASSES
) -> keras.Model:
    """A transformer encoder; BERT-base has depth 12, width 768 and 12 heads."""
    inputs = keras.Input((tokens,), dtype="int32")
    x = layers.LayerNormalization()(Positions()(layers.Embedding(vocabulary, width)(inputs)))
    for _ in range(depth):
        attended = layers.MultiHeadAttention(heads, width // heads)(x, x)
        x = layers.LayerNormalization()(x + attended)
        hidden = layers.Dense(4 * width, activation="gelu")(x)
        x = layers.LayerNormalization()(x + layers.Dense(width)(hidden))
    return keras.Model(inputs, layers.Dense(classes)(layers.GlobalAveragePooling1D()(x)))


def digits(count: int, pixels: int = 8) -> tuple[np.ndarray, np.ndarray]:
    """Random images of scikit-learn's digits, with noise."""
    import sklearn.datasets

    x, y = sklearn.datasets.load_digits(return_X_y=True)
    random = np.random.default_rng(0)
    chosen = random.integers(0, len(x), count)
    images = (x[chosen] / 16).reshape(count, 8, 8, 1).repeat(pixels // 8, 1).repeat(pixels // 8, 2)
    images = images + 0.3 * random.standard_normal(images.shape)
    return images.astype("float32"), y[chosen].astype("int32")


def words(images: np.ndarray, vocabulary: int = 16) -> np.ndarray:
    """Images as sequences of tokens: the quantized pixels."""
    levels = np.clip(images.reshape(len(images), -1), 0, 1) * (vocabulary - 1)
    return levels.round().astype("int32")


def loss_of(y: tf.Tensor, logits: tf.Tensor) -> tf.Tensor:
    """Cross-entropy with smoothed labels, so that the smallest loss is above zero."""
    classes = logits.shape[-1]
    # Keras passes labels to a loss as floats.
    smooth = tf.one_hot(tf.cast(y, "int32"), classes, 0.9, 0.1 / (classes - 1))
    return keras.losses.CategoricalCrossentropy(from_logits=True)(smooth, logits)


def step_of(
    model: keras.Model, scale: Callable, apply: Callable, scope: Callable = contextlib.nullcontext
) -> Step:
    """A step of a custom loop, as it is traced: forward, backward, update; returns the loss."""

    def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            with scope():
                loss = loss_of(y, model(x, training=True))
            scaled = scale(loss)
        gradients = tape.gradient(scaled, [v.value for v in model.trainable_variables])
        apply(gradients, model.trainable_variables)
        return loss

    return step


def plain_step(model: keras.Model, optimizer: keras.optimizers.Optimizer) -> Step:
    """The step of an optimizer that may scale the loss."""
    return step_of(model, optimizer.scale_loss, optimizer.apply)


def monitored_step(model: keras.Model, optimizer: keras.optimizers.Optimizer, every: int) -> Step:
    """The step of an optimizer whose gradients a NumericsMonitor records."""
    monitor = tfamp.diagnostics.NumericsMonitor(every=every)

    def apply(gradients: list, variables: list) -> None:
        monitor.record(gradients, variables, optimizer=optimizer)
        optimizer.apply(gradients, variables)

    return step_of(model, optimizer.get_scaled_loss, apply)


def scaler_step(
    model: keras.Model, optimizer: keras.optimizers.Optimizer, scaler: tfamp.GradScaler
) -> Step:
    """The step of a GradScaler, under autocast in float16."""

    def apply(gradients: list, variables: list) -> None:
        scaler.step(optimizer, zip(gradients, variables, strict=True))
        scaler.update()

    return step_of(model, scaler.scale, apply, lambda: tfamp.autocast("float16"))


@dataclass(frozen=True)
class Training:
    """A model that is trained in one way.

    Attributes:
        model: The model.
        optimizer: Its optimizer.
        step: The traced step.
    """

    model: keras.Model
    optimizer: keras.optimizers.Optimizer
    step: Step


def train(
    make: Callable[[], keras.Model],
    way: str,
    dtype: str = "float32",
    *,
    inner: Callable[[], keras.optimizers.Optimizer] = lambda: keras.optimizers.Adam(1e-3),
    scaled: bool | None = None,
    jit_compile: bool = False,
    **options: object,
) -> Training:
    """Returns a model with the same initial weights at every call, and its step in one of `WAYS`.

    The loss is scaled for float16, or as `scaled` says.
    """
    keras.utils.set_random_seed(5)
    with tfamp.policy_scope(f"mixed_{dtype}" if way == "policy" else "float32"):
        model = make()
    optimizer = inner()
    if scaled if scaled is not None else dtype == "float16":
        optimizer = tfamp.LossScaleOptimizer(optimizer, initial_scale=2.0**12)
    optimizer.build(model.trainable_variables)
    step = plain_step(model, optimizer)
    if way == "rewrite":
        step = tfamp.rewrite(step, dtype=dtype, **options)
    else:
        step = tf.function(step, jit_compile=jit_compile, autograph=False)
    return Training(model, optimizer, step)


def values(*owners: keras.Model | keras.optimizers.Optimizer) -> list[np.ndarray]:
    """Every variable of models and optimizers."""
    return [np.array(each.numpy()) for owner in owners for each in owner.variables]


def time_cnn(device: str, dtype: str, *sizes: str) -> dict[str, float]:
    """The time of a CNN's training step, and the loss at the end."""
    filters, pixels, rounds = map(int, sizes)
    with tf.device(device):
        x, y = map(tf.constant, digits(32, pixels))
        training = train(lambda: cnn(filters, pixels), "policy", dtype)
        ways = {"step": lambda: training.step(x, y)}
        seconds = interleaved_seconds(ways, rounds=rounds, calls=3)["step"]
    return {"seconds": statistics.median(seconds), "loss": float(training.step(x, y))}


if __name__ == "__main__":
    print("RESULT", json.dumps(time_cnn(*sys.argv[1:])))
