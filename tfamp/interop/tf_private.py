"""Private TensorFlow symbols that tfamp calls, each behind one small typed function.

Those for imported graphs are in `tfamp.interop.imported_graphs`.

Patched symbols are in the tables of `tfamp.interop.patching`.

If a release removed a symbol, its function raises `UnsupportedVersionError` with the installed
and the tested versions. Each function has a test, which fails if a release changes the symbol.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import re
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeAlias, TypeVar, cast

import tensorflow as tf

from tfamp.core.device_names import device_kind_of
from tfamp.core.dtypes import FLOAT_DTYPES, LOW_PRECISION
from tfamp.core.errors import UnsupportedVersionError
from tfamp.core.kinds import (
    DType,
    Function,
    Handle,
    Method,
    Op,
    Tensor,
    TFGraph,
    Trace,
)
from tfamp.core.names import Device
from tfamp.interop.patching import (
    attempt,
    foreign,
    foreign_symbol,
    missing_symbol,
    require_attribute,
)

_logger = logging.getLogger(__name__)
# The definition of an op type and of its attributes: `OpDef` and `OpDef.AttrDef` messages.
_OpDef: TypeAlias = Any
_AttrDef: TypeAlias = Any
_Method = TypeVar("_Method", bound=Callable[..., Any])


def strategy_needs_merge_call() -> bool:
    """Whether the current `tf.distribute` strategy updates variables through `merge_call`.

    Such a strategy, like MirroredStrategy on CPUs, forbids a `tf.cond` around an update in
    replica context: the condition has to be evaluated in cross-replica context. False without a
    strategy.

    Symbol: `tf.__internal__.distribute.strategy_supports_no_merge_call`; Keras calls it for the
    same purpose. No public function does.
    """
    distribute = tf.__internal__.distribute
    return not private_symbol(distribute, "strategy_supports_no_merge_call")()


def replicas_share_graph() -> bool:
    """Whether this is a replica, and all replicas are traced into the current graph.

    Such replicas can meet in a `merge_call`. A `tf.function` that a replica calls is traced for
    this replica alone.

    Symbol: the attribute `graph` of `tensorflow.python.distribute.mirrored_run`'s threads, the
    graph in which `strategy.run` was called. No public function returns it.
    """
    graph = getattr(threading.current_thread(), "graph", None)
    return graph is tf.compat.v1.get_default_graph()


def op_definition(name: str) -> _OpDef | None:
    """Returns the definition of an op type: its arguments and attributes.

    Symbol: `tensorflow.python.framework.op_def_registry.get`. No public function looks up an op
    by name: a graph's `graph_def` has no definitions, and `tf.raw_ops` lacks internal ops.

    An `OpDef` message, shared by all callers: do not change it. None for an unknown op; ops
    that `tf.load_op_library` has loaded are known.
    """
    return private("framework.op_def_registry:get")(name)


def cache_of_ops(function: _Method) -> _Method:
    """Caches a function of an op type, but for ops that are unknown: their library may be loaded.

    The function's first argument is the op type.
    """
    kept = functools.cache(function)
    known: set[str] = set()

    @functools.wraps(function)
    def call(op: str, *args: Any) -> Any:
        if op in known or op_definition(op) is not None:
            known.add(op)
            return kept(op, *args)
        return function(op, *args)

    call.cache_clear = kept.cache_clear  # type: ignore[attr-defined]
    return cast("_Method", call)


def known_ops() -> frozenset[str]:
    """Returns the names of all registered op types; takes tens of ms.

    Symbol: `tensorflow.python.framework.c_api_util.ApiDefMap`. The public `tf.raw_ops` lacks
    internal ops and ops of loaded libraries.
    """
    api = private("framework.c_api_util:ApiDefMap")()
    return frozenset(private_symbol(api, "op_names")())


def default_device_kind() -> Device:
    """Returns the kind of device that TensorFlow places an op on by default."""
    return "gpu" if tf.config.get_visible_devices("GPU") else "cpu"


def device_details(device: tf.config.PhysicalDevice) -> dict[str, Any]:
    """Returns TensorFlow's details of a physical device, with its compute capability as text.

    Symbol: `tensorflow.python.pywrap_tfe.TF_GetDeviceDetails`. The public function raises an
    error for a capability with a letter, such as "9.0a", so that even the name stays unknown.

    Empty for a device of another machine.
    """
    devices = tf.config.list_physical_devices()
    if device not in devices:
        return {}
    details = "pywrap_tfe:TF_GetDeviceDetails"
    nothing: dict[str, Any] = {}
    lost = "devices have no details."
    return dict(attempt(lambda: private(details)(devices.index(device)), nothing, lost))


def runtime_has_started() -> bool:
    """Whether TensorFlow has initialized its devices: then they cannot be configured any more.

    Symbol: `tensorflow.python.eager.context.Context._context_handle`. Public functions
    initialize them.
    """
    return private_symbol(private("eager.context:context")(), "_context_handle") is not None


def uses_onednn() -> bool:
    """Whether TensorFlow runs oneDNN's kernels, or is for CPUs for which it has none.

    Symbol: `tensorflow.python.util._pywrap_util_port.IsMklEnabled`. The environment variable
    does not tell, as its default depends on the CPU.
    """
    is_on = private("util._pywrap_util_port:IsMklEnabled")
    is_x86 = private("util._pywrap_util_port:IsX86Available")
    return bool(is_on() or not is_x86())


# ---- For autocast ----------------------------------------------------------------------------


def place_in_trace(op: Op) -> int:
    """The number of an operation in the order in which its graph's operations were created.

    Symbol: `tf.Operation._id`.
    """
    return int(private_symbol(op, "_id"))


def _definition(op: str) -> _OpDef:
    """The definition of an op type; for an unknown one that of an op without inputs."""
    return op_definition(op) or op_definition("NoOp")


def held_dtype(handle: Handle) -> str:
    """Returns the dtype of a handle's variable, or "" if unknown.

    Symbol: `tensorflow.python.ops.handle_data_util.get_handle_data`.
    """
    data = private("ops.handle_data_util:get_handle_data")(handle)
    known = data is not None and data.is_set and len(data.shape_and_type) == 1
    return dtype_of_number(data.shape_and_type[0].dtype) if known else ""


def resource_kind(handle: Handle) -> str:
    """Returns the type of an eager handle's resource, e.g. "tensorflow::Var"; "" if symbolic.

    Symbol: how TensorFlow prints a `ResourceHandle`, whose type has no public attribute.
    """
    match = re.search(r'type="([^"]*)"', repr(handle))
    if match is None and not tf.is_symbolic_tensor(handle):
        raise missing_symbol('the type in what a ResourceHandle prints, type="...",', "TensorFlow")
    return match[1] if match else ""


def operation_seeds() -> Any:
    """Returns the `random.Random` that seeds eager random ops without a seed, or None.

    Symbol: `tensorflow.python.eager.context.Context._rng`, which exists once
    `tf.random.set_seed` was called. No public function returns its state.
    """
    require_attribute("tensorflow.python.eager.context:Context._set_global_seed", "_rng")
    return getattr(_context()(), "_rng", None)


class OpInput(NamedTuple):
    """One input of an op.

    Attributes:
        name: Its name in the op's definition.
        type_attr: The attribute that holds its dtype; None if that is fixed or a list.
        floats: The float dtypes that the attribute allows and the device has a kernel for.
        dtype: The dtype if that is fixed, else None.
        default: The dtype of values without one, such as an empty list; None for any.
        is_list: Whether it takes several tensors.
    """

    name: str
    type_attr: str | None
    floats: frozenset[str]
    dtype: DType | None
    default: DType | None
    is_list: bool


# SparseAdd's threshold must have the dtype of the real part of its values. TensorFlow does not
# check this, and reads out of bounds for another dtype.
_REAL_PART_OF = {"Treal": "T"}


# Low dtypes that an op's shape function rejects in a graph, although there is a kernel.
_WITHOUT_SHAPE = {("Range", "Tidx"): frozenset({"float16"})}


@cache_of_ops
def op_inputs(op: str, device: str = "cpu") -> tuple[OpInput, ...]:
    """The inputs of an op type, in order; none for an unknown op.

    Only `floats` depends on the device, the kind that the op is to run on.
    """
    definition = _definition(op)
    used = {arg.type_attr for arg in definition.input_arg}
    floats = {
        attr.name: _allowed_floats(attr)
        - _without_kernel(op, attr.name, device)
        - _WITHOUT_SHAPE.get((op, attr.name), frozenset())
        for attr in definition.attr
        if attr.name in used and _allowed_floats(attr)
    }
    return tuple(
        OpInput(
            name=arg.name,
            type_attr=_REAL_PART_OF.get(arg.type_attr, arg.type_attr) or None,
            floats=floats.get(arg.type_attr, frozenset()),
            dtype=tf.as_dtype(arg.type) if arg.type else None,
            default=_default_dtype(definition, arg.type_attr),
            is_list=bool(arg.number_attr or arg.type_list_attr),
        )
        for arg in definition.input_arg
    )


def _default_dtype(definition: _OpDef, type_attr: str) -> DType | None:
    """The dtype of a type attribute that an op takes without one; None if it infers it."""
    defaults = {attr.name: attr.default_value.type for attr in definition.attr}
    number = defaults.get(type_attr)
    return tf.as_dtype(number) if number else None


@cache_of_ops
def attr_kinds(op: str) -> dict[str, str]:
    """The kinds of the attributes of an op type, such as "float" or "type", by name."""
    return {attr.name: attr.type for attr in _definition(op).attr}


def attr_default(op: str, name: str) -> Any:
    """The default value of an attribute of an op type, as a Python value; None without one."""
    attr = next(attr for attr in _definition(op).attr if attr.name == name)
    value, kind = attr.default_value, attr.default_value.WhichOneof("value")
    if kind != "list":
        return getattr(value, kind) if kind else None
    return next((list(values) for _, values in value.list.ListFields()), [])


def _allowed_floats(attr: _AttrDef) -> frozenset[str]:
    if attr.type != "type":
        return frozenset()
    allowed = attr.allowed_values.list.type if attr.HasField("allowed_values") else None
    return frozenset(
        name
        for name in FLOAT_DTYPES
        if allowed is None or tf.as_dtype(name).as_datatype_enum in allowed
    )


def _without_kernel(op: str, attr: str, device: str) -> frozenset[str]:
    """The low-precision dtypes that a device lacks a kernel for although it has float32's.

    In these TensorFlow would run the op on the CPU, as it does without a float32 kernel.
    """

    def has(kind: str, dtype: str) -> bool:
        return has_kernel(op, kind, ((attr, (dtype,)),))

    where = device if has(device, "float32") else "cpu"
    if not has(where, "float32"):  # Such as an op that is always part of a compiled function.
        return frozenset()
    return frozenset(dtype for dtype in LOW_PRECISION if not has(where, dtype))


# ---- Devices and kernels ---------------------------------------------------------------------


def device_kind_in_force() -> str:
    """The kind of device that the `tf.device` blocks around this code set; "" if they set none.

    Symbols: `tf.Graph._device_function_stack` and `tensorflow.python.eager.context.context`.
    Only existing tensors and ops have a public device.
    """
    graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
    while graph is not None:
        for block in private_symbol(graph, "_device_function_stack").peek_objs():
            if block.function is None:  # tf.device(None)
                return ""
            # A device function of the op may return any device.
            if not block.fast_string_merge:
                continue
            if kind := device_kind_of(block.string_merge(tf.compat.v1.NodeDef())):
                return kind
        # The caller of this graph's function may be in a block too.
        graph = outer_graph(graph)
    return device_kind_of(device_scope() or "")


def outer_graph(graph: TFGraph) -> TFGraph | None:
    """The graph in which the function of a graph is traced; None for a graph of no function.

    Symbol: `tf.__internal__.FuncGraph.outer_graph`.
    """
    if not isinstance(graph, tf.__internal__.FuncGraph):
        return None
    return cast("TFGraph | None", private_symbol(graph, "outer_graph"))


def device_scope() -> str | None:
    """The device that `tf.device` set for eager ops. Symbol: as `device_kind_in_force`."""
    return cast("str | None", _context()().device_name)


@functools.cache
def _context() -> Any:
    return private("eager.context:context")


def op_determinism_is_enabled() -> bool:
    """Whether `tf.config.experimental.enable_op_determinism` was called.

    Symbol: `tensorflow.python.framework.config.is_op_determinism_enabled`.
    """
    is_enabled = "framework.config:is_op_determinism_enabled"
    lost = "enable_op_determinism is not known to be on."
    return bool(attempt(lambda: private(is_enabled)(), False, lost))


class Kernel(NamedTuple):
    """A kernel of an op."""

    device: str  # Kind of device it runs on: "cpu", "gpu"; "default" is every kind.
    dtypes: dict[str, frozenset[str]]  # Restricted type attribute -> accepted dtypes.


@cache_of_ops
def kernels(op: str) -> tuple[Kernel, ...]:
    """Returns the kernels of an op type, also for devices that this machine does not have.

    Symbol: `tensorflow.python.framework.kernels.get_registered_kernels_for_op`. Otherwise one
    would have to run the op on the device and read the error message.
    """
    find = private("framework.kernels:get_registered_kernels_for_op")
    return tuple(
        Kernel(
            device=kernel.device_type.lower(),
            dtypes={
                constraint.name: frozenset(
                    map(dtype_of_number, constraint.allowed_values.list.type)
                )
                for constraint in kernel.constraint
            },
        )
        for kernel in find(op).kernel
    )


@cache_of_ops
def has_kernel(op: str, device: str, types: tuple[tuple[str, tuple[str, ...]], ...]) -> bool:
    """Whether a device kind has a kernel for an op with these type attributes and their dtypes.

    True for TPUs, which compile their ops.
    """
    if device == "tpu":
        return True
    candidates = kernels(op)
    # oneDNN's kernels replace the op's; for these ops they add bfloat16.
    if op.startswith("FusedBatchNorm") and any("bfloat16" in dtypes for _, dtypes in types):
        candidates += kernels(f"_MklNative{op}")

    def takes(kernel: Kernel, attr: str, dtypes: tuple[str, ...]) -> bool:
        return attr not in kernel.dtypes or kernel.dtypes[attr].issuperset(dtypes)

    return any(
        kernel.device in (device, "default")
        and all(takes(kernel, attr, dtypes) for attr, dtypes in types)
        for kernel in candidates
    )


# ---- For the graph rewrite -------------------------------------------------------------------


@functools.cache
def dtype_of_number(number: int) -> str:
    """Returns the name of a dtype enum in a graph; of a reference dtype its value's name."""
    try:
        return tf.as_dtype(number).base_dtype.name
    except TypeError:  # Not used in graphs, but in definitions of ops.
        return f"dtype {number}"


def dtype_number(name: str) -> int:
    """Returns the enum of a dtype in graphs."""
    return tf.as_dtype(name).as_datatype_enum


def is_tracking(attribute: str) -> bool:
    """Whether an attribute of an object is one in which TensorFlow keeps what it tracks of it.

    Symbol: the prefix `_self_` of `tensorflow.python.trackable.base.Trackable`'s attributes.
    """
    return attribute.startswith("_self_")


# ---- For SavedModels -------------------------------------------------------------------------


def saved_model_message() -> Any:
    """Returns an empty `SavedModel` message, the type of a saved_model.pb.

    Symbol: `tensorflow.core.protobuf.saved_model_pb2.SavedModel`. `tf.compat.v1` has the
    messages inside it, not this one, and `tf.saved_model.load` does not return graphs.
    """
    return foreign("tensorflow.core.protobuf.saved_model_pb2:SavedModel")()


def message_error() -> type[Exception]:
    """Returns the class of errors in parsing messages.

    Symbol: `google.protobuf.message.Error`. It is public in protobuf, a dependency of
    TensorFlow, which itself does not export it.
    """
    return cast("type[Exception]", foreign("google.protobuf.message:Error"))


def write_fingerprint(directory: str) -> None:
    """Writes the fingerprint.pb of a directory's saved_model.pb.

    Symbol: `tensorflow.python.saved_model.fingerprinting_utils.write_fingerprint`, which
    `tf.saved_model.save` calls. `tf.saved_model.experimental` only reads fingerprints.
    """
    write = "saved_model.fingerprinting_utils:write_fingerprint"
    attempt(lambda: private(write)(directory), None, "SavedModels get no fingerprint.")


def private(symbol: str) -> Any:
    """Returns a symbol below `tensorflow.python`, such as "ops.math_ops:cast"."""
    return foreign(f"tensorflow.python.{symbol}")


def private_symbol(owner: Any, name: str) -> Any:
    """Returns an attribute of a module or class; raises `UnsupportedVersionError` if missing."""
    return foreign_symbol(owner, name, "TensorFlow")


@functools.cache
def xla_works(device: str) -> bool:
    """Whether XLA compiles and runs a function on a device; tried once per process."""
    try:
        with tf.init_scope(), tf.device(device):
            compiled = tf.function(tf.sqrt, jit_compile=True, autograph=False)
            return bool(tf.reduce_all(tf.equal(compiled(tf.ones(4)), 1.0)))
    except tf.errors.OpError as error:
        _logger.info(
            "XLA does not work on %s, nothing is compiled: %s", device or "this machine", error
        )
        return False


# ---- Traced functions ------------------------------------------------------------------------


def is_compiled_by_xla() -> bool:
    """Whether the function being traced, or one around it, has `jit_compile=True`.

    Symbol: `tf.__internal__.get_enclosing_xla_context`. Graphs have no public attribute for it.
    """
    context = "ops.control_flow_ops:get_enclosing_xla_context"
    lost = "functions that XLA compiles count as others, which costs them time."
    return attempt(lambda: private(context)() is not None, False, lost)


def is_vectorized() -> bool:
    """Whether the body of a `tf.vectorized_map` is being traced.

    By the name scope "loop_body" that TensorFlow gives it, as nothing else tells.
    """
    graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
    while graph is not None:
        if "loop_body" in graph.get_name_scope().split("/"):
            return True
        graph = outer_graph(graph)
    return False


def has_tangent(*tensors: Tensor) -> bool:
    """Whether a `tf.autodiff.ForwardAccumulator` follows one of some tensors.

    Symbol: `tensorflow.python.eager.forwardprop_util.pack_tangents`.
    """

    def check() -> bool:
        pack = private("eager.forwardprop_util:pack_tangents")
        return len(pack(list(tensors)).tangents) > 0

    return attempt(check, True, "XLA multiplies no output layer by itself.")


def written_handles(function: Trace) -> list[Handle]:
    """The captured handles of variables that a concrete function may assign to; no arguments.

    Symbol: `get_read_only_resource_input_indices_graph` of
    `tensorflow.python.framework.auto_control_deps_utils`, by which TensorFlow orders calls.
    """
    indices = "framework.auto_control_deps_utils:get_read_only_resource_input_indices_graph"
    read = set(private(indices)(function.graph))
    captured = enumerate(function.captured_inputs)
    return [x for index, x in captured if x.dtype == tf.resource and index not in read]


def capture_into_graph(tensor: Tensor) -> Tensor:
    """Captures a tensor from outside in the function being traced; returns its placeholder.

    Symbol: `FuncGraph.capture`. Ops capture eager tensors, but the `input_map` of
    `tf.graph_util.import_graph_def` takes tensors of the graph only, and `tf.identity` copies a
    resource handle's shape for some dtypes only.
    """
    return private_symbol(tf.compat.v1.get_default_graph(), "capture")(tensor)


def captured_in(graph: TFGraph, tensor: Tensor) -> Tensor | None:
    """Returns the placeholder of a tensor that a traced function captured; None if it did not.

    Symbol: `FuncGraph.captures`.
    """
    captures = private_symbol(graph, "captures")
    return next((inner for outer, inner in captures if outer is tensor), None)


def call_at_calls(callback: Callable[[], object], key: str) -> None:
    """Makes every eager call of the function being traced begin with a call of `callback`.

    So do calls of functions around it, also of those that are traced later. One callback is
    called for each key and function; nothing else in the process is changed. A loaded copy of a
    saved function does not call it.

    Symbols: `FuncGraph`, its `capture`, and its `capture_call_time_value`, by which a function
    captures another value at every call. It captures a bool that no op takes: without a value,
    saved functions would count their captures wrongly.
    """
    graph, outer = None, tf.compat.v1.get_default_graph()
    function_graph = private("framework.func_graph:FuncGraph")
    while isinstance(outer, function_graph):  # Bodies of loops and branches are inside.
        graph, outer = outer, outer.outer_graph
    if graph is None:
        return  # A graph of TensorFlow 1, which is run, not called.
    value = _true()

    def called() -> Tensor:
        callback()
        return value

    # Saving stores what is captured at once, and finds the value of a call there.
    with graph.as_default():
        private_symbol(graph, "capture")(value)
        capture = private_symbol(graph, "capture_call_time_value")
        capture(called, tf.TensorSpec((), "bool"), key=key, default_value=value)


@functools.cache
def _true() -> Tensor:
    """A constant of eager mode; one object, by which saving recognizes it."""
    with tf.init_scope():
        return tf.constant(True)


def registered_gradient(name: str) -> Method:
    """Returns the gradient function registered under a name; raises a LookupError without one.

    Symbol: `tensorflow.python.framework.ops.gradient_registry`. `tf.RegisterGradient` is
    public, looking up is not.
    """
    return cast("Method", private("framework.ops:gradient_registry").lookup(name))


def function_options(function: Function) -> dict[str, Any]:
    """Returns the arguments of `tf.function` that a function was created with.

    Symbols: the attributes `_jit_compile`, `_reduce_retracing`, `_autograph` and
    `_experimental_autograph_options` of `tf.types.experimental.PolymorphicFunction`.
    """
    names = "jit_compile", "reduce_retracing", "autograph", "experimental_autograph_options"
    options = {name: private_symbol(function, f"_{name}") for name in names}
    return {"input_signature": function.input_signature, **options}


def function_signature(function: Function) -> inspect.Signature:
    """Returns the signature of a `tf.function`, with defaults.

    Symbol: the attribute `_default_values` of `tf.types.experimental.PolymorphicFunction`. The
    Python function of one restored from a SavedModel has a generic signature.
    """
    defaults = private_symbol(function, "_default_values")
    parameters = [
        inspect.Parameter(name, parameter.kind, default=defaults.get(name, parameter.empty))
        for name, parameter in function.function_type.parameters.items()
    ]
    return inspect.Signature(parameters)


def _function_class() -> type[Any]:
    """TensorFlow's class of functions, or one of which no instance can be made."""
    try:
        return cast(
            "type[Any]", private("eager.polymorphic_function.polymorphic_function:Function")
        )
    except UnsupportedVersionError as error:
        missing = error

    class Missing:
        def __init__(self, *_: Any, **__: Any) -> None:
            raise missing

    return Missing


class SaveableFunction(_function_class()):  # type: ignore[misc]
    """A `tf.function` that can be subclassed and is tracked and saved like any other.

    Symbol: `tensorflow.python.eager.polymorphic_function.polymorphic_function.Function`. Saving
    requires attributes and signatures to be its instances; no public base class suffices.
    """


# ---- For diagnostics -------------------------------------------------------------------------


def set_attribute(operation: Op, name: str, value: Any) -> None:
    """Adds an attribute, a `TensorProto`, to an op. Symbol: `Operation._set_attr`."""
    attribute = tf.compat.v1.AttrValue(tensor=value)
    private_symbol(operation, "_set_attr")(name, attribute)


def ops_marked(name: str, text: str) -> contextlib.AbstractContextManager[None]:
    """Returns a context in which ops added to the current graph get an attribute.

    Symbol: `Graph._attr_scope`. Name scopes would be public, but change the names that rules
    match. The attribute's name begins with an underscore.
    """
    attribute = tf.compat.v1.AttrValue(s=text.encode())
    scope = private_symbol(tf.compat.v1.get_default_graph(), "_attr_scope")
    return cast("contextlib.AbstractContextManager[None]", scope({name: attribute}))


def as_written(method: _Method) -> _Method:
    """Excludes a method from AutoGraph, which converts all code that a `tf.function` calls."""
    return tf.autograph.experimental.do_not_convert(method)


@contextlib.contextmanager
def scratch_graph() -> Iterator[None]:
    """Returns a context that traces ops into a graph which is thrown away.

    Symbol: `framework.func_graph.FuncGraph`; a `tf.Graph` does not take tensors from outside.
    """
    with private("framework.func_graph:FuncGraph")("scratch").as_default():
        yield


def placeholder(dtype: str, shape: Any) -> Tensor:
    """A tensor without a value in the graph that is being traced."""
    return tf.compat.v1.placeholder(dtype, shape)
