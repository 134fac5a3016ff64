"""Every op with a low kernel is in the table of kernels, or known not to need a row."""

import pytest

from helpers.kernel_categories import CATEGORIES, INTERNAL
from tfamp.core.dtypes import LOW_PRECISION
from tfamp.interop import tf_private
from tfamp.planning.kernels import OPS


def _low_ops() -> set[str]:
    """Ops with a kernel that is registered for a low dtype, on any device of the wheel."""
    return {
        op
        for op in tf_private.known_ops()
        if any(
            dtypes & set(LOW_PRECISION)
            for kernel in tf_private.kernels(op)
            if kernel.device in ("cpu", "gpu", "default")
            for dtypes in kernel.dtypes.values()
        )
    }


@pytest.mark.slow
def test_every_op_with_a_low_kernel_has_a_row_or_a_reason():
    found = {op for op in _low_ops() if not INTERNAL.fullmatch(op)}
    new = sorted(found - OPS - frozenset().union(*CATEGORIES.values()))
    assert not new, (
        f"{', '.join(new)}: a low kernel and neither a row in tfamp/planning/kernels.py nor a "
        "category in tests/helpers/kernel_categories.py. Measure it on some 10,000 terms first."
    )


def test_an_op_is_in_one_place():
    everywhere = [*OPS, *(op for ops in CATEGORIES.values() for op in ops)]
    assert not sorted({op for op in everywhere if everywhere.count(op) > 1})


def test_all_ops_of_the_categories_exist():
    named = frozenset().union(*CATEGORIES.values(), OPS)
    assert not sorted(named - tf_private.known_ops())
