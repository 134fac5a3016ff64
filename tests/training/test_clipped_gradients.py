"""Gradients that were clipped while they were multiplied by the loss scale are told of."""

import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(512, 16)).astype("float32")
Y = np.argmax(X @ RANDOM.normal(size=(16, 4)), axis=1)
CLIPPED = "clipped while they were multiplied by the loss scale.*grad_clip"
loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def by_hand(gradients):
    norm = tf.sqrt(tf.add_n([tf.reduce_sum(g * g) for g in gradients]))
    return [g * tf.minimum(1.0, 1.0 / norm) for g in gradients]


CLIPS = {
    "global norm": lambda gradients: tf.clip_by_global_norm(gradients, 1.0)[0],
    "norm": lambda gradients: [tf.clip_by_norm(g, 0.5) for g in gradients],
    "by hand": by_hand,
    "normalized": lambda gradients: [g / tf.norm(g) for g in gradients],
}
# In eager mode these have no constant norm.
VALUES = {
    "value": lambda gradients: [tf.clip_by_value(g, -0.5, 0.5) for g in gradients],
    "minimum": lambda gradients: [tf.minimum(tf.maximum(g, -0.5), 0.5) for g in gradients],
}


def wrapped(scale=2.0**12):
    return tfamp.LossScaleOptimizer(keras.optimizers.SGD(0.5, name="sgd"), initial_scale=scale)


def train(optimizer, change, policy="mixed_float16", mode="graph", unscale=False, steps=12, **how):
    """Returns the first and the last loss."""
    keras.utils.set_random_seed(0)
    with tfamp.policy_scope(policy):
        layers = [keras.layers.Dense(32, activation="relu"), keras.layers.Dense(4)]
        model = keras.Sequential([keras.Input((16,)), *layers])

    def step(x, y):
        with tf.GradientTape() as tape:
            loss = loss_of(y, model(x, training=True))
            scaled = optimizer.scale_loss(loss)
        gradients = tape.gradient(scaled, model.trainable_variables)
        if unscale:
            gradients = optimizer.get_unscaled_gradients(gradients)
        optimizer.apply(change(gradients), model.trainable_variables, **how)
        return loss

    if mode != "eager":
        step = tf.function(step, jit_compile=mode == "xla")
    losses = []
    for number in range(steps):
        rows = slice(number % 8 * 64, number % 8 * 64 + 64)
        losses.append(float(step(tf.constant(X[rows]), tf.constant(Y[rows]))))
    return losses[0], losses[-1]


@pytest.fixture
def no_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error", tfamp.TfampWarning)
        yield


@pytest.mark.parametrize("clip", [*CLIPS, *VALUES])
def test_a_traced_step_that_clips_scaled_gradients_learns_nothing_and_is_told_of_once(clip):
    with pytest.warns(tfamp.TfampWarning, match=CLIPPED) as found:
        first, last = train(wrapped(), {**CLIPS, **VALUES}[clip])
    assert len(found) == 1
    assert found[0].filename == __file__
    assert last > 0.9 * first  # What the warning is of.


@pytest.mark.parametrize(
    ("clip", "mode"), [("global norm", "eager"), ("norm", "eager"), ("global norm", "xla")]
)
def test_so_is_one_in_eager_mode_and_in_xla(clip, mode):
    with pytest.warns(tfamp.TfampWarning, match=CLIPPED) as found:
        train(wrapped(), CLIPS[clip], mode=mode, steps=24)
    assert len(found) == 1


def test_so_is_one_that_says_that_its_gradients_are_scaled():
    with pytest.warns(tfamp.TfampWarning, match=CLIPPED):
        train(wrapped(), CLIPS["global norm"], unscaled=False, steps=1)


@pytest.mark.parametrize("mode", ["graph", "eager"])
def test_so_is_keras_s_own_wrapper(mode):
    with tfamp.policy_scope("mixed_float16"):
        optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.5, name="sgd"))
    with pytest.warns(tfamp.TfampWarning, match=f"around sgd.*{CLIPPED}") as found:
        train(optimizer, CLIPS["global norm"], mode=mode, steps=24)
    assert len(found) == 1


@pytest.mark.parametrize(
    ("clip", "mode"),
    [
        ("global norm", "graph"),
        ("norm", "graph"),
        ("by hand", "graph"),
        ("value", "graph"),
        ("global norm", "eager"),
        pytest.param("global norm", "xla", marks=pytest.mark.slow),
    ],
)
def test_unscaled_gradients_are_clipped_as_in_float32_and_not_told_of(clip, mode, no_warning):
    change = {**CLIPS, **VALUES}[clip]
    found = train(wrapped(), change, mode=mode, unscale=True)
    bare = keras.optimizers.SGD(0.5)
    expected = train(bare, change, "float32")
    assert expected[1] < 0.7 * expected[0]
    np.testing.assert_allclose(found, expected, rtol=0.03)


@pytest.mark.parametrize("mode", ["graph", "eager"])
def test_other_changes_are_not_told_of(mode, no_warning):
    for change in (
        lambda gradients: gradients,
        lambda gradients: [g * 0.5 for g in gradients],
        lambda gradients: [g * tf.reduce_mean(tf.constant(X)) for g in gradients],
        lambda gradients: [tf.maximum(g, -1e30) for g in gradients],
    ):
        train(wrapped(), change, mode=mode, steps=22 if mode == "eager" else 1)
    inner = keras.optimizers.SGD(0.5, global_clipnorm=1.0)
    train(tfamp.LossScaleOptimizer(inner), lambda gradients: gradients, mode=mode, steps=22)
    clips = tfamp.LossScaleOptimizer(keras.optimizers.SGD(0.5), grad_clip=1.0)
    first, last = train(clips, lambda gradients: gradients, mode=mode)
    assert last < 0.7 * first


def test_a_step_without_a_scaled_loss_or_with_a_scale_of_one_is_not_told_of(no_warning):
    for mode in ("graph", "eager"):
        one = tfamp.LossScaleOptimizer(keras.optimizers.SGD(0.5), loss_scale=1.0)
        train(one, CLIPS["global norm"], "mixed_bfloat16", mode, steps=22)


def test_the_state_that_it_needs_is_in_no_checkpoint(tmp_path):
    optimizer = wrapped()
    with pytest.warns(tfamp.TfampWarning, match=CLIPPED):
        train(optimizer, CLIPS["norm"], mode="eager", steps=24)
    path = tf.train.Checkpoint(optimizer=optimizer).save(tmp_path / "ck")
    names = [name for name, _ in tf.train.list_variables(path)]
    assert not [name for name in names if "clip" in name or "norm" in name]
    new = wrapped()
    tf.train.Checkpoint(optimizer=new).restore(path)
    assert int(new.iterations) == int(optimizer.iterations) == 24
