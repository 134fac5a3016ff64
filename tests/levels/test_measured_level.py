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
