"""The meaning of each level, by machine and dtype: what `prepare` makes of a model that trains."""

import keras
import numpy as np
import pytest

import tfamp
from helpers.cases import first_of, tiers
from helpers.graph_asserts import op_dtypes
from tfamp.machine import hardware
from tfamp.machine.hardware import Gpu, Hardware

X = np.random.default_rng(0).normal(size=(16, 4)).astype("float32")
Y = (X @ np.float32([[1], [-2], [0.5], [3]])).astype("float32")
LEVELS = pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
pytestmark = pytest.mark.filterwarnings("ignore:No low precision is fast:tfamp.TfampWarning")


def machine(*, bfloat16=False, capability=None, tpu=False):
    gpus = () if capability is None else (Gpu("gpu", capability),)
    return Hardware("", cpu_bfloat16=bfloat16, cpu_float16=False, gpus=gpus, tpu=tpu)


PLAIN_CPU = machine()
BF16_CPU = machine(bfloat16=True)
VOLTA = machine(capability=(7, 0))
AMPERE = machine(capability=(8, 0))


@pytest.fixture
def on(monkeypatch):
    """Makes tfamp find a machine."""
    return lambda found: monkeypatch.setattr(hardware, "detect", lambda: found)


def prepared(**arguments):
    """A small compiled model, prepared with SGD."""
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [keras.Input((4,)), keras.layers.Dense(8, "relu"), keras.layers.Dense(1)]
    )
    model.compile(keras.optimizers.SGD(0.05), "mse", jit_compile=False)
    return tfamp.prepare(model, **arguments)


def fit(model, x=X, y=Y):
    return model.fit(x, y, batch_size=8, shuffle=False, verbose=0).history["loss"]


def products(model):
    """The dtypes that the products of a train step are computed in."""
    return op_dtypes(lambda: model.train_step((X[:8], Y[:8])))["MatMul"]


@pytest.mark.parametrize(
    ("where", "level", "dtype"),
    [
        (PLAIN_CPU, "O0", "float32"),
        (BF16_CPU, "O1", "bfloat16"),
        (VOLTA, "O2", "float16"),
        (AMPERE, "O2", "bfloat16"),
        (machine(capability=(6, 0)), "O0", "float32"),
        (machine(tpu=True), "O2", "bfloat16"),
    ],
)
def test_auto_goes_by_the_device(where, level, dtype, on):
    on(where)
    model, optimizer = prepared(level="auto")
    assert dtype in products(model)
    assert model.layers[0].compute_dtype == (dtype if level == "O2" else "float32")
    assert isinstance(optimizer, tfamp.LossScaleOptimizer) is (level != "O0")
    settings = tfamp.precision_settings(model)
    assert settings.level == level
    assert f"level: auto is {level}" in str(settings)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_auto_does_not_take_float16_to_a_cpu(dtype, on):
    on(BF16_CPU)
    model, optimizer = prepared(level="auto", dtype=dtype)
    assert products(model) == {"float32"}
    assert type(optimizer) is keras.optimizers.SGD


@LEVELS
@pytest.mark.parametrize("dtype", first_of(["float16", "bfloat16"]))
def test_the_default_loss_scale_is_that_of_the_table(level, dtype, on):
    on(PLAIN_CPU)
    model, optimizer = prepared(level=level, dtype=dtype)
    if level == "O0":
        assert type(optimizer) is keras.optimizers.SGD
        return
    dynamic = level in ("O1", "O2") and dtype == "float16"
    assert (optimizer.dynamic, float(optimizer.loss_scale)) == (dynamic, 2.0**15 if dynamic else 1)
    weights = model.get_weights()
    model.train_on_batch(X[:8], Y[:8] * np.inf)
    for before, after in zip(weights, model.get_weights(), strict=True):
        np.testing.assert_array_equal(before, after)
    assert int(optimizer.skipped_steps) == 1
    assert float(optimizer.loss_scale) == (2.0**14 if dynamic else 1)


@pytest.mark.parametrize("level", tiers(["O2"], ["O0", "O1", "O3"]))
def test_a_loss_scale_that_is_given_holds_at_every_level(level, on):
    on(PLAIN_CPU)
    model, optimizer = prepared(level=level, dtype="bfloat16", loss_scale=128)
    plain, bare = prepared(level=level, dtype="bfloat16", loss_scale="none")
    assert type(bare) is keras.optimizers.SGD
    # A power of two changes no bit: scaled once, unscaled once.
    assert fit(model) == fit(plain)
    for scaled, expected in zip(model.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_array_equal(scaled, expected)
    model.train_on_batch(X[:8], Y[:8] * np.nan)
    counts = [int(each) for each in (optimizer.iterations, optimizer.skipped_steps)]
    assert (counts, float(optimizer.scale_loss(1.0))) == ([2, 1], 128.0)


@pytest.mark.filterwarnings("default:No low precision is fast")
def test_a_machine_without_low_precision_gets_one_all_the_same_and_a_warning(on, recwarn):
    on(PLAIN_CPU)
    with pytest.warns(tfamp.TfampWarning, match="emulated"):
        model, _ = prepared()
    assert "bfloat16" in products(model)
    recwarn.clear()
    on(BF16_CPU)
    model, _ = prepared()
    assert "bfloat16" in products(model)
    assert not [each for each in recwarn if each.category is tfamp.TfampWarning]


def test_clipping_and_masters_need_a_wrapper_that_scales_by_one(on):
    on(BF16_CPU)
    for level, arguments in (("O1", {"grad_clip": 1e-3}), ("O2", {"master_weights": True})):
        model, optimizer = prepared(level=level, dtype="bfloat16", loss_scale="none", **arguments)
        assert float(optimizer.scale_loss(1.0)) == 1.0
        before = [weight.numpy() for weight in model.trainable_weights]
        fit(model)
        moved = [w.numpy() - old for w, old in zip(model.trainable_weights, before, strict=True)]
        norm = np.sqrt(sum(np.sum(np.square(each.astype("float32"))) for each in moved))
        # Two clipped steps with a learning rate of 0.05.
        assert bool(0 < norm <= 2 * 0.05 * 1e-3 * 1.01) is (level == "O1")
        assert len(optimizer.master_variables) == (2 if level == "O2" else 0)


def test_auto_refuses_masters_where_weights_are_float32(on):
    on(BF16_CPU)
    with pytest.raises(ValueError, match="level 'auto' is O1 here"):
        prepared(level="auto", master_weights=True)


def test_split_weights_are_bfloat16(on):
    on(BF16_CPU)
    with pytest.raises(
        ValueError, match="weight_rounding='split' .* float16: give dtype='bfloat16'"
    ):
        prepared(level="O3", dtype="float16", weight_rounding="split")
    model, _ = prepared(level="O3", dtype="bfloat16", weight_rounding="split")
    assert {weight.dtype for weight in model.trainable_weights} == {"bfloat16"}
    losses = fit(model) + fit(model)
    assert losses[1] < losses[0]


def outputs_of_kernel(rows, columns, **arguments):
    """The plan of the output layer of a model, prepared."""
    inputs = keras.Input((rows,))
    hidden = keras.layers.Dense(rows)(inputs)
    model = keras.Model(inputs, keras.layers.Dense(columns, name="head")(hidden))
    settings = tfamp.prepare(model, **arguments).settings
    row = next(row for row in settings.layers if row.kind == "Dense" and "head" in row.path)
    assert (row.compute_dtype, row.variable_dtype) == ("float32", "float32")
    assert model.outputs[0].dtype == "float32"
    return row.calls, "".join(settings.reasons)


def test_output_layers_have_low_products_where_asked_and_at_auto_where_they_are_large(on):
    on(AMPERE)
    low = "product in bfloat16"
    calls, reasons = outputs_of_kernel(512, 2048, level="auto")
    assert low in calls
    assert "float32 outputs: sums, as head multiplies by 1,048,576 weights." in reasons
    for arguments in (
        {"level": "auto", "columns": 2047},
        {"level": "auto", "float32_outputs": True},
        {"level": "auto", "keep_float32": "head"},
        {"level": "O2"},
    ):
        columns = arguments.pop("columns", 2048)
        calls, reasons = outputs_of_kernel(512, columns, **arguments)
        assert "product in" not in calls
        assert "sums" not in reasons
    assert low in outputs_of_kernel(8, 3, level="O2", float32_outputs="sums")[0]
    on(BF16_CPU)
    with pytest.raises(ValueError, match="level 'auto' is O1 here"):
        outputs_of_kernel(8, 3, level="auto", float32_outputs="sums")


def test_a_level_with_low_products_computes_as_the_policy_and_can_be_taken_back():
    def make():
        keras.utils.set_random_seed(1)
        return keras.Sequential(
            [keras.Input((4,)), keras.layers.Dense(8, "relu"), keras.layers.Dense(1)]
        )

    model = make()
    before = model(X).numpy()
    with tfamp.policy_scope(tfamp.Policy("mixed_float16", float32_outputs="sums")):
        by_policy = make()
    arguments = {"dtype": "float16", "float32_outputs": "sums"}
    by_level, _ = tfamp.prepare(model, level="O2", **arguments)
    np.testing.assert_array_equal(by_level(X), by_policy(X))
    assert (by_level(X).numpy() != before).any()
    assert np.abs(by_level(X) - before).max() < 2**-8 * np.abs(before).max()
    exact, _ = tfamp.prepare(model, level="O0")
    np.testing.assert_array_equal(exact(X), before)
