"""A variable is cast once in a trace, and never to what it, a tape or a graph no longer has."""

from __future__ import annotations

import gc
import weakref

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

import tfamp
from helpers.cases import first_of
from helpers.tolerances import assert_all_close, assert_all_equal, assert_close
from tfamp.torch_style.modes import current_modes

DTYPES = ["float16", "bfloat16"]
X = np.random.default_rng(0).uniform(-1, 1, (4, 4)).astype("float32")


@pytest.fixture
def w():
    return tf.Variable(np.random.default_rng(1).uniform(-1, 1, (4, 4)).astype("float32"))


def casts_of_reads(graph, dtype):
    """How often what was read from a variable is cast to a dtype, in a graph and its functions."""
    graph_def = graph.as_graph_def()
    count = 0
    for nodes in [graph_def.node, *(f.node_def for f in graph_def.library.function)]:
        reads = {node.name for node in nodes if node.op == "ReadVariableOp"}
        count += sum(
            node.op == "Cast"
            and node.attr["DstT"].type == tf.as_dtype(dtype).as_datatype_enum
            and node.input[0].partition(":")[0] in reads
            for node in nodes
        )
    return count


def traced(function, dtype, cache_casts=True, around=False):
    """Traces a function under autocast; returns the number of casts of variables and its result."""

    @tf.function
    def inside(x):
        with tfamp.autocast(dtype, cache_casts=cache_casts):
            return function(x)

    if around:
        with tfamp.autocast(dtype, cache_casts=cache_casts):
            concrete = tf.function(function).get_concrete_function(tf.TensorSpec((4, 4)))
    else:
        concrete = inside.get_concrete_function(tf.TensorSpec((4, 4)))
    assert current_modes.casts is None
    return casts_of_reads(concrete.graph, dtype), concrete(tf.constant(X))


@pytest.mark.parametrize("around", [False, True])
@pytest.mark.parametrize("dtype", first_of(reversed(DTYPES)))
def test_a_variable_used_twice_or_weights_of_a_layer_called_twice_are_cast_once(w, dtype, around):
    dense = keras.layers.Dense(4)
    dense.build((4, 4))

    def twice(x):
        each = tf.matmul(x, w), tf.linalg.matvec(w, x[0]), tf.einsum("ij,jk->ik", x, w)
        return *each, dense(x), dense(x + 1.0)

    kept, results = traced(twice, dtype, around=around)
    fresh, expected = traced(twice, dtype, cache_casts=False, around=around)
    assert (kept, fresh) == (1 + 2, 3 + 4)  # The layer has a kernel and a bias.
    assert {result.dtype.name for result in results} == {dtype}
    assert_all_equal(results, expected)


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("dtype", first_of(reversed(DTYPES)))
def test_every_tape_gets_its_gradient(w, dtype, persistent):
    def taping(x):
        tf.matmul(x, w)
        with tf.GradientTape(persistent=persistent) as outer:
            y = tf.reduce_sum(tf.matmul(x, w))
            with tf.GradientTape() as inner:
                z = tf.reduce_sum(tf.square(tf.matmul(tf.matmul(x, w), w)))
            first = inner.gradient(z, w)
            total = y + tf.reduce_sum(first) + tf.reduce_sum(tf.matmul(x, w))
        return first, outer.gradient(total, w)

    kept, gradients = traced(taping, dtype)
    fresh, expected = traced(taping, dtype, cache_casts=False)
    assert kept < fresh
    assert {gradient.dtype for gradient in gradients} == {tf.float32}
    assert_all_close(gradients, expected, dtype, depth=16)
    assert_all_close(gradients, tf.function(taping)(X), dtype, depth=256)


def test_what_a_tape_did_not_record_is_cast_again(w):
    def pausing(x):
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tf.matmul(x, w)
            tape.watch(w)
            watched = tf.reduce_sum(tf.matmul(x, w))
            with tape.stop_recording():
                w.assign_add(tf.eye(4))
                tf.matmul(x, w)
            total = watched + tf.reduce_sum(tf.matmul(x, w))
        return tape.gradient(total, w)

    _, gradient = traced(pausing, "bfloat16")
    assert_close(gradient, 2 * X.sum(axis=0)[:, None] * np.ones((1, 4)), "bfloat16", depth=8)


@pytest.mark.parametrize("again", [False, True])
def test_a_read_from_before_the_tape_lends_its_cast_to_nothing_on_it(w, again):
    @tf.function
    def run(x):
        before = w.value()
        with tf.GradientTape() as tape:
            if again:
                with tfamp.autocast("bfloat16"):
                    tf.matmul(x, w)
            with tfamp.autocast("bfloat16"):
                total = tf.reduce_sum(tf.matmul(x, before)) + tf.reduce_sum(tf.matmul(x, w))
        return tape.gradient(total, w)

    assert_close(run(X), X.sum(axis=0)[:, None] * np.ones((1, 4)), "bfloat16", depth=4)


def test_an_accumulator_sees_its_casts(w):
    def forward(x):
        tf.matmul(x, w)
        with tf.autodiff.ForwardAccumulator(w, tf.eye(4)) as accumulator:
            y = tf.matmul(x, w)
        return accumulator.jvp(y)

    _, tangent = traced(forward, "bfloat16")
    np.testing.assert_array_equal(tangent, tf.cast(X, tf.bfloat16))


def test_custom_gradients_and_recomputed_ones_know_their_variables(w):
    @tf.custom_gradient
    def doubled(x):
        def gradient(dy, variables=None):
            return dy, [tf.fill((4, 4), 7.0) for _ in variables]

        return tf.matmul(x, w), gradient

    recomputed = tf.recompute_grad(lambda x: tf.matmul(x, w))

    def differentiated(x):
        tf.matmul(x, w)
        with tf.GradientTape(persistent=True) as tape:
            tf.matmul(x, w)
            one, other = tf.reduce_sum(doubled(x)), tf.reduce_sum(recomputed(x))
        return tape.gradient(one, w), tape.gradient(other, w)

    _, (one, other) = traced(differentiated, "bfloat16")
    np.testing.assert_array_equal(one, np.full((4, 4), 7.0))
    assert_close(other, X.sum(axis=0)[:, None] * np.ones((1, 4)), "bfloat16", depth=4)


def test_two_low_dtypes_and_an_island_share_nothing(w):
    def mixed(x):
        first = tf.matmul(x, w)
        with tfamp.autocast("float16"):
            second = tf.matmul(x, w)
        with tfamp.autocast(enabled=False):
            third = tf.matmul(x, w)
        return first, second, third, tf.matmul(x, w)

    count, results = traced(mixed, "bfloat16")
    assert count == 1
    assert [each.dtype.name for each in results] == ["bfloat16", "float16", "float32", "bfloat16"]


def test_a_graph_is_not_kept_while_autocast_is_in_force(w):
    with tfamp.autocast("bfloat16"):
        function = tf.function(lambda x: tf.matmul(x, w) + tf.matmul(x, w))
        graph = weakref.ref(function.get_concrete_function(tf.TensorSpec((4, 4))).graph)
        del function
        gc.collect()
        assert graph() is None


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["use", "assign", "call", "read", "use_read", "loop", "tape", "pause"]),
        st.integers(0, 1),
    ),
    min_size=2,
    max_size=8,
)


def program(steps, variables, cache_casts):
    """Uses and assigns variables by the steps; returns each result and each tape's gradients."""
    assigning = [tf.function(lambda v=v: v.assign_add(tf.eye(4) * 0.25)) for v in variables]

    @tf.function
    def run(x):
        results, reads = [], [v.value() for v in variables]

        def use(weight):
            return tf.reduce_sum(tf.cast(tf.matmul(x, weight), tf.float32))

        with (
            tfamp.autocast("bfloat16", cache_casts=cache_casts),
            tf.GradientTape(persistent=True) as outer,
        ):
            total = tf.constant(0.0)
            for name, number in steps:
                v = variables[number]
                if name == "use":
                    total += use(v)
                elif name == "assign":
                    v.assign(v * 0.5)
                elif name == "call":
                    assigning[number]()
                elif name == "read":
                    reads[number] = v.value()
                elif name == "use_read":
                    total += use(reads[number])
                elif name == "loop":
                    total += tf.while_loop(
                        lambda i, _: i < 2, lambda i, y, v=v: (i + 1, y + use(v)), (0, 0.0)
                    )[1]
                elif name == "tape":
                    with tf.GradientTape() as tape:
                        loss = use(v) + use(v)
                    results.append(tape.gradient(loss, v))
                else:
                    with outer.stop_recording():
                        results.append(use(v))
            total += use(variables[0]) + use(variables[1])
        return results, total, [outer.gradient(total, v) for v in variables]

    return run(tf.constant(X))


@pytest.mark.parametrize("examples", [4, pytest.param(50, marks=pytest.mark.nightly)])
def test_random_uses_and_assignments_give_what_they_give_without(examples):
    def outcome(steps, cache_casts):
        variables = [tf.Variable(X), tf.Variable(X.T * 0.5)]
        return tf.nest.flatten(program(steps, variables, cache_casts))

    @settings(max_examples=examples)
    @given(STEPS)
    def check(steps):
        for kept, fresh in zip(outcome(steps, True), outcome(steps, False), strict=True):
            # Values are the same bits; gradients of several uses are added up in bfloat16.
            assert_close(kept, fresh, "bfloat16", depth=4 * len(steps))
            if not fresh.shape.rank:
                assert float(kept) == float(fresh)

    check()
