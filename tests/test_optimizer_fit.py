"""LossScaleOptimizer under model.fit, in every way Keras can run a step, and in a compiled loop."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp
from helpers.cases import first_of, tiers
from helpers.graph_asserts import branches
from helpers.training import assert_identical, data, small_model, snapshot, train_step

WAYS = {
    "graph": {"jit_compile": False},
    "xla": {"jit_compile": True},
    "eager": {"run_eagerly": True},
    "several_steps": {"jit_compile": False, "steps_per_execution": 4},
    "several_steps_xla": {"jit_compile": True, "steps_per_execution": 4},
}
EVERY_WAY = pytest.mark.parametrize(
    "way", tiers(["graph"], ["several_steps", "xla", "eager"], ["several_steps_xla"])
)


def fit(model, x, y, **arguments):
    return model.fit(x, y, batch_size=8, shuffle=False, verbose=0, **arguments)


@EVERY_WAY
def test_fit_equals_the_inner_optimizer_and_on_bad_data_changes_only_the_scale(way):
    x, y = data()
    wrapped, bare = small_model(), small_model()
    optimizer = tfamp.LossScaleOptimizer(
        keras.optimizers.Adam(0.01), initial_scale=2.0**10, dynamic_growth_steps=3
    )
    wrapped.compile(optimizer, "mse", **WAYS[way])
    bare.compile(keras.optimizers.Adam(0.01), "mse", **WAYS[way])
    fit(wrapped, x, y, epochs=2)
    fit(bare, x, y, epochs=2)
    for actual, expected in zip(wrapped.get_weights(), bare.get_weights(), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-6, atol=1e-7)
    counts = optimizer.loss_scale, optimizer.dynamic_counter, optimizer.iterations
    assert [float(each) for each in counts] == [2.0**12, 2, 8]
    before = snapshot(wrapped, optimizer.inner_optimizer)
    for skipped, bad in ((4, np.inf), (8, np.nan)):
        x[::8] = bad  # One row of every batch.
        fit(wrapped, x, y)
        assert_identical(snapshot(wrapped, optimizer.inner_optimizer), before)
        counts = optimizer.skipped_steps, optimizer.consecutive_skipped_steps
        assert [int(each) for each in counts] == [skipped] * 2
        assert float(optimizer.loss_scale) == 2.0 ** (12 - skipped)


@pytest.mark.parametrize(
    "arguments", first_of([{}, {"grad_clip": 1.0}, {"loss_scale": 1.0}]), ids=str
)
def test_a_step_branches_once(arguments):
    model = small_model()
    model.compile(tfamp.LossScaleOptimizer(keras.optimizers.Adam(), **arguments), "mse")
    loop = train_step(model, model.optimizer, unscale=True)
    for step in (loop, lambda x, y: model.train_step((x, y))):
        assert branches(step, *data(1)) == 1


class Noisy(keras.optimizers.SGD):
    """Moves at random, from a seed that is a variable."""

    def build(self, variables):
        super().build(variables)
        self.seed = keras.random.SeedGenerator(1)

    def update_step(self, gradient, variable, learning_rate):
        noise = keras.random.normal(variable.shape, seed=self.seed)
        super().update_step(gradient + noise, variable, learning_rate)


@pytest.mark.parametrize(
    ("inner", "arguments"),
    first_of(
        [
            (lambda: keras.optimizers.AdamW(0.01), {"grad_clip": 1.0}),
            (lambda: keras.optimizers.Lion(0.01), {"master_weights": True}),
            (lambda: keras.optimizers.AdamW(0.01), {"weight_rounding": "stochastic"}),
            (Noisy, {}),
        ]
    ),
)
def test_a_compiled_step_has_no_branch_and_one_that_is_skipped_changes_nothing(inner, arguments):
    low = arguments.keys() & {"master_weights", "weight_rounding"}
    with tfamp.policy_scope("bfloat16" if low else "float32"):
        model = small_model()
    optimizer = tfamp.LossScaleOptimizer(inner(), loss_scale=2.0, **arguments)
    optimizer.build(model.trainable_variables)
    step = tf.function(train_step(model, optimizer), jit_compile=True)
    x, y = data(1)
    assert " conditional(" not in step.experimental_get_compiler_ir(x, y)(stage="hlo")
    values = [*model.variables, *optimizer.inner_optimizer.variables, *optimizer.master_variables]
    values += [optimizer.inner_optimizer.seed.state] if inner is Noisy else []
    for bad, moves in ((1.0, True), (np.nan, False), (np.inf, False), (1.0, True)):
        before = [v.numpy().tobytes() for v in values]
        step(x * np.float32(bad), y)
        assert (before != [v.numpy().tobytes() for v in values]) is moves
    assert [int(each) for each in (optimizer.iterations, optimizer.skipped_steps)] == [2, 2]


def test_reading_the_state_inside_the_step_needs_no_host():
    weight = keras.Variable(1.0)
    optimizer = tfamp.LossScaleOptimizer(keras.optimizers.SGD(1.0), initial_scale=4.0)
    optimizer.build([weight])

    @tf.function(jit_compile=True)  # XLA refuses ops that go back to Python.
    def step(gradient):
        optimizer.apply_gradients([(gradient, weight)], unscaled=False)
        counts = optimizer.dynamic_counter, optimizer.skipped_steps
        last = optimizer.consecutive_skipped_steps, optimizer.last_step_finite
        return optimizer.loss_scale, *counts, *last

    assert [float(value) for value in step(tf.constant(np.nan))] == [2.0, 0.0, 1.0, 1.0, 0.0]
    assert [float(value) for value in step(tf.constant(1.0))] == [2.0, 1.0, 1.0, 0.0, 1.0]


@pytest.mark.skipif(
    not hasattr(keras.optimizers, "MultiOptimizer"), reason="this Keras has no MultiOptimizer"
)
def test_callbacks_reach_the_learning_rates_of_several_optimizers():
    x, y = data()
    model = small_model()
    inner = keras.optimizers.SGD(0.5), keras.optimizers.Adam(0.25)
    several = keras.optimizers.OptimizerMap(inner[0], {".*bias": inner[1]})
    optimizer = tfamp.LossScaleOptimizer(keras.optimizers.MultiOptimizer(several))
    model.compile(optimizer, "mse", jit_compile=False)
    scheduler = keras.callbacks.LearningRateScheduler(lambda epoch, lr: lr / 4)
    fit(model, x, y, callbacks=[scheduler])
    assert [float(each.learning_rate) for each in inner] == [0.125, 0.0625]
    assert set(optimizer.optimizers) == set(inner)
    plateau = keras.callbacks.ReduceLROnPlateau("loss", factor=0.5, patience=1, min_delta=1e9)
    history = fit(model, x * 0, y, epochs=2, callbacks=[plateau]).history
    assert [float(each.learning_rate) for each in inner] == [0.0625, 0.03125]
    assert {"learning_rate_sgd", "learning_rate_adam"} <= set(history)


def test_schedulers_the_setter_and_swapped_averages_know_the_wrapper():
    x, y = data()
    model = small_model()
    inner = keras.optimizers.SGD(0.05, use_ema=True, ema_momentum=0.5)
    model.compile(tfamp.LossScaleOptimizer(inner), "mse", jit_compile=False)
    scheduler = keras.callbacks.LearningRateScheduler(lambda epoch, lr: lr / 4)
    swap = keras.callbacks.SwapEMAWeights(swap_on_epoch=True)
    fit(model, x, y, epochs=2, callbacks=[swap, scheduler])
    assert float(model.optimizer.learning_rate) == pytest.approx(0.05 / 16)
    model.optimizer.learning_rate = 0.25
    assert float(inner.learning_rate) == 0.25
    average = inner._model_variables_moving_average[0].numpy()
    np.testing.assert_array_equal(model.trainable_variables[0].numpy(), average)
