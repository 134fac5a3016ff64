"""O3 gives master weights by what an optimizer keeps; every Keras optimizer is in the table."""

import warnings

import keras
import pytest

import tfamp
from helpers.cases import one_of_each
from helpers.optimizers import WRAPPERS, optimizer_classes, plain_optimizers
from tfamp.training.optimizer_state import STATE_NEEDING_FLOAT32

KERAS = plain_optimizers()


def test_every_optimizer_of_keras_is_in_the_table():
    classes = set(optimizer_classes())
    assert classes >= {"SGD", "Muon", *WRAPPERS} - {"MultiOptimizer"}  # which is new in Keras 3.15
    assert classes - set(STATE_NEEDING_FLOAT32) == set(), (
        "say in STATE_NEEDING_FLOAT32 what they keep"
    )


def _model():
    keras.utils.set_random_seed(0)
    dense = [keras.layers.Dense(32, "relu"), keras.layers.Dense(10)]
    return keras.Sequential([keras.Input((64,)), *dense])


def _prepared(optimizer, **arguments):
    """The optimizer of a model at O3, and what was said."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", tfamp.TfampWarning)
        _, optimizer = tfamp.prepare(_model(), optimizer, level="O3", **arguments)
    return optimizer, [str(each.message) for each in said if each.category is tfamp.TfampWarning]


@pytest.mark.parametrize(
    ("name", "dtype"),
    one_of_each([*sorted(KERAS), "MultiOptimizer"], ["float16", "bfloat16"], quick=2),
)
def test_all_but_sgd_get_masters_or_a_warning(name, dtype):
    if name == "MultiOptimizer" and not hasattr(keras.optimizers, name):
        pytest.skip("this Keras has no MultiOptimizer")

    def make():
        if name != "MultiOptimizer":
            return KERAS[name]()
        adam = {".*bias": keras.optimizers.Adam()}
        return keras.optimizers.MultiOptimizer(
            keras.optimizers.OptimizerMap(keras.optimizers.SGD(), adam)
        )

    optimizer, said = _prepared(make(), dtype=dtype)
    assert (getattr(optimizer, "master_weights", False), said) == (name != "SGD", [])
    optimizer, said = _prepared(make(), dtype=dtype, master_weights=False)
    assert not getattr(optimizer, "master_weights", False)
    assert len(said) == (name != "SGD")
    assert all("without master weights it may learn nothing" in text for text in said)


class Own(keras.optimizers.Optimizer):
    """A user's optimizer, which tfamp does not know."""

    def update_step(self, gradient, variable, learning_rate):
        self.assign_sub(variable, keras.ops.cast(learning_rate, variable.dtype) * gradient)


class OwnSGD(keras.optimizers.SGD):
    """An optimizer of a user's that is one of Keras's."""


def test_optimizers_of_users_count_as_what_they_are_made_from():
    optimizer, said = _prepared(Own(0.1), dtype="bfloat16")
    assert optimizer.master_weights
    assert said == []
    assert len(_prepared(Own(0.1), dtype="bfloat16", master_weights=False)[1]) == 1
    assert _prepared(OwnSGD(), dtype="bfloat16")[1] == []
    assert not _prepared(OwnSGD(), dtype="bfloat16")[0].master_weights
    assert _prepared(OwnSGD(use_ema=True), dtype="float16")[0].master_weights  # an average
    wrapped = tfamp.LossScaleOptimizer(keras.optimizers.Ftrl(), master_weights=True)
    assert _prepared(wrapped, dtype="float16", master_weights=False)[1] == []


def test_optimizers_of_a_later_compile_are_told_the_same():
    model, _ = tfamp.prepare(_model(), level="O3", dtype="bfloat16")
    model.compile("adagrad", "mse")
    assert model.optimizer.master_weights
    assert tfamp.precision_settings(model).master_weights
    model.compile("sgd", "mse")
    assert not model.optimizer.master_weights
    assert not tfamp.precision_settings(model).master_weights
    model, _ = tfamp.prepare(_model(), level="O3", dtype="bfloat16", master_weights=False)
    with pytest.warns(tfamp.TfampWarning, match="keeps sums of squared gradients"):
        model.compile("ftrl", "mse")
