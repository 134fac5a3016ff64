"""Tiny Keras models of every kind of layer that mixed precision is for, and digits to train them.

All classify 8 x 8 images of digits, which each of them gets in the shape it wants.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import keras
import sklearn.datasets
import tensorflow as tf

BATCH = 16
CLASSES = 10


@dataclass(frozen=True)
class Kind:
    """A kind of model.

    Attributes:
        layers: Makes the layers between input and classifier.
        shape: Shape of one example.
        ops: Ops that the forward pass must have in low precision.
        learning_rate: For SGD with momentum: large enough to learn in 20 steps, and small enough
            that a rounding error does not grow from step to step.
    """

    layers: Callable[[], list]
    shape: tuple[int, ...]
    ops: frozenset[str]
    learning_rate: float


class Resize(keras.layers.Layer):
    """`tf.image.resize`, which Keras's layer also calls, with its gradient."""

    def call(self, x):
        return tf.image.resize(x, (5, 5), "bilinear")


class SelfAttention(keras.layers.Layer):
    """Multi-head attention with a shortcut, as in a transformer."""

    def build(self, shape):
        self.attention = keras.layers.MultiHeadAttention(2, 4)
        self.attention.build(shape, shape)
        self.norm = keras.layers.LayerNormalization()
        self.norm.build(shape)

    def call(self, x):
        return self.norm(x + self.attention(x, x))


def _layers() -> dict[str, Kind]:
    k = keras.layers
    image, rows, volume = (8, 8, 1), (8, 8), (4, 4, 4, 1)
    dense = frozenset({"MatMul"})
    convs = dense | {"Conv2D"}

    def conv(filters, **options):
        return k.Conv2D(filters, 3, **{"activation": "relu", **options})

    def cnn():
        first = conv(6, activation=None, padding="same", use_bias=False)
        rest = [k.ReLU(), k.MaxPooling2D(), conv(8, padding="same"), k.Flatten()]
        return [first, k.BatchNormalization(), *rest]

    def depthwise():
        return [conv(6), k.DepthwiseConv2D(3), k.Flatten()]

    def conv1d():
        return [k.Conv1D(12, 3, activation="relu"), k.MaxPooling1D(), k.Flatten()]

    def conv3d():
        return [k.Conv3D(6, 2, activation="relu"), k.MaxPooling3D(2, 1), k.Flatten()]

    def transposed():
        return [conv(6, strides=2), k.Conv2DTranspose(4, 3, strides=2), k.Flatten()]

    def resizing():
        return [conv(4), k.Resizing(9, 9), conv(4, activation=None), Resize(), k.Flatten()]

    def attention():
        return [SelfAttention(), k.GlobalAveragePooling1D()]

    return {
        "mlp": Kind(lambda: [k.Dense(32, "relu"), k.Dense(32, "tanh")], (64,), dense, 0.1),
        "cnn": Kind(cnn, image, convs, 0.01),
        "depthwise": Kind(depthwise, image, convs | {"DepthwiseConv2dNative"}, 0.04),
        "lstm": Kind(lambda: [k.LSTM(12)], rows, dense, 0.5),
        "gru": Kind(lambda: [k.GRU(12)], rows, dense, 0.5),
        "gru_unrolled": Kind(lambda: [k.GRU(12, unroll=True)], rows, dense, 0.5),
        "attention": Kind(attention, rows, dense | {"Einsum"}, 0.05),
        "conv1d": Kind(conv1d, rows, convs, 0.1),
        "conv3d": Kind(conv3d, volume, dense | {"Conv3D"}, 0.1),
        "transposed": Kind(transposed, image, convs | {"Conv2DBackpropInput"}, 0.04),
        "resizing": Kind(resizing, image, convs, 0.04),
    }


KINDS = _layers()


def build(kind: str) -> keras.Model:
    """A model, with the same weights at every call."""
    keras.utils.set_random_seed(3)
    layers = KINDS[kind].layers()
    return keras.Sequential([keras.Input(KINDS[kind].shape), *layers, keras.layers.Dense(CLASSES)])


def digits(kind: str, batches: int) -> list[tuple[tf.Tensor, tf.Tensor]]:
    """Batches of digits in the shape that a kind of model takes."""
    x, y = sklearn.datasets.load_digits(return_X_y=True)
    x = (x[: BATCH * batches] / 16).astype("float32").reshape(batches, BATCH, *KINDS[kind].shape)
    y = y[: BATCH * batches].reshape(batches, BATCH)
    return [(tf.constant(a), tf.constant(b)) for a, b in zip(x, y, strict=True)]
