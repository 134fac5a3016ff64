"""`prepare(level="auto", example_batch=...)`: the level that is measured to be the fastest."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp
from helpers import level_models
from helpers.graph_asserts import op_dtypes
from tfamp.machine import hardware
from tfamp.rewriting import measured_runs, tuning


@pytest.fixture
def timed(monkeypatch):
    """Fakes the times of candidates, which still run."""
    seconds = {"float32": 2.0, "lists": 1.0, "min_cut": 0.5, "O2": 0.25}
    measured, original = {}, tuning.compare_candidates

    def compare(candidates, args, **kwargs):
        measured.update({each.name: each.function for each in candidates}, args=args)
        return original(candidates, args, rounds=1, **kwargs)

    def together(call, count):
        del count
        call()
        settings = getattr(call.func, "settings", None)
        if settings is not None:
            return seconds.get(settings.placement, 9.0)
        return seconds["float32" if is_float32(call) else "O2"]

    def is_float32(call):
        found = op_dtypes(call.func.get_concrete_function(*call.args))
        return "bfloat16" not in set().union(*found.values())

    monkeypatch.setattr(tuning, "compare_candidates", compare)
    monkeypatch.setattr(measured_runs, "together", together)
    return seconds, measured


def arrays(model):
    owners = (model, getattr(model.optimizer, "inner_optimizer", model.optimizer))
    return [np.asarray(each).tobytes() for owner in owners for each in owner.variables]


def example():
    x, y = level_models.data()
    return x[:8].astype("float64"), y[:8]


def test_the_placement_that_is_measured_to_be_the_fastest_is_what_fit_runs(timed):
    model = level_models.trained("functional")
    before = arrays(model)
    timed[0]["min_cut"] = 1.5
    prepared = tfamp.prepare(model, level="auto", dtype="bfloat16", example_batch=example())
    assert arrays(model) == before
    settings = prepared.settings
    assert settings.level == "O1"
    assert "a step takes 1000 ms (lists), and 2000 ms in float32" in str(settings)
    assert settings.rewrite(lambda x: model(x)).settings.placement == "lists"
    model.fit(*level_models.data(), batch_size=8, verbose=0)
    assert arrays(model) != before


@pytest.mark.slow
def test_where_float32_is_the_fastest_the_level_is_o0(timed):
    timed[0].update(dict.fromkeys(("lists", "min_cut"), 3.0))
    model = level_models.compiled("functional")
    batch = {"dtype": "bfloat16", "example_batch": example()}
    prepared = tfamp.prepare(model, level="auto", keep_float32="^conv", **batch)
    # Kept layers are float32 in what is measured.
    graph = timed[1]["lists"].concrete(*timed[1]["args"])
    assert (op_dtypes(graph)["Conv2D"], "bfloat16" in op_dtypes(graph)["MatMul"]) == (
        {"float32"}, True
    )  # fmt: skip
    assert prepared.settings.level == "O0"
    assert {layer.compute_dtype for layer in level_models.leaves(model)} == {"float32"}
    assert "a step takes 2000 ms." in str(prepared.settings)


@pytest.mark.slow
def test_o2_is_a_candidate_where_the_device_suggests_it(timed, monkeypatch):
    gpu = hardware.Gpu("H100", (9, 0))
    found = hardware.Hardware("", cpu_bfloat16=True, cpu_float16=False, gpus=(gpu,), tpu=False)
    monkeypatch.setattr(hardware, "detect", lambda: found)
    model = level_models.compiled("functional")
    timed[0]["O2"] = 5.0
    prepared = tfamp.prepare(model, level="auto", dtype="bfloat16", example_batch=example())
    assert "O2" in timed[1]
    assert prepared.settings.level == "O1"
    assert {layer.compute_dtype for layer in level_models.leaves(model)} == {"float32"}
    timed[0]["O2"] = 0.1
    again = tfamp.prepare(model, level="auto", dtype="bfloat16", example_batch=example())
    assert again.settings.level == "O2"
    assert "bfloat16" in {layer.compute_dtype for layer in level_models.leaves(model)}


@pytest.mark.parametrize(
    ("shape", "placement", "expected"),
    [((8,), None, "fused"), ((None, 8), None, "min_cut"), ((8,), "lists", "lists")],
)
def test_auto_without_a_batch_is_fused_where_only_the_batch_size_varies(
    shape, placement, expected, monkeypatch
):
    found = hardware.Hardware("", cpu_bfloat16=True, cpu_float16=False, gpus=(), tpu=False)
    monkeypatch.setattr(hardware, "detect", lambda: found)
    model = keras.Sequential([keras.Input(shape), keras.layers.Dense(2)])
    settings = tfamp.prepare(model, level="auto", placement=placement).settings
    assert settings.rewrite(lambda x: model(x)).settings.placement == expected


def test_what_cannot_be_measured_is_refused():
    model = level_models.compiled("functional")
    with pytest.raises(ValueError, match="level is 'O1'"):
        tfamp.prepare(model, level="O1", example_batch=example())
    with pytest.raises(TypeError, match=r"must be a tuple as fit takes it, .*; got ndarray"):
        tfamp.prepare(model, level="auto", example_batch=example()[0])
    with pytest.raises(TypeError, match=r"sample_weight\); got tuple"):
        tfamp.prepare(model, level="auto", example_batch=example() * 2)
    x, y = example()
    for wrong, text in (
        ([1.0, 2.0], r"1\.0 of type float"),
        (tf.TensorSpec((8, *x.shape[1:])), "TensorSpec"),
        (keras.Input(x.shape[1:]), "KerasTensor"),
        (tf.data.Dataset.from_tensors(x), "Dataset"),
    ):
        for name, batch in (("x", (wrong, y)), ("y", (x, wrong))):
            message = f"arrays or tensors with values, .*; {name} holds .*{text}"
            with pytest.raises(TypeError, match=message):
                tfamp.prepare(model, level="auto", example_batch=batch)
    with pytest.raises(ValueError, match="is not compiled"):
        fresh = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
        tfamp.prepare(fresh, level="auto", example_batch=example())
    low, _ = tfamp.prepare(model, level="O3", dtype="bfloat16")
    with pytest.raises(ValueError, match=r"leave example_batch out.*prepare\(model, level='O0'\)"):
        tfamp.prepare(low, level="auto", example_batch=example())


# ---- Steps that XLA compiles ---------------------------------------------------------------------


def dense(**options):
    """A compiled model without convolutions, and a batch."""
    keras.utils.set_random_seed(3)
    layers = [keras.Input((8,)), keras.layers.Dense(16, "relu"), keras.layers.Dense(2)]
    model = keras.Sequential(layers)
    model.compile(**{"optimizer": keras.optimizers.SGD(0.1), "loss": "mse", **options})
    generator = np.random.default_rng(0)
    return model, [generator.standard_normal((16, n)).astype("float32") for n in (8, 2)]


def is_compiled(function, *args):
    return function.get_concrete_function(*args).function_def.attr["_XlaMustCompile"].b


@pytest.fixture
def compiled(monkeypatch):
    """Fakes times: what XLA compiles takes 1 s, and the rest the seconds of the list."""
    seconds = [2.0]

    def together(call, count):
        call()
        return 1.0 if is_compiled(call.func, *call.args) else seconds[0]

    monkeypatch.setattr(measured_runs, "together", together)
    return seconds


def test_prepare_has_xla_compile_the_steps_where_that_is_the_fastest(compiled):
    model, batch = dense()
    before = arrays(model)
    prepared = tfamp.prepare(model, level="auto", dtype="bfloat16", example_batch=batch)
    settings = prepared.settings
    assert arrays(model) == before
    assert (settings.level, settings.jit_compile, model.jit_compile) == ("O0", True, True)
    assert "jit_compile: True, as steps are faster if XLA compiles them." in str(settings)
    assert "a step takes 1000 ms (xla), and 2000 ms in float32" in str(settings)
    other, _ = dense()
    for each in (model, other):
        each.fit(*batch, batch_size=16, epochs=2, verbose=0)
    for mine, theirs in zip(model.get_weights(), other.get_weights(), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-6)
    # A custom loop gets the same, unless its author has chosen.
    step = settings.rewrite(lambda x: model(x))
    assert is_compiled(step, batch[0])
    assert is_compiled(settings.rewrite(tf.function(lambda x: model(x))), batch[0])
    chosen = tf.function(lambda x: model(x), jit_compile=False)
    assert settings.rewrite(chosen) is chosen
    np.testing.assert_allclose(step(batch[0]), model.predict(batch[0], verbose=0), rtol=1e-5)


def test_the_measured_jit_compile_lasts_until_the_user_chooses_or_another_level(compiled):
    model, batch = dense()
    options = {"level": "auto", "dtype": "bfloat16", "example_batch": batch}
    tfamp.prepare(model, **options)
    model.compile("sgd", "mse")
    assert (model.jit_compile, tfamp.precision_settings(model).jit_compile) == (True, True)
    assert model.get_compile_config()["jit_compile"]
    compiled[0] = 0.5
    again = tfamp.prepare(model, **options).settings
    assert (model.jit_compile, again.jit_compile) == (False, False)
    assert "jit_compile: False, as no step that XLA compiles is faster." in str(again)
    compiled[0] = 2.0
    tfamp.prepare(model, **options)
    assert model.jit_compile
    tfamp.prepare(model, level="O1", dtype="bfloat16")
    assert (model.jit_compile, tfamp.precision_settings(model).jit_compile) == (False, None)
    tfamp.prepare(model, **options)
    low, _ = tfamp.prepare(model, level="O3", dtype="bfloat16")
    assert (model.jit_compile, low.jit_compile) == (True, False)
    model.compile("sgd", "mse", jit_compile=False)
    assert (model.jit_compile, tfamp.precision_settings(model).jit_compile) == (False, None)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"jit_compile": True}, "xla: the model was compiled with jit_compile=True."),
        ({"run_eagerly": True}, "xla: the model was compiled with run_eagerly=True."),
    ],
)
def test_a_value_of_the_user_is_kept(options, reason, compiled):
    model, batch = dense(**options)
    given = model.jit_compile
    prepared = tfamp.prepare(model, level="auto", dtype="bfloat16", example_batch=batch)
    assert model.jit_compile == given
    assert prepared.settings.jit_compile is None
    assert f"not measured: {reason}" in str(prepared.settings)


def test_layers_without_xla_and_inputs_of_any_shape_are_not_compiled(compiled):
    model, batch = dense()
    model.layers[0].supports_jit = False
    prepared = tfamp.prepare(model, level="auto", dtype="bfloat16", example_batch=batch)
    assert "supports_jit=False" in str(prepared.settings)
    layers = [keras.Input((None, 8)), keras.layers.Dense(2)]
    varying = keras.Sequential(layers)
    varying.compile("sgd", "mse")
    batch = [np.ones((4, 3, n), "float32") for n in (8, 2)]
    prepared = tfamp.prepare(varying, level="auto", dtype="bfloat16", example_batch=batch)
    assert "the shapes of inputs may vary" in str(prepared.settings)
    assert not varying.jit_compile


def test_a_sparse_batch_is_measured():
    inputs = keras.Input((8,), sparse=True)
    model = keras.Model(inputs, keras.layers.Dense(1)(inputs))
    model.compile("sgd", "mse")
    x = tf.sparse.from_dense(np.eye(8, dtype="float32"))
    batch = (x, np.ones((8, 1), "float32"))
    prepared = tfamp.prepare(model, level="auto", dtype="bfloat16", example_batch=batch)
    assert prepared.settings.level in ("O0", "O1")
    prepared.model.fit(*batch, verbose=0)
