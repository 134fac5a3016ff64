"""`GradClip`: by which norm gradients are clipped, and to how much."""

from __future__ import annotations

import difflib
import math
import numbers
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tfamp.core.dtypes import float_format
from tfamp.core.options import checked_number

_FLOAT32 = float_format("float32")
_NAMES = ("max_norm", "norm_type")


@dataclass(frozen=True, slots=True)
class GradClip:
    """Clips the gradients of a step, all together, to a norm.

    Where the norm of all gradients, taken as one long vector, is greater than `max_norm`, all are
    multiplied by the same factor that makes it `max_norm`. It is the norm of what is applied: after
    unscaling and, on several replicas, of the gradients summed over the replicas.

    Source: `torch.nn.utils.clip_grad_norm_`, and `grad_clip` in mmdetection's configurations.

    Args:
        max_norm: The greatest norm that is left as it is; positive, in units of the loss over
            those of the weights.
        norm_type: 1 for the sum of magnitudes, 2 for the Euclidean norm, `math.inf` (or "inf") for
            the greatest magnitude.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: `max_norm` is not positive and finite, or `norm_type` is another number.

    Example:
        >>> GradClip(35)
        GradClip(max_norm=35.0, norm_type=2)
    """

    max_norm: float
    norm_type: float = 2

    def __post_init__(self) -> None:
        limit = checked_number("max_norm", self.max_norm, low=_FLOAT32.tiny, high=_FLOAT32.max)
        object.__setattr__(self, "max_norm", limit)
        object.__setattr__(self, "norm_type", _checked_norm_type(self.norm_type))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> GradClip:
        """Makes one of a dict, such as a configuration file holds.

        Args:
            values: `max_norm` and, if wanted, `norm_type`.

        Returns:
            The same as the class called with the values.

        Raises:
            TypeError: A value has the wrong type, or `values` is no dict.
            ValueError: A key is unknown or missing, or a value is out of range.

        Example:
            >>> GradClip.from_dict({"max_norm": 35, "norm_type": "inf"})
            GradClip(max_norm=35.0, norm_type=inf)
        """
        if not isinstance(values, Mapping):
            raise TypeError(
                f"grad_clip must be a dict such as {{'max_norm': 1.0}}; got {values!r}."
            )
        for name in values:
            if name not in _NAMES:
                close = difflib.get_close_matches(str(name), _NAMES, n=1, cutoff=0.0)
                raise ValueError(
                    f"grad_clip has no key {name!r}; it takes max_norm and norm_type. The nearest "
                    f"is {close[0]!r}."
                )
        if "max_norm" not in values:
            raise ValueError(f"grad_clip needs the key 'max_norm'; got {dict(values)!r}.")
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """The fields as `from_dict` takes them, of types that JSON and TOML have.

        Example:
            >>> GradClip(1.0, norm_type=float("inf")).to_dict()
            {'max_norm': 1.0, 'norm_type': 'inf'}
        """
        name = "inf" if math.isinf(self.norm_type) else self.norm_type
        return {"max_norm": self.max_norm, "norm_type": name}


def _checked_norm_type(value: Any) -> float:
    if value == "inf":
        return math.inf
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(
            f"norm_type must be 1, 2 or inf; got {value!r} of type {type(value).__name__}."
        )
    if value not in (1, 2, math.inf):
        raise ValueError(f"norm_type must be 1, 2 or inf; got {value!r}.")
    return math.inf if value == math.inf else int(float(value))


def resolve_grad_clip(value: GradClip | Mapping[str, Any] | float | None) -> GradClip | None:
    """Returns what an argument named `grad_clip` means.

    Args:
        value: A `GradClip`, a dict of its fields, a number for the Euclidean norm, or None.

    Returns:
        The `GradClip`, or None.

    Raises:
        TypeError: It is something else.
        ValueError: A number is out of range or a key unknown.
    """
    if value is None or isinstance(value, GradClip):
        return value
    if isinstance(value, Mapping):
        return GradClip.from_dict(value)
    if isinstance(value, numbers.Real) and not isinstance(value, bool):
        return GradClip(float(value))
    raise TypeError(
        "grad_clip must be a GradClip, a dict such as {'max_norm': 1.0}, a number or None; got "
        f"{value!r} of type {type(value).__name__}."
    )
