"""Layers that Keras has quantized: they stay so at every level, by hand and in comparisons."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfamp
from helpers.cases import first_of, tiers
from tfamp.core.dtypes import float_format

X = np.random.default_rng(0).normal(size=(4, 6, 32)).astype("float32")
# int8 inputs have steps of 1/127 of the largest, and one that is rounded may go to the next.
MOST = 16 / 127


def mlp():
    keras.utils.set_random_seed(1)
    dense = [layers.Dense(32, "relu", name="a"), layers.Dense(32, "relu", name="b")]
    return keras.Sequential([keras.Input((6, 32)), *dense, layers.Dense(4, name="c")])


def attention():
    keras.utils.set_random_seed(1)
    inputs = keras.Input((None, 32))
    x = layers.MultiHeadAttention(2, 16, name="attention")(inputs, inputs)
    x = layers.LayerNormalization()(x + inputs)
    x = layers.EinsumDense("abc,cd->abd", (None, 16), name="e")(x)
    return keras.Model(inputs, layers.Dense(4, name="c")(x))


class Embedded(keras.Model):
    def __init__(self):
        super().__init__()
        self.table = layers.ReversibleEmbedding(64, 16)
        self.hidden = layers.Dense(16, "relu")

    def call(self, x):
        ids = keras.ops.cast(keras.ops.abs(x[:, :, 0]) * 10, "int32")
        return self.table(self.hidden(self.table(ids)), reverse=True)


def embedded():
    keras.utils.set_random_seed(1)
    model = Embedded()
    model(X)
    return model


def quantized(make, mode):
    model = make()
    model.quantize(mode)
    return model


def modes_of(model):
    flat = model._flatten_layers()
    return {x.path: x.quantization_mode for x in flat if x.quantization_mode is not None}


def policies_of(model):
    return [layer.dtype_policy.name for layer in model.layers]


def error(got, expected):
    got, expected = np.asarray(got, "float32"), np.asarray(expected, "float32")
    return np.abs(got - expected).max() / np.abs(expected).max()


@pytest.mark.filterwarnings("ignore::tfamp.core.errors.NothingConvertedWarning")
@pytest.mark.parametrize(
    ("make", "mode", "dtype"),
    tiers(
        [(mlp, "int8", "bfloat16")],
        [
            (attention, "int8", "bfloat16"),
            (embedded, "int4", "bfloat16"),
            (mlp, "float8", "bfloat16"),
        ],
        [(attention, "int4", "float16")],
    ),
)
def test_levels_in_any_order_keep_the_quantization_and_what_it_predicts(make, mode, dtype):
    model = quantized(make, mode)
    modes, expected = modes_of(model), model(X)
    assert modes
    for level in ("O2", "O1", "O2", "O0"):
        model, _ = tfamp.prepare(model, level=level, dtype=dtype)
        assert modes_of(model) == modes
        assert error(model(X), expected) < MOST
        if level == "O1":
            assert error(model.predict(X, verbose=0), expected) < MOST
    np.testing.assert_array_equal(model(X), expected)


def test_o2_moves_a_layer_to_its_counterpart_says_so_and_saves_it(tmp_path):
    model, _ = tfamp.prepare(quantized(mlp, "int8"), level="O2", dtype="bfloat16")
    low = "int8_from_mixed_bfloat16"
    assert policies_of(model) == [low, low, "int8_from_float32"]
    rows = tfamp.precision_settings(model).layers
    assert [(x.quantization, x.compute_dtype, x.why) for x in rows] == [
        *[("int8", "bfloat16", "level O2")] * 2,
        ("int8", "float32", "output"),
    ]
    assert "level O2; quantized to int8" in str(tfamp.precision_settings(model))
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert policies_of(loaded) == policies_of(model)
    np.testing.assert_array_equal(loaded(X), model(X))
    loaded, _ = tfamp.prepare(loaded, level="O0")
    np.testing.assert_array_equal(loaded(X)[..., 0], quantized(mlp, "int8")(X)[..., 0])


def test_quantized_under_a_policy_o0_leads_back_to_float32():
    with tfamp.policy_scope("mixed_bfloat16"):
        model = quantized(mlp, "int8")
    low = model(X)
    assert policies_of(model)[0] == "int8_from_mixed_bfloat16"
    grown = keras.Sequential([model, layers.Dense(2)])  # its output is interior now, and converted
    assert np.isfinite(grown(X)).all()
    model, _ = tfamp.prepare(model, level="O0")
    assert policies_of(model) == ["int8_from_float32"] * 3
    assert error(low, model(X)) < MOST


@pytest.mark.parametrize("mode", first_of(["int8", "int4"]))
def test_quantized_at_o2_o0_leads_to_the_float32_model_quantized(mode):
    model, _ = tfamp.prepare(mlp(), level="O2", dtype="bfloat16")
    model.quantize(mode)
    model, _ = tfamp.prepare(model, level="O0")
    np.testing.assert_array_equal(model(X), quantized(mlp, mode)(X))


def test_float8_and_int8_in_float16_are_left_as_keras_made_them():
    model, _ = tfamp.prepare(mlp(), level="O2", dtype="bfloat16")
    model.quantize("float8")
    made, expected = policies_of(model), model(X)
    model, _ = tfamp.prepare(model, level="O0")
    assert policies_of(model) == made
    np.testing.assert_array_equal(model(X), expected)
    rows = tfamp.precision_settings(model).layers
    assert (rows[0].compute_dtype, rows[0].quantization) == ("bfloat16", "float8")

    model = quantized(mlp, "int8")
    with pytest.warns(tfamp.core.errors.NothingConvertedWarning):
        model, _ = tfamp.prepare(model, level="O2", dtype="float16")
    assert policies_of(model) == ["int8_from_float32"] * 3
    assert [x.why for x in tfamp.precision_settings(model).layers] == ["own dtype"] * 3


class Block(layers.Layer):
    def build(self, shape):
        self.dense, self.norm = layers.Dense(32), layers.LayerNormalization()
        self.dense.build(shape)
        self.norm.build(shape)

    def call(self, x):
        return self.norm(x) + self.dense(x)  # TensorFlow's own sum, which wants one dtype


def test_a_layer_that_holds_one_without_a_counterpart_is_left_with_it():
    model = keras.Sequential([keras.Input((6, 32)), layers.ReLU(), Block(), layers.Dense(2)])
    model.quantize("int8")
    expected = model(X)
    model, _ = tfamp.prepare(model, level="O2", dtype="float16")
    assert [layer.compute_dtype for layer in model.layers] == ["float16", "float32", "float32"]
    assert model.layers[1].norm.compute_dtype == "float32"
    assert error(model(X), expected) < MOST


@pytest.mark.parametrize("choice", [{"level": "O3"}, {"level": "O2", "master_weights": True}])
def test_low_weights_are_refused_with_the_names_of_quantized_layers(choice):
    model = quantized(mlp, "int8")
    expected, made = model(X), policies_of(model)
    with pytest.raises(ValueError, match=r"a \(int8\).*before it is quantized"):
        tfamp.prepare(model, "sgd", dtype="bfloat16", **choice)
    assert policies_of(model) == made
    np.testing.assert_array_equal(model(X), expected)


def test_by_hand_a_quantized_layer_gets_its_counterpart_or_is_refused():
    model = quantized(attention, "int8")
    expected = model(X)
    tfamp.set_layer_dtype(model, "bfloat16", pattern="attention")
    inner = [x for x in model.get_layer("attention")._flatten_layers() if x.quantization_mode]
    assert {x.dtype_policy.name for x in inner} == {"int8_from_mixed_bfloat16"}
    assert error(model(X), expected) < MOST
    tfamp.set_layer_dtype(model, "float32", pattern="attention")
    np.testing.assert_array_equal(model(X), expected)
    with pytest.raises(ValueError, match=r"attention/query \(int8\).*float16"):
        tfamp.set_layer_dtype(model, "float16", pattern="attention")
    np.testing.assert_array_equal(model(X), expected)


def test_a_map_of_policies_keeps_its_quantized_entries(tmp_path):
    entries = {"mapped/q": keras.dtype_policies.get("int8_from_float32")}
    policies = keras.dtype_policies.DTypePolicyMap("float32", entries)
    dense = [layers.Dense(32, name="q", dtype=policies), layers.Dense(32, name="p", dtype=policies)]
    dense = [keras.Input((6, 32)), *dense, layers.Dense(2, name="c")]
    model = keras.Sequential(dense, name="mapped")
    model.layers[0]._kernel.assign(np.random.default_rng(0).integers(-99, 99, (32, 32)))
    expected = model(X)
    model, _ = tfamp.prepare(model, level="O2", dtype="bfloat16")
    assert [layer.compute_dtype for layer in model.layers] == ["bfloat16", "bfloat16", "float32"]
    assert model.layers[0].quantization_mode == "int8"
    assert error(model(X), expected) < MOST
    model, _ = tfamp.prepare(model, level="O0")
    np.testing.assert_array_equal(model(X), expected)


@pytest.mark.parametrize("mode", ["int8"])
def test_compare_and_find_nonfinite_run_a_quantized_model_quantized(mode):
    plain, low = quantized(mlp, mode), quantized(mlp, mode)
    expected, made = plain(X), policies_of(plain)
    low, _ = tfamp.prepare(low, level="O2", dtype="bfloat16")
    for model in (plain, low):
        before = model(X)
        found = tfamp.diagnostics.compare(model, X, dtype="bfloat16")
        assert 0 < found.output_error < MOST
        assert [row.dtype for row in found.rows] == ["bfloat16", "bfloat16", "float32"]
        # What the reference computed is what the model predicts in float32.
        largest = float(np.abs(expected).max())
        assert found.rows[-1].max == pytest.approx(largest, rel=float_format("float16").eps)
        np.testing.assert_array_equal(model(X), before)
    for dtype in ("float16", "bfloat16"):
        assert tfamp.diagnostics.find_nonfinite(plain, X, dtype=dtype) is None
    assert policies_of(plain) == made


@pytest.mark.parametrize("dtype", first_of(["bfloat16", "float16"]))
def test_autocast_leaves_a_quantized_layer_to_keras(dtype):
    inputs = keras.Input((6, 64))
    # Keras sums these integers up as floats: far beyond what float16 holds.
    layer = layers.EinsumDense("abc,bcd->abd", (6, 8), kernel_initializer="ones")
    model = keras.Model(inputs, layer(inputs))
    model.quantize("int8")
    x = tf.fill((2, 6, 64), 3.0)
    expected = model(x)
    with tfamp.autocast(dtype):
        np.testing.assert_allclose(model(x), expected, rtol=float_format(dtype).eps)
    at_o1, _ = tfamp.prepare(model, level="O1", dtype=dtype)
    np.testing.assert_allclose(at_o1(x), expected, rtol=float_format(dtype).eps)
    np.testing.assert_allclose(at_o1.predict(x, verbose=0), expected, rtol=float_format(dtype).eps)
