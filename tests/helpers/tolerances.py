"""How close two results must be, derived from the spacing of the dtype they were computed in.

Scaling by a power of two is exact, and so is a graph's structure: compare those with `==`.
"""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np

# Allowed error of one rounded operation in units of eps: 2e-3 in float16, 1.6e-2 in bfloat16, 1e-6
# in float32.
_EPS_COUNT = {"float16": 2, "bfloat16": 2, "float32": 8, "float64": 8}


def tolerance(dtype: str, *, depth: int = 1) -> float:
    """Relative tolerance of a result computed in `dtype`.

    Args:
        dtype: Name of the lowest float dtype the computation went through.
        depth: Number of terms added up where the result is a sum (K of a matmul). Rounding errors
            are independent, so they grow like its square root.
    """
    return _EPS_COUNT[dtype] * float(ml_dtypes.finfo(dtype).eps) * math.sqrt(depth)


def assert_close(actual, expected, dtype: str, *, depth: int = 1) -> None:
    """Asserts that `actual` equals `expected` up to rounding in `dtype`.

    With `depth` 1 each element is held to its own magnitude. Terms of a sum may cancel, so from
    depth 2 on every element is held to the largest magnitude in `expected`. Infs and NaNs must be
    in the same places.
    """
    actual, expected = _as_float64(actual), _as_float64(expected)
    assert actual.shape == expected.shape, f"shape {actual.shape}, expected {expected.shape}"
    finite = np.isfinite(expected)
    np.testing.assert_array_equal(actual[~finite], expected[~finite], "non-finite elements differ")
    assert np.isfinite(actual[finite]).all(), "inf or NaN where a finite value is expected"
    if not finite.any():
        return
    actual, expected = actual[finite], expected[finite]
    magnitude = np.abs(expected) if depth == 1 else np.full_like(expected, np.abs(expected).max())
    allowed = tolerance(dtype, depth=depth) * magnitude
    # Below the normal range the spacing no longer shrinks.
    allowed = np.maximum(allowed, float(ml_dtypes.finfo(dtype).smallest_subnormal))
    excess = np.abs(actual - expected) - allowed
    worst = int(np.argmax(excess))
    assert excess[worst] <= 0, (
        f"{np.count_nonzero(excess > 0)} of {excess.size} elements differ by more than rounding in "
        f"{dtype} at depth {depth}; worst: {actual[worst]!r}, expected {expected[worst]!r}, "
        f"allowed difference {allowed[worst]:.3g}"
    )


def assert_all_close(actual, expected, dtype: str, *, depth: int = 1) -> None:
    """As `assert_close`, for each of several pairs."""
    for one, other in zip(actual, expected, strict=True):
        assert_close(one, other, dtype, depth=depth)


def assert_all_equal(actual, expected) -> None:
    """Asserts that each of several pairs has the same numbers, element by element."""
    for one, other in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


def _as_float64(value) -> np.ndarray:
    return np.asarray(value).astype(np.float64)
