"""Gradients of convolutions by their filters become ops that are faster, on CPUs."""

from collections import Counter

import numpy as np
import pytest
import tensorflow as tf

import tfamp
from helpers.graph_asserts import graph_op_dtypes
from helpers.rewritten_graphs import random, rewritten, run, traced
from helpers.tolerances import tolerance
from tfamp import OpLists
from tfamp.machine.hardware import detect

pytestmark = pytest.mark.usefixtures("exact_kernels")

NATIVE, PRODUCT = "Conv2DBackpropFilter", "MatMul"
DEPTHWISE, FORWARD = "DepthwiseConv2dNativeBackpropFilter", "DepthwiseConv2dNative"
UNEVEN = [[0, 0], [1, 0], [0, 1], [0, 0]]
SMALL = (4, 8, 8, 128)


def gradient(padding, stride, dilation=1):
    def by_filter(x, w):
        with tf.GradientTape() as tape:
            tape.watch(w)
            y = tf.nn.conv2d(x, w, stride, padding, dilations=dilation)
            loss = tf.reduce_sum(y * y)
        return tape.gradient(loss, w)

    return by_filter


def depthwise_gradient(padding, stride):
    def by_filter(x, w):
        with tf.GradientTape() as tape:
            tape.watch(w)
            y = tf.nn.depthwise_conv2d(x, w, [1, stride, stride, 1], padding)
            loss = tf.reduce_sum(y * y)
        return tape.gradient(loss, w)

    return by_filter


def counts(result, ops=(NATIVE, PRODUCT)):
    return Counter(node.op for node in result.graph_def.node if node.op in ops)


def error(concrete, result, *args):
    (found,), expected = run(concrete, result, *args), concrete(*args)
    assert found.shape == expected.shape
    return np.linalg.norm(found - expected) / np.linalg.norm(expected)


@pytest.mark.parametrize(
    ("image", "kernel", "padding", "stride", "op"),
    [
        ((4, 8, 9, 12), (1, 1, 12, 7), "SAME", 1, PRODUCT),
        ((4, 8, 9, 64), (1, 1, 64, 64), UNEVEN, 1, NATIVE),
        ((4, 8, 9, 64), (1, 1, 64, 64), "SAME", 2, NATIVE),
        ((4, 8, 6, 64), (2, 2, 64, 48), "VALID", 2, PRODUCT),
        ((4, 9, 8, 64), (2, 2, 64, 48), "VALID", 2, NATIVE),  # A row is in no patch.
        ((4, 8, 8, 64), (2, 2, 64, 48), UNEVEN, 2, NATIVE),
        ((4, 8, 8, 3), (4, 4, 3, 64), "VALID", 4, NATIVE),  # Few channels.
        (SMALL, (3, 3, 128, 64), "SAME", 1, NATIVE),
        pytest.param(
            SMALL,
            (3, 3, 64, 128),  # In two groups, which only oneDNN's own bfloat16 has.
            "SAME",
            1,
            NATIVE,
            marks=pytest.mark.skipif(not detect().cpu_bfloat16, reason="no bfloat16 kernel"),
        ),
    ],
)
def test_what_is_faster_as_a_product_is_one(image, kernel, padding, stride, op):
    concrete = traced(gradient(padding, stride), image, kernel)
    result = rewritten(concrete)
    assert counts(result) == {op: 1}
    assert graph_op_dtypes(result.graph_def)[op] == {"bfloat16"}
    args = random(image, kernel)
    assert error(concrete, result, *args) < tolerance("bfloat16", depth=4)


def test_a_batch_that_is_not_known_and_what_is_left_alone():
    pointwise = traced(gradient("SAME", 1), (None, 8, 8, 16), (1, 1, 16, 8))
    assert counts(rewritten(pointwise)) == {PRODUCT: 1}
    patches = traced(gradient("SAME", 2), (None, 8, 8, 32), (2, 2, 32, 48))
    assert counts(rewritten(patches)) == {PRODUCT: 1}
    for concrete, kernel in ((pointwise, (1, 1, 16, 8)), (patches, (2, 2, 32, 48))):
        for batch in (0, 3):
            args = random((batch, 8, 8, kernel[2]), kernel)
            (found,), expected = run(concrete, rewritten(concrete), *args), concrete(*args)
            np.testing.assert_allclose(found, expected, atol=0.1 * np.abs(expected).max())
    lists = OpLists.grappler("bfloat16")
    assert counts(rewritten(pointwise, op_lists=lists)) == {NATIVE: 1}
    apart = traced(gradient("SAME", 1, dilation=2), SMALL, (3, 3, 128, 128))
    assert counts(rewritten(apart))[PRODUCT] == 0


def test_in_float32_it_is_the_same_to_rounding_and_keeps_its_name():
    shapes = SMALL, (2, 2, 128, 64)
    concrete = traced(gradient("VALID", 2), *shapes)
    with pytest.warns(tfamp.NothingConvertedWarning):
        result = rewritten(concrete, keep_float32=["."])
    assert counts(result) == {PRODUCT: 1}
    names = {node.name for node in result.graph_def.node}
    assert {op.name for op in concrete.graph.get_operations() if op.type == NATIVE} <= names
    args = random(*shapes)
    assert error(concrete, result, *args) < tolerance("float32", depth=4)


def test_a_product_in_functions_of_the_graph():
    loop = tf.function(gradient("SAME", 1))

    def called(x, w):
        return tf.cond(tf.reduce_sum(x) > 1e9, lambda: w, lambda: loop(x, w))

    shapes = (4, 8, 8, 16), (1, 1, 16, 8)
    concrete = traced(called, *shapes)
    result = rewritten(concrete)
    ops = Counter(n.op for f in result.graph_def.library.function for n in f.node_def)
    assert ops[PRODUCT]
    assert not ops[NATIVE]
    args = random(*shapes)
    assert error(concrete, result, *args) < tolerance("bfloat16", depth=4)


@pytest.mark.parametrize(
    ("kernel", "padding", "stride", "batch", "convolutions"),
    [
        ((5, 5, 32, 1), "SAME", 1, 4, 2),
        ((5, 7, 32, 1), "VALID", 1, 4, 2),
        ((5, 5, 32, 1), "SAME", 1, None, 2),
        ((5, 7, 32, 1), "VALID", 1, None, 2),
        ((6, 6, 32, 1), [[0, 0], [3, 2], [1, 3], [0, 0]], 1, 4, 2),
        ((3, 3, 32, 1), "SAME", 1, 4, 1),
        ((5, 5, 32, 1), "SAME", 2, 4, 1),
        ((5, 5, 32, 2), "SAME", 1, 4, 1),  # Two filters a channel.
    ],
)
def test_large_depthwise_filters_get_theirs_from_a_convolution(
    kernel, padding, stride, batch, convolutions
):
    image = (4, 8, 9, 32) if stride == 1 else (4, 8, 8, 32)
    concrete = traced(depthwise_gradient(padding, stride), (batch, *image[1:]), kernel)
    result = rewritten(concrete)
    assert counts(result, (FORWARD, DEPTHWISE)) == Counter(
        {FORWARD: convolutions, DEPTHWISE: 2 - convolutions}
    )
    assert graph_op_dtypes(result.graph_def)[FORWARD] == {"bfloat16"}
    assert error(concrete, result, *random(image, kernel)) < tolerance("bfloat16", depth=4)
    if batch is None:  # One of no images too, though no convolution is of no channels.
        (found,) = run(concrete, result, *random((0, *image[1:]), kernel))
        np.testing.assert_array_equal(found, np.zeros(kernel))
