"""Files of Keras releases since 3.3, and what Keras's own LossScaleOptimizer does, done by ours.

tests/data/write_old_keras_files.py wrote the files, with the Keras of each release.
"""

import json
import zipfile
from pathlib import Path

import keras
import numpy as np
import pytest

import tfamp

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
@pytest.mark.parametrize("release", RELEASES)
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


def test_settings_without_effect_are_left_out_and_unknown_or_missing_ones_errors():
    _, config = written("3.3")
    ours = tfamp.LossScaleOptimizer.from_config(config | {"clipnorm": 5.0, "use_ema": True})
    assert ours.get_config() == tfamp.LossScaleOptimizer.from_config(config).get_config()
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


def test_the_configuration_of_tf_keras_is_taken():
    tf_keras = pytest.importorskip("tf_keras")
    inner = tf_keras.optimizers.SGD(0.5, momentum=0.25)
    theirs = tf_keras.mixed_precision.LossScaleOptimizer(
        inner, initial_scale=64.0, dynamic_growth_steps=3
    )
    made = tfamp.LossScaleOptimizer.from_config(theirs.get_config())
    assert type(made.inner_optimizer) is keras.optimizers.SGD
    assert (float(made.learning_rate), made.inner_optimizer.momentum) == (0.5, 0.25)
    assert (made.initial_scale, made.dynamic_growth_steps) == (64.0, 3)
