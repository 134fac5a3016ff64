"""Models whose class has a `compile` of its own, at every level."""

import warnings

import keras
import numpy as np
import pytest

import tfamp
from helpers.cases import first_of


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


_LEFT = r"optimizers of its own \(d_optimizer, g_optimizer\).*no loss scale.*scale_loss\(loss\)"


@pytest.mark.parametrize("level", first_of(["O1", "O2"]))
def test_optimizers_under_other_names_are_left_with_a_warning_that_names_them(level):
    model = TwoOptimizers()
    model.build((None, 3))
    tfamp.prepare(model, level=level, dtype="float16")
    first, second = _two()
    with pytest.warns(tfamp.TfampWarning, match=_LEFT) as caught:
        model.compile(g_optimizer=second, d_optimizer=first)
    assert (model.d_optimizer, model.g_optimizer) == (first, second)
    assert caught[0].filename == __file__
    tfamp.prepare(model, level="O0")
    with pytest.warns(tfamp.TfampWarning, match=_LEFT) as caught:
        tfamp.prepare(model, level=level, dtype="float16")
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error", tfamp.TfampWarning)
        tfamp.prepare(model, level=level, dtype="bfloat16")  # needs no loss scale
        model.compile(*(tfamp.LossScaleOptimizer(each) for each in _two()))
        tfamp.prepare(model, level=level, dtype="float16")
        model.scaler = tfamp.GradScaler()
        model.compile(*_two())
        tfamp.prepare(model, level=level, dtype="float16")


class Several(keras.Sequential):
    def compile(self, optimizers, **kwargs):
        super().compile(**kwargs)
        self.several = optimizers


@pytest.mark.parametrize(
    ("several", "names"),
    [
        (lambda: [*_two()], r"\(several\[0\], several\[1\]\)"),
        (lambda: {"d": _two()[0], "g": tfamp.LossScaleOptimizer(_two()[1])}, r"\(several\['d'\]\)"),
    ],
)
def test_optimizers_in_lists_and_dicts_are_named_too(several, names):
    model, _ = tfamp.prepare(Several(_layers()), level="O2", dtype="float16")
    with pytest.warns(tfamp.TfampWarning, match=f"optimizers of its own {names}"):
        model.compile(several(), loss="mse")
    with warnings.catch_warnings():
        warnings.simplefilter("error", tfamp.TfampWarning)
        model.compile(several(), loss="mse", auto_scale_loss=False)


def test_own_optimizers_of_low_weights_are_named_for_their_masters():
    model, _ = tfamp.prepare(Several(_layers()), level="O2", dtype="bfloat16", master_weights=True)
    with pytest.warns(tfamp.TfampWarning, match="bare ones have no float32 master weights"):
        model.compile([*_two()], loss="mse")


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


class Sampler(keras.Sequential):
    """With an optional argument of `compile` that it stores, as KerasHub's tasks a sampler."""

    def compile(self, *args, sampler="top_k", unused=0, **kwargs):
        super().compile(*args, **kwargs)
        self.sampler = sampler


@pytest.mark.parametrize("way", [{"level": "O3"}, {"level": "O2", "master_weights": True}])
def test_a_copy_is_compiled_with_what_its_class_stores_of_its_own_arguments(way):
    model = Sampler(_layers())
    model.compile("sgd", "mse", sampler="greedy")
    copy, _ = tfamp.prepare(model, dtype="bfloat16", **way)
    assert copy is not model
    assert (copy.sampler, model.sampler) == ("greedy", "greedy")
    back, _ = tfamp.prepare(copy, level="O0")
    assert back.sampler == "greedy"
