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
_GRAPPLER = {
    "float16": "auto_mixed_precision",
    "bfloat16": "auto_mixed_precision_onednn_bfloat16",
}


def float32(workload: Workload, dtype: str) -> Step:
    return _step(workload)


def keras_policy(workload: Workload, dtype: str) -> Step:
    keras.config.set_dtype_policy(f"mixed_{dtype}")
    return _step(workload)


def tensorflow_amp(workload: Workload, dtype: str) -> Step:
    tf.config.optimizer.set_experimental_options({_GRAPPLER[dtype]: True})
    return _step(workload)


def tfamp_policy(workload: Workload, dtype: str) -> Step:
    tfamp.set_global_policy(f"mixed_{dtype}")
    return _step(workload)


def tfamp_lists(workload: Workload, dtype: str) -> Step:
    return tfamp.rewrite(_step(workload), dtype=dtype, placement="lists")


def tfamp_min_cut(workload: Workload, dtype: str) -> Step:
    return tfamp.rewrite(_step(workload), dtype=dtype, placement="min_cut")


SYSTEMS = {
    "float32": float32,
    "Keras policy": keras_policy,
    "TensorFlow auto_mixed_precision": tensorflow_amp,
    "tfamp policy": tfamp_policy,
    "tfamp.rewrite, lists": tfamp_lists,
    "tfamp.rewrite, min_cut": tfamp_min_cut,
}


def _step(workload: Workload) -> Step:
    keras.utils.set_random_seed(0)
    optimizer = keras.optimizers.SGD(0.01, momentum=0.9)
    return models.train_step(workload.build(), optimizer)
