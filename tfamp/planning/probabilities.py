"""Finds products whose log-probabilities are subtracted from one another; framework-free.

Two models that hardly differ, or one before and after a step, give log-probabilities whose
difference is smaller than the rounding errors of either: KL divergences, DPO, PPO's ratios.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Iterator, Sequence, Set

from tfamp.planning.coloring import REDUCTIONS
from tfamp.planning.op_sets import CROSS_ENTROPIES
from tfamp.planning.structures import op_types
from tfamp.planning.value_flow import ValueFlow

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
