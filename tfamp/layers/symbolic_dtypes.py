"""The dtypes of a model's symbolic tensors, kept what its layers return.

Keras computes the specs of symbolic outputs once, when a layer is called. After a layer has got
another dtype they are computed again, and only their dtypes are taken over.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from tfamp.core.dtypes import FLOAT_DTYPES, LOW_PRECISION
from tfamp.core.kinds import Functional, KerasNode, Layer, Model, Tensor
from tfamp.interop import keras_hooks

# Symbolic dtypes are corrected in passes until a fixed point. A layer called several times may
# need as many passes. The bound is a choice: more passes mean that the dtypes never settle.
_MOST_PASSES = 20
# Errors of users' code and of ops that do not take the new dtype.
FAILURES = (TypeError, ValueError, RuntimeError, NotImplementedError, tf.errors.OpError)


class _Computing(threading.local):
    def __init__(self) -> None:
        self.models: list[Layer] = []


_computing = _Computing()


@contextlib.contextmanager
def computing_specs_of(model: Model) -> Iterator[None]:
    """A context to compute the specs of a model's parts in: none of them is outermost."""
    _computing.models.append(model)
    try:
        yield
    finally:
        _computing.models.pop()


def models_in_computation() -> list[Layer]:
    """The models whose specs are being computed, innermost last; Keras does not record these."""
    return _computing.models


def correct(functional: Functional) -> None:
    """Gives the symbolic tensors of a Functional the dtypes that its layers return.

    A ValueError names a layer that fails.
    """
    nodes = [
        node
        for operation in functional.operations
        if not isinstance(operation, keras.layers.InputLayer)
        for node in keras_hooks.inbound_nodes(operation)
        if any(tensor.dtype in FLOAT_DTYPES for tensor in node.outputs)
    ]
    with computing_specs_of(functional):
        for _ in range(_MOST_PASSES):
            # A list: any() of a generator would stop at the first change.
            changed = [_corrected(node) for node in nodes]
            if not any(changed):
                return


def _corrected(node: KerasNode) -> bool:
    try:
        return respecify(node)
    except FAILURES as error:
        operation = node.operation
        dtype = getattr(operation, "compute_dtype", "low precision")
        raise ValueError(
            f"{operation.name} ({type(operation).__name__}) cannot be computed in {dtype}: "
            f"{error} Keep it in float32 with keep_float32=[{operation.name!r}]."
        ) from error


def respecify(node: KerasNode) -> bool:
    """Corrects the output dtypes of one symbolic call; returns whether any changed."""
    return copy_dtypes(specs_now(node), node.outputs)


def specs_now(node: KerasNode) -> list[Tensor]:
    """Returns the output specs of a call as they would be now, with its inputs cast."""
    args, kwargs = node.arguments.args, node.arguments.kwargs
    operation, reads = node.operation, None
    if isinstance(operation, keras.Layer) and not isinstance(operation, keras.Model):
        as_called = functools.partial(_as_called, operation)
        args, kwargs = keras.tree.map_structure(as_called, (args, kwargs))
        if operation.autocast and operation.compute_dtype in LOW_PRECISION:
            reads = operation.compute_dtype
    with keras_hooks.reading_variables_in(reads):
        return keras.tree.flatten(operation.compute_output_spec(*args, **kwargs))


def _as_called(layer: Layer, value: Any) -> Any:
    castable = isinstance(value, keras.KerasTensor) and value.dtype in FLOAT_DTYPES
    if not castable or not layer.autocast or value.dtype == layer.input_dtype:
        return value
    return keras.KerasTensor(value.shape, dtype=layer.input_dtype, sparse=value.sparse)


def copy_dtypes(sources: list[Tensor], targets: list[Tensor]) -> bool:
    """Gives symbolic tensors the dtypes of others; returns whether any changed."""
    different = [(s, t) for s, t in zip(sources, targets, strict=True) if s.dtype != t.dtype]
    for source, target in different:
        keras_hooks.set_symbolic_dtype(target, source.dtype)
    return bool(different)
