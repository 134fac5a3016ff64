"""Losses of layers that compute low: float32 in `fit`, in loops and in every kind of model."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfamp
from helpers.cases import first_of, one_of_each
from helpers.tolerances import tolerance

KERAS_VERSION = tuple(int(part) for part in keras.__version__.split(".")[:2])
X = np.random.default_rng(0).standard_normal((16, 8)).astype("float32")
Y = X[:, :1]


class Adding(layers.Layer):
    """Adds a loss in the dtype it computes in."""

    def call(self, x):
        self.add_loss(keras.ops.mean(x) * 0.1)
        return x


class Subclassed(keras.Model):
    def __init__(self):
        super().__init__()
        self.hidden = layers.Dense(8, activity_regularizer="l2")
        self.adding = Adding()
        self.head = layers.Dense(1)

    def call(self, x):
        hidden = self.adding(self.hidden(x))
        self.add_loss([keras.ops.sum(hidden) * 0.01])
        return self.head(hidden)


def sequential():
    regularized = layers.Dense(8, activity_regularizer="l2", kernel_regularizer="l2")
    return keras.Sequential([keras.Input((8,)), regularized, Adding(), layers.Dense(1)])


def nested():
    inner = keras.Sequential(
        [keras.Input((8,)), layers.Dense(8, activity_regularizer="l1"), layers.Dense(8)]
    )
    inputs = keras.Input((8,))
    return keras.Model(inputs, layers.Dense(1)(Adding()(inner(inputs))))


def attention():
    """Hands its regularizer and its dtype down to layers that it makes."""
    inputs = keras.Input((8,))
    x = layers.Reshape((2, 4))(inputs)
    x = layers.MultiHeadAttention(2, 4, activity_regularizer="l2")(x, x)
    return keras.Model(inputs, layers.Dense(1)(layers.Flatten()(x)))


def beyond_float16():
    """The activations fit in float16; the sum of their squares is some 3e6."""
    wide = layers.Dense(
        8,
        kernel_initializer=keras.initializers.Constant(40.0),
        activity_regularizer=keras.regularizers.L2(1e-4),
    )
    return keras.Sequential([keras.Input((8,)), wide, layers.Dense(1)])


MODELS = {
    each.__name__: each for each in (sequential, nested, Subclassed, attention, beyond_float16)
}


def under_policy(make, dtype):
    with tfamp.policy_scope(f"mixed_{dtype}"):
        model = make()
    model(X)
    return model, "sgd"


def at_level(level):
    def prepared(make, dtype):
        model = make()
        model(X)
        return tfamp.prepare(model, keras.optimizers.SGD(), level=level, dtype=dtype)

    return prepared


WAYS = {"policy": under_policy, "O1": at_level("O1"), "O2": at_level("O2"), "O3": at_level("O3")}


@pytest.mark.parametrize("dtype", first_of(["float16", "bfloat16"], pytest.mark.nightly))
@pytest.mark.parametrize(("name", "way"), one_of_each(MODELS, WAYS, quick=1))
def test_losses_are_float32_and_those_of_float32(name, way, dtype):
    make = MODELS[name]
    keras.utils.set_random_seed(0)
    float32 = make()
    float32(X)
    model, optimizer = WAYS[way](make, dtype)
    if name == "nested" and way != "O1" and KERAS_VERSION < (3, 14):
        pytest.skip("L1 of this Keras multiplies a float32 constant with what is low, by itself")
    for old, new in zip(float32.weights, model.weights, strict=True):
        new.assign(keras.ops.cast(old, new.dtype))
    float32(X), model(X)
    expected = [float(loss) for loss in float32.losses]
    assert {loss.dtype.name for loss in model.losses} == {"float32"}
    found = [float(loss) for loss in model.losses]
    # A mean or a sum of both signs is held to the size of its terms.
    np.testing.assert_allclose(found, expected, rtol=tolerance(dtype, depth=8), atol=0.02)
    model.compile(optimizer, "mse")
    history = model.fit(X, Y, verbose=0).history
    assert np.isfinite(history["loss"]).all()


def test_in_a_custom_loop_they_have_gradients():
    with tfamp.policy_scope("mixed_float16"):
        model = beyond_float16()
    # So it is saved.
    assert model.layers[0].get_config()["activity_regularizer"]["class_name"] == "L2"

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            error = tf.reduce_mean(tf.square(model(X) - Y))
            loss = error + tf.add_n(model.losses)  # refuses tensors of two dtypes
        return loss, tape.gradient(loss, model.trainable_variables)

    loss, gradients = step()
    assert loss.dtype == tf.float32
    assert np.isfinite(loss)
    assert all(np.isfinite(each).all() for each in gradients)


def test_find_nonfinite_computes_them_so_too_and_leaves_the_layers_alone():
    model = beyond_float16()
    model.compile("sgd", "mse")
    assert tfamp.diagnostics.find_nonfinite(model, X, Y, dtype="float16") is None
    assert "add_loss" not in vars(model.layers[0])
