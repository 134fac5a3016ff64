"""Which nodes normalize data by statistics of the data; framework-free.

A normalization is known by what it computes, whatever its nodes are called: a mean, or a sum, of
squares of some data, a root of that, and the same data multiplied or divided by the root. So are
LayerNormalization, GroupNormalization, RMSNormalization, the unit norm, and the same by hand. A
mean that is subtracted before is part of it. A mean by itself is not, nor is a distance, nor the
root of one.

Low precision would round the mean before it is subtracted and the root before all values are
multiplied by it. Such an error is the same in all values, where those of the values themselves
cancel in the sums that follow.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

from tfamp.planning.structures import FLOAT32, GraphIndex, Reason, op_types, reach

RULE = "statistics"
ROOTS = op_types("Pow Rsqrt Sqrt")

_REDUCTIONS = op_types("Mean Sum")
_SQUARES = op_types("Pow Square SquaredDifference")
_SCALING = op_types("Div DivNoNan Mul MulNoNan RealDiv Xdivy")
_SHIFTING = op_types("Add AddV2 BiasAdd Sub")
_PASSING_ON = op_types("""
    BroadcastTo EnsureShape ExpandDims Identity PreventGradient Reshape Snapshot Squeeze
    StopGradient StridedSlice Tile Transpose
""")
# What makes other numbers of data and statistics, each by itself.
_ELEMENTWISE = op_types("""
    Abs ClipByValue Inv Maximum Minimum Neg Reciprocal Relu Select SelectV2
""")
_ARITHMETIC = _ELEMENTWISE | _SCALING | _SHIFTING | _PASSING_ON | _SQUARES | _REDUCTIONS | ROOTS
# What gradients of these are made of.
_GRADIENTS = _ARITHMETIC | op_types(
    "AddN InvGrad ReciprocalGrad RsqrtGrad SqrtGrad StridedSliceGrad"
)
# Weights, and what they are multiplied by.
_STORED = op_types("Const HostConst ReadVariableOp Variable VariableV2")


def statistics(index: GraphIndex) -> dict[int, Reason]:
    """Finds the nodes of a scope that make normalized values out of data.

    Args:
        index: The scope.

    Returns:
        Positions of nodes with the reason: from the first ones that take the data to the one that
        gives the normalized values, with a gain and a bias where these come next; and those of
        their gradients.
    """
    finder = _Finder(index)
    squared = dict.fromkeys(finder.squared_data())
    lasts: dict[int, int] = {}
    for data in squared:
        lasts = finder.normalization_of(data) | lasts
    if not lasts:
        return {}
    gradient = Reason(RULE, "it is part of the gradient of a normalization")
    found = dict.fromkeys(finder.gradients_of(squared, lasts), gradient)
    for position, last in lasts.items():
        text = f"it is part of the normalization that gives {index.nodes[last].name}"
        found[position] = Reason(RULE, text)
    return found


@dataclass(frozen=True, slots=True)
class _Part:
    """What a node gives that is computed from some data, and from nothing else but weights.

    Attributes:
        is_statistic: Whether all of it went through a reduction.
        is_squared: Whether it is made of a sum of squares.
        is_scale: Whether it is made of a root of such a statistic.
        is_normalized: Whether it is the data, scaled by that.
    """

    is_statistic: bool = False
    is_squared: bool = False
    is_scale: bool = False
    is_normalized: bool = False


_DATA = _Part()


class _Finder:
    """The float32 tensors of a scope: for each node its op, where they come from and go to."""

    def __init__(self, index: GraphIndex) -> None:
        self._ops = [node.op for node in index.nodes]
        self._inputs: list[list[int]] = [[] for _ in index.nodes]
        self._consumers: list[list[int]] = [[] for _ in index.nodes]
        for edge in index.edges:
            if index.slots[edge.source].dtype == FLOAT32:
                source, target = index.slots[edge.source].node, index.slots[edge.target].node
                self._inputs[target].append(source)
                self._consumers[source].append(target)
        self._numbers = {
            position
            for position, node in enumerate(index.nodes)
            if node.op in _STORED and index.shapes.get((position, 0)) == ()
        }
        self._order = index.producers_first()
        self._stored: set[int] = set()
        for position in self._order:
            if self._is_stored(position):
                self._stored.add(position)

    def _is_stored(self, node: int) -> bool:
        """Whether a node gives weights or constants, or is computed from nothing else."""
        given = self._inputs[node]
        if not given:
            # A Cast without a float input counts elements.
            return self._ops[node] in _STORED or self._ops[node] == "Cast"
        elementwise = self._ops[node] in _ARITHMETIC - _REDUCTIONS
        return elementwise and self._stored.issuperset(given)

    def squared_data(self) -> Iterator[int]:
        """What squares are added up of, less a statistic of its own that is subtracted before."""
        for position, op in enumerate(self._ops):
            if op in _REDUCTIONS and self._inputs[position]:
                square = self._past(self._inputs[position][0])
                if self._is_square(square):
                    is_difference = self._ops[square] == "SquaredDifference"
                    data = square if is_difference else self._past(self._inputs[square][0])
                    yield self._past(self._before_mean(data))

    def _past(self, node: int) -> int:
        """The node whose values a node passes on."""
        while self._ops[node] in _PASSING_ON and self._inputs[node]:
            node = self._inputs[node][0]
        return node

    def _is_square(self, node: int) -> bool:
        given = self._inputs[node]
        if self._ops[node] == "Mul":
            return len(given) == 2 and given[0] == given[1]
        return self._ops[node] in _SQUARES and bool(given)

    def _before_mean(self, node: int) -> int:
        """The data of a difference from a statistic of them, else the node itself."""
        given = self._inputs[node]
        if self._ops[node] in ("Sub", "SquaredDifference") and len(given) == 2:
            for data, mean in (given, given[::-1]):
                if self._is_computed_from(self._past(data), mean):
                    return data
        return node

    def _is_computed_from(self, data: int, node: int) -> bool:
        def sources(each: int) -> list[int]:
            return self._inputs[each] if each != data and self._ops[each] in _ARITHMETIC else []

        return node != data and data in reach([node], sources)

    def normalization_of(self, data: int) -> dict[int, int]:
        """The nodes that normalize some data, each with the last of them."""
        parts = self._parts(data)

        def before(node: int) -> list[int]:
            return [
                each
                for each in self._inputs[node]
                if each != data and (each in parts or (each in self._stored and self._inputs[each]))
            ]

        found: dict[int, int] = {}
        for last in reversed(parts):  # Each comes behind what it is computed from.
            gives = self._ops[last] not in _PASSING_ON and parts[last].is_normalized
            if gives and last not in found:
                found.update(dict.fromkeys(reach([last], before), last) | found)
        return found

    def gradients_of(self, squared: Collection[int], lasts: Mapping[int, int]) -> Iterable[int]:
        """What takes more than the result of normalizations, and what that is computed from.

        Up to the gradient that comes from behind and the sum that goes on: all between is computed
        from these gradients, the data, statistics and weights only.
        """
        inside = lasts.keys() - set(lasts.values())
        beside = {each for node in inside for each in self._consumers[node]} - lasts.keys()
        given = {each for node in beside for each in self._inputs[node]} - lasts.keys()
        # The gradient of a quotient starts from one more such quotient: a result is known too.
        known = {*lasts, *given, *squared, *self._stored}
        between: set[int] = set()
        found: set[int] = set()
        for node in self._order:
            sources = self._inputs[node]
            is_new = sources and not any(node in of for of in (lasts, squared, self._stored))
            if is_new and self._ops[node] in _GRADIENTS and known.issuperset(sources):
                known.add(node)
                between.add(node)
                if not inside.isdisjoint(sources) or not found.isdisjoint(sources):
                    found.add(node)
        return reach(found, lambda node: [each for each in self._inputs[node] if each in between])

    def _parts(self, data: int) -> dict[int, _Part]:
        """What is computed from some data and weights only."""
        parts: dict[int, _Part] = {data: _DATA}
        pending = [data]
        for near in pending:  # It grows meanwhile.
            for node in self._consumers[near]:
                given = self._inputs[node]
                known = self._ops[node] in _ARITHMETIC and node not in parts
                if known and all(each in parts or each in self._stored for each in given):
                    parts[node] = self._part(node, parts)
                    pending.append(node)
        return parts

    def _part(self, node: int, parts: Mapping[int, _Part]) -> _Part:
        op = self._ops[node]
        given = [parts[each] for each in self._inputs[node] if each in parts]
        is_statistic = op in _REDUCTIONS or all(each.is_statistic for each in given)
        is_squared = is_statistic and (
            any(each.is_squared for each in given)
            or (op in _REDUCTIONS and self._is_square(self._past(self._inputs[node][0])))
        )
        is_scale = is_statistic and (
            any(each.is_scale for each in given) or (is_squared and op in ROOTS)
        )
        is_normalized = not is_statistic and self._is_normalized(node, parts)
        return _Part(is_statistic, is_squared, is_scale, is_normalized)

    def _is_normalized(self, node: int, parts: Mapping[int, _Part]) -> bool:
        """Whether a node scales its data, or what is normalized gets a gain or a bias here."""
        op, given = self._ops[node], self._inputs[node]
        of_data = [parts[each] for each in given if each in parts and not parts[each].is_statistic]
        if len(of_data) != 1:
            return False
        others = [parts.get(each) for each in given]
        if op in _SCALING and any(each is not None and each.is_scale for each in others):
            return True
        if not of_data[0].is_normalized or self._numbers.intersection(given):
            return False
        return op in _SCALING | _SHIFTING | _PASSING_ON
