"""`find_nonfinite` names the op that made the first bad value of those that matter, and counts."""

import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf

from tfamp.diagnostics import find_nonfinite


def _find(function, x):
    return find_nonfinite(function, tf.convert_to_tensor(x))


def test_the_first_op_in_the_order_of_the_data():
    def function(x):
        return tf.sqrt(tf.math.log(x) + 1.0) * 2.0

    report = _find(function, [0.0, 1.0])
    assert (report.op, report.node, report.kind) == ("Log", "Log", "also_in_float32")
    assert not report.details  # It is in no other function.
    assert [(each.name, each.max) for each in report.ranges["inputs"]] == [("input 0", 1.0)]


def test_only_what_leads_to_the_result_counts_and_large_numbers_and_constants_do():
    # A masked logarithm is passed over.
    function = lambda x: tf.where(x > 0, tf.math.log(x), 0.0) + tf.sqrt(x - 1.0)  # noqa: E731
    assert _find(function, [0.0, 2.0]).op == "Sqrt"
    large = _find(lambda x: tf.math.rsqrt(tf.reduce_sum(tf.square(x))), [1e30, 1.0])
    assert large.op == "Square"  # Though the result is finite.
    assert _find(lambda x: x + np.inf, [1.0]).op == "Const"


def test_nothing_where_results_are_finite():
    assert _find(lambda x: tf.exp(x), [1.0]) is None
    # A masked infinity, and an infinite constant that a softmax takes.
    assert _find(lambda x: tf.where(x > 0, 1.0 / x, 0.0), [0.0, 1.0]) is None
    assert _find(lambda x: tf.nn.softmax(tf.where(x > 0, x, -np.inf)), [0.0, 1.0]) is None
    # A branch that never ran.
    assert _find(lambda x: tf.cond(x[0] > 0, lambda: x, lambda: x * np.inf), [1.0]) is None


def test_a_value_that_is_bad_inside_a_call_only():
    @tf.function(autograph=False)
    def masked(x):
        return tf.where(x > 0, tf.cast(tf.exp(tf.cast(x, tf.float16)), tf.float32) * 0.0 + x, x)

    def function(x):
        return tf.while_loop(
            lambda i, _: i < 1, lambda i, y: (i + 1, tf.nn.relu(-masked(y))), (0, x)
        )[1]

    report = _find(function, [12.0])
    assert (report.op, report.kind) == ("Exp", "overflow")


def test_inside_a_loop_the_iteration_is_that_of_the_fault():
    def function(x):
        for i in tf.range(5):
            x = tf.math.log(x) if i > 2 else x - 1.0
        return x

    report = _find(function, [3.0])
    assert report.op == "Log"
    # The condition, and the loop it is in.
    assert "It is in the function that while/cond in while runs" in report.details[0]


def test_a_late_iteration_is_known_by_what_was_before():
    def function(x):
        return tf.while_loop(lambda i, _: i < 400, lambda i, x: (i + 1, x * 1.5), (0, x))[1]

    with np.errstate(over="ignore"):
        values = np.cumprod(np.float32([2.0**-40, *[1.5] * 400]), dtype=np.float32)
    executions = int(np.isfinite(values).sum())
    assert 100 < executions < 400
    report = _find(function, np.float32(2.0**-40))
    assert f"in its execution {executions}." in report.details[0]
    assert report.ranges["inputs"][0].max == values[executions - 1]


def test_lists_do_not_hide_where_a_value_came_from():
    def function(x):
        array = tf.TensorArray(tf.float32, 3)
        for i in tf.range(3):
            array = array.write(i, tf.math.log(x - tf.cast(i, tf.float32)))
        return tf.reduce_sum(array.stack())

    assert _find(function, 2.0).op == "Log"


# ---- What values are like ------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
def test_every_kind_of_value_is_counted(dtype):
    smallest = ml_dtypes.finfo(dtype).smallest_subnormal
    values = np.array([[1.0, -3.0, np.inf], [-np.inf, np.nan, 0.0], [smallest, -0.0, 2.0]], dtype)
    (found,) = find_nonfinite(tf.identity, values).ranges["outputs"]
    assert (found.dtype, found.shape) == (np.dtype(dtype).name, (3, 3))
    assert (found.min, found.max, found.max_abs) == (-3.0, 2.0, 3.0)
    assert (found.infs, found.nans, found.zeros, found.subnormals) == (2, 1, 2, 1)
    assert not found.finite


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_without_a_finite_value_the_range_is_zero(value):
    (found,) = find_nonfinite(tf.identity, np.array([value], np.float32)).ranges["outputs"]
    assert (found.min, found.max, found.max_abs) == (0.0, 0.0, 0.0)
    assert found.to_text() == f"float32 [1], 1 {'inf' if value > 0 else 'NaN'} of 1"


def test_an_empty_array_is_finite():
    assert find_nonfinite(tf.identity, np.array([], np.float32)) is None
    report = _find(lambda x: tf.reduce_mean(x), np.zeros(0, np.float32))
    assert report.ranges["inputs"][0].max_abs == 0.0
