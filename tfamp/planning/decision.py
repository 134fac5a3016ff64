"""The decision about a graph: which dtypes change and where Casts go; framework-free.

What must agree, what may be low, what is worth it, the plan: each stage takes what the ones before
it found and changes nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from tfamp.core.profile import MachineProfile
from tfamp.planning.choices import ChosenNodes, NodeChoices, nearest_names
from tfamp.planning.coloring import Updates, paint, safe_slots
from tfamp.planning.cost import estimate, with_free_casts
from tfamp.planning.linking import Joined, join
from tfamp.planning.placement import place
from tfamp.planning.plan import PaintedScope, make_plan
from tfamp.planning.ranges import Limits, Ranges, too_large
from tfamp.planning.regions import find_regions
from tfamp.planning.structures import GraphIndex, Painting, Reason, Regions, RewritePlan


@dataclass(frozen=True, slots=True)
class Request:
    """What is asked of a rewrite, checked.

    Attributes:
        dtype: The low dtype.
        choices: The nodes the caller chose.
        colors: Colour of every op type that is on a list.
        clear: Op types that may change their dtypes with their neighbours.
        updates: How far arithmetic on gradients, on its way to variables, may be low.
        device: Kind of device of nodes that are pinned to none.
        placement: "min_cut" or "lists".
        profile: How fast the machine is.
        ranges: What was measured.
        limits: From where on measured values need float32.
        cached: Names of handles of variables whose Casts take no time.
    """

    dtype: str
    choices: NodeChoices
    colors: Mapping[str, str]
    clear: frozenset[str]
    updates: Updates
    device: str
    placement: str
    profile: MachineProfile
    ranges: Ranges
    limits: Limits
    cached: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Decision:
    """What was decided.

    Attributes:
        scopes: The graph and its functions, with their colours and costs.
        plan: What to change.
        idle: A text for each pattern of the caller's that changes nothing.
    """

    scopes: tuple[PaintedScope, ...]
    plan: RewritePlan
    idle: tuple[str, ...]


def decide(
    indexes: Sequence[GraphIndex], weights: Collection[tuple[str, str]], request: Request
) -> Decision:
    """Decides about a graph and its functions.

    Args:
        indexes: The graph, then its functions.
        weights: Arguments of loops' functions that hold weights: see `linking.join`.
        request: What is asked.

    Raises:
        ValueError: The graph has no node of a name, or that matches a pattern, of the request's.
    """
    chosen = request.choices.nodes_of(indexes)
    rules = _Rules(join(indexes, request.clear, weights), request.colors, request.updates, chosen)
    kept = [
        too_large(index, request.ranges, request.limits, forced) | {**by_name, **used}
        for index, forced, by_name, used in zip(
            indexes, chosen.forced, chosen.kept, chosen.used, strict=True
        )
    ]
    regions, painting = rules.paint(kept)
    costs = [estimate(index, request.profile, request.dtype) for index in indexes]
    costs[0] = with_free_casts(costs[0], indexes[0], request.cached)
    joined = rules.joined
    if request.placement == "min_cut":
        safe = safe_slots(joined.index, regions, rules.colors, painting)
        every = joined.join_costs(costs, safe)
        least_gain = request.profile.least_gain
        painting = place(joined.index, regions, painting, safe, every, least_gain)
    scopes = tuple(
        PaintedScope(
            index,
            joined.split_regions(regions, number),
            joined.split_painting(painting, number),
            costs[number],
            joined.rounds[number],
        )
        for number, index in enumerate(indexes)
    )
    plan = make_plan(scopes, dtype=request.dtype, colors=rules.colors)
    return Decision(scopes, plan, tuple(_without_effect(rules, scopes, plan)))


@dataclass(frozen=True, slots=True)
class _Rules:
    """What decides which slots are lowered, whatever they cost."""

    joined: Joined
    colors: Mapping[str, str]
    updates: Updates
    chosen: ChosenNodes

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
