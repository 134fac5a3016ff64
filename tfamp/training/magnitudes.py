"""The largest magnitude of tensors of 16 bits, in one look at each.

TensorFlow's own ops would make float32 tensors of them first.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfamp.training.compiled_groups import grouped
from tfamp.training.rounding import widened

# How many numbers are looked at in one call on a CPU: 8 MiB.
_GROUP = 1 << 22
# A maximum of so many parts is one of whole vectors; more are slower again.
_PARTS = 8
_SIGN = 1 << 15


def largest_magnitudes(tensors: Sequence[Any], device: str) -> Any:
    """The largest magnitudes of groups of tensors, a float32 vector; NaN where a group has one.

    The tensors are bfloat16 or float16 and have known shapes; XLA has to work on the device.
    """
    found = []
    with tf.device(device):
        for group in grouped(tensors, device, lambda each: each, lambda each: None, _GROUP):
            compiled = _compiled(tuple((each.shape, each.dtype) for each in group))
            found.append(compiled(*group))
        return tf.stack(found)


@functools.lru_cache(maxsize=64)
def _compiled(specs: tuple[tuple[tf.TensorShape, tf.DType], ...]) -> Any:
    def largest(*tensors: Any) -> Any:
        # As patterns too: of a number and NaN XLA's maximum may be the number.
        patterns = [tf.bitcast(widened(_largest(each)), tf.int32) for each in tensors]
        return tf.bitcast(tf.reduce_max(tf.stack(patterns)), tf.float32)

    signature = [tf.TensorSpec(*spec) for spec in specs]
    return tf.function(largest, signature, jit_compile=True, autograph=False)


def _largest(tensor: Any) -> Any:
    """The largest magnitude; the patterns of magnitudes have their order, inf and NaN above all."""
    rows = tensor if tensor.shape.rank == 1 else tf.reshape(tensor, [-1, *tensor.shape[-1:]])
    patterns = tf.bitwise.bitwise_and(tf.bitcast(rows, tf.uint16), tf.constant(_SIGN - 1, tf.uint16))
    count = rows.shape[0]
    length = -(-count // _PARTS)
    # The last ones overlap, which changes no maximum.
    starts = sorted({min(i * length, count - length) for i in range(_PARTS)})
    parts = [patterns[start : start + length] for start in starts]
    return tf.bitcast(tf.reduce_max(functools.reduce(tf.maximum, parts)), tensor.dtype)
