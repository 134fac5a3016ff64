"""Casts of constants that are folded, and those that are not."""

import numpy as np
import pytest
import tensorflow as tf

from helpers import graph_models
from tfamp.graph.passes.frozen_casts import fold_casts

VALUES = np.array([1.0, 1e-3, 70000.0, -2.5], "float32")
X = tf.ones(4)


def folded(function, keep=()):
    """The ops of a function's graph after folding, by name, and the Casts that are gone."""
    concrete = tf.function(function).get_concrete_function(tf.TensorSpec((4,), tf.float32))
    before = concrete.graph.as_graph_def()
    copy = before.SerializeToString(deterministic=True)
    results = [tensor.name for tensor in concrete.outputs]
    graph, casts = fold_casts(before, [*results, *keep])
    assert before.SerializeToString(deterministic=True) == copy
    (actual,) = graph_models.runnable(concrete, graph)(X)
    expected = tf.nest.flatten(concrete(X))[0]
    assert actual.dtype == expected.dtype
    np.testing.assert_array_equal(actual.numpy(), expected.numpy())
    return graph, casts


def stored(graph):
    """The float constants of a graph: dtypes and bytes."""
    constants = [n.attr["value"].tensor for n in graph.node if n.op == "Const"]
    return [(tf.as_dtype(c.dtype).name, len(c.tensor_content)) for c in constants]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_constant_behind_identities_takes_half_the_bytes(dtype):
    def function(x):
        read = tf.identity(tf.identity(tf.constant(VALUES)))
        return tf.cast(x, dtype) * tf.cast(read, dtype)

    graph, casts = folded(function)
    assert stored(graph) == [(dtype, 8)]
    assert len(casts) == 1
    assert sum(node.op == "Identity" for node in graph.node) == 1  # the function's result


def test_two_casts_share_one_constant():
    def function(x):
        read = tf.constant(VALUES)
        one, two = (tf.cast(tf.identity(read), tf.float16) for _ in range(2))
        return tf.cast(x, tf.float16) * one + two

    graph, casts = folded(function)
    assert stored(graph) == [("float16", 8)]
    assert len(casts) == 2


def test_a_constant_used_in_float32_as_well_stays_with_its_cast():
    def function(x):
        read = tf.constant(VALUES)
        return tf.cast(x * read, tf.float16) * tf.cast(read, tf.float16)

    graph, casts = folded(function)
    assert [dtype for dtype, _ in stored(graph)] == ["float32"]
    assert not casts


def test_casts_to_float64_and_of_integers_stay():
    def function(x):
        wide = tf.cast(tf.constant(VALUES), tf.float64) * tf.cast(x, tf.float64)
        return wide + tf.cast(tf.cast(tf.constant([1, 2, 3, 4]), tf.float16), tf.float64)

    graph, casts = folded(function)
    assert not casts
    assert sum(node.op == "Cast" for node in graph.node) == 4


def test_functions_are_folded_too():
    @tf.function
    def inner(x):
        low = tf.cast(tf.constant(VALUES), tf.float16)
        return tf.cast(x, tf.float16) * low, low

    graph, casts = folded(lambda x: tf.add(*inner(x)))
    ((scope, _),) = casts
    (body,) = [f for f in graph.library.function if f.signature.name == scope]
    assert [n.attr["dtype"].type for n in body.node_def if n.op == "Const"] == [
        tf.float16.as_datatype_enum
    ]


def test_a_constant_that_is_fetched_stays():
    def function(x):
        read = tf.constant(VALUES, name="weights")
        return tf.cast(x, tf.float16) * tf.cast(read, tf.float16)

    graph, casts = folded(function, keep=["weights:0"])
    assert not casts
    assert "weights" in {node.name for node in graph.node}
