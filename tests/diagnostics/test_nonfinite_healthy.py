"""`find_nonfinite` has nothing to say about healthy models, in any dtype."""

from __future__ import annotations

import keras
import numpy as np
import pytest
from keras import layers
from sklearn.datasets import load_digits

import tfamp
from helpers.cases import one_in
from tfamp.diagnostics import find_nonfinite

LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def _digits():
    data = load_digits()
    return (data.images[:16, ..., None] / 16.0).astype(np.float32), data.target[:16]


def _cnn():
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(8, 3, use_bias=False),
            layers.BatchNormalization(),
            layers.ReLU(),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dropout(0.3),
            layers.Dense(10),
        ]
    ), *_digits()


def _lstm():
    x = np.random.default_rng(0).integers(1, 50, (4, 10))
    x[:, 7:] = 0
    model = keras.Sequential(
        [
            keras.Input((10,), dtype="int32"),
            layers.Embedding(50, 8, mask_zero=True),
            layers.Bidirectional(layers.LSTM(8)),
            layers.Dense(3),
        ]
    )
    return model, x, np.arange(4) % 3


def _transformer():
    inputs = keras.Input((10,), dtype="int32")
    x = layers.Embedding(50, 16, mask_zero=True)(inputs)
    attention = layers.MultiHeadAttention(2, 8, dropout=0.1)(x, x, use_causal_mask=True)
    x = layers.LayerNormalization()(x + attention)
    x = layers.LayerNormalization()(x + layers.Dense(16)(layers.Dense(32, activation="gelu")(x)))
    tokens = np.random.default_rng(0).integers(0, 50, (4, 10))
    return keras.Model(inputs, layers.Dense(50)(x)), tokens, tokens


def _mobilenet():
    model = keras.applications.MobileNet(
        (32, 32, 3), alpha=0.25, weights=None, classes=10, classifier_activation=None
    )
    return model, np.random.default_rng(0).random((4, 32, 32, 3), np.float32), np.arange(4)


MODELS = {"cnn": _cnn, "lstm": _lstm, "transformer": _transformer, "mobilenet": _mobilenet}


@pytest.mark.parametrize("name", one_in(2, MODELS))
@pytest.mark.parametrize(
    "policy", ["mixed_float16", pytest.param("mixed_bfloat16", marks=pytest.mark.slow)]
)
def test_models_without_a_fault(name, policy):
    with tfamp.policy_scope(policy):
        model, x, y = MODELS[name]()
    assert find_nonfinite(model, x, y, loss=LOSS) is None


def test_an_empty_batch_is_no_fault_of_precision():
    model = keras.Sequential([keras.Input((4,)), layers.Dense(2)])
    x, y = np.ones((0, 4), "float32"), np.ones((0, 2), "float32")
    with pytest.raises(ValueError, match="x is an empty batch"):
        find_nonfinite(model, x, y, loss="mse", dtype="float16")
