"""`model_runs`: a model computes as if in a dtype, and is the same object as before afterwards."""

import keras
import numpy as np
import pytest
from keras import layers, ops

from tfamp.diagnostics.model_runs import (
    computing_in,
    observing_layers,
    policies_in,
    unchanged,
)

X = np.linspace(-1, 1, 16, dtype=np.float32).reshape(2, 8)


def test_low_variables_are_cast_up_and_calls_are_observed():
    model = keras.Sequential([keras.Input((8,)), layers.Dense(3, dtype="float16")])
    called = []

    def note(layer, call):
        called.append(layer.name)
        return call()

    with computing_in(model, "float32"), unchanged(model.variables), observing_layers(note):
        result = model(X)
    assert model.layers[0].name in called
    assert result.dtype == "float32"
    kernel = ops.convert_to_numpy(model.layers[0].kernel).astype(np.float32)
    np.testing.assert_allclose(result, X @ kernel, rtol=1e-6, atol=1e-6)


def test_a_policy_map_is_left_alone():
    policies = keras.dtype_policies.DTypePolicyMap(default_policy="float32")
    layer = layers.Dense(2, dtype=policies, name="mapped")
    model = keras.Sequential([keras.Input((8,)), layer, layers.Dense(1)])
    with pytest.raises(KeyError), computing_in(model, "float16"):  # Also after an exception.
        assert layer.compute_dtype == "float16"
        raise KeyError
    assert layer.dtype_policy is policies
    assert not list(policies)


def test_a_wrong_dtype():
    with pytest.raises(ValueError, match="dtype must be one of float32, float16, bfloat16"):
        policies_in(keras.Sequential([layers.Dense(1)]), "float8")
