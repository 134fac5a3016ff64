"""Bytes of an element, by dtype."""

from __future__ import annotations

WIDTHS = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8, "int64": 8, "bool": 1}
WIDTHS |= {"int8": 1, "uint8": 1, "int16": 2, "int32": 4, "complex64": 8, "complex128": 16}
WIDTHS |= {"resource": 0, "variant": 0, "string": 0}


def is_float(dtype: str) -> bool:
    """Whether a dtype has a fraction."""
    return "float" in dtype
