"""The cache of `tfamp.tune`: what is taken from it, measured again, and stored in it."""

import dataclasses
import json
import os
from pathlib import Path

import keras
import numpy as np
import platformdirs
import pytest
import tensorflow as tf

import tfamp
from helpers.cases import one_in, tiers
from tfamp.core.profile import builtin_profile
from tfamp.machine import hardware, profile_measure
from tfamp.rewriting import choice_cache, measured_runs
from tfamp.rewriting.choice_cache import fingerprint, keras_program

X, Y = np.ones((4, 8), "float32"), np.ones((4, 2), "float32")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty cache that is used."""
    monkeypatch.delenv("TFAMP_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return Path(platformdirs.user_cache_dir("tfamp", False))


@pytest.fixture
def runs(monkeypatch):
    """The timed runs; in the times made up, low precision is faster."""
    found = []

    def together(call, count):
        found.append(call)
        return 2.0 if call.func.settings.dtype == "float32" else 1.0

    monkeypatch.setattr(measured_runs, "together", together)
    return found


def make_model(units=8, name="secret", activation="relu", layer=keras.layers.Dense, **options):
    keras.utils.set_random_seed(0)
    hidden = layer(units, activation=activation, name=name)
    model = keras.Sequential([keras.Input((8,)), hidden, keras.layers.Dense(2)])
    model.compile(**{"optimizer": "sgd", "loss": "mse", **options})
    return model


def tune(dtype="bfloat16", max_error=None, **choices):
    """Tunes a step that is written again, as in another process."""
    model = make_model(**choices)

    def secret_step(x):
        return model(x, training=True)

    candidates = ("lists", "min_cut")
    return tfamp.tune(
        secret_step, X, dtype=dtype, candidates=candidates, max_error=max_error, rounds=1
    )


def test_a_second_start_takes_the_choice_without_a_run(folder, runs):
    first = tune()
    (path,) = folder.iterdir()
    assert first.source == f"measured now, kept in {path}"
    timed = len(runs)
    again = tune(name="other")
    assert len(runs) == timed
    assert again.best.experimental_get_tracing_count() == 1, "of the trace that was looked up"
    assert again.source == f"measured before, kept in {path}"
    assert again.source in again.to_text()
    assert again.rows == first.rows
    assert again.best.plan(X).summary.low_nodes > 0
    text = path.read_text("utf-8")
    assert not any(secret in text for secret in ("secret", "relu", "dense"))
    assert json.loads(text).keys() == set(choice_cache.Choice._fields) - {"source"}


@pytest.mark.parametrize(
    "changes",
    one_in(
        2,
        [{"units": 16}, {"max_error": 0.5}, {"ONEDNN_MAX_CPU_ISA": "AVX2"}, {"TFAMP_CACHE": "off"}],
    ),
)
def test_what_changes_is_measured_again(changes, folder, runs, monkeypatch):
    tune()
    timed = len(runs)
    for name in filter(str.isupper, changes):
        monkeypatch.setenv(name, changes[name])
    report = tune(**{name: value for name, value in changes.items() if not name.isupper()})
    assert len(runs) > timed
    is_kept = "TFAMP_CACHE" not in changes
    assert report.source.startswith("measured now, kept in" if is_kept else "measured now")
    assert len(list(folder.iterdir())) == 1 + is_kept


def test_the_reason_of_an_error_is_kept_too(folder, runs):
    options = {"dtype": "bfloat16", "candidates": ("lists",), "rounds": 1}
    for _ in range(2):
        tf.random.set_seed(None)
        report = tfamp.tune(lambda x: x @ tf.random.normal((8, 8)), X, **options)
        assert report.unseeded == ("RandomStandardNormal",)
    assert report.source.startswith("measured before")


def test_a_machine_measured_in_each_process_finds_its_choice_again(folder, runs, monkeypatch):
    monkeypatch.setenv("TFAMP_PROFILE", "measure")
    builtin = builtin_profile("cpu", bfloat16=True)
    digits = iter(range(1, 9))

    def measure():  # Two measurements are never equal.
        return dataclasses.replace(builtin, name="measured", bandwidth=1e10 + next(digits))

    monkeypatch.setattr(profile_measure, "measure_profile", measure)
    reports = []
    for _ in range(3):
        hardware._measured.cache_clear()  # Another process.
        reports.append(tune())
    hardware._measured.cache_clear()
    assert next(digits) == 4, "each measured the machine"
    assert len(list(folder.iterdir())) == 1
    assert [report.source.split(",")[0] for report in reports] == [
        "measured now",
        "measured before",
        "measured before",
    ]
    assert reports[1].rows == reports[2].rows == reports[0].rows
    low, exact = (np.asarray(reports[n].best(X)) for n in (2, 0))
    np.testing.assert_array_equal(low, exact)


def test_a_profile_from_a_file_counts_by_its_figures(folder, runs, monkeypatch, tmp_path):
    usual = builtin_profile("cpu", bfloat16=True)
    path = tmp_path / "profile.json"
    monkeypatch.setenv("TFAMP_PROFILE", str(path))
    sources = []
    for bandwidth in (1e10, 2e10, 1e10):
        path.write_text(dataclasses.replace(usual, bandwidth=bandwidth).to_json())
        sources.append(tune().source.split(",")[0])
    assert sources == ["measured now", "measured now", "measured before"]


def test_the_choices_unused_for_the_longest_time_are_deleted(folder, runs, monkeypatch):
    monkeypatch.setattr(choice_cache, "_MOST_FILES", 3)
    folder.mkdir(parents=True)
    profile = folder / "machine-0.json"
    profile.write_text("{}")
    os.utime(profile, (1, 1))

    def choices():
        return {path for path in folder.iterdir() if path != profile}

    found = []
    for number, max_error in enumerate((0.1, 0.2, 0.3), 1):
        tune(max_error=max_error)
        (path,) = choices() - set(found)
        os.utime(path, (number, number))
        found.append(path)
    assert tune(max_error=0.1).source.startswith("measured before")  # The oldest, but in use.
    tune(max_error=0.4)
    assert set(found) & choices() == {found[0], found[2]}
    assert len(choices()) == 3
    assert profile.exists()
    found[2].write_text("damaged")
    os.utime(found[2], (3, 3))
    tune(max_error=0.5)
    assert found[0] in choices()
    assert found[2] not in choices()


@pytest.mark.parametrize(
    "content", tiers([b"[]", b'{"rows": [{"chosen": true}]}'], [b"\xff", b"{}"])
)
def test_a_damaged_or_foreign_file_is_a_warning_and_is_replaced(content, folder, runs):
    report = tune()
    (path,) = folder.iterdir()
    path.write_bytes(content)
    with pytest.warns(tfamp.TfampWarning, match="is damaged or not a file of tfamp's"):
        assert tune().rows == report.rows
    assert tune().source.startswith("measured before")


def test_a_cache_that_cannot_be_used_says_what_to_do(folder, runs, monkeypatch):
    folder.write_text("no folder")
    with pytest.warns(tfamp.TfampWarning, match="choice of tune cannot be kept.* TFAMP_CACHE"):
        assert tune().source == "measured now; it cannot be kept"
    monkeypatch.setenv("TFAMP_CACHE", "no")
    with pytest.raises(ValueError, match="TFAMP_CACHE must be \"off\", or unset .* got 'no'"):
        tune()


def test_the_settings_of_a_model_say_so_and_no_step_of_keras_layers_is_traced(
    folder, runs, monkeypatch
):
    traced = []
    step = keras.Model.train_step
    monkeypatch.setattr(
        keras.Model, "train_step", lambda *args: traced.append(args) or step(*args), raising=False
    )

    def settings(name="secret", **options):
        given = {"level": "auto", "dtype": "bfloat16", "example_batch": (X, Y)}
        return str(tfamp.prepare(make_model(name=name), **given, **options).settings)

    assert "measured now, kept in" in settings()
    done = len(runs), len(traced)
    assert "measured before, kept in" in settings("other")
    assert (len(runs), len(traced)) == done
    assert "measured now, kept in" in settings(keep_float32="secret")  # Kept layers count.
    assert len(runs) > done[0]


@keras.saving.register_keras_serializable()
def own_loss(y, out):
    return keras.ops.mean(y - out)


def relu(x):
    return -x


class Own(keras.layers.Dense):
    def call(self, inputs, training=None):
        return super().call(-inputs)


def program(change=lambda model: None, shape=(4, 8), **options):
    model = make_model(**options)
    change(model)
    return keras_program(model, (tf.ones(shape), tf.ones((4, 2))))


def test_a_program_of_keras_alone_is_known_without_a_trace():
    sgd, adam = keras.optimizers.SGD, keras.optimizers.AdamW
    schedule = keras.optimizers.schedules.CosineDecay(0.1, 9)
    leaves_out = adam()
    leaves_out.exclude_from_weight_decay(var_names=["bias"])
    known = program(optimizer=sgd(0.1))
    assert known == program(optimizer=sgd(0.2), name="dense_7")
    others = [
        *(program(optimizer=each) for each in (sgd(schedule), sgd(0.1, clipnorm=1.0), adam())),
        *(program(optimizer=leaves_out), program(loss="mae"), program(metrics=["mae"])),
        *(program(units=9), program(activation="tanh"), program(shape=(5, 8))),
        *(program(jit_compile=True), program(activation="gelu")),
        program(lambda model: setattr(model.layers[0], "trainable", False)),
        program(lambda model: setattr(model.layers[0], "dtype_policy", "mixed_float16")),
        program(lambda model: setattr(model.layers[0].bias, "trainable", False)),
    ]
    assert "" not in {known, *others}
    assert len({known, *others}) == 1 + len(others)


@pytest.mark.parametrize(
    "options",
    [
        *({"layer": Own}, {"activation": relu}, {"activation": tf.nn.relu}),
        *({"loss": own_loss}, {"loss": "Custom>own_loss"}, {"loss": lambda y, out: y - out}),
        {"metrics": [own_loss]},
        {"change": lambda model: setattr(model, "train_step", lambda data: {})},
        {"change": lambda model: model.add(keras.layers.Lambda(keras.ops.relu))},
    ],
)
def test_other_code_in_a_step_makes_it_unknown_until_it_is_traced(options):
    assert program(**options) == ""


def test_a_fingerprint_is_of_what_takes_time():
    def of(loop=3, width=4, name="x", factor=2.0, op=tf.tanh, cases=(tf.cos, tf.exp)):
        @tf.function
        def step(x):
            x = tf.multiply(x, factor, name=name)
            for _ in tf.range(loop):
                x = op(x, name=name)
            return tf.cond(tf.reduce_all(x > 0.0), *(lambda case=case: case(x) for case in cases))

        trace = step.get_concrete_function(tf.TensorSpec((2, width)))
        return fingerprint(trace.graph.as_graph_def(add_shapes=True))

    assert of(name="y", factor=3.0) == of()
    others = of(loop=4), of(width=5), of(op=tf.sin), of(cases=(tf.exp, tf.cos))
    assert len({of(), *others}) == 5
