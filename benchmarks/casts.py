"""Counts the Casts between float dtypes in a step that ran, and the bytes they move."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from benchmarks.step_graph import Node
from benchmarks.widths import WIDTHS, is_float


@dataclass(frozen=True)
class CastTotals:
    """The Casts of a step.

    Attributes:
        count: How many ran; one in a loop counts each time.
        bytes: Bytes they read and wrote.
    """

    count: int
    bytes: int


def count_casts(nodes: Iterable[Node]) -> CastTotals:
    """Counts the Casts from a float dtype to another; others are no matter of precision."""
    count = size = 0
    for node in nodes:
        ends = [each for each in (*node.inputs[:1], *node.outputs[:1]) if each is not None]
        if node.op == "Cast" and len(ends) == 2 and all(is_float(each.dtype) for each in ends):
            count += node.count
            size += node.count * sum(math.prod(each.shape) * WIDTHS[each.dtype] for each in ends)
    return CastTotals(count, size)
