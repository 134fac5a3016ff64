"""`prepare` on models of keras.applications: weights kept, predictions near, back exactly."""

from __future__ import annotations

import keras
import numpy as np
import pytest

import tfamp
from tfamp.dtypes import float_format

SIDE = 64
# One of each kind of architecture. The first three always run; the others are slow.
ALWAYS = ("MobileNetV2", "MobileNetV3Small", "ResNet50")
OTHERS = (
    "ConvNeXtTiny",
    "DenseNet121",
    "EfficientNetB0",
    "EfficientNetV2B0",
    "NASNetMobile",
    "ResNet50V2",
    "VGG16",
    "Xception",
)
_SIDES = {"Xception": 71}
MODELS = [*ALWAYS, *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)]


def as_after_training(name):
    """A model with random weights whose statistics are those of its own activations."""
    keras.utils.set_random_seed(0)
    side = _SIDES.get(name, SIDE)
    model = getattr(keras.applications, name)(
        weights=None, classes=10, input_shape=(side, side, 3), classifier_activation=None
    )
    x = np.random.default_rng(0).uniform(0, 255, (4, side, side, 3)).astype("float32")
    norms = [y for y in model._flatten_layers() if isinstance(y, keras.layers.BatchNormalization)]
    for norm in norms:
        norm.momentum = 0.0
    model(x, training=True)
    return model, x


@pytest.mark.parametrize("name", MODELS)
def test_predictions_stay_near_and_come_back_bit_by_bit(name):
    model, x = as_after_training(name)
    weights = [w.numpy() for w in model.weights]
    expected = model(x).numpy()
    scale = np.abs(expected).max()
    for dtype in ("float16", "bfloat16"):
        same, _ = tfamp.prepare(model, level="O2", dtype=dtype)
        assert same is model
        convolutions = [y for y in model._flatten_layers() if isinstance(y, keras.layers.Conv2D)]
        assert {y.compute_dtype for y in convolutions} == {dtype}
        assert (model.outputs[0].dtype, model(x).dtype) == ("float32", "float32")
        error = np.abs(model(x).numpy() - expected).max() / scale
        # Rounding errors of the layers are independent: they grow like the square root.
        depth = len([y for y in model._flatten_layers() if y.weights])
        assert 0 < error <= 2 * float_format(dtype).eps * np.sqrt(depth)
        for old, new in zip(weights, model.weights, strict=True):
            np.testing.assert_array_equal(old, new.numpy())
    back, _ = tfamp.prepare(model, level="O0")
    assert back is model
    assert {y.dtype_policy.name for y in model._flatten_layers()} == {"float32"}
    np.testing.assert_array_equal(model(x).numpy(), expected)
