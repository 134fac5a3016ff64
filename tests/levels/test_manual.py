"""Dtypes set by hand: one layer, a pattern, inside containers, on models built and prepared."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfamp
from helpers.cases import first_of
from helpers.graph_asserts import op_dtypes
from helpers.level_models import KINDS, Stubborn, Subclassed, compiled, computes, data, leaves
from helpers.tolerances import tolerance

X, Y = data()


def dense_model():
    model = keras.Sequential([keras.Input((8,))])
    for name in ("one", "two_a", "two_b", "last"):
        model.add(layers.Dense(8, name=name))
    return model


def dtypes(model):
    return {layer.name: layer.compute_dtype for layer in leaves(model)}


@pytest.mark.parametrize("dtype", first_of(["float16", "bfloat16", tf.float16, np.float16]))
def test_one_layer_of_a_float32_model_computes_low(dtype):
    model = dense_model()
    x = np.linspace(-1, 1, 16, dtype="float32").reshape(2, 8)
    before = model(x).numpy()
    name = tf.as_dtype(dtype).name
    assert tfamp.set_layer_dtype(model, dtype, pattern="one") == (f"{model.name}/one",)
    assert dtypes(model) == {"one": name, "two_a": "float32", "two_b": "float32", "last": "float32"}
    assert model.layers[0].kernel.dtype == "float32"
    assert op_dtypes(model, tf.constant(x))["MatMul"] == {name, "float32"}
    after = model(x)
    assert (after.dtype, model.outputs[0].dtype) == ("float32", "float32")
    np.testing.assert_allclose(after, before, atol=tolerance(name, depth=8) * np.abs(before).max())
    assert (after.numpy() != before).any()
    tfamp.set_layer_dtype(model.layers[0], "float32")
    np.testing.assert_array_equal(model(x), before)
    # Compiled functions are traced again.
    model.compile("sgd", "mse", jit_compile=False)
    before = model.predict(x, verbose=0)
    tfamp.set_layer_dtype(model, name, pattern="one")
    assert (model.predict(x, verbose=0) != before).any()


@pytest.mark.parametrize("kind", first_of(KINDS))
def test_layers_inside_containers_are_set(kind):
    model = compiled(kind)
    tfamp.set_layer_dtype(model, "bfloat16", pattern="conv")
    assert computes(model)["Conv2D"] == ["bfloat16"]
    assert set(computes(model)["Dense"]) == {"float32"}
    assert model(X).dtype == "float32"
    batch = (tf.constant(X[:8]), tf.constant(Y[:8]))
    found = op_dtypes(lambda: model.train_step(batch))
    assert ("bfloat16" in found["Conv2D"], found["MatMul"]) == (True, {"float32"})


def test_sublayers_are_set_with_their_layer_and_layers_without_variables_for_later():
    model = keras.Sequential([keras.Input((4, 6)), layers.LSTM(4), layers.Dense(2)])
    tfamp.set_layer_dtype(model, "float16", pattern="lstm")
    assert model.layers[0].cell.compute_dtype == "float16"
    assert model(np.ones((1, 4, 6), "float32")).dtype == "float32"
    model = Subclassed()
    tfamp.set_layer_dtype(model.hidden, "float16")
    model(X)
    assert (model.hidden.compute_dtype, model.hidden.kernel.dtype) == ("float16", "float32")


def test_an_output_layer_set_by_hand_says_so_everywhere():
    inner = dense_model()
    outer = keras.Sequential([keras.Input((8,)), inner])
    tfamp.set_layer_dtype(outer, "float16", pattern="last")
    assert inner.outputs[0].dtype == "float16"
    assert outer.outputs[0].dtype == "float16"
    assert outer.compute_output_spec(keras.KerasTensor((2, 8))).dtype == "float16"
    assert outer(np.ones((2, 8), "float32")).dtype == "float16"


def test_a_pattern_means_names_first_and_paths_then_and_a_file_keeps_it(tmp_path):
    model = dense_model()
    assert len(tfamp.set_layer_dtype(model, "float16", pattern="two_")) == 2
    assert dtypes(model) == {
        "one": "float32", "two_a": "float16", "two_b": "float16", "last": "float32"
    }  # fmt: skip
    model.save(tmp_path / "m.keras")
    assert dtypes(keras.models.load_model(tmp_path / "m.keras")) == dtypes(model)
    assert tfamp.set_layer_dtype(model, "float16", pattern=r"/(one|last)$")[1].endswith("last")


def test_it_goes_with_a_level_and_stays_when_the_level_changes():
    model = dense_model()
    tfamp.prepare(model, level="O2", dtype="float16")
    tfamp.set_layer_dtype(model, "float32", pattern="two_a")
    expected = {"one": "float16", "two_a": "float32", "two_b": "float16", "last": "float32"}
    assert dtypes(model) == expected
    rows = {row.path: row.why for row in tfamp.precision_settings(model).layers}
    assert rows[f"{model.name}/two_a"] == "set by hand"
    tfamp.prepare(model, level="O2", dtype="bfloat16")
    assert dtypes(model)["two_a"] == "float32"
    assert dtypes(model)["two_b"] == "bfloat16"
    tfamp.prepare(model, level="O0")
    assert set(dtypes(model).values()) == {"float32"}
    tfamp.prepare(model, level="O2", dtype="float16")
    assert dtypes(model)["two_a"] == "float16"


def test_batch_normalization_set_by_hand_is_keras_own_in_that_dtype():
    model = compiled("sequential")
    tfamp.prepare(model, level="O2", dtype="float16")
    for dtype in ("float32", "float16"):
        tfamp.set_layer_dtype(model, dtype, pattern="batch_norm")
        assert computes(model)["BatchNormalization"] == [dtype]
        norm = model.layers[1]
        assert norm(tf.ones((2, 4, 4, 4), tf.float16)).dtype == dtype
        assert np.isfinite(model(X)).all()


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((3, "float16"), TypeError, r"keras\.Model or keras\.Layer"),
        (("model", "int8"), ValueError, "dtype must be"),
        (("model", None), ValueError, "dtype must be"),
        (("model", "float16", "twwo_a"), ValueError, "nearest is 'two_a'"),
        (("model", "float16", "("), ValueError, "not a regular expression"),
        (("model", "float16", 3), TypeError, "pattern takes names of layers"),
        (("model", "float16", "stubborn"), ValueError, "stubborn"),
        (("model", "float32", "pure"), ValueError, "stores its weights in float16"),
    ],
)
def test_mistakes_change_nothing(arguments, error, message):
    model = dense_model()
    model.add(Stubborn(name="stubborn"))
    model.add(layers.Dense(8, name="pure", dtype="float16"))
    before = dtypes(model)
    first, dtype, *pattern = arguments
    with pytest.raises(error, match=message):
        tfamp.set_layer_dtype(
            model if first == "model" else first, dtype, pattern=pattern[0] if pattern else None
        )
    assert dtypes(model) == before


def products(model):
    """The dtype of each layer's product in the rewritten model."""
    step = tfamp.precision_settings(model).rewrite(lambda x: model(x))
    nodes = step.plan(tf.ones((2, 8))).nodes
    return [node.dtype for node in nodes if node.op == "MatMul"]


def test_a_layer_set_to_float32_by_hand_stays_so_at_level_o1():
    model = dense_model()
    tfamp.set_layer_dtype(model, "float32", pattern="one")
    model, _ = tfamp.prepare(model, level="O1", dtype="bfloat16")
    assert products(model) == ["float32", "bfloat16", "bfloat16", "bfloat16"]
    tfamp.set_layer_dtype(model, "float32", pattern="two_b")
    assert products(model) == ["float32", "bfloat16", "float32", "bfloat16"]
    why = {row.path.rpartition("/")[2]: row.why for row in tfamp.precision_settings(model).layers}
    assert why["one"] == why["two_b"] == "set by hand"
    # So does a layer that is given without its model.
    tfamp.set_layer_dtype(model.layers[-1], "float32")
    assert products(model) == ["float32", "bfloat16", "float32", "float32"]
    # Eager calls too.
    seen = op_dtypes(model.layers[0], tf.ones((2, 8)))
    assert seen["MatMul"] == {"float32"}
    model, _ = tfamp.prepare(model, level="O0")
    model, _ = tfamp.prepare(model, level="O1", dtype="bfloat16")
    # O0 resets what was set since the model was first prepared.
    assert products(model) == ["float32", "bfloat16", "bfloat16", "bfloat16"]
