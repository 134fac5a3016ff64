"""Errors of sums of low-precision tensors against float64; a program, too.

GPUs add some sums up in the low dtype, or atomically in any order, and TensorFlow picks kernels by
timing them, so that every process may run others.
"""

from __future__ import annotations

import json
import sys

import ml_dtypes
import numpy as np
import tensorflow as tf

import tfamp
from helpers.graph_asserts import op_dtypes

COLUMNS = 768  # More than one block of threads adds to each sum.
# Depthwise filters that cuDNN does not support: even size, not square, multiplier 2.
FILTERS = {"4x4": (4, 4, 4, 1), "1x3": (1, 3, 4, 1), "multiplier 2": (3, 3, 4, 2)}


def gradient(upstream, forward, x):
    """Returns the gradient of a forward pass; a product makes the upstream gradient low."""
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = forward(x)
        loss = tf.reduce_sum((y @ tf.eye(y.shape[-1], dtype=y.dtype)) * upstream)
    return tf.convert_to_tensor(tape.gradient(loss, x))


def _product(x):
    """Returns its argument as a low product, with which a rewrite begins."""
    return x @ tf.eye(COLUMNS, dtype=x.dtype)


def sums(rows: int) -> dict:
    """Returns a function for each op that adds up rows."""
    halves = tf.range(rows) % 2
    return {
        "Sum": lambda x: tf.reduce_sum(_product(x), 0),
        "Cumsum": lambda x: tf.cumsum(_product(x))[-1],
        "UnsortedSegmentSum": lambda x: tf.math.unsorted_segment_sum(_product(x), halves, 2),
        "SegmentMean": lambda x: tf.math.segment_mean(_product(x), tf.sort(halves)),
        "ScatterNd": lambda x: tf.scatter_nd(halves[:, None], _product(x), (2, COLUMNS)),
    }


def cases(rows: int) -> dict:
    """Returns a function for each sum, and the shapes of its arguments."""
    pixels, side = (rows // 16, 16, 4), int(rows**0.5)

    def depthwise(shape):
        def filter_gradient(upstream, x, filters):
            forward = lambda w: tf.nn.depthwise_conv2d(x, w, [1] * 4, "SAME")  # noqa: E731
            return gradient(upstream / 8, forward, filters)  # Less than float16's largest.

        upstream = (8, *pixels[:2], shape[2] * shape[3])
        return filter_gradient, (upstream, (8, *pixels), shape)

    def bias(upstream, x, bias):
        return gradient(upstream, lambda b: tf.nn.bias_add(x, b), bias)

    def embedding(upstream, table):
        index = tf.range(rows) % 2
        return gradient(upstream, lambda t: tf.gather(tf.identity(t), index), table)

    def enlarged(upstream, x):
        method = tf.image.ResizeMethod.NEAREST_NEIGHBOR
        return gradient(upstream, lambda t: tf.image.resize(t, [side, side], method), x)

    def pooled(upstream, x):
        return gradient(upstream, lambda t: tf.nn.avg_pool2d(t, 15, 1, "SAME"), x)

    wide, image = (rows, COLUMNS), (1, 32, 32, 4)
    return {
        "gradient of a bias": (bias, (wide, wide, (COLUMNS,))),
        **{name: (function, (wide,)) for name, function in sums(rows).items()},
        "gradient of an embedding": (embedding, (wide, (2, COLUMNS))),
        "gradient of nearest resizing": (enlarged, ((1, side, side, 4), (1, 1, 1, 4))),
        "gradient of overlapping pools": (pooled, (image, image)),
        **{f"depthwise filter {name}": depthwise(shape) for name, shape in FILTERS.items()},
    }


def error(found: tf.Tensor, expected: tf.Tensor, dtype: str) -> float:
    """Returns the largest relative error, in eps of the low dtype."""
    found, expected = (np.asarray(tf.cast(each, tf.float64)) for each in (found, expected))
    return float(np.max(np.abs(found / expected - 1)) / float(ml_dtypes.finfo(dtype).eps))


def errors(dtype: str, rows: int) -> dict[str, dict]:
    """Returns for each sum the dtypes of products and the errors of tfamp and TensorFlow."""
    found = {}
    for name, (function, shapes) in cases(rows).items():
        # Of one sign: a sum that is kept in a low dtype stops growing.
        args = [tf.random.stateless_uniform(shape, (0, 1), 0.7, 1.7) for shape in shapes]
        low = [tf.cast(each, dtype) for each in args]
        with tf.device("CPU"):
            expected = function(*(tf.cast(each, tf.float64) for each in low))
        ours = tfamp.rewrite(function, dtype=dtype, placement="lists")
        given = [tf.cast(each, tf.float32) for each in low]
        ops = op_dtypes(ours, *given)
        found[name] = {
            "products": sorted(ops.get("MatMul", ops.get("BatchMatMulV2", {"none"}))),
            "tfamp": error(ours(*given), expected, dtype),
            "autocast": error(_under_autocast(function, dtype)(*given), expected, dtype),
            "TensorFlow": error(tf.function(function)(*low), expected, dtype),
        }
    return found


def _under_autocast(function, dtype: str):
    def run(*args):
        with tfamp.autocast(dtype):
            return function(*args)

    return tf.function(run)


if __name__ == "__main__":
    print("RESULT", json.dumps(errors(sys.argv[1], int(sys.argv[2]))))
