"""Gradients of biases that BatchNormalization takes off are zeros."""

import numpy as np
import pytest
import tensorflow as tf

from helpers.rewritten_graphs import random, rewritten, run, traced
from tfamp import OpLists
from tfamp.graph import rewrite_graph_def

SHAPES = [(8, 6, 6, 3), (3, 3, 3, 4), (4,), (4,), (4,)]
NAME = "gradient_tape/BiasAdd/BiasAddGrad"


def gradients(x, w, bias, scale, offset, *, training=True, also=None):
    """Of a convolution with a bias in front of BatchNormalization."""
    statistics = {} if training else {"mean": tf.zeros(4), "variance": tf.ones(4)}
    with tf.GradientTape() as tape:
        tape.watch([w, bias, scale, offset])
        before = tf.nn.bias_add(tf.nn.conv2d(x, w, 1, "SAME"), bias)
        y, _, _ = tf.compat.v1.nn.fused_batch_norm(
            before, scale, offset, is_training=training, **statistics
        )
        loss = tf.reduce_sum(tf.square(y) * tf.sin(x[..., :1]))
        if also is not None:
            loss += also(before)
    return tape.gradient(loss, [w, bias, scale, offset])


def step(function=gradients, **choices):
    return traced(lambda *args: function(*args, **choices), *SHAPES)


def op_of(result):
    scopes = [result.graph_def.node, *(f.node_def for f in result.graph_def.library.function)]
    (op,) = [node.op for nodes in scopes for node in nodes if node.name.endswith("BiasAddGrad")]
    return op


# The convolution stays float32, so that its gradients can be compared to rounding.
FLOAT32 = {"keep_float32": ["Conv2D", "gradient_tape"]}


@pytest.mark.filterwarnings("ignore::tfamp.TfampWarning")
def test_they_are_zeros_and_all_others_as_before():
    concrete, args = step(), random(*SHAPES)
    result = rewritten(concrete, **FLOAT32)
    assert op_of(result) == "ZerosLike"
    by_w, by_bias, by_scale, by_offset = run(concrete, result, *args)
    expected = concrete(*args)
    for found, other in zip((by_w, by_scale, by_offset), expected[::2] + expected[3:], strict=True):
        np.testing.assert_allclose(found, other, rtol=1e-4, atol=1e-4)
    # What it was is rounding, next to what was added up.
    assert by_bias.dtype == tf.float32
    np.testing.assert_array_equal(by_bias, np.zeros(4))
    assert np.max(np.abs(expected[1])) < 1e-4 * np.max(np.abs(expected[0]))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_they_need_no_cast_in_low_precision(dtype):
    plan = rewritten(step(), dtype=dtype).plan
    (node,) = [each for each in plan.nodes if each.name == NAME]
    assert (node.op, node.dtype) == ("ZerosLike", "float32")
    assert plan.summary.low_nodes
    assert not [cast for cast in plan.casts if NAME in cast.tensor]


def test_in_the_body_of_a_loop():
    def steps(x, w, bias, scale, offset):
        def body(i, w, bias):
            by_w, by_bias, *_ = gradients(x, w, bias, scale, offset)
            return i + 1, w - 0.01 * by_w, bias - 0.01 * by_bias

        return tf.while_loop(lambda i, *_: i < 3, body, (0, w, bias))[1:]

    concrete, args = step(steps), random(*SHAPES)
    result = rewritten(concrete)
    assert op_of(result) == "ZerosLike"
    np.testing.assert_array_equal(run(concrete, result, *args)[1], args[2])


@pytest.mark.parametrize(
    "choices",
    [{"training": False}, {"also": tf.reduce_sum}],
    ids=["given statistics", "used before it too"],
)
def test_where_it_is_not_zero_it_is_computed(choices):
    concrete, args = step(**choices), random(*SHAPES)
    result = rewritten(concrete)
    assert op_of(result) in ("BiasAddGrad", "Sum")
    expected = concrete(*args)[1]
    found = run(concrete, result, *args)[1]
    assert np.linalg.norm(found - expected) < 0.05 * np.linalg.norm(expected)


def changed(graph, op, **attrs):
    for node in graph.node:
        if node.op == op:
            for name, value in attrs.items():
                node.attr[name].CopyFrom(value)
    return graph


def test_channels_in_another_place_are_added_up():
    concrete = step()
    other = tf.compat.v1.AttrValue(s=b"NCHW")
    graph = changed(concrete.graph.as_graph_def(add_shapes=True), "BiasAddGrad", data_format=other)
    names = [each.name for each in concrete.outputs]
    rules = {"dtype": "bfloat16", "device": "cpu", "placement": "lists"}
    assert op_of(rewrite_graph_def(graph, names, **rules)) in ("BiasAddGrad", "Sum")


def test_with_grapplers_lists_it_is_as_grappler_leaves_it():
    result = rewritten(step(), op_lists=OpLists.grappler("bfloat16"))
    assert op_of(result) == "BiasAddGrad"
