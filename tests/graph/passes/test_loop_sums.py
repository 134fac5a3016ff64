"""Sums over the iterations of a gradient's loop become one op behind the loop."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp
from helpers.cases import first_of
from helpers.tolerances import assert_close
from tfamp.core.profile import builtin_profile
from tfamp.graph.graph import Graph
from tfamp.graph.passes import loop_sums
from tfamp.graph.rewrite import rewrite_graph_def

ROUNDS, BATCH, WIDTH = 6, 4, 16
X = tf.random.stateless_normal((BATCH, WIDTH), (1, 2)) * 0.3
START = tf.random.stateless_normal((WIDTH, WIDTH), (3, 4)) * 0.3


def recurrent(weight, rounds=ROUNDS, x=X):
    return tf.while_loop(
        lambda i, _: i < rounds,
        lambda i, state: (i + 1, tf.tanh(state @ weight + x)),
        (0, x),
        maximum_iterations=ROUNDS,
    )[1]


def gradient_of(loss, signature=()):
    """A function of the gradient of a loss by a weight, and the weight."""
    weight = tf.Variable(START)

    @tf.function(input_signature=signature)
    def gradient(*args):
        with tf.GradientTape() as tape:
            value = loss(weight, *args)
        return tape.gradient(value, weight)

    return gradient, weight


def mean_square(weight, rounds=ROUNDS, x=X):
    return tf.reduce_mean(recurrent(weight, rounds, x) ** 2)


def graph_of(function):
    return function.get_concrete_function().graph.as_graph_def(add_shapes=True)


def products(nodes):
    """The products that gradients of weights are, by the rows of what they multiply."""
    return [n for n in nodes if n.op == "MatMul" and n.attr["transpose_a"].b]


def products_in_loops(graph_def):
    return [n.name for f in graph_def.library.function for n in products(f.node_def)]


def changed(function, keep=()):
    graph_def = graph_of(function)
    before = graph_def.SerializeToString(deterministic=True)
    loop_sums.run(Graph(graph_def, keep), None)
    return graph_def.SerializeToString(deterministic=True) != before


@pytest.mark.parametrize("dtype", first_of(["bfloat16", "float16"]))
def test_the_gradient_of_a_weight_is_one_product_behind_the_loop(dtype):
    gradient, _ = gradient_of(mean_square, (tf.TensorSpec((), tf.int32),))
    fast = tfamp.rewrite(gradient, dtype=dtype, placement="lists")
    rounds = tf.constant(ROUNDS)
    graph_def = fast.concrete(rounds).graph.as_graph_def()
    assert products_in_loops(graph_def) == []
    (product,) = products(graph_def.node)
    assert tf.as_dtype(product.attr["T"].type) == dtype
    lists = [node for node in fast.plan(rounds).nodes if node.op == "TensorListConcatV2"]
    assert {node.dtype for node in lists} == {dtype}
    for number in (ROUNDS, 3, 0):
        rounds = tf.constant(number)
        assert_close(fast(rounds), gradient(rounds), dtype, depth=4 * ROUNDS)


def test_rows_of_unknown_number_are_added_up_too():
    spec = tf.TensorSpec((None, WIDTH))
    gradient, _ = gradient_of(lambda weight, x: mean_square(weight, ROUNDS, x), (spec,))
    graph_def = graph_of(gradient)
    loop_sums.run(Graph(graph_def), None)
    # As many rows count as 32, and 32 rows of both are more than the weight.
    assert products(graph_def.node) == []
    wide = tf.Variable(tf.tile(START, (8, 8)) / 8.0)
    x = tf.tile(X, (1, 8))

    @tf.function(input_signature=[tf.TensorSpec((None, 8 * WIDTH))])
    def of_wide(x):
        with tf.GradientTape() as tape:
            value = mean_square(wide, ROUNDS, x)
        return tape.gradient(value, wide)

    fast = tfamp.rewrite(of_wide, dtype="bfloat16", placement="lists")
    assert len(products(fast.concrete(x).graph.as_graph_def().node)) == 1
    for rows in (BATCH, 1):
        assert_close(fast(x[:rows]), of_wide(x[:rows]), "bfloat16", depth=4 * ROUNDS)


def test_one_sum_is_no_less_exact_than_one_of_rounded_products():
    gradient, weight = gradient_of(mean_square)
    exact = gradient().numpy().astype(np.float64)
    fast = tfamp.rewrite(gradient, dtype="bfloat16", placement="lists")
    grappler = tfamp.OpLists.grappler("bfloat16")  # Nothing is changed but dtypes.
    plain = tfamp.rewrite(gradient, dtype="bfloat16", placement="lists", op_lists=grappler)
    assert products_in_loops(plain.concrete().graph.as_graph_def())
    error, bound = (np.linalg.norm(f().numpy() - exact) for f in (fast, plain))
    assert error <= bound


def test_the_second_gradient_goes_through_the_lists():
    gradient, weight = gradient_of(mean_square)
    fast = tfamp.rewrite(gradient, dtype="bfloat16", placement="lists")
    assert products_in_loops(fast.concrete().graph.as_graph_def()) == []

    def second(function):
        with tf.GradientTape() as tape:
            value = tf.reduce_sum(function() ** 2)
        return tape.gradient(value, weight)

    assert_close(second(fast), second(gradient), "bfloat16", depth=8 * ROUNDS)


def used_elsewhere(_):
    """A loop whose sum its next round takes."""

    def body(i, total, state):
        total = total + tf.linalg.matmul(state, X, transpose_a=True)
        return i + 1, total, tf.tanh(X @ total)

    start = (0, tf.zeros((WIDTH, WIDTH)), X)
    return tf.while_loop(lambda i, *_: i < ROUNDS, body, start)[1:]


def without_a_list(_):
    """A loop for which XLA would not know the number of rows."""

    def body(i, total, state):
        return i + 1, total + tf.linalg.matmul(state, X, transpose_a=True), tf.tanh(state)

    start = (0, tf.zeros((WIDTH, WIDTH)), X)
    return tf.while_loop(lambda i, *_: i < ROUNDS, body, start)[1:]


@pytest.mark.parametrize("loss", [used_elsewhere, without_a_list])
def test_other_loops_stay_as_they_are(loss):
    assert not changed(tf.function(lambda: loss(None)))


def test_many_rows_and_a_fetched_loop_stay_as_they_are():
    gradient, _ = gradient_of(mean_square)
    loops = [node.name for node in graph_of(gradient).node if "While" in node.op]
    assert changed(gradient)
    assert not changed(gradient, [f"{name}:1" for name in loops])
    many = tf.tile(X, (8, 1))
    assert not changed(gradient_of(lambda weight: mean_square(weight, ROUNDS, many))[0])


def test_a_second_time_changes_nothing():
    graph_def = graph_of(gradient_of(mean_square)[0])
    loop_sums.run(Graph(graph_def), None)
    before = graph_def.SerializeToString(deterministic=True)
    loop_sums.run(Graph(graph_def), None)
    assert graph_def.SerializeToString(deterministic=True) == before
    for function in graph_def.library.function:
        assert set(function.ret) == {arg.name for arg in function.signature.output_arg}


@pytest.mark.parametrize(
    ("layer", "compiled"),
    first_of([("LSTM", False), ("GRU", False), ("LSTM", True)]),
)
def test_keras_rnns_get_the_gradients_of_float32(layer, compiled):
    keras.utils.set_random_seed(0)
    made = getattr(keras.layers, layer)(WIDTH, return_sequences=True)
    model = keras.Sequential([keras.Input((ROUNDS, WIDTH)), made, keras.layers.Dense(1)])

    @tf.function
    def gradients(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x, training=True) - 1.0) ** 2)
        return tape.gradient(loss, model.trainable_variables)

    x = tf.random.stateless_normal((BATCH, ROUNDS, WIDTH), (5, 6))
    fast = tfamp.rewrite(gradients, dtype="bfloat16", placement="lists")
    graph_def = fast.concrete(x).graph.as_graph_def()
    assert products_in_loops(graph_def) == []
    assert sum("while_grad" in node.name for node in products(graph_def.node)) == 2
    found = tf.function(lambda x: fast(x), jit_compile=True)(x) if compiled else fast(x)
    for got, wanted in zip(found, gradients(x), strict=True):
        assert_close(got, wanted, "bfloat16", depth=8 * ROUNDS)


@pytest.mark.parametrize("rows", [8, None])
def test_a_product_behind_the_loop_counts_the_rows_of_all_rounds(rows):
    """With those of one round, a Cast of its result would outweigh what a low product gains."""
    layer = keras.layers.SimpleRNN(512)
    layer.build((None, 32, 512))

    @tf.function(input_signature=[tf.TensorSpec((rows, 32, 512))])
    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(layer(x) ** 2)
        gradients = tape.gradient(loss, layer.trainable_variables)
        for variable, gradient in zip(layer.trainable_variables, gradients, strict=True):
            variable.assign_sub(0.1 * gradient)
        return loss

    graph = step.get_concrete_function().graph
    result = rewrite_graph_def(
        graph.as_graph_def(add_shapes=True),
        [end.name for end in (*graph.outputs, *graph.control_outputs)],
        dtype="bfloat16",
        device="cpu",
        profile=builtin_profile("cpu", bfloat16=True),
    )
    behind = {node.name for node in products(result.graph_def.node)}
    dtypes = {node.dtype for node in result.plan.nodes if node.name in behind}
    assert len(behind) == 2
    assert dtypes == {"bfloat16"}
