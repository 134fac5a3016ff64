"""Losses scaled, gradients unscaled and checked: dtypes, exactness, sparse gradients."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp
from helpers.cases import first_of
from helpers.graph_asserts import op_numbers

LOW_SHAPES = [(), (1,), (13,), (17, 3), (3, 3, 5, 9), (64, 2), (1, 40)]


def unscaled(gradient, scale):
    optimizer = tfamp.LossScaleOptimizer(keras.optimizers.SGD(), loss_scale=scale)
    return optimizer.get_unscaled_gradients([gradient])[0]


def is_finite(*gradients):
    """Whether a `GradScaler` finds the gradients finite, which it shows by its next scale."""
    scaler = tfamp.GradScaler(init_scale=1.0, growth_interval=1)
    scaler.unscale(keras.optimizers.SGD(), gradients)
    scaler.update()
    return {2.0: True, 0.5: False}[float(scaler.get_scale())]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("exponent", [-20, 0, 15])
def test_unscaling_by_a_power_of_two_is_exact_and_does_not_underflow(dtype, exponent):
    values = [1.5, -3.0, 0.0, 2.0**-24]
    result = unscaled(tf.constant(values, dtype), 2.0**exponent)
    assert result.dtype.name == ("float64" if dtype == "float64" else "float32")
    np.testing.assert_array_equal(result, np.float64(values) / 2.0**exponent)


@pytest.mark.parametrize("bad", first_of([np.inf, -np.inf, np.nan]))
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_all_finite(bad, dtype):
    good = tf.ones(5, dtype)
    assert is_finite()
    assert is_finite(good, None)
    assert not is_finite(good, None, tf.constant([0.0, bad], dtype))
    assert not is_finite(tf.IndexedSlices(tf.constant([bad], dtype), [0]))


@pytest.mark.parametrize("dtype", first_of(["float16", "bfloat16"]))
def test_one_number_of_a_low_gradient_that_is_not_finite_is_found(dtype):
    weights = [keras.Variable(tf.zeros(shape), dtype=dtype) for shape in LOW_SHAPES]
    optimizer = tfamp.LossScaleOptimizer(
        keras.optimizers.SGD(0.0),
        initial_scale=1.0,
        min_scale=2.0**-9,
        weight_rounding="stochastic",
    )
    optimizer.build(weights)
    step = tf.function(lambda *grads: optimizer.apply(list(grads), weights, unscaled=True))
    largest = tf.dtypes.as_dtype(dtype).max
    good = [np.full(shape, largest, weights[0].dtype) for shape in LOW_SHAPES]
    good[3][5] = -0.0, -largest, np.float32(2.0**-130)
    # Each is checked as it is, without a float32 copy.
    assert "IsFinite" not in op_numbers(step, *map(tf.constant, good))
    step(*map(tf.constant, good))
    assert int(optimizer.skipped_steps) == 0
    tried = 0
    for which, shape in enumerate(LOW_SHAPES):
        for place in {0, np.prod(shape, dtype=int) // 2, np.prod(shape, dtype=int) - 1}:
            for bad in (np.inf, -np.inf, np.nan, -np.nan):
                grads = [each.copy() for each in good]
                grads[which].flat[place] = bad
                step(*map(tf.constant, grads))
                tried += 1
    assert int(optimizer.skipped_steps) == tried > 60


def test_a_low_gradient_that_overflows_when_unscaled_is_found():
    weights = [keras.Variable(tf.zeros((9, 2)), dtype=dtype) for dtype in ("float16", "bfloat16")]
    optimizer = tfamp.LossScaleOptimizer(
        keras.optimizers.SGD(0.0), initial_scale=2.0**-4, min_scale=2.0**-9, master_weights=False
    )
    optimizer.build(weights)
    step = tf.function(lambda *grads: optimizer.apply(list(grads), weights, unscaled=False))
    for value, finite in ((2.0**11, True), (2.0**12, False)):  # 2**16 is beyond float16.
        before = int(optimizer.skipped_steps)
        step(*(tf.fill((9, 2), tf.constant(value, weight.dtype)) for weight in weights))
        assert (int(optimizer.skipped_steps) == before) is finite


def test_low_gradients_given_as_unscaled_are_clipped_in_float32():
    gradient = tf.cast(np.random.default_rng(1).standard_normal((7, 5)), "bfloat16")
    ours, theirs = (keras.Variable(tf.zeros((7, 5)), dtype=d) for d in ("bfloat16", "float32"))
    optimizer = tfamp.LossScaleOptimizer(
        keras.optimizers.SGD(1.0, clipnorm=0.5), loss_scale=1.0, master_weights=True
    )
    optimizer.apply([gradient], [ours], unscaled=True)
    keras.optimizers.SGD(1.0, clipnorm=0.5).apply([tf.cast(gradient, "float32")], [theirs])
    (master,) = optimizer.master_variables
    np.testing.assert_allclose(master.numpy(), theirs.numpy(), rtol=1e-6)


@pytest.mark.parametrize(
    ("gradient", "masters", "finite"), [(1e5, False, False), (1e4, False, True), (1e5, None, True)]
)
def test_finite_means_finite_in_what_is_updated(gradient, masters, finite):
    optimizer = tfamp.LossScaleOptimizer(
        keras.optimizers.SGD(), loss_scale=1.0, master_weights=masters
    )
    variable = keras.Variable([0.0], dtype="float16")
    optimizer.apply_gradients([(tf.constant([gradient]), variable)], unscaled=True)
    assert bool(optimizer.last_step_finite) is finite
