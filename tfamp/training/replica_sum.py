"""Summing gradients over the replicas of a `tf.distribute` strategy, in float16 if wanted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfamp.core.dtypes import LOW_PRECISION
from tfamp.training import gradients as gradient_lib


def several_replicas() -> bool:
    """Whether this is a replica, and one of several."""
    replica = tf.distribute.get_replica_context()
    return replica is not None and replica.num_replicas_in_sync > 1


def summed(gradients: Sequence[Any], variables: Sequence[Any], scale: Any) -> list[Any]:
    """Unscales gradients and sums them over the replicas, in float32 or wider.

    Args:
        gradients: Float tensors, `tf.IndexedSlices` (values and indices of all replicas are put
            together) or None.
        variables: The variables they belong to, in the same order.
        scale: Scalar float32 they are to be divided by; None: they have been.

    Returns:
        The sums, in the same order; None for None. Gradients that overwrite their variable are
        returned as they are.
    """
    if scale is not None:
        gradients = gradient_lib.unscale_all(gradients, variables, scale)
    return _all_reduced(gradients, variables)


def summed_in_float16(
    gradients: Sequence[Any], variables: Sequence[Any], scale: Any, loss_scale: Any
) -> tuple[list[Any], Any]:
    """Sums gradients over the replicas, sent as float16 at the loss scale.

    What is sent is the gradient times the loss scale, as on one replica. What overflows, in a cast
    or in the sum, is inf in the result: so the result has to be checked, and a loss scale that is
    too large for the sum backs off.

    Source: TensorFlow RFC 293, "Keras mixed precision", which designed it and was not built.

    Args:
        gradients: As in `summed`. Those of 16 bits are sent in their dtype, float64 in float64.
        variables: The variables they belong to, in the same order.
        scale: Scalar float32 they are still to be divided by; None: they have been.
        loss_scale: Scalar float32, the scale to send them at.

    Returns:
        The sums, float32 or float64, in the same order, and the scalar float32 that they are still
        to be divided by.
    """
    factor = loss_scale if scale is None else loss_scale / scale

    def packed(values: Any) -> Any:
        wire = "float16" if values.dtype == tf.float32 else values.dtype
        return tf.cast(_widened(values) * tf.cast(factor, _widened(values).dtype), wire)

    grads = [
        gradient if _is_value(variable) else _mapped(packed, gradient)
        for gradient, variable in zip(gradients, variables, strict=True)
    ]
    return [_mapped(_widened, gradient) for gradient in _all_reduced(grads, variables)], loss_scale


def _all_reduced(gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
    result = list(gradients)
    sent = [
        i
        for i, (gradient, variable) in enumerate(zip(gradients, variables, strict=True))
        if gradient is not None and not _is_value(variable)
    ]
    if sent:
        replica = tf.distribute.get_replica_context()
        values = replica.all_reduce(tf.distribute.ReduceOp.SUM, [result[i] for i in sent])
        for i, value in zip(sent, values, strict=True):
            result[i] = value
    return result


def _is_value(variable: Any) -> bool:
    # Its "gradient" is its next value, which no scale was multiplied with.
    return getattr(variable, "overwrite_with_gradient", False)


def _widened(values: Any) -> Any:
    return tf.cast(values, tf.float32) if values.dtype.name in LOW_PRECISION else values


def _mapped(function: Callable[[Any], Any], gradient: Any) -> Any:
    if gradient is None:
        return None
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(function(gradient.values), gradient.indices, gradient.dense_shape)
    return function(tf.convert_to_tensor(gradient))
