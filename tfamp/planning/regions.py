"""Which slots of a scope must agree, and which must not change; framework-free."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from tfamp.planning.control_flow import LINK, LOOPS
from tfamp.planning.structures import (
    ARGUMENT,
    FLOAT32,
    RESULT,
    GraphIndex,
    IndexedNode,
    Reason,
    Regions,
)

# Ops that take elements out of a TensorList, and that put them in.
_READERS = frozenset(
    {
        "TensorListConcat",
        "TensorListConcatV2",
        "TensorListGather",
        "TensorListGetItem",
        "TensorListPopBack",
        "TensorListStack",
    }
)
_WRITERS = frozenset(
    {
        "TensorListFromTensor",
        "TensorListPushBack",
        "TensorListPushBackBatch",
        "TensorListScatter",
        "TensorListScatterIntoExistingList",
        "TensorListScatterV2",
        "TensorListSetItem",
        "TensorListSplit",
    }
)
# Ops that pass a TensorList on without looking at the dtype of its elements.
_CARRIERS = frozenset(
    {
        "AddN",
        "Enter",
        "Exit",
        "Identity",
        "IdentityN",
        "Merge",
        "NextIteration",
        "Snapshot",
        "StopGradient",
        "Switch",
        "ZerosLike",
    }
)
# What puts tensors into a variant and takes them out, whose dtypes no edge tells.
_OPTIONALS = frozenset({"OptionalFromValue", "OptionalGetValue"})
_VARIABLES = frozenset({"Variable", "VariableV2"})

_ARGUMENT_REASON = Reason("boundary", "an argument of the function keeps its dtype")
_RESULT_REASON = Reason("boundary", "a result of the function keeps its dtype")
_CALL_REASON = Reason("boundary", "it calls a function, whose arguments and results keep theirs")
_REFERENCE_REASON = Reason("variable", "it refers to the memory of a variable")
_RESOURCE_REASON = Reason("variable", "it uses a resource, whose values keep their dtype")
_OPTIONAL_REASON = Reason("optional", "what a branch keeps for its gradient keeps its dtype")
_SOURCE_REASON = Reason("source", "it has no inputs: its value is given")


def find_regions(
    index: GraphIndex, chosen: Mapping[int, Reason], kept: Mapping[int, Reason] | None = None
) -> Regions:
    """Finds what the structure of a scope demands of its slots.

    Args:
        index: The scope.
        chosen: Positions of nodes that must not change, with the reason, such as a fetched one.
        kept: Slots that must not change, with the reason.

    Returns:
        The regions.
    """
    fixed = {**_fixed_slots(index, chosen), **(kept or {})}
    clusters = _list_clusters(index)
    members = [_list_members(index, cluster) for cluster in clusters]
    used = [i for i, slots in enumerate(members) if slots]
    return Regions(
        fixed=fixed,
        lists=tuple(tuple(members[i]) for i in used),
        unsafe_lists=tuple(_why_unsafe(index, clusters[i], members[i], fixed) for i in used),
        implied=tuple(pair for i in used for pair in _implied_edges(index, members[i])),
        loops=_loop_edges(index),
        variable_reads=_variable_reads(index),
    )


def _fixed_slots(index: GraphIndex, chosen: Mapping[int, Reason]) -> dict[int, Reason]:
    fed = {index.slots[edge.target].node for edge in index.edges}
    fixed = {}
    for position, node in enumerate(index.nodes):
        reason = chosen.get(position) or _structural_reason(index, node, position in fed)
        if reason is not None:
            fixed.update(dict.fromkeys(node.slots, reason))
    return fixed


def _structural_reason(index: GraphIndex, node: IndexedNode, has_inputs: bool) -> Reason | None:
    if node.op == ARGUMENT:
        return _ARGUMENT_REASON
    if node.op == RESULT:
        return _RESULT_REASON
    if node.calls_function:
        return _CALL_REASON
    if node.op in LOOPS or node.op == LINK:  # Its dtypes are also those of what it runs.
        return None
    if node.op in _OPTIONALS:
        return _OPTIONAL_REASON
    if node.uses_references:
        return _REFERENCE_REASON
    if any(index.slots[slot].dtype == "resource" for slot in node.slots):
        return _RESOURCE_REASON
    return None if has_inputs else _SOURCE_REASON


# TensorLists: the handle is a variant tensor, so that no edge tells the dtype of the elements


def _list_clusters(index: GraphIndex) -> list[list[int]]:
    """Groups the variant slots that handles connect."""
    seen: set[int] = set()
    clusters = []
    for root, slot in enumerate(index.slots):
        if slot.dtype == "variant" and root not in seen:
            seen.add(root)
            clusters.append(_closure(index, [root], (index.fanin, index.fanout), seen))
    return clusters


def _closure(
    index: GraphIndex,
    roots: Iterable[int],
    neighbours: tuple[Sequence[Sequence[int]], ...],
    seen: set[int],
) -> list[int]:
    """Follows slots from roots that are in `seen` already; adds what it reaches to it."""
    pending = list(roots)
    reached = list(pending)
    while pending:
        slot = pending.pop()
        # The gradient of a loop in a loop has lists of lists: what one holds is part of it.
        within = _handles(index, slot) if "TensorList" in index.node_of(slot).op else ()
        for table in (*(table[slot] for table in neighbours), within):
            for other in table:
                if other not in seen:
                    seen.add(other)
                    reached.append(other)
                    pending.append(other)
    return sorted(reached)


def _handles(index: GraphIndex, slot: int) -> list[int]:
    """The variant slots of the node of a slot."""
    return [each for each in index.node_of(slot).slots if index.slots[each].dtype == "variant"]


def _list_members(index: GraphIndex, cluster: Sequence[int]) -> list[int]:
    slots = (_element_slot(index, index.node_of(slot)) for slot in cluster)
    return [slot for slot in slots if slot is not None]


def _element_slot(index: GraphIndex, node: IndexedNode) -> int | None:
    if "TensorList" not in node.op:
        return None
    for slot in node.slots:
        found = index.slots[slot]
        if found.attr and found.index is None and found.dtype == FLOAT32:
            return slot
    return None


def _why_unsafe(
    index: GraphIndex, cluster: Sequence[int], members: Sequence[int], fixed: Mapping[int, Reason]
) -> Reason | None:
    for slot in cluster:
        node = index.node_of(slot)
        linked = node.op in LOOPS and not node.calls_function
        if "TensorList" not in node.op and node.op not in _CARRIERS and not linked:
            return Reason("TensorList", f"its TensorList goes through {node.name} ({node.op})")
    for slot in members:
        node = index.node_of(slot)
        if slot in fixed:
            return Reason("TensorList", f"its TensorList is used by {node.name}, which is fixed")
        if not index.slots[slot].can_be_low:
            return Reason("TensorList", f"{node.name} ({node.op}) has no kernel for it")
    return None


def _implied_edges(index: GraphIndex, members: Sequence[int]) -> list[tuple[int, int]]:
    edges = []
    for reader in members:
        node = index.node_of(reader)
        if node.op not in _READERS:
            continue
        handles = _handles(index, reader)
        for slot in _closure(index, handles, (index.fanin,), set(handles)):
            writer = index.node_of(slot)
            element = _element_slot(index, writer) if writer.op in _WRITERS else None
            if element is not None:
                edges.append((element, reader))
    return edges


# Loops of TensorFlow 1


def _loop_edges(index: GraphIndex) -> tuple[tuple[int, tuple[int, ...]], ...]:
    return tuple(
        (slot, tuple(s for s in index.fanout[slot] if index.node_of(s).op == "Merge"))
        for node in index.nodes
        if node.op == "NextIteration"
        for slot in node.slots
        if index.slots[slot].dtype == FLOAT32
    )


def _variable_reads(index: GraphIndex) -> frozenset[int]:
    """Slots of nodes that pass on a variable of TensorFlow 1, through an Enter also."""

    def follows(slot: int, op: str, ops: frozenset[str]) -> bool:
        sources = (index.node_of(source) for source in index.fanin[slot])
        return index.node_of(slot).op == op and any(node.op in ops for node in sources)

    slots = range(len(index.slots))
    reads = {slot for slot in slots if follows(slot, "Identity", _VARIABLES)}
    enters = {
        slot
        for slot in slots
        if index.node_of(slot).op == "Enter" and reads.intersection(index.fanin[slot])
    }
    return frozenset(reads | enters)
