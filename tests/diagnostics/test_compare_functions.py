"""`compare` on functions under autocast and on rewritten functions, op by op."""

from __future__ import annotations

import math

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp
from tests.helpers.tolerances import tolerance
from tfamp.diagnostics import compare

DTYPES = ("float16", "bfloat16")


@pytest.fixture
def x():
    return np.random.default_rng(0).normal(size=(8, 16)).astype("float32")


def network(x):
    """Two matmuls, the second one too large for float16."""
    hidden = tf.nn.relu(tf.matmul(x, tf.ones((16, 16)), name="small"))
    large = tf.matmul(hidden * 1000.0, tf.fill((16, 16), 40.0), name="large")
    return tf.reduce_mean(large / tf.constant(4e5), -1)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_function_is_compared_op_by_op_under_autocast(dtype, x):
    found = compare(network, x, dtype=dtype)
    rows = {row.layer: row for row in found.rows}
    assert [row.kind for row in found.rows if row.kind == "MatMul"] == ["MatMul", "MatMul"]
    assert rows["small"].dtype == dtype
    assert 0 < rows["small"].own_error < tolerance(dtype, depth=16)
    assert rows["Mean"].dtype == "float32"
    assert rows["Mean"].own_error is None
    assert found.model == "network"
    assert (found.output_error == math.inf) is (dtype == "float16")
    assert (rows["large"].overflow > 0) is (dtype == "float16")


def test_op_types_are_kept_for_autocast_and_that_is_what_a_user_can_do(x):
    found = compare(network, x, dtype="float16", bound=0.01)
    assert found.worst.layer == "large"
    assert "MatMul" in found.keep_float32
    lists = tfamp.OpLists.default("float16").with_changes(deny_add=found.keep_float32)
    with tfamp.autocast("float16", op_lists=lists):
        mixed = network(tf.constant(x))
    expected = network(tf.constant(x))
    error = np.max(np.abs(mixed - expected)) / np.max(np.abs(expected))
    assert error == pytest.approx(found.proved_error, rel=0.1)
    assert found.proved_error <= 0.01


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_rewritten_function_is_compared_with_its_rewrite(dtype, x):
    rewritten = tfamp.rewrite(network, dtype=dtype, placement="lists")
    found = compare(rewritten, x)
    assert found.dtype == dtype
    rows = {row.layer: row for row in found.rows}
    planned = {node.name: node.dtype for node in rewritten.plan(x).nodes}
    assert {row.layer: row.dtype for row in found.rows}.items() <= planned.items()
    assert rows["small"].dtype == dtype
    assert (found.output_error == math.inf) is (dtype == "float16")


def test_nodes_are_kept_for_a_rewrite_and_that_is_what_a_user_can_do(x):
    rewritten = tfamp.rewrite(network, dtype="float16", placement="lists")
    found = compare(rewritten, x, bound=0.01)
    assert "large" in found.keep_float32
    assert "small" not in found.keep_float32
    patterns = [f"^{name}$" for name in found.keep_float32]
    kept = tfamp.rewrite(network, dtype="float16", placement="lists", keep_float32=patterns)
    expected = network(tf.constant(x))
    error = np.max(np.abs(kept(x) - expected)) / np.max(np.abs(expected))
    assert error == pytest.approx(found.proved_error, rel=0.1)


@pytest.mark.parametrize("make", [lambda f: f, tf.function], ids=["python", "function"])
def test_nested_functions_loops_and_several_arguments(make, x):
    inner = tf.function(lambda a, b: tf.matmul(a, b, transpose_b=True))

    def outer(a, b):
        y = inner(a, b)
        return tf.while_loop(
            lambda i, _: i < 3, lambda i, z: (i + 1, 0.02 * tf.matmul(z, z)), (0, y)
        )

    for dtype in DTYPES:
        found = compare(make(outer), (x, x), dtype=dtype)
        assert "MatMul" in {row.kind for row in found.rows}
        assert {"While", "StatelessWhile"} & {row.kind for row in found.rows}
        assert 0 < found.output_error < 20 * tolerance(dtype, depth=16)


def test_a_train_step_leaves_its_variables_as_they_were(x):
    weights = tf.Variable(tf.ones((16, 4)))
    optimizer = keras.optimizers.SGD(0.1)
    optimizer.build([weights])

    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.matmul(x, weights) ** 2)
        optimizer.apply_gradients([(tape.gradient(loss, weights), weights)])
        return loss

    for function in (step, tfamp.rewrite(step, dtype="bfloat16", placement="lists")):
        found = compare(function, x, dtype="bfloat16")
        assert 0 < found.output_error < 0.05
        np.testing.assert_array_equal(weights, np.ones((16, 4)))
        assert int(optimizer.iterations.numpy()) == 0


def test_the_dtype_of_a_rewrite_is_its_own(x):
    rewritten = tfamp.rewrite(network, dtype="bfloat16")
    with pytest.raises(ValueError, match="rewritten to bfloat16, not float16"):
        compare(rewritten, x, dtype="float16")


def test_a_float32_function_has_no_error(x):
    found = compare(lambda x: tf.exp(x) + 1.0, x, dtype="bfloat16", bound=1e-6)
    assert found.output_error == 0
    assert found.keep_float32 == ()
    assert {row.dtype for row in found.rows} == {"float32"}
