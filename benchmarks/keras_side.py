"""Training steps of the systems on TensorFlow; each belongs in a process of its own.

Policies and TensorFlow's graph rewrite are switched on for the whole process.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import keras
import tensorflow as tf

import tfamp
import tfamp.rewriting.pipeline
from benchmarks import models
from benchmarks.data import Batch
from benchmarks.step_graph import CastTotals, count_casts, trace
from benchmarks.systems import BASE, CONTROL, SYSTEMS, grappler_options
from benchmarks.workloads import Sizes, Workload
from tfamp.machine.hardware import find_profile

Step = Callable[[tf.Tensor, tf.Tensor], tf.Tensor]
_MOMENTUM = 0.9


class Trainer:
    """Trains models with one system.

    Args:
        system: Its name.
        dtype: The low dtype.
    """

    def __init__(self, system: str, dtype: str) -> None:
        self._system, self._dtype = system, dtype
        self._step: Step | None = None
        self._about = SYSTEMS.get(system, CONTROL)
        self.rewrite_seconds = 0.0
        tf.ones(1).numpy()  # Starts TensorFlow, whose memory is not a model's.
        if system.startswith("keras_policy"):
            keras.config.set_dtype_policy(f"mixed_{dtype}")
        elif system == "tensorflow_amp":
            tf.config.optimizer.set_experimental_options(grappler_options(system, dtype))
        elif system.startswith("tfamp_policy"):
            outputs = "sums" if system == "tfamp_policy_sums" else True
            tfamp.set_global_policy(tfamp.Policy(f"mixed_{dtype}", float32_outputs=outputs))
        elif self._about.placement:
            find_profile()  # Measured once per machine, not once per function.

    def build(self, workload: Workload, size: Sizes) -> None:
        """Makes the model and its step; nothing is traced yet."""
        keras.utils.set_random_seed(0)
        optimizer = keras.optimizers.SGD(workload.learning_rate, momentum=_MOMENTUM)
        model = models.MODELS[workload.name](size)
        if self._system == CONTROL.name:
            for each in model.trainable_variables:
                each.assign(tf.cast(tf.cast(each.value, self._dtype), each.dtype))
        if self._system == "auto":
            prepared = tfamp.prepare(model, optimizer, level="auto", dtype=self._dtype)
            self._step = prepared.settings.rewrite(models.train_step(*prepared))
            return
        self.use(model, self.with_loss_scale(optimizer))

    def use(self, model: keras.Model, optimizer: Any) -> None:
        """Makes the step of a model that was made after this object."""
        step = models.train_step(model, optimizer, xla=self._about.compiled)
        if self._about.placement:
            step = tfamp.rewrite(step, dtype=self._dtype, placement=self._about.placement)
        self._step = step

    def first_step(self, batch: Any) -> float:
        """Takes the first step, which traces, and tunes; sets `rewrite_seconds`."""
        with _timed_rewrite() as seconds:
            if self._system == "tune":
                self._step = tfamp.tune(self._step, *batch, dtype=self._dtype).best
            loss = self.step(batch)
        self.rewrite_seconds = sum(seconds)
        return loss

    def put(self, batch: Batch) -> Any:
        """Brings a batch to the device."""
        on_device = tuple(map(tf.constant, batch))
        tf.test.experimental.sync_devices()
        return on_device

    def step(self, batch: Any) -> float:
        """Takes a step and waits until it is done; returns the loss."""
        loss = self._step(*batch)
        tf.test.experimental.sync_devices()
        return float(loss)

    def concrete(self, batch: Any) -> Any:
        """The concrete function that a step on such a batch runs."""
        step = self._step
        get = step.concrete if hasattr(step, "concrete") else step.get_concrete_function
        return get(*batch)

    def casts(self, batch: Any) -> CastTotals | None:
        """Counts the Casts between float dtypes that run in a step; None for what XLA makes."""
        if self._about.compiled:
            return None
        concrete = self.concrete(batch)
        if any(op.type == "PartitionedCall" for op in concrete.graph.get_operations()):
            return None  # XLA compiles parts of the step.
        options = grappler_options(self._system, self._dtype)
        return count_casts(trace(concrete, batch, rewriter_options=options).nodes)

    def with_loss_scale(self, optimizer: Any) -> Any:
        """The optimizer in what the system scales losses with, where its dtype needs that."""
        if self._system in (BASE, "float32_xla", CONTROL.name):
            return optimizer
        if self._system in ("keras_policy", "keras_policy_xla", "tensorflow_amp"):
            if self._dtype == "float16":
                return keras.optimizers.LossScaleOptimizer(optimizer)
            return optimizer
        # bfloat16 needs no loss scale; the update in one pass is faster in any dtype.
        scale = None if self._dtype == "float16" else 1.0  # None: dynamic.
        return tfamp.LossScaleOptimizer(optimizer, loss_scale=scale)


@contextmanager
def _timed_rewrite() -> Iterator[list[float]]:
    """Collects how long each rewrite of a graph takes, apart from the tracing around it."""
    seconds: list[float] = []
    rewrite = tfamp.rewriting.pipeline.graph_in_low_precision

    def timed(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        try:
            return rewrite(*args, **kwargs)
        finally:
            seconds.append(time.perf_counter() - start)

    tfamp.rewriting.pipeline.graph_in_low_precision = timed
    try:
        yield seconds
    finally:
        tfamp.rewriting.pipeline.graph_in_low_precision = rewrite


def device_bytes() -> dict[str, int] | None:
    """The "current" and "peak" bytes of the first GPU's allocator; None without a GPU."""
    if not tf.config.get_visible_devices("GPU"):
        return None
    return tf.config.experimental.get_memory_info("GPU:0")


def reset_device_peak() -> None:
    if tf.config.get_visible_devices("GPU"):
        tf.config.experimental.reset_memory_stats("GPU:0")
