"""Makes the losses that a layer adds float32, whatever the layer computes in.

Keras adds them up with the float32 loss of the model, which it cannot do for tensors of two dtypes;
and a sum of the squares of many activations is beyond float16's range.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import keras

from tfamp.core.dtypes import LOW_PRECISION
from tfamp.interop.patching import wrap_method, wrapped_methods
from tfamp.layers.roles import is_built_in


def add_losses_in_float32(layer: Any) -> None:
    """Makes what a layer adds to the losses float32, and computes its activity regularizer so.

    Args:
        layer: A layer of any dtype. What is float32 already, or wider, stays as it is.
    """
    regularized = layer.activity_regularizer is not None
    if "add_loss" in wrapped_methods(layer) or (is_built_in(layer) and not regularized):
        return
    losses = _Losses(layer)
    wrap_method(layer, "add_loss", losses.add_loss)
    if regularized:
        wrap_method(layer, "call", losses.call)
        wrap_method(layer, "compute_output_spec", losses.compute_output_spec)


class _Losses:
    """What the methods of one layer are wrapped in.

    Keras computes the activity regularizer of each output, in the output's dtype, once `call` has
    returned, and hands the result to `add_loss`, where the float32 one takes its place.
    """

    def __init__(self, layer: Any):
        self._layer = layer
        self._thread = threading.local()  # replicas trace in threads of their own

    def call(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._thread.outputs = []
        outputs = original(*args, **kwargs)
        self._thread.outputs = [x for x in keras.tree.flatten(outputs) if keras.ops.is_tensor(x)]
        return outputs

    def compute_output_spec(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            return original(*args, **kwargs)
        finally:
            self._thread.outputs = []  # nothing regularizes symbolic tensors

    def add_loss(self, original: Callable[[Any], None], loss: Any) -> None:
        outputs = getattr(self._thread, "outputs", None)
        if outputs:
            output = outputs.pop(0)
            if _is_low(output):
                loss = _activity_loss(self._layer.activity_regularizer, output)
        original(keras.tree.map_structure(_in_float32, loss))


def _activity_loss(regularizer: Callable[[Any], Any], output: Any) -> Any:
    """What Keras adds for one output of a layer: a mean over the batch."""
    loss = regularizer(_in_float32(output))
    if keras.ops.ndim(output) == 0:
        return loss
    batch_size = keras.ops.cast(keras.ops.shape(output)[0], loss.dtype)
    return keras.ops.divide_no_nan(loss, batch_size)


def _in_float32(value: Any) -> Any:
    return keras.ops.cast(value, "float32") if _is_low(value) else value


def _is_low(value: Any) -> bool:
    return (
        keras.ops.is_tensor(value) and keras.backend.standardize_dtype(value.dtype) in LOW_PRECISION
    )
