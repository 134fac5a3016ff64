"""The pure functions on gradients, by themselves."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfamp.training import gradients


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("exponent", [-20, 0, 15])
def test_unscaling_by_a_power_of_two_is_exact(dtype, exponent):
    gradient = tf.constant([1.5, -3.0, 0.0], dtype)
    unscaled = gradients.unscale(gradient, tf.constant(2.0**exponent))
    assert unscaled.dtype.name == ("float64" if dtype == "float64" else "float32")
    np.testing.assert_array_equal(unscaled, np.float64([1.5, -3.0, 0.0]) / 2.0**exponent)


def test_float16_gradients_do_not_underflow_when_unscaled():
    smallest = tf.constant([2.0**-24], "float16")
    assert float(gradients.unscale(smallest, tf.constant(2.0**15))[0]) == 2.0**-39


def test_sparse_gradients_stay_sparse():
    sparse = tf.IndexedSlices(tf.constant([[8.0]]), tf.constant([3]), tf.constant([9, 1]))
    unscaled = gradients.unscale(sparse, tf.constant(4.0))
    assert isinstance(unscaled, tf.IndexedSlices)
    assert (unscaled.indices is sparse.indices, float(unscaled.values[0, 0])) == (True, 2.0)


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_all_finite(bad, dtype):
    good = tf.ones(5, dtype)
    assert bool(gradients.all_finite([good, None]))
    assert not bool(gradients.all_finite([good, None, tf.constant([0.0, bad], dtype)]))
    assert not bool(gradients.all_finite([tf.IndexedSlices(tf.constant([bad], dtype), [0])]))


def test_nothing_is_finite():
    assert bool(gradients.all_finite([]))
    assert bool(gradients.all_finite([None]))


def test_finite_means_finite_in_the_variable():
    variable = keras.Variable([0.0], dtype="float16")
    assert not bool(gradients.all_finite([tf.constant([1e5])], [variable]))
    assert bool(gradients.all_finite([tf.constant([1e4])], [variable]))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_scaling_keeps_the_gradient_path(dtype):
    x = tf.constant(3.0, dtype)
    with tf.GradientTape() as tape:
        tape.watch(x)
        scaled = gradients.scaled_loss(x * x, tf.constant(2.0**4))
    assert scaled.dtype == tf.float32
    assert float(tape.gradient(scaled, x)) == 6.0 * 2**4


def test_float64_losses_stay_float64():
    assert gradients.scaled_loss(tf.constant(1.0, "float64"), tf.constant(2.0)).dtype == tf.float64
