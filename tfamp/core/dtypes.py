"""Names and number-format facts of the float dtypes tfamp works with; framework-free."""

from __future__ import annotations

import functools
import re
from collections.abc import Collection
from typing import Any, NamedTuple, get_args

from tfamp.core.names import LowDtype

LOW_PRECISION: tuple[LowDtype, ...] = get_args(LowDtype)
FLOAT_DTYPES = ("float16", "bfloat16", "float32", "float64")


class FloatFormat(NamedTuple):
    """Range and spacing of one float dtype.

    Attributes:
        max: Largest finite value.
        tiny: Smallest positive normal value.
        smallest_subnormal: Smallest positive value; anything under half of it rounds to zero.
        eps: Distance from 1.0 to the next value.
    """

    max: float
    tiny: float
    smallest_subnormal: float
    eps: float


def given_low_dtype(dtype: Any, others: tuple[str, ...] = ()) -> str | None:
    """Returns the low dtype that an argument names; None for None and "auto".

    Args:
        dtype: "float16" or "bfloat16", also as a dtype of TensorFlow or NumPy; None or "auto".
        others: Names of other dtypes that are accepted.

    Raises:
        ValueError: It is anything else.

    Example:
        >>> import numpy as np
        >>> given_low_dtype("bfloat16"), given_low_dtype(np.float16)
        ('bfloat16', 'float16')
    """
    name = getattr(dtype, "name", getattr(dtype, "__name__", dtype))
    if name is None or name == "auto":
        return None
    if name not in (accepted := (*LOW_PRECISION, *others)):
        choices = ", ".join((*accepted, "auto"))
        bare = str(name).removeprefix("mixed_")
        is_policy = bare != name and bare in accepted
        hint = f" That is a policy; give {bare!r}." if is_policy else dtype_hint(dtype, accepted)
        raise ValueError(f"dtype must be one of {choices}; got {dtype!r}.{hint}")
    return str(name)


# Names that other systems use -> the dtype.
_OTHER_NAMES = {
    **dict.fromkeys(("fp16", "f16", "half"), "float16"),
    **dict.fromkeys(("bf16", "brain_float16"), "bfloat16"),
    **dict.fromkeys(("fp32", "f32", "single", "float", "full"), "float32"),
    **dict.fromkeys(("fp64", "f64", "double"), "float64"),
}


def dtype_by_other_name(name: object) -> str | None:
    """Returns the dtype that a name such as "fp16" or "half" means elsewhere; None for others.

    Example:
        >>> dtype_by_other_name("bf16"), dtype_by_other_name("torch.float16")
        ('bfloat16', 'float16')
    """
    word = str(name).lower().rpartition(".")[2]
    return word if word in FLOAT_DTYPES else _OTHER_NAMES.get(word)


def level_hint(name: object) -> str:
    """Returns advice, to end a message, for a level given instead of a dtype or policy."""
    if not re.fullmatch("[oO][0-3]", str(name)):
        return ""
    level = str(name).upper()
    return f' {level} is a level: use tfamp.prepare(model, optimizer, level="{level}").'


def dtype_hint(name: object, accepted: Collection[str]) -> str:
    """Returns advice, to end a message, for a dtype by another name, or a level; "" for others."""
    meant = dtype_by_other_name(name)
    return f" Did you mean {meant!r}?" if meant in accepted else level_hint(name)


_FORMATS = {
    "float16": FloatFormat(65504.0, 2.0**-14, 2.0**-24, 2.0**-10),
    "bfloat16": FloatFormat((2 - 2.0**-7) * 2.0**127, 2.0**-126, 2.0**-133, 2.0**-7),
    "float32": FloatFormat((2 - 2.0**-23) * 2.0**127, 2.0**-126, 2.0**-149, 2.0**-23),
    "float64": FloatFormat((2 - 2.0**-52) * 2.0**1023, 2.0**-1022, 2.0**-1074, 2.0**-52),
}


@functools.cache
def float_format(dtype: str) -> FloatFormat:
    """Returns the number-format facts of a float dtype.

    Args:
        dtype: "float16", "bfloat16", "float32" or "float64".

    Returns:
        Its `FloatFormat`.

    Example:
        >>> float_format("float16").max
        65504.0
    """
    return _FORMATS[dtype]
