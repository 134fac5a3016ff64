"""Training steps and a SavedModel against float32: time, memory, results."""

import time

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp
from helpers import acceptance_models as models
from helpers.acceptance import interleaved_seconds, ratio
from helpers.cases import first_of
from helpers.graph_asserts import op_dtypes

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("as_users_have_it")]


def resnet50(device):
    if device.toy:
        return models.cnn(8)
    return keras.applications.ResNet50(weights=None, classes=1000, classifier_activation=None)


def bert_base(device):
    if device.toy:
        return models.encoder(1, 16, 2, tokens=8, vocabulary=32)
    return models.encoder(12, 768, 12, tokens=128, vocabulary=30522)


MODELS = {"ResNet-50": resnet50, "BERT-base": bert_base}


def batch(device, name):
    count = device.size(64 if name == "ResNet-50" else 32, 2)
    if name == "ResNet-50":
        pixels, channels = device.size(224, 8), device.size(3, 1)
        return tf.random.normal((count, pixels, pixels, channels)), tf.zeros(count, "int32")
    tokens = device.size(128, 8)
    return tf.ones((count, tokens), "int32"), tf.zeros(count, "int32")


def measure(device, name, ways):
    """Returns interleaved times of steps, peak memory of a step, and times of the first step."""
    x, y = batch(device, name)
    calls, memory, first = {}, {}, {}
    with tf.device(device.name):
        for way, (kind, dtype, options) in ways.items():
            before = memory_info(device)["current"]
            training = models.train(lambda: MODELS[name](device), kind, dtype, **options)
            start = time.perf_counter()
            training.step(x, y)
            tf.test.experimental.sync_devices()
            first[way] = time.perf_counter() - start
            training.step(x, y)
            # Only now: cuDNN's autotuning takes gigabytes in the first steps.
            memory_info(device, reset=True)
            training.step(x, y)
            memory[way] = memory_info(device)["peak"] - before
            calls[way] = lambda training=training: training.step(x, y)
        seconds = interleaved_seconds(calls, rounds=device.size(7, 1), calls=device.size(5, 1))
    return seconds, memory, first


def memory_info(device, *, reset=False):
    """Returns the bytes in use on a GPU, "current" and "peak"; zeros for a CPU."""
    tf.test.experimental.sync_devices()
    if device.toy:
        return {"current": 0, "peak": 0}
    if reset:
        tf.config.experimental.reset_memory_stats(device.name)
    return tf.config.experimental.get_memory_info(device.name)


@pytest.mark.parametrize("name", first_of(MODELS, pytest.mark.long))
def test_training(device, check, name):
    """A training step by policy and by rewrite against float32 with TF32."""
    low = device.low
    # Without TF32, as on GPUs of capability 7.x, float32 is slower.
    gain = 1.3 if low == "bfloat16" else 1.8
    ways = {
        "float32": ("float32", "float32", {}),
        "policy": ("policy", low, {}),
        "lists": ("rewrite", low, {"placement": "lists"}),
        "min_cut": ("rewrite", low, {"placement": "min_cut"}),
    }
    seconds, memory, first = measure(device, name, ways)
    for way in list(ways)[1:]:
        faster = ratio(seconds, "float32", way)
        check(f"{way}: times as fast", faster, at_least=gain, timing=True)
        check(f"{way}: first step, to float32's", first[way] / first["float32"])
        if device.toy:
            check.leave_out(f"{way}: memory", "TensorFlow counts none on CPUs")
        else:
            check(f"{way}: memory, to float32's", memory[way] / memory["float32"], at_most=0.75)
    slower = ratio(seconds, "min_cut", "lists")
    check("min_cut's time, to lists'", slower, at_most=1.03, timing=True)


@pytest.mark.long
def test_saved_model(device, check, tmp_path):
    """A SavedModel that was converted on a CPU for a GPU."""
    source, target = tmp_path / "float32", tmp_path / "low"
    model = models.cnn(device.size(64, 4), device.size(32, 8))
    shape = (None, *model.input_shape[1:])
    x = tf.random.stateless_normal((4, *shape[1:]), (0, 1))
    module = tf.Module()
    module.model = model
    module.call = tf.function(
        lambda x: {"logits": model(x, training=False)}, input_signature=[tf.TensorSpec(shape)]
    )
    tf.saved_model.save(module, str(source), signatures=module.call)
    if device.toy:
        tfamp.rewrite_saved_model(source, target, dtype="float16")
    else:
        arguments = ("rewrite", str(source), str(target), "--dtype", "float16", "--device", "gpu")
        done = device.tfamp(*arguments, CUDA_VISIBLE_DEVICES="-1")
        assert done.returncode == 0, done.stderr[-3000:]
    results = []
    with tf.device(device.name):
        for path in (source, target):
            signature = tf.saved_model.load(str(path)).signatures["serving_default"]
            results.append(signature(x)["logits"].numpy().astype("float64"))
    dtypes = op_dtypes(signature)["Conv2D"]
    difference = np.abs(results[1] - results[0]).max() / np.abs(results[0]).max()
    check("dtypes of the convolutions", ", ".join(sorted(dtypes)), equals="float16")
    check("relative difference", difference, at_most=1e-2)
