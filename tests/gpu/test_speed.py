"""How fast, and how exact where speed could cost exactness."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp
from helpers import acceptance_models as models
from helpers.acceptance import ratio, seconds_by_turns
from helpers.graph_asserts import op_dtypes

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _as_users_have_it(device, monkeypatch):
    """A float32 with TF32, and a rewrite that goes by what it measured on this GPU."""
    if not device.toy:
        monkeypatch.setenv("TFAMP_PROFILE", "measure")
    tf.config.experimental.enable_tensor_float_32_execution(True)
    yield
    tf.config.experimental.enable_tensor_float_32_execution(False)


def resnet50(device):
    if device.toy:
        return models.cnn(8)
    return keras.applications.ResNet50(weights=None, classes=1000, classifier_activation=None)


def bert_base(device):
    if device.toy:
        return models.encoder(1, 16, 2, tokens=8, vocabulary=32)
    return models.encoder(12, 768, 12, tokens=128, vocabulary=30522)


def keras_hub_bert(device):
    hub = pytest.importorskip("keras_hub", reason="KerasHub is not installed")
    sizes = (8, 32, 1, 2, 16) if device.toy else (128, 30522, 12, 12, 768)
    tokens, vocabulary, depth, heads, width = sizes
    backbone = hub.models.BertBackbone(
        vocabulary_size=vocabulary,
        num_layers=depth,
        num_heads=heads,
        hidden_dim=width,
        intermediate_dim=4 * width,
        max_sequence_length=tokens,
    )
    ids = keras.Input((tokens,), dtype="int32")
    zeros, ones = keras.ops.zeros_like(ids), keras.ops.ones_like(ids)
    outputs = backbone({"token_ids": ids, "segment_ids": zeros, "padding_mask": ones})
    return keras.Model(ids, keras.layers.Dense(models.CLASSES)(outputs["pooled_output"]))


MODELS = {"ResNet-50": resnet50, "BERT-base": bert_base, "KerasHub's BERT-base": keras_hub_bert}
NAMES = pytest.mark.parametrize("name", MODELS)


def batch(device, name):
    count = device.size(64 if name == "ResNet-50" else 32, 2)
    if name == "ResNet-50":
        pixels, channels = device.size(224, 8), device.size(3, 1)
        return tf.random.normal((count, pixels, pixels, channels)), tf.zeros(count, "int32")
    tokens = device.size(128, 8)
    return tf.ones((count, tokens), "int32"), tf.zeros(count, "int32")


def measure(device, name, ways):
    """Times of steps by turns, and the most memory that each way needs for a step."""
    x, y = batch(device, name)
    calls, memory = {}, {}
    with tf.device(device.name):
        for way, (kind, dtype, options) in ways.items():
            before = None if device.toy else used(device)
            training = models.train(lambda: MODELS[name](device), kind, dtype, **options)
            for _ in range(3):
                training.step(x, y)
            if before is not None:
                memory[way] = tf.config.experimental.get_memory_info(device.name)["peak"] - before
            calls[way] = lambda training=training: training.step(x, y)
        seconds = seconds_by_turns(calls, rounds=device.size(9, 1), calls=device.size(10, 1))
    return seconds, memory


def used(device):
    tf.test.experimental.sync_devices()
    tf.config.experimental.reset_memory_stats(device.name)
    return tf.config.experimental.get_memory_info(device.name)["current"]


def least_gain(device):
    return 1.3 if device.low == "bfloat16" else 1.8


@NAMES
def test_training(device, check, name):
    """A training step by policy and by rewrite against float32 with TF32."""
    low = device.low
    ways = {
        "float32": ("float32", "float32", {}),
        "policy": ("policy", low, {}),
        "lists": ("rewrite", low, {"placement": "lists"}),
        "min_cut": ("rewrite", low, {"placement": "min_cut"}),
    }
    seconds, memory = measure(device, name, ways)
    for way in list(ways)[1:]:
        gain = ratio(seconds, "float32", way)
        check(f"{way}: times as fast", gain, at_least=least_gain(device), timing=True)
    for way in list(ways)[1:]:
        if device.toy:
            check.leave_out(f"{way}: memory", "TensorFlow counts none on CPUs")
        else:
            check(f"{way}: memory, to float32's", memory[way] / memory["float32"], at_most=0.75)
    check(
        "min_cut's time, to that of lists",
        ratio(seconds, "min_cut", "lists"),
        at_most=1.03,
        timing=True,
    )


ROWS, COLUMNS = 8192, 768  # More blocks of threads than one add to each sum.


def test_bias_gradients(device, check):
    """The gradient of a bias over 8,192 rows in bfloat16 is as exact as its dtype."""
    if device.capability and device.capability < (8, 0):
        pytest.skip("this GPU has no bfloat16 arithmetic")
    with tf.device(device.name):
        # All of one sign: a sum that is kept in bfloat16 stops growing at 256 or so.
        gradients = tf.random.stateless_uniform((ROWS, COLUMNS), (0, 1), 0.7, 1.7)
        low = tf.cast(gradients, "bfloat16")
        expected = np.asarray(tf.cast(low, tf.float64)).sum(0)

        def error(found):
            return float(np.abs(np.asarray(tf.cast(found, tf.float64)) / expected - 1).max())

        raw = tf.raw_ops.BiasAddGrad(out_backprop=low)
        bias = tf.Variable(tf.zeros(COLUMNS))
        kernel = tf.Variable(tf.random.stateless_normal((32, COLUMNS), (0, 2)))

        @tfamp.rewrite(dtype="bfloat16", placement="lists")
        def gradient(x, scale):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(tf.nn.bias_add(x @ kernel, bias) * scale)
            return tape.gradient(loss, bias)

        x = tf.random.stateless_normal((ROWS, 32), (0, 3))
        ours = gradient(x, tf.cast(low, tf.float32))
    check("relative error of the rewritten gradient", error(ours), at_most=2 * 2**-7)
    check("that of TensorFlow's kernel BiasAddGrad", error(raw))


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
