"""The decision about a graph: which dtypes change and where Casts go; framework-free.

Regions, colours, placement, plan: each stage is a pure function of the results of earlier ones.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import NamedTuple

from tfamp.core import messages
from tfamp.planning.coloring import ColoredScope, find_regions, paint, safe_slots
from tfamp.planning.cost import (
    FLOP_FORMULAS,
    ITERATIONS,
    ScopeCosts,
    crossing_tensors,
    estimate,
    scope_seconds,
)
from tfamp.planning.ends import ends_of
from tfamp.planning.exact_values import exact_slots
from tfamp.planning.inexact_kernels import inexact_nodes
from tfamp.planning.loop_states import kept_variables
from tfamp.planning.normalizations import softmax_gradients, statistics
from tfamp.planning.op_sets import STORED
from tfamp.planning.options import (
    ChosenNodes,
    GraphUse,
    RewriteOptions,
    choose_nodes,
    nearest_names,
)
from tfamp.planning.placement import place
from tfamp.planning.ranges import too_large
from tfamp.planning.scalings import joined_nodes
from tfamp.planning.structures import (
    ARGUMENT,
    FLOAT32,
    LINK,
    LOOPS,
    MAIN_GRAPH,
    RESULT,
    CastSite,
    Edge,
    GraphIndex,
    IndexedNode,
    NodeOutput,
    NodePlan,
    Reason,
    Retype,
    RewritePlan,
    RewriteSummary,
    TypeSlot,
    free_name,
)


@dataclass(frozen=True, slots=True)
class PaintedScope:
    """A scope with the decisions about it.

    Attributes:
        index: The scope.
        low: Slots that are to be converted, with the reason.
        kept: Slots that need float32 or are cheaper in it, with the reason.
        costs: The time of each part.
        runs: Estimated number of runs for each run of the graph, by the loops around it.
    """

    index: GraphIndex
    low: Mapping[int, Reason]
    kept: Mapping[int, Reason]
    costs: ScopeCosts
    runs: int


@dataclass(frozen=True, slots=True)
class Decision:
    """The decisions about a graph.

    Attributes:
        scopes: The graph and its functions, with their colours and costs.
        plan: The changes.
        idle: A text for each pattern of the options that changes no node.
    """

    scopes: tuple[PaintedScope, ...]
    plan: RewritePlan
    idle: tuple[str, ...]


def decide(
    indexes: Sequence[GraphIndex],
    weights: Collection[tuple[str, str]],
    options: RewriteOptions,
    use: GraphUse,
) -> Decision:
    """Decides about a graph and its functions.

    Args:
        indexes: The graph, then its functions.
        weights: Arguments of loops' functions that hold weights: see `join`.
        options: How to rewrite, resolved.
        use: The tensors of the graph that are used, and their ranges.

    Raises:
        ValueError: The graph has no node of a name, or that matches a pattern.
    """
    chosen = choose_nodes(indexes, options, use)
    forced = chosen.forced
    joined = join(indexes, options.colors, weights)
    normalizing = _normalizing(joined)
    exact_nodes = {
        node: reason
        for node, reason in _float32_nodes(joined, normalizing, options, use).items()
        if node not in forced
    }
    exact: dict[int, Reason] = {}
    if options.updates != "low":  # With exactly Grappler's lists there are none.
        fetched = [node for node, reason in chosen.used.items() if reason.rule == "fetches"]
        loops = [number for number, runs in enumerate(joined.runs) if runs > 1]
        ends = ends_of(joined.scopes, joined.slots, loops, joined.conditions, fetched)
        for slot in joined.kept:  # Of a sum over the iterations each term may be rounded.
            ends.states.pop(slot, None)
        exact = exact_slots(joined.index, options.colors, ends, normalizing, options.dtype)
    slots = joined.index.slots
    exact = {slot: reason for slot, reason in exact.items() if slots[slot].node not in forced}

    def scope_with(kept: Mapping[int, Reason]) -> ColoredScope:
        regions = find_regions(joined.index, {**exact_nodes, **kept}, {**exact, **joined.kept})
        return ColoredScope(joined.index, regions, options.colors, forced, options.updates)

    scope = scope_with(chosen.kept)
    painting = paint(scope)
    costs = [estimate(index, options.machine, options.dtype) for index in indexes]
    if options.placement != "lists":
        safe = safe_slots(scope, painting)
        least_gain = options.machine.least_gain
        joined_costs = joined.join_costs(costs, safe)
        painting = place(joined.index, scope.regions, painting, safe, joined_costs, least_gain)
    why_float32 = {**painting.left, **painting.denied, **scope.regions.fixed}
    scopes = tuple(
        PaintedScope(
            index=index,
            low=joined.split(painting.low, number),
            kept=joined.split(why_float32, number),
            costs=costs[number],
            runs=joined.runs[number],
        )
        for number, index in enumerate(indexes)
    )
    plan = _plan(scopes, options)
    able: frozenset[int] = frozenset()
    if any(matched.argument == "keep_float32" for matched in chosen.patterns):
        able = _able_nodes(scope_with(chosen.used))
    return Decision(scopes, plan, tuple(_idle_patterns(indexes, chosen, able, plan)))


def _plan(scopes: Sequence[PaintedScope], options: RewriteOptions) -> RewritePlan:
    return make_plan(
        options.dtype,
        nodes=tuple(node for scope in scopes for node in _node_plans(scope, options)),
        casts=tuple(cast for scope in scopes for cast in _casts(scope, options.dtype)),
        retypes=tuple(retype for scope in scopes for retype in _retypes(scope)),
        speed_up=_speed_up(scopes),
    )


def _able_nodes(scope: ColoredScope) -> frozenset[int]:
    """The nodes that could be low."""
    painting = paint(scope)
    slots = (*painting.low, *safe_slots(scope, painting))
    return frozenset(scope.index.slots[slot].node for slot in slots)


def _idle_patterns(
    indexes: Sequence[GraphIndex], chosen: ChosenNodes, able: Set[int], plan: RewritePlan
) -> Iterator[str]:
    """A text for each pattern that changes no node; nodes in `able` could be low without it."""
    nodes = {(node.scope, node.name): node for node in plan.nodes}
    places = [(index.scope, node.name) for index in indexes for node in index.nodes]
    for argument, pattern, matches in chosen.patterns:
        names = ", ".join(repr(places[node][1]) for node in matches[:3])
        shown = messages.argument(argument)
        planned = [nodes[places[node]] for node in matches if places[node] in nodes]
        if argument == "keep_float32" and able.isdisjoint(matches):
            near = nearest_names(pattern, (chosen.names[node] for node in sorted(able)))
            hint = f" Nodes that can be {plan.dtype} are {near}." if near else ""
            text = f"{shown}: {pattern!r} has no effect: without it, too, {names} is float32"
            yield f"{text}.{hint}"
        elif argument == "force_low" and all(node.dtype == FLOAT32 for node in planned):
            why = planned[0].reason.text if planned else "it does not hold float32"
            yield f"{shown}: {pattern!r} has no effect: {names} stays as it is; {why}."


def _normalizing(joined: Joined) -> dict[int, Reason]:
    """Nodes that normalize data, whichever precision they need."""
    return {
        offset + position: reason
        for offset, index in zip(joined.offsets, joined.scopes, strict=True)
        for position, reason in statistics(index).items()
    }


def _float32_nodes(
    joined: Joined, normalizing: Mapping[int, Reason], options: RewriteOptions, use: GraphUse
) -> dict[int, Reason]:
    """Nodes that need float32: normalizations, measured values, and sums of low kernels."""
    # The last reason of a node is the one to tell: what its values mean, then what they are.
    reasons: dict[int, Reason] = {}
    measured: dict[int, Reason] = {}
    for offset, index in zip(joined.offsets, joined.scopes, strict=True):
        of_scope: dict[int, Reason] = {}
        if options.updates != "low":
            of_scope.update(inexact_nodes(index, options))
            of_scope.update(joined_nodes(index, options.dtype))
        if options.exact_statistics:
            of_scope.update(softmax_gradients(index, options.dtype))
        reasons.update((offset + position, reason) for position, reason in of_scope.items())
        if use.ranges and use.limits:
            large = too_large(index, use.ranges, use.limits)
            measured.update((offset + position, reason) for position, reason in large.items())
    return {**reasons, **(normalizing if options.exact_statistics else {}), **measured}


# ---- The plan --------------------------------------------------------------------------


def make_plan(
    dtype: str,
    nodes: tuple[NodePlan, ...],
    casts: tuple[CastSite, ...],
    retypes: tuple[Retype, ...],
    speed_up: float | None,
) -> RewritePlan:
    """Returns a plan with its totals."""
    known = [cast.bytes for cast in casts if cast.bytes is not None]
    products = [node for node in nodes if node.op in FLOP_FORMULAS]
    summary = RewriteSummary(
        nodes=len(nodes),
        low_nodes=sum(node.dtype == dtype for node in nodes),
        retyped_nodes=len({(retype.scope, retype.node) for retype in retypes if retype.attr}),
        casts=len(casts),
        cast_bytes=sum(known),
        casts_of_unknown_size=len(casts) - len(known),
        estimated_speed_up=speed_up,
        products=len(products),
        low_products=sum(node.dtype == dtype for node in products),
    )
    return RewritePlan(dtype, nodes, casts, retypes, summary)


def _speed_up(scopes: Sequence[PaintedScope]) -> float | None:
    if any(s.index.slots[slot].can_be_low for s in scopes for slot in s.costs.unshaped):
        return None
    before = sum(s.runs * scope_seconds(s.index, s.costs, ()) for s in scopes)
    after = sum(s.runs * scope_seconds(s.index, s.costs, s.low) for s in scopes)
    return before / after if after else None


def _retypes(scope: PaintedScope) -> Iterator[Retype]:
    index = scope.index
    for number in sorted(scope.low):
        slot = index.slots[number]
        yield Retype(index.scope, index.nodes[slot.node].name, slot.attr, slot.entry)


def _casts(scope: PaintedScope, dtype: str) -> Iterator[CastSite]:
    index, low = scope.index, scope.low
    taken = {node.name for node in index.nodes}
    # All edges of a tensor that need a Cast need the same one: the producer has one dtype.
    for tensor, edges in sorted(crossing_tensors(index, low).items()):
        from_, to = (dtype, FLOAT32) if edges[0].source in low else (FLOAT32, dtype)
        node, elements = index.nodes[tensor[0]], index.size(tensor)
        name = free_name(f"{node.name}-{tensor[1]}-CastTo-{to}", taken)
        taken.add(name)
        yield CastSite(
            scope=index.scope,
            tensor=edges[0].tensor,
            from_=from_,
            to=to,
            bytes=None if elements is None else elements * (4 + 2),
            name=name,
            producer=node.name,
            device=node.device,
            consumers=tuple((index.node_of(edge.target).name, edge.input) for edge in edges),
        )


def _node_plans(scope: PaintedScope, options: RewriteOptions) -> Iterator[NodePlan]:
    index, dtype = scope.index, options.dtype
    for position, node in enumerate(index.nodes):
        slots = _float_slots(index, node, dtype)
        if not slots or node.op in (ARGUMENT, RESULT):
            continue
        why_low = [scope.low[slot] for slot in slots if slot in scope.low]
        if any(index.slots[slot].dtype == dtype for slot in slots):
            why_low.append(Reason("as given", f"it is in {dtype} already"))
        seconds = scope.costs.node(index, position, scope.low)
        producers = [index.node_of(edge.source).name for edge in index.inputs[position]]
        yield NodePlan(
            scope=index.scope,
            name=node.name,
            op=node.op,
            dtype=dtype if why_low else FLOAT32,
            reason=why_low[0] if why_low else _why_float32(scope, slots[0], options.colors),
            cost=seconds if scope.costs.is_known(node) else None,
            inputs=tuple(dict.fromkeys(producers)),
        )


def _float_slots(index: GraphIndex, node: IndexedNode, dtype: str) -> list[int]:
    # A Cast counts under what it casts to.
    return [
        slot
        for slot in node.slots
        if index.slots[slot].dtype in (FLOAT32, dtype)
        and (node.op != "Cast" or index.slots[slot].attr == "DstT")
    ]


def _why_float32(scope: PaintedScope, slot: int, colors: Mapping[str, str]) -> Reason:
    op = scope.index.node_of(slot).op
    if slot in scope.kept:
        return scope.kept[slot]
    if op not in colors:
        return Reason("no list", f"{op} is on no list")
    if not scope.index.slots[slot].can_be_low:
        return Reason("no kernel", f"{op} has no kernel for it on this device")
    if colors[op] == "clear":
        return Reason("clear", "no node next to it is converted")
    return Reason("infer", "it is neither between nor behind converted nodes")


# ---- Joining loops ---------------------------------------------------------------------

# A loop variable has one dtype: in the loop's attribute, as an argument of its condition and
# its body, and as a result of its body. All of these are one slot here, so that the passes and
# the cut decide about a loop variable once, and see the graph before, in and behind the loop.
#
# Functions with other callers are not joined: their arguments and results keep their dtypes, as
# in conditionals, where a branch may return its argument as it is, which must not be rounded.

_APART = Reason("boundary", "the loop keeps the dtypes of its boundary")


class Link(NamedTuple):
    """The function of a loop.

    Attributes:
        caller: Position of the scope of the loop.
        node: Position of the loop there.
        attr: The loop's attribute that names the function: "cond" or "body".
        slots: Slots of the function's arguments and results, with the loop's slot for each.
    """

    caller: int
    node: int
    attr: str
    slots: Mapping[int, int]


@dataclass(frozen=True, slots=True)
class Joined:
    """Several scopes as one.

    Attributes:
        scopes: The scopes.
        index: All of them: nodes one scope after the other, slots too.
        offsets: For each scope the position in `index` of its first node.
        slots: For each scope the position in `index` of each of its slots.
        kept: Loop variables, as slots of `index`, that stay float32, with the reason.
        runs: For each scope the estimated number of runs, by the loops around it.
        conditions: Positions of the scopes that are conditions of joined loops.
    """

    scopes: Sequence[GraphIndex]
    index: GraphIndex
    offsets: Sequence[int]
    slots: Sequence[Sequence[int]]
    kept: Mapping[int, Reason]
    runs: Sequence[int]
    conditions: Collection[int]

    def join_costs(self, costs: Sequence[ScopeCosts], safe: Collection[int]) -> ScopeCosts:
        """Returns the costs of all scopes as one, multiplied by their numbers of runs.

        If the shape of a slot in `safe` is unknown, the costs of its whole scope are.
        """
        times = [(0.0, 0.0)] * len(self.index.slots)
        casts: dict[NodeOutput, float] = {}
        overheads: list[float] = []
        unshaped: set[int] = set()
        edges = iter(self.index.edges)
        scopes = zip(self.scopes, self.slots, self.runs, costs, strict=True)
        for scope, slots, runs, scope_costs in scopes:
            for slot, (as_it_is, converted) in zip(slots, scope_costs.slots, strict=True):
                before = times[slot]
                times[slot] = before[0] + runs * as_it_is, before[1] + runs * converted
            for inner, edge in zip(scope.edges, edges, strict=False):
                if (tensor := scope.tensor(inner)) in scope_costs.casts:
                    casts[self.index.tensor(edge)] = runs * scope_costs.casts[tensor]
            overheads += [runs * seconds for seconds in scope_costs.overheads]
            if any(slots[slot] in safe for slot in scope_costs.unshaped):
                unshaped.update(slots)
        return ScopeCosts(times, casts, overheads, unshaped)

    def split(self, decided: Mapping[int, Reason], scope: int) -> dict[int, Reason]:
        """Returns decisions about slots of `index` for the slots of one scope."""
        slots = enumerate(self.slots[scope])
        return {slot: decided[joined] for slot, joined in slots if joined in decided}


def join(
    scopes: Sequence[GraphIndex],
    colors: Mapping[str, str],
    weights: Collection[tuple[str, str]],
) -> Joined:
    """Joins a graph with the functions that its loops run.

    Args:
        scopes: The graph and its functions.
        colors: Colour of every op type that is on a list: only "clear" loops are joined with
            their functions.
        weights: Invariant arguments of loops' functions, as (function, argument), that may be
            low, as no gradients by them are needed.

    Returns:
        All scopes as one; scopes without links are not connected to others.
    """
    links = _links(scopes, colors)
    offsets = list(itertools.accumulate((len(scope.nodes) for scope in scopes), initial=0))
    bounds = itertools.accumulate((len(scope.slots) for scope in scopes), initial=0)
    slots = [list(range(*pair)) for pair in itertools.pairwise(bounds)]
    kept: dict[int, Reason] = {}
    for number, link in links.items():
        for inner, outer in link.slots.items():
            slots[number][inner] = slots[link.caller][outer]

    def runs(number: int) -> int:
        return ITERATIONS * runs(links[number].caller) if number in links else 1

    every = [runs(number) for number in range(len(scopes))]
    apart = _loops_apart(scopes, slots, links)
    for number in sorted(links, key=every.__getitem__, reverse=True):  # Inner loops first.
        kept.update(kept_variables(scopes[number], slots[number], weights, {**apart, **kept}))
    index = scopes[0] if len(scopes) == 1 else _join_indexes(scopes, offsets, slots, links)
    conditions = [number for number, link in links.items() if link.attr == "cond"]
    return Joined(scopes, index, offsets[:-1], slots, kept, every, conditions)


def _links(scopes: Sequence[GraphIndex], colors: Mapping[str, str]) -> dict[int, Link]:
    """The functions, by position of their scopes, whose only caller is a loop."""
    numbers = {scope.scope: number for number, scope in enumerate(scopes)}
    nodes = (node for scope in scopes for node in scope.nodes)
    callers = Counter(name for node in nodes for _, name in node.calls)
    links: dict[int, Link] = {}
    for caller, scope in enumerate(scopes):
        for position, node in enumerate(scope.nodes):
            if node.op not in LOOPS or colors.get(node.op) != "clear":
                continue
            functions = {
                numbers[name]: Link(
                    *(caller, position, attr),
                    _shared_slots(scope, node, attr, scopes[numbers[name]]),
                )
                for attr, name in node.calls
                if name in numbers and callers[name] == 1
            }
            # All functions of a loop or none: they share its slots.
            fit = all(link.slots for link in functions.values())
            if fit and len(functions) == len(node.calls):
                links.update(functions)
    return links


def _loops_apart(
    scopes: Sequence[GraphIndex], slots: Sequence[Sequence[int]], links: Mapping[int, Link]
) -> dict[int, Reason]:
    """The slots of loops that are not joined with their functions."""
    joined = {(link.caller, link.node) for link in links.values()}
    return {
        of_scope[slot]: _APART
        for number, (scope, of_scope) in enumerate(zip(scopes, slots, strict=True))
        for position, node in enumerate(scope.nodes)
        if node.op in LOOPS and (number, position) not in joined
        for slot in node.slots
    }


def _shared_slots(
    caller: GraphIndex, loop: IndexedNode, attr: str, function: GraphIndex
) -> dict[int, int]:
    """The slots of a function's arguments and results with the loop's; none if these differ."""
    outer = [slot for slot in loop.slots if caller.slots[slot].attr == "T"]
    pairs: dict[int, int] = {}
    for op in (ARGUMENT, RESULT) if attr == "body" else (ARGUMENT,):
        inner = [node.slots[0] for node in function.nodes if node.op == op]
        if [caller.slots[s].dtype for s in outer] != [function.slots[s].dtype for s in inner]:
            return {}
        pairs.update(zip(inner, outer, strict=True))
    return pairs


def _join_indexes(
    scopes: Sequence[GraphIndex],
    offsets: Sequence[int],
    places: Sequence[Sequence[int]],
    links: Mapping[int, Link],
) -> GraphIndex:
    loops = {(link.caller, link.node) for link in links.values()}
    nodes: list[IndexedNode] = []
    slots: list[TypeSlot] = []
    edges: list[Edge] = []
    largest: dict[int, float] = {}
    shapes: dict[NodeOutput, tuple[int | None, ...]] = {}  # of variables and constants
    for number, scope in enumerate(scopes):
        joined, offset = places[number], offsets[number]
        shared = links[number].slots if number in links else {}
        for position, node in enumerate(scope.nodes):
            node_slots = tuple(dict.fromkeys(joined[slot] for slot in node.slots))
            calls = () if (number, position) in loops else node.calls
            op = LINK if number in links and node.op in (ARGUMENT, RESULT) else node.op
            nodes.append(node._replace(slots=node_slots, calls=calls, op=op))
        slots += [slot._replace(node=slot.node + offset) for slot in scope.slots]
        for edge in scope.edges:
            # A tensor is identified by the node of its slot and its port. An argument has a
            # slot of the caller's node, and so a port that the caller does not have.
            argument = offset + scope.slots[edge.source].node
            port = -1 - argument if edge.source in shared else edge.port
            ends = joined[edge.source], joined[edge.target]
            edges.append(Edge(*ends, port, edge.input, edge.tensor))
        largest.update((offset + position, value) for position, value in scope.largest.items())
        for position, node in enumerate(scope.nodes):
            if node.op in STORED and (shape := scope.shapes.get((position, 0))) is not None:
                shapes[offset + position, 0] = shape
    return GraphIndex(MAIN_GRAPH, tuple(nodes), tuple(slots), tuple(edges), shapes, largest)
