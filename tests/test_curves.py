"""The benchmark that trains to the end: runs that go on, their table, their picture, their page."""

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("sklearn")
pytest.importorskip("benchmarks", reason="the benchmarks are not in the package")

from benchmarks import curve_results, curve_run, curves, report
from benchmarks.curve_results import Curve, Evaluation, Setup
from helpers.cases import tiers

ROOT = Path(__file__).parents[1]
ASSETS = ROOT / "docs" / "assets"


def a_setup(task="transformer", system="float32", dtype="float32", seed=0, steps=6):
    size, _, batches = curves.SIZES["small"][task]
    return Setup(task, system, dtype, seed, dict(size), steps, 2, batches)


# Runs


# Products are the same bit for bit however threads share them. Convolutions are not on a busy CPU:
# the ResNet goes on in processes of one thread, below.
@pytest.mark.parametrize(
    ("system", "dtype"),
    tiers(
        [("tfamp_policy", "float16")],
        [("keras_policy", "float16"), ("float32", "float32")],
        [("tfamp_policy", "bfloat16"), ("keras_policy", "bfloat16")],
    ),
)
def test_a_stopped_run_goes_on_where_it_was(tmp_path, monkeypatch, system, dtype):
    task = "transformer"
    setup = a_setup(task, system, dtype, seed=1)
    whole = curve_run.train(setup, tmp_path / "whole")
    assert whole.done
    assert [each.step for each in whole.held_out] == [0, 2, 4, 6]
    assert len(set(whole.losses)) == 6
    assert [path.name for path in (tmp_path / "whole").iterdir()] == [f"{setup.name}.json"]

    taken, stop_at = [], 10**6 + 3
    plain = curve_run.TASKS[task]

    def batch(size, number, held_out):
        if not held_out:
            taken.append(number - 10**6)
            if number == stop_at:
                raise KeyboardInterrupt
        return plain.batch(size, number, held_out)

    watched = dataclasses.replace(plain, batch=batch)
    monkeypatch.setattr(curve_run, "TASKS", {task: watched})
    with pytest.raises(KeyboardInterrupt):
        curve_run.train(setup, tmp_path)
    (part,) = curve_results.read(tmp_path)
    assert (part.step, part.done) == (2, False)

    stop_at = None
    again = curve_run.train(setup, tmp_path)
    assert taken == [0, 1, 2, 3, 2, 3, 4, 5]
    assert again.losses == whole.losses
    assert again.held_out == whole.held_out
    texts = [(tmp_path / each / f"{setup.name}.json").read_text() for each in ("", "whole")]
    assert texts[0] == texts[1]
    assert curve_run.train(setup, tmp_path).done
    assert len(taken) == 8


def test_a_run_whose_curve_was_not_written_any_more_is_at_its_end_all_the_same(
    tmp_path, monkeypatch
):
    setup = a_setup(steps=2)
    replace_text = curve_run.replace_text

    def killed(path, text):
        raise KeyboardInterrupt

    monkeypatch.setattr(curve_run, "replace_text", killed)
    with pytest.raises(KeyboardInterrupt):
        curve_run.train(setup, tmp_path)
    assert [path.suffix for path in tmp_path.iterdir()] == [".npz"]
    monkeypatch.setattr(curve_run, "replace_text", replace_text)
    curve_run.train(setup, tmp_path)
    (curve,) = curve_results.read(tmp_path)
    assert curve.done
    assert curve.step == 2


@pytest.mark.slow
@pytest.mark.parametrize("system", ["keras_policy", "tfamp_policy"])
def test_low_precision_is_used_and_learns_as_float32(tmp_path, system):
    exact = curve_run.train(a_setup(steps=30), tmp_path)
    low = curve_run.train(a_setup(system=system, dtype="bfloat16", steps=30), tmp_path)
    assert exact.held_out[-1].loss < 0.98 * exact.held_out[0].loss
    assert low.losses != exact.losses
    assert low.losses == pytest.approx(exact.losses, rel=0.01)
    assert low.held_out[-1].loss == pytest.approx(exact.held_out[-1].loss, rel=0.01)


def test_files_of_other_dimensions_are_not_gone_on_with(tmp_path):
    setup = a_setup(steps=2)
    curve_run.train(setup, tmp_path)
    with pytest.raises(ValueError, match=r"other dimensions: it has .*'steps': 2.* 'steps': 4"):
        curve_run.train(dataclasses.replace(setup, steps=4), tmp_path)


def test_a_run_whose_time_is_up_ends_at_an_evaluation(tmp_path):
    curve = curve_run.train(a_setup(), tmp_path, end=time.time() - 1)
    assert (curve.step, curve.done, len(curve.held_out)) == (0, False, 1)


@pytest.mark.parametrize(
    ("task", "system", "dtype"),
    tiers(
        [],
        [("resnet", "float32", "float32")],
        [("resnet", "tfamp_policy", "float16"), ("transformer", "tfamp_policy", "bfloat16")],
    ),
)
def test_a_command_that_was_killed_goes_on_in_new_processes(tmp_path, task, system, dtype):
    command = [sys.executable, "-m", "benchmarks.curves", "--size", "small", "--steps", "40"]
    command += ["--task", task, "--system", system, "--seeds", "1"]
    command += ["--dtype", "bfloat16" if dtype == "float32" else dtype, "--results"]
    # oneDNN's convolutions crash with one thread: TensorFlow 2.21, without AVX-512.
    threads = {"TF_NUM_INTRAOP_THREADS": "1", "TF_NUM_INTEROP_THREADS": "1"}
    threads["TF_ENABLE_ONEDNN_OPTS"] = "0"
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    options = {"cwd": ROOT, "env": os.environ | threads, **quiet}
    folder = tmp_path / "stopped"
    last = folder / f"{a_setup(task, system, dtype).name}.json"
    with subprocess.Popen([*command, folder], start_new_session=True, **options) as process:
        while not last.exists():
            assert process.poll() is None
            time.sleep(0.01)
        os.killpg(process.pid, signal.SIGKILL)
    *before, part = curve_results.read(folder)
    assert all(curve.done for curve in before)
    assert 0 < part.step < 40
    for each in (folder, tmp_path / "whole"):
        subprocess.run([*command, each], check=True, **options)
    again, whole = (curve_results.read(each) for each in (folder, tmp_path / "whole"))
    assert again == whole
    assert all(curve.done for curve in again)


# Tables, pictures, pages


def made_up():
    """Three seeds of float32 and two of tfamp's policy, of which the second is half-way."""
    found = []
    for system, dtype, seed, losses in (
        ("float32", "float32", 0, [4.0, 3.0, 2.0, 1.0]),
        ("float32", "float32", 1, [4.0, 3.0, 2.0, 1.1]),
        ("float32", "float32", 2, [4.0, 3.0, 2.0, 1.2]),
        ("tfamp_policy", "bfloat16", 0, [4.0, 3.0, 2.0, 1.01]),
        ("tfamp_policy", "bfloat16", 1, [4.0, 3.0, 2.0, 1.089]),
        ("tfamp_policy", "bfloat16", 2, [4.0, 3.0]),
    ):
        held_out = [Evaluation(2 * n, loss, 1 - loss / 5) for n, loss in enumerate(losses)]
        setup = a_setup("resnet", system, dtype, seed)
        seen = [5.0] * held_out[-1].step
        found.append(Curve(setup, 5382, {"CPU": "a CPU"}, seen, held_out))
    return found


def test_the_table_compares_the_ends_of_the_same_seeds():
    table = curve_results.table(made_up())
    assert table.rows == (
        ("resnet", "float32", "3", "1.1000", "1.0000 to 1.2000", "", "78.00%", ""),
        (
            *("resnet", "tfamp policy, bfloat16", "2", "1.0495", "1.0100 to 1.0890"),
            *("-1.00% to +1.00%", "79.01%", "-0.20 to +0.22"),
        ),
    )
    about, machine, unfinished = table.notes
    assert about.startswith("resnet: 5,382 parameters, 6 steps; blocks 1, channels 4,")
    assert machine == "Machine: CPU a CPU."
    expected = "Not at its end: resnet, tfamp policy, bfloat16, seed 2, at step 2 of 6."
    assert unfinished == expected


def test_curves_of_a_file_are_those_that_were_written(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    path, again, picture = (tmp_path / name for name in ("a.json", "b.json", "c.png"))
    path.write_text(curve_results.to_json(made_up()), encoding="utf-8")
    assert curve_results.read(path) == made_up()
    curves.main(["--read", str(path), "--json", str(again), "--picture", str(picture)])
    assert again.read_text() == path.read_text()
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "at step 2 of 6" in capsys.readouterr().out
    path.write_text(json.dumps({"schema": 0, "curves": []}), encoding="utf-8")
    with pytest.raises(ValueError, match="must be of schema 1; got 0"):
        curve_results.read(path)


def test_runs_of_the_command_are_of_all_ways_and_seeds(capsys):
    args = curves._parser().parse_args(["--dtype", "bfloat16", "float16", "--seeds", "2"])
    found = curves.setups(args)
    assert len({each.name for each in found}) == len(found) == 2 * 2 * 5
    assert found[0].system == "float32"
    assert [each.seed for each in found] == [0] * 10 + [1] * 10
    with pytest.raises(SystemExit):
        curves.main(["--seeds", "0"])
    assert "--seeds must be at least 1; got 0" in capsys.readouterr().err


def test_the_page_has_the_numbers_of_the_file():
    found = curve_results.read(ASSETS / "curves.json")
    page = (ROOT / "docs" / "accuracy.md").read_text(encoding="utf-8")
    begin, end = report.marks("curves")
    shown = page.partition(begin)[2].partition(end)[0]
    assert shown.strip() == curves.section(found).strip()
    assert re.search(r"!\[.+\]\(assets/curves\.png\)", page)
    assert (ASSETS / "curves.png").read_bytes().startswith(b"\x89PNG")
