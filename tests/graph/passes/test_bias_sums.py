"""Gradients of biases on CPUs: converted to bfloat16 as sums, which add up in float32."""

import dataclasses

import numpy as np
import pytest
import tensorflow as tf

import tfamp
from helpers.graph_asserts import graph_op_dtypes
from helpers.tolerances import tolerance
from tfamp import OpLists
from tfamp.core.profile import builtin_profile
from tfamp.graph import rewrite_graph_def
from tfamp.graph.graph import Graph

ROWS, WIDTH = 4096, 4
CPU = {"device": "cpu", "placement": "lists"}
# As there is a kernel or not.
GPU_GRADIENTS = {"bfloat16" if tf.test.is_built_with_cuda() else "float32"}


def upstream(x):
    """An upstream gradient that is low in a rewritten graph."""
    return x @ tf.eye(WIDTH)


def gradient(x, shape=(ROWS, WIDTH), data_format="NHWC"):
    upper = tf.reshape(upstream(x), shape)
    total = tf.raw_ops.BiasAddGrad(out_backprop=upper, data_format=data_format, name="bias")
    # By the lists an op is low where another one behind it is.
    return tf.reshape(upstream(total[tf.newaxis]), (WIDTH,))


def run(function, x):
    """Results of a function after its rewrite for a CPU."""
    graph = rewritten(graph_of(function)).graph_def
    assert graph_op_dtypes(graph)["Sum"] == {"bfloat16"}
    assert "BiasAddGrad" not in graph_op_dtypes(graph)
    # A process knows one function by each name, and those of loops have their names still.
    graph = Graph(graph).rename_functions("_rewritten").graph_def

    def imported(x):
        return tf.graph_util.import_graph_def(graph, {"x": x}, ["Identity:0"])[0]

    with tf.device("CPU:0"):
        return tf.compat.v1.wrap_function(imported, [tf.TensorSpec(x.shape)])(x)


def graph_of(function, spec=(ROWS, WIDTH), shapes=True):
    concrete = tf.function(function, autograph=False).get_concrete_function(tf.TensorSpec(spec))
    return concrete.graph.as_graph_def(add_shapes=shapes)


def rewritten(graph, dtype="bfloat16", **choices):
    return rewrite_graph_def(graph, ["Identity:0"], dtype=dtype, **{**CPU, **choices})


def test_every_row_counts():
    x = tf.constant(np.random.default_rng(0).uniform(0.5, 1.5, (ROWS, WIDTH)), tf.float32)
    found = run(gradient, x)
    assert found.dtype == tf.float32
    # The rows are rounded once, with errors that cancel, and so is their sum. TensorFlow's own
    # bfloat16 kernel is off by more than half.
    np.testing.assert_allclose(found, np.sum(x.numpy(), 0), rtol=tolerance("bfloat16"))


@pytest.mark.parametrize(
    ("shape", "data_format", "axes"),
    [
        ((64, 64, WIDTH), "NHWC", (0, 1)),
        ((16, WIDTH, 16, 16), "NCHW", (0, 2, 3)),
        ((16, 16, 16, WIDTH), "NHWC", (0, 1, 2)),
    ],
)
def test_all_axes_but_the_channels_are_summed(shape, data_format, axes):
    x = tf.constant(np.random.default_rng(1).uniform(0.5, 1.5, (ROWS, WIDTH)), tf.float32)
    found = run(lambda x: gradient(x, shape, data_format), x)
    expected = np.sum(x.numpy().reshape(shape).astype(np.float64), axes)
    np.testing.assert_allclose(found, expected, rtol=tolerance("bfloat16"))


@pytest.mark.parametrize(
    ("dtype", "choices", "gradients"),
    [
        ("bfloat16", {"op_lists": OpLists.grappler("bfloat16")}, {"bfloat16"}),
        ("float16", {}, {"float16"}),
        (
            "bfloat16",
            {"op_lists": OpLists.default("bfloat16", "cpu").with_changes(deny_add=["BiasAddGrad"])},
            {"float32"},
        ),
        ("bfloat16", {"keep_float32": ["^bias$"]}, {"float32"}),
    ],
    ids=["Grappler's lists", "float16", "denied", "kept"],
)
def test_it_stays_what_it_is_elsewhere(dtype, choices, gradients):
    found = graph_op_dtypes(rewritten(graph_of(gradient), dtype, **choices).graph_def)
    assert found["BiasAddGrad"] == gradients
    assert "Sum" not in found


@pytest.mark.parametrize("place", ["", "/device:CPU:0", "/device:GPU:0"])
def test_on_a_gpu_it_becomes_a_sum_too(place):
    # Its blocks of threads add to the result in bfloat16.
    graph = graph_of(gradient)
    (node,) = [node for node in graph.node if node.op == "BiasAddGrad"]
    node.device = place
    found = graph_op_dtypes(rewritten(graph, device="gpu").graph_def)
    on_cpu = place.endswith("CPU:0")
    assert found["Sum"] == ({"bfloat16"} if on_cpu else GPU_GRADIENTS)
    assert "BiasAddGrad" not in found or {"float32"} == GPU_GRADIENTS
    denied = OpLists.default("bfloat16", "gpu").with_changes(deny_add=["BiasAddGrad"])
    found = graph_op_dtypes(rewritten(graph, device="gpu", op_lists=denied).graph_def)
    assert found["BiasAddGrad"] == {"float32"}


def test_without_a_known_rank_it_stays_float32():
    def function(x, y):
        return tf.raw_ops.BiasAddGrad(out_backprop=tf.reshape(upstream(x), y), name="bias")

    specs = [tf.TensorSpec((ROWS, WIDTH)), tf.TensorSpec((None,), tf.int32)]
    graph = tf.function(function).get_concrete_function(*specs).graph.as_graph_def(add_shapes=True)
    found = graph_op_dtypes(rewritten(graph).graph_def)
    assert found["BiasAddGrad"] == {"float32"}
    graph = graph_of(gradient, shapes=False)
    assert graph_op_dtypes(rewritten(graph).graph_def)["BiasAddGrad"] == {"float32"}


def test_what_is_not_converted_is_as_it_was():
    slow = builtin_profile("cpu", bfloat16=False)
    slow = dataclasses.replace(slow, least_gain=0.0)
    graph = graph_of(gradient)
    before = graph.SerializeToString(deterministic=True)
    with pytest.warns(tfamp.NothingConvertedWarning):
        result = rewritten(graph, placement="min_cut", profile=slow)
    assert result.graph_def == graph
    assert graph.SerializeToString(deterministic=True) == before
    (node,) = [each for each in result.plan.nodes if each.name == "bias"]
    assert (node.op, node.dtype) == ("BiasAddGrad", "float32")
    assert node.inputs == ("Reshape",)
    assert "Sum" not in node.reason


def test_in_the_body_of_a_loop():
    def function(x):
        def body(i, total):
            return i + 1, total + gradient(x * total[0])

        return tf.while_loop(lambda i, _: i < 3, body, (0, tf.ones((WIDTH,))))[1]

    x = tf.random.stateless_uniform((ROWS, WIDTH), (1, 2)) / ROWS
    np.testing.assert_allclose(run(function, x), function(x), rtol=tolerance("bfloat16", depth=8))


def test_a_rewritten_graph_is_its_own_rewrite():
    result = rewritten(graph_of(gradient))
    assert rewritten(result.graph_def).graph_def == result.graph_def
