"""What the symbolic tensors of a model say their dtypes are, corrected call by call."""

from __future__ import annotations

from typing import Any

import keras

from tfamp.core.dtypes import FLOAT_DTYPES
from tfamp.interop import keras_hooks


def spec_now(node: Any) -> list[Any]:
    """Returns symbolic tensors as one symbolic call would return them now.

    Args:
        node: A node of a layer or op; its inputs are cast first, as the layer's call does it.
    """
    arguments = node.arguments.args, node.arguments.kwargs
    operation = node.operation
    if isinstance(operation, keras.Layer) and not isinstance(operation, keras.Model):
        arguments = keras.tree.map_structure(lambda x: _as_called(operation, x), arguments)
    args, kwargs = arguments
    return keras.tree.flatten(operation.compute_output_spec(*args, **kwargs))


def _as_called(layer: Any, value: Any) -> Any:
    castable = isinstance(value, keras.KerasTensor) and value.dtype in FLOAT_DTYPES
    if not castable or not layer.autocast or value.dtype == layer.input_dtype:
        return value
    return keras.KerasTensor(value.shape, dtype=layer.input_dtype, sparse=value.sparse)


def respecify(node: Any) -> bool:
    """Corrects what the outputs of one symbolic call say; returns whether they said otherwise."""
    return copy_dtypes(spec_now(node), node.outputs)


def copy_dtypes(sources: list[Any], targets: list[Any]) -> bool:
    """Makes symbolic tensors say the dtypes of others; returns whether they said otherwise."""
    changed = False
    for source, target in zip(sources, targets, strict=True):
        if source.dtype != target.dtype:
            keras_hooks.set_symbolic_dtype(target, source.dtype)
            changed = True
    return changed
