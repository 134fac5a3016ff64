"""LossScaleOptimizer: one contract for every Keras optimizer, and who unscales."""

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

import tfamp
from helpers.cases import first_of, one_in, one_of_each, tiers
from helpers.optimizers import plain_optimizers
from helpers.training import assert_identical, data, small_model, snapshot, train_step
from tfamp.core.loss_scale import initial_state, next_state

SCALE = 2.0**10
KERAS_VERSION = tuple(int(part) for part in keras.__version__.split(".")[:2])


SGD = keras.optimizers.SGD
# Each optimizer that Keras has, and each argument of theirs that changes the update.
OPTIMIZERS = {name: lambda kind=kind: kind(0.05) for name, kind in plain_optimizers().items()} | {
    "adam_amsgrad": lambda: keras.optimizers.Adam(0.05, amsgrad=True),
    "rmsprop_centered": lambda: keras.optimizers.RMSprop(0.01, momentum=0.5, centered=True),
    "sgd_nesterov": lambda: SGD(0.05, momentum=0.9, nesterov=True),
    "clipnorm": lambda: SGD(0.05, clipnorm=0.5),
    "clipvalue": lambda: SGD(0.05, clipvalue=0.1),
    "global_clipnorm": lambda: SGD(0.05, global_clipnorm=0.5),
    "ema": lambda: SGD(0.05, use_ema=True, ema_momentum=0.9, ema_overwrite_frequency=2),
    "accumulation": lambda: keras.optimizers.Adam(0.05, gradient_accumulation_steps=2),
    "schedule": lambda: SGD(
        keras.optimizers.schedules.ExponentialDecay(0.05, decay_steps=1, decay_rate=0.5)
    ),
}
# Not in every Keras tfamp runs with.
if KERAS_VERSION < (3, 13):  # Keras 3.12 has a Muon, which fails on TensorFlow by itself.
    OPTIMIZERS.pop("Muon", None)
if hasattr(keras.optimizers, "MultiOptimizer"):
    OPTIMIZERS["multi"] = lambda: keras.optimizers.MultiOptimizer(lambda variable: SGD(0.01))


def plain_step(model, optimizer):
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x, training=True) - y))
        variables = model.trainable_variables
        optimizer.apply_gradients(
            zip(tape.gradient(loss, [v.value for v in variables]), variables, strict=True)
        )

    return step


@pytest.mark.parametrize(
    ("name", "traced", "unscale"), one_of_each(OPTIMIZERS, [False, True], [False, True], quick=1)
)
def test_finite_steps_equal_the_inner_optimizers(name, traced, unscale):
    """And a skipped one moves nothing."""
    model, reference = small_model(), small_model()
    optimizer = tfamp.LossScaleOptimizer(OPTIMIZERS[name](), initial_scale=SCALE)
    inner = OPTIMIZERS[name]()
    optimizer.build(model.trainable_variables)
    inner.build(reference.trainable_variables)
    step, expected = train_step(model, optimizer, unscale=unscale), plain_step(reference, inner)
    if traced:
        step, expected = tf.function(step), tf.function(expected)
    for x, y in zip(*(np.split(each, 4) for each in data()), strict=True):
        step(tf.constant(x), tf.constant(y))
        expected(tf.constant(x), tf.constant(y))
    for actual, wanted in zip(model.variables, reference.variables, strict=True):
        np.testing.assert_allclose(actual.numpy(), wanted.numpy(), rtol=1e-5, atol=1e-6)
    before = snapshot(model, optimizer.inner_optimizer)
    assert not np.array_equal(model.get_weights()[0], small_model().get_weights()[0])
    for value in (np.inf, np.nan):
        bad = x.copy()
        bad[3, 1] = value
        step(tf.constant(bad), tf.constant(y))
    assert_identical(snapshot(model, optimizer.inner_optimizer), before)
    assert int(optimizer.skipped_steps) == 2
    assert float(optimizer.loss_scale) == SCALE / 4
    step(tf.constant(x), tf.constant(y))
    assert int(optimizer.consecutive_skipped_steps) == 0
    assert bool(optimizer.last_step_finite)


# ---- Who unscales ---------------------------------------------------------------------------


def one_weight(**arguments):
    weight = keras.Variable([1.0, 1.0])
    arguments = {"initial_scale": 8.0} | arguments
    optimizer = tfamp.LossScaleOptimizer(keras.optimizers.SGD(1.0), **arguments)
    optimizer.get_scale()  # As a loop does that scales its loss by hand.
    return weight, optimizer


def scaled(*values):
    return [tf.constant(values, "float32") * 8.0]


def test_apply_does_not_unscale_again_without_unscaled_false():
    weight, optimizer = one_weight()
    gradients = optimizer.get_unscaled_gradients(scaled(0.5, 3.0))
    optimizer.apply_gradients([(tf.clip_by_value(gradients[0], -1.0, 1.0), weight)])
    np.testing.assert_array_equal(weight.numpy(), [0.5, 0.0])
    optimizer.apply_gradients([(tf.constant([0.0, -0.5]), weight)], unscaled=True)
    np.testing.assert_array_equal(weight.numpy(), [0.5, 0.5])
    optimizer.get_unscaled_gradients(scaled(1.0, 1.0))
    optimizer.apply_gradients([(scaled(0.5, 0.5)[0], weight)], unscaled=False)
    np.testing.assert_array_equal(weight.numpy(), [0.0, 0.0])


@pytest.mark.parametrize(
    ("apply_traced", "unscale_traced"), one_in(3, itertools.product([False, True], [False, True]))
)
def test_unscaling_and_applying_in_two_functions(unscale_traced, apply_traced):
    weight, optimizer = one_weight()
    same = scaled(0.25, 0.25)[0]

    def unscale(gradients):
        return optimizer.get_unscaled_gradients([gradients])[0]

    def apply(gradients):
        optimizer.apply_gradients([(gradients, weight)])

    unscale = tf.function(unscale) if unscale_traced else unscale
    apply = tf.function(apply) if apply_traced else apply
    for _ in range(2):
        # An eager apply forgets the tensors of its step.
        apply(unscale(scaled(0.25, 0.25)[0] if apply_traced else same))
    np.testing.assert_array_equal(weight.numpy(), [0.5, 0.5])
    apply(scaled(0.25, 0.25)[0])  # The same trace, this time with scaled gradients.
    optimizer.apply_gradients([(scaled(0.125, 0.25)[0], weight)])  # And in eager mode.
    np.testing.assert_array_equal(weight.numpy(), [0.125, 0.0])


@pytest.mark.parametrize("traced", first_of(["nothing", "both", "the step"]))
def test_gradients_unscaled_only_to_be_looked_at_do_not_spoil_a_later_step(traced):
    weight, optimizer = one_weight()

    def step(gradient):
        optimizer.get_scaled_loss(1.0)
        optimizer.apply_gradients([(gradient, weight)])

    def both(looked_at, gradient):
        optimizer.get_unscaled_gradients([looked_at])
        step(gradient)
        later = optimizer.get_unscaled_gradients([gradient + 0.0])
        optimizer.get_scaled_loss(1.0)  # Of another loss: these stay unscaled.
        optimizer.apply_gradients(zip(later, [weight], strict=True))

    step = tf.function(step) if traced == "the step" else step
    both = tf.function(both) if traced == "both" else both
    for value in (1.0, np.inf):
        both(scaled(value, 1.0)[0], scaled(0.125, 0.125)[0])
    np.testing.assert_array_equal(weight.numpy(), [0.5, 0.5])
    assert int(optimizer.skipped_steps) == 0


@pytest.mark.parametrize("traced", first_of([False, True]))
@pytest.mark.parametrize("loss_scale", [1.0, 2.0])
def test_a_bad_gradient_that_was_only_looked_at_skips_no_later_step(loss_scale, traced):
    weight = keras.Variable(1.0)
    optimizer = tfamp.LossScaleOptimizer(keras.optimizers.SGD(1.0), loss_scale=loss_scale)

    def step(looked_at, gradient):
        optimizer.get_scaled_loss(1.0)
        optimizer.get_unscaled_gradients([looked_at])
        optimizer.get_scaled_loss(1.0)
        optimizer.apply_gradients([(gradient * loss_scale, weight)])

    step = tf.function(step) if traced else step
    step(tf.constant(np.inf), tf.constant(0.25))
    assert float(weight) == 0.75
    step(tf.constant(1.0), tf.constant(np.inf))
    assert float(weight) == 0.75
    assert int(optimizer.skipped_steps) == 1


@pytest.mark.parametrize("traced", [False, True])
def test_clipping_cannot_hide_an_overflow_in_another_function_neither(traced):
    weight, optimizer = one_weight()

    def unscale(gradient):
        (gradient,) = optimizer.get_unscaled_gradients([gradient])
        return tf.clip_by_value(gradient, -1.0, 1.0)

    def apply(gradient):
        optimizer.apply_gradients([(gradient, weight)])

    if traced:
        unscale, apply = tf.function(unscale), tf.function(apply)
    apply(unscale(tf.constant([np.inf, 1.0])))
    np.testing.assert_array_equal(weight.numpy(), [1.0, 1.0])
    assert int(optimizer.skipped_steps) == 1
    assert float(optimizer.loss_scale) == 4.0
    gradients = optimizer.get_unscaled_gradients(scaled(1.0, 1.0))
    optimizer.apply_gradients([(gradients[0] / 0.0, weight)])  # Spoilt since it was unscaled.
    np.testing.assert_array_equal(weight.numpy(), [1.0, 1.0])


def test_accumulation_over_several_backward_passes():
    weight, optimizer = one_weight()

    @tf.function
    def step(first, second):
        both = [optimizer.get_unscaled_gradients([each])[0] for each in (first, second)]
        optimizer.apply_gradients([((both[0] + both[1]) / 2.0, weight)])

    step(scaled(0.5, 0.0)[0], scaled(0.0, 1.0)[0])
    np.testing.assert_array_equal(weight.numpy(), [0.75, 0.5])
    step(tf.constant([np.inf, 0.0]), scaled(0.0, 1.0)[0])  # One bad pass spoils the step.
    np.testing.assert_array_equal(weight.numpy(), [0.75, 0.5])


@pytest.mark.parametrize(
    ("traced", "sparse", "again"),
    one_in(3, itertools.product([False, True], [False, True], ["inputs", "outputs"])),
)
def test_unscaling_twice_is_an_error_that_says_so(again, sparse, traced):
    _, optimizer = one_weight()

    def step(values):
        gradients = [tf.IndexedSlices(values, [0]) if sparse else values]
        unscaled = optimizer.get_unscaled_gradients(gradients)
        assert isinstance(unscaled[0], tf.IndexedSlices) is sparse
        optimizer.get_unscaled_gradients(gradients if again == "inputs" else unscaled)

    with pytest.raises(ValueError, match="unscaled already since the last apply"):
        (tf.function(step) if traced else step)(tf.ones((1, 2)))


@pytest.mark.slow
@settings(max_examples=30)
@given(st.lists(st.booleans(), min_size=1, max_size=12), st.booleans())
def test_state_follows_the_rule_on_random_histories(history, unscale):
    rule = tfamp.DynamicLossScale(
        initial_scale=8.0, growth_steps=2, hysteresis=2, min_scale=2.0, max_scale=32.0
    )
    weight = keras.Variable(0.0)
    optimizer = tfamp.LossScaleOptimizer(keras.optimizers.SGD(1.0), loss_scale=rule)
    state = initial_state(rule)
    for finite in history:
        gradient = tf.constant(float(state.scale) if finite else np.inf)
        grads = optimizer.get_unscaled_gradients([gradient]) if unscale else [gradient]
        optimizer.apply_gradients(zip(grads, [weight], strict=True), unscaled=unscale)
        state = next_state(rule, state, finite, np)
        assert float(optimizer.loss_scale) == state.scale
        assert int(optimizer.dynamic_counter) == state.good_steps
        assert int(optimizer.consecutive_skipped_steps) == state.consecutive_skipped_steps
        assert bool(optimizer.last_step_finite) == finite
    assert float(weight.numpy()) == -sum(history)
    assert int(optimizer.iterations) == sum(history)


# ---- Gradients of every kind ------------------------------------------------------------------


def test_sparse_gradients_are_checked_and_unscaled_on_their_values_only():
    table = keras.Variable(np.ones((1000, 4), "float32"))
    optimizer = tfamp.LossScaleOptimizer(keras.optimizers.SGD(1.0), initial_scale=8.0)

    @tf.function
    def step(values, indices):
        gradient = tf.IndexedSlices(values, indices, tf.constant([1000, 4]))
        optimizer.apply_gradients([(gradient, table)])

    optimizer.build([table])
    optimizer.get_scale()
    step(8.0 * tf.ones((2, 4)), tf.constant([1, 7]))
    assert np.flatnonzero(table.numpy()[:, 0] == 0.0).tolist() == [1, 7]
    before = table.numpy()
    step(tf.constant([[np.nan] * 4, [8.0] * 4]), tf.constant([1, 7]))
    np.testing.assert_array_equal(table.numpy(), before)
    graph = step.get_concrete_function(tf.TensorSpec((2, 4)), tf.TensorSpec((2,), "int32")).graph
    checks = [op for op in graph.get_operations() if op.type == "IsFinite"]
    assert [op.inputs[0].shape.as_list() for op in checks] == [[2, 4]]


@pytest.mark.parametrize("unscale", [False, True])
def test_gradients_may_be_missing_of_mixed_dtypes_and_overwrite_their_variable(unscale):
    dtypes = ["float16", "bfloat16", "float32", "float64"]
    variables = [keras.Variable([1.0], dtype=dtype) for dtype in dtypes]
    unused, amax = keras.Variable(1.0), keras.Variable(1.0)
    amax.overwrite_with_gradient = True
    optimizer = tfamp.LossScaleOptimizer(keras.optimizers.SGD(1.0), initial_scale=8.0)
    optimizer.build([*variables, unused, amax])
    grads = [*(tf.constant([4.0], dtype) for dtype in dtypes), None, tf.constant(5.0)]
    if unscale:
        grads = optimizer.get_unscaled_gradients(grads)
        assert [g.dtype.name for g in grads[:4]] == ["float32", "float32", "float32", "float64"]
        assert grads[4] is None
    pairs = zip(grads, [*variables, unused, amax], strict=True)
    with pytest.warns(UserWarning, match="Gradients do not exist"):
        optimizer.apply_gradients(pairs, unscaled=unscale)
    assert [float(v.numpy()[0]) for v in variables] == [0.5] * 4
    assert float(unused) == 1.0
    assert float(amax) == 5.0  # Overwritten with its gradient as it is.


# ---- Losses ------------------------------------------------------------------------------------


def test_a_float16_loss_is_scaled_in_float32_by_a_scale_that_is_not_baked_into_the_graph():
    weight, optimizer = one_weight(initial_scale=2.0**20)
    scaled = optimizer.get_scaled_loss(tf.constant(3.0, "float16"))
    assert (scaled.dtype, float(scaled)) == (tf.float32, 3.0 * 2.0**20)
    assert float(optimizer.get_scaled_loss(lambda: tf.constant(2.0))()) == 2.0**21
    weight, optimizer = one_weight()

    @tf.function
    def scaled_loss():
        return optimizer.get_scaled_loss(tf.constant(1.0))

    assert float(scaled_loss()) == 8.0
    optimizer.apply_gradients([(tf.constant([np.inf, 0.0]), weight)])
    assert float(scaled_loss()) == 4.0


@pytest.mark.parametrize(
    ("with_tape", "traced"), tiers([(False, False), (True, False)], [(False, True), (True, True)])
)
def test_minimize(traced, with_tape):
    def step():
        if not with_tape:
            return optimizer.minimize(lambda: tf.square(weight), [weight])
        with tf.GradientTape() as tape:
            loss = tf.square(weight)
        return optimizer.minimize(loss, [weight], tape=tape)

    for kind in (keras.Variable, tf.Variable):
        weight = kind(3.0)
        optimizer = tfamp.LossScaleOptimizer(keras.optimizers.SGD(0.25), initial_scale=8.0)
        optimizer.build([weight])
        (tf.function(step) if traced else step)()
        assert float(weight.numpy()) == 1.5


def test_keras_accumulates_gradients_of_low_variables():
    weight = keras.Variable([1.0, 1.0], dtype="float16")
    inner = keras.optimizers.SGD(0.5, gradient_accumulation_steps=2)
    optimizer = tfamp.LossScaleOptimizer(inner, loss_scale=8.0)

    def step(gradient):
        optimizer.apply([gradient], [weight], unscaled=False)

    for run, values in ((step, [8.0, 16.0]), (tf.function(step), [24.0, 16.0])):
        run(tf.constant(values, "float16"))
    assert keras.ops.cast(weight, "float32").numpy().tolist() == [0.0, 0.0]


@pytest.mark.parametrize("unscaled", ["yes", 1, 0.0])
def test_unscaled_is_a_bool(unscaled):
    weight = keras.Variable([1.0])
    optimizer = tfamp.LossScaleOptimizer(keras.optimizers.SGD(0.5), loss_scale=8.0)
    with pytest.raises(TypeError, match="unscaled must be True or False"):
        optimizer.apply_gradients([(tf.constant([8.0]), weight)], unscaled=unscaled)
    assert weight.numpy() == 1.0
