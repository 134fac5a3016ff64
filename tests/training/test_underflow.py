"""The warning of float16 gradients that underflow because no loss scale multiplies the loss."""

import contextlib
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp
from tfamp.interop.patching import locate
from tfamp.training import underflow

ZERO = (
    "gradients that sgd was given in its first steps are exactly zero.*"
    "LossScaleOptimizer.*GradScaler.*bfloat16"
)


@pytest.fixture(autouse=True)
def _nothing_was_watched():
    underflow._counts.clear()
    yield
    underflow.watch("next steps", wanted=False)


def autocast_step(dtype, factor, scale=1.0, optimizer=None):
    """A step of a relu network whose gradients are about `factor`, and its weights."""
    random = np.random.default_rng(0)
    weights = [
        keras.Variable(np.float32(random.normal(size=shape) / 4)) for shape in ((16, 16), (16, 16))
    ]
    x = tf.constant(random.normal(size=(1, 16)), tf.float32)
    optimizer = optimizer or keras.optimizers.SGD(2.0**-10, name="sgd")
    optimizer.build(weights)

    def step():
        with tf.GradientTape() as tape:
            with tfamp.autocast(dtype):
                y = tf.nn.relu(x @ weights[0].value) @ weights[1].value
            loss = tf.reduce_sum(tf.cast(y, tf.float32)) * (factor * scale)
        gradients = tape.gradient(loss, [w.value for w in weights])
        optimizer.apply([g / scale for g in gradients], weights)
        return gradients

    return step, weights


def run(step, traced, count=5):
    step = tf.function(step) if traced else step
    for _ in range(count):
        gradients = step()
    return gradients


@contextlib.contextmanager
def no_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error", tfamp.TfampWarning)
        yield


@pytest.mark.parametrize("factor", [2.0**-27, 2.0**-40], ids=["most", "all"])
def test_underflow_is_warned_of_once(factor):
    step, _ = autocast_step("float16", factor)
    with pytest.warns(tfamp.TfampWarning, match=ZERO) as caught:
        gradients = run(step, traced=False)
    assert sum("exactly zero" in str(each.message) for each in caught) == 1
    zeros = np.mean([np.mean(g.numpy() == 0.0) for g in gradients])
    assert zeros > 0.5
    with no_warning():
        run(step, traced=False)


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize(
    ("dtype", "factor", "scale"),
    [("float16", 1.0, 1.0), ("float16", 2.0**-40, 2.0**40), ("bfloat16", 2.0**-40, 1.0)],
    ids=["large", "scaled by hand", "bfloat16"],
)
def test_zeros_of_a_relu_and_small_gradients_that_are_right_are_not(traced, dtype, factor, scale):
    step, weights = autocast_step(dtype, factor, scale)
    before = [w.numpy() for w in weights]
    with no_warning():
        gradients = run(step, traced)
    assert np.mean(gradients[0].numpy() == 0.0) > 0.1, "relu"
    assert any((w.numpy() != b).any() for w, b in zip(weights, before, strict=True)) or factor < 1


def test_scaled_optimizers_are_not():
    inner = keras.optimizers.RMSprop(0.1)  # Applied by Keras.
    optimizer = tfamp.LossScaleOptimizer(inner)
    weight = keras.Variable(np.ones(4))
    with no_warning(), tfamp.autocast("float16"):
        for _ in range(5):
            optimizer.apply([optimizer.get_scaled_loss(tf.zeros(4))], [weight])
    scaler = tfamp.GradScaler()
    with no_warning(), tfamp.autocast("float16"):
        for _ in range(5):
            scaler.step(keras.optimizers.RMSprop(0.1), [(scaler.scale(tf.zeros(4)), weight)])
            scaler.update()


def test_a_bare_optimizer_under_a_policy():
    with tfamp.policy_scope("mixed_float16"):
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(32), keras.layers.Dense(1)])
        optimizer = keras.optimizers.SGD(name="sgd")
        optimizer.build(model.trainable_variables)
        x = tf.constant(np.random.default_rng(0).normal(size=(4, 8)), tf.float32)

        def step():
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(model(x)) * 2.0**-32
            sources = [v.value for v in model.trainable_variables]
            optimizer.apply(tape.gradient(loss, sources), model.trainable_variables)

        with pytest.warns(tfamp.TfampWarning, match=ZERO):
            run(step, traced=False)


def test_a_rewritten_loss():
    weight = keras.Variable(np.float32(np.random.default_rng(0).normal(size=(16, 16))))
    optimizer = keras.optimizers.SGD(name="sgd")
    optimizer.build([weight])

    @tfamp.rewrite(dtype="float16", placement="lists")
    def loss(x):
        return tf.reduce_sum(tf.cast(x @ weight.value, tf.float32)) * 2.0**-40

    def step():
        with tf.GradientTape() as tape:
            value = loss(tf.ones((2, 16)))
        gradients = tape.gradient(value, [weight.value])
        optimizer.apply(gradients, [weight])
        return gradients

    with pytest.warns(tfamp.TfampWarning, match=ZERO):
        (gradient,) = run(step, traced=False)
    assert not gradient.numpy().any()


def test_nothing_is_watched_after_the_first_steps():
    owner, name = locate("keras.src.optimizers.base_optimizer:BaseOptimizer.apply")
    original = getattr(owner, name)
    step, _ = autocast_step("float16", 1.0)
    run(step, traced=False, count=1)
    assert getattr(owner, name) is not original
    run(step, traced=False)
    assert getattr(owner, name) is original
