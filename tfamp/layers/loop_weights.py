"""Weights of recurrent layers, which a policy casts once before the loop over a sequence.

A layer reads its weights in its compute dtype, and a recurrent one does so at each step of a
sequence, where each would be cast again. Here the loop takes low copies that are made before it.
The gradients of all steps are still added up in float32, as those of casts in a loop are: a sum
in the low dtype would be rounded at each step.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import keras
import tensorflow as tf

from tfamp.core.dtypes import LOW_PRECISION
from tfamp.core.kinds import Layer, Method, Nest, Tensor
from tfamp.interop import keras_hooks, op_calls, patching

# Their calls only read their weights. A subclass may assign one at each step.
_CELLS = (keras.layers.LSTMCell, keras.layers.GRUCell, keras.layers.SimpleRNNCell)
_WEIGHTS = ("kernel", "recurrent_kernel", "bias")
# Names the gradient of a copy. Not a `tf.custom_gradient`, which keeps each graph for good.
_GRADIENT = "TfampLowCopy"


def loops(layer: Layer) -> bool:
    """Whether a layer loops over the steps of a sequence; its constructor may run.

    Example:
        >>> loops(keras.layers.GRU(2)), loops(keras.layers.Dense(2))
        (True, False)
    """
    return isinstance(layer, keras.layers.RNN)


def inner_loop(layer: Layer, original: Method, *args: Any, **kwargs: Any) -> Nest:
    """Runs the loop of a recurrent layer, which takes low copies of its cells' weights."""
    low = layer.compute_dtype
    is_low = low in LOW_PRECISION and keras_hooks.reading_dtype() == low
    weights = list(_weights_of(layer.cell)) if is_low and not tf.executing_eagerly() else []
    if not weights:
        return original(*args, **kwargs)
    copies = _Copies(low)
    with keras_hooks.reading_low_by(copies.read, low):
        copies.make(weights)
        return original(*args, **kwargs)


def _weights_of(cell: Any) -> list[Any]:
    """The weights that a cell of Keras's only reads, and that have gradients."""
    if type(cell) is keras.layers.StackedRNNCells:
        return [weight for inner in cell.cells for weight in _weights_of(inner)]
    is_known = type(cell) in _CELLS and patching.is_own_class_method(cell, "call")
    if not (is_known and cell.built):
        return []
    held = (getattr(cell, name, None) for name in _WEIGHTS)
    return [weight for weight in held if weight is not None and weight.trainable]


class _Copies:
    """Low copies of weights: made in the graph that has a loop, and read in its body."""

    def __init__(self, low: str) -> None:
        self._low = low
        self._graph = tf.compat.v1.get_default_graph()
        self._is_making = False
        # With the values, so that their ids stay theirs.
        self._made: dict[int, tuple[Any, Tensor, Tensor]] = {}

    def make(self, weights: list[Any]) -> None:
        """Copies weights, in a context in which variables are read by `read`."""
        self._is_making = True
        for weight in weights:
            _ = weight.value
        self._is_making = False

    def read(self, value: Any) -> Tensor:
        """Returns what a read of a variable returns: low, if its value is of a float dtype."""
        if not tf.as_dtype(value.dtype).is_floating:
            return value
        if self._is_making and value.dtype == tf.float32:
            exact = tf.convert_to_tensor(value)
            self._made[id(value)] = value, exact, tf.cast(exact, self._low)
        if id(value) not in self._made or tf.compat.v1.get_default_graph() is self._graph:
            return tf.cast(value, self._low)
        return _copied(*self._made[id(value)][1:])


def _copied(exact: Tensor, copy: Tensor) -> Tensor:
    """Returns a low copy of a tensor, whose gradient is the exact one's."""
    # A SavedModel has one gradient function of a name, for one shape.
    dims = "x".join(map(str, copy.shape.as_list()))
    name = f"{_GRADIENT}_{copy.dtype.name}_{dims}"
    _register_gradient(name)
    graph = tf.compat.v1.get_default_graph()
    with graph.gradient_override_map({"IdentityN": name}), op_calls.not_recording():
        return tf.raw_ops.IdentityN(input=[exact, copy])[1]


@functools.cache
def _register_gradient(name: str) -> None:
    # Another import of tfamp in this process has one that is as good.
    with contextlib.suppress(KeyError):
        tf.RegisterGradient(name)(_gradient_of_copy)


def _gradient_of_copy(_op: Any, _of_exact: Any, of_copy: Tensor) -> tuple[Tensor, None]:
    # The exact one is float32; a SavedModel traces this without an op.
    return tf.cast(of_copy, tf.float32), None
