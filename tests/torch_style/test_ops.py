"""Every op on autocast's lists, through TensorFlow's public API, against dtypes written by hand.

Each row names the op type it is for, a call with a float32 matrix `f` and a low-precision one `x`,
and the dtype that comes out: "low" is the dtype of the autocast.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp
from helpers.cases import one_of_each
from helpers.graph_asserts import op_dtypes
from tfamp.interop import tf_private

DTYPES = ("float16", "bfloat16")
RAW = tf.raw_ops
N = 4


class Row(NamedTuple):
    op: str
    call: Callable[[Any, Any], Any]
    expected: str

    def __str__(self) -> str:
        return f"{self.op}-{self.call.__code__.co_firstlineno}"


def image(x):
    """A batch of one 2 x 2 image with 4 channels, or with other rank as asked."""
    return tf.reshape(x, (1, 2, 2, N))


def volume(x):
    return tf.reshape(x, (1, 2, 2, 1, N))


def filters(x, *shape):
    return tf.reshape(tf.reshape(x, (-1,))[: int(np.prod(shape))], shape)


def positive(x):
    return tf.abs(x) + tf.ones_like(x)


def well_conditioned(x):
    """A symmetric positive definite matrix of the dtype."""
    return tf.linalg.set_diag(tf.zeros_like(x), positive(x[0]))


def sparse(x):
    return tf.SparseTensor([[0, 1], [2, 3]], x[0, :2], (N, N))


STRIDES = [1, 1, 1, 1]
STRIDES_3D = [1, 1, 1, 1, 1]

# float32 in, low out.
LOW = [
    Row("MatMul", lambda f, x: tf.matmul(f, f), "low"),
    Row("MatMul", lambda f, x: tf.linalg.matmul(f, f, transpose_b=True), "low"),
    Row("MatMul", lambda f, x: f @ f, "low"),
    Row("MatMul", lambda f, x: tf.tensordot(f, f, 1), "low"),
    Row("MatMul", lambda f, x: tf.linalg.matvec(f, f[0]), "low"),
    Row("MatMul", lambda f, x: tf.compat.v1.nn.xw_plus_b(f, f, x[0]), "low"),
    Row("MatMul", lambda f, x: tf.matmul(f, x), "low"),
    Row("MatMul", lambda f, x: tf.matmul(x, f), "low"),
    Row("MatMul", lambda f, x: RAW.MatMul(a=f, b=x), "low"),
    Row("MatMul", lambda f, x: tf.matmul(f, np.ones((N, N), "float32")), "low"),
    Row("MatMul", lambda f, x: keras.ops.matmul(f, f), "low"),
    Row("MatMul", lambda f, x: keras.ops.dot(f, x), "low"),
    Row("BatchMatMulV2", lambda f, x: tf.matmul(f[None], f[None]), "low"),
    Row("BatchMatMulV2", lambda f, x: RAW.BatchMatMulV2(x=f, y=x), "low"),
    Row("BatchMatMul", lambda f, x: RAW.BatchMatMul(x=f, y=x), "low"),
    Row("Einsum", lambda f, x: tf.einsum("ij,jk->ik", f, f), "low"),
    Row("Einsum", lambda f, x: tf.einsum("ij,jk->ik", f, x), "low"),
    Row("Einsum", lambda f, x: tf.einsum("ij->ji", f), "low"),
    Row("Conv2D", lambda f, x: tf.nn.conv1d(f[None], filters(f, 2, N, 2), 1, "SAME"), "low"),
    Row("Conv2D", lambda f, x: tf.nn.conv2d(image(f), filters(f, 1, 1, N, 2), 1, "SAME"), "low"),
    Row("Conv2D", lambda f, x: tf.nn.convolution(image(f), filters(f, 1, 1, N, 2)), "low"),
    Row("Conv2D", lambda f, x: tf.nn.conv2d(image(x), filters(f, 1, 1, N, 2), 1, "SAME"), "low"),
    Row(
        "Conv2D",
        lambda f, x: tf.nn.atrous_conv2d(image(f), filters(f, 1, 1, N, 2), 1, "SAME"),
        "low",
    ),
    Row(
        "Conv2D",
        lambda f, x: tf.nn.separable_conv2d(
            image(f), filters(f, 1, 1, N, 1), filters(f, 1, 1, N, 2), STRIDES, "SAME"
        ),
        "low",
    ),
    Row(
        "Conv",
        lambda f, x: RAW.Conv(
            input=image(f), filter=filters(f, 1, 1, N, 2), strides=STRIDES, padding="SAME"
        ),
        "low",
    ),
    Row(
        "Conv2DBackpropInput",
        lambda f, x: tf.nn.conv2d_transpose(
            image(f), filters(f, 1, 1, 2, N), (1, 2, 2, 2), 1, "SAME"
        ),
        "low",
    ),
    Row(
        "Conv2DBackpropInput",
        lambda f, x: tf.nn.conv1d_transpose(f[None], filters(f, 1, 2, N), (1, N, 2), 1, "SAME"),
        "low",
    ),
    Row(
        "Conv2DBackpropFilter",
        lambda f, x: RAW.Conv2DBackpropFilter(
            input=image(f),
            filter_sizes=[1, 1, N, N],
            out_backprop=image(x),
            strides=STRIDES,
            padding="SAME",
        ),
        "low",
    ),
    Row(
        "Conv3D",
        lambda f, x: tf.nn.conv3d(volume(f), filters(f, 1, 1, 1, N, 2), STRIDES_3D, "SAME"),
        "low",
    ),
    Row(
        "Conv3DBackpropInputV2",
        lambda f, x: tf.nn.conv3d_transpose(
            volume(f), filters(f, 1, 1, 1, 2, N), (1, 2, 2, 1, 2), 1, "SAME"
        ),
        "low",
    ),
    Row(
        "Conv3DBackpropFilterV2",
        lambda f, x: RAW.Conv3DBackpropFilterV2(
            input=volume(f),
            filter_sizes=[1, 1, 1, N, N],
            out_backprop=volume(f),
            strides=STRIDES_3D,
            padding="SAME",
        ),
        "low",
    ),
    Row(
        "DepthwiseConv2dNative",
        lambda f, x: tf.nn.depthwise_conv2d(image(f), filters(f, 1, 1, N, 1), STRIDES, "SAME"),
        "low",
    ),
    Row(
        "DepthwiseConv2dNativeBackpropInput",
        lambda f, x: tf.nn.depthwise_conv2d_backprop_input(
            (1, 2, 2, N), filters(f, 1, 1, N, 1), image(f), STRIDES, "SAME"
        ),
        "low",
    ),
    Row(
        "DepthwiseConv2dNativeBackpropFilter",
        lambda f, x: tf.nn.depthwise_conv2d_backprop_filter(
            image(f), (1, 1, N, 1), image(f), STRIDES, "SAME"
        ),
        "low",
    ),
]

# Low in, float32 out.
FLOAT32 = [
    Row("Acos", lambda f, x: tf.acos(x), "float32"),
    Row("Asin", lambda f, x: tf.asin(x), "float32"),
    Row("Cosh", lambda f, x: tf.cosh(x), "float32"),
    Row("Sinh", lambda f, x: tf.sinh(x), "float32"),
    Row("Tan", lambda f, x: tf.tan(x), "float32"),
    Row("Exp", lambda f, x: tf.exp(x), "float32"),
    Row("Exp", lambda f, x: keras.ops.exp(x), "float32"),
    Row("Expm1", lambda f, x: tf.math.expm1(x), "float32"),
    Row("Log", lambda f, x: tf.math.log(positive(x)), "float32"),
    Row("Log1p", lambda f, x: tf.math.log1p(positive(x)), "float32"),
    Row("Pow", lambda f, x: tf.pow(x, 2), "float32"),
    Row("Pow", lambda f, x: x**2, "float32"),
    Row("Pow", lambda f, x: 2.0**x, "float32"),
    Row("Pow", lambda f, x: f**x, "float32"),
    Row("Rsqrt", lambda f, x: tf.math.rsqrt(positive(x)), "float32"),
    Row("Reciprocal", lambda f, x: tf.math.reciprocal(positive(x)), "float32"),
    Row("Inv", lambda f, x: RAW.Inv(x=positive(x)), "float32"),
    Row("Erfinv", lambda f, x: tf.math.erfinv(x), "float32"),
    Row("Ndtri", lambda f, x: tf.math.ndtri(x), "float32"),
    Row("Softplus", lambda f, x: tf.math.softplus(x), "float32"),
    Row("Xlogy", lambda f, x: tf.math.xlogy(x, positive(f)), "float32"),
    Row("Xlog1py", lambda f, x: tf.math.xlog1py(x, positive(x)), "float32"),
    Row("Sum", lambda f, x: tf.reduce_sum(x), "float32"),
    Row("Sum", lambda f, x: tf.reduce_sum(x, axis=[0], keepdims=True), "float32"),
    Row("Sum", lambda f, x: keras.ops.sum(x), "float32"),
    Row("Sum", lambda f, x: tf.norm(x), "float32"),
    Row("Mean", lambda f, x: tf.reduce_mean(x, 0), "float32"),
    Row("Mean", lambda f, x: tf.math.reduce_variance(x), "float32"),
    Row("Mean", lambda f, x: tf.math.reduce_std(x, 0), "float32"),
    Row("Mean", lambda f, x: tf.nn.moments(x, [0])[1], "float32"),
    Row("Mean", lambda f, x: keras.ops.mean(x), "float32"),
    Row("Mean", lambda f, x: keras.ops.var(x), "float32"),
    Row("Prod", lambda f, x: tf.reduce_prod(x), "float32"),
    Row("EuclideanNorm", lambda f, x: tf.math.reduce_euclidean_norm(x), "float32"),
    Row("Cumsum", lambda f, x: tf.cumsum(x), "float32"),
    Row(
        "ResizeBilinear",
        lambda f, x: tf.image.resize(image(x), (6, 6)),
        "float32",
    ),
    Row(
        "ResizeBicubic",
        lambda f, x: tf.image.resize(image(x), (6, 6), "bicubic"),
        "float32",
    ),
    Row(
        "ScaleAndTranslate",
        lambda f, x: tf.image.resize(image(x), (6, 6), antialias=True),
        "float32",
    ),
    Row("Square", lambda f, x: tf.square(x), "float32"),
    Row("SquaredDifference", lambda f, x: tf.math.squared_difference(x, x), "float32"),
    Row("Cumprod", lambda f, x: tf.math.cumprod(x), "float32"),
    Row("CumulativeLogsumexp", lambda f, x: tf.math.cumulative_logsumexp(x), "float32"),
    Row("L2Loss", lambda f, x: tf.nn.l2_loss(x), "float32"),
    Row("Softmax", lambda f, x: tf.nn.softmax(x), "float32"),
    Row("LogSoftmax", lambda f, x: tf.nn.log_softmax(x), "float32"),
    Row("SparseSoftmax", lambda f, x: tf.sparse.softmax(sparse(x)), "float32"),
    Row(
        "SoftmaxCrossEntropyWithLogits",
        lambda f, x: tf.nn.softmax_cross_entropy_with_logits(f, x),
        "float32",
    ),
    Row(
        "SoftmaxCrossEntropyWithLogits",
        lambda f, x: tf.nn.softmax_cross_entropy_with_logits(labels=x, logits=x),
        "float32",
    ),
    Row(
        "SparseSoftmaxCrossEntropyWithLogits",
        lambda f, x: tf.nn.sparse_softmax_cross_entropy_with_logits([0] * N, x),
        "float32",
    ),
    Row("Log1p", lambda f, x: tf.nn.sigmoid_cross_entropy_with_logits(x, x), "float32"),
    Row("Exp", lambda f, x: tf.reduce_logsumexp(x), "float32"),
    Row(
        "Sum", lambda f, x: keras.losses.CategoricalCrossentropy(from_logits=True)(f, x), "float32"
    ),
    Row("Cholesky", lambda f, x: tf.linalg.cholesky(well_conditioned(x)), "float32"),
    Row("LogMatrixDeterminant", lambda f, x: tf.linalg.slogdet(well_conditioned(x))[1], "float32"),
    Row("MatrixDeterminant", lambda f, x: tf.linalg.det(well_conditioned(x)), "float32"),
    Row("MatrixInverse", lambda f, x: tf.linalg.inv(well_conditioned(x)), "float32"),
    Row("MatrixSolve", lambda f, x: tf.linalg.solve(well_conditioned(x), f), "float32"),
    Row(
        "MatrixSolveLs", lambda f, x: tf.linalg.lstsq(well_conditioned(f), x, fast=False), "float32"
    ),
    Row("MatrixSquareRoot", lambda f, x: tf.linalg.sqrtm(well_conditioned(x)), "float32"),
    Row(
        "MatrixTriangularSolve",
        lambda f, x: tf.linalg.triangular_solve(well_conditioned(x), x),
        "float32",
    ),
    Row(
        "BandedTriangularSolve",
        lambda f, x: RAW.BandedTriangularSolve(matrix=positive(x)[:1], rhs=f),
        "float32",
    ),
    Row("Lu", lambda f, x: tf.linalg.lu(well_conditioned(x))[0], "float32"),
    Row("Qr", lambda f, x: tf.linalg.qr(x)[0], "float32"),
    Row("Svd", lambda f, x: tf.linalg.svd(x)[0], "float32"),
    Row("SelfAdjointEigV2", lambda f, x: tf.linalg.eigvalsh(well_conditioned(x)), "float32"),
    Row("Eig", lambda f, x: RAW.Eig(input=x, Tout=tf.complex64)[0], "complex64"),
    Row("RFFT", lambda f, x: tf.signal.rfft(x), "complex64"),
    Row("RFFT2D", lambda f, x: tf.signal.rfft2d(x), "complex64"),
    Row("RFFT3D", lambda f, x: tf.signal.rfft3d(x[None]), "complex64"),
    Row("RFFT", lambda f, x: tf.signal.stft(x, 4, 2), "complex64"),
    Row("Betainc", lambda f, x: tf.math.betainc(positive(x), 1.0, 0.5), "float32"),
    Row("Polygamma", lambda f, x: tf.math.polygamma(positive(x), positive(f)), "float32"),
    Row("Zeta", lambda f, x: tf.math.zeta(positive(x) + 1, 1.0), "float32"),
    Row("NextAfter", lambda f, x: tf.math.nextafter(x, f), "float32"),
    Row(
        "TridiagonalSolve",
        lambda f, x: tf.linalg.tridiagonal_solve(positive(x)[:3], x[:, :1]),
        "float32",
    ),
    Row(
        "TridiagonalMatMul",
        lambda f, x: tf.linalg.tridiagonal_matmul(x[:3], f),
        "float32",
    ),
    Row(
        "CTCLoss",
        lambda f, x: tf.compat.v1.nn.ctc_loss(
            tf.SparseTensor(tf.constant([[0, 0]], tf.int64), [1], (1, 1)), x[:, None], [4]
        ),
        "float32",
    ),
    Row("Exp", lambda f, x: tf.nn.ctc_loss(tf.constant([[1, 2]]), x[:, None], [2], [4]), "float32"),
    # Not listed: no kernel, on a CPU at least, or not even an op for low precision.
    Row("Complex", lambda f, x: tf.complex(x, f), "complex64"),
    Row("HistogramFixedWidth", lambda f, x: tf.histogram_fixed_width(x, [0.0, 1.0]), "int32"),
    Row("Sum", lambda f, x: tf.linalg.expm(x), "float32"),
    Row("InTopKV2", lambda f, x: tf.math.in_top_k([1] * N, x, 2), "bool"),
]

# float32 as soon as one input is.
WIDEST = [
    Row("AddV2", lambda f, x: x + f, "float32"),
    Row("AddV2", lambda f, x: f + x, "float32"),
    Row("AddV2", lambda f, x: tf.add(x, f), "float32"),
    Row("AddV2", lambda f, x: keras.ops.add(f, x), "float32"),
    Row("Add", lambda f, x: RAW.Add(x=x, y=f), "float32"),
    Row("AddN", lambda f, x: tf.add_n([x, f, x]), "float32"),
    Row("Sub", lambda f, x: x - f, "float32"),
    Row("Sub", lambda f, x: tf.subtract(f, x), "float32"),
    Row("Mul", lambda f, x: x * f, "float32"),
    Row("Mul", lambda f, x: tf.multiply(f, x), "float32"),
    Row("MulNoNan", lambda f, x: tf.math.multiply_no_nan(x, f), "float32"),
    Row("RealDiv", lambda f, x: x / f, "float32"),
    Row("RealDiv", lambda f, x: f / x, "float32"),
    Row("RealDiv", lambda f, x: tf.divide(x, f), "float32"),
    Row("RealDiv", lambda f, x: tf.truediv(f, x), "float32"),
    Row("RealDiv", lambda f, x: tf.compat.v1.div(x, f), "float32"),
    Row("Div", lambda f, x: RAW.Div(x=x, y=f), "float32"),
    Row("DivNoNan", lambda f, x: tf.math.divide_no_nan(x, f), "float32"),
    Row("DivNoNan", lambda f, x: tf.math.divide_no_nan(f, x), "float32"),
    Row("FloorDiv", lambda f, x: x // f, "float32"),
    Row("FloorDiv", lambda f, x: tf.math.floordiv(f, x), "float32"),
    Row("FloorMod", lambda f, x: x % f, "float32"),
    Row("FloorMod", lambda f, x: tf.math.floormod(f, x), "float32"),
    Row("Mod", lambda f, x: RAW.Mod(x=x, y=f), "float32"),
    Row("TruncateMod", lambda f, x: RAW.TruncateMod(x=f, y=x), "float32"),
    Row(
        "XlaDynamicUpdateSlice",
        lambda f, x: keras.ops.slice_update(x, (0, 0), f[:2, :2]),
        "float32",
    ),
    Row("Maximum", lambda f, x: tf.maximum(x, f), "float32"),
    Row("Minimum", lambda f, x: tf.minimum(f, x), "float32"),
    Row("Atan2", lambda f, x: tf.atan2(x, f), "float32"),
    Row("Xdivy", lambda f, x: tf.math.xdivy(x, f), "float32"),
    Row("Igamma", lambda f, x: tf.math.igamma(positive(x), positive(f)), "float32"),
    Row("Igammac", lambda f, x: tf.math.igammac(positive(f), positive(x)), "float32"),
    Row("ApproximateEqual", lambda f, x: RAW.ApproximateEqual(x=x, y=f), "bool"),
    Row("Equal", lambda f, x: x == f, "bool"),
    Row("NotEqual", lambda f, x: f != x, "bool"),
    Row("Less", lambda f, x: x < f, "bool"),
    Row("LessEqual", lambda f, x: f <= x, "bool"),
    Row("Greater", lambda f, x: tf.greater(x, f), "bool"),
    Row("GreaterEqual", lambda f, x: x >= f, "bool"),
    Row("ConcatV2", lambda f, x: tf.concat([x, f], 0), "float32"),
    Row("ConcatV2", lambda f, x: keras.ops.concatenate([f, x]), "float32"),
    Row("Concat", lambda f, x: RAW.Concat(concat_dim=0, values=[x, f]), "float32"),
    Row("Pack", lambda f, x: tf.stack([f, x]), "float32"),
    Row("SelectV2", lambda f, x: tf.where(f > 0, x, f), "float32"),
    Row("SelectV2", lambda f, x: keras.ops.where(f > 0, f, x), "float32"),
    Row("Select", lambda f, x: tf.compat.v1.where(f > 0, x, f), "float32"),
    Row(
        "ClipByValue",
        lambda f, x: RAW.ClipByValue(t=x, clip_value_min=f[0, 0], clip_value_max=f[0, 0]),
        "float32",
    ),
    Row("Minimum", lambda f, x: tf.clip_by_value(x, f[0, 0], f[0, 0]), "float32"),
    Row("BiasAdd", lambda f, x: tf.nn.bias_add(x, f[0]), "float32"),
    Row("BiasAdd", lambda f, x: tf.nn.bias_add(f, x[0]), "float32"),
    Row("BiasAddV1", lambda f, x: RAW.BiasAddV1(value=x, bias=f[0]), "float32"),
    Row("Cross", lambda f, x: tf.linalg.cross(x[:, :3], f[:, :3]), "float32"),
    Row(
        "Dilation2D",
        lambda f, x: tf.nn.dilation2d(
            image(x), filters(f, 1, 1, N), STRIDES, "SAME", "NHWC", STRIDES
        ),
        "float32",
    ),
    Row("DynamicStitch", lambda f, x: tf.dynamic_stitch([[0], [1]], [x[:1], f[:1]]), "float32"),
    Row(
        "ParallelDynamicStitch",
        lambda f, x: RAW.ParallelDynamicStitch(indices=[[0], [1]], data=[x[:1], f[:1]]),
        "float32",
    ),
    Row("LinSpace", lambda f, x: RAW.LinSpace(start=x[0, 0], stop=f[0, 0], num=3), "float32"),
    Row(
        "Range",
        lambda f, x: RAW.Range(start=x[0, 0] * 0, limit=f[0, 0] * 0 + 3, delta=x[0, 0] * 0 + 1),
        "float32",
    ),
    Row("LowerBound", lambda f, x: tf.searchsorted(tf.sort(x[0]), f[0]), "int32"),
    Row("UpperBound", lambda f, x: tf.searchsorted(tf.sort(f[0]), x[0], side="right"), "int32"),
    Row("MatrixDiagPartV3", lambda f, x: tf.linalg.diag_part(x, padding_value=f[0, 0]), "float32"),
    Row(
        "MatrixDiagPartV2",
        lambda f, x: RAW.MatrixDiagPartV2(input=x, k=0, padding_value=f[0, 0]),
        "float32",
    ),
    Row("MatrixDiagV3", lambda f, x: tf.linalg.diag(x[0], padding_value=f[0, 0]), "float32"),
    Row(
        "MatrixDiagV2",
        lambda f, x: RAW.MatrixDiagV2(
            diagonal=x[0], k=0, num_rows=N, num_cols=N, padding_value=f[0, 0]
        ),
        "float32",
    ),
    Row("MatrixSetDiagV3", lambda f, x: tf.linalg.set_diag(x, f[0]), "float32"),
    Row(
        "MatrixSetDiagV2", lambda f, x: RAW.MatrixSetDiagV2(input=f, diagonal=x[0], k=0), "float32"
    ),
    Row("MatrixSetDiag", lambda f, x: RAW.MatrixSetDiag(input=f, diagonal=x[0]), "float32"),
    Row("OneHot", lambda f, x: tf.one_hot([1], 3, x[0, 0], f[0, 0]), "float32"),
    Row("PadV2", lambda f, x: tf.pad(x, [[1, 1], [0, 0]], constant_values=f[0, 0]), "float32"),
    Row(
        "ParallelConcat",
        lambda f, x: RAW.ParallelConcat(values=[x[:1], f[:1]], shape=(2, N)),
        "float32",
    ),
    Row(
        "RaggedTensorToTensor",
        lambda f, x: tf.RaggedTensor.from_row_lengths(x, [1, 3]).to_tensor(default_value=f[0]),
        "float32",
    ),
    Row("SparseAdd", lambda f, x: tf.sparse.add(sparse(x), sparse(f)), "float32"),
    Row("SparseConcat", lambda f, x: tf.sparse.concat(0, [sparse(x), sparse(f)]), "float32"),
    Row("SparseDenseCwiseMul", lambda f, x: sparse(x) * f, "float32"),
    Row("SparseDenseCwiseDiv", lambda f, x: sparse(f) / x, "float32"),
    Row(
        "SparseDenseCwiseAdd",
        lambda f, x: RAW.SparseDenseCwiseAdd(
            sp_indices=sparse(x).indices,
            sp_values=sparse(x).values,
            sp_shape=sparse(x).dense_shape,
            dense=f,
        ),
        "float32",
    ),
    Row("SparseTensorDenseAdd", lambda f, x: tf.sparse.add(sparse(x), f), "float32"),
    Row(
        "SparseTensorDenseMatMul",
        lambda f, x: tf.sparse.sparse_dense_matmul(sparse(x), f),
        "float32",
    ),
    Row("SparseSparseMaximum", lambda f, x: tf.sparse.maximum(sparse(x), sparse(f)), "float32"),
    Row("SparseSparseMinimum", lambda f, x: tf.sparse.minimum(sparse(f), sparse(x)), "float32"),
    Row(
        "SparseFillEmptyRows",
        lambda f, x: tf.sparse.fill_empty_rows(sparse(x), f[0, 0])[0],
        "float32",
    ),
    Row("SparseToDense", lambda f, x: tf.sparse.to_dense(sparse(x), f[0, 0]), "float32"),
    Row(
        "TensorScatterUpdate", lambda f, x: tf.tensor_scatter_nd_update(x, [[0]], f[:1]), "float32"
    ),
    Row("TensorScatterAdd", lambda f, x: tf.tensor_scatter_nd_add(f, [[0]], x[:1]), "float32"),
    Row("TensorScatterSub", lambda f, x: tf.tensor_scatter_nd_sub(x, [[0]], f[:1]), "float32"),
    Row("TensorScatterMax", lambda f, x: tf.tensor_scatter_nd_max(x, [[0]], f[:1]), "float32"),
    Row("TensorScatterMin", lambda f, x: tf.tensor_scatter_nd_min(x, [[0]], f[:1]), "float32"),
    Row(
        "TensorStridedSliceUpdate",
        lambda f, x: RAW.TensorStridedSliceUpdate(
            input=x, begin=[0, 0], end=[1, N], strides=[1, 1], value=f[:1]
        ),
        "float32",
    ),
]

# Run in the dtype they are given.
AS_GIVEN = [
    Row("Relu", lambda f, x: tf.nn.relu(x), "low"),
    Row("Relu", lambda f, x: tf.nn.relu(f), "float32"),
    Row("Tanh", lambda f, x: tf.tanh(x), "low"),
    Row("Sigmoid", lambda f, x: tf.sigmoid(x), "low"),
    Row("Sqrt", lambda f, x: tf.sqrt(positive(x)), "low"),
    Row("Max", lambda f, x: tf.reduce_max(x), "low"),
    Row("Reshape", lambda f, x: tf.reshape(x, (-1,)), "low"),
    Row("Transpose", lambda f, x: tf.transpose(x), "low"),
    Row("GatherV2", lambda f, x: tf.gather(x, [0]), "low"),
    Row("MaxPool", lambda f, x: tf.nn.max_pool2d(image(x), 2, 1, "SAME"), "low"),
    Row("AddV2", lambda f, x: x + x, "low"),
    Row("AddV2", lambda f, x: x + 1.0, "low"),
    Row("AddV2", lambda f, x: 1.0 + x, "low"),
    Row("AddV2", lambda f, x: f + f, "float32"),
    Row("RealDiv", lambda f, x: x / x, "low"),
    Row("RealDiv", lambda f, x: x / 2.0, "low"),
    Row("DivNoNan", lambda f, x: tf.math.divide_no_nan(x, x), "low"),
    Row("Maximum", lambda f, x: tf.maximum(x, 0.0), "low"),
    Row("ConcatV2", lambda f, x: tf.concat([x, x], 0), "low"),
    Row("SelectV2", lambda f, x: tf.where(x > 0, x, 0.0), "low"),
    Row("BiasAdd", lambda f, x: tf.nn.bias_add(x, x[0]), "low"),
    # TensorFlow gives arrays and numbers the dtype of the tensor beside them.
    Row("AddV2", lambda f, x: x + np.ones((N, N), "float32"), "low"),
    Row("AddV2", lambda f, x: np.ones((N, N), "float32") + x, "low"),
    Row("Maximum", lambda f, x: tf.maximum(x, np.ones((N, N), "float32")), "low"),
    Row("ConcatV2", lambda f, x: tf.concat([np.ones((N, N)), x], 0), "low"),
]

ROWS = [*LOW, *FLOAT32, *WIDEST, *AS_GIVEN]


def matrices(dtype):
    values = np.random.default_rng(0).uniform(0.1, 0.9, (2, N, N))
    return tf.constant(values[0], tf.float32), tf.constant(values[1], dtype)


def dtype_names(result):
    values = result.values if isinstance(result, tf.SparseTensor) else result
    return values.dtype.name


def expected_name(row, dtype):
    return dtype if row.expected == "low" else row.expected


@pytest.mark.parametrize(("row", "dtype"), one_of_each(ROWS, DTYPES), ids=str)
def test_eager_and_traced_call_run_the_op_and_return_the_dtype_of_the_table(row, dtype):
    f, x = matrices(dtype)

    def call(f, x):
        with tfamp.autocast(dtype):
            result = row.call(f, x)
        return tf.identity(result.values if isinstance(result, tf.SparseTensor) else result)

    eager = call(f, x)
    assert eager.dtype.name == expected_name(row, dtype)
    traced = tf.function(call, autograph=False).get_concrete_function(f, x)
    assert row.op in {op.type for op in traced.graph.get_operations()} | set(op_dtypes(traced))
    assert traced.output_dtypes.name == expected_name(row, dtype)
    result = traced(f, x)
    if result.dtype.is_floating:
        expected = tf.cast(eager, tf.float64)
        np.testing.assert_allclose(tf.cast(result, tf.float64), expected, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_same_call_without_autocast_is_as_if_tfamp_were_not_there(row):
    f, _ = matrices("float32")
    result = row.call(f, f)
    assert dtype_names(result) == ("float32" if row.expected == "low" else row.expected)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float16", marks=pytest.mark.nightly)])
def test_on_a_gpu_no_call_and_no_gradient_has_an_op_that_only_the_cpu_runs_low(dtype, monkeypatch):
    monkeypatch.setattr(tf_private, "default_device_kind", lambda: "gpu")
    _, x = matrices(dtype)
    traced, wrong = 0, set()
    for row in ROWS:
        try:
            graph = (
                tf.function(with_gradient(row, dtype), autograph=False)
                .get_concrete_function(x)
                .graph
            )
        except (LookupError, NotImplementedError, TypeError, ValueError):
            continue  # It takes no low input, or has no gradient.
        traced += 1
        wrong |= {(row.op, op) for op in low_on_the_cpu(graph.as_graph_def(), dtype)}
    assert not wrong
    assert traced > 200


def with_gradient(row, low):
    """A call of low inputs only, and the gradient of what is a float of its results."""

    def step(x):
        with tfamp.autocast(low), tf.GradientTape() as tape:
            tape.watch(x)
            y = row.call(x, x)
        values = [each for each in tf.nest.flatten(y, expand_composites=True) if tf.is_tensor(each)]
        floats = [each for each in values if each.dtype.is_floating]
        return floats, tape.gradient(floats, x)

    return step


def low_on_the_cpu(graph_def, low):
    """The ops of a graph that have a GPU's kernel in float32, but none in the low dtype."""
    for nodes in (graph_def.node, *(each.node_def for each in graph_def.library.function)):
        for node in nodes:
            attrs = {name: value.type for name, value in node.attr.items() if value.type}
            types = {name: tf_private.dtype_name(each) for name, each in attrs.items()}
            wide = {name: each.replace(low, "float32") for name, each in types.items()}
            here, there = (
                tf_private.has_kernel(node.op, "gpu", tuple((k, (v,)) for k, v in each.items()))
                for each in (types, wide)
            )
            if there and not here:
                yield node.op


# Why a listed op is not in the table.
NOT_REACHED = {
    "gradients, run with autocast off": {
        "CholeskyGrad",
        "Conv3DBackpropFilter",
        "Conv3DBackpropInput",
    },
    "its output dtype is an argument, so the caller decides": {"BatchMatMulV3"},
    "cells no public function runs": {
        "BlockLSTM",
        "BlockLSTMGrad",
        "BlockLSTMGradV2",
        "BlockLSTMV2",
        "GRUBlockCell",
        "GRUBlockCellGrad",
        "LSTMBlockCell",
        "LSTMBlockCellGrad",
    },
    "GPUs only": {
        "CTCLossV2",
        "CudnnRNN",
        "CudnnRNNBackprop",
        "CudnnRNNBackpropV2",
        "CudnnRNNBackpropV3",
        "CudnnRNNV2",
        "CudnnRNNV3",
    },
    "for inference graphs, with no gradient and no function of their own": {
        "FusedPadConv2D",
        "FusedResizeAndPadConv2D",
    },
    "other libraries' ops": {
        "FastUnsortedSegmentMax",
        "FusedConv2DBiasActivation",
        "FusedSparseConvGpuV2",
        "Mha",
        "MhaV2",
        "Pmlp",
        "Tmlp",
        "TmlpV2",
        "TmlpV3",
        "VoxelMax",
    },
    "takes complex numbers": {"IRFFT", "IRFFT2D", "IRFFT3D"},
    "writes a checkpoint": {"SaveV2"},
    "takes integers only": {"TruncateDiv"},
    "TensorFlow has neither a kernel nor a use for it any more": {
        "AccumulateNV2",
        "MatrixExponential",
    },
    "experimental: XLA only": {"RFFTND"},
}


def test_the_table_reaches_every_listed_op_or_says_why_not():
    reached = {row.op for row in ROWS}
    excused = set().union(*NOT_REACHED.values())
    listed = set()
    for dtype in DTYPES:
        lists = tfamp.OpLists.default(dtype)
        listed |= lists.low | lists.float32 | lists.widest
    assert listed - reached - excused == set()
    assert excused - listed == set(), "excused, but on no list"
    assert reached & excused == set(), "excused, but in the table"


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_table_agrees_with_the_lists(dtype):
    lists = tfamp.OpLists.default(dtype)
    assert {row.op for row in LOW} <= lists.low
    unlisted = {"Complex", "HistogramFixedWidth", "InTopKV2"}
    assert {row.op for row in FLOAT32} - unlisted <= lists.float32
    assert {row.op for row in WIDEST} <= lists.widest
