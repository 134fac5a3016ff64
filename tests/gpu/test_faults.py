"""Steps whose gradients overflow, and values between 65,504 and 65,536."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp
from helpers import acceptance_models as models
from helpers.cases import first_of

pytestmark = pytest.mark.gpu
JIT = pytest.mark.parametrize("jit", [False, True], ids=["jit off", "jit on"])


def same(actual, expected):
    return all(np.array_equal(a, b) for a, b in zip(actual, expected, strict=True))


def record(check, before, after, moved, scales):
    check("state that a skipped step changed", not same(after, before), equals=False)
    check("the scale after it, to that before", scales[1] / scales[0], equals=0.5)
    check("a good step afterwards trains", not same(moved, after), equals=True)


@JIT
@pytest.mark.parametrize("way", first_of(["policy", "scaler"], pytest.mark.long))
def test_loop(device, check, way, jit):
    """inf in a custom loop: the state stays bit for bit, the scale is halved."""
    with tf.device(device.name):
        x, y = models.digits(32)
        x, y = tf.reshape(tf.constant(x), (32, 64)), tf.constant(y)
        with tfamp.policy_scope("mixed_float16" if way == "policy" else "float32"):
            model, inner = models.mlp(device.size(512, 32)), keras.optimizers.Adam(1e-3)
        scaling = tfamp.GradScaler(init_scale=2.0**12)
        step = models.scaler_step(model, inner, scaling)
        if way == "policy":
            scaling = tfamp.LossScaleOptimizer(inner, initial_scale=2.0**12)
            step = models.plain_step(model, scaling)
        inner.build(model.trainable_variables)
        step = tf.function(step, jit_compile=jit, autograph=False)
        step(x, y)
        before, scale = models.values(model, inner), float(scaling.get_scale())
        step(x * np.float32(np.inf), y)
        after, halved = models.values(model, inner), float(scaling.get_scale())
        step(x, y)
    record(check, before, after, models.values(model, inner), (scale, halved))


@pytest.mark.long
@JIT
def test_fit(device, check, jit):
    """inf in fit: the state stays bit for bit, the scale is halved."""
    x, y = models.digits(32)
    x = x.reshape(32, 64)
    with tf.device(device.name), tfamp.policy_scope("mixed_float16"):
        model = models.mlp(device.size(512, 32))
    optimizer = tfamp.LossScaleOptimizer(keras.optimizers.Adam(1e-3), initial_scale=2.0**12)
    model.compile(optimizer, models.loss_of, jit_compile=jit)
    owners = model, optimizer.inner_optimizer
    options = {"batch_size": 32, "verbose": 0, "shuffle": False}
    model.fit(x, y, **options)
    before, scale = models.values(*owners), float(optimizer.loss_scale)
    model.fit(np.full_like(x, np.inf), y, **options)
    after, halved = models.values(*owners), float(optimizer.loss_scale)
    model.fit(x, y, **options)
    record(check, before, after, models.values(*owners), (scale, halved))


@JIT
@pytest.mark.parametrize("placement", ["lists", "fused"])
def test_rounded_to_inf(device, check, placement, jit):
    """A product that float16 rounds to inf is inf for every op that takes it, or for none."""

    @tfamp.rewrite(dtype="float16", placement=placement, force_low=["."])
    def product(x, y):
        x, y = x @ tf.eye(64), y @ tf.eye(64)
        both = tf.nn.relu(x * y) + x - tf.abs(x)
        return both @ tf.eye(64), tf.reduce_all(tf.math.is_finite(both))

    call = tf.function(lambda *args: product(*args), jit_compile=True) if jit else product
    with tf.device(device.name):
        for x, y in ((362.0, 180.0), (362.0, 181.0)):  # 65,160 and 65,522.
            result, finite = call(tf.fill((512, 64), x), tf.fill((512, 64), y))
            found = bool(np.isfinite(result).all())
            check(f"{x * y:,.0f} is finite in the result", found)
            check(f"{x * y:,.0f} is finite inside", bool(finite), equals=found)
