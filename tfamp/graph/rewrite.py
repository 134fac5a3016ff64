"""GraphDef -> GraphDef in low precision: inline, run passes, index, decide, apply, verify."""

from __future__ import annotations

import dataclasses
import importlib
import warnings
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass
from typing import Any, NamedTuple

import tensorflow as tf

from tfamp.core.dtypes import LOW_PRECISION
from tfamp.core.errors import NothingConvertedWarning, RewriteError, TfampWarning
from tfamp.core.names import Device, LowDtype, Placement
from tfamp.core.options import checked_word
from tfamp.core.profile import MachineProfile
from tfamp.graph.body import Body
from tfamp.graph.graph import Graph, collector_paused
from tfamp.graph.index import index_bodies
from tfamp.graph.op_lists import OpLists, default_lists
from tfamp.graph.ops import FRAMES, STATISTICS_ATTR
from tfamp.interop import tf_private
from tfamp.interop.patching import level_of_user
from tfamp.machine import hardware
from tfamp.planning import structures
from tfamp.planning.decision import Decision, PaintedScope, decide
from tfamp.planning.inexact_kernels import inexact_nodes
from tfamp.planning.op_sets import CHOICES
from tfamp.planning.options import (
    COLORS,
    SUCCESSORS,
    GraphUse,
    OpColors,
    RewriteOptions,
)
from tfamp.planning.ranges import RULE as CALIBRATION
from tfamp.planning.structures import RewriteResult


def rewrite_graph_def(
    graph_def: Any,
    fetches: Iterable[str],
    *,
    feeds: Iterable[str] = (),
    dtype: LowDtype = "float16",
    op_lists: OpLists | None = None,
    keep_float32: Iterable[str] = (),
    force_low: Iterable[str] = (),
    placement: Placement = RewriteOptions.placement,
    device: Device = RewriteOptions.device,
    profile: MachineProfile | None = None,
) -> RewriteResult:
    """Returns a graph that computes in low precision where that is safe and pays.

    Args:
        graph_def: A `tf.compat.v1.GraphDef`, float32; it is not modified.
        fetches: Tensors ("dense/Relu:0") or operations that are used; they keep their dtypes.
        feeds: Tensors that are given a value; they keep their dtypes, as placeholders do
            anyway.
        dtype: "float16" or "bfloat16".
        op_lists: Which ops may be low; `OpLists.default(dtype, device)` if None.
        keep_float32: Regular expressions, searched for in node names: these stay float32. Nodes
            of branches, loops and other functions have the name of their caller in front too,
            as in "gate/cond/MatMul".
        force_low: The same: these are converted wherever the op has a kernel for it.
        placement: "min_cut": the lists decide what may be low, and a minimum cut what pays, by
            the times that `profile` gives for the shapes in the graph, which
            `graph.as_graph_def(add_shapes=True)` records. Without shapes, and where the cut
            gains almost nothing, the lists decide, as with "lists". "fused": as "min_cut", and
            XLA compiles the arithmetic between products and convolutions; the plan has the
            nodes as they were before.
        device: Kind of device of the nodes that are pinned to none: "cpu", "gpu", "tpu", or
            "auto" for this machine's. A node without a kernel there stays float32. "gpu" needs
            a TensorFlow that has kernels for GPUs, not a GPU.
        profile: How fast the machine is in each dtype; None for built-in figures, which depend
            on the kind of device and on what it multiplies natively. No profile is measured or
            read here, whatever TFAMP_PROFILE says: `tfamp.rewrite` does that.

    Returns:
        The new graph, with functions rewritten under their names, and the plan.

    Raises:
        TypeError, ValueError: An argument is wrong; the message names what is allowed.
        RewriteError: The graph is not valid or has an unknown op; it names node, op and cause.

    Example:
        >>> import tensorflow as tf
        >>> square = tf.function(lambda x: x @ x)
        >>> graph = square.get_concrete_function(tf.TensorSpec((2, 2))).graph
        >>> from tfamp.core.profile import builtin_profile
        >>> profile = builtin_profile("cpu", bfloat16=True)
        >>> result = rewrite_graph_def(
        ...     graph.as_graph_def(), ["Identity:0"], dtype="bfloat16", profile=profile
        ... )
        >>> [(node.name, node.dtype) for node in result.plan.nodes]
        [('x', 'float32'), ('matmul', 'bfloat16'), ('Identity', 'float32')]
    """
    if not isinstance(graph_def, tf.compat.v1.GraphDef):
        raise TypeError(
            f"graph_def must be a tf.compat.v1.GraphDef; got {type(graph_def).__name__}. "
            "For a concrete function it is `function.graph.as_graph_def()`."
        )
    checked_word("dtype", dtype, LOW_PRECISION, exact=True)
    options = RewriteOptions(
        dtype=dtype,
        op_lists=op_lists,
        keep_float32=keep_float32,
        force_low=force_low,
        placement=placement,
        device=device,
        profile="builtin" if profile is None else profile,
    )
    use = GraphUse(fetches, feeds)
    options, graph = resolved(options), Graph(graph_def, use.names).copy().inline_calls()
    return RewriteResult(graph.graph_def, convert_graph(graph, options, use))


def resolved(options: RewriteOptions) -> RewriteOptions:
    """Resolves the options that depend on this machine: kind of device, op lists and profile.

    Raises:
        ValueError: This machine cannot rewrite for the device, or XLA does not work here.
    """
    kind = hardware.device_kind(options.device)
    if kind == "gpu" and all(kernel.device != kind for kernel in tf_private.kernels("MatMul")):
        raise ValueError(
            f"device is 'gpu', but this TensorFlow {tf.__version__} was built without GPU "
            "kernels, which decide what can be converted. Convert with one that has them, such "
            "as tensorflow for Linux on x86-64, or give device='cpu'."
        )
    if options.placement == "fused" and not tf_private.xla_works(""):
        raise ValueError(
            "placement='fused' has XLA compile arithmetic, and XLA does not work here. Give "
            "placement='min_cut', which is the same without it."
        )
    profile = options.profile
    # The placement "lists" needs no measurement: its plan only holds estimated times.
    if profile is None and options.placement != "lists":
        profile = hardware.find_profile().profile
    defaults = default_lists(options.dtype, kind)
    lists = options.op_lists or defaults
    return dataclasses.replace(
        options,
        device=kind,
        op_lists=lists,
        onednn=hardware.onednn_dtypes(),
        moved_ops=_moved_ops(lists, defaults),
        profile=profile if isinstance(profile, MachineProfile) else hardware.profile_of(kind),
    )


def _moved_ops(lists: OpColors, defaults: OpLists) -> frozenset[str]:
    """The ops that are on another list than by default, or that the caller put on one."""
    moved = (getattr(lists, color) - getattr(defaults, color) for color in COLORS)
    return frozenset().union(getattr(lists, "as_given", ()), *moved)


class Pass(NamedTuple):
    """A graph-to-graph rewrite in place: the function `run` of a file of `tfamp.graph.passes`.

    Its arguments are the graph and the options, after the decision also the plan.

    Attributes:
        file: The file, which is imported when the pass runs.
        ops: The pass runs on graphs with one of these op types; None for any graph.
        applies: Whether the options enable the pass.
        carries_plan: Whether it runs after the decision, on the converted graph.
        in_frames: Whether it supports graphs with loops of TensorFlow 1.
    """

    file: str
    ops: frozenset[str] | None
    applies: Callable[[RewriteOptions], bool]
    carries_plan: bool = False
    in_frames: bool = False


def _not_grapplers(options: RewriteOptions) -> bool:
    """Grappler's own lists give Grappler's result, node by node."""
    return options.updates != "low"


def _on_cpus(options: RewriteOptions) -> bool:
    return options.device == "cpu" and _not_grapplers(options)


_FILTER_GRADIENTS = frozenset({"Conv2DBackpropFilter", "DepthwiseConv2dNativeBackpropFilter"})
# All passes, in the order in which they run. The first ones are equivalence-preserving and make
# a graph faster; then it is indexed, decided and converted. The others make low ops more
# accurate, or have XLA compile them.
PASSES = (
    Pass("loop_sums", structures.LOOPS, _not_grapplers),
    Pass("filter_gradients", _FILTER_GRADIENTS, _on_cpus),
    Pass("loop_reads", structures.LOOPS, lambda options: True),
    Pass("bias_sums", frozenset({"BiasAddGrad"}), _not_grapplers, carries_plan=True),
    Pass("constants", CHOICES, _not_grapplers, carries_plan=True, in_frames=True),
    Pass("fusion", None, lambda options: options.placement == "fused", carries_plan=True),
)


def _passes_for(graph: Graph, options: RewriteOptions, carries_plan: bool) -> list[Pass]:
    """The passes before or after the decision that apply to a graph."""
    ops = frozenset(op for body in graph.bodies for op in body.by_op)
    framed = not FRAMES.isdisjoint(ops)
    return [
        graph_pass
        for graph_pass in PASSES
        if graph_pass.carries_plan == carries_plan
        and (graph_pass.in_frames or not framed)
        and (graph_pass.ops is None or not graph_pass.ops.isdisjoint(ops))
        and graph_pass.applies(options)
    ]


def _run(passes: Iterable[Pass], *args: Any) -> None:
    for graph_pass in passes:
        importlib.import_module(f"tfamp.graph.passes.{graph_pass.file}").run(*args)


@dataclass(frozen=True, slots=True)
class IndexedGraph:
    """A graph after its first passes, with its index: the input of every decision about it.

    Attributes:
        graph: The graph.
        indexes: The index of the graph, then of each function.
    """

    graph: Graph
    indexes: Sequence[structures.GraphIndex]


def convert_graph(graph: Graph, options: RewriteOptions, use: GraphUse) -> structures.RewritePlan:
    """Converts a graph in place; returns the plan.

    Raises:
        ValueError: The graph has no node of a name, or that matches a pattern.
        RewriteError: The graph is not valid or has an unknown op.
    """
    indexed = index_after_passes(graph, options)
    return carry_out(graph, options, decide_nodes(indexed, options, use))


@collector_paused()
def index_after_passes(graph: Graph, options: RewriteOptions) -> IndexedGraph:
    """Runs the first passes on a graph, in place, and indexes it.

    The result does not depend on the placement, nor on patterns.
    """
    _run(_passes_for(graph, options, carries_plan=False), graph, options)
    indexes = index_bodies(graph, options.dtype, options.device)
    return IndexedGraph(graph, indexes)


@collector_paused()
def decide_nodes(indexed: IndexedGraph, options: RewriteOptions, use: GraphUse) -> Decision:
    """Decides about a graph, which is not modified."""
    return decide(indexed.indexes, indexed.graph.weights, options, use)


def carry_out(graph: Graph, options: RewriteOptions, decision: Decision) -> structures.RewritePlan:
    """Converts a graph in place, as was decided; returns the plan."""
    passes = _passes_for(graph, options, carries_plan=True)
    # Not as a decorator: its frame would end the search for the user's.
    with collector_paused():
        apply_plan(graph, decision.plan)
        verify_rewrite(graph, decision.scopes, decision.plan)
        _run(passes, graph, options, decision.plan)
        verify_result(graph, options, decision)
    for text in decision.idle:
        warnings.warn(text, TfampWarning, stacklevel=level_of_user())
    if not decision.plan.summary.low_nodes:
        text = _nothing_converted(decision)
        warnings.warn(text, NothingConvertedWarning, stacklevel=level_of_user())
    return decision.plan


def _nothing_converted(decision: Decision) -> str:
    plan = decision.plan
    rules = {node.reason.rule: node for node in reversed(plan.nodes)}
    able = "is worth converting" if "cut" in rules else "can be converted"
    because = ""
    if (node := rules.get(CALIBRATION)) is not None:
        because = f" with this calibration data ({node.name}: {node.reason.text})"
    slots = [slot for scope in decision.scopes for slot in scope.index.slots]
    for dtype in sorted({slot.dtype for slot in slots if slot.dtype in LOW_PRECISION}):
        because += f"; some compute in {dtype} already"
        because += ", as they do under a mixed policy of Keras"
    return f"The graph has no op that {able} to {plan.dtype}{because}: it stays as it is."


# ---- The new graph -------------------------------------------------------------------------------


def apply_plan(graph: Graph, plan: structures.RewritePlan) -> None:
    """Carries out a plan in the graph it was made for, in place.

    Nodes keep their names and their order; Casts come behind them. Functions keep their names
    and the names of their arguments and results.
    """
    for retype in plan.retypes:
        _retype(graph.body(retype.scope), retype, tf_private.dtype_number(plan.dtype))
    for cast in plan.casts:
        body, dtypes = graph.body(cast.scope), (tf.as_dtype(cast.from_), tf.as_dtype(cast.to))
        dims = body.shape(cast.tensor)
        made = body.cast(cast.name, cast.tensor, dtypes, dims, cast.device)
        body.connect(made, cast.consumers)


def _retype(body: Body, retype: structures.Retype, low: int) -> None:
    node = body.named(retype.node)
    if not retype.attr:
        node.type = low
        return
    if node.op in SUCCESSORS:
        body.set_op(node, SUCCESSORS[node.op])
        node.attr[STATISTICS_ATTR].type = tf_private.dtype_number(structures.FLOAT32)
    if retype.entry is None:
        node.attr[retype.attr].type = low
    else:
        node.attr[retype.attr].list.type[retype.entry] = low


# ---- The check -----------------------------------------------------------------------------------


def verify_rewrite(
    graph: Graph, scopes: Sequence[PaintedScope], plan: structures.RewritePlan
) -> None:
    """Checks a rewritten graph against the decisions: a failure is a bug of tfamp's.

    Every node is there under its name and has the dtypes that were decided, a Cast is where
    they differ, and nothing else is new; else a RewriteError.
    """
    for painted in scopes:
        scope = painted.index.scope
        if scope and scope not in graph.functions:
            raise _violation(f"function {scope!r}", "it was lost")
        body = graph.body(scope)
        casts = {cast.name for cast in plan.casts if cast.scope == scope}
        _verify_names(body, painted.index, casts)
        _verify_dtypes(body, painted, plan.dtype)
        _verify_casts(body, painted, casts)


def _verify_names(body: Body, index: structures.GraphIndex, casts: Set[str]) -> None:
    boundaries = (structures.ARGUMENT, structures.RESULT)
    names = {node.name for node in index.nodes if node.op not in boundaries}
    if wrong := body.by_name.keys() ^ (names | casts):
        raise _violation(f"node {min(wrong)!r}", "it was lost or added")


def _verify_dtypes(body: Body, painted: PaintedScope, low_dtype: str) -> None:
    index = painted.index
    for number, slot in enumerate(index.slots):
        wanted = low_dtype if number in painted.low else slot.dtype
        now = _dtype_now(body, index, slot)
        if now != wanted:
            node = index.nodes[slot.node]
            cause = f"{slot.attr} became {now}, but must be {wanted}"
            raise _violation(f"node {node.name!r} ({node.op})", cause)


def _verify_casts(body: Body, painted: PaintedScope, casts: Set[str]) -> None:
    """Checks that a Cast is where the dtypes of an input and its producer differ."""
    index, low = painted.index, painted.low
    for node, edges in zip(index.nodes, index.inputs, strict=True):
        tensors = body.taken(node.name) if edges else ()
        for edge, tensor in zip(edges, tensors, strict=False):
            needs_cast = (edge.source in low) != (edge.target in low)
            if needs_cast != (structures.node_name(tensor) in casts):
                cause = f"its input {edge.tensor!r} has another dtype than the node takes"
                raise _violation(f"node {node.name!r}", cause)


def verify_result(graph: Graph, options: RewriteOptions, decision: Decision) -> None:
    """Checks what is handed to TensorFlow, after the last pass: a failure is a bug of tfamp's.

    Both ends of every edge agree, names that are used from outside are there, what was decided
    to be float32 is, and the table of kernels has no fault of a low node, unless the caller forced
    it or gave Grappler's lists; else a RewriteError.
    """
    low = options.dtype
    try:
        indexes = index_bodies(graph, low, options.device)
    except RewriteError as error:
        raise _violation("the result", str(error)) from error
    if lost := graph.main.kept - graph.main.by_name.keys():
        raise _violation(f"node {min(lost)!r}", "it was lost")
    before = {painted.index.scope: painted.index for painted in decision.scopes}
    planned = {(node.scope, node.name): node for node in decision.plan.nodes}
    for index in indexes:
        known = _with_shapes_of(index, before.get(index.scope))
        inexact = dict(inexact_nodes(known, options)) if _not_grapplers(options) else {}
        for position, node in enumerate(index.nodes):
            is_low = any(index.slots[slot].dtype == low for slot in node.slots)
            if not is_low or node.op == "Cast":
                continue
            plan = planned.get((index.scope, node.name))
            place = f"node {node.name!r} ({node.op})"
            if plan is not None and plan.dtype == structures.FLOAT32:
                raise _violation(place, f"it is {low}, but must be float32: {plan.reason.text}")
            forced = plan is not None and plan.reason.rule in ("force_low", "as given")
            if position in inexact and not forced:
                raise _violation(place, f"it is low: {inexact[position].text}")


def _with_shapes_of(
    index: structures.GraphIndex, before: structures.GraphIndex | None
) -> structures.GraphIndex:
    """An index with the shapes of nodes as they were before passes, which new nodes lack."""
    if before is None:
        return index
    positions = {node.name: position for position, node in enumerate(index.nodes)}
    shapes = {
        (positions[before.nodes[node].name], port): shape
        for (node, port), shape in before.shapes.items()
        if before.nodes[node].name in positions
    }
    return dataclasses.replace(index, shapes={**shapes, **index.shapes})


def _dtype_now(body: Body, index: structures.GraphIndex, slot: structures.TypeSlot) -> str:
    """The dtype of a slot as it is in the rewritten graph."""
    node = index.nodes[slot.node]
    named = body.named(node.name)
    if node.op in (structures.ARGUMENT, structures.RESULT):
        return tf_private.dtype_of_number(named.type)
    if slot.attr not in named.attr:  # The op fixes it, or it has its default.
        return slot.dtype
    value = named.attr[slot.attr]
    dtype = value.type if slot.entry is None else value.list.type[slot.entry]
    return tf_private.dtype_of_number(dtype)


def _violation(place: str, cause: str) -> RewriteError:
    return RewriteError(
        f"Internal error of the rewrite, found by its check: {place}: {cause}. The graph is "
        "unchanged; please report this with the graph."
    )
