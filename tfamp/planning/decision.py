"""The decision about a graph: which dtypes change and where Casts go; framework-free.

What must agree, what may be low, what is worth it, the plan: each stage takes what the ones before
it found and changes nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from tfamp.core.profile import MachineProfile
from tfamp.planning.choices import ChosenNodes, NodeChoices, nearest_names
from tfamp.planning.coloring import Updates, find_regions, paint, safe_slots
from tfamp.planning.cost import (
    ScopeCosts,
    crossing_tensors,
    estimate,
    scope_seconds,
    with_free_casts,
)
from tfamp.planning.linking import Joined, join
from tfamp.planning.placement import place
from tfamp.planning.ranges import Limits, Ranges, too_large
from tfamp.planning.structures import (
    ARGUMENT,
    FLOAT32,
    RESULT,
    CastSite,
    Edge,
    GraphIndex,
    IndexedNode,
    NodePlan,
    Painting,
    Reason,
    Regions,
    Retype,
    RewritePlan,
    RewriteSummary,
    ScopePlan,
    free_name,
)


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
        ranges: What was measured, if anything was.
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
    ranges: Ranges | None
    limits: Limits | None
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
        {**_too_large(index, request, forced), **by_name, **used}
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


def _too_large(index: GraphIndex, request: Request, forced: frozenset[int]) -> Mapping[str, Reason]:
    if request.ranges is None or request.limits is None:
        return {}
    return too_large(index, request.ranges, request.limits, forced)


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


_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True, slots=True)
class PaintedScope:
    """A scope with the decisions about it.

    Attributes:
        index: The scope.
        regions: What its structure demands.
        painting: Its colours.
        costs: What everything takes, if that is known.
        rounds: How often the scope is run for each run of the graph, as far as loops go.
    """

    index: GraphIndex
    regions: Regions
    painting: Painting
    costs: ScopeCosts | None = None
    rounds: int = 1


def make_plan(
    scopes: Sequence[PaintedScope], *, dtype: str, colors: Mapping[str, str]
) -> RewritePlan:
    """Turns the colours of a graph and its functions into a plan, with reasons by op colours."""
    plans = tuple(_plan_scope(scope, dtype) for scope in scopes)
    nodes = tuple(node for scope in scopes for node in _node_plans(scope, dtype, colors))
    casts = tuple(cast for plan in plans for cast in plan.casts)
    known = [cast.bytes for cast in casts if cast.bytes is not None]
    retyped = sum(len({each.node for each in plan.retypes if each.attr}) for plan in plans)
    summary = RewriteSummary(
        nodes=len(nodes),
        low_nodes=sum(node.dtype == dtype for node in nodes),
        retyped_nodes=retyped,
        casts=len(casts),
        cast_bytes=sum(known),
        casts_of_unknown_size=len(casts) - len(known),
        estimated_speed_up=_speed_up(scopes),
    )
    return RewritePlan(dtype, nodes, casts, plans, summary)


def _speed_up(scopes: Sequence[PaintedScope]) -> float | None:
    before = after = 0.0
    for scope in scopes:
        costs, low = scope.costs, scope.painting.low
        if costs is None or any(scope.index.slots[slot].can_be_low for slot in costs.unshaped):
            return None
        before += scope.rounds * scope_seconds(scope.index, costs, ())
        after += scope.rounds * scope_seconds(scope.index, costs, low)
    return before / after if after else None


def _plan_scope(scope: PaintedScope, dtype: str) -> ScopePlan:
    index, low = scope.index, scope.painting.low
    retypes = tuple(
        Retype(index.node_of(slot).name, index.slots[slot].attr, index.slots[slot].index)
        for slot in sorted(low)
    )
    crossing = crossing_tensors(index, low)
    taken = {node.name for node in index.nodes}
    casts = []
    # All edges of a tensor that need a Cast need the same one: the producer has one dtype.
    for (producer, port), edges in sorted(crossing.items()):
        down = edges[0].source not in low
        cast = _cast_site(index, producer, port, edges, dtype if down else FLOAT32, dtype)
        name = free_name(cast.name, taken)
        taken.add(name)
        casts.append(dataclasses.replace(cast, name=name))
    return ScopePlan(index.scope, retypes, tuple(casts))


def _cast_site(
    index: GraphIndex, producer: int, port: int, edges: Sequence[Edge], target: str, dtype: str
) -> CastSite:
    source = FLOAT32 if target == dtype else dtype
    node = index.nodes[producer]
    elements = index.sizes.get((producer, port))
    return CastSite(
        scope=index.scope,
        tensor=edges[0].tensor,
        source=source,
        target=target,
        bytes=None if elements is None else elements * (_BYTES[source] + _BYTES[target]),
        name=f"{node.name}-{port}-CastTo-{target}",
        producer=node.name,
        device=node.device,
        consumers=tuple((index.node_of(edge.target).name, edge.input) for edge in edges),
    )


def _node_plans(scope: PaintedScope, dtype: str, colors: Mapping[str, str]) -> Iterable[NodePlan]:
    index = scope.index
    inputs = _producers(index)
    for position, node in enumerate(index.nodes):
        slots = _float_slots(index, node, dtype)
        if not slots or node.op in (ARGUMENT, RESULT):
            continue
        lowered = [slot for slot in slots if slot in scope.painting.low]
        already = [slot for slot in slots if index.slots[slot].dtype == dtype]
        if lowered:
            reason = scope.painting.low[lowered[0]]
        elif already:
            reason = Reason("as given", f"it is in {dtype} already")
        else:
            reason = _why_float32(scope, slots[0], colors)
        yield NodePlan(
            scope=index.scope,
            name=node.name,
            op=node.op,
            dtype=dtype if lowered or already else FLOAT32,
            reason=reason,
            cost=_cost(scope, position),
            inputs=tuple(inputs.get(position, ())),
        )


def _producers(index: GraphIndex) -> dict[int, dict[str, None]]:
    """Names of the nodes each node gets its tensors from, in the order of its inputs."""
    producers: dict[int, dict[str, None]] = {}
    for edge in index.edges:  # those of one consumer come in the order of its inputs
        names = producers.setdefault(index.slots[edge.target].node, {})
        names[index.node_of(edge.source).name] = None
    return producers


def _cost(scope: PaintedScope, position: int) -> float | None:
    if scope.costs is None or not scope.costs.known[position]:
        return None
    return scope.costs.node(scope.index, position, scope.painting.low)


def _float_slots(index: GraphIndex, node: IndexedNode, dtype: str) -> list[int]:
    # A Cast counts under what it casts to.
    return [
        slot
        for slot in node.slots
        if index.slots[slot].dtype in (FLOAT32, dtype)
        and (node.op != "Cast" or index.slots[slot].attr == "DstT")
    ]


def _why_float32(scope: PaintedScope, slot: int, colors: Mapping[str, str]) -> Reason:
    node = scope.index.node_of(slot)
    color = colors.get(node.op)
    if slot in scope.regions.fixed:
        return scope.regions.fixed[slot]
    if slot in scope.painting.denied:
        return scope.painting.denied[slot]
    if slot in scope.painting.left:
        return scope.painting.left[slot]
    if color is None:
        return Reason("no list", f"{node.op} is on no list")
    if not scope.index.slots[slot].can_be_low:
        return Reason("no kernel", f"{node.op} has no kernel for it on this device")
    if color == "clear":
        return Reason("clear", "no node next to it is converted")
    return Reason("infer", "it is neither between nor behind converted nodes")
