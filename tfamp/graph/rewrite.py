"""The whole rewrite: index, regions, coloring, plan, apply, verify."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable
from typing import Any

from tfamp.core.errors import NothingToLowerWarning
from tfamp.core.profile import MachineProfile
from tfamp.graph import request
from tfamp.graph.apply import apply_plan
from tfamp.graph.index import build_indexes
from tfamp.graph.op_lists import OpLists
from tfamp.graph.transforms.bias_gradients import Sums, as_sums, sums_are_better, without_idle_sums
from tfamp.graph.transforms.inline import inline_calls
from tfamp.graph.transforms.loop_reads import read_before_loops
from tfamp.graph.verify import verify_rewrite
from tfamp.planning.coloring import paint, safe_slots
from tfamp.planning.cost import estimate, with_free_casts
from tfamp.planning.linking import join
from tfamp.planning.placement import place
from tfamp.planning.plan import PaintedScope, make_plan
from tfamp.planning.ranges import Limits, Ranges, too_large
from tfamp.planning.regions import find_regions
from tfamp.planning.structures import RewritePlan, RewriteResult


def rewrite_graph_def(
    graph_def: Any,
    fetches: Iterable[str],
    *,
    feeds: Iterable[str] = (),
    dtype: str = "float16",
    op_lists: OpLists | None = None,
    keep_float32: Iterable[str] = (),
    force_low: Iterable[str] = (),
    placement: str = "min_cut",
    device: str = "auto",
    profile: MachineProfile | None = None,
    inline: bool = True,
    ranges: Ranges | None = None,
    limits: Limits | None = None,
    cached: Collection[str] = (),
) -> RewriteResult:
    """Returns a graph that computes in low precision where that is safe and worth it.

    Args:
        graph_def: A `tf.compat.v1.GraphDef`, float32; it is not modified.
        fetches: Tensors ("dense/Relu:0") or operations that are used; they keep their dtypes.
        feeds: Tensors that are given a value; they keep their dtypes, as placeholders do anyway.
        dtype: "float16" or "bfloat16".
        op_lists: Which ops may be low; `OpLists.default(dtype, device)` if None.
        keep_float32: Regular expressions, searched for in node names: these stay float32.
        force_low: The same: these are lowered wherever the op has a kernel for it.
        placement: "min_cut": the lists decide what may be low, a minimum cut what is worth it, by
            the times that `profile` gives for the shapes in the graph. They are there in
            `graph.as_graph_def(add_shapes=True)`. Without them, and where the cut gains next to
            nothing, the lists decide, as with "lists".
        device: Kind of device of the nodes that are pinned to none: "cpu", "gpu", "tpu", or "auto"
            for this machine's. A node without a kernel there stays float32.
        inline: Whether the nodes of called functions take the place of the calls first. A function
            that is left is rewritten by itself, with float32 arguments and results.
        ranges: What `calibration.measure` found when it ran the graph on data; nodes that
            exceed the limits stay float32, unless `force_low` matches them.
        limits: From where on measured values need float32; `Limits.default(dtype)` if None.
        cached: Names of handles of variables of which somebody keeps low-precision copies: Casts
            of what is read from them take no time.
        profile: How fast the machine is in each dtype; None for built-in figures, which depend on
            the kind of device and on what it multiplies natively. Nothing is measured or read here,
            whatever TFAMP_PROFILE says: `tfamp.rewrite` does that.

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
    request.check(
        graph_def,
        dtype=dtype,
        placement=placement,
        device=device,
        op_lists=op_lists,
        profile=profile,
    )
    choices = request.NodeChoices(fetches, feeds, keep_float32, force_low)
    if inline:
        graph_def = inline_calls(graph_def, choices.used_names)
    measured, limits = request.measured(ranges, limits, dtype)
    lists = op_lists or OpLists.default(dtype, device)
    colors = request.colors_of(lists)
    kind = request.device_kind(device)
    profile = profile or request.profile_of(kind)
    sums: Sums = {}
    if sums_are_better(lists, dtype, kind):
        graph_def, sums = as_sums(graph_def)
    indexes = build_indexes(graph_def, dtype=dtype, device=kind)
    weights: Collection[tuple[str, str]] = ()
    if inline:
        # Behind the index, which refuses graphs that are not valid.
        graph_def, weights = read_before_loops(graph_def, choices.used_names)
    if weights:
        indexes = build_indexes(graph_def, dtype=dtype, device=kind)
    choices.check(indexes)
    forced = [choices.forced(index) for index in indexes]
    chosen = [
        too_large(index, measured, limits, each) | choices.unchanging(index)
        for index, each in zip(indexes, forced, strict=True)
    ]
    joined = join(indexes, lists.clear, weights)
    regions = find_regions(joined.index, joined.by_position(chosen), joined.kept)
    painting = paint(
        joined.index, regions, colors, joined.positions(forced), request.updates_of(lists, dtype)
    )
    costs = [estimate(index, profile, dtype) for index in indexes]
    costs[0] = with_free_casts(costs[0], indexes[0], cached)
    if placement == "min_cut":
        safe = safe_slots(joined.index, regions, colors, painting)
        every = joined.join_costs(costs, safe)
        painting = place(joined.index, regions, painting, safe, every, profile.least_gain)
    scopes = [
        PaintedScope(
            index,
            joined.split_regions(regions, number),
            joined.split_painting(painting, number),
            costs[number],
            joined.rounds[number],
        )
        for number, index in enumerate(indexes)
    ]
    plan = make_plan(scopes, dtype=dtype, colors=colors)
    result = apply_plan(graph_def, plan)
    verify_rewrite(graph_def, result, scopes, plan, kind)
    result, plan = without_idle_sums(result, plan, sums)
    if not plan.summary.low_nodes:
        warnings.warn(_nothing_lowered(plan), NothingToLowerWarning, stacklevel=2)
    return RewriteResult(result, plan)


def _nothing_lowered(plan: RewritePlan) -> str:
    could = any(node.reason.rule == "cut" for node in plan.nodes)
    able = "is worth lowering" if could else "can be lowered"
    return f"The graph has no op that {able} to {plan.dtype}: it stays as it is."
