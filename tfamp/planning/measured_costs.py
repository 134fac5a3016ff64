"""Times that were measured, in the place of a roofline's; framework-free.

What was not measured keeps its estimate, scaled by what was learnt from its kind: the mean of
measured over estimated times of the same op type, else of the same kind of op.
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import TypeAlias

from tfamp.planning.choices import Place
from tfamp.planning.cost import (
    FLOP_RULES,
    FREE_OPS,
    MOVING_OPS,
    SPECIAL_OPS,
    ScopeCosts,
    counted_shape,
    scope_seconds,
)
from tfamp.planning.placement import place
from tfamp.planning.structures import GraphIndex, Painting, Regions, Tensor

# In float32 and in the low dtype.
Times: TypeAlias = tuple[float, float]

# A measured time may be off by this part of it, and in a step this part of the whole is nothing.
# Where the two times of a node differ by less, estimates decide: they do the same each time.
NOISE = 0.3
NOTHING = 5e-4
# Two placements cannot be told apart if their times differ by less than this part.
LEAST_GAIN = 0.01
# What a node takes that is part of another one: next to nothing, in the dtype it has otherwise.
PART = 1e-9


@dataclass(frozen=True, slots=True)
class MeasuredTimes:
    """What was measured of a graph and its functions, in seconds.

    Attributes:
        nodes: For each node, by the positions of its scope and of itself, its times; both are
            float32's for one that cannot be low.
        casts: For each number of elements a Cast's, to the low dtype and back on average.
        fused: Nodes that TensorFlow makes part of the product before them.
    """

    nodes: Mapping[Place, Times] = field(default_factory=dict)
    casts: Mapping[int, float] = field(default_factory=dict)
    fused: Set[Place] = frozenset()

    def costs(
        self, indexes: Sequence[GraphIndex], estimates: Sequence[ScopeCosts]
    ) -> tuple[ScopeCosts, ...]:
        """Returns what a graph and its functions take, by these times and by estimates."""
        learnt = _Learnt(indexes, estimates, self)
        return tuple(
            _scope_costs(number, index, costs, self, learnt)
            for number, (index, costs) in enumerate(zip(indexes, estimates, strict=True))
        )

    def place(
        self,
        index: GraphIndex,
        regions: Regions,
        lists: Painting,
        safe: frozenset[int],
        estimated: ScopeCosts,
        measured: ScopeCosts,
    ) -> Painting:
        """Lowers what is worth it by measured times, as far as that is not noise.

        Args:
            index: The scope.
            regions: What its structure demands.
            lists: What the lists decide.
            safe: Slots that may be low, Casts left out.
            estimated: What everything takes by estimate.
            measured: What it takes by what was measured.

        Returns:
            What the cut by estimates decides, with the changes that are clear gains; or what the
            lists do, if nothing is gained over them.
        """
        usual = place(index, regions, lists, safe, estimated)
        leaning, least_gain = self.told_apart(index, measured, usual.low)
        found = place(index, regions, usual, safe, leaning, least_gain)
        by_lists, by_times = (scope_seconds(index, measured, p.low) for p in (lists, found))
        return lists if by_lists - by_times < least_gain else found

    def told_apart(
        self, index: GraphIndex, costs: ScopeCosts, low: Collection[int]
    ) -> tuple[ScopeCosts, float]:
        """Returns costs by which a cut does the usual where its gain may be noise.

        Args:
            index: A scope, of which the times are.
            costs: What it takes.
            low: The slots that are low otherwise.

        Returns:
            Costs with less of what a slot gains by not being the usual, and what all slots
            together must save.
        """
        whole = scope_seconds(index, costs, low)

        def leaning(slot: int, times: Times) -> Times:
            margin = (NOISE * max(times) + NOTHING * whole) * any(times)
            return (times[0] + margin, times[1]) if slot in low else (times[0], times[1] + margin)

        slots = [leaning(slot, times) for slot, times in enumerate(costs.slots)]
        return dataclasses.replace(costs, slots=slots), LEAST_GAIN * whole


def _scope_costs(
    number: int, index: GraphIndex, costs: ScopeCosts, times: MeasuredTimes, learnt: _Learnt
) -> ScopeCosts:
    slots, overheads = list(costs.slots), list(costs.overheads)
    measured = set()
    for position, node in enumerate(index.nodes):
        found = times.nodes.get((number, position))
        if (number, position) in times.fused:
            found = PART, PART
        elif found is not None:
            measured.add(position)
        if found is not None:
            overheads[position] = 0.0
            slots_of_it = dict.fromkeys(node.slots, (0.0, 0.0))
            slots_of_it[deciding_slot(index, position)] = found
        else:
            slots_of_it = {
                slot: _product(costs.slots[slot], learnt.factors(index, position))
                for slot in node.slots
            }
        for slot, seconds in slots_of_it.items():
            slots[slot] = seconds
    casts = {
        tensor: learnt.cast_seconds(index, tensor, seconds, times)
        for tensor, seconds in costs.casts.items()
    }
    return dataclasses.replace(
        costs, slots=slots, casts=casts, overheads=overheads, measured=frozenset(measured)
    )


def deciding_slot(index: GraphIndex, position: int) -> int:
    """Returns the slot that a node's time is counted with: the one that can be low, or the first.

    A node with several of them is not measured.
    """
    slots = index.nodes[position].slots
    return next((slot for slot in slots if index.slots[slot].can_be_low), slots[0])


def _product(one: Times, other: Times) -> Times:
    return one[0] * other[0], one[1] * other[1]


class _Learnt:
    """How far estimates are off, by op type and by kind of op."""

    def __init__(
        self, indexes: Sequence[GraphIndex], estimates: Sequence[ScopeCosts], times: MeasuredTimes
    ) -> None:
        ratios: dict[str, list[Times]] = defaultdict(list)
        for (number, position), found in times.nodes.items():
            index, costs = indexes[number], estimates[number]
            slots = index.nodes[position].slots
            overhead = costs.overheads[position]
            estimated = [overhead + sum(costs.slots[slot][low] for slot in slots) for low in (0, 1)]
            if all(estimated) and all(found):
                ratio = found[0] / estimated[0], found[1] / estimated[1]
                op = index.nodes[position].op
                ratios[op].append(ratio)
                ratios[_kind(op)].append(ratio)
        self._factors = {name: _mean(each) for name, each in ratios.items()}
        casts = list(_cast_ratios(indexes, estimates, times))
        self._casts = _mean(casts)[0] if casts else 1.0

    def factors(self, index: GraphIndex, position: int) -> Times:
        """What to multiply the estimates of a node by that was not measured."""
        op = index.nodes[position].op
        if op == "Cast":
            return self._casts, self._casts
        return self._factors.get(op) or self._factors.get(_kind(op), (1.0, 1.0))

    def cast_seconds(
        self, index: GraphIndex, tensor: Tensor, estimated: float, times: MeasuredTimes
    ) -> float:
        """What a Cast takes; one that was estimated to take no time does take none."""
        if not estimated:
            return 0.0
        return times.casts.get(elements_of(index, tensor), estimated * self._casts)


def _cast_ratios(
    indexes: Sequence[GraphIndex], estimates: Sequence[ScopeCosts], times: MeasuredTimes
) -> Iterator[Times]:
    for index, costs in zip(indexes, estimates, strict=True):
        for tensor, estimated in costs.casts.items():
            found = times.casts.get(elements_of(index, tensor))
            if estimated and found:
                yield found / estimated, 1.0


def elements_of(index: GraphIndex, tensor: Tensor) -> int:
    """Returns how many elements a tensor counts as having; 0 if its rank is not known."""
    shape = index.shapes.get(tensor)
    return 0 if shape is None else math.prod(counted_shape(shape))


def _kind(op: str) -> str:
    """A name for ops that are limited by the same thing; that of no op type."""
    if op in FLOP_RULES:
        return f"<{FLOP_RULES[op].kind}>"
    if op in FREE_OPS:
        return "<free>"
    if op in MOVING_OPS:
        return "<moving>"
    return "<special>" if op in SPECIAL_OPS else "<elementwise>"


def _mean(ratios: Iterable[Times]) -> Times:
    """Geometric means."""
    logs = [(math.log(one), math.log(other)) for one, other in ratios]
    one, other = (math.exp(math.fsum(column) / len(logs)) for column in zip(*logs, strict=True))
    return one, other
