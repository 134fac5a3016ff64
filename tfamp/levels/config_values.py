"""Reads the values of a `PrecisionConfig` as people write them; framework-free."""

from __future__ import annotations

import difflib
import json
import numbers
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from tfamp.core.dtypes import LOW_PRECISION
from tfamp.core.options import (
    DynamicLossScale,
    FixedLossScale,
    GradClip,
    LossScale,
    resolve_grad_clip,
)

LEVELS = ("O0", "O1", "O2", "O3", "auto")
_DTYPES = {
    **{name: name for name in LOW_PRECISION},
    **{f"mixed_{name}": name for name in LOW_PRECISION},
    "half": "float16",
    "fp16": "float16",
    "bf16": "bfloat16",
    "float32": "float32",
}

# What other systems call the fields: torch's and mmdetection's GradScaler, MindSpore's manager,
# DeepSpeed's configuration.
_DYNAMIC_NAMES = {
    **{name: name for name in DynamicLossScale.__dataclass_fields__},
    "init_scale": "initial_scale",
    "growth_interval": "growth_steps",
    "init_loss_scale": "initial_scale",
    "scale_factor": "growth_factor",
    "scale_window": "growth_steps",
    "loss_scale_window": "growth_steps",
    "min_loss_scale": "min_scale",
    "max_loss_scale": "max_scale",
}
_FIXED_NAMES = {
    **{name: name for name in FixedLossScale.__dataclass_fields__},
    "loss_scale": "scale",
    "drop_overflow_update": "skip_nonfinite",
}


def nearest(name: object, known: Iterable[str]) -> str:
    """Returns the known name that is spelled most like a name."""
    names = list(known)
    lower = {each.lower(): each for each in names}
    found = difflib.get_close_matches(str(name).lower(), lower, n=1, cutoff=0.0)
    return lower[found[0]] if found else names[0]


def check_keys(what: str, given: Iterable[object], known: Iterable[str]) -> None:
    """Raises a ValueError that names the first unknown key and the nearest known one."""
    known = tuple(known)
    for key in given:
        if key not in known:
            raise ValueError(
                f"{what} has no key {key!r}; did you mean {nearest(key, known)!r}? "
                f"Known: {', '.join(known)}."
            )


def read_level(value: Any) -> str:
    """Returns the level, "O0" to "O3" or "auto", in this spelling.

    Args:
        value: The name, in capitals or not; the number 0 to 3 will do.

    Raises:
        TypeError: It is neither a string nor a whole number.
        ValueError: There is no such level.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        value = f"O{value}"
    if not isinstance(value, str):
        raise TypeError(
            f"level must be one of {', '.join(LEVELS)}; got {value!r} of type "
            f"{type(value).__name__}."
        )
    spelled = {level.lower(): level for level in LEVELS}
    if value.lower() not in spelled:
        hint = ""
        if re.fullmatch(r"0[0-3]", value):
            hint = " Levels begin with the letter O, not with a zero."
        raise ValueError(
            f"level must be one of {', '.join(LEVELS)}; got {value!r}, did you mean "
            f"{nearest(value, LEVELS)!r}?{hint}"
        )
    return spelled[value.lower()]


def read_dtype(value: Any) -> str | None:
    """Returns "float16", "bfloat16" or "float32"; None, also for "auto", for the machine's choice.

    Args:
        value: The name of a dtype, or a dtype of TensorFlow or NumPy.

    Raises:
        TypeError: It is no dtype.
        ValueError: It is another dtype.
    """
    if value is None:
        return None
    name = getattr(value, "name", getattr(value, "__name__", value))
    if not isinstance(name, str):
        raise TypeError(
            f"dtype must be 'float16', 'bfloat16' or None; got {value!r} of type "
            f"{type(value).__name__}."
        )
    if name.lower() == "auto":
        return None
    if name.lower() not in _DTYPES:
        raise ValueError(
            f"dtype must be 'float16', 'bfloat16' or None; got {value!r}, did you mean "
            f"{nearest(name, _DTYPES)!r}?"
        )
    return _DTYPES[name.lower()]


def read_loss_scale(value: Any) -> LossScale | str | float | None:
    """Returns a loss scale as `LossScaleOptimizer` takes it, or "none" for none at all.

    Args:
        value: None for the level's own. A `FixedLossScale` or `DynamicLossScale`; a number for a
            fixed one; "dynamic"; "none" or False for none; a dict of the fields of one of the
            classes, under the names that torch, mmdetection, MindSpore or DeepSpeed give them too.

    Raises:
        TypeError: A value has the wrong type.
        ValueError: A key is unknown, or a value out of range.
    """
    if value is None or isinstance(value, FixedLossScale | DynamicLossScale):
        return value
    if value is False:
        return "none"
    if isinstance(value, str):
        return _named_loss_scale(value)
    if isinstance(value, Mapping):
        return _loss_scale_of_dict(value)
    return _fixed("loss_scale", value)


def _fixed(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(
            f"{name} must be a number, 'dynamic', 'none', a dict, a FixedLossScale or a "
            f"DynamicLossScale; got {value!r} of type {type(value).__name__}."
        )
    return FixedLossScale(float(value)).scale


def _named_loss_scale(name: str) -> str | float:
    if name.lower() in ("dynamic", "none"):
        return name.lower()
    try:
        number = float(name)
    except ValueError:
        raise ValueError(
            "loss_scale must be a number, 'dynamic', 'none', a dict, a FixedLossScale or a "
            f"DynamicLossScale; got {name!r}."
        ) from None
    return _fixed("loss_scale", number)


def _loss_scale_of_dict(given: Mapping[Any, Any]) -> LossScale:
    values = dict(given)
    # mmcv's own scaler says with a word of its own which of the two it is.
    mode = values.pop("mode", "dynamic")
    if mode == "static":
        values = {"scale": values.get("init_scale", FixedLossScale.scale)}
    elif mode != "dynamic":
        raise ValueError(f"loss_scale has mode {mode!r}; it is 'dynamic' or 'static'.")
    names = {**_DYNAMIC_NAMES, **_FIXED_NAMES}
    check_keys("loss_scale", values, names)
    fixed = [key for key in values if key in _FIXED_NAMES]
    dynamic = [key for key in values if key in _DYNAMIC_NAMES]
    if fixed and dynamic:
        raise ValueError(
            f"loss_scale has {fixed[0]!r}, which is of a fixed scale, and {dynamic[0]!r}, which is "
            "of a dynamic one; give the keys of one of them."
        )
    arguments: dict[str, Any] = {}
    for key, value in values.items():
        if names[key] in arguments:
            raise ValueError(f"loss_scale gives {names[key]} twice, the second time as {key!r}.")
        arguments[names[key]] = value
    if fixed:
        return FixedLossScale(**arguments)
    if "scale_factor" in values and "backoff_factor" not in values:
        # Where it is called so, the scale falls by the factor that it grows by.
        DynamicLossScale(growth_factor=values["scale_factor"])
        arguments["backoff_factor"] = 1.0 / values["scale_factor"]
    return DynamicLossScale(**arguments)


def loss_scale_to_plain(value: LossScale | str | float | None) -> Any:
    """Returns a loss scale as JSON and TOML can hold it, for `read_loss_scale`."""
    if isinstance(value, FixedLossScale):
        return {"scale": value.scale, "skip_nonfinite": value.skip_nonfinite}
    if isinstance(value, DynamicLossScale):
        return {name: getattr(value, name) for name in DynamicLossScale.__dataclass_fields__}
    return value


def read_keep_float32(value: Any) -> tuple[Any, ...]:
    """Returns what is to stay float32 as a tuple; a single thing will do.

    Args:
        value: A string (name of a layer, or regular expression), a class or a layer, or several.

    Raises:
        TypeError: It is something else.
        ValueError: A string is no regular expression.
    """
    if value is None:
        return ()
    single = isinstance(value, str | type) or not isinstance(value, Iterable)
    kept = (value,) if single else tuple(value)
    for each in kept:
        if isinstance(each, str):
            try:
                re.compile(each)
            except re.error as error:
                raise ValueError(
                    f"keep_float32 holds {each!r}, which is no regular expression: {error}."
                ) from error
        elif isinstance(each, bool | int | float | bytes | Mapping):
            raise TypeError(
                "keep_float32 takes names of layers, regular expressions, layer classes and "
                f"layers; got {each!r} of type {type(each).__name__}."
            )
    return kept


def read_flag(name: str, value: Any) -> bool | None:
    """Returns a bool or None as it is; raises a TypeError for anything else."""
    if value is not None and not isinstance(value, bool):
        raise TypeError(f"{name} must be True, False or None; got {value!r}.")
    return value


def read_grad_clip(value: Any) -> GradClip | None:
    """Returns a `GradClip`, or None; False is None, as no clipping is in some systems' files."""
    return None if value is False else resolve_grad_clip(value)


def from_text(name: str, text: str, read: Callable[[Any], Any]) -> Any:
    """Reads a value out of an environment variable, whose text may be JSON.

    Args:
        name: The variable, for the message.
        text: Its text.
        read: The function above for the value.

    Raises:
        TypeError, ValueError: As `read`, naming the variable.
    """
    value: Any = text.strip()
    if value[:1] in tuple("{["):
        try:
            value = json.loads(value)
        except json.JSONDecodeError as error:
            raise ValueError(f"{name} begins like JSON and is none: {error}.") from error
    try:
        return read(value)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{name}: {error}") from error
