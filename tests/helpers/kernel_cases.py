"""Calls of the kernels in `tfamp.planning.kernels`, on enough positive terms to lose some of them.

`RAW_CASES` call an op itself, `FUNCTION_CASES` are functions as a user writes them, whose gradients
run the gradient ops of the table, and `LAYER_CASES` are the Keras layers that the table names.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import keras
import numpy as np
import tensorflow as tf

from tfamp.core.dtypes import LOW_PRECISION

# Makes an argument of a case from a generator of random numbers.
Data: TypeAlias = Callable[[np.random.Generator], np.ndarray]
R = tf.raw_ops
TERMS = 16384
_SIDE = 128  # Its square is TERMS.


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
    return lambda random: random.uniform(0.5 * scale, 1.5 * scale, shape)


def near_one(*shape: int, most: float = 0.02) -> Data:
    """Factors that bfloat16 tells from one, and whose product stays within range."""
    return lambda random: 1 + random.uniform(-most, most, shape)


def peak(*shape: int) -> Data:
    """Zeros, but for the middle of the spatial axes: the largest value of all windows around it."""

    def make(_: np.random.Generator) -> np.ndarray:
        values = np.zeros(shape)
        values[(slice(None), *(size // 2 for size in shape[1:-1]))] = 1
        return values

    return make


def _zeros(count: int, *columns: int) -> Any:
    return tf.zeros((count, *columns), tf.int32)


def _cells() -> Any:
    """Positions of the values of a sparse tensor with one row."""
    count = tf.range(TERMS, dtype=tf.int64)
    return tf.stack([tf.zeros_like(count), count], 1)


def _sparse(values: Any) -> Any:
    return tf.SparseTensor(_cells(), values, (1, TERMS))


def _pooling(size: int, rank: int = 2, stride: int = 1) -> dict[str, Any]:
    return {
        "ksize": [1, *[size] * rank, 1],
        "strides": [1, *[stride] * rank, 1],
        "padding": "SAME" if stride == 1 else "VALID",
    }


def _constant_like(value: Any, *shape: int) -> Any:
    return tf.zeros(shape, value.dtype)


# ---- Ops themselves ------------------------------------------------------------------------------


def _raw(op: str, call: Callable[..., Any], *arrays: Data, name: str = "", **more: Any):
    return KernelCase(f"{op}{name and ' '}{name}", (op,), call, arrays, **more)


def _max_pool_gradient(rank: int) -> Callable[..., Any]:
    op = "MaxPool" if rank == 2 else "MaxPool3D"
    window = _pooling(31 if rank == 2 else 9, rank)

    def call(x: Any, upstream: Any) -> Any:
        y = getattr(R, op)(input=x, **window)
        return getattr(R, f"{op}Grad")(orig_input=x, orig_output=y, grad=upstream, **window)

    return call


def _lstm_gradient(version: str, x: Any, w: Any, upstream: Any) -> Any:
    """The gradient of the biases of a block of LSTM cells."""
    state, peephole, bias = (_constant_like(x, *shape) for shape in ((64, 4), (4,), (16,)))
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
        ids = {"segment_ids": _zeros(TERMS)}
        if op.startswith("Unsorted"):
            ids["num_segments"] = 1
        return getattr(R, op)(data=data, **ids)

    return _raw(op, call, *arrays)


def _scatter(op: str, call: Callable[..., Any]) -> KernelCase:
    return _raw(op, functools.partial(call, getattr(R, op)), positive(TERMS, 4))


def _scatter_into(op: Callable[..., Any], updates: Any) -> Any:
    to = {"indices": _zeros(TERMS, 1), "updates": updates}
    name = "input" if op is R.ScatterNdNonAliasingAdd else "tensor"
    return op(**{name: _constant_like(updates, 1, 4)}, **to)


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


_IMAGE = positive(1, _SIDE, _SIDE, 8)
_WIDE_IMAGE, _WIDE_FILTER = positive(1, 128, 128, 8), positive(31, 31, 8, 1)
_VOLUME = positive(1, 32, 32, 32, 4)
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
    _scatter("ScatterNd", lambda op, d: op(indices=_zeros(TERMS, 1), updates=d, shape=[1, 4])),
    *(
        _scatter(op, _scatter_into)
        for op in ("TensorScatterAdd", "TensorScatterSub", "ScatterNdNonAliasingAdd")
    ),
    _raw(
        "SparseTensorDenseMatMul",
        lambda v, d: R.SparseTensorDenseMatMul(
            a_indices=_cells(), a_values=v, a_shape=[1, TERMS], b=d
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
        )  # fmt: skip
        # oneDNN's strided gradient of fewer filters writes where it must not.
        for name, stride, channels, filters, dtypes in (
            ("1x1", 1, 8, 4, ("bfloat16",)),
            ("1x1 strided", 2, 8, 16, ("bfloat16",)),
            ("1x1 of one channel", 1, 1, 1, LOW_PRECISION),
        )
    ),
    _raw(
        "Conv2DBackpropInput",
        lambda f, d: R.Conv2DBackpropInput(
            input_sizes=[1, 7, 7, 1], filter=f, out_backprop=d, **_UNIT
        ),
        positive(3, 3, 1, 2048),
        positive(1, 5, 5, 2048),
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
            _IMAGE,
            _IMAGE,
            name="x".join(map(str, size)),
        )  # fmt: skip
        for size in ([3, 3], [1, 7])
    ),
    _raw(
        "DepthwiseConv2dNative",
        lambda x, f: R.DepthwiseConv2dNative(input=x, filter=f, strides=[1] * 4, padding="SAME"),
        _WIDE_IMAGE,
        _WIDE_FILTER,
        crashes_onednn=True,
    ),
    _raw(
        "DepthwiseConv2dNativeBackpropInput",
        lambda f, d: R.DepthwiseConv2dNativeBackpropInput(
            input_sizes=d.shape, filter=f, out_backprop=d, strides=[1] * 4, padding="SAME"
        ),
        _WIDE_FILTER,
        _WIDE_IMAGE,
        crashes_onednn=True,
    ),
    # Pooling, resizing, morphology.
    _raw("AvgPool", lambda x: R.AvgPool(value=x, **_pooling(32, stride=32)), _IMAGE),
    _raw(
        "AvgPool3D",
        lambda x: R.AvgPool3D(input=x, **_pooling(25, 3, stride=25)),
        positive(1, 25, 25, 25, 4),
    ),
    _raw(
        "AvgPoolGrad",
        lambda d: R.AvgPoolGrad(orig_input_shape=d.shape, grad=d, **_pooling(31)),
        _IMAGE,
    ),
    _raw(
        "AvgPool3DGrad",
        lambda d: R.AvgPool3DGrad(orig_input_shape=d.shape, grad=d, **_pooling(15, 3)),
        positive(1, 16, 16, 16, 2),
    ),
    _raw("MaxPoolGrad", _max_pool_gradient(2), peak(1, 128, 128, 8), _IMAGE),
    _raw(
        "MaxPool3DGrad", _max_pool_gradient(3), peak(1, 16, 16, 16, 4), positive(1, 16, 16, 16, 4)
    ),
    _raw(
        "MaxPoolGradV2",
        lambda x, d: R.MaxPoolGradV2(
            orig_input=x, orig_output=R.MaxPool(input=x, **_pooling(31)), grad=d, **_pooling(31)
        ),
        peak(1, 128, 128, 8),
        _IMAGE,
    ),
    _raw(
        "MaxPoolGradWithArgmax",
        lambda x, d: R.MaxPoolGradWithArgmax(
            input=x,
            argmax=R.MaxPoolWithArgmax(input=x, **_pooling(31)).argmax,
            grad=d,
            **_pooling(31),
        ),
        peak(1, 128, 128, 8),
        _IMAGE,
    ),
    _raw(
        "ResizeNearestNeighborGrad",
        lambda d: R.ResizeNearestNeighborGrad(grads=d, size=[1, 1]),
        _IMAGE,
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
        _IMAGE,
    ),
    *(
        _raw(
            f"Dilation2DBackprop{operand}",
            lambda x, d, op=f"Dilation2DBackprop{operand}", side=side: getattr(R, op)(
                input=x,
                filter=_constant_like(x, side, side, 8),
                out_backprop=d,
                strides=[1] * 4,
                rates=[1] * 4,
                padding="SAME",
            ),  # fmt: skip
            data,
            _IMAGE,
        )
        for operand, side, data in (
            ("Filter", 1, _IMAGE),
            ("Input", 31, peak(1, 128, 128, 8)),
        )
    ),
)

# ---- Functions -----------------------------------------------------------------------------------


def _function(name: str, rows: str, call: Callable[..., Any], *arrays: Data, **more: Any):
    more.setdefault("wrt", tuple(range(len(arrays))))
    return KernelCase(name, tuple(rows.split()), call, arrays, **more)


def _broadcast(name: str, call: Callable[..., Any], *arrays: Data, quick: bool = False):
    return _function(name, "Sum", call, *(arrays or (positive(TERMS, 4), positive(4))), quick=quick)


def _attention(query: Any, key: Any, value: Any) -> Any:
    scores = tf.einsum("bqd,bkd->bqk", query, key) / 8
    return tf.einsum("bqk,bkd->bqd", tf.nn.softmax(scores), value)


FUNCTION_CASES: tuple[KernelCase, ...] = (
    _function(
        "bias_add", "BiasAddGrad", tf.nn.bias_add, positive(TERMS, 4), positive(4), quick=True
    ),
    _broadcast("add", lambda x, b: x + b, quick=True),
    _broadcast("multiply", lambda x, b: x * b),
    _broadcast("divide", lambda x, b: x / b, positive(TERMS, 4), positive(4, scale=2)),
    _broadcast("broadcast_to", lambda b: tf.broadcast_to(b, (TERMS, 4)), positive(4)),
    _broadcast("tile", lambda b: tf.tile(b, (TERMS, 1)), positive(1, 4)),
    _function("reduce_sum", "Sum", lambda x: tf.reduce_sum(x, 0), positive(TERMS, 4), quick=True),
    _function(
        "reduce_mean", "Mean", lambda x: tf.reduce_mean(x, (1, 2)), positive(2, 128, 128, 4),
        quick=True,
    ),
    _function("reduce_prod", "Prod", lambda x: tf.reduce_prod(x, 0), near_one(TERMS, 4), wrt=()),
    _function(
        "reduce_prod, gradient", "Prod Cumprod", lambda x: tf.reduce_prod(x, 0), near_one(4096, 4)
    ),
    _function(
        "euclidean_norm", "EuclideanNorm", lambda x: tf.math.reduce_euclidean_norm(x, 0),
        positive(TERMS, 4, scale=1 / 16),
    ),
    _function("l2_loss", "L2Loss", tf.nn.l2_loss, positive(TERMS, scale=1 / 16)),
    _function("cumsum", "Cumsum", tf.cumsum, positive(TERMS, 4), quick=True),
    _function("cumprod", "Cumprod", tf.math.cumprod, near_one(4096, 4)),
    _function(
        "cumulative_logsumexp", "CumulativeLogsumexp", tf.math.cumulative_logsumexp,
        positive(4096, 4),
    ),
    _function("add_n", "AddN", lambda x: tf.add_n(tf.unstack(x)), positive(1024, 16)),
    _function("lrn", "LRN LRNGrad", lambda x: tf.nn.lrn(x, 500), positive(1, 2, 2, 2048)),
    *(
        _function(
            op, row, lambda x, op=op: getattr(tf.math, op)(x, _zeros(TERMS)), data, quick=quick
        )
        for op, row, data, quick in (
            ("segment_sum", "SegmentSum", positive(TERMS, 4), True),
            ("segment_mean", "SegmentMean SegmentSum", positive(TERMS, 4), False),
            ("segment_prod", "SegmentProd", near_one(TERMS, 4), False),
        )
    ),
    *(
        _function(
            op, row, lambda x, op=op: getattr(tf.math, op)(x, _zeros(TERMS), 1), data, wrt=wrt,
            roundings=roundings,
        )
        for op, row, data, wrt, roundings in (
            ("unsorted_segment_sum", "UnsortedSegmentSum", positive(TERMS, 4), (0,), 1),
            ("unsorted_segment_mean", "UnsortedSegmentSum", positive(TERMS, 4), (0,), 2),
            ("unsorted_segment_sqrt_n", "UnsortedSegmentSum", positive(TERMS, 4), (0,), 2),
            ("unsorted_segment_prod", "UnsortedSegmentProd", near_one(TERMS, 4), (), 1),
        )
    ),
    _function(
        "gather", "UnsortedSegmentSum", lambda x: tf.gather(x, _zeros(TERMS)), positive(4, 4),
        quick=True,
    ),
    _function("gather_nd", "ScatterNd", lambda x: tf.gather_nd(x, _zeros(TERMS, 1)), positive(4, 4)),
    _function(
        "scatter_nd", "ScatterNd", lambda x: tf.scatter_nd(_zeros(TERMS, 1), x, (1, 4)),
        positive(TERMS, 4),
    ),
    *(
        _function(
            f"tensor_scatter_nd_{op}", f"TensorScatter{op.title()}",
            lambda t, x, op=op: getattr(tf, f"tensor_scatter_nd_{op}")(t, _zeros(TERMS, 1), x),
            positive(1, 4), positive(TERMS, 4),
        )
        for op in ("add", "sub")
    ),
    _function(
        "ScatterNdNonAliasingAdd", "ScatterNdNonAliasingAdd",
        functools.partial(_scatter_into, R.ScatterNdNonAliasingAdd), positive(TERMS, 4), wrt=(),
    ),
    _function(
        "sparse_dense_matmul", "SparseTensorDenseMatMul",
        lambda v, d: tf.sparse.sparse_dense_matmul(_sparse(v), d), positive(TERMS),
        positive(TERMS, 4), quick=True,
    ),
    _function(
        "sparse_dense_matmul, adjoint", "SparseTensorDenseMatMul",
        lambda v, d: tf.sparse.sparse_dense_matmul(
            tf.SparseTensor(_cells()[:, ::-1], v, (TERMS, 1)), d, adjoint_a=True
        ),
        positive(TERMS), positive(TERMS, 4),
    ),
    _function(
        "extract_patches", "SparseTensorDenseMatMul",
        lambda x: tf.image.extract_patches(x, (1, 15, 15, 1), [1] * 4, [1] * 4, "SAME"),
        positive(1, 32, 32, 1),
    ),
    _function(
        "sparse fill_empty_rows", "SparseFillEmptyRowsGrad",
        lambda v, d: tf.sparse.fill_empty_rows(
            tf.SparseTensor(tf.zeros((1, 2), tf.int64), v, (TERMS, 1)), d
        )[0].values,
        positive(1), positive(),
    ),
    _function(
        "ragged fill_empty_rows", "RaggedFillEmptyRowsGrad",
        lambda v, d: R.RaggedFillEmptyRows(
            value_rowids=tf.constant([0], tf.int64), values=v, nrows=tf.constant(TERMS, tf.int64),
            default_value=d,
        ).output_values,
        positive(1), positive(),
    ),
    *(
        _function(f"einsum {equation}", "Einsum", functools.partial(tf.einsum, equation), *arrays,
                  quick=quick)
        for equation, arrays, quick in (
            ("abc,cd->abd", (positive(128, 128, 4), positive(4, 4)), True),
            ("ab,bc->ac", (positive(4, TERMS), positive(TERMS, 4)), False),
            ("abc->c", (positive(128, 128, 4),), False),
            ("a,a->", (positive(TERMS), positive(TERMS)), False),
        )
    ),
    _function(
        "attention", "Einsum", _attention, positive(1, 8, 16), positive(1, 1024, 16),
        positive(1, 1024, 16), wrt=(2,), roundings=3,
    ),
    *(
        _function(
            f"BlockLSTM{version}", f"BlockLSTMGrad{version}",
            lambda x, w, b, version=version: getattr(R, f"BlockLSTM{version}")(
                seq_len_max=64, x=x, cs_prev=_constant_like(x, 64, 4),
                h_prev=_constant_like(x, 64, 4), w=w, wci=_constant_like(x, 4),
                wcf=_constant_like(x, 4), wco=_constant_like(x, 4), b=b,
            ).h,
            positive(64, 64, 4), positive(8, 16, scale=1 / 8), positive(16), roundings=8,
        )
        for version in ("", "V2")
    ),
    *(
        _function(
            f"conv2d {name}", "Conv2DBackpropFilter",
            lambda x, f, stride=stride: tf.nn.conv2d(x, f, stride, "SAME"), _IMAGE,
            positive(side, side, 8, 16), quick=quick,
        )
        for name, side, stride, quick in (
            ("1x1", 1, 1, True), ("1x1 strided", 1, 2, False), ("3x3", 3, 1, False),
            ("3x3 strided", 3, 2, False),
        )
    ),
    _function(
        "conv1d", "Conv2DBackpropFilter", lambda x, f: tf.nn.conv1d(x, f, 1, "SAME"),
        positive(4, 4096, 8), positive(3, 8, 4),
    ),
    _function(
        "conv2d, 2048 filters", "Conv2DBackpropInput",
        lambda x, f: tf.nn.conv2d(x, f, 1, "VALID"), positive(1, 7, 7, 1), positive(3, 3, 1, 2048),
    ),
    _function(
        "conv2d_transpose", "Conv2DBackpropInput Conv2DBackpropFilter",
        lambda d, f: tf.nn.conv2d_transpose(d, f, (1, 7, 7, 1), 1, "VALID"),
        positive(1, 5, 5, 2048), positive(3, 3, 1, 2048),
    ),
    _function(
        "conv3d", "Conv3DBackpropFilterV2", lambda x, f: tf.nn.conv3d(x, f, [1] * 5, "SAME"),
        positive(1, 32, 32, 32, 1), positive(1, 1, 1, 1, 1), quick=True,
    ),
    _function(
        "conv3d, 1024 channels", "Conv3D", lambda x, f: tf.nn.conv3d(x, f, [1] * 5, "VALID"),
        positive(1, 3, 3, 3, 1024), positive(3, 3, 3, 1024, 4),
    ),
    _function(
        "conv3d_transpose", "Conv3D Conv3DBackpropFilterV2",
        lambda d, f: tf.nn.conv3d_transpose(d, f, (1, 5, 5, 5, 1024), [1] * 5, "VALID"),
        positive(1, 3, 3, 3, 4), positive(3, 3, 3, 1024, 4),
    ),
    _function(
        "convolution", "Conv", lambda x, f: R.Conv(
            input=x, filter=f, strides=[1] * 5, padding="VALID"
        ),
        positive(1, 3, 3, 3, 1024), positive(3, 3, 3, 1024, 4), wrt=(),
    ),
    *(
        _function(
            f"depthwise_conv2d {name}", "DepthwiseConv2dNativeBackpropFilter",
            lambda x, f, stride=stride, rate=rate: tf.nn.depthwise_conv2d(
                x, f, [1, stride, stride, 1], "SAME", dilations=[rate, rate]
            ),
            _IMAGE, positive(*size, 8, multiplier), quick=name == "3x3",
        )
        for name, size, multiplier, stride, rate in (
            ("3x3", (3, 3), 1, 1, 1), ("1x7", (1, 7), 1, 1, 1), ("multiplier 2", (3, 3), 2, 1, 1),
            ("strided", (3, 3), 1, 2, 1), ("dilated", (3, 3), 1, 1, 2),
        )
    ),
    _function(
        "depthwise_conv2d 31x31",
        "DepthwiseConv2dNative DepthwiseConv2dNativeBackpropInput",
        lambda x, f: tf.nn.depthwise_conv2d(x, f, [1] * 4, "SAME"), positive(1, 32, 32, 8),
        _WIDE_FILTER, crashes_onednn=True,
    ),
    _function(
        "avg_pool2d", "AvgPool", lambda x: tf.nn.avg_pool2d(x, 32, 32, "VALID"), _IMAGE, quick=True
    ),
    _function(
        "avg_pool3d", "AvgPool3D", lambda x: tf.nn.avg_pool3d(x, 25, 25, "VALID"),
        positive(1, 25, 25, 25, 4),
    ),
    _function(
        "avg_pool2d, overlapping", "AvgPool AvgPoolGrad",
        lambda x: tf.nn.avg_pool2d(x, 31, 1, "SAME"), _IMAGE,
    ),
    _function(
        "avg_pool3d, overlapping", "AvgPool3D AvgPool3DGrad",
        lambda x: tf.nn.avg_pool3d(x, 15, 1, "SAME"), positive(1, 16, 16, 16, 2),
    ),
    _function(
        "max_pool2d, overlapping", "MaxPoolGrad", lambda x: tf.nn.max_pool2d(x, 31, 1, "SAME"),
        peak(1, 128, 128, 8), quick=True,
    ),
    _function(
        "max_pool3d, overlapping", "MaxPool3DGrad", lambda x: tf.nn.max_pool3d(x, 9, 1, "SAME"),
        peak(1, 16, 16, 16, 4),
    ),
    _function(
        "MaxPoolV2", "MaxPoolGradV2", lambda x: R.MaxPoolV2(input=x, **_pooling(31)),
        peak(1, 128, 128, 8),
    ),
    _function(
        "max_pool_with_argmax", "MaxPoolGradWithArgmax",
        lambda x: tf.nn.max_pool_with_argmax(x, 31, 1, "SAME").output, peak(1, 128, 128, 8),
    ),
    _function(
        "resize, nearest", "ResizeNearestNeighborGrad",
        lambda x: tf.image.resize(x, (128, 128), "nearest"), positive(1, 1, 1, 8), quick=True,
    ),
    _function(
        "crop_and_resize", "CropAndResizeGradImage",
        lambda x: tf.image.crop_and_resize(x, [[0, 0, 1e-6, 1e-6]], [0], (128, 128)),
        positive(1, 4, 4, 8),
    ),
    _function(
        "dilation2d", "Dilation2DBackpropFilter",
        lambda x, f: tf.nn.dilation2d(x, f, [1] * 4, "SAME", "NHWC", [1] * 4), _IMAGE,
        positive(1, 1, 8),
    ),
    _function(
        "dilation2d 31x31", "Dilation2DBackpropInput",
        lambda x: tf.nn.dilation2d(
            x, _constant_like(x, 31, 31, 8), [1] * 4, "SAME", "NHWC", [1] * 4
        ),
        peak(1, 128, 128, 8),
    ),
)  # fmt: skip

# ---- Layers --------------------------------------------------------------------------------------


def _layer(name: str, rows: str, make: Callable[..., Any], *arrays: Data, **more: Any):
    return KernelCase(name, tuple(rows.split()), make, arrays, **more)


_SEQUENCE, _LONG = positive(4, 4096, 8), positive(1, 8192, 8)
_FIT = {"padding": "same"}
L = keras.layers
_DEPTHWISE = "DepthwiseConv2dNativeBackpropFilter"

LAYER_CASES: tuple[KernelCase, ...] = (
    _layer("Dense", "BiasAddGrad", lambda **k: L.Dense(4, **k), positive(TERMS, 8), quick=True),
    _layer("Dense of images", "BiasAddGrad Sum", lambda **k: L.Dense(4, **k), _IMAGE),
    _layer(
        "EinsumDense", "BiasAddGrad Sum Einsum",
        lambda **k: L.EinsumDense("abc,cd->abd", (None, 4), bias_axes="d", **k), _SEQUENCE,
        quick=True,
    ),
    _layer(
        "Conv1D", "BiasAddGrad Conv2DBackpropFilter", lambda **k: L.Conv1D(4, 3, **_FIT, **k),
        _SEQUENCE,
    ),
    *(
        _layer(
            f"Conv2D {name}", "BiasAddGrad Conv2DBackpropFilter Conv2DBackpropInput",
            lambda side=side, stride=stride, **k: L.Conv2D(4, side, stride, **_FIT, **k), _IMAGE,
            quick=name == "1x1",
        )
        for name, side, stride in (("1x1", 1, 1), ("3x3", 3, 1), ("3x3 strided", 3, 2))
    ),
    _layer(
        "Conv3D", "BiasAddGrad Conv3DBackpropFilterV2 Conv3D",
        lambda **k: L.Conv3D(1, 1, **k), positive(1, 32, 32, 32, 1),
    ),
    _layer(
        "Conv1DTranspose", "BiasAddGrad Conv2DBackpropFilter",
        lambda **k: L.Conv1DTranspose(4, 3, **_FIT, **k), _SEQUENCE,
    ),
    _layer(
        "Conv2DTranspose", "BiasAddGrad Conv2DBackpropFilter Conv2DBackpropInput",
        lambda **k: L.Conv2DTranspose(4, 3, **_FIT, **k), _IMAGE,
    ),
    _layer(
        "Conv3DTranspose", "BiasAddGrad Conv3DBackpropFilterV2 Conv3D",
        lambda **k: L.Conv3DTranspose(4, 1, **k), positive(1, 24, 24, 24, 4),
    ),
    _layer(
        "DepthwiseConv1D", f"BiasAddGrad {_DEPTHWISE}",
        lambda **k: L.DepthwiseConv1D(3, **_FIT, **k), _SEQUENCE,
    ),
    _layer(
        "DepthwiseConv2D", f"BiasAddGrad {_DEPTHWISE}",
        lambda **k: L.DepthwiseConv2D(3, **_FIT, **k), _IMAGE, quick=True,
    ),
    _layer(
        "DepthwiseConv2D 31x31", "DepthwiseConv2dNative DepthwiseConv2dNativeBackpropInput",
        lambda **k: L.DepthwiseConv2D(31, **_FIT, **k), positive(1, 32, 32, 8),
        crashes_onednn=True,
    ),
    _layer(
        "SeparableConv1D", f"BiasAddGrad {_DEPTHWISE} Conv2DBackpropFilter",
        lambda **k: L.SeparableConv1D(4, 3, **_FIT, **k), _SEQUENCE, roundings=2,
    ),
    _layer(
        "SeparableConv2D", f"BiasAddGrad {_DEPTHWISE} Conv2DBackpropFilter",
        lambda **k: L.SeparableConv2D(4, 3, **_FIT, **k), _IMAGE, roundings=2,
    ),
    _layer("RepeatVector", "Sum", lambda **k: L.RepeatVector(TERMS, **k), positive(1, 4)),
    *(
        _layer(name, "Sum", make, positive(512, 8, 4, scale=0.25), roundings=8)
        for name, make in (
            ("SimpleRNN", lambda **k: L.SimpleRNN(4, **k)),
            ("LSTM", lambda **k: L.LSTM(4, **k)),
            ("GRU", lambda **k: L.GRU(4, **k)),
        )
    ),
    _layer(
        "GlobalAveragePooling1D", "Mean", lambda **k: L.GlobalAveragePooling1D(**k), _LONG
    ),
    _layer(
        "GlobalAveragePooling2D", "Mean", lambda **k: L.GlobalAveragePooling2D(**k), _IMAGE,
        quick=True,
    ),
    _layer(
        "GlobalAveragePooling3D", "Mean", lambda **k: L.GlobalAveragePooling3D(**k), _VOLUME
    ),
    _layer(
        "Embedding", "UnsortedSegmentSum", lambda **k: L.Embedding(4, 8, **k),
        lambda random: np.zeros((4, 4096), "int32"), quick=True,
    ),
    # Without biases: the keys' one has no gradient.
    _layer(
        "MultiHeadAttention", "Einsum Sum",
        lambda **k: L.MultiHeadAttention(2, 8, use_bias=False, **k), positive(16, 256, 8, scale=0.25),
        positive(16, 256, 8, scale=0.25), roundings=8,
    ),
    _layer(
        "GroupQueryAttention", "Einsum Sum",
        lambda **k: L.GroupQueryAttention(8, 2, 1, use_bias=False, **k), positive(16, 256, 8, scale=0.25),
        positive(16, 256, 8, scale=0.25), roundings=8,
    ),
    *(
        _layer(
            f"{kind}Pooling{rank}D, overlapping", f"{row}{'3D' if rank == 3 else ''}Grad",
            lambda kind=kind, rank=rank, size=size, **k: getattr(L, f"{kind}Pooling{rank}D")(
                size, 1, **_FIT, **k
            ),
            (peak if kind == "Max" else positive)(*shape),
        )
        for kind, row in (("Average", "AvgPool"), ("Max", "MaxPool"))
        for rank, size, shape in (
            (1, 511, (1, 1024, 8)), (2, 31, (1, 64, 64, 8)), (3, 9, (1, 16, 16, 16, 4))
        )
    ),
    _layer("AveragePooling1D", "AvgPool", lambda **k: L.AveragePooling1D(4096, **k), _SEQUENCE),
    _layer(
        "AveragePooling2D", "AvgPool", lambda **k: L.AveragePooling2D(32, **k), _IMAGE, quick=True
    ),
    _layer(
        "AveragePooling3D", "AvgPool3D", lambda **k: L.AveragePooling3D(16, **k), _VOLUME
    ),
    _layer(
        "UpSampling2D", "ResizeNearestNeighborGrad", lambda **k: L.UpSampling2D(64, **k),
        positive(1, 2, 2, 8), quick=True,
    ),
    _layer(
        "Resizing", "ResizeNearestNeighborGrad",
        lambda **k: L.Resizing(128, 128, "nearest", **k), positive(1, 2, 2, 8),
    ),
)  # fmt: skip
