"""Calls of single ops: attributes for TensorFlow's fast path, and gradients of ours."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import tensorflow as tf

from tfamp.core.kinds import Method, Op, Tensor
from tfamp.interop import tf_private
from tfamp.interop.patching import require_attribute
from tfamp.interop.tf_private import OpInput

# Gradients of an op's inputs, from those of its outputs.
Backward: TypeAlias = Callable[..., Sequence[Tensor]]


def plain_attrs(op: str, attrs: Sequence[Any]) -> list[Any]:
    """Converts attributes (names and values alternately) to types of TensorFlow's fast path.

    Its fallback for other types uses the original inputs.
    """
    converters, kinds = {"float": float, "type": tf.as_dtype}, tf_private.attr_kinds(op)
    plain = [_plain(attr) for attr in attrs]
    for place in range(1, len(plain), 2):
        convert = converters.get(kinds.get(plain[place - 1], ""))
        if convert is not None:
            plain[place] = convert(plain[place])
    return plain


def _plain(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value.tolist() if isinstance(value, (np.generic, np.ndarray)) else value


def op_input_tensor(value: Any, op_input: OpInput) -> Tensor:
    """Converts an input of an op to a tensor, as TensorFlow does before it runs the op."""
    hint = None if hasattr(value, "dtype") else op_input.default
    return tf.convert_to_tensor(value, op_input.dtype, dtype_hint=hint)


class EagerOp:
    """An eager op as registered gradient functions read one: like an op of a graph."""

    # Which inputs need no gradient, for gradient functions that look.
    skip_input_indices: tuple[int, ...] = ()

    def __init__(
        self,
        op: str,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        attrs: Mapping[str, Any],
    ) -> None:
        self.type, self.inputs, self.outputs, self._attrs = op, inputs, outputs, attrs

    def get_attr(self, name: str) -> Any:
        """Returns an attribute as `tf.Operation.get_attr` does, also inferred or default ones."""
        kind = tf_private.attr_kinds(self.type).get(name)
        if name in self._attrs:
            return _as_read(kind, self._attrs[name])
        op_inputs = tf_private.op_inputs(self.type)
        for op_input, value in zip(op_inputs, self.inputs, strict=False):
            if op_input.type_attr == name:
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


def require_gradients() -> None:
    """Raises `UnsupportedVersionError` where a symbol of the functions below is missing."""
    record = ("record_operation", "could_possibly_record", "stop_recording")
    for name in record:
        tf_private.private(f"eager.record:{name}")
    function = "tensorflow.python.framework.ops:get_gradient_function"
    require_attribute(function, "_gradient_function")


def gradient_function(op: Op | EagerOp) -> Method:
    """Returns the gradient function of an operation or an `EagerOp`, which takes it first.

    Symbol: `tensorflow.python.framework.ops.get_gradient_function`.
    """
    if isinstance(op, EagerOp):
        return tf_private.registered_gradient(op.type)
    gradient: Method = tf_private.private("framework.ops:get_gradient_function")(op)
    return gradient


def set_gradient(operation: Op, backward: Backward) -> None:
    """Gives an operation of a graph another gradient where TensorFlow differentiates the graph.

    Symbol: `tf.Operation._gradient_function`, which no file holds: saved graphs lack it.
    """
    tf_private.private_symbol(operation, "_gradient_function")
    operation._gradient_function = lambda _, *upstream: backward(*upstream)


def record(
    op: str, inputs: Sequence[Tensor], outputs: Sequence[Tensor], backward: Backward
) -> None:
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
