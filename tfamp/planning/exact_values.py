"""Selects slots that stay float32 for the values they hold, whatever their ops; framework-free.

Each rule is a function here, named and ordered as the lines of the table in
`docs/explanation/rewrite.md`; `loop_states` has the rule of states, `scalings` that of compilers,
and `normalizations` finds others. All rules go by structure and none by names: they read the
`ValueFlow` of the graph and `ends`, which finds where a graph begins and ends. A product is an op
of the allow list. The selected slots stay as they are and the passes work around them; unlike a
denied op, they do not make the nodes behind them float32.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass

from tfamp.core.dtypes import float_format
from tfamp.planning.cancellations import cancelling, is_square, takes_one_tensor
from tfamp.planning.coloring import REDUCTIONS
from tfamp.planning.ends import Ends, LoopVariable
from tfamp.planning.op_sets import CHOICES, DECOMPOSITIONS
from tfamp.planning.scalings import QUOTIENTS
from tfamp.planning.structures import LOOPS, GraphIndex, Reason, along, op_types, reach
from tfamp.planning.value_flow import FRAMES, ValueFlow, Ways, value_flow
from tfamp.planning.value_kinds import (
    DIFFERENCES,
    Given,
    Probabilities,
    given_values,
    gradients_of,
    products_of_gradients,
    weights_of,
)


def exact_slots(
    index: GraphIndex,
    colors: Mapping[str, str],
    ends: Ends,
    normalizing: Collection[int],
    dtype: str,
) -> dict[int, Reason]:
    """Finds the slots that stay float32 for the values they hold, without normalizations.

    Args:
        index: A graph, joined with its loops.
        colors: Color of every op type that is on a list.
        ends: Where its values come from, and where they go.
        normalizing: Nodes of normalizations, about which no rule here decides.
        dtype: The low dtype.

    Returns:
        The slots, with the reason.
    """
    values = _values_of(value_flow(index, colors, ends.across), ends, normalizing, dtype)
    # Of two rules that select a slot the later one here gives the reason.
    before_results = {
        **_losses(values),
        **_results(values),
        **_log_probabilities(values),
        **_comparison(values),
    }
    return {
        **_masks(values),
        **_squares(values),
        **_updates(values),
        **_data(values),
        **_without_idle_holders(values.flow, before_results),
        **_cancellations(values),
        **_decompositions(values),
        **_angles(values),
        **_conditions(values),
    }


def _without_idle_holders(flow: ValueFlow, kept: Mapping[int, Reason]) -> dict[int, Reason]:
    """Leaves out lists and loop variables that hold low values only: these are as exact low."""
    computed = (slot for slot in kept if not flow.moves(slot))
    behind = reach(computed, along(kept.__contains__, flow.targets))
    return {s: reason for s, reason in kept.items() if s in behind or not flow.holds(s)}


# ---- What the rules read ---------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Values:
    """The values of a graph, as the rules read them.

    Attributes:
        flow: Their flow.
        ends: Where they come from, and where they go.
        normalizing: Nodes of normalizations.
        dtype: The low dtype.
        given: Data and stored values.
        gradients: What the products of gradients compute.
        crosses: For each slot whether it is a last product before a loss: one with a weight, or
            of gradients. Those of activations behind it count as parts of the loss.
        of_updates: What leads to updates of weights from the last product or reduction on.
        before_losses: What leads to losses from the last product with a weight on.
        before_returned: What leads to other results from the last product on.
    """

    flow: ValueFlow
    ends: Ends
    normalizing: Collection[int]
    dtype: str
    given: Given
    gradients: Collection[int]
    crosses: Sequence[bool]
    of_updates: Collection[int]
    before_losses: Set[int]
    before_returned: Collection[int]

    def is_before_result(self, slot: int) -> bool:
        """Whether a slot leads to a loss or another result, from the last product on."""
        return slot in self.before_losses or slot in self.before_returned


def _values_of(flow: ValueFlow, ends: Ends, normalizing: Collection[int], dtype: str) -> _Values:
    scalars = [*ends.scalars, *ends.unused]
    gradients = gradients_of(flow, scalars)
    weights = weights_of(flow, ends.inputs)
    crosses = [
        multiplies and (slot in gradients or not weights.isdisjoint(flow.sources[slot]))
        for slot, multiplies in enumerate(flow.multiplies)
    ]
    losses = [slot for slot in scalars if slot not in gradients]
    others = [slot for slot in ends.results if slot not in gradients]
    others += (slot for slot in ends.scalars if slot in gradients)  # Norms of gradients.
    # Updates of weights have their own rule, back to the last reduction.
    returned = [slot for slot in ends.results if slot in gradients]
    of_updates = flow.last_parts([*ends.stored, *returned])
    last = flow.ways(losses, of_updates, crosses).last
    # What a loop takes that reads variables counts as stored, but may be its state.
    stored = (s for s in ends.stored if not any(map(flow.is_loop, flow.targets[s])))
    apart = flow.last_parts([*stored, *returned])
    return _Values(
        flow=flow,
        ends=ends,
        normalizing=normalizing,
        dtype=dtype,
        given=given_values(flow, ends.inputs),
        gradients=gradients,
        crosses=crosses,
        of_updates=of_updates,
        before_losses={slot for slot in flow.order if last[slot]},
        before_returned=_before_returned(flow, others, apart, ends.states),
    )


def _before_returned(
    flow: ValueFlow,
    ends: Iterable[int],
    without: Collection[int],
    states: Mapping[int, LoopVariable],
) -> Collection[int]:
    """Slots that lead to some ends without a product between, in the last iteration of loops.

    The last product of one end may be an early one of another: each end counts by itself. The
    state of a loop leads to the products of the next iteration, and the last has none.
    """
    slots, roots = flow.index.slots, list(ends)
    before, returned, loops = set[int](), dict[int, None](), set[int]()
    while roots:
        # The last iteration of a loop is a graph of its own: no values go on to the next.
        apart = {slot for slot in states if slots[slot].node in loops}
        ways = flow.ways(roots, apart.union(without), flow.multiplies)
        before.update(slot for slot in flow.order if ways.last[slot])
        found = [
            slot
            for slot, state in states.items()
            if flow.is_float(slot) and slot not in returned
            if slot in roots or _leads_on(flow, slot, state, slot in apart, ways)
        ]
        returned.update(dict.fromkeys(found))
        loops.update(slots[slot].node for slot in found)
        roots = [source for slot in found for source in states[slot].sources]
    return {*before, *returned}


def _leads_on(flow: ValueFlow, slot: int, state: LoopVariable, inside: bool, ways: Ways) -> bool:
    """Whether a state leads to an end without a product on any way, in or behind its loop."""
    leads = across = 0
    for target in flow.targets[slot]:
        if (target in state.targets) == inside:
            leads |= ways.leads[target]
            across |= ways.leads[target] if flow.multiplies[target] else ways.across[target]
    return bool(leads & ~across)


# ---- results ---------------------------------------------------------------------------

_ON_THE_WAY = Reason("result", "it leads from the last product to a result of the function")


def _results(values: _Values) -> dict[int, Reason]:
    """Slots from the last product to a result of the function, also through states of loops.

    Probabilities sum to 1, also those that are the state of a loop.
    """
    flow, before = values.flow, values.before_returned
    slots = (slot for slot in flow.order if slot in before and flow.may_stay(slot))
    return dict.fromkeys(slots, _ON_THE_WAY)


# ---- losses ----------------------------------------------------------------------------

_BEHIND_WEIGHTS = Reason("result", "it multiplies activations, behind the last weight of a result")
_CANCELS = Reason("result", "the gradient of a result is added up here, and may cancel")
_SUMS_OF_GRADIENTS = op_types("Add AddN AddV2 Sub")


def _losses(values: _Values) -> dict[int, Reason]:
    """Slots from the last product with a weight to a scalar, products of activations included.

    A scalar is differentiated, stored or returned. Products of activations in between, as in a
    Gram matrix, and those of their gradients, are float32 too. So are sums of a loss's gradient
    before its first product: there large numbers may cancel, as 1 - 2 * sigmoid(-2 * x).
    """
    flow = values.flow
    before = [slot for slot in flow.order if slot in values.before_losses]
    products = [slot for slot in before if flow.is_product(slot) and not values.crosses[slot]]
    of_gradients = products_of_gradients(flow, products, values.gradients)
    return {
        **dict.fromkeys(_sums_of_gradients(values), _CANCELS),
        **dict.fromkeys([*of_gradients, *products], _BEHIND_WEIGHTS),
        **dict.fromkeys(filter(flow.may_stay, before), _ON_THE_WAY),
    }


def _sums_of_gradients(values: _Values) -> Iterable[int]:
    """Sums of the gradients of losses, and what leads there, up to the first products."""
    flow, before = values.flow, values.before_losses

    def goes_on(slot: int) -> bool:
        return not flow.multiplies[slot] and slot not in before and slot not in values.gradients

    behind = reach(
        (t for slot in before for t in flow.targets[slot] if goes_on(t)),
        along(goes_on, flow.targets),
    )
    sums = (slot for slot in behind if flow.ops[slot] in _SUMS_OF_GRADIENTS)
    return filter(flow.may_stay, reach(sums, along(behind.__contains__, flow.sources)))


# ---- comparison ------------------------------------------------------------------------

_COMPARED = Reason("result", "its results are compared with given data")


def _comparison(values: _Values) -> dict[int, Reason]:
    """The last products before differences of predictions and given data.

    They stay float32, as the output layer does under a policy.
    """
    flow, data = values.flow, values.given.data
    differences = (
        slot
        for slot in flow.order
        if flow.ops[slot] in DIFFERENCES and not data.isdisjoint(flow.sources[slot])
        if values.is_before_result(slot) and flow.may_stay(slot)
    )
    makers = reach(differences, flow.operands)
    return dict.fromkeys(_last_products(values, makers), _COMPARED)


def _last_products(values: _Values, slots: Iterable[int]) -> Iterable[int]:
    """Those of some slots that are products before results, and not of updates."""
    return (
        slot
        for slot in filter(values.flow.is_product, slots)
        if values.is_before_result(slot) and slot not in values.of_updates
    )


# ---- log-probabilities -----------------------------------------------------------------

_SUBTRACTED = Reason("result", "its log-probabilities are compared with those of another product")


def _log_probabilities(values: _Values) -> dict[int, Reason]:
    """The last products whose log-probabilities are subtracted from one another."""
    within = {slot for slot in values.flow.order if values.is_before_result(slot)}
    products = Probabilities(values.flow).compared_products(within)
    return dict.fromkeys(_last_products(values, products), _SUBTRACTED)


# ---- updates, in float16 ---------------------------------------------------------------

_UPDATE = Reason("update", "it leads from the last product of a gradient to where this is used")
_FINITE = op_types("IsFinite IsInf IsNan")


def _updates(values: _Values) -> dict[int, Reason]:
    """Slots between the last products, or sums, of gradients and what uses these.

    Divided by a loss scale a gradient may exceed float16's range.
    """
    if values.dtype != "float16":
        return {}
    flow, ends, gradients = values.flow, values.ends, values.gradients
    checks = (slot for slot in flow.order if flow.ops[slot] in _FINITE)
    roots = (s for s in [*ends.stored, *ends.results, *checks] if s in gradients)
    parts = (s for s in flow.last_parts(roots) if flow.ops[s] not in REDUCTIONS)
    return {s: _UPDATE for s in parts if s in gradients and flow.may_stay(s)}


# ---- data ------------------------------------------------------------------------------

_FROM_DATA = Reason("data", "it computes with given data, which only products round")
_SOFTMAXES = op_types("Exp LogSoftmax Softmax")
_ADDITIONS = op_types("Add AddV2 BiasAdd Sub")


def _data(values: _Values) -> dict[int, Reason]:
    """Slots of arithmetic on input data, and ops that move the data there, up to a softmax.

    Data is rounded only as an operand of a product. What is added on the way to a softmax may be
    a mask, or distances, that is stored.
    """
    flow, (data, stored) = values.flow, values.given
    arithmetic = [
        slot
        for slot in flow.order
        if not flow.multiplies[slot]
        and not flow.moves(slot)
        and any(source in data for source in flow.sources[slot])
    ]
    moved = reach(arithmetic, along(lambda s: s in data and flow.moves(s), flow.sources))
    softmaxes = [slot for slot in flow.order if flow.ops[slot] in _SOFTMAXES]
    leading = reach(softmaxes, along(lambda s: not flow.multiplies[s], flow.sources))
    mixing = [slot for slot in arithmetic if slot not in data and slot in leading]
    mixing += (slot for slot in flow.order if slot in leading and _adds(flow, slot, stored))
    masked = reach(mixing, along(leading.__contains__, flow.targets))
    return dict.fromkeys(filter(flow.may_stay, [*moved, *masked]), _FROM_DATA)


def _adds(flow: ValueFlow, slot: int, stored: frozenset[int]) -> bool:
    """Whether a slot adds what is stored to other values, numbers and biases left out."""
    sources = flow.sources[slot]
    if flow.ops[slot] not in _ADDITIONS or stored.issuperset(sources):
        return False
    return any(source in stored and _rank(flow.index, source) > 1 for source in sources)


def _rank(index: GraphIndex, slot: int) -> float:
    """How many axes what is stored has; infinity where that is not known."""
    shape = index.shapes.get((index.slots[slot].node, 0))
    return math.inf if shape is None else len(shape)


# ---- angles, indices -------------------------------------------------------------------

_TURNED = Reason("angle", "it becomes an angle or an index, which rounding errors change")
# Periodic functions and roundings; Casts to integers are others.
_TURNING = op_types("""
    Bucketize Ceil Cos Floor FloorDiv FloorMod LowerBound Mod Rint Round Sin Tan TruncateMod
    UpperBound
""")
# Of a complex number these turn by its imaginary part.
_TURNING_COMPLEX = op_types("Cos Cosh Exp Sin Sinh")


def _angles(values: _Values) -> dict[int, Reason]:
    """Slots from the last products before angles and indices on, products included.

    An error of a thousandth of 1,000 turns an angle by a sixth, and an index becomes another one.
    """
    flow = values.flow
    index = flow.index
    roots = [slot for slot in flow.order if flow.ops[slot] in _TURNING]
    for node in index.nodes:
        dtypes = {index.slots[slot].dtype for slot in node.slots}
        if node.op == "Cast" and any("int" in dtype for dtype in dtypes):
            operands = (s for s in node.slots if index.slots[s].attr == "SrcT")
            roots += filter(flow.is_float, operands)
    before = reach([*roots, *_parts_of_complex_angles(flow)], flow.operands_across)
    return dict.fromkeys(_with_operands(values, before), _TURNED)


def _parts_of_complex_angles(flow: ValueFlow) -> Iterable[int]:
    """The float slots of the complex numbers of which a sine or an exponential is taken."""
    slots = flow.index.slots

    def is_complex(slot: int) -> bool:
        return slots[slot].dtype.startswith("complex")

    def made_from(slot: int) -> Iterable[int]:
        if flow.ops[slot] in ("Cast", "Complex"):
            return (part for part in flow.index.node_of(slot).slots if part != slot)
        return (*flow.across.get(slot, ()), *flow.index.fanin[slot])

    turning = (slot for slot, op in enumerate(flow.ops) if op in _TURNING_COMPLEX)
    turned = filter(is_complex, turning)
    parts = reach(turned, lambda slot: made_from(slot) if is_complex(slot) else ())
    return filter(flow.is_float, parts)


def _with_operands(values: _Values, before: Iterable[int]) -> Iterable[int]:
    """Those of some slots that can be kept, with what products among them take.

    With this as far as it is known before any product: in float32 it has all its digits.
    """
    flow = values.flow
    kept = dict.fromkeys(s for s in before if flow.is_product(s) or flow.may_stay(s))
    taken = (s for slot in kept if flow.multiplies[slot] for s in flow.sources[slot])
    known = values.given.data | values.given.stored | kept.keys()
    roots = [slot for slot in taken if slot in known]
    operands = reach(roots, along(known.__contains__, flow.sources))
    return [*kept, *filter(flow.may_stay, operands)]


# ---- decompositions --------------------------------------------------------------------

_DECOMPOSED = Reason(
    "decomposition", "a decomposition or solver would multiply its rounding errors"
)


def _decompositions(values: _Values) -> dict[int, Reason]:
    """Slots from the last products before decompositions on, these products included.

    A decomposition multiplies rounding errors by a condition number. The product of a matrix
    with itself has this squared, and is not the last.
    """
    flow = values.flow

    def leading(slot: int) -> Iterable[int]:
        squares = flow.is_product(slot) and len(flow.sources[slot]) == 1
        return flow.sources[slot] if squares else flow.operands_across(slot)

    roots = (slot for slot in flow.order if flow.ops[slot] in DECOMPOSITIONS)
    return dict.fromkeys(_with_operands(values, reach(roots, leading)), _DECOMPOSED)


# ---- cancellations ---------------------------------------------------------------------

_CANCELLED = Reason("cancellation", "a logarithm, a root or a quotient takes what rounds to zero")


def _cancellations(values: _Values) -> dict[int, Reason]:
    """Slots from the last products before logarithms, roots and divisors of differences on.

    A probability rounds to one, and a difference of rounded values may be zero or negative.
    """
    flow, given = values.flow, values.given
    # What leads to results is float32 by their rules, and data is not rounded.
    left_out = {
        slot
        for slot in flow.order
        if values.is_before_result(slot) or flow.index.slots[slot].node in values.normalizing
    }
    exact = given.data.union(given.stored, values.gradients)
    slots = cancelling(flow, left_out, exact, values.dtype)
    return {s: _CANCELLED for s in slots if flow.is_product(s) or flow.may_stay(s)}


# ---- conditions ------------------------------------------------------------------------

_CONDITION = Reason("condition", "it decides when a loop ends")
# Ops that look at shapes only.
_SIZES = op_types("Rank Shape ShapeN Size TensorListElementShape TensorListLength")
# Ops that choose indices, such as the next token of a text, which measure no error.
_CHOOSING = op_types("ArgMax ArgMin Multinomial StatelessMultinomial TopK TopKV2")


def _conditions(values: _Values) -> dict[int, Reason]:
    """Slots from the last products before the conditions of loops on, these included.

    Rounded values need not come closer to each other than a tolerance.
    """
    flow = values.flow
    roots = [*values.ends.conditions, *(s for s, op in enumerate(flow.ops) if op == "LoopCond")]
    deciding = reach(roots, lambda slot: _decided_by(flow, slot))
    before = reach(filter(flow.is_float, deciding), flow.operands_across)
    return dict.fromkeys(_with_operands(values, before), _CONDITION)


def _decided_by(flow: ValueFlow, slot: int) -> Iterable[int]:
    """The sources of a slot; of a comparison's result the operands, as other slots."""
    index, op = flow.index, flow.ops[slot]
    if slot in flow.across:
        choosing = (s for s in index.node_of(slot).slots if not _is_of_call(index, s))
        return [*flow.across[slot], *(source for s in choosing for source in index.fanin[s])]
    chooses = op in _CHOOSING and not flow.is_float(slot)
    if flow.multiplies[slot] or op in _SIZES or chooses:
        return ()
    apart = flow.is_float(slot) or op in LOOPS or op in FRAMES or op == "IdentityN"
    taking = (slot,) if apart else index.node_of(slot).slots
    return [source for s in taking for source in index.fanin[s]]


def _is_of_call(index: GraphIndex, slot: int) -> bool:
    """Whether a slot is an argument or a result of a call, and not what chooses a branch."""
    return index.slots[slot].attr in ("Tin", "Tout")


# ---- squares, in float16 ---------------------------------------------------------------

_SQUARED = Reason("square", "it squares values, whose squares may be beyond float16's range")


def _squares(values: _Values) -> dict[int, Reason]:
    """Products of a tensor with itself, element by element, also added up by an Einsum.

    A Square is on no list in float16, and they are the same.
    """
    if values.dtype != "float16":
        return {}
    flow = values.flow
    multiplying = (slot for slot in flow.order if flow.ops[slot] == "Mul" and flow.may_stay(slot))
    squares = [slot for slot in multiplying if is_square(flow, slot)]
    einsums = (slot for slot in flow.order if flow.ops[slot] == "Einsum" and flow.is_product(slot))
    squares += (slot for slot in einsums if _multiplies_itself(flow, slot))
    return dict.fromkeys(squares, _SQUARED)


def _multiplies_itself(flow: ValueFlow, slot: int) -> bool:
    """Whether an Einsum squares the elements of a tensor: its operands have the same axes."""
    axes = flow.index.node_of(slot).equation.split("->")[0].replace(" ", "").split(",")
    return len(axes) > 1 and len(set(axes)) == 1 and takes_one_tensor(flow, slot)


# ---- masks, epsilons -------------------------------------------------------------------

# Ops with bounded results.
_BOUNDED = op_types("Erf Exp Sigmoid Softmax Softsign Tanh")


def _masks(values: _Values) -> dict[int, Reason]:
    """Slots that values beyond the range of a dtype reach, up to a softmax or a product.

    A finite number beyond the range, as -1e9 for masked positions, does not become infinite, nor
    what is divided by 1e-12, and 0.999 does not become one.
    """
    flow = values.flow
    large, lost = _constants_beyond(flow.index, values.dtype)
    counted = _divided_by_counts(flow) if values.dtype == "float16" else {}
    if not large and not lost:
        return counted
    # The slots that such a value reaches. True for those whose values are in range if they
    # are low: `graph.passes` clips constants of choices to the range of the dtype.
    fits = dict.fromkeys([*large, *lost], False)
    # An operand of a product cannot be clipped, nor can it be rounded to zero.
    constants = reach(fits, along(flow.moves, flow.targets)).keys()
    masked: dict[int, Reason] = {}
    for _ in flow.walks(masked, fits):
        for slot in flow.order:
            beyond = [source for source in flow.sources[slot] if source in fits]
            if flow.multiplies[slot]:
                beyond = [s for s in beyond if s in constants and flow.is_product(slot)]
            if not beyond:
                continue
            if not _stays_in_range(flow, slot, beyond, fits, large):
                name = flow.index.node_of(beyond[0]).name
                text = f"a value beyond the range of {values.dtype} gets here from {name}"
                masked[slot] = Reason("mask", text)
            if flow.ops[slot] not in _BOUNDED:
                fits[slot] = slot not in masked
    for slot in reversed(flow.order):
        # Arithmetic behind it would compute with the clipped value.
        behind = next((target for target in flow.targets[slot] if target in masked), None)
        if fits.get(slot) and behind is not None:
            masked[slot] = masked[behind]
    kept = {s: r for s, r in masked.items() if flow.may_stay(s) or flow.is_product(s)}
    return {**counted, **kept}


def _divided_by_counts(flow: ValueFlow) -> dict[int, Reason]:
    """Quotients by integers, which may be beyond float16's range; not by roots of these."""
    index = flow.index

    def moved(slot: int) -> Iterable[int]:
        return flow.sources[slot] if flow.moves(slot) else ()

    def is_count(slot: int) -> bool:
        dtypes = (index.slots[other].dtype for other in index.node_of(slot).slots)
        return flow.ops[slot] == "Cast" and any("int" in dtype for dtype in dtypes)

    kept: dict[int, Reason] = {}
    for slot in flow.order:
        if flow.ops[slot] in QUOTIENTS and flow.may_stay(slot):
            edges = index.inputs[index.slots[slot].node]
            divisors = [edge.source for edge in edges if edge.input == 1]
            counts = filter(is_count, reach(filter(flow.is_float, divisors), moved))
            if (count := next(counts, None)) is not None:
                text = f"the integers of {index.node_of(count).name} may be beyond float16's range"
                kept[slot] = Reason("mask", text)
    return kept


def _stays_in_range(
    flow: ValueFlow,
    slot: int,
    beyond: Sequence[int],
    fits: Mapping[int, bool],
    large: Collection[int],
) -> bool:
    """Whether a slot that takes from slots `beyond` the range stays in it if it is low.

    A choice takes clipped constants; what moves values passes on what fits already.
    """
    if flow.ops[slot] in CHOICES:
        return all(fits[source] or source in large for source in beyond)
    passes_on = flow.moves(slot) or flow.ops[slot] == "Softmax"
    return passes_on and all(fits[source] for source in beyond)


def _constants_beyond(index: GraphIndex, dtype: str) -> tuple[set[int], set[int]]:
    """Slots of constants that become infinite in a dtype, and of those that lose meaning.

    These become one, or their inverses infinite.
    """
    limits = float_format(dtype)
    large, lost = set[int](), set[int]()
    for node, value in index.largest.items():
        slots, size = index.nodes[node].slots, abs(value)
        is_number = not any(_rank(index, slot) for slot in slots)
        next_to_one = 0 < abs(size - 1) < limits.eps / (4 if size < 1 else 2)
        if size > limits.max / 2:  # Two of them may be added.
            large.update(slots)
        elif 0 < size < 1 / limits.max or (is_number and next_to_one):
            lost.update(slots)  # It may be all that is divided by, in a gradient too.
    return large, lost
