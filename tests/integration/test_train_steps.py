"""Models with a `train_step` of their own under `fit`, as docs/guides/train_step.md shows them."""

import functools
import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfamp
from helpers.cases import tiers
from helpers.graph_asserts import op_dtypes

sklearn = pytest.importorskip("sklearn.datasets")
DIGITS, LABELS = sklearn.load_digits(return_X_y=True)
X = (DIGITS[:256] / 16).astype("float32")
Y = LABELS[:256].astype("int32")
LOGITS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
IS_REAL = keras.losses.BinaryCrossentropy(from_logits=True)


def dense(units, inputs, outputs, **first):
    hidden = [layers.Dense(units, activation="relu", **first), layers.Dense(units, "relu")]
    return keras.Sequential([keras.Input((inputs,)), *hidden, layers.Dense(outputs)])


def apply(optimizer, tape, scaled, variables):
    optimizer.apply_gradients(zip(tape.gradient(scaled, variables), variables, strict=True))


class OneOptimizer(keras.Model):
    """A classifier whose step is written out."""

    def __init__(self):
        super().__init__()
        self.net = dense(64, 64, 10)

    def call(self, x):
        return self.net(x)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = LOGITS(y, self(x, training=True))
            scaled = self.optimizer.scale_loss(loss)
        apply(self.optimizer, tape, scaled, self.trainable_variables)
        return {"loss": loss}


class Averaged(OneOptimizer):
    """One that keeps a moving average of its weights in a copy."""

    def __init__(self):
        super().__init__()
        self.average = keras.models.clone_model(self.net)
        self.average.set_weights(self.net.get_weights())
        self.average.trainable = False

    def train_step(self, data):
        logs = super().train_step(data)
        for mean, weight in zip(self.average.variables, self.net.variables, strict=True):
            mean.assign(0.9 * mean + 0.1 * weight)
        return logs


class Penalized(OneOptimizer):
    """One with a penalty on the gradient of its loss by the images."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            with tf.GradientTape() as inner:
                inner.watch(x)
                loss = LOGITS(y, self(x, training=True))
            slope = inner.gradient(loss, x) * tf.cast(tf.shape(x)[0], x.dtype)
            loss += tf.reduce_mean(tf.reduce_sum(tf.square(slope), axis=1))
            scaled = self.optimizer.scale_loss(loss)
        apply(self.optimizer, tape, scaled, self.trainable_variables)
        return {"loss": loss}


class GAN(keras.Model):
    """A generator and a discriminator, each with an optimizer."""

    def __init__(self):
        super().__init__()
        self.generator, self.discriminator = dense(32, 16, 64), dense(32, 64, 1)

    def compile(self, d_optimizer, g_optimizer):
        super().compile()
        self.d_optimizer, self.g_optimizer = d_optimizer, g_optimizer

    def call(self, noise):
        return self.generator(noise)

    def train_step(self, data):
        real, _ = data
        count = tf.shape(real)[0]
        noise = tf.random.stateless_normal((count, 16), (1, 2))
        is_real = tf.concat([tf.ones((count, 1)), tf.zeros((count, 1))], axis=0)
        with tf.GradientTape() as tape:
            both = tf.concat([real, self.generator(noise, training=True)], axis=0)
            loss = IS_REAL(is_real, self.discriminator(both, training=True))
            scaled = self.d_optimizer.scale_loss(loss)
        apply(self.d_optimizer, tape, scaled, self.discriminator.trainable_variables)
        with tf.GradientTape() as tape:
            judged = self.discriminator(self.generator(noise, training=True), training=True)
            g_loss = IS_REAL(tf.ones((count, 1)), judged)
            scaled = self.g_optimizer.scale_loss(g_loss)
        apply(self.g_optimizer, tape, scaled, self.generator.trainable_variables)
        return {"loss": loss, "g_loss": g_loss}


def optimizers(program, low):
    """An optimizer for each that a program takes, wrapped where the program computes low."""
    made = [keras.optimizers.Adam(1e-3) for _ in range(2 if program is GAN else 1)]
    return [tfamp.LossScaleOptimizer(each) for each in made] if low else made


def trained(program, way, dtype):
    keras.utils.set_random_seed(0)
    before = keras.config.dtype_policy()
    if way == "policy":
        tfamp.set_global_policy(f"mixed_{dtype}")
    try:
        model = program()
    finally:
        keras.config.set_dtype_policy(before)
    model.compile(*optimizers(program, way in ("policy", "rewrite")))
    if way == "rewrite":
        model.train_step = tfamp.rewrite(model.train_step, dtype=dtype, placement="lists")
    if way == "O1":
        tfamp.prepare(model, level="O1", dtype=dtype)
    history = model.fit(X, Y, batch_size=32, epochs=3, shuffle=False, verbose=0).history
    return model, {name: values[-1] for name, values in history.items()}


@functools.cache
def exact(program):
    return trained(program, "float32", None)[1]


@pytest.mark.parametrize(
    ("way", "program"),
    tiers(
        [("O1", OneOptimizer)],
        [("O1", GAN), ("O1", Penalized), ("O1", Averaged), ("rewrite", GAN)],
        [
            *itertools.product(["rewrite"], [Penalized, OneOptimizer, Averaged]),
            *itertools.product(["policy"], [GAN, Penalized, OneOptimizer, Averaged]),
        ],
    ),
)
def test_a_step_computes_low_and_learns_what_float32_learns(program, way):
    dtype = "float16" if way == "policy" else "bfloat16"
    model, losses = trained(program, way, dtype)
    batch = (tf.constant(X[:32]), tf.constant(Y[:32]))
    assert dtype in op_dtypes(lambda: model.train_step(batch))["MatMul"]
    for name, loss in losses.items():
        np.testing.assert_allclose(loss, exact(program)[name], rtol=0.05)
    assert all(np.isfinite(weight).all() for weight in model.get_weights())
    if program is Averaged:
        pairs = zip(model.average.get_weights(), model.net.get_weights(), strict=True)
        assert 0 < max(np.max(np.abs(mean - weight)) for mean, weight in pairs) < 0.1
