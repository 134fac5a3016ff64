"""LossScaleOptimizer and the optimizer inside it: whose settings are whose, and who calls what."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp
from helpers.cases import first_of
from helpers.replicas import per_replica
from helpers.training import data, small_model

SGD = keras.optimizers.SGD


class Around(keras.optimizers.Optimizer):
    """A wrapper of a user's own, whose learning rate is that of the optimizer inside."""

    def __init__(self, inner_optimizer):
        super().__init__(0.0, name="around")
        self.inner_optimizer = inner_optimizer

    @property
    def learning_rate(self):
        return self.inner_optimizer.learning_rate

    @learning_rate.setter
    def learning_rate(self, value):
        self.inner_optimizer.learning_rate = value


def test_the_learning_rate_is_read_and_set_through_several_wrappers():
    inner = SGD(0.5)
    optimizer = tfamp.LossScaleOptimizer(Around(inner))
    assert float(optimizer.learning_rate) == 0.5
    optimizer.learning_rate = tf.Variable(0.25)
    assert float(inner.learning_rate) == float(optimizer.learning_rate) == 0.25
    single = tfamp.LossScaleOptimizer(inner)
    assert single.learning_rate is inner.learning_rate


def test_iterations_are_the_inner_optimizers_variable():
    inner = SGD()
    optimizer = tfamp.LossScaleOptimizer(inner)
    optimizer.iterations.assign(7)
    assert int(inner.iterations) == int(optimizer.iterations) == 7


def test_attributes_of_one_class_of_optimizers_are_not_the_wrappers():
    inner = SGD()
    optimizer = tfamp.LossScaleOptimizer(inner)
    listed = dir(optimizer)
    assert {"learning_rate", "minimize", "loss_scale"} <= set(listed)
    assert "nesterov" not in listed
    assert not hasattr(optimizer, "nesterov")
    optimizer.nesterov = True
    assert inner.nesterov is False


class Counting(SGD):
    """Has an `apply` of its own, and a variable that Keras does not know."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.given = []
        self.extra = tf.Variable(0.0)

    def apply(self, grads, trainable_variables=None):
        self.given += [tf.is_tensor(each) for each in grads]
        self.extra.assign_add(1.0)
        super().apply(grads, trainable_variables)


@pytest.mark.parametrize("traced", [True, False])
def test_an_apply_of_its_own_gets_plain_tensors_on_every_replica(two_replicas, traced):
    with two_replicas.scope():
        weight, inner = keras.Variable([4.0]), Counting(1.0)
        optimizer = tfamp.LossScaleOptimizer(inner, initial_scale=2.0)
        optimizer.build([weight])

    def replica(factor):
        optimizer.minimize(lambda: weight.value * factor, [weight])

    def step(factors):
        two_replicas.run(replica, (factors,))

    (tf.function(step) if traced else step)(per_replica(two_replicas, [0.5], [1.0]))
    assert inner.given
    assert all(inner.given)
    assert weight.numpy().tolist() == [2.5]


@pytest.mark.parametrize("restored_alone", [False, True])
def test_a_checkpoint_holds_what_the_inner_optimizer_tracks(tmp_path, restored_alone):
    weight, inner = keras.Variable([1.0]), Counting(1.0, momentum=0.5)
    optimizer = tfamp.LossScaleOptimizer(inner)
    optimizer.minimize(lambda: weight.value * 0.5, [weight])
    path = tf.train.Checkpoint(optimizer=optimizer).save(str(tmp_path / "checkpoint"))
    again = Counting(1.0, momentum=0.5)
    again.build([weight])
    whole = tfamp.LossScaleOptimizer(again)
    whole.build([weight])
    part = tf.train.Checkpoint(inner_optimizer=again)
    restored = part if restored_alone else whole
    tf.train.Checkpoint(optimizer=restored).restore(path).expect_partial()
    assert (float(again.extra), int(again.iterations)) == (1.0, 1)
    assert again.momentums[0].numpy().tolist() == [-0.5]


def test_files_and_configurations_find_its_class_among_the_custom_objects(tmp_path):
    model = small_model()
    model.compile(tfamp.LossScaleOptimizer(Counting(0.5), initial_scale=4.0), "mse")
    model.fit(*data(1), verbose=0)
    model.save(tmp_path / "model.keras")
    named = {"Counting": Counting}
    loaded = keras.models.load_model(tmp_path / "model.keras", custom_objects=named).optimizer
    config = keras.optimizers.serialize(model.optimizer)
    with keras.saving.custom_object_scope(named):
        inside = tfamp.LossScaleOptimizer.from_config(config["config"])
    for each in (loaded, inside, keras.optimizers.deserialize(config, custom_objects=named)):
        assert type(each) is tfamp.LossScaleOptimizer
        assert type(each.inner_optimizer) is Counting
        assert (float(each.learning_rate), each.initial_scale) == (0.5, 4.0)
    assert int(loaded.iterations) == 1


def clipped(strategy, setting, wrapped):
    """A weight after a step with gradients of 8 and 0.5 on two replicas, clipped to 2."""
    with strategy.scope():
        weight, inner = keras.Variable([5.0]), SGD(1.0, **{setting: 2.0})
        optimizer = tfamp.LossScaleOptimizer(inner, initial_scale=64.0) if wrapped else inner
        optimizer.build([weight])

    def replica(factor):
        with tf.GradientTape() as tape:
            loss = weight.value * factor
            loss = optimizer.get_scaled_loss(loss) if wrapped else loss
        optimizer.apply_gradients([(tape.gradient(loss, weight.value), weight)])

    tf.function(strategy.run)(replica, (per_replica(strategy, [8.0], [0.5]),))
    return weight.numpy().tolist()


@pytest.mark.parametrize("setting", first_of(["clipnorm", "clipvalue", "global_clipnorm"]))
def test_its_clipping_is_of_unscaled_gradients_on_each_replica_before_the_sum(
    two_replicas, setting
):
    assert clipped(two_replicas, setting, wrapped=False) == [2.5]
    assert clipped(two_replicas, setting, wrapped=True) == [2.5]


def test_an_overflow_of_a_float16_loss_leads_to_the_largest_scale_that_it_holds():
    weight = keras.Variable(1.0)
    optimizer = tfamp.LossScaleOptimizer(SGD(0.0), initial_scale=2.0**16, dynamic_growth_steps=2)
    optimizer.build([weight])

    @tf.function
    def step():
        # Its gradient, 2 * scale, is float16.
        optimizer.minimize(lambda: tf.square(tf.cast(weight.value, "float16")), [weight])
        return optimizer.last_step_finite, optimizer.loss_scale

    found = [tuple(float(each) for each in step()) for _ in range(8)]
    backs_off, stays, grows = [0.0, 2.0**14], [1.0, 2.0**14], [1.0, 2.0**15]
    expected = [[0.0, 2.0**15], *[backs_off, stays, grows] * 2, backs_off]
    np.testing.assert_array_equal(found, expected)
