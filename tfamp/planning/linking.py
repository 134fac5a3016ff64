"""A graph with the bodies of its loops -> one scope; framework-free.

A loop takes, carries and returns its variables in one dtype each: that of an entry of the loop's
attribute, of an argument of its condition and its body, and of a result of its body. All of these
are one slot here, so that the passes and the cut decide about a loop variable once, with everything
before, in and behind the loop in sight.

A function that something else calls too is left by itself: its arguments and results keep their
dtypes, as those of conditionals do. One of their branches may pass on what it is given, and nobody
expects that to be rounded.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from tfamp.planning.cost import ScopeCosts
from tfamp.planning.structures import (
    ARGUMENT,
    FLOAT32,
    LINK,
    LOOPS,
    MAIN_GRAPH,
    RESULT,
    Edge,
    GraphIndex,
    IndexedNode,
    Painting,
    Reason,
    Regions,
    reach,
)

T = TypeVar("T")

# A loop whose number of rounds the graph does not tell counts as this many.
ROUNDS = 32

_ADDING = frozenset({"AccumulateNV2", "Add", "AddN", "AddV2", "Sub"})
_ADDS_UP = Reason("loop", "it adds up over the iterations of a loop")
_INVARIANT = Reason("loop", "it is the same in every iteration, and its gradient adds up over them")


@dataclass(frozen=True, slots=True)
class Link:
    """A function that one loop runs, and nothing else.

    Attributes:
        caller: Position of the scope that the loop is in.
        node: Position of the loop there.
        function: Position of the scope of the function.
        slots: Slots of the function's arguments and results, with the caller's slot for each.
    """

    caller: int
    node: int
    function: int
    slots: Mapping[int, int]


@dataclass(frozen=True, slots=True)
class Joined:
    """Several scopes as one.

    Attributes:
        scopes: The scopes.
        index: All of them: nodes one scope after the other, slots too.
        slots: For each scope the position in `index` of each of its slots.
        kept: Slots of `index` that stay as they are because of what loops do, with the reason.
        rounds: For each scope how often it is run, as far as loops make it run more than once.
    """

    scopes: tuple[GraphIndex, ...]
    index: GraphIndex
    slots: tuple[tuple[int, ...], ...]
    kept: Mapping[int, Reason]
    rounds: tuple[int, ...]

    def by_position(self, named: Sequence[Mapping[str, T]]) -> dict[int, T]:
        """Returns what is known of nodes of each scope by name, by position in `index`."""
        offsets = _offsets([len(scope.nodes) for scope in self.scopes])
        return {
            offset + position: value
            for offset, scope, known in zip(offsets, self.scopes, named, strict=True)
            for position, value in scope.positions(known).items()
        }

    def positions(self, chosen: Sequence[Iterable[int]]) -> frozenset[int]:
        """Returns positions of nodes in each scope as positions in `index`."""
        offsets = _offsets([len(scope.nodes) for scope in self.scopes])
        pairs = zip(offsets, chosen, strict=True)
        return frozenset(offset + node for offset, nodes in pairs for node in nodes)

    def join_costs(self, costs: Sequence[ScopeCosts], safe: Collection[int]) -> ScopeCosts:
        """Returns what all scopes take, with the rounds of loops.

        If the shape of a slot that may be low, as those in `safe`, is unknown, then so is what the
        whole scope takes.
        """
        slots = [(0.0, 0.0)] * len(self.index.slots)
        casts: dict[tuple[int, int], float] = {}
        offsets = _offsets([len(scope.nodes) for scope in self.scopes])
        for number, each in enumerate(costs):
            rounds = self.rounds[number]
            for slot, (as_it_is, lowered) in enumerate(each.slots):
                place = self.slots[number][slot]
                before = slots[place]
                slots[place] = before[0] + rounds * as_it_is, before[1] + rounds * lowered
            for edge in self.scopes[number].edges:
                producer = self.scopes[number].slots[edge.source].node
                seconds = each.casts.get((producer, edge.port))
                if seconds is not None:
                    source = self.slots[number][edge.source]
                    port = _port(edge.port, offsets[number] + producer, source, self.index)
                    casts[self.index.slots[source].node, port] = rounds * seconds
        return ScopeCosts(
            slots=tuple(slots),
            casts=casts,
            overheads=tuple(
                self.rounds[number] * seconds
                for number, each in enumerate(costs)
                for seconds in each.overheads
            ),
            known=tuple(known for each in costs for known in each.known),
            unshaped=frozenset(
                place
                for places, each in zip(self.slots, costs, strict=True)
                if any(places[slot] in safe for slot in each.unshaped)
                for place in places
            ),
        )

    def split(self, decided: Mapping[int, Reason], scope: int) -> dict[int, Reason]:
        """Returns what was decided about slots of `index` for the slots of one scope."""
        return {
            slot: decided[joined]
            for slot, joined in enumerate(self.slots[scope])
            if joined in decided
        }

    def split_painting(self, painting: Painting, scope: int) -> Painting:
        """Returns the colours of one scope."""
        parts = (painting.low, painting.denied, painting.left)
        return Painting(*(self.split(part, scope) for part in parts))

    def split_regions(self, regions: Regions, scope: int) -> Regions:
        """Returns the slots of one scope that do not change."""
        return Regions(self.split(regions.fixed, scope), (), (), (), (), frozenset())


def join(
    scopes: Sequence[GraphIndex],
    clear: Collection[str],
    weights: Collection[tuple[str, str]] = (),
) -> Joined:
    """Joins a graph with the functions that its loops run.

    Args:
        scopes: The graph and its functions.
        clear: Op types that may change their dtypes with their neighbours: only loops among them
            are joined with what they run.
        weights: Arguments of loops' functions as (function, argument) by which nobody will need
            gradients: they may be low though they are the same in every iteration.

    Returns:
        All scopes as one. A scope that nothing is linked with is in it by itself.
    """
    links = tuple(_links(scopes, clear))
    linked = {link.function: link for link in links}
    node_offsets = _offsets([len(scope.nodes) for scope in scopes])
    slot_offsets = _offsets([len(scope.slots) for scope in scopes])
    places = []
    for number, scope in enumerate(scopes):
        link = linked.get(number)
        places.append(
            tuple(
                slot_offsets[link.caller] + link.slots[slot]
                if link and slot in link.slots
                else slot_offsets[number] + slot
                for slot in range(len(scope.slots))
            )
        )
    one = len(scopes) == 1
    index = scopes[0] if one else _join_indexes(scopes, tuple(places), node_offsets, links)
    kept = {}
    for link in links:
        kept.update(_kept(scopes[link.function], places[link.function], weights))
    return Joined(tuple(scopes), index, tuple(places), kept, _rounds(len(scopes), links))


def boundaries_agree(scopes: Sequence[GraphIndex]) -> Iterator[tuple[IndexedNode, str, bool]]:
    """Yields loops and conditionals with each function they run, and whether the dtypes agree."""
    numbers = {scope.scope: number for number, scope in enumerate(scopes)}
    for caller in scopes:
        for node in caller.nodes:
            for attr, name in node.calls:
                if name in numbers and _boundary_attrs(node.op, attr) is not None:
                    yield (
                        node,
                        name,
                        _boundary(caller, node, attr, scopes[numbers[name]]) is not None,
                    )


def _offsets(counts: Sequence[int]) -> list[int]:
    return [sum(counts[:number]) for number in range(len(counts))]


def _links(scopes: Sequence[GraphIndex], clear: Collection[str]) -> Iterator[Link]:
    numbers = {scope.scope: number for number, scope in enumerate(scopes)}
    callers = Counter(name for scope in scopes for node in scope.nodes for _, name in node.calls)
    for caller, scope in enumerate(scopes):
        for position, node in enumerate(scope.nodes):
            if node.op not in LOOPS or node.op not in clear:
                continue
            if any(callers[name] != 1 for _, name in node.calls):
                continue
            found = [
                (numbers[name], _boundary(scope, node, attr, scopes[numbers[name]]))
                for attr, name in node.calls
                if name in numbers and name != MAIN_GRAPH
            ]
            # All functions of a node or none: they share its slots.
            if len(found) == len(node.calls) and all(slots is not None for _, slots in found):
                for function, slots in found:
                    yield Link(caller, position, function, slots or {})


def _boundary_attrs(op: str, attr: str) -> tuple[str, str] | None:
    """The attributes with the dtypes of a function's arguments and of its results."""
    if op in LOOPS:
        return {"body": ("T", "T"), "cond": ("T", "")}.get(attr)
    if attr in ("then_branch", "else_branch", "branches"):
        return ("Tin", "Tout")
    return None


def _boundary(
    caller: GraphIndex, node: IndexedNode, attr: str, function: GraphIndex
) -> dict[int, int] | None:
    """The slots of a function's arguments and results with the caller's, if they fit."""
    attrs = _boundary_attrs(node.op, attr)
    if attrs is None:
        return None
    pairs: dict[int, int] = {}
    for name, op in zip(attrs, (ARGUMENT, RESULT), strict=True):
        if not name:
            continue
        outer = [slot for slot in node.slots if caller.slots[slot].attr == name]
        outer.sort(key=lambda slot: caller.slots[slot].index or 0)
        inner = [each.slots[0] for each in function.nodes if each.op == op]
        if [caller.slots[s].dtype for s in outer] != [function.slots[s].dtype for s in inner]:
            return None
        pairs.update(zip(inner, outer, strict=True))
    return pairs


def _join_indexes(
    scopes: Sequence[GraphIndex],
    places: Sequence[Sequence[int]],
    node_offsets: Sequence[int],
    links: Sequence[Link],
) -> GraphIndex:
    linked_nodes = {(link.caller, link.node) for link in links}
    linked_functions = {link.function for link in links}
    nodes, slots = [], []
    for number, scope in enumerate(scopes):
        for position, node in enumerate(scope.nodes):
            own = tuple(dict.fromkeys(places[number][slot] for slot in node.slots))
            changes: dict[str, Any] = {"slots": own}
            if (number, position) in linked_nodes:
                changes["calls"] = ()
            elif number in linked_functions and node.op in (ARGUMENT, RESULT):
                changes["op"] = LINK
            nodes.append(node._replace(**changes))
        offset = node_offsets[number]
        slots += [dataclasses.replace(slot, node=slot.node + offset) for slot in scope.slots]
    bare = GraphIndex(MAIN_GRAPH, tuple(nodes), tuple(slots), (), (), (), {})
    edges = []
    fanin: list[dict[int, None]] = [{} for _ in slots]
    fanout: list[dict[int, None]] = [{} for _ in slots]
    for number, scope in enumerate(scopes):
        for edge in scope.edges:
            source, target = places[number][edge.source], places[number][edge.target]
            producer = node_offsets[number] + scope.slots[edge.source].node
            port = _port(edge.port, producer, source, bare)
            edges.append(Edge(source, target, port, edge.input, edge.tensor))
            fanin[target][source] = None
            fanout[source][target] = None
    return dataclasses.replace(
        bare,
        edges=tuple(edges),
        fanin=tuple(map(tuple, fanin)),
        fanout=tuple(map(tuple, fanout)),
    )


def _port(port: int, producer: int, source: int, index: GraphIndex) -> int:
    """The output port of a tensor; negative where its slot is another node's than its producer.

    A tensor is told by the node of its slot and its port. An argument's slot is the caller's, so
    that its port must be none of the caller's.
    """
    return port if index.slots[source].node == producer else -1 - producer


def _rounds(count: int, links: Sequence[Link]) -> tuple[int, ...]:
    by_function = {link.function: link for link in links}

    def rounds(number: int) -> int:
        link = by_function.get(number)
        return 1 if link is None else ROUNDS * rounds(link.caller)

    return tuple(rounds(number) for number in range(count))


def _kept(
    body: GraphIndex, places: Sequence[int], weights: Collection[tuple[str, str]]
) -> dict[int, Reason]:
    """Loop variables that stay float32, and the ops that add to them."""
    arguments = [node.slots[0] for node in body.nodes if node.op == ARGUMENT]
    results = [node.slots[0] for node in body.nodes if node.op == RESULT]
    if len(arguments) != len(results):  # the condition of a loop, not its body
        return {}
    kept = {}
    for argument, result in zip(arguments, results, strict=True):
        if body.slots[argument].dtype != FLOAT32:
            continue
        (made,) = _origins(body, result)
        if made == argument:
            if (body.scope, body.node_of(argument).name) in weights:
                continue
            kept[places[argument]] = _INVARIANT
        elif body.node_of(made).op in _ADDING and argument in _origins(body, made):
            kept[places[argument]] = kept[places[made]] = _ADDS_UP
    return kept


def _origins(body: GraphIndex, slot: int) -> list[int]:
    """The slots that a slot's values come from, past Identity nodes."""

    def made(source: int) -> Iterable[int]:
        return body.fanin[source] if body.node_of(source).op == "Identity" else ()

    return [list(reach([source], made))[-1] for source in body.fanin[slot]]
