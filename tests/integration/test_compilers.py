"""Float16 values after Grappler and XLA, by each way to convert a program.

Each program is the identity as a product, an expression, and a product again. Every op of it by
itself is in float16's range; joined with its neighbours, it is not.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp
from helpers.cases import one_in
from helpers.graph_asserts import op_dtypes
from helpers.tolerances import assert_close

SIZE = 4


def _image(h):
    return tf.reshape(h, (1, SIZE, SIZE, 1))


def _convolved(h):
    return tf.nn.conv2d(h, tf.constant([[[[1e-3]]]], h.dtype), 1, "SAME")


def _convolved_3d(h):
    return tf.nn.conv3d(h[None], tf.constant([[[[[1e-3]]]]], h.dtype), [1] * 5, "SAME")


# Name -> expression of three results of products, and their values.
EXPRESSIONS = {
    "h / 3000 / 3000": (lambda h, n, m: h / 3000 / 3000, (3e4, 1, 1)),
    "h / 16 / 64 / 3000": (lambda h, n, m: h / 16 / 64 / 3000, (3e4, 1, 1)),
    "h * 300 * 300": (lambda h, n, m: h * 300 * 300, (2e-3, 1, 1)),
    "(h / 16384) * (h / 4096)": (lambda h, n, m: (h / 16384) * (h / 4096), (16384, 1, 1)),
    "sqrt(h * 300 * 300)": (lambda h, n, m: tf.sqrt(h * 300 * 300), (2e-3, 1, 1)),
    "log(h * 300 * 300)": (lambda h, n, m: tf.math.log(h * 300 * 300), (2e-3, 1, 1)),
    "-(h * 400) * 400": (lambda h, n, m: -(h * 400) * 400, (1e-3, 1, 1)),
    "(-h * 400) * 400": (lambda h, n, m: (-h * 400) * 400, (1e-3, 1, 1)),
    "six factors": (lambda h, n, m: h * 10 * 10 * 10 * 10 * 10 * 10, (2e-3, 1, 1)),
    "reshape": (lambda h, n, m: tf.reshape(h * 300, (2, -1)) * 300, (2e-3, 1, 1)),
    "transpose": (lambda h, n, m: tf.transpose(h * 300) * 300, (2e-3, 1, 1)),
    "broadcast": (lambda h, n, m: tf.broadcast_to(h * 300, (2, 4, 4)) * 300, (2e-3, 1, 1)),
    "tile": (lambda h, n, m: tf.tile(h * 300, (2, 1)) * 300, (2e-3, 1, 1)),
    "unstack, stack": (lambda h, n, m: tf.stack(tf.unstack(h * 300)) * 300, (2e-3, 1, 1)),
    "stop_gradient": (lambda h, n, m: tf.stop_gradient(h * 300) * 300, (2e-3, 1, 1)),
    "multiply_no_nan": (
        lambda h, n, m: tf.math.multiply_no_nan(tf.math.multiply_no_nan(h, 300.0), 300.0),
        (2e-3, 1, 1),
    ),
    "h + 4e4 + 4e4": (lambda h, n, m: h + 4e4 + 4e4, (-3e4, 1, 1)),
    "h + 1000 + 0.3": (lambda h, n, m: h + 1000 + 0.3, (-1000, 1, 1)),
    "bias": (
        lambda h, n, m: tf.nn.bias_add(h + 4e4, tf.fill([SIZE], tf.cast(4e4, h.dtype))),
        (-3e4, 1, 1),
    ),
    "h / n / m": (lambda h, n, m: h / n / m, (3e4, 1e3, 1e3)),
    "n / (h / m)": (lambda h, n, m: n / (h / m), (3e4, 3e4, 3e4)),
    "1e4 / (h / m)": (lambda h, n, m: 1e4 / (h / m), (3e4, 3e4, 3e4)),
    "(h / n) / (m / n)": (lambda h, n, m: (h / n) / (m / n), (3e4, 3e4, 3e4)),
    "(h / 100) * (n / 100)": (lambda h, n, m: (h / 100) * (n / 100), (1e4, 1e4, 1)),
    "(h * n) * 100": (lambda h, n, m: (h * n) * 100, (1e4, 1e-3, 1)),
    "(n * h) / 1e4": (lambda h, n, m: (n * h) / 1e4, (1e-3, 1e4, 1)),
    "scale, filter": (lambda h, n, m: _convolved(_image(h) * 1e-4), (3e4, 1, 1)),
    "scale, transpose, filter": (
        lambda h, n, m: _convolved(tf.transpose(_image(h) * 1e-4, (0, 2, 1, 3))),
        (3e4, 1, 1),
    ),
    "filter, scale": (lambda h, n, m: _convolved(_image(h)) / 1e4, (3e4, 1, 1)),
    "filter, zero bias, scale": (
        lambda h, n, m: tf.nn.bias_add(_convolved(_image(h)), tf.zeros(1, h.dtype)) * 1e-4,
        (3e4, 1, 1),
    ),
    "scale, filter in 3 dimensions": (
        lambda h, n, m: _convolved_3d(_image(h) * 1e-4),
        (3e4, 1, 1),
    ),
}


def _program(name: str, weight) -> Callable:
    expression, _ = EXPRESSIONS[name]

    def program(h, n, m):
        result = expression(h @ weight, n @ weight, m @ weight)
        return tf.reshape(result, (-1, SIZE)) @ weight

    return program


def _arguments(name: str) -> list[tf.Tensor]:
    return [tf.fill((SIZE, SIZE), tf.constant(value, "float32")) for value in EXPRESSIONS[name][1]]


def _rewritten(name: str, jit_compile: bool, placement: str = "lists"):
    step = tf.function(_program(name, tf.Variable(tf.eye(SIZE))), jit_compile=jit_compile)
    # A cut finds that a CPU gains nothing in float16.
    forced = ["matmul"] if placement == "fused" else []
    fast = tfamp.rewrite(step, dtype="float16", placement=placement, force_low=forced)
    products = [node for node in fast.plan(*_arguments(name)).nodes if node.op == "MatMul"]
    assert {node.dtype for node in products[:3]} == {"float16"}
    return fast(*_arguments(name))


def _under_autocast(name: str, jit_compile: bool):
    program = _program(name, tf.Variable(tf.eye(SIZE)))

    @tf.function(jit_compile=jit_compile)
    def step(h, n, m):
        with tfamp.autocast("float16"):
            return program(h, n, m)

    assert "float16" in op_dtypes(step, *_arguments(name))["MatMul"]
    return step(*_arguments(name))


class _Layer(keras.layers.Layer):
    def __init__(self, name_of_expression):
        super().__init__()
        self.expression = name_of_expression

    def build(self, *shapes):
        self.weight = self.add_weight(shape=(SIZE, SIZE), initializer="identity")

    def call(self, h, n, m):
        return _program(self.expression, tf.convert_to_tensor(self.weight))(h, n, m)

    def compute_output_spec(self, h, n, m):
        return keras.KerasTensor((None, SIZE), self.compute_dtype)


def _model(name: str) -> keras.Model:
    inputs = [keras.Input((SIZE,)) for _ in range(3)]
    hidden = _Layer(name)(*inputs)
    return keras.Model(inputs, keras.layers.Activation("linear")(hidden))


def _under_the_policy(name: str, jit_compile: bool):
    with tfamp.policy_scope("mixed_float16"):
        model = _model(name)
    step = tf.function(lambda *args: model(list(args)), jit_compile=jit_compile)
    assert "float16" in op_dtypes(step, *_arguments(name))["MatMul"]
    return step(*_arguments(name))


def _predicted_at(level: str):
    def predicted(name: str, jit_compile: bool):
        model, _ = tfamp.prepare(_model(name), level=level, dtype="float16")
        model.compile(jit_compile=jit_compile)
        return model.predict([argument.numpy() for argument in _arguments(name)], verbose=0)

    return predicted


def _frozen(name: str, jit_compile: bool):
    module = tf.Module()
    module.weight = tf.Variable(tf.eye(SIZE))
    specs = [tf.TensorSpec((SIZE, SIZE), name=argument) for argument in "hnm"]
    module.call = tf.function(_program(name, module.weight), input_signature=specs)
    folder = tempfile.mkdtemp()
    tf.saved_model.save(module, f"{folder}/float32", signatures=module.call)
    plan = tfamp.rewrite_saved_model(
        f"{folder}/float32", f"{folder}/low", dtype="float16", freeze=True, placement="lists"
    )
    assert any(node.op == "MatMul" and node.dtype == "float16" for node in plan.nodes)
    serve = tf.saved_model.load(f"{folder}/low").signatures["serving_default"]
    arguments = dict(zip("hnm", _arguments(name), strict=True))
    run = tf.function(lambda: serve(**arguments), jit_compile=jit_compile)
    (result,) = run().values()
    return result


WAYS = {
    "rewrite": _rewritten,
    "fused": functools.partial(_rewritten, placement="fused"),
    "autocast": _under_autocast,
    "policy": _under_the_policy,
    "frozen": _frozen,
    "O1": _predicted_at("O1"),
    "O2": _predicted_at("O2"),
}


@pytest.mark.parametrize("jit_compile", [False, True], ids=["Grappler", "XLA"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", one_in(8, EXPRESSIONS))
def test_compilers_keep_values_in_range(name, way, jit_compile):
    expected = tf.reshape(EXPRESSIONS[name][0](*_arguments(name)), (-1, SIZE))

    actual = WAYS[way](name, jit_compile)

    # Four roundings of float16: the two products, and two ops between.
    assert_close(np.reshape(actual, (-1, SIZE)), expected, "float16")


def test_values_beyond_float16_between_two_scales_are_right_in_a_rewrite():
    weight = tf.Variable(tf.eye(SIZE))
    fast = tfamp.rewrite(
        tf.function(lambda x: (x @ weight) * 300 * 300 / 3000 @ weight),
        dtype="float16",
        placement="lists",
    )

    # 9e4 between.
    assert_close(fast(tf.fill((SIZE, SIZE), 1.0)), np.full((SIZE, SIZE), 30.0), "float16")


@pytest.mark.parametrize("jit_compile", [False, True], ids=["Grappler", "XLA"])
@pytest.mark.parametrize("scale", [300.0, 1 / 300])
def test_gradients_of_two_scales_are_right(scale, jit_compile):
    weight = tf.Variable(tf.eye(SIZE))

    @tf.function(jit_compile=jit_compile)
    def step(x):
        with tf.GradientTape() as tape:
            hidden = x @ weight
            loss = tf.reduce_sum((hidden * scale * scale) @ weight) * 1e-3 / scale
        return tape.gradient(loss, weight)

    x = tf.fill((SIZE, SIZE), 1.0 / SIZE)
    expected = step(x)
    fast = tfamp.rewrite(step, dtype="float16", placement="lists")

    assert any(node.op == "MatMul" and node.dtype == "float16" for node in fast.plan(x).nodes)
    assert_close(fast(x), expected, "float16")


def test_the_plan_says_why():
    def step(x, weight):
        return tf.matmul((x @ weight) / 3000 / 3000, weight)

    plan = tfamp.rewrite(step, dtype="float16", placement="lists").plan(tf.eye(4), tf.eye(4))

    divided = [node for node in plan.nodes if node.op == "RealDiv"]
    assert {node.dtype for node in divided} == {"float32"}
    assert all("compilers would join" in node.reason for node in divided)


@pytest.mark.parametrize(
    "activation",
    [
        lambda x: 0.5 * x * (1 + tf.tanh(0.8 * (x + 0.04 * x))),  # GELU's outer part
        lambda x: x * tf.nn.relu6(x + 3) / 6,  # hard swish
        lambda x: tf.nn.dropout(x, 0.1),
        lambda x: x / 32,
    ],
    ids=["gelu", "hard swish", "dropout", "one scale"],
)
def test_usual_scales_stay_low(activation):
    def step(x, weight):
        return tf.matmul(activation(x @ weight), weight)

    plan = tfamp.rewrite(step, dtype="float16", placement="lists").plan(tf.eye(4), tf.eye(4))

    assert not any("compilers" in node.reason for node in plan.nodes)
    assert {node.dtype for node in plan.nodes if node.op in ("Mul", "RealDiv")} == {"float16"}


def test_a_scale_beside_a_product_is_low_in_bfloat16():
    def step(x, weight):
        return tf.matmul((x @ weight) / 3000 / 3000, weight)

    plan = tfamp.rewrite(step, dtype="bfloat16", placement="lists").plan(tf.eye(4), tf.eye(4))

    assert {node.dtype for node in plan.nodes if node.op == "RealDiv"} == {"bfloat16"}


@pytest.mark.parametrize("jit_compile", [False, True], ids=["Grappler", "XLA"])
@pytest.mark.parametrize("way", ["rewrite", "autocast", "policy"])
def test_the_gradient_of_a_divisor_is_right(way, jit_compile):
    """It is -h / n / n, for which XLA divides by n * n."""
    weight = tf.Variable(tf.eye(SIZE))
    h, n = tf.fill((SIZE, SIZE), 3e4), tf.fill((SIZE, SIZE), 1e3)
    with tfamp.policy_scope("mixed_float16" if way == "policy" else "float32"):
        layer = keras.layers.Lambda(lambda both: both[0] / both[1])

    def quotient(h, n):
        with tfamp.autocast("float16", enabled=way == "autocast"):
            if way == "policy":
                h, n = tf.cast(h, tf.float16), tf.cast(n, tf.float16)
                return layer([h, n])
            return (h @ weight) / (n @ weight) @ weight

    def step(h, n):
        with tf.GradientTape() as tape:
            tape.watch(n)
            total = tf.reduce_sum(tf.cast(quotient(h, n), tf.float32))
        return tape.gradient(total, n)

    compiled = tf.function(step, jit_compile=jit_compile)
    if way == "rewrite":
        compiled = tfamp.rewrite(compiled, dtype="float16", placement="lists")

    assert_close(compiled(h, n), np.full((SIZE, SIZE), -0.03), "float16")
