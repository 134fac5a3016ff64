"""The option dataclasses accept what makes sense and say what is wrong with the rest."""

import dataclasses

import numpy as np
import pytest

import tfamp

BAD_NUMBERS = [0.0, -1.0, float("nan"), float("inf"), 1e300]


def test_options_are_frozen_hashable_and_of_plain_numbers():
    rule = tfamp.FixedLossScale(2)
    with pytest.raises(dataclasses.FrozenInstanceError):
        rule.scale = 4.0
    assert {rule, tfamp.FixedLossScale(2.0)} == {rule}
    given = tfamp.DynamicLossScale(initial_scale=np.float32(8), growth_steps=np.int64(3))
    assert (type(given.initial_scale), type(given.growth_steps)) == (float, int)


@pytest.mark.parametrize("value", BAD_NUMBERS)
def test_scales_must_be_positive_and_representable(value):
    with pytest.raises(ValueError, match=r"scale must be a number in .* got"):
        tfamp.FixedLossScale(value)
    with pytest.raises(ValueError, match="initial_scale must be a number in"):
        tfamp.DynamicLossScale(initial_scale=value)


@pytest.mark.parametrize("value", ["128", None, True, [1.0], 1j])
def test_scales_must_be_numbers(value):
    with pytest.raises(TypeError, match="scale must be a number; got"):
        tfamp.FixedLossScale(value)
    with pytest.raises(TypeError, match="skip_nonfinite must be True or False; got 1"):
        tfamp.FixedLossScale(2.0, skip_nonfinite=1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"growth_factor": 1.0}, r"growth_factor must be a number in \(1, inf\)"),
        ({"growth_factor": 0.5}, "growth_factor"),
        ({"backoff_factor": 1.0}, r"backoff_factor must be a number in \(0, 1\)"),
        ({"backoff_factor": 0.0}, "backoff_factor"),
        ({"growth_steps": 0}, "growth_steps must be at least 1"),
        ({"hysteresis": 0}, "hysteresis must be at least 1"),
        ({"min_scale": 4.0, "max_scale": 2.0}, "min_scale must not be greater than max_scale"),
        ({"initial_scale": 1.0, "min_scale": 2.0}, r"initial_scale must be a number in \[2"),
        ({"initial_scale": 2.0**33}, "initial_scale"),
        ({"min_scale": 1e-45}, "min_scale"),
    ],
)
def test_dynamic_arguments_out_of_range(arguments, message):
    with pytest.raises(ValueError, match=message):
        tfamp.DynamicLossScale(**arguments)


@pytest.mark.parametrize("scale", [2.0, 8.0])
def test_a_scale_may_start_at_either_of_its_bounds(scale):
    rule = tfamp.DynamicLossScale(initial_scale=scale, min_scale=2.0, max_scale=8.0)
    assert rule.initial_scale == scale
    assert tfamp.DynamicLossScale(initial_scale=scale, min_scale=scale, max_scale=scale)


@pytest.mark.parametrize("name", ["growth_steps", "hysteresis"])
@pytest.mark.parametrize("value", [2.5, "3", True, None])
def test_counts_must_be_whole_numbers(name, value):
    with pytest.raises(TypeError, match=f"{name} must be a whole number"):
        tfamp.DynamicLossScale(**{name: value})
