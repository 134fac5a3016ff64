"""Calls of single ops: attributes for TensorFlow's fast path, and gradients of our own."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import tensorflow as tf

from tfamp.interop import tf_private
from tfamp.interop.tf_private import OpInput

# Gradients of an op's inputs, given those of its outputs.
Backward: TypeAlias = Callable[..., Sequence[Any]]


def plain_attrs(op: str, attrs: Sequence[Any]) -> list[Any]:
    """Converts attributes (names and values alternately) to types of TensorFlow's fast path.

    Its fallback for other types uses the original inputs.
    """
    makers, kinds = {"float": float, "type": tf.as_dtype}, tf_private.attr_kinds(op)
    plain = [_plain(attr) for attr in attrs]
    for place in range(1, len(plain), 2):
        maker = makers.get(kinds.get(plain[place - 1], ""))
        plain[place] = plain[place] if maker is None else maker(plain[place])
    return plain


def _plain(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    return value.tolist() if isinstance(value, (np.generic, np.ndarray)) else value


def as_tensor(value: Any, given: OpInput) -> Any:
    """Converts an input of an op to a tensor, as TensorFlow does before it runs the op."""
    hint = None if hasattr(value, "dtype") else given.default
    return tf.convert_to_tensor(value, given.dtype, dtype_hint=hint)


class EagerOp:
    """An eager op as registered gradient functions read one: like a `tf.Operation` of a graph."""

    # Which inputs need no gradient, for gradient functions that look.
    skip_input_indices: tuple[int, ...] = ()

    def __init__(
        self, op: str, inputs: Sequence[Any], outputs: Sequence[Any], attrs: Mapping[str, Any]
    ) -> None:
        self.type, self.inputs, self.outputs, self._attrs = op, inputs, outputs, attrs

    def get_attr(self, name: str) -> Any:
        """Returns an attribute as `tf.Operation.get_attr` does, also an inferred or default one."""
        kind = tf_private.attr_kinds(self.type).get(name)
        if name in self._attrs:
            return _as_read(kind, self._attrs[name])
        for given, value in zip(tf_private.op_inputs(self.type), self.inputs, strict=False):
            if given.type_attr == name:
                return value.dtype
        default = tf_private.attr_default(self.type, name)
        if default is None:
            raise ValueError(f"{self.type} has no attribute {name!r}.")
        return _as_read(kind, default)


def _as_read(kind: str | None, value: Any) -> Any:
    if kind == "type":
        return tf.as_dtype(value)
    if kind == "string" and isinstance(value, str):
        return value.encode()
    return value


def gradient_function(op: Any) -> Callable[..., Any]:
    """Returns the gradient function of an operation or an `EagerOp`, which takes it first.

    Symbol: `tensorflow.python.framework.ops.get_gradient_function`.
    """
    if isinstance(op, EagerOp):
        return tf_private.registered_gradient(op.type)
    found: Callable[..., Any] = tf_private.private("framework.ops:get_gradient_function")(op)
    return found


def set_gradient(operation: Any, backward: Backward) -> None:
    """Gives an operation of a graph its own gradient where TensorFlow differentiates the graph.

    Symbol: `tf.Operation._gradient_function`, which no file holds: a saved graph has the usual one.
    """
    tf_private.private_symbol(operation, "_gradient_function")
    operation._gradient_function = lambda _, *upstream: backward(*upstream)


def record(op: str, inputs: Sequence[Any], outputs: Sequence[Any], backward: Backward) -> None:
    """Records an op on the tapes that watch its inputs.

    Symbol: `tensorflow.python.eager.record.record_operation`.
    """
    tf_private.private("eager.record:record_operation")(op, [*outputs], [*inputs], backward)


def may_record() -> bool:
    """Whether a tape may record here. Symbol: `record.could_possibly_record`."""
    return bool(tf_private.private("eager.record:could_possibly_record")())


def not_recording() -> contextlib.AbstractContextManager[None]:
    """Returns a context in which no tape records. Symbol: `record.stop_recording`."""
    context: contextlib.AbstractContextManager[None]
    context = tf_private.private("eager.record:stop_recording")()
    return context
