"""Functions and Keras layers that run the kernels of `tfamp.planning.kernels`, gradients included.

`FUNCTION_CASES` are functions as a user writes them, `LAYER_CASES` the layers that the table names.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from helpers.kernel_cases import (
    IMAGE,
    TERMS,
    VOLUME,
    WIDE_FILTER,
    Data,
    KernelCase,
    R,
    cells,
    constant_like,
    near_one,
    peak,
    pooling,
    positive,
    scatter_into,
    sparse,
    spread,
    zeros,
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
        "bias_add", "BiasAdd BiasAddGrad", tf.nn.bias_add, positive(TERMS, 4), positive(4),
        quick=True,
    ),
    _function(
        "add", "AddV2 Sum", lambda x, b: x + b, positive(TERMS, 4), positive(4), quick=True
    ),
    _function(
        "add of TensorFlow 1", "Add Sum", lambda x, b: tf.raw_ops.Add(x=x, y=b),
        positive(TERMS, 4), positive(4),
    ),
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
            op, row, lambda x, op=op: getattr(tf.math, op)(x, zeros(TERMS)), data, quick=quick
        )
        for op, row, data, quick in (
            ("segment_sum", "SegmentSum", positive(TERMS, 4), True),
            ("segment_mean", "SegmentMean SegmentSum", positive(TERMS, 4), False),
            ("segment_prod", "SegmentProd", near_one(TERMS, 4), False),
        )
    ),
    *(
        _function(
            op, row, lambda x, op=op: getattr(tf.math, op)(x, zeros(TERMS), 1), data, wrt=wrt,
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
        "gather", "UnsortedSegmentSum", lambda x: tf.gather(x, zeros(TERMS)), positive(4, 4),
        quick=True,
    ),
    _function(
        "gather_nd", "ScatterNd", lambda x: tf.gather_nd(x, zeros(TERMS, 1)), positive(4, 4)
    ),
    _function(
        "scatter_nd", "ScatterNd", lambda x: tf.scatter_nd(zeros(TERMS, 1), x, (1, 4)),
        positive(TERMS, 4),
    ),
    *(
        _function(
            f"tensor_scatter_nd_{op}", f"TensorScatter{op.title()}",
            lambda t, x, op=op: getattr(tf, f"tensor_scatter_nd_{op}")(t, zeros(TERMS, 1), x),
            positive(1, 4), positive(TERMS, 4),
        )
        for op in ("add", "sub")
    ),
    _function(
        "ScatterNdNonAliasingAdd", "ScatterNdNonAliasingAdd",
        functools.partial(scatter_into, R.ScatterNdNonAliasingAdd), positive(TERMS, 4), wrt=(),
    ),
    _function(
        "sparse times dense", "SparseTensorDenseAdd",
        lambda v, d: (sparse(v) * d).values,
        positive(TERMS), positive(1, 1), wrt=(1,),
    ),
    _function(
        "sparse_dense_matmul", "SparseTensorDenseMatMul",
        lambda v, d: tf.sparse.sparse_dense_matmul(sparse(v), d), positive(TERMS),
        positive(TERMS, 4), quick=True,
    ),
    _function(
        "sparse_dense_matmul, adjoint", "SparseTensorDenseMatMul",
        lambda v, d: tf.sparse.sparse_dense_matmul(
            tf.SparseTensor(cells()[:, ::-1], v, (TERMS, 1)), d, adjoint_a=True
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
        positive(1, 1024, 16), wrt=(2,), roundings=2,
    ),
    *(
        _function(
            f"BlockLSTM{version}", f"BlockLSTMGrad{version}",
            lambda x, w, b, version=version: getattr(R, f"BlockLSTM{version}")(
                seq_len_max=64, x=x, cs_prev=constant_like(x, 64, 4),
                h_prev=constant_like(x, 64, 4), w=w, wci=constant_like(x, 4),
                wcf=constant_like(x, 4), wco=constant_like(x, 4), b=b,
            ).h,
            positive(64, 64, 4), positive(8, 16, scale=1 / 8), positive(16), roundings=8,
        )
        for version in ("", "V2")
    ),
    *(
        _function(
            f"conv2d {name}", "Conv2DBackpropFilter",
            lambda x, f, stride=stride: tf.nn.conv2d(x, f, stride, "SAME"), IMAGE,
            positive(side, side, 8, 16), quick=quick,
            crashes_onednn=name == "1x1 strided",
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
    _function(  # Without oneDNN it has no gradient, in float32 neither.
        "conv2d, 32 groups", "Conv2D", lambda x, f: tf.nn.conv2d(x, f, 1, "SAME"),
        positive(1, 16, 16, 32), positive(3, 3, 1, 32), wrt=(),
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
        "conv3d_transpose", "Conv3D Conv3DBackpropFilterV2 Conv3DBackpropInputV2",
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
            IMAGE, positive(*size, 8, multiplier), quick=name == "3x3",
        )
        for name, size, multiplier, stride, rate in (
            ("3x3", (3, 3), 1, 1, 1), ("1x7", (1, 7), 1, 1, 1), ("multiplier 2", (3, 3), 2, 1, 1),
            ("strided", (3, 3), 1, 2, 1), ("dilated", (3, 3), 1, 1, 2),
        )
    ),
    _function(
        "depthwise_conv2d_backprop_input", "DepthwiseConv2dNativeBackpropFilter",
        lambda f, d: tf.nn.depthwise_conv2d_backprop_input(
            (1, 128, 128, 8), f, d, [1] * 4, "SAME"
        ),
        positive(3, 3, 8, 1), positive(1, 128, 128, 8),
    ),
    _function(
        "depthwise_conv2d 31x31",
        "DepthwiseConv2dNative DepthwiseConv2dNativeBackpropInput",
        lambda x, f: tf.nn.depthwise_conv2d(x, f, [1] * 4, "SAME"), positive(1, 32, 32, 8),
        WIDE_FILTER, crashes_onednn=True,
    ),
    _function("gelu", "Erfc", tf.nn.gelu, positive(TERMS), roundings=4),
    _function(
        "avg_pool2d", "AvgPool", lambda x: tf.nn.avg_pool2d(x, 32, 32, "VALID"), IMAGE, quick=True
    ),
    _function(
        "avg_pool3d", "AvgPool3D", lambda x: tf.nn.avg_pool3d(x, 25, 25, "VALID"),
        positive(1, 25, 25, 25, 4),
    ),
    _function(
        "avg_pool2d, overlapping", "AvgPool AvgPoolGrad",
        lambda x: tf.nn.avg_pool2d(x, 31, 1, "SAME"), IMAGE,
    ),
    _function(
        "avg_pool3d, overlapping", "AvgPool3D AvgPool3DGrad",
        lambda x: tf.nn.avg_pool3d(x, 15, 1, "SAME"), positive(1, 16, 16, 16, 2),
    ),
    _function(
        "max_pool2d, overlapping", "MaxPoolGrad", lambda x: tf.nn.max_pool2d(x, 31, 1, "SAME"),
        peak(1, 64, 64, 8), quick=True,
    ),
    _function(
        "max_pool3d, overlapping", "MaxPool3DGrad", lambda x: tf.nn.max_pool3d(x, 9, 1, "SAME"),
        peak(1, 16, 16, 16, 4),
    ),
    _function(
        "MaxPoolV2", "MaxPoolGradV2", lambda x: R.MaxPoolV2(input=x, **pooling(31)),
        peak(1, 64, 64, 8),
    ),
    _function(
        "max_pool_with_argmax", "MaxPoolGradWithArgmax",
        lambda x: tf.nn.max_pool_with_argmax(x, 31, 1, "SAME").output, peak(1, 64, 64, 8),
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
        lambda x, f: tf.nn.dilation2d(x, f, [1] * 4, "SAME", "NHWC", [1] * 4), IMAGE,
        positive(1, 1, 8),
    ),
    _function(
        "dilation2d 31x31", "Dilation2DBackpropInput",
        lambda x: tf.nn.dilation2d(
            x, constant_like(x, 31, 31, 8), [1] * 4, "SAME", "NHWC", [1] * 4
        ),
        peak(1, 64, 64, 8),
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
    _layer("Dense of images", "BiasAddGrad Sum", lambda **k: L.Dense(4, **k), IMAGE),
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
            lambda side=side, stride=stride, **k: L.Conv2D(4, side, stride, **_FIT, **k), IMAGE,
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
        lambda **k: L.Conv2DTranspose(4, 3, **_FIT, **k), IMAGE,
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
        lambda **k: L.DepthwiseConv2D(3, **_FIT, **k), IMAGE, quick=True,
    ),
    _layer(
        "DepthwiseConv2D 31x31", "DepthwiseConv2dNative DepthwiseConv2dNativeBackpropInput",
        lambda **k: L.DepthwiseConv2D(31, **_FIT, **k), positive(1, 32, 32, 8),
        crashes_onednn=True,
    ),
    _layer(
        "SeparableConv1D", f"BiasAddGrad {_DEPTHWISE} Conv2DBackpropFilter",
        lambda **k: L.SeparableConv1D(4, 3, **_FIT, **k),
        positive(4, 4096, 8, scale=0.25), roundings=2,
    ),
    _layer(
        "SeparableConv2D", f"BiasAddGrad {_DEPTHWISE} Conv2DBackpropFilter",
        lambda **k: L.SeparableConv2D(4, 3, **_FIT, **k),
        positive(1, 128, 128, 8, scale=0.25), roundings=2,
    ),
    _layer("RepeatVector", "Sum", lambda **k: L.RepeatVector(TERMS, **k), positive(1, 4)),
    *(
        _layer(name, "Sum", make, positive(512, 8, 4, scale=0.25), roundings=4)
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
        "GlobalAveragePooling2D", "Mean", lambda **k: L.GlobalAveragePooling2D(**k), IMAGE,
        quick=True,
    ),
    _layer(
        "GlobalAveragePooling3D", "Mean", lambda **k: L.GlobalAveragePooling3D(**k), VOLUME
    ),
    _layer(
        "Embedding", "UnsortedSegmentSum", lambda **k: L.Embedding(4, 8, **k),
        lambda random: np.zeros((4, 4096), "int32"), quick=True,
    ),
    # Without biases: the keys' one has no gradient.
    _layer(
        "MultiHeadAttention", "Einsum Sum",
        lambda **k: L.MultiHeadAttention(2, 8, use_bias=False, **k),
        *[spread(16, 256, 8, scale=0.25)] * 2, roundings=3,
    ),
    _layer(
        "GroupQueryAttention", "Einsum Sum",
        lambda **k: L.GroupQueryAttention(8, 2, 1, use_bias=False, **k),
        *[spread(16, 256, 8, scale=0.25)] * 2, roundings=3,
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
        "AveragePooling2D", "AvgPool", lambda **k: L.AveragePooling2D(32, **k), IMAGE, quick=True
    ),
    _layer(
        "AveragePooling3D", "AvgPool3D", lambda **k: L.AveragePooling3D(16, **k), VOLUME
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
