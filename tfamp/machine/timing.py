"""What every measurement needs: a place of its own, and what a missing kernel looks like."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
import tensorflow as tf

# How TensorFlow says that there is no kernel, or none for this dtype on this device.
NO_KERNEL_ERRORS = (
    tf.errors.InvalidArgumentError,
    tf.errors.NotFoundError,
    tf.errors.UnimplementedError,
    tf.errors.InternalError,
    tf.errors.UnknownError,
)
_Result = TypeVar("_Result")


def in_own_thread(
    function: Callable[[], _Result], interrupted: Callable[[], None] = lambda: None
) -> _Result:
    """Runs it where none of TensorFlow's and tfamp's per-thread state is: scopes, graphs, modes.

    It is eager there wherever this is called: in a function that is being traced, and under
    `tf.Graph().as_default()`, which `tf.init_scope` does not leave. Ctrl-C reaches the thread that
    waits: `interrupted` is to end the function soon.
    """
    with ThreadPoolExecutor(1) as own_thread:
        try:  # Ctrl-C may come while the thread starts: nobody waits for it then.
            return own_thread.submit(function).result()
        except BaseException:
            interrupted()
            raise


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
