"""Functions of what rounding makes zero, and numbers beyond float16's range, are as in float32."""

import numpy as np
import pytest
import tensorflow as tf

import tfamp
from helpers.cases import one_of_each, tiers

DTYPES = ("bfloat16", "float16")
PLACEMENTS = ("lists", "min_cut")
EPS = {"bfloat16": 2.0**-7, "float16": 2.0**-10}
RANDOM = np.random.default_rng(0)
W = [tf.Variable(RANDOM.normal(size=(16, 16)) / 4, dtype=tf.float32) for _ in range(3)]
X = tf.constant(RANDOM.normal(size=(64, 16)), tf.float32)
PRODUCTS = ("MatMul", "BatchMatMulV2", "Conv2D", "Einsum")


def step_of(features, scale=2.0, loss_scale=64.0):
    """A training step with features between products, of values up to about 3 * scale."""

    def step(x):
        with tf.GradientTape() as tape:
            y = features(tf.tanh(x @ W[0]) @ W[1] * scale) @ W[2]
            loss = loss_scale * tf.reduce_mean(tf.square(y))
        return y, tape.gradient(loss, W)

    return step


def rewritten(step, dtype, placement="lists"):
    return tfamp.rewrite(step, dtype=dtype, placement=placement, profile="builtin")


def low_products(plan):
    return [node.dtype for node in plan.nodes if node.op in PRODUCTS and node.dtype != "float32"]


def assert_as_exact(step, dtype, placement="lists"):
    """The products are low, and predictions and gradients are those of float32 all the same."""
    fast = rewritten(step, dtype, placement)
    assert len(low_products(fast.plan(X))) >= 8
    for found, wanted in zip(tf.nest.flatten(fast(X)), tf.nest.flatten(step(X)), strict=True):
        assert np.isfinite(wanted).all()
        error = np.linalg.norm(np.float64(found) - wanted) / np.linalg.norm(wanted)
        assert error < 6 * EPS[dtype]


# ---- Probabilities that round to zero and one ----------------------------------------------------


def odds(p):
    return p / (1.0 - p)


def entropy(p):
    return -p * tf.math.log(p) - (1.0 - p) * tf.math.log(1.0 - p)


def logit(h):
    return tf.math.log(odds(tf.sigmoid(h)))


OF_PROBABILITIES = {
    "log(1 - p)": lambda h: tf.math.log(1.0 - tf.sigmoid(4.0 * h)),
    "log1p(-p)": lambda h: tf.math.log1p(-tf.sigmoid(4.0 * h)),
    "p / (1 - p)": lambda h: odds(tf.sigmoid(2.0 * h)) / 1024.0,
    "1 / (1 - p)": lambda h: tf.math.reciprocal(1.0 - tf.sigmoid(2.0 * h)) / 1024.0,
    "(1 - p) ** -1": lambda h: (1.0 - tf.sigmoid(2.0 * h)) ** -1.0 / 1024.0,
    "p * log(p)": lambda h: (p := tf.nn.softmax(8.0 * h)) * tf.math.log(p),
    "log of a mean": lambda h: (
        h * tf.math.log(tf.reduce_mean(tf.sigmoid(2.0 * h - 16.0), -1, keepdims=True))
    ),
    "entropy": lambda h: entropy(tf.sigmoid(4.0 * h)),
    "logit": lambda h: logit(4.0 * h),
    "in a function": lambda h: tf.function(tf.math.log)(1.0 - tf.sigmoid(4.0 * h)),
}


@pytest.mark.parametrize("placement", tiers(["lists"], ["min_cut"]))
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", OF_PROBABILITIES)
def test_logarithms_and_quotients_of_probabilities_are_as_in_float32(name, dtype, placement):
    assert_as_exact(step_of(OF_PROBABILITIES[name]), dtype, placement)


def test_a_clipped_probability_keeps_what_the_bound_would_hide():
    def clipped(h):
        return tf.math.log(tf.clip_by_value(1.0 - tf.sigmoid(3.0 * h), 1e-7, 1.0))

    assert_as_exact(step_of(clipped), "bfloat16")


# ---- Differences of nearly equal values ----------------------------------------------------------


def deviation(h):
    mean = tf.reduce_mean(h, -1, keepdims=True)
    return tf.sqrt(tf.reduce_mean(h * h, -1, keepdims=True) - mean**2)


def of_windows(smooth):
    def deviations(h):
        h = 8.0 + h
        return tf.sqrt(smooth(h * h) - smooth(h) ** 2 + 1e-3)

    return deviations


def pooled(h):
    return tf.nn.avg_pool1d(h[..., None], 3, 1, "SAME")[..., 0]


def convolved(h):
    return tf.nn.conv1d(h[..., None], tf.ones((3, 1, 1)) / 3.0, 1, "SAME")[..., 0]


def distances(h):
    h = tf.math.l2_normalize(h, -1)
    return tf.sqrt(2.0001 - 2.0 * tf.matmul(h, h, transpose_b=True)) @ h


def neighbours(h):
    """Rows weighted by their distances, which both terms of the gradient nearly cancel."""
    squares = tf.reduce_sum(h * h, -1)
    found = squares[:, None] + squares[None] - 2.0 * tf.matmul(h, h, transpose_b=True)
    return tf.exp(-tf.sqrt(tf.maximum(found, 1e-6))) @ h


DIFFERENCES = {
    "deviation": lambda h: tf.concat([h[:, 1:], deviation(8.0 + h)], -1),
    "scaled by it": lambda h: h * deviation(tf.nn.relu(8.0 + h)),
    "of pooled windows": of_windows(pooled),
    "of windows": of_windows(convolved),
    "distances": distances,
    "neighbours": neighbours,
}


@pytest.mark.parametrize(
    ("name", "dtype", "placement"),
    one_of_each(DIFFERENCES, DTYPES, PLACEMENTS, quick=6),
)
def test_roots_of_differences_are_as_in_float32(name, dtype, placement):
    assert_as_exact(step_of(DIFFERENCES[name]), dtype, placement)


@pytest.mark.parametrize("dtype", DTYPES)
def test_whole_powers_of_differences_keep_products_low(dtype):
    """Neither these nor their gradients, which are powers too, divide by what rounds to zero."""

    def features(h):
        return (h - 0.5) ** 3 + tf.nn.relu(0.5 - h) ** 2

    plan = rewritten(step_of(features), dtype).plan(X)
    assert not [node for node in plan.nodes if node.op in PRODUCTS and node.dtype == "float32"]


# ---- Squares, constants and counts beyond float16's range ----------------------------------------


CONSTANT = RANDOM.normal(size=(16, 16)).astype("float32")
BEYOND = {
    "h * h": lambda h: tf.sqrt(1e-3 + h * h) / 256.0,
    "h ** 2": lambda h: tf.sqrt(1e-3 + h**2) / 256.0,
    "norm": lambda h: tf.norm(h, axis=-1, keepdims=True) * tf.ones((1, 16)) / 1024.0,
    "einsum": lambda h: tf.sqrt(tf.einsum("bi, bi -> b", h, h))[:, None] * tf.ones((1, 16)) / 1024,
    "einsum of elements": lambda h: tf.sqrt(1e-3 + tf.einsum("...i,...i->...i", h, h)) / 256.0,
    "large constant": lambda h: (h @ tf.constant(CONSTANT * 1e6)) * 1e-10,
    "large filter": lambda h: (
        tf.nn.conv1d(h[..., None], CONSTANT[:3, None, :1] * 1e6, 1, "SAME")[..., 0] * 1e-10
    ),
    "small constant": lambda h: (h @ tf.constant(CONSTANT * 1e-9)) * 1e5,
    "divided by a count": lambda h: h / tf.cast(1500 * tf.shape(h)[0], tf.float32),
}


@pytest.mark.parametrize("placement", tiers(["lists"], ["min_cut"]))
@pytest.mark.parametrize("name", BEYOND)
def test_numbers_beyond_float16s_range_are_as_in_float32(name, placement):
    assert_as_exact(step_of(BEYOND[name], scale=400.0, loss_scale=4096.0), "float16", placement)


# ---- What stays low ------------------------------------------------------------------------------


def hidden(h):
    """A normalization, gates, attention, a router and activations, as models have them."""
    mean = tf.reduce_mean(h, -1, keepdims=True)
    variance = tf.reduce_mean(h * h, -1, keepdims=True) - mean * mean
    h = (h - mean) * tf.math.rsqrt(variance + 1e-5) @ W[0]
    z = tf.sigmoid(h @ W[1])
    h = (1.0 - z) * h + z * tf.tanh(h @ W[2])
    scores = tf.matmul(h, h, transpose_b=True) / tf.sqrt(tf.cast(tf.shape(h)[-1], tf.float32))
    h += tf.nn.softmax(scores) @ h
    chosen = tf.math.top_k(tf.nn.softmax(h @ W[1]), 2).values
    h *= chosen[:, :1] / tf.reduce_sum(chosen, -1, keepdims=True)
    h = tf.math.l2_normalize(h, -1) @ W[0]
    return h / (1.0 + tf.exp(-h)) + tf.nn.gelu(h) + tf.nn.dropout(h, 0.1)


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_ordinary_layers_have_nothing_that_cancels(dtype, placement):
    plan = rewritten(step_of(hidden), dtype, placement).plan(X)
    assert set(low_products(plan)) == {dtype}
    assert {node.reason.rule for node in plan.nodes}.isdisjoint({"cancellation", "angle"})
    gates = [node for node in plan.nodes if node.op in ("Sigmoid", "Tanh")]
    assert gates
    assert {node.dtype for node in gates} == {dtype}


def test_a_gram_matrix_is_no_sum_of_squares():
    def gram(h):
        return tf.einsum("bi,bj->ij", h, h) / 64.0

    plan = rewritten(step_of(gram), "float16").plan(X)
    assert {node.dtype for node in plan.nodes if node.op == "Einsum"} == {"float16"}
