"""`prepare` on keras.applications: weights kept, predictions near, and back bit by bit."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp
from helpers.cases import tiers

SIDE = 64
# One of each kind of architecture: the first always, the second in CI, the others at night.
OTHERS = ("ConvNeXtTiny", "DenseNet121", "EfficientNetV2B0", "NASNetMobile", "VGG16")
MODELS = tiers(["MobileNetV3Small"], ["ResNet50"], OTHERS)


def as_after_training(name):
    """A model with random weights whose statistics are those of its own activations."""
    keras.utils.set_random_seed(0)
    shape = (SIDE, SIDE, 3)
    model = getattr(keras.applications, name)(
        weights=None, classes=10, input_shape=shape, classifier_activation=None
    )
    x = np.random.default_rng(0).uniform(0, 255, (4, *shape)).astype("float32")
    norms = [y for y in model._flatten_layers() if isinstance(y, keras.layers.BatchNormalization)]
    for norm in norms:
        norm.momentum = 0.0
    model(x, training=True)
    return model, x


def error_of(model, x, expected):
    return np.abs(model(x).numpy() - expected).max() / np.abs(expected).max()


def error_of_rounded_weights(model, x, expected, dtype):
    """Returns float32's result with kernels rounded to a dtype, and nothing else."""
    kernels = [w for w in model.trainable_weights if len(w.shape) > 1]
    values = [w.numpy() for w in kernels]
    for kernel in kernels:
        kernel.assign(tf.cast(tf.cast(kernel.value, dtype), "float32"))
    error = error_of(model, x, expected)
    for kernel, value in zip(kernels, values, strict=True):
        kernel.assign(value)
    return error


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_predictions_stay_near_and_come_back_bit_by_bit(name):
    model, x = as_after_training(name)
    weights = [w.numpy() for w in model.weights]
    expected = model(x).numpy()
    for dtype in ("float16", "bfloat16"):
        # A deep network that was never trained multiplies every rounding error: measure by how
        # much. Activations are rounded as often as weights; of eleven models the worst is 3.4.
        allowed = 5 * error_of_rounded_weights(model, x, expected, dtype)
        same, _ = tfamp.prepare(model, level="O2", dtype=dtype)
        assert same is model
        convolutions = [y for y in model._flatten_layers() if isinstance(y, keras.layers.Conv2D)]
        assert {y.compute_dtype for y in convolutions} == {dtype}
        assert (model.outputs[0].dtype, model(x).dtype) == ("float32", "float32")
        assert 0 < error_of(model, x, expected) <= allowed
        for old, new in zip(weights, model.weights, strict=True):
            np.testing.assert_array_equal(old, new.numpy())
        back, _ = tfamp.prepare(model, level="O0")
        assert back is model
        assert {y.dtype_policy.name for y in model._flatten_layers()} == {"float32"}
        np.testing.assert_array_equal(model(x).numpy(), expected)
