"""Gradients through rewritten functions, and of all that has a gradient of its own."""

import numpy as np
import pytest
import tensorflow as tf

import tfamp
from helpers.cases import first_of, one_of_each
from helpers.graph_asserts import assert_computes_in
from helpers.tolerances import assert_close

DTYPES = ["float16", "bfloat16"]
WIDTH = 8


@pytest.fixture
def weights():
    random = np.random.default_rng(1)
    kernel = random.standard_normal((WIDTH, WIDTH)) / np.sqrt(WIDTH)
    return tf.Variable(kernel.astype("float32"))


@pytest.fixture
def x():
    return tf.constant(np.random.default_rng(2).standard_normal((4, WIDTH)).astype("float32"))


def gradients(fn, x, variables):
    with tf.GradientTape() as tape:
        tape.watch(x)
        loss = tf.reduce_sum(fn(x) ** 2)
    return tape.gradient(loss, [x, *variables])


def check(fn, x, variables, dtype, depth=WIDTH):
    """Values and gradients of a function agree with those of its rewritten self."""
    fast = tfamp.rewrite(fn, dtype=dtype)
    assert_computes_in(dtype, fast.concrete(x))
    assert_close(fast(x), fn(x), dtype, depth=depth)
    mine, expected = gradients(fast, x, variables), gradients(fn, x, variables)
    for one, other in zip(mine, expected, strict=True):
        assert one.dtype == other.dtype == tf.float32
        assert_close(tf.convert_to_tensor(one), other, dtype, depth=4 * depth)


@tf.custom_gradient
def softplus_times_three(x):
    """The gradient is three times softplus's, so that a lost custom gradient is seen."""
    exponential = tf.exp(x)

    def gradient(upstream):
        return 3.0 * upstream * (1.0 - 1.0 / (1.0 + exponential))

    return tf.math.log1p(exponential), gradient


def loop_with_tensor_array(x, weights):
    def body(i, h, states):
        h = tf.tanh(h @ weights)
        return i + 1, h, states.write(i, h)

    start = (0, x, tf.TensorArray(tf.float32, 3))
    return tf.while_loop(lambda i, *_: i < 3, body, start)[2].stack()


def compiled_inside_and_in_a_loop(x, weights):
    inner = tf.function(lambda x: tf.tanh(x @ weights), jit_compile=True)
    return 2.0 * tf.while_loop(lambda i, _: i < 2, lambda i, x: (i + 1, inner(x)), (0, inner(x)))[1]


def a_function_with_a_loop_called_twice(x, weights):
    @tf.function
    def inner(x):
        states = tf.TensorArray(tf.float32, 2)

        def body(i, x, states):
            x = tf.tanh(x @ weights)
            return i + 1, x, states.write(i, x)

        found = tf.while_loop(lambda i, *_: i < 2, body, (0, x, states))
        return found[1], tf.reduce_sum(found[2].stack(), 0)

    return inner(inner(x)[0])[1]


def calls_that_stay_calls_with_a_loop_that_reads_a_variable(x, weights):
    @tf.function(experimental_attributes={"_noinline": True})
    def inner(x, y):
        rows = tf.map_fn(lambda row: tf.tanh(tf.linalg.matvec(weights, row)), x)
        return rows + y, tf.reduce_sum(y)

    once, _ = inner(x, x)
    twice, total = inner(x, once)
    return twice + total


def custom_gradient_in_nested_functions(x, weights):
    inner = tf.function(softplus_times_three)
    outer = tf.function(lambda x: inner(x @ weights) + inner(x))
    return outer(x) * 2.0


def custom_gradient_in_a_loop(x, weights):
    def body(i, x):
        return i + 1, 0.2 * softplus_times_three(x @ weights)

    return tf.while_loop(lambda i, _: i < 2, body, (0, x))[1]


def custom_gradient_of_variables(x, weights):
    @tf.custom_gradient
    def layer(x):
        def gradient(upstream, variables=None):
            (kernel,) = variables
            to_x = upstream @ tf.transpose(kernel)
            return to_x, [2.0 * tf.transpose(x) @ upstream]

        return x @ weights, gradient

    return tf.tanh(layer(x))


def custom_gradient_over_tensors_of_the_caller(x, weights):
    scale = tf.reduce_mean(tf.abs(x))

    @tf.custom_gradient
    def scaled(x):
        return x * scale, lambda upstream: upstream * scale * 2.0

    return tf.function(scaled)(x @ weights)


def recomputed(x, weights):
    block = tf.recompute_grad(lambda x: tf.tanh(x @ weights))
    return block(block(x))


def activation_with_a_custom_gradient(x, weights):
    return tf.nn.silu(x @ weights)


# How many values are added up on the way, in widths.
FUNCTIONS = {
    loop_with_tensor_array: 4,
    compiled_inside_and_in_a_loop: 3,
    a_function_with_a_loop_called_twice: 8,
    calls_that_stay_calls_with_a_loop_that_reads_a_variable: 8,
    custom_gradient_in_nested_functions: 1,
    custom_gradient_in_a_loop: 4,
    custom_gradient_of_variables: 1,
    custom_gradient_over_tensors_of_the_caller: 1,
    recomputed: 2,
    activation_with_a_custom_gradient: 1,
}


@pytest.mark.parametrize(("fn", "dtype"), one_of_each(FUNCTIONS, DTYPES))
def test_values_and_gradients(fn, dtype, weights, x):
    check(lambda x: fn(x, weights), x, [weights], dtype, depth=FUNCTIONS[fn] * WIDTH)


@pytest.mark.parametrize("dtype", DTYPES)
def test_compiled_as_a_whole(dtype, weights, x):
    fn = tf.function(lambda x: tf.nn.relu(x @ weights) @ weights, jit_compile=True)
    check(fn, x, [weights], dtype)
    assert tfamp.rewrite(fn, dtype=dtype).concrete(x).function_def.attr["_XlaMustCompile"].b


@pytest.mark.parametrize("dtype", first_of(DTYPES))
def test_embedding(dtype, weights):
    table = tf.Variable(tf.reshape(tf.range(40.0) / 40.0, (5, WIDTH)))
    fn = tf.function(lambda ids: tf.nn.embedding_lookup(table, ids) @ weights)
    fast = tfamp.rewrite(fn, dtype=dtype)
    ids = tf.constant([3, 1, 3])
    assert_computes_in(dtype, fast.concrete(ids))
    with tf.GradientTape(persistent=True) as tape:
        mine, other = tf.reduce_sum(fast(ids)), tf.reduce_sum(fn(ids))
    gradient, expected = tape.gradient(mine, table), tape.gradient(other, table)
    assert isinstance(gradient, tf.IndexedSlices)
    assert gradient.indices.numpy().tolist() == expected.indices.numpy().tolist()
    assert_close(gradient.values, expected.values, dtype, depth=WIDTH)


@pytest.mark.parametrize("dtype", first_of(DTYPES))
def test_tapes_around_it_in_a_function_and_inside_and_second_order(dtype, weights, x):
    def fn(x):
        return tf.tanh(x @ weights)

    def penalty(fn):
        with tf.GradientTape() as outer:
            with tf.GradientTape() as tape:
                tape.watch(x)
                value = tf.reduce_sum(fn(x))
            norm = tf.reduce_sum(tape.gradient(value, x) ** 2)
        return outer.gradient(norm, weights)

    fast = tfamp.rewrite(fn, dtype=dtype)
    assert_computes_in(dtype, fast.concrete(x))
    expected = gradients(fn, x, [weights])
    around = tf.function(lambda x: gradients(fast, x, [weights]))
    inside = tfamp.rewrite(lambda x: gradients(fn, x, [weights]), dtype=dtype)
    assert_computes_in(dtype, inside.concrete(x))
    for found in (around(x), inside(x)):
        for one, other in zip(found, expected, strict=True):
            assert_close(one, other, dtype, depth=4 * WIDTH)
    assert_close(penalty(fast), penalty(fn), dtype, depth=4 * WIDTH)


def test_a_closure_that_cannot_be_followed_is_named(weights, x):
    """Two levels up: neither the function of the node nor the one that is rewritten."""

    @tf.function
    def middle(x):
        scale = tf.reduce_mean(x)

        @tf.function
        def inner(x):
            @tf.custom_gradient
            def scaled(x):
                return x + 0.0, lambda upstream: upstream * scale

            return scaled(x @ weights)

        return inner(x)

    fast = tfamp.rewrite(lambda x: middle(x), dtype="bfloat16")
    assert_close(fast(x), x @ weights, "bfloat16", depth=WIDTH)
    with pytest.raises(tfamp.RewriteError, match="Pass it to the function with the custom"):
        gradients(fast, x, [weights])


@pytest.mark.slow
def test_second_derivatives_of_loops_are_for_tapes_inside(weights, x):
    def loop(x):
        return tf.while_loop(
            lambda i, _: i < 2, lambda i, x: (i + 1, tf.tanh(x @ weights)), (0, x)
        )[1]

    def penalty(fn):
        with tf.GradientTape() as outer:
            norm = tf.reduce_sum(gradients(fn, x, [])[0] ** 2)
        return outer.gradient(norm, weights)

    with pytest.raises(ValueError, match="without handle data"):
        penalty(tfamp.rewrite(loop, dtype="bfloat16"))
    inside = tfamp.rewrite(lambda: penalty(loop), dtype="bfloat16")
    assert_close(inside(), penalty(tf.function(loop)), "bfloat16", depth=16 * WIDTH)
