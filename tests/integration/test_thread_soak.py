"""Threads take scopes, optimizers, policies and autocasts in random order: nothing is left behind.

`python tests/integration/test_thread_soak.py --minutes 60` does so for an hour.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import random
import sys
import threading
import time
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

import tfamp
from tfamp.interop import patching

THREADS = 4
POLICIES = ("mixed_float16", "mixed_bfloat16", "float32")
X = np.random.default_rng(0).normal(size=(8, 6)).astype("float32")


class Worker:
    """The actions of one thread; it leaves scopes in any order and frees optimizers.

    Attributes:
        errors: The errors of its actions, and their wrong values.
        done: How many actions it has done.
    """

    def __init__(self, seed: int, end: float, process: threading.Lock) -> None:
        self.random, self.end, self.process = random.Random(seed), end, process
        self.errors: list[str] = []
        self.done = 0
        self._scopes: list[contextlib.AbstractContextManager] = []
        self._optimizers: list[keras.optimizers.Optimizer] = []
        self._layer = keras.layers.Dense(3, dtype="float32")
        self._layer.build((None, 6))
        self._step = tf.function(lambda x: tf.reduce_sum(self._layer(x) ** 2))

    def run(self) -> None:
        actions = [
            self.enter_policy, self.enter_autocast, self.leave, self.make_optimizer, self.free,
            self.call, self.train, self.call_function, self.set_policy, self.patch_here,
        ]  # fmt: skip
        while time.monotonic() < self.end:
            action = self.random.choice(actions)
            try:
                action()
                self.done += 1
            except Exception as error:  # noqa: BLE001 - every error is a fault
                self.errors.append(f"{action.__name__}: {type(error).__name__}: {error}"[:500])
                if len(self.errors) > 20:
                    break
        while self._scopes:
            self.leave()
        self._optimizers.clear()

    def enter_policy(self) -> None:
        self._enter(tfamp.policy_scope(self.random.choice(POLICIES)))

    def enter_autocast(self) -> None:
        self._enter(tfamp.autocast("bfloat16", enabled=self.random.random() < 0.7))

    def _enter(self, scope) -> None:
        if len(self._scopes) < 4:
            scope.__enter__()
            self._scopes.append(scope)

    def leave(self) -> None:
        if self._scopes:
            place = self.random.randrange(len(self._scopes))
            self._scopes.pop(place).__exit__(None, None, None)

    def make_optimizer(self) -> None:
        self._optimizers.append(tfamp.LossScaleOptimizer(keras.optimizers.SGD(0.01)))

    def free(self) -> None:
        if self._optimizers:
            self._optimizers.pop(self.random.randrange(len(self._optimizers)))
        if self.random.random() < 0.05:
            gc.collect()

    def call(self) -> None:
        layer = keras.layers.Dense(3)
        self._check(layer(X), X @ layer.kernel.numpy())

    def call_function(self) -> None:
        kernel = self._layer.kernel.numpy()
        self._check(self._step(X), np.sum((X @ kernel) ** 2))

    def _check(self, found, right) -> None:
        found = tf.cast(found, "float32").numpy()
        if not np.allclose(found, right, rtol=0.05, atol=0.05):
            self.errors.append(f"values {np.abs(found - right).max()} off")

    def train(self) -> None:
        variable = keras.Variable(np.ones(3, "float32"))
        optimizer = tfamp.LossScaleOptimizer(keras.optimizers.SGD(0.5))
        optimizer.build([variable])
        with tf.GradientTape() as tape:
            loss = optimizer.get_scaled_loss(tf.reduce_sum(variable.value * 2.0))
        gradients = tape.gradient(loss, [variable.value])
        optimizer.apply_gradients(zip(gradients, [variable], strict=True))
        self._check(variable.value, np.zeros(3))

    def set_policy(self) -> None:
        # The process has one policy: one thread at a time sets it, and takes it back.
        if not self.process.acquire(blocking=False):
            return
        try:
            tfamp.set_global_policy(self.random.choice(POLICIES))
            self.call()
            tfamp.set_global_policy("float32")
        finally:
            self.process.release()

    def patch_here(self) -> None:
        seen = []

        def note(original, *args, **kwargs):
            seen.append(None)
            return original(*args, **kwargs)

        with patching.patched_here(layer_call=note):
            self._layer(X)
        if not seen:
            self.errors.append("a patch of this thread was not called")


def wrapped() -> list[str]:
    """The symbols that a wrapper of tfamp is around, once nothing is in force any more."""
    gc.collect()
    found = [(symbol, getattr(*patching.locate(symbol))) for _, symbol in patching.SYMBOLS]
    return [symbol for symbol, value in found if hasattr(value, patching._MARK)]


def soak(seconds: float, seed: int) -> list[Worker]:
    """Runs the threads for some time, and returns what they did."""
    end, process = time.monotonic() + seconds, threading.Lock()
    workers = [Worker(seed + place, end, process) for place in range(THREADS)]
    threads = [threading.Thread(target=worker.run) for worker in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(seconds + 300)
    if any(thread.is_alive() for thread in threads):
        workers[0].errors.append("a thread has not ended: a deadlock")
    return workers


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::tfamp.TfampWarning", "ignore::UserWarning")
def test_a_minute_of_threads_leaves_nothing_behind():
    tfamp.set_global_policy("float32")  # It stays in force.
    before = wrapped()
    workers = soak(60, seed=0)
    assert [worker.errors for worker in workers] == [[]] * THREADS
    assert min(worker.done for worker in workers) > 20
    assert wrapped() == before


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=60)
    arguments = parser.parse_args()
    tfamp.set_global_policy("float32")  # It stays in force.
    faults, before = [], wrapped()
    for minute in range(max(1, round(arguments.minutes))):
        seconds = 60 * min(1.0, arguments.minutes)
        workers = soak(seconds, seed=100 * minute)
        errors = [error for worker in workers for error in worker.errors]
        faults += errors
        keras.backend.clear_session()
        done = sum(worker.done for worker in workers)
        del workers
        left = sorted(set(wrapped()) - set(before))
        memory = resident_bytes() / 2**20
        print(f"minute {minute}: {done} actions, {len(errors)} errors, wrapped {left}", end=", ")
        print(f"{memory:.0f} MiB", *errors[:3], sep="\n  ", flush=True)
    sys.exit(1 if faults or wrapped() != before else 0)
