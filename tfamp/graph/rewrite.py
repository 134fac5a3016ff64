"""GraphDef -> GraphDef in low precision: inline, transform, index, decide, apply, verify."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import importlib.metadata
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import tensorflow as tf

from tfamp.core.dtypes import LOW_PRECISION
from tfamp.core.errors import NothingConvertedWarning, TfampWarning
from tfamp.core.profile import MachineProfile
from tfamp.graph.apply import apply_plan, control_inputs, verify_rewrite
from tfamp.graph.functions import bodies, copied, has_frames, inline_calls
from tfamp.graph.index import build_indexes
from tfamp.graph.op_lists import OpLists
from tfamp.graph.passes.attention_products import as_batches
from tfamp.graph.passes.bias_sums import as_sums, sums_are_better, without_idle_sums
from tfamp.graph.passes.chosen_constants import keep_choices_finite
from tfamp.graph.passes.loop_reads import read_before_loops
from tfamp.interop import tf_private
from tfamp.interop.patching import level_of_user
from tfamp.machine import profile_choice
from tfamp.planning.decision import Decision, decide
from tfamp.planning.exact_values import CHOICES
from tfamp.planning.options import GraphUse, RewriteOptions, check_choice
from tfamp.planning.ranges import RULE as CALIBRATION
from tfamp.planning.structures import (
    FLOAT32,
    LOOPS,
    GraphIndex,
    RewritePlan,
    RewriteResult,
    op_types,
)


def rewrite_graph_def(
    graph_def: Any,
    fetches: Iterable[str],
    *,
    feeds: Iterable[str] = (),
    dtype: str = "float16",
    op_lists: OpLists | None = None,
    keep_float32: Iterable[str] = (),
    force_low: Iterable[str] = (),
    placement: str = RewriteOptions.placement,
    device: str = RewriteOptions.device,
    profile: MachineProfile | None = None,
) -> RewriteResult:
    """Returns a graph that computes in low precision where that is safe and worth it.

    Args:
        graph_def: A `tf.compat.v1.GraphDef`, float32; it is not modified.
        fetches: Tensors ("dense/Relu:0") or operations that are used; they keep their dtypes.
        feeds: Tensors that are given a value; they keep their dtypes, as placeholders do anyway.
        dtype: "float16" or "bfloat16".
        op_lists: Which ops may be low; `OpLists.default(dtype, device)` if None.
        keep_float32: Regular expressions, searched for in node names: these stay float32. Nodes of
            branches, loops and other functions have the name of their caller in front too, as in
            "gate/cond/MatMul".
        force_low: The same: these are converted wherever the op has a kernel for it.
        placement: "min_cut": the lists decide what may be low, a minimum cut what is worth it, by
            the times that `profile` gives for the shapes in the graph. They are there in
            `graph.as_graph_def(add_shapes=True)`. Without them, and where the cut gains next to
            nothing, the lists decide, as with "lists". "fused": as "min_cut", and XLA compiles the
            arithmetic between products and convolutions; the plan tells of the nodes as they were
            before.
        device: Kind of device of the nodes that are pinned to none: "cpu", "gpu", "tpu", or "auto"
            for this machine's. A node without a kernel there stays float32. "gpu" needs a
            TensorFlow that has kernels for GPUs, not a GPU.
        profile: How fast the machine is in each dtype; None for built-in figures, which depend on
            the kind of device and on what it multiplies natively. No profile is measured or read
            here, whatever TFAMP_PROFILE says: `tfamp.rewrite` does that.

    Returns:
        The new graph, with functions rewritten under their names, and the plan.

    Raises:
        TypeError, ValueError: An argument is wrong; the message names what is allowed.
        RewriteError: The graph is not valid or has an unknown op; it names node, op and cause.

    Example:
        >>> import tensorflow as tf
        >>> graph = tf.function(lambda x: x @ x).get_concrete_function(tf.TensorSpec((2, 2))).graph
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
            "That of a concrete function is `function.graph.as_graph_def()`."
        )
    check_choice("dtype", dtype, LOW_PRECISION)
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
    owned = inline_calls(copied(graph_def), use.names)
    return RewriteResult(owned, convert(owned, resolved(options), use).plan)


def resolved(options: RewriteOptions) -> RewriteOptions:
    """Fills in what options leave to this machine: kind of device, op lists and profile.

    Raises:
        ValueError: This machine cannot rewrite for the device, or XLA does not work here.
    """
    kind = profile_choice.device_kind(options.device)
    _check_kernels(kind)
    _check_fusion(options.placement)
    profile = options.profile
    # The placement "lists" needs no measurement: its plan only holds estimated times.
    if profile is None and options.placement != "lists":
        profile = profile_choice.find_profile().profile
    return dataclasses.replace(
        options,
        device=kind,
        op_lists=options.op_lists or OpLists.default(options.dtype, kind),
        profile=profile if isinstance(profile, MachineProfile) else profile_choice.profile_of(kind),
    )


def _check_kernels(device: str) -> None:
    """Raises a ValueError if TensorFlow has no kernels that tell what may be low on GPUs."""
    if device == "gpu" and all(kernel.device != device for kernel in tf_private.kernels("MatMul")):
        wheels = importlib.metadata.packages_distributions().get("tensorflow", ["tensorflow"])
        raise ValueError(
            f"device is 'gpu', but the wheel {' or '.join(sorted(set(wheels)))} {tf.__version__} "
            "was built without GPU kernels, and these tell what may be low there. Convert with one "
            "that has them, such as tensorflow for Linux on x86-64, or give device='cpu'."
        )


def _check_fusion(placement: str) -> None:
    """Raises a ValueError where XLA is to compile and does not work."""
    if placement == "fused" and not tf_private.xla_works(""):
        raise ValueError(
            "placement='fused' has XLA compile arithmetic, and XLA does not work here. Give "
            "placement='min_cut', which is the same without it."
        )


@contextlib.contextmanager
def _collector_paused() -> Iterator[None]:
    """A rewrite makes millions of objects and no cycles; looking for these takes a third of it."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class Pass(NamedTuple):
    """A change in place, with the same results but for rounding, of graphs with one of some ops."""

    ops: frozenset[str]
    run: Callable[[Any, RewriteOptions, GraphUse], None]


def sums_behind_loops(graph_def: Any, options: RewriteOptions, use: GraphUse) -> None:
    """Makes what loops of gradients add up one op behind the loop."""
    from tfamp.graph.passes.loop_sums import add_up_behind_loops  # Nothing else needs it.

    add_up_behind_loops(graph_def, use.names)


def gradients_by_filters(graph_def: Any, options: RewriteOptions, use: GraphUse) -> None:
    """Makes gradients of convolutions by their filters ops that are faster."""
    from tfamp.graph.passes.filter_gradients import by_faster_ops  # Nothing else needs it.

    peaks = options.machine.peaks["matmul"]
    by_faster_ops(graph_def, options.device, peaks[options.dtype] > peaks[FLOAT32])


# What makes a graph cheaper before it is decided about, in the order in which it runs.
PASSES = (
    Pass(frozenset({"Einsum"}), as_batches),
    Pass(LOOPS, sums_behind_loops),
    Pass(
        op_types("Conv2DBackpropFilter DepthwiseConv2dNativeBackpropFilter"), gradients_by_filters
    ),
)


@dataclass(frozen=True, slots=True)
class PreparedGraph:
    """A graph behind its passes, with its index: what every decision about it starts from.

    Attributes:
        graph_def: The graph.
        indexes: The index of the graph, then those of its functions.
        weights: Arguments of loops' functions that hold weights.
        sums: What became of gradients of biases, by name.
    """

    graph_def: Any
    indexes: Sequence[GraphIndex]
    weights: Collection[tuple[str, str]]
    sums: Mapping[tuple[str, str], Any]

    def copy(self) -> PreparedGraph:
        """Returns the same with a graph of its own."""
        return dataclasses.replace(self, graph_def=copied(self.graph_def))


def convert(graph_def: Any, options: RewriteOptions, use: GraphUse) -> Decision:
    """Converts a graph of the caller's own, in place; returns what was decided.

    Raises:
        ValueError: The graph has no node of a name, or that matches a pattern.
        RewriteError: The graph is not valid or has an unknown op.
    """
    return convert_prepared(prepare(graph_def, options, use), options, use)


@_collector_paused()
def prepare(graph_def: Any, options: RewriteOptions, use: GraphUse) -> PreparedGraph:
    """Runs the passes on a graph of the caller's own, in place, and indexes it.

    The result does not depend on the placement, nor on patterns.
    """
    framed = has_frames(graph_def)
    ops = {node.op for _, nodes, _ in bodies(graph_def) for node in nodes}
    # Grappler's own lists give Grappler's result, node by node.
    if options.updates != "low" and not framed:
        for each in PASSES:
            if not each.ops.isdisjoint(ops):
                each.run(graph_def, options, use)
    has_biases = not framed and "BiasAddGrad" in ops
    better = has_biases and sums_are_better(options.colors, options.dtype)
    sums = as_sums(graph_def, options.device) if better else {}
    indexes = build_indexes(graph_def, dtype=options.dtype, device=options.device)
    # Behind the index, which refuses graphs that are not valid.
    weights = frozenset() if LOOPS.isdisjoint(ops) else read_before_loops(graph_def, use.names)
    if weights:
        indexes = build_indexes(graph_def, dtype=options.dtype, device=options.device)
    return PreparedGraph(graph_def, indexes, weights, sums)


@_collector_paused()
def convert_prepared(prepared: PreparedGraph, options: RewriteOptions, use: GraphUse) -> Decision:
    """Decides about a graph, and converts it in place."""
    graph_def = prepared.graph_def
    decision = decide(prepared.indexes, prepared.weights, options, use)
    before = control_inputs(graph_def)
    apply_plan(graph_def, decision.plan)
    nodes = (node for index in prepared.indexes for node in index.nodes)
    if options.updates != "low" and any(node.op in CHOICES for node in nodes):
        keep_choices_finite(graph_def, decision.plan)
    verify_rewrite(before, graph_def, decision.scopes, decision.plan)
    plan = decision.plan
    if prepared.sums:
        plan = without_idle_sums(graph_def, plan, prepared.sums)
    if options.placement == "fused":
        from tfamp.graph.passes.fusion import fuse  # Nothing else needs it.

        fuse(graph_def, use.names)
    for text in decision.idle:
        warnings.warn(text, TfampWarning, stacklevel=level_of_user())
    if not plan.summary.low_nodes:
        warnings.warn(
            _nothing_converted(plan, decision), NothingConvertedWarning, stacklevel=level_of_user()
        )
    return dataclasses.replace(decision, plan=plan)


def _nothing_converted(plan: RewritePlan, decision: Decision) -> str:
    rules = {node.reason.rule: node for node in reversed(plan.nodes)}
    able = "is worth converting" if "cut" in rules else "can be converted"
    because = ""
    if (node := rules.get(CALIBRATION)) is not None:
        because = f" with this calibration data ({node.name}: {node.reason.text})"
    slots = [slot for scope in decision.scopes for slot in scope.index.slots]
    for dtype in sorted({slot.dtype for slot in slots if slot.dtype in LOW_PRECISION}):
        because += f"; some compute in {dtype} already, as they do under a mixed policy of Keras"
    return f"The graph has no op that {able} to {plan.dtype}{because}: it stays as it is."
