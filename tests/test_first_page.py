"""Values of other systems that the first page of the site names, where no other test shows them.

When another system mends a fault a test here fails, and the page has to change.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp

ROWS = 16384
X = np.random.default_rng(0).uniform(0.5, 1.5, (ROWS, 8)).astype("float32")


def bias_gradient(policy=None, wrap=tf.function):
    """The gradient of a bias, each element a sum over all rows."""
    keras.utils.set_random_seed(1)
    layer, output = keras.layers.Dense(16, dtype=policy), keras.layers.Dense(1, dtype="float32")
    layer.build((None, 8))
    output.build((None, 16))

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(output(layer(x)))
        return tape.gradient(loss, layer.bias.value)

    return np.float64(wrap(step)(tf.constant(X)))


@pytest.fixture
def tensorflows_pass():
    name = "auto_mixed_precision_onednn_bfloat16"
    tf.config.optimizer.set_experimental_options({name: True})
    yield
    tf.config.optimizer.set_experimental_options({name: False})


def error_of(found):
    exact = bias_gradient()
    return np.linalg.norm(found - exact) / np.linalg.norm(exact)


@pytest.mark.skipif(tf.config.list_physical_devices("GPU") != [], reason="it is about CPUs")
def test_the_gradient_of_a_bias_is_exact_but_under_kerass_policy():
    rewritten = bias_gradient(wrap=lambda step: tfamp.rewrite(step, dtype="bfloat16"))
    with tfamp.policy_scope("mixed_bfloat16"):
        under_policy = bias_gradient()
    assert max(error_of(rewritten), error_of(under_policy)) < 0.005
    assert error_of(bias_gradient("mixed_bfloat16")) > 0.9


@pytest.mark.skipif(tf.config.list_physical_devices("GPU") != [], reason="it is about CPUs")
def test_the_gradient_of_a_bias_is_wrong_in_tensorflows_pass(tensorflows_pass):
    found = bias_gradient()
    tf.config.optimizer.set_experimental_options({"auto_mixed_precision_onednn_bfloat16": False})
    assert error_of(found) > 0.9


def test_a_mask_of_a_billion_is_finite_in_a_rewrite_and_nan_in_a_layer_under_kerass_policy():
    random = np.random.default_rng(1)
    queries = tf.constant(random.standard_normal((4, 8, 16)), tf.float32)
    weight = tf.Variable(random.standard_normal((16, 16)), dtype=tf.float32)
    mask = tf.constant(random.integers(0, 2, (4, 1, 8)), tf.float32)

    def attention(x, mask):
        hidden = x @ tf.cast(weight, x.dtype)
        scores = hidden @ tf.transpose(hidden, [0, 2, 1])
        scores += (1 - tf.cast(mask, x.dtype)) * tf.cast(-1e9, x.dtype)
        return tf.nn.softmax(scores) @ hidden

    class Attention(keras.layers.Layer):
        def call(self, x, mask):
            return attention(x, mask)

    exact = attention(queries, mask)
    found = tfamp.rewrite(attention, dtype="float16")(queries, mask)
    np.testing.assert_allclose(found, exact, atol=0.05)
    # -1e9 is -inf in float16, and that times 0 is NaN.
    assert np.isnan(np.float32(Attention(dtype="mixed_float16")(queries, mask))).all()
