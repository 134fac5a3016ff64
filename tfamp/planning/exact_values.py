"""Which slots stay float32 for the values they hold, whatever their ops; framework-free.

Three rules, all by structure and none by names:

- **Results.** A float result of the function, and a scalar that is differentiated, stored or
  returned, is computed in float32 from the last product on: a loss has float32's digits, and
  probabilities add up to 1. Where a loss subtracts given data from predictions, the product that
  makes these stays float32 too, as the output layer does under a policy.
- **Data.** A placeholder, or an element of a dataset, is rounded only as an operand of a product.
- **Masks.** A finite number beyond the range of the low dtype, as -1e9 for what is masked, becomes
  no infinity: what computes with it stays float32 up to the softmax.

A product is an op of the allow list. The slots found stay as they are and the passes work around
them; nothing that follows becomes float32 for it, as it would behind a denied op.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from tfamp.core.dtypes import float_format
from tfamp.planning.coloring import REDUCTIONS
from tfamp.planning.structures import (
    ARGUMENT,
    FLOAT32,
    LINK,
    LOOPS,
    RESULT,
    GraphIndex,
    IndexedNode,
    Reason,
    op_types,
    reach,
)

_ON_THE_WAY = Reason("result", "it leads from the last product to a result of the function")
_COMPARED = Reason("result", "its results are compared with given data")
_GIVEN = Reason("data", "it computes with given data, which only products round")

# Ops whose results are data from outside of the graph.
_SOURCES = op_types("""
    IteratorGetNext IteratorGetNextSync OptionalGetValue Placeholder PlaceholderWithDefault
""")
# Ops that choose between values and do not compute new ones.
CHOICES = op_types("""
    ClipByValue Equal Greater GreaterEqual Less LessEqual Maximum Minimum NotEqual Select SelectV2
""")
# Ops whose results are small, however large what they are given.
_BOUNDED = op_types("Erf Exp Sigmoid Softmax Softsign Tanh")
_SOFTMAXES = op_types("Exp LogSoftmax Softmax")
_DIFFERENCES = op_types("SquaredDifference Sub")
# Nodes of loops and lists, which change as a whole or not at all.
_CARRIERS = LOOPS | {LINK} | op_types("Enter Exit Merge NextIteration Switch")


@dataclass(frozen=True, slots=True)
class Ends:
    """Slots of a graph where values come from outside, and where they go.

    Attributes:
        given: Those of placeholders, elements of datasets, and other data.
        results: Those of float results that are not known to be scalars.
        scalars: Those of scalars that are returned or stored.
        unused: Those of scalars that nothing computes with: losses that are differentiated only.
        stored: Those of larger tensors that are stored: the updates of weights.
    """

    given: Sequence[int]
    results: Sequence[int]
    scalars: Sequence[int]
    unused: Sequence[int]
    stored: Sequence[int]


def exact_slots(
    index: GraphIndex, colors: Mapping[str, str], ends: Ends, dtype: str
) -> dict[int, Reason]:
    """Finds the slots that stay float32 for the values they hold.

    Args:
        index: A graph, joined with its loops.
        colors: Color of every op type that is on a list.
        ends: Where its values come from, and where they go.
        dtype: The low dtype.

    Returns:
        The slots, with the reason.
    """
    finder = _Finder(index, colors, dtype, ends.given)
    found = finder.masked()
    found.update(dict.fromkeys(finder.computing_with_data(), _GIVEN))
    found.update(finder.before_results(ends))
    return found


class _Finder:
    """The float32 slots of a graph, and how values go from one to the next."""

    def __init__(
        self, index: GraphIndex, colors: Mapping[str, str], dtype: str, given: Iterable[int]
    ) -> None:
        self._index, self._dtype = index, dtype
        self._ops = [index.node_of(slot).op for slot in range(len(index.slots))]
        self._colors = [colors.get(op) for op in self._ops]
        floats = [slot.dtype == FLOAT32 for slot in index.slots]
        self._sources = _among(floats, index.fanin)
        self._targets = _among(floats, index.fanout)
        self._order = [
            slot
            for node in index.producers_first()
            for slot in index.nodes[node].slots
            if floats[slot]
        ]
        self._data = self._data_slots(given)

    def _multiplies(self, slot: int) -> bool:
        return self._colors[slot] == "allow" or bool(self._index.node_of(slot).calls)

    def _moves(self, slot: int) -> bool:
        return self._colors[slot] == "clear" and self._ops[slot] not in CHOICES

    def _may_stay(self, slot: int) -> bool:
        """Whether a slot could be low and can be kept by itself: no part of a loop or a list."""
        op, listed = self._ops[slot], self._colors[slot] in ("infer", "clear")
        carries = op in _CARRIERS or "TensorList" in op or self._multiplies(slot)
        return listed and self._index.slots[slot].can_be_low and not carries

    # Masks

    def masked(self) -> dict[int, Reason]:
        """Slots that numbers beyond the range of the dtype get to, up to a softmax or a product."""
        limit = float_format(self._dtype).max / 2  # Two of them may be added.
        constants = {
            slot
            for node, largest in self._index.largest.items()
            if largest > limit
            for slot in self._index.nodes[node].slots
        }
        # Whether what a slot holds fits in where it is low: `graph.passes` ends constants that
        # choices take at the largest value of the dtype.
        fits = dict.fromkeys(constants, False)
        found: dict[int, Reason] = {}
        for slot in self._order if constants else ():
            beyond = [each for each in self._sources[slot] if each in fits]
            if not beyond or self._multiplies(slot):
                continue
            chosen = self._ops[slot] in CHOICES and all(fits[s] or s in constants for s in beyond)
            all_fit = all(map(fits.__getitem__, beyond))
            if not chosen and not (all_fit and (self._moves(slot) or self._ops[slot] == "Softmax")):
                name = self._index.node_of(beyond[0]).name
                text = f"a value beyond the range of {self._dtype} gets here from {name}"
                found[slot] = Reason("mask", text)
            if self._ops[slot] not in _BOUNDED:
                fits[slot] = slot not in found
        for slot in reversed(self._order if constants else ()):
            # In arithmetic behind it, the end of the range is another number.
            behind = next((each for each in self._targets[slot] if each in found), None)
            if fits.get(slot) and behind is not None:
                found[slot] = found[behind]
        return {slot: reason for slot, reason in found.items() if self._may_stay(slot)}

    # Data

    def _data_slots(self, given: Iterable[int]) -> frozenset[int]:
        """Slots of given data, as they are, moved, or computed from them and weights only."""
        slots, data = self._index.slots, set(given)
        is_integer = [slot.dtype.startswith(("int", "uint")) for slot in slots]
        # Sizes of tensors are no data: they are in another slot of a Shape.
        integers = reach(
            (slot for slot in data if is_integer[slot]),
            lambda slot: [each for each in self._index.fanout[slot] if is_integer[each]],
        )
        for slot in integers:
            if self._ops[slot] == "Cast":
                data.update(self._index.node_of(slot).slots)
        neutral: set[int] = set()
        for slot in self._order:
            sources = [each for each in self._sources[slot] if each != slot]
            if slot in data or self._multiplies(slot):
                continue
            if data.isdisjoint(sources):
                if neutral.issuperset(sources):
                    neutral.add(slot)
            elif self._moves(slot) or all(each in data or each in neutral for each in sources):
                data.add(slot)
        return frozenset(slot for slot in data if slots[slot].dtype == FLOAT32)

    def computing_with_data(self) -> Iterable[int]:
        """Slots of arithmetic on given data, with what moves the data there, up to a softmax."""
        arithmetic = [
            slot
            for slot in self._order
            if not self._multiplies(slot)
            and not self._moves(slot)
            and not self._data.isdisjoint(self._sources[slot])
        ]

        def moved(slot: int) -> list[int]:
            return [s for s in self._sources[slot] if s in self._data and self._moves(s)]

        mixing = [slot for slot in arithmetic if slot not in self._data]
        softmaxes = [slot for slot in self._order if self._ops[slot] in _SOFTMAXES]
        leading = reach(softmaxes, _past(self._multiplies, self._sources))
        masked = reach(
            (slot for slot in mixing if slot in leading),
            lambda slot: [each for each in self._targets[slot] if each in leading],
        )
        kept = dict.fromkeys([*reach(arithmetic, moved), *masked])
        return [slot for slot in kept if self._may_stay(slot)]

    # Results

    def before_results(self, ends: Ends) -> dict[int, Reason]:
        """Slots behind the last product before a result, and products compared with data.

        The last product of one result may be an early one of another: for each slot a number holds
        a bit for every result that it leads to, and one for those it leads to through a product.
        """
        gradients = self._gradients([*ends.scalars, *ends.unused])
        ours = [slot for slot in [*ends.results, *ends.unused] if slot not in gradients]
        returned = [slot for slot in ends.results if slot in gradients]
        updates = self._updates([*ends.stored, *returned])
        leads, through = self._ways(_bits([*ends.scalars, *ours]), updates)
        before = {slot for slot in self._order if leads[slot] & ~through[slot]}
        found = {
            slot: _ON_THE_WAY for slot in self._order if slot in before and self._may_stay(slot)
        }
        compared = (
            slot
            for slot in found
            if self._ops[slot] in _DIFFERENCES and not self._data.isdisjoint(self._sources[slot])
        )
        makers = reach(compared, lambda s: () if self._multiplies(s) else self._sources[s])
        last = [slot for slot in makers if self._colors[slot] == "allow"]
        found.update((slot, _COMPARED) for slot in last if slot in before and slot not in updates)
        return found

    def _updates(self, stored: Iterable[int]) -> Collection[int]:
        """Slots of updates of weights back to the last reduction; they have a rule of their own."""

        def sources(slot: int) -> Sequence[int]:
            ends = self._multiplies(slot) or self._ops[slot] in REDUCTIONS
            return () if ends else self._sources[slot]

        return reach(stored, sources)

    def _gradients(self, scalars: Iterable[int]) -> Collection[int]:
        """Slots computed by the products of gradients, which round what they return.

        Such a product takes what is behind a scalar, and another operand that leads to the scalar
        through a product; it does not lead there itself.
        """
        leads, through = self._ways(_bits(scalars), ())
        behind = [0] * len(self._ops)
        found: set[int] = set()
        for slot in self._order:
            for each in self._sources[slot]:
                behind[slot] |= behind[each] | leads[each] & ~through[each]
            if self._multiplies(slot):
                operands = functools.reduce(
                    operator.or_, (through[s] for s in self._sources[slot]), 0
                )
                if behind[slot] & operands & ~leads[slot]:
                    found.add(slot)
            if not found.isdisjoint(self._sources[slot]):
                found.add(slot)
        return found

    def _ways(
        self, own: Mapping[int, int], updates: Collection[int]
    ) -> tuple[Sequence[int], Sequence[int]]:
        leads, through = ([0] * len(self._ops) for _ in range(2))
        changed = True
        while changed:  # Loops take more than one round.
            changed = False
            for slot in reversed(self._order):
                if slot in updates:
                    continue
                all_, crossing = own.get(slot, 0), 0
                for target in self._targets[slot]:
                    all_ |= leads[target]
                    ends = self._multiplies(target) or self._ops[target] in LOOPS
                    crossing |= leads[target] if ends else through[target]
                changed |= (all_, crossing) != (leads[slot], through[slot])
                leads[slot], through[slot] = all_, crossing
        return leads, through


def _bits(slots: Iterable[int]) -> dict[int, int]:
    return {slot: 1 << number for number, slot in enumerate(dict.fromkeys(slots))}


_Table: TypeAlias = Sequence[Sequence[int]]


def _among(floats: Sequence[bool], table: _Table) -> _Table:
    return [[each for each in near if floats[each]] for near in table]


def _past(ends: Callable[[int], bool], table: _Table) -> Callable[[int], Iterable[int]]:
    """The neighbours of a slot by a table, without those at which ways end."""
    return lambda slot: [each for each in table[slot] if not ends(each)]


def ends_of(
    scopes: Sequence[GraphIndex], slots: Sequence[Sequence[int]], fetched: Iterable[int]
) -> Ends:
    """Finds where the values of a graph and its functions come from, and where they go.

    Args:
        scopes: The scopes, each with its shapes; the graph itself is the first.
        slots: For each scope the slot of the joined graph for each of its slots.
        fetched: Positions of the nodes of the graph that are fetched.
    """
    # The functions that a SavedModel refers to are called from outside.
    roots = [node for node in scopes[0].nodes if node.op == "NoOp"]
    called = {name for node in roots for _, name in node.calls}
    results: dict[int, None] = {}
    scalars: dict[int, None] = {}
    for position in fetched:
        is_scalar = scopes[0].shapes.get((position, 0)) == ()
        where = scalars if is_scalar else results
        where.update((slots[0][slot], None) for slot in scopes[0].nodes[position].slots)
    given: dict[int, None] = {}
    unused: dict[int, None] = {}
    stored: dict[int, None] = {}
    for scope, joined in zip(scopes, slots, strict=True):
        is_called = scope.scope in called
        for node in scope.nodes:
            if node.op in _SOURCES or (is_called and node.op == ARGUMENT):
                given.update((joined[slot], None) for slot in node.slots)
            elif is_called and node.op == RESULT:
                results.update((joined[slot], None) for slot in node.slots)
        scalars.update((joined[slot], None) for slot in _scalar_results(scope))
        unused.update((joined[slot], None) for slot in _unused_scalars(scope))
        stored.update((joined[slot], None) for slot in _stored(scope))
    others = [slot for slot in unused if slot not in scalars and slot not in results]
    return Ends([*given], [*results], [*scalars], others, [*stored])


def _scalar_results(scope: GraphIndex) -> Iterator[int]:
    """Slots of scalars that are stored or returned."""
    for edge in scope.edges:
        node, tensor = scope.node_of(edge.target), scope.tensor(edge)
        if scope.shapes.get(tensor) == () and (
            node.op == RESULT or _has_dtype(scope, node, "resource")
        ):
            yield edge.source


def _unused_scalars(scope: GraphIndex) -> Iterator[int]:
    """Slots of scalars that nothing computes with."""
    for (position, port), shape in scope.shapes.items():
        node = scope.nodes[position]
        # The shape of a handle of a list says nothing of the floats in it.
        if shape == () and port == 0 and not node.calls and not _has_dtype(scope, node, "variant"):
            yield from (slot for slot in node.slots if not _is_computed_with(scope, slot))


def _stored(scope: GraphIndex) -> Iterator[int]:
    """Slots of tensors, of more than one number, that are stored."""
    for edge in scope.edges:
        is_scalar = scope.shapes.get(scope.tensor(edge)) == ()
        if not is_scalar and _has_dtype(scope, scope.node_of(edge.target), "resource"):
            yield edge.source


def _has_dtype(scope: GraphIndex, node: IndexedNode, dtype: str) -> bool:
    return any(scope.slots[slot].dtype == dtype for slot in node.slots)


def _is_computed_with(scope: GraphIndex, slot: int) -> bool:
    """Whether other floats that something uses are computed from those of a slot."""
    return any(
        scope.slots[each].dtype == FLOAT32 and scope.fanout[each]
        for target in scope.fanout[slot]
        for each in scope.node_of(target).slots
    )


# ---- Normalizations ------------------------------------------------------------------------------

# A normalization is known by what it computes, whatever its nodes are called: a mean, or a sum, of
# squares of some data, a root of that, and the same data multiplied or divided by the root. So are
# LayerNormalization, GroupNormalization, RMSNormalization, the unit norm, and the same by hand. A
# mean that is subtracted before is part of it. A mean by itself is not, nor is a distance, nor the
# root of one.
#
# Low precision would round the mean before it is subtracted and the root before all values are
# multiplied by it. Such an error is the same in all values, where those of the values themselves
# cancel in the sums that follow.

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
    finder = _Normalizations(index)
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


class _Normalizations:
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
