"""A model saved under tfamp reloads with the same dtypes in a process that never imports tfamp."""

from __future__ import annotations

import itertools
import json

import keras
import numpy as np
import pytest
from keras import layers

import tfamp
from helpers.output_models import MODELS, X, functional, sequential

pytestmark = pytest.mark.slow  # It starts a process.

_RELOAD = """
import json, sys
import keras, numpy as np
x = np.load(folder + "/x.npy")
found = {}
for path in paths:
    model = keras.saving.load_model(path)
    found[path] = {
        "layers": sorted(
            [type(layer).__name__, layer.dtype_policy.name]
            for layer in model._flatten_layers()
            if not isinstance(layer, (keras.layers.InputLayer, keras.Model))
        ),
        "outputs": [output.dtype for output in model.outputs],
        "real": [str(y.dtype.name) for y in keras.tree.flatten(model(x))],
        "values": [np.asarray(y, "float64").tolist() for y in keras.tree.flatten(model(x))],
    }
assert "tfamp" not in sys.modules
assert keras.config.dtype_policy().name == "float32"
with open(folder + "/found.json", "w") as file:
    json.dump(found, file)
"""


# Each model under one of the policies.
CASES = list(zip(MODELS, itertools.cycle(["mixed_float16", "mixed_bfloat16"]), strict=False))


def describe(model):
    outputs = keras.tree.flatten(model(X))
    return {
        # A model's own policy is not in its file, and says nothing about its layers.
        "layers": sorted(
            [type(layer).__name__, layer.dtype_policy.name]
            for layer in model._flatten_layers()
            if not isinstance(layer, layers.InputLayer | keras.Model)
        ),
        "outputs": [output.dtype for output in model.outputs],
        "real": [output.dtype.name for output in outputs],
        "values": [np.asarray(output, "float64").tolist() for output in outputs],
    }


@pytest.fixture(scope="module")
def reloaded(tmp_path_factory, without_tfamp):
    """(here, there) by model and policy: what the models were, and what they are when reloaded."""
    folder = tmp_path_factory.mktemp("saved")
    here, paths = {}, {}
    for name, policy in CASES:
        with tfamp.policy_scope(policy):
            model = MODELS[name]()
        paths[name, policy] = str(folder / f"{name}-{policy}.keras")
        model.save(paths[name, policy])
        here[name, policy] = describe(model)
    np.save(folder / "x.npy", X)
    without_tfamp(_RELOAD, folder=str(folder), paths=list(paths.values()))
    there = json.loads((folder / "found.json").read_text("utf-8"))
    return {key: (here[key], there[path]) for key, path in paths.items()}


@pytest.mark.parametrize(("name", "policy"), CASES)
def test_same_dtypes_and_values(reloaded, name, policy):
    here, there = reloaded[name, policy]
    low = [value for _, value in here["layers"] if value == policy]
    assert low or name == "functional_with_ops", "nothing was in low precision to begin with"
    assert set(here["outputs"]) == set(here["real"]) == {"float32"}
    assert there["outputs"] == here["outputs"]
    assert there["real"] == here["real"]
    # Only its Functional has the cast of a Sequential, so it is not a layer of it before.
    added = [["Activation", "float32"]] if name == "sequential_with_cast" else []
    assert there["layers"] == sorted(here["layers"] + added)
    for actual, expected in zip(there["values"], here["values"], strict=True):
        np.testing.assert_allclose(actual, expected, rtol=2e-2, atol=1e-2)


def test_a_clone_and_a_reloaded_model_that_is_extended_have_the_same_dtypes(tmp_path):
    with tfamp.policy_scope("mixed_float16"):
        model = functional()
        clone = keras.models.clone_model(model)
        sequential().save(tmp_path / "m.keras")
        loaded = keras.saving.load_model(tmp_path / "m.keras")
        assert describe(loaded)["real"] == ["float32"]
        loaded.add(layers.Dense(2))
        assert describe(loaded)["real"] == ["float32"]
        loaded.save(tmp_path / "m.keras")
    again = keras.saving.load_model(tmp_path / "m.keras")
    assert describe(clone)["layers"] == describe(model)["layers"]
    assert describe(clone)["real"] == describe(again)["real"] == ["float32"]
