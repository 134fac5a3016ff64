"""The precision policy as a value: which dtype computes, which one variables have. Framework-free.

`layers.policy_state` puts a policy in force; this file only says what one is, and `low_dtype` which
low dtype an argument asks for.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from tfamp.core import dtypes
from tfamp.core.options import checked_flag, nearest

_MIXED = {f"mixed_{dtype}": dtype for dtype in dtypes.LOW_PRECISION}
_DEFAULT_FLOAT32_LAYERS = ("BatchNormalization",)
# What data is made fit for a model with: cheap, and of raw values that low dtypes cannot hold.
_PREPROCESSING = ".layers.preprocessing."

POLICY_NAMES = (*dtypes.FLOAT_DTYPES, *_MIXED, "auto")


@dataclass(frozen=True)
class Policy:
    """Which dtype layers compute in, which one their variables have, and what stays float32.

    A policy is a value: it cannot be changed, can be hashed, and equals any other with the same
    contents. Put it in force with `tfamp.set_global_policy` or `tfamp.policy_scope`.

    Args:
        name: "mixed_float16" or "mixed_bfloat16": layers compute in the low dtype, variables are
            float32. "float16", "bfloat16", "float32" or "float64": everything in that dtype.
            "auto": looks at this machine once, now, and becomes "mixed_bfloat16",
            "mixed_float16" or "float32"; `tfamp doctor` tells which and why.
        float32_layers: Layer classes, or names of layer classes, that stay float32 under a mixed
            policy, subclasses and sublayers included. They are kept in addition to
            BatchNormalization and to the layers that prepare data, such as Normalization; the
            empty tuple keeps none, not even these.
        float32_outputs: Whether models return float32 under a mixed policy.

    Attributes:
        name: The name, never "auto".
        float32_layers: Tuple of the classes and names kept, BatchNormalization first.
        float32_outputs: As given.

    Raises:
        ValueError: `name` is none of the names above.
        TypeError: An argument has the wrong type.

    Example:
        >>> policy = Policy("mixed_float16")
        >>> policy.compute_dtype, policy.variable_dtype, policy.output_dtype
        ('float16', 'float32', 'float32')
        >>> Policy("mixed_float16", float32_layers=["Softmax"]).float32_layers
        ('BatchNormalization', 'Softmax')
    """

    name: str
    float32_layers: tuple[type | str, ...] = field(default=_DEFAULT_FLOAT32_LAYERS, kw_only=True)
    float32_outputs: bool = field(default=True, kw_only=True)

    def __post_init__(self) -> None:
        # The dataclass is frozen for its users; this is where its values are made.
        object.__setattr__(self, "name", _resolved_name(self.name))
        object.__setattr__(self, "float32_layers", _normalised_layers(self.float32_layers))
        checked_flag("float32_outputs", self.float32_outputs)

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

        Args:
            layer_class: A layer class; it is kept if it or any of its base classes is in
                `float32_layers`, by identity or by name, or is one of Keras's that prepare data.

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


def prepares_data(layer_class: type) -> bool:
    """Whether layers of a class make raw data fit for a model: Keras's own, and what derives."""
    return any(
        base.__module__.startswith("keras") and _PREPROCESSING in f"{base.__module__}."
        for base in layer_class.__mro__
    )


def low_dtype(dtype: Any) -> str | None:
    """The low dtype that an argument asks for, as `core.dtypes.given_low_dtype` reads it.

    For None and "auto" the one that the policy "auto" computes in; None where that is float32.
    """
    automatic = dtypes.given_low_dtype(dtype) or Policy("auto").compute_dtype
    return automatic if automatic in dtypes.LOW_PRECISION else None


def _resolved_name(name: object) -> str:
    if not isinstance(name, str):
        own = getattr(name, "name", None)  # a policy has one
        hint = f" Give its name, {own!r}." if own in POLICY_NAMES else ""
        raise TypeError(
            f"name must be a string, one of {', '.join(POLICY_NAMES)}; got {name!r} of type "
            f"{type(name).__name__}.{hint}"
        )
    if name not in POLICY_NAMES:
        raise ValueError(
            f"name must be one of {', '.join(POLICY_NAMES)}; got {name!r}; did you mean "
            f"{nearest(name, POLICY_NAMES)!r}?"
        )
    if name == "auto":
        from tfamp.machine import hardware

        return hardware.automatic_policy(hardware.detect())[0]
    return name


def _normalised_layers(layers: object) -> tuple[type | str, ...]:
    if isinstance(layers, str | type) or not isinstance(layers, Iterable):
        raise TypeError(
            "float32_layers must be a sequence of layer classes or their names, such as "
            f"(keras.layers.LayerNormalization,); got {layers!r}."
        )
    given = tuple(layers)
    for layer in given:
        if not isinstance(layer, str | type):
            raise TypeError(
                "float32_layers must hold layer classes or their names; got "
                f"{layer!r} of type {type(layer).__name__}. Give the class, not a layer of it."
            )
    # dict.fromkeys: without duplicates, in the order given.
    return tuple(dict.fromkeys((*_DEFAULT_FLOAT32_LAYERS, *given))) if given else ()
