"""Weights in 16 bits learn like float32 ones with every optimizer, or a warning says so."""

import functools
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp
from helpers.cases import one_of_each, tiers
from helpers.optimizers import plain_optimizers
from tfamp.training.optimizer_state import STATE_NEEDING_FLOAT32

KERAS = plain_optimizers()
# Rates at which 150 float32 steps get well below the first loss.
RATES = {
    **{"Adadelta": 1.0, "Adafactor": 0.05, "Adagrad": 0.1, "Ftrl": 0.1, "SGD": 0.05},
    **{"Adamax": 0.02, "Lion": 0.005},
}
X = np.random.default_rng(0).standard_normal((64, 8)).astype("float32")
Y = (X @ np.random.default_rng(1).standard_normal((8, 1)) / 3).astype("float32")


def _model(dtype):
    keras.utils.set_random_seed(1)
    with tfamp.policy_scope(dtype):
        hidden = keras.layers.Dense(16, "relu", bias_initializer="uniform")
        return keras.Sequential([keras.Input((8,)), hidden, keras.layers.Dense(1)])


def _loss(model):
    return tf.reduce_mean(tf.square(tf.cast(model(X), "float32") - Y))


def _step(model, optimizer):
    variables = model.trainable_variables
    with tf.GradientTape() as tape:
        scaled = optimizer.get_scaled_loss(_loss(model))
    optimizer.apply(tape.gradient(scaled, variables), variables)


def _learnt(inner, dtype, steps=150, *, compiles=False, **arguments):
    """The first and the last loss of a model whose variables are of a dtype; the optimizer."""
    model = _model(dtype)
    optimizer = tfamp.LossScaleOptimizer(inner, **arguments)
    optimizer.build(model.trainable_variables)

    @functools.partial(tf.function, jit_compile=compiles)
    def run():
        for _ in tf.range(steps):
            _step(model, optimizer)

    before = float(_loss(model))
    run()
    return before, float(_loss(model)), optimizer


def _inner(name):
    return KERAS[name](RATES.get(name, 0.01))


@functools.cache
def _of_float32(name):
    return _learnt(_inner(name), "float32")[1]


@pytest.mark.parametrize(
    ("name", "dtype"), one_of_each(sorted(KERAS), ["bfloat16", "float16"], quick=2)
)
def test_weights_in_16_bits_learn_like_float32(name, dtype):
    with warnings.catch_warnings():
        warnings.simplefilter("error", tfamp.TfampWarning)
        before, after, optimizer = _learnt(_inner(name), dtype)
    assert len(optimizer.master_variables) == 4
    exact = _of_float32(name)
    assert exact < before / 10, "a rate at which float32 learns"
    # The gradients are 16-bit, and so is the forward pass that measures: 2**-8 of an output.
    assert after < 1.5 * exact + before * 2.0**-8


@pytest.mark.parametrize("name", tiers(["Nadam"], ["Lamb"], ["ScheduleFreeAdamW", "Adam"]))
def test_a_step_compiled_as_a_whole_learns_too(name):
    before, after, _ = _learnt(_inner(name), "bfloat16", compiles=True)
    assert after < 1.5 * _of_float32(name) + before * 2.0**-8


@pytest.mark.parametrize("name", ["Nadam", "Lamb"])
def test_an_eager_step_is_that_of_float32_variables(name):
    weight, wide = keras.Variable([1.0, -2.0], dtype="bfloat16"), keras.Variable([1.0, -2.0])
    optimizer = tfamp.LossScaleOptimizer(_inner(name))
    optimizer.build([weight])
    bare = _inner(name)
    for gradient in ([1e-3, 0.5], [2e-3, -0.25], [1e-3, 1.0]):
        optimizer.apply([tf.constant(gradient)], [weight], unscaled=True)
        bare.apply([tf.constant(gradient)], [wide])
    np.testing.assert_allclose(optimizer.master_variables[0].numpy(), wide.numpy(), rtol=1e-6)
    np.testing.assert_array_equal(weight.numpy(), tf.cast(wide.value, "bfloat16").numpy())


def test_fit_under_a_pure_policy_learns():
    model = _model("bfloat16")
    model.compile(tfamp.LossScaleOptimizer(keras.optimizers.Adam(0.01)), "mse")
    losses = model.fit(X, Y, batch_size=64, epochs=60, verbose=0).history["loss"]
    assert losses[-1] < losses[0] / 5


def _said(run):
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", tfamp.TfampWarning)
        run()
    return [str(each.message) for each in said if each.category is tfamp.TfampWarning]


@pytest.mark.parametrize("wide", ["float32", "float64"])
@pytest.mark.parametrize("name", one_of_each(["SGD", "RMSprop", "Adagrad", "Ftrl"]))
def test_low_and_wide_weights_of_one_model_train_together(name, wide):
    """Without a loss scale only the low gradients are cast; Keras sums all of them."""

    def moved(dtype, own):
        with tfamp.policy_scope(dtype):
            layers = [keras.layers.Dense(8, "tanh", dtype=own), keras.layers.Dense(1)]
            model = keras.Sequential([keras.Input(X.shape[1:]), *layers])
        draw = np.random.default_rng(0).standard_normal
        model.set_weights([draw(weight.shape) / 4 for weight in model.weights])
        optimizer = getattr(keras.optimizers, name)(0.05)
        model.compile(tfamp.LossScaleOptimizer(optimizer, loss_scale=1.0), "mse")
        before = model.get_weights()
        model.fit(X, Y, batch_size=32, shuffle=False, verbose=0)
        after = model.get_weights()
        return [(b.astype("float64") - a).ravel() for a, b in zip(before, after, strict=True)]

    exact = np.concatenate(moved("float32", "float32"))
    low = np.concatenate(moved("bfloat16", wide))
    assert np.linalg.norm(low - exact) < 0.1 * np.linalg.norm(exact)


@pytest.mark.parametrize("name", sorted(KERAS))
def test_without_masters_a_warning_names_what_is_lost_once(name):
    weights = [keras.Variable([1.0], dtype="bfloat16", name=f"weight_{i}") for i in range(2)]
    optimizer = tfamp.LossScaleOptimizer(_inner(name), master_weights=False)

    def build():
        optimizer.build(weights)
        optimizer.build(weights)

    expected = (
        f"keeps {STATE_NEEDING_FLOAT32[name]}, which bfloat16 slots may not hold: for 2 variables"
    )
    said = _said(build)
    assert len(said) == (STATE_NEEDING_FLOAT32[name] != "")
    assert all(expected in text and "Leave master_weights out" in text for text in said)
    assert optimizer.master_variables == []


def test_an_inner_optimizer_that_was_built_goes_on_with_a_warning():
    weight = keras.Variable([1.0], dtype="float16")
    inner = keras.optimizers.RMSprop(0.5)
    inner.build([weight])
    optimizer = tfamp.LossScaleOptimizer(inner)
    (said,) = _said(lambda: optimizer.build([weight]))
    assert "create a new one, and let LossScaleOptimizer build it" in said
    optimizer.apply([tf.constant([1.0])], [weight], unscaled=True)
    assert float(weight[0]) < 0


def test_float32_variables_get_neither_masters_nor_a_warning():
    weight = keras.Variable([1.0])
    optimizer = tfamp.LossScaleOptimizer(keras.optimizers.Adam())
    assert _said(lambda: optimizer.build([weight])) == []
    assert optimizer.master_variables == []
    assert optimizer.get_config()["master_weights"] is None


def test_prepare_leaves_a_choice_against_masters(recwarn):
    weights = {"level": "O3", "dtype": "float16", "master_weights": False}
    mine = tfamp.LossScaleOptimizer(keras.optimizers.Adam())
    _, optimizer = tfamp.prepare(_model("float32"), mine, **weights)
    assert optimizer.master_weights is False
    assert sum("may not hold" in str(each.message) for each in recwarn) == 1


@pytest.mark.parametrize("kept", [None, False])
def test_a_keras_file_goes_on_as_it_was_saved(tmp_path, kept):
    """Files of earlier versions say False: their slots are 16-bit, as they were."""
    model = _model("float16")
    inner = keras.optimizers.SGD(0.05, momentum=0.9)
    model.compile(tfamp.LossScaleOptimizer(inner, master_weights=kept), "mse", jit_compile=False)
    model.fit(X, Y, batch_size=32, shuffle=False, verbose=0)
    model.save(tmp_path / "model.keras")
    other = keras.models.load_model(tmp_path / "model.keras")
    assert other.optimizer.master_weights is kept
    assert len(other.optimizer.master_variables) == (4 if kept is None else 0)
    for each in (model, other):
        each.fit(X, Y, batch_size=32, shuffle=False, verbose=0)
    for ours, theirs in zip(model.get_weights(), other.get_weights(), strict=True):
        np.testing.assert_array_equal(ours, theirs)
