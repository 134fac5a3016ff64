"""`precision_settings`: what a model computes in, whatever made it so."""

import keras
import numpy as np
import pytest

import tfamp

X = np.linspace(-1, 1, 32, dtype="float32").reshape(4, 8)


def layers(**options):
    return [
        keras.Input((8,)),
        keras.layers.Dense(64, activation="relu", name="hidden", **options),
        keras.layers.BatchNormalization(name="norm"),
        keras.layers.Dense(4, name="head"),
    ]


def of_keras():
    keras.config.set_dtype_policy("mixed_float16")
    model = keras.Sequential(layers())
    model.compile("sgd", "mse")
    return model


def of_tfamp():
    with tfamp.policy_scope("mixed_bfloat16"):
        return keras.Sequential(layers())


class Subclassed(keras.Model):
    def __init__(self):
        super().__init__()
        self.inner = keras.Sequential(layers(dtype="mixed_float16"))

    def call(self, x):
        return self.inner(x)


@pytest.mark.parametrize(
    ("make", "dtype", "computes", "stores", "whys"),
    [
        (lambda: keras.Sequential(layers()),
         "float32", "float32 " * 3, "float32", "policy float32," * 3),
        (of_keras, "float16", "float16 " * 3, "float32", "policy mixed_float16," * 3),
        (of_tfamp, "bfloat16", "bfloat16 float32 float32", "float32",
         "policy mixed_bfloat16,statistics,output"),
        (lambda: keras.Sequential(layers(dtype="float16")),
         "float16", "float16 float32 float32", "float16",
         "policy float16,policy float32,policy float32"),
        (Subclassed, "float16", "float16 float32 float32", "float32",
         "policy mixed_float16,policy float32,policy float32"),
    ],
    ids=["untouched", "Keras's policy", "tfamp's policy", "by hand", "subclassed"],
)  # fmt: skip
def test_settings_tell_what_every_model_computes_in(make, dtype, computes, stores, whys):
    model = make()
    found = tfamp.precision_settings(model)
    assert (found.level, found.dtype) == (None, dtype)
    assert [row.compute_dtype for row in found.layers] == computes.split()
    assert found.layers[0].variable_dtype == stores
    assert [row.why for row in found.layers] == whys.rstrip(",").split(",")
    assert "hidden" in str(found)
    assert "hidden" in found._repr_html_()
    if make is of_keras:
        # compile has wrapped the optimizer in Keras's own.
        assert found.loss_scale == tfamp.DynamicLossScale()


def test_a_rewrite_says_that_a_policy_came_first_and_a_level_takes_its_place():
    model = of_keras()
    with pytest.warns(tfamp.NothingConvertedWarning, match="compute in float16 already"):
        tfamp.rewrite(model, dtype="bfloat16", placement="lists").plan(X)
    prepared = tfamp.prepare(model, level="O2", dtype="bfloat16")
    computes = [row.compute_dtype for row in prepared.settings.layers]
    assert computes == ["bfloat16", "float32", "float32"]
    again = tfamp.prepare(model, level="O2", dtype="bfloat16")
    assert str(again.settings) == str(prepared.settings)
    back = tfamp.prepare(model, level="O0")
    assert {row.compute_dtype for row in back.settings.layers} == {"float32"}
