"""Floating-point operations of the ops that multiply, from the shapes of their tensors.

Framework-free. Multiply and add count as two. The shapes tell what attributes such as transpose_a,
strides and data_format would; only an Einsum's equation is needed in addition.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

Shape: TypeAlias = tuple[int, ...]
_Count: TypeAlias = Callable[[Sequence[Shape], str], float]

# Ops that hand on the memory they are given, or look at a shape only.
FREE_OPS = frozenset(
    {
        "Const",
        "EnsureShape",
        "Enter",
        "Exit",
        "ExpandDims",
        "Identity",
        "IdentityN",
        "Merge",
        "NextIteration",
        "NoOp",
        "Placeholder",
        "PreventGradient",
        "Rank",
        "ReadVariableOp",
        "RefEnter",
        "Reshape",
        "Shape",
        "ShapeN",
        "Size",
        "Snapshot",
        "Squeeze",
        "StopGradient",
        "Switch",
        "TensorListGetItem",
        "TensorListPopBack",
        "TensorListPushBack",
        "TensorListReserve",
        "TensorListSetItem",
    }
)
# Ops that move values and compute nothing.
MOVING_OPS = frozenset(
    {
        "BatchToSpace",
        "BatchToSpaceND",
        "BroadcastTo",
        "Concat",
        "ConcatV2",
        "DepthToSpace",
        "DynamicPartition",
        "DynamicStitch",
        "Fill",
        "Gather",
        "GatherNd",
        "GatherV2",
        "MirrorPad",
        "OneHot",
        "OnesLike",
        "Pack",
        "Pad",
        "PadV2",
        "ResizeNearestNeighbor",
        "ResourceGather",
        "Reverse",
        "ReverseSequence",
        "ReverseV2",
        "Slice",
        "SpaceToBatch",
        "SpaceToBatchND",
        "SpaceToDepth",
        "Split",
        "SplitV",
        "StridedSlice",
        "StridedSliceGrad",
        "TensorListConcat",
        "TensorListConcatV2",
        "TensorListFromTensor",
        "TensorListGather",
        "TensorListStack",
        "Tile",
        "Transpose",
        "Unpack",
        "ZerosLike",
    }
)
# Ops that take longer per element than a sum or a product.
SPECIAL_OPS = frozenset(
    {
        "AvgPool",
        "AvgPool3D",
        "AvgPool3DGrad",
        "AvgPoolGrad",
        "Elu",
        "Erfc",
        "FusedBatchNormGradV2",
        "FusedBatchNormGradV3",
        "FusedBatchNormV2",
        "FusedBatchNormV3",
        "Log",
        "Log1p",
        "LogSoftmax",
        "MaxPool",
        "MaxPool3D",
        "MaxPool3DGrad",
        "MaxPoolGrad",
        "Selu",
        "Sigmoid",
        "Softmax",
        "Softplus",
        "_FusedBatchNormEx",
    }
)


@dataclass(frozen=True, slots=True)
class FlopRule:
    """How the arithmetic of an op is counted.

    Attributes:
        kind: The peak it is held against: "matmul", "conv", "conv_input" or "conv_filter".
        inputs: Positions of the inputs whose shapes tell it, None for all.
        outputs: The same for outputs.
        count: Counts from these shapes, those of inputs first, and the equation.
    """

    kind: str
    inputs: tuple[int, ...] | None
    outputs: tuple[int, ...]
    count: _Count

    def flops(
        self,
        inputs: Mapping[int, Shape | None],
        outputs: Mapping[int, Shape | None],
        equation: str = "",
    ) -> float | None:
        """Counts the operations of one node.

        Args:
            inputs: Shapes by position, control inputs left out.
            outputs: Shapes by port.
            equation: An Einsum's equation.

        Returns:
            The number, or None where a shape that tells it is missing or None.
        """
        positions = sorted(inputs) if self.inputs is None else self.inputs
        shapes = [inputs.get(position) for position in positions]
        shapes += [outputs.get(port) for port in self.outputs]
        known = [shape for shape in shapes if shape is not None]
        return self.count(known, equation) if len(known) == len(shapes) else None


def _size(shape: Sequence[int]) -> float:
    return float(math.prod(shape))


def _matmul(shapes: Sequence[Shape], _: str) -> float:
    """Of matrices m x k, k x n and m x n, transposed or not: the root of mk * kn * mn is mkn."""
    result = shapes[-1]
    return 2 * _size(result[:-2]) * math.sqrt(math.prod(_size(shape[-2:]) for shape in shapes))


def _einsum(shapes: Sequence[Shape], equation: str) -> float:
    """Every combination of indices is multiplied once, for each operand after the first."""
    sizes: dict[str, int] = {}
    for labels, shape in zip(equation.partition("->")[0].split(","), shapes, strict=True):
        before, dots, after = labels.replace(" ", "").partition("...")
        hidden = len(shape) - len(before) - len(after) if dots else 0
        # An ellipsis is aligned at its end, as in broadcasting.
        names = [*before, *(f"...{i}" for i in range(hidden, 0, -1)), *after]
        for name, size in zip(names, shape, strict=True):
            sizes[name] = max(size, sizes.get(name, 0))
    return 2 * max(len(shapes) - 1, 0.5) * _size(tuple(sizes.values()))


def _convolution(shapes: Sequence[Shape], _: str) -> float:
    """Of what a filter makes, and the filter; its last dimension is the channels made."""
    made, weights = shapes
    return 2 * _size(made) * _size(weights[:-1])


def _depthwise(shapes: Sequence[Shape], _: str) -> float:
    made, weights = shapes
    return 2 * _size(made) * _size(weights[:2])


def _filter_first(count: _Count) -> _Count:
    return lambda shapes, equation: count(shapes[::-1], equation)


def _cell(shapes: Sequence[Shape], _: str) -> float:
    """Of a recurrent cell: every row of the first input meets every weight."""
    rows, *weights = shapes
    return 2 * _size(rows[:-1]) * sum(map(_size, weights))


def _cell_gradient(shapes: Sequence[Shape], _: str) -> float:
    return 2 * _cell(shapes, _)


def _rules() -> dict[str, FlopRule]:
    matmul = FlopRule("matmul", (0, 1), (0,), _matmul)
    rules = dict.fromkeys(
        ("MatMul", "_FusedMatMul", "BatchMatMul", "BatchMatMulV2", "BatchMatMulV3"), matmul
    )
    rules["Einsum"] = FlopRule("matmul", None, (), _einsum)
    weights_at = {"Conv": 1, "Conv2D": 1, "Conv3D": 1, "_FusedConv2D": 1}
    weights_at |= {"FusedConv2DBiasActivation": 1, "FusedPadConv2D": 2}
    weights_at |= {"FusedResizeAndPadConv2D": 3}
    for op, position in weights_at.items():
        rules[op] = FlopRule("conv", (position,), (0,), _filter_first(_convolution))
    for op in ("Conv2DBackpropInput", "Conv3DBackpropInput"):
        rules[op] = rules[f"{op}V2"] = FlopRule("conv_input", (2, 1), (), _convolution)
    for op in ("Conv2DBackpropFilter", "Conv3DBackpropFilter"):
        rules[op] = rules[f"{op}V2"] = FlopRule("conv_filter", (2,), (0,), _convolution)
    name = "DepthwiseConv2dNative"
    rules[name] = FlopRule("conv", (1,), (0,), _filter_first(_depthwise))
    rules[f"{name}BackpropInput"] = FlopRule("conv_input", (2, 1), (), _depthwise)
    rules[f"{name}BackpropFilter"] = FlopRule("conv_filter", (2,), (0,), _depthwise)
    # The gradient of an LSTMBlockCell leaves the matmuls to other ops.
    rules["LSTMBlockCell"] = FlopRule("matmul", (0, 3), (), _cell)
    rules["GRUBlockCell"] = FlopRule("matmul", (0, 2, 3), (), _cell)
    rules["GRUBlockCellGrad"] = FlopRule("matmul", (0, 2, 3), (), _cell_gradient)
    for op in ("BlockLSTM", "BlockLSTMV2"):
        rules[op] = FlopRule("matmul", (1, 4), (), _cell)
    for op in ("BlockLSTMGrad", "BlockLSTMGradV2"):
        rules[op] = FlopRule("matmul", (1, 4), (), _cell_gradient)
    for op in ("CudnnRNN", "CudnnRNNV2", "CudnnRNNV3"):
        rules[op] = FlopRule("matmul", (0, 3), (), _cell)
    for op in ("CudnnRNNBackprop", "CudnnRNNBackpropV2", "CudnnRNNBackpropV3"):
        rules[op] = FlopRule("matmul", (0, 3), (), _cell_gradient)
    return rules


# Op type -> how its arithmetic is counted; all other ops count elements.
FLOP_RULES = _rules()
