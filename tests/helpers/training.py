"""Small models, steps and state comparisons shared by the optimizer's tests."""

from __future__ import annotations

from collections.abc import Callable

import keras
import numpy as np
import tensorflow as tf

import tfamp

BATCH = 8


def data(batches: int = 4) -> tuple[np.ndarray, np.ndarray]:
    """A regression task of `batches` batches of 8 with 4 features."""
    random = np.random.default_rng(7)
    x = random.standard_normal((BATCH * batches, 4)).astype("float32")
    return x, (x @ np.float32([[1], [-2], [0.5], [3]])).astype("float32")


def small_model() -> keras.Sequential:
    """Two dense layers, initialised the same way at every call."""
    keras.utils.set_random_seed(3)
    return keras.Sequential(
        [keras.Input((4,)), keras.layers.Dense(8, activation="relu"), keras.layers.Dense(1)]
    )


def snapshot(*owners: keras.Model | keras.optimizers.Optimizer) -> dict[str, np.ndarray]:
    """Every variable of models and optimizers, copied."""
    return {
        f"{i}/{j}/{variable.path}": np.array(variable.numpy())
        for i, owner in enumerate(owners)
        for j, variable in enumerate(owner.variables)
    }


def assert_identical(actual: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    """Asserts that two snapshots hold the same variables with bit-identical values."""
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(actual[name], value, name)


def assert_same_values(actual: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    """As `assert_identical`, for models whose variables have other paths."""
    for value, wanted in zip(actual.values(), expected.values(), strict=True):
        np.testing.assert_array_equal(value, wanted)


def scaled_gradients(
    model: keras.Model, optimizer: tfamp.LossScaleOptimizer, x: tf.Tensor, y: tf.Tensor
) -> list[tf.Tensor]:
    """Gradients of the scaled mean squared error."""
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(tf.cast(model(x, training=True), tf.float32) - y))
        scaled = optimizer.get_scaled_loss(loss)
    return tape.gradient(scaled, [v.value for v in model.trainable_variables])


def train_step(
    model: keras.Model, optimizer: tfamp.LossScaleOptimizer, *, unscale: bool = True
) -> Callable[[tf.Tensor, tf.Tensor], None]:
    """A step as TensorFlow's guide writes it; without `unscale`, as a beginner does."""

    def step(x: tf.Tensor, y: tf.Tensor) -> None:
        gradients = scaled_gradients(model, optimizer, x, y)
        if unscale:
            gradients = optimizer.get_unscaled_gradients(gradients)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    return step
