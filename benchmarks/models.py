"""The models the benchmarks train, and their training steps."""

from __future__ import annotations

from collections.abc import Callable

import keras
import numpy as np
import tensorflow as tf


def transformer(
    layers: int = 4, width: int = 512, heads: int = 8, tokens: int = 128, vocabulary: int = 8000
) -> keras.Model:
    """A language model: pre-norm blocks of causal attention and a feed-forward part."""
    inputs = keras.Input((tokens,), dtype="int32")
    x = keras.layers.Embedding(vocabulary, width)(inputs)
    for _ in range(layers):
        attention = keras.layers.MultiHeadAttention(heads, width // heads)
        normed = keras.layers.LayerNormalization()(x)
        x = x + attention(normed, normed, use_causal_mask=True)
        hidden = keras.layers.Dense(4 * width, activation="relu")(
            keras.layers.LayerNormalization()(x)
        )
        x = x + keras.layers.Dense(width)(hidden)
    outputs = keras.layers.Dense(vocabulary)(keras.layers.LayerNormalization()(x))
    return keras.Model(inputs, outputs)


def token_batch(
    batch: int = 16, tokens: int = 128, vocabulary: int = 8000
) -> tuple[tf.Tensor, tf.Tensor]:
    """Random tokens and the tokens after them."""
    drawn = np.random.default_rng(0).integers(0, vocabulary, (batch, tokens + 1))
    return tf.constant(drawn[:, :-1], tf.int32), tf.constant(drawn[:, 1:], tf.int32)


def train_step(
    model: keras.Model, optimizer: keras.optimizers.Optimizer
) -> Callable[[tf.Tensor, tf.Tensor], tf.Tensor]:
    """One traced step: forward, backward, update; returns the loss."""
    loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    variables = [v.value for v in model.trainable_variables]

    @tf.function
    def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = loss_fn(y, model(x, training=True))
        gradients = tape.gradient(loss, variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    return step
