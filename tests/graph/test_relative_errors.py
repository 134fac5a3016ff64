"""The error that comparisons and searches state."""

import math

import ml_dtypes
import numpy as np
import pytest

from tfamp.graph.relative_errors import largest_error, relative_error


@pytest.mark.parametrize(
    ("value", "reference", "error"),
    [
        ([1, 2], [1, 2], 0.0),
        ([1, 3], [1, 4], 0.25),
        ([0.5, -4], [1, -4], 0.125),
        ([1], [0], math.inf),
        ([0], [0], 0.0),
        ([math.inf], [1], math.inf),
        ([math.nan, 1], [1, 1], math.inf),
        ([math.inf, 3], [math.inf, 4], 0.25),
        ([5.0], [math.nan], 0.0),
        ([], [], 0.0),
        (np.array([1.0, 257.0], ml_dtypes.bfloat16), [1.0, 257.0], 1 / 257),
    ],
)
def test_the_largest_difference_over_the_largest_magnitude(value, reference, error):
    assert relative_error(np.array(value), np.array(reference, float)) == error


def test_of_several_tensors_it_is_the_worst_and_other_shapes_or_counts_are_wrong_at_all():
    assert largest_error([[1.0], [3.0]], [[1.0], [4.0]]) == 0.25
    assert largest_error([], []) == 0.0
    assert relative_error([1, 2], [1]) == largest_error([[1.0]], []) == math.inf
