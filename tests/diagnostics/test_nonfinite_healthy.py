"""`find_nonfinite` has nothing to say about healthy models, in any dtype."""

import keras
import numpy as np
import pytest
from keras import layers

import tfamp
from helpers import model_zoo
from helpers.cases import one_in
from tfamp.diagnostics import find_nonfinite

LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def _masked():
    inputs = keras.Input((10,), dtype="int32")
    x = layers.Embedding(50, 16, mask_zero=True)(inputs)
    attention = layers.MultiHeadAttention(2, 8, dropout=0.1)(x, x, use_causal_mask=True)
    x = layers.LayerNormalization()(x + attention)
    x = layers.Bidirectional(layers.LSTM(8, return_sequences=True))(x)
    x = layers.LayerNormalization()(x + layers.Dense(16)(layers.Dense(32, activation="gelu")(x)))
    tokens = np.random.default_rng(0).integers(1, 50, (4, 10))
    tokens[:, 7:] = 0
    return keras.Model(inputs, layers.Dense(50)(layers.Dropout(0.3)(x))), tokens, tokens


@pytest.mark.parametrize("name", ["masked", *one_in(2, ["cnn", "depthwise", "attention"])])
@pytest.mark.parametrize(
    "policy", ["mixed_float16", pytest.param("mixed_bfloat16", marks=pytest.mark.slow)]
)
def test_models_without_a_fault(name, policy):
    with tfamp.policy_scope(policy):
        if name == "masked":
            model, x, y = _masked()
        else:
            model, ((x, y),) = model_zoo.build(name), model_zoo.digits(name, 1)
    assert find_nonfinite(model, x, y, loss=LOSS) is None


def test_an_empty_batch_is_no_fault_of_precision():
    model = keras.Sequential([keras.Input((4,)), layers.Dense(2)])
    x, y = np.ones((0, 4), "float32"), np.ones((0, 2), "float32")
    with pytest.raises(ValueError, match="x is an empty batch"):
        find_nonfinite(model, x, y, loss="mse", dtype="float16")
