"""Models whose class has a `compile` of its own, at every level."""

import keras
import numpy as np
import pytest

import tfamp


class TwoOptimizers(keras.Model):
    """As the generative adversarial network of Keras's own examples is compiled."""

    def __init__(self):
        super().__init__()
        self.inner = keras.Sequential(_layers())

    def compile(self, d_optimizer, g_optimizer):
        super().compile()
        self.d_optimizer, self.g_optimizer = d_optimizer, g_optimizer

    def call(self, x):
        return self.inner(x)


class PassesOn(keras.Sequential):
    def compile(self, *args, **kwargs):
        super().compile(*args, run_eagerly=False, **kwargs)


def _two():
    return keras.optimizers.SGD(0.1), keras.optimizers.SGD(0.2)


def _layers():
    return [keras.Input((3,)), keras.layers.Dense(4), keras.layers.Dense(1)]


@pytest.mark.filterwarnings("ignore:rm_sprop")
def test_a_copy_that_cannot_be_compiled_says_so():
    model = TwoOptimizers()
    model.build((None, 3))
    model.compile(*_two())
    with pytest.warns(tfamp.TfampWarning, match="is not compiled"):
        # Without a name for its optimizer, Keras gives the model one of its own, RMSprop.
        made, _ = tfamp.prepare(model, level="O3", dtype="bfloat16", master_weights=False)
    assert not made.compiled
    made.compile(*_two())
    assert made(np.zeros((2, 3), "float32")).shape == (2, 1)


def test_compile_that_passes_its_arguments_on_is_followed():
    model, _ = tfamp.prepare(PassesOn(_layers()), level="O2", dtype="float16")
    for arguments in (("sgd", "mse"), ()):
        model.compile(*arguments)
        assert isinstance(model.optimizer, tfamp.LossScaleOptimizer)
    model.compile(loss="mse", optimizer=keras.optimizers.Adam())
    assert isinstance(model.optimizer.inner_optimizer, keras.optimizers.Adam)
