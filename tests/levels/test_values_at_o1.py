"""Level O1 in training: losses, targets and masks have the values that a policy gives them."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfamp
from helpers.cases import first_of, one_of_each, tiers
from helpers.graph_asserts import op_dtypes

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(512, 16)).astype("float32")
CURVE = np.tanh(X @ RANDOM.normal(size=(16, 1)) / 4)
DTYPES = ("bfloat16", "float16")


def regressor(offset):
    keras.utils.set_random_seed(0)
    start = keras.initializers.Constant(offset)
    hidden = [layers.Dense(32, activation="tanh") for _ in range(2)]
    return keras.Sequential([keras.Input((16,)), *hidden, layers.Dense(1, bias_initializer=start)])


def regress(model, optimizer, offset, epochs=8):
    """The loss that training reports last, and the error in float64 by the weights it found."""
    model.compile(optimizer, "mse")
    y = (offset + 2 * CURVE).astype("float32")
    history = model.fit(X, y, batch_size=32, epochs=epochs, shuffle=False, verbose=0)
    *hidden, (kernel, bias) = np.array_split(np.array(model.get_weights(), object), 3)
    h = X.astype("float64")
    for w, b in hidden:
        h = np.tanh(h @ w + b)
    return history.history["loss"][-1], np.mean(np.square(h @ kernel + bias - y))


@functools.cache
def by_policy(offset, dtype):
    before = keras.config.dtype_policy()
    tfamp.set_global_policy(f"mixed_{dtype}")
    try:
        model = regressor(offset)
    finally:
        keras.config.set_dtype_policy(before)
    return regress(model, tfamp.LossScaleOptimizer(keras.optimizers.Adam(2e-3)), offset)


@pytest.mark.parametrize("dtype", first_of(DTYPES))
@pytest.mark.parametrize("placement", tiers(["lists"], ["min_cut"], ["fused"]))
def test_regression_learns_what_it_learns_under_a_policy(placement, dtype):
    offset = 2000
    model, optimizer = tfamp.prepare(
        regressor(offset), keras.optimizers.Adam(2e-3), level="O1", dtype=dtype, placement=placement
    )
    reported, error = regress(model, optimizer, offset)
    assert dtype in op_dtypes(lambda: model.train_step((X[:8], X[:8, :1])))["MatMul"]
    expected_report, expected_error = by_policy(offset, dtype)
    assert error < 1.5 * expected_error
    assert reported < 1.5 * expected_report
    np.testing.assert_allclose(reported, error, rtol=0.5)
    # Called outside of fit, where autocast chooses the dtypes.
    assert np.mean(np.square(model(X) - (offset + 2 * CURVE))) < 1.5 * expected_error


def test_targets_that_float16_cannot_hold():
    model, optimizer = tfamp.prepare(
        regressor(1e5), keras.optimizers.Adam(2e-3), level="O1", dtype="float16"
    )
    reported, error = regress(model, optimizer, 1e5, epochs=2)
    assert int(optimizer.skipped_steps) < 4
    assert np.isfinite([reported, error]).all()


class MaskedAttention(layers.Layer):
    """Attends to tokens that are not 0: adds a number that is near the least of its scores."""

    def __init__(self):
        super().__init__()
        self.supports_masking = True

    def build(self, shape):
        self.query = self.add_weight(shape=(shape[-1], shape[-1]), initializer="glorot_uniform")

    def call(self, x, tokens):
        scores = x @ self.query @ tf.linalg.matrix_transpose(x)
        least = scores.dtype.min / (4 if scores.dtype == tf.float16 else 1)
        scores = scores + tf.cast(tokens == 0, scores.dtype)[:, None, :] * least
        self.add_loss(1e-3 * tf.reduce_mean(tf.square(self.query)))
        return tf.nn.softmax(scores) @ x


def reader():
    keras.utils.set_random_seed(0)
    tokens = keras.Input((8,), dtype="int32")
    x = layers.Embedding(20, 16, mask_zero=True)(tokens)
    x = layers.Attention(use_scale=True)([x, x])
    x = x + MaskedAttention()(x, tokens)
    x = layers.MultiHeadAttention(2, 8)(x, x, attention_mask=(tokens != 0)[:, None, :])
    return keras.Model(tokens, layers.Dense(4, activation="softmax")(layers.Flatten()(x)))


TOKENS = RANDOM.integers(1, 20, (64, 8)).astype("int32")
TOKENS[:, 5:] = 0
TOKENS[:4] = 0  # Nothing but padding.
CLASSES = RANDOM.dirichlet(np.ones(4), 64).astype("float32")


@pytest.mark.parametrize(("level", "dtype"), one_of_each(["O1", "O2"], DTYPES, quick=1))
def test_masked_rows_and_a_divergence(level, dtype):
    model, optimizer = tfamp.prepare(reader(), keras.optimizers.SGD(0.1), level=level, dtype=dtype)
    exact = reader()
    losses = []
    for each, its_optimizer in ((model, optimizer), (exact, keras.optimizers.SGD(0.1))):
        each.compile(its_optimizer, "kl_divergence")
        history = each.fit(TOKENS, CLASSES, batch_size=16, epochs=3, shuffle=False, verbose=0)
        losses.append(history.history["loss"])
    assert int(optimizer.skipped_steps) == 0
    assert all(np.isfinite(weight).all() for weight in model.get_weights())
    np.testing.assert_allclose(*losses, rtol=0.03)
    probabilities = model.predict(TOKENS, verbose=0)
    np.testing.assert_allclose(probabilities.sum(-1), 1.0, atol=1e-6)
    assert model.evaluate(TOKENS, probabilities, verbose=0) >= 0.0


def test_a_saved_model_gives_probabilities(tmp_path):
    model = reader()
    model.export(tmp_path / "float32", verbose=False)
    for dtype, freeze in (("float16", True), ("bfloat16", False)):
        low = tmp_path / dtype
        tfamp.rewrite_saved_model(tmp_path / "float32", low, dtype=dtype, freeze=freeze)
        served = tf.saved_model.load(low).signatures["serving_default"]
        assert dtype in op_dtypes(served)["MatMul"]
        (found,) = served(tf.constant(TOKENS)).values()
        np.testing.assert_allclose(np.sum(found, -1), 1.0, atol=1e-6)
        np.testing.assert_allclose(found, model(TOKENS), rtol=0.05)
