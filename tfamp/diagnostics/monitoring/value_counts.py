"""Counts a tensor's values by exponent, on the device that holds the tensor."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfamp.diagnostics.monitoring.exponents import ExponentHistogram

# One column for each of float32's exponents, biased as in its bits; then NaNs, values over either
# bound, and the bits of the largest finite value.
_BIAS, _EXPONENTS, _MANTISSA_BITS = 127, 256, 23
_NANS, _OVER, _OVER_SECOND, _LARGEST = range(_EXPONENTS, _EXPONENTS + 4)
COLUMNS = _EXPONENTS + 4
_INF_BITS = 0x7F800000


def count_values(tensor: Any, bound: Any, second_bound: Any) -> Any:
    """Counts the values of a tensor by binary exponent.

    The exponent is read from the bits, so that the work is a few passes over integers. XLA compiles
    it too. What is under float32's normal range, 2**-126, counts as zero: TensorFlow takes it for
    zero in most places.

    Args:
        tensor: Float tensor of any shape, `tf.IndexedSlices` (only its values count) or None.
        bound: Scalar float32. Values over it are counted.
        second_bound: Another one.

    Returns:
        int64 of shape (COLUMNS,), for `histogram`; zeros for None.
    """
    if tensor is None:
        return tf.zeros((COLUMNS,), tf.int64)
    values = tensor.values if isinstance(tensor, tf.IndexedSlices) else tensor
    bits = tf.bitcast(_as_float32(tf.reshape(values, (-1,))), tf.int32)
    bits = tf.bitwise.bitwise_and(bits, _INF_BITS | (2**_MANTISSA_BITS - 1))
    counts = tf.raw_ops.DenseBincount(
        input=tf.bitwise.right_shift(bits, _MANTISSA_BITS),
        size=_EXPONENTS,
        weights=tf.zeros((0,), tf.int64),
        binary_output=False,
    )
    # Bits of positive floats are ordered as the floats are, inf behind them and NaNs at the end. Of
    # no value at all the maximum is int32's least.
    largest = tf.maximum(tf.reduce_max(bits), 0)
    least = tf.bitcast(tf.cast(tf.stack([bound, second_bound]), tf.float32), tf.int32)

    def closer_look() -> Any:
        finite = bits < _INF_BITS
        over = [
            tf.math.count_nonzero((bits > each) & (bits <= _INF_BITS)) for each in tf.unstack(least)
        ]
        top = tf.cast(tf.reduce_max(tf.where(finite, bits, 0)), tf.int64)
        return tf.stack([tf.math.count_nonzero(bits > _INF_BITS), *over, top])

    def nothing_there() -> Any:
        return tf.stack([tf.zeros((), tf.int64)] * 3 + [tf.cast(largest, tf.int64)])

    # Mostly nothing is that large, and four more passes over the values are saved.
    others = tf.cond(largest > tf.reduce_min(least), closer_look, nothing_there)
    return tf.concat([counts, others], 0)


def _as_float32(values: Any) -> Any:
    if values.dtype != tf.float64:
        return tf.cast(values, tf.float32)
    # What float32 cannot hold counts as its largest or its smallest normal number.
    limits = tf.float32.max, tf.constant(2.0**-126, tf.float64)
    held = tf.clip_by_value(tf.abs(values), limits[1], limits[0])
    inside = tf.math.is_finite(values) & tf.not_equal(values, 0.0)
    return tf.cast(tf.where(inside, held, values), tf.float32)


def histogram(rows: Sequence[Sequence[int]], scale: float) -> tuple[ExponentHistogram, int]:
    """Makes a histogram of counts.

    Args:
        rows: What `count_values` returned, of each replica.
        scale: What the values are to be divided by; one that is no power of two counts as the next
            one below.

    Returns:
        The histogram of the values divided by `scale`, with `over` from the bound, and how many
        values were over the second bound.
    """
    columns = [sum(int(row[i]) for row in rows) for i in range(_LARGEST)]
    counts = {i - _BIAS: n for i, n in enumerate(columns[:_EXPONENTS]) if n}
    # Zeros have the exponent bits of subnormal numbers, NaNs those of infs.
    zeros, nans = counts.pop(-_BIAS, 0), columns[_NANS]
    infs = counts.pop(_EXPONENTS - 1 - _BIAS, 0) - nans
    largest = max(_float_of_bits(int(row[_LARGEST])) for row in rows)
    seen = ExponentHistogram(counts, zeros, infs, nans, columns[_OVER], largest)
    return seen.shifted(-math.frexp(scale)[1] + 1, seen.over), columns[_OVER_SECOND]


def _float_of_bits(bits: int) -> float:
    exponent, mantissa = divmod(bits, 2**_MANTISSA_BITS)
    if not exponent:
        return 0.0
    return (2**_MANTISSA_BITS + mantissa) * 2.0 ** (exponent - _BIAS - _MANTISSA_BITS)
