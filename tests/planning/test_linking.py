"""Loops and what is in them, decided about as one."""

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp
from helpers import graph_models, loops
from helpers.cases import first_of, one_in, one_of_each
from helpers.tolerances import assert_close
from tfamp.graph import rewrite_graph_def

DTYPES = ("float16", "bfloat16")
STEPS = 12


def rewritten(function, dtype, placement="lists", **choices):
    graph_def = function.graph.as_graph_def(add_shapes=True)
    outputs = [tensor.name for tensor in function.outputs]
    return rewrite_graph_def(
        graph_def, outputs, dtype=dtype, placement=placement, device="cpu", **choices
    )


def concrete(function, *shapes):
    specs = [tf.TensorSpec(shape) for shape in shapes]
    return tf.function(function, autograph=False).get_concrete_function(*specs)


def nodes(result, op):
    return [node for node in result.plan.nodes if node.op == op]


def recurrent(x, w):
    """A TensorList in, one out, and a state."""
    rows = tf.TensorArray(tf.float32, STEPS).unstack(x @ w)

    def body(i, state, out):
        state = tf.tanh(rows.read(i) + state @ w)
        return i + 1, state, out.write(i, state)

    start = (0, tf.zeros_like(x[0]), tf.TensorArray(tf.float32, STEPS))
    return tf.while_loop(lambda i, *_: i < STEPS, body, start, maximum_iterations=STEPS)[2].stack()


@pytest.mark.parametrize(
    ("placement", "dtype"), one_in(3, itertools.product(["lists", "min_cut"], DTYPES))
)
def test_the_state_and_the_lists_of_a_recurrent_loop_are_low(dtype, placement):
    function = concrete(recurrent, (STEPS, 4, 8), (8, 8))
    result = rewritten(function, dtype, placement)
    for op in ("TensorListFromTensor", "TensorListGetItem", "TensorListSetItem", "TensorListStack"):
        assert {node.dtype for node in nodes(result, op)} == {dtype}, op
    assert {node.dtype for node in result.plan.nodes if "While" in node.op} == {dtype}
    # The weight is the same in every round, so it is cast in the body; nothing else is.
    inside = [cast for cast in result.plan.casts if cast.scope]
    assert [cast.to for cast in inside] == [dtype]
    x = tf.random.stateless_normal((STEPS, 4, 8), (1, 2)) * 0.5
    w = tf.random.stateless_normal((8, 8), (3, 4)) * 0.3
    assert_close(
        *graph_models.runnable(function, result.graph_def)(x, w), function(x, w), dtype, depth=STEPS
    )


@pytest.mark.parametrize("dtype", first_of(reversed(DTYPES)))
def test_what_a_loop_adds_up_stays_float32(dtype):
    rounds = 3000

    def function(x):
        def body(i, total):
            return i + 1, total + x @ x

        return tf.while_loop(lambda i, _: i < rounds, body, (0, tf.zeros((4, 4))))[1]

    made = concrete(function, (4, 4))
    result = rewritten(made, dtype)
    (adding,) = nodes(result, "AddV2")
    assert (adding.dtype, adding.reason.rule) == ("float32", "loop")
    assert [node.dtype for node in nodes(result, "MatMul")] == [dtype]
    (total,) = graph_models.runnable(made, result.graph_def)(tf.eye(4))
    # In either low dtype ones stop adding up long before.
    np.testing.assert_allclose(total, 3000.0 * np.eye(4), rtol=1e-3)


@pytest.mark.parametrize("dtype", first_of(DTYPES))
def test_gradients_of_weights_add_up_in_float32(dtype):
    def step(x, w):
        with tf.GradientTape() as tape:
            tape.watch(w)
            loss = tf.reduce_sum(recurrent(x, w))
        return loss, tape.gradient(loss, w)

    function = concrete(step, (STEPS, 4, 8), (8, 8))
    result = rewritten(function, dtype)
    sums = [node for node in nodes(result, "AddN") if node.scope]
    assert sums
    assert {(node.dtype, node.reason.rule) for node in sums if node.reason.rule == "loop"} == {
        ("float32", "loop")
    }
    x = tf.random.stateless_normal((STEPS, 4, 8), (1, 2)) * 0.2
    w = tf.random.stateless_normal((8, 8), (3, 4)) * 0.3
    loss, gradient = graph_models.runnable(function, result.graph_def)(x, w)
    expected_loss, expected = function(x, w)
    assert_close(loss, expected_loss, dtype, depth=STEPS)
    assert_close(gradient, expected, dtype, depth=STEPS)


def test_a_loop_off_the_clear_list_and_a_fetched_one_keep_their_dtypes():
    function = loops.loop_v2()
    lists = tfamp.OpLists.default("bfloat16").with_changes(deny_add=["While", "StatelessWhile"])
    result = rewritten(function, "bfloat16", op_lists=lists)
    (loop,) = [node for node in result.plan.nodes if "While" in node.op]
    assert (loop.dtype, loop.reason.rule) == ("float32", "boundary")
    result = rewrite_graph_def(
        function.graph.as_graph_def(), [loop.name], dtype="bfloat16", placement="lists"
    )
    (loop,) = [node for node in result.plan.nodes if "While" in node.op]
    assert (loop.dtype, loop.reason.rule) == ("float32", "fetches")


def test_a_body_that_two_loops_share_keeps_its_boundary():
    # Inlining a function twice makes two loops with one body.
    inner = tf.function(
        lambda x: tf.while_loop(lambda i, _: i < 3, lambda i, y: (i + 1, y @ y), (0, x))[1],
        autograph=False,
    )
    function = concrete(lambda x: inner(x) @ inner(x), (4, 4))
    result = rewritten(function, "bfloat16")
    loops_found = [node for node in result.plan.nodes if "While" in node.op]
    assert len(loops_found) == 2
    assert {(node.dtype, node.reason.rule) for node in loops_found} == {("float32", "boundary")}
    x = tf.eye(4) * 0.5
    assert_close(*graph_models.runnable(function, result.graph_def)(x), function(x), "bfloat16")


def test_conditionals_pass_on_what_they_are_given_unrounded():
    def function(x, flag):
        return tf.cond(flag, lambda: x @ x, lambda: x)

    fast = tfamp.rewrite(tf.function(function), dtype="bfloat16", placement="lists")
    x = tf.constant([[1.0001, 0.0], [0.0, 70000.0]])
    assert fast(x, tf.constant(False)).numpy().tolist() == x.numpy().tolist()


@pytest.mark.parametrize(
    ("layer", "dtype"), one_of_each(["LSTM", "GRU", "SimpleRNN"], DTYPES, quick=1)
)
def test_keras_rnns_have_few_casts_in_their_loops(layer, dtype):
    keras.utils.set_random_seed(0)
    recurrent_layer = getattr(keras.layers, layer)(16)
    model = keras.Sequential([keras.Input((STEPS, 8)), recurrent_layer, keras.layers.Dense(1)])

    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(x, training=True))
        return loss, tape.gradient(loss, model.trainable_variables)

    fast = tfamp.rewrite(step, dtype=dtype, placement="lists")
    x = tf.random.stateless_normal((4, STEPS, 8), (5, 6))
    plan = fast.plan(x)
    # What the loop keeps of every step for the way back.
    kept = [node for node in plan.nodes if node.op in ("TensorListPushBack", "TensorListPopBack")]
    assert kept
    assert {node.dtype for node in kept} == {dtype}
    # Forward and back: each weight down, and its gradient up where it is added to the sum.
    weights = len(recurrent_layer.trainable_variables)
    assert 0 < sum(bool(cast.scope) for cast in plan.casts) <= 4 * weights
    loss, gradients = fast(x)
    expected_loss, expected = step(x)
    assert_close(loss, expected_loss, dtype, depth=STEPS)
    for gradient, wanted in zip(gradients, expected, strict=True):
        assert_close(gradient, wanted, dtype, depth=4 * STEPS)
