"""A rewrite is as exact as rounding where low kernels would add up in their own dtype.

Every function runs on some 10,000 positive terms, forward and backward, between products that are
low. The whole file runs once more with Eigen's kernels where oneDNN's are the default.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

import tfamp
from helpers.cases import one_in
from helpers.graph_asserts import op_dtypes
from helpers.tolerances import tolerance
from tfamp import OpLists
from tfamp.machine import hardware
from tfamp.planning.kernels import EIGEN, ONEDNN, OpCall, fact_about, library_of

DTYPES = ("bfloat16", "float16")
LISTS = {"placement": "lists"}
RANDOM = np.random.default_rng(0)


def positive(*shape, scale=1.0):
    return tf.constant(RANDOM.uniform(0.5 * scale, 1.5 * scale, shape), tf.float32)


def peaked(*shape):
    """Data whose largest value is in the middle: every window around it takes the maximum there."""
    values = RANDOM.uniform(0.5, 1.0, shape)
    values[:, shape[1] // 2, shape[2] // 2] = 2.0
    return tf.constant(values, tf.float32)


def depthwise(x, w):
    return tf.nn.depthwise_conv2d(x, w, [1] * 4, "SAME")


def strided_depthwise(x, w):
    return tf.nn.depthwise_conv2d(x, w, [1, 2, 2, 1], "SAME")


def strided(x, w):
    return tf.nn.conv2d(x, w, 2, "SAME")


def gathered(x):
    return tf.gather(x, tf.zeros(8192, tf.int32))


def gathered_nd(x):
    return tf.gather_nd(x, tf.zeros((8192, 1), tf.int32))


def scattered(x):
    return tf.scatter_nd(tf.zeros((8192, 1), tf.int32), x, (2, 4))


CASES = {
    "bias": (tf.nn.bias_add, positive(8192, 4), positive(4)),
    "broadcast sum": (tf.add, positive(8192, 4), positive(4)),
    "broadcast product": (tf.multiply, positive(8192, 4), positive(4)),
    "depthwise": (depthwise, positive(8, 32, 32, 4), positive(3, 3, 4, 1, scale=0.1)),
    "depthwise in pairs": (depthwise, positive(8, 32, 32, 4), positive(3, 3, 4, 2, scale=0.1)),
    "strided depthwise": (
        *(strided_depthwise, positive(8, 64, 64, 4)),
        positive(3, 3, 4, 1, scale=0.1),
    ),
    "strided": (strided, positive(8, 64, 64, 4), positive(3, 3, 4, 8, scale=0.1)),
    "convolution": (
        lambda x, w: tf.nn.conv2d(x, w, 1, "SAME"),
        *(positive(8, 32, 32, 4), positive(3, 3, 4, 8, scale=0.1)),
    ),
    "1x1": (
        lambda x, w: tf.nn.conv2d(x, w, 1, "SAME"),
        *(positive(8, 32, 32, 4), positive(1, 1, 4, 8, scale=0.1)),
    ),
    "1-D": (
        lambda x, w: tf.nn.conv1d(x, w, 1, "SAME"),
        *(positive(8, 1024, 4), positive(5, 4, 8, scale=0.1)),
    ),
    "transposed": (
        lambda x, w: tf.nn.conv2d_transpose(x, w, (4, 64, 64, 8), 2, "SAME"),
        *(positive(4, 32, 32, 16), positive(3, 3, 8, 16, scale=0.1)),
    ),
    "3-D": (
        lambda x, w: tf.nn.conv3d(x, w, [1] * 5, "SAME"),
        *(positive(1, 16, 16, 16, 8), positive(5, 5, 5, 8, 8, scale=0.01)),
    ),
    "einsum": (
        lambda x, w: tf.einsum("abc,cd->abd", x, w),
        *(positive(16, 512, 4), positive(4, 8)),
    ),
    "einsum that contracts": (
        lambda x, y: tf.einsum("abc,abd->cd", x, y),
        *(positive(16, 512, 4, scale=0.1), positive(16, 512, 8, scale=0.1)),
    ),
    "einsum of one operand": (lambda x: tf.einsum("abc->c", x), positive(16, 512, 4)),
    "average": (
        lambda x: tf.nn.avg_pool2d(x, 64, 64, "VALID"),
        positive(2, 128, 128, 4),
    ),
    "small averages": (lambda x: tf.nn.avg_pool2d(x, 2, 2, "VALID"), positive(2, 32, 32, 4)),
    "average in 3-D": (lambda x: tf.nn.avg_pool3d(x, 16, 16, "VALID"), positive(1, 16, 16, 16, 4)),
    "overlapping averages": (
        lambda x: tf.nn.avg_pool2d(x, 31, 1, "VALID"),
        positive(1, 64, 64, 4),
    ),
    "overlapping maxima": (lambda x: tf.nn.max_pool2d(x, 31, 1, "VALID"), peaked(1, 64, 64, 4)),
    "upsampling": (
        lambda x: tf.raw_ops.ResizeNearestNeighbor(images=x, size=(256, 256)),
        positive(1, 2, 2, 4),
    ),
    "gather": (gathered, positive(2, 4)),
    "gather_nd": (gathered_nd, positive(2, 4)),
    "scatter_nd": (scattered, positive(8192, 4, scale=0.1)),
    "segments": (
        lambda x: tf.math.segment_sum(x, tf.zeros(8192, tf.int32)),
        positive(8192, 4, scale=0.1),
    ),
    "unsorted segments": (
        lambda x: tf.math.unsorted_segment_mean(x, tf.zeros(8192, tf.int32), 2),
        positive(8192, 4),
    ),
    "cumulative sum": (lambda x: tf.cumsum(x, 0), positive(8192, 4, scale=0.1)),
    "mean": (lambda x: tf.reduce_mean(x, 0), positive(8192, 4)),
    # Numbers that both dtypes hold, and whose product is near 1.
    "product": (
        lambda x: tf.reduce_prod(x, 0),
        tf.constant(RANDOM.choice([1 - 2**-7, 1 + 2**-7], (4096, 4)), tf.float32),
    ),
}


def product(x):
    """The same values by a product, so that a rewrite wants what is around it to be low."""
    return tf.linalg.matmul(x, tf.eye(x.shape[-1])) if x.shape.rank > 1 else product(x[None])[0]


def step_of(function):
    def step(upstream, *given):
        given = [product(each) for each in given]
        with tf.GradientTape() as tape:
            tape.watch(given)
            result = function(*given)
        found = tape.gradient(result, given, output_gradients=product(upstream))
        found = [tf.convert_to_tensor(each) for each in found]
        return [product(result), *map(product, found)]

    return step


@pytest.mark.parametrize(("name", "dtype"), one_in(5, itertools.product(CASES, DTYPES)))
def test_values_and_gradients_are_exact(name, dtype):
    function, *given = CASES[name]
    # Rounding the arguments is not what is measured.
    given = [tf.cast(tf.cast(each, dtype), tf.float32) for each in given]
    with tf.device("CPU:0"):
        upstream = 0.25 * tf.ones_like(function(*given))
        step = step_of(function)
        fast = tfamp.rewrite(step, dtype=dtype, **LISTS)
        assert (
            dtype
            in op_dtypes(fast.concrete(upstream, *given))[
                "MatMul" if given[0].shape.rank == 2 else "BatchMatMulV2"
            ]
        )
        found, expected = fast(upstream, *given), step(upstream, *given)
    for value, exact in zip(found, expected, strict=True):
        error = np.max(np.abs(value - exact)) / np.max(np.abs(exact))
        assert error < tolerance(dtype), f"{name}: off by {error:.3g}"


def attention(causal):
    def gradients(queries, keys, values, upstream):
        with tf.GradientTape() as tape:
            tape.watch([queries, keys, values])
            scores = tf.linalg.matmul(queries, keys, transpose_b=True) * keys.shape[-1] ** -0.5
            if causal:
                rows = keys.shape[0] // queries.shape[0] * tf.range(queries.shape[0])[:, None]
                scores = tf.where(rows >= tf.range(keys.shape[0]), scores, -1e9)
            result = tf.linalg.matmul(tf.nn.softmax(scores), values)
        return tape.gradient(result, [queries, keys, values], output_gradients=upstream)

    return gradients


@pytest.mark.parametrize(
    ("keys", "causal", "dtype"), one_in(7, itertools.product([4000, 4096], [False, True], DTYPES))
)
def test_attention_over_many_nearly_uniform_keys_has_exact_gradients(keys, causal, dtype):
    given = [positive(n, 32, scale=s) for n, s in ((64, 0.1), (keys, 0.5), (keys, 0.5), (64, 0.5))]
    step = attention(causal)
    found = tfamp.rewrite(step, dtype=dtype, **LISTS)(*given)
    expected = step(*(tf.cast(each, tf.float64) for each in given))
    for value, exact in zip(found, expected, strict=True):
        error = np.linalg.norm(value.numpy() - exact) / np.linalg.norm(exact)
        # A low softmax with low sums behind it is off by 188 %, and by 33 % in float16.
        assert error < 4 * tolerance(dtype)


@pytest.mark.parametrize(
    ("keys", "softmax"), [(128, "bfloat16"), (256, "bfloat16"), (257, "float32"), (None, "float32")]
)
def test_softmaxes_over_few_keys_stay_low_and_those_over_many_or_unknown_do_not(keys, softmax):
    step = tfamp.rewrite(
        attention(causal=False) if keys else unknown_attention, dtype="bfloat16", **LISTS
    )
    given = [positive(n, 32) for n in (64, keys or 128, keys or 128, 64)]
    found = {node.op: node.dtype for node in step.plan(*given).nodes}
    assert found["Softmax"] == found["Sub"] == found["Sum"] == softmax


def unknown_attention(queries, keys, values, upstream):
    found = tf.boolean_mask(tf.concat([keys, values], 1), keys[:, 0] > 0)
    with tf.GradientTape() as tape:
        tape.watch(queries)
        scores = tf.linalg.matmul(queries, found[:, :32], transpose_b=True)
        result = tf.linalg.matmul(tf.nn.softmax(scores), found[:, 32:])
    return tape.gradient(result, queries, output_gradients=upstream)


def test_a_softmax_without_a_gradient_may_be_low_over_any_number_of_keys():
    def predict(queries, keys):
        scores = tf.nn.softmax(tf.linalg.matmul(queries, keys, transpose_b=True))
        return tf.linalg.matmul(scores, keys)

    plan = tfamp.rewrite(predict, dtype="bfloat16", **LISTS).plan(
        positive(64, 32), positive(4096, 32)
    )
    assert {node.dtype for node in plan.nodes if node.op == "Softmax"} == {"bfloat16"}


# What decides


def dtype_of(op, function, *given, dtype="bfloat16", **choices):
    with tf.device("CPU:0"):
        plan = tfamp.rewrite(step_of(function), dtype=dtype, **LISTS, **choices).plan(
            tf.ones_like(function(*given)), *given
        )
    return {node.dtype for node in plan.nodes if node.op == op}, plan


def test_the_reason_names_the_library_and_the_number_of_values():
    found, plan = dtype_of("AvgPoolGrad", *CASES["overlapping averages"])
    assert found == {"float32"}
    (reason,) = [node.reason for node in plan.nodes if node.op == "AvgPoolGrad"]
    assert reason.rule == "sum"
    assert reason == "Eigen's kernel would add up 961 values for each result in bfloat16"


def test_few_values_may_be_low():
    for op in ("AvgPool", "AvgPoolGrad"):
        assert dtype_of(op, *CASES["small averages"])[0] == {"bfloat16"}


def test_the_library_that_runs_decides():
    is_exact = "bfloat16" in hardware.onednn_dtypes()
    found, _ = dtype_of("AvgPool", *CASES["average"])
    assert found == {"bfloat16" if is_exact else "float32"}
    # oneDNN's averages take no float16.
    assert dtype_of("AvgPool", *CASES["average"], dtype="float16")[0] == {"float32"}


def test_force_low_and_ops_that_the_callers_lists_moved_win():
    case = CASES["overlapping averages"]
    assert dtype_of("AvgPoolGrad", *case, force_low=["AvgPoolGrad"])[0] == {"bfloat16"}
    for change in ({"infer_add": ["AvgPoolGrad"]}, {"allow_add": ["AvgPoolGrad"]}):
        lists = OpLists.default("bfloat16", "cpu").with_changes(**change)
        assert dtype_of("AvgPoolGrad", *case, op_lists=lists)[0] == {"bfloat16"}
    other = OpLists.default("bfloat16", "cpu").with_changes(deny_add=["Tanh"])
    assert dtype_of("AvgPoolGrad", *case, op_lists=other)[0] == {"float32"}


def test_grapplers_own_lists_know_no_kernels():
    lists = OpLists.grappler("bfloat16")
    found, _ = dtype_of("AvgPoolGrad", *CASES["overlapping averages"], op_lists=lists)
    assert found == {"bfloat16"}


def test_kernels_lose_what_the_table_says_and_no_more():
    rows = tf.ones((8192, 4), tf.bfloat16)
    pixels = tf.fill((1, 32, 32, 1), tf.constant(0.75, tf.bfloat16))
    onednn = hardware.onednn_dtypes()
    pooling = {"ksize": [1, 32, 32, 1]}
    with tf.device("CPU:0"):
        mean = tf.nn.avg_pool2d(pixels, 32, 32, "VALID")
        upsampled = tf.raw_ops.ResizeNearestNeighborGrad(grads=pixels, size=[1, 1])
        scattered = tf.scatter_nd(tf.zeros((1024, 1), tf.int32), tf.reshape(pixels, [1024]), [1])
        gradient = tf.raw_ops.BiasAddGrad(out_backprop=rows)
        assert tf.reduce_sum(rows, 0).numpy().tolist() == [8192.0] * 4
    # Once one of these fails, TensorFlow's kernel is repaired, and its row in the table goes.
    assert gradient.numpy().tolist() == [256.0] * 4
    assert max(float(upsampled[0, 0, 0, 0]), float(scattered[0])) < 400 < 0.75 * 1024
    fact = fact_about(OpCall("AvgPool", attrs=pooling), "bfloat16", "cpu", onednn)
    assert (float(mean[0, 0, 0, 0]) > 0.9) is (fact is not None)


@pytest.mark.skipif(not hardware.onednn_dtypes(), reason="Eigen's kernels run here already")
def test_all_of_this_holds_with_eigens_kernels():
    environment = {**os.environ, "TF_ENABLE_ONEDNN_OPTS": "0"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "", __file__]
    found = subprocess.run(
        command, env=environment, cwd=Path(__file__).parents[2], capture_output=True, text=True
    )
    assert found.returncode == 0, found.stdout[-5000:]


def test_an_exponential_in_float16_is_exact_with_its_scope_in_float32():
    """The page on sums gives this pattern: the coefficients exceed float16."""
    matrix = tf.random.stateless_normal((6, 6), [1, 2])

    def step(matrix):
        with tf.GradientTape() as tape:
            tape.watch(matrix)
            result = tf.linalg.expm(matrix @ tf.eye(6))
        return result, tape.gradient(result, matrix)

    expected = step(tf.cast(tf.cast(matrix, tf.float16), tf.float32))
    fast = tfamp.rewrite(
        step, dtype="float16", placement="lists", keep_float32=["matrix_exponential"]
    )
    for value, exact in zip(fast(matrix), expected, strict=True):
        assert float(tf.norm(value - exact) / tf.norm(exact)) < 1e-3


def test_a_cpu_that_multiplies_float16_has_tensorflows_own_average_pools():
    onednn = frozenset({"float16", "bfloat16"})
    assert library_of("AvgPool", "float16", "cpu", onednn) == EIGEN
    assert library_of("AvgPool", "bfloat16", "cpu", onednn) == ONEDNN
    assert library_of("MatMul", "float16", "cpu", onednn) == ONEDNN
    call = OpCall("AvgPool", ((1, 32, 32, 4),), attrs={"ksize": [1, 32, 32, 1]})
    assert fact_about(call, "float16", "cpu", onednn) is not None
    assert fact_about(call, "bfloat16", "cpu", onednn) is None


@pytest.mark.parametrize(
    ("equation", "is_exact"),
    [("abc,abd->cd", True), ("...ab,bc->...ac", True), ("abc->c", False), ("ab,cd->ac", False)],
)
def test_onednns_float16_einsum_is_exact_but_over_axes_of_one_operand(equation, is_exact):
    shapes = {part: (128,) * len(part) for part in equation.partition("->")[0].split(",")}
    call = OpCall("Einsum", tuple(shapes.values()), attrs={"equation": equation})
    onednn = frozenset({"float16", "bfloat16"})
    assert (fact_about(call, "float16", "cpu", onednn) is None) == is_exact
    assert fact_about(call, "bfloat16", "cpu", onednn) is None
