"""Models whose outputs are made in every way there is, for tests of what is float32 in them.

Each takes rows of 8 numbers. Made under a mixed policy they are mixed, else float32.
"""

from __future__ import annotations

import keras
import numpy as np
from keras import layers

X = np.linspace(-1, 1, 16, dtype="float32").reshape(2, 8)


def functional():
    x = keras.Input((8,))
    return keras.Model(x, layers.Dense(3)(layers.BatchNormalization()(layers.Dense(4)(x))))


def functional_with_ops():
    x = keras.Input((8,))
    return keras.Model(x, keras.ops.softmax(layers.Dense(3)(x) + 1.0))


def sequential():
    return keras.Sequential(
        [keras.Input((8,)), layers.Dense(4), layers.BatchNormalization(), layers.Dense(3)]
    )


def normalized_images():
    x = keras.Input((8,))
    y = layers.Conv2D(4, 2, padding="same")(layers.Reshape((2, 2, 2))(x))
    y = layers.ReLU()(layers.BatchNormalization()(y))
    return keras.Model(x, layers.Dense(3)(layers.Flatten()(y)))


def prepared_features():
    """Between its first two layers values are of the order of 1e6, which float16 has not."""
    prepare = [layers.Rescaling(1e6), layers.Normalization(mean=5e5, variance=1e12)]
    return keras.Sequential([keras.Input((8,)), *prepare, layers.Dense(4), layers.Dense(2)])


def deferred():
    model = keras.Sequential([layers.Dense(4), layers.Dense(3)])
    model(X)
    return model


def several_outputs():
    x = keras.Input((8,))
    trunk = layers.Dense(4)(x)
    return keras.Model(x, {"a": layers.Dense(2)(trunk), "b": layers.Dense(3)(trunk)})


def nested_inside():
    return keras.Sequential([keras.Input((8,)), sequential(), functional_head(3), layers.Dense(2)])


def nested_at_the_end():
    return keras.Sequential([keras.Input((8,)), layers.Dense(8), sequential()])


def functional_head(units):
    x = keras.Input((units,))
    return keras.Model(x, layers.Dense(units)(layers.Dense(4)(x)))


def with_cast():
    x = keras.Input((8,))
    hidden = layers.Dense(4)
    with_cast.full = keras.Model(x, layers.Dense(2)(hidden(x)))
    return keras.Model(x, hidden.output)


def sequential_with_cast():
    inner = keras.Sequential([keras.Input((2,)), layers.Dense(3)])
    outer = [layers.Reshape((4, 2)), layers.TimeDistributed(inner)]
    return keras.Sequential([keras.Input((8,)), *outer])


def composite_layers():
    x = keras.Input((8,))
    y = layers.Bidirectional(layers.LSTM(2, return_sequences=True))(layers.Reshape((4, 2))(x))
    return keras.Model(x, layers.MultiHeadAttention(2, 2)(y, y))


MODELS = {
    make.__name__: make
    for make in (
        functional,
        functional_with_ops,
        sequential,
        normalized_images,
        prepared_features,
        deferred,
        several_outputs,
        nested_inside,
        nested_at_the_end,
        with_cast,
        sequential_with_cast,
        composite_layers,
    )
}
