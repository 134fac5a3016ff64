"""How many values an op adds up for each of its results, from shapes; framework-free."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TypeAlias

Shape: TypeAlias = tuple[int, ...]

_MATMULS = frozenset({"BatchMatMul", "BatchMatMulV2", "BatchMatMulV3", "MatMul"})
_CONVOLUTIONS = frozenset({"Conv", "Conv2D", "Conv3D"})
_INPUT_GRADIENTS = frozenset(
    {
        "Conv2DBackpropInput",
        "Conv2DBackpropInputV2",
        "Conv3DBackpropInput",
        "Conv3DBackpropInputV2",
        "DepthwiseConv2dNativeBackpropInput",
    }
)
_FILTER_GRADIENTS = frozenset(
    {
        "Conv2DBackpropFilter",
        "Conv2DBackpropFilterV2",
        "Conv3DBackpropFilter",
        "Conv3DBackpropFilterV2",
    }
)
_DEPTHWISE = "DepthwiseConv2dNative"
_DEPTHWISE_FILTER_GRADIENT = "DepthwiseConv2dNativeBackpropFilter"
_EINSUM = "Einsum"
_SUMS = frozenset({"BiasAddGrad", "EuclideanNorm", "L2Loss", "Mean", "Prod", "Sum"})

# Ops whose kernels add up in float32 whatever the dtype of their tensors.
IN_FLOAT32 = (
    _MATMULS
    | _CONVOLUTIONS
    | _INPUT_GRADIENTS
    | _FILTER_GRADIENTS
    | {_DEPTHWISE, _DEPTHWISE_FILTER_GRADIENT, _EINSUM}
)
REDUCING = IN_FLOAT32 | _SUMS


def reduction_depth(
    op: str, inputs: Mapping[int, Shape], output: Shape | None, equation: str = ""
) -> int | None:
    """Returns how many values an op adds up for each element of its result.

    Of a strided transposed convolution it is an upper bound.

    Args:
        op: An op type.
        inputs: Shapes of its inputs, as far as they are known, by position.
        output: Shape of its first output, if it is known.
        equation: The attribute of that name of an Einsum.

    Returns:
        The number; None for an op that reduces nothing, or if a shape that is needed is not known.

    Example:
        >>> reduction_depth("MatMul", {0: (4, 512), 1: (512, 8)}, (4, 8))
        512
    """
    if any(0 in shape for shape in (*inputs.values(), output or ())):
        return None
    if op in _MATMULS and 0 in inputs and output:
        # The two last dimensions hold rows and depth in either order; the result has the rows.
        return math.prod(inputs[0][-2:]) // output[-2]
    if op == _EINSUM:
        return _einsum_depth(equation, inputs)
    if op in _SUMS and 0 in inputs and output is not None:
        return math.prod(inputs[0]) // math.prod(output)
    return _convolution_depth(op, inputs, output)


def _convolution_depth(op: str, inputs: Mapping[int, Shape], output: Shape | None) -> int | None:
    # Filters are height, width, channels in, channels out; for depthwise ones the last two are
    # channels in and results for each.
    if op in _CONVOLUTIONS and 1 in inputs:
        return math.prod(inputs[1][:-1])
    if op == _DEPTHWISE and 1 in inputs:
        return math.prod(inputs[1][:-2])
    if op in _INPUT_GRADIENTS and 1 in inputs:
        return math.prod(inputs[1]) // inputs[1][-2]
    if op in _FILTER_GRADIENTS and 2 in inputs and output:
        return math.prod(inputs[2]) // output[-1]
    if op == _DEPTHWISE_FILTER_GRADIENT and 2 in inputs and output:
        return math.prod(inputs[2]) // math.prod(output[-2:])
    return None


def _einsum_depth(equation: str, inputs: Mapping[int, Shape]) -> int | None:
    left, _, right = equation.replace(" ", "").partition("->")
    sizes: dict[str, int] = {}
    for position, labels in enumerate(left.split(",")):
        if position not in inputs:
            return None
        sizes.update(_label_sizes(labels, inputs[position]))
    return math.prod(size for label, size in sizes.items() if label not in right)


def _label_sizes(labels: str, shape: Sequence[int]) -> dict[str, int]:
    """Sizes of the labels before and behind an ellipsis, which itself is never summed over."""
    before, dots, behind = labels.partition("...")
    sizes = dict(zip(before, shape, strict=False))
    if dots:
        sizes.update(zip(reversed(behind), reversed(shape), strict=False))
    return sizes
