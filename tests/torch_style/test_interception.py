"""Every op can be patched, its new inputs are used, and other threads go on as before."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import tensorflow as tf

import tfamp
from tfamp.interop.patching import Patch

A = np.eye(2, dtype="float32")


@pytest.fixture
def ops():
    """The ops that ran, in eager mode or into a graph."""
    found = []

    def eager_op(original, context, op, *args):
        found.append(op)
        return original(context, op, *args)

    def graph_op(original, op, *args, **keywords):
        found.append(op)
        return original(op, *args, **keywords)

    with Patch(eager_op=eager_op, graph_op=graph_op).held():
        yield found


def test_every_eager_op_and_raw_op_asks(ops):
    tf.matmul(A, A)
    tf.raw_ops.Tan(x=A)
    tf.ones((2, 2)) + 1.0
    assert [op for op in ops if op in ("MatMul", "Tan", "AddV2")] == ["MatMul", "Tan", "AddV2"]


def test_every_op_of_a_graph_asks(ops):
    tf.function(lambda x: tf.raw_ops.Tan(x=tf.matmul(x, x))).get_concrete_function(tf.constant(A))
    assert {"MatMul", "Tan"} <= set(ops)


@pytest.mark.parametrize("run", [lambda f: f, tf.function], ids=["eager", "traced"])
def test_the_op_runs_with_the_new_inputs_and_these_are_on_the_tape(run):
    @run
    def work(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.matmul(x, tf.constant(A), transpose_b=True)
        return y, tape.gradient(y, x)

    with tfamp.autocast("bfloat16"):
        product, gradient = work(tf.constant(A * 1.001))
    assert (product.dtype, gradient.dtype) == (tf.bfloat16, tf.float32)
    np.testing.assert_array_equal(tf.cast(product, tf.float32), A)  # 1.001 is 1 in bfloat16
    np.testing.assert_array_equal(gradient, np.ones((2, 2)))


@pytest.mark.parametrize("dilations", [[1, np.int64(1), np.int64(1), 1], np.ones(4, "int32")])
def test_attributes_the_fast_path_does_not_take_do_not_lose_the_inputs(dilations):
    with tfamp.autocast("bfloat16"):
        result = tf.raw_ops.Conv2D(
            input=tf.ones((1, 1, 1, 1)),
            filter=tf.ones((1, 1, 1, 1)),
            strides=[1, 1, 1, 1],
            padding="SAME",
            dilations=list(dilations),
        )
    assert result.dtype == tf.bfloat16
    assert float(tf.squeeze(result)) == 1.0


def test_the_autocast_of_another_thread_changes_no_result():
    def work(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.while_loop(lambda i, y: i < 2, lambda i, y: (i + 1, y @ y / 2.0), (0, x))[1]
            loss = tf.nn.sparse_softmax_cross_entropy_with_logits([0, 1], y)
        return loss, tape.gradient(loss, x)

    def elsewhere():
        with tfamp.autocast("bfloat16"):
            entered.set()
            left.wait(60)

    x = tf.constant(A + 0.5)
    expected = work(x)
    entered, left = threading.Event(), threading.Event()
    thread = threading.Thread(target=elsewhere)
    thread.start()
    try:
        assert entered.wait(60)
        for found in (work(x), tf.function(work)(x)):
            for one, other in zip(found, expected, strict=True):
                np.testing.assert_allclose(one, other, rtol=1e-6)
    finally:
        left.set()
        thread.join()
