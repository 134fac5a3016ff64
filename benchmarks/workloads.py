"""What the benchmarks train: the workloads of the tables, each at two sizes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import keras
import numpy as np
import tensorflow as tf

from benchmarks import models


@dataclass(frozen=True)
class Workload:
    """A model and a batch.

    Attributes:
        build: Returns a new model, under the policy of the moment.
        x: Inputs.
        y: Class numbers.
    """

    build: Callable[[], keras.Model]
    x: tf.Tensor
    y: tf.Tensor


def mlp(small: bool) -> Workload:
    width, batch = (256, 32) if small else (2048, 256)

    def build() -> keras.Model:
        layers = [keras.layers.Dense(width, activation="relu") for _ in range(6)]
        return keras.Sequential([keras.Input((width,)), *layers, keras.layers.Dense(10)])

    return Workload(build, _normal(batch, width), _classes(batch, 10))


def transformer(small: bool) -> Workload:
    size = {"tokens": 32, "vocabulary": 500} if small else {"tokens": 128, "vocabulary": 8000}
    shape = {"layers": 2, "width": 128, "heads": 4} if small else {}
    x, y = models.token_batch(batch=8 if small else 16, **size)
    return Workload(lambda: models.transformer(**shape, **size), x, y)


def resnet50(small: bool) -> Workload:
    pixels, batch = (32, 2) if small else (128, 16)

    def build() -> keras.Model:
        return keras.applications.ResNet50(
            weights=None,
            input_shape=(pixels, pixels, 3),
            classes=1000,
            classifier_activation=None,
        )

    return Workload(build, _normal(batch, pixels, pixels, 3), _classes(batch, 1000))


WORKLOADS = {"mlp": mlp, "transformer": transformer, "resnet50": resnet50}


def _normal(*shape: int) -> tf.Tensor:
    return tf.constant(np.random.default_rng(0).standard_normal(shape).astype("float32"))


def _classes(batch: int, number: int) -> tf.Tensor:
    return tf.constant(np.random.default_rng(1).integers(0, number, batch), tf.int32)
