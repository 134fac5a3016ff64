"""LSTM and GRU on cuDNN: dtypes and speed."""

import keras
import pytest
import tensorflow as tf

from helpers import acceptance_models as models
from helpers.acceptance import interleaved_seconds, ratio
from helpers.cases import first_of
from helpers.graph_asserts import op_dtypes

pytestmark = pytest.mark.gpu
CELLS = pytest.mark.parametrize("cell", first_of(["LSTM", "GRU"], pytest.mark.long))
WAYS = pytest.mark.parametrize("way", first_of(["policy", "rewrite"], pytest.mark.long))


def make_model(cell, units, tokens):
    layer = getattr(keras.layers, cell)
    inputs = keras.Input((tokens, units))
    x = layer(units, return_sequences=True)(inputs)
    return keras.Model(inputs, keras.layers.Dense(models.CLASSES)(layer(units)(x)))


def make_training(device, cell, way, dtype):
    units, tokens = device.size(1024, 16), device.size(64, 4)
    return models.train(lambda: make_model(cell, units, tokens), way, dtype)


def batch(device):
    count, tokens = device.size(64, 4), device.size(64, 4)
    x = tf.random.normal((count, tokens, device.size(1024, 16)))
    return x, tf.zeros(count, "int32")


@CELLS
@WAYS
def test_in_cudnn(device, check, cell, way):
    """The layer runs cuDNN's kernel, in low precision."""
    device.needs_gpu("cuDNN is for GPUs")
    with tf.device(device.name):
        x, y = batch(device)
        training = make_training(device, cell, way, device.low)
        training.step(x, y)
        found = op_dtypes(training.step, x, y)
    for op in ("CudnnRNNV3", "CudnnRNNBackpropV3"):
        check(f"dtypes of {op}", ", ".join(sorted(found.get(op, {"none"}))), equals=device.low)


@CELLS
@pytest.mark.usefixtures("as_users_have_it")
def test_speed(device, check, cell):
    """A training step of two layers of 1,024 units against float32's."""
    with tf.device(device.name):
        x, y = batch(device)
        trainings = {
            way: make_training(device, cell, way, "float32" if way == "float32" else device.low)
            for way in ("float32", "policy")
        }
        ways = {way: lambda each=each: each.step(x, y) for way, each in trainings.items()}
        seconds = interleaved_seconds(ways, rounds=device.size(9, 2), calls=device.size(10, 1))
    faster = ratio(seconds, "float32", "policy")
    check("times as fast as float32", faster, at_least=1.3, timing=True)
