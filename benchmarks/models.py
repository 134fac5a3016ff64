"""The Keras models of the benchmarks, made under the policy of the moment, and a training step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf
from keras import layers

from benchmarks import data
from benchmarks.workloads import Sizes

IMAGE_CLASSES = 1000


def mlp(size: Sizes) -> keras.Model:
    """Dense layers of one width."""
    hidden = [layers.Dense(size["width"], activation="relu") for _ in range(size["layers"])]
    output = layers.Dense(data.CLASSES_OF_CHARACTERS)
    return keras.Sequential([keras.Input((size["width"],)), *hidden, output])


def transformer(size: Sizes) -> keras.Model:
    """A language model: pre-norm blocks of causal attention and a feed-forward part."""
    width, heads = size["width"], size["heads"]
    inputs = keras.Input((size["tokens"],), dtype="int32")
    x = layers.Embedding(size["vocabulary"], width)(inputs)
    for _ in range(size["layers"]):
        attention = layers.MultiHeadAttention(heads, width // heads)
        normed = layers.LayerNormalization()(x)
        x = x + attention(normed, normed, use_causal_mask=True)
        hidden = layers.Dense(4 * width, activation="relu")(layers.LayerNormalization()(x))
        x = x + layers.Dense(width)(hidden)
    outputs = layers.Dense(size["vocabulary"])(layers.LayerNormalization()(x))
    return keras.Model(inputs, outputs)


def _application(make: Callable[..., keras.Model]) -> Callable[[Sizes], keras.Model]:
    """A model of keras.applications, with all its classes."""
    return lambda size: make(
        weights=None,
        input_shape=(size["pixels"], size["pixels"], 3),
        classes=IMAGE_CLASSES,
        classifier_activation=None,
    )


def convnext(size: Sizes) -> keras.Model:
    """Three stages of ConvNeXt's blocks, behind a convolution of patches."""
    x = inputs = keras.Input((size["pixels"], size["pixels"], 3))
    for stage in range(3):
        channels, patch = size["channels"] << stage, 4 if stage == 0 else 2
        x = layers.Conv2D(channels, patch, patch)(x)
        for _ in range(size["blocks"]):
            normed = layers.LayerNormalization()(layers.DepthwiseConv2D(7, padding="same")(x))
            x = x + layers.Dense(channels)(layers.Dense(4 * channels, activation="gelu")(normed))
    x = layers.LayerNormalization()(layers.GlobalAveragePooling2D()(x))
    return keras.Model(inputs, layers.Dense(data.DIGITS)(x))


def resnet(size: Sizes) -> keras.Model:
    """A ResNet for small images, as He et al. (2016) made it for CIFAR: 6 layers a block, and 2."""
    x = inputs = keras.Input((size["pixels"], size["pixels"], 3))
    x = layers.ReLU()(_normed_convolution(x, size["channels"], 3, 1))
    for stage in range(3):
        channels = size["channels"] << stage
        for block in range(size["blocks"]):
            stride = 2 if stage and not block else 1
            y = layers.ReLU()(_normed_convolution(x, channels, 3, stride))
            y = _normed_convolution(y, channels, 3, 1)
            x = x if stride == 1 else _normed_convolution(x, channels, 1, stride)
            x = layers.ReLU()(x + y)
    outputs = layers.Dense(data.DIGITS)(layers.GlobalAveragePooling2D()(x))
    return keras.Model(inputs, outputs)


def _normed_convolution(x: Any, channels: int, width: int, stride: int) -> Any:
    x = layers.Conv2D(channels, width, stride, padding="same", use_bias=False)(x)
    # Averages over 10 steps rather than Keras's 100: runs of some hundred steps end with these.
    return layers.BatchNormalization(momentum=0.9)(x)


def unet(size: Sizes) -> keras.Model:
    """Convolutions with BatchNormalization down and, transposed, up again; skips between."""
    inputs = keras.Input((size["pixels"], size["pixels"], 1))
    x, skips = inputs, []
    for level in range(size["levels"]):
        if level:
            x = layers.MaxPooling2D()(x)
        x = _two_convolutions(x, size["channels"] << level)
        skips.append(x)
    for level in reversed(range(size["levels"] - 1)):
        x = layers.Conv2DTranspose(size["channels"] << level, 2, 2, padding="same")(x)
        x = layers.Concatenate()([x, skips[level]])
        x = _two_convolutions(x, size["channels"] << level)
    return keras.Model(inputs, layers.Conv2D(data.INK_LEVELS, 1)(x))


def _two_convolutions(x: Any, channels: int) -> Any:
    for _ in range(2):
        x = layers.Conv2D(channels, 3, padding="same", use_bias=False)(x)
        x = layers.ReLU()(layers.BatchNormalization()(x))
    return x


def lstm(size: Sizes) -> keras.Model:
    """A language model of characters."""
    inputs = keras.Input((size["tokens"],), dtype="int32")
    x = layers.Embedding(data.CHARACTERS, size["width"])(inputs)
    for _ in range(size["layers"]):
        x = layers.LSTM(size["width"], return_sequences=True)(x)
    return keras.Model(inputs, layers.Dense(data.CHARACTERS)(x))


def bert(size: Sizes) -> keras.Model:
    """KerasHub's BERT, which predicts the word at every position."""
    import keras_hub

    backbone = keras_hub.models.BertBackbone(
        vocabulary_size=size["vocabulary"],
        num_layers=size["layers"],
        num_heads=size["heads"],
        hidden_dim=size["width"],
        intermediate_dim=4 * size["width"],
        max_sequence_length=size["tokens"],
        dropout=0.0,
    )
    backbone.get_layer("pooled_dense").trainable = False  # No loss depends on it.
    tokens = keras.Input((size["tokens"],), dtype="int32")
    ones = keras.ops.ones_like(tokens)
    inputs = {"token_ids": tokens, "padding_mask": ones, "segment_ids": ones - 1}
    found = backbone(inputs)["sequence_output"]
    return keras.Model(tokens, layers.Dense(size["vocabulary"])(found))


def vit(size: Sizes) -> keras.Model:
    """KerasHub's Vision Transformer, with a classifier on its first token."""
    import keras_hub

    backbone = keras_hub.models.ViTBackbone(
        image_shape=(size["pixels"], size["pixels"], 3),
        patch_size=size["patch"],
        num_layers=size["layers"],
        num_heads=size["heads"],
        hidden_dim=size["width"],
        mlp_dim=4 * size["width"],
    )
    images = keras.Input((size["pixels"], size["pixels"], 3))
    return keras.Model(images, layers.Dense(IMAGE_CLASSES)(backbone(images)[:, 0]))


def conv1d(size: Sizes) -> keras.Model:
    """A language model of characters: causal convolutions in residual blocks."""
    inputs = keras.Input((size["tokens"],), dtype="int32")
    x = layers.Embedding(data.CHARACTERS, size["channels"])(inputs)
    for _ in range(size["layers"]):
        hidden = layers.Conv1D(size["channels"], 5, padding="causal")(x)
        x = x + layers.ReLU()(layers.BatchNormalization()(hidden))
    return keras.Model(inputs, layers.Dense(data.CHARACTERS)(x))


MODELS = {
    "mlp": mlp,
    "transformer": transformer,
    "resnet50": _application(keras.applications.ResNet50),
    "convnext": convnext,
    "unet": unet,
    "lstm": lstm,
    "bert": bert,
    "vit": vit,
    "efficientnet_b0": _application(keras.applications.EfficientNetB0),
    "conv1d": conv1d,
}


def train_step(
    model: keras.Model, optimizer: keras.optimizers.Optimizer, *, xla: bool = False
) -> Callable[[tf.Tensor, tf.Tensor], tf.Tensor]:
    """One traced step: forward, backward, update; returns the loss.

    The loss is scaled where the optimizer does that, else `scale_loss` returns it as it is.
    """
    loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    variables = [v.value for v in model.trainable_variables]

    @tf.function(jit_compile=xla or None)
    def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = loss_fn(y, model(x, training=True))
            scaled = optimizer.scale_loss(loss)
        gradients = tape.gradient(scaled, variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    return step
