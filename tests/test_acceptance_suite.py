"""The acceptance suite in tests/gpu: that it runs, on a CPU at toy size, and what it reports."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import tfamp
from helpers.acceptance import TOY_TIMING, Check, first_visible_gpu
from helpers.acceptance_report import report_path

SUITE = Path(__file__).parent / "gpu"


@pytest.mark.nightly  # The build of the docs runs the quick checks, in docs/notebooks/gpu.ipynb.
def test_every_check_runs_on_a_cpu_at_toy_size(tmp_path):
    options = ["--on-cpu", f"--report={tmp_path / 'gpu.json'}"]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-m", "gpu", str(SUITE), *options],
        env=kept | {"PYTHONPATH": str(Path(tfamp.__file__).parents[1])},
        capture_output=True,
        text=True,
        check=False,
        timeout=1200,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    found = json.loads((tmp_path / "gpu.json").read_text("utf-8"))
    collected = {
        outcome: int(count) for count, outcome in re.findall(r"(\d+) (passed|skipped)", done.stdout)
    }
    assert found["counts"] == collected | {"failed": 0}
    assert len(found["checks"]) == sum(collected.values()) >= 25
    assert collected["passed"] > 2 * collected["skipped"]
    for check in found["checks"]:
        if check["outcome"] == "skipped":
            assert check["why"], check
        else:
            assert any(each["value"] is not None for each in check["figures"]), check
    groups = list(dict.fromkeys(check["group"] for check in found["checks"]))
    assert set(groups) == {path.stem.removeprefix("test_") for path in SUITE.glob("test_*.py")}
    assert (groups[0], groups[-1]) == ("detection", "speed")


@pytest.mark.parametrize("name", ["report.html", "no_folder/report.json"])
def test_a_report_that_cannot_be_written_is_refused(name, tmp_path):
    with pytest.raises(pytest.UsageError, match="--report"):
        report_path(str(tmp_path / name))


def test_nvidia_smi_reports_the_gpu_that_tensorflow_calls_the_first():
    assert first_visible_gpu({}) == "0"
    assert first_visible_gpu({"CUDA_VISIBLE_DEVICES": "3,1"}) == "3"
    assert first_visible_gpu({"CUDA_VISIBLE_DEVICES": "GPU-8932f937,1"}) == "GPU-8932f937"


def test_figures_beyond_their_limits_are_failures():
    check = Check(toy=False)
    check("fine", 1.0, at_most=1.0, at_least=1.0)
    check("too large", 2.0, at_most=1, unit="s", timing=True)
    check("too small", 1, at_least=2)
    check("another", "float32", equals="float16")
    check("no number", math.nan, at_most=1.0)
    check("only told", 3.0)
    check.leave_out("not here", "as there is none")
    outcomes = [each.outcome for each in check.figures]
    assert outcomes == ["passed", *["failed"] * 4, "recorded", "skipped"]
    assert check.failures == [
        "too large: 2 s, expected at most 1",
        "too small: 1, expected at least 2",
        "another: float32, expected float16",
        "no number: nan, expected at most 1",
    ]
    check = Check(toy=True)  # Where times say nothing.
    check("time", 2.0, at_most=1.0, timing=True)
    check("error", 2.0, at_most=1.0)
    assert [each.outcome for each in check.figures] == ["recorded", "failed"]
    assert check.figures[0].why == TOY_TIMING


def test_copies_to_the_host_are_read_from_a_profile(tmp_path):
    xplane_pb2 = pytest.importorskip("tensorflow.tsl.profiler.protobuf.xplane_pb2")
    from helpers.device_trace import copies_to_host

    space = xplane_pb2.XSpace()
    for name in ("/device:GPU:0", "/host:CPU"):
        plane = space.planes.add(name=name)
        for number, event in enumerate(("MemcpyD2H", "MemcpyH2D", "a_kernel")):
            plane.event_metadata[number].id = number
            plane.event_metadata[number].name = event
        plane.stat_metadata[7].name = "memcpy_details"
        for line in ("Stream #14(MemcpyD2H)", "TensorFlow Ops"):
            events = plane.lines.add(name=line).events
            for number, size in ((0, 4), (1, 64), (2, 0), (0, 800)):
                details = f"kind_src:device kind_dst:pageable size:{size} dest:0 async:1"
                events.add(metadata_id=number).stats.add(metadata_id=7, str_value=details)
    (tmp_path / "plugins").mkdir()
    (tmp_path / "plugins" / "host.xplane.pb").write_bytes(space.SerializeToString())
    assert copies_to_host(tmp_path) == [4, 800]
    assert copies_to_host(tmp_path / "plugins" / "none") is None
