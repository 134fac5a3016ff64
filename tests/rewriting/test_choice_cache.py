"""The cache of `tfamp.tune`: what is taken from it, measured again, and stored in it."""

import dataclasses
import json
from pathlib import Path

import keras
import numpy as np
import platformdirs
import pytest
import tensorflow as tf

import tfamp
from tfamp.rewriting import tuning
from tfamp.rewriting.choice_cache import fingerprint

QUICK = {"dtype": "bfloat16", "candidates": ("lists", "min_cut"), "rounds": 1}
X = np.ones((4, 8), "float32")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty cache that is used."""
    monkeypatch.delenv("TFAMP_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return Path(platformdirs.user_cache_dir("tfamp", False))


@pytest.fixture
def runs(monkeypatch):
    """The runs that are timed; low precision is made up to be faster."""
    found = []

    def together(call, count):
        found.append(call)
        return 1.0 if getattr(call.func, "settings", None) else 2.0

    monkeypatch.setattr(tuning, "together", together)
    return found


def program(units=8, name="secret", activation="relu"):
    """A step that is written again, as in another process, with variables of its own."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [keras.Input((8,)), keras.layers.Dense(units, activation, name=name), keras.layers.Dense(2)]
    )

    def secret_step(x):
        return model(x, training=True)

    return secret_step


def test_a_second_start_takes_the_choice_without_a_run(folder, runs):
    first = tfamp.tune(program(), X, **QUICK)
    (path,) = folder.iterdir()
    assert first.source == f"measured now, kept in {path}"
    timed = len(runs)
    again = tfamp.tune(program(name="other"), X, **QUICK)
    assert len(runs) == timed
    assert again.source == f"measured before, kept in {path}"
    assert again.source in again.to_text()
    assert again.rows == first.rows
    assert again.best.plan(X).summary.low_nodes > 0
    text = path.read_text("utf-8")
    assert not any(secret in text for secret in ("secret", "relu", "dense"))
    assert json.loads(text).keys() == {"rows", "rounds", "dropped"}


CHANGES = {
    "the graph": lambda patch: ({}, program(activation="tanh")),
    "a shape": lambda patch: ({}, program(units=16)),
    "an argument": lambda patch: ({"max_error": 0.5}, program()),
    "the dtype": lambda patch: ({"dtype": "float16"}, program()),
    "tfamp": lambda patch: (patch.setattr(tfamp, "__version__", "9") or {}, program()),
    "the hardware": lambda patch: (patch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2") or {}, program()),
    "the cache": lambda patch: (patch.setenv("TFAMP_CACHE", "off") or {}, program()),
    "the op lists": lambda patch: (
        {},
        tfamp.rewrite(program(), dtype="bfloat16", op_lists=tfamp.OpLists.default("bfloat16")),
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_is_measured_again(change, folder, runs, monkeypatch):
    tfamp.tune(program(), X, **QUICK)
    timed, kept = len(runs), sorted(folder.iterdir())
    options, function = CHANGES[change](monkeypatch)
    report = tfamp.tune(function, X, **QUICK | options)
    assert len(runs) > timed
    is_kept = change not in ("the cache", "the op lists")
    assert report.source.startswith("measured now, kept in" if is_kept else "measured now")
    assert len(list(folder.iterdir())) == len(kept) + is_kept


ROW = {"candidate": "lists", "seconds": 1.0, "quartiles": [1, 1], "error": 0.0, "chosen": True}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\xfe\x00",
        b"[]",
        b"{}",
        json.dumps({"rounds": 1, "dropped": [], "rows": []}).encode(),
        json.dumps({"rounds": 1, "dropped": [], "rows": [ROW | {"seconds": "fast"}]}).encode(),
        json.dumps({"rounds": 1, "dropped": [], "rows": [ROW | {"candidate": "fused"}]}).encode(),
    ],
)
def test_a_damaged_or_foreign_file_is_a_warning_and_is_replaced(content, folder, runs):
    report = tfamp.tune(program(), X, **QUICK)
    (path,) = folder.iterdir()
    path.write_bytes(content)
    with pytest.warns(tfamp.TfampWarning, match="is damaged or not a file of tfamp's"):
        again = tfamp.tune(program(), X, **QUICK)
    assert again.rows == report.rows
    assert tfamp.tune(program(), X, **QUICK).source.startswith("measured before")


def test_a_folder_that_cannot_be_written_is_a_warning(folder, runs):
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.write_text("no folder")
    with pytest.warns(tfamp.TfampWarning, match="choice of tune cannot be kept.* TFAMP_CACHE"):
        report = tfamp.tune(program(), X, **QUICK)
    assert report.source == "measured now; it cannot be kept"


def test_a_wrong_value_of_the_variable_is_an_error(monkeypatch):
    monkeypatch.setenv("TFAMP_CACHE", "no")
    with pytest.raises(ValueError, match="TFAMP_CACHE must be \"off\", or unset .* got 'no'"):
        tfamp.tune(program(), X, **QUICK)


def test_the_settings_of_a_model_say_so_and_kept_layers_count(folder, runs):
    def prepared(**options):
        keras.utils.set_random_seed(0)
        layers = [keras.layers.Dense(8, name="first"), keras.layers.Dense(2)]
        model = keras.Sequential([keras.Input((8,)), *layers])
        model.compile("sgd", "mse")
        batch = (X, np.ones((4, 2), "float32"))
        return tfamp.prepare(model, level="auto", dtype="bfloat16", example_batch=batch, **options)

    assert "measured now, kept in" in str(prepared().settings)
    timed = len(runs)
    settings = prepared().settings
    assert len(runs) == timed
    assert "measured before, kept in" in str(settings)
    assert settings.level == "O1"
    prepared(keep_float32="first")
    assert len(runs) > timed


def test_a_fingerprint_is_of_what_takes_time():
    def of(loop=3, width=4, name="x", factor=2.0, op=tf.tanh):
        @tf.function
        def step(x):
            x = tf.multiply(x, factor, name=name)
            for _ in tf.range(loop):
                x = op(x, name=name)
            return x

        trace = step.get_concrete_function(tf.TensorSpec((2, width)))
        return fingerprint(trace.graph.as_graph_def(add_shapes=True))

    same = of()
    assert of(name="y", factor=3.0) == same
    others = [of(loop=4), of(width=5), of(op=tf.sin)]
    assert len({same, *others}) == 4


def test_rows_are_read_as_they_were_written():
    row = tuning.TuneRow("lists", 1.0, (0.5, 2.0), float("inf"), True, 3, "float32")
    assert tuning.TuneRow.of(json.loads(json.dumps(dataclasses.asdict(row)))) == row
