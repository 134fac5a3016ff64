"""Gradients of rewritten functions by a tape around the call add up in float32.

TensorFlow differentiates the converted graph then, whose ops are low: filters, biases, gathered
rows, in the graph itself and in the bodies of loops and branches.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp
from helpers.cases import first_of
from helpers.graph_asserts import assert_computes_in

ROWS = 8192
# Half the distance of 1 to the next number: how far one rounding may take a value.
EPS = {"bfloat16": 2.0**-8, "float16": 2.0**-11}
DRAW = np.random.default_rng(0)
# Gradients of a mean are subnormal numbers of float16: a loss is scaled there.
SCALE = 256.0


def positive(*shape):
    return tf.constant(DRAW.uniform(0.5, 1.5, shape).astype("float32"))


IMAGES, ROW, WIDE = (8, 32, 32, 4), (8, 1024, 4), (ROWS, 8)
FILTER, POINT, LINE = (tf.Variable(positive(*s)) for s in ((3, 3, 4, 1), (1, 1, 4, 4), (3, 4, 4)))
MATRIX, BIAS = tf.Variable(positive(8, 8) / 4), tf.Variable(positive(8))


def separable(x):
    return tf.nn.separable_conv2d(x, FILTER, POINT, [1, 1, 1, 1], "SAME")


def pooled(x):
    return tf.nn.avg_pool2d(tf.nn.conv2d(x, POINT, 1, "SAME"), 2, 2, "SAME")


def in_a_branch(x):
    return tf.cond(tf.reduce_sum(x) > 0, lambda: tf.nn.bias_add(x @ MATRIX, BIAS), lambda: x)


def in_a_loop(x):
    def body(i, h):
        return i + 1, tf.tanh(tf.nn.bias_add(h @ MATRIX * 0.01, BIAS))

    return tf.while_loop(lambda i, h: i < 3, body, (0, x))[1]


FUNCTIONS = {
    "bias": (lambda x: tf.nn.bias_add(x @ MATRIX, BIAS) @ MATRIX, [BIAS, MATRIX], WIDE),
    "gathered rows": (
        lambda x: tf.gather(x @ MATRIX, tf.zeros(4096, tf.int32)),
        [MATRIX],
        (8, 8),
    ),
    "separable convolution": (separable, [FILTER, POINT], IMAGES),
    "convolution of one pixel": (lambda x: tf.nn.conv2d(x, POINT, 1, "SAME"), [POINT], IMAGES),
    "convolution of a row": (lambda x: tf.nn.conv1d(x, LINE, 1, "SAME"), [LINE], ROW),
    "pool": (pooled, [POINT], IMAGES),
    "branch": (lambda x: in_a_branch(x) @ MATRIX, [BIAS, MATRIX], WIDE),
    "loop": (in_a_loop, [BIAS, MATRIX], WIDE),
}


def gradients(function, variables, x, scale=1.0):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(function(x)) * scale
    return [gradient / scale for gradient in tape.gradient(loss, variables)]


def errors(found, expected):
    return [
        np.linalg.norm(each - np.asarray(exact)) / np.linalg.norm(exact)
        for each, exact in zip(found, expected, strict=True)
    ]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("placement", first_of(["lists", "min_cut", "fused"]))
@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradients_are_those_of_float32(name, placement, dtype):
    function, variables, shape = FUNCTIONS[name]
    x = positive(*shape)
    fast = tfamp.rewrite(function, dtype=dtype, placement=placement, profile="builtin")
    if placement == "lists":
        assert_computes_in(dtype, fast, x)
    expected = gradients(tf.function(function), variables, x)
    found = gradients(fast, variables, x, SCALE)
    assert max(errors(found, expected)) < 4 * EPS[dtype]


def test_a_model_is_differentiated_from_outside_as_the_guide_shows():
    with tfamp.policy_scope("float32"):
        model = keras.Sequential(
            [
                keras.Input((16,)),
                keras.layers.Dense(16, "relu", kernel_initializer="ones"),
                keras.layers.Dense(4, kernel_initializer="ones"),
            ]
        )
    x, variables = positive(ROWS, 16), [v.value for v in model.trainable_variables]
    fast = tfamp.rewrite(model, dtype="bfloat16", placement="lists")
    assert_computes_in("bfloat16", fast, x)
    expected = gradients(model, variables, x)
    assert max(errors(gradients(fast, variables, x), expected)) < 4 * EPS["bfloat16"]


def test_rows_of_a_table_stay_slices():
    table = tf.Variable(positive(64, 8))

    def look_up(x):
        return tf.gather(table, x) @ MATRIX

    ids = tf.constant([3, 5, 3])
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tfamp.rewrite(look_up, dtype="bfloat16")(ids))
    gradient = tape.gradient(loss, table)
    assert isinstance(gradient, tf.IndexedSlices)
    assert gradient.values.shape == (3, 8)


def test_second_derivatives_from_outside():
    x = positive(ROWS, 8)
    fast = tfamp.rewrite(
        lambda x: tf.nn.bias_add(x @ MATRIX, BIAS) ** 3, dtype="bfloat16", placement="lists"
    )

    def curvature(function):
        with tf.GradientTape() as outer:
            with tf.GradientTape() as inner:
                loss = tf.reduce_mean(function(x))
            first = tf.reduce_sum(inner.gradient(loss, BIAS))
        return outer.gradient(first, BIAS)

    expected = curvature(lambda x: tf.nn.bias_add(x @ MATRIX, BIAS) ** 3)
    assert max(errors([curvature(fast)], [expected])) < 4 * EPS["bfloat16"]
