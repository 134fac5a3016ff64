"""Guards ops whose low-precision kernels add up low or are unusable: they run in float32.

`planning.kernels` says which ones these are. The results keep their dtypes, and forward values
of exact kernels stay as they are. A gradient runs when no autocast and no layer is in force any
more, so the forward op gets another gradient: the usual one, run under the guard.

Autocast and the layers of a policy use the same guard. It is installed while one of them runs,
and acts in that thread only. A rewrite plans the ops of its graph; the gradients of these, which
a tape around the rewritten function takes later, run under the guard too.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import tensorflow as tf

from tfamp.core.dtypes import LOW_PRECISION
from tfamp.core.kinds import Method, Nest, Op, Tensor
from tfamp.core.scopes import Scope, ScopeStack
from tfamp.interop import imported_graphs, op_calls, patching, tf_private
from tfamp.interop.op_calls import Backward, EagerOp
from tfamp.interop.tf_private import OpInput, op_inputs
from tfamp.machine.hardware import onednn_dtypes
from tfamp.planning import kernels, scalings
from tfamp.planning.kernel_calls import call_before_it_runs
from tfamp.planning.kernels import BROADCASTING, GUARDED_OPS, OpCall
from tfamp.planning.scalings import Dataflow

# Attribute of an output that was recorded here, so that TensorFlow does not record it again.
_RECORDED = "_tfamp_recorded"
# Attribute of an eager result of Cast, whose gradient adds up in float32.
_CAST = "_tfamp_cast"
# Broadcasting ops that take the shape of the result, and those that broadcast all but two axes.
_BY_A_SHAPE = frozenset({"BroadcastTo", "Tile"})
_OF_MATRICES = frozenset({"BatchMatMulV2", "BatchMatMulV3"})
_Shape: TypeAlias = tuple[int | None, ...]


@dataclass(eq=False)
class _Guard(Scope):
    """A block under the guard.

    Attributes:
        device: Kind of TensorFlow's default device.
        is_on: False for ops to run as they are called.
    """

    device: str
    is_on: bool


_LOST = (
    "{} of low-precision ops whose kernels add up in low precision are less exact than this tfamp "
    "promises."
)
_guards: ScopeStack[_Guard] = ScopeStack("tfamp_kernels")


def enter(is_on: bool = True) -> Scope:
    """Puts the guard in force here, until `leave`; `guarded` does both.

    Args:
        is_on: False to run ops as they are called, inside of another such block.
    """
    hooks.acquire()
    outer = _guards.innermost
    device = tf_private.default_device_kind() if outer is None else outer.device
    guard = _Guard(device, is_on and _can_guard())
    _guards.enter(guard)
    return guard


@functools.cache
def _can_guard() -> bool:
    """Whether all symbols exist by which gradients of ops are changed; if not, warns once."""

    def check() -> bool:
        op_calls.require_gradients()
        return True

    return patching.attempt(check, False, _LOST.format("results and gradients"))


def leave(guard: Any) -> None:
    """Ends what `enter` put in force."""
    _guards.leave(guard)
    hooks.release()


@contextlib.contextmanager
def guarded(is_on: bool = True) -> Iterator[None]:
    """Returns a context whose ops, and their gradients, avoid kernels of the table; see `enter`."""
    guard = enter(is_on)
    try:
        yield
    finally:
        leave(guard)


# ---- Calls -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Call:
    """A call of an op that has low inputs.

    Attributes:
        op: Its type.
        dtype: The low dtype.
        inputs: Its inputs, in the order of the op's definition; lists of tensors are lists.
        attrs: Its attributes, as far as the caller passes them.
        device: Kind of the device that it runs on.
    """

    op: str
    dtype: str
    inputs: Sequence[Nest]
    attrs: Mapping[str, Any]
    device: str

    def in_table(self) -> OpCall:
        """The call as the table reads it."""
        values = list(_flat(self.inputs))
        return call_before_it_runs(
            self.op,
            [_shape(value) for value in values],
            lambda number: _static_integers(self.inputs[number]),
            self.attrs,
            [value.op.type if tf.is_symbolic_tensor(value) else "" for value in values],
        )


def _call_of(op: str, inputs: Sequence[Nest], attrs: Mapping[str, Any]) -> _Call | None:
    """A call to look at; None for one without a low dtype, or outside of every guard."""
    guard = _guards.innermost if op in GUARDED_OPS else None
    if guard is None or not guard.is_on:
        return None
    dtype = next(filter(None, map(_low_dtype, _flat(inputs))), "")
    if not dtype and isinstance(attrs.get("T"), tf.DType):
        dtype = _LOW.get(attrs["T"], "")  # An op with float32 inputs and low results.
    if not dtype:
        return None
    device = tf_private.device_kind_in_force() or guard.device or "cpu"
    return _Call(op, dtype, inputs, attrs, device)


def _flat(values: Sequence[Nest]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from value
        else:
            yield value


_LOW = {tf.as_dtype(name): name for name in LOW_PRECISION}


def _low_dtype(value: Any) -> str:
    """The low dtype of a tensor or variable; else ""."""
    dtype = getattr(value, "dtype", None)
    if isinstance(dtype, str):  # of a variable of Keras
        return dtype if dtype in LOW_PRECISION else ""
    return _LOW.get(dtype.base_dtype, "") if isinstance(dtype, tf.DType) else ""


def _shape(value: Any) -> _Shape | None:
    shape = tf.TensorShape(getattr(value, "shape", None))
    return None if shape.rank is None else tuple(shape.as_list())


def _static_integers(value: Any) -> tuple[int, ...] | None:
    static = tf.get_static_value(value) if tf.is_tensor(value) else value
    if static is None:
        return None
    return tuple(map(int, tf.nest.flatten(np.asarray(static).tolist())))


def _runs_in_float32(call: _Call) -> bool:
    """Whether a call must run in float32: the table has its low kernel, or there is none."""
    if _mixes_dtypes(call):
        return False  # TensorFlow raises an error, as it does without the guard.
    for op_input, value in zip(op_inputs(call.op, call.device), call.inputs, strict=False):
        lacks_kernel = op_input.floats and call.dtype not in op_input.floats
        if lacks_kernel and any(map(_low_dtype, _flat([value]))):
            return True
    fact = kernels.fact_about(call.in_table(), call.dtype, call.device, onednn_dtypes())
    return fact is not None or _is_joined(call)


def _mixes_dtypes(call: _Call) -> bool:
    """Whether tensors have different dtypes that the op wants in one."""
    dtypes: dict[str, tf.DType] = {}
    for op_input, value in zip(op_inputs(call.op, call.device), call.inputs, strict=False):
        if op_input.type_attr is None:
            continue
        for tensor in filter(tf.is_tensor, _flat([value])):
            if dtypes.setdefault(op_input.type_attr, tensor.dtype) != tensor.dtype:
                return True
    return False


def _gradient_is_guarded(call: _Call) -> bool:
    """Whether the gradient of a call may run low kernels of the table."""
    dtypes = kernels.forward_ops(call.device, onednn_dtypes()).get(call.op, frozenset())
    if call.dtype == "float16" and call.op in scalings.QUOTIENTS and not tf.executing_eagerly():
        return True  # That of the divisor divides twice: see `_is_joined`.
    if call.op in BROADCASTING and call.op not in _BY_A_SHAPE:
        # Only broadcast operands have a sum in their gradients.
        shapes = [_shape(value) for value in _flat(call.inputs)]
        if call.op in _OF_MATRICES:
            shapes = [None if shape is None else shape[:-2] for shape in shapes]
        known = all(shape is not None and None not in shape for shape in shapes)
        if known and all(shape == shapes[0] for shape in shapes):
            return False
    return call.dtype in dtypes


# ---- Compilers -------------------------------------------------------------------------------

# Ops that compute a constant from others, one behind the other.
_MOST_FOLDED = 8


def _is_joined(call: _Call) -> bool:
    """Whether compilers would join a call with earlier ops of the graph that is being traced."""
    if call.dtype != "float16" or call.op not in scalings.JOINED_OPS or tf.executing_eagerly():
        return False
    inputs = [_producer(value) for value in _flat(call.inputs)]
    return any(True for _ in scalings.joined_before(_TRACED, call.op, inputs))


def _producer(value: Any) -> Op | None:
    """The op that gives a tensor of a graph; None for a number or an array."""
    if tf.is_symbolic_tensor(value):
        return value.op
    return None if isinstance(value, (int, float, np.generic, np.ndarray)) else _UNKNOWN


class _Unknown:
    """A value from outside of the graph, such as a variable."""

    type, inputs = "", ()


_UNKNOWN: Any = _Unknown()


def _is_known(producer: Op | None, most: int = _MOST_FOLDED) -> bool:
    if producer is None or producer.type in scalings.KNOWN:
        return True
    is_folded = most > 0 and producer.type in scalings.FOLDED and len(producer.inputs) > 0
    return is_folded and all(_is_known(tensor.op, most - 1) for tensor in producer.inputs)


def _is_mild(producer: Op | None) -> bool:
    if producer is None or producer.type != "Const":
        return False
    value = tf.get_static_value(producer.outputs[0])
    return value.size == 1 and scalings.is_mild_number(float(value.item()))


_TRACED: Dataflow[Op | None] = Dataflow(
    op=lambda producer: "" if producer is None else str(producer.type),
    inputs=lambda producer: [tensor.op for tensor in (producer.inputs if producer else ())],
    is_known=_is_known,
    is_mild=_is_mild,
)


# ---- Ops -------------------------------------------------------------------------------------


def eager_op(original: Method, context: Any, op: str, name: str | None, *args: Any) -> Nest:
    """Runs an op in eager mode."""
    count = len(op_inputs(op)) if op in GUARDED_OPS else 0
    inputs, attrs = args[:count], args[count:]
    call = None
    if count:
        attrs = tuple(op_calls.plain_attrs(op, attrs))
        call = _call_of(op, inputs, _by_name(attrs))
    if call is None and op == "Cast":
        return _eager_cast(original, context, name, args)
    if call is None:
        return original(context, op, name, *args)
    if _runs_in_float32(call):
        if (exact := _sum_of_bias_gradient(call)) is not None:
            return exact
        raised = map(functools.partial(_raised, dtype=call.dtype), attrs)
        result = original(context, op, name, *_cast_up(call, _tensors(call)), *raised)
        return _lowered(result, call.dtype)
    if not op_calls.may_record() or not _gradient_is_guarded(call):
        return original(context, op, name, *args)
    tensors = _tensors(call)
    with op_calls.not_recording():
        result = original(context, op, name, *tensors, *attrs)
    outputs = result if isinstance(result, (list, tuple)) else [result]
    _record(EagerOp(op, [*_flat(tensors)], [*outputs], call.attrs), call)
    return result


def _eager_cast(original: Method, context: Any, name: str | None, args: Sequence[Any]) -> Tensor:
    """Runs a Cast; the gradient of one from a low dtype adds up slices before it casts them."""
    if _guards.innermost is None:
        return original(context, "Cast", name, *args)
    is_recorded = _is_cast_of_low(args[0]) and op_calls.may_record()
    with op_calls.not_recording() if is_recorded else contextlib.nullcontext():
        result = original(context, "Cast", name, *args)
    setattr(result, _CAST, True)
    if is_recorded:
        operation = EagerOp("Cast", [args[0]], [result], {})
        _record_as(operation, _backward_of_cast(operation))
    return result


def _is_cast_of_low(value: Any) -> bool:
    """Whether a value that is cast here is a low tensor, under a guard that is on."""
    guard = _guards.innermost
    return (
        guard is not None
        and guard.is_on
        and isinstance(value, tf.Tensor)
        and bool(_low_dtype(value))
    )


def _by_name(attrs: Sequence[Any]) -> dict[str, Any]:
    """Attributes by name, from names and values alternately."""
    return dict(zip(attrs[::2], attrs[1::2], strict=True))


def graph_op(original: Method, op: str, name: str | None = None, **keywords: Any) -> Any:
    """Adds an op to a graph."""
    names = [op_input.name for op_input in op_inputs(op)] if op in GUARDED_OPS else []
    inputs = [keywords.get(input_name) for input_name in names]
    kinds = tf_private.attr_kinds(op) if names else {}
    attrs = {
        key: tf.as_dtype(value) if kinds.get(key) == "type" and value is not None else value
        for key, value in keywords.items()
        if key not in names
    }
    call = _call_of(op, inputs, attrs) if names else None
    if call is None:
        structure, is_stateful, operation, outputs = original(op, name, **keywords)
        if op == "Cast" and _is_cast_of_low(keywords.get("x")):
            backward = _backward_of_cast(operation)
            op_calls.set_gradient(operation, backward)
            _record_as(operation, backward)
        return structure, is_stateful, operation, outputs
    if _runs_in_float32(call):
        if (exact := _sum_of_bias_gradient(call)) is not None:
            # Callers read the attributes of the op itself, which nothing uses then.
            structure, is_stateful, operation, _ = original(op, name, **keywords)
            setattr(exact, _RECORDED, True)
            return structure, is_stateful, operation, [exact]
        raised = {key: _raised(value, call.dtype) for key, value in attrs.items()}
        cast_inputs = dict(zip(names, _cast_up(call, inputs), strict=True))
        structure, is_stateful, operation, outputs = original(op, name, **cast_inputs, **raised)
        _record(operation, None)
        low_outputs = [_lowered(output, call.dtype) for output in outputs]
        return structure, is_stateful, operation, low_outputs
    structure, is_stateful, operation, outputs = original(op, name, **keywords)
    if _gradient_is_guarded(call):
        _record(operation, call)
    return structure, is_stateful, operation, outputs


def record_gradient(
    original: Method,
    op: str,
    inputs: Sequence[Tensor],
    attrs: Sequence[Any],
    outputs: Sequence[Tensor],
) -> None:
    """Records an op on tapes, as the callers of `graph_op` do, unless that was done here.

    It may be an op that `graph_op` did not make, as those are that vectorize a function.
    """
    if any(getattr(output, _RECORDED, False) for output in outputs):
        return
    if op in GUARDED_OPS and all(map(tf.is_symbolic_tensor, outputs)):
        call = _call_of(op, list(inputs), _by_name(attrs))
        if call is not None and _gradient_is_guarded(call):
            _record(outputs[0].op, call)
            return
    original(op, inputs, attrs, outputs)


def custom_gradient(original: Method, f: Method, args: Any, kwargs: Any) -> Nest:
    """Runs a custom gradient, which may recompute the forward pass, as the guard here says."""
    guard = _guards.innermost
    if guard is None:
        return original(f, args, kwargs)

    @functools.wraps(f)
    def with_gradient(*args: Any, **kwargs: Any) -> tuple[Nest, Method]:
        result, grad_fn = f(*args, **kwargs)

        @functools.wraps(grad_fn)
        def gradient(*upstream: Tensor, **variables: Any) -> Nest:
            with guarded(guard.is_on):
                return grad_fn(*upstream, **variables)

        # TensorFlow looks for an argument named "variables".
        gradient.__signature__ = inspect.signature(grad_fn)  # type: ignore[attr-defined]
        return result, gradient

    return original(with_gradient, args, kwargs)


def dropout(original: Method, x: Any = None, rate: Any = None, **kwargs: Any) -> Tensor:
    """Drops values of a low tensor in float32, and returns the low dtype.

    Low random numbers are a few ones: at a rate of 0.1 bfloat16 drops 0.1016, at 0.999 all. The
    factor of what is kept would be rounded, for all values in the same direction.
    """
    guard, dtype = _guards.innermost, _low_dtype(x)
    if guard is None or not guard.is_on or not dtype:
        return original(x=x, rate=rate, **kwargs)
    exact_rate = _cast(rate, tf.float32) if _low_dtype(rate) else rate
    dropped = original(x=_cast(x, tf.float32), rate=exact_rate, **kwargs)
    return _cast(dropped, tf.as_dtype(dtype))


def function_context(original: Method, *args: Any, **kwargs: Any) -> Any:
    """Adds the guard to the cache key of a function's traces."""
    key, guard = original(*args, **kwargs), _guards.innermost
    if guard is None or not guard.is_on:
        return key
    context = key.context._replace(xla_context_id=(key.context.xla_context_id, "guarded"))
    return type(key)(context, key.scope_type)


hooks = patching.Patch(
    # Without them an op runs as TensorFlow runs it.
    optional={
        "eager_op": _LOST.format("results"),
        "graph_op": _LOST.format("results in graphs"),
        "custom_gradient": _LOST.format("custom gradients"),
        "record_gradient": _LOST.format("gradients in graphs"),
        "dropout": "dropout in a low dtype drops a little more than its rate, as Keras's does.",
        "function_context": _LOST.format("functions that were traced elsewhere before: results"),
    },
    eager_op=eager_op,
    graph_op=graph_op,
    custom_gradient=custom_gradient,
    record_gradient=record_gradient,
    dropout=dropout,
    function_context=function_context,
)


def guard_gradients(operations: Iterable[Op]) -> None:
    """Makes gradients of low ops that exist already add up in float32.

    Graphs of functions that the ops call, such as bodies of loops, are included. For ops that
    were imported into a graph, which TensorFlow may differentiate later.
    """
    with guarded():
        for operation in operations:
            if operation.type in GUARDED_OPS:
                # Nothing else is read of a call that was made: every attribute takes its time.
                has_dtype = "T" in tf_private.attr_kinds(operation.type)
                attrs = {"T": operation.get_attr("T")} if has_dtype else {}
                call = _call_of(operation.type, list(operation.inputs), attrs)
                if call is not None and _gradient_is_guarded(call):
                    op_calls.set_gradient(operation, _backward(operation, call))
            if operation.type == "Cast" and _low_dtype(operation.inputs[0]):
                op_calls.set_gradient(operation, _backward_of_cast(operation))
            for graph in imported_graphs.kept_body_graphs(operation):
                guard_gradients(graph.get_operations())


def _record(operation: Op | EagerOp, call: _Call | None) -> None:
    """Records an op on the tapes; with a call its gradient runs under the guard."""
    # With a call before the operation gets `backward`.
    backward = _backward(operation, call)
    if call is not None and isinstance(operation, tf.Operation):
        op_calls.set_gradient(operation, backward)
    _record_as(operation, backward)


def _record_as(operation: Op | EagerOp, backward: Backward) -> None:
    """Records an op on the tapes with the gradient given."""
    if isinstance(operation, tf.Operation):
        backward = _in_scope_of(operation, backward)
    inputs, outputs = list(operation.inputs), list(operation.outputs)
    for output in outputs:
        setattr(output, _RECORDED, True)
    op_calls.record(operation.type, inputs, outputs, backward)


def _in_scope_of(operation: Op, backward: Backward) -> Backward:
    """A gradient in the name scope that tapes give it, by which reports find op and layer."""
    scope = f"gradient_tape/{operation.name}/"

    def scoped(*upstream: Tensor) -> Sequence[Tensor]:
        with tf.name_scope(scope):
            return backward(*upstream)

    return scoped


def _backward(operation: Op | EagerOp, call: _Call | None) -> Backward:
    """The gradient of an op; with a call, which only ops with gradients have, under the guard."""
    gradient = None if call is None else op_calls.gradient_function(operation)

    def backward(*upstream: Tensor) -> list[Tensor]:
        if gradient is None:
            return _listed(op_calls.gradient_function(operation)(operation, *upstream))
        with guarded():
            gradients = _listed(gradient(operation, *upstream))
            return list(map(_summed, gradients, operation.inputs))

    return backward


def _backward_of_cast(operation: Op | EagerOp) -> Backward:
    """The gradient of a Cast from a low dtype, which adds up slices in the other dtype."""
    gradient = op_calls.gradient_function(operation)

    def backward(upstream: Tensor) -> list[Tensor]:
        with guarded():
            return _listed(gradient(operation, _summed(upstream, operation.inputs[0])))

    return backward


def _listed(gradients: Nest) -> list[Tensor]:
    return list(gradients) if isinstance(gradients, (list, tuple)) else [gradients]


def _summed(gradient: Tensor, value: Tensor) -> Tensor:
    """The sum of the slices of a low value's gradient, unless the next gradient adds them up.

    That is the gradient of a Cast, such as a variable's: it keeps the slices.
    """
    if not isinstance(gradient, tf.IndexedSlices) or not _low_dtype(value):
        return gradient
    if tf.is_symbolic_tensor(value):
        is_cast = value.op.type in _SLICED
    else:
        is_cast = getattr(value, _CAST, False)
    if is_cast or gradient.dense_shape is None:
        return gradient
    rows = gradient.dense_shape[0]
    return tf.math.unsorted_segment_sum(gradient.values, gradient.indices, rows)


_SLICED = frozenset({"Cast", "ReadVariableOp"})


def _sum_of_bias_gradient(call: _Call) -> Tensor | None:
    """The gradient of a bias by Sum, if that is exact in the low dtype; else None."""
    facts = kernels.facts_of(call.op, call.dtype, call.device, onednn_dtypes())
    if not any(fact.instead == "Sum" for fact in facts):
        return None
    if kernels.facts_of("Sum", call.dtype, call.device, onednn_dtypes()):
        return None
    upstream, rank = call.inputs[0], call.inputs[0].shape.rank
    if rank is None:
        return None
    channels = 1 if call.attrs.get("data_format") in ("NCHW", b"NCHW") else rank - 1
    total = tf.reduce_sum(upstream, [axis for axis in range(rank) if axis != channels])
    return _lowered(total, call.dtype)


# ---- Casts -----------------------------------------------------------------------------------


def _cast_up(call: _Call, inputs: Sequence[Nest]) -> list[Nest]:
    def cast(value: Nest) -> Nest:
        if isinstance(value, (list, tuple)):
            return [cast(item) for item in value]
        return _cast(value, tf.float32) if _low_dtype(value) == call.dtype else value

    return [cast(value) for value in inputs]


def _lowered(result: Nest, dtype: str) -> Nest:
    """The float32 results of an op, cast down."""
    if isinstance(result, (list, tuple)):
        return [_lowered(output, dtype) for output in result]
    if result.dtype != tf.float32:
        return result
    low = _cast(result, tf.as_dtype(dtype))
    setattr(low, _RECORDED, True)
    return low


def _cast(value: Any, dtype: tf.DType) -> Tensor:
    # Not tf.cast, which autocast takes for a user's.
    return tf.raw_ops.Cast(x=tf.convert_to_tensor(value), DstT=dtype)


def _tensors(call: _Call) -> list[Nest]:
    """The inputs of a call as tensors, as the fallback for others uses the original inputs."""

    def convert(value: Any, op_input: OpInput) -> Nest:
        if op_input.is_list and isinstance(value, (list, tuple)):
            return [convert(item, op_input) for item in value]
        if isinstance(value, tf.Tensor):
            return value
        if op_input.dtype is None and op_input.floats:
            return tf.convert_to_tensor(value, call.dtype)
        return op_calls.op_input_tensor(value, op_input)

    return [*map(convert, call.inputs, op_inputs(call.op))]


def _raised(attr: Any, dtype: str) -> Any:
    """An attribute of the op in float32."""
    is_low = isinstance(attr, tf.DType) and _LOW.get(attr) == dtype
    return tf.float32 if is_low else attr
