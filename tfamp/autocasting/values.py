"""The dtypes of values, and values in other dtypes: how autocast casts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfamp.autocasting.state import Casts, current_modes
from tfamp.core.dtypes import LOW_PRECISION
from tfamp.interop.tf_private import no_tape_is_active

EDITABLE = frozenset({*LOW_PRECISION, "float32"})
ARRAYS = (np.ndarray, np.generic)
_NAMES = {tf.as_dtype(name): name for name in EDITABLE}  # DType.name takes long


def dtype_name(value: Any) -> str:
    """The dtype's name of anything that has one; "" of numbers, lists and None."""
    dtype = getattr(value, "dtype", None)
    if dtype is None:
        return ""
    if isinstance(dtype, tf.DType):
        return _NAMES.get(dtype) or dtype.base_dtype.name
    return str(getattr(dtype, "name", dtype))


def declared_dtype(dtype: Any) -> str:
    """The name of a dtype, or of the one in a type's specification; "" where it has none."""
    dtype = getattr(dtype, "dtype", dtype)
    return "" if isinstance(dtype, tf.TypeSpec) else str(tf.as_dtype(dtype).name)


def widest(dtypes: set[str]) -> str:
    """The dtype that holds what each of these does."""
    return next(iter(dtypes)) if len(dtypes) == 1 else "float32"


def mixes(values: Iterable[Any]) -> bool:
    """Whether tensors among the values have different float dtypes."""
    dtypes = {dtype_name(value) for value in values if tf.is_tensor(value)}
    return len(dtypes & EDITABLE) > 1


def recast(value: Any, dtype: str) -> Any:
    """A float16, bfloat16 or float32 value in another of these dtypes; anything else as it is."""
    given = dtype_name(value)
    if given not in EDITABLE or dtype not in EDITABLE or isinstance(value, tf.TypeSpec):
        return value
    if given == dtype:
        return value
    if isinstance(value, ARRAYS):
        return value.astype(tf.as_dtype(dtype).as_numpy_dtype)
    mode = current_modes.current
    casts = current_modes.casts if mode is not None and mode.cache_casts else None
    with current_modes.set_to(None):
        return tf.cast(value, dtype) if casts is None else _cast_once(value, dtype, casts)


def _cast_once(value: Any, dtype: str, casts: Casts) -> Any:
    if not tf.executing_eagerly():
        tensor = tf.convert_to_tensor(value) if isinstance(value, tf.Variable) else value
        return casts.traced.once(tensor, dtype, lambda: tf.cast(tensor, dtype))
    # Immutable tensors only, so no assignment can be missed; off the tape only, because a tape
    # that did not see the cast would lose the gradient.
    if not isinstance(value, tf.Tensor) or not no_tape_is_active():
        return tf.cast(value, dtype)
    cast = casts.eager.get(value, dtype)
    if cast is None:
        cast = tf.cast(value, dtype)
        casts.eager.set(value, dtype, cast)
    return cast


def recast_gradients(gradients: Any, dtypes: Sequence[str], variables: Any = None) -> Any:
    """What a custom gradient returned, in the dtypes of its inputs and variables."""
    if variables:
        of_inputs, of_variables = gradients
        wanted = [dtype_name(variable) for variable in variables]
        return recast_gradients(of_inputs, dtypes), [
            recast(value, dtype) for value, dtype in zip(of_variables, wanted, strict=False)
        ]
    flat = tf.nest.flatten(gradients)
    if len(flat) != len(dtypes):  # TensorFlow has a message for that.
        return gradients
    cast = [recast(value, dtype) for value, dtype in zip(flat, dtypes, strict=True)]
    return tf.nest.pack_sequence_as(gradients, cast)
