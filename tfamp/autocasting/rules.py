"""What autocast does to one op, by its list: which inputs are cast, to what."""

from __future__ import annotations

import contextlib
import functools
import inspect
import operator
import sys
from collections.abc import Callable, Hashable, Sequence
from types import FrameType
from typing import Any, NamedTuple

import tensorflow as tf

from tfamp.autocasting.finished_graphs import warn_of_finished_graph
from tfamp.autocasting.state import Mode, current_modes
from tfamp.autocasting.values import (
    ARRAYS,
    EDITABLE,
    declared_dtype,
    dtype_name,
    mixes,
    recast,
    recast_gradients,
    widest,
)
from tfamp.core.dtypes import LOW_PRECISION
from tfamp.interop import library_code
from tfamp.interop.tf_private import (
    OpInput,
    chooses_its_output_dtype,
    held_dtype,
    op_inputs,
)

_EXPLICIT = "_tfamp_explicit_cast"


_TENSORS = (tf.Tensor, tf.Variable)
_STRUCTURED = (tf.RaggedTensor, tf.SparseTensor)


class Autocaster:
    """Answers TensorFlow's interception for whatever mode is in force in the calling thread.

    Args:
        hold: Makes a context in which the interception stays in place.
    """

    def __init__(self, hold: Callable[[], contextlib.AbstractContextManager[None]]) -> None:
        self._hold = hold

    def concerns(self, op: str) -> bool:
        """Whether the op is on a list of the mode in force, or cannot run with whatever dtypes."""
        mode = current_modes.current
        return mode is not None and (op in mode.targets or _is_particular(op))

    def adjust(self, op: str, inputs: Sequence[Any]) -> Sequence[Any] | None:
        """Casts an op's inputs as its list says.

        Args:
            op: Op type.
            inputs: Tensors, variables, arrays, numbers, or lists of them, in the op's order.

        Returns:
            The inputs to use instead; None if none changes.
        """
        mode = current_modes.current
        if mode is None:
            return None
        adjusted = list(inputs)
        for group in _groups(op):
            _cast_group(mode, op, group, adjusted)
        if all(map(operator.is_, adjusted, inputs)):
            return None
        if any(isinstance(value, _STRUCTURED) for value in adjusted):
            return None  # It fails, and TensorFlow goes on with what they are made of.
        # TensorFlow's fast path takes tensors only; where it gives up, it forgets these inputs.
        return [_as_tensors(*pair) for pair in zip(adjusted, op_inputs(op), strict=True)]

    def cast(self, tensor: Any, dtype: Any, run: Callable[[], Any]) -> Any:
        """Runs a cast, notes that it was the user's, or leaves out one of a library's."""
        if current_modes.current is None:
            return run()
        source, target = dtype_name(tensor), tf.as_dtype(dtype).name
        if source not in EDITABLE or target not in EDITABLE or not tf.is_tensor(tensor):
            return run()
        module, function = _asker()
        if source == "float32":
            needless = (module, function) in library_code.RESULTS_CAST_BACK
        else:
            needless = (
                module in library_code.KERAS_UPCASTS
                and function not in library_code.NEEDS_KERAS_UPCAST
            )
        if needless and target != source:
            return tensor
        mode = current_modes.current
        casts = current_modes.casts if mode.cache_casts else None
        if casts is not None and source == "float32" and module.startswith(library_code.LIBRARIES):
            return casts.traced.once(tensor, target, run)  # Keras's, of a layer's weights.
        result = run()
        if not module.startswith(library_code.LIBRARIES):
            setattr(result, _EXPLICIT, True)
        return result

    def kept(self, tensor: Any) -> Any:
        """Notes a user's cast to the dtype the tensor has: that is the dtype to compute in."""
        if current_modes.current is None or not tf.is_tensor(tensor):
            return tensor
        module, _ = _asker()
        if dtype_name(tensor) not in EDITABLE or module.startswith(library_code.LIBRARIES):
            return tensor
        with current_modes.set_to(None):
            result = tf.identity(tensor)  # The tensor itself may be used elsewhere.
        setattr(result, _EXPLICIT, True)
        return result

    def convert(self, value: Any, dtype: Any, asker: FrameType) -> tuple[Any, Any]:
        """Settles a conversion to a tensor where TensorFlow would refuse its dtype.

        Args:
            value: What is converted.
            dtype: The dtype asked for, None for any.
            asker: The frame that asks.

        Returns:
            The value, cast up where float32 is wanted and to a variable's dtype where it is for
            one; and the dtype to ask for, None where the op that follows settles it.
        """
        if not tf.is_tensor(value):  # true of Keras's variables as well
            return value, dtype
        given = dtype_name(value)
        if given not in EDITABLE:
            return value, dtype
        module = asker.f_globals.get("__name__", "")
        function = (module, asker.f_code.co_name)
        if function in library_code.FLOAT32_FUNCTIONS or (
            function in library_code.SAME_DTYPE_FUNCTIONS and mixes(asker.f_locals.values())
        ):
            return recast(value, "float32"), None
        wanted = given if dtype is None else tf.as_dtype(dtype).base_dtype.name
        if given == wanted or wanted not in EDITABLE:
            return value, dtype
        if wanted == "float32" or module in library_code.FIXED_DTYPES:
            return recast(value, wanted), dtype
        return value, None

    def recast(self, value: Any, dtype: str) -> Any:
        """A float16, bfloat16 or float32 tensor in another of these; anything else as it is."""
        return value if current_modes.current is None else recast(value, dtype)

    def stacked(self, values: Any, dtype: Any) -> tuple[Any, Any]:
        """Gives tensors in a list, which become one, their widest dtype where they differ."""
        if current_modes.current is None or not mixes(tf.nest.flatten(values)):
            return values, dtype
        return tf.nest.map_structure(lambda value: recast(value, "float32"), values), tf.float32

    def active(self) -> bool:
        """Whether a mode is in force."""
        return current_modes.current is not None

    def paused(self) -> contextlib.AbstractContextManager[None]:
        """A context for optimizers, and for gradients: these run in the forward pass's dtypes."""
        return current_modes.set_to(None)

    def custom_gradient(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Makes a custom gradient run in the mode of its forward pass, as recomputing needs.

        Its results are cast to the dtypes of what they are the gradients of.
        """
        mode = current_modes.current
        if mode is None:
            return function

        @functools.wraps(function)
        def with_gradient(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
            result, grad_fn = function(*args, **kwargs)
            dtypes = [dtype_name(arg) for arg in tf.nest.flatten((args, kwargs))]

            @functools.wraps(grad_fn)
            def gradient(*dys: Any, **variables: Any) -> Any:
                # The tape may be asked after the context was left.
                with self._hold(), current_modes.set_to(mode):
                    return recast_gradients(grad_fn(*dys, **variables), dtypes, **variables)

            # TensorFlow looks for an argument named "variables".
            gradient.__signature__ = inspect.signature(grad_fn)  # type: ignore[attr-defined]
            return result, gradient

        return with_gradient

    def python_function(self, function: Callable[..., Any], dtypes: Any) -> Callable[..., Any]:
        """Gives a Python function's results the dtypes that were declared for its op.

        A graph runs it when no autocast is in force, on what the ops before it gave.
        """
        if current_modes.current is None or not callable(function):
            return function
        several = isinstance(dtypes, (list, tuple))
        wanted = [declared_dtype(each) for each in (dtypes if several else [dtypes])]

        @functools.wraps(function)
        def with_dtypes(*args: Any) -> Any:
            result = function(*args)
            if isinstance(result, (list, tuple)):
                return [recast(*each) for each in zip(result, wanted, strict=False)]
            return recast(result, wanted[0]) if wanted else result

        return with_dtypes

    def recording_changed(self) -> None:
        """Forgets casts that a tape has not seen."""
        casts = current_modes.casts
        if casts is not None:
            casts.traced.recording_changed()

    def trace_key(self) -> Hashable:
        """The mode in force."""
        mode = current_modes.current
        return None if mode is None else mode.key

    def finished_graph(self, function: Any) -> None:
        """Warns of a function that was traced before and stays float32."""
        mode = current_modes.current
        if mode is not None:
            warn_of_finished_graph(function, mode.dtype, mode.targets)

    def layer_dtype(self) -> str | None:
        """The dtype Keras layers read their variables in; None for the layers' own."""
        mode = current_modes.current
        return None if mode is None else mode.dtype

    def align(self, outputs: Any, like: Any) -> Any:
        """Gives a loop body's outputs the dtypes of the variables it got."""
        if current_modes.current is None:
            return outputs
        wanted = [dtype_name(value) for value in tf.nest.flatten(like)]
        flat = tf.nest.flatten(outputs)
        if len(flat) != len(wanted):  # TensorFlow has a message for that.
            return outputs
        cast = [recast(value, dtype) for value, dtype in zip(flat, wanted, strict=True)]
        return tf.nest.pack_sequence_as(outputs, cast)

    def common_dtype(self, values: Sequence[Any]) -> str:
        """The widest dtype of the outputs of several branches, "" if they have one already."""
        dtypes = {dtype_name(value) for value in values}
        differ = current_modes.current is not None and len(dtypes) > 1 and dtypes <= EDITABLE
        return "float32" if differ else ""

    def cross_entropy_input(self, logits: Any) -> Any:
        """Logits in float32 where the lists keep cross-entropies in it."""
        mode = current_modes.current
        name = "SoftmaxCrossEntropyWithLogits"
        return recast(logits, "float32") if mode and mode.targets.get(name) else logits


class _Group(NamedTuple):
    """Inputs of an op that must have one float dtype: where they are, and which it may be."""

    places: tuple[int, ...]
    floats: frozenset[str]


@functools.cache
def _groups(op: str) -> tuple[_Group, ...]:
    places: dict[str, list[int]] = {}
    floats: dict[str, frozenset[str]] = {}
    for index, each in enumerate(op_inputs(op)):
        name = each.type_attr or f"input {index}"
        allowed = frozenset({"float32"}) if each.dtype == tf.float32 else each.floats
        if allowed:
            places.setdefault(name, []).append(index)
            floats.setdefault(name, allowed)
    return tuple(_Group(tuple(places[name]), floats[name]) for name in places)


def _cast_group(mode: Mode, op: str, group: _Group, inputs: list[Any]) -> None:
    """Casts the inputs of a group, in place."""
    members: list[Any] = []
    for index in group.places:
        value = inputs[index]
        members += value if isinstance(value, (list, tuple)) else (value,)
    dtypes = {dtype_name(member) for member in members}
    if len(dtypes) > 1:
        # Beside a tensor, TensorFlow gives arrays and numbers the tensor's dtype.
        tensors = [each for each in members if not isinstance(each, ARRAYS)]
        dtypes = {dtype_name(each) for each in tensors} - {""} or dtypes - {""}
    if not dtypes <= EDITABLE:
        return
    target = _written(op, inputs) or _target(mode, op, dtypes, members, group.floats)
    if not target or (dtypes == {target} and all(isinstance(each, _TENSORS) for each in members)):
        return
    for index in group.places:
        value = inputs[index]
        if isinstance(value, (list, tuple)) and op_inputs(op)[index].is_list:
            cast = [_recast_or_make(member, target) for member in value]
            if not all(map(operator.is_, cast, value)):
                inputs[index] = cast
        else:
            inputs[index] = _recast_or_make(value, target)


def _recast_or_make(value: Any, dtype: str) -> Any:
    """An input in a dtype, as a tensor if it was none."""
    if value is None or isinstance(value, _TENSORS):
        return recast(value, dtype)
    if _is_list(value):
        value = [recast(member, dtype) for member in value]
    with current_modes.set_to(None):
        # A Keras variable does not take a dtype that is not its own.
        return tf.cast(value, dtype) if tf.is_tensor(value) else tf.convert_to_tensor(value, dtype)


def _as_tensors(value: Any, given: OpInput) -> Any:
    if given.is_list and isinstance(value, (list, tuple)):
        return [_as_tensors(member, given._replace(is_list=False)) for member in value]
    if value is None or isinstance(value, _TENSORS):
        return value
    with current_modes.set_to(None):
        return tf.convert_to_tensor(value, given.dtype)


def _target(
    mode: Mode, op: str, dtypes: set[str], members: Sequence[Any], floats: frozenset[str]
) -> str:
    """The dtype an op's inputs are cast to, "" for none."""
    listed = mode.targets.get(op)
    if not listed or chooses_its_output_dtype(op):
        # An op on no list is as it is given, save that it could not run with two dtypes.
        target = widest(dtypes)
    else:
        explicit = {dtype_name(each) for each in members if getattr(each, _EXPLICIT, False)}
        target = widest(explicit) if explicit else listed
    if target in floats:
        return target
    return "float32" if "float32" in floats and not dtypes <= floats else ""


def _written(op: str, inputs: Sequence[Any]) -> str:
    """The dtype of the variable an op writes, if that is one ops are cast to; "" otherwise."""
    handle = inputs[0]
    if op_inputs(op)[0].dtype != tf.resource or not isinstance(handle, tf.Tensor):
        return ""
    dtype = held_dtype(handle)
    return dtype if dtype in EDITABLE else ""


@functools.cache
def _is_particular(op: str) -> bool:
    """Whether there are float dtypes an op cannot run with.

    It takes several inputs of one dtype, writes a variable, or has no kernel for a low one.
    """
    inputs = op_inputs(op)
    return any(
        "float32" in group.floats
        and (
            len(group.places) > 1
            or inputs[group.places[0]].is_list
            or inputs[0].dtype == tf.resource
            or not group.floats.issuperset(LOW_PRECISION)
        )
        for group in _groups(op)
    )


def _is_list(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and any(dtype_name(member) for member in value)


def _asker() -> tuple[str, str]:
    """The module and the function whose code asked for the cast that is running."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if not module.startswith(library_code.IN_BETWEEN):
            return str(module), frame.f_code.co_name
        frame = frame.f_back
    return "", ""
