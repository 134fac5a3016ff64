"""Loops as PyTorch's tests of its GradScaler have them: scaled training equals unscaled."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp
from helpers.cases import one_of_each, tiers
from helpers.training import data, small_model

BAD = 2  # The batch whose first gradient overflows.


def spoilt(gradients, number):
    return [tf.where(tf.equal(number, BAD), np.inf, 1.0) * gradients[0], *gradients[1:]]


def loss_of(model, x, y):
    return tf.reduce_mean(tf.square(model(x, training=True) - y))


def values(model):
    return [v.value for v in model.trainable_variables]


def pairs(gradients, model):
    return zip(gradients, model.trainable_variables, strict=True)


def scaled_gradients(scaler, model, x, y, number):
    with tf.GradientTape() as tape:
        scaled = scaler.scale(loss_of(model, x, y))
    return spoilt(tape.gradient(scaled, values(model)), number)


def clipped_at_the_scale(scaler, optimizer, model, x, y, number):
    gradients = scaled_gradients(scaler, model, x, y, -1)
    gradients, _ = tf.clip_by_global_norm(gradients, 0.5 * scaler.get_scale())
    scaler.step(optimizer, pairs(spoilt(gradients, number), model))


def clipped_after_unscaling(scaler, optimizer, model, x, y, number):
    gradients = scaler.unscale(optimizer, scaled_gradients(scaler, model, x, y, number))
    gradients, _ = tf.clip_by_global_norm(gradients, 0.5)
    scaler.step(optimizer, pairs(gradients, model))


def penalty(scaler, optimizer, model, x, y, number):
    with tf.GradientTape() as tape:
        with tf.GradientTape() as inner:
            loss = loss_of(model, x, y)
            scaled = scaler.scale(loss)
        gradients = [g / scaler.get_scale() for g in inner.gradient(scaled, values(model))]
        scaled = scaler.scale(loss + tf.linalg.global_norm(gradients))
    scaler.step(optimizer, pairs(spoilt(tape.gradient(scaled, values(model)), number), model))


def accumulated(scaler, optimizer, model, x, y, number):
    halves = zip(tf.split(x, 2), tf.split(y, 2), strict=True)
    gradients = [scaled_gradients(scaler, model, *half, number) for half in halves]
    scaler.step(optimizer, pairs([(a + b) / 2.0 for a, b in zip(*gradients, strict=True)], model))


LOOPS = (clipped_at_the_scale, clipped_after_unscaling, penalty, accumulated)


def trained(loop, way, **arguments):
    model, optimizer = small_model(), keras.optimizers.SGD(0.05, momentum=0.5)
    optimizer.build(model.trainable_variables)
    scaler = tfamp.GradScaler(**arguments)

    def step(x, y, number):
        loop(scaler, optimizer, model, x, y, number)
        scaler.update()

    step = tf.function(step) if way == "function" else step
    for number, batch in enumerate(zip(*(np.split(each, 4) for each in data()), strict=True)):
        if number == BAD and not scaler.is_enabled():
            continue
        step(*map(tf.constant, batch), tf.constant(number))
    return model.get_weights(), optimizer.variables, float(scaler.get_scale())


@pytest.mark.parametrize(("loop", "way"), one_of_each(LOOPS, ["function", "eager"], quick=2))
def test_training_with_a_scaler_is_training_without_it_and_without_the_bad_batch(loop, way):
    weights, state, scale = trained(loop, way, init_scale=128.0, growth_interval=1)
    expected, expected_state, disabled = trained(loop, way, enabled=False)
    assert (scale, disabled) == (128.0 * 2**3 / 2, 1.0)
    for value, wanted, start in zip(weights, expected, small_model().get_weights(), strict=True):
        np.testing.assert_allclose(value, wanted, rtol=1e-5, atol=1e-6)
        assert np.abs(value - start).max() > 1e-3
    for value, wanted in zip(state, expected_state, strict=True):
        np.testing.assert_allclose(value, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("enabled", "traced"), tiers([(True, False), (False, True)], [(True, True), (False, False)])
)
def test_two_models_with_an_optimizer_each_and_losses_of_both(enabled, traced):
    models = [small_model() for _ in range(2)]
    models[1].set_weights([w / 2 for w in models[1].get_weights()])
    optimizers = [keras.optimizers.SGD(0.05) for _ in models]
    for model, optimizer in zip(models, optimizers, strict=True):
        optimizer.build(model.trainable_variables)
    scaler = tfamp.GradScaler(init_scale=128.0, growth_interval=1, enabled=enabled)

    def step(x, y, number):
        with tf.GradientTape(persistent=True) as tape:
            first, second = (model(x) for model in models)
            outputs = 0.3 * first + 0.7 * second, 0.6 * first - 0.4 * second
            losses = scaler.scale([tf.reduce_mean(tf.square(each - y)) for each in outputs])
            total = losses[0] + losses[1]
        gradients = [tape.gradient(total, values(model)) for model in models]
        gradients[0] = scaler.unscale(optimizers[0], gradients[0])
        gradients[1] = spoilt(gradients[1], number if enabled else -1)
        applied = [
            scaler.step(optimizer, pairs(each, model))
            for optimizer, each, model in zip(optimizers, gradients, models, strict=True)
        ]
        scaler.update()
        return applied

    step = tf.function(step) if traced else step
    batches = list(zip(*(np.split(each, 4) for each in data()), strict=True))
    before = [model.get_weights() for model in models]
    applied = [step(*map(tf.constant, b), tf.constant(n)) for n, b in enumerate(batches)]
    assert [[bool(each) for each in both] for both in applied] == [
        [True, not (enabled and number == BAD)] for number in range(4)
    ]
    assert float(scaler.get_scale()) == (128.0 * 2**3 / 2 if enabled else 1.0)
    for model, weights in zip(models, before, strict=True):
        for value, start in zip(model.get_weights(), weights, strict=True):
            assert np.abs(value - start).max() > 1e-3


@pytest.mark.parametrize("traced", [True, False])
def test_sparse_gradients_stay_sparse_and_float16_rows_of_one_index_are_added_in_float32(traced):
    table = tf.Variable(tf.zeros((3, 1)))
    optimizer, scaler = keras.optimizers.SGD(1.0), tfamp.GradScaler(init_scale=4.0)
    optimizer.build([table])

    def step(rows):
        gradient = tf.IndexedSlices(rows, tf.constant([0, 1, 0]), tf.constant([3, 1]))
        (gradient,) = scaler.unscale(optimizer, [gradient])
        assert isinstance(gradient, tf.IndexedSlices)
        applied = scaler.step(optimizer, [(gradient, table)])
        scaler.update()
        return applied

    step = tf.function(step) if traced else step
    # Their sum is inf in float16.
    assert bool(step(tf.constant([[64000.0], [32.0], [64000.0]], "float16")))
    assert table.numpy().tolist() == [[-32000.0], [-8.0], [0.0]]
    for bad in (np.inf, np.nan):
        assert not bool(step(tf.constant([[1.0], [1.0], [bad]], "float16")))
    assert table.numpy().tolist() == [[-32000.0], [-8.0], [0.0]]
    assert float(scaler.get_scale()) == 1.0
