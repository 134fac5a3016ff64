"""Facts about TensorFlow's kernels in low precision, in one table; framework-free.

A kernel that adds up in the dtype of its tensors loses what is too small next to the sum so
far: a sum of equal terms stops growing after 2 / eps of them, 256 in bfloat16. A plan looks
right then, as every node has the dtype that it should have. Other kernels do not return, crash,
or take far longer than float32's. Rewrites, autocast, policies, levels and `tfamp doctor` read
this table, and tests/kernels measures it.

The words of a row, and who acts on them:

- `low`: the pairs in which `library_of` finds the kernel; such a kernel must be registered. For
  XLA, which compiles ops, the definition of the op must allow the dtype.
- `fault`: `ADDS_UP_LOW` holds for calls with more than `SAFE_TERMS` terms, counted by `terms`; the
  other faults for every call of the `form`. Shapes that are unknown count as large ones.
- `form`: narrows the row to some calls; several rows of one op are alternatives, the first that
  holds is told as the reason.
- `instead`: "float32", the op runs in float32 between Casts; "Sum", that op in the low dtype, by
  `graph.passes.bias_sums` in rewrites and by `kernel_guard` elsewhere. Another op needs both.
- `gradient_of`: the ops that `kernel_guard` *guards*: it leaves their forward pass alone and runs
  their usual gradient in a place where this table holds. That is needed as a gradient runs after
  autocast or the layer has ended. Without an entry the op of the row is exact only where it is
  called itself.
- `layers`: for tests and pages; nothing is decided by it.

Evidence: for CPUs, measured with TensorFlow 2.21 against float64 on some 10,000 positive terms;
run `python tests/kernels/facts.py` to measure again. A kernel counts as exact if its error is
at most four times that of rounding its inputs and outputs. For GPUs, the template arguments of
the kernels in TensorFlow's wheel and sources: `core/kernels/bias_op_gpu.cu.cc`,
`depthwise_conv_op_gpu.h`, `reduction_gpu_kernels.cu.h`, `scatter_nd_op_gpu.cu.cc`,
`segment_reduction_ops_gpu.cu.h` and `core/util/use_cudnn.cc`; and one measurement on an H100
(docs/gpu.md). There the tree sums of norms, of AvgPoolGrad and of depthwise filters were exact
on 16,384 terms: their rows stay, as longer sums are less exact, and depthwise filters go by
other kernels on other cards. For kernels that do not return, crash or are slow:
`python tests/kernels/faults.py` runs each call in a process with a time limit.
"""

from __future__ import annotations

import enum
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from tfamp.core.dtypes import LOW_PRECISION, float_format
from tfamp.planning.op_sets import CUDNN_RNN
from tfamp.planning.structures import op_types

# A shape with None for an unknown dimension; None if the rank is unknown.
PartialShape: TypeAlias = "tuple[int | None, ...] | None"

# Libraries of kernels. GPU stands for TensorFlow's own kernels, cuDNN and cuBLAS together.
EIGEN, ONEDNN, GPU, XLA = "Eigen", "oneDNN", "GPU", "XLA"
# Ops for which TensorFlow on a CPU runs oneDNN's kernels, where oneDNN supports the dtype.
ONEDNN_OPS = op_types("""
    Add AddV2 AvgPool AvgPool3D BatchMatMul BatchMatMulV2 BiasAdd Conv2D Conv2DBackpropFilter
    Conv2DBackpropInput Conv3D Conv3DBackpropFilterV2 Conv3DBackpropInputV2 DepthwiseConv2dNative
    DepthwiseConv2dNativeBackpropFilter DepthwiseConv2dNativeBackpropInput Einsum MatMul Softmax
""")
# Where it has none for a dtype that it supports otherwise.
_NOT_ONEDNNS = frozenset((op, "float16") for op in ("AvgPool", "AvgPool3D"))


@dataclass(frozen=True, slots=True)
class OpCall:
    """An op with the shapes of its tensors, as far as they are known.

    Attributes:
        op: Its type.
        inputs: Shapes of its inputs.
        output: Shape of its first output.
        attrs: Its attributes, as Python values; those of other types may be missing.
        producers: Types of the ops that give its inputs in a graph, "" for unknown ones; empty
            if none is known.
    """

    op: str
    inputs: Sequence[PartialShape] = ()
    output: PartialShape = None
    attrs: Mapping[str, Any] = field(default_factory=dict)
    producers: Sequence[str] = ()


class Fault(enum.Enum):
    """Why a low kernel is not used, as a clause whose subject is the kernel."""

    ADDS_UP_LOW = "would add up {terms} values for each result in {dtype}"
    HANGS = "does not return in {dtype}{calls}"
    CRASHES = "crashes in {dtype}{calls}"
    SLOW = "can take {factor:g} times as long in {dtype} as in float32{calls}"


_IN_SHORT = {
    Fault.HANGS: "does not return",
    Fault.CRASHES: "crashes",
    Fault.SLOW: "{factor:g} times",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelFact:
    """A kernel that is worse in low precision than its dtype: less exact, unusable or slow.

    Attributes:
        op: The op type.
        low: Pairs (library, dtype) in which it has the fault.
        fault: What is wrong with it. Only `ADDS_UP_LOW` depends on the number of terms.
        factor: Of a slow kernel, how many times float32's time it can take.
        terms: How many values it adds up for one result: a key of `TERMS`.
        form: Which calls of the op are meant: a key of `FORMS`.
        instead: What is exact in its place: "float32" for the op in float32, or an op type.
        gradient_of: Ops whose gradients run it, which are the ones that a forward pass sees.
        layers: Keras layers that run it, or whose gradients do.
    """

    op: str
    low: frozenset[tuple[str, str]]
    fault: Fault = Fault.ADDS_UP_LOW
    factor: float = 1.0
    terms: str = "reduced"
    form: str = "any"
    instead: str = "float32"
    gradient_of: tuple[str, ...] = ()
    layers: tuple[str, ...] = ()

    def holds_for(self, call: OpCall) -> bool:
        """Whether the kernel has the fault in a call of the op; unknown shapes count as large."""
        if not FORMS[self.form](call):
            return False
        return self.fault != Fault.ADDS_UP_LOW or TERMS[self.terms](call) > SAFE_TERMS

    def text(self, dtype: str, library: str, call: OpCall | None = None) -> str:
        """Returns what is wrong, of a call or of all calls of the row's form."""
        terms = _UNKNOWN if call is None else TERMS[self.terms](call)
        many = f"{round(terms)}" if terms < _UNKNOWN else "an unknown number of"
        kernel = {GPU: "a GPU's kernel"}.get(library, f"{library}'s kernel")
        named = _FILTERS[self.form](call) if call and self.form in _FILTERS else self.form
        calls = "" if self.form == "any" else f" for {named}"
        fields = {"terms": many, "dtype": dtype, "calls": calls, "factor": self.factor}
        return f"{kernel} {self.fault.value.format(**fields)}"


# ---- Forms and numbers of terms --------------------------------------------------------

# An unknown number of terms.
_UNKNOWN = math.inf


def _size(shape: PartialShape) -> float:
    return _UNKNOWN if shape is None or None in shape else math.prod(d for d in shape if d)


def _text(call: OpCall, name: str, unknown: str = "") -> str:
    """A text among the attributes, which ops that are about to run have as bytes."""
    text = call.attrs.get(name, unknown)
    return text.decode() if isinstance(text, bytes) else str(text)


def _window(call: OpCall) -> float:
    """Values in a window of a pooling op."""
    return math.prod(call.attrs.get("ksize") or (math.inf,))


def _overlapping(call: OpCall) -> float:
    """Windows of a pooling op that hold the same pixel."""
    sizes, strides = call.attrs.get("ksize"), call.attrs.get("strides")
    if not sizes or not strides:
        return _UNKNOWN
    return math.prod(-(-size // step) for size, step in zip(sizes, strides, strict=True))


def _filter_size(shape: PartialShape, axes: int) -> float:
    return _UNKNOWN if shape is None else _size(shape[:axes])


def _filter_and_results(call: OpCall) -> float:
    """Values of a filter, the second input, without its last axis but one."""
    shape = _input(call, 1)
    return _UNKNOWN if shape is None else _size((*shape[:-2], *shape[-1:]))


def _input(call: OpCall, number: int) -> PartialShape:
    return call.inputs[number] if number < len(call.inputs) else None


def _reduced(call: OpCall) -> float:
    """Input elements for one element of the output."""
    results = _size(call.output)
    return _size(_input(call, 0)) / max(results, 1) if results < _UNKNOWN else _UNKNOWN


def _pixels(call: OpCall) -> float:
    """Pixels of a batch of upstream gradients, the third input."""
    shape = _input(call, 2)
    if shape is None:
        return _UNKNOWN
    first = _text(call, "data_format") in ("NCHW", "NCDHW")
    return _size((shape[0], *shape[2:]) if first else shape[:-1])


def _rows(number: int) -> Callable[[OpCall], float]:
    """Elements of an input: ids of segments, of which all may be the same."""
    return lambda call: _size(_input(call, number))


def _indexes(number: int) -> Callable[[OpCall], float]:
    """Indexes in an input whose last axis is one index."""

    def count(call: OpCall) -> float:
        shape = _input(call, number)
        return _UNKNOWN if shape is None else _size(shape[:-1])

    return count


def _not_channels(call: OpCall) -> float:
    """Elements for one channel of the input."""
    shape = _input(call, 0)
    if not shape:
        return _UNKNOWN
    channels = shape[1] if _text(call, "data_format") == "NCHW" else shape[-1]
    return _UNKNOWN if channels is None else _size(shape) / max(channels, 1)


def _longest(call: OpCall) -> float:
    """The longest axis of the input."""
    shape = _input(call, 0)
    known = shape is not None and None not in shape
    return max((d or 0 for d in shape or ()), default=1) if known else _UNKNOWN


def _contracted(call: OpCall) -> float:
    """Values of the axes that an Einsum adds up over."""
    inputs, _, output = _text(call, "equation").partition("->")
    sizes: dict[str, float] = {}
    for axes, shape in zip(inputs.split(","), call.inputs, strict=False):
        if shape is None or "." in axes or len(axes) != len(shape):
            return _UNKNOWN
        for axis, size in zip(axes, shape, strict=True):
            sizes[axis] = _UNKNOWN if size is None else size
    return math.prod(size for axis, size in sizes.items() if axis not in output)


def _sums_one_operand(call: OpCall) -> bool:
    """Whether an Einsum adds up over an axis that one operand alone has, or may do so."""
    inputs, _, output = _text(call, "equation", "a->").partition("->")
    operands = inputs.split(",")
    summed = set(inputs) - set(output) - {","}
    return any(sum(axis in operand for operand in operands) == 1 for axis in summed)


TERMS: Mapping[str, Callable[[OpCall], float]] = {
    "reduced": _reduced,
    "all but channels": _not_channels,
    "pixels": _pixels,
    "window": _window,
    "overlapping windows": _overlapping,
    "filter": lambda call: _filter_size(_input(call, 1), 2),
    "filter and channels": lambda call: _filter_size(_input(call, 1), 4),
    "filter and results": _filter_and_results,
    "segment ids": _rows(1),
    "values of a vector": _rows(1),
    "scattered": _indexes(0),
    "scattered into a tensor": _indexes(1),
    "contracted": _contracted,
    "axis": _longest,
    "inputs": lambda call: len(call.inputs),
    "unknown": lambda call: _UNKNOWN,
}


def _sides(call: OpCall) -> PartialShape:
    """Height, width, channels and multiplier of the filter whose gradient an op computes."""
    return call.output


def _outside_cudnn(call: OpCall) -> bool:
    """Whether cuDNN has no depthwise filter gradient of this shape: square, one a channel."""
    height, width, _, multiplier = _sides(call) or (None,) * 4
    return not (height == width and height in (1, 3, 5, 7) and multiplier == 1)


# From this side on filters do not return; see the row of DepthwiseConv2dNative.
_ENDLESS_SIDE = 14
_WIDE_FILTER = f"a filter with a side of {_ENDLESS_SIDE} or more"


def _has_wide_filter(call: OpCall) -> bool:
    """Whether a side of the filter, the second input, is long or unknown."""
    sides = (_input(call, 1) or (None, None))[:2]
    return any(side is None or side >= _ENDLESS_SIDE for side in sides)


def _filter_text(call: OpCall) -> str:
    sides = (_input(call, 1) or (None, None))[:2]
    if None in sides:
        return f"{_WIDE_FILTER}, and this one's size is unknown"
    return f"a filter of {' x '.join(map(str, sides))}"


_GROUPS = "as many groups as channels"


def _has_a_group_for_each_channel(call: OpCall) -> bool:
    """Whether a Conv2D is depthwise, by its filter; False for an unknown one."""
    image, weights = _input(call, 0), _input(call, 1)
    if weights is None or len(weights) != 4 or weights[2] != 1:
        return False
    first = _text(call, "data_format") == "NCHW"
    return image is None or len(image) != 4 or image[1 if first else 3] != 1


_WIDE_GROUPS = f"{_WIDE_FILTER}, and {_GROUPS}"
# Of depthwise convolutions' gradients.
_LARGER_FILTER, _STRIDED = "a filter of more than 3 x 3", "strides of more than 1"


def _has_larger_filter(call: OpCall) -> bool:
    """Whether a filter's gradient has a side of more than 3, or an unknown one."""
    sides = (_sides(call) or (None, None))[:2]
    return any(side is None or side > 3 for side in sides)


def _is_of_rows(call: OpCall) -> bool:
    """Whether the first input is a matrix, or of an unknown rank."""
    rows = _input(call, 0)
    return rows is None or len(rows) == 2


def _adds_a_row(call: OpCall) -> bool:
    """Whether one input is a product of matrices, and the other a row for all of its rows."""
    if "MatMul" not in call.producers or len(call.producers) != 2:
        return False
    row = _input(call, 1 if call.producers[0] == "MatMul" else 0)
    return row is not None and (len(row) == 1 or (len(row) == 2 and row[0] == 1))


def _is_strided(call: OpCall) -> bool:
    """Whether a window moves by more than one pixel, or by an unknown number."""
    return max(call.attrs.get("strides") or (math.inf,)) > 1


def _is_wide_in_each_group(call: OpCall) -> bool:
    return _has_a_group_for_each_channel(call) and _has_wide_filter(call)


# How texts name the calls of a form, where they do not name the form itself.
_FILTERS: Mapping[str, Callable[[OpCall], str]] = {
    _WIDE_FILTER: _filter_text,
    _WIDE_GROUPS: _filter_text,
}
FORMS: Mapping[str, Callable[[OpCall], bool]] = {
    _WIDE_GROUPS: _is_wide_in_each_group,
    _WIDE_FILTER: _has_wide_filter,
    _GROUPS: _has_a_group_for_each_channel,
    _LARGER_FILTER: _has_larger_filter,
    _STRIDED: _is_strided,
    "a matrix": _is_of_rows,
    "a product and a row": _adds_a_row,
    "any": lambda call: True,
    "three spatial axes": lambda call: len(_input(call, 1) or (None,) * 5) == 5,
    "outside of cuDNN's shapes": _outside_cudnn,
    "axes that one operand alone has": _sums_one_operand,
    "several operands": lambda call: "," in _text(call, "equation", ","),
}

# ---- The table -------------------------------------------------------------------------


def _in(
    eigen: str = "", onednn: str = "", gpu: str = "", xla: str = ""
) -> frozenset[tuple[str, str]]:
    named = ((EIGEN, eigen), (ONEDNN, onednn), (GPU, gpu), (XLA, xla))
    return frozenset((library, dtype) for library, dtypes in named for dtype in dtypes.split())


_BF16, _F16, _BOTH = "bfloat16", "float16", "bfloat16 float16"
_DENSE_LAYERS = ("Dense", "EinsumDense")
_CONV_LAYERS = ("Conv1D", "Conv2D", "Conv3D")
_TRANSPOSED_LAYERS = ("Conv1DTranspose", "Conv2DTranspose", "Conv3DTranspose")
_SEPARABLE_LAYERS = ("DepthwiseConv1D", "DepthwiseConv2D", "SeparableConv1D", "SeparableConv2D")
_ATTENTION_LAYERS = ("MultiHeadAttention", "GroupQueryAttention", "EinsumDense")
_ALL_CONV_LAYERS = (*_CONV_LAYERS, *_TRANSPOSED_LAYERS, *_SEPARABLE_LAYERS)
_DEPTHWISE_GRADIENTS = (
    "DepthwiseConv2dNativeBackpropFilter",
    "DepthwiseConv2dNativeBackpropInput",
)
_CONV_GRADIENTS = ("Conv2DBackpropFilter", "Conv2DBackpropInput")
# Ops whose gradients add up over broadcast axes, by Sum.
BROADCASTING = (
    "Add", "AddV2", "Atan2", "BatchMatMulV2", "BatchMatMulV3", "BroadcastTo", "ClipByValue",
    "Div", "DivNoNan", "FloorDiv", "FloorMod", "Maximum", "Minimum", "Mul", "MulNoNan", "Pow",
    "RealDiv", "SelectV2", "SquaredDifference", "Sub", "TensorStridedSliceUpdate", "Tile",
    "Xdivy", "Xlog1py", "Xlogy",
)  # fmt: skip
# Ops whose gradients add up, by Sum, what one value was used for, or how many
# values are largest.
_SHARING = (
    "BiasAddGrad", "BiasAddV1", "Fill", "Max", "Min", "RaggedTensorToTensor", "RandomGamma",
    "SparseToDense",
    "StatelessParameterizedTruncatedNormal", "StatelessRandomGammaV2", "StatelessRandomGammaV3",
)  # fmt: skip

KERNEL_FACTS: tuple[KernelFact, ...] = (
    # Biases. Sum adds the same rows up in float32 and rounds once.
    KernelFact(
        op="BiasAddGrad",
        low=_in(eigen=_BF16, gpu=_BOTH),
        terms="all but channels",
        instead="Sum",
        gradient_of=("BiasAdd", "BiasAddV1"),
        layers=(*_DENSE_LAYERS, *_ALL_CONV_LAYERS),
    ),
    # In a graph TensorFlow joins it with the product before, to an op whose float16 kernel has no
    # vectors: on an Intel Xeon with AVX512-FP16 2.6 s for 256 rows, 512 inputs and 2,048 units,
    # where the product alone takes 3 ms. A float32 bias keeps the two apart.
    *(
        KernelFact(
            op=op,
            low=_in(onednn=_F16),
            fault=Fault.SLOW,
            factor=800,
            form=form,
            layers=("Dense",),
        )
        for op, form in (
            ("BiasAdd", "a matrix"),
            ("Add", "a product and a row"),
            ("AddV2", "a product and a row"),
        )
    ),
    # Reductions. Sum and Mean over the last axis are exact; the axis is not looked at.
    KernelFact(
        op="Sum",
        low=_in(eigen=_F16, gpu=_F16),
        gradient_of=(*BROADCASTING, *_SHARING),
        layers=(*_DENSE_LAYERS, *_ALL_CONV_LAYERS, "RepeatVector", "LSTM", "GRU", "SimpleRNN"),
    ),
    KernelFact(
        op="Mean",
        low=_in(eigen=_F16),
        layers=("GlobalAveragePooling1D", "GlobalAveragePooling2D", "GlobalAveragePooling3D"),
    ),
    KernelFact(op="Prod", low=_in(eigen=_BOTH, gpu=_BOTH)),
    KernelFact(op="EuclideanNorm", low=_in(eigen=_F16, gpu=_BOTH)),
    # In bfloat16 a CPU's squares are rounded before they are added up.
    KernelFact(op="L2Loss", low=_in(eigen=_BF16, gpu=_BOTH), terms="unknown"),
    KernelFact(
        op="Cumsum",
        low=_in(eigen=_BOTH, gpu=_BOTH),
        terms="axis",
        gradient_of=("Cumsum",),
    ),
    KernelFact(
        op="Cumprod",
        low=_in(eigen=_BOTH, gpu=_BOTH),
        terms="axis",
        gradient_of=("Cumprod", "Prod"),
    ),
    KernelFact(
        op="CumulativeLogsumexp",
        low=_in(eigen=_BOTH, gpu=_BOTH),
        terms="axis",
        gradient_of=("CumulativeLogsumexp",),
    ),
    KernelFact(op="AddN", low=_in(eigen=_BOTH, gpu=_BOTH), terms="inputs"),
    KernelFact(op="LRN", low=_in(eigen=_F16), terms="unknown"),
    KernelFact(op="LRNGrad", low=_in(eigen=_F16), terms="unknown", gradient_of=("LRN",)),
    # Segments, scattering, gathering.
    KernelFact(
        op="SegmentSum",
        low=_in(eigen=_BOTH, gpu=_BOTH),
        terms="segment ids",
        gradient_of=("SegmentMax", "SegmentMean", "SegmentMin"),
    ),
    KernelFact(op="SegmentMean", low=_in(eigen=_BOTH, gpu=_BOTH), terms="segment ids"),
    KernelFact(op="SegmentProd", low=_in(eigen=_BOTH, gpu=_BOTH), terms="segment ids"),
    KernelFact(
        op="UnsortedSegmentSum",
        low=_in(eigen=_BOTH, gpu=_BOTH),
        terms="segment ids",
        gradient_of=(
            "DynamicStitch",
            "Gather",
            "GatherV2",
            "ParallelDynamicStitch",
            "ResourceGather",
            "SparseTensorDenseMatMul",
            "UnsortedSegmentMax",
            "UnsortedSegmentMin",
        ),
        layers=("Embedding",),
    ),
    KernelFact(
        op="UnsortedSegmentProd",
        low=_in(eigen=_BOTH, gpu=_BOTH),
        terms="segment ids",
    ),
    KernelFact(
        op="ScatterNd",
        low=_in(eigen=_BOTH, gpu=_BOTH, xla=_BF16),
        terms="scattered",
        gradient_of=(
            "GatherNd",
            "ResourceGatherNd",
            "SparseReduceSum",
            "TensorScatterMax",
            "TensorScatterMin",
            "TensorScatterUpdate",
        ),
    ),
    # The first two have no low kernel on GPUs.
    *(
        KernelFact(op=op, low=low, terms="scattered into a tensor")
        for op, low in (
            ("TensorScatterAdd", _in(eigen=_BOTH)),
            ("TensorScatterSub", _in(eigen=_BOTH)),
            ("ScatterNdNonAliasingAdd", _in(eigen=_BOTH, gpu=_BOTH)),
        )
    ),
    KernelFact(
        op="SparseTensorDenseAdd",
        low=_in(eigen=_BOTH),
        terms="values of a vector",
        gradient_of=("SparseDenseCwiseDiv", "SparseDenseCwiseMul"),
    ),
    KernelFact(
        op="SparseTensorDenseMatMul",
        low=_in(eigen=_BF16),
        terms="unknown",
        gradient_of=("ExtractImagePatches", "ExtractVolumePatches", "SparseTensorDenseMatMul"),
    ),
    # The gradient of the default value, for which empty rows stand. On a GPU it differed from
    # run to run, once by 130 %.
    *(
        KernelFact(
            op=f"{op}Grad",
            low=_in(eigen=_BOTH, gpu=_BOTH),
            terms="values of a vector",
            gradient_of=(op,),
        )
        for op in ("SparseFillEmptyRows", "RaggedFillEmptyRows")
    ),
    # Products.
    KernelFact(
        op="Einsum",
        low=_in(eigen=_BF16),
        terms="contracted",
        form="several operands",
        gradient_of=("Einsum",),
        layers=_ATTENTION_LAYERS,
    ),
    KernelFact(
        op="Einsum",
        low=_in(eigen=_F16),
        terms="contracted",
        gradient_of=("Einsum",),
        layers=_ATTENTION_LAYERS,
    ),
    # Before the product, by a Sum, as on an Intel Xeon with AVX512-FP16.
    KernelFact(
        op="Einsum",
        low=_in(onednn=_F16),
        terms="contracted",
        form="axes that one operand alone has",
        gradient_of=("Einsum",),
    ),
    *(
        KernelFact(
            op=op, low=_in(eigen=_F16, gpu=_F16), terms="unknown", gradient_of=(gradient_of,)
        )
        for op, gradient_of in (
            ("BlockLSTMGrad", "BlockLSTM"),
            ("BlockLSTMGradV2", "BlockLSTMV2"),
        )
    ),
    # cuDNN's recurrent layers: a gradient in bfloat16 was off by five orders of magnitude on an
    # H100. Both directions, as they share a reserved space.
    *(
        KernelFact(op=op, low=_in(gpu=_BF16), terms="unknown", layers=("LSTM", "GRU"))
        for op in sorted(CUDNN_RNN)
    ),
    # Convolutions. Where oneDNN runs float32, Eigen's low kernels took 16 to 110 times as long with
    # 16, 32 and 128 groups, and 2 times with 4, on an AMD EPYC with AVX2. Where it does not,
    # float32 takes nearly as long.
    KernelFact(
        op="Conv2D",
        low=_in(eigen=_BOTH),
        fault=Fault.SLOW,
        factor=30,
        form=_GROUPS,
        gradient_of=_CONV_GRADIENTS,
        layers=("Conv1D", "Conv2D"),
    ),
    KernelFact(
        op="Conv2DBackpropFilter",
        low=_in(eigen=_BOTH),
        terms="pixels",
        gradient_of=("Conv2D", "Conv2DBackpropInput"),
        layers=(*_CONV_LAYERS, *_TRANSPOSED_LAYERS, "SeparableConv1D", "SeparableConv2D"),
    ),
    KernelFact(
        op="Conv2DBackpropInput",
        low=_in(eigen=_BOTH),
        terms="filter and results",
        gradient_of=("Conv2D", "Conv2DBackpropFilter"),
        layers=(*_CONV_LAYERS, *_TRANSPOSED_LAYERS),
    ),
    KernelFact(
        op="Conv3DBackpropInputV2",
        low=_in(eigen=_BOTH),
        terms="filter and results",
        gradient_of=("Conv3D", "Conv3DBackpropFilterV2"),
        layers=("Conv3D", "Conv3DTranspose"),
    ),
    KernelFact(
        op="Conv3DBackpropFilterV2",
        low=_in(eigen=_BOTH),
        terms="pixels",
        gradient_of=("Conv3D", "Conv3DBackpropInputV2"),
        layers=("Conv3D", "Conv3DTranspose"),
    ),
    KernelFact(
        op="Conv3D",
        low=_in(eigen=_BOTH),
        terms="filter and channels",
        gradient_of=("Conv3DBackpropFilterV2", "Conv3DBackpropInputV2"),
        layers=("Conv3D", "Conv3DTranspose"),
    ),
    KernelFact(
        op="Conv", low=_in(eigen=_BOTH), terms="filter and channels", form="three spatial axes"
    ),
    KernelFact(
        op="DepthwiseConv2dNativeBackpropFilter",
        low=_in(eigen=_BOTH),
        terms="pixels",
        gradient_of=("DepthwiseConv2dNative", "DepthwiseConv2dNativeBackpropInput"),
        layers=_SEPARABLE_LAYERS,
    ),
    KernelFact(
        op="DepthwiseConv2dNativeBackpropFilter",
        low=_in(gpu=_BOTH),
        terms="pixels",
        form="outside of cuDNN's shapes",
        gradient_of=("DepthwiseConv2dNative", "DepthwiseConv2dNativeBackpropInput"),
        layers=_SEPARABLE_LAYERS,
    ),
    # oneDNN has no kernels for filter gradients of float16 convolutions but those for all dtypes,
    # without vectors. On an Intel Xeon with AVX512-FP16 they took 2 to 12 s, and float32 3 to 17
    # ms: 3 x 3 and 1 x 1 filters, 64 to 512 channels, 16 images of 8 to 32 pixels. In three
    # dimensions 140 to 160 ms for 1, with a depthwise filter 6 to 110 times as long.
    *(
        KernelFact(
            op=op,
            low=_in(onednn=_F16),
            fault=Fault.SLOW,
            factor=factor,
            gradient_of=gradient_of,
            layers=layers,
        )
        for op, factor, gradient_of, layers in (
            (
                "Conv2DBackpropFilter",
                800,
                ("Conv2D", "Conv2DBackpropInput"),
                (*_CONV_LAYERS, *_TRANSPOSED_LAYERS, "SeparableConv1D", "SeparableConv2D"),
            ),
            (
                "Conv3DBackpropFilterV2",
                150,
                ("Conv3D", "Conv3DBackpropInputV2"),
                ("Conv3D", "Conv3DTranspose"),
            ),
            (
                "DepthwiseConv2dNativeBackpropFilter",
                100,
                ("DepthwiseConv2dNative", "DepthwiseConv2dNativeBackpropInput"),
                _SEPARABLE_LAYERS,
            ),
            (
                "DepthwiseConv2dNativeBackpropInput",
                20,
                ("DepthwiseConv2dNative", "DepthwiseConv2dNativeBackpropFilter"),
                _SEPARABLE_LAYERS,
            ),
        )
    ),
    # The same machine, with AMX and without: a depthwise filter of 5 x 5 or 7 x 7 has a gradient
    # in bfloat16 after 1.4 to 5 times float32's time, one of 3 x 3 after 0.9 to 1.3 times. With
    # strides of 2 the image's takes 3 to 22 times as long, without 0.8 to 1.1 times.
    *(
        KernelFact(
            op=op,
            low=_in(onednn=_BF16),
            fault=Fault.SLOW,
            factor=factor,
            form=form,
            gradient_of=("DepthwiseConv2dNative", other),
            layers=_SEPARABLE_LAYERS,
        )
        for (op, other), factor, form in (
            (_DEPTHWISE_GRADIENTS, 5, _LARGER_FILTER),
            (_DEPTHWISE_GRADIENTS[::-1], 20, _STRIDED),
        )
    ),
    # A process of oneDNN's bfloat16 kernel was still running after 45 s, where float32 takes
    # 30 ms: on an AMD Zen 5 with AVX512-BF16, filters of 15 x 15 and 31 x 31 on 64 x 64 pixels
    # with 4 and 16 channels, 1 x 15 on 256 with 16, 1 x 17 on 512 with 8, 1 x 31 on 512 with 4.
    # These returned: sides of 7 to 13; 15 x 15 on 16 x 16 pixels; sides of 17, 27 and 31 with 32,
    # 64 and 128 channels; both gradients. The row does not depend on sizes of images and
    # numbers of channels, as their limits are those of this machine. Float16 is oneDNN's on CPUs
    # with AVX512-FP16: there 15 x 15 on 64 x 64 pixels with 16 channels, 1 x 16 and 1 x 17 on
    # 256 with 16 and 1 do not return either.
    KernelFact(
        op="DepthwiseConv2dNative",
        low=_in(onednn=_BOTH),
        fault=Fault.HANGS,
        form=_WIDE_FILTER,
        gradient_of=_DEPTHWISE_GRADIENTS,
        layers=_SEPARABLE_LAYERS,
    ),
    # Not run: for oneDNN it is the same convolution, with the same kernel.
    KernelFact(
        op="Conv2D",
        low=_in(onednn=_BOTH),
        fault=Fault.HANGS,
        form=_WIDE_GROUPS,
        gradient_of=_CONV_GRADIENTS,
        layers=("Conv1D", "Conv2D"),
    ),
    *(
        KernelFact(
            op=op,
            low=_in(eigen=_BOTH),
            terms="filter",
            gradient_of=gradient_of,
            layers=_SEPARABLE_LAYERS,
        )
        for op, gradient_of in (
            ("DepthwiseConv2dNative", _DEPTHWISE_GRADIENTS),
            (
                "DepthwiseConv2dNativeBackpropInput",
                ("DepthwiseConv2dNative", "DepthwiseConv2dNativeBackpropFilter"),
            ),
        )
    ),
    # Twice float32's time, which two Casts more do not take: exact GELUs have it.
    KernelFact(op="Erfc", low=_in(eigen=_BOTH), fault=Fault.SLOW, factor=2),
    # Pooling, resizing, morphology. In graphs, oneDNN's bfloat16 gradient of MaxPool is worse
    # than Eigen's: with windows of more than 256 pixels it adds to the wrong ones.
    KernelFact(
        op="AvgPool",
        low=_in(eigen=_BOTH),
        terms="window",
        gradient_of=("AvgPoolGrad",),
        layers=("AveragePooling1D", "AveragePooling2D"),
    ),
    # In three dimensions CPUs have no float16 kernels.
    KernelFact(
        op="AvgPool3D",
        low=_in(eigen=_BF16),
        terms="window",
        gradient_of=("AvgPool3DGrad",),
        layers=("AveragePooling3D",),
    ),
    *(
        KernelFact(
            op=f"{op}Grad",
            low=_in(eigen=on_cpus, gpu=_BOTH),
            terms="overlapping windows",
            gradient_of=(op, *gradient_of),
            layers=layers,
        )
        for op, on_cpus, gradient_of, layers in (
            ("AvgPool", _BOTH, (), ("AveragePooling1D", "AveragePooling2D")),
            ("AvgPool3D", _BF16, (), ("AveragePooling3D",)),
            ("MaxPool", _BOTH, ("MaxPoolGradGrad",), ("MaxPooling1D", "MaxPooling2D")),
            ("MaxPool3D", _BF16, ("MaxPool3DGradGrad",), ("MaxPooling3D",)),
        )
    ),
    *(
        KernelFact(
            op=op,
            low=_in(eigen=_BOTH, gpu=_BOTH),
            terms="overlapping windows",
            gradient_of=(gradient_of,),
        )
        for op, gradient_of in (
            ("MaxPoolGradV2", "MaxPoolV2"),
            ("MaxPoolGradWithArgmax", "MaxPoolWithArgmax"),
        )
    ),
    KernelFact(
        op="ResizeNearestNeighborGrad",
        low=_in(eigen=_BOTH, gpu=_BOTH, xla=_BF16),
        gradient_of=("ResizeNearestNeighbor",),
        layers=("UpSampling2D", "Resizing"),
    ),
    KernelFact(
        op="CropAndResizeGradImage",
        low=_in(eigen=_F16, gpu=_F16),
        terms="unknown",
        gradient_of=("CropAndResize",),
    ),
    *(
        KernelFact(
            op=f"Dilation2DBackprop{operand}",
            low=_in(eigen=_BOTH, gpu=_BOTH),
            terms=terms,
            gradient_of=("Dilation2D",),
        )
        for operand, terms in (("Filter", "pixels"), ("Input", "filter"))
    ),
)

# What no replacement makes exact: the result, or the place where it is added up, is low itself.
UNMENDABLE: Mapping[str, str] = {
    "ResourceScatterAdd": "it adds to a variable of a low dtype; keep the variable in float32",
    "ResourceScatterSub": "it subtracts from a variable of a low dtype; keep it in float32",
    "ResourceScatterNdAdd": "it adds to a variable of a low dtype; keep the variable in float32",
    "ResourceScatterNdSub": "it subtracts from a variable of a low dtype; keep it in float32",
    "ConditionalAccumulator": "it adds gradients up in their dtype; give it float32 ones",
    "AssignAddVariableOp": "it adds to a variable of a low dtype; keep the variable in float32",
}

# ---- Queries ---------------------------------------------------------------------------


# How many terms may be added up in a low dtype. Adding n equal terms is off by at most n / 4 *
# eps, as each step may round in the same direction, by half of what the last digit of the sum
# is worth; usually by much less. Four roundings of a result are 2 * eps.
SAFE_TERMS = 16


def stalling_terms(dtype: str) -> float:
    """How many equal terms a sum in a dtype takes before it stops growing.

    Example:
        >>> stalling_terms("bfloat16"), stalling_terms("float16")
        (256.0, 2048.0)
    """
    return 2 / float_format(dtype).eps


def library_of(op: str, dtype: str, device: str, onednn: frozenset[str]) -> str:
    """Which library's kernel runs an op.

    Args:
        op: The op type.
        dtype: The low dtype.
        device: "cpu", "gpu" or "tpu"; "" for a CPU.
        onednn: The low dtypes for which the CPU's kernels are oneDNN's.
    """
    if device == "tpu":
        return XLA
    if device == "gpu":
        return GPU
    is_onednns = dtype in onednn and op in ONEDNN_OPS and (op, dtype) not in _NOT_ONEDNNS
    return ONEDNN if is_onednns else EIGEN


@functools.cache
def facts_of(op: str, dtype: str, device: str, onednn: frozenset[str]) -> tuple[KernelFact, ...]:
    """The rows of an op that hold for the kernel that runs; see `library_of`."""
    here = library_of(op, dtype, device, onednn), dtype
    return tuple(fact for fact in KERNEL_FACTS if fact.op == op and here in fact.low)


def fact_about(call: OpCall, dtype: str, device: str, onednn: frozenset[str]) -> KernelFact | None:
    """The row that keeps a call from a low dtype; None if its low kernel is as it should be.

    Example:
        >>> pooling = OpCall("AvgPool", attrs={"ksize": [1, 32, 32, 1]})
        >>> fact_about(pooling, "bfloat16", "cpu", frozenset()).instead
        'float32'
        >>> fact_about(pooling, "bfloat16", "cpu", frozenset({"bfloat16"})) is None
        True
    """
    return next(
        (fact for fact in facts_of(call.op, dtype, device, onednn) if fact.holds_for(call)),
        None,
    )


@functools.cache
def forward_ops(device: str, onednn: frozenset[str]) -> Mapping[str, frozenset[str]]:
    """Ops whose gradients run a kernel of the table, with the dtypes in which they do."""
    dtypes_of: dict[str, frozenset[str]] = {}
    for fact in KERNEL_FACTS:
        dtypes = {d for d in LOW_PRECISION if fact in facts_of(fact.op, d, device, onednn)}
        for op in fact.gradient_of:
            dtypes_of[op] = dtypes_of.get(op, frozenset()) | dtypes
    return dtypes_of


def unusable_kernels(device: str, onednn: frozenset[str]) -> tuple[str, ...]:
    """Texts of the ops of a device whose kernels do not return, crash, or are slow.

    Example:
        >>> found = unusable_kernels("cpu", frozenset({"bfloat16"}))
        >>> [text for text in found if "not return" in text]
        ['DepthwiseConv2dNative in bfloat16 (does not return)', 'Conv2D in bfloat16 (does not ...)']
    """
    dtypes: dict[tuple[str, str], dict[str, None]] = {}
    for fact in KERNEL_FACTS:
        for library, dtype in sorted(fact.low) if fact.fault in _IN_SHORT else ():
            if library == library_of(fact.op, dtype, device, onednn):
                short = _IN_SHORT[fact.fault].format(factor=fact.factor)
                dtypes.setdefault((fact.op, short), {})[dtype] = None
    return tuple(
        f"{op} in {' and '.join(sorted(found))} ({short})" for (op, short), found in dtypes.items()
    )


OPS = frozenset(fact.op for fact in KERNEL_FACTS)
GUARDED_OPS = OPS | frozenset(op for fact in KERNEL_FACTS for op in fact.gradient_of)
LAYERS = frozenset(layer for fact in KERNEL_FACTS for layer in fact.layers)
