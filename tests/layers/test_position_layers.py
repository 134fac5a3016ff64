"""KerasHub's layers that turn positions into angles."""

import threading

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp
from helpers.cases import one_of_each

keras_hub = pytest.importorskip("keras_hub")
pytestmark = [
    pytest.mark.models,
    pytest.mark.filterwarnings("ignore:This CPU:tfamp.TfampWarning"),
]
DTYPES = ("bfloat16", "float16")
EPS = {"bfloat16": 2.0**-7, "float16": 2.0**-10}
LAYERS = {
    "sine": lambda: keras_hub.layers.SinePositionEncoding(),
    "rotary": lambda: keras_hub.layers.RotaryEmbedding(),
}
X = tf.constant(np.random.default_rng(0).normal(size=(2, 2048, 16)), tf.float32)


def outputs(name, way, dtype):
    make = LAYERS[name]
    if way == "policy":
        with tfamp.policy_scope(f"mixed_{dtype}"):
            layer = make()
        found = layer(X)
        assert found.dtype == dtype  # It fits beside other low tensors.
        return found
    layer = make()
    if way == "rewrite":
        return tfamp.rewrite(lambda x: layer(x) @ tf.eye(16), dtype=dtype)(X)

    def call():
        with tfamp.autocast(dtype):
            return layer(tf.cast(X, dtype) if way == "low input" else X)

    return call() if way == "eager autocast" else tf.function(call)()


WAYS = ("policy", "rewrite", "autocast", "eager autocast", "low input")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("name", "dtype"), one_of_each(LAYERS, DTYPES, quick=1))
def test_angles_are_float32s(name, way, dtype):
    exact = LAYERS[name]()(X)
    assert np.abs(np.float64(tf.cast(outputs(name, way, dtype), "float64")) - exact).max() < (
        4 * EPS[dtype] * np.abs(exact).max()
    )


@pytest.mark.parametrize("way", ["policy", "eager autocast"])
def test_the_policy_is_there_again_after_a_call_that_fails(way):
    with tfamp.policy_scope("mixed_bfloat16"):
        layer = keras_hub.layers.RotaryEmbedding()
    with pytest.raises(ValueError, match="even"):
        layer(tf.ones((1, 8, 7)))
    assert layer.compute_dtype == "bfloat16"
    assert layer(tf.ones((1, 8, 8))).dtype == tf.bfloat16


def called_at_once(call, threads, monkeypatch):
    """The results of threads that are all inside of a RotaryEmbedding's `call` at one time."""
    meeting, found = threading.Barrier(threads), {}
    layer_class = keras_hub.layers.RotaryEmbedding
    original = layer_class._compute_cos_sin_embedding

    def meet(*args, **kwargs):
        meeting.wait(timeout=60)  # Raises in all threads if one does not come.
        return original(*args, **kwargs)

    monkeypatch.setattr(layer_class, "_compute_cos_sin_embedding", meet)
    running = [
        threading.Thread(target=lambda n=n: found.update({n: call()})) for n in range(threads)
    ]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    return [found[number] for number in range(threads)]


@pytest.mark.parametrize("inputs", ["float32", "bfloat16"])
@pytest.mark.parametrize("mode", ["eager", "function"])
def test_three_threads_in_one_layer_get_float32s_angles(mode, inputs, monkeypatch):
    with tfamp.policy_scope("mixed_bfloat16"):
        layer = keras_hub.layers.RotaryEmbedding()
    x = tf.cast(X, inputs)
    exact = np.asarray(keras_hub.layers.RotaryEmbedding(dtype="float32")(tf.cast(x, "float32")))

    def call():
        return layer(x) if mode == "eager" else tf.function(lambda: layer(x))()

    for found in called_at_once(call, 3, monkeypatch):
        assert found.dtype == tf.bfloat16
        error = np.abs(np.asarray(tf.cast(found, "float32")) - exact)
        assert (error <= 2.0**-8 * np.abs(exact)).all()  # One rounding, of the result.
    assert layer.compute_dtype == "bfloat16"


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_that_is_set_to_low_precision_by_hand_computes_float32s_angles(name):
    layer = LAYERS[name]()
    exact = np.asarray(layer(X))
    tfamp.set_layer_dtype(layer, "bfloat16")
    found = layer(X)
    assert found.dtype == tf.bfloat16
    error = np.abs(np.asarray(tf.cast(found, "float32")) - exact)
    assert (error <= 2.0**-8 * np.abs(exact)).all()


def test_what_a_call_stores_in_its_layer_stays_there():
    class RotaryEmbedding(keras_hub.layers.RotaryEmbedding):
        calls = 0

        def call(self, *args, **kwargs):
            self.calls += 1
            self.add_loss(tf.constant(float(self.calls)))
            return super().call(*args, **kwargs)

    RotaryEmbedding.__module__ = "keras_hub.example"  # Layers of this package are recognized.
    with tfamp.policy_scope("mixed_bfloat16"):
        layer = RotaryEmbedding()
    for _ in range(2):
        found = layer(X)
    exact = keras_hub.layers.RotaryEmbedding(dtype="float32")(X)
    error = np.abs(np.asarray(tf.cast(found, "float32")) - exact)
    assert (error <= 2.0**-8 * np.abs(exact)).all()
    assert layer.calls == 2
    assert [float(loss) for loss in layer.losses] == [2.0]  # Keras keeps the last call's.


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_llama_at_o1_is_as_exact_as_keras_policy(dtype):
    def make():
        keras.utils.set_random_seed(0)
        model = keras_hub.models.LlamaBackbone(
            vocabulary_size=256,
            num_layers=2,
            num_query_heads=4,
            num_key_value_heads=2,
            hidden_dim=64,
            intermediate_dim=128,
        )
        for variable in model.trainable_variables:
            if "query" in variable.path or "key" in variable.path:
                variable.assign(variable.value * 6)  # Attention that is not uniform.
        return model

    random = np.random.default_rng(1)
    tokens = {
        "token_ids": random.integers(0, 256, (1, 1024)),
        "padding_mask": np.ones((1, 1024), bool),
    }
    exact = np.asarray(make()(tokens))

    def error_of(model):
        found = np.asarray(tf.cast(tf.function(model)(tokens), "float32"))
        return np.linalg.norm(found - exact) / np.linalg.norm(exact)

    keras.config.set_dtype_policy(f"mixed_{dtype}")
    try:
        with_keras = make()
    finally:
        keras.config.set_dtype_policy("float32")
    prepared, _ = tfamp.prepare(make(), keras.optimizers.SGD(0.1), level="O1", dtype=dtype)
    assert error_of(prepared) < 1.2 * error_of(with_keras)


@pytest.mark.parametrize("dtype", one_of_each(DTYPES))
def test_a_classifier_whose_head_takes_the_dtype_of_its_backbone_returns_float32(dtype):
    with tfamp.policy_scope(f"mixed_{dtype}"):
        backbone = keras_hub.models.BertBackbone(
            vocabulary_size=50, num_layers=1, num_heads=2, hidden_dim=16, intermediate_dim=16,
            max_sequence_length=8,
        )  # fmt: skip
        model = keras_hub.models.BertTextClassifier(backbone, num_classes=3, preprocessor=None)
    assert backbone.compute_dtype == dtype
    words = np.ones((2, 8), "int32")
    x = {"token_ids": words, "segment_ids": 0 * words, "padding_mask": words}
    assert model.output.dtype == model(x).dtype == model.predict(x, verbose=0).dtype == "float32"
