"""Errors of a run's values: largest difference over largest magnitude, as reports state them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from tfamp.core.kinds import Tensor


def relative_error(value: Tensor, reference: Tensor) -> float:
    """Returns the largest difference over the largest magnitude, where the reference is finite.

    It is inf for another shape, and for a value that is not finite where the reference is.
    """
    value, reference = in_float64(value), in_float64(reference)
    if value.shape != reference.shape:
        return math.inf
    finite = np.isfinite(reference)
    value, reference = value[finite], reference[finite]
    if not np.isfinite(value).all():
        return math.inf
    difference = float(np.max(np.abs(value - reference), initial=0.0))
    magnitude = float(np.max(np.abs(reference), initial=0.0))
    if not magnitude:
        return math.inf if difference else 0.0
    return difference / magnitude


def largest_error(values: Sequence[Tensor], references: Sequence[Tensor]) -> float:
    """Returns the largest relative error of several tensors; 0 for none."""
    if len(values) != len(references):
        return math.inf
    return max(map(relative_error, values, references), default=0.0)


def in_float64(value: Tensor) -> np.ndarray:
    """Returns a value as an array of float64, which holds every number of the other dtypes."""
    return np.asarray(value).astype(np.float64)
