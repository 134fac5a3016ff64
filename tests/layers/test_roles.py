"""The registry of managed layers: by identity, weak, and looking through Sequential models."""

from __future__ import annotations

import gc

import keras
import pytest

import tfamp
from tfamp.layers.float_policies import WeakMap, is_built_in, managed_layers
from tfamp.layers.output_dtypes import graph_of


def test_weak_map_compares_by_identity_and_keeps_nothing_alive():
    class Equal:
        __hash__ = None

        def __eq__(self, other):
            return True

    one, two = Equal(), Equal()
    numbers = WeakMap()
    numbers.set(one, 1)
    assert (numbers.get(one), numbers.get(two)) == (1, None)
    numbers.set(two, 2)
    numbers.set(one, 3)
    assert (numbers.get(one), numbers.get(two)) == (3, 2)
    numbers.discard(two)
    numbers.discard(two)
    assert numbers.alive() == [one]
    del one
    gc.collect()
    assert numbers.alive() == []


@pytest.mark.parametrize("name", ["mixed_float16", "mixed_bfloat16"])
def test_only_layers_without_a_dtype_of_their_own_are_managed(name):
    with tfamp.policy_scope(name) as policy:
        managed, norm = keras.layers.Dense(1), keras.layers.BatchNormalization()
        others = [
            keras.layers.Dense(1, dtype=name),
            keras.layers.BatchNormalization(dtype="float32"),
            keras.layers.InputLayer((1,)),
        ]
    assert managed_layers.get(managed).policy is managed_layers.get(norm).policy is policy
    assert managed_layers.get(managed).policy_name == name
    # Its own policy is float32; only its outputs are low.
    assert managed_layers.get(norm).policy_name == "float32"
    assert [managed_layers.get(layer) for layer in others] == [None] * 3


def test_graph_of_a_sequential_is_its_functionals():
    with tfamp.policy_scope("mixed_float16"):
        model = keras.Sequential([keras.layers.Dense(1)])
        assert graph_of(model) is None
        model.build((None, 2))
        functional, graph = graph_of(model)
    assert graph_of(functional) == (functional, graph)
    assert graph.owner() is model
    assert graph_of(keras.layers.Dense(1)) is None


def test_is_built_in():
    class Mine(keras.layers.Dense):
        pass

    assert is_built_in(keras.layers.Dense(1))
    assert not is_built_in(Mine(1))
