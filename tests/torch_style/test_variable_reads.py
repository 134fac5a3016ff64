"""Variables of layers under autocast: float32 by themselves, and low beside low tensors."""

import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp
from helpers.cases import first_of

DTYPES = first_of(["bfloat16", "float16"])
EPS = {"bfloat16": 2.0**-7, "float16": 2.0**-10}
RUNS = {
    "eager": lambda f: f,
    "function": tf.function,
    "compiled": lambda f: tf.function(f, jit_compile=True),
}
GAMMA = np.float32([1.001, 0.3333, 2.718, -0.7])
X = tf.constant(np.random.default_rng(0).normal(size=(3, 4)), tf.float32)
both_dtypes = pytest.mark.parametrize("dtype", DTYPES)
in_every_run = pytest.mark.parametrize("run", RUNS)


class Computed(keras.layers.Layer):
    """Returns what a function of its variable and its input does."""

    def __init__(self, function):
        super().__init__()
        self.function = function
        self.gamma = self.add_weight(
            shape=GAMMA.shape, initializer=lambda shape, dtype: tf.constant(GAMMA, dtype)
        )

    def call(self, x):
        return self.function(self.gamma, x)


def results(function, x, dtype, run="eager"):
    """Returns the results of a function in a layer, in float32 and under autocast."""
    layer = Computed(function)

    def inside(x):
        with tfamp.autocast(dtype):
            return layer(x)

    return layer(X), RUNS[run](inside)(x)


def low(dtype):
    """The input, cast outside of autocast: no op takes it for a cast by a user."""
    return tf.constant(tf.cast(X, dtype).numpy())


ALONE = {
    "read": lambda g, x: tf.convert_to_tensor(g),
    "numbers": lambda g, x: 0.999 * g + g / 3.0 - 1,
    "Keras": lambda g, x: keras.ops.square(g) - keras.ops.multiply(g, 0.25),
    "TensorFlow": lambda g, x: tf.nn.softplus(tf.reshape(tf.multiply(g, 0.7), (2, 2))),
    "arrays": lambda g, x: g * np.float32(0.999) + GAMMA,
    "joined": lambda g, x: tf.concat([tf.stack([0.5 * g, 2.0 * g]), tf.reshape(g, (1, 4))], 0),
    "moments": lambda g, x: tf.reduce_mean(tf.math.squared_difference(g, 0.5)),
}


@both_dtypes
@in_every_run
@pytest.mark.parametrize("name", ALONE)
def test_what_a_layer_computes_of_its_variables_alone_is_float32s(name, run, dtype):
    target = tf.Variable(tf.zeros_like(ALONE[name](tf.constant(GAMMA), X)))

    def stored(gamma, x):
        target.assign(ALONE[name](gamma, x))
        return x

    Computed(stored)(X)
    expected = target.numpy()
    target.assign(tf.zeros_like(target))
    results(stored, low(dtype), dtype, run)
    # Compilers fuse a multiplication with an addition.
    np.testing.assert_allclose(target.numpy(), expected, rtol=1e-6, atol=1e-6)


BESIDE = {
    "scaled": lambda g, x: x * (1 + g) / 2.0,
    "the other way": lambda g, x: (g - 0.5) * x,
    "added": lambda g, x: tf.reshape(g * 0.5, (1, 4)) + x,
    "by Keras": lambda g, x: keras.ops.add(x, keras.ops.expand_dims(g, 0)),
    "joined": lambda g, x: tf.concat([tf.reshape(g, (1, 4)), x], 0),
    "stacked": lambda g, x: tf.stack([g * 0.5, x[0]]),
    "chosen": lambda g, x: tf.where(x > g, x, g),
    "divided": lambda g, x: tf.math.divide_no_nan(x, tf.convert_to_tensor(g)),
    "dividing": lambda g, x: tf.math.divide_no_nan(tf.convert_to_tensor(g), x + 4.0),
    "multiplied": lambda g, x: tf.matmul(x, tf.reshape(g + 1, (4, 1))),
    "in a condition": lambda g, x: tf.cond(x[0, 0] > -9.0, lambda: x * g, lambda: x - g),
    "in a function": lambda g, x: tf.function(lambda y: y * g)(x),
}


@both_dtypes
@in_every_run
@pytest.mark.parametrize("name", BESIDE)
def test_an_op_on_low_tensors_takes_variables_low(name, run, dtype):
    expected, found = results(BESIDE[name], low(dtype), dtype, run)
    assert found.dtype == tf.as_dtype(dtype)
    np.testing.assert_allclose(tf.cast(found, "float32"), expected, rtol=0, atol=12 * EPS[dtype])


@both_dtypes
@in_every_run
def test_an_op_on_float32_tensors_takes_variables_as_they_are(run, dtype):
    expected, found = results(lambda g, x: x * (1 + g) + tf.reduce_sum(g), X, dtype, run)
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)
    assert found.dtype == tf.float32


@both_dtypes
@in_every_run
def test_an_average_in_a_layer_has_the_value_of_float32(run, dtype):
    def averaged(gamma, x):
        gamma.assign(0.999 * gamma + 0.001 * 2.0)
        return x * gamma

    layers = Computed(averaged), Computed(averaged)

    def inside(x):
        with tfamp.autocast(dtype):
            return layers[1](x)

    step, x = RUNS[run](inside), low(dtype)
    for _ in range(20):
        layers[0](X)
        assert step(x).dtype == tf.as_dtype(dtype)
    np.testing.assert_allclose(layers[1].gamma.numpy(), layers[0].gamma.numpy(), rtol=1e-6)


@both_dtypes
@in_every_run
def test_rows_of_an_embedding_are_float32s(run, dtype):
    layer, ids = keras.layers.Embedding(50, 4), tf.constant([[1, 2], [3, 49]])
    expected = layer(ids)

    def inside(ids):
        with tf.GradientTape() as tape, tfamp.autocast(dtype):
            rows = layer(ids)
            loss = tf.reduce_sum(rows * rows)
        return rows, tf.convert_to_tensor(tape.gradient(loss, layer.embeddings.value))

    rows, gradient = RUNS[run](inside)(ids)
    np.testing.assert_array_equal(rows, expected)
    np.testing.assert_allclose(tf.gather(gradient, ids), 2 * expected, rtol=1e-6)


@both_dtypes
@pytest.mark.parametrize("run", ["eager", "function"])
def test_an_island_in_a_layer_reads_its_variables_in_float32(run, dtype):
    def inside(gamma, x):
        with tfamp.autocast(enabled=False):
            return tf.linalg.matvec(tf.cast(x, tf.float32), gamma)

    expected, found = results(inside, X, dtype, run)
    np.testing.assert_allclose(found, expected, rtol=1e-6)


@both_dtypes
@pytest.mark.parametrize("run", ["eager", "function"])
def test_a_rematerialized_layer_reads_its_variables_as_in_the_forward_pass(run, dtype):
    def gradients(dtype, x, run):
        with keras.RematScope(mode="full"):
            layer = Computed(lambda g, x: x * (1 + g))

        def inside(x):
            with tf.GradientTape() as tape:
                with tfamp.autocast(dtype, enabled=dtype != "float32"):
                    y = layer(x)
                loss = tf.reduce_sum(tf.cast(y, tf.float32) ** 2)
            return y, tape.gradient(loss, layer.gamma.value)

        return run(inside)(x)

    _, expected = gradients("float32", X, RUNS["eager"])
    y, found = gradients(dtype, low(dtype), RUNS[run])
    assert y.dtype == tf.as_dtype(dtype)
    np.testing.assert_allclose(found, expected, rtol=4 * EPS[dtype], atol=0.05)


@both_dtypes
def test_a_weight_that_two_products_of_a_layer_use_is_cast_once(dtype):
    layer = Computed(lambda g, x: x @ tf.reshape(g, (4, 1)) - tf.linalg.matvec(x, g))
    twice = Computed(lambda g, x: tf.linalg.matvec(x, g) + tf.linalg.matvec(2.0 * x, g))

    def casts(layer):
        @tf.function(autograph=False)
        def run(x):
            with tfamp.autocast(dtype):
                return layer(x)

        ops = run.get_concrete_function(low(dtype)).graph.get_operations()
        return sum(op.type == "Cast" for op in ops)

    assert casts(layer) == 2
    assert casts(twice) >= 1


@both_dtypes
@in_every_run
def test_tf_variables_are_float32_also_beside_low_tensors(run, dtype):
    v = tf.Variable(GAMMA)

    def inside(x):
        with tfamp.autocast(dtype):
            return v * 0.999, x * v

    alone, beside = RUNS[run](inside)(low(dtype))
    np.testing.assert_allclose(alone, GAMMA * np.float32(0.999), rtol=1e-6)
    np.testing.assert_allclose(beside, tf.cast(low(dtype), tf.float32) * GAMMA, rtol=1e-6)


def test_state_of_a_call_that_only_eager_mode_runs_is_exact_without_a_warning():
    def counted(gamma, x):
        if float(tf.reduce_sum(x)) != 0:
            gamma.assign(gamma + 2.0**-12)
        return x

    layer = Computed(counted)
    with warnings.catch_warnings(), tfamp.autocast("bfloat16"):
        warnings.simplefilter("error", tfamp.TfampWarning)
        for _ in range(4):
            layer(X)
    np.testing.assert_allclose(layer.gamma.numpy(), GAMMA + 2.0**-10, rtol=1e-7)
