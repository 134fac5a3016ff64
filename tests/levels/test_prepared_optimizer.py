"""The optimizer of a copied model: state, exclusions and masters find the right variables."""

import keras
import numpy as np
import pytest

import tfamp


def _three_layers():
    keras.utils.set_random_seed(0)
    return keras.Sequential(
        [keras.Input((8,))] + [keras.layers.Dense(8, activation="tanh") for _ in range(3)]
    )


def _with_masters(model, optimizer):
    model.compile(optimizer, "mse")
    model, _ = tfamp.prepare(model, level="O2", dtype="bfloat16", master_weights=True)
    _fit(model)
    return model


def _fit(model):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((32, 8)).astype("float32")
    model.fit(x, np.tanh(x), batch_size=8, verbose=0)


def _float32(values):
    return [np.asarray(value, "float32") for value in values]


@pytest.mark.parametrize("arguments", [{"level": "O3"}, {"level": "O2", "master_weights": True}])
def test_what_is_excluded_from_weight_decay_stays_so_in_a_copy(arguments):
    model = _three_layers()
    model.set_weights([np.ones_like(weight) for weight in model.get_weights()])
    optimizer = keras.optimizers.SGD(0.5, weight_decay=0.5)
    optimizer.exclude_from_weight_decay([model.layers[0].kernel], ["bias"])
    model, optimizer = tfamp.prepare(model, optimizer, dtype="bfloat16", **arguments)
    variables = model.trainable_variables
    optimizer.build(variables)
    before = _float32(variables)
    optimizer.apply([keras.ops.zeros(v.shape, v.dtype) for v in variables], variables)
    decayed = [not np.array_equal(a, b) for a, b in zip(before, _float32(variables), strict=True)]
    assert decayed == [False, False, True, False, True, False]


def test_layers_frozen_since_keep_their_exact_values_and_slots():
    model = _with_masters(_three_layers(), keras.optimizers.SGD(0.01, momentum=0.9))
    masters = _float32(model.optimizer.master_variables)
    slots = _float32(model.optimizer.inner_optimizer.momentums)
    model.layers[1].trainable = False
    model, optimizer = tfamp.prepare(model, level="O0")
    # The last layer computes in float32, so its weights have no masters.
    for master, weight in zip(masters, model.weights, strict=False):
        np.testing.assert_array_equal(master, weight)
    for before, after in zip(slots, optimizer.momentums, strict=True):
        np.testing.assert_array_equal(before, after)
    _fit(model)


def test_weights_assigned_since_the_last_step_lead_back_to_o0():
    model = _with_masters(_three_layers(), keras.optimizers.SGD(0.1))
    best = model.get_weights()
    _fit(model)
    model.set_weights(best)  # what EarlyStopping(restore_best_weights=True) does
    restored, _ = tfamp.prepare(model, level="O0")
    for old, new in zip(_float32(best)[:4], restored.weights, strict=False):
        rounded = keras.ops.cast(keras.ops.cast(new, "bfloat16"), "float32")
        np.testing.assert_array_equal(old, rounded)


def test_an_optimizer_of_another_model_is_an_error():
    model, other = _three_layers(), _three_layers()
    optimizer = keras.optimizers.SGD(0.1)
    optimizer.build(other.trainable_variables)
    before = _float32(model.weights)
    with pytest.raises(ValueError, match="6 variables .*Give the model an optimizer of its own"):
        tfamp.prepare(model, optimizer, level="O3", dtype="bfloat16")
    for old, new in zip(before, model.weights, strict=True):
        np.testing.assert_array_equal(old, new)
    assert model.layers[0].compute_dtype == "float32"


@pytest.mark.skipif(
    not hasattr(keras.optimizers, "MultiOptimizer"), reason="this Keras has no MultiOptimizer"
)
def test_an_optimizer_that_cannot_be_made_again_is_an_error_that_says_what_to_do():
    sgd = keras.optimizers.SGD(0.1)
    model, optimizer = _three_layers(), keras.optimizers.MultiOptimizer(lambda variable: sgd)
    with pytest.raises(ValueError, match=r"MultiOptimizer .*keras\.optimizers\.OptimizerMap"):
        tfamp.prepare(model, optimizer, level="O3", dtype="bfloat16")
    assert model.layers[0].compute_dtype == "float32"
    mapped = keras.optimizers.MultiOptimizer(keras.optimizers.OptimizerMap(sgd))
    made, _ = tfamp.prepare(model, mapped, level="O3", dtype="bfloat16")
    assert made.layers[0].kernel.dtype == "bfloat16"


def test_skipped_steps_are_counted_on_in_a_copy():
    model = _three_layers()
    model.compile("sgd", "mse")
    model, optimizer = tfamp.prepare(model, level="O2", dtype="float16")
    variables = model.trainable_variables
    optimizer.apply([keras.ops.full(v.shape, np.inf) for v in variables], variables, unscaled=True)
    for level in ({"level": "O3", "loss_scale": "dynamic"}, {"level": "O2", "loss_scale": 8.0}):
        model, optimizer = tfamp.prepare(model, dtype="float16", **level)
        counts = optimizer.skipped_steps, optimizer.consecutive_skipped_steps
        assert [int(count) for count in counts] == [1, 1]


def test_an_optimizer_built_for_masters_goes_on_with_them_in_another_wrapper():
    """A level with a loss scale of its own replaces a user's wrapper at compile."""
    x, y = np.float32(np.random.default_rng(1).normal(size=(2, 16, 4)))
    y = y[:, :1]

    def trained(model, optimizer):
        model.compile(optimizer, "mse", jit_compile=False)
        model.fit(x, y, batch_size=8, shuffle=False, verbose=0)
        return model

    def make(loss_scale=None):
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8), keras.layers.Dense(1)])
        return tfamp.prepare(model, level="O3", dtype="float16", loss_scale=loss_scale)[0]

    def wrapper():
        inner = keras.optimizers.SGD(0.0625, momentum=0.5)
        return tfamp.LossScaleOptimizer(inner, initial_scale=64.0)

    plain = trained(make(), wrapper())
    model, users = make(loss_scale=32.0), wrapper()
    users.build(model.trainable_variables)
    trained(model, users)
    optimizer = model.optimizer
    assert optimizer is not users
    assert optimizer.inner_optimizer is users.inner_optimizer
    assert float(optimizer.dynamic_scale) == 32.0
    assert len(optimizer.master_variables) == 4
    held = {id(variable) for variable in optimizer.variables}  # Saved with the optimizer.
    assert held >= {id(master) for master in optimizer.master_variables}
    found = [*optimizer.master_variables, *optimizer.inner_optimizer.variables]
    wanted = [*plain.optimizer.master_variables, *plain.optimizer.inner_optimizer.variables]
    for value, as_before in zip(found, wanted, strict=True):
        np.testing.assert_allclose(value, as_before, rtol=2e-3, atol=2e-4)
    for weight, master in zip(model.get_weights(), optimizer.master_variables, strict=True):
        np.testing.assert_array_equal(weight, np.float16(master))

    again = make(loss_scale=32.0)
    again, _ = tfamp.prepare(
        again, level="O3", dtype="float16", loss_scale=32.0, master_weights=False
    )
    users = wrapper()
    users.build(again.trainable_variables)
    with pytest.raises(ValueError, match="was built for 4 master weights"):
        again.compile(users, "mse")
