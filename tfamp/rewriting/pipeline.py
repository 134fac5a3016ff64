"""Traces a function, converts its graph, and imports that into the function being traced.

call -> trace -> flat graph -> measured ranges -> passes -> decision -> new graph -> current
graph

The nodes become nodes of the current graph, so TensorFlow differentiates them like any others.
Two kinds of references need repair: functions get new names, and custom gradients use the
copies of the tensors they capture, see `tfamp.rewriting.custom_gradients`.
"""

from __future__ import annotations

import contextlib
import contextvars
import itertools
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import tensorflow as tf

from tfamp import kernel_guard
from tfamp.core.kinds import Nest, NodeDef, Tensor, Trace
from tfamp.graph.calibration import measure
from tfamp.graph.graph import Graph, collector_paused, new_suffix
from tfamp.graph.inlining import INLINED_INTO
from tfamp.graph.nodes import SHAPES
from tfamp.graph.rewrite import (
    IndexedGraph,
    carry_out,
    decide_nodes,
    index_after_passes,
    resolved,
)
from tfamp.interop import imported_graphs, tf_private
from tfamp.planning.decision import Decision
from tfamp.planning.options import GraphUse, RewriteOptions
from tfamp.planning.ranges import Ranges
from tfamp.planning.structures import FLOAT32, LOOPS, RewritePlan, node_name, producers_first
from tfamp.rewriting.custom_gradients import (
    DTYPES,
    Counterpart,
    Host,
    adopt_gradients,
    custom_nodes,
    note_dtypes,
)
from tfamp.rewriting.traced_function import FlatCall, PythonFunction, TracedFunction
from tfamp.torch_style.modes import current_modes
from tfamp.training import underflow

_NUMBERS = itertools.count(1)
# Attributes dropped on import. Shapes are inferred again; colocation may refer to a fed node.
_LEFT_OUT = (SHAPES, "_class", INLINED_INTO, DTYPES)

# ---- The stages ----------------------------------------------------------------------------------


def call_converted(
    function: TracedFunction,
    call: FlatCall,
    options: RewriteOptions,
    counterpart: Counterpart = lambda tensor: tensor,
) -> tuple[Nest, RewritePlan | None]:
    """Calls a function, converted to low precision, in the function that is being traced.

    `counterpart` maps a captured tensor to the one to use instead. Returns the result and the
    plan, which is None where the options leave the function in float32.
    """
    # An autocast around the call would cast before the rewrite decides, outputs included.
    with current_modes.set_to(None), _watching_steps(options):
        traced = _trace(function, call)
    graph, plan = graph_in_low_precision(function, traced, options)
    values = [*call.tensors, *map(counterpart, traced.captured_inputs)]
    # A collection on the way would go through the trace, the model and the nodes made so far.
    with collector_paused():
        results = iter(_into_current_graph(graph, traced, values, options))
    result = tf.nest.map_structure(
        lambda leaf: None if leaf is None else next(results),
        traced.structured_outputs,
        expand_composites=True,
    )
    return result, plan


def graph_in_low_precision(
    function: TracedFunction, traced: Trace, options: RewriteOptions
) -> tuple[Graph, RewritePlan | None]:
    """Returns the graph of a trace in low precision, and the plan."""
    if options.dtype == FLOAT32:
        return _flat(traced), None
    options, shared = resolved(options), _shared_by(function)
    if shared is None or shared.trace is not traced:
        indexed, use = _indexed(function, traced, options)
        decision = decide_nodes(indexed, options, use)
        graph = indexed.graph
    else:
        indexed, decision = _shared_decision(shared, function, options)
        graph = indexed.graph.copy()
    return graph, carry_out(graph, options, decision)


def shared_plan(function: TracedFunction, options: RewriteOptions) -> RewritePlan | None:
    """Returns the plan of a function whose trace is shared, None for another one."""
    shared = _shared_by(function)
    if options.dtype == FLOAT32 or shared is None or shared.trace is None:
        return None
    return _shared_decision(shared, function, resolved(options))[1].plan


def _shared_decision(
    shared: _Shared, function: TracedFunction, options: RewriteOptions
) -> tuple[IndexedGraph, Decision]:
    shared.indexed = shared.indexed or _indexed(function, shared.trace, options)
    indexed, use = shared.indexed
    # "fused" decides as "min_cut" does.
    placement = "lists" if options.placement == "lists" else "min_cut"
    if placement not in shared.decisions:
        shared.decisions[placement] = decide_nodes(indexed, options, use)
    return indexed, shared.decisions[placement]


def _indexed(
    function: TracedFunction, traced: Trace, options: RewriteOptions
) -> tuple[IndexedGraph, GraphUse]:
    """Inlines the calls of a trace, measures ranges on calibration data, runs the passes."""
    graph, ranges = _flat(traced), None
    inputs = [tensor.name for tensor in traced.inputs]
    outputs = [tensor.name for tensor in traced.outputs]
    if options.calibration is not None:
        calls = options.calibration.calls()
        batches = (function.call(*args, **kwargs).values() for args, kwargs in calls)
        ranges = measure(graph, inputs, batches, traced.captured_inputs, outputs)
    use = graph_use(outputs, inputs, options, ranges)
    return index_after_passes(graph, options), use


def graph_use(
    fetches: Iterable[str], feeds: Iterable[str], options: RewriteOptions, ranges: Ranges | None
) -> GraphUse:
    """Returns fetches, feeds and ranges on calibration data of a graph, with its limits."""
    calibration = options.calibration
    limits = None if calibration is None else calibration.limits(options.dtype)
    return GraphUse(fetches, feeds, ranges, limits)


def _flat(traced: Trace) -> Graph:
    """Returns a new copy of the graph of a trace, with its calls inlined."""
    names = [tensor.name for tensor in (*traced.outputs, *traced.inputs)]
    graph = Graph(traced.graph.as_graph_def(add_shapes=True), names).flatten()
    note_dtypes(graph)
    return graph


def _into_current_graph(
    graph: Graph, traced: Trace, values: Sequence[Tensor], options: RewriteOptions
) -> list[Tensor]:
    """Imports a graph, which it modifies, into the current one; returns the output tensors.

    `values` has a tensor for each input, of the input's dtype.
    """
    graph.rename_functions(new_suffix())
    names = [tensor.name for tensor in traced.inputs]
    inputs = dict(zip(names, map(tf_private.capture_into_graph, values), strict=True))
    current = tf.compat.v1.get_default_graph()
    scope = _free_scope(graph, current, names)
    host = Host(
        graph=weakref.ref(current),
        scope=scope,
        inputs={name: tensor.name for name, tensor in inputs.items()},
        replaced={body.scope: body.replaced for body in graph.bodies},
        traced=traced.graph,
        options=options.for_gradients(),
        convert=call_converted,
    )
    with_gradients = {function for function, _ in custom_nodes(graph) if function}
    adopt_gradients(graph, host)
    outputs = [tensor.name for tensor in traced.outputs]
    before = len(current.get_operations())
    results = _import(graph, inputs, outputs, scope)
    imported = current.get_operations()[before:]
    imported_graphs.keep_order(imported)
    if options.dtype != FLOAT32:
        kernel_guard.guard_gradients(imported)
    imported_graphs.give_graphs(with_gradients)
    imported_graphs.note_variables(traced.graph.variables)
    return results


@dataclass
class _Shared:
    """Values that rewrites of a function share: trace, graph after the passes, decisions."""

    trace: Trace = None
    indexed: tuple[IndexedGraph, GraphUse] | None = None
    decisions: dict[str, Decision] = field(default_factory=dict)


@dataclass
class _Sharing:
    """A function whose rewrites share a trace, and these traces: one for what XLA compiles.

    Optimizers and users' code read whether they are traced for XLA, so its graph may differ.
    """

    python_function: PythonFunction
    by_jit: dict[bool, _Shared] = field(default_factory=dict)


_sharing: contextvars.ContextVar[_Sharing | None] = contextvars.ContextVar("sharing", default=None)


def _shared_by(function: TracedFunction) -> _Shared | None:
    """The values that rewrites of a function share; None if they share none."""
    sharing = _sharing.get()
    if sharing is None or sharing.python_function is not function.python_function:
        return None
    return sharing.by_jit.setdefault(bool(function.jit_compile), _Shared())


@contextlib.contextmanager
def traced_once(function: TracedFunction) -> Iterator[None]:
    """A context in which rewrites of a function, all of the same call, share one trace."""
    token = _sharing.set(_Sharing(function.python_function))
    try:
        yield
    finally:
        _sharing.reset(token)


def _trace(function: TracedFunction, call: FlatCall) -> Trace:
    shared = _shared_by(function)
    if shared is None:
        return function.trace(call, to_rewrite=True)
    trace = shared.trace or function.trace(call, to_rewrite=True)
    if not any(map(tf.is_symbolic_tensor, trace.captured_inputs)):
        shared.trace = trace  # Other traces capture tensors of one caller's graph.
    return trace


def _watching_steps(options: RewriteOptions) -> contextlib.AbstractContextManager[None]:
    """A context in which an optimizer's first steps are watched only where they are float16's.

    Candidates of `tune` share a trace, whatever their dtypes, and run it to measure times.
    """
    is_watched = options.dtype == "float16" and _sharing.get() is None
    return contextlib.nullcontext() if is_watched else underflow.paused()


# ---- Import --------------------------------------------------------------------------------------


def _import(
    graph: Graph, values: Mapping[str, Tensor], outputs: Sequence[str], scope: str
) -> list[Tensor]:
    """Imports a graph, which it modifies, with `values` instead of tensors of these names."""
    fed = {node_name(name) for name in values}
    nodes = [node for node in graph.main.nodes if node.name not in fed]
    graph.main.replace_nodes(in_topological_order(nodes))
    for node in graph.nodes:
        for attr in _LEFT_OUT:
            node.attr.pop(attr, None)
    library = graph.graph_def.library
    imported_graphs.register_functions(library.function, tf.compat.v1.get_default_graph())
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
        graph.graph_def,
        input_map=mapped,
        return_elements=[*made, *loops],
        name=f"{scope}/" if scope else "",  # The slash says that it is the whole scope.
    )
    nested = any(body.of_types(*LOOPS) for body in graph.functions.values())
    for loop in imported[len(made) :]:
        # Second derivatives need what the handles of variables refer to.
        if nested:
            imported_graphs.keep_handle_data(loop, LOOPS)
        else:
            imported_graphs.copy_handle_data(loop.inputs, loop.outputs)
    tensors = dict(zip(made, imported, strict=False))
    return [tensors[name] if name in tensors else tf.identity(values[name]) for name in outputs]


def in_topological_order(nodes: Sequence[NodeDef]) -> list[NodeDef]:
    """Returns nodes in topological order, otherwise in their order.

    TensorFlow adds control edges between ops with side effects in this order, so an op must not
    come before one that it waits for.
    """
    by_name = {node.name: node for node in nodes}
    ordered = producers_first(by_name, lambda name: map(node_name, by_name[name].input))
    return [by_name[name] for name in ordered]


def _free_scope(graph: Graph, host: tf.Graph, inputs: Sequence[str]) -> str:
    """Returns a scope for the nodes, from the root: "" keeps their names, if none is taken."""
    fed = {node_name(name) for name in inputs}
    taken = {op.name for op in host.get_operations()}
    if not any(node.name in taken and node.name not in fed for node in graph.main.nodes):
        return ""
    name, outer = f"rewritten_{next(_NUMBERS)}", tf.get_current_name_scope()
    return f"{outer}/{name}" if outer else name
