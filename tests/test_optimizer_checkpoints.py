"""Checkpoints that an optimizer saved with another wrapper, or without one."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp
from helpers.cases import first_of, tiers
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


SLOTTED = {
    "momentum": lambda: keras.optimizers.SGD(0.05, momentum=0.5),
    "adam": lambda: keras.optimizers.Adam(0.05),
    "lion": lambda: keras.optimizers.Lion(0.05),
}
FEATURES = [
    {},
    {"master_weights": True, "hysteresis": 2},
    {"weight_rounding": "stochastic"},
    {"loss_scale": 8.0, "grad_clip": 1e9},
]


class Scalars(keras.Model):
    """A model of a few scalar weights, so that only their number tells files apart."""

    def __init__(self, optimizer, count=9, dtype="float32"):
        super().__init__()
        add = self.add_weight
        self.scalars = [add(shape=(), initializer="ones", dtype=dtype) for _ in range(count)]
        self.compile(optimizer, "mse", auto_scale_loss=False)
        self.build((1, 1))

    def call(self, x):
        return x * sum(self.scalars)

    def train(self, steps=2):
        for _ in range(steps):
            grads = [tf.constant(0.5 + i, v.dtype) for i, v in enumerate(self.scalars)]
            self.optimizer.apply_gradients(zip(grads, self.scalars, strict=True))


@pytest.fixture
def bare_file(tmp_path):
    """A function that trains with a bare optimizer and returns the model and its file."""

    def save(optimizer, count=9):
        model = Scalars(optimizer, count)
        model.train()
        model.save_weights(tmp_path / "bare.weights.h5")
        return model, tmp_path / "bare.weights.h5"

    return save


def wrapped_like(optimizer, built, count=9, **feature):
    model = Scalars(tfamp.LossScaleOptimizer(optimizer, **feature), count)
    if built:
        model.optimizer.build(model.trainable_variables)
    return model


@pytest.mark.filterwarnings("ignore:Skipping variable loading")  # Of Keras, for an empty entry.
@pytest.mark.parametrize("built", [True, False], ids=["built", "not_built"])
@pytest.mark.parametrize("inner", first_of(SLOTTED))
def test_a_bare_optimizers_weights_file_restores_slots_and_training_goes_on(
    bare_file, inner, built
):
    bare, path = bare_file(SLOTTED[inner]())
    loaded = [wrapped_like(SLOTTED[inner](), built, **each) for each in FEATURES]
    for model in loaded:
        start = float(model.optimizer.dynamic_scale)
        model.load_weights(path)
        optimizer = model.optimizer
        assert (int(optimizer.iterations), float(optimizer.dynamic_scale)) == (2, start)
        optimizer.build(model.trainable_variables)
        assert_same_values(snapshot(optimizer.inner_optimizer), snapshot(bare.optimizer))
        assert float(optimizer.loss_scale) == start
        assert [int(optimizer.dynamic_counter), int(optimizer.skipped_steps)] == [0, 0]
    bare.train()
    like_bare = wrapped_like(SLOTTED[inner](), built, loss_scale=1.0)
    bare_file(SLOTTED[inner]())
    like_bare.load_weights(path)
    like_bare.train()
    np.testing.assert_allclose(like_bare.get_weights(), bare.get_weights(), rtol=1e-6)
    assert_same_values(snapshot(like_bare.optimizer.inner_optimizer), snapshot(bare.optimizer))


@pytest.mark.filterwarnings("ignore:Skipping variable loading")
@pytest.mark.parametrize("count", range(8, 14))
def test_no_number_of_weights_takes_a_bare_optimizers_file_for_a_wrappers(bare_file, count):
    inner = SLOTTED["momentum"]
    bare, path = bare_file(inner(), count)
    for feature in FEATURES:
        model = wrapped_like(inner(), False, count, **feature)
        start = snapshot(model.optimizer)
        model.load_weights(path)
        own = len(start) - len(model.optimizer.inner_optimizer.variables)
        after = list(snapshot(model.optimizer).values())
        assert after[:own] == list(start.values())[:own]
        model.optimizer.build(model.trainable_variables)
        assert_same_values(snapshot(model.optimizer.inner_optimizer), snapshot(bare.optimizer))


@pytest.mark.filterwarnings("ignore:Skipping variable loading")
def test_what_a_program_assigns_after_it_loaded_a_file_stays(bare_file):
    bare, path = bare_file(SLOTTED["adam"]())
    model = wrapped_like(SLOTTED["adam"](), False)
    model.load_weights(path)
    model.optimizer.learning_rate = 0.25
    model.optimizer.build(model.trainable_variables)
    assert float(model.optimizer.inner_optimizer.learning_rate) == 0.25
    slots = [snapshot(each) for each in (model.optimizer.inner_optimizer, bare.optimizer)]
    for value, wanted in list(zip(*(each.values() for each in slots), strict=True))[2:]:
        np.testing.assert_array_equal(value, wanted)


@pytest.mark.filterwarnings("ignore:Skipping variable loading")
@pytest.mark.parametrize("built", [True, False], ids=["built", "not_built"])
@pytest.mark.parametrize("count", [7, 9])
def test_a_file_of_another_optimizer_changes_nothing_and_the_warning_says_where(
    bare_file, built, count
):
    _, path = bare_file(SLOTTED["adam"](), count)
    model = wrapped_like(keras.optimizers.SGD(0.125, momentum=0.5), built, count)
    wanted = snapshot(
        wrapped_like(keras.optimizers.SGD(0.125, momentum=0.5), True, count).optimizer
    )
    with pytest.warns(tfamp.TfampWarning, match="restored into the inner_optimizer of"):
        model.load_weights(path)
        model.optimizer.build(model.trainable_variables)
    assert_same_values(snapshot(model.optimizer), wanted)
    model.train()
    assert int(model.optimizer.iterations) == 2


@pytest.mark.filterwarnings("ignore:Skipping variable loading")
@pytest.mark.parametrize("feature", FEATURES, ids=lambda each: "-".join(each) or "none")
def test_a_wrappers_own_weights_file_is_no_bare_optimizers(tmp_path, feature):
    """Even where it holds as many variables as the inner optimizer."""
    path = tmp_path / "own.weights.h5"
    saved = wrapped_like(SLOTTED["momentum"](), True, **feature)
    saved.train()
    saved.optimizer.dynamic_scale.assign(4.0)
    saved.save_weights(path)
    model = wrapped_like(SLOTTED["momentum"](), True, **feature)
    model.load_weights(path)
    assert_same_values(snapshot(model.optimizer), snapshot(saved.optimizer))

    unbuilt = wrapped_like(SLOTTED["momentum"](), False, **feature)
    unbuilt.save_weights(path)
    count = len(unbuilt.optimizer.variables) - 2
    model = wrapped_like(SLOTTED["momentum"](), True, count, **feature)
    assert len(model.optimizer.inner_optimizer.variables) == len(unbuilt.optimizer.variables)
    before = snapshot(model.optimizer)
    model.optimizer.load_own_variables(
        {str(i): variable.numpy() for i, variable in enumerate(unbuilt.optimizer.variables)}
    )
    assert_same_values(snapshot(model.optimizer), before)


def test_no_number_of_variables_takes_kerass_wrappers_file_for_ours(tmp_path):
    theirs = Scalars(keras.optimizers.LossScaleOptimizer(SLOTTED["momentum"]()), 5)
    theirs.train()
    theirs.save_weights(tmp_path / "theirs.weights.h5")
    model = wrapped_like(SLOTTED["momentum"](), False, 5)
    assert len(model.optimizer.variables) == len(theirs.optimizer.variables)
    before = snapshot(model.optimizer)
    with pytest.warns(UserWarning, match="Skipping variable loading"):
        model.load_weights(tmp_path / "theirs.weights.h5")
    assert_same_values(snapshot(model.optimizer), before)

    built = wrapped_like(SLOTTED["momentum"](), True, 5)
    with pytest.warns(UserWarning, match="Skipping variable loading"):
        built.load_weights(tmp_path / "theirs.weights.h5")
    inner = [each.optimizer.inner_optimizer for each in (built, theirs)]
    assert_same_values(*map(snapshot, inner))


@pytest.mark.filterwarnings("ignore:No loss has been scaled")
@pytest.mark.parametrize("built", [True, False], ids=["built", "not_built"])
@pytest.mark.parametrize(
    ("feature", "dtype"),
    [
        ({"master_weights": True}, "float16"),
        ({"weight_rounding": "stochastic"}, "float16"),
        ({"weight_rounding": "split"}, "bfloat16"),
    ],
    ids=["masters", "stochastic", "split"],
)
def test_low_precision_slots_of_a_bare_optimizers_checkpoint_are_cast(
    tmp_path, feature, dtype, built
):
    for inner in reversed(SLOTTED.values()):  # Adam divides by zero in bfloat16.
        bare = Scalars(inner(), 3, dtype)
        bare.train()
        path = tf.train.Checkpoint(o=bare.optimizer).write(str(tmp_path / "bare"))
        model = Scalars(tfamp.LossScaleOptimizer(inner(), **feature), 3, dtype)
        optimizer = model.optimizer
        if built:
            optimizer.build(model.trainable_variables)
        else:  # A checkpoint of the optimizer alone holds the weights it was built for.
            model.set_weights(bare.get_weights())
        tf.train.Checkpoint(o=optimizer).read(path)
        optimizer.build(model.trainable_variables)
        assert (float(optimizer.dynamic_scale), int(optimizer.iterations)) == (2.0**15, 2)
        pairs = zip(optimizer.inner_optimizer.variables, bare.optimizer.variables, strict=True)
        for slot, saved in pairs:
            wanted = tf.cast(tf.convert_to_tensor(saved), slot.dtype)
            np.testing.assert_array_equal(slot.numpy(), wanted.numpy())
        assert_same_values(snapshot(model), snapshot(bare))
        for master, weight in zip(optimizer.master_variables, bare.scalars, strict=False):
            np.testing.assert_array_equal(master, tf.cast(tf.convert_to_tensor(weight), "float32"))
    model.train(1)
    bare.train(1)
    close = np.testing.assert_allclose
    close(*([np.float32(w) for w in m.get_weights()] for m in (model, bare)), rtol=0.02)


def test_weights_of_a_bare_optimizers_checkpoint_reach_the_model_and_its_masters(tmp_path):
    bare = Scalars(SLOTTED["adam"](), 3)
    bare.train(3)
    path = tf.train.Checkpoint(o=bare.optimizer).write(str(tmp_path / "bare"))
    for feature in ({"master_weights": True}, {"weight_rounding": "split"}):
        model = Scalars(tfamp.LossScaleOptimizer(SLOTTED["adam"](), **feature), 3, "bfloat16")
        model.optimizer.build(model.trainable_variables)
        tf.train.Checkpoint(o=model.optimizer).read(path)
        exact = model.optimizer.stored_weights.exact_values(model.scalars)
        np.testing.assert_array_equal(exact, bare.get_weights())
        if "master_weights" in feature:
            rounded = tf.cast(bare.get_weights(), "bfloat16")
            np.testing.assert_array_equal(model.get_weights(), rounded)


# ---- With and without master weights -----------------------------------------------------------


def low_model(dtype):
    """Variables and arithmetic in the low dtype."""
    with tfamp.policy_scope(dtype):
        return small_model()


def take_steps(weights, optimizer, steps):
    """Steps with gradients that are exact in every dtype."""
    for step in range(steps):
        numbers = (np.arange(np.prod(v.shape)).reshape(v.shape) for v in weights)
        gradients = [np.round(32 * np.cos(n + step)) / 32 for n in numbers]
        pairs = zip(gradients, weights, strict=True)
        optimizer.apply_gradients([(tf.constant(g, v.dtype), v) for g, v in pairs])


def trained_low(inner, dtype, **arguments):
    """A model of 16-bit weights and its optimizer, after three steps."""
    model = low_model(dtype)
    optimizer = tfamp.LossScaleOptimizer(
        inner(), initial_scale=4.0, dynamic_growth_steps=2, **arguments
    )
    take_steps(model.trainable_variables, optimizer, 3)
    return model, optimizer


def float32_twin(inner, weights, state):
    """float32 variables and a bare optimizer, which go on from weights and a state."""
    variables = [keras.Variable(tf.cast(tf.convert_to_tensor(w), "float32")) for w in weights]
    optimizer = inner()
    optimizer.build(variables)
    for variable, value in zip(optimizer.variables, state, strict=True):
        variable.assign(tf.cast(tf.convert_to_tensor(value), variable.dtype))
    return variables, optimizer


def assert_goes_on_as_in_float32(inner, model, optimizer, state):
    """Two steps in a function and an eager one, against a bare optimizer on float32 variables."""
    twins, bare = float32_twin(inner, model.trainable_variables, state)
    tf.function(lambda: take_steps(model.trainable_variables, optimizer, 2))()
    take_steps(twins, bare, 2)
    for take in (model.trainable_variables, optimizer), (twins, bare):
        take_steps(*take, 1)
    found = [*optimizer.master_variables, *optimizer.inner_optimizer.variables]
    for value, wanted in zip(found, [*twins, *bare.variables], strict=True):
        np.testing.assert_allclose(value, wanted, rtol=1e-5, atol=1e-7)


def own_state(optimizer):
    """The wrapper's scale and counters, and the iterations."""
    counters = optimizer.dynamic_counter, optimizer.skipped_steps, optimizer.iterations
    return float(optimizer.dynamic_scale), *map(int, counters)


def assert_masters_are(optimizer, weights):
    assert optimizer.master_variables
    for master, weight in zip(optimizer.master_variables, weights, strict=True):
        assert str(master.dtype) == "float32"
        np.testing.assert_array_equal(master, np.float32(weight))


WITHOUT_MASTERS = first_of([("momentum", "float16"), ("lion", "bfloat16"), ("adam", "bfloat16")])


@pytest.mark.filterwarnings("ignore:No loss has been scaled", "ignore:(lion|adam) keeps")
@pytest.mark.parametrize("with_model", [True, False], ids=["model", "optimizer"])
@pytest.mark.parametrize("built", [True, False], ids=["built", "not_built"])
@pytest.mark.parametrize(("inner", "dtype"), WITHOUT_MASTERS)
def test_masters_start_from_a_checkpoint_without_them(tmp_path, inner, dtype, built, with_model):
    inner = SLOTTED[inner]
    old, saved = trained_low(inner, dtype, master_weights=False)
    held = {"m": old} if with_model else {}
    path = tf.train.Checkpoint(o=saved, **held).write(str(tmp_path / "old"))

    model, optimizer = low_model(dtype), tfamp.LossScaleOptimizer(inner(), dynamic_growth_steps=2)
    if built:
        optimizer.build(model.trainable_variables)
    elif not with_model:  # A checkpoint of the optimizer alone holds the weights it was built for.
        model.set_weights(old.get_weights())
    held = {"m": model} if with_model else {}
    tf.train.Checkpoint(o=optimizer, **held).read(path).assert_nontrivial_match()
    optimizer.build(model.trainable_variables)
    assert own_state(optimizer) == own_state(saved) == (8.0, 1, 0, 3)
    assert_same_values(snapshot(model), snapshot(old))
    assert_masters_are(optimizer, old.get_weights())
    assert_goes_on_as_in_float32(inner, model, optimizer, saved.inner_optimizer.variables)


@pytest.mark.filterwarnings("ignore:No loss has been scaled")
@pytest.mark.parametrize("built", [True, False], ids=["built", "not_built"])
@pytest.mark.parametrize("dtype", first_of(["bfloat16", "float16"]))
def test_a_checkpoint_with_masters_restores_without_them(tmp_path, dtype, built):
    inner = SLOTTED["momentum"]
    old, saved = trained_low(inner, dtype)
    assert len(saved.master_variables) == 4
    path = tf.train.Checkpoint(m=old, o=saved).write(str(tmp_path / "old"))
    model, optimizer = low_model(dtype), tfamp.LossScaleOptimizer(inner(), master_weights=False)
    if built:
        optimizer.build(model.trainable_variables)
    tf.train.Checkpoint(m=model, o=optimizer).read(path)
    optimizer.build(model.trainable_variables)
    assert own_state(optimizer) == own_state(saved) == (8.0, 1, 0, 3)
    assert_same_values(snapshot(model), snapshot(old))
    both = optimizer.inner_optimizer.variables, saved.inner_optimizer.variables
    for slot, wanted in list(zip(*both, strict=True))[2:]:
        assert slot.dtype == dtype
        np.testing.assert_array_equal(slot.numpy(), tf.cast(wanted.value, dtype).numpy())
    for each in (model, optimizer), (old, saved):
        take_steps(each[0].trainable_variables, each[1], 1)
    for value, wanted in zip(model.get_weights(), saved.master_variables, strict=True):
        # The step is rounded to the low dtype; weights and slots are at most 1 or so.
        np.testing.assert_allclose(np.float32(value), wanted, atol=2.0**-7)


@pytest.mark.filterwarnings("ignore:(No loss has been scaled|multi_optimizer keeps)")
def test_a_multi_optimizer_gets_masters_from_a_checkpoint_without_them(tmp_path):
    if not hasattr(keras.optimizers, "MultiOptimizer"):
        pytest.skip("this Keras has no MultiOptimizer")

    def inner():
        biases = {".*bias": keras.optimizers.SGD(0.05, momentum=0.5)}
        kernels = keras.optimizers.Adam(0.05, epsilon=1e-3)
        return keras.optimizers.MultiOptimizer(keras.optimizers.OptimizerMap(kernels, biases))

    old, saved = trained_low(inner, "bfloat16", master_weights=False)
    path = tf.train.Checkpoint(m=old, o=saved).write(str(tmp_path / "old"))
    model, optimizer = low_model("bfloat16"), tfamp.LossScaleOptimizer(inner())
    optimizer.build(model.trainable_variables)
    tf.train.Checkpoint(m=model, o=optimizer).read(path)
    assert_masters_are(optimizer, old.get_weights())
    # Keras's checkpoints lose the state of the parts, in every dtype and without a wrapper.
    assert own_state(optimizer) == own_state(saved)


@pytest.mark.filterwarnings(
    "ignore:(No loss has been scaled|__array__ implementation)",
    "ignore:Skipping variable loading for optimizer 'sgd",  # Of Keras, for the inner one.
)
@pytest.mark.parametrize("built", [True, False], ids=["built", "not_built"])
@pytest.mark.parametrize(
    ("saved_with", "loaded_with"),
    [(False, None), (None, False), (None, None)],
    ids=["without", "with", "with_both"],
)
def test_weights_files_restore_scale_and_slots_with_and_without_masters(
    tmp_path, saved_with, loaded_with, built
):
    inner = SLOTTED["momentum"]
    old, saved = trained_low(inner, "float16", master_weights=saved_with)
    old.compile(saved, "mse")
    old.save_weights(tmp_path / "old.weights.h5")
    model = low_model("float16")
    optimizer = tfamp.LossScaleOptimizer(
        inner(), master_weights=loaded_with, dynamic_growth_steps=2
    )
    model.compile(optimizer, "mse")
    if built:
        optimizer.build(model.trainable_variables)
    model.load_weights(tmp_path / "old.weights.h5")
    assert own_state(optimizer) == own_state(saved) == (8.0, 1, 0, 3)
    optimizer.build(model.trainable_variables)
    assert_same_values(snapshot(model), snapshot(old))
    both = optimizer.inner_optimizer.variables, saved.inner_optimizer.variables
    for slot, wanted in zip(*both, strict=True):
        np.testing.assert_array_equal(slot.numpy(), tf.cast(wanted.value, slot.dtype).numpy())
    if loaded_with is None:
        assert_masters_are(optimizer, (saved.master_variables or old.get_weights()))
        assert_goes_on_as_in_float32_from(inner, model, optimizer, saved)


def assert_goes_on_as_in_float32_from(inner, model, optimizer, saved):
    weights = saved.master_variables or model.trainable_variables
    twins, bare = float32_twin(inner, weights, saved.inner_optimizer.variables)
    take_steps(model.trainable_variables, optimizer, 2)
    take_steps(twins, bare, 2)
    for value, wanted in zip(optimizer.master_variables, twins, strict=True):
        np.testing.assert_allclose(value, wanted, rtol=1e-5, atol=1e-7)


@pytest.mark.filterwarnings("ignore:No loss has been scaled")
def test_a_keras_file_of_an_optimizer_built_before_gives_its_state_to_the_masters(tmp_path):
    model, inner = low_model("float16"), SLOTTED["momentum"]()
    inner.build(model.trainable_variables)  # So that the default has no masters.
    saved = tfamp.LossScaleOptimizer(inner, initial_scale=4.0, dynamic_growth_steps=2)
    model.compile(saved, "mse")
    take_steps(model.trainable_variables, saved, 3)
    assert not saved.master_variables
    model.save(tmp_path / "old.keras")
    loaded = keras.models.load_model(tmp_path / "old.keras")
    optimizer = loaded.optimizer
    assert own_state(optimizer) == own_state(saved) == (8.0, 1, 0, 3)
    assert_masters_are(optimizer, model.get_weights())
    assert_goes_on_as_in_float32(
        SLOTTED["momentum"], loaded, optimizer, saved.inner_optimizer.variables
    )


@pytest.mark.filterwarnings(
    "ignore:(No loss has been scaled|__array__ implementation)",
    "ignore:Skipping variable loading for optimizer 'nadam",
)
@pytest.mark.parametrize("built", [True, False], ids=["built", "not_built"])
@pytest.mark.parametrize("way", ["checkpoint", "weights"])
def test_nadams_product_of_momenta_is_restored_and_training_goes_on_exactly(tmp_path, way, built):
    def make():
        model, optimizer = low_model("float32"), keras.optimizers.Nadam(0.05)
        model.compile(tfamp.LossScaleOptimizer(optimizer), "mse", auto_scale_loss=False)
        return model

    old, model = make(), make()
    take_steps(old.trainable_variables, old.optimizer, 3)
    if built:
        model.optimizer.build(model.trainable_variables)
    if way == "checkpoint":
        path = tf.train.Checkpoint(m=old, o=old.optimizer).write(str(tmp_path / "old"))
        tf.train.Checkpoint(m=model, o=model.optimizer).read(path)
    else:
        old.save_weights(tmp_path / "old.weights.h5")
        model.load_weights(tmp_path / "old.weights.h5")
    for each in (old, model):
        take_steps(each.trainable_variables, each.optimizer, 2)
    assert_same_values(snapshot(model, model.optimizer), snapshot(old, old.optimizer))
