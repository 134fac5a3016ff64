"""`autocast`: op-by-op mixed precision, as in PyTorch and Paddle, for eager and traced code.

While an autocast is in force, the functions here that take an `original` replace the symbols
that `tfamp.interop.patching` lists under their names: they cast the inputs of an op by its
list, and keep library code from casting back, with those in `dtype_checks`. The class itself
is at the end.
"""

# ruff: noqa: N803 - arguments have the names that TensorFlow gives them

from __future__ import annotations

import contextlib
import functools
import inspect
import operator
import sys
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, Literal, TypeAlias, TypeVar

import tensorflow as tf

from tfamp import kernel_guard, state_guard
from tfamp.core.dtypes import FLOAT_DTYPES, LOW_PRECISION
from tfamp.core.errors import TfampWarning
from tfamp.core.kinds import DType, Nest, Operand, Tensor, TFGraph, Trace, Variable
from tfamp.core.names import LowDtypeLike
from tfamp.core.options import checked_flag
from tfamp.core.scopes import decorated
from tfamp.graph.graph import Graph
from tfamp.graph.op_lists import OpLists
from tfamp.interop import keras_hooks, patching, tf_private
from tfamp.interop.op_calls import may_record, op_input_tensor, plain_attrs
from tfamp.interop.tf_private import OpInput, op_inputs
from tfamp.policy import low_dtype
from tfamp.torch_style import modes
from tfamp.torch_style.dtype_checks import (
    LossOps,
    Original,
    array_method,
    convert,
    cross_entropy,
    declared_dtype,
    folded,
    in_float32,
    mapped,
    number,
    operation_call,
    sparse_matmul,
    stacked,
)
from tfamp.torch_style.modes import (
    EDITABLE,
    EXPLICIT,
    Block,
    Mode,
    current_modes,
    held_dtype,
    recast,
    yielded_dtype,
)
from tfamp.training import underflow

_Callable = TypeVar("_Callable", bound=Callable[..., Any])
_TENSORS = (tf.Tensor, tf.Variable)
_STRUCTURED = (tf.RaggedTensor, tf.SparseTensor)
# Indices of the inputs of an op that share a float dtype, and the allowed dtypes.
_Group: TypeAlias = tuple[tuple[int, ...], frozenset[str]]

# ---- Ops -------------------------------------------------------------------------------


def eager_op(original: Original, context: Any, op: str, name: str | None, *args: Any) -> Nest:
    """Runs an op in eager mode."""
    count = len(op_inputs(op))
    adjusted, yielding = _adjust(op, args[:count])
    if adjusted is not None:
        args = (*adjusted, *plain_attrs(op, args[count:]))
    result = original(context, op, name, *args)
    if yielding:
        modes.mark_yielding(result)
    return result


def graph_op(original: Original, op: str, name: str | None = None, **keywords: Any) -> Nest:
    """Adds an op to a graph."""
    names = [op_input.name for op_input in op_inputs(op)]
    adjusted, yielding = _adjust(op, [keywords.get(key) for key in names])
    if adjusted is not None:
        keywords |= dict(zip(names, adjusted, strict=True))
    result = original(op, name, **keywords)
    if yielding:
        modes.mark_yielding(result)
    return result


def true_division(
    mode: Mode, original: Original, x: Operand, y: Operand, name: str | None = None
) -> Tensor:
    """Casts before TensorFlow's Python code, which rejects mixed dtypes."""
    adjusted, _ = _adjust("RealDiv", (x, y))
    x, y = adjusted or (x, y)
    return original(x, y, name=name)


def _adjust(op: str, inputs: Sequence[Operand]) -> tuple[Sequence[Operand] | None, bool]:
    """Returns the inputs of an op, cast by its list, and whether its results yield.

    The inputs are None if they stay as they are.
    """
    mode = current_modes.current
    if mode is None:
        return None, False
    device = _next_device()
    yielding = any(modes.yields(member) for value in inputs for member in _members(value))
    if not yielding and op not in mode.targets and not _is_restricted(op, device):
        return None, False
    adjusted = list(inputs)
    for group in _groups(op, device):
        yielding &= _cast_group(mode, op, group, adjusted)
    if not yielding and all(map(operator.is_, adjusted, inputs)):
        return None, False
    if any(isinstance(value, _STRUCTURED) for value in adjusted):
        return None, False  # The op fails, and TensorFlow dispatches to their components.
    # TensorFlow's fast path takes tensors only, and its fallback uses the original inputs, and
    # returns results that are not marked.
    tensors = [_as_tensors(*pair) for pair in zip(adjusted, op_inputs(op), strict=True)]
    return tensors, yielding


def _members(value: Operand) -> Sequence[Operand]:
    """The values in an input of an op, which may be a list."""
    return value if isinstance(value, (list, tuple)) else (value,)


def _next_device() -> str:
    """The kind of device on which TensorFlow places the next op, if it has a kernel there."""
    return tf_private.device_kind_in_force() or getattr(current_modes.innermost, "device", "")


@functools.cache
def _groups(op: str, device: str) -> tuple[_Group, ...]:
    """Groups the inputs of an op that share a float dtype, with the allowed dtypes."""
    groups: dict[str, _Group] = {}
    for index, op_input in enumerate(op_inputs(op, device)):
        name = op_input.type_attr or f"input {index}"
        is_float32 = op_input.dtype == tf.float32
        allowed = frozenset({"float32"}) if is_float32 else op_input.floats
        if allowed:
            places, floats = groups.get(name, ((), allowed))
            groups[name] = (*places, index), floats
    return tuple(groups.values())


@functools.cache
def _is_restricted(op: str, device: str) -> bool:
    """Whether an unlisted op may get float dtypes that it has no kernel for."""
    if any(op_input.is_list or op_input.dtype == tf.resource for op_input in op_inputs(op)):
        return True
    return any(
        len(places) > 1 or not floats.issuperset(LOW_PRECISION)
        for places, floats in _groups(op, device)
    )


def _cast_group(mode: Mode, op: str, group: _Group, inputs: list[Operand]) -> bool:
    """Casts the inputs of a group, in place; returns whether all stay float32 and yield."""
    places, floats = group
    members = [member for index in places for member in _members(inputs[index])]
    dtypes = {yielded_dtype(member, mode) for member in members}
    if len(dtypes) > 1:
        # TensorFlow converts arrays and numbers to the dtype of a tensor among them.
        tensors = [member for member in members if not isinstance(member, modes.ARRAYS)]
        dtypes = {yielded_dtype(tensor, mode) for tensor in tensors} - {""} or dtypes - {""}
    if not dtypes <= EDITABLE:
        return False
    written = _written(op, inputs)
    target = written or _target(mode, op, dtypes, members, floats)
    if not target:
        return False
    # Ops that do not gain compute with variables alone in float32.
    gains = mode.targets.get(op) == mode.dtype
    stays = target == mode.dtype and not (gains or written) and _all_yield(members)
    if stays:
        target = "float32"
    if all(isinstance(member, _TENSORS) and held_dtype(member) == target for member in members):
        return stays
    for index in places:
        value = inputs[index]
        if isinstance(value, (list, tuple)) and op_inputs(op)[index].is_list:
            cast = [_recast_or_make(member, target) for member in value]
            inputs[index] = value if all(map(operator.is_, cast, value)) else cast
        else:
            inputs[index] = _recast_or_make(value, target)
        if stays:  # Numbers that became tensors, too.
            modes.mark_yielding(inputs[index])
    return stays


def _all_yield(members: list[Operand]) -> bool:
    """Whether all tensors among the members of a group yield."""
    return all(
        modes.yields(member) or isinstance(member, modes.ARRAYS) or not held_dtype(member)
        for member in members
    )


def _recast_or_make(value: Operand, dtype: str) -> Tensor:
    """Converts an input to a tensor of a dtype."""
    if value is None or isinstance(value, _TENSORS):
        return recast(value, dtype)
    if isinstance(value, (list, tuple)):
        # TensorFlow takes lists of arrays of its own dtypes of NumPy only, and rounds these.
        value = [
            member if isinstance(member, modes.ARRAYS) else recast(member, dtype)
            for member in value
        ]
    with current_modes.set_to(None):
        if tf.is_tensor(value):  # A Keras variable converts to the dtype it has only.
            return tf.cast(value, dtype)
        return tf.convert_to_tensor(value, dtype)


def _as_tensors(value: Operand, op_input: OpInput) -> Nest:
    if op_input.is_list and isinstance(value, (list, tuple)):
        return [_as_tensors(member, op_input._replace(is_list=False)) for member in value]
    if value is None or isinstance(value, _TENSORS):
        return value
    with current_modes.set_to(None):
        return op_input_tensor(value, op_input)


def _target(
    mode: Mode, op: str, dtypes: set[str], members: list[Operand], floats: frozenset[str]
) -> str:
    """Returns the dtype for the inputs of an op, "" for none."""
    listed = mode.targets.get(op)
    if not listed:
        # An unlisted op keeps its dtype; mixed ones, which it could not run with, are promoted.
        target = modes.widest(dtypes)
    else:
        cast_by_user = (member for member in members if getattr(member, EXPLICIT, False))
        explicit = set(map(held_dtype, cast_by_user))
        target = modes.widest(explicit) if explicit else listed
    low = target or next(iter(dtypes), "")
    if "float32" in floats and any(modes.is_lost(member, low) for member in members):
        return "float32"
    if target in floats:
        return target
    return "float32" if "float32" in floats and not dtypes <= floats else ""


def _written(op: str, inputs: Sequence[Operand]) -> str:
    """The dtype of the variable an op writes, if it is one of the three; else ""."""
    handle = inputs[0]
    if op_inputs(op)[0].dtype != tf.resource or not isinstance(handle, tf.Tensor):
        return ""
    dtype = tf_private.held_dtype(handle)
    return dtype if dtype in EDITABLE else ""


# ---- Explicit casts --------------------------------------------------------------------


def cast(
    mode: Mode, original: Original, x: Operand, DstT: DType, *args: Any, **kwargs: Any
) -> Tensor:
    """Runs a cast and marks a user's as explicit; leaves out some of library code."""
    run = functools.partial(original, x, DstT, *args, **kwargs)
    source, target = held_dtype(x), tf.as_dtype(DstT).name
    if source not in EDITABLE or target not in EDITABLE or not tf.is_tensor(x):
        return run()
    module, function = _caller()
    if source == "float32":
        needless = (module, function) in patching.RESULTS_CAST_BACK
    else:
        is_kerass = module in patching.KERAS_UPCASTS
        needless = is_kerass and function not in patching.NEEDS_KERAS_UPCAST
    if needless and target != source:
        return x
    casts = current_modes.casts if mode.cache_casts else None
    if casts is not None and source == "float32" and module.startswith(patching.LIBRARIES):
        return casts.of_traced(x, target, run)  # Keras's, of a layer's weights.
    result = run()
    if not module.startswith(patching.LIBRARIES):
        setattr(result, EXPLICIT, True)
    return result


def public_cast(
    mode: Mode, original: Original, x: Operand, dtype: DType, name: str | None = None
) -> Tensor:
    """Marks a user's cast to the dtype that a tensor has, for which no op runs."""
    result = original(x, dtype, name)
    if result is not x or not tf.is_tensor(x) or held_dtype(x) not in EDITABLE:
        return result
    if _caller()[0].startswith(patching.LIBRARIES):
        return result
    with current_modes.set_to(None):
        result = tf.identity(x)  # Other uses of the tensor itself are not explicit.
    setattr(result, EXPLICIT, True)
    return result


def _caller() -> tuple[str, str]:
    """The module and the function that called the running cast."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if not module.startswith(patching.IN_BETWEEN):
            return str(module), frame.f_code.co_name
        frame = frame.f_back
    return "", ""


# ---- Gradients -------------------------------------------------------------------------


def paused(mode: Mode, original: Original, *args: Any, **kwargs: Any) -> Nest:
    """Runs gradients in the forward pass's dtypes and optimizers in their variables' dtypes."""
    with current_modes.set_to(None):
        return original(*args, **kwargs)


def _watch_steps(mode: Mode | None) -> None:
    """Watches the steps that follow a tape: inference leaves nothing behind."""
    if mode is not None and mode.dtype == "float16":
        underflow.watch_next_steps()


def recording(original: Original, *args: Any, **kwargs: Any) -> Nest:
    """Drops cached casts that a tape has not recorded, in a float32 island, too."""
    casts = current_modes.casts
    if casts is not None:
        casts.recording_changed()
    _watch_steps(current_modes.current)
    return original(*args, **kwargs)


def custom_gradient(mode: Mode, original: Original, f: Original, args: Nest, kwargs: Nest) -> Nest:
    """Runs a custom gradient in the mode of its forward pass, which recomputation needs.

    Layers read their variables as in the forward pass. The results are cast to the dtypes of the
    inputs and variables.
    """

    @functools.wraps(f)
    def with_gradient(*args: Any, **kwargs: Any) -> tuple[Nest, Callable[..., Nest]]:
        result, grad_fn = f(*args, **kwargs)
        dtypes = [held_dtype(arg) for arg in tf.nest.flatten((args, kwargs))]
        reading = keras_hooks.reading_again()

        @functools.wraps(grad_fn)
        def gradient(*dys: Tensor, **variables: Any) -> Nest:
            # tape.gradient may be called after the context was left.
            with hooks.held(), current_modes.set_to(mode), reading():
                return _recast_gradients(grad_fn(*dys, **variables), dtypes, **variables)

        # TensorFlow looks for an argument named "variables".
        gradient.__signature__ = inspect.signature(grad_fn)  # type: ignore[attr-defined]
        return result, gradient

    return original(with_gradient, args, kwargs)


def _recast_gradients(
    gradients: Nest, dtypes: Sequence[str], variables: Sequence[Variable] | None = None
) -> Nest:
    """Casts the results of a custom gradient to the dtypes of its inputs and variables."""
    if not variables:
        return _in_dtypes(gradients, dtypes)
    of_inputs, of_variables = gradients
    pairs = zip(of_variables, map(held_dtype, variables), strict=False)
    return _in_dtypes(of_inputs, dtypes), [recast(*pair) for pair in pairs]


def _in_dtypes(structure: Nest, dtypes: Sequence[str]) -> Nest:
    flat = tf.nest.flatten(structure)
    if len(flat) != len(dtypes):  # TensorFlow raises for that.
        return structure
    cast = [recast(value, dtype) for value, dtype in zip(flat, dtypes, strict=True)]
    return tf.nest.pack_sequence_as(structure, cast)


# ---- Functions -------------------------------------------------------------------------


def python_function(
    mode: Mode,
    original: Original,
    func: Original,
    inp: Nest,
    Tout: DType,
    *args: Any,
    **kwargs: Any,
) -> Nest:
    """Casts the results of a Python function to the dtypes that were declared for its op.

    A graph runs it while no autocast is in force, on the results of the ops before it.
    """
    several = isinstance(Tout, (list, tuple))
    declared = [declared_dtype(dtype) for dtype in (Tout if several else [Tout])]

    @functools.wraps(func)
    def with_dtypes(*args: Any) -> Nest:
        result = func(*args)
        if isinstance(result, (list, tuple)):
            return [recast(*pair) for pair in zip(result, declared, strict=False)]
        return recast(result, declared[0]) if declared else result

    return original(with_dtypes if callable(func) else func, inp, Tout, *args, **kwargs)


def function_context(mode: Mode, original: Original, *args: Any, **kwargs: Any) -> Any:
    """Adds the mode and the kind of device to the cache key of a function's traces."""
    made = original(*args, **kwargs)
    key = made.context.xla_context_id, mode.key, _next_device()
    eager = made.context._replace(xla_context_id=key)
    return type(made)(eager, made.scope_type)


def signature_cast(
    mode: Mode, original: Original, spec: Any, value: Operand, casting_context: Any
) -> Operand:
    """Casts inputs of a function to the dtypes of its trace or its input signature."""
    value = recast(value, spec.dtype.name) if tf.is_tensor(value) else value
    return original(spec, value, casting_context)


# Graphs that were checked; not all functions support weak references.
_seen: weakref.WeakSet[TFGraph] = weakref.WeakSet()


def finished_graph(
    mode: Mode, original: Original, function: Trace, *args: Any, **kwargs: Any
) -> Any:
    """Warns, once per graph, of float32 ops that autocast would run in low precision."""
    if function.graph not in _seen:
        _seen.add(function.graph)
        name = function.name.decode() if isinstance(function.name, bytes) else function.name
        float32 = _float32_ops(function.graph, mode)
        if float32:
            ops = ", ".join(f"{count} {op}" for op, count in sorted(float32.items()))
            warnings.warn(
                f"{name} is a finished graph, a ConcreteFunction or one from a SavedModel: "
                f"autocast leaves it as it is, with {ops} in float32. Call the tf.function it "
                "comes from, which is traced again for autocast, or tfamp.rewrite(function, "
                f"dtype={mode.dtype!r}).",
                TfampWarning,
                stacklevel=patching.level_of_user(),
            )
    return original(function, *args, **kwargs)


def _float32_ops(graph: TFGraph, mode: Mode) -> Counter[str]:
    """Counts float32 ops of the low list; none if one has the low dtype, which is a choice."""
    every_node = Graph(graph.as_graph_def()).nodes
    nodes = [node for node in every_node if mode.targets.get(node.op) == mode.dtype]
    low, wide = (tf.as_dtype(dtype).as_datatype_enum for dtype in (mode.dtype, "float32"))
    types = [(node.op, node.attr["T"].type) for node in nodes if "T" in node.attr]
    if any(dtype == low for _, dtype in types):
        return Counter()
    return Counter(op for op, dtype in types if dtype == wide)


# ---- Control flow ----------------------------------------------------------------------


def while_loop(
    mode: Mode,
    original: Original,
    cond: Original,
    body: Original,
    loop_vars: Nest,
    *args: Any,
    **kwargs: Any,
) -> Nest:
    """Keeps the dtypes of a loop's variables."""

    def aligned(*variables: Nest) -> Nest:
        return _align(body(*variables), variables)

    return original(cond, aligned, loop_vars, *args, **kwargs)


def loop_check(mode: Mode, original: Original, *args: Any) -> Any:
    """Aligns a variable before AutoGraph compares its dtypes."""
    *before, entry, exit_, shape = args
    exit_ = _align(exit_, entry) if tf.is_tensor(exit_) else exit_
    return original(*before, entry, exit_, shape)


def _align(outputs: Nest, like: Nest) -> Nest:
    """Casts a loop body's outputs to the dtypes of its inputs."""
    return _in_dtypes(outputs, [held_dtype(value) for value in tf.nest.flatten(like)])


def branch_check(
    mode: Mode, original: Original, name: str, body_var: Nest, orelse_var: Nest
) -> None:
    """Leaves out AutoGraph's check of outputs that `branches` aligns later."""
    if not _differ([body_var, orelse_var]):
        original(name, body_var, orelse_var)


def branches(
    mode: Mode, original: Original, op_type: str, branch_graphs: Sequence[TFGraph]
) -> Nest:
    """Promotes outputs of branches to their widest dtype."""
    outputs = [graph.outputs for graph in branch_graphs]
    if len(set(map(len, outputs))) == 1:  # TensorFlow raises for the others.
        for place, row in enumerate(zip(*outputs, strict=True)):
            if _differ(row):
                _recast_output(branch_graphs, place)
    return original(op_type, branch_graphs)


def _differ(values: Sequence[Operand]) -> bool:
    """Whether the outputs of branches have mixed dtypes to promote."""
    dtypes = {held_dtype(value) for value in values}
    return len(dtypes) > 1 and dtypes <= EDITABLE


def _recast_output(branch_graphs: Sequence[TFGraph], place: int) -> None:
    pack = tf_private.private("ops.cond_v2:_pack_sequence_as")
    for graph in branch_graphs:
        with graph.as_default():
            graph.outputs[place] = recast(graph.outputs[place], "float32")
        graph.structured_outputs = pack(graph.structured_outputs, graph.outputs)


# ---- Hooks -----------------------------------------------------------------------------


def _where_in_force(replacement: Original) -> Original:
    """Calls a replacement with the mode in force, and the original without one."""

    def around(original: Original, *args: Any, **kwargs: Any) -> Nest:
        mode = current_modes.current
        if mode is None:
            return original(*args, **kwargs)
        return replacement(mode, original, *args, **kwargs)

    return around


_FOR_A_MODE = (
    true_division, cast, public_cast, paused, custom_gradient, python_function,
    function_context, signature_cast, finished_graph, while_loop, loop_check, branch_check,
    branches, stacked, mapped, in_float32, array_method, sparse_matmul, cross_entropy,
    operation_call, folded, number,
)  # fmt: skip
# What autocast does not do without a symbol. All others it needs.
_OPTIONAL = {
    "array_method": "writing low tensors to a float32 TensorArray fails under autocast.",
    "branch_check": "branches of different float dtypes fail under autocast.",
    "branches": "branches of different float dtypes fail under autocast.",
    "cross_entropy": "cross-entropies of low logits are rounded to low precision under autocast.",
    "custom_gradient": "custom gradients under autocast run in the dtypes that they are given.",
    "finished_graph": "a finished graph that autocast cannot change is not warned of.",
    "folded": "foldl, foldr and scan add up in low precision under autocast.",
    "in_float32": "this function fails, or is inexact, with low tensors.",
    "loop_check": "loops whose values change their float dtype fail under autocast.",
    "loss_ops": "Keras's losses run in the dtype of their predictions under autocast.",
    "mapped": "map_fn with another float dtype than announced fails under autocast.",
    "number": "variables of Keras layers to which numbers are added make ops float32 under "
    "autocast.",
    "operation_call": "Keras's layers of positions, and quantized ones, run in low precision under "
    "autocast.",
    "python_function": "Python functions that return low tensors fail under autocast.",
    "signature_cast": "functions with a signature of float32 reject low tensors under autocast.",
    "sparse_matmul": "tf.matmul with is_sparse arguments is slow under autocast.",
    "stacked": "stacking tensors of different float dtypes fails under autocast.",
    "true_division": "dividing tensors of different float dtypes fails under autocast.",
    "while_loop": "loops whose values change their float dtype fail under autocast.",
}
# Installed while any autocast is in force.
hooks = patching.Patch(
    optional=_OPTIONAL,
    loss_ops=LossOps,
    **{hook.__name__: hook for hook in (eager_op, graph_op, recording, convert)},
    **{hook.__name__: _where_in_force(hook) for hook in _FOR_A_MODE},
)

# ---- The context -----------------------------------------------------------------------


class autocast:  # noqa: N801 - a context manager, named as torch's and Paddle's are
    """Runs ops in a low-precision dtype where that pays, and in float32 where accuracy needs it.

    A context manager and a decorator, for eager code and for code being traced:

    - matmuls, einsums and convolutions cast their float32 inputs down;
    - exponentials, logarithms, powers, softmaxes, sums, means, norms and cross-entropies cast
      low-precision inputs up to float32;
    - arithmetic and joining ops promote mixed inputs to the widest dtype among them, where the
      variables of a Keras layer, read in its call, count as low;
    - all other ops run in the dtype they are given.

    float64, integer and complex tensors are never cast. Your own casts inside, with `tf.cast`
    or `keras.ops.cast` between float32 and low precision, are respected. Gradients are computed
    in the dtypes of the forward pass and have the variable's dtype; `tape.gradient` can be
    called inside or outside. A custom gradient runs in the mode of its forward pass. Keras
    layers called inside are cast, too; optimizers are not. A layer reads its variables in float32,
    and what it computes of them alone is float32: only ops on activations cast them. Loops keep
    the dtypes of their variables; the branches of a condition are promoted to the widest dtype.

    It applies to its own thread and coroutine, and one object is re-entrant. A `tf.function`
    called inside is traced again, even if it was traced before; a `ConcreteFunction` stays
    unchanged, with a warning. Under `tf.distribute.Strategy.run` put the context inside the
    function, as each replica runs in its own thread.

    Source: the semantics of `torch.autocast` and `paddle.amp.auto_cast`, with the lists in
    `tfamp.OpLists`.

    Args:
        dtype: "float16", "bfloat16" or the TensorFlow dtype; any float dtype if not enabled.
            None picks the dtype that the hardware multiplies natively, as the policy "auto"
            does; without one nothing is cast.
        enabled: False makes a float32 island inside another autocast: ops run as given.
        op_lists: A `tfamp.OpLists`; None for the default lists of the dtype.
        cache_casts: Whether a variable that several ops of a trace use is cast once, per tape
            and until it is assigned. Its gradients are then accumulated in the low dtype.

    Warns:
        TfampWarning: Once for each function called inside whose graph was finished before and
            has float32 ops of the low list.

    Raises:
        ValueError: `dtype` is not a low-precision dtype.
        TypeError: `op_lists` is not an `OpLists`, or a flag is not a bool.
        UnsupportedBackendError: Keras runs on JAX or PyTorch, whose ops it cannot cast.

    Example:
        >>> import tensorflow as tf, tfamp
        >>> with tfamp.autocast("bfloat16"):
        ...     product = tf.matmul(tf.ones((2, 2)), tf.ones((2, 2)))
        ...     total = tf.reduce_sum(product)
        >>> product.dtype.name, total.dtype.name
        ('bfloat16', 'float32')
    """

    def __init__(
        self,
        dtype: LowDtypeLike | Literal["float32", "float64"] | None = None,
        enabled: bool = True,
        *,
        op_lists: OpLists | None = None,
        cache_casts: bool = True,
    ) -> None:
        checked_flag("enabled", enabled)
        checked_flag("cache_casts", cache_casts)
        if op_lists is not None and not isinstance(op_lists, OpLists):
            raise TypeError(
                f"op_lists must be a tfamp.OpLists; got {op_lists!r}. Start from "
                'tfamp.OpLists.default("float16").with_changes(...).'
            )
        name = getattr(dtype, "name", getattr(dtype, "__name__", dtype))  # NumPy's types, too.
        # A disabled autocast takes any float dtype, so that a loop over dtypes needs no branch.
        low = None if not enabled and name in FLOAT_DTYPES else low_dtype(dtype)
        if enabled:
            keras_hooks.require_tensorflow("tfamp.autocast")
        self._entered: list[Block] = []  # in all contexts and threads
        self._mode: Mode | None = None
        if enabled and low is not None:
            self._mode = Mode.of(low, op_lists or OpLists.default(low), cache_casts)

    def __enter__(self) -> autocast:
        patching.check_recognized()
        with contextlib.ExitStack() as undo:
            # First, so that ops get there with the inputs that they run with.
            guard = kernel_guard.enter(is_on=self._mode is not None)
            undo.callback(kernel_guard.leave, guard)
            for patch in (hooks, state_guard.hooks):
                patch.acquire()
                undo.callback(patch.release)
            if may_record():
                _watch_steps(self._mode)
            block = current_modes.block(self._mode)
            block.guard = guard
            undo.pop_all()
        self._entered.append(block)
        current_modes.enter(block)
        return self

    def __exit__(self, *exception: object) -> None:
        block = current_modes.leave_one(self._entered, "autocast")
        hooks.release()
        state_guard.hooks.release()
        kernel_guard.leave(block.guard)

    def __call__(self, function: _Callable) -> _Callable:
        """Decorates a function, or a layer's or model's `call`, to run under this autocast."""
        return decorated(self, "autocast", function)
