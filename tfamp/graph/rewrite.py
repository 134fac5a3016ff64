"""The whole rewrite: index, regions, coloring, plan, apply, verify."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tfamp.core.errors import NothingToLowerWarning, TfampWarning
from tfamp.core.profile import MachineProfile
from tfamp.graph import request
from tfamp.graph.apply import apply_plan
from tfamp.graph.index import build_indexes
from tfamp.graph.op_lists import OpLists
from tfamp.graph.transforms.bias_gradients import Sums, as_sums, sums_are_better, without_idle_sums
from tfamp.graph.transforms.inline import inline_calls
from tfamp.graph.transforms.loop_reads import read_before_loops
from tfamp.graph.verify import verify_rewrite
from tfamp.machine import hardware
from tfamp.planning.coloring import Updates, paint, safe_slots
from tfamp.planning.cost import estimate, with_free_casts
from tfamp.planning.linking import Joined, join
from tfamp.planning.name_search import nearest_names
from tfamp.planning.placement import place
from tfamp.planning.plan import PaintedScope, make_plan
from tfamp.planning.ranges import RULE as CALIBRATION
from tfamp.planning.ranges import Limits, Ranges, too_large
from tfamp.planning.regions import find_regions
from tfamp.planning.structures import (
    GraphIndex,
    Painting,
    Reason,
    Regions,
    RewritePlan,
    RewriteResult,
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
    placement: str = "min_cut",
    device: str = "auto",
    profile: MachineProfile | None = None,
    inline: bool = True,
    ranges: Ranges | None = None,
    limits: Limits | None = None,
    cached: Collection[str] = (),
    may_miss: Iterable[str] = (),
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
        force_low: The same: these are lowered wherever the op has a kernel for it.
        placement: "min_cut": the lists decide what may be low, a minimum cut what is worth it, by
            the times that `profile` gives for the shapes in the graph. They are there in
            `graph.as_graph_def(add_shapes=True)`. Without them, and where the cut gains next to
            nothing, the lists decide, as with "lists".
        device: Kind of device of the nodes that are pinned to none: "cpu", "gpu", "tpu", or "auto"
            for this machine's. A node without a kernel there stays float32.
        inline: Whether the nodes of called functions take the place of the calls first. A function
            that is left is rewritten by itself, with float32 arguments and results.
        ranges: What `measuring.calibration.measure` found when it ran the graph on data; nodes that
            exceed the limits stay float32, unless `force_low` matches them.
        limits: From where on measured values need float32; `Limits.default(dtype)` if None.
        cached: Names of handles of variables of which somebody keeps low-precision copies: Casts
            of what is read from them take no time.
        may_miss: Those of the patterns that need not matter. Of the others one that matches no node
            is an error, and one that changes none a warning.
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
    choices = request.NodeChoices(fetches, feeds, keep_float32, force_low, may_miss)
    if inline:
        graph_def = inline_calls(graph_def, choices.used_names)
    measured, limits = request.measured(ranges, limits, dtype)
    lists = op_lists or OpLists.default(dtype, device)
    kind = hardware.device_kind(device)
    profile = profile or hardware.profile_of(kind)
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
    chosen = choices.nodes_of(indexes)
    joined = join(indexes, lists.clear, weights)
    rules = _Rules(joined, request.colors_of(lists), request.updates_of(lists, dtype), chosen)
    kept = [
        too_large(index, measured, limits, forced) | {**by_name, **used}
        for index, forced, by_name, used in zip(
            indexes, chosen.forced, chosen.kept, chosen.used, strict=True
        )
    ]
    regions, painting = rules.paint(kept)
    costs = [estimate(index, profile, dtype) for index in indexes]
    costs[0] = with_free_casts(costs[0], indexes[0], cached)
    if placement == "min_cut":
        safe = safe_slots(joined.index, regions, rules.colors, painting)
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
    plan = make_plan(scopes, dtype=dtype, colors=rules.colors)
    result = apply_plan(graph_def, plan)
    verify_rewrite(graph_def, result, scopes, plan, kind)
    result, plan = without_idle_sums(result, plan, sums)
    for text in _without_effect(rules, scopes, plan):
        warnings.warn(text, TfampWarning, stacklevel=2)
    if not plan.summary.low_nodes:
        warnings.warn(_nothing_lowered(plan), NothingToLowerWarning, stacklevel=2)
    return RewriteResult(result, plan)


@dataclass(frozen=True, slots=True)
class _Rules:
    """What decides which slots are lowered, whatever they cost."""

    joined: Joined
    colors: Mapping[str, str]
    updates: Updates
    chosen: request.ChosenNodes

    def paint(self, kept: Sequence[Mapping[str, Reason]]) -> tuple[Regions, Painting]:
        """Returns what is to be lowered if some nodes of each scope, by name, stay as they are."""
        index = self.joined.index
        regions = find_regions(index, self.joined.by_position(kept), self.joined.kept)
        forced = self.joined.positions(self.chosen.forced)
        return regions, paint(index, regions, self.colors, forced, self.updates)

    def lowerable(self) -> list[set[int]]:
        """Returns the nodes of each scope that could be low if the caller kept none."""
        regions, painting = self.paint(self.chosen.used)
        safe = safe_slots(self.joined.index, regions, self.colors, painting)
        low = {*safe, *painting.low}
        return [
            _nodes_with(index, {slot for slot, place in enumerate(places) if place in low})
            for index, places in zip(self.joined.scopes, self.joined.slots, strict=True)
        ]


def _nodes_with(index: GraphIndex, slots: Collection[int]) -> set[int]:
    return {
        position
        for position, node in enumerate(index.nodes)
        if any(slot in slots for slot in node.slots)
    }


def _without_effect(
    rules: _Rules, scopes: Sequence[PaintedScope], plan: RewritePlan
) -> Iterator[str]:
    """A warning for each pattern that changes no node."""
    chosen = rules.chosen
    if any(each.argument == "keep_float32" for each in chosen.must_matter):
        lowerable = rules.lowerable()
        for each in chosen.idle("keep_float32", lowerable):
            could = (
                names[position]
                for names, nodes in zip(chosen.names, lowerable, strict=True)
                for position in sorted(nodes)
            )
            near = nearest_names(each.pattern, filter(None, could))
            advice = f" Nodes that could be {plan.dtype} are {', '.join(map(repr, near))}."
            yield (
                f"keep_float32: {each.pattern!r} has no effect: without it, too, {each.text()} "
                f"would stay in float32.{advice if near else ''}"
            )
    low = [_nodes_with(scope.index, scope.painting.low) for scope in scopes]
    reasons = {(node.scope, node.name): node.reason.text for node in plan.nodes}
    for each in chosen.idle("force_low", low):
        known = (
            reasons.get((scope.index.scope, scope.index.nodes[position].name))
            for scope, nodes in zip(scopes, each.nodes, strict=True)
            for position in nodes
        )
        why = next(filter(None, known), "it holds no float32")
        yield (f"force_low: {each.pattern!r} has no effect: {each.text()} stays as it is; {why}.")


def _nothing_lowered(plan: RewritePlan) -> str:
    rules = {node.reason.rule: node for node in reversed(plan.nodes)}
    able = "is worth lowering" if "cut" in rules else "can be lowered"
    because = ""
    if (node := rules.get(CALIBRATION)) is not None:
        because = f" with this calibration data ({node.name}: {node.reason.text})"
    return f"The graph has no op that {able} to {plan.dtype}{because}: it stays as it is."
