"""`op_counts`: functions of every kind, models, train steps; loops, branches, nested functions."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp
from tfamp.diagnostics import op_counts

X = np.ones((4, 8), "float32")
Y = np.zeros(4, "int32")


def product(x):
    return tf.matmul(x, x, transpose_b=True)


def mlp() -> keras.Model:
    layers = [keras.Input((8,)), keras.layers.Dense(8, activation="relu"), keras.layers.Dense(3)]
    return keras.Sequential(layers)


@pytest.mark.parametrize(
    "fn",
    [product, tf.function(product), tf.function(product).get_concrete_function(tf.ones((4, 8)))],
    ids=["python", "function", "concrete"],
)
def test_a_function_counts_what_computes_and_nothing_else(fn):
    arguments = () if isinstance(fn, tf.types.experimental.ConcreteFunction) else (X,)
    assert op_counts(fn, *arguments) == {"MatMul": {"float32": 1}}
    with pytest.raises(TypeError, match=r"takes a Python function.*got int"):
        op_counts(3)


def test_the_dtype_is_the_float_output_then_the_float_input_then_the_first():
    counts = op_counts(
        lambda x: (tf.cast(x, "float16"), x > 0, tf.shape(x)[0] + 1, tf.argmax(x)), X
    )
    assert counts["Cast"] == {"float16": 1}
    assert counts["Greater"] == {"float32": 1}
    assert counts["ArgMax"] == {"float32": 1}
    unknown = op_counts(lambda x: tf.shape(x)[0] + 1, tf.TensorSpec((None,)))
    assert unknown["AddV2"] == {"int32": 1}


def test_loops_and_branches_count_once_and_a_nested_function_for_each_call():
    inner = tf.function(product)

    def loop(x):
        x = inner(inner(x))
        return tf.while_loop(lambda i, _: i < 3, lambda i, y: (i + 1, inner(y)), (0, x))[1]

    def branch(x):
        return tf.cond(tf.reduce_sum(x) > 0, lambda: product(x), lambda: tf.exp(x))

    square = tf.ones((4, 4))
    with tfamp.autocast("bfloat16"):
        looped, counts = op_counts(loop, square), op_counts(branch, square)
    assert looped["MatMul"] == {"bfloat16": 3}
    assert (counts["MatMul"], counts["Exp"]) == ({"bfloat16": 1}, {"float32": 1})
    calls = {"While", "StatelessWhile", "If", "StatelessIf", "PartitionedCall"}
    assert not calls & {*looped, *counts}


def test_a_model_counts_its_forward_pass_and_with_labels_its_train_step_and_nothing_moves():
    tfamp.set_global_policy("mixed_float16")
    model = mlp()
    model.compile(
        tfamp.LossScaleOptimizer(keras.optimizers.Adam()), "sparse_categorical_crossentropy"
    )
    before = [value.copy() for value in model.get_weights()]
    forward, step = op_counts(model, X), op_counts(model, X, Y)
    # The output layer is float32.
    assert forward["MatMul"] == {"float16": 1, "float32": 1}
    assert forward["Relu"] == {"float16": 1}
    assert op_counts(model.layers[0], X)["MatMul"] == {"float16": 1}
    # Backward: one of the first layer, as its input has no gradient, two of the second.
    assert step["MatMul"] == {"float16": 2, "float32": 3}
    assert op_counts(model, X, Y, np.ones(4, "float32"))["MatMul"] == step["MatMul"]
    assert "MatMul" not in set(op_counts(model, X, training=True)) - set(forward)
    for old, new in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(old, new)
    assert int(model.optimizer.iterations.numpy()) == 0


def test_a_train_step_on_replicas_counts_on_all_and_can_be_taken_later(two_replicas):
    with two_replicas.scope():
        model = mlp()
        model.compile(keras.optimizers.Adam(), "sparse_categorical_crossentropy")
    assert op_counts(model, X, Y)["MatMul"] == {"float32": 2 * 5}
    model.fit(X, Y, verbose=0)
    assert int(model.optimizer.iterations.numpy()) == 1
