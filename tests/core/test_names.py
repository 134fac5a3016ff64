"""The types of names and the tuples that checks use hold the same names."""

from typing import get_args

import pytest

import tfamp
from tfamp.core import dtypes, names
from tfamp.core.options import SLOT_DTYPES
from tfamp.levels.precision_config import LEVELS
from tfamp.planning.ways import WAY_NAMES
from tfamp.policy import POLICY_NAMES


def test_the_types_of_names_are_those_that_are_accepted():
    assert get_args(names.Level) == (*LEVELS, "auto")
    assert set(get_args(names.CandidateName)) == set(WAY_NAMES)
    assert set(get_args(names.ComputeDtype)) == set(SLOT_DTYPES)
    mixed = [f"mixed_{low}" for low in dtypes.LOW_PRECISION]
    assert (*dtypes.FLOAT_DTYPES, *mixed, "auto") == POLICY_NAMES


@pytest.mark.parametrize("name", get_args(names.PolicyName))
def test_a_name_that_the_program_has_computed_is_checked_when_it_runs(name):
    computed = "".join(list(name))  # not the literal
    assert tfamp.Policy(computed) == tfamp.Policy(name)
    with pytest.raises(ValueError, match=r"name must be one of float16, bfloat16, .*; got"):
        tfamp.Policy(computed + "x")
