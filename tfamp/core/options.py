"""Checks of options, for all callers alike, and the options of clipping and weight rounding."""

from __future__ import annotations

import dataclasses
import difflib
import math
import numbers
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, get_args

from tfamp.core import names
from tfamp.core.dtypes import float_format
from tfamp.core.names import LowDtype

_Options = TypeVar("_Options")

# Ways to select the nodes to convert among the safe ones.
PLACEMENTS: tuple[names.Placement, ...] = get_args(names.Placement)


def checked_number(
    name: str, value: object, *, low: float, high: float, bounds: str = "[]"
) -> float:
    """Returns `value` as a float after checking that it is a finite number within bounds.

    In `bounds`, "[" and "]" include a bound, "(" and ")" exclude it.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        kind = type(value).__name__
        raise TypeError(f"{name} must be a number; got {value!r} of type {kind}.")
    number = float(value)
    above = number >= low if bounds[0] == "[" else number > low
    below = number <= high if bounds[1] == "]" else number < high
    if not (above and below):
        interval = f"{bounds[0]}{low:g}, {high:g}{bounds[1]}"
        raise ValueError(f"{name} must be a number in {interval}; got {value!r}.")
    return number


def checked_count(name: str, value: object) -> int:
    """Returns `value` as an int after checking that it is a whole number of at least 1."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(
            f"{name} must be a whole number; got {value!r} of type {type(value).__name__}."
        )
    if value < 1:
        raise ValueError(f"{name} must be at least 1; got {value!r}.")
    return int(value)


def checked_flag(name: str, value: object) -> bool:
    """Returns `value` after checking that it is a bool."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False; got {value!r}.")
    return value


WEIGHT_ROUNDINGS: tuple[names.WeightRounding, ...] = get_args(names.WeightRounding)
SLOT_DTYPES: tuple[names.ComputeDtype, ...] = ("bfloat16", "float16", "float32")


def checked_word(
    name: str, value: object, words: Iterable[str], hint: str = "", *, exact: bool = False
) -> str:
    """Returns the word that equals `value`, ignoring case; errors name the words.

    Args:
        name: The argument, for errors.
        value: What was given for it.
        words: The allowed words.
        hint: A sentence that ends errors.
        exact: Whether case counts, and every other value, of whatever type, is a ValueError.
    """
    known = {word if exact else word.lower(): word for word in words}
    shown = known.values() if exact else map(repr, known.values())
    expected = f"{name} must be one of {', '.join(shown)}; got {value!r}"
    # tf.float16 equals "float16" without being a string.
    if not isinstance(value, str) and not exact:
        raise TypeError(f"{expected} of type {type(value).__name__}.{hint}")
    word = value if exact or not isinstance(value, str) else value.lower()
    if not isinstance(word, str) or word not in known:
        raise ValueError(f"{expected}.{hint}")
    return known[word]


def checked_pattern(name: str, pattern: str) -> re.Pattern[str]:
    """Returns a string compiled, after checking that it is a regular expression."""
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ValueError(
            f"{name} holds {pattern!r}, which is not a regular expression: {error}. To match "
            f"these characters, give {re.escape(pattern)!r}."
        ) from error


def nearest(name: object, known: Iterable[str]) -> str:
    """Returns the known name with the most similar spelling; "" without known names."""
    by_lower = {word.lower(): word for word in known}
    matches = difflib.get_close_matches(str(name).lower(), by_lower, n=1, cutoff=0.0)
    return by_lower[matches[0]] if matches else ""


def from_mapping(
    kind: type[_Options],
    what: str,
    values: object,
    names: Mapping[str, str] | None = None,
    advice: Callable[[str, Any], str] = lambda key, value: "",
) -> _Options:
    """Makes a dataclass from a dict, such as a configuration file holds.

    `names` maps keys to fields if they differ. An error names `what` was read, and the key that
    is unknown, missing, or the second one for its field. `advice` takes an unknown key with its
    value and returns a sentence, or "" for a key that only looks misspelt.
    """
    fields = dataclasses.fields(kind)  # type: ignore[arg-type]
    if not isinstance(values, Mapping):
        raise TypeError(
            f"{what} must be a dict such as {{{fields[0].name!r}: ...}}; got {values!r} of "
            f"type {type(values).__name__}."
        )
    names = names or {field.name: field.name for field in fields}
    for key in values:
        if key not in names:
            meant = advice(str(key), values[key])
            hint = f". {meant}" if meant else f"; did you mean {nearest(key, names)!r}?"
            raise ValueError(f"{what} has no key {key!r}{hint} Known: {', '.join(names)}.")
    arguments = {names[key]: value for key, value in values.items()}
    if len(arguments) < len(values):
        raise ValueError(f"{what} gives one value twice, under two names: {', '.join(values)}.")
    for field in fields:
        if field.default is dataclasses.MISSING and field.name not in arguments:
            raise ValueError(f"{what} needs the key {field.name!r}; got {dict(values)!r}.")
    return kind(**arguments)


def resolve_weight_rounding(
    rounding: str | None, slots: str | None, master_weights: bool | None
) -> tuple[str, str] | None:
    """Returns how low weights are rounded and the dtype of their slots; None for to nearest."""
    if rounding is None:
        if slots is not None:
            raise ValueError(
                f"slots={slots!r} is the dtype of an optimizer's slots for weights whose "
                "updates are not rounded to nearest: give weight_rounding too, one of "
                f"{WEIGHT_ROUNDINGS}."
            )
        return None
    rounding = checked_word("weight_rounding", rounding, WEIGHT_ROUNDINGS)
    if master_weights:
        raise ValueError(
            f"weight_rounding={rounding!r} is there so that low weights need no float32 "
            "masters; got master_weights=True too. Leave one of the two out."
        )
    # Split weights are float32 masters, whose slots are float32 too.
    default = "float32" if rounding == "split" else "bfloat16"
    return rounding, default if slots is None else checked_word("slots", slots, SLOT_DTYPES)


_FLOAT32 = float_format("float32")


def checked_scale(name: str, value: object) -> float:
    """Returns `value` as a float after checking that it is a positive normal float32."""
    return checked_number(name, value, low=_FLOAT32.tiny, high=_FLOAT32.max)


# ---- Sums over replicas ----------------------------------------------------------------


def resolve_aggregation(dtype: LowDtype | None, in_float16: object) -> LowDtype | None:
    """Returns the dtype of `aggregate_in`, or of its older form `aggregate_in_float16`."""
    flag = checked_flag("aggregate_in_float16", in_float16)
    if dtype not in (None, "float16", "bfloat16"):
        raise ValueError(
            "aggregate_in must be 'float16', 'bfloat16' or None for the dtype of the gradients; "
            f"got {dtype!r}."
        )
    if flag and dtype == "bfloat16":
        raise ValueError(
            "aggregate_in='bfloat16' and aggregate_in_float16=True contradict each other. Give "
            "one of them: aggregate_in_float16=True is aggregate_in='float16'."
        )
    return "float16" if flag else dtype


# ---- Clipping --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class GradClip:
    """Clips the gradients of a step, all together, to a norm.

    If the norm of all gradients, as one long vector, is greater than `max_norm`, all are
    multiplied by the factor that makes it `max_norm`. The norm is taken after unscaling and, on
    several replicas, after the sum over the replicas.

    Source: `torch.nn.utils.clip_grad_norm_`, and `grad_clip` in mmdetection's configurations.

    Args:
        max_norm: The greatest norm that is not clipped; positive, in units of the loss over the
            weights' units.
        norm_type: 1 for the sum of magnitudes, 2 for the Euclidean norm, `math.inf` (or "inf")
            for the greatest magnitude.

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
        object.__setattr__(self, "max_norm", checked_scale("max_norm", self.max_norm))
        object.__setattr__(self, "norm_type", _checked_norm_type(self.norm_type))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> GradClip:
        """Makes a GradClip from a dict, such as a configuration file holds.

        Args:
            values: `max_norm` and, optionally, `norm_type`.

        Returns:
            The same as the class called with the values.

        Raises:
            TypeError: A value has the wrong type, or `values` is not a dict.
            ValueError: A key is unknown or missing, or a value is out of range.

        Example:
            >>> GradClip.from_dict({"max_norm": 35, "norm_type": "inf"})
            GradClip(max_norm=35.0, norm_type=inf)
        """
        return from_mapping(cls, "grad_clip", values)

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields for `from_dict`, as types that JSON and TOML have.

        Example:
            >>> GradClip(1.0, norm_type=float("inf")).to_dict()
            {'max_norm': 1.0, 'norm_type': 'inf'}
        """
        name = "inf" if math.isinf(self.norm_type) else self.norm_type
        return {"max_norm": self.max_norm, "norm_type": name}


def _checked_norm_type(value: object) -> float:
    if isinstance(value, bool) or value not in (1, 2, math.inf, "inf"):
        raise ValueError(f"norm_type must be 1, 2 or inf; got {value!r}.")
    return math.inf if value in (math.inf, "inf") else int(value)


def resolve_grad_clip(value: GradClip | Mapping[str, Any] | float | None) -> GradClip | None:
    """Returns the `GradClip` of an argument named `grad_clip`."""
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
