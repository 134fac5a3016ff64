"""Selects the slots that are worth converting, by a minimum cut; framework-free.

Each slot has one of two labels, float32 or low. The time of a placement is the time of its
nodes in their labels, plus one Cast for every tensor whose producer and consumers differ in
label. The placement of least time is a minimum cut in a graph with the low slots on the source
side: see "Placement" in the README of `graph`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from tfamp.planning.cost import ScopeCosts, scope_seconds
from tfamp.planning.structures import FLOAT32, GraphIndex, NodeOutput, Painting, Reason, Regions

_LOW = "low"  # the source; the sink is FLOAT32

_LEFT = Reason("cut", "cheaper in float32: its Casts cost more than it gains")
_CHEAPER = Reason("cut", "it is behind converted nodes, and cheaper converted")
_CAST = Reason("cast", "every tensor it takes or gives here is converted")


def place(
    index: GraphIndex,
    regions: Regions,
    painting: Painting,
    safe: frozenset[int],
    costs: ScopeCosts,
    least_gain: float = 0.0,
) -> Painting:
    """Lowers the slots that are worth it.

    Of several placements of least time, the one with the fewest low slots is used. The lists
    decide about slots of unknown shape, and about all slots if the cut gains too little.

    Args:
        index: The scope.
        regions: Constraints from its structure.
        painting: The slots that the lists lower.
        safe: Slots that can be converted, without Casts.
        costs: Times of slots and Casts.
        least_gain: Seconds that the cut must save over the lists' decision.

    Returns:
        The painting with the slots to lower, and the reason for the others to stay float32.
    """
    pinned = safe & costs.unshaped
    wanted = {slot for slot, reason in painting.low.items() if reason.rule == "force_low"}
    forced = safe & (pinned & painting.low.keys() | wanted)
    kept = {*regions.fixed, *painting.denied}
    casts = {slot: ends for slot, ends in index.cast_ends() if slot not in kept}
    free = dict.fromkeys([*sorted(safe - (pinned - forced)), *casts])
    arcs = itertools.chain(
        ((_LOW, slot, math.inf) for slot in sorted(forced)),
        _slot_arcs(free, costs, regions, casts),
        _cast_arcs(free, costs, index),
    )
    low = free.keys() & minimum_cut(arcs, _LOW, FLOAT32)
    by_lists, least = (scope_seconds(index, costs, slots) for slots in (painting.low, low))
    if by_lists - least < least_gain:
        return painting
    reasons = {
        slot: painting.low.get(slot, _CAST if index.node_of(slot).op == "Cast" else _CHEAPER)
        for slot in sorted(low)
    }
    left = dict.fromkeys(sorted(safe - pinned - low), _LEFT)
    return Painting(reasons, painting.denied, left)


# Tail, head, capacity. Vertices are the free slots, `_LOW`, FLOAT32, and auxiliary ones for
# tensors; a slot that is not free is merged with FLOAT32.
Arc: TypeAlias = tuple[Hashable, Hashable, float]


def _slot_arcs(
    free: Collection[int],
    costs: ScopeCosts,
    regions: Regions,
    casts: Mapping[int, Sequence[int]],
) -> Iterator[Arc]:
    """Arcs for the times of slots, and for slots that must agree."""
    for slot in free:
        as_it_is, converted = costs.slots[slot]
        if converted > as_it_is:
            yield slot, FLOAT32, converted - as_it_is
        else:
            yield _LOW, slot, as_it_is - converted
    for slots in (*regions.lists, *regions.loops):
        first, *others = (slot if slot in free else FLOAT32 for slot in slots)
        for vertex in others:
            yield first, vertex, math.inf
            yield vertex, first, math.inf
    # An end of a Cast is low only if all slots it is joined to are: otherwise it would round
    # for the others. The labels pass from integers to float32 and back.
    for slot, ends in casts.items():
        for other in ends:
            yield slot, FLOAT32 if other in casts or other not in free else other, math.inf


def _cast_arcs(free: Collection[int], costs: ScopeCosts, index: GraphIndex) -> Iterator[Arc]:
    """Arcs for the time of Casts; all consumers of a tensor share one."""
    consumers: dict[tuple[NodeOutput, Hashable], dict[Hashable, None]] = {}
    for edge in index.edges:
        source, target = (end if end in free else FLOAT32 for end in (edge.source, edge.target))
        if index.slots[edge.source].dtype == FLOAT32 and source != target:
            consumers.setdefault((index.tensor(edge), source), {})[target] = None
    for (tensor, producer), others in consumers.items():
        seconds = costs.casts[tensor]
        down, up = ("low if one consumer is", tensor), ("float32 if one consumer is", tensor)
        yield down, producer, seconds
        yield producer, up, seconds
        for vertex in others:
            yield vertex, down, math.inf
            yield up, vertex, math.inf


# Residual graphs hold up to twice this capacity, which must be less than 2**31.
_INFINITE = 2**30
# Capacities are rounded to multiples of this, or of the next power of two that lets them fit.
# All small graphs share one step, so that rounding does not depend on the rest of a graph.
# It is a nanosecond: times are in seconds, and with `_INFINITE` a graph of up to a second
# has this step.
_FINEST_STEP = 2.0**-30


def minimum_cut(edges: Iterable[Arc], source: Hashable, sink: Hashable) -> frozenset[Hashable]:
    """Returns the source side of a cut of least capacity: the one with fewest vertices.

    That side is unique, so the result depends neither on the order of edges nor on
    the algorithm.

    Args:
        edges: Triples (tail, head, capacity). The capacity of a cut is the sum over the
            edges from its source side to its sink side, none of them `math.inf`.
            Parallel edges add up.
        source: Vertex on the source side.
        sink: Vertex on the sink side.

    Returns:
        The vertices on the source side.

    Raises:
        ValueError: Every cut has an infinite edge.

    Example:
        >>> edges = [("a", "b", 3.0), ("b", "c", 1.0), ("c", "d", 3.0)]
        >>> sorted(minimum_cut(edges, source="a", sink="d"))
        ['a', 'b']
    """
    import numpy as np
    from scipy.sparse import csr_matrix
    from scipy.sparse.csgraph import breadth_first_order, maximum_flow

    arcs = [edge for edge in edges if edge[0] != edge[1]]
    vertices = list(dict.fromkeys([source, sink, *(end for arc in arcs for end in arc[:2])]))
    numbers = {vertex: number for number, vertex in enumerate(vertices)}
    ends = np.array([(numbers[tail], numbers[head]) for tail, head, _ in arcs], np.int32)
    values = np.array([capacity for _, _, capacity in arcs], float)
    shape = (len(vertices), len(vertices))
    graph: Any = csr_matrix((values, ends.reshape(-1, 2).T), shape=shape)
    finite = np.isfinite(graph.data)
    step = _FINEST_STEP
    # Rounding adds at most half a step to a capacity.
    while graph.data[finite].sum() / step + finite.sum() >= _INFINITE:
        step *= 2
    graph.data = np.where(finite, np.round(graph.data / step), _INFINITE).astype(np.int32)
    maximum: Any = maximum_flow(graph, 0, 1)
    if maximum.flow_value >= _INFINITE:
        raise ValueError("Every cut between source and sink has an infinite edge.")
    residual = csr_matrix(graph - maximum.flow)
    residual.eliminate_zeros()
    reached = breadth_first_order(residual, 0, return_predecessors=False)
    return frozenset(vertices[number] for number in reached)
