"""The forward pass of a training step gives the values of a forward pass alone, as PPO needs."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp
from helpers.cases import one_of_each

# Unit roundoff.
ROUNDING = {"bfloat16": 2.0**-8, "float16": 2.0**-11}
TOKENS, WORDS, WIDTH = 16, 50, 32


def _normal(deviation):
    return keras.initializers.RandomNormal(stddev=deviation)


def _transformer() -> keras.Model:
    words = keras.Input((TOKENS,), dtype="int32")
    x = keras.layers.Embedding(WORDS, WIDTH, embeddings_initializer=_normal(1.0))(words)
    for _ in range(2):
        attended = keras.layers.MultiHeadAttention(2, WIDTH // 2)(x, x)
        x = keras.layers.LayerNormalization()(keras.layers.Add()([x, attended]))
        hidden = keras.layers.Dense(4 * WIDTH, activation="gelu")(x)
        x = keras.layers.Add()([x, keras.layers.Dense(WIDTH)(hidden)])
    x = keras.layers.LayerNormalization()(x)
    return keras.Model(words, keras.layers.Dense(WORDS, kernel_initializer=_normal(0.3))(x))


def _mlp() -> keras.Model:
    words = keras.Input((TOKENS,), dtype="int32")
    x = keras.layers.Flatten()(keras.layers.Embedding(WORDS, WIDTH, _normal(1.0))(words))
    for _ in range(3):
        x = keras.layers.Dense(64, activation="tanh", kernel_initializer=_normal(0.1))(x)
    return keras.Model(words, keras.layers.Dense(WORDS, kernel_initializer=_normal(0.3))(x))


MODELS = {"transformer": _transformer, "mlp": _mlp}


@pytest.mark.parametrize(
    ("name", "dtype", "level"),
    one_of_each(MODELS, ROUNDING, ("O1", "O2"), quick=2),
)
def test_a_step_of_unchanged_weights_has_the_log_probabilities_of_predict(name, dtype, level):
    def difference(old, logits):
        return tf.reduce_max(tf.abs(tf.nn.log_softmax(logits) - old), axis=-1)

    keras.utils.set_random_seed(1)
    # "lists" converts what a minimum cut leaves on a CPU without the dtype.
    config = tfamp.PrecisionConfig(
        level=level, dtype=dtype, placement="lists" if level == "O1" else None
    )
    # Without updates, to see the loss of the same weights.
    model, optimizer = tfamp.prepare(MODELS[name](), keras.optimizers.SGD(0.0), config=config)
    model.compile(optimizer, difference)
    x = np.random.default_rng(0).integers(0, WORDS, (8, TOKENS)).astype("int32")

    logits = model.predict(x, verbose=0)
    loss = model.train_on_batch(x, tf.nn.log_softmax(logits).numpy())

    assert np.abs(logits).max() > 1
    # In the step the last product is compared with the data, and neither it nor what it takes is
    # rounded: one rounding of a logit, and those of the terms of its sum.
    assert loss <= 1.25 * ROUNDING[dtype] * np.abs(logits).max()


@pytest.mark.parametrize("dtype", ROUNDING)
def test_the_forward_part_has_the_plan_of_the_forward_pass(dtype):
    keras.utils.set_random_seed(1)
    model = _transformer()
    optimizer = keras.optimizers.SGD(0.1)
    optimizer.build(model.trainable_variables)

    def step(x, y):
        with tf.GradientTape() as tape:
            logits = model(x, training=True)
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits))
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        return loss

    x = tf.zeros((4, TOKENS), tf.int32)
    forward = tfamp.rewrite(lambda x: model(x), dtype=dtype, placement="lists")
    alone = [n for n in forward.plan(x).nodes if n.name.startswith("functional")]
    plan = tfamp.rewrite(step, dtype=dtype, placement="lists").plan(x, x)
    of_step = {node.name: node.dtype for node in plan.nodes}

    assert sum(node.dtype == dtype for node in alone) > 10
    assert len(alone) > 50
    assert {n.name: of_step[n.name] for n in alone} == {n.name: n.dtype for n in alone}
