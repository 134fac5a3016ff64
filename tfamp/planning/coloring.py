"""The passes that colour the slots of a scope; framework-free.

The rules are those of TensorFlow's own pass, `grappler/optimizers/auto_mixed_precision.cc`, with
two differences: a slot is lowered only where the device has a kernel for it, and the input of a
Cast follows its producer. Each pass is a pure function. In the chains below A, I, D and C stand for
an allow, infer, deny and clear node, lower case for one that is not lowered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from tfamp.planning.control_flow import LOOPS
from tfamp.planning.structures import FLOAT32, GraphIndex, Painting, Reason, Regions

Updates = Literal["low", "reduced", "float32"]

# What makes the gradients of biases, scales and embeddings out of larger tensors.
_REDUCTIONS = frozenset({"BiasAddGrad", "Mean", "SegmentSum", "Sum", "UnsortedSegmentSum"})


@dataclass(frozen=True, slots=True)
class Rules:
    """A scope with everything the passes need to know of it.

    Attributes:
        index: The scope.
        regions: What its structure demands.
        colors: Colour of each node: "allow", "infer", "deny", "clear" or None.
        forced: Positions of nodes to lower whatever their colour.
        updates: How far what is written to variables may be computed in low precision.
        fanin: For each slot the slots its values come from, through TensorLists also.
        fanout: For each slot the slots its values go to, through TensorLists also.
    """

    index: GraphIndex
    regions: Regions
    colors: Sequence[str | None]
    forced: frozenset[int]
    updates: Updates
    fanin: Sequence[Sequence[int]]
    fanout: Sequence[Sequence[int]]

    def color(self, slot: int) -> str | None:
        """Returns the colour of a slot: that of its node."""
        return self.colors[self.index.slots[slot].node]

    def is_free(self, slot: int) -> bool:
        """Whether a slot can be lowered as far as its op and the structure go."""
        return self.index.slots[slot].can_be_low and slot not in self.regions.fixed


def paint(
    index: GraphIndex,
    regions: Regions,
    colors: Mapping[str, str],
    forced: frozenset[int] = frozenset(),
    updates: Updates = "low",
) -> Painting:
    """Runs all passes.

    Args:
        index: The scope.
        regions: What its structure demands.
        colors: Colour of every op type that is on a list.
        forced: Positions of nodes to lower whatever their colour.
        updates: How far pass 5 goes on into what is written to variables: "low", all the way, as
            Grappler's does; "reduced", up to the last reduction; "float32", not at all. What an
            optimizer adds to a weight is often less than the weight's rounding error in bfloat16.
            In float16 the square of a gradient, or a gradient whose loss scale is taken off, is
            often less than the smallest number.

    Returns:
        The slots to lower and the slots that need float32, with reasons.
    """
    rules = _make_rules(index, regions, colors, forced, updates)
    painting = Painting({}, {})
    for each in PASSES:
        painting = each(rules, painting)
    return painting


def safe_slots(
    index: GraphIndex,
    regions: Regions,
    colors: Mapping[str, str],
    painting: Painting,
) -> frozenset[int]:
    """Returns the slots that may be lowered without loss of safety, Casts left out.

    Those that the passes lower; infer and clear nodes behind these, through infer and clear nodes;
    clear nodes joined to any of these through clear nodes; TensorLists and loops as a whole. With
    A -> c -> i, the passes leave i in float32 and this returns it. What is denied is never safe,
    nor are infer nodes that no allow node leads to, or that the passes leave in float32 on the way
    to a variable: learning rates and moments keep their digits.

    Args:
        index: The scope.
        regions: What its structure demands.
        colors: Colour of every op type that is on a list.
        painting: What the passes made of it.
    """
    rules = _make_rules(index, regions, colors, frozenset(), "float32")
    updates = _ways_to_variables(rules)

    def is_clear(slot: int) -> bool:
        return (
            rules.color(slot) == "clear"
            and rules.is_free(slot)
            and slot not in painting.denied
            and slot not in regions.variable_reads
        )

    def follows(slot: int) -> bool:
        return is_clear(slot) or (
            rules.color(slot) == "infer"
            and rules.is_free(slot)
            and slot not in painting.denied
            and slot not in updates
            and not any(source in painting.denied for source in rules.fanin[slot])
        )

    safe = {slot for slot in painting.low if index.node_of(slot).op != "Cast"}
    _spread(sorted(safe), (rules.fanout,), safe, follows)
    _spread(sorted(safe), (rules.fanin, rules.fanout), safe, is_clear)
    return frozenset(_whole_groups(rules, painting, safe))


def _whole_groups(rules: Rules, painting: Painting, safe: set[int]) -> set[int]:
    """Adds the rest of each TensorList and loop of which a part is safe, or drops the part."""
    whole = set(safe)
    for slots in rules.regions.lists:
        if whole.intersection(slots) and not any(slot in painting.denied for slot in slots):
            whole.update(slots)
        else:
            whole.difference_update(slots)
    for following, merges in rules.regions.loops:
        if not (merges and whole.issuperset((following, *merges))):
            whole.difference_update((following, *merges))
    return whole


def _make_rules(
    index: GraphIndex,
    regions: Regions,
    colors: Mapping[str, str],
    forced: frozenset[int],
    updates: Updates,
) -> Rules:
    fanin, fanout = list(index.fanin), list(index.fanout)
    for source, target in regions.implied:
        fanin[target] = (*fanin[target], source)
        fanout[source] = (*fanout[source], target)
    by_node = [colors.get(node.op) for node in index.nodes]
    return Rules(index, regions, by_node, forced, updates, fanin, fanout)


def deny_unsafe_lists(rules: Rules, painting: Painting) -> Painting:
    """Pass 0: a TensorList that leaves the scope, or cannot be low, stays float32."""
    denied = dict(painting.denied)
    for slots, reason in zip(rules.regions.lists, rules.regions.unsafe_lists, strict=True):
        if reason is not None:
            denied.update(dict.fromkeys(slots, reason))
    return Painting(painting.low, denied)


def lower_allow_nodes(rules: Rules, painting: Painting) -> Painting:
    """Pass 1: allow nodes are lowered, and those the user forces. a -> A."""
    low = dict(painting.low)
    for slot, found in enumerate(rules.index.slots):
        if not rules.is_free(slot) or slot in painting.denied:
            continue
        if found.node in rules.forced:
            low[slot] = Reason("force_low", "its name matches force_low")
        elif rules.color(slot) == "allow":
            op = rules.index.nodes[found.node].op
            low[slot] = Reason("allow", f"{op} is on the allow list")
    return Painting(low, painting.denied)


def spread_deny_forward(rules: Rules, painting: Painting) -> Painting:
    """Pass 2: deny goes forward up to the next deny or infer node, through infer and clear.

    D -> I -> C -> I -> C -> A becomes D -> D -> D -> D -> C -> A: the last C has no infer or deny
    node behind it.
    """
    slots = range(len(rules.index.slots))
    ends = [slot for slot in slots if rules.color(slot) in ("deny", "infer")]
    leads_there = set(ends)
    _spread(ends, (rules.fanin,), leads_there, lambda slot: rules.color(slot) == "clear")
    denied = dict(painting.denied)
    roots = [s for s in slots if rules.color(s) == "deny" and s not in painting.low]
    for slot in roots:
        op = rules.index.node_of(slot).op
        denied.setdefault(slot, Reason("deny", f"{op} is on the deny list"))
    seen = set(denied) | {slot for slot in slots if _is_forced(rules, slot)}
    for slot, cause in _spread(roots, (rules.fanout,), seen, leads_there.__contains__):
        name = rules.index.node_of(cause).name
        denied[slot] = Reason("behind deny", f"it is computed from {name}, which needs float32")
    return Painting(painting.low, denied)


def match_lists(rules: Rules, painting: Painting) -> Painting:
    """Passes 3 and 7: all slots of a TensorList get one colour; one denied slot denies all."""
    low, denied = dict(painting.low), dict(painting.denied)
    for slots in rules.regions.lists:
        if any(slot in denied for slot in slots):
            for slot in slots:
                low.pop(slot, None)
                denied.setdefault(slot, Reason("TensorList", "its TensorList stays float32"))
        elif any(slot in low for slot in slots):
            for slot in slots:
                low.setdefault(slot, Reason("TensorList", "its TensorList is lowered"))
    return Painting(low, denied)


def lower_between_allow(rules: Rules, painting: Painting) -> Painting:
    """Pass 4: infer and clear nodes on a way from one allow node to another are lowered.

    A -> i -> c -> A becomes A -> I -> C -> A, and A -> i -> c stays.
    """

    def joins(slot: int) -> bool:
        return (
            rules.color(slot) in ("infer", "clear")
            and rules.is_free(slot)
            and slot not in painting.denied
        )

    roots = list(painting.low)
    behind = set(roots)
    _spread(roots, (rules.fanout,), behind, joins)
    low = dict(painting.low)
    for slot, _ in _spread(roots, (rules.fanin,), set(roots), behind.__contains__):
        low[slot] = Reason("between", "it is between lowered nodes")
    return Painting(low, painting.denied)


def lower_infer_behind_lowered(rules: Rules, painting: Painting) -> Painting:
    """Pass 5: an infer node directly behind a lowered one joins it. A -> i becomes A -> I.

    In graph order, so that a chain of infer nodes follows as a whole. Not where another of its
    inputs comes from a denied node, nor, unless the rules allow it, on the way to a variable.
    """
    low = dict(painting.low)
    skipped = set(painting.denied)
    if rules.updates != "low":
        skipped |= _ways_to_variables(rules)
    for slot in range(len(rules.index.slots)):
        if rules.color(slot) != "infer" or slot in low or slot in skipped:
            continue
        sources = rules.fanin[slot]
        if (
            rules.is_free(slot)
            and any(source in low for source in sources)
            and not any(source in painting.denied for source in sources)
        ):
            cause = next(source for source in sources if source in low)
            name = rules.index.node_of(cause).name
            low[slot] = Reason("behind low", f"it is computed from {name}, which is lowered")
    return Painting(low, painting.denied)


def lower_clear_beside_lowered(rules: Rules, painting: Painting) -> Painting:
    """Pass 6: clear nodes joined to a lowered node through clear nodes are lowered.

    c -> c -> A -> c becomes C -> C -> A -> C.
    """

    def joins(slot: int) -> bool:
        return (
            rules.color(slot) == "clear"
            and rules.is_free(slot)
            and slot not in painting.denied
            and slot not in rules.regions.variable_reads
        )

    low = dict(painting.low)
    roots = list(low)
    for slot, cause in _spread(roots, (rules.fanin, rules.fanout), set(roots), joins):
        name = rules.index.node_of(cause).name
        low[slot] = Reason("beside low", f"it is next to {name}, which is lowered")
    return Painting(low, painting.denied)


def match_loops(rules: Rules, painting: Painting) -> Painting:
    """Pass 8: a NextIteration and the Merges it feeds get one colour, as no Cast fits between."""
    low = dict(painting.low)
    for following, merges in rules.regions.loops:
        if all(merge in low for merge in merges) and rules.is_free(following) and merges:
            low.setdefault(following, Reason("loop", "the loop variable is lowered"))
        else:
            for slot in (following, *merges):
                low.pop(slot, None)
    return Painting(low, painting.denied)


def repaint_casts(rules: Rules, painting: Painting) -> Painting:
    """Pass 9: a Cast of the graph makes the dtype its consumers want, and takes what it is given.

    A Cast to float32 all of whose consumers are lowered makes the low dtype, and one whose producer
    is lowered takes the low dtype, so that no second Cast is put behind or before it.
    """
    low = dict(painting.low)
    for node in rules.index.nodes:
        if node.op != "Cast":
            continue
        for slot in node.slots:
            found = rules.index.slots[slot]
            if found.dtype != FLOAT32 or slot in rules.regions.fixed:
                continue
            ends = rules.fanout[slot] if found.attr == "DstT" else rules.fanin[slot]
            if ends and all(end in painting.low for end in ends):
                low[slot] = Reason("cast", "every tensor it takes or gives here is lowered")
    return Painting(low, painting.denied)


PASSES: tuple[Callable[[Rules, Painting], Painting], ...] = (
    deny_unsafe_lists,
    lower_allow_nodes,
    spread_deny_forward,
    match_lists,
    lower_between_allow,
    lower_infer_behind_lowered,
    lower_clear_beside_lowered,
    match_lists,
    match_loops,
    repaint_casts,
)


def _ways_to_variables(rules: Rules) -> set[int]:
    """Slots whose values get to a node that has resources, with no allow or deny node between.

    Nor a reduction, where updates may be low up to the last one.
    """
    nodes, slots = rules.index.nodes, rules.index.slots
    # What a loop writes is found in its body, where that is joined with its caller.
    writers = [
        node
        for node in nodes
        if (node.op not in LOOPS or node.calls_function)
        and any(slots[i].dtype == "resource" for i in node.slots)
    ]
    roots = [slot for node in writers for slot in node.slots]
    ways = set(roots)

    def leads_on(slot: int) -> bool:
        reduces = rules.updates == "reduced" and rules.index.node_of(slot).op in _REDUCTIONS
        return rules.color(slot) not in ("allow", "deny") and not reduces

    _spread(roots, (rules.fanin,), ways, leads_on)
    return ways


def _is_forced(rules: Rules, slot: int) -> bool:
    return rules.index.slots[slot].node in rules.forced


def _spread(
    roots: Iterable[int],
    neighbours: tuple[Sequence[Sequence[int]], ...],
    seen: set[int],
    enters: Callable[[int], bool],
) -> list[tuple[int, int]]:
    """Goes from slot to slot; `seen` holds where not to go and gets every slot it reaches.

    Returns:
        The slots reached, each with the one it was reached from.
    """
    reached = []
    pending = list(roots)
    while pending:
        slot = pending.pop()
        for table in neighbours:
            for other in table[slot]:
                if other not in seen and enters(other):
                    seen.add(other)
                    reached.append((other, slot))
                    pending.append(other)
    return reached
