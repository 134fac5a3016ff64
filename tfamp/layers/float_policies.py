"""What a layer computes in, quantization apart; the one place where layers get another dtype.

Keras tells by a layer's policy whether its weights are quantized: `int8_from_mixed_bfloat16` is
quantized to int8 and computes in bfloat16. A plain policy on such a layer would make numbers of its
integers. So whoever wants another dtype names the float part alone, its *float policy*, and a
quantized layer gets its *counterpart*: the same quantization from that float policy.
"""

from __future__ import annotations

import copy
from typing import Any

import keras
import numpy as np

from tfamp.core.dtypes import FLOAT_DTYPES, LOW_PRECISION, float_format
from tfamp.interop.keras_hooks import variables_as_stored


def policy_of(layer: Any) -> Any:
    """Returns the policy a layer computes under: of a map of policies, its own entry.

    That goes by its path, which it gets when it is built; until then the map itself is returned.
    """
    policy = layer.dtype_policy
    if not _is_map(policy) or not layer.built:
        return policy
    # Without a path: one that is never built, such as Dropout.
    return policy[layer.path] if layer.path else policy.default_policy


def quantization_of(layer: Any) -> str | None:
    """Returns how Keras has quantized a layer: "int8", "gptq" and so on; None if it has not."""
    mode = policy_of(layer).quantization_mode
    return None if mode is None else str(mode)


def is_plain(policy: Any) -> bool:
    """Whether a Keras policy is one dtype, or a mixed one; no map of policies, not quantized."""
    plain = (keras.DTypePolicy, keras.FloatDTypePolicy)
    return type(policy) in plain and policy.compute_dtype in FLOAT_DTYPES


def float_policy(layer: Any) -> str | None:
    """Returns the name of what a layer computes in, quantization apart.

    Args:
        layer: A layer.

    Returns:
        "float32", "mixed_bfloat16" and so on; None where its policy is neither plain nor quantized.

    Example:
        >>> float_policy(keras.layers.Dense(4, dtype="int8_from_mixed_bfloat16"))
        'mixed_bfloat16'
    """
    policy = policy_of(layer)
    if _is_map(policy) or (policy.quantization_mode is None and not is_plain(policy)):
        return None
    return _float_name(policy)


def policy_with(layer: Any, float_name: str) -> Any:
    """Returns the policy of a layer that computes in another dtype.

    Args:
        layer: A layer.
        float_name: Name of a plain or mixed policy.

    Returns:
        A new policy, of a quantized layer its counterpart; None where it has none with which it
        computes what it computes now, but for rounding.

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
    if not _holds_quantized(layer, own.quantization_mode, wanted.compute_dtype):
        return None
    return type(own).from_config({**own.get_config(), "source_name": float_name})


def give_policy(layer: Any, policy: Any) -> bool:
    """Gives a layer a policy; where Keras has quantized it, the counterpart.

    Args:
        layer: A layer.
        policy: A policy or the name of one. Of a quantized policy the float part counts where the
            layer is quantized.

    Returns:
        False if the layer is quantized and has no such counterpart: it is as it was then.
    """
    if policy_of(layer).quantization_mode is None:
        layer.dtype_policy = policy
        return True
    wanted = policy_with(layer, _float_name(keras.dtype_policies.get(policy)))
    if wanted is not None:
        layer.dtype_policy = wanted
    return wanted is not None


def _is_map(policy: Any) -> bool:
    return isinstance(policy, keras.dtype_policies.DTypePolicyMap)


def _float_name(policy: Any) -> str:
    # Not the policy's name: a map of policies takes the names of its entries away when it is saved.
    compute = str(policy.compute_dtype)
    return compute if compute == policy.variable_dtype else f"mixed_{compute}"


def _holds_quantized(layer: Any, mode: str, dtype: str) -> bool:
    """Whether a dtype holds what a quantized layer computes with, so that only rounding differs."""
    if mode == "float8":
        # Its inputs have three bits behind the leading one: a value that is rounded before may end
        # a whole step, an eighth, away.
        return False
    if dtype not in LOW_PRECISION:
        return True
    if dtype == "float16" and (mode == "int8" or getattr(layer, "inputs_quantizer", None)):
        return False  # sums of products of integers, beyond its range
    return all(_holds(weight, dtype) for weight in layer.weights)


def _holds(weight: Any, dtype: str) -> bool:
    """Whether a dtype holds a weight that Keras casts to it: a scale, or the groups' numbers."""
    import tensorflow as tf

    if weight.name != "g_idx" and "_scale" not in weight.name:
        return True
    # A layer may be moved while a graph is traced in which it runs.
    with tf.init_scope(), variables_as_stored():
        sizes = np.abs(keras.ops.convert_to_numpy(weight).astype(np.float32))
    known = float_format(dtype)
    if weight.name == "g_idx":  # the number of each weight's group, as a float
        return bool(np.all(sizes <= 2 / known.eps))
    return bool(np.all((sizes <= known.max) & ((sizes >= known.tiny) | (sizes == 0))))
