"""Every op with a low kernel is in the table of kernels, or known not to need a row."""

import inspect
import re

import pytest
from tensorflow.python.framework import ops

from helpers.kernel_categories import CATEGORIES, INTERNAL
from helpers.kernel_paths import has_kernel
from tfamp.core.dtypes import LOW_PRECISION
from tfamp.interop import tf_private
from tfamp.planning.kernels import (
    EIGEN,
    GPU,
    GUARDED_OPS,
    KERNEL_FACTS,
    ONEDNN,
    OPS,
    XLA,
    library_of,
)


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


# ---- Every pair of a row is a kernel -------------------------------------------------------------

_DEVICES = {EIGEN: "cpu", ONEDNN: "cpu", GPU: "gpu", XLA: "tpu"}


def _is_registered(op: str, library: str, dtype: str) -> bool:
    """Whether a kernel of a device has the dtype; for XLA, whether the op's definition allows it.

    Without a build for GPUs none of their kernels is registered: their pairs are not looked at.
    """
    if library == XLA:
        return any(dtype in op_input.floats for op_input in tf_private.op_inputs(op, "tpu"))
    device = _DEVICES[library]
    if device == "gpu" and not has_kernel("MatMul", "float32", device):
        return True
    return has_kernel(op, dtype, device)


@pytest.mark.parametrize("fact", KERNEL_FACTS, ids=lambda fact: f"{fact.op}, {fact.form}")
def test_a_row_names_kernels_that_exist_and_can_be_the_one_that_runs(fact):
    for library, dtype in sorted(fact.low):
        place = f"the row of {fact.op} with form {fact.form!r} in tfamp/planning/kernels.py"
        assert _is_registered(fact.op, library, dtype), (
            f"{place}: this TensorFlow registers no kernel for {dtype} on a {_DEVICES[library]}; "
            f"take ({library}, {dtype}) out of its `low`"
        )
        found = library_of(fact.op, dtype, _DEVICES[library], frozenset(LOW_PRECISION))
        # Eigen's kernel runs where oneDNN does not support the dtype.
        assert library in (found, EIGEN), (
            f"{place}: for this op `library_of` never returns {library}; take ({library}, {dtype}) "
            "out of its `low`, or add the op to ONEDNN_OPS"
        )


# What gradient functions of TensorFlow call to add up, and those that add up nothing low.
_SUMS = re.compile(r"reduce_sum|segment_sum|scatter_nd\b|bias_add_grad|_ReduceGradientArgs?\b")
_EXACT_GRADIENTS = {
    "ApproxTopK TopK TopKV2": "scatter each value to a place of its own",
    "LogSoftmax NthElement Softmax SparseSoftmax": "sum over the last axis, which is exact",
    "Reshape": "adds up slices, which the gradient before it has added up in float32",
    "SparseReduceSum": "spreads; adds up only in a shape",
    "SparseSegmentMean SparseSegmentMeanWithNumSegments SparseSegmentSqrtN": "kernels in float32",
    "SparseSegmentSqrtNWithNumSegments SparseSegmentSum": "kernels in float32",
    "SparseSegmentSumWithNumSegments": "kernels in float32",
}


def _source(function) -> str:
    """The source of a gradient function and of the private functions that it calls."""
    source = inspect.getsource(function)
    called = (function.__globals__.get(name) for name in re.findall(r"\b(_\w+)\(", source))
    return source + "".join(inspect.getsource(each) for each in called if inspect.isfunction(each))


def test_gradients_that_add_up_are_in_the_table():
    named = frozenset(" ".join(_EXACT_GRADIENTS).split())
    low = {op for op in _low_ops() if not INTERNAL.fullmatch(op)}
    registry = ops.gradient_registry._registry
    functions = {op: registry[op]["type"] for op in low & set(registry) - GUARDED_OPS - named}
    new = sorted(op for op, f in functions.items() if f and _SUMS.search(_source(f)))
    assert not new, (
        f"{', '.join(new)}: the gradient adds up, and no row in tfamp/planning/kernels.py has the "
        "op in gradient_of. Measure it, then add it there or to _EXACT_GRADIENTS."
    )
