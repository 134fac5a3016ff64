"""Bad input to LossScaleOptimizer: a message that helps, and nothing changed."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp
from helpers.cases import first_of
from helpers.training import assert_identical, small_model, snapshot


def wrapped(**arguments):
    return tfamp.LossScaleOptimizer(keras.optimizers.Adam(0.1), **arguments)


# ---- Construction ---------------------------------------------------------------------------


def test_wrapping_what_scales_already():
    inner = keras.optimizers.SGD(loss_scale_factor=64.0)
    with pytest.raises(ValueError, match="loss_scale=64"):
        tfamp.LossScaleOptimizer(inner)
    assert inner.loss_scale_factor == 64.0, "the inner optimizer must not be modified"
    with pytest.raises(ValueError, match="LossScaleOptimizer already.*inner_optimizer"):
        tfamp.LossScaleOptimizer(wrapped())
    with pytest.raises(ValueError, match="already"):
        tfamp.LossScaleOptimizer(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD()))


@pytest.mark.parametrize("inner", ["adam", None, 3, keras.optimizers.Adam])
def test_wrapping_another_object_is_an_error(inner):
    with pytest.raises(TypeError, match=r"must be a keras\.optimizers\.Optimizer, e\.g\."):
        tfamp.LossScaleOptimizer(inner)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"initial_scale": "big"}, TypeError, "initial_scale must be a number; got 'big'"),
        ({"dynamic_growth_steps": 0}, ValueError, "growth_steps"),
        ({"max_scale": float("inf")}, ValueError, "max_scale"),
        ({"dynamic": "yes"}, TypeError, "dynamic must be True or False"),
        ({"aggregate_in_float16": 16}, TypeError, "aggregate_in_float16 must be True or False"),
        ({"master_weights": 16}, TypeError, "master_weights must be True or False; got 16"),
        ({"loss_scale": "dynamic"}, TypeError, "scale must be a number; got 'dynamic'"),
        ({"loss_scale": 8.0, "initial_scale": 4.0}, ValueError, "give either loss_scale or those"),
        ({"loss_scale": tfamp.FixedLossScale(), "dynamic": False}, ValueError, "give either"),
        ({"dynamic": False, "hysteresis": 3}, ValueError, "dynamic=False .* got hysteresis=3 too"),
        ({"dynamic": False, "dynamic_growth_steps": 2}, ValueError, "got growth_steps=2 too"),
    ],
)
def test_bad_arguments(arguments, error, message):
    with pytest.raises(error, match=message):
        wrapped(**arguments)


@pytest.mark.parametrize(
    ("arguments", "dynamic", "scale"),
    [
        ({}, True, 2.0**15),
        *(({"loss_scale": given}, False, 8.0) for given in (8, tfamp.FixedLossScale(8.0))),
        ({"dynamic": False, "initial_scale": 8.0}, False, 8.0),
        ({"loss_scale": tfamp.DynamicLossScale(initial_scale=2.0)}, True, 2.0),
    ],
)
def test_ways_to_give_the_scale(arguments, dynamic, scale):
    optimizer = wrapped(**arguments)
    assert (optimizer.dynamic, optimizer.initial_scale) == (dynamic, scale)
    assert float(optimizer.loss_scale) == float(optimizer.get_scale()) == scale


def test_a_fixed_scale_skips_or_applies():
    for skip, expected in [(True, 1.0), (False, -np.inf)]:
        weight = keras.Variable(1.0)
        optimizer = tfamp.LossScaleOptimizer(
            keras.optimizers.SGD(1.0), loss_scale=tfamp.FixedLossScale(8.0, skip_nonfinite=skip)
        )
        optimizer.apply_gradients([(tf.constant(np.inf), weight)], unscaled=False)
        assert float(weight) == expected
        assert float(optimizer.loss_scale) == 8.0
        assert int(optimizer.skipped_steps) == int(skip)
        assert not bool(optimizer.last_step_finite)


def test_settings_of_the_inner_optimizer_are_read_and_set_there():
    inner = keras.optimizers.AdamW(weight_decay=0.5, use_ema=True)
    optimizer = tfamp.LossScaleOptimizer(inner)
    optimizer.build(small_model().trainable_variables)
    assert len(optimizer.variables) - len(inner.variables) == 9  # No averages of its own.
    for name, old, new in (("weight_decay", 0.5, 0.0), ("clipnorm", None, 1.0)):
        with pytest.raises(AttributeError, match=rf"optimizer\.inner_optimizer\.{name} = {new}"):
            setattr(optimizer, name, new)
        assert getattr(optimizer, name) == old
        setattr(inner, name, new)
        assert getattr(optimizer, name) == new


# ---- Applying --------------------------------------------------------------------------------


@pytest.fixture
def built():
    model = small_model()
    optimizer = wrapped(initial_scale=8.0)
    optimizer.build(model.trainable_variables)
    return model, optimizer


def gradients_of(model):
    return [tf.ones(v.shape) for v in model.trainable_variables]


INTEGERS = tf.ones((4, 8), tf.int32)


@pytest.mark.parametrize("traced", first_of([False, True]))
@pytest.mark.parametrize(
    ("spoil", "error", "message"),
    [
        (lambda g, v: ([], []), ValueError, "There is nothing to apply"),
        (lambda g, v: ([None] * 4, v), ValueError, "no gradient was given for any of 4 variables"),
        (lambda g, v: ([g[1], *g[1:]], v), ValueError, "has shape .*; the variable has shape"),
        (lambda g, v: ([1.0, *g[1:]], v), TypeError, "a float gradient and .*; got float"),
        (lambda g, v: ([INTEGERS, *g[1:]], v), TypeError, "a float gradient and .*; got int32"),
        (lambda g, v: (v, g), TypeError, "pairs of a float gradient and a variable"),
        (lambda g, v: (g[:1], [keras.Variable(np.ones((4, 8)))]), ValueError, "Unknown variable"),
    ],
    ids=["empty", "all_none", "shape", "number", "integer", "swapped", "unknown"],
)
def test_bad_gradients(built, traced, spoil, error, message):
    model, optimizer = built
    grads, variables = spoil(gradients_of(model), model.trainable_variables)
    before = snapshot(model, optimizer)

    def step():
        optimizer.apply_gradients(zip(grads, variables, strict=True), unscaled=False)

    with pytest.raises(error, match=message):
        (tf.function(step) if traced else step)()
    assert_identical(snapshot(model, optimizer), before)


def test_apply_takes_pairs_or_a_gradient_for_each_variable_it_was_built_with(built):
    model, optimizer = built
    with pytest.raises(ValueError, match="one gradient for each of the 4 variables; got 2"):
        optimizer.apply(gradients_of(model)[:2])
    for pairs in (None, 3, [1, 2], [(1, 2, 3)]):
        with pytest.raises(TypeError, match="takes .gradient, variable. pairs"):
            optimizer.apply_gradients(pairs)
    with pytest.raises(ValueError, match="needs the tape"):
        optimizer.minimize(tf.constant(1.0), model.trainable_variables)
    optimizer.apply(gradients_of(model), unscaled=False)
    assert int(optimizer.iterations) == 1


def test_building_on_an_empty_list_leaves_it_to_the_first_apply():
    optimizer, weight = wrapped(initial_scale=1.0), keras.Variable(1.0)
    optimizer.build([])
    assert not optimizer.built
    optimizer.apply_gradients([(tf.constant(1.0), weight)], unscaled=True)
    assert float(weight) < 1.0


@pytest.mark.parametrize("bad", [None, tf.ones(3), {"a": tf.ones(3)}, "gradients"])
def test_unscaling_needs_a_list(bad):
    with pytest.raises(TypeError, match="takes a list of gradients"):
        wrapped().get_unscaled_gradients(bad)


@pytest.mark.parametrize("loss", [None, "loss", tf.constant(3), {"a": 1.0}, [1.0, tf.ones(2)]])
def test_losses_that_cannot_be_scaled(loss):
    with pytest.raises(TypeError, match="The loss must be a float tensor"):
        wrapped().get_scaled_loss(loss)


def test_stateless_apply_says_that_tensorflow_has_none(built):
    model, optimizer = built
    with pytest.raises(ValueError, match="not supported with the TensorFlow backend"):
        optimizer.stateless_apply(
            [v.value for v in optimizer.variables],
            gradients_of(model),
            [v.value for v in model.trainable_variables],
        )
    with pytest.raises(ValueError, match="must be built before stateless_apply"):
        wrapped().stateless_apply([], [], [])
