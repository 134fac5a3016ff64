"""Processes killed at any moment leave whole files."""

import contextlib
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import tensorflow as tf

import tfamp
from helpers import saved_models
from helpers.cases import tiers
from tfamp.core.profile import MachineProfile, builtin_profile

TESTS = Path(__file__).resolve().parents[1]


def start(program, *arguments):
    paths = [str(TESTS), str(Path(tfamp.__file__).parents[1])]
    return subprocess.Popen(
        [sys.executable, "-c", program, *map(str, arguments)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths), "TF_CPP_MIN_LOG_LEVEL": "3"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def kill_after(process, seconds):
    """Kills a process some time after its first line; whether it was still running."""
    assert process.stdout.readline(), process.stderr.read()[-3000:]
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(seconds)
    running = process.poll() is None
    process.kill()
    process.communicate()
    return running


# ---- Files ---------------------------------------------------------------------------------------

_REWRITING = """
import sys
from tfamp.rewriting.saved_model import rewrite_saved_model
source, target = sys.argv[1:]
rewrite_saved_model(source, target + ".first", dtype="bfloat16")  # All is imported and traced.
print("writing", flush=True)
for number in range(10**6):
    dtype = "float16" if number % 2 else "bfloat16"
    rewrite_saved_model(source, target, dtype=dtype, device="cpu", overwrite=True)
"""


# Every kill is a process that starts TensorFlow.
@pytest.mark.parametrize("kills", tiers([], [1], [20]))
def test_killed_while_a_saved_model_is_replaced(tmp_path, kills):
    saved_models.module(tmp_path / "source")
    target = tmp_path / "target"
    tfamp.rewrite_saved_model(tmp_path / "source", target, dtype="bfloat16")
    moments = random.Random(kills)
    for number in range(kills):
        seconds = moments.uniform(0.0, 1.5)
        assert kill_after(start(_REWRITING, tmp_path / "source", target), seconds)
        if not target.exists():  # It was killed between the two renames.
            (old,) = tmp_path.glob(".target-*.old")
            old.rename(target)
        # The one before or the one after: each loads and runs.
        signature = tf.saved_model.load(str(target)).signatures["serving_default"]
        result = signature(x=tf.constant(saved_models.FLOATS), count=tf.constant(number))
        assert int(result["count"]) == number + 1
        first = target.with_name("target.first")
        if first.exists():
            first.rename(tmp_path / f"first{number}")


_CACHING = """
import sys, dataclasses
from pathlib import Path
from tfamp.core.profile import builtin_profile
from tfamp.machine.file_replacing import replace_text

print("writing", flush=True)
for number in range(10**9):
    profile = dataclasses.replace(builtin_profile("cpu"), name="x" * (number % 2 * 100_000 + 1))
    replace_text(Path(sys.argv[1]), profile.to_json())
"""


@pytest.mark.parametrize("kills", [4, pytest.param(60, marks=pytest.mark.nightly)])
def test_killed_while_the_cache_is_written(tmp_path, kills):
    path, moments = tmp_path / "machine.json", random.Random(kills)
    path.write_text(builtin_profile("cpu").to_json())
    for _ in range(kills // 2):
        two = [start(_CACHING, path) for _ in range(2)]
        assert all(kill_after(each, moments.uniform(0.0, 0.1)) for each in two)
        assert MachineProfile.from_json(path.read_text("utf-8"))
