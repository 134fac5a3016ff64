"""`stats_of` counts what there is; `Seen` keeps the first bad execution apart from good ones."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from tfamp.graph.measuring.tensor_stats import Run, Seen, TensorStats, stats_of


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
def test_every_kind_of_value_is_counted(dtype):
    smallest = ml_dtypes.finfo(dtype).smallest_subnormal
    values = np.array([[1.0, -3.0, np.inf], [-np.inf, np.nan, 0.0], [smallest, -0.0, 2.0]], dtype)
    stats = stats_of(values)
    assert stats.dtype == np.dtype(dtype).name
    assert (stats.shape, stats.size) == ((3, 3), 9)
    assert (stats.min, stats.max, stats.max_abs) == (-3.0, 2.0, 3.0)
    assert (stats.infs, stats.nans, stats.zeros, stats.subnormals) == (2, 1, 2, 1)
    assert stats.nonfinite


@pytest.mark.parametrize("values", [[], [np.nan], [np.inf]])
def test_without_a_finite_value_the_range_is_zero(values):
    stats = stats_of(np.array(values, np.float32))
    assert (stats.min, stats.max, stats.max_abs) == (0.0, 0.0, 0.0)
    assert stats.nonfinite == bool(values)


def test_the_first_bad_execution_is_kept():
    runs = [[1.0, 2.0], [-5.0, 0.0], [np.nan, 1.0], [np.inf, 9.0]]
    seen = Seen()
    for values in runs:
        seen = seen.then(stats_of(np.array(values, np.float32)))
    assert (seen.executions, seen.bad_at) == (4, 2)
    assert (seen.good.min, seen.good.max, seen.good.zeros) == (-5.0, 2.0, 1)
    assert seen.stats.nans == 1
    assert seen.at(0).max == 2.0
    assert seen.at(3).infs == 1
    assert [seen.is_bad_by(execution) for execution in range(4)] == [False, False, True, True]


def test_late_executions_are_known_in_sum():
    seen = Seen()
    for value in range(200):
        seen = seen.then(stats_of(np.float32(value)))
    assert seen.at(5).max == 5.0
    assert seen.at(150).max == 199.0


def test_a_tensor_that_was_never_computed():
    run = Run({("", "x", 0): Seen().then(TensorStats("float32", (), 1.0, 1.0, 1.0))})
    assert run.finite
    assert run.get(("", "y", 0)).executions == 0
    assert run.get(("", "y", 0)).stats is None
