"""Makes BatchNormalization layers of mixed policies run TensorFlow's fused kernel.

Such a layer is float32 as far as Keras is concerned: policy, variables and statistics. What differs
is how it gets from its input to its output. A low input is not cast to float32 first, and the
output is low as well, unless the layer makes an output of a model. Any other input is treated as
Keras does.

The methods are wrapped on the one layer: a layer created under another policy, or read from a file,
is Keras's own, and one created here keeps its kernel when the policy has changed since.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras

from tfamp.core.dtypes import FLOAT_DTYPES
from tfamp.interop.keras_backend import runs_tensorflow
from tfamp.interop.patching import wrap_method
from tfamp.layers.roles import managed_layers

# A subclass that overrides anything else of Keras's may compute something else.
_HARMLESS = frozenset({"build", "get_config", "from_config"})


def can_fuse(layer_class: type) -> bool:
    """Whether layers of a class compute what Keras's BatchNormalization does, by TensorFlow.

    Args:
        layer_class: Class of a layer.

    Returns:
        False for other layers, for subclasses that override how it computes, and under other
        backends of Keras.
    """
    norm = keras.layers.BatchNormalization
    if not issubclass(layer_class, norm) or not runs_tensorflow():
        return False
    between = layer_class.__mro__[: layer_class.__mro__.index(norm)]
    added = {name for each in between for name in vars(each)} - _HARMLESS
    # Python gives every class a few __names__ of its own.
    changed = {name for name in added if name == "__call__" or not name.startswith("__")}
    return not any(hasattr(norm, name) for name in changed)


def fuse(layer: Any, low: str) -> None:
    """Makes a layer use the fused kernel for inputs of a low dtype, wherever that can be done.

    Args:
        layer: A layer whose class `can_fuse`, in `managed_layers`. Its constructor need not have
            ended yet.
        low: The low dtype.
    """
    if layer.compute_dtype == "float32":
        # Keras would cast the input to float32 before the layer sees it.
        layer.autocast = False
    calls = _FusedCalls(layer, low)
    wrap_method(layer, "call", calls.call)
    wrap_method(layer, "compute_output_spec", calls.compute_output_spec)


class _FusedCalls:
    """What the methods of one layer are wrapped in."""

    def __init__(self, layer: Any, low: str):
        self._layer = layer
        self._low = low

    def call(
        self, original: Callable[..., Any], inputs: Any, training: Any = None, mask: Any = None
    ) -> Any:
        returned = self._output_dtype(inputs)
        if (
            returned == self._low == _dtype_of(inputs)
            and mask is None
            and fits(self._layer, inputs, self._low)
        ):
            return normalize(self._layer, inputs, training)
        if not self._layer.autocast and _dtype_of(inputs) in FLOAT_DTYPES:
            inputs = keras.ops.cast(inputs, self._layer.input_dtype)
        return keras.ops.cast(original(inputs, training=training, mask=mask), returned)

    def compute_output_spec(
        self, original: Callable[..., Any], inputs: Any, *args: Any, **kwargs: Any
    ) -> Any:
        spec = original(inputs, *args, **kwargs)
        return keras.KerasTensor(spec.shape, dtype=self._output_dtype(inputs), sparse=spec.sparse)

    def _output_dtype(self, inputs: Any) -> str:
        """The dtype of the output, which no fallback changes: symbolic tensors are to tell it."""
        layer, record = self._layer, managed_layers.get(self._layer)
        raised = record is not None and bool(record.raised)
        if layer.compute_dtype == "float32" and _dtype_of(inputs) == self._low and not raised:
            return self._low
        return str(layer.compute_dtype)


def fits(layer: Any, inputs: Any, dtype: str) -> bool:
    """Whether the kernel computes what a BatchNormalization is to compute on its input.

    Args:
        layer: A layer whose class `can_fuse`.
        inputs: What it is called with.
        dtype: Name of the dtype the kernel is to have for it.
    """
    import tensorflow as tf

    from tfamp.layers.batch_norm import has_fused_kernel

    if not isinstance(inputs, tf.Tensor) or inputs.shape.rank is None:
        return False
    rank = inputs.shape.rank
    # Keras 3.12 has no renorm.
    elsewhere = layer.synchronized or getattr(layer, "renorm", False)
    return (
        not elsewhere
        and rank >= 2
        and layer.axis in (-1, rank - 1)
        and inputs.shape[-1] is not None
        and has_fused_kernel(dtype, layer.epsilon)
    )


def normalize(layer: Any, inputs: Any, training: Any) -> Any:
    """Computes a layer by the kernel, and updates its moving statistics as Keras does.

    Args:
        layer: A layer for whose inputs the kernel `fits`.
        inputs: Tensor of shape [..., channels].
        training: Whether the batch's own statistics are used.

    Returns:
        Tensor of the inputs' shape and dtype.
    """
    from tfamp.layers.batch_norm import normalize_batch, normalize_by

    mean, variance = _float32(layer.moving_mean), _float32(layer.moving_variance)
    gamma = _float32(layer.gamma) if layer.scale else None
    beta = _float32(layer.beta) if layer.center else None
    if not (training and layer.trainable):
        return normalize_by(inputs, mean, variance, gamma, beta, layer.epsilon)
    found = normalize_batch(inputs, gamma, beta, layer.epsilon)
    kept = layer.momentum
    layer.moving_mean.assign(mean * kept + found.mean * (1.0 - kept))
    layer.moving_variance.assign(variance * kept + found.variance * (1.0 - kept))
    return found.outputs


def _dtype_of(tensor: Any) -> str:
    return str(keras.backend.standardize_dtype(tensor.dtype))


def _float32(variable: Any) -> Any:
    return keras.ops.cast(variable, "float32")
