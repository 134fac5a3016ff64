"""autocast around Keras: layers, losses, metrics, optimizers and `fit`."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp
from helpers.cases import first_of, one_of_each, tiers
from helpers.graph_asserts import assert_computes_in, op_dtypes
from helpers.tolerances import assert_close

KERAS_VERSION = tuple(int(part) for part in keras.__version__.split(".")[:2])
DTYPES = ("float16", "bfloat16")
DTYPES = ("bfloat16", "float16")
both_dtypes = pytest.mark.parametrize("dtype", first_of(DTYPES, pytest.mark.nightly))


def values(*shape):
    return tf.constant(np.random.default_rng(0).uniform(-1, 1, shape), tf.float32)


IMAGE, SEQUENCE, ROW = (2, 8, 8, 3), (2, 5, 8), (4, 8)
COMPUTING = {
    "Conv2D": (lambda: keras.layers.Conv2D(4, 3), IMAGE),
    "Conv2DTranspose": (lambda: keras.layers.Conv2DTranspose(4, 3), IMAGE),
    "DepthwiseConv2D": (lambda: keras.layers.DepthwiseConv2D(3), IMAGE),
    "MultiHeadAttention": (lambda: self_attention(), SEQUENCE),
}
OTHERS = {
    "BatchNormalization": (keras.layers.BatchNormalization, IMAGE, "float32"),
    "GroupNormalization": (
        lambda: keras.layers.GroupNormalization(2),
        ROW,
        "float32" if KERAS_VERSION >= (3, 15) else "low",  # casts its result from 3.15 on
    ),
    "Softmax": (keras.layers.Softmax, ROW, "float32"),
    "ReLU": (keras.layers.ReLU, ROW, "low"),
    "GlobalAveragePooling2D": (keras.layers.GlobalAveragePooling2D, IMAGE, "float32"),
}


def self_attention():
    x = keras.Input(SEQUENCE[1:])
    return keras.Model(x, keras.layers.MultiHeadAttention(2, 4)(x, x, use_causal_mask=True))


@pytest.mark.usefixtures("exact_kernels")
@both_dtypes
@pytest.mark.parametrize(
    "name",
    tiers(
        ["DepthwiseConv2D", "MultiHeadAttention"],
        [each for each in COMPUTING if each not in ("DepthwiseConv2D", "MultiHeadAttention")],
    ),
)
def test_layers_compute_low_and_stay_close_to_float32(name, dtype):
    make, shape = COMPUTING[name]
    layer, x = make(), values(*shape)
    expected = layer(x)
    with tfamp.autocast(dtype):
        found = layer(x)

    @tf.function
    def traced(x):
        with tfamp.autocast(dtype):
            return layer(x)

    assert found.dtype == tf.as_dtype(dtype)
    assert {v.dtype for v in layer.variables if "seed" not in v.path} == {"float32"}
    for result in (found, traced(x)):
        assert_close(result, expected, dtype, depth=64)
    if name == "Conv2DTranspose":  # no op that the helper counts
        assert op_dtypes(traced, x)["Conv2DBackpropInput"] == {dtype}
    else:
        assert_computes_in(dtype, traced, x)
    assert layer(x).dtype == tf.float32


@both_dtypes
@pytest.mark.parametrize("name", OTHERS)
def test_other_layers_return_what_their_ops_do(name, dtype):
    make, shape, expected = OTHERS[name]
    layer, x = make(), values(*shape)
    plain = layer(x)
    with tfamp.autocast(dtype):
        found = layer(tf.constant(tf.cast(x, dtype).numpy()))
    assert found.dtype.name == (dtype if expected == "low" else expected)
    assert_close(found, plain, dtype, depth=16)


@both_dtypes
def test_batch_normalization_keeps_float32_statistics(dtype):
    layer, reference = keras.layers.BatchNormalization(), keras.layers.BatchNormalization()
    low = tf.constant(tf.cast(values(64, 8) * 100.0, dtype).numpy())
    reference(tf.cast(low, tf.float32), training=True)
    with tfamp.autocast(dtype):
        layer(low, training=True)
    for found, expected in zip(layer.variables, reference.variables, strict=True):
        assert found.dtype == "float32"
        np.testing.assert_allclose(found.numpy(), expected.numpy(), rtol=1e-4, atol=1e-4)


def test_a_layer_built_inside_has_float32_variables_and_its_own_policy():
    with tfamp.autocast("bfloat16"):
        model = keras.Sequential([keras.layers.Embedding(10, 8), keras.layers.Dense(2)])
        assert model(tf.constant([[1, 2], [3, 4]])).dtype == tf.bfloat16
    assert {v.dtype for v in model.variables} == {"float32"}
    assert model.layers[1].dtype_policy.name == "float32"


def test_a_layer_with_a_mixed_policy_of_its_own_keeps_it():
    layer = keras.layers.Dense(3, dtype="mixed_float16")
    with tfamp.autocast("bfloat16"):
        # A bfloat16 product, and a float16 bias: both fit into float32.
        assert layer(values(*ROW)).dtype == tf.float32
        assert layer.kernel.dtype == "float32"
    with tfamp.autocast("float16"):
        assert layer(values(*ROW)).dtype == tf.float16
    assert layer(values(*ROW)).dtype == tf.float16


class Watched(keras.layers.Dense):
    """Notes the dtypes in which it reads its kernel, and adds its bias."""

    seen = {}

    def call(self, x):
        read, result = tf.convert_to_tensor(self.kernel), super().call(x)
        assert read.dtype == self.kernel.dtype
        self.seen[self.name] = self.kernel.dtype, result.dtype.name
        return result


def test_a_float32_layer_inside_a_layer_with_a_mixed_policy_stays_float32():
    class Outer(keras.layers.Layer):
        def __init__(self):
            super().__init__(dtype="mixed_float16")
            self.inner = Watched(3, dtype="float32", name="inner")
            self.inner.build((None, 8))

        def call(self, x):
            outside = self.inner.kernel.dtype
            y = self.inner(x)
            seen.append((outside, *Watched.seen["inner"]))
            return y

    seen, outer = [], Outer()
    for layer in (outer, keras.Sequential([outer])):
        with tfamp.autocast("bfloat16"):
            layer(values(*ROW))
    assert set(seen) == {("float16", "float32", "float32")}


@both_dtypes
def test_layers_in_layers_read_float32_and_compute_low_unless_they_do_not_autocast(dtype):
    def seen(**options):
        inner = Watched(3, name="inner")
        inner.build((None, 3))
        model = keras.Sequential([Watched(3, name="outer", **options), inner])
        x = tf.cast(values(*ROW), options.get("dtype", "float32"))
        with tfamp.autocast(dtype):
            model(x)
        return Watched.seen["outer"], Watched.seen["inner"]

    low, exact = ("float32", dtype), ("float32", "float32")
    assert seen() == (low, low)
    assert seen(autocast=False) == (exact, low)
    assert seen(dtype="float64") == (("float64", "float64"), low)


# ---- Optimizers and fit --------------------------------------------------------------------------


OPTIMIZERS = {
    "SGD": lambda: keras.optimizers.SGD(0.1, momentum=0.9, global_clipnorm=1.0),
    "Adam": lambda: keras.optimizers.Adam(0.1, clipnorm=1.0),
    "Adafactor": lambda: keras.optimizers.Adafactor(0.1),
    "Lion": lambda: keras.optimizers.Lion(0.1, use_ema=True),
    "LossScaleOptimizer": lambda: tfamp.LossScaleOptimizer(keras.optimizers.Adam(0.1)),
}
if KERAS_VERSION >= (3, 13):  # Keras 3.12 has a Muon, which fails on TensorFlow by itself.
    OPTIMIZERS["Muon"] = lambda: keras.optimizers.Muon(0.1)


@both_dtypes
@pytest.mark.parametrize(
    ("name", "run"), one_of_each(OPTIMIZERS, [lambda f: f, tf.function], quick=2)
)
def test_an_optimizer_inside_updates_exactly_as_without_autocast(name, run, dtype):
    def after_three_steps(context):
        v = keras.Variable(values(4, 4).numpy(), name="kernel")
        optimizer = OPTIMIZERS[name]()
        optimizer.build([v])
        gradient = values(4, 4)[::-1]

        @run
        def step(gradient):
            optimizer.apply_gradients([(gradient, v)])

        with context:
            for _ in range(3):
                step(gradient)
        return {w.name: w.numpy() for w in [v, *optimizer.variables]}

    expected = after_three_steps(tfamp.autocast(dtype, enabled=False))
    found = after_three_steps(tfamp.autocast(dtype))
    assert expected.keys() == found.keys()
    for name_, value in expected.items():
        np.testing.assert_array_equal(found[name_], value, name_)


@both_dtypes
@pytest.mark.parametrize(("eager", "scaled"), one_of_each([True, False], [True, False], quick=1))
def test_fit_evaluate_and_predict_inside(dtype, eager, scaled):
    model = keras.Sequential([keras.layers.Dense(16, "relu"), keras.layers.Dense(1)])
    optimizer = keras.optimizers.Adam(0.01)
    optimizer = tfamp.LossScaleOptimizer(optimizer) if scaled else optimizer
    model.compile(optimizer, "mse", metrics=["mae"], run_eagerly=eager)
    x = values(64, 8).numpy()
    y = x.sum(1, keepdims=True)
    before = model.evaluate(x, y, verbose=0)
    with tfamp.autocast(dtype):
        model.fit(x, y, epochs=4, batch_size=16, verbose=0)
        inside = model.evaluate(x, y, verbose=0)
        predicted = model.predict(x, verbose=0)
    after = model.evaluate(x, y, verbose=0)
    assert after[0] < 0.7 * before[0]
    np.testing.assert_allclose(inside, after, rtol=0.05)
    assert predicted.dtype == np.dtype(tf.as_dtype(dtype).as_numpy_dtype)
    assert model.predict(x, verbose=0).dtype == np.float32
    assert {v.dtype for v in model.variables} == {"float32"}
