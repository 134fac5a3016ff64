"""Models of every kind, rewritten: their forward pass and 20 whole train steps match float32.

What the rewrite decides about a graph is tested in tests/graph and tests/planning; here it is
what a user gets. The models are Keras's own in float32, so that every low-precision op comes from
the rewrite.
"""

import functools
import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp
from helpers import model_zoo
from helpers.cases import first_of, one_in, one_of_each
from helpers.graph_asserts import op_dtypes
from helpers.tolerances import assert_close
from tfamp.interop import tf_private
from tfamp.machine import hardware
from tfamp.planning.kernels import facts_of

DTYPES = ["float16", "bfloat16"]
STEPS = 20
# A matmul adds up about as many products as this, and its rounding errors like the root of it.
DEPTH = 64


def assert_converted(function, ops, dtype):
    """Matmuls and convolutions are low, their gradients and those in loop bodies included.

    Those that the table of kernels has as inexact for the library that runs may stay float32.
    """
    library = tf_private.default_device_kind(), hardware.onednn_dtypes()
    found = {
        op: dtypes
        for op, dtypes in op_dtypes(function).items()
        if "Conv" in op or "MatMul" in op or op == "Einsum"
    }
    assert ops <= found.keys()
    inexact = {op for op in found if facts_of(op, dtype, *library)}
    assert set().union(*(found[op] for op in found.keys() - inexact)) == {dtype}, found
    assert dtype in found.get("Conv2D", {dtype}), found  # Only those of many groups have a row.
    assert set().union(*found.values()) <= {dtype, "float32"}, found


@pytest.mark.parametrize(("kind", "dtype"), one_of_each(model_zoo.KINDS, DTYPES, quick=4))
def test_the_forward_pass_is_converted_and_matches_float32(kind, dtype):
    model = model_zoo.build(kind)
    ((x, _),) = model_zoo.digits(kind, 1)
    fast = tfamp.rewrite(model, dtype=dtype)
    assert_converted(fast.concrete(x), model_zoo.KINDS[kind].ops, dtype)

    actual = fast(x)
    assert actual.dtype == tf.float32
    assert_close(actual, model(x), dtype, depth=DEPTH)


def make_step(kind, dtype):
    """A whole train step of a new model, as a user writes it, and its optimizer."""
    model = model_zoo.build(kind)
    optimizer = keras.optimizers.SGD(model_zoo.KINDS[kind].learning_rate, momentum=0.9)
    if dtype == "float16":
        optimizer = tfamp.LossScaleOptimizer(optimizer)
    optimizer.build(model.trainable_variables)
    loss_function = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def step(x, y):
        with tf.GradientTape() as tape:
            loss = loss_function(y, model(x, training=True))
            scaled = optimizer.scale_loss(loss)
        gradients = tape.gradient(scaled, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    return step, model, optimizer


@functools.cache
def float32_training(kind):
    """Losses and final moving statistics of 20 steps in float32."""
    step, model, _ = make_step(kind, "float32")
    step = tf.function(step)
    losses = [float(step(x, y)) for x, y in model_zoo.digits(kind, STEPS)]
    return losses, [variable.numpy() for variable in model.non_trainable_variables]


@pytest.mark.parametrize("kind", first_of(model_zoo.KINDS))
@pytest.mark.parametrize("dtype", first_of(DTYPES, pytest.mark.nightly))
def test_twenty_train_steps_are_converted_and_match_float32(kind, dtype):
    batches = model_zoo.digits(kind, STEPS)
    step, model, optimizer = make_step(kind, dtype)
    fast = tfamp.rewrite(step, dtype=dtype)
    assert_converted(fast.concrete(*batches[0]), model_zoo.KINDS[kind].ops, dtype)

    losses = [float(fast(x, y)) for x, y in batches]
    expected, statistics = float32_training(kind)
    assert np.mean(expected[-5:]) < np.mean(expected[:5])  # It does learn.
    # The errors of the steps add up like those of a sum of as many terms.
    assert_close(losses, expected, dtype, depth=STEPS)
    assert {variable.dtype for variable in model.variables} <= {"float32", "int64", "uint32"}
    for variable, value in zip(model.non_trainable_variables, statistics, strict=True):
        if variable.dtype == "float32":
            assert_close(variable.numpy(), value, dtype, depth=DEPTH)
    if dtype == "float16":
        assert int(optimizer.skipped_steps) == 0
        assert int(optimizer.iterations) == STEPS


def as_floats(product):
    return lambda a, b: product(tf.cast(a, tf.float32), tf.cast(b, tf.float32))


PRODUCTS = {
    "Einsum": as_floats(lambda a, b: tf.cast(tf.einsum("ab,bc->ac", a, b), tf.int32)),
    # The float32 values are scaled as they are, in another shape.
    "MatMul": as_floats(lambda a, b: tf.reshape(tf.matmul(tf.identity(a), b), [4, 8])),
    "BatchMatMulV3": lambda a, b: tf.matmul(a, b, output_type=tf.int32),
}


@pytest.mark.parametrize(
    ("product", "placement", "dtype"),
    one_in(5, itertools.product(PRODUCTS, ["lists", "min_cut"], DTYPES)),
)
def test_sums_of_products_of_integers_stay_float32(product, placement, dtype):
    # As in a layer that Keras has quantized to int8, between two that are not: the sums reach
    # 127 * 127 * 32, beyond float16's range and bfloat16's digits.
    kernel = tf.constant(127, tf.int8, (32, 8))
    weights = tf.ones((32, 32)) / 32, tf.ones((8, 8)) / 8

    def quantized(x):
        x = x @ weights[0]
        scale = 127.0 / tf.reduce_max(tf.abs(x))
        sums = PRODUCTS[product](tf.cast(tf.round(x * scale), tf.int8), kernel)
        return (tf.cast(sums, tf.float32) / (scale * 127.0)) @ weights[1]

    x = tf.ones((4, 32))
    fast = tfamp.rewrite(quantized, dtype=dtype, placement=placement, force_low=["^matmul$"])
    reasons = {node.op: node.reason for node in fast.plan(x).nodes if node.dtype == "float32"}
    assert reasons["RealDiv"].rule == "behind deny"
    if product != "BatchMatMulV3":  # It holds no float.
        # The kernel of a CPU may add up low as well, and a Cast to integers takes one of them.
        assert reasons[product].rule in ("integers", "sum", "angle")
    assert_close(fast(x), quantized(x), dtype, depth=DEPTH)
