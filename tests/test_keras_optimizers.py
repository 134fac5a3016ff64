"""Every private symbol of Keras's optimizers that tfamp uses is there and does its work."""

import keras
import numpy as np
import pytest

from tfamp.core.errors import UnsupportedVersionError
from tfamp.interop import keras_hooks as private


@pytest.fixture
def variables():
    return [keras.Variable(np.ones((2, 3), "float32"), name=name) for name in ("kernel", "bias")]


def test_variables_and_slots_are_found_by_place(variables):
    optimizer = keras.optimizers.Adam(weight_decay=0.1)
    optimizer.build(variables)
    built = private.built_for(optimizer)
    assert all(v is own for v, own in zip(variables, built, strict=True))
    assert [private.index_of(optimizer, v) for v in variables] == [0, 1]
    assert private.slot(optimizer, "momentums", 1).shape == (2, 3)
    key = private.key_of(optimizer)
    assert key(variables[0]) != key(variables[1])
    adafactor = keras.optimizers.Adafactor()
    adafactor.build(variables)
    assert [private.slot(adafactor, name, 0).shape for name in "rcv"] == [(2,), (3,), (2, 3)]


def test_decay_and_what_is_left_out_of_it(variables):
    optimizer = keras.optimizers.Adam(weight_decay=0.1)
    assert private.excluded_from_decay(optimizer) == (set(), None)
    optimizer.exclude_from_weight_decay(variables[:1])
    private.exclude_pattern(optimizer, None)
    optimizer.build(variables)
    assert [private.decays(optimizer, v) for v in variables] == [False, True]
    assert not private.decays(keras.optimizers.Adam(), variables[0])
    keys, pattern = private.excluded_from_decay(optimizer)
    assert (keys, pattern) == ({private.key_of(optimizer)(variables[0])}, None)


def test_gradients_are_left_out_and_clipped_as_keras_does(variables):
    optimizer = keras.optimizers.SGD(clipvalue=0.5)
    with pytest.warns(UserWarning, match="bias"):
        kept = private.without_missing(optimizer, [np.ones((2, 3), "float32"), None], variables)
    assert [len(each) for each in kept] == [1, 1]
    (gradient,) = private.clipped(optimizer, kept[0])
    np.testing.assert_array_equal(gradient, np.full((2, 3), 0.5))


def test_learning_rates_that_are_functions_and_inner_optimizers():
    assert not private.rate_is_called(keras.optimizers.SGD(0.1))
    assert private.rate_is_called(keras.optimizers.SGD(lambda: 0.1))
    with pytest.raises(UnsupportedVersionError, match="_inner_optimizers"):
        private.inner_optimizers(keras.optimizers.SGD())
