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

# A maximum of so many parts is one of whole vectors; more are slower again.
_PARTS = 8
_SIGN = 1 << 15


def largest_magnitudes(tensors: Sequence[Any], device: str) -> Any:
    """The largest magnitudes of groups of tensors, a float32 vector; NaN where a group has one.

    All are bfloat16 or all float16, and their shapes are known; XLA has to work on the device.
    """
    with tf.device(device):
        groups = grouped(tensors, device, lambda each: each.shape, _bytes)
        shapes = [tuple(each.shape for each in group) for group in groups]
        dtype = tensors[0].dtype
        return tf.stack(
            [_compiled(dtype, own)(*group) for own, group in zip(shapes, groups, strict=True)]
        )


def _bytes(tensor: Any) -> int:
    return int(tensor.shape.num_elements() * tensor.dtype.size)


@functools.lru_cache(maxsize=64)
def _compiled(dtype: tf.DType, shapes: tuple[tf.TensorShape, ...]) -> Any:
    # Magnitudes are ordered as their patterns are, inf and NaN above all. The maximum of numbers
    # may lose a NaN.
    def largest(*tensors: Any) -> Any:
        patterns = [_largest(tf.bitcast(each, tf.uint16)) for each in tensors]
        return widened(tf.bitcast(tf.reduce_max(tf.stack(patterns)), dtype))

    signature = [tf.TensorSpec(shape, dtype) for shape in shapes]
    return tf.function(largest, signature, jit_compile=True, autograph=False)


def _largest(patterns: Any) -> Any:
    rows = patterns if patterns.shape.rank == 1 else tf.reshape(patterns, [-1, patterns.shape[-1]])
    magnitudes = tf.bitwise.bitwise_and(rows, tf.constant(_SIGN - 1, tf.uint16))
    count = int(rows.shape[0])
    length = -(-count // _PARTS)
    # The last ones overlap, which changes no maximum.
    starts = sorted({min(i * length, count - length) for i in range(_PARTS)})
    return tf.reduce_max(functools.reduce(tf.maximum, [magnitudes[i : i + length] for i in starts]))
