"""The benchmarks: what they compute from times, how they show it, and one tiny run."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import sys
from pathlib import Path

import pytest
import tensorflow as tf

pytest.importorskip("rich")
pytest.importorskip("sklearn")
sys.path.append(str(Path(__file__).parents[1]))
pytest.importorskip("benchmarks", reason="the benchmarks are no part of the package")

from benchmarks import profile, report, results
from benchmarks.__main__ import main
from benchmarks.interleaved import Options, WorkerError, workers
from benchmarks.results import Measured, Run, WorkloadRun
from benchmarks.step_graph import count_casts, trace
from benchmarks.systems import SYSTEMS

ROOT = Path(__file__).parents[1]


def a_run():
    """Results made up: the rewrite is twice as fast as float32 in each round, Keras's as fast."""
    float32 = Measured([4.0, 8.0, 4.0], 0.1, 5.0, None, 10**6, 0, 0, [3.0, 2.0])
    keras = Measured([4.0, 8.0, 4.0], 0.1, 6.0, None, 2 * 10**6, 7, 3 * 10**6, [3.0, 2.1])
    rewrite = Measured([2.0, 4.0, 2.0], 0.1, 7.0, 0.25, 10**6, 5, 2 * 10**6, [3.0, 1.99])
    systems = {"float32": float32, "keras_policy": keras, "rewrite": rewrite}
    skipped = {"torch_autocast": "PyTorch is not installed"}
    size, loss_size = {"layers": 6, "width": 2048, "batch": 256}, {"width": 8, "batch": 4}
    return Run(
        machine={"CPU": "a CPU", "cores": "2", "GPU": "none", "TensorFlow": "2.21"},
        dtype="bfloat16",
        rounds=3,
        loss_steps=2,
        workloads=[WorkloadRun("mlp", size, loss_size, systems, skipped, [3.0, 2.02])],
    )


# What follows from times


def test_medians_quartiles_ratios_by_round_and_final_losses():
    assert dataclasses.astuple(results.spread([3.0])) == (3, 3, 3)
    assert dataclasses.astuple(results.spread([5.0, 1.0, 2.0, 4.0, 3.0])) == (3, 2, 4)
    # The machine is ten times as slow from the third round on; the ratio of a round is 2 always.
    found = results.ratio([2.0, 2.0, 20.0, 20.0], [1.0, 1.0, 10.0, 10.0])
    assert dataclasses.astuple(found) == (2, 2, 2)
    for count, mean in ((1, 0), (9, 8), (20, 18.5), (200, 189.5)):
        assert results.final_loss([float(i) for i in range(count)]) == mean
    with pytest.raises(ValueError, match="at least one value"):
        results.spread([])
    with pytest.raises(ValueError, match="at least one step"):
        results.final_loss([])


def test_losses_are_compared_with_float32_of_the_same_framework():
    run = a_run().workloads[0]
    assert results.loss_difference(run, "rewrite") == pytest.approx(-0.005)
    assert results.loss_difference(run, "keras_policy") == pytest.approx(0.05)
    run.systems["torch_autocast"] = Measured([1.0] * 3, losses=[3.0, 2.0])
    assert results.loss_difference(run, "torch_autocast") is None
    run.systems["torch_float32"] = Measured([1.0] * 3, losses=[3.0, 4.0])
    assert results.loss_difference(run, "torch_autocast") == pytest.approx(-0.5)


# Tables, JSON, pages


def test_json_gives_the_run_back_with_what_follows_from_the_times():
    run = a_run()
    found = json.loads(json.dumps(results.to_json(run)))
    assert results.from_json(found) == run
    system = found["workloads"][0]["systems"]["rewrite"]
    assert system["speed"] == {"median": 2, "low": 2, "high": 2}
    assert system["loss_difference"] == pytest.approx(-0.005)
    with pytest.raises(ValueError, match="must be of schema 1; got 0"):
        results.from_json(found | {"schema": 0})


def test_tables_have_the_ratios_first():
    first, mlp, losses, models, machine = report.all_tables(a_run())
    assert first.headers == ("times as fast as float32", "mlp")
    assert [row[1] for row in first.rows] == ["1.00", "1.00", "2.00"]
    by_header = dict(zip(mlp.headers, mlp.rows[2], strict=True))
    assert by_header["x float32"] == "2.00"
    assert by_header["step, ms"] == "2000.0"
    assert by_header["rewrite, s"] == "0.25"
    assert (by_header["Casts"], by_header["Cast MB"]) == ("5", "2.0")
    assert first.notes == ("Not measured: PyTorch, autocast on mlp: PyTorch is not installed.",)
    rounded = "mlp", "float32, initial weights rounded", "3.0000", "2.0200", "+1.00%"
    assert losses.rows[1] == rounded
    assert losses.rows[3] == ("mlp", "tfamp.rewrite, min_cut", "3.0000", "1.9900", "-0.50%")
    assert models.rows == (("mlp", "layers 6, width 2048, batch 256", "width 8, batch 4"),)
    assert ("CPU", "a CPU") in machine.rows


def test_the_documented_pages_have_the_marks():
    pages = "benchmarks", "peers", "peers_float16", "performance", "kerashub", "guides/saved_models"
    for page in pages:
        text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
        assert text.count(report.BEGIN) == text.count(report.END) == 1, page


# Workloads and systems


# Graphs of steps


def low_product(x, w):
    low = tf.cast(x, tf.bfloat16) @ tf.cast(w, tf.bfloat16)
    return tf.reduce_sum(tf.cast(low, tf.float32)) + tf.cast(tf.shape(x)[0], tf.float32)


def traced(fn, *args, runs=0):
    concrete = tf.function(fn).get_concrete_function(*args)
    return trace(concrete, args, runs=runs)


def test_casts_and_kinds_of_ops_of_known_graphs():
    w = tf.Variable(tf.ones((8, 2)))
    step = traced(lambda x: low_product(x, w), tf.ones((4, 8)), runs=2)
    assert count_casts(step.nodes) == (3, (4 * 8 + 8 * 2 + 4 * 2) * (4 + 2))
    for op, kind in (("MatMul", "matmul"), ("Cast", "cast"), ("Relu", "elementwise")):
        assert profile.kind_of(op) == kind
    found = profile.table({("product", "low"): step})
    assert {"step", "matrix products", "Casts"} <= set(found.headers)

    def loop(x):
        for _ in tf.range(5):
            x = tf.cast(tf.cast(x, tf.bfloat16) @ tf.ones((4, 4), tf.bfloat16), tf.float32)
        return x

    assert count_casts(traced(loop, tf.ones((4, 4))).nodes) == (10, 10 * 16 * 6)


# Runs


def test_a_worker_that_fails_ends_only_itself_but_for_float32(monkeypatch):
    options = Options("bfloat16", 1, torch_python=shutil.which("false"))
    with workers(["torch_autocast"], options) as group:
        assert not group.workers
        assert not list(group.in_turn("step"))
        assert group.failed == {"torch_autocast": "failed: it ended with code 1"}
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    with (
        pytest.raises(WorkerError, match="float32, which all are compared with, failed"),
        workers(["float32"], Options("bfloat16", 1)),
    ):
        pass


@pytest.mark.slow
def test_a_tiny_run_from_the_command_line(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    written = {name: tmp_path / f"run.{name}" for name in ("json", "png")}
    arguments = ["--small", "--workload", "mlp", "--system", "rewrite", "--dtype", "bfloat16"]
    arguments += ["--rounds", "2", "--loss-steps", "10"]
    arguments += ["--json", str(written["json"]), "--plot", str(written["png"])]
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    run = results.from_json(json.loads(written["json"].read_text(encoding="utf-8")))
    (mlp,) = run.workloads
    assert run.machine["TensorFlow"] == tf.__version__
    assert list(mlp.systems) == ["float32", "rewrite"]
    for name, each in mlp.systems.items():
        assert len(each.seconds) == 2
        assert len(each.losses) == 10
        assert each.losses[-1] < each.losses[0]
        assert (each.casts > 0) == (each.cast_bytes > 0) == (name != "float32")
        assert each.first_call > 0
        assert (each.rewrite is not None) == (name == "rewrite")
    assert len(mlp.control) == 10
    assert mlp.control != mlp.systems["float32"].losses
    assert abs(results.loss_difference(mlp, "rewrite")) < 0.05
    assert abs(results.control_difference(mlp)) < 0.05
    assert written["png"].read_bytes().startswith(b"\x89PNG")
    assert SYSTEMS["rewrite"].title in printed
    assert not re.search(r"[\x00-\x08\x0b-\x1f]", printed)


# Serving
