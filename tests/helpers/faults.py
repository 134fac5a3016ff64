"""The classical ways to a NaN in low precision, each as a small model, and as raw ops."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

import tfamp

CLASSES = 3
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


@dataclass(frozen=True)
class Fault:
    """A model with a fault.

    Attributes:
        make: Builds the model, without its policy.
        x: A batch that brings the fault out.
        stage, layer, op, kind: What the report is to say; the layer by its name.
        fix: Words of the fix.
        in_bfloat16: Kind in bfloat16; None where the model is healthy there.
        prepare: Does the damage to the built model.
    """

    make: Callable[[], keras.Model]
    x: np.ndarray
    stage: str
    layer: str | None
    op: str
    kind: str
    fix: tuple[str, ...]
    in_bfloat16: str | None = None
    prepare: Callable[[keras.Model], None] = lambda model: None

    def model(self, policy: str) -> keras.Model:
        """The model, built under a policy and damaged."""
        with tfamp.policy_scope(policy):
            model = self.make()
        self.prepare(model)
        return model

    @property
    def y(self) -> np.ndarray:
        """Targets for the batch."""
        return np.zeros(len(self.x), np.int32)


class Attention(layers.Layer):
    """Attention without a scale."""

    def build(self, shape):
        self.query = self.add_weight(shape=(shape[-1], 32), initializer="ones")

    def call(self, x):
        query = ops.matmul(x, self.query)
        logits = ops.matmul(query, ops.transpose(query, (0, 2, 1)))
        return ops.matmul(ops.softmax(logits), x)


class LogOfSoftmax(layers.Layer):
    """Log-probabilities in two steps."""

    def call(self, x):
        return ops.log(ops.softmax(x))


class Standardize(layers.Layer):
    """A layer normalization in single ops."""

    def __init__(self, epsilon, **kwargs):
        super().__init__(**kwargs)
        self.epsilon = epsilon

    def call(self, x):
        centered = x - ops.mean(x, axis=-1, keepdims=True)
        variance = ops.mean(ops.square(centered), axis=-1, keepdims=True)
        return centered * ops.rsqrt(variance + self.epsilon)


class Masked(layers.Layer):
    """A softmax over what is positive, by an additive mask."""

    def call(self, x):
        mask = ops.cast(x > 0, x.dtype)
        return ops.softmax(x + (1.0 - mask) * -1e9)


class LongSum(layers.Layer):
    """A mean as the sum over a long axis, then a division."""

    def call(self, x):
        return ops.sum(x, axis=1) / x.shape[1]


class Exponential(layers.Layer):
    """The exponential function."""

    def call(self, x):
        return ops.exp(x)


def _classifier(shape: tuple[int, ...], *middle: Callable[[], layers.Layer]) -> keras.Model:
    inputs = keras.Input(shape)
    x = layers.Dense(8, kernel_initializer="identity", name="first")(inputs)
    for make in middle:
        x = make()(x)
    return keras.Model(inputs, layers.Dense(CLASSES, name="logits")(x))


def _random(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


def _with_nan() -> np.ndarray:
    x = _random(4, 8)
    x[2, 3] = np.nan
    return x


def _spoil_kernel(model: keras.Model) -> None:
    kernel = model.get_layer("first").kernel
    kernel.assign(tf.tensor_scatter_nd_update(kernel.value, [[0, 0]], [np.inf]))


def _compile(scale: float) -> Callable[[keras.Model], None]:
    def compile_(model: keras.Model) -> None:
        # In float32 as well: `dtype=` asks about a model that has its scale already.
        model.compile(tfamp.LossScaleOptimizer(keras.optimizers.Adam(), initial_scale=scale), LOSS)

    return compile_


FAULTS = {
    "attention logits": Fault(
        lambda: _classifier((6, 8), lambda: Attention(name="attention"), layers.Flatten),
        np.abs(_random(2, 6, 8)) * 60.0,
        *("forward", "attention", "BatchMatMulV2", "overflow"),
        ('"attention" float32', "attention logits", "bfloat16"),
    ),
    "softmax then log": Fault(
        lambda: _classifier((8,), lambda: LogOfSoftmax(name="log_softmax")),
        _random(4, 8) * 20.0,
        *("forward", "log_softmax", "Log", "underflow"),
        ("tf.nn.log_softmax", "from_logits=True"),
    ),
    "variance of large activations": Fault(
        lambda: _classifier((8,), lambda: Standardize(1e-3, name="norm")),
        _random(4, 8) * 500.0,
        *("forward", "norm", "Square", "overflow"),
        ('"norm" float32', "256"),
    ),
    "epsilon 1e-8": Fault(
        lambda: _classifier((8,), lambda: Standardize(1e-8, name="norm")),
        np.ones((4, 8), np.float32),
        *("forward", "norm", "Rsqrt", "underflow"),
        ("epsilon of 1e-04", "6.1e-05"),
    ),
    "mask constant": Fault(
        lambda: _classifier((8,), lambda: Masked(name="masked")),
        _random(4, 8),
        *("forward", "masked", "Const", "overflow"),
        ("-6e+04", "1e+09"),
    ),
    "sum over a long axis": Fault(
        lambda: _classifier((2048, 8), lambda: LongSum(name="pool")),
        np.full((2, 2048, 8), 100.0, np.float32),
        *("forward", "pool", "Sum", "overflow"),
        ("2048 values", '"pool" float32'),
    ),
    "exp": Fault(
        lambda: _classifier((8,), lambda: Exponential(name="exp")),
        np.full((4, 8), 12.0, np.float32),
        *("forward", "exp", "Exp", "overflow"),
        ("11.1", '"exp" float32', "bfloat16"),
    ),
    "bad input": Fault(
        lambda: _classifier((8,)),
        _with_nan(),
        *("input", None, "Placeholder", "also_in_float32"),
        ("data",),
        "also_in_float32",
    ),
    "bad weights": Fault(
        lambda: _classifier((8,)),
        _random(4, 8),
        *("weights", "first", "ReadVariableOp", "also_in_float32"),
        ("checkpoint", "first/kernel"),
        "also_in_float32",
        _spoil_kernel,
    ),
    "loss scale": Fault(
        lambda: _classifier((8,)),
        _random(4, 8),
        *("loss_scale", "logits", "Cast", "overflow"),
        ("2**26", "initial_scale=2**"),
        prepare=_compile(2.0**26),
    ),
}


def raw_softmax_log(x: Any) -> Any:
    """A loss of raw ops, float16 by explicit casts."""
    probabilities = tf.nn.softmax(tf.cast(x, tf.float16))
    return -tf.reduce_mean(tf.math.log(probabilities))
