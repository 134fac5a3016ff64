"""The systems the benchmarks compare: each makes one training step of a workload.

A system belongs in a process of its own: TensorFlow's graph rewrite is switched on per process.
"""

from __future__ import annotations

from collections.abc import Callable

import keras
import tensorflow as tf

import tfamp
from benchmarks import models
from benchmarks.workloads import Workload

Step = Callable[[tf.Tensor, tf.Tensor], tf.Tensor]
GRAPPLER = {
    "float16": "auto_mixed_precision",
    "bfloat16": "auto_mixed_precision_onednn_bfloat16",
}


def float32(workload: Workload, dtype: str) -> Step:
    return _step(workload)


def keras_policy(workload: Workload, dtype: str) -> Step:
    keras.config.set_dtype_policy(f"mixed_{dtype}")
    return _step(workload)


def tensorflow_amp(workload: Workload, dtype: str) -> Step:
    tf.config.optimizer.set_experimental_options({GRAPPLER[dtype]: True})
    return _step(workload)


def tfamp_policy(workload: Workload, dtype: str) -> Step:
    tfamp.set_global_policy(f"mixed_{dtype}")
    return _step(workload)


def rewrite_lists(workload: Workload, dtype: str) -> Step:
    return tfamp.rewrite(_step(workload), dtype=dtype, placement="lists")


def rewrite(workload: Workload, dtype: str) -> Step:
    return tfamp.rewrite(_step(workload), dtype=dtype, placement="min_cut")


SYSTEMS = {
    "float32": float32,
    "keras_policy": keras_policy,
    "tensorflow_amp": tensorflow_amp,
    "tfamp_policy": tfamp_policy,
    "rewrite_lists": rewrite_lists,
    "rewrite": rewrite,
}
TITLES = {
    "float32": "float32",
    "keras_policy": "Keras's policy",
    "tensorflow_amp": "TensorFlow's auto_mixed_precision",
    "tfamp_policy": "tfamp policy",
    "rewrite_lists": "tfamp.rewrite, lists",
    "rewrite": "tfamp.rewrite, min_cut",
}


def rewriter_options(system: str, dtype: str) -> dict[str, bool]:
    """The optimizers of TensorFlow's that a system switches on, for a session of its graph."""
    return {GRAPPLER[dtype]: True} if system == "tensorflow_amp" else {}


def concrete(step: Step, workload: Workload) -> object:
    """The concrete function that a call of a step runs."""
    get = step.concrete if hasattr(step, "concrete") else step.get_concrete_function
    return get(workload.x, workload.y)


def _step(workload: Workload) -> Step:
    keras.utils.set_random_seed(0)
    optimizer = keras.optimizers.SGD(0.01, momentum=0.9)
    return models.train_step(workload.build(), optimizer)
