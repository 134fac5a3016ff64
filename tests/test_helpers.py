"""The helpers the other tests rely on must themselves be able to fail."""

import os
import time

import numpy as np
import pytest
import tensorflow as tf

from helpers.graph_asserts import assert_computes_in, assert_has_low_precision, op_dtypes
from helpers.limited import Child, NotDoneError
from helpers.tolerances import assert_close, tolerance


def test_a_matmul_is_close_at_its_depth_and_not_in_a_finer_dtype():
    for dtype, stated in (("float16", 2e-3), ("bfloat16", 1.6e-2), ("float32", 1e-6)):
        assert tolerance(dtype) == pytest.approx(stated, rel=0.06)
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(8, 256)), rng.normal(size=(256, 8))
    low = tf.matmul(tf.cast(a, tf.bfloat16), tf.cast(b, tf.bfloat16))
    assert_close(low, a @ b, "bfloat16", depth=256)
    with pytest.raises(AssertionError, match="differ by more than rounding in float32"):
        assert_close(low, a @ b, "float32", depth=256)


@pytest.mark.parametrize(
    ("actual", "expected", "message"),
    [
        ([1.0, 1.01], [1.0, 1.0], "1 of 2 elements differ"),
        ([1.0], [1.0, 1.0], "shape"),
        ([np.inf], [1.0], "inf or NaN where a finite"),
        ([np.nan], [1.0], "inf or NaN where a finite"),
        ([1.0], [np.inf], "non-finite elements differ"),
        ([-np.inf], [np.inf], "non-finite elements differ"),
    ],
)
def test_differences_fail(actual, expected, message):
    with pytest.raises(AssertionError, match=message):
        assert_close(actual, expected, "float16")
    assert_close([np.inf, np.nan, 1.0], [np.inf, np.nan, 1.0], "float16")


@tf.function
def _nested(x):
    def body(i, y):
        low = tf.cast(y, tf.bfloat16)
        return i + 1, tf.cast(tf.matmul(low, low), y.dtype)

    return tf.while_loop(lambda i, _: i < 3, body, (0, x))[1]


def test_op_dtypes_sees_inside_nested_functions_that_are_called():
    outer = tf.function(lambda x: tf.nn.relu(_nested(x)))
    found = op_dtypes(outer, tf.ones((2, 2)))
    assert found["MatMul"] == {"bfloat16"}
    assert found["Relu"] == {"float32"}
    assert found["Cast"] == {"bfloat16", "float32"}

    @tf.function
    def without_call(x):
        _nested.get_concrete_function(x)
        return x + 1.0

    assert "MatMul" not in op_dtypes(without_call, tf.ones((2, 2)))


def test_a_low_precision_graph_is_told_from_one_in_float32_and_one_without_matmuls():
    def product(x):
        return tf.matmul(x, x)

    low, x = tf.ones((2, 2), tf.float16), tf.ones((2, 2))
    assert_computes_in("float16", product, low)
    assert_has_low_precision(product, low)
    with pytest.raises(AssertionError, match="no matmul or convolution in float16 or bfloat16"):
        assert_has_low_precision(product, x)
    with pytest.raises(AssertionError, match="expected every matmul and convolution in float16"):
        assert_computes_in("float16", product, x)
    with pytest.raises(AssertionError, match="no matmul or convolution in the graph"):
        assert_computes_in("float16", tf.nn.relu, low)


def test_a_call_that_does_not_end_and_one_that_ends_the_process_are_reported():
    with Child(time.sleep, limit=0.5) as child, pytest.raises(NotDoneError, match=r"after 0\.5 s"):
        child.ask(60)
    with Child(os._exit, limit=60) as child:
        with pytest.raises(NotDoneError, match="exit code 3"):
            child.ask(3)
        with pytest.raises(NotDoneError, match="exit code 4"):
            child.ask(4)
    with Child(abs, limit=60) as child:
        assert [child.ask(-1), child.ask(-2)] == [1, 2]


def test_a_block_that_does_not_end_ends_its_process():
    block = "import time, helpers.limited\nwith helpers.limited.time_limit(0.2): time.sleep(60)"
    with Child(exec, limit=60) as child, pytest.raises(NotDoneError, match="exit code 1"):
        child.ask(block)
