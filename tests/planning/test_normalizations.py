"""Normalizations are float32 under the default lists, found by what they compute."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp
from helpers.cases import first_of, one_in
from tfamp import OpLists
from tfamp.machine.hardware import detect

DTYPES = ("bfloat16", "float16")
EPS = {"bfloat16": 2.0**-8, "float16": 2.0**-11}
WIDTH = 32
WEIGHT = tf.constant(np.random.default_rng(0).normal(size=(WIDTH, WIDTH)) / 6.0, tf.float32)
GAIN = tf.Variable(tf.random.stateless_uniform((WIDTH,), (1, 2), 0.5, 1.5))
X = tf.constant(np.random.default_rng(1).normal(size=(16, WIDTH)), tf.float32)


def centred_by_hand(x):
    centred = x - tf.reduce_sum(x, -1, keepdims=True) * (1.0 / WIDTH)
    deviation = tf.sqrt(tf.reduce_mean(tf.square(centred), -1, keepdims=True) + 1e-6)
    return GAIN * (centred / deviation)


def by_moments(x):
    mean, variance = tf.nn.moments(x, -1)
    scale = tf.math.rsqrt(variance + 1e-6)[:, None]
    return (x - mean[:, None]) * scale * GAIN + GAIN


def by_mean_of_squares(x):
    mean = tf.reduce_mean(x, -1, keepdims=True)
    variance = tf.reduce_mean(x * x, -1, keepdims=True) - tf.square(mean)
    return (x - mean) * tf.pow(tf.maximum(variance, 0.0) + 1e-3, -0.5)


def in_groups(x):
    grouped = tf.reshape(x, (16, 4, WIDTH // 4))
    mean = tf.reduce_mean(grouped, -1, keepdims=True)
    variance = tf.reduce_mean(tf.math.squared_difference(grouped, mean), -1, keepdims=True)
    return tf.reshape((grouped - mean) / tf.sqrt(variance + 1e-6), (16, WIDTH))


NORMALIZATIONS = {
    "centred by hand": centred_by_hand,
    "moments": by_moments,
    "mean of squares": by_mean_of_squares,
    "groups": in_groups,
    "rms": lambda x: x * tf.math.rsqrt(tf.reduce_mean(x**2, -1, keepdims=True) + 1e-6) * GAIN,
    "unit norm": lambda x: tf.nn.l2_normalize(x, -1),
    "norm": lambda x: x / tf.norm(x, axis=-1, keepdims=True),
    "of means": lambda x: by_moments(tf.reduce_mean(tf.reshape(x, (16, WIDTH, 1)), -1)),
    "LayerNormalization": keras.layers.LayerNormalization(),
    "RMSNormalization": keras.layers.RMSNormalization(),
    "GroupNormalization": keras.layers.GroupNormalization(4),
}


def distance(x):
    return x * tf.sqrt(tf.reduce_mean(tf.math.squared_difference(x, GAIN), -1, keepdims=True))


LOOK_ALIKES = {
    "mean": lambda x: x - tf.reduce_mean(x, -1, keepdims=True),
    "gate": lambda x: x * tf.sigmoid(tf.reduce_mean(x, -1, keepdims=True)),
    "root of the mean": lambda x: x / tf.sqrt(tf.abs(tf.reduce_mean(x, -1, keepdims=True)) + 1.0),
    "distance": distance,
    "root of the mean beside squares": lambda x: (
        x / tf.sqrt(tf.reduce_mean(x, -1, keepdims=True) + 9.0)
        + tf.reduce_mean(x * x, -1, keepdims=True)
    ),
    "other data": lambda x: tf.nn.relu(x @ WEIGHT) / tf.sqrt(tf.reduce_mean(x * x) + 1.0),
    "variance": lambda x: tf.broadcast_to(tf.math.reduce_variance(x, -1, keepdims=True), x.shape),
}


def plan_of(function, dtype="bfloat16", **arguments):
    """The plan of a function of low values whose result is multiplied."""
    arguments = {"placement": "lists", **arguments}
    return tfamp.rewrite(
        lambda x: function(x @ WEIGHT) @ WEIGHT, dtype=dtype, profile="builtin", **arguments
    ).plan(X)


def in_statistics(plan):
    return [node for node in plan.nodes if node.reason.rule == "statistics"]


@pytest.mark.parametrize("dtype", first_of(reversed(DTYPES)))
@pytest.mark.parametrize("name", NORMALIZATIONS)
def test_normalization_is_float32_between_low_products(name, dtype):
    plan = plan_of(NORMALIZATIONS[name], dtype)
    products = [node for node in plan.nodes if node.op == "MatMul"]
    assert [node.dtype for node in products] == [dtype, dtype]
    found = in_statistics(plan)
    assert {node.dtype for node in found} == {"float32"}
    ops = {node.op for node in found}
    assert ops & {"Mean", "Sum"}
    assert ops & {"Rsqrt", "Sqrt", "Pow"}
    assert ops & {"Mul", "RealDiv"}
    # All of them are part of it, and nothing is: one Cast up and one down, weights left out.
    arithmetic = {"Mean", "Rsqrt", "Sqrt", "SquaredDifference", "Square", "Sub", "Mul", "RealDiv"}
    of_it = [n for n in plan.nodes if n.op in arithmetic and n not in found]
    assert not [n for n in of_it if name != "of means" or n.op != "Mean"]
    casts = [cast for cast in plan.casts if cast.producer not in ("Const", "MatMul/ReadVariableOp")]
    assert sum(cast.to == "float32" for cast in casts) <= 2


@pytest.mark.parametrize("name", one_in(2, LOOK_ALIKES))
def test_other_means_and_roots_follow_the_lists(name):
    plan = plan_of(LOOK_ALIKES[name])
    assert not in_statistics(plan)
    assert {node.dtype for node in plan.nodes if node.op == "Mean"} == {"bfloat16"}


def test_lists_decide_whether_statistics_are_exact():
    lists = OpLists.default("bfloat16")
    rounded = lists.with_changes(exact_statistics=False)
    assert rounded != lists == rounded.with_changes(exact_statistics=True)
    assert lists.with_changes(deny_add=["Tanh"]).exact_statistics
    for without in (rounded, OpLists.grappler("bfloat16")):
        plan = plan_of(by_moments, op_lists=without)
        assert not in_statistics(plan)
        assert {node.dtype for node in plan.nodes if node.op == "Mean"} == {"bfloat16"}
    with pytest.raises(TypeError, match="exact_statistics must be True or False; got 1"):
        OpLists(exact_statistics=1)


def test_what_the_user_forces_is_low():
    plan = plan_of(by_moments, force_low=["moments/mean"])
    dtypes = {node.name: node.dtype for node in plan.nodes}
    assert dtypes["moments/mean"] == "bfloat16"
    assert dtypes["moments/variance"] == "float32"


def test_keeping_what_is_float32_anyway_is_a_warning_with_names_that_could_be_low():
    with pytest.warns(tfamp.TfampWarning, match="'Rsqrt' has no effect: .* are 'matmul', "):
        plan = plan_of(NORMALIZATIONS["rms"], keep_float32=["Rsqrt"])
    dtypes = {node.op: node.dtype for node in plan.nodes}
    assert (dtypes["Rsqrt"], dtypes["MatMul"]) == ("float32", "bfloat16")


def test_an_earlier_use_of_the_data_does_not_hide_a_normalization():
    found = in_statistics(plan_of(lambda x: tf.tanh(x) + by_moments(x)))
    assert {node.dtype for node in found} == {"float32"}
    assert {"Mean", "Rsqrt", "Mul"} <= {node.op for node in found}


def test_normalization_in_a_loop_is_found():
    def loop(x):
        return tf.while_loop(
            lambda i, _: i < 3, lambda i, x: (i + 1, by_moments(x @ WEIGHT)), (0, x)
        )[1]

    plan = plan_of(loop)
    assert {"Mean", "Rsqrt"} <= {node.op for node in in_statistics(plan) if node.scope}


HAND_WRITTEN = ("centred by hand", "moments", "mean of squares", "groups", "rms", "norm")


@pytest.mark.parametrize("name", one_in(2, HAND_WRITTEN))
def test_gradient_between_low_products_is_float32(name):
    def gradient(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            product = NORMALIZATIONS[name](x) @ WEIGHT
        return tape.gradient(product, x)

    plan = plan_of(gradient)
    made = [n for n in plan.nodes if n.name.startswith(("gradient_tape/", "AddN"))]
    assert {node.dtype for node in made if node.op == "MatMul"} == {"bfloat16"}
    # One gradient comes from behind and one goes on: all arithmetic in between is float32.
    arithmetic = {"Mul", "RealDiv", "Neg", "Sub", "AddN", "Square", "SqrtGrad", "RsqrtGrad"}
    found = [node for node in made if node.op in arithmetic]
    assert {node.dtype for node in found} == {"float32"}
    reasons = {node.reason for node in found if node.op in ("Mul", "SqrtGrad", "RsqrtGrad")}
    assert "it is part of the gradient of a normalization" in reasons


@pytest.mark.parametrize("name", first_of(["norm", "moments"]))
def test_gradients_of_blocks_by_hand_do_not_lose_digits(name):
    """With residuals, and data whose mean is far from zero."""

    def gradient(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            h = x @ WEIGHT + 5.0
            for _ in range(2):
                h += tf.nn.relu(NORMALIZATIONS[name](h) @ WEIGHT) @ WEIGHT
            loss = tf.reduce_sum(h * h)
        return tape.gradient(loss, x)

    x = X + 3.0
    wanted = tf.function(gradient)(x)

    def error(lists):
        arguments = {"placement": "lists", "profile": "builtin", "op_lists": lists}
        actual = tfamp.rewrite(gradient, dtype="bfloat16", **arguments)(x)
        return float(tf.norm(actual - wanted) / tf.norm(wanted))

    lists = OpLists.default("bfloat16")
    exact = error(lists)
    assert 0.0 < exact < 4.0 * EPS["bfloat16"]
    # Products round twice as much on CPUs without bfloat16, and take a larger part of the error.
    share = 0.7 if detect().cpu_bfloat16 else 0.95
    assert exact < share * error(lists.with_changes(exact_statistics=False))
