"""Which of many tensors are put together in one compiled call, and their largest magnitude so."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import tensorflow as tf

from tfamp.interop.tf_private import device_kind_of
from tfamp.training.rounding import widened

_Item = TypeVar("_Item")

# Bytes that a cache which cores share holds of one call, while another one runs beside it.
_ROOM = 8 << 20


def grouped(
    items: Sequence[_Item], device: str, kind: Callable[[_Item], Any], size: Callable[[_Item], int]
) -> list[list[_Item]]:
    """Items that are computed together: on GPUs all of them, on CPUs what caches hold.

    `size` is how many bytes a call reads and writes for an item. What is computed of numbers that
    were just written then finds them in a cache. Groups of the same kinds, as layers that repeat
    have them, are compiled once.
    """
    if device_kind_of(device) != "cpu":
        return [list(items)]
    kinds: dict[Any, list[_Item]] = defaultdict(list)
    for each in items:
        kinds[kind(each)].append(each)
    groups: list[list[_Item]] = []
    others: list[_Item] = []
    for alike in kinds.values():
        count = max(1, _ROOM // max(1, size(alike[0])))
        whole = len(alike) - len(alike) % count
        groups += [alike[i : i + count] for i in range(0, whole, count)]
        others += alike[whole:]
    left = 0
    for each in others:
        if not groups or size(each) > left:
            groups.append([])
            left = _ROOM
        groups[-1].append(each)
        left -= size(each)
    return groups


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
