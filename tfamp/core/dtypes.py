"""Names and number-format facts of the float dtypes tfamp works with; framework-free."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

LOW_PRECISION = ("float16", "bfloat16")
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
        hint = f" That is a policy; give {bare!r}." if is_policy else ""
        raise ValueError(f"dtype must be one of {choices}; got {dtype!r}.{hint}")
    return str(name)


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
