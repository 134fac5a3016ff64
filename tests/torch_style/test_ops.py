"""Ops on autocast's lists, through TensorFlow's public API, against dtypes written by hand.

Each row names the op type it is for, and a call with a float32 matrix `f` and a low-precision one
`x`; the table it is in says which float dtype comes out.
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

DTYPES = ("float16", "bfloat16")
nn, RAW = tf.nn, tf.raw_ops
N = 4
SHAPE = (1, 2, 2, N)
SAME = {"strides": [1] * 4, "padding": "SAME"}
SAME_3D = {"strides": [1] * 5, "padding": "SAME"}


def image(x):
    """A batch of one 2 x 2 image with 4 channels."""
    return tf.reshape(x, SHAPE)


def volume(x):
    return image(x)[None]


def pointwise(x):
    """Filters of one pixel."""
    return x[None, None]


def depthwise(x):
    return x[None, :1, :, None]


def positive(x):
    return tf.abs(x) + tf.ones_like(x)


def well_conditioned(x):
    """A symmetric positive definite matrix of the dtype."""
    return tf.linalg.set_diag(tf.zeros_like(x), positive(x[0]))


def same(x):
    return x


def each_of(ops, **argument):
    """Rows of ops that take one argument, made of the low-precision matrix."""
    ((name, make),) = argument.items()
    return [(op, lambda f, x, op=op: getattr(RAW, op)(**{name: make(x)})) for op in ops.split()]


def sparse(x):
    return tf.SparseTensor([[0, 1], [2, 3]], x[0, :2], (N, N))


# float32 in, low out.
LOW = [
    ("MatMul", lambda f, x: tf.matmul(f, f)),
    ("MatMul", lambda f, x: tf.tensordot(f, f, 1)),
    ("MatMul", lambda f, x: tf.matmul(f, x)),
    ("MatMul", lambda f, x: RAW.MatMul(a=f, b=x)),
    ("MatMul", lambda f, x: tf.matmul(f, np.ones((N, N), "float32"))),
    ("MatMul", lambda f, x: keras.ops.dot(f, x)),
    ("BatchMatMulV2", lambda f, x: tf.matmul(f[None], f[None])),
    ("BatchMatMul", lambda f, x: RAW.BatchMatMul(x=f, y=x)),
    ("Einsum", lambda f, x: tf.einsum("ij,jk->ik", f, x)),
    ("Conv2D", lambda f, x: nn.conv1d(f[None], pointwise(f)[0], 1, "SAME")),
    ("Conv2D", lambda f, x: nn.conv2d(image(f), pointwise(f), 1, "SAME")),
    ("Conv2D", lambda f, x: nn.conv2d(image(x), pointwise(f), 1, "SAME")),
    ("Conv", lambda f, x: RAW.Conv(input=image(f), filter=pointwise(f), **SAME)),
    ("Conv2DBackpropInput", lambda f, x: nn.conv2d_transpose(image(f), pointwise(f), SHAPE, 1)),
    (
        "Conv2DBackpropFilter",
        lambda f, x: RAW.Conv2DBackpropFilter(
            input=image(f), filter_sizes=[1, 1, N, N], out_backprop=image(x), **SAME
        ),
    ),
    ("Conv3D", lambda f, x: nn.conv3d(volume(f), pointwise(f)[None], **SAME_3D)),
    (
        "Conv3DBackpropInputV2",
        lambda f, x: nn.conv3d_transpose(volume(f), pointwise(f)[None], (1, *SHAPE), **SAME_3D),
    ),
    ("DepthwiseConv2dNative", lambda f, x: nn.depthwise_conv2d(image(f), depthwise(f), **SAME)),
    (
        "DepthwiseConv2dNativeBackpropFilter",
        lambda f, x: nn.depthwise_conv2d_backprop_filter(image(f), (1, 1, N, 1), image(f), **SAME),
    ),
]

# Low in, float32 out.
FLOAT32 = [
    *each_of("Acos Asin Cosh Erfinv Expm1 Inv Ndtri Reciprocal Rsqrt Sinh Square Tan", x=same),
    *each_of("Cholesky MatrixDeterminant MatrixInverse MatrixSquareRoot", input=well_conditioned),
    ("Exp", lambda f, x: tf.exp(x)),
    ("Log", lambda f, x: tf.math.log(positive(x))),
    ("Log1p", lambda f, x: tf.math.log1p(positive(x))),
    ("Pow", lambda f, x: 2.0**x),
    ("Pow", lambda f, x: f**x),
    ("Softplus", lambda f, x: tf.math.softplus(x)),
    ("Sum", lambda f, x: tf.reduce_sum(x)),
    ("Mean", lambda f, x: tf.reduce_mean(x, 0)),
    ("Mean", lambda f, x: nn.moments(x, [0])[1]),
    ("Mean", lambda f, x: keras.ops.var(x)),
    ("Prod", lambda f, x: tf.reduce_prod(x)),
    ("EuclideanNorm", lambda f, x: tf.math.reduce_euclidean_norm(x)),
    ("Cumsum", lambda f, x: tf.cumsum(x)),
    ("ResizeBilinear", lambda f, x: tf.image.resize(image(x), (6, 6))),
    ("SquaredDifference", lambda f, x: tf.math.squared_difference(x, x)),
    ("Cumprod", lambda f, x: tf.math.cumprod(x)),
    ("L2Loss", lambda f, x: nn.l2_loss(x)),
    ("Softmax", lambda f, x: nn.softmax(x)),
    ("LogSoftmax", lambda f, x: nn.log_softmax(x)),
    ("SoftmaxCrossEntropyWithLogits", lambda f, x: nn.softmax_cross_entropy_with_logits(f, x)),
    (
        "SparseSoftmaxCrossEntropyWithLogits",
        lambda f, x: nn.sparse_softmax_cross_entropy_with_logits([0] * N, x),
    ),
    ("Log1p", lambda f, x: nn.sigmoid_cross_entropy_with_logits(x, x)),
    ("Exp", lambda f, x: tf.reduce_logsumexp(x)),
    ("Sum", lambda f, x: keras.losses.CategoricalCrossentropy(from_logits=True)(f, x)),
    ("MatrixSolve", lambda f, x: tf.linalg.solve(well_conditioned(x), f)),
    ("RFFT", lambda f, x: tf.signal.rfft(x)),
    ("RFFT", lambda f, x: tf.signal.stft(x, 4, 2)),
    ("Exp", lambda f, x: nn.ctc_loss(tf.constant([[1, 2]]), x[:, None], [2], [4])),
    # Not listed: no kernel, on a CPU at least, or not even an op for low precision.
    ("Complex", lambda f, x: tf.complex(x, f)),
]

# float32 as soon as one input is.
WIDEST = [
    ("AddV2", lambda f, x: x + f),
    ("AddV2", lambda f, x: keras.ops.add(f, x)),
    ("AddN", lambda f, x: tf.add_n([x, f, x])),
    ("Sub", lambda f, x: x - f),
    ("Mul", lambda f, x: x * f),
    ("MulNoNan", lambda f, x: tf.math.multiply_no_nan(x, f)),
    ("RealDiv", lambda f, x: x / f),
    ("RealDiv", lambda f, x: f / x),
    ("DivNoNan", lambda f, x: tf.math.divide_no_nan(x, f)),
    ("FloorDiv", lambda f, x: x // f),
    ("XlaDynamicUpdateSlice", lambda f, x: keras.ops.slice_update(x, (0, 0), f[:2, :2])),
    ("Maximum", lambda f, x: tf.maximum(x, f)),
    ("Minimum", lambda f, x: tf.minimum(f, x)),
    ("Equal", lambda f, x: x == f),
    ("Less", lambda f, x: x < f),
    ("Greater", lambda f, x: tf.greater(x, f)),
    ("ConcatV2", lambda f, x: tf.concat([x, f], 0)),
    ("Pack", lambda f, x: tf.stack([f, x])),
    ("SelectV2", lambda f, x: tf.where(f > 0, x, f)),
    ("BiasAdd", lambda f, x: nn.bias_add(x, f[0])),
    ("OneHot", lambda f, x: tf.one_hot([1], 3, x[0, 0], f[0, 0])),
    ("PadV2", lambda f, x: tf.pad(x, [[1, 1], [0, 0]], constant_values=f[0, 0])),
    (
        "RaggedTensorToTensor",
        lambda f, x: tf.RaggedTensor.from_row_lengths(x, [1, 3]).to_tensor(default_value=f[0]),
    ),
    ("SparseAdd", lambda f, x: tf.sparse.add(sparse(x), sparse(f))),
    ("SparseTensorDenseAdd", lambda f, x: tf.sparse.add(sparse(x), f)),
    ("SparseTensorDenseMatMul", lambda f, x: tf.sparse.sparse_dense_matmul(sparse(x), f)),
]

# Run in the dtype they are given.
AS_GIVEN = [
    ("Relu", lambda f, x: nn.relu(x)),
    ("Tanh", lambda f, x: tf.tanh(x)),
    ("Max", lambda f, x: tf.reduce_max(x)),
    ("MaxPool", lambda f, x: nn.max_pool2d(image(x), 2, 1, "SAME")),
    ("AddV2", lambda f, x: x + x),
    ("AddV2", lambda f, x: x + 1.0),
    ("RealDiv", lambda f, x: x / 2.0),
    ("Maximum", lambda f, x: tf.maximum(x, 0.0)),
    ("SelectV2", lambda f, x: tf.where(x > 0, x, 0.0)),
    # TensorFlow gives arrays and numbers the dtype of the tensor beside them.
    ("AddV2", lambda f, x: x + np.ones((N, N), "float32")),
    ("AddV2", lambda f, x: np.ones((N, N), "float32") + x),
    ("ConcatV2", lambda f, x: tf.concat([np.ones((N, N)), x], 0)),
]


class Row(NamedTuple):
    op: str
    call: Callable[[Any, Any], Any]
    expected: str

    def __str__(self) -> str:
        return f"{self.op}-{self.call.__code__.co_firstlineno}"


ROWS = [Row(*each, "low") for each in [*LOW, *AS_GIVEN]]
ROWS += [Row(*each, "float32") for each in [*FLOAT32, *WIDEST]]


def matrices(dtype):
    values = np.random.default_rng(0).uniform(0.1, 0.9, (2, N, N))
    return tf.constant(values[0], tf.float32), tf.constant(values[1], dtype)


@pytest.mark.parametrize(("row", "dtype"), one_of_each(ROWS, DTYPES, quick=25), ids=str)
def test_eager_and_traced_call_run_the_op_and_return_the_dtype_of_the_table(row, dtype):
    f, x = matrices(dtype)

    def call(f, x):
        with tfamp.autocast(dtype):
            result = row.call(f, x)
        return tf.identity(result.values if isinstance(result, tf.SparseTensor) else result)

    eager = call(f, x)
    plain = row.call(f, tf.cast(x, tf.float32))
    expected = row.expected if plain.dtype == tf.float32 else plain.dtype.name
    assert not plain.dtype.is_floating or plain.dtype == tf.float32
    assert eager.dtype.name == (dtype if expected == "low" else expected)
    traced = tf.function(call, autograph=False).get_concrete_function(f, x)
    assert row.op in {op.type for op in traced.graph.get_operations()} | set(op_dtypes(traced))
    assert traced.output_dtypes == eager.dtype
    if eager.dtype.is_floating:
        found = [tf.cast(each, tf.float64) for each in (traced(f, x), eager)]
        np.testing.assert_allclose(*found, rtol=0.05, atol=0.05)
