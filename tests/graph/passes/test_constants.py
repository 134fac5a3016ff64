"""Constants stored as they are cast, Casts hoisted out of loops, and masks that stay finite."""

import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf

import tfamp
from helpers import graph_models
from tfamp.graph.graph import Graph
from tfamp.graph.passes.constants import fold_casts

VALUES = np.array([1.0, 1e-3, 70000.0, -2.5], "float32")
WEIGHT = np.random.default_rng(0).normal(0, 0.5, (8, 8)).astype("float32")
DTYPES = ("float16", "bfloat16")


def folded(function, x, keep=()):
    """A function's graph after folding, and the Casts that are gone."""
    concrete = tf.function(function).get_concrete_function(tf.TensorSpec(x.shape))
    graph = concrete.graph.as_graph_def()
    casts = fold_casts(Graph(graph, [*(tensor.name for tensor in concrete.outputs), *keep]))
    (actual,) = graph_models.runnable(concrete, graph)(x)
    expected = tf.nest.flatten(concrete(x))[0]
    assert actual.dtype == expected.dtype
    np.testing.assert_array_equal(actual.numpy(), expected.numpy())
    return graph, casts


def stored(nodes):
    """The float constants among nodes: dtypes and bytes."""
    constants = [n.attr["value"].tensor for n in nodes if n.op == "Const"]
    found = [(tf.as_dtype(c.dtype).name, len(c.tensor_content)) for c in constants]
    return [each for each in found if "float" in each[0]]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_constant_behind_identities_takes_half_the_bytes_and_two_casts_share_it(dtype):
    def function(x):
        read = tf.identity(tf.constant(VALUES))
        one, two = (tf.cast(tf.identity(read), dtype) for _ in range(2))
        return tf.cast(x, dtype) * one + two

    graph, casts = folded(function, tf.ones(4))
    assert stored(graph.node) == [(dtype, 8)]
    assert len(casts) == 2


def used_in_float32(x):
    read = tf.constant(VALUES)
    return tf.cast(x * read, tf.float16) * tf.cast(read, tf.float16)


def of_other_dtypes(x):
    wide = tf.cast(tf.constant(VALUES), tf.float64) * tf.cast(x, tf.float64)
    return wide + tf.cast(tf.cast(tf.constant([1, 2, 3, 4]), tf.float16), tf.float64)


def fetched(x):
    return tf.cast(x, tf.float16) * tf.cast(tf.constant(VALUES, name="weights"), tf.float16)


@pytest.mark.parametrize("function", [used_in_float32, of_other_dtypes, fetched])
def test_other_constants_stay_with_their_casts(function):
    graph, casts = folded(function, tf.ones(4), keep=["weights:0"])
    assert [dtype for dtype, _ in stored(graph.node)] == ["float32"]
    assert not casts


def test_functions_are_folded_too():
    @tf.function
    def inner(x):
        low = tf.cast(tf.constant(VALUES), tf.float16)
        return tf.cast(x, tf.float16) * low, low

    graph, casts = folded(lambda x: tf.add(*inner(x)), tf.ones(4))
    ((scope, _),) = casts
    (body,) = [f for f in graph.library.function if f.signature.name == scope]
    assert [dtype for dtype, _ in stored(body.node_def)] == ["float16"]


# ---- Loops ---------------------------------------------------------------------------------------


def low_product(x, weight, dtype="bfloat16"):
    return tf.cast(tf.cast(x, dtype) @ tf.cast(weight, dtype), tf.float32)


def hoisted(body, result=0):
    """Folds a loop over (x, weight): low dtypes of variables, the weight's dtype, gone Casts."""

    def function(x):
        return tf.while_loop(lambda i, *_: i < 3, body, [0, x, tf.constant(WEIGHT)])[1 + result]

    graph, casts = folded(function, tf.ones((2, 8)))
    (loop,) = [n for n in graph.node if "While" in n.op]
    types = {tf.as_dtype(number).name for number in loop.attr["T"].list.type}
    return types & set(DTYPES), [dtype for dtype, _ in stored(graph.node)], casts


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_weight_is_cast_before_the_loop_and_stored_low(dtype):
    low, weights, casts = hoisted(lambda i, x, w: (i + 1, low_product(x, tf.identity(w), dtype), w))
    assert low == {dtype}
    assert weights == [dtype]
    assert {scope == "" for scope, _ in casts} == {True, False}


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
    assert hoisted(body, result) == (set(), ["float32"], frozenset())


# ---- Choices -------------------------------------------------------------------------------------

LARGE = {"float16": -2e38, "bfloat16": tf.float32.min}
MASK = tf.constant([[False] * 4, [True, True, False, True]])
X = tf.reshape(tf.range(6, dtype=tf.float32), (2, 3)) / 4
W = tf.reshape(tf.range(12, dtype=tf.float32), (3, 4)) / 8


def rewritten(function, dtype):
    """Results of a function in low precision for X and W, and the dtypes of its Selects."""
    result = tfamp.rewrite(tf.function(function), dtype=dtype, placement="lists")
    operations = result.concrete(X, W).graph.get_operations()
    selects = {op.outputs[0].dtype.name for op in operations if op.type == "SelectV2"}
    return [each.numpy() for each in tf.nest.flatten(result(X, W))], selects


@pytest.mark.parametrize("dtype", LARGE)
def test_a_row_that_is_masked_as_a_whole_is_as_in_float32(dtype):
    def attend(x, w):
        return tf.nn.softmax(tf.where(MASK, x @ w, LARGE[dtype])) @ tf.transpose(w)

    (actual,), selects = rewritten(attend, dtype)
    assert selects == {dtype}
    tolerance = 8 * float(ml_dtypes.finfo(dtype).eps)
    np.testing.assert_allclose(actual, attend(X, W), rtol=tolerance)


def chosen(x, w):
    y = x @ w
    return tf.where(MASK, tf.where(MASK, y, np.inf), -7.0), tf.where(MASK, y, -np.inf)


def scaled(x, w):
    large = tf.constant(1e6)
    return [tf.where(MASK, (x @ w) * large, large) / large @ tf.transpose(w)]


@pytest.mark.parametrize(("function", "selects"), [(chosen, None), (scaled, {"float32"})])
def test_infinity_small_constants_and_those_of_arithmetic_keep_their_values(function, selects):
    actual, found = rewritten(function, "float16")
    assert found == (selects or found)
    for result, expected in zip(actual, function(X, W), strict=True):
        np.testing.assert_allclose(result, expected, rtol=1e-2)


@pytest.mark.parametrize("way", ["lists", "min_cut"])
def test_a_bound_beyond_the_range_does_not_hide_an_overflow(way):
    def clipped(x, w):
        return tf.clip_by_value(x @ w, -1e6, 1e6) @ w

    large, w = tf.fill((8, 64), 40.0), tf.fill((64, 64), 40.0)
    options = {"dtype": "float16", "placement": way, "force_low": ["matmul", "clip"]}
    fast = tfamp.rewrite(clipped, **options)
    assert not np.isfinite(fast(large, w)).any()  # The product is 102,400.
    x, small = tf.fill((8, 64), 2.0), w / 100.0
    np.testing.assert_allclose(fast(x, small), clipped(x, small), rtol=1e-2)


def test_a_bound_that_holds_for_every_value_stays_finite():
    low = np.full((2, 4), 1e9, "float32")
    low[0] = -1e9  # Masks a row as a whole.

    def attend(x, w):
        return tf.nn.softmax(tf.minimum(x @ w, low)) @ tf.transpose(w)

    (actual,), _ = rewritten(attend, "float16")
    np.testing.assert_allclose(actual, attend(X, W), rtol=1e-2)

    def at_least(x, w):
        return tf.maximum(x @ w, 1e5)

    fast = tfamp.rewrite(at_least, dtype="float16", placement="lists", force_low=["Maximum"])
    np.testing.assert_array_equal(fast(X, W), np.full((2, 4), 65504.0))


def test_a_constant_that_bounds_and_is_chosen_is_stored_for_each():
    large, w = tf.fill((8, 64), 40.0), tf.fill((64, 64), 40.0)
    x = large / 100.0

    def both(x, w):
        most, y = tf.constant(1e6), x @ w
        return tf.minimum(y, most) * 1e-3, tf.where(y > 0, most, y) * 1e-3

    low = {"force_low": ["matmul", "Minimum", "Select"]}
    fast = tfamp.rewrite(both, dtype="float16", placement="lists", **low)
    bounded, chosen = fast(large, w)
    assert not np.isfinite(bounded).any()  # The product is 102,400.
    np.testing.assert_allclose(chosen, 65.504, rtol=1e-2)
    np.testing.assert_allclose(fast(x, w)[0], both(x, w)[0], rtol=1e-2)
