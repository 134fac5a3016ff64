"""Functions of TensorFlow whose steps would multiply rounding errors, or exceed low dtypes."""

import contextlib

import numpy as np
import pytest
import tensorflow as tf

import tfamp
from helpers.cases import first_of
from tfamp.core.dtypes import float_format

DTYPES = ["float16", "bfloat16"]
WAYS = {"eager": lambda step: step, "traced": tf.function}


def error(found, expected):
    """Returns the norm of the difference, relative to the expected value's."""
    difference = np.asarray(found, "float64") - np.asarray(expected, "float64")
    return np.linalg.norm(difference) / np.linalg.norm(expected)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", first_of(DTYPES))
def test_exponential_of_a_low_matrix_is_as_exact_as_the_matrix(dtype, way):
    matrix = 0.3 * tf.random.stateless_normal((6, 6), [1, 2])

    def step():
        with tf.GradientTape() as tape:
            tape.watch(matrix)
            with tfamp.autocast(dtype):
                result = tf.linalg.expm(matrix @ tf.eye(6))
        return result, tape.gradient(result, matrix)

    exact = tf.cast(tf.cast(matrix, dtype), tf.float32)
    with tf.GradientTape() as tape:
        tape.watch(exact)
        expected = tf.linalg.expm(exact)
    result, gradient = WAYS[way](step)()
    assert result.dtype == tf.float32
    assert error(result, expected) < 1e-5
    assert error(gradient, tape.gradient(expected, exact)) < float_format(dtype).eps


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", first_of(reversed(DTYPES)))
def test_sampled_softmax_with_accidental_hits_is_finite_and_exact(dtype, way):
    features = tf.random.stateless_normal((32, 16), [1, 2])
    weights = tf.cast(tf.random.stateless_normal((64, 16), [3, 4]), dtype)
    labels = tf.random.stateless_uniform((32, 1), [5, 6], 0, 64, tf.int64)
    samples = tf.random.log_uniform_candidate_sampler(labels, 1, 16, True, 64, seed=1)

    def loss(features, weights):
        biases = tf.zeros(64, weights.dtype)
        found = tf.nn.sampled_softmax_loss(
            weights, biases, labels, features, 16, 64, sampled_values=samples
        )
        return tf.reduce_mean(found)

    def step():
        with tf.GradientTape() as tape:
            tape.watch(features)
            with tfamp.autocast(dtype):
                found = loss(features @ tf.eye(16), weights)
        return found, tape.gradient(found, features)

    # A sample that is a label itself: an accidental hit.
    assert set(samples[0].numpy()) & set(labels.numpy().ravel())
    with tf.GradientTape() as tape:
        tape.watch(features)
        expected = loss(features, tf.cast(weights, tf.float32))
    found, gradient = WAYS[way](step)()
    assert error(found, expected) < float_format(dtype).eps
    assert error(gradient, tape.gradient(expected, features)) < 4 * float_format(dtype).eps


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", first_of(reversed(DTYPES)))
@pytest.mark.parametrize("function", [tf.linalg.eig, tf.linalg.eigvals], ids=["eig", "eigvals"])
def test_eigenvalues_of_a_low_matrix_are_those_of_float32(function, dtype, way):
    low = tf.cast(tf.random.stateless_normal((5, 5), [1, 2]), dtype)

    def sizes(matrix):
        # Looked up here, as the function in force is the one of the module.
        found = getattr(tf.linalg, function.__name__)(matrix)
        return tf.abs(found[0] if isinstance(found, tuple) else found)

    def step(matrix, autocast):
        with tf.GradientTape() as tape:
            tape.watch(matrix)
            with autocast:
                result = sizes(matrix)
        return result, tape.gradient(result, matrix)

    expected, gradient = step(tf.cast(low, tf.float32), contextlib.nullcontext())
    found, low_gradient = WAYS[way](lambda: step(low, tfamp.autocast(dtype)))()
    assert found.dtype == tf.float32
    assert error(found, expected) < 1e-6
    assert error(tf.cast(low_gradient, tf.float32), gradient) < float_format(dtype).eps


FOLDS = {
    "foldl": lambda x: tf.foldl(tf.add, x),
    "foldr": lambda x: tf.foldr(tf.add, x),
    "scan": lambda x: tf.scan(tf.add, x)[-1],
    "scan of a low start": lambda x: tf.scan(tf.add, x, tf.zeros_like(x[0]))[-1],
    "foldl of a pair": lambda x: tf.foldl(lambda a, b: (a[0] + b[0], a[1] + b[1]), (x, x))[1],
    "lambda of a product": lambda x: tf.foldl(lambda a, b: a + tf.tensordot(b, EYE, 1), x),
}
EYE = tf.eye(2)


@pytest.mark.parametrize("way", [*WAYS, "compiled"])
@pytest.mark.parametrize("dtype", first_of(reversed(DTYPES)))
@pytest.mark.parametrize("name", FOLDS)
def test_what_a_fold_or_a_scan_collects_is_float32(name, dtype, way):
    low = tf.cast(tf.random.stateless_uniform((1000, 2), [1, 2], 0.5, 1.5), dtype)

    def step():
        with tf.GradientTape() as tape:
            tape.watch(low)
            with tfamp.autocast(dtype):
                total = FOLDS[name](low)
        return total, tape.gradient(total, low)

    ways = {**WAYS, "compiled": tf.function(jit_compile=True)}
    found, gradient = ways[way](step)()
    assert found.dtype == tf.float32
    assert error(found, tf.reduce_sum(tf.cast(low, tf.float32), 0)) < 1e-5
    np.testing.assert_array_equal(tf.cast(gradient, tf.float32), np.ones((1000, 2)))


def test_a_fold_of_values_that_a_user_has_cast_stays_low():
    with tfamp.autocast("bfloat16"):
        start = tf.cast(tf.zeros(2), tf.bfloat16)
        assert tf.foldl(tf.add, tf.ones((3, 2), tf.bfloat16), start).dtype == tf.bfloat16
