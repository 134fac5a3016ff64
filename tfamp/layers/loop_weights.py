"""Weights of recurrent layers, which a policy casts once a call, not once a step of a sequence.

A layer reads its weights in its compute dtype, and a recurrent one does so in the loop over the
steps of a sequence: each step casts them, and a gradient keeps every copy. Here the loop takes
low copies that are made before it. The gradients of all steps are still added up in float32, as
those of casts in a loop are: a sum in the low dtype would be rounded at each step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfamp.core.dtypes import LOW_PRECISION
from tfamp.core.kinds import Layer, Method, Nest, Tensor
from tfamp.interop import keras_hooks

# A cell of a user's own may assign its weights at each step.
_CELLS = (keras.layers.LSTMCell, keras.layers.GRUCell, keras.layers.SimpleRNNCell)


def loops(layer: Layer) -> bool:
    """Whether a layer loops over the steps of a sequence; its constructor may run.

    Example:
        >>> loops(keras.layers.GRU(2)), loops(keras.layers.Dense(2))
        (True, False)
    """
    return isinstance(layer, keras.layers.RNN)


def _only_reads(cell: Any) -> bool:
    """Whether a cell does not assign its weights."""
    if isinstance(cell, keras.layers.StackedRNNCells):
        return all(map(_only_reads, cell.cells))
    return isinstance(cell, keras.layers.Layer) and any(
        type(cell).call is known.call for known in _CELLS
    )


def call(layer: Layer, original: Method, *args: Any, **kwargs: Any) -> Nest:
    """Calls a recurrent layer whose loop takes low copies of its weights."""
    low = layer.compute_dtype
    is_low = low in LOW_PRECISION and keras_hooks.reading_dtype() == low
    if not is_low or tf.executing_eagerly() or not _only_reads(layer.cell):
        return original(*args, **kwargs)
    read = _reader(low)
    with keras_hooks.reading_low_by(read, low):
        for weight in layer.trainable_weights:
            keras.ops.convert_to_tensor(weight)  # Has it read, and copied, before the loop.
        return original(*args, **kwargs)


def _reader(low: str) -> Callable[[Any], Tensor]:
    """A function that casts what is read here, and in a loop takes the copy that was made here."""
    before = tf.compat.v1.get_default_graph()
    copies: dict[int, tuple[Any, Tensor, Tensor]] = {}

    def read(value: Any) -> Tensor:
        if not tf.as_dtype(value.dtype).is_floating:
            return value
        if tf.compat.v1.get_default_graph() is before:
            exact = tf.convert_to_tensor(value)
            made = tf.cast(exact, low)
            copies[id(value)] = value, exact, made  # The value too, so that its id stays its own.
            return made
        if id(value) not in copies:
            return tf.cast(value, low)
        return _copied(*copies[id(value)][1:])

    return read


@tf.custom_gradient
def _copied(exact: Tensor, copy: Tensor) -> tuple[Tensor, Callable[[Tensor], Any]]:
    """A low copy of a tensor, whose gradient is the exact one's."""
    return tf.identity(copy), lambda upstream: (tf.cast(upstream, exact.dtype), None)
