"""Eight threads train eight models with policies and autocast states of their own."""

import contextlib
import threading

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp

# Policy of the layers, dtype of autocast or None.
KINDS = [
    ("float32", None),
    ("mixed_float16", None),
    ("mixed_bfloat16", None),
    ("float32", "float16"),
    ("float32", "bfloat16"),
    ("mixed_float16", "bfloat16"),
    ("mixed_bfloat16", "float16"),
    ("bfloat16", None),
]
STEPS = 6


class Training:
    """One model with its own optimizer; made in one thread, since Keras's seeds are global."""

    def __init__(self, number):
        self.policy, self.autocast = KINDS[number]
        keras.utils.set_random_seed(number)
        with tfamp.policy_scope(self.policy):
            layers = [
                keras.layers.Dense(16, activation="relu", kernel_initializer="he_normal"),
                keras.layers.BatchNormalization(),
                keras.layers.Dense(1),
            ]
            self.model = keras.Sequential([keras.Input((6,)), *layers])
        self.optimizer = tfamp.LossScaleOptimizer(
            keras.optimizers.SGD(0.05, momentum=0.9), initial_scale=2.0**10, dynamic_growth_steps=2
        )
        self.optimizer.build(self.model.trainable_variables)
        self.x = np.random.default_rng(number).standard_normal((8, 6)).astype("float32")
        self.seen = []

    def step(self, x):
        inside = tfamp.autocast(self.autocast) if self.autocast else contextlib.nullcontext()
        with tf.GradientTape() as tape:
            with inside:
                product = tf.matmul(x, tf.transpose(x))
                y = tf.cast(self.model(x, training=True), tf.float32)
            self.seen.append(product.dtype.name)
            loss = self.optimizer.get_scaled_loss(tf.reduce_mean(tf.square(y - 1.0)))
        variables = self.model.trainable_variables
        gradients = tape.gradient(loss, [v.value for v in variables])
        gradients = self.optimizer.get_unscaled_gradients(gradients)
        self.optimizer.apply_gradients(zip(gradients, variables, strict=True))

    def train(self, wait=lambda: None):
        # Half of the steps eager, half traced, so that traces of all threads overlap too.
        traced = tf.function(self.step)
        with tfamp.policy_scope(self.policy):
            for number in range(STEPS):
                wait()
                x = self.x * (np.inf if number == 3 else 1.0)
                (traced if number % 2 else self.step)(tf.constant(x, tf.float32))
                assert tfamp.global_policy().name == self.policy

    def results(self):
        variables = [*self.model.variables, *self.optimizer.variables]
        return [np.asarray(v.numpy(), "float64") for v in variables]


@pytest.mark.slow
def test_eight_threads_train_as_one_does():
    alone = [Training(number) for number in range(8)]
    for each in alone:
        each.train()
    together = [Training(number) for number in range(8)]
    barrier, errors = threading.Barrier(8, timeout=120), []

    def run(training):
        try:
            training.train(barrier.wait)
        except BaseException as error:
            barrier.abort()
            errors.append(error)
            raise

    threads = [threading.Thread(target=run, args=(each,)) for each in together]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    for (policy, autocast), first, second in zip(KINDS, alone, together, strict=True):
        assert set(second.seen) == {autocast or "float32"}
        assert second.model.layers[0].compute_dtype == policy.removeprefix("mixed_")
        assert int(second.optimizer.skipped_steps) == 1
        for expected, actual in zip(first.results(), second.results(), strict=True):
            np.testing.assert_array_equal(actual, expected, f"{policy} {autocast}")
    assert tfamp.global_policy().name == "float32"
    assert tf.matmul(tf.ones((2, 2)), tf.ones((2, 2))).dtype == tf.float32
