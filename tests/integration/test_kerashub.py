"""KerasHub: a slice of the run over its backbones, and what fine-tuning does to a model."""

from __future__ import annotations

import sys
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

pytest.importorskip("rich")
sys.path.append(str(Path(__file__).parents[2]))
pytest.importorskip("benchmarks", reason="the benchmarks are not in the package")

import tfamp
from benchmarks import kerashub
from benchmarks.kerashub_models import MODELS, inputs_of
from benchmarks.outputs import difference
from helpers.cases import tiers

FINE = dict.fromkeys(kerashub.CHECKS, 0.01) | {"O0": 0.0, "reload": 0.0, "train": 1.0}


# What the run says of what it found


@pytest.mark.parametrize(
    ("outcomes", "faults"),
    [
        ({}, []),
        ({"policy": 0.014, "train": 9.0}, []),
        ({"O2": 0.02}, ["O2"]),
        ({"O0": 1e-3}, ["O0"]),
        ({"reload": 0.02}, ["reload"]),
        ({"train": "ValueError: x"}, ["train"]),
        ({"O1": np.nan}, ["O1"]),
        # Where Keras fails too, no error is held against tfamp.
        ({"Keras": "ValueError: x", "O2": "ValueError: x"}, []),
        ({"Keras": np.nan, "O2": np.nan}, []),
        ({"Keras": np.nan, "O0": 0.1}, ["O0"]),
        ({"Keras": "ValueError: x", "O1": np.nan}, ["O1"]),
        ({"train": "under Keras's policy too: ValueError: x"}, []),
    ],
)
def test_what_is_worse_than_under_kerass_policy_is_a_fault(outcomes, faults):
    assert kerashub.worse_than_keras(FINE | outcomes) == faults


def test_a_suspect_is_judged_by_other_weights(tmp_path, monkeypatch):
    def run(name, dtype, folder, seed, wanted):
        # Once, by chance, autocast is worse; O2 is in general.
        chance = 0.02 if seed == 7 else 0.01
        return FINE | {"Keras": 0.01, "autocast": chance, "O2": 0.03}

    monkeypatch.setattr(kerashub, "_run_seed", run)
    outcomes = kerashub.run_model("Mixtral", "bfloat16", tmp_path)
    assert outcomes["autocast"] == pytest.approx(0.01)
    assert kerashub.worse_than_keras(outcomes) == ["O2"]
    assert kerashub.over_draws([0.01, 0.01, 0.3]) == 0.01
    assert kerashub.over_draws([0.01, "ValueError: x"]) == "ValueError: x"


def test_the_table_has_a_note_for_each_error_that_kerass_policy_does_not_have():
    also = "under Keras's policy too: ValueError: x"
    result = kerashub.table({"Bert-float16": FINE | {"O1": "ValueError: no", "train": also}})
    ((name, dtype, *cells),) = result.rows
    assert (name, dtype, cells[-1]) == ("Bert", "float16", "O1")
    assert cells.count("error") == 2
    assert result.notes == ("Bert, float16, O1: ValueError: no",)


# Models


# A decoder, at night also encoder and decoder and pictures; Bert is below.
@pytest.mark.parametrize("names", tiers([], [["Llama"]], [["DenseNet", "Bart", "DINOV2"]]))
def test_families_are_no_worse_than_under_kerass_policy(names):
    pytest.importorskip("keras_hub", reason="KerasHub is not installed")
    found = kerashub.run(names, ("bfloat16",))
    assert {key: kerashub.worse_than_keras(outcomes) for key, outcomes in found.items()} == {
        f"{name}-bfloat16": [] for name in names
    }
    for key, outcomes in found.items():
        assert set(outcomes) == set(kerashub.CHECKS), key
        assert all(outcomes[check] > 0 for check in ("Keras", "policy", "O2")), key


def encoder(dtype):
    """A small BERT under a mixed policy of tfamp's, and its inputs."""
    pytest.importorskip("keras_hub", reason="KerasHub is not installed")
    keras.utils.set_random_seed(0)
    with tfamp.policy_scope(f"mixed_{dtype}"):
        model = MODELS["Bert"]()
    return model, inputs_of(model)


def classifier(backbone, dtype):
    with tfamp.policy_scope(f"mixed_{dtype}"):
        outputs = keras.layers.Dense(3)(backbone.output["pooled_output"])
        model = keras.Model(backbone.input, outputs)
        optimizer = tfamp.LossScaleOptimizer(keras.optimizers.Adam(0.01))
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer, loss)
    return model


def moved_by_fit(model, x):
    """The paths of the weights that training changes."""
    before = {weight.path: weight.numpy() for weight in model.weights}
    losses = model.fit(x, tf.constant([0, 2]), epochs=4, verbose=0).history["loss"]
    assert np.isfinite(losses).all()
    assert losses[-1] < losses[0]
    assert int(model.optimizer.skipped_steps) < 4
    after = {weight.path: weight.numpy() for weight in model.weights}
    return {path for path in before if not np.array_equal(before[path], after[path])}


@pytest.mark.slow
def test_lora_on_a_quantized_backbone_trains_under_a_policy():
    dtype = "bfloat16"
    with pytest.raises(ValueError, match="doesn't work well with compute_dtype='float16'"):
        encoder("float16")[0].quantize("int8")  # Keras itself has no integers in float16.
    backbone, x = encoder(dtype)
    before = kerashub.predict(backbone, x)
    backbone.quantize("int8")
    names = {layer.dtype_policy.name for layer in backbone._flatten_layers()}
    assert f"int8_from_mixed_{dtype}" in names, "nothing was quantized"
    assert difference(kerashub.predict(backbone, x), before) < 0.1
    backbone.enable_lora(2)
    moved = moved_by_fit(classifier(backbone, dtype), x)
    assert any("lora_kernel" in path for path in moved)
    frozen = {w.path for w in backbone.weights if not w.trainable}
    assert frozen
    assert not frozen & moved
