"""Methods of one object are replaced, and come back as they were."""

from __future__ import annotations

import functools

import keras
import pytest

from tfamp.layers.methods import rewrap_methods, unwrap_methods, wrap_method, wrapped_methods


def plus(number):
    return lambda original, *args, **kwargs: original(*args, **kwargs) + number


class Layer(keras.layers.Layer):
    def call(self, x):
        return x

    def build(self, shape):
        pass


@pytest.mark.parametrize("name", ["call", "compute_output_spec", "build"])
def test_unwrapping_leaves_nothing(name):
    layer, other = Layer(), Layer()
    before = dict(vars(layer))
    wrap_method(layer, name, lambda original, *args: original(*args))
    wrap_method(layer, name, lambda original, *args: original(*args))
    assert set(wrapped_methods(layer)) == {name}
    assert not wrapped_methods(other)
    unwrap_methods(layer)
    assert vars(layer) == before
    assert not wrapped_methods(layer)


def test_wrappers_go_around_each_other_and_can_be_put_back():
    layer = Layer()
    wrap_method(layer, "call", plus(1))
    wrap_method(layer, "call", plus(10))
    taken = wrapped_methods(layer)
    assert layer.call(0) == 11
    unwrap_methods(layer)
    assert layer.call(0) == 0
    rewrap_methods(layer, taken)
    assert layer.call(0) == 11


def test_what_someone_else_put_on_top_is_left_alone():
    layer = Layer()
    wrap_method(layer, "call", plus(1))
    ours = layer.call

    @functools.wraps(ours)
    def theirs(x):
        return ours(x) * 2

    object.__setattr__(layer, "call", theirs)
    unwrap_methods(layer)
    assert layer.call(0) == 2
