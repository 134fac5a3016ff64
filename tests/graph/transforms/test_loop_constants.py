"""Casts that are taken out of loops, and those that must stay inside."""

import numpy as np
import pytest
import tensorflow as tf

from helpers import graph_models
from tfamp.graph.passes.frozen_casts import cast_before_loops, fold_casts

WEIGHT = np.random.default_rng(0).normal(0, 0.5, (8, 8)).astype("float32")
X = tf.ones((2, 8))


def low_product(x, weight, dtype="bfloat16"):
    return tf.cast(tf.cast(x, dtype) @ tf.cast(weight, dtype), tf.float32)


def loop(body, weight, *, result=0):
    """A While over (x, weight); returns one of the values it ends with."""

    def function(x):
        ends = tf.while_loop(lambda i, *_: i < 3, body, [0, x, tf.constant(weight)])
        return ends[1 + result]

    return function


def hoisted(function):
    """The loop's dtypes, the dtypes of constants and the Casts that are gone."""
    concrete = tf.function(function).get_concrete_function(tf.TensorSpec(X.shape))
    before = concrete.graph.as_graph_def()
    copy = before.SerializeToString(deterministic=True)
    graph, casts = cast_before_loops(before)
    assert before.SerializeToString(deterministic=True) == copy
    graph, _ = fold_casts(graph, [tensor.name for tensor in concrete.outputs])
    (actual,) = graph_models.runnable(concrete, graph)(X)
    np.testing.assert_array_equal(actual.numpy(), concrete(X).numpy())
    loops = [n for n in graph.node if "While" in n.op]
    types = [tf.as_dtype(number).name for n in loops for number in n.attr["T"].list.type]
    stored = [n.attr["dtype"].type for n in graph.node if n.op == "Const" and n.ByteSize() > 100]
    return types, [tf.as_dtype(number).name for number in stored], casts


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_weight_is_cast_before_the_loop_and_stored_low(dtype):
    types, stored, casts = hoisted(
        loop(lambda i, x, w: (i + 1, low_product(x, tf.identity(w), dtype), w), WEIGHT)
    )
    assert types.count(dtype) == 1
    assert stored == [dtype]
    ((scope, _),) = casts
    assert scope


@pytest.mark.parametrize(
    ("body", "result"),
    [
        (lambda i, x, w: (i + 1, low_product(x, w), w + 1.0), 0),
        (lambda i, x, w: (i + 1, low_product(x, w) @ w, w), 0),
        (lambda i, x, w: (i + 1, low_product(x, w), tf.identity(w)), 1),
        (lambda i, x, w: (i + 1, low_product(x, w) + low_product(x, w, "float16"), w), 0),
    ],
    ids=["changed", "used in float32", "used behind the loop", "used in two dtypes"],
)
def test_what_is_more_than_a_low_weight_stays(body, result):
    types, stored, casts = hoisted(loop(body, WEIGHT, result=result))
    assert set(types) & {"float16", "bfloat16"} == set()
    assert stored == ["float32"]
    assert not casts
