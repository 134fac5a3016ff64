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


def layers():
    return [
        keras.Input((8,)),
        keras.layers.Dense(64, activation="relu", name="hidden"),
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
