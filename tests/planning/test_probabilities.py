"""Where log-probabilities are subtracted from one another, the last products are float32."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp
from helpers.cases import one_of_each
from helpers.tolerances import assert_close

DTYPES = ("bfloat16", "float16")
PLACEMENTS = ("lists", "min_cut")
RANDOM = np.random.default_rng(0)
X = tf.constant(RANDOM.normal(size=(32, 64)), tf.float32)
IDS = tf.constant(RANDOM.integers(0, 50, size=32), tf.int64)
HIDDEN = RANDOM.normal(size=(64, 64)) / 8
KERNEL = RANDOM.normal(size=(64, 50)) / 2
# Two models that differ by a thousandth.
ONE = tf.Variable(KERNEL, dtype=tf.float32)
OTHER = tf.Variable(KERNEL * (1 + 1e-3 * RANDOM.normal(size=KERNEL.shape)), dtype=tf.float32)
FIRST = tf.Variable(HIDDEN, dtype=tf.float32)


def kl(a, b):
    p, q = tf.nn.log_softmax(a), tf.nn.log_softmax(b)
    return tf.reduce_sum(tf.exp(p) * (p - q))


def kl_of_sums(a, b):
    p, q = tf.nn.log_softmax(a), tf.nn.log_softmax(b)
    return tf.reduce_sum(
        tf.reduce_sum(tf.exp(p) * p, -1) - tf.reduce_sum(tf.exp(p) * q, -1), name="kl"
    )


def by_hand(a, b):
    p, q = (x - tf.reduce_logsumexp(x, -1, keepdims=True) for x in (a, b))
    return tf.reduce_sum(tf.exp(p) * (p - q))


def jensen_shannon(a, b):
    p, q = tf.nn.softmax(a), tf.nn.softmax(b)
    middle = tf.math.log((p + q) / 2)
    return tf.reduce_sum(p * (tf.math.log(p) - middle) + q * (tf.math.log(q) - middle))


def keras_divergence(a, b):
    return keras.losses.KLDivergence(reduction="sum")(tf.nn.softmax(a), tf.nn.softmax(b))


def of_tokens(logits):
    return tf.gather(tf.nn.log_softmax(logits), IDS, batch_dims=1)


def of_texts(logits):
    return tf.reduce_sum(tf.reshape(of_tokens(logits), (8, 4)), -1)


def of_texts_by_cross_entropy(logits):
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(IDS, logits)
    return tf.reduce_sum(tf.reshape(-losses, (8, 4)), -1)


def dpo(texts):
    def loss(a, b):
        (won, lost), (ref_won, ref_lost) = (tf.split(texts(logits), 2) for logits in (a, b))
        # Without the loss of equal models, whose digits would hide the difference.
        return tf.reduce_sum(
            -tf.math.log_sigmoid((won - ref_won) - (lost - ref_lost)) - np.log(2.0)
        )

    return loss


def dpo_of_ratios(a, b):
    (won, lost), (ref_won, ref_lost) = (tf.split(of_texts(logits), 2) for logits in (a, b))
    return tf.reduce_sum(-tf.math.log_sigmoid((won - lost) - (ref_won - ref_lost)) - np.log(2.0))


def ppo(a, b):
    return tf.reduce_sum(tf.square(tf.exp(of_tokens(a) - of_tokens(b)) - 1))


def ppo_of_quotients(a, b):
    new, old = (tf.gather(tf.nn.softmax(logits), IDS, batch_dims=1) for logits in (a, b))
    return tf.reduce_sum(tf.square(new / old - 1))


def binary(a, b):
    p, q = tf.math.log_sigmoid(a), tf.math.log_sigmoid(b)
    return tf.reduce_sum(tf.math.squared_difference(p, q))


COMPARING = {
    "kl": kl,
    "kl of sums": kl_of_sums,
    "by hand": by_hand,
    "Keras": keras_divergence,
    "Jensen-Shannon": jensen_shannon,
    "DPO": dpo(of_texts),
    "DPO by cross-entropy": dpo(of_texts_by_cross_entropy),
    "DPO of ratios": dpo_of_ratios,
    "PPO": ppo,
    "PPO of quotients": ppo_of_quotients,
    "binary": binary,
}


@pytest.mark.parametrize(
    ("name", "placement", "dtype"), one_of_each(COMPARING, PLACEMENTS, DTYPES, quick=len(COMPARING))
)
def test_differences_of_log_probabilities_have_the_digits_of_float32(name, placement, dtype):
    def step(x):
        with tf.GradientTape() as tape:
            h = tf.stop_gradient(tf.tanh(x @ FIRST))
            loss = 1000.0 * COMPARING[name](h @ ONE, h @ OTHER)
        return loss, tape.gradient(loss, [ONE, OTHER])

    fast = tfamp.rewrite(tf.function(step), dtype=dtype, placement=placement, profile="builtin")
    products = [node for node in fast.plan(X).nodes if node.op == "MatMul"]
    assert {node.dtype for node in products} == {dtype, "float32"}
    kept = [node for node in products if node.dtype == "float32"]
    assert len(kept) == 2
    assert all("log-probabilities" in node.reason for node in kept)
    (loss, gradients), (wanted, exact) = fast(X), step(X)
    np.testing.assert_allclose(loss, wanted, rtol=0.05)
    for gradient, expected in zip(gradients, exact, strict=True):
        assert_close(gradient, expected, dtype, depth=8)


def logits(x, kernel=ONE):
    return tf.tanh(x @ FIRST) @ kernel


def cross_entropy(x):
    return tf.nn.sparse_softmax_cross_entropy_with_logits(IDS, logits(x))


def with_entropy_bonus(x):
    log_p = tf.nn.log_softmax(logits(x))
    entropy = -tf.reduce_sum(tf.exp(log_p) * log_p, -1)
    return cross_entropy_of(log_p) - 0.01 * entropy


def cross_entropy_of(log_p):
    return -tf.gather(log_p, IDS, batch_dims=1)


def actor_critic(x):
    h = tf.tanh(x @ FIRST)
    log_p, value = tf.nn.log_softmax(h @ ONE), (h @ OTHER)[:, 0]
    entropy = -tf.reduce_sum(tf.exp(log_p) * log_p, -1)
    gained = cross_entropy_of(log_p) * tf.stop_gradient(value)
    return gained + 0.5 * tf.square(value) - 0.01 * entropy


def renormalized(x):
    p = tf.nn.softmax(logits(x))
    return -tf.math.log(p / tf.reduce_sum(p, -1, keepdims=True))[:, 0]


def adversarial(x):
    real, fake = logits(x), logits(-x)
    return tf.math.softplus(-real) + tf.math.softplus(fake)


def adversarial_by_logs(x):
    real, fake = tf.sigmoid(logits(x)), tf.sigmoid(logits(-x))
    return -tf.math.log(real) - tf.math.log(1.0 - fake)


def variational(x):
    h = tf.tanh(x @ FIRST)
    mean, log_variance = h @ ONE, h @ OTHER
    divergence = -0.5 * (1 + log_variance - tf.square(mean) - tf.exp(log_variance))
    decoded = (mean + tf.exp(log_variance / 2)) @ tf.transpose(ONE)
    half = 0.5 * tf.ones_like(decoded)
    return tf.reduce_sum(tf.nn.sigmoid_cross_entropy_with_logits(half, decoded), -1) + (
        tf.reduce_sum(divergence, -1)
    )


def several_tasks(x):
    h = tf.tanh(x @ FIRST)
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits
    return losses(IDS, h @ ONE) + 0.3 * losses(IDS, h @ OTHER)


def distilled(x):
    p = tf.stop_gradient(tf.nn.softmax(logits(x, OTHER)))
    return tf.nn.softmax_cross_entropy_with_logits(p, logits(x))


ONE_HOT = np.eye(50, dtype="float32")[IDS.numpy()]
SMOOTH = keras.losses.CategoricalCrossentropy(label_smoothing=0.1, from_logits=True)
FOCAL = keras.losses.CategoricalFocalCrossentropy()
USUAL = {
    "cross-entropy": cross_entropy,
    "of probabilities": lambda x: keras.losses.categorical_crossentropy(
        ONE_HOT, tf.nn.softmax(logits(x))
    ),
    "label smoothing": lambda x: SMOOTH(ONE_HOT, logits(x)),
    "focal": lambda x: FOCAL(ONE_HOT, tf.nn.softmax(logits(x))),
    "binary": lambda x: tf.nn.sigmoid_cross_entropy_with_logits(ONE_HOT, logits(x)),
    "entropy bonus": with_entropy_bonus,
    "actor and critic": actor_critic,
    "renormalized": renormalized,
    "adversarial": adversarial,
    "adversarial by logs": adversarial_by_logs,
    "variational": variational,
    "several tasks": several_tasks,
    "distilled": distilled,
}


@pytest.mark.parametrize(("name", "dtype"), one_of_each(USUAL, DTYPES, quick=len(USUAL)))
def test_products_of_usual_losses_stay_low(name, dtype):
    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(USUAL[name](x))
        return loss, tape.gradient(loss, [FIRST, ONE])

    plan = tfamp.rewrite(tf.function(step), dtype=dtype, placement="lists", profile="builtin").plan(
        X
    )
    assert {node.dtype for node in plan.nodes if node.op == "MatMul"} == {dtype}
