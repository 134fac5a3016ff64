"""A loop that scales no loss: its gradients are applied as they are, until the scale is used."""

import itertools
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp
from helpers.cases import first_of, one_in, one_of_each, tiers
from helpers.replicas import per_replica
from helpers.training import data, small_model
from tfamp import diagnostics

SCALE = 2.0**15


class PlainStep(keras.Sequential):
    """A model whose train step is the one of Keras's guides."""

    def train_step(self, batch):
        x, y = batch
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(tf.cast(self(x, training=True), tf.float32) - y))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {"loss": loss}


def plain_model(optimizer, **arguments):
    keras.utils.set_random_seed(3)
    hidden = keras.layers.Dense(8, activation="relu")
    model = PlainStep([keras.Input((4,)), hidden, keras.layers.Dense(1)])
    model.compile(optimizer, **{"jit_compile": False} | arguments)
    return model


def train(model, way):
    """Trains for 40 steps in one of `WAYS`."""
    x, y = data()
    if way in ("fit", "fit_xla"):
        model.fit(x, y, batch_size=8, epochs=10, shuffle=False, verbose=0)
        return
    step = model.train_step if way == "eager" else tf.function(model.train_step)
    for _ in range(10):
        for batch in zip(np.split(x, 4), np.split(y, 4), strict=True):
            step(tuple(map(tf.constant, batch)))


WAYS = ("fit", "fit_xla", "eager", "function")
POLICIES = ("mixed_bfloat16", "float32", "mixed_float16")


@pytest.mark.filterwarnings("ignore::tfamp.TfampWarning")
@pytest.mark.parametrize(("policy", "way"), one_of_each(POLICIES, WAYS, quick=1))
def test_it_learns_as_with_the_inner_optimizer(policy, way):
    weights = {}
    for name in ("bare", "wrapped"):
        inner = keras.optimizers.SGD(0.05, momentum=0.5)
        optimizer = inner if name == "bare" else tfamp.LossScaleOptimizer(inner)
        with tfamp.policy_scope(policy):
            # Keras's compile would wrap it for mixed_float16.
            model = plain_model(optimizer, jit_compile=way == "fit_xla", auto_scale_loss=False)
            before = model.get_weights()
            train(model, way)
        weights[name] = model.get_weights()
    for start, bare, wrapped in zip(before, weights["bare"], weights["wrapped"], strict=True):
        assert np.abs(bare - start).max() > 1e-2, "the reference must have learned"
        np.testing.assert_allclose(wrapped, bare, rtol=1e-6, atol=1e-7)


def one_weight(**arguments):
    weight = keras.Variable([1.0])
    optimizer = tfamp.LossScaleOptimizer(keras.optimizers.SGD(1.0), **arguments)
    optimizer.build([weight])
    return weight, optimizer


USES = {
    "get_scaled_loss": lambda optimizer: optimizer.get_scaled_loss(1.0),
    "scale_loss": lambda optimizer: optimizer.scale_loss(1.0),
    "get_scale": lambda optimizer: optimizer.get_scale(),
    "loss_scale": lambda optimizer: optimizer.loss_scale,
}


@pytest.mark.parametrize(
    ("xla", "use_is_traced", "use"),
    one_in(5, itertools.product([False, True], [False, True], USES)),
)
def test_an_apply_that_was_traced_before_unscales_from_the_first_use_on(use, use_is_traced, xla):
    weight, optimizer = one_weight()
    apply = tf.function(lambda g: optimizer.apply_gradients([(g, weight)]), jit_compile=xla)
    apply(tf.constant([0.25]))
    assert weight.numpy().tolist() == [0.75]
    (tf.function(USES[use]) if use_is_traced else USES[use])(optimizer)
    apply(tf.constant([0.25 * SCALE]))
    assert weight.numpy().tolist() == [0.5]
    assert apply.experimental_get_tracing_count() == 1
    optimizer.apply_gradients([(tf.constant([0.25 * SCALE]), weight)])  # And in eager mode.
    assert weight.numpy().tolist() == [0.25]


def test_a_trace_that_scales_but_has_not_run_counts_for_nothing():
    weight, optimizer = one_weight()
    tf.function(lambda: optimizer.get_scaled_loss(1.0)).get_concrete_function()
    optimizer.apply_gradients([(tf.constant([0.25]), weight)])
    assert weight.numpy().tolist() == [0.75]


def test_unscaled_says_what_the_gradients_are_in_any_case():
    weight, optimizer = one_weight()
    optimizer.apply_gradients([(tf.constant([0.25 * SCALE]), weight)], unscaled=False)
    optimizer.get_scaled_loss(1.0)
    optimizer.apply_gradients([(tf.constant([0.25]), weight)], unscaled=True)
    assert weight.numpy().tolist() == [0.5]


def saved_as_keras_file(model, path):
    model.save(path / "model.keras")


def saved_as_weights(model, path):
    model.save_weights(path / "model.weights.h5")


def saved_model(model, path):
    module = tf.Module()
    module.model, module.optimizer = model, model.optimizer
    batch = [tf.TensorSpec((8, 4)), tf.TensorSpec((8, 1))]
    module.step = tf.function(lambda x, y: model.train_step((x, y)), input_signature=batch)
    tf.saved_model.save(module, str(path / "saved"))
    loaded = tf.saved_model.load(str(path / "saved"))
    loaded.step(tf.ones((8, 4)), tf.ones((8, 1)))


def checkpoint(model, path):
    tf.train.Checkpoint(model=model).save(str(path / "checkpoint"))


def search(model, path):
    assert diagnostics.find_nonfinite(model, *data(1), loss="mse") is None


def monitored(model, path):
    monitor = diagnostics.NumericsMonitor(every=1)
    model.fit(*data(), batch_size=8, verbose=0, callbacks=[monitor])
    assert monitor.history


READERS = tiers(
    (saved_as_keras_file, saved_as_weights, checkpoint, search), (saved_model, monitored)
)


@pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader.__name__)
def test_saving_and_searching_do_not_count_as_using_the_scale(reader, tmp_path):
    model = plain_model(tfamp.LossScaleOptimizer(keras.optimizers.SGD(1.0)))
    model.optimizer.build(model.trainable_variables)
    reader(model, tmp_path)
    before = model.get_weights()
    model.optimizer.apply([tf.ones(v.shape) for v in model.trainable_variables])
    for value, old in zip(model.get_weights(), before, strict=True):
        np.testing.assert_allclose(value, old - 1.0, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("use_in_replica", [False, True])
def test_replicas_agree(two_replicas, use_in_replica):
    strategy = two_replicas
    with strategy.scope():
        weight, optimizer = one_weight()

    @tf.function
    def apply(gradient):
        strategy.run(lambda g: optimizer.apply_gradients([(g, weight)]), (gradient,))

    apply(per_replica(strategy, [0.25], [0.125]))
    assert weight.numpy().tolist() == [0.625]
    if use_in_replica:
        tf.function(lambda: strategy.run(optimizer.get_scale))()
    else:
        assert float(optimizer.loss_scale) == SCALE
    apply(per_replica(strategy, [0.25 * SCALE], [0.125 * SCALE]))
    values = [each.numpy().tolist() for each in strategy.experimental_local_results(weight.value)]
    assert values == [[0.25]] * 2


# ---- Warnings -----------------------------------------------------------------------------------


def warnings_of(function):
    with warnings.catch_warnings(record=True) as record:
        warnings.simplefilter("always")
        function()
    ours = [each for each in record if each.category is tfamp.TfampWarning]
    assert {each.filename for each in ours} <= {__file__}
    return [str(each.message) for each in ours]


def apply_twice(weight, optimizer, traced=False):
    def apply():
        optimizer.apply_gradients([(tf.constant([0.25], weight.dtype), weight)])

    apply = tf.function(apply) if traced else apply
    apply()
    apply()


@pytest.mark.parametrize("traced", [False, True])
def test_in_float16_one_warning_says_what_is_lost_and_how_to_scale(traced):
    with tfamp.policy_scope("mixed_float16"):
        (text,) = warnings_of(lambda: apply_twice(*one_weight(), traced))
        assert "small gradients are lost" in text
        assert "get_scaled_loss" in text
        assert not warnings_of(lambda: apply_twice(*one_weight(loss_scale=1.0)))
    weight = keras.Variable([1.0], dtype="float16")
    own = tfamp.LossScaleOptimizer(keras.optimizers.SGD(1.0))
    assert len(warnings_of(lambda: apply_twice(weight, own, traced))) == 1


def test_layers_in_float16_are_seen_in_a_graph_after_the_scope_of_their_policy():
    for policy, count in (("mixed_float16", 1), ("mixed_bfloat16", 0)):
        with tfamp.policy_scope(policy):
            model = plain_model(tfamp.LossScaleOptimizer(keras.optimizers.SGD(0.1)))
        assert len(warnings_of(lambda model=model: train(model, "function"))) == count


@pytest.mark.parametrize("given", ["bare", "wrapped"])
@pytest.mark.parametrize(("dtype", "count"), [("float16", 1), ("bfloat16", 0)])
def test_a_level_in_float16_is_warned_of_too(given, dtype, count):
    optimizer = keras.optimizers.SGD(0.1)
    optimizer = optimizer if given == "bare" else tfamp.LossScaleOptimizer(optimizer)
    model, prepared = tfamp.prepare(small_model(), optimizer, level="O2", dtype=dtype)
    gradients = [tf.zeros(v.shape) for v in model.trainable_variables]
    found = warnings_of(lambda: prepared.apply(gradients, model.trainable_variables))
    assert len(found) == count


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "float32"])
def test_elsewhere_nothing_is_lost_and_nothing_is_warned_of(policy):
    with tfamp.policy_scope(policy):
        assert not warnings_of(lambda: apply_twice(*one_weight()))


def test_unscaling_what_was_never_scaled_warns_once():
    weight, optimizer = one_weight()

    def step():
        gradients = optimizer.get_unscaled_gradients([tf.constant([SCALE])])
        optimizer.apply_gradients(zip(gradients, [weight], strict=True))

    (text,) = warnings_of(lambda: (step(), step()))
    assert "training stands still" in text
    assert weight.numpy().tolist() == [-1.0]
    assert not warnings_of(lambda: one_weight(loss_scale=1.0)[1].get_unscaled_gradients([1.0]))


@pytest.mark.parametrize("traced", first_of([False, True]))
@pytest.mark.parametrize("read", ["get_scale", "loss_scale"])
def test_dividing_by_hand_before_apply_divides_too_warns(traced, read):
    weight, optimizer = one_weight()

    def step(**arguments):
        scaled = optimizer.get_scaled_loss(tf.constant([0.25]))
        apply = optimizer.apply_gradients
        apply([(scaled / USES[read](optimizer), weight)], **arguments)

    (text,) = warnings_of(tf.function(step) if traced else step)
    assert "unscaled=True" in text
    weight, optimizer = one_weight()
    assert not warnings_of(lambda: step(unscaled=True))
    assert weight.numpy().tolist() == [0.75]

    def looks_at_the_scale_between_steps():
        for _ in range(3):
            scaled = optimizer.get_scaled_loss(tf.constant([0.25]))
            optimizer.apply_gradients([(scaled, weight)])
            float(optimizer.loss_scale)

    assert not warnings_of(looks_at_the_scale_between_steps)
