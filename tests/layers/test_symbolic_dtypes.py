"""Symbolic tensors of a model have the dtypes that its layers return, after these change too."""

import keras
import numpy as np
import pytest

import tfamp

X = np.linspace(-1, 1, 24, dtype="float32").reshape(3, 8)


class Adds(keras.layers.Layer):
    """Adds 1, to float32 only."""

    def call(self, x):
        if keras.backend.standardize_dtype(x.dtype) != "float32":
            raise TypeError("a float32 tensor is needed")
        return x + 1.0


def shared_three_times():
    """A layer that is called three times, each time on what follows from the call before."""
    inputs = keras.Input((8,))
    same = keras.layers.Identity()
    x = same(keras.layers.Dense(8, name="first")(inputs))
    x = same(keras.ops.relu(x))
    x = same(keras.ops.multiply(x, 2))
    return keras.Model(inputs, [x, keras.layers.Dense(2, name="last")(x)])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_dtypes_pass_on_through_ops_and_through_a_layer_that_is_called_again(dtype):
    model = shared_three_times()
    tfamp.set_layer_dtype(model, dtype, pattern="first|identity")
    assert [x.dtype for x in model.outputs] == [dtype, "float32"]
    assert [keras.backend.standardize_dtype(x.dtype) for x in model(X)] == [dtype, "float32"]


def test_a_layer_that_fails_in_the_new_dtype_is_named_and_the_model_is_as_it_was():
    inputs = keras.Input((8,))
    model = keras.Model(inputs, keras.layers.Dense(2)(Adds(name="adds")(inputs)))
    with pytest.raises(ValueError, match=r"adds \(Adds\) cannot be computed in float16") as error:
        tfamp.set_layer_dtype(model, "float16")
    assert "keep_float32=['adds']" in str(error.value)
    assert {layer.compute_dtype for layer in model.layers} == {"float32"}
    assert model.outputs[0].dtype == "float32"
    assert np.isfinite(model(X)).all()
