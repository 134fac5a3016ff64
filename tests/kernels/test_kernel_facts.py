"""The table of kernels, measured: what each kernel does, and that every path is exact despite it.

`python tests/kernels/facts.py` prints what these tests measure.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest

from helpers import kernel_paths
from helpers.cases import one_in, tiers
from helpers.kernel_cases import RAW_CASES, KernelCase
from helpers.kernel_path_cases import FUNCTION_CASES, LAYER_CASES
from helpers.kernel_paths import FUNCTION_PATHS, LAYER_PATHS, limit
from tfamp.core.dtypes import LOW_PRECISION
from tfamp.interop import tf_private
from tfamp.machine.hardware import onednn_dtypes
from tfamp.planning.kernels import (
    EIGEN,
    FORMS,
    GPU,
    KERNEL_FACTS,
    LAYERS,
    ONEDNN,
    OPS,
    Fault,
    KernelFact,
    facts_of,
    library_of,
)

# Levels convert no layer of a model whose only layer has no low kernel.
pytestmark = pytest.mark.filterwarnings("ignore::tfamp.NothingConvertedWarning")
_QUICK_PATHS = ("rewrite", "autocast", "policy")
# The test of the other library, in CI's slow step, runs all of them in its process.
_ONE_IN = 1 if "TFAMP_TEST_OTHER_LIBRARY" in os.environ else 3


def _raw_runs():
    runs = [
        (case, dtype)
        for case in RAW_CASES
        for dtype in case.dtypes
        if kernel_paths.has_kernel(case.rows[0], dtype)
    ]
    return one_in(_ONE_IN, runs)


def _path_runs():
    quick, slow = [], []
    for cases, paths in ((FUNCTION_CASES, FUNCTION_PATHS), (LAYER_CASES, LAYER_PATHS)):
        for run in itertools.product(cases, paths, LOW_PRECISION):
            case, path, dtype = run
            is_quick = case.quick and path in _QUICK_PATHS and dtype == "bfloat16"
            (quick if is_quick else slow).append(run)
    return [*one_in(_ONE_IN, quick), *tiers([], slow)]


def _skip_what_crashes(case: KernelCase, dtype: str) -> None:
    if not kernel_paths.is_available(case):
        pytest.skip("TensorFlow's kernel of oneDNN corrupts memory on these shapes")


@pytest.mark.parametrize(("case", "dtype"), _raw_runs(), ids=str)
def test_a_kernel_is_as_exact_as_its_row_says(case, dtype):
    _skip_what_crashes(case, dtype)
    op = case.rows[0]
    library = library_of(op, dtype, "cpu", onednn_dtypes())
    call = kernel_paths.op_call(case, dtype)
    held = [row for row in facts_of(op, dtype, "cpu", onednn_dtypes()) if row.holds_for(call)]
    for row in held:
        if row.fault in (Fault.HANGS, Fault.CRASHES):
            pytest.skip(row.text(dtype, library, call))
    fact = next((row for row in held if row.fault == Fault.ADDS_UP_LOW), None)
    found = kernel_paths.largest(kernel_paths.deviations(case, "raw", dtype))
    measured = f"{op} is off by {found.error:.3%} in {dtype} by {library} ({found.of})"
    if fact is None:
        assert found.error <= limit(dtype), (
            f"{measured}, and no row says so: add ({library}, {dtype}) to one in "
            "tfamp/planning/kernels.py"
        )
    else:
        assert found.error > limit(dtype), (
            f"{measured}, which is exact: take ({library}, {dtype}) out of the row with form "
            f"{fact.form!r} in tfamp/planning/kernels.py, or narrow the form"
        )


@pytest.mark.parametrize(("case", "path", "dtype"), _path_runs(), ids=str)
def test_a_path_is_as_exact_as_float32(case, path, dtype):
    _skip_what_crashes(case, dtype)
    found = kernel_paths.deviations(case, path, dtype)
    allowed = limit(dtype, case.roundings)
    wrong = [f"{each.of}: {each.error:.2%}, bias {each.bias:+.2%}" for each in found
             if not each.error <= allowed]  # fmt: skip
    assert not wrong, f"more than {allowed:.2%} off: {'; '.join(wrong)}; rows: {case.rows}"


# ---- Nothing is left out -------------------------------------------------------------------------


# Their kernels are for GPUs only: tests/gpu/test_recurrent.py measures them.
_ON_GPUS = {fact.op for fact in KERNEL_FACTS if {library for library, _ in fact.low} == {GPU}} & {
    op for op in OPS if not any(kernel_paths.has_kernel(op, d) for d in LOW_PRECISION)
}


@pytest.mark.parametrize("fact", KERNEL_FACTS, ids=lambda fact: f"{fact.op}, {fact.form}")
def test_a_row_has_a_case_of_its_op(fact: KernelFact):
    if fact.op in _ON_GPUS:
        return
    cases = [case for case in RAW_CASES if case.rows[0] == fact.op]
    assert cases
    for library, dtype in fact.low:
        if library in (EIGEN, ONEDNN) and kernel_paths.has_kernel(fact.op, dtype):
            assert any(
                dtype in case.dtypes and FORMS[fact.form](kernel_paths.op_call(case, dtype))
                for case in cases
            ), f"no case of this form in {dtype}"


def test_every_row_is_met_by_functions_and_its_layers():
    met = {row for case in FUNCTION_CASES for row in case.rows}
    assert not OPS - _ON_GPUS - met
    assert {row for case in (*FUNCTION_CASES, *LAYER_CASES) for row in case.rows} <= OPS
    assert not {layer for layer in LAYERS if not any(
        case.name.replace(",", "").split()[0] == layer for case in LAYER_CASES
    )}  # fmt: skip


# ---- The other library ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "marks",
    [
        pytest.param("not slow and not nightly", marks=pytest.mark.slow, id="quick"),
        pytest.param("not nightly", marks=pytest.mark.nightly, id="whole"),
    ],
)
def test_the_other_library_of_kernels(marks):
    if "TFAMP_TEST_OTHER_LIBRARY" in os.environ:
        pytest.skip("this process tests the other library")
    setting = "0" if tf_private.uses_onednn() else "1"
    changed = {"TF_ENABLE_ONEDNN_OPTS": setting, "TFAMP_TEST_OTHER_LIBRARY": "1"}
    kept = {name: value for name, value in os.environ.items() if "PYTEST" not in name}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--tb=line", "-p", "no:cacheprovider", "-m", marks,
         __file__],
        cwd=Path(__file__).parents[2], env={**kept, **changed}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
