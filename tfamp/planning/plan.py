"""Colours -> RewritePlan: which slots to retype, which Casts to insert; framework-free."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from tfamp.planning.cost import ScopeCosts, scope_seconds
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
)

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
    """Turns colours into a plan.

    Args:
        scopes: The graph and its functions, with their colours.
        dtype: The low dtype.
        colors: Colour of every op type that is on a list, for the reasons.

    Returns:
        The plan; where colours change nothing it has no retypes and no Casts.
    """
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
    crossing: dict[tuple[int, int], list[Edge]] = {}
    for edge in index.edges:
        if (edge.source in low) != (edge.target in low):
            producer = index.slots[edge.source].node
            crossing.setdefault((producer, edge.port), []).append(edge)
    taken = {node.name for node in index.nodes}
    casts = []
    # All edges of a tensor that need a Cast need the same one: the producer has one dtype.
    for (producer, port), edges in sorted(crossing.items()):
        down = edges[0].source not in low
        cast = _cast_site(index, producer, port, edges, dtype if down else FLOAT32, dtype)
        casts.append(_with_free_name(cast, taken))
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


def _with_free_name(cast: CastSite, taken: set[str]) -> CastSite:
    name, number = cast.name, 0
    while name in taken:
        number += 1
        name = f"{cast.name}_{number}"
    taken.add(name)
    return dataclasses.replace(cast, name=name)


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
        return Reason("clear", "no node next to it is lowered")
    return Reason("infer", "it is neither between nor behind lowered nodes")
