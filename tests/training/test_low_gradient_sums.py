"""`gradient_accumulation_steps` of an inner optimizer whose variables are stored in 16 bits."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp
from helpers.tolerances import assert_close

RANDOM = np.random.default_rng(0)


def several(inner):
    return keras.optimizers.MultiOptimizer(keras.optimizers.OptimizerMap(inner))


def sgd(steps, **arguments):
    return keras.optimizers.SGD(1.0, gradient_accumulation_steps=steps, **arguments)


def wrapped(inner):
    return tfamp.LossScaleOptimizer(inner, loss_scale=1.0, master_weights=False)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("make", [sgd, lambda steps: several(sgd(steps))], ids=["one", "several"])
def test_a_thousand_gradients_count_in_full(dtype, make):
    # A bfloat16 sum of ones stops at 256, a float16 one of a weight of 3 at 6144: -0.25, -1.5.
    steps = 1024 if dtype == "bfloat16" else 4096
    gradients = tf.constant([1.0, 3.0], dtype)
    weight = keras.Variable(np.zeros(2), dtype=dtype)
    optimizer = wrapped(make(steps))

    @tf.function
    def run():
        for _ in tf.range(steps):
            optimizer.apply([gradients], [weight])

    optimizer.build([weight])
    run()
    np.testing.assert_array_equal(np.float32(weight.numpy()), [-1.0, -3.0])


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("kind", [keras.Variable, tf.Variable])
def test_updates_are_those_of_float32_sums(kind, traced):
    values = np.float32(RANDOM.normal(size=(32, 5)))
    values = tf.cast(tf.cast(values, "bfloat16"), "float32").numpy()
    low = kind(np.zeros(5), dtype="bfloat16")
    wide, bare = keras.Variable(np.zeros(5), dtype="float32"), sgd(16, clipvalue=0.125)
    optimizer = wrapped(sgd(16, clipvalue=0.125))
    optimizer.build([low])

    def step(gradient):
        optimizer.apply([tf.cast(gradient, "bfloat16")], [low])

    step = tf.function(step) if traced else step
    for value in values:
        step(tf.constant(value))
        bare.apply([tf.constant(value)], [wide])
    assert low.dtype in ("bfloat16", tf.bfloat16)
    assert_close(np.float32(low.numpy()), wide.numpy(), "bfloat16")


def test_an_optimizer_that_was_built_with_low_sums_says_so():
    weight, inner = keras.Variable([0.0], dtype="bfloat16"), sgd(2)
    inner.build([weight])
    optimizer = wrapped(inner)
    with pytest.warns(tfamp.TfampWarning, match="sums the gradients of 1 variables.*in bfloat16"):
        optimizer.apply([tf.constant([1.0])], [weight])
    optimizer.apply([tf.constant([3.0])], [weight])  # Warned of once.
    assert np.float32(weight.numpy()) == [-2.0]


def test_a_window_goes_on_from_a_checkpoint(tmp_path):
    def make():
        weight = keras.Variable([0.0], dtype="bfloat16")
        optimizer = wrapped(sgd(600))
        optimizer.build([weight])

        @tf.function
        def run(count):
            for _ in tf.range(count):
                optimizer.apply([tf.constant([1.0])], [weight])

        return run, weight, tf.train.Checkpoint(optimizer=optimizer)

    run, _, checkpoint = make()
    run(tf.constant(500))
    path = checkpoint.save(str(tmp_path / "state"))
    run, weight, checkpoint = make()
    checkpoint.restore(path).assert_consumed()
    run(tf.constant(100))
    assert np.float32(weight.numpy()) == [-1.0]
