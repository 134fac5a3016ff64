"""The benchmarks: statistics of times, tables, and one tiny run."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.tsl.profiler.protobuf import xplane_pb2

pytest.importorskip("sklearn")
sys.path.append(str(Path(__file__).parents[1]))
pytest.importorskip("benchmarks", reason="the benchmarks are not in the package")

from benchmarks import interleaved, kernels, profile, report, results, scale, serving
from benchmarks.__main__ import main
from benchmarks.interleaved import Options, WorkerError, workers
from benchmarks.results import Measured, Run, WorkloadRun
from benchmarks.step_graph import count_casts, trace
from benchmarks.systems import SYSTEMS
from benchmarks.worker import Worker
from benchmarks.workloads import WORKLOADS

ROOT = Path(__file__).parents[1]
# The generated sections of docs/benchmarks.md.
SECTIONS = ["AMX", "AVX2"]


def a_run():
    """Made-up results: in each round Keras's is as fast as float32, the rewrite twice as fast."""
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


# Statistics of times


def test_medians_quartiles_ratios_by_round_and_final_losses():
    assert dataclasses.astuple(results.spread([3.0])) == (3, 3, 3)
    assert dataclasses.astuple(results.spread([5.0, 1.0, 2.0, 4.0, 3.0])) == (3, 2, 4)
    # From the third round on the machine is ten times as slow; the ratios stay 2.
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
    first, first_calls, losses, mlp = report.all_tables(a_run())
    assert first.headers == ("times as fast as float32", "mlp")
    assert [row[1] for row in first.rows] == ["1.00", "1.00", "2.00"]
    by_header = dict(zip(mlp.headers, mlp.rows[2], strict=True))
    assert by_header["x float32"] == "2.00"
    assert by_header["step, ms"] == "2000.0"
    assert by_header["rewrite, s"] == "0.25"
    assert (by_header["Casts"], by_header["Cast MB"]) == ("5", "2.0")
    assert first.notes == (
        "Machine: CPU a CPU, cores 2, GPU none, TensorFlow 2.21.",
        "Not measured: PyTorch, autocast on mlp: PyTorch is not installed.",
    )
    assert first_calls.rows == (("mlp", "5.0", "1.2", "1.4", "-"),)
    rounded = "mlp", "float32, initial weights rounded", "3.0000", "2.0200", "+1.00%"
    assert losses.rows[1] == rounded
    assert losses.rows[3] == ("mlp", "tfamp.rewrite, min_cut", "3.0000", "1.9900", "-0.50%")


def test_a_reason_names_only_systems_that_it_stops_on_the_workload():
    run, both = a_run(), {"tune": "slow", "auto": "slow"}
    for name, skipped in {"lstm": both, "vit": both, "bert": {"auto": "slow"}}.items():
        run.workloads.append(dataclasses.replace(run.workloads[0], workload=name, skipped=skipped))
    assert report.overview(run).notes[2:] == (
        'Not measured: tfamp.tune and tfamp.prepare, "auto" on lstm, vit: slow.',
        'Not measured: tfamp.prepare, "auto" on bert: slow.',
    )


def test_a_step_is_compared_with_the_fastest_peer_and_with_pytorchs_best_way():
    run = a_run()
    slower, faster = Measured([2.0, 4.0, 2.0]), Measured([1.0, 2.0, 1.0], first_call=18.0)
    (mlp,) = run.workloads
    torch = {"torch_float32": slower, "torch_autocast": faster}
    mlp.systems |= {"float32_xla": slower, "tune": faster, "auto": slower}
    lstm = dataclasses.replace(mlp, workload="lstm", systems=mlp.systems | torch)
    run.workloads += [lstm, dataclasses.replace(mlp, systems={"float32": slower}, control=[])]
    _, tuned, automatic, *over_others, first_calls = report.all_tables(run)[:6]
    ratio = "float32, XLA", "2.00", "2.00 to 2.00"
    autocast = "PyTorch, autocast", "1.00", "1.00 to 1.00"
    assert tuned.rows == (
        ("mlp", "4.00", *ratio, "-", "-", "-"),
        ("lstm", "4.00", *ratio, *autocast),
        ("mlp", "-", *["-"] * 6),
        ("geometric mean", "", "", "2.00", "", "", "1.00", ""),
    )
    assert [row[3] for row in automatic.rows] == ["1.00", "1.00", "-", "1.00"]
    assert automatic.rows[1][5:7] == ("PyTorch, autocast", "0.50")
    for table, speed in zip(over_others, ("4.00", "2.00"), strict=True):
        assert table.headers[1:] == ("Keras's policy", "PyTorch, autocast")
        assert [row[1] for row in table.rows] == [speed, speed, "-", speed]
        assert [row[2] for row in table.rows][:2] == ["-", f"{float(speed) / 4:.2f}"]
    # float32's first two calls take 5 s and, by the median, 4 s.
    assert first_calls.headers[-1] == "tfamp.tune over two calls"
    assert [row[-1] for row in first_calls.rows] == ["2.0", "2.0", "-"]


def test_a_page_has_a_row_for_each_model_and_the_fastest_of_several_ways():
    run = a_run()
    (mlp,) = run.workloads
    faster = Measured([1.0, 2.0, 1.0], memory=3 * 10**6)
    mlp.systems |= {"rewrite_fused": faster, "torch_autocast": faster}
    run.workloads.append(dataclasses.replace(mlp, workload="lstm", systems={"rewrite": faster}))
    table = report.by_model(run)
    assert table.headers[2:] == ("Keras's policy", "PyTorch's best", "tfamp.rewrite")
    # Without float32 a model has nothing to be compared with.
    assert table.rows == (("mlp", "4000", "1.00", "4.00", "4.00"),)
    memory = report.memory_by_model(run)
    assert memory.headers[2:] == ("Keras's policy", "tfamp.rewrite")
    assert memory.rows == (("mlp", "1", "2.00", "1.00"),)
    mlp.systems["tune"] = faster
    run.workloads[1] = dataclasses.replace(mlp, workload="lstm")
    table = report.by_model(run)
    assert table.headers[-1] == "tfamp.tune"
    assert table.rows[-1] == ("geometric mean", "", "1.00", "4.00", "4.00")
    without = {name: each for name, each in mlp.systems.items() if name != "torch_autocast"}
    run.workloads.append(dataclasses.replace(mlp, workload="vit", systems=without))
    *_, note = report.by_model(run).notes
    assert note == "Not measured: PyTorch's best on vit: PyTorch is not installed."


@pytest.mark.parametrize("name", ["", "today"])
def test_a_page_keeps_what_is_outside_its_marks(tmp_path, name):
    page, (begin, end) = tmp_path / "page.md", report.marks(name)
    page.write_text(f"before\n{begin}\nold\n{end}\nafter\n", encoding="utf-8")
    named = Path(f"{page}#{name}")
    report.put_section(named, report.section(a_run()))
    text = page.read_text(encoding="utf-8")
    assert text.startswith("before\n")
    assert text.endswith(f"{end}\nafter\n")
    assert "old" not in text
    # The model's row: float32's milliseconds, Keras's policy, the rewrite; then bytes.
    assert "| mlp | 4000 | 1.00 | 2.00 |" in text
    assert "| mlp | 1 | 2.00 | 1.00 |" in text
    page.write_text("no marks", encoding="utf-8")
    with pytest.raises(ValueError, match="each once"):
        report.put_section(named, "text")
    assert page.read_text(encoding="utf-8") == "no marks"


def test_the_documented_pages_have_the_marks():
    pages = {"kerashub": [""], "guides/saved_models": [""], "benchmarks": SECTIONS}
    pages["guides/generate"] = [""]
    pages["gpu"] = ["H100", "H100 float16", "H100 compiled"]
    for page, names in pages.items():
        text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
        for mark in (mark for name in names for mark in report.marks(name)):
            assert text.count(mark) == 1, (page, mark)


def test_runs_on_one_machine_are_shown_as_one_and_written_again(tmp_path, capsys):
    *paths, again = (tmp_path / name for name in ("1.json", "2.json", "a.json"))
    runs = a_run(), a_run()
    runs[1].workloads[0].workload = "lstm"
    for path, run in zip(paths, runs, strict=True):
        path.write_text(json.dumps(results.to_json(run)), encoding="utf-8")
    read = ["--read", *map(str, paths)]
    assert main([*read, "--json", str(again)]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"^times as fast as float32 +mlp +lstm$", printed, re.M)
    assert re.search(r"^tfamp.rewrite, min_cut +2.00 +2.00$", printed, re.M)
    written = results.from_json(json.loads(again.read_text(encoding="utf-8")))
    assert [each.workload for each in written.workloads] == ["mlp", "lstm"]
    with pytest.raises(ValueError, match="these differ"):
        results.together([written, dataclasses.replace(written, dtype="float16")])


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


def test_kernels_of_a_gpu_are_added_up_by_name_and_by_what_they_cover():
    space = xplane_pb2.XSpace()
    gpu, host = space.planes.add(name="/device:GPU:0"), space.planes.add(name="/host:CPU")
    for number, name in enumerate(("matmul", "add")):
        for plane in (gpu, host):
            plane.event_metadata[number].name = name
    gpu.stat_metadata[7].name = "tf_op"

    def put(plane, line, *events):
        added = plane.lines.add(name=line, timestamp_ns=5)
        for kernel, start, duration in events:
            event = added.events.add(metadata_id=kernel, offset_ps=start, duration_ps=duration)
            event.stats.add(
                metadata_id=7, str_value=f"model/layer:{'MatMul' if not kernel else 'Add'}"
            )

    second = 10**12
    put(gpu, "Stream #1", (0, 0, 2 * second), (1, 3 * second, second), (0, 6 * second, 2 * second))
    put(gpu, "Stream #2", (1, second, second))  # While the first one runs.
    put(gpu, "TensorFlow Ops", (0, 0, 9 * second))
    put(host, "Stream #1", (0, 0, 9 * second))
    step = kernels.kernels_of(space.planes, 2)
    assert step == kernels.Kernels(
        busy=2.5, launched=2.0, largest=[(2.0, 1.0, "matmul", "MatMul"), (1.0, 1.0, "add", "Add")]
    )
    found = [
        kernels.Found("mlp", system, seconds, 30.0, step)
        for system, seconds in (("float32", 0.006), ("tfamp_policy_xla", 0.002))
    ]
    low = kernels.table(found).rows[1]
    assert low == ("mlp", "tfamp policy, XLA", "2.0", "3.00", "2500.0", "2", "30")


@pytest.mark.slow
def test_steps_of_systems_are_profiled_in_processes_of_their_own(tmp_path):
    path = tmp_path / "kernels.json"
    command = [sys.executable, "-m", "benchmarks.kernels", "--small", "--workload", "mlp"]
    run = subprocess.run([*command, "--json", path], capture_output=True, text=True, check=True)
    assert "tfamp policy, XLA" in run.stdout
    machine, found = kernels.from_json(path.read_text())
    assert machine["TensorFlow"] == tf.__version__
    assert [each.system for each in found] == ["float32", "tfamp_policy", "tfamp_policy_xla"]
    assert all(0 < each.step < each.first_call for each in found)


def test_a_traced_step_leaves_the_variables_as_they_are():
    v = tf.Variable([1.0, 2.0])

    def step(x):
        v.assign_add(x)
        return tf.reduce_sum(v)

    found = traced(step, tf.ones(2), runs=3)
    np.testing.assert_array_equal(v, [1, 2])
    assert len(found.walls) == 3
    assert {"AssignAddVariableOp", "Sum"} <= {node.op for node in found.nodes}
    assert all(len(node.seconds) == 3 for node in found.nodes)


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


class WorkerHere(interleaved.WorkerProcess):
    """A worker without a process of its own, which would have to import TensorFlow."""

    def __init__(self, system, options):
        self._worker, self._answers = Worker(system, options.dtype), [{"ready": True}]

    def send(self, do, **arguments):
        self._answers.append(getattr(self._worker, do)(**arguments))

    def read(self, end=None):
        return self._answers.pop(0)

    def close(self):
        assert not self._answers


@pytest.mark.slow
def test_a_tiny_run_from_the_command_line(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(interleaved, "WorkerProcess", WorkerHere)
    written = tmp_path / "run.json"
    arguments = ["--small", "--workload", "mlp", "--system", "rewrite", "--dtype", "bfloat16"]
    arguments += ["--rounds", "2", "--loss-steps", "10", "--json", str(written)]
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    run = results.from_json(json.loads(written.read_text(encoding="utf-8")))
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
    assert SYSTEMS["rewrite"].title in printed
    assert not re.search(r"[\x00-\x08\x0b-\x1f]", printed)


@pytest.mark.parametrize("gpu", [False, True])
def test_a_run_whose_time_is_up_says_what_it_did_not_do(tmp_path, capsys, monkeypatch, gpu):
    monkeypatch.setattr(interleaved, "WorkerProcess", WorkerHere)
    written = tmp_path / "run.json"
    arguments = ["--workload", "mlp", "lstm", "--system", "rewrite", "--dtype", "bfloat16"]
    arguments += ["--loss-steps", "0", "--minutes", "0", "--json", str(written)]
    assert main([*arguments, "--gpu" if gpu else "--small"]) == 0
    run = results.from_json(json.loads(written.read_text(encoding="utf-8")))
    assert [each.workload for each in run.workloads] == ["mlp", "lstm"]
    assert run.workloads[0].size["width"] == (4096 if gpu else 256)
    for each in run.workloads:
        assert not each.systems
        assert each.skipped == dict.fromkeys(["float32", "rewrite"], interleaved.TIME_IS_UP)
    printed = capsys.readouterr().out
    assert (
        "Not measured: float32 and tfamp.rewrite, min_cut on mlp, lstm: the time was up" in printed
    )


class LateHere(WorkerHere):
    """A worker that does not answer to a first call in time, if it rewrites."""

    def __init__(self, system, options):
        super().__init__(system, options)
        self._is_late = system == "rewrite"

    def read(self, end=None):
        if end is not None and self._is_late:
            self._answers.clear()
            raise interleaved.NoAnswerError(interleaved.TIME_IS_UP)
        return super().read(end)


@pytest.mark.slow
def test_a_system_that_compiles_for_too_long_is_left_out_and_the_others_are_timed(monkeypatch):
    monkeypatch.setattr(interleaved, "WorkerProcess", LateHere)
    options = Options("bfloat16", 2, size="small", end=time.monotonic() + 60)
    systems = ["float32", "rewrite", "tfamp_policy"]
    run = interleaved.measure(WORKLOADS["mlp"], systems, options, lambda text: None)
    assert run.skipped == {"rewrite": interleaved.TIME_IS_UP}
    assert {name: len(each.seconds) for name, each in run.systems.items()} == {
        "float32": 2,
        "tfamp_policy": 2,
    }


def test_a_process_that_does_not_answer_is_not_waited_for():
    worker = interleaved.WorkerProcess("float32", Options("bfloat16", 1))
    try:
        with pytest.raises(interleaved.NoAnswerError, match="time was up"):
            worker.read(end=time.monotonic())
    finally:
        worker.close()


# Serving


def test_clients_share_a_load_and_every_request_counts():
    together = threading.Barrier(2, timeout=60)  # Passed only by two threads at once.
    latencies, rate = serving.put_under_load(together.wait, 2, 0.0)
    assert len(latencies) == 2
    assert 0 < rate <= 1 / min(latencies) * 2
    assert len(serving.put_under_load(lambda: None, 1, 0.01)[0]) > 1
    assert [serving.percentile_95(range(1, n + 1)) for n in (1, 2, 20, 100)] == [1, 2, 19, 95]


@pytest.mark.slow
def test_saved_models_are_served_in_all_ways(tmp_path, capsys):
    pytest.importorskip("keras_hub")
    page = tmp_path / "page.md"
    page.write_text("\n".join(report.marks()), encoding="utf-8")
    arguments = ["--small", "--models", "bert", "--rounds", "1", "--seconds", "0.02"]
    serving.main([*arguments, "--page", str(page)])
    lines = [re.split("  +", line) for line in capsys.readouterr().out.splitlines()]
    files = {row[1]: row[2:] for row in lines if len(row) == 4 and row[0] == "bert"}
    assert list(files) == ["float32", *serving.WAYS]
    bytes_on_disk, errors = zip(*files.values(), strict=True)
    assert [float(error) for error in errors] == [0, 0, *[pytest.approx(0.005, abs=0.005)] * 2]
    assert float(errors[2]) > 0
    assert float(bytes_on_disk[3]) < float(bytes_on_disk[1]) < float(bytes_on_disk[0])
    loads = [row for row in lines if row[0] in ("1", "2", "4")]
    assert [(row[0], row[1]) for row in loads] == [
        (str(clients), way) for clients in serving.CLIENTS for way in files
    ]
    assert page.read_text(encoding="utf-8").count("| bert | bfloat16, frozen |") == 1


def test_first_calls_of_several_rounds_are_medians_and_compared_within_a_round():
    times = {"float32": (1.0, 4.0, 2.0), "rewrite": (3.0, 6.0, 2.4)}
    calls = [
        scale.FirstCall(way, 4, 100, seconds[number], 10**6, 0.0)
        for number in range(3)
        for way, seconds in times.items()
    ]
    (exact, rewritten) = scale.table(calls).rows
    assert exact == ("4", "float32", "2.0", "1.00", "1", "1.00", "100")
    assert rewritten == ("4", "rewrite", "3.0", "1.50", "1", "1.00", "100")
    (alone,) = scale.table([call for call in calls if call.way == "rewrite"]).rows
    assert alone[3] == "-"


@pytest.mark.slow
def test_first_calls_are_measured_in_processes_and_compared_with_float32s(tmp_path, capsys):
    path = tmp_path / "scale.json"
    scale.main(["--layers", "1", "--way", "float32", "rewrite", "--json", str(path)])
    exact, rewritten = json.loads(path.read_text())
    assert (exact["way"], rewritten["way"], exact["layers"]) == ("float32", "rewrite", 1)
    assert exact["nodes"] > 100
    assert min(exact["seconds"], rewritten["seconds"], exact["memory"]) > 0
    text = capsys.readouterr().out
    assert f"{rewritten['seconds'] / exact['seconds']:.2f}" in text
