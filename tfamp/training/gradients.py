"""Pure functions on lists of gradients: checking, unscaling, finiteness, agreement of replicas."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import keras
import tensorflow as tf
from keras import ops

from tfamp.core.dtypes import FLOAT_DTYPES, LOW_PRECISION
from tfamp.interop.keras_backend import runs_tensorflow


def variable_name(variable: Any) -> str:
    """The most telling name a variable has: a Keras path, else a TensorFlow name."""
    return str(getattr(variable, "path", None) or getattr(variable, "name", variable))


def dtype_name(tensor: Any) -> str:
    """The dtype of a tensor, variable or `IndexedSlices` as a name."""
    return keras.backend.standardize_dtype(tensor.dtype)


def scaled_loss(loss: Any, scale: Any) -> Any:
    """Multiplies a loss by the loss scale, in float32 or wider.

    A float16 loss is cast first: the default maximum scale, and already 2**16, is inf in float16.

    Args:
        loss: Float tensor of any shape, or a number.
        scale: Scalar float32.

    Returns:
        The scaled loss: float64 if the loss is, else float32.

    Raises:
        TypeError: `loss` is no float tensor or number.
    """
    loss = _as_float_tensor(loss)
    if dtype_name(loss) in LOW_PRECISION:
        loss = ops.cast(loss, "float32")
    return loss * ops.cast(scale, loss.dtype)


def _as_float_tensor(loss: Any) -> Any:
    try:
        tensor = ops.convert_to_tensor(loss)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"The loss must be a float tensor; got {type(loss).__name__}. To scale several losses, "
            "scale each of them."
        ) from error
    if dtype_name(tensor) not in FLOAT_DTYPES:
        raise TypeError(f"The loss must be a float tensor; got dtype {dtype_name(tensor)}.")
    return tensor


def unscale(gradient: Any, scale: Any) -> Any:
    """Divides one gradient by the loss scale, in float32 or wider.

    Args:
        gradient: Float tensor, `tf.IndexedSlices` (its values are divided, it is not densified)
            or None.
        scale: Scalar float32.

    Returns:
        The unscaled gradient; None for None.
    """
    if gradient is None:
        return None
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(
            unscale(gradient.values, scale), gradient.indices, gradient.dense_shape
        )
    if dtype_name(gradient) in LOW_PRECISION:
        gradient = ops.cast(gradient, "float32")
    return gradient / ops.cast(scale, gradient.dtype)


def unscale_all(gradients: Sequence[Any], variables: Sequence[Any], scale: Any) -> list[Any]:
    """Divides gradients by the loss scale, in float32 or wider.

    Args:
        gradients: As in `unscale`.
        variables: The variables they belong to. Those that are overwritten with their "gradient"
            keep it: it is their next value (float8 training), not a derivative. Where there is
            another number of variables than of gradients, all gradients are divided.
        scale: Scalar float32. None: they have been.

    Returns:
        The unscaled gradients, in the same order.
    """
    if scale is None:
        return list(gradients)
    if len(variables) != len(gradients):
        return [unscale(gradient, scale) for gradient in gradients]
    return [
        gradient
        if getattr(variable, "overwrite_with_gradient", False)
        else unscale(gradient, scale)
        for gradient, variable in zip(gradients, variables, strict=True)
    ]


def as_stored_all(gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
    """Casts the gradients of float16 and bfloat16 variables to their variable's dtype.

    Keras adds gradients up in sums of that dtype, and does not cast them itself there.

    Args:
        gradients: Unscaled gradients: float tensors, `tf.IndexedSlices` or None.
        variables: The variables they belong to, in the same order.

    Returns:
        The gradients, in the same order.
    """
    return [_stored(*pair) for pair in zip(gradients, variables, strict=True)]


def _stored(gradient: Any, variable: Any) -> Any:
    if gradient is None or not _narrows(gradient, variable):
        return gradient
    values = _as_stored(gradient, variable)
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    return values


def all_finite(
    gradients: Sequence[Any], variables: Sequence[Any] | None = None, scale: Any = None
) -> Any:
    """Whether no gradient holds an inf or NaN.

    Args:
        gradients: Float tensors, `tf.IndexedSlices` (only their values are looked at) or None.
        variables: The variables they belong to, if known. A gradient that is finite but would not
            be in its variable's narrower dtype counts as not finite.
        scale: Scalar float32: what counts is the gradients divided by it. None: they are unscaled.

    Returns:
        Scalar bool tensor; True for an empty list.
    """
    pairs = [
        (gradient, variable)
        for gradient, variable in zip(gradients, variables or [None] * len(gradients), strict=True)
        if gradient is not None
    ]
    summed = [pair for pair in pairs if _can_be_summed(*pair)]
    checks = _finite_each([pair for pair in pairs if not _can_be_summed(*pair)], scale)
    if summed:
        checks.append(_finite_sums(summed, scale))
    return ops.all(ops.stack(checks)) if checks else ops.convert_to_tensor(True)


def _finite_sums(pairs: Sequence[tuple[Any, Any]], scale: Any) -> Any:
    # The sum of the squares takes one look at a gradient, and is finite only where every element
    # is. Where it is not, which is rare, every element is looked at.
    sums = tf.stack([tf.nn.l2_loss(tf.cast(gradient, "float32")) for gradient, _ in pairs])
    sums = sums if scale is None else sums / scale / scale
    return tf.cond(
        tf.reduce_all(tf.math.is_finite(sums)),
        lambda: tf.constant(True),
        lambda: tf.reduce_all(tf.stack(_finite_each(pairs, scale))),
    )


def _finite_each(pairs: Sequence[tuple[Any, Any]], scale: Any) -> list[Any]:
    return [
        ops.all(ops.isfinite(_as_stored(_divided(gradient, variable, scale), variable)))
        for gradient, variable in pairs
    ]


def _can_be_summed(gradient: Any, variable: Any) -> bool:
    # In eager mode the host would wait for the device between the two looks.
    if not runs_tensorflow() or tf.executing_eagerly():
        return False
    sparse = isinstance(gradient, tf.IndexedSlices)
    overwritten = getattr(variable, "overwrite_with_gradient", False)
    narrow = variable is not None and dtype_name(variable) in LOW_PRECISION
    return not (sparse or overwritten or narrow or dtype_name(gradient) == "float64")


def _narrows(gradient: Any, variable: Any) -> bool:
    dtype = None if variable is None else dtype_name(variable)
    return dtype in LOW_PRECISION and dtype_name(gradient) != dtype


def _divided(gradient: Any, variable: Any, scale: Any) -> Any:
    if scale is None or getattr(variable, "overwrite_with_gradient", False):
        return gradient
    return unscale(gradient, scale)


def _as_stored(gradient: Any, variable: Any) -> Any:
    values = gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient
    return ops.cast(values, dtype_name(variable)) if _narrows(values, variable) else values


def on_every_replica(finite: Any) -> Any:
    """Makes all replicas agree: True only where every replica of every worker said True.

    Args:
        finite: Scalar bool tensor of this replica.

    Returns:
        Scalar bool tensor, equal on all replicas. Without several replicas it is `finite`.
    """
    replica = tf.distribute.get_replica_context()
    if replica is None or replica.num_replicas_in_sync == 1:
        return finite
    faults = tf.cast(tf.logical_not(finite), "float32")
    return tf.equal(replica.all_reduce(tf.distribute.ReduceOp.SUM, faults), 0.0)


def listed(gradients: Iterable[Any], caller: str) -> list[Any]:
    """Returns gradients as a list.

    Args:
        gradients: Float tensors, `tf.IndexedSlices` or None.
        caller: Name of the method they were given to, for the message.

    Returns:
        The gradients, in the same order.

    Raises:
        TypeError: It is one tensor, a dict or something else that is no list of gradients.
    """
    if (
        isinstance(gradients, (dict, str))
        or not isinstance(gradients, Iterable)
        or hasattr(gradients, "dtype")
    ):
        raise TypeError(
            f"{caller} takes a list of gradients, as tape.gradient returns it for a list of "
            f"variables; got {type(gradients).__name__}."
        )
    return list(gradients)


def split_pairs(
    grads_and_vars: Iterable[tuple[Any, Any]], caller: str
) -> tuple[list[Any], list[Any]]:
    """Splits (gradient, variable) pairs.

    Args:
        grads_and_vars: The pairs.
        caller: Name of the method they were given to, for the message.

    Returns:
        The gradients and the variables.

    Raises:
        TypeError: An element is no pair.
    """
    try:
        pairs = [(gradient, variable) for gradient, variable in grads_and_vars]
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"{caller} takes (gradient, variable) pairs, as zip(gradients, variables) makes them; "
            f"got {type(grads_and_vars).__name__} with other elements."
        ) from error
    return [gradient for gradient, _ in pairs], [variable for _, variable in pairs]


def check_gradients(gradients: Sequence[Any], variables: Sequence[Any]) -> None:
    """Raises if the gradients cannot be applied to the variables, before anything is changed.

    Args:
        gradients: Float tensors, `tf.IndexedSlices` or None.
        variables: The variables they belong to, in the same order.

    Raises:
        ValueError: The lists are empty or of different lengths, all gradients are None, or a
            shape does not fit.
        TypeError: A gradient is no float tensor.
    """
    if not gradients:
        raise ValueError(
            "There is nothing to apply: the list of gradients is empty. Pass one (gradient, "
            "variable) pair for each trainable variable."
        )
    if len(gradients) != len(variables):
        raise ValueError(
            f"Expected one gradient for each of the {len(variables)} variables; got "
            f"{len(gradients)}."
        )
    if all(gradient is None for gradient in gradients):
        names = ", ".join(variable_name(v) for v in variables[:3])
        raise ValueError(
            f"No gradient was given for any of {len(variables)} variables ({names}, …): all are "
            "None. Was the loss computed under the tape, from these variables?"
        )
    for gradient, variable in zip(gradients, variables, strict=True):
        if gradient is not None:
            _check_gradient(gradient, variable)


def _check_gradient(gradient: Any, variable: Any) -> None:
    if not hasattr(gradient, "dtype") or dtype_name(gradient) not in FLOAT_DTYPES:
        given = dtype_name(gradient) if hasattr(gradient, "dtype") else type(gradient).__name__
        raise TypeError(
            f"The gradient of {variable_name(variable)} must be a float tensor; got {given}."
        )
    if not hasattr(variable, "assign"):
        raise TypeError(
            f"Expected (gradient, variable) pairs; got {type(variable).__name__} as variable. "
            "Are the two swapped?"
        )
    given_shape = tf.TensorShape(gradient.shape)
    if not given_shape.is_compatible_with(tf.TensorShape(variable.shape)):
        raise ValueError(
            f"The gradient of {variable_name(variable)} has shape {given_shape}; the variable has "
            f"shape {tf.TensorShape(variable.shape)}."
        )
