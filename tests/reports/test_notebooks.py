"""HTML and pictures of results in a notebook: complete, and self-contained."""

import re

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp
from helpers.browser import open_page
from tfamp import diagnostics
from tfamp.reports import tables

X = np.linspace(-1, 1, 32, dtype="float32").reshape(4, 8)
HOSTILE = "<script>alert(1)</script>&"


def layers(**options):
    return [
        keras.Input((8,)),
        keras.layers.Dense(64, activation="relu", name="hidden", **options),
        keras.layers.BatchNormalization(name="norm"),
        keras.layers.Dense(4, name="head"),
    ]


def plan():
    weights = tf.Variable(tf.ones((8, 64)))
    step = tfamp.rewrite(lambda x: tf.exp(x @ weights), dtype="bfloat16", placement="lists")
    return step.plan(tf.ones((4, 8)))


def comparison():
    rows = [
        diagnostics.ComparisonRow(HOSTILE, "Dense", "float16", 0.01, 0.01, 7e4, 0.25, 0.5),
        diagnostics.ComparisonRow("head", "Dense", "float32", 0.02, None, 1.0, 0.0, 0.0),
    ]
    return diagnostics.Comparison("model", "float16", tuple(rows), 0.02, 0.01, (HOSTILE,), 0.005)


def nonfinite():
    return diagnostics.find_nonfinite(
        lambda x: tf.exp(tf.cast(x, tf.float16)), tf.constant([12.0, 1.0])
    )


def settings():
    model, _ = tfamp.prepare(keras.Sequential(layers()), level="O2", dtype="bfloat16")
    return tfamp.precision_settings(model)


# What makes a result -> what has to be readable in it.
RESULTS = {
    "plan": (plan, ["MatMul", "bfloat16", "Casts", "float nodes"]),
    "comparison": (comparison, ["&lt;script&gt;", "too large", "proved by a run", "0.02"]),
    "nonfinite": (nonfinite, ["overflow in forward: Exp", "float32: ", "fix"]),
    "device": (diagnostics.device_report, ["policy auto", "tensorflow", "CPU"]),
    "settings": (settings, ["level O2", "hidden", "BatchNormalization", "statistics", "output"]),
}


@pytest.fixture(scope="module")
def shown():
    return {name: make()._repr_html_() for name, (make, _) in RESULTS.items()}


@pytest.mark.parametrize("name", RESULTS)
def test_a_result_shows_itself_and_loads_nothing(shown, name):
    text = shown[name]
    for each in RESULTS[name][1]:
        assert each in text
    assert text.startswith('<div class="tfamp">')
    assert text.endswith("</div>")
    assert not re.search(r"https?://", text)
    assert not re.search(r"<script|<link|<img|\ssrc=|\shref=|url\(|@import", text)
    # No colour but what the page has, and shades that go with light and dark.
    style = text[text.index("<style>") : text.index("</style>")]
    assert not re.findall(r"#[0-9a-f]{3,6}|(?<!-)\b(?:white|black)\b(?!-)", style)


def test_the_results_are_whole_in_a_browser(shown, tmp_path):
    page = tmp_path / "page.html"
    page.write_text("<!doctype html><meta charset=utf-8>" + "<hr>".join(shown.values()))
    document, messages = open_page(page, tmp_path / "profile")
    assert document.count('<div class="tfamp">') == len(shown)
    assert document.count("</table>") == sum(each.count("</table>") for each in shown.values())
    assert not messages


def test_a_long_table_says_how_much_is_left_out():
    rows = [(str(i), "x") for i in range(1234)]
    text = tables.table(("number", "what"), rows, rest=": elsewhere")
    assert text.count("<tr>") == 1 + tables.MOST_ROWS
    assert "and 1,034 more: elsewhere" in text


# ---- precision_settings --------------------------------------------------------------------------


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
