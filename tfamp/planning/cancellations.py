"""Finds logarithms, roots and quotients of what rounding makes zero or negative; framework-free.

`log(1 - p)` is infinite where a low `p` rounds to one, `sqrt(mean(h * h) - mean(h) ** 2)` is NaN
where the difference of two rounded values is negative, and in float16 `p` itself rounds to zero.
Squares and exponentials end the search: they are not negative, and round to zero as they should.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Set

from tfamp.planning.coloring import REDUCTIONS
from tfamp.planning.scalings import QUOTIENTS
from tfamp.planning.structures import along, op_types, reach
from tfamp.planning.value_flow import ValueFlow

# What these take must not become zero or negative; of a quotient and a power one input.
_SINGULAR = op_types("Inv Log Reciprocal Rsqrt RsqrtGrad Sqrt")
_ONE_INPUT = dict.fromkeys(QUOTIENTS | {"Xdivy", "Xlog1py", "Xlogy"}, 1) | {"Pow": 0}
# These take one more than what must not become zero.
_OF_ONE_MORE = op_types("Log1p Xlog1py")
_DIFFERENCES = op_types("Neg Sub")
_PROBABILITIES = op_types("Sigmoid Softmax")
# Not negative by themselves.
_POSITIVE = op_types("Exp Softplus Square SquaredDifference")
# The rounding errors of what these take are as small in their results.
_BOUNDED = op_types("Erf Exp Sigmoid Softmax Softsign Tanh")
# Ops by which the rounding error of a product gets into a difference as it is.
_PASSING_ON = op_types("""
    Add AddN AddV2 BiasAdd ConcatV2 ExpandDims Identity MatrixDiagPartV3 Mul Neg Pow Reshape Slice
    Square Squeeze StridedSlice Sub Transpose
""")


def is_square(flow: ValueFlow, slot: int) -> bool:
    """Whether a slot is of the product of a tensor with itself, element by element."""
    op = flow.ops[slot]
    if op == "Mul":
        return takes_one_tensor(flow, slot)
    if op == "Pow":
        return _exponent(flow, slot) == 2
    return op in ("Square", "SquaredDifference")


def takes_one_tensor(flow: ValueFlow, slot: int) -> bool:
    """Whether all inputs of a slot's node are the same tensor."""
    edges = flow.index.inputs[flow.index.slots[slot].node]
    return len({(edge.source, edge.port) for edge in edges}) == 1


def cancelling(flow: ValueFlow, left_out: Set[int], exact: Set[int], dtype: str) -> Iterable[int]:
    """Finds what singular functions take, from the last products on, and what they lead to.

    Args:
        flow: The flow of a graph's values.
        left_out: Slots that do not count as singular functions, nor lead to them.
        exact: Slots that do not count as differences and probabilities.
        dtype: The low dtype.
    """
    singular = {root: taken for root, taken in _taken(flow) if root not in left_out}

    def may_cancel(slot: int) -> Iterable[int]:
        """Returns the operands of a slot, unless nothing like zero can come of them."""
        ends = slot in left_out or flow.ops[slot] in _POSITIVE | _PROBABILITIES
        return () if ends or is_square(flow, slot) else flow.operands_across(slot)

    def unless_added(slot: int) -> Iterable[int]:
        return () if flow.ops[slot] in REDUCTIONS else may_cancel(slot)

    def taken_by(roots: Iterable[int]) -> Iterable[int]:
        return (slot for root in roots for slot in singular[root])

    before = reach(taken_by(singular), may_cancel)
    found = [slot for slot in before if flow.ops[slot] in _DIFFERENCES]
    # A probability rounds to zero in float16 only; sums by which others are divided do not.
    rounding = [s for s in singular if dtype == "float16" or flow.ops[s] in _OF_ONE_MORE]
    single = {
        **reach(taken_by(s for s in rounding if flow.ops[s] in QUOTIENTS), unless_added),
        **reach(taken_by(s for s in rounding if flow.ops[s] not in QUOTIENTS), may_cancel),
    }
    found += (slot for slot in single if flow.ops[slot] in _PROBABILITIES)
    origins = [slot for slot in found if slot not in exact]
    between = _ways_from(origins, before, may_cancel)
    roots = [root for root, taken in singular.items() if not between.isdisjoint(taken)]
    products = _products_of_differences(flow, origins)
    starts = [*origins, *(s for product in products for s in flow.sources[product])]
    kept = {*reach(starts, lambda slot: _exact_operands(flow, slot)), *between, *roots}
    made = (slot for slot in flow.order if slot in kept and not flow.multiplies[slot])
    gradients = _gradients_of(flow, products, roots)
    return [*products, *made, *gradients, *_behind(flow, roots, kept, dtype)]


def _ways_from(
    origins: Iterable[int], before: Iterable[int], operands: Callable[[int], Iterable[int]]
) -> Set[int]:
    """Those of the slots of a walk back that some slots lead to, by the steps of this walk."""
    targets: dict[int, list[int]] = {}
    for slot in before:
        for source in operands(slot):
            targets.setdefault(source, []).append(slot)
    return reach(origins, lambda slot: targets.get(slot, ())).keys()


def _taken(flow: ValueFlow) -> Iterator[tuple[int, Iterable[int]]]:
    """The slots of singular functions, with the slots of what must not become zero."""
    index = flow.index
    for slot in flow.order:
        op = flow.ops[slot]
        if op in _SINGULAR or op == "Log1p":
            yield slot, flow.sources[slot]
        elif op in _ONE_INPUT and (op != "Pow" or not _is_whole_power(flow, slot)):
            edges = index.inputs[index.slots[slot].node]
            taken = (edge.source for edge in edges if edge.input == _ONE_INPUT[op])
            yield slot, list(filter(flow.is_float, taken))


def _is_whole_power(flow: ValueFlow, slot: int) -> bool:
    """Whether a power is known to be one of 0, 1, 2 and so on."""
    exponent = _exponent(flow, slot)
    return exponent is not None and exponent >= 0 and exponent % 1 == 0


def _exponent(flow: ValueFlow, slot: int) -> float | None:
    """The exponent of a Pow, if it is a constant, or one less, as in its gradient; else None."""
    index, subtracted = flow.index, 0.0
    node = index.slots[index.inputs[index.slots[slot].node][1].source].node
    while index.nodes[node].op == "Sub":
        node, one = (index.slots[edge.source].node for edge in index.inputs[node])
        subtracted += index.largest.get(one, math.nan)
    exponent = index.largest.get(node, math.nan) - subtracted
    return None if math.isnan(exponent) else exponent


def _exact_operands(flow: ValueFlow, slot: int) -> Iterable[int]:
    return () if flow.ops[slot] in _BOUNDED else flow.operands_across(slot)


def _products_of_differences(flow: ValueFlow, origins: Iterable[int]) -> list[int]:
    """Products that differences take as they are: one minus a cosine, variances of a window."""

    def passed_on(slot: int) -> Iterable[int]:
        return flow.operands_across(slot) if flow.ops[slot] in _PASSING_ON else ()

    differences = (slot for slot in origins if flow.ops[slot] in _DIFFERENCES)
    return list(filter(flow.is_product, reach(differences, passed_on)))


def _gradients_of(flow: ValueFlow, products: Iterable[int], roots: Iterable[int]) -> Iterable[int]:
    """Products of the gradients of products that a difference takes, and what adds these up.

    They cancel as the products do: a distance by a Gram matrix from squares and products has a
    gradient by both.
    """
    operands = {source for product in products for source in flow.sources[product]}
    if not operands:
        return []

    def added(slot: int) -> Iterable[int]:
        return (target for target in flow.targets[slot] if not flow.multiplies[target])

    behind = reach(roots, added)
    users = dict.fromkeys(target for slot in behind for target in flow.targets[slot])
    found = [u for u in users if flow.is_product(u) and not operands.isdisjoint(flow.sources[u])]
    return reach(found, added)


def _behind(flow: ValueFlow, roots: Iterable[int], kept: Set[int], dtype: str) -> Collection[int]:
    """Slots that take the results of some singular functions, up to a product.

    These results may be beyond the range of float16. In bfloat16 only the last ops of their
    gradients, which take what they took, need its digits.
    """

    def enters(slot: int) -> bool:
        return not flow.multiplies[slot]

    def next_to(slot: int) -> Iterable[int]:
        return () if flow.ops[slot] in _BOUNDED else filter(enters, flow.targets[slot])

    behind = reach(roots, next_to)
    if dtype == "float16":
        return behind
    taking = (s for s in behind if s in roots or not kept.isdisjoint(flow.sources[s]))
    return reach(taking, along(behind.__contains__, flow.sources))
