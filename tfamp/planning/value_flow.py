"""The flow of float32 values between the slots of a graph; framework-free.

The rules of `exact_values` and `value_kinds` read it. It only answers questions: no rule changes
it, and none depends on what another one asked before.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tfamp.planning.coloring import REDUCTIONS, neighbours
from tfamp.planning.op_sets import CHOICES
from tfamp.planning.structures import FLOAT32, LOOPS, GraphIndex, op_types, reach

# Nodes of TensorFlow 1's loops, which change as a whole or not at all.
FRAMES = op_types("Enter Exit Merge NextIteration Switch")


@dataclass(frozen=True, slots=True, eq=False)
class ValueFlow:
    """The float32 slots of a graph, with their producers and consumers.

    Attributes:
        index: The graph, joined with its loops.
        across: For slots at the boundaries of calls where their values come from, on the other
            side of the call.
        ops: The op of each slot.
        colors: The color of this op; None for one that is on no list.
        sources: For each slot the float32 slots it takes values from, also through TensorLists.
        targets: For each slot the float32 slots that take its values.
        multiplies: Whether a slot is of a product, or of a call, whose products are not known.
        order: The float32 slots, producers first.
        has_loops: Whether values may come back to where they came from.
    """

    index: GraphIndex
    across: Mapping[int, Sequence[int]]
    ops: Sequence[str]
    colors: Sequence[str | None]
    sources: Sequence[Sequence[int]]
    targets: Sequence[Sequence[int]]
    multiplies: Sequence[bool]
    order: Sequence[int]
    has_loops: bool

    # ---- A slot --------------------------------------------------------------------------

    def is_float(self, slot: int) -> bool:
        """Whether a slot holds float32 values."""
        return self.index.slots[slot].dtype == FLOAT32

    def is_loop(self, slot: int) -> bool:
        """Whether a slot is of a loop, and not of a node inside."""
        return self.ops[slot] in LOOPS

    def is_product(self, slot: int) -> bool:
        """Whether a slot is of an op of the allow list; calls multiply as well."""
        return self.colors[slot] == "allow"

    def holds(self, slot: int) -> bool:
        """Whether a slot holds values of others, as elements of a list or states of a loop."""
        return "TensorList" in self.ops[slot] or self.is_loop(slot)

    def moves(self, slot: int) -> bool:
        """Whether a slot passes on values as they are."""
        return self.colors[slot] == "clear" and self.ops[slot] not in CHOICES

    def may_stay(self, slot: int) -> bool:
        """Whether a slot could be low, does not multiply, and can change alone."""
        listed = self.colors[slot] in ("infer", "clear") and self.index.slots[slot].can_be_low
        return listed and not self.multiplies[slot] and self.ops[slot] not in FRAMES

    # ---- Its producers -------------------------------------------------------------------

    def operands(self, slot: int) -> Sequence[int]:
        """The sources of a slot; none of a product, so that walks back end there."""
        return () if self.multiplies[slot] else self.sources[slot]

    def operands_across(self, slot: int) -> Iterable[int]:
        """The same, also on the other side of a call."""
        if slot in self.across:
            return filter(self.is_float, self.across[slot])
        return self.operands(slot)

    def last_parts(self, roots: Iterable[int]) -> Collection[int]:
        """Slots that lead to some slots without a product or a reduction between."""

        def parts(slot: int) -> Iterable[int]:
            return () if self.ops[slot] in REDUCTIONS else self.operands(slot)

        return reach(roots, parts)

    # ---- Walks ---------------------------------------------------------------------------

    def walks(self, *grown: Collection[int]) -> Iterator[None]:
        """Repeats a walk over the slots while it adds to sets; without loops one is enough."""
        before = -1
        while before != (size := sum(map(len, grown))) and (before < 0 or self.has_loops):
            before = size
            yield

    def ways(self, ends: Iterable[int], without: Collection[int], crosses: Sequence[bool]) -> Ways:
        """The ends that each slot leads to.

        Args:
            ends: The ends.
            without: Slots that no way goes through.
            crosses: For each slot whether it counts as a product.
        """
        end_bits = {slot: 1 << number for number, slot in enumerate(dict.fromkeys(ends))}
        leads, across = [0] * len(self.ops), [0] * len(self.ops)
        changed = True
        while changed:
            changed = False
            for slot in reversed(self.order):
                if slot in without:
                    continue
                slot_leads, slot_across = end_bits.get(slot, 0), 0
                for target in self.targets[slot]:
                    slot_leads |= leads[target]
                    # Whatever a product leads to is across it for its operands.
                    slot_across |= leads[target] if crosses[target] else across[target]
                changed |= (slot_leads, slot_across) != (leads[slot], across[slot])
                leads[slot], across[slot] = slot_leads, slot_across
            changed &= self.has_loops  # Without them one walk back is enough.
        last = [on_any & ~on_some for on_any, on_some in zip(leads, across, strict=True)]
        return Ways(leads, across, last)


class Ways(NamedTuple):
    """Which ends the slots lead to: for each slot a mask, whose bit n stands for the n-th end.

    Attributes:
        leads: The ends that a slot leads to, on any way.
        across: Those of them that it leads to across a product, on some way.
        last: Those that it leads to without a product on any way: it is behind the last one.
    """

    leads: Sequence[int]
    across: Sequence[int]
    last: Sequence[int]


def value_flow(
    index: GraphIndex, colors: Mapping[str, str], across: Mapping[int, Sequence[int]]
) -> ValueFlow:
    """Returns the flow of float32 values between the slots of a graph.

    Args:
        index: The graph, joined with its loops.
        colors: Color of every op type that is on a list.
        across: `Ends.across` of the graph.
    """
    slots = index.slots
    floats = [slot.dtype == FLOAT32 for slot in slots]
    sources, targets = (
        [[slot for slot in near if floats[slot]] for near in table] for table in neighbours(index)
    )
    calls = (bool(index.nodes[slot.node].calls) for slot in slots)
    allowed = (colors.get(op) == "allow" for op in index.ops)
    nodes = (index.nodes[position] for position in index.producers_first)
    return ValueFlow(
        index=index,
        across=across,
        ops=index.ops,
        colors=[colors.get(op) for op in index.ops],
        sources=sources,
        targets=targets,
        multiplies=list(map(operator.or_, allowed, calls)),
        order=[slot for node in nodes for slot in node.slots if floats[slot]],
        has_loops=not (LOOPS | FRAMES).isdisjoint(index.ops),
    )
