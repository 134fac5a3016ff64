"""`intercept`: the handler is asked, its answers are used, and a silent one changes nothing."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
import tensorflow as tf

from tfamp.interop.tf_intercept import intercept


class Silent:
    """A handler that changes nothing and notes what it was asked."""

    def __init__(self):
        self.ops = []

    def active(self):
        return False

    def concerns(self, op):
        self.ops.append(op)
        return False

    def adjust(self, op, inputs):
        return None

    def cast(self, tensor, dtype, run):
        return run()

    def convert(self, value, dtype, asker):
        return value, dtype

    def stacked(self, values, dtype):
        return values, dtype

    def recast(self, value, dtype):
        return value

    def align(self, outputs, like):
        return outputs

    def common_dtype(self, values):
        return ""

    def paused(self):
        return contextlib.nullcontext()

    def custom_gradient(self, function):
        return function

    def python_function(self, function, dtypes):
        return function

    def recording_changed(self):
        pass

    def finished_graph(self, function):
        pass

    def trace_key(self):
        return None

    def cross_entropy_input(self, logits):
        return logits


class Doubling(Silent):
    """A handler that doubles the first input of every MatMul."""

    on = True

    def concerns(self, op):
        return op == "MatMul" and self.on

    @contextlib.contextmanager
    def paused(self):
        self.on = False
        yield
        self.on = True

    def adjust(self, op, inputs):
        return [inputs[0] * 2.0, *inputs[1:]]


@pytest.fixture
def intercepted():
    undo = []

    def start(handler):
        undo.append(intercept(handler))
        return handler

    yield start
    while undo:
        undo.pop()()


A = np.eye(2, dtype="float32")


def test_every_eager_op_and_raw_op_asks(intercepted):
    handler = intercepted(Silent())
    tf.matmul(A, A)
    tf.raw_ops.Tan(x=A)
    tf.ones((2, 2)) + 1.0
    assert [op for op in handler.ops if op in ("MatMul", "Tan", "AddV2")] == [
        "MatMul",
        "Tan",
        "AddV2",
    ]


def test_every_op_of_a_graph_asks(intercepted):
    handler = intercepted(Silent())
    tf.function(lambda x: tf.raw_ops.Tan(x=tf.matmul(x, x))).get_concrete_function(tf.constant(A))
    assert {"MatMul", "Tan"} <= set(handler.ops)


@pytest.mark.parametrize("run", [lambda f: f, tf.function], ids=["eager", "traced"])
def test_the_op_runs_with_the_inputs_of_the_handler(intercepted, run):
    intercepted(Doubling())
    result = run(lambda x: tf.matmul(x, x, transpose_b=True))(tf.constant(A))
    np.testing.assert_array_equal(result, 2 * A)


def test_the_inputs_of_the_handler_are_on_the_tape(intercepted):
    intercepted(Doubling())
    x = tf.Variable(A)
    with tf.GradientTape() as tape:
        y = tf.reduce_sum(tf.matmul(x, tf.constant(A)))
    np.testing.assert_array_equal(tape.gradient(y, x), np.full((2, 2), 2.0))


@pytest.mark.parametrize("dilations", [[1, np.int64(1), np.int64(1), 1], np.ones(4, "int32")])
def test_attributes_the_fast_path_does_not_take_do_not_lose_the_inputs(intercepted, dilations):
    class DoublingConv(Doubling):
        def concerns(self, op):
            return op == "Conv2D"

    intercepted(DoublingConv())
    result = tf.raw_ops.Conv2D(
        input=tf.ones((1, 1, 1, 1)),
        filter=tf.ones((1, 1, 1, 1)),
        strides=[1, 1, 1, 1],
        padding="SAME",
        dilations=list(dilations),
    )
    assert float(tf.squeeze(result)) == 2.0


def test_a_silent_handler_changes_no_result(intercepted):
    def work(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.while_loop(lambda i, y: i < 2, lambda i, y: (i + 1, y @ y / 2.0), (0, x))[1]
            loss = tf.nn.sparse_softmax_cross_entropy_with_logits([0, 1], y)
        return loss, tape.gradient(loss, x)

    x = tf.constant(A + 0.5)
    expected = work(x)
    intercepted(Silent())
    for found in (work(x), tf.function(work)(x)):
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-6)
