"""Files of Keras releases since 3.3, and what Keras's own LossScaleOptimizer does, done by ours.

tests/data/write_old_keras_files.py wrote the files, with the Keras of each release.
"""

import copy
import json
import zipfile
from pathlib import Path

import keras
import numpy as np
import pytest

import tfamp
from helpers.cases import tiers

RELEASES = ("3.3", "3.6", "3.9", "3.12")
DATA = Path(__file__).parent / "data"
X = np.linspace(-1, 1, 12, dtype="float32").reshape(4, 3)


def written(release):
    """The path of a release's file, and the optimizer's configuration in it."""
    path = DATA / f"keras-{release}.keras"
    with zipfile.ZipFile(path) as archive:
        saved = json.loads(archive.read("config.json"))["compile_config"]["optimizer"]
    assert saved["class_name"] == "LossScaleOptimizer"
    return path, saved["config"]


@pytest.mark.parametrize("release", RELEASES)
def test_the_configuration_of_every_release_is_taken(release):
    _, config = written(release)
    before = json.dumps(config)
    ours = tfamp.LossScaleOptimizer.from_config(config)
    assert json.dumps(config) == before
    assert (ours.name, ours.initial_scale, ours.dynamic_growth_steps) == (
        "loss_scale_optimizer", 4096.0, 3,
    )  # fmt: skip
    inner = ours.inner_optimizer
    assert type(inner) is keras.optimizers.Adam
    assert (inner.clipnorm, inner.use_ema, inner.ema_momentum) == (1.0, True, 0.9)
    # Ours writes a configuration without the settings that had no effect.
    assert "clipnorm" not in ours.get_config()
    again = keras.optimizers.deserialize(keras.optimizers.serialize(ours))
    assert again.get_config() == ours.get_config()


@pytest.mark.filterwarnings("ignore::tfamp.NothingConvertedWarning")
@pytest.mark.parametrize("release", tiers(["3.9"], [each for each in RELEASES if each != "3.9"]))
def test_a_model_of_every_release_goes_on_under_a_level(release):
    path, _ = written(release)
    theirs = keras.models.load_model(path)
    assert int(theirs.optimizer.inner_optimizer.iterations) == 4, "one of five steps was skipped"
    slots = [v.numpy() for v in theirs.optimizer.inner_optimizer.variables]
    model, optimizer = tfamp.prepare(theirs, level="O2", dtype="float16")
    assert type(optimizer) is tfamp.LossScaleOptimizer
    for now, before in zip(optimizer.inner_optimizer.variables, slots, strict=True):
        np.testing.assert_array_equal(now.numpy(), before)
    model.fit(X, X[:, :2], batch_size=2, verbose=0)
    assert int(optimizer.iterations) == 6


def test_settings_without_effect_are_left_out_and_named_in_a_warning():
    _, config = written("3.3")
    with pytest.warns(tfamp.TfampWarning, match="has clipnorm=5.0, use_ema=True, which") as record:
        ours = tfamp.LossScaleOptimizer.from_config(config | {"clipnorm": 5.0, "use_ema": True})
    assert [each.filename for each in record] == [__file__]
    assert ours.get_config() == tfamp.LossScaleOptimizer.from_config(config).get_config()


def test_unknown_settings_and_a_missing_inner_optimizer_are_errors():
    _, config = written("3.3")
    with pytest.raises(TypeError, match="nonsense"):
        tfamp.LossScaleOptimizer.from_config(config | {"nonsense": 1})
    config.pop("inner_optimizer")
    with pytest.raises(TypeError, match="The optimizer for a LossScaleOptimizer must be"):
        tfamp.LossScaleOptimizer.from_config(config)


def test_keras_optimizers_get_takes_what_describes_one():
    config = {"inner_optimizer": {"class_name": "adam", "config": {"learning_rate": 0.5}}}
    made = keras.optimizers.get({"class_name": "tfamp>LossScaleOptimizer", "config": config})
    assert type(made) is tfamp.LossScaleOptimizer
    assert type(made.inner_optimizer) is keras.optimizers.Adam
    assert (made.initial_scale, float(made.learning_rate)) == (2.0**15, 0.5)
    assert keras.optimizers.get(made) is made


class Half(keras.optimizers.SGD):
    """An optimizer that Keras does not know."""


@pytest.mark.parametrize("inner", ["half", {"class_name": "Half", "config": {}}], ids=["a", "b"])
def test_custom_objects_are_found_in_every_form_of_an_inner_optimizer(inner):
    named = {"half": Half, "Half": Half}
    config = {"inner_optimizer": inner}
    made = tfamp.LossScaleOptimizer.from_config(config, custom_objects=named)
    assert type(made.inner_optimizer) is Half
    with pytest.raises(ValueError, match="[Hh]alf"):
        tfamp.LossScaleOptimizer.from_config(config)


@pytest.mark.parametrize(
    ("saved", "rule"),
    [
        (
            {
                "class_name": "DynamicLossScale",
                "config": {
                    "initial_loss_scale": 4096.0,
                    "increment_period": 100,
                    "multiplier": 4.0,
                },
            },
            tfamp.DynamicLossScale(4096.0, 4.0, 0.25, growth_steps=100),
        ),
        (
            {"class_name": "FixedLossScale", "config": {"loss_scale_value": 64.0}},
            tfamp.FixedLossScale(64.0),
        ),
    ],
    ids=["dynamic", "fixed"],
)
def test_the_configuration_of_tensorflow_2_3_is_taken(saved, rule):
    inner = {"class_name": "SGD", "config": {"name": "SGD", "learning_rate": 0.5, "decay": 0.0}}
    config = {"name": "old", "optimizer": inner, "loss_scale": saved}
    made = tfamp.LossScaleOptimizer.from_config(config)
    assert (made.rule, made.name, float(made.learning_rate)) == (rule, "old", 0.5)


@pytest.mark.parametrize("legacy", [False, True])
def test_the_configuration_of_tf_keras_is_taken(legacy):
    tf_keras = pytest.importorskip("tf_keras")
    kinds = tf_keras.optimizers.legacy if legacy else tf_keras.optimizers
    inner = kinds.SGD(0.5, momentum=0.25)
    theirs = tf_keras.mixed_precision.LossScaleOptimizer(
        inner, initial_scale=64.0, dynamic_growth_steps=3
    )
    made = tfamp.LossScaleOptimizer.from_config(theirs.get_config())
    assert type(made.inner_optimizer) is keras.optimizers.SGD
    assert (float(made.learning_rate), made.inner_optimizer.momentum) == (0.5, 0.25)
    assert (made.initial_scale, made.dynamic_growth_steps) == (64.0, 3)


# ---- What Keras's own class does -----------------------------------------------------------------

# docs/migrating/from_keras3.md lists the deliberate differences.
either = pytest.mark.parametrize(
    "wrapper", [tfamp.LossScaleOptimizer, keras.optimizers.LossScaleOptimizer]
)


def stepped(wrapper, gradients, **options):
    """A weight after steps with gradients of a scaled loss, and the optimizer."""
    optimizer = wrapper(keras.optimizers.SGD(0.25), **options)
    weight = keras.Variable(np.float32([2.0, -1.0]))
    for gradient in gradients:
        optimizer.scale_loss(np.float32(1.0))
        optimizer.apply([np.float32(gradient)], [weight])
    return weight.numpy(), optimizer


@either
def test_a_finite_step_divides_by_the_scale(wrapper):
    weight, _ = stepped(wrapper, [[4.0 * 2**15, -8.0 * 2**15]])
    np.testing.assert_array_equal(weight, [1.0, 1.0])


@either
def test_a_step_that_is_not_finite_changes_no_weight_and_is_not_an_iteration(wrapper):
    weight, optimizer = stepped(wrapper, [[np.inf, 0.0], [np.nan, 1.0]])
    np.testing.assert_array_equal(weight, [2.0, -1.0])
    assert int(optimizer.iterations) == 0


@either
def test_the_scale_halves_at_every_step_that_is_not_finite(wrapper):
    _, optimizer = stepped(wrapper, [[np.inf, np.inf]] * 3, initial_scale=80.0)
    assert float(optimizer.scale_loss(np.float32(1.0))) == 10.0


@either
def test_the_scale_doubles_after_the_growth_steps(wrapper):
    _, optimizer = stepped(wrapper, [[1.0, 2.0]] * 6, initial_scale=4.0, dynamic_growth_steps=2)
    assert float(optimizer.scale_loss(np.float32(1.0))) == 32.0


@either
def test_a_variable_to_overwrite_becomes_its_gradient_as_given(wrapper):
    weight = keras.Variable(np.float32([2.0, -1.0]))
    weight.overwrite_with_gradient = True
    other = keras.Variable(1.0)
    optimizer = wrapper(keras.optimizers.SGD(0.25), initial_scale=8.0)
    optimizer.scale_loss(np.float32(1.0))
    optimizer.apply([np.float32([5.0, 6.0]), np.float32(8.0)], [weight, other])
    np.testing.assert_array_equal(weight.numpy(), [5.0, 6.0])
    assert float(other) == 0.75


@either
def test_iterations_are_the_inner_optimizers(wrapper):
    _, optimizer = stepped(wrapper, [[1.0, 2.0], [np.inf, 0.0], [3.0, 4.0]])
    assert int(optimizer.iterations) == int(optimizer.inner_optimizer.iterations) == 2


def test_a_search_makes_new_ones_from_a_description_and_trains_them():
    """As keras_tuner does: for each trial a new model, and copies of the callbacks."""
    monitor = tfamp.diagnostics.NumericsMonitor(every=1)
    copies = []
    for rate in (0.1, 0.01):
        described = keras.optimizers.serialize(
            tfamp.LossScaleOptimizer(keras.optimizers.SGD(rate), initial_scale=16.0)
        )
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
        model.compile(described, "mse", jit_compile=False)
        copies.append(copy.deepcopy(monitor))
        model.fit(X, X[:, :2], batch_size=2, verbose=0, callbacks=[copies[-1]])
        assert float(model.optimizer.learning_rate) == pytest.approx(rate)
    assert [len(each.history) for each in (monitor, *copies)] == [0, 2, 2]
