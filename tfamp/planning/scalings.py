"""Finds scales, quotients and shifts that compilers would join; framework-free.

A plan decides dtypes; Grappler and XLA then reassociate what runs. `h / 3000 / 3000` becomes a
product with 1 / 9e6, `h * 300 * 300` one with 9e4, and XLA computes `x / n / m` as `x / (n * m)`.
In float32 that is what was meant. In float16 the joined constant or divisor overflows or loses
its digits, though every value of the program is in range. bfloat16 has float32's range, and a
joined constant is rounded once, as each of the two would be.

So the ops that would be joined compute in float32: in a rewrite all of them, with what lies
between; under autocast and policies the last one, and compilers do not join across its Casts.

Evidence: 130 expressions with TensorFlow 2.21 on a CPU, optimized by Grappler (`ConstantPushDown`
and `MulConvPushDown` of its constant folding) and compiled by XLA, against the same ops one by
one. `tests/integration/test_compilers.py` has those that differ. A Relu, a Maximum, a Sqrt or a
product between keeps compilers from joining.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from tfamp.planning.structures import FLOAT32, GraphIndex, Reason, op_types, reach

K = TypeVar("K", bound=Hashable)

RULE = "compilers"
_TEXT = "compilers would join its constants or divisors with those of {}, in float16's range"

QUOTIENTS = op_types("Div DivNoNan RealDiv")
_SCALES = QUOTIENTS | op_types("Mul MulNoNan")
_SHIFTS = op_types("Add AddV2 BiasAdd BiasAddV1 Sub")
_CONVOLUTIONS = op_types("Conv2D Conv3D")
JOINED_OPS = _SCALES | _SHIFTS | _CONVOLUTIONS
# Compilers look through these, as they move values or change signs only.
_PASSING_ON = op_types("""
    BroadcastTo ConcatV2 EnsureShape ExpandDims Identity Neg Pack PreventGradient Reshape Reverse
    ReverseV2 Snapshot Squeeze StopGradient Tile Transpose Unpack
""")
# Ops of one tensor that may bring a value beyond float16 back into its range.
_BEHIND = op_types("Abs Inv Log Neg Reciprocal Rsqrt Sqrt") | _PASSING_ON
KNOWN = op_types("Const Shape Size")
# Compilers fold these where all inputs are constants.
FOLDED = _SCALES | _SHIFTS | _BEHIND
FOLDED |= op_types("Cast Fill Pow Prod Range Square StridedSlice Sum")
# A single number from 1 / 16 to 16 takes four bits of float16's range at most, where it is moved
# to another operand: those of GELU, dropout and hard swish, whose ops stay low.
_MILD = 16.0


@dataclass(frozen=True, slots=True)
class Dataflow(Generic[K]):
    """A dataflow as the rules read it: of an index, or of a graph that is being traced.

    Attributes:
        op: The op type of a node.
        inputs: Its producers, in the order of its inputs.
        is_known: Whether a node is computed from constants only.
        is_mild: Whether a node is a constant of a single number from 1 / 16 to 16.
    """

    op: Callable[[K], str]
    inputs: Callable[[K], Sequence[K]]
    is_known: Callable[[K], bool]
    is_mild: Callable[[K], bool]

    def constants(self, nodes: Iterable[K]) -> list[K]:
        """Those of some nodes that are computed from constants only."""
        return [node for node in nodes if self.is_known(node)]


def joined_before(flow: Dataflow[K], op: str, inputs: Sequence[K]) -> Iterator[Sequence[K]]:
    """Finds the earlier ops with which compilers would join an op.

    Args:
        flow: The dataflow.
        op: The op type.
        inputs: The nodes that it takes.

    Yields:
        The way from each: the earlier op first, then what only moves values.
    """
    if op in _CONVOLUTIONS:
        # A scale of what it takes is moved to its filter, if that is a constant.
        if flow.is_known(inputs[1]):
            for way in _ways(flow, inputs[0], _SCALES):
                factors = flow.constants(flow.inputs(way[0]))
                if factors and not all(map(flow.is_mild, factors)):
                    yield way
    elif op in _SCALES:
        yield from _scales_before(flow, op, inputs)
    elif op in _SHIFTS and flow.constants(inputs):
        for node in _not_known(flow, inputs):
            for way in _ways(flow, node, _SHIFTS):
                if flow.constants(flow.inputs(way[0])):
                    yield way


def _scales_before(flow: Dataflow[K], op: str, inputs: Sequence[K]) -> Iterator[Sequence[K]]:
    factors = flow.constants(inputs)
    is_mild = all(map(flow.is_mild, factors))
    operands = _not_known(flow, inputs)
    ways = [[*_ways(flow, node, _SCALES)] for node in operands]
    scaled = [any(flow.constants(flow.inputs(way[0])) for way in to_one) for to_one in ways]
    for to_one, is_scaled in zip(ways, scaled, strict=True):
        for way in to_one:
            earlier = way[0]
            # a / n / m is a / (n * m), and n / (a / m) is n * m / a.
            joins = op in QUOTIENTS and flow.op(earlier) in QUOTIENTS
            if factors:  # c * (d * a) is (c * d) * a, and c * (a * b) may become (c * a) * b.
                joins |= not is_mild or bool(flow.constants(flow.inputs(earlier)))
            elif is_scaled:  # (c * a) * (d * b) becomes (c * d) * (a * b); a square stays one.
                joins |= len(scaled) > 1 and all(scaled)
            if joins:
                yield way
    if factors and not is_mild:  # A scale of what a convolution gives is moved to its filter.
        for node in operands:
            for way in _ways(flow, node, _CONVOLUTIONS):
                if flow.is_known(flow.inputs(way[0])[1]):
                    yield way


def _not_known(flow: Dataflow[K], inputs: Iterable[K]) -> list[K]:
    return [node for node in dict.fromkeys(inputs) if not flow.is_known(node)]


def _ways(flow: Dataflow[K], node: K, ops: frozenset[str]) -> Iterator[list[K]]:
    """The ways from nodes of some ops to a node, with nothing but moves of values between.

    A bias of zero behind a convolution is one, too: Grappler removes it.
    """
    shifts = _SHIFTS if ops is _CONVOLUTIONS else frozenset[str]()

    def moved(near: K) -> Iterable[K]:
        inputs = flow.inputs(near)
        moves = flow.op(near) in _PASSING_ON
        return inputs if moves or (flow.op(near) in shifts and flow.constants(inputs)) else ()

    behind = reach([node], moved)
    for near in behind:
        if flow.op(near) in ops and not flow.is_known(near):
            way = [near]
            while way[-1] != node:
                way.append(behind[way[-1]])
            yield way


# ---- Of a scope ------------------------------------------------------------------------


def joined_nodes(index: GraphIndex, dtype: str) -> dict[int, Reason]:
    """Finds the nodes of a scope that compilers would join, in float16.

    Args:
        index: The scope.
        dtype: The low dtype.

    Returns:
        Positions of nodes with the reason: of all that are joined, of what lies between, and of
        what follows, as a root, that may bring the result back into float16's range.
    """
    if dtype != "float16":
        return {}
    flow, reasons = _flow_of(index), dict[int, Reason]()
    consumers: list[list[int]] = [[] for _ in index.nodes]
    for edge in index.edges:
        if index.slots[edge.source].dtype == FLOAT32:
            consumers[index.slots[edge.source].node].append(index.slots[edge.target].node)

    def behind(node: int) -> Iterator[int]:
        return (user for user in consumers[node] if index.nodes[user].op in _BEHIND)

    for position in sorted(index.users[FLOAT32]):
        node = index.nodes[position]
        if node.op not in JOINED_OPS or flow.is_known(position):
            continue
        for way in joined_before(flow, node.op, flow.inputs(position)):
            reason = Reason(RULE, _TEXT.format(index.nodes[way[0]].name))
            parts = [position, *way[1:], *reach([position], behind)]
            if node.op in _CONVOLUTIONS:  # The scale alone, and no product.
                parts = list(way)
            elif index.nodes[way[0]].op not in _CONVOLUTIONS:
                parts.append(way[0])
            reasons.update(dict.fromkeys(parts, reason))
    return reasons


def _flow_of(index: GraphIndex) -> Dataflow[int]:
    inputs = [[index.slots[edge.source].node for edge in edges] for edges in index.inputs]
    ops = [node.op for node in index.nodes]
    known: set[int] = set()
    for position in index.producers_first:
        is_folded = ops[position] in FOLDED and known.issuperset(inputs[position])
        if ops[position] in KNOWN or (is_folded and inputs[position]):
            known.add(position)

    def is_mild(position: int) -> bool:
        is_number = index.size((position, 0)) == 1
        return is_number and is_mild_number(index.largest.get(position, 0.0))

    return Dataflow(ops.__getitem__, inputs.__getitem__, known.__contains__, is_mild)


def is_mild_number(value: float) -> bool:
    """Whether a number is from 1 / 16 to 16."""
    return 1 / _MILD <= abs(value) <= _MILD
