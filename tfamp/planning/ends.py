"""Finds the ends of a graph: where its values come from, and where they go; framework-free.

A loss is an end that no node shows: a scalar that is returned, stored or only differentiated.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from tfamp.planning.structures import (
    ARGUMENT,
    FLOAT32,
    LOOPS,
    RESULT,
    GraphIndex,
    Ordered,
    op_types,
    reach,
)

# Ops whose results are data from outside of the graph.
_SOURCES = op_types("""
    IteratorGetNext IteratorGetNextSync OptionalGetValue Placeholder PlaceholderWithDefault
""")
# Ops by which a loss is computed from other scalars.
_TERMS = op_types("Add AddN AddV2 Identity Mul Neg RealDiv Sub")


class LoopVariable(NamedTuple):
    """A variable of a loop, by the slots of the loop's functions.

    Attributes:
        sources: Where its next values come from.
        targets: Where an iteration takes its values.
    """

    sources: list[int]
    targets: list[int]


@dataclass(frozen=True, slots=True)
class Ends:
    """Slots of a graph where values come from outside, and where they go.

    Attributes:
        inputs: Placeholders, elements of datasets, results of calls and arguments of functions.
        results: Float results that are not known to be scalars.
        scalars: Scalars that are returned or stored, and the scalars that they are sums of.
        unused: Scalars without consumers: losses that are only differentiated; and their terms.
        stored: Larger tensors that are stored: the updates of weights.
        conditions: Results of the conditions of loops, of any dtype.
        across: For the results of calls where these come from in the functions, and for the
            arguments of functions where these come from at their callers; of any dtype.
        states: The variables of the joined loops, of any dtype; `decide` leaves sums out.
    """

    inputs: Ordered = field(default_factory=dict)
    results: Ordered = field(default_factory=dict)
    scalars: Ordered = field(default_factory=dict)
    unused: Ordered = field(default_factory=dict)
    stored: Ordered = field(default_factory=dict)
    conditions: Ordered = field(default_factory=dict)
    across: dict[int, list[int]] = field(default_factory=dict)
    states: dict[int, LoopVariable] = field(default_factory=dict)


def ends_of(
    scopes: Sequence[GraphIndex],
    slots: Sequence[Sequence[int]],
    joined: Collection[int],
    conditions: Collection[int],
    fetched: Iterable[int],
) -> Ends:
    """Finds where the values of a graph and its functions come from, and where they go.

    A call is such an end, for its caller and for the function: it keeps the dtypes
    of its boundary.

    Args:
        scopes: The scopes, each with its shapes; the graph itself is the first.
        slots: For each scope the slot of the joined graph for each of its slots.
        joined: Positions of the functions that are joined with their loops.
        conditions: Positions of those that are conditions of loops.
        fetched: Positions of the nodes of the graph that are fetched.
    """
    ends = Ends()
    for position in fetched:
        is_scalar = scopes[0].shapes.get((position, 0)) == ()
        of_kind = ends.scalars if is_scalar else ends.results
        of_kind.update((slots[0][slot], None) for slot in scopes[0].nodes[position].slots)
    for number, (scope, of_scope) in enumerate(zip(scopes, slots, strict=True)):
        is_called = number not in joined
        for node in scope.nodes:
            node_slots = ((of_scope[slot], None) for slot in node.slots)
            calls = node.calls and node.op not in LOOPS
            if node.op in _SOURCES or calls or (is_called and node.op == ARGUMENT):
                ends.inputs.update(node_slots)
            elif is_called and node.op == RESULT:
                ends.results.update(node_slots)
        if number in joined:
            _add_states(ends.states, scope, of_scope)
        scalars, stored = _ends_of_scope(scope)
        unused = _with_terms(scope, _unused_scalars(scope))
        ends.scalars.update((of_scope[slot], None) for slot in _with_terms(scope, scalars))
        ends.stored.update((of_scope[slot], None) for slot in stored)
        ends.unused.update((of_scope[slot], None) for slot in unused)
        if number in conditions:
            decided = (slot for node in scope.nodes if node.op == RESULT for slot in node.slots)
            ends.conditions.update((of_scope[slot], None) for slot in decided)
    for slot in [*ends.scalars, *ends.results]:
        ends.unused.pop(slot, None)
    for slot, source in _across_calls(scopes, slots):
        ends.across.setdefault(slot, []).append(source)
    return ends


def _add_states(
    states: dict[int, LoopVariable], scope: GraphIndex, of_scope: Sequence[int]
) -> None:
    """Adds the variables of a loop, as far as they are in one of its functions."""
    for node in scope.nodes:
        if node.op not in (ARGUMENT, RESULT):
            continue
        for slot in node.slots:
            state = states.setdefault(of_scope[slot], LoopVariable([], []))
            is_next = node.op == RESULT
            found, near = (state.sources, scope.fanin) if is_next else (state.targets, scope.fanout)
            found += (of_scope[other] for other in near[slot])


def _ends_of_scope(scope: GraphIndex) -> tuple[list[int], list[int]]:
    """Slots of scalars that are returned or stored, and of larger tensors that are stored."""
    scalars, stored = list[int](), list[int]()
    storing = scope.users["resource"]
    for edge in scope.edges:
        position = scope.slots[edge.target].node
        stores = position in storing
        if not stores and scope.nodes[position].op != RESULT:
            continue
        if scope.shapes.get(scope.tensor(edge)) == ():
            scalars.append(edge.source)
        elif stores:
            stored.append(edge.source)
    return scalars, stored


def _with_terms(scope: GraphIndex, scalars: Iterable[int]) -> Iterable[int]:
    """Adds the scalars that scalars are computed from by additions and scaling.

    A penalty of gradients is behind products with weights, and the loss beside it is not.
    """

    def terms(slot: int) -> Iterable[int]:
        return scope.fanin[slot] if scope.ops[slot] in _TERMS else ()

    def is_scalar(slot: int) -> bool:
        return scope.shapes.get((scope.slots[slot].node, 0)) == ()

    return reach(scalars, lambda slot: filter(is_scalar, terms(slot)))


def _across_calls(
    scopes: Sequence[GraphIndex], slots: Sequence[Sequence[int]]
) -> Iterator[tuple[int, int]]:
    """Pairs of a slot and where its value comes from, on the other side of a call."""
    boundaries = {
        scope.scope: [
            [of_scope[node.slots[0]] for node in scope.nodes if node.op == op]
            for op in (ARGUMENT, RESULT)
        ]
        for scope, of_scope in zip(scopes, slots, strict=True)
    }
    for scope, of_scope in zip(scopes, slots, strict=True):
        for node in scope.nodes:
            if not node.calls or node.op in LOOPS:
                continue
            taken, made = (
                [slot for slot in node.slots if scope.slots[slot].attr == attr]
                for attr in ("Tin", "Tout")
            )
            for _, name in node.calls:
                arguments, results = boundaries.get(name, [[], []])
                if (len(arguments), len(results)) != (len(taken), len(made)):
                    continue
                for slot, argument in zip(taken, arguments, strict=True):
                    yield from ((argument, of_scope[source]) for source in scope.fanin[slot])
                for slot, result in zip(made, results, strict=True):
                    yield of_scope[slot], result


def _unused_scalars(scope: GraphIndex) -> Iterator[int]:
    """Slots of scalars whose consumers, if any, have no used float results."""
    used = {
        slot.node
        for number, slot in enumerate(scope.slots)
        if slot.dtype == FLOAT32 and scope.fanout[number]
    }
    for (position, port), shape in scope.shapes.items():
        # A scalar handle of a list may hold larger tensors.
        if shape == () and port == 0 and position not in scope.users["variant"]:
            node = scope.nodes[position]
            for slot in () if node.calls else node.slots:
                if used.isdisjoint(scope.slots[target].node for target in scope.fanout[slot]):
                    yield slot
