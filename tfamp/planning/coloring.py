"""The passes that colour the slots of a scope, and its regions; framework-free.

The rules follow TensorFlow's own pass, `grappler/optimizers/auto_mixed_precision.cc`, with two
differences: a slot is converted only where the device has a kernel for it, and the input of a
Cast follows its producer. Each pass adds to a painting. In the chains below A, I, D and C stand
for an allow, infer, deny and clear node, lower case for one that is not converted.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Literal

from tfamp.planning.cost import FLOP_FORMULAS
from tfamp.planning.op_sets import LIST_READERS, LIST_WRITERS
from tfamp.planning.structures import (
    ARGUMENT,
    FLOAT32,
    LINK,
    LOOPS,
    RESULT,
    GraphIndex,
    IndexedNode,
    Painting,
    Reason,
    Regions,
    along,
    op_types,
    reach,
)

Updates = Literal["low", "reduced", "float32"]

# Ops that reduce larger tensors to the gradients of biases, scales and embeddings.
REDUCTIONS = frozenset({"BiasAddGrad", "Mean", "SegmentSum", "Sum", "UnsortedSegmentSum"})


class ColoredScope:
    """A scope as the passes read it, with its regions and the op lists.

    Args:
        index: The scope.
        regions: Its regions.
        colors: Colour of every op type that is on a list.
        forced: Positions of nodes to convert whatever their colour.
        updates: How far pass 5 follows values that are written to variables: "low", all the
            way, as Grappler does; "reduced", up to the last reduction; "float32", not at all.
            The update of a weight is often less than the weight's rounding error in bfloat16.
            In float16 squared gradients and unscaled gradients often underflow.

    Attributes:
        colors: Colour of each slot's node: "allow", "infer", "deny", "clear" or None.
        integers: Slots of sums of integers.
        reads: Slots that read variables of TensorFlow 1: they stay float32.
        fanin: For each slot the slots its values come from, also through TensorLists.
        fanout: For each slot the slots its values go to, also through TensorLists.
    """

    def __init__(
        self,
        index: GraphIndex,
        regions: Regions,
        colors: Mapping[str, str],
        forced: frozenset[int] = frozenset(),
        updates: Updates = "float32",
    ) -> None:
        self.index, self.regions, self.forced, self.updates = index, regions, forced, updates
        self.colors = [colors.get(op) for op in index.ops]
        # Grappler's own lists give Grappler's result.
        self.integers = [] if updates == "low" else _integer_sums(index, self.colors)
        for slot in self.integers:
            self.colors[slot] = "deny"
        self.reads = _reads_of_references(index)
        self.fanin, self.fanout = neighbours(index)

    def is_free(self, slot: int) -> bool:
        """Whether the op and the structure allow a slot to be low."""
        return self.index.slots[slot].can_be_low and slot not in self.regions.fixed

    def may_join(self, slot: int, painting: Painting, *colors: str) -> bool:
        """Whether a slot of one of these colours may follow its neighbours."""
        has_color = self.colors[slot] in colors
        return has_color and self.is_free(slot) and slot not in painting.denied

    def may_join_beside(self, slot: int, painting: Painting) -> bool:
        """Whether a clear slot may follow its neighbours in either direction."""
        return slot not in self.reads and self.may_join(slot, painting, "clear")

    def may_infer(self, slot: int, painting: Painting) -> bool:
        """Whether a slot may follow its producers, as all may be low."""
        return self.may_join(slot, painting, "infer") and painting.denied.keys().isdisjoint(
            self.fanin[slot]
        )

    def name(self, slot: int) -> str:
        """Returns the name of the node of a slot."""
        return self.index.node_of(slot).name


def paint(scope: ColoredScope) -> Painting:
    """Runs all passes; returns slots to convert and slots that need float32, with reasons."""
    painting = Painting({}, {})
    for apply_pass in PASSES:
        apply_pass(scope, painting)
    return painting


def safe_slots(scope: ColoredScope, painting: Painting) -> frozenset[int]:
    """Returns the slots that may be converted without loss of safety, Casts left out.

    Slots that the passes convert; infer and clear nodes behind them, through infer and clear
    nodes; clear nodes connected to any of these through clear nodes; TensorLists and loops as a
    whole. In A -> c -> i, the passes leave i in float32, but it is safe. Denied slots are never
    safe, nor are infer nodes without an allow node before them, or ones that the passes leave
    in float32 on the way to a variable: learning rates and moments keep their digits.
    """
    updates = _ways_to_variables(scope, reduced=False)

    def is_clear(slot: int) -> bool:
        return scope.may_join_beside(slot, painting)

    def follows(slot: int) -> bool:
        return is_clear(slot) or (slot not in updates and scope.may_infer(slot, painting))

    roots = (slot for slot in painting.low if scope.index.node_of(slot).op != "Cast")
    behind = reach(roots, along(follows, scope.fanout))
    safe = reach(behind, along(is_clear, scope.fanin, scope.fanout))
    # A TensorList or a loop is safe as a whole or not at all.
    low = dict.fromkeys(safe, Reason("safe", "it may be converted"))
    whole = Painting(low, dict(painting.denied))
    match_lists(scope, whole)
    low_slots = set(whole.low)
    for slots in scope.regions.loops:
        if len(slots) == 1 or not low_slots.issuperset(slots):
            low_slots.difference_update(slots)
    return frozenset(low_slots)


def _integer_sums(index: GraphIndex, colors: Sequence[str | None]) -> list[int]:
    """Slots of products of integers, up to where they are scaled: low precision rounds them.

    Quantized layers multiply integers, also as float32, and cast the sums back.
    """

    def is_integer(slot: int) -> bool:
        is_cast = index.node_of(slot).op == "Cast" and index.slots[slot].attr == "DstT"
        slots = index.node_of(slot).slots if is_cast else (slot,)
        return any("int" in index.slots[end].dtype for end in slots)

    def sources(slot: int) -> Iterable[int]:
        return index.fanin[slot] if colors[slot] == "clear" else ()

    def consumers(slot: int) -> Iterable[int]:
        node = index.node_of(slot)
        nearby = (*index.fanout[slot], *(node.slots if node.op == "Cast" else ()))
        return [n for n in nearby if colors[n] == "clear" or index.node_of(n).op == "Cast"]

    products: list[int] = []
    for node in index.nodes:
        if node.op in FLOP_FORMULAS:
            operands = (source for slot in node.slots for source in index.fanin[slot])
            origins = [slot for slot in reach(operands, sources) if not sources(slot)]
            if origins and all(map(is_integer, origins)):
                products += node.slots
    return [slot for slot in reach(products, consumers) if index.slots[slot].dtype == FLOAT32]


def _reads_of_references(index: GraphIndex) -> Collection[int]:
    """Slots of Identity nodes directly behind variables without resources, and of their Enters.

    Grappler leaves them, as programs fetch the Identity as the variable's value.
    """
    ops = index.ops
    reads = [
        slot
        for slot, sources in enumerate(index.fanin)
        if ops[slot] == "Identity" and any(ops[source] in _REFERENCES for source in sources)
    ]
    return reach(reads, along(lambda slot: ops[slot] == "Enter", index.fanout))


_REFERENCES = frozenset({"Variable", "VariableV2"})


def deny_by_structure(scope: ColoredScope, painting: Painting) -> None:
    """Pass 0: sums of integers, and TensorLists that leave the scope or cannot be low."""
    reason = Reason("integers", "it holds sums of products of integers, exact only in float32")
    slots = scope.index.slots
    unforced = (slot for slot in scope.integers if slots[slot].node not in scope.forced)
    painting.denied.update(dict.fromkeys(unforced, reason))
    painting.denied.update(scope.regions.unsafe)


def convert_allow_nodes(scope: ColoredScope, painting: Painting) -> None:
    """Pass 1: allow and forced nodes are converted. a -> A."""
    for slot, type_slot in enumerate(scope.index.slots):
        if not scope.is_free(slot) or slot in painting.denied:
            continue
        if type_slot.node in scope.forced:
            painting.low[slot] = Reason("force_low", "its name matches force_low")
        elif scope.colors[slot] == "allow":
            op = scope.index.nodes[type_slot.node].op
            painting.low[slot] = Reason("allow", f"{op} is on the allow list")


def spread_deny_forward(scope: ColoredScope, painting: Painting) -> None:
    """Pass 2: deny goes forward up to the next deny or infer node, through infer and clear.

    D -> I -> C -> I -> C -> A becomes D -> D -> D -> D -> C -> A: the last C has no infer or
    deny node behind it.
    """
    slots = range(len(scope.index.slots))
    ends = [slot for slot in slots if scope.colors[slot] in ("deny", "infer")]
    leads_there = reach(ends, along(lambda slot: scope.colors[slot] == "clear", scope.fanin))
    denied = set(painting.denied)
    roots = [s for s in slots if scope.colors[s] == "deny" and s not in painting.low]

    def follows(slot: int) -> bool:
        is_forced = scope.index.slots[slot].node in scope.forced
        return slot in leads_there and slot not in denied and not is_forced

    for slot, cause in reach(roots, along(follows, scope.fanout)).items():
        text = f"it is computed from {scope.name(cause)}, which needs float32"
        reason = Reason("behind deny", text)
        if slot == cause:
            reason = Reason("deny", f"{scope.index.node_of(slot).op} is on the deny list")
        painting.denied.setdefault(slot, reason)


def match_lists(scope: ColoredScope, painting: Painting) -> None:
    """Passes 3 and 7: all slots of a TensorList get one colour; one denied slot denies all."""
    low, denied = painting.low, painting.denied
    for slots in scope.regions.lists:
        if any(slot in denied for slot in slots):
            for slot in slots:
                low.pop(slot, None)
                denied.setdefault(slot, Reason("TensorList", "its TensorList stays float32"))
        elif any(slot in low for slot in slots):
            for slot in slots:
                low.setdefault(slot, Reason("TensorList", "its TensorList is converted"))


def convert_between_allow(scope: ColoredScope, painting: Painting) -> None:
    """Pass 4: infer and clear nodes on a path between allow nodes are converted.

    A -> i -> c -> A becomes A -> I -> C -> A, and A -> i -> c stays.
    """

    def joins(slot: int) -> bool:
        return scope.may_join(slot, painting, "infer", "clear")

    behind = reach(painting.low, along(joins, scope.fanout))
    for slot in reach(painting.low, along(behind.__contains__, scope.fanin)):
        painting.low.setdefault(slot, Reason("between", "it is between converted nodes"))


def convert_infer_behind_converted(scope: ColoredScope, painting: Painting) -> None:
    """Pass 5: an infer node directly behind a converted one joins it. A -> i becomes A -> I.

    In graph order, so that a chain of infer nodes is converted as a whole. Not with another
    input from a denied node, nor, unless `updates` allows it, on the way to a variable.
    """
    reduced = scope.updates == "reduced"
    updates = set() if scope.updates == "low" else _ways_to_variables(scope, reduced)
    for slot, sources in enumerate(scope.fanin):
        cause = next((source for source in sources if source in painting.low), None)
        if cause is not None and slot not in updates and scope.may_infer(slot, painting):
            text = f"it is computed from {scope.name(cause)}, which is converted"
            painting.low.setdefault(slot, Reason("behind low", text))


def convert_clear_beside_converted(scope: ColoredScope, painting: Painting) -> None:
    """Pass 6: clear nodes connected to a converted node through clear nodes are converted.

    c -> c -> A -> c becomes C -> C -> A -> C.
    """

    def is_clear(slot: int) -> bool:
        return scope.may_join_beside(slot, painting)

    near = reach(painting.low, along(is_clear, scope.fanin, scope.fanout))
    for slot, cause in near.items():
        text = f"it is next to {scope.name(cause)}, which is converted"
        painting.low.setdefault(slot, Reason("beside low", text))


def match_loops(scope: ColoredScope, painting: Painting) -> None:
    """Pass 8: a NextIteration and the Merges it feeds get one colour: no Cast fits between."""
    low = painting.low
    for following, *merges in scope.regions.loops:
        if merges and all(merge in low for merge in merges) and scope.is_free(following):
            low.setdefault(following, Reason("loop", "the loop variable is converted"))
        else:
            for slot in (following, *merges):
                low.pop(slot, None)


def repaint_casts(scope: ColoredScope, painting: Painting) -> None:
    """Pass 9: a Cast of the graph adopts the dtypes of its consumers and its producer.

    If all consumers of a Cast to float32 are converted, its result is low; if its producer is
    converted, its operand is low. So no second Cast is added before or behind it.
    """
    kept = {*scope.regions.fixed, *painting.denied}
    reason = Reason("cast", "every tensor it takes or gives here is converted")
    ends_of = {slot: ends for slot, ends in scope.index.cast_ends() if slot not in kept}
    casts = [slot for slot, ends in ends_of.items() if painting.low.keys() >= set(ends)]
    painting.low.update(dict.fromkeys(casts, reason))


PASSES: tuple[Callable[[ColoredScope, Painting], None], ...] = (
    deny_by_structure,
    convert_allow_nodes,
    spread_deny_forward,
    match_lists,
    convert_between_allow,
    convert_infer_behind_converted,
    convert_clear_beside_converted,
    match_lists,
    match_loops,
    repaint_casts,
)


def _ways_to_variables(scope: ColoredScope, reduced: bool) -> Iterable[int]:
    """Slots on paths to nodes with resources, without allow or deny nodes between.

    If updates may be low up to the last reduction (`reduced`), without reductions
    between either. A forward pass alone has the same slots, those that the gradients of a
    training step would take, so that both give the same values.
    """
    index = scope.index
    # The writes of a joined loop are in its body.
    roots = [
        slot
        for position, node in enumerate(index.nodes)
        if (node.op not in LOOPS or node.calls) and position in index.users["resource"]
        for slot in node.slots
    ]

    def leads_on(slot: int) -> bool:
        reduces = reduced and index.node_of(slot).op in REDUCTIONS
        return scope.colors[slot] not in ("allow", "deny") and not reduces

    saved = [] if scope.updates == "low" else _taken_by_gradients(scope, leads_on, reduced)
    return reach([*roots, *saved], along(leads_on, scope.fanin))


_WRITERS = ("Assign", "ResourceApply", "ResourceScatter", "ResourceSparseApply")
# Ops whose gradients take none of their operands.
_LINEAR = REDUCTIONS | op_types("""
    Add AddN AddV2 AvgPool AvgPool3D BiasAdd BiasAddV1 BroadcastTo Cast Concat ConcatV2 EnsureShape
    ExpandDims Gather GatherNd GatherV2 Identity IdentityN MirrorPad Neg Pack Pad PadV2
    PreventGradient Reshape Reverse ReverseV2 Slice Snapshot Split SplitV Squeeze StopGradient
    StridedSlice Sub Tile Transpose Unpack
""")


def _taken_by_gradients(
    scope: ColoredScope, leads_on: Callable[[int], bool], reduced: bool
) -> list[int]:
    """Slots of a graph without gradients that those of its variables would take.

    The gradient of a variable takes the operands of each op that is not linear, from the variable
    on, up to the next product. Here those of normalizations count, whose sums go on from layer to
    layer: for their gains and the biases before them. All gradients of variables are reduced to
    their shapes, but those of gathered rows.
    """
    index = scope.index
    using = index.users["resource"]
    if any(index.nodes[position].op.startswith(_WRITERS) for position in using):
        return []
    fixed = scope.regions.fixed.items()
    normalized = {slot for slot, reason in fixed if reason.rule == "statistics"}
    if not normalized:
        return []
    reads = [slot for position in using for slot in index.nodes[position].slots]
    if reduced:
        gathers = (s for read in reads for s in (read, *scope.fanout[read]))
        reads = [slot for slot in gathers if "Gather" in index.ops[slot]]

    def goes_on(slot: int) -> Iterator[int]:
        shape = _shape_of(index, slot)
        for target in filter(leads_on, scope.fanout[slot]):
            # The gradient of what is broadcast is reduced.
            is_broadcast = index.ops[target] in _LINEAR and _shape_of(index, target) != shape
            if not (reduced and is_broadcast):
                yield target

    behind = reach(reads, goes_on)
    return [
        source
        for slot in behind
        if slot in normalized and index.ops[slot] not in _LINEAR
        for source in scope.fanin[slot]
        if source in behind and leads_on(source)
    ]


def _shape_of(index: GraphIndex, slot: int) -> tuple[int | None, ...] | None:
    return index.shapes.get((index.slots[slot].node, 0))


# ---- Regions ---------------------------------------------------------------------------

# Ops that pass a TensorList on, whatever the dtype of its elements.
_CARRIERS = op_types("""
    AddN Enter Exit Identity IdentityN Merge NextIteration Snapshot StopGradient
    Switch ZerosLike
""")

_FIXED_OPS = {
    ARGUMENT: Reason("boundary", "an argument of the function keeps its dtype"),
    RESULT: Reason("boundary", "a result of the function keeps its dtype"),
    **dict.fromkeys(
        # They store tensors in a variant: no edge has these tensors' dtypes.
        ("OptionalFromValue", "OptionalGetValue"),
        Reason("optional", "values that a branch stores for its gradient keep their dtype"),
    ),
}


def find_regions(
    index: GraphIndex, chosen: Mapping[int, Reason], kept: Mapping[int, Reason] | None = None
) -> Regions:
    """Finds the regions of a scope.

    Args:
        index: The scope.
        chosen: Positions of nodes that must not change, with the reason, such as a fetched one.
        kept: Slots that must not change, with the reason.

    Returns:
        The regions.
    """
    fixed = dict(kept or {})
    for position, node in enumerate(index.nodes):
        reason = chosen.get(position) or _structural_reason(index, position)
        if reason is not None:
            fixed.update(dict.fromkeys(node.slots, reason))
    lists: list[tuple[int, ...]] = []
    unsafe: dict[int, Reason] = {}
    for handles, elements in _lists(index):
        lists.append(elements)
        reason = _why_unsafe(index, handles, elements, fixed)
        if reason is not None:
            unsafe.update(dict.fromkeys(elements, reason))
    # In loops of TensorFlow 1.
    loops = tuple(
        (slot, *(s for s in index.fanout[slot] if index.node_of(s).op == "Merge"))
        for node in index.nodes
        if node.op == "NextIteration"
        for slot in node.slots
        if index.slots[slot].dtype == FLOAT32
    )
    return Regions(fixed, tuple(lists), unsafe, loops)


def _structural_reason(index: GraphIndex, position: int) -> Reason | None:
    node = index.nodes[position]
    if node.op in _FIXED_OPS:
        return _FIXED_OPS[node.op]
    if node.calls:
        return Reason("boundary", "it calls a function, which keeps the dtypes of its boundary")
    if node.op in LOOPS or node.op == LINK:  # It shares its dtypes with the functions.
        return None
    if node.uses_references:
        return Reason("variable", "it refers to the memory of a variable")
    if position in index.users["resource"]:
        return Reason("variable", "it uses a resource, whose values keep their dtype")
    has_inputs = any(index.fanin[slot] for slot in node.slots)
    return None if has_inputs else Reason("source", "it has no inputs: its value is given")


# TensorLists: the handle is a variant tensor, so that no edge has the dtype of the elements.


def _lists(index: GraphIndex) -> Iterator[tuple[list[int], tuple[int, ...]]]:
    """Yields connected variant slots of handles, with the slots of the elements."""
    seen: set[int] = set()
    for root, slot in enumerate(index.slots):
        if slot.dtype == "variant" and root not in seen:
            handles = sorted(reach([root], _linked_handles(index, index.fanin, index.fanout)))
            seen.update(handles)
            nodes = map(index.node_of, handles)
            slots_or_none = [_element_slot(index, node) for node in nodes]
            elements = tuple(slot for slot in slots_or_none if slot is not None)
            if elements:
                yield handles, elements


def _linked_handles(
    index: GraphIndex, *tables: Sequence[Iterable[int]]
) -> Callable[[int], Iterable[int]]:
    def neighbours(slot: int) -> Iterable[int]:
        # The gradient of nested loops has lists of lists: inner lists are part of
        # the outer one.
        within = _handles(index, slot) if "TensorList" in index.node_of(slot).op else ()
        return itertools.chain(*(table[slot] for table in tables), within)

    return neighbours


def _handles(index: GraphIndex, slot: int) -> list[int]:
    """The variant slots of the node of a slot."""
    return [s for s in index.node_of(slot).slots if index.slots[s].dtype == "variant"]


def _element_slot(index: GraphIndex, node: IndexedNode) -> int | None:
    for slot in node.slots if "TensorList" in node.op else ():
        type_slot = index.slots[slot]
        if type_slot.attr and type_slot.entry is None and type_slot.dtype == FLOAT32:
            return slot
    return None


def _why_unsafe(
    index: GraphIndex,
    handles: Sequence[int],
    elements: Iterable[int],
    fixed: Mapping[int, Reason],
) -> Reason | None:
    for node in map(index.node_of, handles):
        linked = node.op in LOOPS and not node.calls
        if "TensorList" not in node.op and node.op not in _CARRIERS and not linked:
            return Reason("TensorList", f"its TensorList goes through {node.name} ({node.op})")
    # What reads a list that leaves the graph expects float32 elements.
    for slot in (*handles, *elements):
        node = index.node_of(slot)
        if slot in fixed:
            text = f"its TensorList is used by {node.name}, which is fixed"
            return Reason("TensorList", text)
        if index.slots[slot].dtype == FLOAT32 and not index.slots[slot].can_be_low:
            return Reason("TensorList", f"{node.name} ({node.op}) has no kernel for it")
    return None


def neighbours(index: GraphIndex) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """Returns the fan-in and fan-out of a scope's slots, also through TensorLists.

    Values flow from every slot that writes an element of a list to every slot that reads one.

    Args:
        index: The scope.
    """
    fanin, fanout = list(index.fanin), list(index.fanout)
    for reader, op in enumerate(index.ops):
        if op not in LIST_READERS or _element_slot(index, index.node_of(reader)) != reader:
            continue
        handles = _handles(index, reader)
        for handle in sorted(reach(handles, _linked_handles(index, index.fanin))):
            writer = index.node_of(handle)
            element = _element_slot(index, writer) if writer.op in LIST_WRITERS else None
            if element is not None:
                fanin[reader] = (*fanin[reader], element)
                fanout[element] = (*fanout[element], reader)
    return fanin, fanout
