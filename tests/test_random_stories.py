"""Random stories of a model's training: what happens to it leaves the state that float32 has."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tfamp
from helpers.cases import first_of

pytestmark = pytest.mark.filterwarnings("ignore::tfamp.TfampWarning", "ignore::UserWarning")
EVENTS = ("fit", "compile", "freeze", "checkpoint", "look", "share", "predict", "custom step")
WAYS = ("policy", "O1", "O2")
RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(64, 12)).astype("float32")
Y = RANDOM.normal(size=(64, 3)).astype("float32")


@dataclass
class Story:
    """A model with what happened to it.

    Attributes:
        way: "float32", or a way to low precision.
        dtype: The low dtype.
        folder: For checkpoints.
        steps: Updates that its optimizers took, one number for each.
    """

    way: str
    dtype: str
    folder: Path
    steps: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        keras.utils.set_random_seed(1)
        with tfamp.policy_scope(f"mixed_{self.dtype}" if self.way == "policy" else "float32"):
            inputs = keras.Input((12,))
            self.body = keras.layers.Dense(16, "tanh")
            x = keras.layers.LayerNormalization()(self.body(inputs))
            self.middle = keras.layers.Dense(16, "tanh")
            self.model = keras.Model(inputs, keras.layers.Dense(3)(self.middle(x)))
        self.start = self.model.get_weights()
        optimizer = self._optimizer()
        if self.way in ("O1", "O2"):
            prepared = tfamp.prepare(self.model, optimizer, level=self.way, dtype=self.dtype)
            self.model, optimizer = prepared
        self.model.compile(optimizer, "mse")

    def _optimizer(self):
        inner = keras.optimizers.SGD(0.02, momentum=0.5)
        return tfamp.LossScaleOptimizer(inner) if self.way == "policy" else inner

    def fit(self) -> None:
        self.model.fit(X, Y, batch_size=16, epochs=1, shuffle=False, verbose=0)

    def compile(self) -> None:
        self._note()
        self.model.compile(self._optimizer(), "mse")

    def freeze(self) -> None:
        """A frozen layer keeps its bits; then it trains again."""
        self.middle.trainable = False
        self.compile()
        before = [each.numpy() for each in self.middle.variables]
        self.fit()
        for value, wanted in zip(self.middle.variables, before, strict=True):
            np.testing.assert_array_equal(value.numpy(), wanted)
        self.middle.trainable = True
        self.compile()

    def checkpoint(self) -> None:
        """Saved weights come back bit for bit."""
        path = self.folder / f"{self.way}-{self.dtype}.weights.h5"
        self.fit()
        self.model.save_weights(path)
        before, steps = self.model.get_weights(), self._iterations()
        self.fit()
        self.model.load_weights(path)
        for value, wanted in zip(self.model.get_weights(), before, strict=True):
            np.testing.assert_array_equal(value, wanted)
        assert self._iterations() == steps

    def look(self) -> None:
        """A gradient that is only looked at changes nothing."""
        before = self.model.get_weights()
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(tf.cast(self.model(X, training=True), "float32") - Y))
            scaled = self.model.optimizer.scale_loss(loss)
        gradients = tape.gradient(scaled, self.model.trainable_variables)
        assert all(np.isfinite(each).all() for each in gradients)
        for value, wanted in zip(self.model.get_weights(), before, strict=True):
            np.testing.assert_array_equal(value, wanted)

    def share(self) -> None:
        """A second model with the first layer trains it too."""
        with tfamp.policy_scope(f"mixed_{self.dtype}" if self.way == "policy" else "float32"):
            inputs = keras.Input((12,))
            other = keras.Model(
                inputs, keras.layers.Dense(3, kernel_initializer="ones")(self.body(inputs))
            )
        other.compile(self._optimizer(), "mse")
        other.fit(X, Y, batch_size=32, epochs=1, shuffle=False, verbose=0)

    def predict(self) -> None:
        found = self.model.predict(X, verbose=0)
        assert found.dtype == np.float32
        assert np.isfinite(found).all()

    def custom_step(self) -> None:
        """A loop of one's own on the compiled model's optimizer."""
        model, optimizer = self.model, self.model.optimizer

        @tf.function
        def step(x, y):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(tf.cast(model(x, training=True), "float32") - y))
                scaled = optimizer.scale_loss(loss)
            gradients = tape.gradient(scaled, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

        for _ in range(2):
            step(X, Y)

    def _iterations(self) -> int:
        optimizer = self.model.optimizer
        return int(
            keras.ops.convert_to_numpy(getattr(optimizer, "inner_optimizer", optimizer).iterations)
        )

    def _note(self) -> None:
        self.steps.append(self._iterations())

    def tell(self, events) -> list[np.ndarray]:
        """Lets events happen; returns the weights, the steps of the last optimizer noted too."""
        for event in events:
            getattr(self, event.replace(" ", "_"))()
        self.fit()
        self._note()
        return self.model.get_weights()


def check(events, way, dtype, folder) -> Story:
    """Tells a story twice, in float32 and low; returns the low one."""
    exact, low = Story("float32", dtype, folder), Story(way, dtype, folder)
    for weight, wanted in zip(low.start, exact.start, strict=True):
        np.testing.assert_array_equal(weight, wanted)
    expected, found = exact.tell(events), low.tell(events)
    assert low.steps == exact.steps  # None was skipped.
    # How far the weights have gone, and how far from float32's.
    moved = np.sqrt(sum(np.sum((a - b) ** 2) for a, b in zip(expected, exact.start, strict=True)))
    off = np.sqrt(sum(np.sum((a - b) ** 2) for a, b in zip(found, expected, strict=True)))
    assert off < {"bfloat16": 0.1, "float16": 0.02}[dtype] * moved
    return low


def story_of(source) -> list[str]:
    return [source.choice(EVENTS) for _ in range(source.randint(1, 5))]


@pytest.mark.parametrize(
    ("way", "dtype"), first_of(itertools.product(WAYS, ["bfloat16", "float16"]))
)
def test_every_event_in_one_story(way, dtype, tmp_path):
    check(EVENTS, way, dtype, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_random_stories(seed, tmp_path):
    source = random.Random(seed)
    check(story_of(source), source.choice(WAYS), source.choice(["bfloat16", "float16"]), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("way", ["policy", "O2"])
def test_a_story_on_two_replicas(way, dtype, two_replicas, tmp_path):
    with two_replicas.scope():
        story = check(("fit", "freeze", "checkpoint", "predict"), way, dtype, tmp_path)
    for variable in story.model.variables:
        first, second = (
            each.numpy() for each in two_replicas.experimental_local_results(variable.value)
        )
        np.testing.assert_array_equal(first, second)


@pytest.mark.nightly
@settings(
    max_examples=200,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(
    source=st.randoms(use_true_random=False),
    way=st.sampled_from(WAYS),
    dtype=st.sampled_from(["bfloat16", "float16"]),
)
def test_random_stories_for_an_hour(source, way, dtype, tmp_path):
    check(story_of(source), way, dtype, tmp_path)
