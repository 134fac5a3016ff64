"""How long ops and Casts take in either dtype, estimated from static shapes; framework-free.

The roofline model: an op takes as long as its arithmetic or its memory traffic, whichever is
longer, plus a fixed overhead. The time of a node is a sum over its type slots, so that each
slot can be decided by itself: the arithmetic counts with the first float slot.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import TypeAlias

from tfamp.core.profile import STRIDED, WIDE, MachineProfile
from tfamp.planning.structures import (
    ARGUMENT,
    FLOAT32,
    RESULT,
    Edge,
    GraphIndex,
    IndexedNode,
    NodeOutput,
    op_types,
)

# Unknown dimensions, mostly batches, count as this many. A tensor of unknown rank counts
# nothing: where it can be converted the lists decide (see `planning.placement`); the others,
# such as the space that batch normalization reserves for cuDNN, are not converted. 32 is a
# choice, a usual size of a batch: it weighs tensors with a batch against weights without one.
UNKNOWN_DIMENSION = 32
# Estimated number of iterations of a loop, which a graph seldom tells. A choice: it only has to
# make work inside of a loop weigh much more than Casts before and behind it.
ITERATIONS = 32

_BYTES = {"float64": 8, "int64": 8, "uint64": 8, "complex64": 8, "complex128": 16}
_BYTES |= {"float16": 2, "bfloat16": 2, "int16": 2, "uint16": 2}
_BYTES |= {"bool": 1, "int8": 1, "uint8": 1}
_BYTES |= {"resource": 0, "variant": 0, "string": 0}
_FLOATS = ("float32", "bfloat16", "float16", "float64")


@dataclass(frozen=True, slots=True)
class ScopeCosts:
    """Times in a scope, in seconds.

    Attributes:
        slots: For each type slot the time of its node as it is, and in the low dtype.
        casts: For each float32 tensor the time of a Cast.
        overheads: Fixed overhead of each node.
        unshaped: Slots with a tensor of unknown rank.
    """

    slots: Sequence[tuple[float, float]]
    casts: Mapping[NodeOutput, float]
    overheads: Sequence[float]
    unshaped: Set[int] = frozenset()

    def node(self, index: GraphIndex, position: int, low: Collection[int]) -> float:
        """Returns the time of a node with the slots in `low` converted."""
        slots = index.nodes[position].slots
        return self.overheads[position] + sum(self.slots[slot][slot in low] for slot in slots)

    def is_known(self, node: IndexedNode) -> bool:
        """Whether the graph has the shapes that a node's time depends on."""
        return node.op in FREE_OPS or not any(slot in self.unshaped for slot in node.slots)


def crossing_tensors(index: GraphIndex, low: Collection[int]) -> dict[NodeOutput, list[Edge]]:
    """Returns the tensors that need a Cast if these slots are low, each with its edges."""
    crossing: dict[NodeOutput, list[Edge]] = {}
    for edge in index.edges:
        if (edge.source in low) != (edge.target in low):
            crossing.setdefault(index.tensor(edge), []).append(edge)
    return crossing


def scope_seconds(index: GraphIndex, costs: ScopeCosts, low: Collection[int]) -> float:
    """Returns the time of a scope, Casts included, with the slots in `low` converted."""
    slots = sum(times[slot in low] for slot, times in enumerate(costs.slots))
    casts = sum(costs.casts[tensor] for tensor in crossing_tensors(index, low))
    return sum(costs.overheads) + slots + casts


def estimate(index: GraphIndex, profile: MachineProfile, dtype: str) -> ScopeCosts:
    """Estimates the times of a scope on a machine."""
    return _Estimate(index, profile, dtype).costs()


def counted_shape(shape: Iterable[int | None]) -> Shape:
    """Returns a shape with a number for each unknown dimension."""
    return tuple(UNKNOWN_DIMENSION if dim is None else dim for dim in shape)


def peaks_of(profile: MachineProfile, op: str, kind: str, form: str = "") -> Mapping[str, float]:
    """Returns the speed of an op by dtype: that of its form, its type or its kind."""
    return profile.ops.get(f"{op} {form}", profile.ops.get(op, profile.peaks[kind]))


class _Estimate:
    """The tensors of a scope and the times that follow from them."""

    def __init__(self, index: GraphIndex, profile: MachineProfile, dtype: str) -> None:
        self._index, self._profile, self._dtype = index, profile, dtype
        # Most tensors share their shapes with others.
        counted = {shape: counted_shape(shape) for shape in set(index.shapes.values())}
        self._shapes = {tensor: counted[shape] for tensor, shape in index.shapes.items()}
        self._inputs: list[dict[int, NodeOutput]] = [{} for _ in index.nodes]
        # For each slot the tensors that have its dtype.
        self._read: list[list[NodeOutput]] = [[] for _ in index.slots]
        self._written: list[dict[NodeOutput, None]] = [{} for _ in index.slots]
        for edge in index.edges:
            tensor = index.tensor(edge)
            self._inputs[index.slots[edge.target].node][edge.input] = tensor
            self._read[edge.target].append(tensor)
            self._written[edge.source][tensor] = None
        for position, node in enumerate(index.nodes):
            if node.op == "Reshape":
                self._complete_reshape(position)
            elif node.op == "TensorListConcatV2":
                self._complete_concatenation(position)
        sizes = {shape: float(math.prod(shape)) for shape in set(self._shapes.values())}
        # Number of elements; tensors of unknown rank count nothing.
        self._sizes = {tensor: sizes[shape] for tensor, shape in self._shapes.items()}

    def _complete_reshape(self, position: int) -> None:
        """Fills in the open dimension of a Reshape from the size of its input."""
        tensor = self._inputs[position].get(0)
        shape = self._index.shapes.get((position, 0), ())
        if tensor in self._shapes and shape.count(None) == 1:
            known = math.prod(dim for dim in shape if dim is not None)
            open_one = max(1, math.prod(self._shapes[tensor]) // max(1, known))
            self._shapes[position, 0] = tuple(open_one if d is None else d for d in shape)

    def _complete_concatenation(self, position: int) -> None:
        """Counts the rows of an unknown number of tensors, each of as many as a batch."""
        shape = self._index.shapes.get((position, 0), ())
        if shape[:1] == (None,):
            rows = ITERATIONS * UNKNOWN_DIMENSION
            self._shapes[position, 0] = (rows, *counted_shape(shape[1:]))

    def costs(self) -> ScopeCosts:
        index = self._index
        times: list[tuple[float, float]] = [(0.0, 0.0)] * len(index.slots)
        for position, node in enumerate(index.nodes):
            of_node = self._cast_times if node.op == "Cast" else self._op_times
            for slot, seconds in zip(node.slots, of_node(position), strict=True):
                times[slot] = seconds
        # A constant is cast when a graph is frozen or loaded, not when it runs.
        casts = {
            tensor: self._cast_seconds(tensor, FLOAT32, self._dtype)
            if index.nodes[tensor[0]].op != "Const"
            else 0.0
            for slot, tensors in enumerate(self._written)
            if index.slots[slot].dtype == FLOAT32
            for tensor in tensors
        }
        overhead = self._profile.op_overhead
        overheads = [0.0 if node.op in _NEVER_RUN else overhead for node in index.nodes]
        unshaped = {
            slot
            for edge in index.edges
            if index.tensor(edge) not in self._shapes
            for slot in (edge.source, edge.target)
        }
        return ScopeCosts(times, casts, overheads, unshaped)

    def _op_times(self, position: int) -> list[tuple[float, float]]:
        index = self._index
        node = index.nodes[position]
        if node.op in _FREE or node.calls:
            return [(0.0, 0.0)] * len(node.slots)
        kind, work = self._arithmetic(position)
        peaks = peaks_of(self._profile, node.op, kind, self._form(position))
        times = []
        for slot in node.slots:
            dtype = index.slots[slot].dtype
            moved = self._elements(slot, node.op) / self._profile.bandwidth
            done = work if dtype in _FLOATS else 0.0
            work -= done  # It is counted with the first float slot.
            as_it_is = converted = _longest(done, moved, dtype, peaks)
            if dtype == FLOAT32:
                converted = _longest(done, moved, self._dtype, peaks)
            times.append((as_it_is, converted))
        return times

    def _arithmetic(self, position: int) -> tuple[str, float]:
        """Kind and amount of an op's arithmetic."""
        node = self._index.nodes[position]
        formula = FLOP_FORMULAS.get(node.op)
        if formula is None:
            if node.op in MOVING_OPS:
                return "elementwise", 0.0
            sizes = [
                self._sizes.get(tensor, 0.0)
                for slot in node.slots
                for tensor in (*self._read[slot], *self._written[slot])
            ]
            return "elementwise", max(sizes, default=0.0)
        inputs = {number: self._shapes.get(t) for number, t in self._inputs[position].items()}
        made = {0: self._shapes.get((position, 0))}
        return formula.kind, formula.flops(inputs, made, node.equation) or 0.0

    def _form(self, position: int) -> str:
        """Form of a depthwise convolution's gradient, by its shapes."""
        op, made = self._index.nodes[position].op, self._shapes.get((position, 0), ())
        if op == "DepthwiseConv2dNativeBackpropFilter":
            return WIDE if max(made[:2], default=0) > 3 else ""
        if op == "DepthwiseConv2dNativeBackpropInput":
            shapes = {i: self._shapes.get(t, ()) for i, t in self._inputs[position].items()}
            sizes = zip(made[1:3], shapes[2][1:3], shapes[1], strict=False)
            # Without strides an image shrinks by less than the filter's size.
            return STRIDED if any(image >= left + size for image, left, size in sizes) else ""
        return ""

    def _elements(self, slot: int, op: str) -> float:
        """Number of elements that an op reads and writes in the dtype of a slot."""
        size = self._sizes.get
        written = sum([size(tensor, 0.0) for tensor in self._written[slot]])
        # Ops that move values read as much as they write: a Gather does not read
        # its whole table.
        if op in MOVING_OPS and written:
            return 2 * written
        return written + sum([size(tensor, 0.0) for tensor in self._read[slot]])

    def _cast_seconds(self, tensor: NodeOutput, source: str, target: str) -> float:
        if source == target:
            return 0.0
        size = self._sizes.get(tensor, 0.0) * (_BYTES.get(source, 4) + _BYTES.get(target, 4))
        return size / self._profile.cast_bandwidth + self._profile.op_overhead

    def _cast_times(self, position: int) -> list[tuple[float, float]]:
        """A Cast of the graph costs the same as an inserted one; between equal dtypes, nothing.

        The time counts with the end that can change. A Cast from float32 to float32 has two
        such ends and counts as nothing.
        """
        slots = self._index.nodes[position].slots
        dtypes = [self._index.slots[slot].dtype for slot in slots]
        tensor = next(iter(self._inputs[position].values()), (position, 0))
        times = [(0.0, 0.0)] * len(slots)
        if dtypes.count(FLOAT32) < len(slots) == 2:
            end = dtypes.index(FLOAT32) if FLOAT32 in dtypes else 0
            converted = self._dtype if dtypes[end] == FLOAT32 else dtypes[end]
            other = dtypes[1 - end]
            times[end] = (
                self._cast_seconds(tensor, dtypes[end], other),
                self._cast_seconds(tensor, converted, other),
            )
        return times


def _longest(done: float, moved: float, dtype: str, peaks: Mapping[str, float]) -> float:
    """The roofline: seconds of an op in a dtype, by its arithmetic or by its memory traffic."""
    return max(done / peaks.get(dtype, peaks[FLOAT32]), moved * _BYTES.get(dtype, 4))


Shape: TypeAlias = tuple[int, ...]

# Nodes without overhead: constants and variables stay in place, and the times of Casts hold it.
_NEVER_RUN = frozenset({ARGUMENT, RESULT, "Cast", "Const", "ReadVariableOp"})
# Ops that forward their buffer or read only a shape.
FREE_OPS = op_types("""
    Const EnsureShape Enter Exit ExpandDims Identity IdentityN Merge NextIteration NoOp
    Placeholder PreventGradient Rank ReadVariableOp RefEnter Reshape Shape ShapeN Size Snapshot
    Squeeze StopGradient Switch TensorListGetItem TensorListPopBack TensorListPushBack
    TensorListReserve TensorListSetItem
""")
_FREE = FREE_OPS | {ARGUMENT, RESULT}
# Ops that move values without arithmetic.
MOVING_OPS = op_types("""
    BatchToSpace BatchToSpaceND BroadcastTo Concat ConcatV2 DepthToSpace DynamicPartition
    DynamicStitch Fill Gather GatherNd GatherV2 MirrorPad OneHot OnesLike Pack Pad PadV2
    ResizeNearestNeighbor ResourceGather Reverse ReverseSequence ReverseV2 Slice SpaceToBatch
    SpaceToBatchND SpaceToDepth Split SplitV StridedSlice StridedSliceGrad TensorListConcat
    TensorListConcatV2 TensorListFromTensor TensorListGather TensorListStack Tile Transpose
    Unpack ZerosLike
""")


@dataclass(frozen=True, slots=True)
class FlopFormula:
    """How the arithmetic of an op is counted.

    Attributes:
        kind: The peak it is held against: "matmul", "conv" or "conv_gradient".
        places: The tensors with the relevant shapes: "i1 o0" for the second input and the first
            output; "" for all operands of an equation.
        count: Computes the count from these shapes and the equation.
    """

    kind: str
    places: str
    count: Callable[[Sequence[Shape], str], float | None]

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
            The number, or None where a relevant shape is missing, None or wrong.
        """
        operands = [f"i{number}" for number in range(equation.count(",") + 1)]
        shapes = [
            (inputs if place[0] == "i" else outputs).get(int(place[1:]))
            for place in self.places.split() or operands
        ]
        known = [shape for shape in shapes if shape is not None]
        return self.count(known, equation) if len(known) == len(shapes) else None


def _matmul(shapes: Sequence[Shape], _: str) -> float:
    """For matrices m x k, k x n and m x n, also transposed: the root of mk * kn * mn is mkn."""
    sizes = [math.prod(shape[-2:]) for shape in shapes]
    return 2 * math.prod(shapes[-1][:-2]) * math.sqrt(math.prod(sizes))


def _einsum(shapes: Sequence[Shape], equation: str) -> float | None:
    """One multiplication per combination of indices and per operand after the first.

    None where a shape does not fit the equation, as in an invalid graph.
    """
    sizes: dict[str, int] = {}
    for labels, shape in zip(equation.partition("->")[0].split(","), shapes, strict=False):
        before, dots, after = labels.replace(" ", "").partition("...")
        hidden = len(shape) - len(before) - len(after) if dots else 0
        # An ellipsis is aligned at its end, as in broadcasting.
        names = [*before, *(f"...{i}" for i in range(hidden, 0, -1)), *after]
        if len(names) != len(shape):
            return None
        for name, size in zip(names, shape, strict=True):
            sizes[name] = max(size, sizes.get(name, 0))
    return 2 * max(len(shapes) - 1, 0.5) * math.prod(tuple(sizes.values()))


def _convolution(shapes: Sequence[Shape], _: str) -> float:
    """For the output and the filter, whose last dimension is the output channels."""
    made, weights = shapes
    return 2 * math.prod(made) * math.prod(weights[:-1])


def _depthwise(shapes: Sequence[Shape], _: str) -> float:
    made, weights = shapes
    return 2 * math.prod(made) * math.prod(weights[:2])


def _cell(shapes: Sequence[Shape], _: str) -> float:
    """For a recurrent cell: every row of the first input meets every weight."""
    rows, *weights = shapes
    return 2 * math.prod(rows[:-1]) * sum(map(math.prod, weights))


def _cell_gradient(shapes: Sequence[Shape], _: str) -> float:
    return 2 * _cell(shapes, _)


_DEPTHWISE = "DepthwiseConv2dNative"
_CONV_GRADIENTS = "Conv2DBackprop{0} Conv2DBackprop{0}V2 Conv3DBackprop{0} Conv3DBackprop{0}V2"
_BY_INPUT = "i2 i1"  # The shapes that count the gradient of a convolution by its input.
_CUDNN_GRADIENTS = "CudnnRNNBackprop CudnnRNNBackpropV2 CudnnRNNBackpropV3"
_MATMULS = "MatMul _FusedMatMul BatchMatMul BatchMatMulV2 BatchMatMulV3"
_CONVOLUTIONS = "Conv Conv2D Conv3D _FusedConv2D FusedConv2DBiasActivation"
_FORMULAS = {
    _MATMULS: ("matmul", "i0 i1 o0", _matmul),
    "Einsum": ("matmul", "", _einsum),
    _CONVOLUTIONS: ("conv", "o0 i1", _convolution),
    "FusedPadConv2D": ("conv", "o0 i2", _convolution),
    "FusedResizeAndPadConv2D": ("conv", "o0 i3", _convolution),
    _CONV_GRADIENTS.format("Input"): ("conv_gradient", _BY_INPUT, _convolution),
    _CONV_GRADIENTS.format("Filter"): ("conv_gradient", "i2 o0", _convolution),
    _DEPTHWISE: ("conv", "o0 i1", _depthwise),
    f"{_DEPTHWISE}BackpropInput": ("conv_gradient", _BY_INPUT, _depthwise),
    f"{_DEPTHWISE}BackpropFilter": ("conv_gradient", "i2 o0", _depthwise),
    # The gradient of an LSTMBlockCell leaves its matmuls to other ops.
    "LSTMBlockCell CudnnRNN CudnnRNNV2 CudnnRNNV3": ("matmul", "i0 i3", _cell),
    _CUDNN_GRADIENTS: ("matmul", "i0 i3", _cell_gradient),
    "GRUBlockCell": ("matmul", "i0 i2 i3", _cell),
    "GRUBlockCellGrad": ("matmul", "i0 i2 i3", _cell_gradient),
    "BlockLSTM BlockLSTMV2": ("matmul", "i1 i4", _cell),
    "BlockLSTMGrad BlockLSTMGradV2": ("matmul", "i1 i4", _cell_gradient),
}
# Op type -> how its arithmetic is counted; all other ops count elements.
FLOP_FORMULAS = {op: FlopFormula(*row) for ops, row in _FORMULAS.items() for op in ops.split()}


# Sums, whose kernels accumulate in the dtype of their tensors; ops of FLOP_FORMULAS do in float32.
SUMS = frozenset({"BiasAddGrad", "EuclideanNorm", "L2Loss", "Mean", "Prod", "Sum"})


def reduction_depth(
    op: str, inputs: Mapping[int, Shape], output: Shape | None, equation: str = ""
) -> int | None:
    """Returns how many values an op adds up for an element of its result.

    None for an op that is not a reduction, or if a relevant shape is unknown. For a strided
    transposed convolution it is an upper bound.

    Example:
        >>> reduction_depth("MatMul", {0: (4, 512), 1: (512, 8)}, (4, 8))
        512
    """
    formula = FLOP_FORMULAS.get(op)
    if any(0 in shape for shape in (*inputs.values(), output or ())):
        return None
    if op in SUMS and 0 in inputs and output is not None:
        return math.prod(inputs[0]) // math.prod(output)
    if formula is None or not (
        "o0" in formula.places or op == "Einsum" or formula.places == _BY_INPUT
    ):
        return None
    if formula.places == _BY_INPUT:  # A filter ends with the channels in and out.
        return math.prod(inputs[1]) // inputs[1][-2] if 1 in inputs else None
    flops = formula.flops(inputs, {0: output}, equation)
    return None if flops is None or output is None else round(flops / 2 / math.prod(output))
