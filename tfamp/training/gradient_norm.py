"""The norm of a step's gradients, taken together; pure functions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfamp.core.dtypes import LOW_PRECISION
from tfamp.core.grad_clip import GradClip


def gradient_norm(
    gradients: Sequence[Any], variables: Sequence[Any], scale: Any, norm_type: float
) -> Any:
    """Returns the norm of all gradients as one long vector.

    Args:
        gradients: Float tensors, `tf.IndexedSlices` (rows of the same index are added up first) or
            None.
        variables: The variables they belong to, in the same order. Those that are overwritten with
            their "gradient" do not count.
        scale: Scalar float32 the gradients are still to be divided by; None: they have been.
        norm_type: 1, 2 or inf.

    Returns:
        Scalar float32. Where a gradient is not finite, neither is the norm.
    """
    values = [
        _values(gradient)
        for gradient, variable in zip(gradients, variables, strict=True)
        if gradient is not None and not getattr(variable, "overwrite_with_gradient", False)
    ]
    if not values:
        return tf.constant(0.0)
    divisor = tf.constant(1.0) if scale is None else tf.cast(scale, tf.float32)
    if math.isinf(norm_type):
        return _greatest(values) / divisor
    if norm_type == 1:
        return _total([tf.reduce_sum(tf.abs(value)) for value in values]) / divisor
    return _euclidean(values) / divisor


def _values(gradient: Any) -> Any:
    if isinstance(gradient, tf.IndexedSlices):
        _, rows = tf.unique(gradient.indices)
        # As many rows as there were: those beyond the distinct ones are zero.
        values = tf.math.unsorted_segment_sum(gradient.values, rows, tf.size(rows))
    else:
        values = tf.convert_to_tensor(gradient)
    return tf.cast(values, tf.float32) if values.dtype.name in LOW_PRECISION else values


def _total(parts: Sequence[Any]) -> Any:
    return tf.add_n([tf.cast(part, tf.float32) for part in parts])


def _greatest(values: Sequence[Any]) -> Any:
    # Not tf.reduce_max: which of NaN and a number it takes is up to the kernel.
    greatest = tf.stack([tf.cast(tf.norm(value, math.inf), tf.float32) for value in values])
    is_nan = tf.stack([tf.reduce_any(tf.math.is_nan(value)) for value in values])
    return tf.where(tf.reduce_any(is_nan), math.nan, tf.reduce_max(greatest))


def _euclidean(values: Sequence[Any]) -> Any:
    if tf.executing_eagerly():
        # The host would wait for the device to know whether the squares are in range.
        return _euclidean_of_any_size(values)
    squares = 2 * _total([tf.nn.l2_loss(value) for value in values])
    return tf.cond(
        tf.math.is_finite(squares) & (squares > 1e-30),
        lambda: tf.sqrt(squares),
        lambda: _euclidean_of_any_size(values),
    )


def _euclidean_of_any_size(values: Sequence[Any]) -> Any:
    """The same where squares overflow or underflow: gradients of a scaled loss may be large."""
    greatest = _greatest(values)
    unit = tf.where(greatest > 0, greatest, 1.0)
    squares = [tf.nn.l2_loss(value / tf.cast(unit, value.dtype)) for value in values]
    return unit * tf.sqrt(2 * _total(squares))


def clipped_scale(clip: GradClip, norm: Any, scale: Any) -> Any:
    """Returns what gradients are divided by so that they are unscaled and clipped at once.

    Args:
        clip: The clipping.
        norm: Norm of the unscaled gradients, scalar float32.
        scale: As in `gradient_norm`.

    Returns:
        Scalar float32; `scale` itself, to the last bit, where the norm is within bounds.
    """
    divisor = tf.constant(1.0) if scale is None else tf.cast(scale, tf.float32)
    return divisor * (tf.maximum(norm, clip.max_norm) / clip.max_norm)
