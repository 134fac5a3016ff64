"""Which nodes stay float32 for given ranges, and how deep ops reduce."""

import math

import numpy as np
import pytest
import tensorflow as tf

from helpers import graph_dsl, loops
from tfamp.graph.index import build_indexes
from tfamp.planning.cost import FLOP_FORMULAS, SUMS, reduction_depth
from tfamp.planning.ranges import Limits, TensorRange, too_large


def index_of(text):
    graph_def = graph_dsl.graph(text).graph_def
    return build_indexes(graph_def, dtype="float16", device="cpu")[0]


def decide(index, tensors=None, limits=None):
    ranges = {(index.scope, name, 0): found for name, found in (tensors or {}).items()}
    found = too_large(index, ranges, limits or Limits.default("float16"))
    return {index.nodes[position].name: reason for position, reason in found.items()}


def test_both_ends_of_a_large_tensor_stay_float32_with_the_number():
    chosen = decide(index_of("x>A>I>A1"), {"a": TensorRange(1.3e4), "i": TensorRange(3.0)})
    assert {name: reason.text for name, reason in chosen.items()} == {
        "a": "a value of 13000 in its output exceeds data_max 512",
        "i": "a value of 13000 in its input a exceeds data_max 512",
    }
    assert {reason.rule for reason in chosen.values()} == {"calibration"}


def test_the_limit_itself_is_allowed_and_what_was_not_measured_has_no_say():
    assert decide(index_of("x>A>I>A1"), {"a": TensorRange(512.0)}) == {}
    assert decide(index_of("x>A>I>A1")) == {}


def test_the_largest_of_several_tensors_is_named():
    index = index_of("x>A>I x>A1>I")
    tensors = {"a": TensorRange(600.0), "a1": TensorRange(900.0)}
    assert "900 in its input a1" in decide(index, tensors)["i"].text
    equal = dict.fromkeys(tensors, TensorRange(900.0))
    assert "900 in its input a exceeds" in decide(index, equal)["i"].text, "the first of equals"


@pytest.mark.parametrize("worst", [math.inf, 3.0])
def test_what_is_not_finite_stays_float32_and_says_so(worst):
    chosen = decide(index_of("x>A>I"), {"a": TensorRange(worst, nonfinite=True)})
    assert chosen["a"].text == "a value in its output is not finite in float32 already"


def test_sources_are_left_out():
    chosen = decide(index_of("x>A>I"), {"x": TensorRange(1e4)})
    assert set(chosen) == {"a"}


def _scaled_by(value):
    with tf.Graph().as_default() as graph:
        x = tf.compat.v1.placeholder(tf.float32, (4, 4), name="x")
        scale = tf.reshape(tf.constant([[value]], name="scale"), [1], name="flat")
        tf.identity(tf.multiply(x @ x, scale, name="scaled"), name="out")
    return build_indexes(graph.as_graph_def(), dtype="float16", device="cpu")[0]


def test_constants_have_a_limit_of_their_own_also_in_another_shape():
    measured = {name: TensorRange(1e5) for name in ("scale", "flat")}
    chosen = decide(_scaled_by(1e5), measured)
    text = "a value of 100000 in the constant flat exceeds constant_max 65504"
    assert chosen["scaled"].text == text
    # A constant is known also in a branch that never ran.
    assert set(decide(_scaled_by(1e5))) == {"flat"}
    # No data makes a constant larger, so that it needs no margin.
    assert decide(_scaled_by(1e4), {name: TensorRange(1e4) for name in ("scale", "flat")}) == {}


def test_statistics_that_are_float32_anyway_do_not_keep_the_node():
    with tf.Graph().as_default() as graph:
        x = tf.compat.v1.placeholder(tf.float32, (2, 4, 4, 3), name="x")
        variance = tf.compat.v1.placeholder(tf.float32, 3, name="variance")
        tf.raw_ops.FusedBatchNormV3(
            x=x, scale=variance, offset=variance, mean=variance, variance=variance, name="norm"
        )
    index = build_indexes(graph.as_graph_def(), dtype="bfloat16", device="cpu")[0]
    limits = Limits(512.0, 65504.0, math.inf, math.inf)
    assert decide(index, {"variance": TensorRange(1e4)}, limits=limits) == {}
    assert set(decide(index, {"x": TensorRange(1e4)}, limits=limits)) == {"norm"}


def test_a_deep_sum_stays_float32_and_a_deep_matmul_does_not_by_default():
    with tf.Graph().as_default() as graph:
        x = tf.compat.v1.placeholder(tf.float32, (5000, 5000), name="x")
        tf.reduce_sum(tf.matmul(x, x, name="product"), 0, name="sum")
    index = build_indexes(graph.as_graph_def(), dtype="float16", device="cpu")[0]
    square = TensorRange(1.0, shape=(5000, 5000))
    seen = {"x": square, "product": square, "sum": TensorRange(1.0, shape=(5000,))}
    chosen = decide(index, seen)
    text = "it adds up 5000 values for each result, more than reduction_depth 2048"
    assert {name: reason.text for name, reason in chosen.items()} == {"sum": text}
    limits = Limits(512.0, 65504.0, 4096.0, 4096.0)
    assert set(decide(index, seen, limits)) == {"product", "sum"}


def test_bfloat16_has_no_limit_for_data_and_its_own_for_constants_and_sums():
    limits = Limits.default("bfloat16")
    assert limits.data_max == limits.matmul_depth == math.inf
    assert limits.constant_max == float(tf.bfloat16.max)
    assert decide(index_of("x>A>I"), {"a": TensorRange(1e38)}, limits=limits) == {}
    chosen = decide(_scaled_by(1.0), {"flat": TensorRange(float(tf.float32.max))}, limits=limits)
    assert set(chosen) >= {"scaled"}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_the_default_sum_depth_is_where_a_sum_of_ones_stops_growing(dtype):
    depth = int(Limits.default(dtype).sum_depth)
    scalar = tf.as_dtype(dtype).as_numpy_dtype
    assert scalar(depth) + scalar(1) == scalar(depth)
    assert scalar(depth - 1) + scalar(1) == scalar(depth)


def _shapes(op, inputs):
    return {i: tuple(each.shape) for i, each in enumerate(inputs) if each.dtype == tf.float32}


def _ones(*shape):
    return tf.ones(shape)


def _by_filter(op, sizes, channels):
    images, upstream = _ones(2, 5, 5, 3), _ones(2, 5, 5, channels)
    return getattr(tf.raw_ops, op)(
        input=images, filter_sizes=sizes, out_backprop=upstream, strides=[1] * 4, padding="SAME"
    )


CASES = {
    "MatMul": lambda: tf.raw_ops.MatMul(a=_ones(7, 4), b=_ones(7, 5), transpose_a=True),
    "BatchMatMulV2": lambda: tf.matmul(_ones(3, 4, 7), _ones(7, 5)),
    "Conv2D": lambda: tf.nn.conv2d(_ones(1, 5, 5, 4), _ones(3, 3, 2, 6), 1, "VALID"),
    "Conv3D": lambda: tf.nn.conv3d(_ones(1, 3, 3, 3, 2), _ones(2, 2, 2, 2, 3), [1] * 5, "VALID"),
    "DepthwiseConv2dNative": lambda: tf.nn.depthwise_conv2d(
        _ones(1, 5, 5, 4), _ones(3, 3, 4, 2), [1] * 4, "VALID"
    ),
    "Conv2DBackpropFilter": lambda: _by_filter("Conv2DBackpropFilter", [1, 1, 3, 4], 4),
    "DepthwiseConv2dNativeBackpropFilter": lambda: _by_filter(
        "DepthwiseConv2dNativeBackpropFilter", [1, 1, 3, 2], 6
    ),
    "Einsum": lambda: tf.raw_ops.Einsum(
        inputs=[_ones(4, 2, 7), _ones(7, 5)], equation="...k,kj->...j"
    ),
    "Sum": lambda: tf.raw_ops.Sum(input=_ones(3, 4, 5), axis=[0, 2]),
    "L2Loss": lambda: 2.0 * tf.raw_ops.L2Loss(t=_ones(3, 4)),
    "BiasAddGrad": lambda: tf.raw_ops.BiasAddGrad(out_backprop=_ones(3, 4, 5)),
}


@pytest.mark.parametrize("op", CASES)
def test_the_depth_is_what_an_op_makes_of_ones(op):
    graph = tf.function(CASES[op]).get_concrete_function().graph
    (node,) = [each for each in graph.get_operations() if each.type == op]
    equation = node.get_attr("equation").decode() if op == "Einsum" else ""
    output = tuple(node.outputs[0].shape)
    depth = reduction_depth(op, _shapes(op, node.inputs), output, equation)
    assert depth == int(np.max(CASES[op]()))


def test_the_depth_of_a_transposed_convolution_is_that_of_its_filter():
    assert reduction_depth("Conv2DBackpropInput", {1: (3, 3, 4, 8)}, None) == 72
    assert reduction_depth("DepthwiseConv2dNativeBackpropInput", {1: (3, 3, 4, 2)}, None) == 18


def test_a_depth_that_cannot_be_known_is_none():
    assert reduction_depth("Relu", {0: (3, 4)}, (3, 4)) is None
    assert reduction_depth("Sum", {0: (0, 4)}, (4,)) is None
    assert all(reduction_depth(op, {}, None) is None for op in (*FLOP_FORMULAS, *SUMS))


def test_functions_are_judged_by_what_happened_in_them():
    indexes = build_indexes(loops.loop_v2().graph.as_graph_def(), dtype="float16", device="cpu")
    (body,) = [i for i in indexes if any(node.op == "MatMul" for node in i.nodes)]
    (product,) = [node.name for node in body.nodes if node.op == "MatMul"]
    assert body.scope
    assert product in decide(body, {product: TensorRange(1e4)})
    elsewhere = {("", product, 0): TensorRange(1e4)}
    assert too_large(body, elsewhere, Limits.default("float16")) == {}
