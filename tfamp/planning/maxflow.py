"""Minimum s-t cuts; knows nothing of graphs of ops, dtypes or TensorFlow.

SciPy finds the maximum flow. It counts in 32-bit integers, and 64-bit capacities lose their upper
half without a word: capacities are rounded here so that no sum of them can overflow.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, TypeAlias

# Tail, head, capacity.
Edge: TypeAlias = tuple[int, int, float]

# In residual graphs up to the double of it occurs, which must be less than 2**31.
_INFINITE = 2**30
# Capacities are rounded to multiples of this, or of the next power of two with which they fit. The
# same step for all small graphs, so that rounding does not depend on what else is in one.
FINEST_STEP = 2.0**-30


def minimum_cut(vertices: int, edges: Iterable[Edge], source: int, sink: int) -> frozenset[int]:
    """Returns the source side of a cut of least capacity: the one with fewest vertices.

    There is only one such side, so that the result depends neither on the order of edges nor on
    the algorithm.

    Args:
        vertices: Number of vertices; they are called 0, 1, 2, ...
        edges: Triples (tail, head, capacity). A cut takes what the edges from its source side to
            its sink side sum up to; none may take an edge of `math.inf`. Parallel edges add up.
        source: Vertex that is on the source side.
        sink: Vertex that is on the other.

    Returns:
        The vertices on the source side.

    Raises:
        ValueError: A capacity is negative or NaN, or every cut takes an infinite edge.

    Example:
        >>> sorted(minimum_cut(4, [(0, 1, 3.0), (1, 2, 1.0), (2, 3, 3.0)], source=0, sink=3))
        [0, 1]
    """
    import numpy as np
    from scipy.sparse import csr_matrix
    from scipy.sparse.csgraph import breadth_first_order, maximum_flow

    capacities = _as_integers(_merged(edges))
    pairs = sorted(capacities)
    values = np.array([capacities[pair] for pair in pairs], np.int32)
    tails = np.array([tail for tail, _ in pairs], np.int32)
    heads = np.array([head for _, head in pairs], np.int32)
    graph = csr_matrix((values, (tails, heads)), shape=(vertices, vertices))
    found: Any = maximum_flow(graph, source, sink)
    if found.flow_value >= _INFINITE:
        raise ValueError("Every cut between source and sink takes an infinite edge.")
    residual = csr_matrix(graph - found.flow)
    residual.eliminate_zeros()
    reached = breadth_first_order(residual, source, return_predecessors=False)
    return frozenset(int(vertex) for vertex in reached)


def _merged(edges: Iterable[Edge]) -> dict[tuple[int, int], float]:
    merged: dict[tuple[int, int], float] = {}
    for tail, head, capacity in edges:
        if not capacity >= 0:
            raise ValueError(f"A capacity must not be negative or NaN; got {capacity!r}.")
        if capacity and tail != head:
            merged[tail, head] = merged.get((tail, head), 0.0) + capacity
    return merged


def _as_integers(capacities: dict[tuple[int, int], float]) -> dict[tuple[int, int], int]:
    finite = [capacity for capacity in capacities.values() if math.isfinite(capacity)]
    # Rounding adds at most half a step to each.
    step = FINEST_STEP
    while sum(finite) / step + len(finite) >= _INFINITE:
        step *= 2
    return {
        pair: round(capacity / step) if math.isfinite(capacity) else _INFINITE
        for pair, capacity in capacities.items()
    }
