"""Checkpoints that an optimizer saved with another wrapper, or without one."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp
from helpers.cases import tiers
from helpers.training import assert_same_values, data, small_model, snapshot

INNER = {
    "sgd": lambda: keras.optimizers.SGD(0.05),
    "momentum": lambda: keras.optimizers.SGD(0.05, momentum=0.5),
    "adam": lambda: keras.optimizers.Adam(0.05),
}


def trained(optimizer):
    """A model that was trained for a few steps."""
    model = small_model()
    model.compile(optimizer, "mse", jit_compile=False, auto_scale_loss=False)
    model.fit(*data(), batch_size=8, shuffle=False, verbose=0)
    return model


def go_on(model):
    model.fit(*data(), batch_size=8, shuffle=False, verbose=0)


@pytest.mark.parametrize(
    "inner", tiers(["momentum"], [each for each in INNER if each != "momentum"])
)
@pytest.mark.parametrize("built", [True, False], ids=["built", "not_built"])
def test_a_bare_optimizers_checkpoint_restores_the_slots_and_leaves_the_scale(
    tmp_path, inner, built
):
    bare = trained(INNER[inner]())
    saved = tf.train.Checkpoint(model=bare, optimizer=bare.optimizer)
    path = saved.save(str(tmp_path / "bare"))

    model, optimizer = small_model(), tfamp.LossScaleOptimizer(INNER[inner](), initial_scale=8.0)
    if built:
        optimizer.build(model.trainable_variables)
    status = tf.train.Checkpoint(model=model, optimizer=optimizer).restore(path)
    status.assert_nontrivial_match()
    assert float(optimizer.dynamic_scale) == 8.0
    optimizer.build(model.trainable_variables)
    assert int(optimizer.iterations) == 4
    assert_same_values(snapshot(optimizer.inner_optimizer), snapshot(bare.optimizer))
    assert [int(each) for each in (optimizer.dynamic_counter, optimizer.skipped_steps)] == [0, 0]
    model.compile(optimizer, "mse", jit_compile=False)
    go_on(model)
    go_on(bare)
    for value, wanted in zip(model.get_weights(), bare.get_weights(), strict=True):
        np.testing.assert_allclose(value, wanted, rtol=1e-5, atol=1e-6)


def test_master_weights_start_from_the_weights_of_a_bare_optimizers_checkpoint(tmp_path):
    bare = trained(INNER["adam"]())
    path = tf.train.Checkpoint(optimizer=bare.optimizer).save(str(tmp_path / "bare"))
    with tfamp.policy_scope("bfloat16"):
        model = small_model()
    optimizer = tfamp.LossScaleOptimizer(INNER["adam"](), master_weights=True)
    optimizer.build(model.trainable_variables)
    tf.train.Checkpoint(optimizer=optimizer).restore(path)
    for master, weight in zip(optimizer.master_variables, bare.trainable_variables, strict=True):
        np.testing.assert_array_equal(master, weight)
    assert int(optimizer.iterations) == 4


def test_kerass_wrapper_and_ours_read_each_others_checkpoints(tmp_path):
    theirs = trained(keras.optimizers.LossScaleOptimizer(INNER["adam"](), initial_scale=2.0**10))
    path = tf.train.Checkpoint(optimizer=theirs.optimizer).save(str(tmp_path / "theirs"))
    model, optimizer = small_model(), tfamp.LossScaleOptimizer(INNER["adam"]())
    optimizer.build(model.trainable_variables)
    tf.train.Checkpoint(optimizer=optimizer).restore(path).assert_nontrivial_match()
    assert (float(optimizer.loss_scale), int(optimizer.dynamic_counter)) == (2.0**10, 4)
    inner = theirs.optimizer.inner_optimizer
    assert_same_values(snapshot(optimizer.inner_optimizer), snapshot(inner))

    optimizer.dynamic_scale.assign(2.0**5)
    back = tf.train.Checkpoint(optimizer=optimizer).save(str(tmp_path / "ours"))
    other = trained(keras.optimizers.LossScaleOptimizer(INNER["adam"]()))
    tf.train.Checkpoint(optimizer=other.optimizer).restore(back).assert_nontrivial_match()
    assert float(other.optimizer.dynamic_scale) == 2.0**5
    assert_same_values(snapshot(other.optimizer.inner_optimizer), snapshot(inner))


def test_a_checkpoint_of_the_first_release_candidate_is_read(tmp_path):
    """It listed the variables of the wrapper under the names of every optimizer, too."""
    old = trained(tfamp.LossScaleOptimizer(INNER["adam"](), initial_scale=2.0**10)).optimizer
    own = old.variables[: -len(old.inner_optimizer.variables)]
    saved = tf.train.Checkpoint(
        **{"_variables": own, "_iterations": own[0], "_learning_rate": own[1]},
        **{"dynamic_scale": old.dynamic_scale, "step_counter": old.step_counter},
        inner_optimizer=old.inner_optimizer,
    )
    path = tf.train.Checkpoint(optimizer=saved).save(str(tmp_path / "old"))
    optimizer = tfamp.LossScaleOptimizer(INNER["adam"]())
    optimizer.build(small_model().trainable_variables)
    tf.train.Checkpoint(optimizer=optimizer).restore(path)
    assert (float(optimizer.loss_scale), int(optimizer.dynamic_counter)) == (2.0**10, 4)
    assert int(optimizer.iterations) == 4
    assert_same_values(snapshot(optimizer.inner_optimizer), snapshot(old.inner_optimizer))


def test_a_wrappers_checkpoint_gives_a_bare_optimizer_nothing_and_by_the_recipe_all(tmp_path):
    wrapped = trained(tfamp.LossScaleOptimizer(INNER["adam"]())).optimizer
    path = tf.train.Checkpoint(optimizer=wrapped).save(str(tmp_path / "wrapped"))
    bare, weights = INNER["adam"](), small_model().trainable_variables
    bare.build(weights)
    status = tf.train.Checkpoint(optimizer=bare).restore(path)
    with pytest.raises(AssertionError, match="not bound"):
        status.assert_existing_objects_matched()
    status.expect_partial()
    assert (int(bare.iterations), float(bare.learning_rate)) == (0, np.float32(0.05))
    inside = tf.train.Checkpoint(inner_optimizer=bare)
    tf.train.Checkpoint(optimizer=inside).restore(path).expect_partial()
    assert_same_values(snapshot(bare), snapshot(wrapped.inner_optimizer))


@pytest.mark.parametrize(
    "inner", tiers(["momentum"], [each for each in INNER if each != "momentum"])
)
def test_weights_files_of_a_bare_optimizer_restore_its_state(tmp_path, inner):
    bare = trained(INNER[inner]())
    bare.save_weights(tmp_path / "bare.weights.h5")
    model = trained(tfamp.LossScaleOptimizer(INNER[inner](), initial_scale=8.0))
    go_on(model)
    model.load_weights(tmp_path / "bare.weights.h5")
    assert_same_values(snapshot(model.optimizer.inner_optimizer), snapshot(bare.optimizer))
    assert float(model.optimizer.loss_scale) == 8.0
