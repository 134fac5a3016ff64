"""Names and number-format facts of the float dtypes tfamp works with; framework-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

LOW_PRECISION = ("float16", "bfloat16")
FLOAT_DTYPES = ("float16", "bfloat16", "float32", "float64")


@dataclass(frozen=True)
class FloatFormat:
    """Range and spacing of one float dtype, derived from its exponent and fraction widths.

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


def _ieee_format(exponent_bits: int, fraction_bits: int) -> FloatFormat:
    max_exponent = 2 ** (exponent_bits - 1) - 1
    min_exponent = 1 - max_exponent
    eps = 2.0**-fraction_bits
    return FloatFormat(
        max=(2.0 - eps) * 2.0**max_exponent,
        tiny=2.0**min_exponent,
        smallest_subnormal=2.0**min_exponent * eps,
        eps=eps,
    )


def given_low_dtype(dtype: Any) -> str | None:
    """Returns the low dtype that an argument names; None for None and "auto".

    Args:
        dtype: "float16" or "bfloat16", also as a dtype of TensorFlow or NumPy; None or "auto".

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
    if name not in LOW_PRECISION:
        choices = ", ".join((*LOW_PRECISION, "auto"))
        raise ValueError(f"dtype must be one of {choices}; got {dtype!r}.")
    return str(name)


_FORMATS = {
    "float16": _ieee_format(5, 10),
    "bfloat16": _ieee_format(8, 7),
    "float32": _ieee_format(8, 23),
    "float64": _ieee_format(11, 52),
}


def float_format(dtype: str) -> FloatFormat:
    """Returns the number-format facts of a float dtype.

    Args:
        dtype: "float16", "bfloat16", "float32" or "float64".

    Returns:
        Its `FloatFormat`.

    Raises:
        ValueError: `dtype` is not one of these names.

    Example:
        >>> float_format("float16").max
        65504.0
    """
    if dtype not in _FORMATS:
        raise ValueError(f"dtype must be one of {', '.join(FLOAT_DTYPES)}; got {dtype!r}.")
    return _FORMATS[dtype]
