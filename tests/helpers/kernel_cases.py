"""Calls of the kernels in `tfamp.planning.kernels`, on enough positive terms to lose some of them.

`RAW_CASES` call an op itself; `kernel_path_cases` has functions and layers, whose gradients run the
gradient ops of the table.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import tensorflow as tf

from tfamp.core.dtypes import LOW_PRECISION

# Makes an argument of a case from a generator of random numbers.
Data: TypeAlias = Callable[[np.random.Generator], np.ndarray]
R = tf.raw_ops
TERMS = 16384


@dataclass(frozen=True)
class KernelCase:
    """A call, and the rows of the table that it exercises.

    Attributes:
        name: Unique among the cases of its kind.
        rows: Op types of the rows. A raw case calls the first.
        call: Takes tensors, one of each `arrays`, and returns a tensor. In a case of a layer it
            takes the keyword arguments of Keras's base class and returns the layer.
        arrays: The data; those of a layer are the inputs of its call.
        wrt: Positions of the arguments whose gradients are compared; a layer's are all.
        roundings: How many roundings follow each other on the way to a result.
        crashes_onednn: TensorFlow's bfloat16 kernel of oneDNN corrupts memory on these shapes.
        dtypes: In which this shape shows what its row says, for a raw case.
        quick: Whether the paths to low precision run it in the quick tests.
    """

    name: str
    rows: tuple[str, ...]
    call: Callable[..., Any]
    arrays: tuple[Data, ...]
    wrt: tuple[int, ...] = ()
    roundings: int = 1
    crashes_onednn: bool = False
    dtypes: tuple[str, ...] = LOW_PRECISION
    quick: bool = False

    def __str__(self) -> str:
        return self.name


# ---- Data ----------------------------------------------------------------------------------------


def positive(*shape: int, scale: float = 1.0) -> Data:
    """Terms of nearly one size, which a low sum rounds in one direction."""
    return lambda random: random.uniform(scale, 1.1 * scale, shape)


def spread(*shape: int, scale: float = 1.0) -> Data:
    """Terms of several sizes: the gradients of attention to nearly equal ones cancel."""
    return lambda random: random.uniform(0.5 * scale, 1.5 * scale, shape)


def near_one(*shape: int, most: float = 0.02) -> Data:
    """Factors that bfloat16 tells from one, and whose product stays within range."""
    return lambda random: 1 + random.uniform(-most, most, shape)


def peak(*shape: int) -> Data:
    """Values of which no two are equal, with the largest in the middle of the spatial axes."""

    def make(random: np.random.Generator) -> np.ndarray:
        _, *sides, channels = shape
        sizes = np.outer(2.0 ** np.arange(-14, 15), 1 + np.arange(128) / 128).ravel()
        distinct = np.concatenate([sizes, -sizes])  # In bfloat16 and in float16.
        planes = [random.permutation(distinct)[: np.prod(sides)] for _ in range(channels)]
        values = np.stack(planes, -1).reshape(shape)
        values[(slice(None), *(side // 2 for side in sides))] = 2.0**15
        return values

    return make


def zeros(count: int, *columns: int) -> Any:
    return tf.zeros((count, *columns), tf.int32)


def cells() -> Any:
    """Positions of the values of a sparse tensor with one row."""
    count = tf.range(TERMS, dtype=tf.int64)
    return tf.stack([tf.zeros_like(count), count], 1)


def sparse(values: Any) -> Any:
    return tf.SparseTensor(cells(), values, (1, TERMS))


def pooling(size: int, rank: int = 2, stride: int = 1) -> dict[str, Any]:
    return {
        "ksize": [1, *[size] * rank, 1],
        "strides": [1, *[stride] * rank, 1],
        "padding": "SAME" if stride == 1 else "VALID",
    }


def constant_like(value: Any, *shape: int) -> Any:
    return tf.zeros(shape, value.dtype)


# ---- Ops themselves ------------------------------------------------------------------------------


def _raw(op: str, call: Callable[..., Any], *arrays: Data, name: str = "", **more: Any):
    return KernelCase(f"{op}{name and ' '}{name}", (op,), call, arrays, **more)


def _max_pool_gradient(rank: int) -> Callable[..., Any]:
    op = "MaxPool" if rank == 2 else "MaxPool3D"
    window = pooling(31 if rank == 2 else 9, rank)

    def call(x: Any, upstream: Any) -> Any:
        y = getattr(R, op)(input=x, **window)
        return getattr(R, f"{op}Grad")(orig_input=x, orig_output=y, grad=upstream, **window)

    return call


def _lstm_gradient(version: str, x: Any, w: Any, upstream: Any) -> Any:
    """The gradient of the biases of a block of LSTM cells."""
    state, peephole, bias = (constant_like(x, *shape) for shape in ((64, 4), (4,), (16,)))
    shared = {
        "seq_len_max": 256, "x": x, "cs_prev": state, "h_prev": state, "w": w, "wci": peephole,
        "wcf": peephole, "wco": peephole, "b": bias,
    }  # fmt: skip
    outputs = getattr(R, f"BlockLSTM{version}")(**shared)._asdict()
    # The state is not differentiated, so the hidden values' gradients alone are given.
    given = {"cs_grad": tf.zeros_like(upstream), "h_grad": upstream, "use_peephole": False}
    return getattr(R, f"BlockLSTMGrad{version}")(**shared, **outputs, **given).b_grad


def _lrn_gradient(upstream: Any, x: Any) -> Any:
    y = R.LRN(input=x, depth_radius=500)
    return R.LRNGrad(input_grads=upstream, input_image=x, output_image=y, depth_radius=500)


def _segment(op: str, *arrays: Data) -> KernelCase:
    def call(data: Any) -> Any:
        ids = {"segment_ids": zeros(TERMS)}
        if op.startswith("Unsorted"):
            ids["num_segments"] = 1
        return getattr(R, op)(data=data, **ids)

    return _raw(op, call, *arrays)


def _scatter(op: str, call: Callable[..., Any]) -> KernelCase:
    return _raw(op, functools.partial(call, getattr(R, op)), positive(TERMS, 4))


def scatter_into(op: Callable[..., Any], updates: Any) -> Any:
    to = {"indices": zeros(TERMS, 1), "updates": updates}
    name = "input" if op is R.ScatterNdNonAliasingAdd else "tensor"
    return op(**{name: constant_like(updates, 1, 4)}, **to)


def _einsum(equation: str, *arrays: Data, name: str = "", **more: Any) -> KernelCase:
    def call(*tensors: Any) -> Any:
        return R.Einsum(inputs=tensors, equation=equation)

    return _raw("Einsum", call, *arrays, name=name or equation, **more)


def _filter_gradient(op: str, size: list[int], *arrays: Data, stride: int = 1, **more: Any):
    steps = [1, *[stride] * (len(size) - 2), 1]

    def call(x: Any, upstream: Any) -> Any:
        images = {"input": x, "out_backprop": upstream, "strides": steps, "padding": "SAME"}
        return getattr(R, op)(filter_sizes=size, **images)

    return _raw(op, call, *arrays, **more)


IMAGE, SMALL_IMAGE = positive(1, 128, 128, 8), positive(1, 64, 64, 8)  # 128 * 128 is TERMS.
WIDE_FILTER = positive(31, 31, 8, 1)
VOLUME = positive(1, 32, 32, 32, 4)
_UNIT = {"strides": [1] * 4, "padding": "VALID"}

RAW_CASES: tuple[KernelCase, ...] = (
    # Biases and reductions.
    _raw("BiasAddGrad", lambda d: R.BiasAddGrad(out_backprop=d), positive(TERMS, 4)),
    *(
        _raw(op, lambda d, op=op: getattr(R, op)(input=d, axis=[0]), data)
        for op, data in (
            ("Sum", positive(TERMS, 4)),
            ("Mean", positive(TERMS, 4)),
            ("Prod", near_one(TERMS, 4)),
            ("EuclideanNorm", positive(TERMS, 4, scale=1 / 16)),
        )
    ),
    _raw("Mean", lambda d: R.Mean(input=d, axis=[1, 2]), positive(2, 128, 128, 4), name="images"),
    _raw("L2Loss", lambda d: R.L2Loss(t=d), positive(TERMS, scale=1 / 16)),
    _raw("Cumsum", lambda d: R.Cumsum(x=d, axis=0), positive(TERMS, 4)),
    _raw("Cumprod", lambda d: R.Cumprod(x=d, axis=0), near_one(4096, 4)),
    _raw("CumulativeLogsumexp", lambda d: R.CumulativeLogsumexp(x=d, axis=0), positive(4096, 4)),
    _raw("AddN", lambda d: R.AddN(inputs=tf.unstack(d)), positive(4096, 16)),
    _raw("LRN", lambda x: R.LRN(input=x, depth_radius=2000), positive(1, 4, 4, 4096)),
    _raw("LRNGrad", _lrn_gradient, *[positive(1, 2, 2, 2048)] * 2),
    # Segments, scattering, sparse tensors.
    *(_segment(op, positive(TERMS, 4)) for op in ("SegmentSum", "SegmentMean")),
    _segment("SegmentProd", near_one(TERMS, 4)),
    _segment("UnsortedSegmentSum", positive(TERMS, 4)),
    _segment("UnsortedSegmentProd", near_one(TERMS, 4)),
    _scatter("ScatterNd", lambda op, d: op(indices=zeros(TERMS, 1), updates=d, shape=[1, 4])),
    *(
        _scatter(op, scatter_into)
        for op in ("TensorScatterAdd", "TensorScatterSub", "ScatterNdNonAliasingAdd")
    ),
    _raw(
        "SparseTensorDenseAdd",
        lambda v: R.SparseTensorDenseAdd(
            a_indices=tf.zeros((TERMS, 2), tf.int64),
            a_values=v,
            a_shape=[1, 1],
            b=constant_like(v, 1, 1),
        ),
        positive(TERMS),
    ),
    _raw(
        "SparseTensorDenseMatMul",
        lambda v, d: R.SparseTensorDenseMatMul(
            a_indices=cells(), a_values=v, a_shape=[1, TERMS], b=d
        ),
        positive(TERMS),
        positive(TERMS, 4),
    ),
    *(
        _raw(
            f"{op}FillEmptyRowsGrad",
            lambda d, op=op: (
                getattr(R, f"{op}FillEmptyRowsGrad")(
                    reverse_index_map=tf.constant([0], tf.int64), grad_values=d
                ).d_default_value
            ),
            positive(TERMS),
        )
        for op in ("Sparse", "Ragged")
    ),
    # Products.
    _einsum("abc,abd->cd", positive(128, 128, 4), positive(128, 128, 4)),
    _einsum("abc->c", positive(128, 128, 4)),
    _einsum("a,a->", positive(TERMS), positive(TERMS)),
    *(
        _raw(
            f"BlockLSTMGrad{version}",
            functools.partial(_lstm_gradient, version),
            positive(256, 64, 4),
            positive(8, 16, scale=1 / 8),
            positive(256, 64, 4),
        )
        for version in ("", "V2")
    ),
    # Convolutions.
    *(
        _filter_gradient(
            "Conv2DBackpropFilter",
            [1, 1, channels, filters],
            positive(1, 128, 128, channels),
            positive(1, 128 // stride, 128 // stride, filters),
            stride=stride,
            name=name,
            dtypes=dtypes,
            crashes_onednn=stride > 1,
        )  # fmt: skip
        for name, stride, channels, filters, dtypes in (
            ("1x1", 1, 8, 4, ("bfloat16",)),
            ("1x1 strided", 2, 8, 16, ("bfloat16",)),
            ("1x1 of one channel", 1, 1, 1, LOW_PRECISION),
        )
    ),
    _raw(
        "Conv2D",
        lambda x, f: R.Conv2D(input=x, filter=f, **_UNIT),
        positive(1, 16, 16, 32),
        positive(3, 3, 1, 32),
        name="of 32 groups",
    ),
    _raw(
        "Conv2D",
        lambda x, f: R.Conv2D(input=x, filter=f, **_UNIT),
        positive(1, 16, 16, 4),
        positive(15, 15, 1, 4),
        name="wide, of 4 groups",
        crashes_onednn=True,
    ),
    _raw(
        "Conv2DBackpropInput",
        lambda f, d: R.Conv2DBackpropInput(
            input_sizes=[1, 7, 7, 1], filter=f, out_backprop=d, **_UNIT
        ),
        positive(3, 3, 1, 2048),
        positive(1, 5, 5, 2048),
    ),
    _raw(
        "Conv3DBackpropInputV2",
        lambda f, d: R.Conv3DBackpropInputV2(
            input_sizes=[1, 5, 5, 5, 1], filter=f, out_backprop=d, strides=[1] * 5, padding="VALID"
        ),
        positive(3, 3, 3, 1, 1024),
        positive(1, 3, 3, 3, 1024),
    ),
    _filter_gradient("Conv3DBackpropFilterV2", [1, 1, 1, 1, 1], *[positive(1, 32, 32, 32, 1)] * 2),
    *(
        _raw(
            op,
            lambda x, f, op=op: getattr(R, op)(input=x, filter=f, strides=[1] * 5, padding="VALID"),
            positive(1, 24, 24, 24, 4, scale=0.5),
            positive(24, 24, 24, 4, 1),
        )
        for op in ("Conv3D", "Conv")
    ),
    *(
        _filter_gradient(
            "DepthwiseConv2dNativeBackpropFilter",
            [*size, 8, 1],
            IMAGE,
            IMAGE,
            name="x".join(map(str, size)),
        )  # fmt: skip
        for size in ([3, 3], [1, 7])
    ),
    _raw(
        "DepthwiseConv2dNative",
        lambda x, f: R.DepthwiseConv2dNative(input=x, filter=f, strides=[1] * 4, padding="SAME"),
        SMALL_IMAGE,
        WIDE_FILTER,
        crashes_onednn=True,
    ),
    _raw(
        "DepthwiseConv2dNativeBackpropInput",
        lambda f, d: R.DepthwiseConv2dNativeBackpropInput(
            input_sizes=d.shape, filter=f, out_backprop=d, strides=[1] * 4, padding="SAME"
        ),
        WIDE_FILTER,
        SMALL_IMAGE,
        crashes_onednn=True,
    ),
    _raw(
        "DepthwiseConv2dNativeBackpropInput",
        lambda f, d: R.DepthwiseConv2dNativeBackpropInput(
            input_sizes=[1, 64, 64, 8],
            filter=f,
            out_backprop=d,
            strides=[1, 2, 2, 1],
            padding="SAME",
        ),
        positive(3, 3, 8, 1),
        positive(1, 32, 32, 8),
        name="strided",
    ),
    _raw("BiasAdd", lambda x, b: R.BiasAdd(value=x, bias=b), positive(TERMS, 4), positive(4)),
    *(
        _raw(
            op,
            lambda x, w, b, op=op: getattr(R, op)(x=R.MatMul(a=x, b=w), y=b),
            positive(TERMS, 4),
            positive(4, 4),
            positive(4),
        )
        for op in ("Add", "AddV2")
    ),
    _raw("Erfc", lambda x: R.Erfc(x=x), positive(TERMS)),
    # Pooling, resizing, morphology.
    _raw("AvgPool", lambda x: R.AvgPool(value=x, **pooling(32, stride=32)), IMAGE),
    _raw(
        "AvgPool3D",
        lambda x: R.AvgPool3D(input=x, **pooling(25, 3, stride=25)),
        positive(1, 25, 25, 25, 4),
    ),
    _raw(
        "AvgPoolGrad",
        lambda d: R.AvgPoolGrad(orig_input_shape=d.shape, grad=d, **pooling(31)),
        IMAGE,
    ),
    _raw(
        "AvgPool3DGrad",
        lambda d: R.AvgPool3DGrad(orig_input_shape=d.shape, grad=d, **pooling(15, 3)),
        positive(1, 16, 16, 16, 2),
    ),
    _raw("MaxPoolGrad", _max_pool_gradient(2), peak(1, 64, 64, 8), SMALL_IMAGE),
    _raw(
        "MaxPool3DGrad", _max_pool_gradient(3), peak(1, 16, 16, 16, 4), positive(1, 16, 16, 16, 4)
    ),
    _raw(
        "MaxPoolGradV2",
        lambda x, d: R.MaxPoolGradV2(
            orig_input=x, orig_output=R.MaxPool(input=x, **pooling(31)), grad=d, **pooling(31)
        ),
        peak(1, 64, 64, 8),
        SMALL_IMAGE,
    ),
    _raw(
        "MaxPoolGradWithArgmax",
        lambda x, d: R.MaxPoolGradWithArgmax(
            input=x,
            argmax=R.MaxPoolWithArgmax(input=x, **pooling(31)).argmax,
            grad=d,
            **pooling(31),
        ),
        peak(1, 64, 64, 8),
        SMALL_IMAGE,
    ),
    _raw(
        "ResizeNearestNeighborGrad",
        lambda d: R.ResizeNearestNeighborGrad(grads=d, size=[1, 1]),
        IMAGE,
    ),
    _raw(
        "CropAndResizeGradImage",
        lambda d: R.CropAndResizeGradImage(
            grads=tf.cast(d, tf.float32),
            boxes=[[0, 0, 1e-6, 1e-6]],
            box_ind=[0],
            image_size=[1, 4, 4, 8],
            T=d.dtype,
        ),  # fmt: skip
        IMAGE,
    ),
    *(
        _raw(
            f"Dilation2DBackprop{operand}",
            lambda x, d, op=f"Dilation2DBackprop{operand}", side=side: getattr(R, op)(
                input=x,
                filter=constant_like(x, side, side, 8),
                out_backprop=d,
                strides=[1] * 4,
                rates=[1] * 4,
                padding="SAME",
            ),  # fmt: skip
            data,
            upstream,
        )
        for operand, side, data, upstream in (
            ("Filter", 1, IMAGE, IMAGE),
            ("Input", 31, peak(1, 64, 64, 8), SMALL_IMAGE),
        )
    ),
)
