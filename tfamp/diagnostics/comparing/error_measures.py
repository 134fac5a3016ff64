"""How far values are from what float32 gives, and how much of them a dtype cannot hold."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tfamp.core.dtypes import float_format


@dataclass(frozen=True, slots=True)
class RangeShares:
    """Magnitudes of float32 values against the range of a dtype.

    Attributes:
        max_abs: The largest finite magnitude; 0 where there is none.
        overflow: Share of the values that are finite and too large.
        underflow: Share of the values that are not 0 and smaller than the smallest positive value.
    """

    max_abs: float
    overflow: float
    underflow: float


def relative_error(value: Any, reference: Any) -> float:
    """Returns the largest difference over the largest magnitude of the reference.

    What is not finite in the reference is left out. A value that is not finite where the reference
    is makes the error inf.

    Example:
        >>> relative_error([1.0, 3.5], [1.0, 4.0])
        0.125
    """
    value, reference = _float64(value), _float64(reference)
    if value.shape != reference.shape:
        raise ValueError(f"The shapes differ: {value.shape} and {reference.shape}.")
    finite = np.isfinite(reference)
    value, reference = value[finite], reference[finite]
    if not reference.size:
        return 0.0
    if not np.isfinite(value).all():
        return math.inf
    difference = float(np.max(np.abs(value - reference)))
    magnitude = float(np.max(np.abs(reference)))
    if not difference:
        return 0.0
    return difference / magnitude if magnitude else math.inf


def largest_error(values: Sequence[Any], references: Sequence[Any]) -> float:
    """Returns the largest relative error of several tensors; 0 for none."""
    return max(map(relative_error, values, references), default=0.0)


def range_shares(values: Sequence[Any], dtype: str) -> RangeShares:
    """Returns how much of some values a dtype cannot hold.

    Args:
        values: Arrays.
        dtype: A float dtype's name.

    Example:
        >>> range_shares([[0.0, 1e-9, 1.0, 1e5]], "float16")
        RangeShares(max_abs=100000.0, overflow=0.25, underflow=0.25)
    """
    limits = float_format(dtype)
    flat = [np.abs(_float64(value)).ravel() for value in values]
    size = np.concatenate(flat) if flat else np.zeros(0)
    count = max(size.size, 1)
    finite = size[np.isfinite(size)]
    small = (finite > 0) & (finite < limits.smallest_subnormal)
    return RangeShares(
        max_abs=float(np.max(finite, initial=0.0)),
        overflow=float(np.count_nonzero(finite > limits.max) / count),
        underflow=float(np.count_nonzero(small) / count),
    )


def _float64(value: Any) -> np.ndarray[Any, Any]:
    return np.asarray(value).astype(np.float64)
