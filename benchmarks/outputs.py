"""Outputs of models, and how far they are from others. Keras and TensorFlow are imported late."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np


def floats(outputs: Any) -> list[np.ndarray]:
    """The float tensors of a structure, in float32."""
    import tensorflow as tf

    tensors = [tf.convert_to_tensor(each) for each in tf.nest.flatten(outputs)]
    return [tf.cast(each, "float32").numpy() for each in tensors if each.dtype.is_floating]


def difference(actual: Sequence[np.ndarray], expected: Sequence[np.ndarray]) -> float:
    """The norm of the difference over the norm, of all outputs together."""
    pairs = zip(actual, expected, strict=True)
    squares = sum(float(np.square(a - e, dtype="float64").sum()) for a, e in pairs)
    return math.sqrt(squares / sum(float(np.square(e, dtype="float64").sum()) for e in expected))


@contextmanager
def keras_policy(name: str) -> Iterator[None]:
    """Keras's own dtype policy, for models that are built inside."""
    import keras

    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(name)
    try:
        yield
    finally:
        keras.config.set_dtype_policy(before)
