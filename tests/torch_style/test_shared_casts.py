"""Casts that several uses of a weight share under autocast, and numbers that a low dtype loses."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp
from helpers.cases import first_of

DTYPES = first_of(["bfloat16", "float16"])
EPS = {"bfloat16": 2.0**-7, "float16": 2.0**-10}
RANDOM = np.random.default_rng(0)
X = tf.constant(RANDOM.normal(size=(8, 16)), tf.float32)


def gradient_of(forward, weights, dtype=None, **options):
    @tf.function(autograph=False)
    def run():
        with tf.GradientTape() as tape:
            if dtype is None:
                y = forward(X)
            else:
                with tfamp.autocast(dtype, **options):
                    y = forward(X)
            loss = tf.reduce_sum(tf.cast(y, tf.float32))
        return tape.gradient(loss, weights)

    return [each.numpy() for each in run()]


def variable_used_twice():
    weight = tf.Variable(RANDOM.normal(size=(16, 16)) / 4, dtype=tf.float32)
    block = tf.recompute_grad(lambda x: tf.tanh(x @ weight))
    return (lambda x: block(x) + x @ weight), [weight]


def layer_used_twice():
    layer = keras.layers.Dense(16)
    layer.build((None, 16))
    block = tf.recompute_grad(lambda x: tf.tanh(layer(x)))
    return (lambda x: block(x) + layer(x)), [each.value for each in layer.trainable_variables]


def plain_before_recomputed():
    weight = tf.Variable(RANDOM.normal(size=(16, 16)) / 4, dtype=tf.float32)
    block = tf.recompute_grad(lambda x: tf.tanh(x @ weight))
    return (lambda x: x @ weight + block(x) + 2.0 * (x @ weight)), [weight]


def without_recording():
    weight = tf.Variable(RANDOM.normal(size=(16, 16)) / 4, dtype=tf.float32)

    def forward(x):
        with tf.GradientTape() as tape, tape.stop_recording():
            shift = tf.reduce_mean(x @ weight)
        return x @ weight - 0.25 * shift

    return forward, [weight]


MODELS = [variable_used_twice, layer_used_twice, plain_before_recomputed, without_recording]


@pytest.mark.parametrize("cache_casts", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("make", MODELS)
def test_a_weight_of_a_recomputed_block_keeps_all_of_its_gradient(make, dtype, cache_casts):
    forward, weights = make()
    found = gradient_of(forward, weights, dtype, cache_casts=cache_casts)
    for gradient, wanted in zip(found, gradient_of(forward, weights), strict=True):
        assert np.linalg.norm(gradient - wanted) < 4 * EPS[dtype] * np.linalg.norm(wanted)


@pytest.mark.parametrize("dtype", DTYPES)
def test_without_a_pause_a_weight_is_cast_once(dtype):
    weight = tf.Variable(RANDOM.normal(size=(16, 16)) / 4, dtype=tf.float32)

    @tf.function(autograph=False)
    def run(x):
        with tf.GradientTape() as tape, tfamp.autocast(dtype):
            y = (x @ weight) @ weight
            loss = tf.reduce_sum(y)
        return tape.gradient(loss, weight)

    ops = run.get_concrete_function(X).graph.get_operations()
    reads = {op.outputs[0].name for op in ops if op.type == "ReadVariableOp"}
    assert sum(op.type == "Cast" and op.inputs[0].name in reads for op in ops) == 1


@pytest.mark.parametrize("in_graph", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_numbers_that_become_zero_or_one_keep_their_meaning(dtype, in_graph):
    x = tf.Variable(tf.constant([[0.0, 1.0, -1.0, 0.5]]))

    def losses():
        with tfamp.autocast(dtype):
            low = x @ tf.eye(4)
            cosine = tf.clip_by_value(low, -1 + 1e-6, 1 - 1e-6)
            return tf.acos(cosine), tf.math.log(tf.nn.relu(low) + 1e-15)

    def gradients():
        with tf.GradientTape() as tape:
            angle, entropy = losses()
            loss = tf.reduce_sum(tf.cast(angle, tf.float32))
        return angle, entropy, tape.gradient(loss, x)

    angle, entropy, gradient = tf.function(gradients)() if in_graph else gradients()
    np.testing.assert_allclose(angle[0], np.arccos([0, 1 - 1e-6, 1e-6 - 1, 0.5]), atol=2e-3)
    np.testing.assert_allclose(entropy[0, 0], np.log(1e-15), rtol=1e-3)
    assert np.isfinite(gradient).all()
