"""The warning of Keras's LossScaleOptimizer without a scaled loss, in fit and in own loops."""

import gc
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp
from tfamp.interop.patching import SYMBOLS, locate

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(256, 16)).astype("float32")
Y = np.argmax(X @ RANDOM.normal(size=(16, 4)), axis=1)
NOBODY = "around sgd, and its scale_loss has not been called.*self.optimizer.scale_loss"
loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


class Classifier(keras.Model):
    """A classifier with a train step of its own, which scales its loss if asked to."""

    def __init__(self, scales):
        super().__init__()
        self.scales = scales
        self.hidden = keras.layers.Dense(32, activation="relu")
        self.out = keras.layers.Dense(4)

    def call(self, x):
        return self.out(self.hidden(x))

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = loss_of(y, self(x, training=True))
            taken = self.optimizer.scale_loss(loss) if self.scales else loss
        gradients = tape.gradient(taken, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {"own_loss": loss}


def sgd():
    return keras.optimizers.SGD(0.5, name="sgd")


def losses(model, eager=False, optimizer=None):
    model.compile(optimizer or sgd(), run_eagerly=eager)
    history = model.fit(X, Y, batch_size=32, epochs=4, shuffle=False, verbose=0)
    return history.history["own_loss"]


def made(policy, scales):
    keras.utils.set_random_seed(0)
    with tfamp.policy_scope(policy):
        return Classifier(scales)


@pytest.fixture
def no_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error", tfamp.TfampWarning)
        yield


@pytest.mark.parametrize("eager", [False, True])
def test_a_train_step_that_scales_no_loss_learns_nothing_and_is_told_of_once(eager):
    with tfamp.policy_scope("mixed_float16"), pytest.warns(tfamp.TfampWarning) as found:
        first, *_, last = losses(made("mixed_float16", scales=False), eager)
    (told,) = [str(each.message) for each in found if "scale_loss has not" in str(each.message)]
    assert "32768" in told
    assert "tfamp.LossScaleOptimizer" in told
    (place,) = [each.filename for each in found if "scale_loss has not" in str(each.message)]
    assert place == __file__
    assert last > 0.98 * first  # What the warning is of.


def test_one_that_does_learns_as_in_float32(no_warning):
    with tfamp.policy_scope("mixed_float16"):
        found = losses(made("mixed_float16", scales=True))
    expected = losses(made("float32", scales=False))
    assert expected[-1] < 0.5 * expected[0]
    np.testing.assert_allclose(found, expected, rtol=0.02)


def test_a_later_compile_with_a_bare_optimizer_is_told_of():
    model = made("mixed_float16", scales=False)
    with tfamp.policy_scope("mixed_float16"):
        ours = tfamp.LossScaleOptimizer(keras.optimizers.SGD(0.5), loss_scale=1.0)
        losses(model, optimizer=ours)
        with pytest.warns(tfamp.TfampWarning, match=NOBODY):
            losses(model)


def test_a_wrapper_made_in_a_scope_is_watched_after_it():
    model = made("mixed_float16", scales=False)
    with tfamp.policy_scope("mixed_float16"):
        model.compile(sgd())
    with pytest.warns(tfamp.TfampWarning, match=NOBODY):
        model.fit(X, Y, verbose=0)


def test_keras_s_own_train_step_is_not(no_warning):
    with tfamp.policy_scope("mixed_float16"):
        model = keras.Sequential([keras.Input((16,)), keras.layers.Dense(8), keras.layers.Dense(4)])
        model.compile(sgd(), loss_of)
        first, *_, last = model.fit(X, Y, epochs=4, verbose=0).history["loss"]
    assert isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
    assert last < 0.8 * first


def test_a_class_that_scales_by_itself_is_not(no_warning):
    class Own(keras.optimizers.LossScaleOptimizer):
        def scale_loss(self, loss):
            return loss * (self.dynamic_scale if self.built else self.initial_scale)

    with tfamp.policy_scope("mixed_float16"):
        first, *_, last = losses(made("mixed_float16", scales=True), optimizer=Own(sgd()))
    assert last < 0.5 * first


def test_after_the_policy_and_the_optimizer_keras_is_as_it_was():
    places = [symbol for name, symbol in SYMBOLS if name in ("scaled_step", "keras_scale_loss")]
    places += [symbol for name, symbol in SYMBOLS if name == "keras_scaling_init"]

    def now():
        return [vars(owner)[name] for owner, name in map(locate, places)]

    gc.collect()
    before = now()
    with tfamp.policy_scope("mixed_float16"):
        optimizer = keras.optimizers.LossScaleOptimizer(sgd())
        assert all(a is not b for a, b in zip(now(), before, strict=True))
    assert now()[:2] != before[:2]
    del optimizer
    gc.collect()
    assert now() == before
