"""Steps that XLA compiles as a whole, as ways that `tune` compares."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp
from helpers.graph_asserts import assert_computes_in
from helpers.tolerances import assert_close
from tfamp.interop import tf_private
from tfamp.rewriting import measured_runs, tuning

OPTIONS = {"dtype": "bfloat16", "rounds": 1}
XLA = ("xla", "lists_xla", "min_cut_xla")


def is_compiled(function, *args):
    """Whether XLA compiles the function that a call runs as a whole."""
    return function.get_concrete_function(*args).function_def.attr["_XlaMustCompile"].b


@pytest.fixture
def weights():
    return tf.Variable(np.random.default_rng(1).standard_normal((64, 64)).astype("float32"))


@pytest.fixture
def layer(weights):
    @tf.function
    def layer(x):
        return tf.nn.gelu(x @ weights)

    return layer


@pytest.fixture
def x():
    return tf.constant(np.random.default_rng(2).standard_normal((8, 64)).astype("float32"))


@pytest.fixture
def timed(monkeypatch):
    """Fakes times by what runs; the calls are made."""
    seconds, args = {}, []

    def together(call, count):
        del count
        call()
        settings = getattr(call.func, "settings", None)
        is_float32 = settings is None or settings.dtype == "float32"
        name = "float32" if is_float32 else settings.placement
        suffix = "_xla" if is_compiled(call.func, *call.args) else ""
        args.append(name + suffix)
        return seconds.get(name + suffix, 9.0)

    monkeypatch.setattr(measured_runs, "together", together)
    return seconds


@pytest.mark.parametrize(
    ("fastest", "name", "dtype"),
    [("float32_xla", "xla", "float32"), ("lists_xla", "lists_xla", "bfloat16")],
)
def test_the_best_function_is_compiled_and_computes_the_same(fastest, name, dtype, layer, x, timed):
    timed.update({"float32": 2.0, fastest: 1.0})
    report = tfamp.tune(layer, x, candidates=XLA, **OPTIONS)
    assert report.chosen.candidate == name
    assert is_compiled(report.best, x)
    assert not is_compiled(layer, x)
    assert_close(report.best(x), layer(x), dtype, depth=64)
    if dtype == "bfloat16":
        assert_computes_in(dtype, report.best.concrete(x))
        assert_close(tf.function(lambda x: report.best(x))(x), layer(x), dtype, depth=64)
    text = report.to_text()
    assert f"chosen: {name}, 2.00 times as fast as float32" in text
    alone = 2.0 if name == "xla" else 2 / 9
    assert f"the compiler alone: {alone:.2f} times as fast in float32 (xla)" in text


def test_a_train_step_with_its_optimizer_is_compiled_and_the_state_is_as_before(timed):
    timed.update({"float32": 2.0, "float32_xla": 1.0})
    models = []
    for _ in range(2):
        keras.utils.set_random_seed(1)
        layers = [keras.Input((64,)), keras.layers.Dense(64, "gelu"), keras.layers.Dense(4)]
        models.append((keras.Sequential(layers), keras.optimizers.Adam(0.1)))
    inside = []

    def step_of(model, optimizer):
        def step(x, y):
            inside.append(tf_private.is_compiled_by_xla())
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((model(x, training=True) - y) ** 2)
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
            return loss

        return tf.function(step)

    x, y = tf.ones((8, 64)), tf.zeros((8, 4))
    before = [each.numpy() for each in models[0][0].variables]
    report = tfamp.tune(step_of(*models[0]), x, y, candidates=("xla", "lists_xla"), **OPTIONS)
    for variable, value in zip(models[0][0].variables, before, strict=True):
        np.testing.assert_array_equal(variable, value)
    # Traced for XLA too: optimizers and users' code read which it is. The first trace, which
    # creates the optimizer's slots, is followed by another one.
    assert inside == [False, False, True]
    assert report.chosen.candidate == "xla"
    plain = step_of(*models[1])
    for _ in range(3):
        np.testing.assert_allclose(report.best(x, y), plain(x, y), rtol=1e-4)
    assert is_compiled(report.best, x, y)


def test_random_numbers_that_xla_draws_otherwise_are_named(x, timed):
    timed.update({"float32": 2.0, "float32_xla": 1.0})
    keras.utils.set_random_seed(0)
    dropout = keras.layers.Dropout(0.5)
    report = tfamp.tune(lambda x: dropout(x, training=True), x, candidates=["xla"], **OPTIONS)
    assert report.redrawn
    assert all("Random" in op for op in report.redrawn)
    assert f"XLA draws other numbers for {report.redrawn[0]}" in report.to_text()
    bound = tfamp.tune(
        lambda x: dropout(x, training=True), x, candidates=["xla"], max_error=0.1, **OPTIONS
    )
    assert bound.chosen.candidate == "float32"
    # The layer's generator is as before.
    seeds = [np.asarray(each) for each in dropout.variables]
    tfamp.tune(lambda x: dropout(x, training=True), x, candidates=["xla"], **OPTIONS)
    for variable, seed in zip(dropout.variables, seeds, strict=True):
        np.testing.assert_array_equal(variable, seed)


def by_python(x):
    return tf.py_function(lambda value: 2 * value, [x], tf.float32)


def by_text(x):
    return tf.strings.to_number(tf.strings.as_string(x))


@pytest.mark.parametrize(("op", "named"), [(by_python, "EagerPyFunc"), (by_text, "AsString")])
def test_what_xla_cannot_compile_is_left_out_with_the_reason(op, named, weights, x, timed):
    timed.update({"float32": 2.0, "lists": 1.0})
    report = tfamp.tune(lambda x: op(x) @ weights, x, **OPTIONS)
    (reason,) = (each for each in report.left_out if each.startswith("xla: "))
    assert reason.startswith("xla: XLA cannot compile it: ")
    assert named in reason
    assert f"left out: {reason}" in report.to_text()
    assert "xla" not in [row.candidate for row in report.rows]
    assert report.chosen.candidate == "lists"


def test_an_error_of_the_function_is_raised(x):
    def checked(x):
        tf.debugging.assert_equal(tf.reduce_sum(x), 0.0, "the sum is not zero")
        return x @ tf.transpose(x)

    with pytest.raises(tf.errors.InvalidArgumentError, match="the sum is not zero"):
        tfamp.tune(checked, x, candidates=("xla",), **OPTIONS)


def test_ops_decide_whether_it_is_tried_unless_it_is_asked_for(timed):
    images, filters = tf.ones((1, 8, 8, 3)), tf.Variable(tf.ones((3, 3, 3, 4)))

    def convolution(x):
        return tf.nn.conv2d(x, filters, 1, "SAME")

    report = tfamp.tune(convolution, images, **OPTIONS)
    assert "xla: 1 convolutions, which XLA makes slower on a CPU" in report.left_out
    asked = tfamp.tune(convolution, images, candidates=("xla",), **OPTIONS)
    assert [row.candidate for row in asked.rows] == ["float32", "xla"]
    late = tfamp.tune(convolution, images, candidates=("xla", "lists_xla"), seconds=0, **OPTIONS)
    assert [row.candidate for row in late.rows] == ["float32", "xla"]
    (reason,) = late.left_out
    assert reason.startswith("lists_xla: others that XLA compiles took ")
    assert reason.endswith("longer than seconds=0")


def test_convolutions_of_sequences_are_compiled_with_their_gradients(timed):
    timed.update({"float32": 2.0, "lists": 2.0, "float32_xla": 1.0})
    filters = tf.Variable(tf.random.stateless_normal((5, 4, 4), (1, 2)))

    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            value = tf.reduce_sum(
                tf.nn.conv1d(tf.nn.conv1d(x, filters, 1, "SAME"), filters, 1, "SAME") ** 2
            )
        return tape.gradient(value, [x, filters])

    x = tf.random.stateless_normal((2, 16, 4), (3, 4))
    report = tfamp.tune(step, x, **OPTIONS)
    assert report.chosen.candidate == "xla"
    for found, expected in zip(report.best(x), step(x), strict=True):
        assert_close(found, expected, "float32", depth=320)


@pytest.mark.parametrize("chosen", [True, False])
def test_a_function_with_a_jit_compile_keeps_it(chosen, weights, x, timed):
    timed.update({"float32": 2.0, "float32_xla": 2.0, "lists": 1.0, "lists_xla": 1.0})
    given = tf.function(lambda x: tf.nn.gelu(x @ weights), jit_compile=chosen)
    report = tfamp.tune(given, x, **OPTIONS)
    assert f"xla: the function has jit_compile={chosen}" in report.left_out
    assert report.chosen.candidate == "lists"
    assert is_compiled(report.best, x) == chosen
    assert_close(report.best(x), given(x), "bfloat16", depth=64)


def test_models_and_concrete_functions_are_compiled(layer, x, timed):
    timed.update({"float32": 2.0, "float32_xla": 1.0})
    model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(64), keras.layers.Dense(4)])
    for fn in (model, layer.get_concrete_function(x)):
        report = tfamp.tune(fn, x, candidates=("xla",), **OPTIONS)
        assert is_compiled(report.best, x)
        assert_close(report.best(x), fn(x), "float32", depth=64)


def test_a_choice_for_another_xla_is_measured_again(layer, x, timed, monkeypatch, tmp_path):
    monkeypatch.delenv("TFAMP_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    timed.update({"float32": 2.0, "float32_xla": 1.0})
    first = tfamp.tune(layer, x, **OPTIONS)
    again = tfamp.tune(layer, x, **OPTIONS)
    assert again.source.startswith("measured before")
    assert again.left_out == first.left_out
    assert again.rows == first.rows
    assert is_compiled(again.best, x)
    monkeypatch.setattr(tuning, "xla_works", lambda device: False)
    without = tfamp.tune(layer, x, **OPTIONS)
    assert without.source.startswith("measured now")
    assert "xla: XLA does not work here" in without.left_out
    assert not is_compiled(without.best, x)


def test_what_auto_takes_is_kept_unless_another_way_leads(weights, x, timed, monkeypatch):
    monkeypatch.setattr(tuning, "low_dtype", lambda dtype: dtype or "bfloat16")
    wide = tf.ones((512, 64))

    def step(x):
        for _ in range(3):
            x = tf.nn.gelu(x @ weights) / 8.0
        return x

    timed.update({"float32": 1.0, "lists": 0.897, "fused": 0.9, "float32_xla": 0.95})
    report = tfamp.tune(step, wide, **OPTIONS)
    assert (report.chosen.candidate, report.incumbent) == ("fused", "fused")
    assert "fused is what level 'auto' takes: lists is 1.00 times as fast, but" in report.to_text()
    timed["lists"] = 0.8
    assert tfamp.tune(step, wide, **OPTIONS).chosen.candidate == "lists"
    timed.update({"lists": 1.2, "fused": 1.2, "float32_xla": 1.2})
    slow = tfamp.tune(step, wide, **OPTIONS)
    assert (slow.chosen.candidate, slow.incumbent) == ("float32", "fused")
