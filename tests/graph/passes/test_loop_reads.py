"""Weights that the loops of a training step read in every round: read, and cast, once a step."""

import numpy as np
import pytest
import tensorflow as tf

import tfamp
from helpers.cases import first_of
from helpers.tolerances import assert_close
from tfamp.graph.graph import Graph
from tfamp.graph.passes import loop_reads

DTYPES = ("float16", "bfloat16")
ROUNDS, WIDTH, RATE = 6, 8, 0.125
X = tf.random.stateless_normal((4, WIDTH), (1, 2)) * 0.3
START = tf.random.stateless_normal((WIDTH, WIDTH), (3, 4)) * 0.3


def rounds(body, *start):
    """The first result of a loop, which is also a loop in graphs and never unrolled."""
    return tf.while_loop(
        lambda i, *_: i < ROUNDS,
        lambda i, *values: (i + 1, *body(*values)),
        (0, *start),
        maximum_iterations=ROUNDS,
    )[1]


def recurrent(weight):
    return rounds(lambda state: (tf.tanh(state @ weight + X),), X)


def training_step(weight):
    """Takes a step of gradient descent; the loss and the gradient are from before it."""

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(recurrent(weight) ** 2)
        gradient = tape.gradient(loss, weight)
        weight.assign_sub(RATE * gradient)
        return loss, gradient

    return step


def assert_same_step(fast, step, *weights, dtype="bfloat16", depth=4 * ROUNDS):
    """Both return the same, and leave the same weights."""
    before = [weight.numpy() for weight in weights]
    found = [*tf.nest.flatten(fast()), *(weight.numpy() for weight in weights)]
    for weight, value in zip(weights, before, strict=True):
        weight.assign(value)
    for got, wanted in zip(found, [*tf.nest.flatten(step()), *weights], strict=True):
        assert_close(got, wanted, dtype, depth=depth)


def reads_in_loops(fast, *args):
    library = fast.concrete(*args).graph.as_graph_def().library.function
    return [node.name for f in library for node in f.node_def if node.op == "ReadVariableOp"]


def read_before_loops(graph_def, keep=()):
    graph = Graph(graph_def, keep)
    loop_reads.run(graph, None)
    return graph.weights


@pytest.mark.parametrize(
    ("dtype", "placement"), first_of([("bfloat16", "min_cut"), ("float16", "lists")])
)
def test_a_step_casts_a_weight_once_and_not_in_every_round(dtype, placement):
    weight = tf.Variable(START)
    step = training_step(weight)
    fast = tfamp.rewrite(step, dtype=dtype, placement=placement, force_low=["MatMul"])
    assert reads_in_loops(fast) == []
    low = [node for node in fast.plan().nodes if node.op == "MatMul"]
    assert {node.dtype for node in low} == {dtype}
    (cast,) = [cast for cast in fast.plan().casts if "ReadVariableOp" in cast.tensor]
    assert (cast.scope, cast.to) == ("", dtype)
    assert_same_step(fast, step, weight, dtype=dtype)


@pytest.mark.parametrize("dtype", first_of(reversed(DTYPES)))
def test_gradients_through_what_does_not_write_its_weights_add_up_in_float32(dtype):
    weight = tf.Variable(START)
    fast = tfamp.rewrite(tf.function(lambda: recurrent(weight)), dtype=dtype, placement="lists")
    assert len(reads_in_loops(fast)) == 1
    with tf.GradientTape(persistent=True) as tape:
        got, wanted = (tf.reduce_sum(f()) for f in (fast, lambda: recurrent(weight)))
    assert_close(*(tape.gradient(each, weight) for each in (got, wanted)), dtype, depth=4 * ROUNDS)


@pytest.mark.parametrize("dtype", first_of(DTYPES))
def test_a_step_can_still_be_differentiated(dtype):
    # What the loop keeps for the gradient inside comes behind the weight in its variables.
    weight = tf.Variable(START)
    step = training_step(weight)
    fast = tfamp.rewrite(step, dtype=dtype, placement="lists")
    assert reads_in_loops(fast) == []
    with tf.GradientTape() as tape:
        loss, _ = fast()
    got = tape.gradient(loss, weight)
    weight.assign(START)
    _, wanted = step()
    assert_close(got, wanted, dtype, depth=4 * ROUNDS)


def written_by_assignment(weight):
    def body(state):
        state = tf.tanh(state @ weight)
        weight.assign(weight * 0.5)
        return (state,)

    return body


def written_by_a_slice(weight):
    def body(state):
        state = tf.tanh(state @ weight)
        weight[0, 0].assign(weight[0, 0] + 1.0)
        return (state,)

    return body


@pytest.mark.parametrize("make", [written_by_assignment, written_by_a_slice])
def test_a_weight_that_the_loop_writes_is_read_in_every_round(make):
    weight = tf.Variable(START)

    @tf.function
    def step():
        state = rounds(make(weight), X)
        weight.assign_sub(tf.ones_like(weight) * 0.01 * tf.reduce_mean(state))
        return state

    fast = tfamp.rewrite(step, dtype="bfloat16", placement="lists")
    assert len(reads_in_loops(fast)) >= 1
    assert_same_step(fast, step, weight)


def test_the_read_waits_for_what_the_loop_waits_for():
    weight = tf.Variable(START)

    @tf.function
    def step():
        weight.assign(2.0 * weight)
        state = recurrent(weight)
        weight.assign(0.0 * weight * tf.reduce_mean(state))
        return state

    fast = tfamp.rewrite(step, dtype="bfloat16", placement="lists")
    assert reads_in_loops(fast) == []
    assert_close(fast(), recurrent(2.0 * START), "bfloat16", depth=4 * ROUNDS)
    assert np.all(weight.numpy() == 0.0)


def test_a_weight_that_the_condition_of_a_loop_writes_is_read_in_every_round():
    weight = tf.Variable(START)

    def condition(i, _):
        with tf.control_dependencies([weight.assign(weight * 0.5)]):
            return tf.identity(i) < ROUNDS

    @tf.function
    def step():
        state = tf.while_loop(condition, lambda i, s: (i + 1, tf.tanh(s @ weight + X)), (0, X))[1]
        weight.assign_sub(tf.ones_like(weight) * 0.01 * tf.reduce_mean(state))
        return state

    fast = tfamp.rewrite(step, dtype="bfloat16", placement="lists")
    assert_same_step(fast, step, weight)


def test_handles_that_a_loop_exchanges_are_read_in_every_round():
    weight, other = tf.Variable(START), tf.Variable(0.5 * START)

    def body(i, state, handle, next_handle):
        value = tf.raw_ops.ReadVariableOp(resource=handle, dtype=tf.float32)
        value = tf.ensure_shape(value, START.shape)
        return i + 1, tf.tanh(state @ value + X), next_handle, handle

    @tf.function
    def step():
        start = (0, X, weight.handle, other.handle)
        state = tf.while_loop(lambda i, *_: i < ROUNDS, body, start)[1]
        for variable in (weight, other):
            variable.assign_sub(tf.ones_like(variable) * 0.01 * tf.reduce_mean(state))
        return state

    fast = tfamp.rewrite(step, dtype="bfloat16", placement="lists")
    assert len(reads_in_loops(fast)) == 1
    assert_same_step(fast, step, weight, other)


@pytest.mark.parametrize("first", first_of([False, True]))
def test_gradients_of_what_only_clips_its_weights_add_up_in_float32(first):
    weight = tf.Variable(START)

    @tf.function
    def forward():
        if first:
            weight.assign(tf.clip_by_norm(weight, 1.0))
        state = recurrent(weight)
        if not first:
            weight.assign(tf.clip_by_norm(weight, 1.0))
        return tf.reduce_sum(state)

    fast = tfamp.rewrite(forward, dtype="bfloat16", placement="lists")
    assert len(reads_in_loops(fast)) == 1
    with tf.GradientTape() as tape:
        loss = fast()
    got = tape.gradient(loss, weight)
    weight.assign(START)
    with tf.GradientTape() as tape:
        loss = forward()
    assert_close(got, tape.gradient(loss, weight), "bfloat16", depth=4 * ROUNDS)


@pytest.mark.parametrize("dtype", first_of(reversed(DTYPES)))
def test_a_loop_in_a_loop_with_its_gradient(dtype):
    # What the inner loop keeps for the gradient is a list, which the outer loop keeps in a list.
    weight = tf.Variable(START)

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            state = rounds(lambda s: (rounds(lambda z: (tf.tanh(z @ weight + X),), s),), X)
            loss = tf.reduce_mean(state**2)
        return loss, tape.gradient(loss, weight)

    fast = tfamp.rewrite(step, dtype=dtype, placement="lists")
    pops = {node.dtype for node in fast.plan().nodes if node.op == "TensorListPopBack"}
    assert dtype in pops
    assert_same_step(fast, step, dtype=dtype, depth=4 * ROUNDS**2)


def test_force_low_leaves_what_a_branch_keeps_for_its_gradient():
    weight = tf.Variable(START)

    def body(state):
        return (
            tf.cond(
                tf.reduce_sum(state) > 0.0, lambda: tf.tanh(state @ weight), lambda: state @ weight
            ),
        )

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(rounds(body, X) ** 2)
        return loss, tape.gradient(loss, weight)

    fast = tfamp.rewrite(step, dtype="bfloat16", placement="lists", force_low=["MatMul"])
    kept = {node.dtype for node in fast.plan().nodes if node.op.startswith("Optional")}
    assert kept == {"float32"}
    assert_same_step(fast, step)


def test_a_fetched_loop_stays_as_it_is():
    step = training_step(tf.Variable(START)).get_concrete_function()
    graph_def = step.graph.as_graph_def(add_shapes=True)
    before = graph_def.SerializeToString(deterministic=True)
    loops = [node.name for node in graph_def.node if "While" in node.op]
    assert read_before_loops(graph_def, [f"{name}:1" for name in loops]) == set()
    assert graph_def.SerializeToString(deterministic=True) == before
    assert len(read_before_loops(graph_def)) == 1
    assert graph_def.SerializeToString(deterministic=True) != before


@pytest.mark.parametrize("part", ["body", "cond"])
def test_a_loop_without_one_of_its_functions_keeps_its_reads(part):
    step = training_step(tf.Variable(START)).get_concrete_function()
    graph_def = step.graph.as_graph_def(add_shapes=True)
    for node in graph_def.node:
        if "While" in node.op:
            node.attr.pop(part)
    before = graph_def.SerializeToString(deterministic=True)
    assert read_before_loops(graph_def) == set()
    assert graph_def.SerializeToString(deterministic=True) == before
