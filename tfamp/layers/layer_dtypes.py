"""The dtypes of layers and tensors: reading and setting a layer's policy, and casts.

This is the one place where layers get another dtype. The policy `int8_from_mixed_bfloat16` is
of a layer that Keras quantized to int8 and that computes in bfloat16; a plain policy on such a
layer would reinterpret its integers as numbers. Callers therefore give only the float part, the
*float policy*, and a quantized layer gets the *counterpart*: that quantization from the policy.

Every layer ends up with a plain Keras policy, so saved models do not need tfamp.
"""

from __future__ import annotations

import copy
from typing import Any

import keras

from tfamp.core.dtypes import FLOAT_DTYPES, LOW_PRECISION
from tfamp.core.kinds import KerasPolicy, Layer, Nest, Tensor
from tfamp.interop.keras_hooks import copy_annotations, is_of_keras

# Attribute of a low tensor: the float32 tensor that it was cast from.
_EXACT = "_tfamp_float32"


def is_built_in(layer: Layer) -> bool:
    """Whether Keras itself defines the layer's class."""
    return is_of_keras(layer)


def policy_of(layer: Layer) -> KerasPolicy:
    """The policy a layer computes under; in a map of policies, its entry there.

    Entries are by path, which a layer gets when it is built; until then it is the map itself.
    """
    policy = layer.dtype_policy
    if not _is_map(policy) or not layer.built:
        return policy
    # Layers that are never built, such as Dropout, have no path.
    return policy[layer.path] if layer.path else policy.default_policy


def quantization_of(layer: Layer) -> str | None:
    """How Keras has quantized a layer: "int8", "gptq" and so on; None if it has not."""
    mode = policy_of(layer).quantization_mode
    return None if mode is None else str(mode)


def is_plain(policy: KerasPolicy) -> bool:
    """Whether a Keras policy is one dtype, or mixed; not a map of policies nor quantized."""
    plain = (keras.DTypePolicy, keras.FloatDTypePolicy)
    return type(policy) in plain and policy.compute_dtype in FLOAT_DTYPES


def float_policy(layer: Layer) -> str | None:
    """The name of a layer's float policy; None if its policy is neither plain nor quantized.

    Example:
        >>> float_policy(keras.layers.Dense(4, dtype="int8_from_mixed_bfloat16"))
        'mixed_bfloat16'
    """
    policy = policy_of(layer)
    if _is_map(policy) or (policy.quantization_mode is None and not is_plain(policy)):
        return None
    return _float_name(policy)


def policy_with(layer: Layer, float_name: str) -> KerasPolicy:
    """Returns a policy for a layer to compute in another dtype; None if it cannot.

    A quantized layer gets the counterpart that predicts the same up to rounding: in float32,
    and, if quantized to int8, in bfloat16. Other low dtypes may not hold its scales, group
    indexes or integer sums; rounding before float8 quantization may change a value by a whole
    float8 step.

    Example:
        >>> layer = keras.layers.Dense(4, dtype="int8_from_mixed_bfloat16")
        >>> policy_with(layer, "float32").name, policy_with(layer, "mixed_float16")
        ('int8_from_float32', None)
    """
    policy, target = policy_of(layer), keras.DTypePolicy(float_name)
    if _is_map(policy):
        return None
    mode = policy.quantization_mode
    if mode is None:
        return target
    if _float_name(policy) == float_name:
        return copy.copy(policy)
    is_exact = target.compute_dtype not in LOW_PRECISION and mode != "float8"
    if not is_exact and (mode, target.compute_dtype) != ("int8", "bfloat16"):
        return None
    return type(policy).from_config({**policy.get_config(), "source_name": float_name})


def give_policy(layer: Layer, policy: KerasPolicy) -> None:
    """Sets a layer's policy, a Keras policy or the name of one.

    A quantized layer gets its counterpart, and is not changed if it has none.
    """
    new_policy = policy
    if policy_of(layer).quantization_mode is not None:
        new_policy = policy_with(layer, _float_name(keras.dtype_policies.get(policy)))
    if new_policy is not None:
        layer.dtype_policy = new_policy


def in_float32(value: Any) -> Any:
    """Casts a low tensor to float32, with its mask and logits; returns anything else unchanged.

    For the result of `in_low` it returns the float32 tensor that was cast.
    """
    exact = before_cast(value)
    return _cast_annotated(exact, "float32") if is_low(exact) else exact


def before_cast(value: Any) -> Any:
    """Returns the float32 tensor that `in_low` cast; anything else unchanged."""
    return getattr(value, _EXACT, value)


def in_low(value: Tensor, dtype: str) -> Tensor:
    """Casts a tensor, also a symbolic one, to a low dtype, so that `in_float32` can undo it."""
    if isinstance(value, keras.KerasTensor):
        return keras.KerasTensor(value.shape, dtype=dtype, sparse=value.sparse)
    result = _cast_annotated(value, dtype)
    setattr(result, _EXACT, value)
    return result


def lowered(values: Nest, dtype: str) -> Nest:
    """Casts the float tensors in a structure, also symbolic ones, to a dtype; see `in_low`."""

    def lower(x: Any) -> Any:
        is_tensor = keras.ops.is_tensor(x) or isinstance(x, keras.KerasTensor)
        if not is_tensor:
            return x
        dtype_now = keras.backend.standardize_dtype(x.dtype)
        if dtype_now not in FLOAT_DTYPES or dtype_now == dtype:
            return x
        exact = in_float32(x)
        return in_low(exact, dtype) if dtype in LOW_PRECISION else _cast_annotated(exact, dtype)

    return keras.tree.map_structure(lower, values)


def _cast_annotated(value: Tensor, dtype: str) -> Tensor:
    result = keras.ops.cast(value, dtype)
    copy_annotations(value, result)
    return result


def is_low(value: Any) -> bool:
    """Whether something is a tensor of a low dtype."""
    standard = keras.backend.standardize_dtype
    return keras.ops.is_tensor(value) and standard(value.dtype) in LOW_PRECISION


def _is_map(policy: KerasPolicy) -> bool:
    return isinstance(policy, keras.dtype_policies.DTypePolicyMap)


def _float_name(policy: KerasPolicy) -> str:
    # Not the policy's name: a map of policies removes the names of its entries on saving.
    compute = str(policy.compute_dtype)
    return compute if compute == policy.variable_dtype else f"mixed_{compute}"
