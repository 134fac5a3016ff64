"""Saving and resuming: every way restores everything, and training goes on bit-identically."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp
from helpers.cases import first_of, tiers
from helpers.training import assert_same_values, data, small_model, snapshot, train_step

# Values other than the defaults, so that a forgotten field shows.
RULE = tfamp.DynamicLossScale(
    initial_scale=2.0**12,
    growth_factor=4.0,
    backoff_factor=0.25,
    growth_steps=7,
    hysteresis=2,
    min_scale=2.0**-8,
    max_scale=2.0**24,
)
FIXED = tfamp.FixedLossScale(512.0, skip_nonfinite=False)


def make_optimizer(rule=RULE):
    return tfamp.LossScaleOptimizer(
        keras.optimizers.Adam(0.01), loss_scale=rule, aggregate_in_float16=True, name="wrapped"
    )


def steps(count, seed):
    """Batches of which one in five is bad, the same for the same seed."""
    x, y = data()
    random = np.random.default_rng(seed)
    for _ in range(count):
        rows = random.integers(0, len(x), 8)
        bad = random.random() < 0.2
        yield tf.constant(x[rows] * np.float32(np.nan if bad else 1.0)), tf.constant(y[rows])


@pytest.mark.parametrize("rule", [RULE, FIXED, tfamp.DynamicLossScale(), tfamp.FixedLossScale()])
def test_config_round_trip(rule):
    optimizer = make_optimizer(rule)
    config = optimizer.get_config()
    again = tfamp.LossScaleOptimizer.from_config(config)
    assert again.get_config() == config == optimizer.get_config(), "config must not be modified"
    assert again.dynamic == isinstance(rule, tfamp.DynamicLossScale)
    assert again.initial_scale == float(again.loss_scale) == rule.initial_scale
    assert again.name == "wrapped"
    assert type(again.inner_optimizer) is keras.optimizers.Adam


def train(model, optimizer, batches, traced=True):
    step = train_step(model, optimizer)
    step = tf.function(step) if traced else step
    for x, y in batches:
        step(x, y)


@pytest.mark.parametrize(
    "traced", first_of([True, False], pytest.mark.nightly), ids=["function", "eager"]
)
@pytest.mark.parametrize("built", first_of([True, False]), ids=["built", "not_built"])
def test_checkpoint_resumes_bit_identically(tmp_path, traced, built):
    model, optimizer = small_model(), make_optimizer()
    optimizer.build(model.trainable_variables)
    train(model, optimizer, steps(100, seed=1), traced)
    assert int(optimizer.skipped_steps) > 5, "the test needs a state worth restoring"
    path = tf.train.Checkpoint(model=model, optimizer=optimizer).save(tmp_path / "checkpoint")
    saved = snapshot(model, optimizer)
    train(model, optimizer, steps(100, seed=2), traced)

    other, resumed = small_model(), make_optimizer()
    if built:
        resumed.build(other.trainable_variables)
    status = tf.train.Checkpoint(model=other, optimizer=resumed).restore(path)
    if built:
        status.assert_consumed()
        assert_same_values(snapshot(other, resumed), saved)
    train(other, resumed, steps(100, seed=2), traced)
    assert_same_values(snapshot(other, resumed), snapshot(model, optimizer))


def fit(model, x, y):
    model.fit(x, y, batch_size=8, shuffle=False, verbose=0)


@pytest.mark.parametrize("policy", tiers(["mixed_float16"], ["float32"], ["mixed_bfloat16"]))
def test_keras_file_resumes_bit_identically(tmp_path, policy):
    x, y = data()
    x[9] = np.nan
    with tfamp.policy_scope(policy):
        model = small_model()
    loss = keras.losses.MeanSquaredError()
    model.compile(make_optimizer(), loss, jit_compile=False)
    fit(model, x, y)
    assert int(model.optimizer.skipped_steps) == 1
    model.save(tmp_path / "model.keras")
    # Without the policy Keras's kernels add up, which may round otherwise.
    with tfamp.policy_scope(policy):
        other = keras.models.load_model(tmp_path / "model.keras")
    assert isinstance(other.optimizer, tfamp.LossScaleOptimizer)
    assert other.optimizer.get_config() == model.optimizer.get_config()
    model.save(tmp_path / "model.h5")
    with tfamp.policy_scope(policy):
        loaded = keras.models.load_model(tmp_path / "model.h5")  # without the optimizer's state
    np.testing.assert_array_equal(loaded(x), model(x))
    assert type(loaded.optimizer) is tfamp.LossScaleOptimizer
    fit(loaded, x, y)
    assert int(loaded.optimizer.iterations) > 0
    assert_equal_state(other, model)
    other.compile(other.optimizer, loss, jit_compile=False)
    fit(model, x, y)
    fit(other, x, y)
    assert_equal_state(other, model)


def assert_equal_state(actual, expected):
    assert_same_values(snapshot(actual, actual.optimizer), snapshot(expected, expected.optimizer))


def model_of_a_bare_optimizer(path, optimizer):
    """A model that was trained with an optimizer of Keras's and saved, with its data."""
    random = np.random.default_rng(0)
    x, y = random.normal(size=(32, 4)).astype("float32"), np.ones((32, 1), "float32")
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8), keras.layers.Dense(1)])
    model.compile(optimizer, "mse")
    model.fit(x, y, batch_size=8, verbose=0)
    model.save(path)
    return model, x, y


def assert_restored_and_continued(loaded, model, x, y):
    assert int(loaded.optimizer.iterations) == int(model.optimizer.iterations) == 4
    slots = [v.numpy() for v in model.optimizer.variables[2:]]
    restored = [v.numpy() for v in loaded.optimizer.inner_optimizer.variables[2:]]
    for slot, value in zip(slots, restored, strict=True):
        np.testing.assert_array_equal(slot, value)
    assert any(np.any(slot) for slot in slots)
    for each in (model, loaded):
        each.fit(x, y, batch_size=8, verbose=0, shuffle=False)
    for weight, value in zip(model.get_weights(), loaded.get_weights(), strict=True):
        np.testing.assert_allclose(value, weight, atol=2e-4)


def test_a_file_of_a_bare_optimizer_keeps_its_state_if_it_is_loaded_in_float32(tmp_path):
    model, x, y = model_of_a_bare_optimizer(tmp_path / "bare.keras", keras.optimizers.Adam())
    with tfamp.policy_scope("float32"):
        loaded = keras.models.load_model(tmp_path / "bare.keras")
    tfamp.prepare(loaded, level="O2", dtype="float16")
    assert_restored_and_continued(loaded, model, x, y)


@pytest.mark.parametrize("way", first_of(["adam", "momentum", "amsgrad"]))
@pytest.mark.parametrize("run_eagerly", first_of([False, True]))
def test_a_file_of_a_bare_optimizer_keeps_its_state_under_a_float16_policy(
    tmp_path, way, run_eagerly
):
    make = {
        "adam": keras.optimizers.Adam,
        "momentum": lambda: keras.optimizers.SGD(0.01, momentum=0.9),
        "amsgrad": lambda: keras.optimizers.AdamW(0.001, amsgrad=True),
    }[way]
    model, x, y = model_of_a_bare_optimizer(tmp_path / "bare.keras", make())
    model.optimizer.learning_rate.assign(0.003)
    model.save(tmp_path / "bare.keras")
    # A warning of Keras's, that it skips variables, would be an error here.
    with tfamp.policy_scope("mixed_float16"):
        loaded = keras.models.load_model(tmp_path / "bare.keras")
    assert type(loaded.optimizer) is keras.optimizers.LossScaleOptimizer
    assert float(loaded.optimizer.learning_rate) == np.float32(0.003)
    assert float(loaded.optimizer.dynamic_scale) == loaded.optimizer.initial_scale
    loaded.run_eagerly = run_eagerly
    assert_restored_and_continued(loaded, model, x, y)


def test_a_file_of_keras_s_wrapper_is_loaded_as_before_under_a_float16_policy(tmp_path):
    path = tmp_path / "wrapped.keras"
    wrapper = keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam())
    model, _, _ = model_of_a_bare_optimizer(path, wrapper)
    model.optimizer.dynamic_scale.assign(64.0)
    model.save(path)
    with tfamp.policy_scope("mixed_float16"):
        loaded = keras.models.load_model(path)
    assert float(loaded.optimizer.dynamic_scale) == 64.0
    assert len(loaded.optimizer.variables) == len(model.optimizer.variables) > 8
    for value, saved in zip(loaded.optimizer.variables, model.optimizer.variables, strict=True):
        np.testing.assert_array_equal(value.numpy(), saved.numpy())


def test_a_file_of_an_optimizer_that_does_not_fit_is_skipped_and_keras_says_so(tmp_path):
    model, _, _ = model_of_a_bare_optimizer(tmp_path / "w.keras", keras.optimizers.Adam())
    model.save_weights(tmp_path / "adam.weights.h5")
    other = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8), keras.layers.Dense(1)])
    with tfamp.policy_scope("mixed_float16"):
        other.compile(keras.optimizers.SGD(momentum=0.9), "mse")
        other.optimizer.build(other.trainable_variables)
        with pytest.warns(UserWarning, match="Skipping variable"):
            other.load_weights(tmp_path / "adam.weights.h5")
    assert int(other.optimizer.iterations) == 0


def test_a_file_whose_optimizer_names_its_own_variables_is_left_to_keras(tmp_path):
    class Named(keras.optimizers.SGD):
        def save_own_variables(self, store):
            for variable in self.variables:
                store[variable.path.replace("/", "_")] = variable.numpy()

    model, _, _ = model_of_a_bare_optimizer(tmp_path / "w.keras", Named(momentum=0.9))
    model.save_weights(tmp_path / "named.weights.h5")
    other = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8), keras.layers.Dense(1)])
    with tfamp.policy_scope("mixed_float16"):
        other.compile(keras.optimizers.SGD(momentum=0.9), "mse")
        other.optimizer.build(other.trainable_variables)
        with pytest.raises(ValueError, match="could not be loaded"):
            other.load_weights(tmp_path / "named.weights.h5")
    assert int(other.optimizer.iterations) == 0


def test_without_a_policy_of_tfamp_keras_loads_as_it_does(tmp_path):
    model_of_a_bare_optimizer(tmp_path / "bare.keras", keras.optimizers.Adam())
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_float16")
    try:
        with pytest.warns(UserWarning, match="Skipping variable"):
            loaded = keras.models.load_model(tmp_path / "bare.keras")
    finally:
        keras.config.set_dtype_policy(before)
    assert int(loaded.optimizer.iterations) == 0


def test_a_checkpoint_of_a_bare_optimizer_has_all_but_the_scale_and_the_counters(tmp_path):
    weight, bare = keras.Variable([1.0, 2.0]), keras.optimizers.Adam(0.1)
    bare.apply([tf.ones(2)], [weight])
    path = tf.train.Checkpoint(optimizer=bare).save(tmp_path / "bare")
    wrapper = tfamp.LossScaleOptimizer(keras.optimizers.Adam(0.1))
    wrapper.build([weight])
    status = tf.train.Checkpoint(optimizer=wrapper).restore(path)
    with pytest.raises(AssertionError) as missing:
        status.assert_existing_objects_matched()
    # Only variables of the wrapper are missing.
    assert "adam" not in str(missing.value)
    for mine, theirs in zip(wrapper.inner_optimizer.variables, bare.variables, strict=True):
        np.testing.assert_array_equal(mine.numpy(), theirs.numpy())
    assert int(wrapper.iterations) == 1
