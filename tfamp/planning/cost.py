"""How long ops and Casts take in either dtype, estimated from static shapes; framework-free.

The roofline: an op takes as long as its arithmetic or as its memory traffic, whichever is longer,
and a fixed overhead. What a node takes is the sum over its type slots, so that each of them can be
decided by itself: the arithmetic is counted with the first one.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from tfamp.core.profile import MachineProfile
from tfamp.planning.flops import FLOP_RULES, FREE_OPS, MOVING_OPS, SPECIAL_OPS, Shape
from tfamp.planning.structures import ARGUMENT, FLOAT32, RESULT, GraphIndex

# Dimensions that are not known, batches mostly, count as this many. A tensor of unknown rank counts
# nothing: where it may be low the lists decide, see `planning.placement`; others, such as what
# batch normalization reserves for cuDNN, are no part of the question.
UNKNOWN_DIMENSION = 32

_BYTES = {"float64": 8, "int64": 8, "uint64": 8, "complex64": 8, "complex128": 16}
_BYTES |= {"float16": 2, "bfloat16": 2, "int16": 2, "uint16": 2, "bool": 1, "int8": 1, "uint8": 1}
_BYTES |= {"resource": 0, "variant": 0, "string": 0}
_FLOATS = ("float32", "bfloat16", "float16", "float64")

Tensor = tuple[int, int]


@dataclass(frozen=True, slots=True)
class ScopeCosts:
    """Times in a scope, in seconds.

    Attributes:
        slots: For each type slot what its node takes for it as it is, and in the low dtype.
        casts: For each float32 tensor, by its producer's position and port, the time of a Cast.
        overheads: What each node takes beside.
        known: Whether the graph tells the shapes that each node's time depends on.
        unshaped: Slots with a tensor of which the graph does not tell the rank.
    """

    slots: tuple[tuple[float, float], ...]
    casts: Mapping[Tensor, float]
    overheads: tuple[float, ...]
    known: tuple[bool, ...]
    unshaped: frozenset[int] = frozenset()

    def node(self, index: GraphIndex, position: int, low: Collection[int]) -> float:
        """Returns the seconds a node takes if the slots in `low` are lowered."""
        slots = index.nodes[position].slots
        return self.overheads[position] + sum(self.slots[slot][slot in low] for slot in slots)


def estimate(index: GraphIndex, profile: MachineProfile, dtype: str) -> ScopeCosts:
    """Estimates what everything in a scope takes.

    Args:
        index: The scope.
        profile: The machine.
        dtype: The low dtype.

    Returns:
        The times.
    """
    return _Estimate(index, profile, dtype).costs()


def with_free_casts(costs: ScopeCosts, index: GraphIndex, handles: Collection[str]) -> ScopeCosts:
    """Returns costs in which Casts of what is read from these variables take no time.

    Args:
        costs: The costs of a scope.
        index: The scope.
        handles: Names of the nodes that stand for the variables' handles.
    """
    reads = {
        index.slots[edge.target].node
        for edge in index.edges
        if index.node_of(edge.source).name in handles
        and index.node_of(edge.target).op == "ReadVariableOp"
    }
    casts = {tensor: 0.0 if tensor[0] in reads else each for tensor, each in costs.casts.items()}
    return dataclasses.replace(costs, casts=casts)


def crossing_tensors(index: GraphIndex, low: Collection[int]) -> dict[Tensor, None]:
    """Returns the tensors that need a Cast if the slots in `low` are lowered, in edge order."""
    return {
        (index.slots[edge.source].node, edge.port): None
        for edge in index.edges
        if (edge.source in low) != (edge.target in low)
    }


def scope_seconds(index: GraphIndex, costs: ScopeCosts, low: Collection[int]) -> float:
    """Returns what a scope takes, Casts included, if the slots in `low` are lowered."""
    nodes = sum(costs.node(index, position, low) for position in range(len(index.nodes)))
    return nodes + sum(costs.casts[tensor] for tensor in crossing_tensors(index, low))


class _Estimate:
    """The tensors of a scope and the times that follow from them."""

    def __init__(self, index: GraphIndex, profile: MachineProfile, dtype: str) -> None:
        self._index, self._profile, self._dtype = index, profile, dtype
        self._sizes: dict[Tensor, float] = {}
        self._inputs: list[dict[int, Tensor]] = [{} for _ in index.nodes]
        self._outputs: list[dict[int, Tensor]] = [{} for _ in index.nodes]
        # For each slot the tensors that have its dtype.
        self._read: list[list[Tensor]] = [[] for _ in index.slots]
        self._written: list[dict[Tensor, None]] = [{} for _ in index.slots]
        for edge in index.edges:
            producer, consumer = index.slots[edge.source].node, index.slots[edge.target].node
            tensor = producer, edge.port
            self._inputs[consumer][edge.input] = tensor
            self._outputs[producer][edge.port] = tensor
            self._read[edge.target].append(tensor)
            self._written[edge.source][tensor] = None

    def costs(self) -> ScopeCosts:
        index = self._index
        times: list[tuple[float, float]] = [(0.0, 0.0)] * len(index.slots)
        overheads, known = [], []
        for position, node in enumerate(index.nodes):
            runs = node.op not in (ARGUMENT, RESULT, "Cast")
            overheads.append(self._profile.op_overhead if runs else 0.0)
            known.append(self._is_known(position))
            if node.op == "Cast":
                times_of_node = self._cast_times(position)
            else:
                times_of_node = self._op_times(position)
            for slot, seconds in zip(node.slots, times_of_node, strict=True):
                times[slot] = seconds
        casts = {
            tensor: self._cast_seconds(tensor, FLOAT32, self._dtype)
            for slot, tensors in enumerate(self._written)
            if index.slots[slot].dtype == FLOAT32
            for tensor in tensors
        }
        unshaped = (
            slot
            for slot, tensors in enumerate(self._read)
            if not all(each in index.shapes for each in (*tensors, *self._written[slot]))
        )
        return ScopeCosts(tuple(times), casts, tuple(overheads), tuple(known), frozenset(unshaped))

    # Sizes

    def _shape(self, tensor: Tensor) -> Shape | None:
        shape = self._index.shapes.get(tensor)
        if shape is None:
            return None
        return tuple(UNKNOWN_DIMENSION if dim is None else dim for dim in shape)

    def _elements(self, tensor: Tensor) -> float:
        known = self._sizes.get(tensor)
        if known is None:
            shape = self._shape(tensor)
            known = float(0 if shape is None else math.prod(shape))
            self._sizes[tensor] = known
        return known

    def _is_known(self, position: int) -> bool:
        tensors = (*self._inputs[position].values(), *self._outputs[position].values())
        return self._index.nodes[position].op in FREE_OPS or all(
            tensor in self._index.shapes for tensor in tensors
        )

    # Ops

    def _op_times(self, position: int) -> list[tuple[float, float]]:
        index = self._index
        node = index.nodes[position]
        if node.op in (*FREE_OPS, ARGUMENT, RESULT) or node.calls_function:
            return [(0.0, 0.0)] * len(node.slots)
        kind, flops = self._arithmetic(position)
        floats = [slot for slot in node.slots if index.slots[slot].dtype in _FLOATS]
        times = []
        for slot in node.slots:
            own = index.slots[slot].dtype
            low = self._dtype if own == FLOAT32 else own
            work = flops if floats[:1] == [slot] else 0.0
            as_it_is, lowered = (self._seconds(slot, kind, work, dtype) for dtype in (own, low))
            times.append((as_it_is, lowered))
        return times

    def _arithmetic(self, position: int) -> tuple[str, float]:
        """The kind of an op's arithmetic and how much of it there is."""
        node = self._index.nodes[position]
        inputs, outputs = self._inputs[position], self._outputs[position]
        rule = FLOP_RULES.get(node.op)
        if rule is None:
            if node.op in MOVING_OPS:
                return "elementwise", 0.0
            sizes = [self._elements(tensor) for tensor in (*inputs.values(), *outputs.values())]
            kind = "special" if node.op in SPECIAL_OPS else "elementwise"
            return kind, max(sizes, default=0.0)
        flops = rule.flops(
            {number: self._shape(tensor) for number, tensor in inputs.items()},
            {port: self._shape((position, port)) for port in rule.outputs},
            node.equation,
        )
        return rule.kind, 0.0 if flops is None else flops

    def _seconds(self, slot: int, kind: str, work: float, dtype: str) -> float:
        node = self._index.node_of(slot)
        peaks = self._profile.peaks_of(node.op, kind)
        written = sum(self._elements(tensor) for tensor in self._written[slot])
        # What only moves values reads as much as it writes: a Gather does not read its table.
        if node.op in MOVING_OPS and written:
            read = written
        else:
            read = sum(self._elements(tensor) for tensor in self._read[slot])
        size = (read + written) * _BYTES.get(dtype, 4)
        return max(work / peaks.get(dtype, peaks[FLOAT32]), size / self._profile.bandwidth)

    # Casts

    def _cast_seconds(self, tensor: Tensor, source: str, target: str) -> float:
        if source == target:
            return 0.0
        size = self._elements(tensor) * (_BYTES.get(source, 4) + _BYTES.get(target, 4))
        return size / self._profile.cast_bandwidth + self._profile.op_overhead

    def _cast_times(self, position: int) -> list[tuple[float, float]]:
        """A Cast of the graph takes what one that is inserted takes, and nothing between equals.

        The time is counted with the end that can change. One from float32 to float32 has two
        such ends and is counted as nothing.
        """
        slots = self._index.nodes[position].slots
        dtypes = [self._index.slots[slot].dtype for slot in slots]
        tensor = next(iter(self._inputs[position].values()), (position, 0))
        times = [(0.0, 0.0)] * len(slots)
        if dtypes.count(FLOAT32) < len(slots) == 2:
            end = dtypes.index(FLOAT32) if FLOAT32 in dtypes else 0
            lowered = self._dtype if dtypes[end] == FLOAT32 else dtypes[end]
            other = dtypes[1 - end]
            times[end] = (
                self._cast_seconds(tensor, dtypes[end], other),
                self._cast_seconds(tensor, lowered, other),
            )
        return times
