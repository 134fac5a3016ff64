"""Traces a function, converts its graph, and imports that into the function being traced.

call -> trace -> flat graph -> measured ranges -> passes -> decision -> new graph -> current
graph

The nodes become nodes of the current graph, so TensorFlow differentiates them like any others.
Two kinds of references need repair: functions get new names, and custom gradients use the
copies of the tensors they capture.

The function of a `tf.custom_gradient` is a closure over tensors of the graph it was traced in.
In a graph with copies of the nodes, the closure is traced again when its gradient is needed,
with the copies substituted for the captured tensors; that trace is converted as well.
"""

from __future__ import annotations

import contextlib
import contextvars
import copy
import dataclasses
import functools
import inspect
import itertools
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tensorflow as tf

from tfamp.core.errors import NothingConvertedWarning, RewriteError
from tfamp.graph.calibration import measure
from tfamp.graph.graph import Graph, new_suffix
from tfamp.graph.inlining import INLINED_INTO, argument_name
from tfamp.graph.nodes import GRADIENT, SHAPES, attribute_text
from tfamp.graph.ops import CALLS
from tfamp.graph.rewrite import PreparedGraph, convert_prepared, decided, prepare, resolved
from tfamp.interop import tf_private
from tfamp.interop.patching import Patch
from tfamp.interop.tf_private import as_written
from tfamp.layers.fused_norms import can_fuse, fits, normalize
from tfamp.planning.decision import Decision
from tfamp.planning.options import GraphUse, RewriteOptions
from tfamp.planning.ranges import Ranges
from tfamp.planning.structures import FLOAT32, LOOPS, RewritePlan, node_name, producers_first
from tfamp.torch_style.state import current_modes

_NUMBERS = itertools.count(1)
_CUSTOM = "CustomGradient-"
# Attribute of a node with a custom gradient: the dtypes of its outputs before conversion.
_DTYPES = "_tfamp_gradient_dtypes"
_DEFAULTS = {"autograph": True}
# Attributes dropped on import. Shapes are inferred again; colocation may refer to a fed node.
_LEFT_OUT = (SHAPES, "_class", INLINED_INTO, _DTYPES)

# ---- Functions and calls -------------------------------------------------------------------------


@dataclass(frozen=True)
class TracedFunction:
    """A function to trace, with its options.

    Attributes:
        python_function: The function to run while tracing.
        options: How the `tf.function` was made, or would be by default.
        signature: The arguments it takes, with their defaults.
    """

    python_function: Callable[..., Any]
    options: dict[str, Any]
    signature: inspect.Signature

    @classmethod
    def of(cls, fn: Any) -> TracedFunction:
        """Describes a `tf.function`, or any other callable."""
        if isinstance(fn, tf.types.experimental.PolymorphicFunction):
            options = tf_private.function_options(fn)
            return cls(fn.python_function, options, tf_private.function_signature(fn))
        return cls(fn, _DEFAULTS, inspect.signature(fn))

    def bound_to(self, instance: Any) -> TracedFunction:
        """Returns the function as a method of an object, which it does not keep alive."""
        reference, function = weakref.ref(instance), self.python_function

        def method(*args: Any, **kwargs: Any) -> Any:
            return function(reference(), *args, **kwargs)

        functools.update_wrapper(method, function)
        parameters = list(self.signature.parameters.values())[1:]
        signature = inspect.Signature(parameters)
        method.__signature__ = signature  # type: ignore[attr-defined]
        return dataclasses.replace(self, python_function=method, signature=signature)

    @property
    def name(self) -> str:
        """The function's name, for messages."""
        return getattr(self.python_function, "__name__", type(self.python_function).__name__)

    def wrapper(self, body: Callable[..., Any]) -> dict[str, Any]:
        """Returns constructor arguments for a `tf.function` like this one, with another body."""

        def rewritten(*args: Any, **kwargs: Any) -> Any:
            return body(*args, **kwargs)

        rewritten.__name__ = self.name
        # TensorFlow counts the traces of each code object, and warns about too many.
        own_name = f"rewritten_{self.name}_{next(_NUMBERS)}"
        rewritten.__code__ = rewritten.__code__.replace(co_name=own_name)
        # TensorFlow binds the arguments of a call by it and fills in defaults.
        rewritten.__signature__ = self.signature  # type: ignore[attr-defined]
        options = {name: each for name, each in self.options.items() if "autograph" not in name}
        return {**options, "python_function": rewritten, "name": self.name, "autograph": False}

    def unchanged(self) -> Any:
        """Returns a `tf.function` that runs it unchanged, with its own traces."""
        return tf.function(self.python_function, **self.options)

    def call(self, *args: Any, **kwargs: Any) -> FlatCall:
        """Returns a call with its arguments bound to the signature, defaults included."""
        bound = self.signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return FlatCall(bound.args, bound.kwargs)

    def trace(self, call: FlatCall, *, to_rewrite: bool = False) -> Any:
        """Traces the function for a call with tensors of the current graph.

        Returns the concrete function, from the call's tensors to the result. In a graph to
        rewrite BatchNormalization layers are the fused op.
        """

        def flat(*tensors: Any) -> Any:
            if to_rewrite:
                _to_rewrite.add(tf.compat.v1.get_default_graph())
            args, kwargs = call.with_tensors(tensors)
            return _returned(self.python_function(*args, **kwargs))

        traced = tf.function(
            flat,
            autograph=self.options["autograph"],
            experimental_autograph_options=self.options.get("experimental_autograph_options"),
        )
        with _fused_batch_normalization.held():
            return traced.get_concrete_function(*map(_spec, call.tensors))


@dataclass(frozen=True)
class FlatCall:
    """The arguments of one call, with the tensors in them.

    Composite tensors count as their components. Variables are not tensors here: the function
    captures them like Python values.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    @functools.cached_property
    def tensors(self) -> tuple[Any, ...]:
        """The tensors in the arguments."""
        return self._components(_is_tensor)

    def values(self) -> tuple[Any, ...]:
        """Returns the values that `tf.function` converts to tensors: tensors and NumPy arrays."""
        arrays = (np.ndarray, np.generic)
        return self._components(lambda leaf: _is_tensor(leaf) or isinstance(leaf, arrays))

    @as_written
    def with_tensors(self, tensors: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns the arguments with other tensors, in the order of `tensors`."""
        remaining = iter(tensors)

        def filled(leaf: Any) -> Any:
            if not _is_tensor(leaf):
                return leaf
            parts = [next(remaining) for _ in _components(leaf)]
            return tf.nest.pack_sequence_as(leaf, parts, expand_composites=True)

        args, kwargs = tf.nest.map_structure(filled, (self.args, dict(self.kwargs)))
        return args, kwargs

    def _components(self, is_wanted: Callable[[Any], bool]) -> tuple[Any, ...]:
        leaves = filter(is_wanted, tf.nest.flatten((self.args, dict(self.kwargs))))
        return tuple(itertools.chain.from_iterable(map(_components, leaves)))


def _spec(tensor: Any) -> tf.TensorSpec:
    name = None if tf.executing_eagerly() else tensor.op.name
    return tf.TensorSpec(tensor.shape, tensor.dtype, name=name)


def _is_tensor(leaf: Any) -> bool:
    is_extension = isinstance(leaf, tf.experimental.ExtensionType)
    return is_extension or (tf.is_tensor(leaf) and not isinstance(leaf, tf.Variable))


def _components(value: Any) -> list[Any]:
    return tf.nest.flatten(value, expand_composites=True)


@as_written
def _returned(result: Any) -> Any:
    """Returns a result with operations replaced by None, as a traced function returns them."""
    return tf.nest.map_structure(
        lambda leaf: None if isinstance(leaf, tf.Operation) else leaf, result
    )


# ---- The stages ----------------------------------------------------------------------------------


def call_converted(
    function: TracedFunction,
    call: FlatCall,
    options: RewriteOptions,
    counterpart: Callable[[Any], Any] = lambda tensor: tensor,
) -> tuple[Any, RewritePlan | None]:
    """Calls a function, converted to low precision, in the function that is being traced.

    `counterpart` maps a captured tensor to the one to use instead. Returns the result and the
    plan, which is None where the options leave the function in float32.
    """
    # An autocast around the call would cast before the rewrite decides, outputs included.
    with current_modes.set_to(None):
        traced = _trace(function, call)
    graph, plan = converted(function, traced, options)
    values = [*call.tensors, *map(counterpart, traced.captured_inputs)]
    results = iter(_into_current_graph(graph, traced, values, options))
    result = tf.nest.map_structure(
        lambda leaf: None if leaf is None else next(results),
        traced.structured_outputs,
        expand_composites=True,
    )
    return result, plan


def converted(
    function: TracedFunction, traced: Any, options: RewriteOptions
) -> tuple[Graph, RewritePlan | None]:
    """Returns the graph of a trace in low precision, and the plan."""
    if options.dtype == FLOAT32:
        return _flat(traced), None
    options, shared = resolved(options), _shared.get()
    if shared is None or shared.trace is not traced:
        prepared, use = _prepared(function, traced, options)
        decision = decided(prepared, options, use)
        graph = prepared.graph
    else:
        prepared, decision = _shared_decision(shared, function, options)
        graph = prepared.graph.copy()
    return graph, convert_prepared(graph, options, decision)


def shared_plan(function: TracedFunction, options: RewriteOptions) -> RewritePlan | None:
    """Returns the plan of a function whose trace is shared, None for another one."""
    shared = _shared.get()
    if options.dtype == FLOAT32 or shared is None or shared.trace is None:
        return None
    return _shared_decision(shared, function, resolved(options))[1].plan


def _shared_decision(
    shared: _Shared, function: TracedFunction, options: RewriteOptions
) -> tuple[PreparedGraph, Decision]:
    shared.prepared = shared.prepared or _prepared(function, shared.trace, options)
    graph, use = shared.prepared
    placement = "lists" if options.placement == "lists" else "min_cut"  # "fused" decides as this.
    if placement not in shared.decisions:
        shared.decisions[placement] = decided(graph, options, use)
    return graph, shared.decisions[placement]


def _prepared(
    function: TracedFunction, traced: Any, options: RewriteOptions
) -> tuple[PreparedGraph, GraphUse]:
    """Inlines the calls of a trace, measures ranges on calibration data, and runs the passes."""
    graph, ranges = _flat(traced), None
    inputs, outputs = ([tensor.name for tensor in x] for x in (traced.inputs, traced.outputs))
    if options.calibration is not None:
        calls = options.calibration.calls()
        batches = (function.call(*args, **kwargs).values() for args, kwargs in calls)
        ranges = measure(graph, inputs, batches, traced.captured_inputs, outputs)
    use = graph_use(outputs, inputs, options, ranges)
    return prepare(graph, options), use


def graph_use(
    fetches: Iterable[str], feeds: Iterable[str], options: RewriteOptions, ranges: Ranges | None
) -> GraphUse:
    """Returns the fetches, feeds and ranges on calibration data of one graph, with its limits."""
    limits = None if options.calibration is None else options.calibration.limits(options.dtype)
    return GraphUse(fetches, feeds, ranges, limits)


def _flat(traced: Any) -> Graph:
    """Returns a new copy of the graph of a trace, with its calls inlined."""
    names = [tensor.name for tensor in (*traced.outputs, *traced.inputs)]
    graph = Graph(traced.graph.as_graph_def(add_shapes=True), names).flatten()
    for _, node in _custom_nodes(graph):
        node.attr[_DTYPES].CopyFrom(node.attr["T"])
    return graph


def _into_current_graph(
    graph: Graph, traced: Any, values: Sequence[Any], options: RewriteOptions
) -> list[Any]:
    """Imports a graph, which it modifies, into the current one; returns the output tensors.

    `values` has a tensor for each input, of the input's dtype.
    """
    graph.rename_functions(new_suffix())
    names = [tensor.name for tensor in traced.inputs]
    inputs = dict(zip(names, map(tf_private.capture_into_graph, values), strict=True))
    current = tf.compat.v1.get_default_graph()
    scope = _free_scope(graph, current, names)
    names_here = {name: tensor.name for name, tensor in inputs.items()}
    gradients = options.for_gradients()
    host = _Host(weakref.ref(current), scope, names_here, traced.graph, gradients)
    with_gradients = {function for function, _ in _custom_nodes(graph) if function}
    _adopt_gradients(graph, host)
    outputs = [tensor.name for tensor in traced.outputs]
    results = _import(graph, inputs, outputs, scope)
    tf_private.give_graphs(with_gradients)
    tf_private.note_variables(traced.graph.variables)
    return results


@dataclass
class _Shared:
    """Values that rewrites of a function share: trace, graph after the passes, decisions."""

    python_function: Callable[..., Any]
    trace: Any = None
    prepared: tuple[PreparedGraph, GraphUse] | None = None
    decisions: dict[str, Decision] = field(default_factory=dict)


_shared: contextvars.ContextVar[_Shared | None] = contextvars.ContextVar("shared", default=None)


@contextlib.contextmanager
def traced_once(function: TracedFunction) -> Iterator[None]:
    """A context in which rewrites of a function, all of the same call, share one trace."""
    token = _shared.set(_Shared(function.python_function))
    try:
        yield
    finally:
        _shared.reset(token)


def _trace(function: TracedFunction, call: FlatCall) -> Any:
    shared = _shared.get()
    if shared is None or shared.python_function is not function.python_function:
        return function.trace(call, to_rewrite=True)
    found = shared.trace or function.trace(call, to_rewrite=True)
    if not any(map(tf.is_symbolic_tensor, found.captured_inputs)):
        shared.trace = found  # Other traces capture tensors of one caller's graph.
    return found


# ---- Custom gradients ----------------------------------------------------------------------------


@dataclass(frozen=True)
class _Host:
    """The graph that the nodes of a trace are copied to; looks up the copies.

    TensorFlow registers gradients for the life of the process, so this does not keep the graph.

    Attributes:
        graph: Returns the graph while it exists.
        scope: The name scope of the copies.
        inputs: Names of the tensors that replace the inputs of the trace, by name.
        traced: The `FuncGraph` that was traced.
        options: How gradients are converted.
    """

    graph: weakref.ref[Any]
    scope: str
    inputs: Mapping[str, str]
    traced: Any
    options: RewriteOptions

    def counterpart(self, name: str) -> Any:
        """Returns the copy of a tensor or operation of the trace; KeyError if there is none."""
        graph, copied = self.graph(), f"{self.scope}/{name}" if self.scope else name
        if graph is None:
            raise KeyError(f"The graph with the copy of {name!r} has been deleted.")
        return graph.as_graph_element(self.inputs.get(name, copied))

    def operation(self, name: str, function: str) -> Any:
        """Returns the copy of an operation of the trace, or of a function of it."""
        graph = self.graph()
        if not function or graph is None:
            return self.counterpart(name)
        return tf_private.graph_of_function(graph, function).get_operation_by_name(name)


@dataclass(frozen=True)
class _CustomGradient:
    """A gradient function for the copies of one node.

    Attributes:
        node: The node as it was traced: its attributes hold the closure's name, the prefix by
            which it was inlined, and the dtypes of its outputs.
        host: The graph with the copies.
        function: Name of the host's function that the node is in; "" for the graph itself.
    """

    node: Any
    host: _Host
    function: str

    def __call__(self, op: Any, *gradients: Any) -> list[Any]:
        """Returns a gradient for each input of the op, or None.

        When a model is saved, TensorFlow traces it without an op, and only for ops of the
        graph.
        """
        op = self.host.operation(self.node.name, self.function) if op is None else op
        name = attribute_text(self.node, GRADIENT)
        closure = tf_private.registered_gradient(name)
        given = zip(gradients, self.node.attr[_DTYPES].list.type, strict=True)
        dense = (None if x is None else tf.cast(tf.convert_to_tensor(x), to) for x, to in given)
        call = FlatCall(tuple(dense), {})
        function = TracedFunction.of(as_written(functools.partial(closure, op)))
        counterpart = functools.partial(self._counterpart, op)
        with warnings.catch_warnings():
            # Many gradients have nothing to convert.
            warnings.simplefilter("ignore", NothingConvertedWarning)
            results, _ = call_converted(function, call, self.host.options, counterpart)
        return [_like(result, taken) for result, taken in zip(results, op.inputs, strict=True)]

    def _counterpart(self, op: Any, tensor: Any) -> Any:
        """Returns the tensor to use in the copy for one that the closure captures."""
        graph = getattr(tensor, "graph", None)
        current = tf.compat.v1.get_default_graph()
        if graph is None or any(graph is each for each in _enclosing(current)):
            return tensor
        try:
            found = self._find(op, tensor, graph)
        except (KeyError, ValueError) as error:
            if self.host.options.placement == "fused" and tensor.op.inputs:
                return self._again(op, tensor)
            raise RewriteError(
                f"Node {op.name!r} ({op.type}): its custom gradient uses the tensor "
                f"{tensor.name!r} of {graph.name!r}, which the rewritten graph does not have. Pass "
                "it to the function with the custom gradient as an argument."
            ) from error
        return found if found.dtype == tensor.dtype else tf.cast(found, tensor.dtype)

    def _again(self, op: Any, tensor: Any) -> Any:
        """Computes a tensor again that a compiled function computes but does not return."""
        node = tensor.op
        attrs = {name: value for name, value in node.node_def.attr.items() if name[0] != "_"}
        inputs = [self._counterpart(op, each) for each in node.inputs]
        dtypes = [output.dtype for output in node.outputs]
        graph = tf.compat.v1.get_default_graph()
        made = graph.create_op(node.type, inputs, dtypes, attrs=attrs)
        return made.outputs[tensor.value_index]

    def _find(self, op: Any, tensor: Any, graph: Any) -> Any:
        if graph is self.host.traced:
            return self.host.counterpart(tensor.name)
        # Inlined nodes of its function have this prefix.
        prefix = attribute_text(self.node, INLINED_INTO)
        position = next((i for i, each in enumerate(graph.inputs) if each is tensor), None)
        if position is None:
            return op.graph.get_tensor_by_name(f"{prefix}{tensor.name}")
        if prefix:
            return op.graph.get_tensor_by_name(f"{argument_name(prefix, position)}:0")
        return op.graph.inputs[position]


def _adopt_gradients(graph: Graph, host: _Host) -> None:
    """Registers gradients for the nodes of a graph to import and makes the nodes refer to them."""
    for function, node in _custom_nodes(graph):
        adopted = f"Tfamp{_CUSTOM}{next(_NUMBERS)}"
        gradient = _CustomGradient(copy.deepcopy(node), host, function)
        tf.RegisterGradient(adopted)(as_written(gradient))
        node.attr[GRADIENT].s = adopted.encode()
    for node in graph.nodes:
        if node.op in CALLS or node.op in graph.functions:
            node.attr[GRADIENT].s = _call_gradient().encode()


@functools.cache
def _call_gradient() -> str:
    """Registers the gradient of imported calls when it is first needed."""
    name = f"TfampCallGradient-{next(_NUMBERS)}"
    tf.RegisterGradient(name)(as_written(_differentiate_call))
    return name


def _differentiate_call(op: Any, *gradients: Any) -> Sequence[Any]:
    # TensorFlow passes no op while a model is saved. Calls get new gradients on loading.
    return [] if op is None else tf_private.differentiate_call(op, gradients)


def _custom_nodes(graph: Graph) -> Iterator[tuple[str, Any]]:
    """Nodes with a custom gradient, each with the name of its function, "" for the graph itself."""
    for body in graph.bodies:
        for node in body.nodes:
            if attribute_text(node, GRADIENT).startswith(_CUSTOM):
                yield body.scope, node


def _enclosing(graph: Any) -> Iterator[Any]:
    """Yields a graph, the graph in which its function is traced, and so on outwards."""
    while graph is not None:
        yield graph
        graph = getattr(graph, "outer_graph", None)


def _like(gradient: Any, given: Any) -> Any:
    """Returns a gradient in the dtype of its tensor; of a resource as it is."""
    if gradient is None or not given.dtype.is_floating or gradient.dtype == given.dtype:
        return gradient
    return tf.cast(gradient, given.dtype)


# ---- Import --------------------------------------------------------------------------------------


def _import(
    graph: Graph, values: Mapping[str, Any], outputs: Sequence[str], scope: str
) -> list[Any]:
    """Imports a graph, which it modifies, with `values` instead of tensors of these names."""
    fed = {node_name(name) for name in values}
    nodes = [node for node in graph.main.nodes if node.name not in fed]
    graph.main.replace_nodes(in_topological_order(nodes))
    for node in graph.nodes:
        for attr in _LEFT_OUT:
            node.attr.pop(attr, None)
    library = graph.graph_def.library
    tf_private.register_functions(library.function, tf.compat.v1.get_default_graph())
    used = {name for node in graph.main.nodes for name in node.input}
    mapped = {
        name: value
        for name, value in values.items()
        if name in used or name.removesuffix(":0") in used
    }
    mapped |= {f"^{name}": values[f"{name}:0"] for name in fed if f"^{name}" in used}
    made = [name for name in dict.fromkeys(outputs) if name not in values]
    loops = [node.name for node in graph.main.nodes if node.op in LOOPS]
    imported = tf.graph_util.import_graph_def(
        graph.graph_def, input_map=mapped, return_elements=[*made, *loops], name=scope
    )
    nested = any(body.of_types(*LOOPS) for body in graph.functions.values())
    for loop in imported[len(made) :]:
        # Second derivatives need what the handles of variables refer to.
        if nested:
            tf_private.keep_handle_data(loop, LOOPS)
        else:
            tf_private.copy_handle_data(loop.inputs, loop.outputs)
    found = dict(zip(made, imported, strict=False))
    return [found[name] if name in found else tf.identity(values[name]) for name in outputs]


def in_topological_order(nodes: Sequence[Any]) -> list[Any]:
    """Returns nodes in topological order, otherwise as given.

    TensorFlow adds control edges between ops with side effects in this order, so an op must not
    come before one that it waits for.
    """
    by_name = {node.name: node for node in nodes}
    ordered = producers_first(by_name, lambda name: map(node_name, by_name[name].input))
    return [by_name[name] for name in ordered]


def _free_scope(graph: Graph, host: Any, inputs: Sequence[str]) -> str:
    """Returns a name scope for the nodes: "", which keeps their names, unless one is taken."""
    fed = {node_name(name) for name in inputs}
    taken = {op.name for op in host.get_operations()}
    if not any(node.name in taken and node.name not in fed for node in graph.main.nodes):
        return ""
    return f"rewritten_{next(_NUMBERS)}"


# ---- Graphs to rewrite ---------------------------------------------------------------------------

# By graph and not by thread: the replicas of a strategy trace theirs in threads of their own.
_to_rewrite: weakref.WeakSet[Any] = weakref.WeakSet()


def traces_for_a_rewrite() -> bool:
    """Whether a function whose graph will be rewritten is being traced here."""
    return any(graph in _to_rewrite for graph in _enclosing(tf.compat.v1.get_default_graph()))


def _normalize(
    original: Any, layer: Any, inputs: Any, training: Any = None, mask: Any = None
) -> Any:
    """Computes a float32 BatchNormalization layer by the fused op, where that computes the same.

    Keras computes it in a dozen ops, and most need float32. One op with float32 statistics
    takes and returns low-precision tensors in the rewritten graph.
    """
    if (
        mask is None
        and traces_for_a_rewrite()
        and getattr(inputs, "dtype", None) == layer.compute_dtype == "float32"
        and can_fuse(type(layer))
        and fits(layer, inputs, "float32", training)
    ):
        return normalize(layer, inputs, training)
    return original(layer, inputs, training=training, mask=mask)


_fused_batch_normalization = Patch(batch_normalization=_normalize)
