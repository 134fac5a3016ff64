"""What every measurement needs: a place and memory of its own, and errors of missing kernels."""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import keras
import numpy as np
import tensorflow as tf

from tfamp.interop import tf_private

# How TensorFlow says that there is no kernel, or none for this dtype on this device.
NO_KERNEL_ERRORS = (
    tf.errors.InvalidArgumentError,
    tf.errors.NotFoundError,
    tf.errors.UnimplementedError,
    tf.errors.InternalError,
    tf.errors.UnknownError,
)
_Result = TypeVar("_Result")


def let_memory_grow() -> None:
    """Makes GPUs give memory as it is needed, if it is tfamp that starts TensorFlow's runtime.

    By default the first op takes nearly all memory of every GPU, also from a job that runs beside.
    Nothing is changed once the runtime has started, and of GPUs for which growth has been set or
    that have been divided.
    """
    if tf_private.runtime_has_started():
        return
    for gpu in tf_private.visible_devices("GPU"):
        if tf.config.experimental.get_memory_growth(gpu) is None:
            with contextlib.suppress(ValueError):  # It is divided, so that each part has a limit.
                tf.config.experimental.set_memory_growth(gpu, True)


def in_own_thread(function: Callable[[], _Result]) -> _Result:
    """Runs it where none of TensorFlow's and tfamp's per-thread state is: scopes, graphs, modes.

    It is eager there wherever this is called: in a function that is being traced, and under
    `tf.Graph().as_default()`, which `tf.init_scope` does not leave.
    """
    with ThreadPoolExecutor(1) as own_thread:
        return own_thread.submit(function).result()


def some_values(shape: Sequence[int], dtype: Any) -> Any:
    """Numbers between 0.1 and 1, the same again and again: many would take longer to make.

    Of what is no float zeros: a valid index.
    """
    dtype, count = tf.as_dtype(dtype), math.prod(shape)
    if not dtype.is_floating:
        return tf.zeros(shape, dtype)
    # Golden sections of a circle: no two neighbours are alike.
    few = 0.1 + 0.9 * (np.arange(math.gcd(count, 4096)) * 0.618034 % 1)
    return tf.reshape(tf.tile(tf.constant(few, dtype), [count // max(few.size, 1)]), shape)


def progress(total: int, unit: str) -> Callable[[], None]:
    """Returns what moves a bar on by one step."""
    if not sys.stdout.isatty():
        return lambda: None
    bar = keras.utils.Progbar(total, unit_name=unit)
    return lambda: bar.add(1)
