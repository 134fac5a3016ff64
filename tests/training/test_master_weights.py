"""float32 masters of low-precision variables: updates, saving, and synchronization."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp
from helpers.cases import first_of, one_in, tiers
from helpers.graph_asserts import branches
from helpers.replicas import halves
from helpers.tolerances import assert_all_close, assert_close
from helpers.training import (
    assert_same_values,
    data,
    scaled_gradients,
    small_model,
    snapshot,
    train_step,
)

LOW = ["float16", "bfloat16"]


def low_model(dtype="float16"):
    """Variables and arithmetic in the low dtype."""
    with tfamp.policy_scope(dtype):
        return small_model()


def make(inner=None, **arguments):
    arguments.setdefault("initial_scale", 2.0**10)
    return tfamp.LossScaleOptimizer(
        inner or keras.optimizers.Adam(0.01), master_weights=True, **arguments
    )


def dtypes(variables):
    names = {keras.backend.standardize_dtype(variable.dtype) for variable in variables}
    return {name for name in names if "float" in name}


def assert_rounded(variables, masters):
    assert len(variables) == len(masters)
    for variable, master in zip(variables, masters, strict=True):
        exact = tf.convert_to_tensor(master.value)
        nearest = tf.cast(tf.cast(exact, variable.dtype), "float32")
        stored = tf.cast(variable.value, "float32")
        # Both neighbours of a tie are nearest: bfloat16 weights take the one away from zero.
        assert tf.reduce_all(tf.abs(stored - exact) == tf.abs(nearest - exact)), variable.path


@pytest.mark.parametrize("dtype", first_of(reversed(LOW)))
def test_updates_below_half_a_spacing_add_up(dtype):
    weight = keras.Variable(np.ones(3), dtype=dtype)
    optimizer = tfamp.LossScaleOptimizer(keras.optimizers.SGD(1.0), master_weights=True)
    optimizer.build([weight])

    @tf.function
    def steps():
        for _ in tf.range(1000):
            optimizer.apply([tf.fill([3], 1e-4)], [weight], unscaled=True)

    steps()
    assert_close(np.float32(weight.numpy()), np.full(3, 0.9), dtype)


@pytest.mark.parametrize(
    "inner",
    one_in(
        3,
        [
            lambda: keras.optimizers.SGD(0.05, momentum=0.9),
            lambda: keras.optimizers.AdamW(0.01),
            lambda: keras.optimizers.RMSprop(0.01),
            lambda: keras.optimizers.SGD(0.05, use_ema=True, ema_overwrite_frequency=3),
            lambda: keras.optimizers.SGD(0.05, gradient_accumulation_steps=2),
        ],
    ),
    ids=["SGD", "AdamW", "RMSprop", "moving_average", "accumulation"],
)
def test_masters_go_as_the_bare_optimizer_on_float32_variables(inner):
    model, optimizer = low_model("bfloat16"), make(inner())
    optimizer.build(model.trainable_variables)
    masters = optimizer.master_variables
    assert dtypes(masters) == {"float32"}
    assert dtypes(optimizer.inner_optimizer.variables) == {"float32"}, "slots too"
    reference = [keras.Variable(m.numpy()) for m in masters]
    bare = inner()
    x, y = data(6)
    for i in range(6):
        grads = scaled_gradients(model, optimizer, *(v[8 * i : 8 * i + 8] for v in (x, y)))
        assert dtypes(grads) == {"bfloat16"}
        unscaled = [tf.cast(g, tf.float32) / optimizer.loss_scale for g in grads]
        optimizer.apply_gradients(zip(grads, model.trainable_variables, strict=True))
        bare.apply_gradients(zip(unscaled, reference, strict=True))
    assert_all_close(masters, reference, "float32", depth=36)
    assert dtypes(model.trainable_variables) == {"bfloat16"}
    assert_rounded(model.trainable_variables, masters)


def test_float32_variables_need_no_master_and_tf_variables_have_one():
    weights = [
        keras.Variable(np.ones(2), dtype="float16", name="low"),
        keras.Variable(np.ones(2), dtype="float32", name="wide"),
        tf.Variable(np.ones(2), dtype=tf.float16, name="outer/weight"),
    ]
    optimizer = make(keras.optimizers.SGD(1e-4))
    optimizer.apply([tf.constant([1.0, 2.0])] * 3, weights, unscaled=True)
    assert optimizer.master_variables[0].name == "low"
    for each in (*optimizer.master_variables, weights[1]):
        assert_close(each.numpy(), [0.9999, 0.9998], "float32")
    without = make()
    without.build(weights[1:2])
    assert (without.master_weights, without.master_variables) == (True, [])


def test_gradients_are_unscaled_in_float32():
    weight = keras.Variable(np.zeros(2), dtype="float16")
    optimizer = make(keras.optimizers.SGD(1.0), initial_scale=2.0**15)
    optimizer.build([weight])
    # 2**-10 over the scale is 2**-25: zero in float16.
    optimizer.get_scaled_loss(1.0)
    optimizer.apply([tf.constant([2.0**-10, 0.0], tf.float16)], [weight])
    np.testing.assert_array_equal(optimizer.master_variables[0].numpy(), [-(2.0**-25), 0.0])


@pytest.mark.parametrize("traced", [True, False], ids=["function", "eager"])
def test_training_goes_on_from_weights_that_were_assigned(traced):
    weight = keras.Variable(np.ones(4), dtype="float16")
    optimizer = make(keras.optimizers.SGD(1.0))

    def step():
        gradient = optimizer.get_scaled_loss(tf.fill([4], 1e-4))
        optimizer.apply_gradients([(gradient, weight)])

    run = tf.function(step) if traced else step
    run()
    np.testing.assert_array_equal(weight.numpy(), np.ones(4), "too small to show")
    weight.assign([1.0, 2.0, -3.0, 0.0])
    run()
    # The first element was assigned its own value: its master is kept.
    expected = np.float32([1 - 2e-4, 2 - 1e-4, -3 - 1e-4, -1e-4])
    assert_close(optimizer.master_variables[0].numpy(), expected, "float32")


@pytest.mark.parametrize(("device", "expected"), [("cpu", 2), ("gpu", 1)])
def test_a_step_branches_once_for_all_masters(monkeypatch, device, expected):
    monkeypatch.setattr("tfamp.training.weights.device_kind_of", lambda name: device)

    def conditions(count):
        weights = [keras.Variable([1.0], dtype="bfloat16") for _ in range(count)]
        optimizer = make(keras.optimizers.SGD(0.5), initial_scale=1.0)
        optimizer.build(weights)

        @tf.function
        def step():
            gradients = [tf.constant([1.0])] * count
            optimizer.apply_gradients(zip(gradients, weights, strict=True), unscaled=True)

        weights[-1].assign([3.0])
        step()
        assert [float(weight[0]) for weight in weights] == [0.5] * (count - 1) + [2.5]
        return branches(step)

    # A check for assigned weights, for which a GPU's host would wait.
    assert conditions(3) == conditions(1) == expected


def test_names_and_paths_are_those_of_the_variables():
    model, optimizer = low_model(), make(keras.optimizers.AdamW(0.5, weight_decay=0.5))
    kernel = model.layers[0].kernel
    optimizer.exclude_from_weight_decay(var_list=[kernel], var_names=["bias"])
    optimizer.build(model.trainable_variables)
    assert [m.path for m in optimizer.master_variables] == [
        v.path for v in model.trainable_variables
    ]
    before = snapshot(model)
    zeros = [tf.zeros(v.shape) for v in model.trainable_variables]
    optimizer.apply(zeros, unscaled=True)
    changed = [
        not np.array_equal(a, b)
        for a, b in zip(snapshot(model).values(), before.values(), strict=True)
    ]
    assert changed == [False, False, True, False], "only the second kernel decays"


def test_constraints_hold_on_the_master():
    weight = keras.Variable(np.ones(3), dtype="float16")
    weight.constraint = keras.constraints.NonNeg()
    optimizer = make(keras.optimizers.SGD(1.0))
    optimizer.apply([tf.constant([0.5, 2.0, 1.0])], [weight], unscaled=True)
    np.testing.assert_array_equal(optimizer.master_variables[0].numpy(), [0.5, 0.0, 0.0])
    np.testing.assert_array_equal(weight.numpy(), [0.5, 0.0, 0.0])


# ---- Saving ------------------------------------------------------------------------------------


def steps(count, seed):
    x, y = data()
    random = np.random.default_rng(seed)
    for _ in range(count):
        rows = random.integers(0, len(x), 8)
        bad = np.float32(np.nan if random.random() < 0.1 else 1.0)
        yield tf.constant(x[rows] * bad), tf.constant(y[rows])


def train(model, optimizer, batches):
    step = tf.function(train_step(model, optimizer))
    for x, y in batches:
        step(x, y)


@pytest.mark.parametrize(("dtype", "built"), first_of([("float16", False), ("bfloat16", True)]))
def test_checkpoint_resumes_bit_identically(tmp_path, dtype, built):
    model, optimizer = low_model(dtype), make()
    train(model, optimizer, steps(30, seed=1))
    path = tf.train.Checkpoint(model=model, optimizer=optimizer).save(tmp_path / "checkpoint")
    lost = [
        m.numpy() - np.float32(v.numpy())
        for v, m in zip(model.trainable_variables, optimizer.master_variables, strict=True)
    ]
    assert any(np.any(rest) for rest in lost), "masters hold what the weights do not"
    other, resumed = low_model(dtype), make()
    if built:
        resumed.build(other.trainable_variables)
    status = tf.train.Checkpoint(model=other, optimizer=resumed).restore(path)
    if built:
        status.assert_consumed()
    train(model, optimizer, steps(30, seed=2))
    train(other, resumed, steps(30, seed=2))
    assert_same_values(snapshot(other, resumed), snapshot(model, optimizer))


@pytest.mark.parametrize("jit_compile", tiers([], [False], [True]))
def test_keras_file_resumes_bit_identically(tmp_path, jit_compile):
    x, y = data()
    model = low_model()
    model.compile(make(), "mse", jit_compile=jit_compile)
    fit = {"batch_size": 8, "shuffle": False, "verbose": 0}
    model.fit(x, y, **fit)
    model.save(tmp_path / "model.keras")
    other = keras.models.load_model(tmp_path / "model.keras")
    assert other.optimizer.master_weights
    assert dtypes(other.trainable_variables) == {"float16"}
    assert dtypes(other.optimizer.master_variables) == {"float32"}
    assert_same_values(snapshot(other, other.optimizer), snapshot(model, model.optimizer))
    other.compile(other.optimizer, "mse", jit_compile=jit_compile)
    for each in (model, other):
        each.fit(np.tile(x, (25, 1)), np.tile(y, (25, 1)), **fit)
    assert int(model.optimizer.iterations) == 104
    assert_same_values(snapshot(other, other.optimizer), snapshot(model, model.optimizer))
    assert_rounded(model.trainable_variables, model.optimizer.master_variables)


# ---- fit, replicas -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments", tiers([], [{"aggregate_in_float16": True, "grad_clip": 1e6}], [{}])
)
def test_replicas_update_their_masters_alike(two_replicas, arguments):
    x, y = data(2)
    model, optimizer = low_model("bfloat16"), make(keras.optimizers.SGD(0.01), **arguments)
    train(model, optimizer, [(x, y)] * 3)
    with two_replicas.scope():
        other, spread = low_model("bfloat16"), make(keras.optimizers.SGD(0.01), **arguments)

    def replica_step(x, y):
        grads = scaled_gradients(other, spread, x, y)
        grads = [g / 2 for g in grads]  # The mean over both halves is half the sum of the means.
        spread.apply_gradients(zip(grads, other.trainable_variables, strict=True))

    step = tf.function(lambda x, y: two_replicas.run(replica_step, args=(x, y)))
    for _ in range(3):
        step(halves(two_replicas, x), halves(two_replicas, y))
    for variable in other.trainable_variables + spread.master_variables:
        first, second = variable.value.values
        np.testing.assert_array_equal(first.numpy(), second.numpy())
    assert int(spread.iterations) == 3
    assert_all_close(spread.master_variables, optimizer.master_variables, "bfloat16", depth=48)
    for variable, master in zip(other.trainable_variables, spread.master_variables, strict=True):
        rounded = tf.cast(master.value.values[0], variable.dtype)
        assert tf.reduce_all(rounded == variable.value.values[0])
    for variable in other.trainable_variables:
        variable.assign(tf.zeros(variable.shape, variable.dtype))
    step(halves(two_replicas, x), halves(two_replicas, y))
    kernel = spread.master_variables[0].numpy()
    assert np.all(np.abs(kernel) < 0.5), "assigned weights hold"


@pytest.mark.slow
def test_fit_on_replicas_ends_with_the_masters_rounded(two_replicas):
    """`fit` finalizes the weights outside the strategy's scope."""
    x, y = data(2)
    with two_replicas.scope():
        model = low_model("bfloat16")
        # Finalizing overwrites the weights with the average.
        model.compile(make(keras.optimizers.SGD(0.01, use_ema=True)), "mse", jit_compile=False)
    before = [variable.numpy() for variable in model.trainable_variables]
    model.fit(x, y, batch_size=8, verbose=0)
    averages = model.optimizer.inner_optimizer._model_variables_moving_average
    for variable, master, average, old in zip(
        model.trainable_variables, model.optimizer.master_variables, averages, before, strict=True
    ):
        np.testing.assert_array_equal(master.numpy(), average.numpy())
        for copy, of in zip(variable.value.values, master.value.values, strict=True):
            assert tf.reduce_all(tf.cast(of, copy.dtype) == copy)
        assert np.any(master.numpy() != old)
