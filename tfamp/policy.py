"""The precision policy as a value: compute, variable and output dtypes. Framework-free.

`layers.policy_in_force` puts a policy in force; `low_dtype` resolves a `dtype` argument.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, cast, get_args

from tfamp.core import dtypes
from tfamp.core.kinds import DType
from tfamp.core.messages import advice, described
from tfamp.core.names import Float32Outputs, LowDtype, PolicyName
from tfamp.core.options import nearest

_MIXED = {f"mixed_{dtype}": dtype for dtype in dtypes.LOW_PRECISION}
_DEFAULT_FLOAT32_LAYERS = ("BatchNormalization",)
# Preprocessing layers are cheap and take raw values that low dtypes cannot hold.
_PREPROCESSING = ".layers.preprocessing."

# The value of `float32_outputs` for float32 sums of low operands.
FLOAT32_SUMS: Final = "sums"

POLICY_NAMES: tuple[PolicyName, ...] = get_args(PolicyName)


@dataclass(frozen=True)
class Policy:
    """The dtypes that layers compute in and store variables in, and the layers that stay float32.

    A policy is an immutable, hashable value, equal to any other with the same contents. Put it
    in force with `tfamp.set_global_policy` or `tfamp.policy_scope`.

    Args:
        name: "mixed_float16" or "mixed_bfloat16": layers compute in the low dtype, variables
            are float32. "float16", "bfloat16", "float32" or "float64": everything in that
            dtype. "auto": resolved at once for this machine to "mixed_bfloat16",
            "mixed_float16" or "float32"; `tfamp doctor` explains the choice.
        float32_layers: Layer classes, or names of layer classes, that stay float32 under a
            mixed policy, subclasses and sublayers included, in addition to BatchNormalization
            and preprocessing layers such as Normalization. The empty tuple keeps none, not even
            these.
        float32_outputs: Whether models return float32 under a mixed policy: True for output
            layers that compute in float32. "sums" for the same but for the product of a Dense or
            EinsumDense: its operands, and those of its gradient, are low, and its sums are
            float32 under XLA, which on CPUs with AMX compiles the product of a training step by
            itself. Without XLA the forward product is float32 under "mixed_bfloat16", and low and
            then cast under "mixed_float16". False for the low dtype.

    Attributes:
        name: The name, never "auto".
        float32_layers: Tuple of the classes and names kept, BatchNormalization first.
        float32_outputs: As in the arguments.

    Raises:
        ValueError: `name` is none of the names above.
        TypeError: An argument has the wrong type, or a class is not of Keras 3, such as
            tf_keras's.

    Example:
        >>> policy = Policy("mixed_float16")
        >>> policy.compute_dtype, policy.variable_dtype, policy.output_dtype
        ('float16', 'float32', 'float32')
        >>> Policy("mixed_float16", float32_layers=["Softmax"]).float32_layers
        ('BatchNormalization', 'Softmax')
    """

    name: PolicyName
    # A tuple, made of any sequence that is given.
    float32_layers: Sequence[type | str] = field(default=_DEFAULT_FLOAT32_LAYERS, kw_only=True)
    float32_outputs: Float32Outputs = field(default=True, kw_only=True)

    def __post_init__(self) -> None:
        # Fields are normalized here; the dataclass is frozen for its users.
        object.__setattr__(self, "name", _resolved_name(self.name))
        object.__setattr__(self, "float32_layers", _normalised_layers(self.float32_layers))
        check_outputs(self.float32_outputs)

    @property
    def is_mixed(self) -> bool:
        """Whether layers compute in a lower dtype than their variables have."""
        return self.name in _MIXED

    @property
    def compute_dtype(self) -> str:
        """The dtype layers compute in."""
        return _MIXED.get(self.name, self.name)

    @property
    def variable_dtype(self) -> str:
        """The dtype of the variables layers create."""
        return "float32" if self.is_mixed else self.name

    @property
    def output_dtype(self) -> str:
        """The dtype models return."""
        return "float32" if self.is_mixed and self.float32_outputs else self.compute_dtype

    def keeps_float32(self, layer_class: type) -> bool:
        """Returns whether layers of a class stay float32 under this policy.

        No other code reads `float32_layers`: policies, levels and reports ask here. Three
        decisions are not about the class: levels leave layers that prepare data alone, whatever
        `float32_layers` says; output layers of models are float32 by `float32_outputs`; and
        sublayers follow the layer that they are in.

        Args:
            layer_class: A layer class; it is kept if it or any of its base classes is in
                `float32_layers`, by identity or by name, or is one of Keras's preprocessing
                layers.

        Returns:
            True under a mixed policy that keeps the class, else False.

        Example:
            >>> class BatchNormalization: ...
            >>> class MyNorm(BatchNormalization): ...
            >>> Policy("mixed_bfloat16").keeps_float32(MyNorm)
            True
        """
        if not self.is_mixed or not self.float32_layers:
            return False
        return prepares_data(layer_class) or any(
            base in self.float32_layers or base.__name__ in self.float32_layers
            for base in layer_class.__mro__
        )


def check_outputs(value: Any) -> None:
    """Raises a TypeError for a value of `float32_outputs` that is neither a bool nor "sums"."""
    if isinstance(value, bool) or (isinstance(value, str) and value == FLOAT32_SUMS):
        return
    raise TypeError(
        f"float32_outputs must be True or False, or {FLOAT32_SUMS!r} for low operands of the "
        f"products of output layers; got {value!r}."
    )


def prepares_data(layer_class: type) -> bool:
    """Whether a class is one of Keras's preprocessing layers, or derives from one."""
    return any(
        base.__module__.startswith("keras") and _PREPROCESSING in f"{base.__module__}."
        for base in layer_class.__mro__
    )


def low_dtype(dtype: DType | None) -> LowDtype | None:
    """Returns the low dtype that an argument means, as `core.dtypes.given_low_dtype` reads it.

    None and "auto" mean the compute dtype of the policy "auto". Returns None for float32.
    """
    automatic = dtypes.given_low_dtype(dtype) or Policy("auto").compute_dtype
    return next((low for low in dtypes.LOW_PRECISION if low == automatic), None)


def policy_named(name: str, **fields: Any) -> Policy:
    """Returns the policy of a name that the program has computed, which no type checker knows."""
    return Policy(cast("PolicyName", name), **fields)


def _resolved_name(name: object) -> str:
    if not isinstance(name, str):
        policy_name = getattr(name, "name", None)  # of a policy
        hint = f" Give its name, {policy_name!r}." if policy_name in POLICY_NAMES else ""
        raise TypeError(
            f"name must be a string, one of {', '.join(POLICY_NAMES)}; got {name!r} of type "
            f"{type(name).__name__}.{hint}"
        )
    mode, is_quantized, float_name = name.partition("_from_")
    if is_quantized and float_name in POLICY_NAMES:
        raise ValueError(
            f"{name!r} is the policy of layers that Keras has quantized, and a tfamp.Policy is "
            f"not quantized: give {float_name!r}, and quantize the finished model with "
            f"model.quantize({mode.partition('/')[0]!r}). Levels and policies keep its "
            "quantized layers."
        )
    if name not in POLICY_NAMES:
        raise ValueError(
            f"name must be one of {', '.join(POLICY_NAMES)}; got {name!r}{_suggestion(name)}"
        )
    if name == "auto":
        from tfamp.machine import hardware

        return hardware.automatic_policy(hardware.detect())[0]
    return name


def _suggestion(name: str) -> str:
    """Returns the end of a message about an unknown policy: what its name probably means."""
    if advice_on_level := dtypes.level_hint(name):
        return f".{advice_on_level}"
    if name.lower() in ("amp", "mixed", "mixed_precision"):
        return (
            "; did you mean 'auto', which takes mixed_float16, mixed_bfloat16 or float32 as this "
            "machine computes?"
        )
    if re.match(r"(mixed_)?(fp8|float8)", name.lower()):
        return ". 8-bit floats are not supported: give 'mixed_bfloat16' or 'mixed_float16'."
    bare = name.lower().removeprefix("mixed_")
    dtype = dtypes.dtype_by_other_name(bare)
    if dtype in dtypes.LOW_PRECISION:
        # "fp16" elsewhere means mixed precision; tfamp's "float16" has float16 variables.
        return f"; did you mean 'mixed_{dtype}'?"
    return f"; did you mean {dtype or nearest(name, POLICY_NAMES)!r}?"


def _normalised_layers(layers: object) -> tuple[type | str, ...]:
    if isinstance(layers, str | type) or not isinstance(layers, Iterable):
        raise TypeError(
            "float32_layers must be a sequence of layer classes or their names, such as "
            f"(keras.layers.LayerNormalization,); got {layers!r}."
        )
    kept = tuple(layers)
    for layer in kept:
        if not isinstance(layer, str | type):
            raise TypeError(
                "float32_layers must hold layer classes or their names; got "
                f"{layer!r} of type {type(layer).__name__}. Give the class, not a layer of it."
            )
        if advice(layer):
            raise TypeError(
                "float32_layers must hold layer classes of Keras 3, or their names; got "
                f"{described(layer)} No layer of Keras 3 is an instance of it."
            )
    if not kept:
        return ()
    # Without duplicates, in the order of the argument.
    return tuple(dict.fromkeys((*_DEFAULT_FLOAT32_LAYERS, *kept)))
