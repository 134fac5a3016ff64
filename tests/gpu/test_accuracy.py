"""Accuracy of low-precision training against float32's, and its determinism."""

import numpy as np
import pytest
import tensorflow as tf

from helpers import acceptance_models as models
from helpers.acceptance import deterministic_ops
from helpers.cases import first_of

pytestmark = pytest.mark.gpu
BATCH = 64


def make_cnn(device):
    return lambda: models.cnn(device.size(64, 8), device.size(32, 8), device.size(4, 1))


def make_transformer(device):
    width, depth = device.size(128, 16), device.size(4, 1)
    return lambda: models.encoder(depth, width, 4, tokens=64, vocabulary=16)


MODELS = {"cnn": make_cnn, "transformer": make_transformer}


def losses(device, make, data, way, dtype):
    x, y = data
    training = models.train(make, way, dtype)
    found = [
        training.step(x[start : start + BATCH], y[start : start + BATCH])
        for start in range(0, len(x), BATCH)
    ]
    return np.array([float(each) for each in found])


@pytest.fixture(scope="module")
def float32_losses():
    return {}


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", MODELS)
def test_trained_as_float32(device, check, float32_losses, name, dtype):
    """500 steps end at float32's loss, or below."""
    device.needs(dtype)
    pytest.importorskip("sklearn")
    steps = device.size(500, 10)
    pixels = device.size(32, 8) if name == "cnn" else 8
    with tf.device(device.name):
        images, y = models.digits(steps * BATCH, pixels)
        x = tf.constant(images if name == "cnn" else models.words(images))
        data, make = (x, tf.constant(y)), MODELS[name](device)
        if name not in float32_losses:
            float32_losses[name] = losses(device, make, data, "float32", "float32")
        low = losses(device, make, data, "policy", dtype)
    last = slice(-max(steps // 10, 1), None)
    expected = float32_losses[name]
    end, wanted = low[last].mean(), expected[last].mean()
    check("loss at the end", float(end))
    check("float32's loss at the end", float(wanted))
    check("relative to float32's", end / wanted - 1, at_most=0.02)
    # A few steps at toy size need not learn.
    fell = {} if device.toy else {"at_most": 0.9}
    check("float32's loss at the end, to that at the start", wanted / expected[0], **fell)


@pytest.mark.parametrize("way", first_of(["policy", "rewrite"], pytest.mark.long))
def test_deterministic(device, check, way):
    """With enable_op_determinism a training from the same seed ends with the same bits."""

    def trained(x, y):
        training = models.train(make_cnn(device), way, "float16")
        for _ in range(device.size(20, 2)):
            training.step(x, y)
        return models.values(training.model, training.optimizer)

    with deterministic_ops(), tf.device(device.name):
        images, y = models.digits(BATCH, device.size(32, 8))
        first, second = (trained(tf.constant(images), tf.constant(y)) for _ in range(2))
    equal = [np.array_equal(a, b, equal_nan=True) for a, b in zip(first, second, strict=True)]
    check("variables with the same bits", sum(equal), equals=len(first))
