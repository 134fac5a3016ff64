"""Selects slots that stay float32 for the values they hold, whatever their ops; framework-free.

Six rules, all by structure and none by names:

- **Results.** A float result of the function, and a scalar that is differentiated, stored or
  returned, is computed in float32 from the last product on: a loss has float32's digits, and
  probabilities sum to 1. If a loss subtracts given data from predictions, the product that computes
  these stays float32 too, as the output layer does under a policy.
- **Data.** A placeholder, or an element of a dataset, is rounded only as an operand of a product.
- **Masks and epsilons.** A finite number beyond the range of the low dtype, as -1e9 for masked
  positions, does not become infinite, and 1e-12 not zero: arithmetic with it stays float32 up to
  the next softmax or product.
- **Decompositions.** A matrix that a Qr or Cholesky op takes is float32 from the last product on,
  that product included: these ops multiply rounding errors by a condition number.
- **Normalizations.** See the second part.
- **Gradients of softmaxes** over many values. See the last part.

A product is an op of the allow list. The selected slots stay as they are and the passes work around
them; unlike a denied op, they do not make the nodes behind them float32.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from tfamp.core.dtypes import float_format
from tfamp.planning.coloring import REDUCTIONS, neighbours
from tfamp.planning.kernels import stalling_terms
from tfamp.planning.op_sets import DECOMPOSITIONS, STORED
from tfamp.planning.structures import (
    ARGUMENT,
    FLOAT32,
    LOOPS,
    RESULT,
    GraphIndex,
    Reason,
    along,
    op_types,
    reach,
)

# An ordered set of slots or nodes.
_Ordered: TypeAlias = dict[int, None]

_ON_THE_WAY = Reason("result", "it leads from the last product to a result of the function")
_COMPARED = Reason("result", "its results are compared with given data")
_GIVEN = Reason("data", "it computes with given data, which only products round")
_DECOMPOSED = Reason(
    "decomposition", "a decomposition or solver would multiply its rounding errors"
)

# Ops whose results are data from outside of the graph.
_SOURCES = op_types("""
    IteratorGetNext IteratorGetNextSync OptionalGetValue Placeholder PlaceholderWithDefault
""")
# Ops that select or compare values and do not compute new ones.
CHOICES = op_types("""
    ClipByValue Equal Greater GreaterEqual Less LessEqual Maximum Minimum NotEqual Select SelectV2
""")
# Ops with bounded results.
_BOUNDED = op_types("Erf Exp Sigmoid Softmax Softsign Tanh")
_SOFTMAXES = op_types("Exp LogSoftmax Softmax")
_DIFFERENCES = op_types("SquaredDifference Sub")
# Nodes of TensorFlow 1's loops, which change as a whole or not at all.
_FRAMES = op_types("Enter Exit Merge NextIteration Switch")


@dataclass(frozen=True, slots=True)
class Ends:
    """Slots of a graph where values come from outside, and where they go.

    Attributes:
        given: Placeholders, elements of datasets, results of calls and arguments of functions.
        results: Float results that are not known to be scalars.
        scalars: Scalars that are returned or stored.
        unused: Scalars without consumers: losses that are only differentiated.
        stored: Larger tensors that are stored: the updates of weights.
    """

    given: _Ordered = field(default_factory=dict)
    results: _Ordered = field(default_factory=dict)
    scalars: _Ordered = field(default_factory=dict)
    unused: _Ordered = field(default_factory=dict)
    stored: _Ordered = field(default_factory=dict)


def ends_of(
    scopes: Sequence[GraphIndex],
    slots: Sequence[Sequence[int]],
    joined: Collection[int],
    fetched: Iterable[int],
) -> Ends:
    """Finds where the values of a graph and its functions come from, and where they go.

    A call is such an end, for its caller and for the function: it keeps the dtypes of its boundary.

    Args:
        scopes: The scopes, each with its shapes; the graph itself is the first.
        slots: For each scope the slot of the joined graph for each of its slots.
        joined: Positions of the functions that are joined with their loops.
        fetched: Positions of the nodes of the graph that are fetched.
    """
    ends = Ends()
    for position in fetched:
        is_scalar = scopes[0].shapes.get((position, 0)) == ()
        found = ends.scalars if is_scalar else ends.results
        found.update((slots[0][slot], None) for slot in scopes[0].nodes[position].slots)
    for number, (scope, of_scope) in enumerate(zip(scopes, slots, strict=True)):
        is_called = number not in joined
        for node in scope.nodes:
            own = ((of_scope[slot], None) for slot in node.slots)
            calls = node.calls and node.op not in LOOPS
            if node.op in _SOURCES or calls or (is_called and node.op == ARGUMENT):
                ends.given.update(own)
            elif is_called and node.op == RESULT:
                ends.results.update(own)
        storing = scope.users["resource"]
        for edge in scope.edges:
            position = scope.slots[edge.target].node
            stores = position in storing
            if not stores and scope.nodes[position].op != RESULT:
                continue
            if scope.shapes.get(scope.tensor(edge)) == ():
                ends.scalars[of_scope[edge.source]] = None
            elif stores:
                ends.stored[of_scope[edge.source]] = None
        ends.unused.update((of_scope[slot], None) for slot in _unused_scalars(scope))
    for slot in [*ends.scalars, *ends.results]:
        ends.unused.pop(slot, None)
    return ends


def _unused_scalars(scope: GraphIndex) -> Iterator[int]:
    """Slots of scalars whose consumers, if any, have no used float results."""
    used = {
        slot.node
        for number, slot in enumerate(scope.slots)
        if slot.dtype == FLOAT32 and scope.fanout[number]
    }
    for (position, port), shape in scope.shapes.items():
        # A scalar handle of a list may hold larger tensors.
        if shape == () and port == 0 and position not in scope.users["variant"]:
            node = scope.nodes[position]
            for slot in () if node.calls else node.slots:
                if used.isdisjoint(scope.slots[target].node for target in scope.fanout[slot]):
                    yield slot


def exact_slots(
    index: GraphIndex, colors: Mapping[str, str], ends: Ends, dtype: str
) -> dict[int, Reason]:
    """Finds the slots that stay float32 for the values they hold, without normalizations.

    Args:
        index: A graph, joined with its loops.
        colors: Color of every op type that is on a list.
        ends: Where its values come from, and where they go.
        dtype: The low dtype.

    Returns:
        The slots, with the reason.
    """
    values = _Values(index, colors)
    data = values.data(ends.given)
    return {
        **values.masked(dtype),
        **dict.fromkeys(values.computing_with(data), _GIVEN),
        **values.before_results(ends, data),
        **dict.fromkeys(values.before_decompositions(), _DECOMPOSED),
    }


class _Values:
    """The flow of float32 values between the slots of a graph."""

    def __init__(self, index: GraphIndex, colors: Mapping[str, str]) -> None:
        self._index = index
        self._ops = index.ops
        self._colors = [colors.get(op) for op in self._ops]
        calls = (bool(index.nodes[slot.node].calls) for slot in index.slots)
        allowed = (color == "allow" for color in self._colors)
        self._multiplies = list(map(operator.or_, allowed, calls))
        floats = [slot.dtype == FLOAT32 for slot in index.slots]
        self._sources, self._targets = (
            [[each for each in near if floats[each]] for near in table]
            for table in neighbours(index)
        )
        nodes = (index.nodes[position] for position in index.producers_first)
        self._order = [slot for node in nodes for slot in node.slots if floats[slot]]
        self._has_loops = not (LOOPS | _FRAMES).isdisjoint(self._ops)

    def _moves(self, slot: int) -> bool:
        return self._colors[slot] == "clear" and self._ops[slot] not in CHOICES

    def _may_stay(self, slot: int) -> bool:
        """Whether a slot could be low, does not multiply, and can change alone."""
        listed = self._colors[slot] in ("infer", "clear") and self._index.slots[slot].can_be_low
        return listed and not self._multiplies[slot] and self._ops[slot] not in _FRAMES

    def _walks(self, *grown: Collection[int]) -> Iterator[None]:
        """Repeats a walk over the slots as long as it adds to sets; without loops one is enough."""
        before = -1
        while before != (size := sum(map(len, grown))) and (before < 0 or self._has_loops):
            before = size
            yield

    def masked(self, dtype: str) -> dict[int, Reason]:
        """Slots that values beyond the range of a dtype reach, up to a softmax or a product."""
        limits, nodes = float_format(dtype), self._index.nodes
        large, tiny = set[int](), set[int]()
        for node, size in self._index.largest.items():
            if size > limits.max / 2:  # Two of them may be added.
                large.update(nodes[node].slots)
            elif 0 < size < limits.smallest_subnormal / 2:  # It may be all that is divided by.
                tiny.update(nodes[node].slots)
        if not large and not tiny:
            return {}
        # Whether the values of a slot are in range if it is low: `graph.passes` clips constants of
        # choices to the range of the dtype.
        fits = dict.fromkeys([*large, *tiny], False)
        found: dict[int, Reason] = {}
        for _ in self._walks(found, fits):
            for slot in self._order:
                beyond = [each for each in self._sources[slot] if each in fits]
                if not beyond or self._multiplies[slot]:
                    continue
                chosen = self._ops[slot] in CHOICES and all(fits[s] or s in large for s in beyond)
                passes_on = self._moves(slot) or self._ops[slot] == "Softmax"
                if not chosen and not (passes_on and all(fits[s] for s in beyond)):
                    name = self._index.node_of(beyond[0]).name
                    text = f"a value beyond the range of {dtype} gets here from {name}"
                    found[slot] = Reason("mask", text)
                if self._ops[slot] not in _BOUNDED:
                    fits[slot] = slot not in found
        for slot in reversed(self._order):
            # Arithmetic behind it would compute with the clipped value.
            behind = next((each for each in self._targets[slot] if each in found), None)
            if fits.get(slot) and behind is not None:
                found[slot] = found[behind]
        return {slot: reason for slot, reason in found.items() if self._may_stay(slot)}

    def data(self, given: Iterable[int]) -> frozenset[int]:
        """Slots of given data, also moved, or computed from data and weights only."""
        slots, data = self._index.slots, set(given)
        is_integer = [slot.dtype.startswith(("int", "uint")) for slot in slots]
        # Sizes of tensors do not count: they are in another slot of a Shape.
        integers = reach(
            (slot for slot in data if is_integer[slot]),
            along(is_integer.__getitem__, self._index.fanout),
        )
        for slot in integers:
            if self._ops[slot] == "Cast":
                data.update(self._index.node_of(slot).slots)
        neutral: set[int] = set()
        for _ in self._walks(data, neutral):
            for slot in self._order:
                sources = [each for each in self._sources[slot] if each != slot]
                if slot in data or self._multiplies[slot]:
                    continue
                if data.isdisjoint(sources):
                    if neutral.issuperset(sources):
                        neutral.add(slot)
                elif self._moves(slot) or all(each in data or each in neutral for each in sources):
                    data.add(slot)
        return frozenset(slot for slot in data if slots[slot].dtype == FLOAT32)

    def computing_with(self, data: Collection[int]) -> Iterable[int]:
        """Slots of arithmetic on given data, and ops that move the data there, up to a softmax."""
        arithmetic = [
            slot
            for slot in self._order
            if not self._multiplies[slot]
            and not self._moves(slot)
            and any(source in data for source in self._sources[slot])
        ]
        moved = reach(arithmetic, along(lambda s: s in data and self._moves(s), self._sources))
        softmaxes = [slot for slot in self._order if self._ops[slot] in _SOFTMAXES]
        leading = reach(softmaxes, along(lambda s: not self._multiplies[s], self._sources))
        mixing = (slot for slot in arithmetic if slot not in data and slot in leading)
        masked = reach(mixing, along(leading.__contains__, self._targets))
        return [slot for slot in dict.fromkeys([*moved, *masked]) if self._may_stay(slot)]

    def before_decompositions(self) -> Iterable[int]:
        """Slots from the last products before decompositions on, these products included.

        The product of a matrix with itself has its condition number squared, and is not the last.
        """

        def leading(slot: int) -> Iterable[int]:
            squares = self._colors[slot] == "allow" and len(self._sources[slot]) == 1
            return self._sources[slot] if squares or not self._multiplies[slot] else ()

        roots = (slot for slot in self._order if self._ops[slot] in DECOMPOSITIONS)
        before = reach(roots, leading)
        return [s for s in before if self._colors[s] == "allow" or self._may_stay(s)]

    def before_results(self, ends: Ends, data: Collection[int]) -> dict[int, Reason]:
        """Slots behind the last product before a result, and products compared with data.

        The last product of one result may be an early one of another: for each slot a number holds
        a bit for every result that it leads to, and one for those it leads to through a product.
        """
        gradients = self._gradients([*ends.scalars, *ends.unused])
        ours = [slot for slot in [*ends.results, *ends.unused] if slot not in gradients]
        returned = [slot for slot in ends.results if slot in gradients]
        # Updates of weights have their own rule, back to the last reduction.
        updates = reach(
            [*ends.stored, *returned],
            lambda s: () if self._multiplies[s] or self._ops[s] in REDUCTIONS else self._sources[s],
        )
        leads, through = self._ways([*ends.scalars, *ours], updates)
        before = {slot for slot in self._order if leads[slot] & ~through[slot]}
        found = [slot for slot in self._order if slot in before and self._may_stay(slot)]
        compared = (
            slot
            for slot in found
            if self._ops[slot] in _DIFFERENCES and any(each in data for each in self._sources[slot])
        )
        makers = reach(compared, lambda s: () if self._multiplies[s] else self._sources[s])
        last = (
            s for s in makers if self._colors[s] == "allow" and s in before and s not in updates
        )
        kept = {**dict.fromkeys(found, _ON_THE_WAY), **dict.fromkeys(last, _COMPARED)}
        # A list or a loop variable that holds low values only is as exact in low precision.
        computed = (slot for slot in kept if not self._moves(slot))
        behind = reach(computed, along(kept.__contains__, self._targets))
        return {slot: why for slot, why in kept.items() if slot in behind or not self._holds(slot)}

    def _holds(self, slot: int) -> bool:
        return "TensorList" in self._ops[slot] or self._ops[slot] in LOOPS

    def _gradients(self, scalars: Iterable[int]) -> Collection[int]:
        """Slots computed by the products of gradients, which round their results.

        Such a product has an operand that comes from behind a scalar, and another one that leads to
        the scalar through a product; it does not lead there itself.
        """
        leads, through = self._ways(scalars, ())
        behind = [0] * len(self._ops)
        found: set[int] = set()
        changed = True
        while changed:
            before = [*behind, len(found)]
            for slot in self._order:
                sources = self._sources[slot]
                for each in sources:
                    behind[slot] |= behind[each] | leads[each] & ~through[each]
                is_gradient = False
                if self._multiplies[slot]:
                    operands = functools.reduce(operator.or_, map(through.__getitem__, sources), 0)
                    is_gradient = bool(behind[slot] & operands & ~leads[slot])
                if is_gradient or not found.isdisjoint(sources):
                    found.add(slot)
            changed = self._has_loops and before != [*behind, len(found)]
        return found

    def _ways(self, ends: Iterable[int], without: Collection[int]) -> tuple[list[int], list[int]]:
        """Bit sets of the ends that each slot leads to, on any path and through a product."""
        own = {slot: 1 << number for number, slot in enumerate(dict.fromkeys(ends))}
        leads, through = ([0] * len(self._ops) for _ in range(2))
        changed = True
        while changed:
            changed = False
            for slot in reversed(self._order):
                if slot in without:
                    continue
                every, crossing = own.get(slot, 0), 0
                for target in self._targets[slot]:
                    every |= leads[target]
                    crossing |= (leads if self._multiplies[target] else through)[target]
                changed |= (every, crossing) != (leads[slot], through[slot])
                leads[slot], through[slot] = every, crossing
            changed &= self._has_loops  # Without them one walk back is enough.
        return leads, through


# ---- Normalizations ------------------------------------------------------------------------------

# A normalization is recognized by structure, not by names: a mean or a sum of squares of some data,
# a root of it, and the same data multiplied or divided by the root. This covers LayerNormalization,
# GroupNormalization, RMSNormalization, the unit norm, and handwritten ones. A mean that is
# subtracted before is part of it; a mean alone is not, nor is a distance or its root.
#
# Low precision would round the mean before it is subtracted and the root before all values are
# multiplied by it: an error common to all values. Rounding errors of single values cancel in later
# sums; a common error does not.

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
        Positions of nodes with the reason: from the first ones that take the data to the one that
        gives the normalized values, with a gain and a bias where these come next; and the nodes of
        their gradients.
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
    found = dict.fromkeys(tensors.gradients_of(squared, lasts), gradient)
    for position, last in lasts.items():
        text = f"it is part of the normalization that gives {index.nodes[last].name}"
        found[position] = Reason("statistics", text)
    return found


class _Tensors:
    """The float32 tensors of a scope: for each node its op, its producers and its consumers."""

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
        # Weights, constants, and nodes computed from these only. A Cast without a float input is a
        # number of elements.
        self._stored: set[int] = set()
        for node in self._order:
            op, given = self._ops[node], self._inputs[node]
            computed = op in _ARITHMETIC and self._stored.issuperset(given)
            if computed if given else op in STORED or op == "Cast":
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
        given = self._inputs[node]
        if self._ops[node] == "Mul":
            return len(given) == 2 and given[0] == given[1]
        return self._ops[node] in _SQUARES and bool(given)

    def _before_mean(self, node: int) -> int:
        """The data from which a node subtracts their statistic, else the node itself."""
        given = self._inputs[node]
        if self._ops[node] in _DIFFERENCES and len(given) == 2:
            for data, mean in (given, given[::-1]):
                if self._is_computed_from(self._past(data), mean):
                    return data
        return node

    def _is_computed_from(self, data: int, node: int) -> bool:
        def sources(each: int) -> list[int]:
            computes = each != data and self._ops[each] in _ARITHMETIC_AND_MEANS
            return self._inputs[each] if computes else []

        return node != data and data in reach([node], sources)

    def normalization_of(self, data: int) -> dict[int, int]:
        """The nodes that normalize some data, each with the last node of the normalization."""
        parts, normalized = self._parts(data)

        def before(node: int) -> list[int]:
            return [
                each
                for each in self._inputs[node]
                if each != data and (each in parts or (each in self._stored and self._inputs[each]))
            ]

        found: dict[int, int] = {}
        for last in reversed(parts):  # In reversed topological order.
            if last in normalized and self._ops[last] not in _PASSING_ON and last not in found:
                found.update(dict.fromkeys(reach([last], before), last) | found)
        return found

    def _parts(self, data: int) -> tuple[_Ordered, Collection[int]]:
        """The nodes computed from some data and weights only; which of them are normalized data."""
        parts: _Ordered = {data: None}
        # Of the parts: statistics, means of squares and their descendants, descendants of a root of
        # these, and data scaled by such a root.
        statistic, squared, scale, normalized = (set[int]() for _ in range(4))
        pending = [data]
        for near in pending:  # It grows while it is iterated.
            for node in self._consumers[near]:
                op, given = self._ops[node], self._inputs[node]
                own = [each for each in given if each in parts]
                others_stored = all(each in parts or each in self._stored for each in given)
                if node in parts or op not in _ARITHMETIC_AND_MEANS or not others_stored:
                    continue
                parts[node] = None
                pending.append(node)
                of_data = [each for each in own if each not in statistic]
                if op in _MEANS or not of_data:
                    statistic.add(node)
                    adds_squares = op in _MEANS and self._is_square(self._past(given[0]))
                    if adds_squares or not squared.isdisjoint(own):
                        squared.add(node)
                    if not scale.isdisjoint(own) or (node in squared and op in _ROOTS):
                        scale.add(node)
                elif len(of_data) == 1:
                    scales = op in _SCALING and not scale.isdisjoint(given)
                    # A gain or a bias applied to normalized data.
                    follows = of_data[0] in normalized and self._numbers.isdisjoint(given)
                    if scales or (follows and op in _SCALING | _SHIFTING | _PASSING_ON):
                        normalized.add(node)
        return parts, normalized

    def gradients_of(self, squared: Collection[int], lasts: Mapping[int, int]) -> Iterable[int]:
        """The nodes that take more than the result of normalizations, and those before them.

        Up to the gradient that comes from behind and the sum that goes on: all between is computed
        from these gradients, the data, statistics and weights only.
        """
        inside = lasts.keys() - set(lasts.values())
        beside = {each for node in inside for each in self._consumers[node]} - lasts.keys()
        given = {each for node in beside for each in self._inputs[node]} - lasts.keys()
        # The gradient of a quotient starts from one more such quotient: a result is known too.
        before = {*lasts, *squared, *self._stored}
        known = before | given
        between: set[int] = set()
        found: set[int] = set()
        for node in self._order:
            sources = self._inputs[node]
            computes = sources and self._ops[node] in _GRADIENTS and known.issuperset(sources)
            if computes and node not in before:
                known.add(node)
                between.add(node)
                if not inside.isdisjoint(sources) or not found.isdisjoint(sources):
                    found.add(node)
        return reach(found, along(between.__contains__, self._inputs))

    def softmax_gradient(self, softmax: int) -> Iterable[int]:
        """The nodes that compute `(dy - sum(dy * y)) * y` of a softmax `y`, the softmax included.

        Empty if the scope does not have its gradient.
        """
        found: _Ordered = {}
        for product in self._consumers_of(softmax, _PRODUCTS):
            upstream = next((n for n in self._inputs[product] if n != softmax), softmax)
            for total in self._consumers_of(product, _SUMS):
                for difference in self._consumers_of(total, _MINUS):
                    if self._inputs[difference] == [upstream, total]:
                        scaled = self._consumers_of(difference, _PRODUCTS)
                        last = [node for node in scaled if softmax in self._inputs[node]]
                        found.update(
                            dict.fromkeys([softmax, product, total, difference, *last] * bool(last))
                        )
        return found

    def _consumers_of(self, node: int, ops: Collection[str]) -> list[int]:
        return [each for each in self._consumers[node] if self._ops[each] in ops]


# ---- Gradients of softmaxes ----------------------------------------------------------------------

# The gradient of a softmax `y` is `(dy - sum(dy * y)) * y`: its sum over the values is zero. Low
# precision rounds the sum, and with nearly uniform values all of `y` in the same direction: an
# error common to all, which the product behind, the gradient of the queries of attention, adds up.
# Rounding errors of `dy` are independent. The error grows with the number of values next to what
# they have in common.

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
    found: dict[int, Reason] = {}
    for softmax in wide:
        text = f"{index.nodes[softmax].name} has so many values that its gradient cancels"
        found.update(dict.fromkeys(tensors.softmax_gradient(softmax), Reason("softmax", text)))
    return found


def _values_of(index: GraphIndex, softmax: int) -> float:
    size = (index.shapes.get((softmax, 0)) or (None,))[-1]
    return math.inf if size is None else size
