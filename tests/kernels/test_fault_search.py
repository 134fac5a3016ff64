"""The search for kernels that fail: what it reports of processes that hang, crash and are slow."""

import sys
import time

import pytest

from kernels import faults

# Runs cases as a process of the search does, named after what they do.
_WORKER = """
import json, os, sys, time
for name, dtype in json.loads(sys.stdin.read()):
    print("start", flush=True)
    if "hangs" in name:
        time.sleep(60)
    if "crashes" in name:
        os.abort()
    print(json.dumps({"name": name, "dtype": dtype, "outcome": "ok"}), flush=True)
"""
_COMMAND = [sys.executable, "-c", _WORKER]


def outcomes(results):
    return {result.name: result.outcome for result in results}


def test_each_case_has_an_outcome_and_a_failure_ends_a_process_only():
    cases = [(name, "bfloat16") for name in ("a", "hangs", "b", "crashes", "also crashes", "c")]
    started = []
    found = faults.search(cases, _COMMAND, limit=1, processes=lambda: started.append(None))
    assert outcomes(found) == {
        "a": "ok", "hangs": "does not return", "b": "ok", "crashes": "crashes",
        "also crashes": "crashes", "c": "ok",
    }  # fmt: skip
    assert len(started) == 4


def test_what_fails_only_after_another_case_is_not_reported():
    first = iter([faults.Result("a", "bfloat16", "crashes"), faults.Result("b", "float16", "ok")])
    found = list(faults.confirmed(first, _COMMAND, limit=1))
    assert outcomes(found) == {"a": "ok", "b": "ok"}


def test_the_search_ends_at_its_time_and_names_a_command_that_does_not_start():
    assert not list(faults.search([("a", "bfloat16")], _COMMAND, until=time.monotonic()))
    with pytest.raises(RuntimeError, match="does not start"):
        list(faults.search([("a", "bfloat16")], [sys.executable, "-c", ""]))
