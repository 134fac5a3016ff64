"""LSTM and GRU on cuDNN: dtypes, values and speed."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp
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
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_in_cudnn(device, check, cell, way, dtype):
    """The layer runs cuDNN's kernel; in bfloat16, whose gradients were wrong, in float32."""
    device.needs_gpu("cuDNN is for GPUs")
    device.needs(dtype)
    with tf.device(device.name):
        x, y = batch(device)
        training = make_training(device, cell, way, dtype)
        training.step(x, y)
        found = op_dtypes(training.step, x, y)
    wanted = "float16" if dtype == "float16" else "float32"
    for op in ("CudnnRNNV3", "CudnnRNNBackpropV3"):
        check(f"dtypes of {op}", ", ".join(sorted(found.get(op, {"none"}))), equals=wanted)


def results(model, x):
    """The output of a model and its gradients, as float64 arrays by name."""

    @tf.function(autograph=False)
    def run(x):
        with tf.GradientTape() as tape:
            y = model(x, training=True)
            loss = tf.reduce_mean(tf.square(tf.cast(y, tf.float32)))
        return y, tape.gradient(loss, [each.value for each in model.trainable_variables])

    y, gradients = run(x)
    names = (f"gradient of {each.path}" for each in model.trainable_variables)
    pairs = zip(("the output", *names), (y, *gradients), strict=True)
    return {name: tf.cast(value, tf.float64).numpy() for name, value in pairs}


@pytest.mark.parametrize("cell", ["LSTM", "GRU", "SimpleRNN"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_values(device, check, cell, dtype):
    """A layer of positive weights against float32; Keras's policy, without tfamp, is recorded."""
    device.needs(dtype)

    def make(policy=None):
        inputs = keras.Input((8, 4))
        layer = getattr(keras.layers, cell)(device.size(64, 4), dtype=policy)
        return keras.Model(
            inputs, keras.layers.Activation("linear", dtype="float32")(layer(inputs))
        )

    with tf.device(device.name):
        x = tf.random.stateless_uniform((512, 8, 4), (1, 2))
        exact = make()
        random = np.random.default_rng(1)
        weights = [random.uniform(0.5, 1.5, w.shape) / len(w) for w in exact.get_weights()]
        exact.set_weights(weights)
        expected = results(exact, x)
        with tfamp.policy_scope(f"mixed_{dtype}"):
            ours = make()
        ways = {"tfamp": ours, "Keras": make(keras.DTypePolicy(f"mixed_{dtype}"))}
        for way, low in ways.items():
            low.set_weights(weights)
            found = results(low, x)
            pairs = zip(expected.items(), found.values(), strict=True)
            errors = {name: relative(value, wanted) for (name, wanted), value in pairs}
            worst = max(errors, key=errors.__getitem__)
            limit = {"at_most": 0.05} if way == "tfamp" else {}
            check(f"{way}: largest relative error, of {worst}", errors[worst], **limit)


def relative(value, wanted):
    return float(np.linalg.norm(value - wanted) / (np.linalg.norm(wanted) or 1.0))


@CELLS
@pytest.mark.usefixtures("as_users_have_it")
def test_speed(device, check, cell):
    """A float16 training step of two layers of 1,024 units against float32's, without a limit.

    On an H100 cuDNN's LSTM and GRU were no faster in float16 than in float32 with TF32.
    """
    with tf.device(device.name):
        x, y = batch(device)
        trainings = {
            way: make_training(device, cell, way, "float32" if way == "float32" else "float16")
            for way in ("float32", "policy")
        }
        ways = {way: lambda each=each: each.step(x, y) for way, each in trainings.items()}
        seconds = interleaved_seconds(ways, rounds=device.size(9, 2), calls=device.size(10, 1))
    faster = ratio(seconds, "float32", "policy")
    check("times as fast as float32", faster)
