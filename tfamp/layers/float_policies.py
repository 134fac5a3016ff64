"""What a layer computes in, and which layers a mixed policy gave that; quantization stays apart.

Keras tells by a layer's policy whether its weights are quantized: `int8_from_mixed_bfloat16` is
quantized to int8 and computes in bfloat16. A plain policy on such a layer would make numbers of its
integers. So whoever wants another dtype names the float part alone, its *float policy*, and a
quantized layer gets its *counterpart*: the same quantization from that float policy. This is the
one place where layers get another dtype.
"""

from __future__ import annotations

import copy
import weakref
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import keras
import numpy as np
import tensorflow as tf

from tfamp.core.dtypes import FLOAT_DTYPES, LOW_PRECISION, float_format
from tfamp.interop.keras_hooks import copy_annotations, reading_variables_in
from tfamp.policy import Policy

# The attribute of a low tensor with the float32 tensor that it was made of.
_EXACT = "_tfamp_float32"
_Value = TypeVar("_Value")


class WeakMap(Generic[_Value]):
    """A dict from objects to values that keeps no object alive and compares by identity.

    Layers of a user's own may define `__eq__`, so weakref's dictionaries will not do.
    """

    def __init__(self) -> None:
        self._items: dict[int, tuple[weakref.ref[Any], _Value]] = {}

    def get(self, key: Any) -> _Value | None:
        """Returns the value of an object, None if it has none."""
        item = self._items.get(id(key))
        return item[1] if item is not None and item[0]() is key else None

    def set(self, key: Any, value: _Value | None) -> None:
        """Gives an object a value, in place of the one it has; None takes it out."""
        if value is None:
            self.discard(key)
            return
        items, number = self._items, id(key)

        def drop(dead: weakref.ref[Any]) -> None:
            # The number may have been given to a new object since.
            if number in items and items[number][0] is dead:
                del items[number]

        items[number] = (weakref.ref(key, drop), value)

    def discard(self, key: Any) -> None:
        """Takes an object out, if it is there."""
        if self.get(key) is not None:
            del self._items[id(key)]

    def alive(self) -> list[Any]:
        """Returns the objects that still exist, in the order they came."""
        alive = [reference() for reference, _ in list(self._items.values())]
        return [key for key in alive if key is not None]


@dataclass(eq=False)
class ManagedLayer:
    """A layer whose dtype came from a mixed policy, and what its roles make of it.

    Attributes:
        policy: The policy it was created under.
        output_of: Functionals it is an output layer of.
        interior_of: Functionals it is an interior layer of.
        raised: The layer and those of its sublayers that had its policy, while they are raised.
        low_outputs: Which of its outputs were low before it was raised.
        follows_input: Whether its own policy is float32, and only its outputs are low: where its
            input is, and while it is not raised.
    """

    policy: Policy
    output_of: WeakMap[bool] = field(default_factory=WeakMap)
    interior_of: WeakMap[bool] = field(default_factory=WeakMap)
    raised: list[weakref.ref[Any]] = field(default_factory=list)
    low_outputs: tuple[int, ...] = ()
    follows_input: bool = False

    @property
    def policy_name(self) -> str:
        """Name of the Keras policy that the layer has while it is not raised."""
        return "float32" if self.follows_input else self.policy.name


managed_layers: WeakMap[ManagedLayer] = WeakMap()


def is_built_in(layer: Any) -> bool:
    """Whether Keras itself defines the layer's class."""
    return type(layer).__module__.partition(".")[0] == "keras"


def policy_of(layer: Any) -> Any:
    """The policy a layer computes under: of a map of policies, its own entry.

    That goes by its path, which it gets when it is built; until then it is the map itself.
    """
    policy = layer.dtype_policy
    if not _is_map(policy) or not layer.built:
        return policy
    # Without a path: one that is never built, such as Dropout.
    return policy[layer.path] if layer.path else policy.default_policy


def quantization_of(layer: Any) -> str | None:
    """How Keras has quantized a layer: "int8", "gptq" and so on; None where it is not."""
    mode = policy_of(layer).quantization_mode
    return None if mode is None else str(mode)


def is_plain(policy: Any) -> bool:
    """Whether a Keras policy is one dtype, or a mixed one; no map of policies, not quantized."""
    plain = (keras.DTypePolicy, keras.FloatDTypePolicy)
    return type(policy) in plain and policy.compute_dtype in FLOAT_DTYPES


def float_policy(layer: Any) -> str | None:
    """The name of what a layer computes in; None where its policy is neither plain nor quantized.

    Example:
        >>> float_policy(keras.layers.Dense(4, dtype="int8_from_mixed_bfloat16"))
        'mixed_bfloat16'
    """
    policy = policy_of(layer)
    if _is_map(policy) or (policy.quantization_mode is None and not is_plain(policy)):
        return None
    return _float_name(policy)


def policy_with(layer: Any, float_name: str) -> Any:
    """A new policy for a layer that computes in another dtype, of a quantized one its counterpart.

    None where it has none with which it computes what it computes now, but for rounding.

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


def give_policy(layer: Any, policy: Any) -> None:
    """Gives a layer a policy or the one of a name; where Keras has quantized it, the counterpart.

    A quantized layer that has no such counterpart stays as it is.
    """
    wanted = policy
    if policy_of(layer).quantization_mode is not None:
        wanted = policy_with(layer, _float_name(keras.dtype_policies.get(policy)))
    if wanted is not None:
        layer.dtype_policy = wanted


def in_float32(value: Any) -> Any:
    """A tensor of a low dtype as float32, with its mask and logits; anything else as it is.

    One that `in_low` made of a float32 tensor becomes that tensor.
    """
    given = as_given(value)
    return _cast(given, "float32") if is_low(given) else given


def as_given(value: Any) -> Any:
    """The float32 tensor that `in_low` made a tensor of; anything else as it is."""
    return getattr(value, _EXACT, value)


def in_low(value: Any, dtype: str) -> Any:
    """A tensor, or symbolic one, in a low dtype; `in_float32` returns the given one for it."""
    if isinstance(value, keras.KerasTensor):
        return keras.KerasTensor(value.shape, dtype=dtype, sparse=value.sparse)
    result = _cast(value, dtype)
    setattr(result, _EXACT, value)
    return result


def lowered(values: Any, dtype: str) -> Any:
    """Returns a structure with its float tensors, also symbolic ones, in a dtype, as `in_low`."""

    def lower(x: Any) -> Any:
        if not (keras.ops.is_tensor(x) or isinstance(x, keras.KerasTensor)):
            return x
        given = keras.backend.standardize_dtype(x.dtype)
        if given not in FLOAT_DTYPES or given == dtype:
            return x
        exact = in_float32(x)
        return in_low(exact, dtype) if dtype in LOW_PRECISION else _cast(exact, dtype)

    return keras.tree.map_structure(lower, values)


def _cast(value: Any, dtype: str) -> Any:
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
    if weight.name != "g_idx" and "_scale" not in weight.name:
        return True
    # A layer may be moved while a graph is traced in which it runs.
    with tf.init_scope(), reading_variables_in(None):
        sizes = np.abs(keras.ops.convert_to_numpy(weight).astype(np.float32))
    known = float_format(dtype)
    if weight.name == "g_idx":  # the number of each weight's group, as a float
        return bool(np.all(sizes <= 2 / known.eps))
    return bool(np.all((sizes <= known.max) & ((sizes >= known.tiny) | (sizes == 0))))
