"""Finds kinds of values by origin: data, weights, gradients, probabilities; framework-free."""

from __future__ import annotations

import functools
import operator
from collections.abc import Collection, Iterable, Iterator, Sequence, Set
from typing import NamedTuple

from tfamp.planning.coloring import REDUCTIONS
from tfamp.planning.op_sets import CROSS_ENTROPIES, STORED
from tfamp.planning.structures import FLOAT32, Ordered, along, op_types, reach
from tfamp.planning.value_flow import ValueFlow, Ways

_VARIABLES = op_types("ReadVariableOp Variable VariableV2")

# ---- Given values ----------------------------------------------------------------------


class Given(NamedTuple):
    """Slots of values that no product made.

    Attributes:
        data: Inputs, also moved, and what is computed from data and stored values.
        stored: Variables and constants, and what is computed from these only.
    """

    data: frozenset[int]
    stored: frozenset[int]


def given_values(flow: ValueFlow, inputs: Iterable[int]) -> Given:
    """Finds the data of a graph, and its stored values.

    Args:
        flow: The flow of its values.
        inputs: Slots of what comes from outside, of any dtype.
    """
    slots, data = flow.index.slots, set(inputs)
    is_integer = [slot.dtype.startswith(("int", "uint")) for slot in slots]
    # Sizes of tensors do not count: they are in another slot of a Shape.
    integers = reach(
        (slot for slot in data if is_integer[slot]),
        along(is_integer.__getitem__, flow.index.fanout),
    )
    for slot in integers:
        if flow.ops[slot] == "Cast":
            data.update(flow.index.node_of(slot).slots)
    stored: set[int] = set()
    for _ in flow.walks(data, stored):
        for slot in flow.order:
            sources = [source for source in flow.sources[slot] if source != slot]
            if slot in data or flow.multiplies[slot]:
                continue
            if data.isdisjoint(sources):
                if stored.issuperset(sources):
                    stored.add(slot)
            elif flow.moves(slot) or all(s in data or s in stored for s in sources):
                data.add(slot)
    float_data = (slot for slot in data if slots[slot].dtype == FLOAT32)
    return Given(frozenset(float_data), frozenset(stored))


# ---- Weights ---------------------------------------------------------------------------


def weights_of(flow: ValueFlow, inputs: Iterable[int]) -> Set[int]:
    """Finds the slots computed from variables and constants only.

    Where no product takes one, as in a frozen graph, from arguments and constants, without
    a product between; all slots where there is only one of these, which is the data.

    Args:
        flow: The flow of a graph's values.
        inputs: Slots of what comes from outside, of any dtype.
    """
    inputs = list(inputs)
    made_here = [
        slot for slot in flow.order if not flow.sources[slot] and flow.ops[slot] not in STORED
    ]
    computed = reach([*inputs, *made_here], flow.targets.__getitem__)
    variables = [slot for slot in flow.order if flow.ops[slot] in _VARIABLES]
    weights = reach(variables, along(lambda s: s not in computed, flow.targets))
    products = filter(flow.is_product, flow.order)
    taken = any(not weights.keys().isdisjoint(flow.sources[slot]) for slot in products)
    if taken or _are_multiplied(flow, variables):
        return weights.keys()
    constants = (slot for slot in flow.order if flow.ops[slot] in STORED)
    origins = [*filter(flow.is_float, inputs), *constants]
    if len(origins) == 1:
        return frozenset(flow.order)
    return reach(origins, along(lambda s: not flow.multiplies[s], flow.targets)).keys()


def _are_multiplied(flow: ValueFlow, variables: Iterable[int]) -> bool:
    """Whether a product takes a variable, as it is or cast: also one that is low."""
    index = flow.index

    def moved(slot: int) -> Iterable[int]:
        if flow.ops[slot] == "Cast":
            return [target for cast in index.node_of(slot).slots for target in index.fanout[cast]]
        passes_on = flow.moves(slot) or flow.ops[slot] in _VARIABLES
        return index.fanout[slot] if passes_on else ()

    return any(map(flow.is_product, reach(variables, moved)))


# ---- Gradients -------------------------------------------------------------------------


def gradients_of(flow: ValueFlow, scalars: Iterable[int]) -> Collection[int]:
    """Finds the slots computed by the products of gradients, which round their results.

    Such a product has an operand that comes from behind a scalar, and another one that
    leads to the scalar through a product; it does not lead there itself.

    Args:
        flow: The flow of a graph's values.
        scalars: What may be differentiated.
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
    ways = flow.ways(scalars, (), flow.multiplies)
    # For each slot the mask of the scalars from whose last part it is computed.
    behind = [0] * len(flow.ops)
    of_gradients: set[int] = set()
    changed = True
    while changed:
        before = [*behind, len(of_gradients)]
        for slot in flow.order:
            sources = flow.sources[slot]
            for source in sources:
                behind[slot] |= behind[source] | ways.last[source]
            is_product = flow.multiplies[slot] and _takes_both(flow, slot, behind, ways)
            if is_product or not of_gradients.isdisjoint(sources):
                of_gradients.add(slot)
        changed = flow.has_loops and before != [*behind, len(of_gradients)]
    return of_gradients


def _takes_both(flow: ValueFlow, slot: int, behind: Sequence[int], ways: Ways) -> bool:
    """Whether a slot behind a scalar takes what leads to this across a product, too."""
    across = 0
    for source in flow.sources[slot]:
        across |= ways.across[source]
    return bool(behind[slot] & across & ~ways.leads[slot])


def products_of_gradients(
    flow: ValueFlow, products: Iterable[int], gradients: Collection[int]
) -> Iterable[int]:
    """Finds the products of gradients that are those of some other products.

    These take what the products take, and a gradient that no other product of
    gradients made; in a second derivative others did, but only these take what no
    other product takes.

    Args:
        flow: The flow of a graph's values.
        products: The other products.
        gradients: What the products of gradients compute.
    """

    def before_moves(slot: int) -> Iterable[int]:
        # Not what a ReluGrad compares with zero.
        is_moved = flow.moves(slot) and "Grad" not in flow.ops[slot]
        return flow.sources[slot] if is_moved else ()

    def origins(slot: int) -> Collection[int]:
        return reach(flow.sources[slot], before_moves).keys()

    taken = {origin for slot in products for origin in origins(slot)}
    if not taken:
        return []
    ours = {*products, *gradients}
    others = (slot for slot in flow.order if flow.multiplies[slot] and slot not in ours)
    taken_alone = taken.difference(*map(origins, others))
    theirs: Ordered = {}
    apart = set[int]()  # Behind other products of gradients.
    for _ in flow.walks(apart):
        theirs.clear()
        for slot in flow.order:
            is_apart = not apart.isdisjoint(flow.sources[slot])
            if flow.multiplies[slot] and slot in gradients:
                ends = taken_alone if is_apart else taken
                is_theirs = not ends.isdisjoint(origins(slot))
                if is_theirs and flow.is_product(slot):
                    theirs[slot] = None
                is_apart = not is_theirs
            if is_apart:
                apart.add(slot)
    return theirs


# ---- Probabilities ---------------------------------------------------------------------

# Two models that hardly differ, or one before and after a step, give log-probabilities whose
# difference is smaller than the rounding errors of either: KL divergences, DPO, PPO's ratios.
_LOGS = CROSS_ENTROPIES | op_types("Log Log1p LogSoftmax Softplus Xlog1py Xlogy")
_PROBABILITIES = op_types("Exp Sigmoid Softmax")
DIFFERENCES = op_types("SquaredDifference Sub")
_QUOTIENTS = op_types("Div DivNoNan RealDiv Xdivy")
# Their results are log-probabilities times -1, or what they take times -1.
_NEGATIVE = CROSS_ENTROPIES | op_types("Neg Softplus")
# Ops by which log-probabilities are chosen, weighted and added up.
_TERMS = REDUCTIONS | DIFFERENCES | _QUOTIENTS
_TERMS |= op_types("Add AddN AddV2 ClipByValue Maximum Minimum Mul MulNoNan Select SelectV2")

_all = functools.partial(functools.reduce, operator.or_)


class Probabilities:
    """The flow of probabilities, and of their logarithms, from products to differences.

    Args:
        flow: The flow of all values.
    """

    def __init__(self, flow: ValueFlow) -> None:
        self._flow = flow
        self._products = [slot for slot in flow.order if flow.multiplies[slot]]
        # For each slot a mask of the last products before it: bit n stands for the n-th one.
        self._made = [0] * len(flow.ops)
        bits = {slot: 1 << number for number, slot in enumerate(self._products)}
        for slot in flow.order:
            made = (self._made[source] for source in flow.sources[slot])
            self._made[slot] = bits[slot] if slot in bits else _all(made, 0)

    def compared_products(self, within: Set[int]) -> Iterable[int]:
        """The last products of both sides of differences, and of quotients, of probabilities.

        Both sides have the same sign, so that they cancel, and are not made by the same
        products, as a cross-entropy and the entropy of one prediction are.

        Args:
            within: The slots of the differences.
        """
        flow, found = self._flow, 0
        for ops, ends in ((DIFFERENCES, _LOGS), (_QUOTIENTS, _PROBABILITIES)):
            comparing = [slot for slot in flow.order if slot in within and flow.ops[slot] in ops]
            signed = self._signed(ends) if comparing else []
            for slot in comparing:
                for sides in zip(*(signed[source] for source in flow.sources[slot]), strict=True):
                    if len(sides) == 2 and all(sides) and sides[0] != sides[1]:
                        found |= sides[0] | sides[1]
        return (slot for number, slot in enumerate(self._products) if found >> number & 1)

    def _signed(self, ends: Set[str]) -> Sequence[tuple[int, int]]:
        """For each slot the products whose probabilities it adds, and those it subtracts.

        Args:
            ends: The ops that compute these probabilities, or their logarithms.
        """
        flow = self._flow
        signed = [(0, 0)] * len(flow.ops)
        for slot in flow.order:
            op = flow.ops[slot]
            if op in ends:
                plus, minus = self._made[slot], 0
            elif op in _TERMS or flow.moves(slot):
                plus, minus = map(_all, self._sides(slot, signed), (0, 0))
            else:
                continue
            if op in DIFFERENCES:
                plus = minus = plus | minus
            signed[slot] = (minus, plus) if op in _NEGATIVE else (plus, minus)
        return signed

    def _sides(self, slot: int, signed: Sequence[tuple[int, int]]) -> Iterator[Iterable[int]]:
        for side in (0, 1):
            yield [signed[source][side] for source in self._flow.sources[slot]]
