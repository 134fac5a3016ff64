"""Kernels that do not return, simulated: no way to low precision runs one, and others stay low.

oneDNN's bfloat16 kernel of DepthwiseConv2dNative does not return for wide filters, on CPUs on which
TensorFlow takes bfloat16 to it. Where that is another library, it counts as this one here, and the
ops that ran are looked at.
"""

from __future__ import annotations

import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.eager import context
from tensorflow.python.framework import op_callbacks

import tfamp
from helpers.cases import tiers
from helpers.graph_asserts import graph_op_dtypes
from helpers.tolerances import assert_close
from tfamp import kernel_guard
from tfamp.core.profile import builtin_profile
from tfamp.machine import hardware
from tfamp.planning.kernels import Fault, KernelFact, OpCall, fact_about, unusable_kernels

LOW = "bfloat16"
ONEDNN = frozenset([LOW])
RANDOM = np.random.default_rng(0)
OP = "DepthwiseConv2dNative"
L = keras.layers
_KEPT = {"padding": "same", "use_bias": False}
# Layers with the shape of an input.
WIDE = {
    "DepthwiseConv1D(15)": (lambda: L.DepthwiseConv1D(15, **_KEPT), (32, 4)),
    "SeparableConv1D(17)": (lambda: L.SeparableConv1D(4, 17, **_KEPT), (32, 4)),
    "DepthwiseConv2D(15)": (lambda: L.DepthwiseConv2D(15, **_KEPT), (16, 16, 4)),
    "SeparableConv2D(31)": (lambda: L.SeparableConv2D(4, 31, **_KEPT), (32, 32, 4)),
}
NARROW = {
    "DepthwiseConv1D(13)": (lambda: L.DepthwiseConv1D(13, **_KEPT), (32, 4)),
    "DepthwiseConv2D(3)": (lambda: L.DepthwiseConv2D(3, **_KEPT), (16, 16, 4)),
    # A rewrite makes the filter's gradient a convolution whose filter is the image.
    "SeparableConv2D(7)": (lambda: L.SeparableConv2D(4, 7, **_KEPT), (13, 13, 4)),
}
LAYERS = WIDE | NARROW
_QUICK = ("DepthwiseConv1D(15)", "SeparableConv1D(17)", "DepthwiseConv2D(15)", "DepthwiseConv2D(3)")
_NAMES = tiers(_QUICK, [name for name in LAYERS if name not in _QUICK])


@pytest.fixture(autouse=True)
def native_bfloat16(monkeypatch):
    """A CPU with bfloat16 instructions, whose kernels are oneDNN's."""
    for module in (hardware, kernel_guard):
        monkeypatch.setattr(module, "onednn_dtypes", lambda: ONEDNN)
    found = hardware.FoundProfile(builtin_profile("cpu", bfloat16=True), "a test")
    monkeypatch.setattr(hardware, "find_profile", lambda: found)


def model_of(name, policy="float32"):
    make, shape = LAYERS[name]
    keras.utils.set_random_seed(0)
    with tfamp.policy_scope(policy):
        layers = [L.Conv1D, L.Conv2D][len(shape) - 2](4, 1), make(), L.Flatten(), L.Dense(2)
        return keras.Sequential([keras.Input(shape), *layers])


def images_of(name):
    return RANDOM.uniform(0.5, 1.5, (2, *LAYERS[name][1])).astype("float32")


@contextlib.contextmanager
def dtypes_run():
    """The dtypes of the forward convolutions that run, eagerly and in graphs."""
    found = set()

    def see(op, inputs, attrs, outputs, op_name=None, graph=None):
        del attrs, outputs, op_name
        if op in (OP, OP.encode()) and graph is None:
            found.add(inputs[0].dtype.name)

    op_callbacks.add_op_callback(see)
    try:
        with context.collect_graphs(optimized=False) as graphs:
            yield found
    finally:
        op_callbacks.remove_op_callback(see)
    for graph in graphs:
        found |= graph_op_dtypes(graph).get(OP, set())


def gradients_of(model, images):
    weights = [weight.value for weight in model.trainable_variables]
    with tf.GradientTape() as tape:
        tape.watch(weights)
        loss = tf.reduce_mean(tf.cast(model(images, training=True), tf.float32) ** 2)
    return tape.gradient(loss, weights)


# ---- Each way ------------------------------------------------------------------------------------


def by_rewrite(model, images):
    return tfamp.rewrite(lambda x: gradients_of(model, x), dtype=LOW, placement="lists")(images)


def by_autocast(model, images):
    def step(x):
        with tfamp.autocast(LOW):
            return gradients_of(model, x)

    return tf.function(step)(images)


def by_eager_autocast(model, images):
    with tfamp.autocast(LOW):
        return gradients_of(model, images)


def by_o2(model, images):
    prepared, _ = tfamp.prepare(model, "sgd", level="O2", dtype=LOW)
    return tf.function(lambda x: gradients_of(prepared, x))(images)


WAYS = [by_rewrite, by_autocast, by_eager_autocast, by_o2]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", _NAMES)
def test_a_wide_filter_is_float32_and_a_narrow_one_is_low(name, way):
    model, images = model_of(name), images_of(name)
    expected = gradients_of(model, tf.constant(images))
    with dtypes_run() as dtypes:
        found = way(model, tf.constant(images))
    assert dtypes == {"float32" if name in WIDE else LOW}
    assert len(found) == len(expected)
    for each, reference in zip(found, expected, strict=True):
        assert_close(tf.cast(each, tf.float32), reference, LOW, depth=64)


@pytest.mark.parametrize("in_graph", [True, False])
@pytest.mark.parametrize("name", _NAMES)
def test_a_layer_of_a_policy_returns_its_dtype(name, in_graph):
    layer = model_of(name, "mixed_bfloat16").layers[1]
    reference = model_of(name).layers[1]
    images = images_of(name)
    reference.set_weights(layer.get_weights())
    call = tf.function(layer) if in_graph else layer
    with dtypes_run() as dtypes:
        result = call(tf.cast(images, LOW))
    assert result.dtype == LOW
    assert dtypes == {"float32" if name in WIDE else LOW}
    assert_close(tf.cast(result, tf.float32), reference(images), LOW, depth=64)


@pytest.mark.parametrize("level", ["O1", "auto", "O2"])
@pytest.mark.parametrize("name", tiers(["DepthwiseConv1D(15)"], ["SeparableConv2D(31)"]))
def test_models_of_a_level_train(name, level):
    model = model_of(name)
    model.compile(keras.optimizers.SGD(0.01), "mse")
    images, targets = images_of(name), np.ones((2, 2), "float32")
    batch = {"example_batch": (images, targets)} if level == "auto" else {}
    with dtypes_run() as dtypes:
        tfamp.prepare(model, level=level, dtype=LOW, **batch)
        model.fit(images, targets, epochs=2, verbose=0)
    assert dtypes == {"float32"}


def test_the_gradient_of_a_gradient_is_float32_too():
    """The gradient of the low input gradient of a convolution is the convolution."""
    weights, upstream = tf.ones((1, 15, 4, 1), LOW), tf.ones((1, 1, 32, 4), LOW)
    with dtypes_run() as dtypes, tf.GradientTape() as tape, tfamp.autocast(LOW):
        tape.watch(upstream)
        found = tf.nn.depthwise_conv2d_backprop_input(
            (1, 1, 32, 4), weights, upstream, [1] * 4, "SAME"
        )
        gradient = tape.gradient(found, upstream)
    assert (found.dtype, gradient.dtype) == (LOW, LOW)
    assert dtypes == {"float32"}


@pytest.mark.parametrize("in_graph", [True, False])
@pytest.mark.parametrize(
    ("side", "stride", "slow"),
    [(3, 1, ()), (5, 1, ("Filter",)), (3, 2, ("Input",)), (5, 2, ("Filter", "Input"))],
)
def test_slow_gradients_of_depthwise_convolutions_are_float32(side, stride, slow, in_graph):
    prefix = f"{OP}Backprop"
    ran = {}

    def see(op, inputs, attrs, outputs, op_name=None, graph=None):
        del attrs, inputs, op_name, graph
        name = op.decode() if isinstance(op, bytes) else op
        if name.startswith(prefix):
            ran[name.removeprefix(prefix)] = outputs[0].dtype.name

    def gradients(x, f):
        with tf.GradientTape() as tape:
            tape.watch([x, f])
            with tfamp.autocast(LOW):
                y = tf.nn.depthwise_conv2d(x, f, [1, stride, stride, 1], "SAME")
        return tape.gradient(y, [x, f])

    x, f = tf.ones((1, 12, 12, 4)), tf.ones((side, side, 4, 1))
    op_callbacks.add_op_callback(see)
    try:
        found = (tf.function(gradients) if in_graph else gradients)(x, f)
    finally:
        op_callbacks.remove_op_callback(see)
    assert ran == {of: "float32" if of in slow else LOW for of in ("Filter", "Input")}
    with tf.GradientTape() as tape:
        tape.watch([x, f])
        y = tf.nn.depthwise_conv2d(x, f, [1, stride, stride, 1], "SAME")
    for each, expected in zip(found, tape.gradient(y, [x, f]), strict=True):
        np.testing.assert_allclose(each, expected, rtol=1e-2)


def rewritten_in_float16(model, x):
    step = tfamp.rewrite(lambda x: gradients_of(model, x), dtype="float16", placement="lists")
    return step(x)


def autocast_to_float16(model, x):
    def step(x):
        with tfamp.autocast("float16"):
            return gradients_of(model, x)

    return tf.function(step)(x)


class AddedByHand(L.Dense):
    """A Dense layer whose bias is added by AddV2."""

    def call(self, inputs):
        return self.activation(tf.matmul(inputs, self.kernel) + self.bias)


@pytest.mark.parametrize(("op", "layer"), [("BiasAdd", L.Dense), ("AddV2", AddedByHand)])
@pytest.mark.parametrize("way", [rewritten_in_float16, autocast_to_float16])
def test_a_bias_of_a_matrix_is_float32_where_a_float16_product_would_be_joined_with_it(
    op, layer, way, monkeypatch
):
    """As on CPUs with AVX512-FP16, where both together take hundreds of times as long."""
    for module in (hardware, kernel_guard):
        monkeypatch.setattr(module, "onednn_dtypes", lambda: frozenset([LOW, "float16"]))
    model = keras.Sequential([keras.Input((8,)), layer(16, "relu"), layer(4)])
    x = tf.constant(RANDOM.uniform(0.5, 1.5, (32, 8)).astype("float32"))
    expected = gradients_of(model, x)
    with context.collect_graphs(optimized=False) as graphs:
        found = way(model, x)
    dtypes = [graph_op_dtypes(graph) for graph in graphs]
    assert {"float16"} in [each.get("MatMul") for each in dtypes]
    assert {name for each in dtypes for name in each.get(op, ())} == {"float32"}
    for each, reference in zip(found, expected, strict=True):
        assert_close(tf.cast(each, tf.float32), reference, "float16", depth=64)


# ---- Reasons -------------------------------------------------------------------------------------


def planned(filter_shape, **options):
    def convolved(x, w):
        x = tf.nn.depthwise_conv2d(x @ tf.eye(4), w, [1] * 4, "SAME")
        return x @ tf.eye(4)

    specs = tf.TensorSpec((1, 32, 32, 4)), tf.TensorSpec(filter_shape)
    plan = tfamp.rewrite(convolved, dtype=LOW, placement="lists", **options).plan(*specs)
    (node,) = [node for node in plan.nodes if node.op == OP]
    return node


@pytest.mark.parametrize(
    ("shape", "text"),
    [
        ((15, 15, 4, 1), "oneDNN's kernel does not return in bfloat16 for a filter of 15 x 15"),
        ((1, 17, 4, 1), "oneDNN's kernel does not return in bfloat16 for a filter of 1 x 17"),
        (
            (None, 3, 4, 1),
            "oneDNN's kernel does not return in bfloat16 for a filter with a side of 14 or more, "
            "and this one's size is unknown",
        ),
    ],
)
def test_the_plan_says_that_the_kernel_does_not_return(shape, text):
    node = planned(shape)
    assert (node.dtype, node.reason.rule, node.reason.text) == ("float32", "kernel", text)


@pytest.mark.parametrize(("channels", "dtype"), [(1, "float32"), (4, LOW)])
def test_a_convolution_with_a_group_for_each_channel_is_slow_by_eigen(monkeypatch, channels, dtype):
    for module in (hardware, kernel_guard):
        monkeypatch.setattr(module, "onednn_dtypes", frozenset)
    images, filters = tf.ones((1, 8, 8, 32)), tf.ones((3, 3, channels, 32))

    def convolved(x, w):
        return tf.nn.conv2d(x @ tf.eye(32), w, 1, "SAME") @ tf.eye(32)

    rewritten = tfamp.rewrite(convolved, dtype=LOW, placement="lists")
    (node,) = [n for n in rewritten.plan(images, filters).nodes if n.op == "Conv2D"]
    assert node.dtype == dtype
    assert channels > 1 or node.reason.text == (
        "Eigen's kernel can take 30 times as long in bfloat16 as in float32 for as many groups as "
        "channels"
    )


@pytest.mark.parametrize(
    ("side", "channels", "faults"), [(15, 1, Fault.HANGS), (13, 1, None), (15, 4, None)]
)
def test_a_convolution_with_a_group_for_each_channel_hangs_as_a_depthwise_one(
    side, channels, faults
):
    call = OpCall("Conv2D", [(1, 64, 64, 16), (side, side, channels, 16)], (1, 64, 64, 16))
    fact = fact_about(call, LOW, "cpu", ONEDNN)
    assert (fact and fact.fault) == faults


def test_narrow_filters_lists_of_others_and_force_low_are_as_before(monkeypatch):
    assert planned((13, 13, 4, 1)).dtype == LOW
    assert planned((15, 15, 4, 1), force_low=["^depthwise$"]).dtype == LOW
    grapplers = {"op_lists": tfamp.OpLists.grappler(LOW)}
    assert planned((15, 15, 4, 1), **grapplers).reason.rule != "kernel"
    # A decision that forgets the table is found by the check of the rewrite.
    monkeypatch.setattr("tfamp.planning.decision.inexact_nodes", lambda index, options: ())
    with pytest.raises(tfamp.RewriteError, match="it is low: oneDNN's kernel does not return"):
        planned((15, 15, 4, 1))


def test_only_onednns_dtypes_are_concerned_whatever_the_number_of_terms():
    call = OpCall(OP, [(1, 8, 8, 4), (1, 15, 4, 1)], (1, 8, 8, 4))
    assert fact_about(call, LOW, "cpu", ONEDNN).fault == Fault.HANGS
    assert fact_about(call, "float16", "cpu", ONEDNN) is None
    # As on CPUs with AVX512-FP16.
    assert fact_about(call, "float16", "cpu", ONEDNN | {"float16"}).fault == Fault.HANGS
    assert fact_about(call, LOW, "gpu", ONEDNN) is None
    assert unusable_kernels("gpu", ONEDNN) == ()
    texts = unusable_kernels("cpu", ONEDNN)
    assert "DepthwiseConv2dNative in bfloat16 (does not return)" in texts
    assert "DepthwiseConv2dNativeBackpropInput in bfloat16 (20 times)" in texts
    both = unusable_kernels("cpu", ONEDNN | {"float16"})
    assert "DepthwiseConv2dNative in bfloat16 and float16 (does not return)" in both


def test_other_faults_have_texts_of_their_own():
    call = OpCall("Conv2D", [None, (3, 3, 4, 4)])
    texts = {
        Fault.CRASHES: "Eigen's kernel crashes in float16",
        Fault.SLOW: "Eigen's kernel can take 30 times as long in float16 as in float32",
    }
    for fault, text in texts.items():
        row = KernelFact(op="Conv2D", low=frozenset(), fault=fault, factor=30)
        assert row.holds_for(call)
        assert row.text("float16", "Eigen", call) == text
