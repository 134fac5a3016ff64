"""Convolutions that a CPU's low-precision kernels refuse stay float32, and the graph runs."""

import pytest
import tensorflow as tf

import tfamp
from helpers.cases import first_of
from helpers.graph_asserts import op_dtypes
from helpers.tolerances import assert_close
from tfamp.machine.hardware import detect

IMAGES = tf.random.stateless_normal((2, 8, 8, 4), [1, 2])
VOLUMES = tf.random.stateless_normal((1, 6, 6, 6, 2), [1, 2])


def channels_first(x):
    first = tf.transpose(x, [0, 3, 1, 2])
    y = tf.nn.conv2d(first, tf.ones((3, 3, 4, 4)), 1, "SAME", data_format="NCHW")
    return tf.nn.avg_pool2d(y, 2, 2, "SAME", data_format="NCHW")


def dilated(x):
    return tf.nn.conv2d(x, tf.ones((3, 3, 4, 4)), 1, "SAME", dilations=2)


def dilated_depthwise(x):
    options = {"strides": [1] * 4, "padding": "SAME", "dilations": [1, 2, 2, 1]}
    return tf.raw_ops.DepthwiseConv2dNative(input=x, filter=tf.ones((3, 3, 4, 1)), **options)


def dilated_3d(x):
    return tf.nn.conv3d(x, tf.ones((2, 2, 2, 2, 2)), [1] * 5, "SAME", dilations=[1, 2, 2, 2, 1])


CASES = [
    (channels_first, IMAGES, {"Conv2D", "Conv2DBackpropInput", "AvgPool", "AvgPoolGrad"}),
    (dilated, IMAGES, {"Conv2D", "Conv2DBackpropInput"}),
    (dilated_depthwise, IMAGES, {"DepthwiseConv2dNative"}),
    (dilated_3d, VOLUMES, {"Conv3D", "Conv3DBackpropInputV2"}),
]


@pytest.mark.parametrize("dtype", first_of(["bfloat16", "float16"]))
@pytest.mark.parametrize(("function", "x", "refused"), CASES)
def test_what_the_kernels_of_a_cpu_refuse_stays_float32(function, x, refused, dtype):
    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.matmul(function(x), tf.eye(function(x).shape[-1]))
        return y, tape.gradient(y, x)

    with tf.device("CPU:0"):
        fast = tfamp.rewrite(step, dtype=dtype)
        found = op_dtypes(fast.concrete(x))
        assert found["MatMul" if "MatMul" in found else "BatchMatMulV2"] == {dtype}
        if dtype == "float16" or not detect().cpu_bfloat16:
            assert {op: found[op] for op in refused} == dict.fromkeys(refused, {"float32"})
        else:  # oneDNN's kernels support it, as in float32.
            assert all(found[op] == {dtype} for op in refused if "Conv" in op)
        for value, expected in zip(fast(x), step(x), strict=True):
            assert_close(value, expected, dtype, depth=64)
