"""Constants that a low Select may choose stay finite: a row that is masked as a whole is no NaN."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf

import tfamp

LARGE = {"float16": -2e38, "bfloat16": tf.float32.min}
MASK = tf.constant([[False] * 4, [True, True, False, True]])
X = tf.reshape(tf.range(6, dtype=tf.float32), (2, 3)) / 4
W = tf.reshape(tf.range(12, dtype=tf.float32), (3, 4)) / 8


def rewritten(function, dtype):
    """What a function gives in low precision for X and W, and the dtypes of its Selects."""
    result = tfamp.rewrite(tf.function(function), dtype=dtype, placement="lists")
    operations = result.concrete(X, W).graph.get_operations()
    selects = {op.outputs[0].dtype.name for op in operations if op.type == "SelectV2"}
    return result(X, W).numpy(), selects


@pytest.mark.parametrize("dtype", LARGE)
def test_a_row_that_is_masked_as_a_whole_is_as_in_float32(dtype):
    def attend(x, w):
        return tf.nn.softmax(tf.where(MASK, x @ w, LARGE[dtype])) @ tf.transpose(w)

    actual, selects = rewritten(attend, dtype)
    assert selects == {dtype}
    tolerance = 8 * float(ml_dtypes.finfo(dtype).eps)
    np.testing.assert_allclose(actual, attend(X, W), rtol=tolerance)


def test_infinity_stays_infinite_and_small_constants_as_they_are():
    def choose(x, w):
        y = x @ w
        return tf.where(MASK, tf.where(MASK, y, np.inf), -7.0), tf.where(MASK, y, -np.inf)

    result = tfamp.rewrite(tf.function(choose), dtype="float16", placement="lists")
    for actual, expected in zip(result(X, W), choose(X, W), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-2)


def test_in_arithmetic_the_constant_keeps_its_value():
    def scaled(x, w):
        large = tf.constant(1e6)
        return tf.where(MASK, (x @ w) * large, large) / large @ tf.transpose(w)

    actual, selects = rewritten(scaled, "float16")
    assert selects == {"float32"}
    np.testing.assert_allclose(actual, scaled(X, W), rtol=1e-2)
