"""Selects the nodes that stay float32 because of measured values; framework-free.

`calibration` measures, this module decides. A tensor that exceeds a limit must not exist in low
precision anywhere: rounding it loses digits, or makes it infinite. So its producer and all its
consumers stay float32; with a float32 producer alone, the Cast before a consumer would round.

Only tensors whose dtype would change with the node count. The statistics of a
`FusedBatchNormV3` may have any size: they are float32 in any case.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from tfamp.core.dtypes import float_format
from tfamp.planning.cost import FLOP_FORMULAS, Shape, reduction_depth
from tfamp.planning.kernels import stalling_terms
from tfamp.planning.op_sets import STORED
from tfamp.planning.structures import FLOAT32, GraphIndex, NodeOutput, Reason, op_types, reach

RULE = "calibration"
# Scope, node, output port.
TensorKey: TypeAlias = tuple[str, str, int]

# From 512 on float16's values are 0.5 apart, and unmeasured data may be 128 times as large
# before they overflow; the power of two is a choice. bfloat16 has float32's range.
_DATA_MAX = {"float16": 512.0, "bfloat16": math.inf}
_PASSING_ON = op_types("""
    Enter ExpandDims Identity Reshape Snapshot Squeeze StopGradient Transpose
""")


@dataclass(frozen=True, slots=True)
class Limits:
    """Largest values and deepest sums in low precision; `math.inf` switches a rule off.

    Attributes:
        data_max: Largest magnitude of a value that depends on data, with a margin for
            unmeasured data.
        constant_max: Largest magnitude of a constant or a variable. Stored values are rounded
            once and do not depend on data: no margin.
        sum_depth: Number of values summed for each result, in ops that accumulate in the dtype
            of their tensors, such as Sum and BiasAddGrad.
        matmul_depth: The same for matmuls and convolutions, which accumulate in float32.
    """

    data_max: float
    constant_max: float
    sum_depth: float
    matmul_depth: float

    @staticmethod
    def default(dtype: str) -> Limits:
        """Returns the limits of a dtype.

        `data_max` is 512 for float16, where larger values are at least 0.5 apart and close to
        65504. It is off for bfloat16, which has float32's range. Constants may reach the
        dtype's maximum.

        A sum of equal terms that is accumulated in the dtype stops growing after
        `kernels.stalling_terms`: 2048 in float16, 256 in bfloat16. That is the limit of
        all sums. Those that the table of `planning.kernels` knows to accumulate so are
        float32 from `SAFE_TERMS` on, with and without calibration. Matmuls and
        convolutions have no limit here.

        Args:
            dtype: "float16" or "bfloat16".

        Returns:
            The limits.

        Example:
            >>> Limits.default("float16")
            Limits(data_max=512.0, constant_max=65504.0, sum_depth=2048.0, matmul_depth=inf)
        """
        low = float_format(dtype)
        return Limits(_DATA_MAX[dtype], low.max, stalling_terms(dtype), math.inf)


@dataclass(frozen=True, slots=True)
class TensorRange:
    """Range of a float32 tensor's values.

    Attributes:
        max_abs: Largest magnitude; `math.inf` if a value was infinite. Executions with a
            NaN are left out.
        nonfinite: Whether a value was infinite or NaN.
        shape: Its shape, the largest if it varied; None if unknown.
    """

    max_abs: float
    nonfinite: bool = False
    shape: tuple[int, ...] | None = None

    def joined(self, other: TensorRange) -> TensorRange:
        """Returns the range over two runs."""
        shapes = [run.shape for run in (self, other) if run.shape is not None]
        return TensorRange(
            max(self.max_abs, other.max_abs),
            self.nonfinite or other.nonfinite,
            max(shapes, key=math.prod, default=None),
        )


# The measured tensors of a graph and its functions. The scope of the graph itself is "", an
# argument of a function is a node with its name.
Ranges: TypeAlias = Mapping[TensorKey, TensorRange]


def too_large(index: GraphIndex, ranges: Ranges, limits: Limits) -> dict[int, Reason]:
    """Finds the nodes of a scope that must stay float32.

    Args:
        index: The scope.
        ranges: The measured tensors. Others were never computed; the values of constants
            are known anyway.
        limits: The limits.

    Returns:
        Positions of nodes with the reason, which holds the number. Nodes that stay float32
        anyway are left out: sources, calls, and nodes without a kernel.
    """
    stored, left_out = _stored_nodes(index), _fixed_nodes(index)
    measured = _measured(index, ranges)
    worst: dict[int, tuple[float, Reason]] = {}
    for position, tensor in _ends(index):
        producer = tensor[0]
        measured_range = measured.get(tensor)
        if measured_range is None or position in left_out:
            continue
        name = index.nodes[producer].name
        rule, where = "data_max", "its output" if position == producer else f"its input {name}"
        if producer in stored:
            rule, where = "constant_max", f"the constant {name}"
        verdict = _judge(measured_range, rule, getattr(limits, rule), where)
        if verdict and (position not in worst or verdict[0] > worst[position][0]):
            worst[position] = verdict
    chosen = {position: reason for position, (_, reason) in worst.items()}
    for position, depth in _depths(index, measured):
        node = index.nodes[position]
        limit = limits.matmul_depth if node.op in FLOP_FORMULAS else limits.sum_depth
        can_be_low = any(index.slots[slot].can_be_low for slot in node.slots)
        if depth > limit and can_be_low and position not in left_out:
            text = f"it adds up {depth} values for each result, more than reduction_depth"
            chosen.setdefault(position, Reason(RULE, f"{text} {limit:.6g}"))
    return chosen


def _measured(index: GraphIndex, ranges: Ranges) -> dict[NodeOutput, TensorRange]:
    """The ranges of a scope's tensors; constants also in branches that never ran."""
    positions = {node.name: position for position, node in enumerate(index.nodes)}
    constants = {(node, 0): TensorRange(abs(value)) for node, value in index.largest.items()}
    return constants | {
        (positions[name], port): tensor_range
        for (scope, name, port), tensor_range in ranges.items()
        if scope == index.scope and name in positions
    }


def _ends(index: GraphIndex) -> Iterator[tuple[int, NodeOutput]]:
    """Nodes at both ends of the edges that could be converted, with the tensor."""
    for edge in index.edges:
        if index.slots[edge.source].dtype == FLOAT32:
            for slot in (index.slots[edge.source], index.slots[edge.target]):
                if slot.can_be_low:
                    yield slot.node, index.tensor(edge)


def _fixed_nodes(index: GraphIndex) -> frozenset[int]:
    """Nodes whose dtypes the structure fixes, which is the better reason: sources, calls."""
    return frozenset(
        position
        for position, node in enumerate(index.nodes)
        if not any(index.fanin[slot] for slot in node.slots)
        or node.calls
        or any(index.slots[slot].dtype == "resource" for slot in node.slots)
    )


def _stored_nodes(index: GraphIndex) -> frozenset[int]:
    """Nodes that return a constant or a variable, possibly reshaped."""
    passing = defaultdict[int, list[int]](list)
    for edge in index.edges:
        source, target = index.slots[edge.source].node, index.slots[edge.target].node
        if edge.input == 0 and index.nodes[target].op in _PASSING_ON:
            passing[source].append(target)
    roots = (i for i, node in enumerate(index.nodes) if node.op in STORED)
    return frozenset(reach(roots, lambda node: passing[node]))


def _judge(
    measured: TensorRange, name: str, limit: float, where: str
) -> tuple[float, Reason] | None:
    if limit == math.inf or not (measured.nonfinite or measured.max_abs > limit):
        return None
    if measured.nonfinite:
        return math.inf, Reason(RULE, f"a value in {where} is not finite in float32 already")
    text = f"a value of {measured.max_abs:.6g} in {where} exceeds {name} {limit:.6g}"
    return measured.max_abs, Reason(RULE, text)


def _depths(
    index: GraphIndex, ranges: Mapping[NodeOutput, TensorRange]
) -> Iterator[tuple[int, int]]:
    """Number of values that nodes sum for one result, by the measured shapes."""
    shapes: dict[NodeOutput, Shape] = {}
    for tensor, measured in ranges.items():
        if measured.shape is not None:
            shapes[tensor] = measured.shape
    inputs = defaultdict[int, dict[int, Shape]](dict)
    for edge in index.edges:
        if (tensor := index.tensor(edge)) in shapes:
            inputs[index.slots[edge.target].node][edge.input] = shapes[tensor]
    for position, node in enumerate(index.nodes):
        output = shapes.get((position, 0))
        depth = reduction_depth(node.op, inputs[position], output, node.equation)
        if depth is not None:
            yield position, depth
