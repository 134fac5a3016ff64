"""Shared by tests of layers."""

import pytest

import tfamp
from helpers.cases import first_of


@pytest.fixture(params=first_of(["float16", "bfloat16"], pytest.mark.nightly))
def low(request):
    """The low dtype of the mixed policy in force."""
    tfamp.set_global_policy(f"mixed_{request.param}")
    return request.param
