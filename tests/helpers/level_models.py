"""One small classifier in each of the ways Keras has to write a model, for the tests of levels."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf
from keras import layers

CLASSES = 3
SHAPE = (6, 6, 1)


class Subclassed(keras.Model):
    """A model that makes its layers in its constructor and in `build`."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = layers.Conv2D(4, 3)
        self.norm = layers.BatchNormalization()
        self.flat = layers.Flatten()
        self.hidden = layers.Dense(8, activation="relu")
        self.head = layers.Dense(CLASSES)

    def call(self, x, training=False):
        x = self.flat(self.norm(self.conv(x), training=training))
        return self.head(self.hidden(x))


class Stubborn(layers.Layer):
    """Adds in float32 what is float32, as code does that never heard of mixed precision."""

    def call(self, x):
        return tf.add(tf.convert_to_tensor(x), tf.ones((1, 8), tf.float32))


def sequential(*last: keras.layers.Layer) -> keras.Model:
    features = [layers.Conv2D(4, 3), layers.BatchNormalization(), layers.Flatten()]
    hidden = layers.Dense(8, activation="relu")
    return keras.Sequential([keras.Input(SHAPE), *features, hidden, *last])


def functional() -> keras.Model:
    inputs = keras.Input(SHAPE)
    x = layers.BatchNormalization()(layers.Conv2D(4, 3, padding="same")(inputs))
    x = layers.Flatten()(layers.ReLU()(x) + x)
    x = layers.Dense(8, activation="relu")(x)
    return keras.Model(inputs, layers.Dense(CLASSES)(x))


def nested() -> keras.Model:
    inputs = keras.Input(SHAPE)
    return keras.Model(inputs, layers.Dense(CLASSES)(sequential()(inputs)))


KINDS = {
    "sequential": lambda: sequential(layers.Dense(CLASSES)),
    "functional": functional,
    "nested": nested,
    "subclassed": Subclassed,
}


def data(batches: int = 2) -> tuple[np.ndarray, np.ndarray]:
    """Images and labels, in batches of 8."""
    random = np.random.default_rng(0)
    count = 8 * batches
    return (
        random.standard_normal((count, *SHAPE)).astype("float32"),
        random.integers(0, CLASSES, count),
    )


def leaves(model: keras.Model) -> list[keras.Layer]:
    """The layers of a model that compute something, those of inner models included."""
    return [
        layer
        for layer in model._flatten_layers()
        if not isinstance(layer, keras.Model | layers.InputLayer)
    ]


def computes(model: keras.Model) -> dict[str, list[str]]:
    """The compute dtypes of a model's layers, by class."""
    found: dict[str, list[str]] = {}
    for layer in leaves(model):
        found.setdefault(type(layer).__name__, []).append(layer.compute_dtype)
    return found


def compiled(kind: str, optimizer: str = "adam", **arguments) -> keras.Model:
    """A built and compiled model, the same at every call, with statistics as after training."""
    keras.utils.set_random_seed(1)
    model = KINDS[kind]()
    if not model.built:
        model(data()[0][:1])
    for layer in leaves(model):
        if isinstance(layer, layers.BatchNormalization):
            layer.moving_mean.assign([0.1, -0.2, 0.3, 0.5])
            layer.moving_variance.assign([0.5, 1.5, 2.0, 1.0])
    model.compile(
        keras.optimizers.get(optimizer),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        **{"metrics": ["accuracy"], "jit_compile": False} | arguments,
    )
    return model


def trained(kind: str, **arguments) -> keras.Model:
    """A model that was compiled and trained for two steps, the same at every call."""
    model = compiled(kind, **arguments)
    model.fit(*data(), batch_size=8, verbose=0, shuffle=False)
    return model
