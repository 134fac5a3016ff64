"""Losses under autocast are computed in float32, however their functions are reached."""

import contextlib
import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras.losses import mean_squared_error  # before any autocast

import tfamp
from helpers.cases import first_of
from tfamp.core.dtypes import float_format

DTYPES = ["float16", "bfloat16"]
WAYS = {
    "eager": lambda step: step,
    "traced": tf.function,
    "compiled": tf.function(jit_compile=True),
}
LOSSES = [
    keras.losses.log_cosh,
    mean_squared_error,
    keras.losses.mean_absolute_error,
    keras.losses.mean_absolute_percentage_error,
    keras.losses.mean_squared_logarithmic_error,
    keras.losses.huber,
    keras.losses.hinge,
    keras.losses.categorical_hinge,
    keras.losses.cosine_similarity,
    keras.metrics.mean_squared_error,
]
OF_PROBABILITIES = [
    keras.losses.squared_hinge,
    keras.losses.kl_divergence,
    keras.losses.poisson,
    keras.losses.binary_crossentropy,
    keras.losses.binary_focal_crossentropy,
    keras.losses.categorical_crossentropy,
    keras.losses.categorical_focal_crossentropy,
    keras.losses.dice,
    keras.losses.tversky,
]
VALUES = tf.random.stateless_normal((32, 4), [1, 2])
TARGETS = tf.random.stateless_normal((32, 4), [3, 4])


def error(found, expected):
    """Returns the norm of the difference, relative to the expected value's."""
    difference = np.asarray(found, "float64") - np.asarray(expected, "float64")
    return np.linalg.norm(difference) / np.linalg.norm(expected)


def check(loss, predictions, dtype, way):
    """Checks that a loss of low predictions is float32's of the same ones, as is its gradient."""

    def step(values, autocast):
        with tf.GradientTape() as tape:
            tape.watch(values)
            with autocast:
                result = loss(values)
                total = tf.reduce_mean(result) / 256
        return result, tape.gradient(total, values)

    low = tf.cast(predictions, dtype)
    expected, gradient = step(tf.cast(low, tf.float32), contextlib.nullcontext())
    found, low_gradient = WAYS[way](lambda: step(low, tfamp.autocast(dtype)))()
    assert found.dtype == tf.float32
    assert error(found, expected) < 1e-5
    assert low_gradient.dtype == dtype
    scale = np.abs(gradient).max()
    np.testing.assert_allclose(
        np.asarray(low_gradient, "float32"),
        gradient,
        rtol=float_format(dtype).eps,
        atol=float_format(dtype).eps * scale / 4 + 6e-8,
    )


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", first_of(DTYPES))
@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.__name__)
def test_a_loss_takes_targets_beyond_float16(loss, dtype, way):
    check(functools.partial(loss, 1e5 * TARGETS), VALUES, dtype, way)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", first_of(DTYPES))
@pytest.mark.parametrize("loss", OF_PROBABILITIES, ids=lambda loss: loss.__name__)
def test_a_loss_of_low_probabilities_is_float32(loss, dtype, way):
    check(functools.partial(loss, tf.nn.softmax(TARGETS)), tf.nn.softmax(VALUES), dtype, way)


@pytest.mark.parametrize("way", ["eager", "traced"])
@pytest.mark.parametrize("dtype", first_of(DTYPES))
@pytest.mark.parametrize(
    "loss",
    [keras.losses.binary_crossentropy, keras.losses.BinaryCrossentropy()],
    ids=["function", "class"],
)
def test_low_probabilities_that_are_one_still_have_their_logits(loss, dtype, way):
    def step():
        with tfamp.autocast(dtype):
            return loss(tf.zeros((2, 2)), keras.activations.sigmoid(tf.fill((2, 2), logits)))

    logits = tf.cast(12.0, dtype)  # A sigmoid of 0.999994, which is one in either dtype.
    np.testing.assert_allclose(WAYS[way](step)(), 12.0, rtol=1e-5)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", first_of(DTYPES))
@pytest.mark.parametrize(
    "loss",
    [
        lambda logits: tf.nn.sigmoid_cross_entropy_with_logits(tf.fill((32, 4), 0.5), logits),
        lambda logits: tf.nn.weighted_cross_entropy_with_logits(tf.fill((32, 4), 0.5), logits, 1.0),
        lambda logits: tf.nn.log_poisson_loss(tf.ones((32, 4)), logits),
    ],
    ids=["sigmoid", "weighted", "poisson"],
)
def test_gradients_of_logits_cancel_in_float32(loss, dtype, way):
    check(lambda logits: 1e4 * loss(logits), 0.01 * VALUES, dtype, way)


def test_without_autocast_a_loss_keeps_its_dtype():
    low = tf.ones((2, 2), "bfloat16")
    with tfamp.autocast("bfloat16"), tfamp.autocast(enabled=False):
        assert keras.losses.mean_squared_error(low, low).dtype == tf.bfloat16
    assert keras.losses.mean_squared_error(low, low).dtype == tf.bfloat16
