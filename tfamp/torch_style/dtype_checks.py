"""Python code of TensorFlow and Keras that checks or requests dtypes, under an autocast.

As in `context`, the functions that take an `original` replace the symbols that
`tfamp.interop.patching` lists under their names.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Sequence
from types import FrameType, ModuleType
from typing import Any, TypeAlias

import keras
import tensorflow as tf

from tfamp import state_guard
from tfamp.core.dtypes import LOW_PRECISION
from tfamp.core.kinds import DType, Nest, Operand, Operation, Tensor
from tfamp.interop import keras_hooks, patching
from tfamp.torch_style import modes
from tfamp.torch_style.modes import (
    EDITABLE,
    EXPLICIT,
    Mode,
    current_modes,
    held_dtype,
    recast,
    yielded_dtype,
)

# A Python function: the one that a patch replaces, or a user's that it takes.
Original: TypeAlias = Callable[..., Any]


def convert(
    original: Original, value: Operand, dtype: DType = None, *args: Any, **kwargs: Any
) -> Tensor:
    """Converts values for library code that requests the dtype of an op's first input."""
    hint = kwargs.get("dtype_hint")
    mode = current_modes.current
    if hint is not None and mode is not None and modes.is_lost(value, hint.name):
        kwargs["dtype_hint"] = tf.float32
    if mode is None:
        return original(value, dtype, *args, **kwargs)
    caller = sys._getframe(2)
    if _function_of(caller) in patching.FUNCTIONS_OF_OPS:
        target = mode.targets.get(patching.FUNCTIONS_OF_OPS[_function_of(caller)])
        mixed = _mixes(caller.f_locals.values())
        common = _common_dtype(caller.f_locals.values(), mode) if mixed else ""
        return recast(original(value, dtype, *args, **kwargs), target or common)
    if tf.is_tensor(value):  # True of Keras variables, too.
        value, dtype = _converted(value, dtype, caller, mode)
    return original(value, dtype, *args, **kwargs)


def _function_of(frame: FrameType) -> tuple[str, str]:
    """The module and the name of the function that runs in a frame."""
    return frame.f_globals.get("__name__", ""), frame.f_code.co_name


def _converted(
    value: Operand, dtype: DType, caller: FrameType, mode: Mode
) -> tuple[Operand, Operand]:
    """Returns the tensor to convert for a caller, and the dtype to request.

    The tensor is cast up if float32 is requested, and to the dtype of a variable that it is
    assigned to; the dtype is None if the following op decides it.
    """
    held = held_dtype(value)
    if held not in EDITABLE:
        return value, dtype
    function = _function_of(caller)
    if function in patching.FLOAT32_FUNCTIONS:
        return recast(value, "float32"), None
    if function in patching.SAME_DTYPE_FUNCTIONS and _mixes(caller.f_locals.values()):
        return recast(value, _common_dtype(caller.f_locals.values(), mode)), None
    wanted = held if dtype is None else tf.as_dtype(dtype).base_dtype.name
    if held == wanted or wanted not in EDITABLE:
        return value, dtype
    if function[0] != patching.FIXED_DTYPES and any(map(modes.yields, caller.f_locals.values())):
        return value, None  # The dtype of a variable that yields may be requested.
    if wanted == "float32" or function[0] == patching.FIXED_DTYPES:
        return recast(value, wanted), dtype
    return value, None


def number(mode: Mode, original: Original, x: Operand, *args: Any, **kwargs: Any) -> Tensor:
    """Marks the tensor of a number that Keras combines with a value that yields."""
    result = original(x, *args, **kwargs)
    # The caller's locals are the operands of its op.
    if isinstance(x, (int, float)) and any(map(modes.yields, sys._getframe(3).f_locals.values())):
        modes.mark_yielding(result)
    return result


def stacked(
    mode: Mode, original: Original, values: Operand, dtype: DType = None, name: str | None = None
) -> Tensor:
    """Promotes a list of tensors of mixed dtypes before they are stacked."""
    flat = tf.nest.flatten(values)
    if _mixes(flat):
        # AutoGraph warns about lambdas, whose source it cannot read.
        common = _common_dtype(flat, mode)
        values = tf.nest.map_structure(functools.partial(recast, dtype=common), values)
        dtype = tf.as_dtype(common)
    return original(values, dtype, name)


def _mixes(values: Iterable[Operand]) -> bool:
    """Whether tensors among the values have mixed float dtypes."""
    dtypes = {held_dtype(value) for value in values if tf.is_tensor(value)}
    return len(dtypes & EDITABLE) > 1


def _common_dtype(values: Iterable[Operand], mode: Mode) -> str:
    """The dtype for tensors among the values that have mixed ones: low if the others yield."""
    dtypes = {yielded_dtype(value, mode) for value in values if tf.is_tensor(value)}
    return modes.widest(dtypes & EDITABLE)


def in_float32(mode: Mode, original: Original, *args: Any, **kwargs: Any) -> Nest:
    """Runs a function in float32 that rejects low dtypes, or multiplies their errors."""
    kwargs = {name: recast(value, "float32") for name, value in kwargs.items()}
    args = tuple(recast(value, "float32") for value in args)
    with current_modes.set_to(None):
        return original(*args, **kwargs)


class LossOps:
    """Replaces `keras.ops` in the modules of Keras's losses, which compute in float32.

    Losses cast targets to the dtype of predictions, which targets may exceed. Functions of these
    modules are reached however they were imported.
    """

    def __init__(self, module: Callable[[], ModuleType]) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._module(), name)
        mode = current_modes.current
        if mode is None or not callable(value):
            return value
        # AutoGraph warns of what it cannot convert.
        run = functools.partial(_loss_op, mode, value)
        return tf.autograph.experimental.do_not_convert(run)


def _loss_op(mode: Mode, original: Original, *args: Any, **kwargs: Any) -> Nest:
    """Runs an op of a loss on float32 values."""
    kwargs = {name: _for_loss(value) for name, value in kwargs.items()}
    return in_float32(mode, original, *map(_for_loss, args), **kwargs)


def _for_loss(value: Operand) -> Operand:
    """Casts a low tensor up; probabilities still lead to the logits that Keras computes with."""
    if not tf.is_tensor(value) or held_dtype(value) not in LOW_PRECISION:
        return value
    with current_modes.set_to(None):
        logits = keras_hooks.logits_of(value)
        if tf.is_symbolic_tensor(value) and logits is None and value.op.type in _WITH_LOGITS:
            return _WITH_LOGITS[value.op.type](tf.cast(value.op.inputs[0], tf.float32))
        wide = tf.cast(value, tf.float32)
        if logits is not None:
            keras_hooks.set_logits(wide, recast(logits, "float32"))
        return wide


# Keras finds the logits of these ops in a graph, if they are a loss's predictions.
_WITH_LOGITS = {"Sigmoid": tf.sigmoid, "Softmax": tf.nn.softmax}


def folded(
    mode: Mode,
    original: Original,
    fn: Original,
    elems: Nest,
    initializer: Nest = None,
    *args: Any,
    **kwargs: Any,
) -> Nest:
    """Begins what a fold or a scan collects in float32, as it may be a sum.

    Without a start value the first element is one, and has the dtype of the others.
    """
    if initializer is None:
        elems = _begun(elems)
    else:
        initializer = _begun(initializer)
    return original(fn, elems, initializer, *args, **kwargs)


def _begun(values: Nest) -> Nest:
    """Casts tensors to float32, except those that a user has cast."""
    return tf.nest.map_structure(
        lambda value: value if getattr(value, EXPLICIT, False) else recast(value, "float32"),
        values,
    )


def mapped(
    mode: Mode, original: Original, values: Sequence[Operand], signature: Sequence[DType]
) -> Nest:
    """Casts the results of a mapped function to the dtypes that were declared for them."""
    pairs = zip(values, map(declared_dtype, signature), strict=True)
    return original([recast(*pair) for pair in pairs], signature)


def array_method(mode: Mode, original: Original, array: Operand, *args: Any, **kwargs: Any) -> Nest:
    """Casts an element to write into a `tf.TensorArray`, the only float tensor argument."""
    dtype = array.dtype.name
    kwargs = {name: recast(value, dtype) for name, value in kwargs.items()}
    return original(array, *(recast(value, dtype) for value in args), **kwargs)


def sparse_matmul(mode: Mode, original: Original, a: Tensor, b: Tensor, **kwargs: Any) -> Tensor:
    """Runs a MatMul instead, as tf.matmul uses this slow op for bfloat16 with float32."""
    if kwargs.get("a_is_sparse") or kwargs.get("b_is_sparse"):
        return original(a, b, **kwargs)
    dense = {k: v for k, v in kwargs.items() if not k.endswith("_is_sparse")}
    return tf.raw_ops.MatMul(a=a, b=b, **dense)


def cross_entropy(
    mode: Mode,
    original: Original,
    labels: Operand = None,
    logits: Operand = None,
    *args: Any,
    **kwargs: Any,
) -> Tensor:
    """Casts low-precision logits up, so that the float32 result is not cast back down."""
    if mode.targets.get("SoftmaxCrossEntropyWithLogits"):
        logits = recast(logits, "float32")
    return original(labels, logits, *args, **kwargs)


def operation_call(
    mode: Mode, original: Original, operation: Operation, *args: Any, **kwargs: Any
) -> Nest:
    """Lets the variables of float32 Keras layers yield to low tensors in their call.

    Results that are made of variables alone are cast: the next layer is to compute low.
    Layers that Keras has quantized, those that turn positions into angles, and those that add
    many inputs run without autocast, on inputs of their own dtype: sums and scales of integers
    exceed float16, rounding turns angles, and every addition would round.
    """
    if not isinstance(operation, keras.layers.Layer):
        return original(operation, *args, **kwargs)
    inputs = args[0] if args else kwargs.get("inputs")
    is_exact = keras_hooks.turns_positions(operation) or keras_hooks.adds_many(operation, inputs)
    if operation.quantization_mode is None and not is_exact:
        with keras_hooks.reading_by(modes.read, operation, mode.dtype):
            # Mixed dtypes are promoted, so that no state has to yield.
            state_guard.settle(operation, operation.call, args, kwargs, same_dtypes=False)
            return _settled(original(operation, *args, **kwargs), mode)

    def in_own_dtype(value: Operand) -> Operand:
        return recast(value, operation.compute_dtype) if tf.is_tensor(value) else value

    with current_modes.set_to(None):
        args, kwargs = keras.tree.map_structure(in_own_dtype, (args, kwargs))
        return original(operation, *args, **kwargs)


def _settled(outputs: Nest, mode: Mode) -> Nest:
    """Casts the outputs of a layer that yield."""

    def settled(output: Operand) -> Operand:
        yielding = isinstance(output, tf.Tensor) and modes.yields(output)
        return recast(output, mode.dtype) if yielding else output

    if not any(map(modes.yields, keras.tree.flatten(outputs))):
        return outputs
    return keras.tree.map_structure(settled, outputs)


def declared_dtype(declared: DType | tf.TypeSpec) -> str:
    """The name of a dtype, or of the dtype in a type specification; "" if it has none."""
    dtype = getattr(declared, "dtype", declared)
    return "" if isinstance(dtype, tf.TypeSpec) else str(tf.as_dtype(dtype).name)
