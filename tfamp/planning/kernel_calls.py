"""Makes the call of an op that the table of kernels is asked about, from each of its sources.

The sources know different things: an index has shapes of all tensors, a node of a GraphDef those
that were written beside it, and an op that is about to run has those of its inputs only. All of
them give the `OpCall` that `planning.kernels` reads. Framework-free: the callers read protobuf and
tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tfamp.planning.kernels import OpCall, PartialShape
from tfamp.planning.structures import GraphIndex

# By op the input that holds its output's shape, or a part of it.
_SIZES = {
    "Conv2DBackpropFilter": 1,
    "DepthwiseConv2dNativeBackpropFilter": 1,
    "ResizeNearestNeighborGrad": 1,
}
# Their second input holds the axes.
_REDUCTIONS = frozenset({"EuclideanNorm", "Mean", "Prod", "Sum"})


def call_of_indexed_node(index: GraphIndex, position: int) -> OpCall:
    """Returns the call of a node of an index.

    Args:
        index: The scope.
        position: The node's position in it.
    """
    node = index.nodes[position]
    edges = index.inputs[position]
    inputs = [index.shapes.get(index.tensor(edge)) for edge in edges]
    producers = [index.node_of(edge.source).op for edge in edges]
    return OpCall(node.op, inputs, index.shapes.get((position, 0)), node.attrs, producers)


def call_of_recorded_shapes(
    op: str,
    inputs: Sequence[Sequence[int]],
    output: Sequence[int],
    attrs: Mapping[str, Any],
) -> OpCall:
    """Returns the call of a node of a GraphDef, from the shapes that are recorded beside it.

    Args:
        op: The op type.
        inputs: Shapes of its inputs, -1 for an unknown dimension, empty for an unknown rank.
        output: The same of its first output.
        attrs: Its attributes, as Python values.

    Example:
        >>> call_of_recorded_shapes("BiasAddGrad", [[-1, 4]], [4], {}).inputs
        [(None, 4)]
    """
    return OpCall(op, [_partial(shape) for shape in inputs], _partial(output), attrs)


def _partial(shape: Sequence[int]) -> PartialShape:
    return tuple(None if dim < 0 else dim for dim in shape) or None


def call_before_it_runs(
    op: str,
    inputs: Sequence[PartialShape],
    integers: Callable[[int], tuple[int, ...] | None],
    attrs: Mapping[str, Any],
    producers: Sequence[str] = (),
) -> OpCall:
    """Returns the call of an op that has no output yet, whose shape its inputs may tell.

    Args:
        op: The op type.
        inputs: Shapes of its inputs, those of a list of tensors one by one.
        integers: Returns the values of the input of a number, in the order of the op's
            definition; None if they are not known before it runs.
        attrs: Its attributes, as Python values.
        producers: Types of the ops that give its inputs, as in `OpCall`.

    Example:
        >>> call_before_it_runs("Sum", [(8, 4), ()], lambda number: (-1,), {}).output
        (8, 1)
    """
    return OpCall(op, inputs, _output_shape(op, inputs, integers), attrs, producers)


def _output_shape(
    op: str, inputs: Sequence[PartialShape], integers: Callable[[int], tuple[int, ...] | None]
) -> PartialShape:
    """The shape of an op's output, if its inputs are known; else None."""
    number = 1 if op in _REDUCTIONS else _SIZES.get(op)
    known = None if number is None else integers(number)
    if known is None or inputs[0] is None:
        return None
    if op in _REDUCTIONS:
        reduced = {axis % max(len(inputs[0]), 1) for axis in known}
        return tuple(1 if axis in reduced else dim for axis, dim in enumerate(inputs[0]))
    if op == "ResizeNearestNeighborGrad":
        return (inputs[0][0], *known, inputs[0][3])
    return known
