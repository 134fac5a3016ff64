"""Selects slots that stay float32 for the values they hold, whatever their ops; framework-free.

All rules go by structure and none by names:

- **Results.** A float result of the function is computed in float32 from the last product on:
  probabilities sum to 1, also those that are the state of a loop. A scalar that is
  differentiated, stored or returned is, from the last product with a weight on: a loss has
  float32's digits. Products of activations in between, as in a Gram matrix, and those of their
  gradients, are float32 too. If a loss subtracts given data from predictions, the product that
  computes these stays float32, as the output layer does under a policy; `probabilities` finds
  those whose log-probabilities are subtracted from one another. So do sums of a loss's gradient
  before its first product: there large numbers may cancel, as 1 - 2 * sigmoid(-2 * x).
- **Updates.** In float16 what leads from the last product of a gradient to an optimizer is
  float32: divided by a loss scale it may exceed float16's range.
- **Data.** A placeholder, or an element of a dataset, is rounded only as an
  operand of a product.
- **Masks and epsilons.** A finite number beyond the range of the low dtype, as -1e9 for masked
  positions, does not become infinite, nor what is divided by 1e-12, and 0.999 does not become
  one: arithmetic with it stays float32 up to the next softmax or product.
- **Decompositions, angles, indices.** What a Qr or Cholesky op takes is float32 from the last
  product on, that product included: these ops multiply rounding errors by a condition number.
  So is what a sine, a rounding or a cast to integers takes: an error of a thousandth of 1,000
  turns an angle by a sixth, and an index becomes another one.
- **Conditions of loops.** What a loop compares with a tolerance is float32, from the last
  product on, this included: rounded values need not come closer to each other.

`normalizations` finds others, `ends` where a graph begins and ends. A product is an op of the
allow list. The selected slots stay as they are and the passes work around them; unlike a denied
op, they do not make the nodes behind them float32.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from typing import NamedTuple

from tfamp.core.dtypes import float_format
from tfamp.planning.coloring import REDUCTIONS, neighbours
from tfamp.planning.ends import Ends, State
from tfamp.planning.op_sets import DECOMPOSITIONS, STORED
from tfamp.planning.probabilities import DIFFERENCES, Probabilities
from tfamp.planning.structures import (
    FLOAT32,
    LOOPS,
    GraphIndex,
    Ordered,
    Reason,
    along,
    op_types,
    reach,
)

_ON_THE_WAY = Reason("result", "it leads from the last product to a result of the function")
_COMPARED = Reason("result", "its results are compared with given data")
_SUBTRACTED = Reason("result", "its log-probabilities are compared with those of another product")
_FROM_DATA = Reason("data", "it computes with given data, which only products round")
_DECOMPOSED = Reason(
    "decomposition", "a decomposition or solver would multiply its rounding errors"
)
_TURNED = Reason("angle", "it becomes an angle or an index, which rounding errors change")
_CONDITION = Reason("condition", "it decides when a loop ends")
_BEHIND_WEIGHTS = Reason("result", "it multiplies activations, behind the last weight of a result")
_CANCELS = Reason("result", "the gradient of a result is added up here, and may cancel")
_UPDATE = Reason("update", "it leads from the last product of a gradient to where this is used")

# Ops that select or compare values and do not compute new ones.
CHOICES = op_types("""
    ClipByValue Equal Greater GreaterEqual Less LessEqual Maximum Minimum NotEqual
    Select SelectV2
""")
# Ops with bounded results.
_BOUNDED = op_types("Erf Exp Sigmoid Softmax Softsign Tanh")
_SOFTMAXES = op_types("Exp LogSoftmax Softmax")
# Periodic functions and roundings; Casts to integers are others.
_TURNING = op_types("""
    Bucketize Ceil Cos Floor FloorDiv FloorMod LowerBound Mod Rint Round Sin Tan TruncateMod
    UpperBound
""")
# Of a complex number these turn by its imaginary part.
_TURNING_COMPLEX = op_types("Cos Cosh Exp Sin Sinh")
_FINITE = op_types("IsFinite IsInf IsNan")
# Ops that look at shapes only.
_SIZES = op_types("Rank Shape ShapeN Size TensorListElementShape TensorListLength")
# Ops that choose indices, such as the next token of a text, which measure no error.
_CHOOSING = op_types("ArgMax ArgMin Multinomial StatelessMultinomial TopK TopKV2")
_VARIABLES = op_types("ReadVariableOp Variable VariableV2")
_ADDITIONS = op_types("Add AddV2 BiasAdd Sub")
_SUMS_OF_GRADIENTS = op_types("Add AddN AddV2 Sub")
# Nodes of TensorFlow 1's loops, which change as a whole or not at all.
_FRAMES = op_types("Enter Exit Merge NextIteration Switch")


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
    values = _Values(index, colors, ends.across)
    data, stored = values.data(ends.inputs)
    gradients = values.gradients([*ends.scalars, *ends.unused])
    updates = values.updates(ends, gradients) if dtype == "float16" else ()
    return {
        **values.masked(dtype),
        **dict.fromkeys(updates, _UPDATE),
        **dict.fromkeys(values.computing_with(data, stored), _FROM_DATA),
        **values.before_results(ends, data, gradients),
        **{
            slot: reason
            for slots, reason in (
                (values.before_decompositions(), _DECOMPOSED),
                (values.before_angles(), _TURNED),
                (values.before_conditions(ends.conditions), _CONDITION),
            )
            for slot in values.with_operands(slots, data | stored)
        },
    }


class _Ways(NamedTuple):
    """Which ends the slots lead to: for each slot a mask, whose bit n stands for the n-th end.

    Attributes:
        leads: The ends that a slot leads to, on any way.
        across: Those of them that it leads to across a product, on some way.
        last: Those that it leads to without a product on any way: it is behind the last one.
    """

    leads: Sequence[int]
    across: Sequence[int]
    last: Sequence[int]


class _Values:
    """The flow of float32 values between the slots of a graph."""

    def __init__(
        self, index: GraphIndex, colors: Mapping[str, str], across: Mapping[int, Sequence[int]]
    ) -> None:
        self._index, self._across = index, across
        self._ops = index.ops
        self._colors = [colors.get(op) for op in self._ops]
        calls = (bool(index.nodes[slot.node].calls) for slot in index.slots)
        allowed = (color == "allow" for color in self._colors)
        self._multiplies = list(map(operator.or_, allowed, calls))
        floats = [slot.dtype == FLOAT32 for slot in index.slots]
        self._sources, self._targets = (
            [[slot for slot in near if floats[slot]] for near in table]
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
        """Repeats a walk over the slots while it adds to sets; without loops one is enough."""
        before = -1
        while before != (size := sum(map(len, grown))) and (before < 0 or self._has_loops):
            before = size
            yield

    def masked(self, dtype: str) -> dict[int, Reason]:
        """Slots that values beyond the range of a dtype reach, up to a softmax or a product."""
        large, lost = self._constants_beyond(dtype)
        if not large and not lost:
            return {}
        # The slots that such a value reaches. True for those whose values are in range if they
        # are low: `graph.passes` clips constants of choices to the range of the dtype.
        fits = dict.fromkeys([*large, *lost], False)
        masked: dict[int, Reason] = {}
        for _ in self._walks(masked, fits):
            for slot in self._order:
                beyond = [source for source in self._sources[slot] if source in fits]
                if not beyond or self._multiplies[slot]:
                    continue
                if not self._stays_in_range(slot, beyond, fits, large):
                    name = self._index.node_of(beyond[0]).name
                    text = f"a value beyond the range of {dtype} gets here from {name}"
                    masked[slot] = Reason("mask", text)
                if self._ops[slot] not in _BOUNDED:
                    fits[slot] = slot not in masked
        for slot in reversed(self._order):
            # Arithmetic behind it would compute with the clipped value.
            behind = next((target for target in self._targets[slot] if target in masked), None)
            if fits.get(slot) and behind is not None:
                masked[slot] = masked[behind]
        return {slot: reason for slot, reason in masked.items() if self._may_stay(slot)}

    def _stays_in_range(
        self, slot: int, beyond: Sequence[int], fits: Mapping[int, bool], large: Collection[int]
    ) -> bool:
        """Whether a slot that takes from slots `beyond` the range stays in it if it is low.

        A choice takes clipped constants; what moves values passes on what fits already.
        """
        if self._ops[slot] in CHOICES:
            return all(fits[source] or source in large for source in beyond)
        passes_on = self._moves(slot) or self._ops[slot] == "Softmax"
        return passes_on and all(fits[source] for source in beyond)

    def _constants_beyond(self, dtype: str) -> tuple[set[int], set[int]]:
        """Slots of constants that become infinite in a dtype, and of those that lose meaning.

        These become one, or their inverses infinite.
        """
        limits = float_format(dtype)
        large, lost = set[int](), set[int]()
        for node, size in self._index.largest.items():
            slots = self._index.nodes[node].slots
            is_number = not any(map(self._rank, slots))
            next_to_one = 0 < abs(size - 1) < limits.eps / (4 if size < 1 else 2)
            if size > limits.max / 2:  # Two of them may be added.
                large.update(slots)
            elif 0 < size < 1 / limits.max or (is_number and next_to_one):
                lost.update(slots)  # It may be all that is divided by, in a gradient too.
        return large, lost

    def data(self, inputs: Iterable[int]) -> tuple[frozenset[int], frozenset[int]]:
        """Slots of data, and of what is stored; each with what is computed from only these.

        Data are inputs, also moved, and what is computed from data and stored values. What is
        stored are variables and constants, and what is computed from these only.
        """
        slots, data = self._index.slots, set(inputs)
        is_integer = [slot.dtype.startswith(("int", "uint")) for slot in slots]
        # Sizes of tensors do not count: they are in another slot of a Shape.
        integers = reach(
            (slot for slot in data if is_integer[slot]),
            along(is_integer.__getitem__, self._index.fanout),
        )
        for slot in integers:
            if self._ops[slot] == "Cast":
                data.update(self._index.node_of(slot).slots)
        stored: set[int] = set()
        for _ in self._walks(data, stored):
            for slot in self._order:
                sources = [source for source in self._sources[slot] if source != slot]
                if slot in data or self._multiplies[slot]:
                    continue
                if data.isdisjoint(sources):
                    if stored.issuperset(sources):
                        stored.add(slot)
                elif self._moves(slot) or all(s in data or s in stored for s in sources):
                    data.add(slot)
        float_data = (slot for slot in data if slots[slot].dtype == FLOAT32)
        return frozenset(float_data), frozenset(stored)

    def computing_with(self, data: Collection[int], stored: frozenset[int]) -> Iterable[int]:
        """Slots of arithmetic on input data, and ops that move the data there, up to a softmax.

        What is added on the way to a softmax may be a mask, or distances, that is stored.
        """
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
        mixing = [slot for slot in arithmetic if slot not in data and slot in leading]
        mixing += (slot for slot in self._order if slot in leading and self._adds(slot, stored))
        masked = reach(mixing, along(leading.__contains__, self._targets))
        return [slot for slot in dict.fromkeys([*moved, *masked]) if self._may_stay(slot)]

    def _adds(self, slot: int, stored: frozenset[int]) -> bool:
        """Whether a slot adds what is stored to other values, numbers and biases left out."""
        sources = self._sources[slot]
        if self._ops[slot] not in _ADDITIONS or stored.issuperset(sources):
            return False
        return any(source in stored and self._rank(source) > 1 for source in sources)

    def _rank(self, slot: int) -> float:
        """How many axes what is stored has; infinity where that is not known."""
        shape = self._index.shapes.get((self._index.slots[slot].node, 0))
        return math.inf if shape is None else len(shape)

    def before_decompositions(self) -> Iterable[int]:
        """Slots from the last products before decompositions on, these products included.

        The product of a matrix with itself has its condition number squared, and
        is not the last.
        """

        def leading(slot: int) -> Iterable[int]:
            squares = self._colors[slot] == "allow" and len(self._sources[slot]) == 1
            return self._sources[slot] if squares else self._made_from(slot)

        roots = (slot for slot in self._order if self._ops[slot] in DECOMPOSITIONS)
        before = reach(roots, leading)
        return [s for s in before if self._colors[s] == "allow" or self._may_stay(s)]

    def before_angles(self) -> Iterable[int]:
        """Slots from the last products before angles and indices on, products included."""
        roots = [slot for slot in self._order if self._ops[slot] in _TURNING]
        for node in self._index.nodes:
            dtypes = {self._index.slots[slot].dtype for slot in node.slots}
            if node.op == "Cast" and any("int" in dtype for dtype in dtypes):
                operands = (s for s in node.slots if self._index.slots[s].attr == "SrcT")
                roots += filter(self._is_float, operands)
        return self._with_last_products([*roots, *self._parts_of_complex_angles()])

    def _parts_of_complex_angles(self) -> Iterable[int]:
        """The float slots of the complex numbers of which a sine or an exponential is taken."""
        slots = self._index.slots

        def is_complex(slot: int) -> bool:
            return slots[slot].dtype.startswith("complex")

        def made_from(slot: int) -> Iterable[int]:
            if self._ops[slot] in ("Cast", "Complex"):
                return (part for part in self._index.node_of(slot).slots if part != slot)
            return (*self._across.get(slot, ()), *self._index.fanin[slot])

        turning = (slot for slot, op in enumerate(self._ops) if op in _TURNING_COMPLEX)
        turned = filter(is_complex, turning)
        parts = reach(turned, lambda slot: made_from(slot) if is_complex(slot) else ())
        return filter(self._is_float, parts)

    def before_conditions(self, conditions: Iterable[int]) -> Iterable[int]:
        """Slots from the last products before the conditions of loops on, these included."""
        roots = [*conditions, *(s for s, op in enumerate(self._ops) if op == "LoopCond")]
        deciding = reach(roots, self._decided_by)
        return self._with_last_products(slot for slot in deciding if self._is_float(slot))

    def _decided_by(self, slot: int) -> Iterable[int]:
        """The sources of a slot; of a comparison's result the operands, as other slots."""
        op = self._ops[slot]
        if slot in self._across:
            deciding = (s for s in self._index.node_of(slot).slots if not self._crosses(s))
            choice = (source for s in deciding for source in self._index.fanin[s])
            return [*self._across[slot], *choice]
        chooses = op in _CHOOSING and not self._is_float(slot)
        if self._multiplies[slot] or op in _SIZES or chooses:
            return ()
        apart = self._is_float(slot) or op in LOOPS or op in _FRAMES or op == "IdentityN"
        taking = (slot,) if apart else self._index.node_of(slot).slots
        return [source for s in taking for source in self._index.fanin[s]]

    def _crosses(self, slot: int) -> bool:
        return self._index.slots[slot].attr in ("Tin", "Tout")

    def _is_float(self, slot: int) -> bool:
        return self._index.slots[slot].dtype == FLOAT32

    def _made_from(self, slot: int) -> Iterable[int]:
        """The sources of a slot, across calls, up to a product."""
        if slot in self._across:
            return filter(self._is_float, self._across[slot])
        return () if self._multiplies[slot] else self._sources[slot]

    def _with_last_products(self, roots: Iterable[int]) -> Iterable[int]:
        before = reach(roots, self._made_from)
        return [s for s in before if self._colors[s] == "allow" or self._may_stay(s)]

    def with_operands(self, slots: Iterable[int], known: Set[int]) -> Iterable[int]:
        """Adds what products among some slots take, if it is known before any product."""
        kept = dict.fromkeys(slots)
        taken = (s for slot in kept if self._multiplies[slot] for s in self._sources[slot])
        known = known | kept.keys()
        roots = [slot for slot in taken if slot in known]
        operands = reach(roots, along(known.__contains__, self._sources))
        return [*kept, *(slot for slot in operands if self._may_stay(slot))]

    def updates(self, ends: Ends, gradients: Collection[int]) -> Iterable[int]:
        """Slots between the last products, or sums, of gradients and what uses these."""
        checks = (slot for slot in self._order if self._ops[slot] in _FINITE)
        roots = (s for s in [*ends.stored, *ends.results, *checks] if s in gradients)
        parts = (s for s in self._last_parts(roots) if self._ops[s] not in REDUCTIONS)
        return [s for s in parts if s in gradients and self._may_stay(s)]

    def _last_parts(self, roots: Iterable[int]) -> Collection[int]:
        """Slots that lead to some slots without a product or a reduction between."""

        def parts(slot: int) -> Iterable[int]:
            is_end = self._multiplies[slot] or self._ops[slot] in REDUCTIONS
            return () if is_end else self._sources[slot]

        return reach(roots, parts)

    def before_results(
        self, ends: Ends, data: Set[int], gradients: Collection[int]
    ) -> dict[int, Reason]:
        """Slots behind the last product before a result, and some products.

        For a loss that is the last product with a weight: those of activations behind it count
        as parts of the loss.
        """
        returned = [slot for slot in ends.results if slot in gradients]
        # Updates of weights have their own rule, back to the last reduction.
        updates = self._last_parts([*ends.stored, *returned])
        losses = [slot for slot in [*ends.scalars, *ends.unused] if slot not in gradients]
        others = [slot for slot in ends.results if slot not in gradients]
        others += (slot for slot in ends.scalars if slot in gradients)  # Norms of gradients.
        weights = self._weights(ends)
        crosses = [
            multiplies and (slot in gradients or not weights.isdisjoint(self._sources[slot]))
            for slot, multiplies in enumerate(self._multiplies)
        ]
        before_losses = self._before(losses, updates, crosses)
        # What a loop takes that reads variables counts as stored, but may be its state.
        stored = (s for s in ends.stored if not any(map(self._is_loop, self._targets[s])))
        apart = self._last_parts([*stored, *returned])
        before = before_losses.union(self._before_returned(others, apart, ends.states))
        on_the_way = [slot for slot in self._order if slot in before and self._may_stay(slot)]
        of_activations = [
            slot
            for slot in self._order
            if slot in before_losses and self._colors[slot] == "allow" and not crosses[slot]
        ]
        compared = {
            s: reason
            for s, reason in self._compared(before, on_the_way, data).items()
            if self._colors[s] == "allow" and s in before and s not in updates
        }
        their_gradients = self._products_of_gradients(of_activations, gradients)
        kept = {
            **dict.fromkeys(self._sums_behind(before_losses, gradients), _CANCELS),
            **dict.fromkeys(their_gradients, _BEHIND_WEIGHTS),
            **dict.fromkeys(of_activations, _BEHIND_WEIGHTS),
            **dict.fromkeys(on_the_way, _ON_THE_WAY),
            **compared,
        }
        # A list or a loop variable that holds low values only is as exact in low precision.
        computed = (slot for slot in kept if not self._moves(slot))
        behind = reach(computed, along(kept.__contains__, self._targets))
        return {s: reason for s, reason in kept.items() if s in behind or not self._holds(s)}

    def _compared(
        self, before: Set[int], on_the_way: Iterable[int], data: Set[int]
    ) -> Mapping[int, Reason]:
        """The last products before differences of predictions and data, or of predictions."""
        with_data = (
            slot
            for slot in on_the_way
            if self._ops[slot] in DIFFERENCES and not data.isdisjoint(self._sources[slot])
        )
        makers = reach(with_data, lambda s: () if self._multiplies[s] else self._sources[s])
        flow = Probabilities(self._order, self._ops, self._sources, self._multiplies, self._moves)
        return {
            **dict.fromkeys(flow.compared_products(before), _SUBTRACTED),
            **dict.fromkeys(makers, _COMPARED),
        }

    def _sums_behind(self, before: Set[int], gradients: Collection[int]) -> Iterable[int]:
        """Sums of the gradients of losses, and what leads there, up to the first products.

        Args:
            before: What leads to losses from the last products on.
            gradients: What the products of gradients compute.
        """

        def goes_on(slot: int) -> bool:
            return not self._multiplies[slot] and slot not in before and slot not in gradients

        behind = reach(
            (t for slot in before for t in self._targets[slot] if goes_on(t)),
            along(goes_on, self._targets),
        )
        sums = (slot for slot in behind if self._ops[slot] in _SUMS_OF_GRADIENTS)
        leading = reach(sums, along(behind.__contains__, self._sources))
        return [slot for slot in leading if self._may_stay(slot)]

    def _before(
        self, ends: Iterable[int], without: Collection[int], crosses: Sequence[bool]
    ) -> set[int]:
        """Slots that lead to some ends without a product of `crosses` between.

        The last product of one end may be an early one of another: each end counts by itself.
        """
        last = self._ways(ends, without, crosses).last
        return {slot for slot in self._order if last[slot]}

    def _before_returned(
        self, ends: Iterable[int], without: Collection[int], states: Mapping[int, State]
    ) -> Collection[int]:
        """Slots that lead to some ends without a product between, in the last iteration of loops.

        The state of a loop leads to the products of the next iteration, and the last has none.
        """
        slots, roots = self._index.slots, list(ends)
        before, returned, loops = set[int](), dict[int, None](), set[int]()
        while roots:
            # The last iteration of a loop is a graph of its own: no values go on to the next.
            apart = {slot for slot in states if slots[slot].node in loops}
            ways = self._ways(roots, apart.union(without), self._multiplies)
            before.update(slot for slot in self._order if ways.last[slot])
            found = [
                slot
                for slot, state in states.items()
                if self._is_float(slot) and slot not in returned
                if slot in roots or self._leads_on(slot, state, slot in apart, ways)
            ]
            returned.update(dict.fromkeys(found))
            loops.update(slots[slot].node for slot in found)
            roots = [source for slot in found for source in states[slot].sources]
        return {*before, *returned}

    def _leads_on(self, slot: int, state: State, inside: bool, ways: _Ways) -> bool:
        """Whether a state leads to an end without a product on any way, in or behind its loop."""
        leads = across = 0
        for target in self._targets[slot]:
            if (target in state.targets) == inside:
                leads |= ways.leads[target]
                across |= ways.leads[target] if self._multiplies[target] else ways.across[target]
        return bool(leads & ~across)

    def _holds(self, slot: int) -> bool:
        return "TensorList" in self._ops[slot] or self._is_loop(slot)

    def _is_loop(self, slot: int) -> bool:
        return self._ops[slot] in LOOPS

    def _weights(self, ends: Ends) -> Set[int]:
        """Slots computed from variables and constants only.

        Where no product takes one, as in a frozen graph, from arguments and constants, without
        a product between; all slots where there is only one of these, which is the data.
        """
        made_here = [
            slot
            for slot in self._order
            if not self._sources[slot] and self._ops[slot] not in STORED
        ]
        computed = reach([*ends.inputs, *made_here], self._targets.__getitem__)
        variables = [slot for slot in self._order if self._ops[slot] in _VARIABLES]
        weights = reach(variables, along(lambda s: s not in computed, self._targets))
        products = [slot for slot in self._order if self._colors[slot] == "allow"]
        taken = any(not weights.keys().isdisjoint(self._sources[slot]) for slot in products)
        if taken or self._are_multiplied(variables):
            return weights.keys()
        constants = (slot for slot in self._order if self._ops[slot] in STORED)
        origins = [*filter(self._is_float, ends.inputs), *constants]
        if len(origins) == 1:
            return frozenset(self._order)
        return reach(origins, along(lambda s: not self._multiplies[s], self._targets)).keys()

    def _are_multiplied(self, variables: Iterable[int]) -> bool:
        """Whether a product takes a variable, as it is or cast: also one that is low."""
        index = self._index

        def moved(slot: int) -> Iterable[int]:
            if self._ops[slot] == "Cast":
                slots = index.node_of(slot).slots
                return [target for cast in slots for target in index.fanout[cast]]
            passes_on = self._moves(slot) or self._ops[slot] in _VARIABLES
            return index.fanout[slot] if passes_on else ()

        return any(self._colors[slot] == "allow" for slot in reach(variables, moved))

    def _products_of_gradients(
        self, products: Iterable[int], gradients: Collection[int]
    ) -> Iterable[int]:
        """The products of gradients that are those of some other products.

        These take what the products take, and a gradient that no other product of
        gradients made; in a second derivative others did, but only these take what no
        other product takes.
        """

        def before_moves(slot: int) -> Iterable[int]:
            # Not what a ReluGrad compares with zero.
            is_moved = self._moves(slot) and "Grad" not in self._ops[slot]
            return self._sources[slot] if is_moved else ()

        def origins(slot: int) -> Collection[int]:
            return reach(self._sources[slot], before_moves).keys()

        taken = {origin for slot in products for origin in origins(slot)}
        if not taken:
            return []
        ours = {*products, *gradients}
        others = (slot for slot in self._order if self._multiplies[slot] and slot not in ours)
        taken_alone = taken.difference(*map(origins, others))
        theirs: Ordered = {}
        apart = set[int]()  # Behind other products of gradients.
        for _ in self._walks(apart):
            theirs.clear()
            for slot in self._order:
                is_apart = not apart.isdisjoint(self._sources[slot])
                if self._multiplies[slot] and slot in gradients:
                    ends = taken_alone if is_apart else taken
                    is_theirs = not ends.isdisjoint(origins(slot))
                    if is_theirs and self._colors[slot] == "allow":
                        theirs[slot] = None
                    is_apart = not is_theirs
                if is_apart:
                    apart.add(slot)
        return theirs

    def gradients(self, scalars: Iterable[int]) -> Collection[int]:
        """Slots computed by the products of gradients, which round their results.

        Such a product has an operand that comes from behind a scalar, and another one that
        leads to the scalar through a product; it does not lead there itself.
        """
        # The loss is the only scalar of this graph, so masks are 0 or 1; y and dw are products:
        #
        #     h ---> y = h @ w ---> square ---> loss            leads  across  last  behind
        #     |      |                                  h         1      1      0      0
        #     |      +---> dy = 2 * y ---+              y         1      0      1      0
        #     |                          |              loss      1      0      1      1
        #     +------------------------> dw = h.T @ dy  dy        0      0      0      1
        #                                               dw        0      0      0      1
        #
        # dw takes dy, which is behind the loss, and h, which leads to the loss across y; y
        # takes nothing from behind it.
        ways = self._ways(scalars, (), self._multiplies)
        # For each slot the mask of the scalars from whose last part it is computed.
        behind = [0] * len(self._ops)
        of_gradients: set[int] = set()
        changed = True
        while changed:
            before = [*behind, len(of_gradients)]
            for slot in self._order:
                sources = self._sources[slot]
                for source in sources:
                    behind[slot] |= behind[source] | ways.last[source]
                is_product = self._multiplies[slot] and self._takes_both(slot, behind, ways)
                if is_product or not of_gradients.isdisjoint(sources):
                    of_gradients.add(slot)
            changed = self._has_loops and before != [*behind, len(of_gradients)]
        return of_gradients

    def _takes_both(self, slot: int, behind: Sequence[int], ways: _Ways) -> bool:
        """Whether a slot behind a scalar takes what leads to this across a product, too."""
        across = 0
        for source in self._sources[slot]:
            across |= ways.across[source]
        return bool(behind[slot] & across & ~ways.leads[slot])

    def _ways(
        self, ends: Iterable[int], without: Collection[int], crosses: Sequence[bool]
    ) -> _Ways:
        """The ends that each slot leads to, outside of some slots and across some products."""
        end_bits = {slot: 1 << number for number, slot in enumerate(dict.fromkeys(ends))}
        leads, across = [0] * len(self._ops), [0] * len(self._ops)
        changed = True
        while changed:
            changed = False
            for slot in reversed(self._order):
                if slot in without:
                    continue
                slot_leads, slot_across = end_bits.get(slot, 0), 0
                for target in self._targets[slot]:
                    slot_leads |= leads[target]
                    # Whatever a product leads to is across it for its operands.
                    slot_across |= leads[target] if crosses[target] else across[target]
                changed |= (slot_leads, slot_across) != (leads[slot], across[slot])
                leads[slot], across[slot] = slot_leads, slot_across
            changed &= self._has_loops  # Without them one walk back is enough.
        last = [on_any & ~on_some for on_any, on_some in zip(leads, across, strict=True)]
        return _Ways(leads, across, last)
