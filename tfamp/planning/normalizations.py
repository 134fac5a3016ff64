"""Finds normalizations, and gradients of softmaxes, which stay float32; framework-free."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import TypeAlias

from tfamp.planning.kernels import stalling_terms
from tfamp.planning.op_sets import STORED
from tfamp.planning.structures import FLOAT32, GraphIndex, Reason, along, op_types, reach

# An ordered set of nodes.
_Ordered: TypeAlias = dict[int, None]
_DIFFERENCES = op_types("SquaredDifference Sub")

# ---- Normalizations --------------------------------------------------------------------

# A normalization is recognized by structure, not by names: a mean or a sum of squares of
# some data, a root of it, and the same data multiplied or divided by the root. This covers
# LayerNormalization, GroupNormalization, RMSNormalization, the unit norm, and handwritten
# ones. A mean that is subtracted before is part of it; a mean alone is not, nor is a
# distance or its root.
#
# Low precision would round the mean before it is subtracted and the root before all values are
# multiplied by it: an error common to all values. Rounding errors of single values cancel in
# later sums; a common error does not.

_ROOTS = op_types("Pow Rsqrt Sqrt")
_MEANS = op_types("Mean Sum")
_SQUARES = op_types("Pow Square SquaredDifference")
_SCALING = op_types("Div DivNoNan Mul MulNoNan RealDiv Xdivy")
_SHIFTING = op_types("Add AddV2 BiasAdd Sub")
_PASSING_ON = op_types("""
    BroadcastTo EnsureShape ExpandDims Identity PreventGradient Reshape Snapshot Squeeze
    StopGradient StridedSlice Tile Transpose
""")
# Other elementwise ops on data and statistics.
_ELEMENTWISE = op_types("""
    Abs ClipByValue Inv Maximum Minimum Neg Reciprocal Relu Select SelectV2
""")
_ARITHMETIC = _ELEMENTWISE | _SCALING | _SHIFTING | _PASSING_ON | _SQUARES | _ROOTS
_ARITHMETIC_AND_MEANS = _ARITHMETIC | _MEANS
_GRADIENTS = _ARITHMETIC_AND_MEANS | op_types(
    "AddN InvGrad ReciprocalGrad RsqrtGrad SqrtGrad StridedSliceGrad"
)


def statistics(index: GraphIndex) -> dict[int, Reason]:
    """Finds the nodes of a scope that normalize data.

    Args:
        index: The scope.

    Returns:
        Positions of nodes with the reason: from the first ones that take the data to the one
        that gives the normalized values, with a gain and a bias where these come next; and the
        nodes of their gradients.
    """
    if _ROOTS.isdisjoint(node.op for node in index.nodes):
        return {}
    tensors = _Tensors(index)
    squared = dict.fromkeys(tensors.squared_data())
    lasts: dict[int, int] = {}
    for data in squared:
        lasts = tensors.normalization_of(data) | lasts
    if not lasts:
        return {}
    gradient = Reason("statistics", "it is part of the gradient of a normalization")
    reasons = dict.fromkeys(tensors.gradients_of(squared, lasts), gradient)
    for position, last in lasts.items():
        text = f"it is part of the normalization that gives {index.nodes[last].name}"
        reasons[position] = Reason("statistics", text)
    return reasons


class _Tensors:
    """The float32 tensors of a scope: the op, the producers and the consumers of its nodes."""

    def __init__(self, index: GraphIndex) -> None:
        self._ops = [node.op for node in index.nodes]
        sources = ([index.slots[edge.source] for edge in edges] for edges in index.inputs)
        self._inputs = [[s.node for s in slots if s.dtype == FLOAT32] for slots in sources]
        self._consumers: list[list[int]] = [[] for _ in index.nodes]
        for node, producers in enumerate(self._inputs):
            for producer in producers:
                self._consumers[producer].append(node)
        self._numbers = {
            position
            for position, op in enumerate(self._ops)
            if op in STORED and index.shapes.get((position, 0)) == ()
        }
        self._order = index.producers_first
        # Weights, constants, and nodes computed from these only. A Cast without a float input
        # is a number of elements.
        self._stored: set[int] = set()
        for node in self._order:
            op, inputs = self._ops[node], self._inputs[node]
            computed = op in _ARITHMETIC and self._stored.issuperset(inputs)
            if computed if inputs else op in STORED or op == "Cast":
                self._stored.add(node)

    def squared_data(self) -> Iterator[int]:
        """Data whose squares are summed, before a statistic is subtracted."""
        for position, op in enumerate(self._ops):
            if op in _MEANS and self._inputs[position]:
                square = self._past(self._inputs[position][0])
                if self._is_square(square):
                    is_difference = self._ops[square] == "SquaredDifference"
                    data = square if is_difference else self._past(self._inputs[square][0])
                    yield self._past(self._before_mean(data))

    def _past(self, node: int) -> int:
        """The node behind ops that only pass its values on."""
        while self._ops[node] in _PASSING_ON and self._inputs[node]:
            node = self._inputs[node][0]
        return node

    def _is_square(self, node: int) -> bool:
        inputs = self._inputs[node]
        if self._ops[node] == "Mul":
            return len(inputs) == 2 and inputs[0] == inputs[1]
        return self._ops[node] in _SQUARES and bool(inputs)

    def _before_mean(self, node: int) -> int:
        """The data from which a node subtracts their statistic, else the node itself."""
        inputs = self._inputs[node]
        if self._ops[node] in _DIFFERENCES and len(inputs) == 2:
            for data, mean in (inputs, inputs[::-1]):
                if self._is_computed_from(self._past(data), mean):
                    return data
        return node

    def _is_computed_from(self, data: int, node: int) -> bool:
        def sources(computed: int) -> list[int]:
            goes_on = computed != data and self._ops[computed] in _ARITHMETIC_AND_MEANS
            return self._inputs[computed] if goes_on else []

        return node != data and data in reach([node], sources)

    def normalization_of(self, data: int) -> dict[int, int]:
        """The nodes that normalize some data, with the last node of their normalization."""
        parts, normalized = self._parts(data)

        def belongs(node: int) -> bool:
            is_computed_weight = node in self._stored and bool(self._inputs[node])
            return node != data and (node in parts or is_computed_weight)

        def before(node: int) -> Iterable[int]:
            return filter(belongs, self._inputs[node])

        last_of: dict[int, int] = {}
        for last in reversed(parts):  # In reversed topological order.
            is_end = last in normalized and self._ops[last] not in _PASSING_ON
            if is_end and last not in last_of:
                last_of.update(dict.fromkeys(reach([last], before), last) | last_of)
        return last_of

    def _parts(self, data: int) -> tuple[_Ordered, Collection[int]]:
        """The nodes computed from some data and weights only, and those of normalized data."""
        parts: _Ordered = {data: None}
        # Of the parts: statistics, means of squares and their descendants, descendants of a
        # root of these, and data scaled by such a root.
        statistic, squared, scale, normalized = (set[int]() for _ in range(4))
        pending = [data]
        for near in pending:  # It grows while it is iterated.
            for node in self._consumers[near]:
                op, inputs = self._ops[node], self._inputs[node]
                from_parts = [source for source in inputs if source in parts]
                others_stored = all(s in parts or s in self._stored for s in inputs)
                if node in parts or op not in _ARITHMETIC_AND_MEANS or not others_stored:
                    continue
                parts[node] = None
                pending.append(node)
                of_data = [source for source in from_parts if source not in statistic]
                if op in _MEANS or not of_data:
                    statistic.add(node)
                    adds_squares = op in _MEANS and self._is_square(self._past(inputs[0]))
                    if adds_squares or not squared.isdisjoint(from_parts):
                        squared.add(node)
                    if not scale.isdisjoint(from_parts) or (node in squared and op in _ROOTS):
                        scale.add(node)
                elif len(of_data) == 1:
                    scales = op in _SCALING and not scale.isdisjoint(inputs)
                    # A gain or a bias applied to normalized data.
                    follows = of_data[0] in normalized and self._numbers.isdisjoint(inputs)
                    if scales or (follows and op in _SCALING | _SHIFTING | _PASSING_ON):
                        normalized.add(node)
        return parts, normalized

    def gradients_of(self, squared: Collection[int], lasts: Mapping[int, int]) -> Iterable[int]:
        """The nodes that take more than the result of normalizations, and those before them.

        Up to the gradient that comes from behind and the sum that goes on: all between is
        computed from these gradients, the data, statistics and weights only.
        """
        inside = lasts.keys() - set(lasts.values())
        beside = {user for node in inside for user in self._consumers[node]} - lasts.keys()
        operands = {source for node in beside for source in self._inputs[node]} - lasts.keys()
        # The gradient of a quotient starts from one more such quotient: a result is known too.
        before = {*lasts, *squared, *self._stored}
        known = before | operands
        between: set[int] = set()
        roots: set[int] = set()
        for node in self._order:
            sources = self._inputs[node]
            computes = sources and self._ops[node] in _GRADIENTS and known.issuperset(sources)
            if computes and node not in before:
                known.add(node)
                between.add(node)
                if not inside.isdisjoint(sources) or not roots.isdisjoint(sources):
                    roots.add(node)
        return reach(roots, along(between.__contains__, self._inputs))

    def softmax_gradient(self, softmax: int) -> Iterable[int]:
        """The nodes that compute `(dy - sum(dy * y)) * y` of a softmax `y`, with the softmax.

        Empty if the scope does not have its gradient.
        """
        parts: _Ordered = {}
        for product in self._consumers_of(softmax, _PRODUCTS):
            upstream = next((n for n in self._inputs[product] if n != softmax), softmax)
            for total in self._consumers_of(product, _SUMS):
                for difference in self._consumers_of(total, _MINUS):
                    if self._inputs[difference] == [upstream, total]:
                        scaled = self._consumers_of(difference, _PRODUCTS)
                        last = [node for node in scaled if softmax in self._inputs[node]]
                        if last:
                            nodes = (softmax, product, total, difference, *last)
                            parts.update(dict.fromkeys(nodes))
        return parts

    def _consumers_of(self, node: int, ops: Collection[str]) -> list[int]:
        return [user for user in self._consumers[node] if self._ops[user] in ops]


# ---- Gradients of softmaxes ------------------------------------------------------------

# The gradient of a softmax `y` is `(dy - sum(dy * y)) * y`: its sum over the values is zero.
# Low precision rounds the sum, and with nearly uniform values all of `y` in the same direction:
# an error common to all, which the product behind, the gradient of the queries of attention,
# adds up. Rounding errors of `dy` are independent. The error grows with the number of values
# next to what they have in common.

_PRODUCTS, _SUMS, _MINUS = op_types("Mul"), op_types("Sum"), op_types("Sub")


def softmax_gradients(index: GraphIndex, dtype: str) -> dict[int, Reason]:
    """Finds the softmaxes over many values, or an unknown number, that have a gradient.

    Args:
        index: The scope, with its shapes.
        dtype: The low dtype.

    Returns:
        Positions of the softmaxes, and of the nodes of their gradients, with the reason.
    """
    limit = stalling_terms(dtype)
    wide = [
        position
        for position, node in enumerate(index.nodes)
        if node.op == "Softmax" and _values_of(index, position) > limit
    ]
    if not wide:
        return {}
    tensors = _Tensors(index)
    reasons: dict[int, Reason] = {}
    for softmax in wide:
        text = f"{index.nodes[softmax].name} has so many values that its gradient cancels"
        nodes = tensors.softmax_gradient(softmax)
        reasons.update(dict.fromkeys(nodes, Reason("softmax", text)))
    return reasons


def _values_of(index: GraphIndex, softmax: int) -> float:
    size = (index.shapes.get((softmax, 0)) or (None,))[-1]
    return math.inf if size is None else size
