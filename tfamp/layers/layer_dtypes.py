"""The dtypes of layers and tensors: reading and setting a layer's policy, and casts.

This is the one place where layers get another dtype. The policy `int8_from_mixed_bfloat16` is of a
layer that Keras quantized to int8 and that computes in bfloat16; a plain policy on such a layer
would reinterpret its integers as numbers. Callers therefore give only the float part, the *float
policy*, and a quantized layer gets the *counterpart*: the same quantization from that policy.

Every layer ends up with a plain Keras policy, so saved models do not need tfamp.
"""

from __future__ import annotations

import copy
from typing import Any

import keras

from tfamp.core.dtypes import FLOAT_DTYPES, LOW_PRECISION
from tfamp.interop.keras_hooks import copy_annotations

# Attribute of a low tensor: the float32 tensor that it was cast from.
_EXACT = "_tfamp_float32"


def is_built_in(layer: Any) -> bool:
    """Whether Keras itself defines the layer's class."""
    return type(layer).__module__.partition(".")[0] == "keras"


def policy_of(layer: Any) -> Any:
    """The policy a layer computes under; in a map of policies, its own entry.

    Entries are by path, which a layer gets when it is built; until then it is the map itself.
    """
    policy = layer.dtype_policy
    if not _is_map(policy) or not layer.built:
        return policy
    # Layers that are never built, such as Dropout, have no path.
    return policy[layer.path] if layer.path else policy.default_policy


def quantization_of(layer: Any) -> str | None:
    """How Keras has quantized a layer: "int8", "gptq" and so on; None if it is not quantized."""
    mode = policy_of(layer).quantization_mode
    return None if mode is None else str(mode)


def is_plain(policy: Any) -> bool:
    """Whether a Keras policy is one dtype, or mixed; neither a map of policies nor quantized."""
    plain = (keras.DTypePolicy, keras.FloatDTypePolicy)
    return type(policy) in plain and policy.compute_dtype in FLOAT_DTYPES


def float_policy(layer: Any) -> str | None:
    """The name of a layer's float policy; None if its policy is neither plain nor quantized.

    Example:
        >>> float_policy(keras.layers.Dense(4, dtype="int8_from_mixed_bfloat16"))
        'mixed_bfloat16'
    """
    policy = policy_of(layer)
    if _is_map(policy) or (policy.quantization_mode is None and not is_plain(policy)):
        return None
    return _float_name(policy)


def policy_with(layer: Any, float_name: str) -> Any:
    """Returns a policy for a layer to compute in another dtype; None if it cannot.

    A quantized layer gets the counterpart that predicts the same up to rounding: in float32, and,
    if quantized to int8, in bfloat16. Other low dtypes may not hold its scales, group indexes or
    integer sums; rounding before float8 quantization may change a value by a whole float8 step.

    Example:
        >>> layer = keras.layers.Dense(4, dtype="int8_from_mixed_bfloat16")
        >>> policy_with(layer, "float32").name, policy_with(layer, "mixed_float16")
        ('int8_from_float32', None)
    """
    wanted, own = keras.DTypePolicy(float_name), policy_of(layer)
    if _is_map(own):
        return None
    if own.quantization_mode is None:
        return wanted
    if _float_name(own) == float_name:
        return copy.copy(own)
    exact = wanted.compute_dtype not in LOW_PRECISION and own.quantization_mode != "float8"
    if not exact and (own.quantization_mode, wanted.compute_dtype) != ("int8", "bfloat16"):
        return None
    return type(own).from_config({**own.get_config(), "source_name": float_name})


def give_policy(layer: Any, policy: Any) -> None:
    """Sets a layer's policy, given itself or by name; on a quantized layer its counterpart.

    A quantized layer without such a counterpart is not changed.
    """
    wanted = policy
    if policy_of(layer).quantization_mode is not None:
        wanted = policy_with(layer, _float_name(keras.dtype_policies.get(policy)))
    if wanted is not None:
        layer.dtype_policy = wanted


def in_float32(value: Any) -> Any:
    """Casts a low tensor to float32, with its mask and logits; returns anything else unchanged.

    For the result of `in_low` it returns the float32 tensor that was cast.
    """
    given = as_given(value)
    return _cast_annotated(given, "float32") if is_low(given) else given


def as_given(value: Any) -> Any:
    """Returns the float32 tensor that `in_low` cast; anything else unchanged."""
    return getattr(value, _EXACT, value)


def in_low(value: Any, dtype: str) -> Any:
    """Casts a tensor, also a symbolic one, to a low dtype, so that `in_float32` can undo it."""
    if isinstance(value, keras.KerasTensor):
        return keras.KerasTensor(value.shape, dtype=dtype, sparse=value.sparse)
    result = _cast_annotated(value, dtype)
    setattr(result, _EXACT, value)
    return result


def lowered(values: Any, dtype: str) -> Any:
    """Casts the float tensors in a structure, also symbolic ones, to a dtype; see `in_low`."""

    def lower(x: Any) -> Any:
        is_tensor = keras.ops.is_tensor(x) or isinstance(x, keras.KerasTensor)
        given = keras.backend.standardize_dtype(x.dtype) if is_tensor else dtype
        if given not in FLOAT_DTYPES or given == dtype:
            return x
        exact = in_float32(x)
        return in_low(exact, dtype) if dtype in LOW_PRECISION else _cast_annotated(exact, dtype)

    return keras.tree.map_structure(lower, values)


def _cast_annotated(value: Any, dtype: str) -> Any:
    result = keras.ops.cast(value, dtype)
    copy_annotations(value, result)
    return result


def is_low(value: Any) -> bool:
    """Whether something is a tensor of a low dtype."""
    standard = keras.backend.standardize_dtype
    return keras.ops.is_tensor(value) and standard(value.dtype) in LOW_PRECISION


def _is_map(policy: Any) -> bool:
    return isinstance(policy, keras.dtype_policies.DTypePolicyMap)


def _float_name(policy: Any) -> str:
    # Not the policy's name: a map of policies removes the names of its entries when it is saved.
    compute = str(policy.compute_dtype)
    return compute if compute == policy.variable_dtype else f"mixed_{compute}"
