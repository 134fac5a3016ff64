"""`tfamp rewrite`: what it prints, writes and leaves behind."""

import json
import signal
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf

import tfamp
from helpers import saved_models
from helpers.graph_asserts import assert_computes_in, op_dtypes
from tfamp.cli import main
from tfamp.rewriting.saved_model import inspect_saved_model


@pytest.fixture(scope="module")
def src(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "module"
    saved_models.module(path)
    return path


@pytest.fixture
def run(capsys):
    """Runs the command line in this process; returns its exit code and what it printed."""

    def run(*arguments):
        code = main([str(each) for each in arguments])
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return run


def one_line(text):
    (line,) = text.splitlines()
    return line


def test_options_are_those_of_the_library_and_what_was_done_is_told(run, src, tmp_path):
    before, handler = (src / "saved_model.pb").read_bytes(), signal.getsignal(signal.SIGTERM)
    code, out, err = run(
        "rewrite", src, tmp_path / "low", "--dtype", "float16", "--freeze", "--device", "cpu",
        "--keep-float32", "back$", "--placement", "min_cut", "--report", tmp_path / "plan.json",
    )  # fmt: skip
    assert (code, err) == (0, "")
    assert (src / "saved_model.pb").read_bytes() == before
    assert signal.getsignal(signal.SIGTERM) is handler
    plan = tfamp.rewrite_saved_model(
        src, tmp_path / "other", dtype="float16", freeze=True, device="cpu",
        keep_float32=["back$"], placement="min_cut",
    )  # fmt: skip
    assert json.loads((tmp_path / "plan.json").read_text()) == json.loads(plan.to_json())
    assert str(tmp_path / "low") in out
    assert f"{plan.summary.low_nodes} of {plan.summary.nodes} float nodes in float16" in out
    assert f"casts   {plan.summary.casts}," in out
    assert not (tmp_path / "low" / "variables").exists()


def test_reports_are_the_plan_as_text_and_as_a_page(run, src, tmp_path):
    plan = inspect_saved_model(src, dtype="float16")
    for name, text in (("plan.txt", plan.to_text()), ("plan.html", plan.to_html())):
        arguments = (src, tmp_path / name.replace(".", "-"), "--report", tmp_path / name)
        code, out, _ = run("rewrite", *arguments, "--dtype", "float16")
        assert (code, out.splitlines()[-1]) == (0, f"report  {tmp_path / name}")
        assert (tmp_path / name).read_text(encoding="utf-8") == text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["rewrite", "a"], "the following arguments are required: DST"),
        (["rewrite", "a", "b", "--dtype", "float64"], "--dtype: invalid choice: 'float64'"),
        (["rewrite", "a", "b", "--report", "plan.pdf"], "must end in .html, .json, .txt"),
        (["rewrite", "a", "b", "--report", "no/plan.txt"], "there is no directory 'no'"),
        (["rewrite", "a", "b", "--report", "plan.json"], "'plan.json' is a directory"),
        (["rewrite", "a", "b", "--placement", "nowhere"], "invalid choice: 'nowhere'"),
    ],
)
def test_wrong_usage_is_exit_code_2(run, arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plan.json").mkdir()
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert message in err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--keep-float32", "nonsense"], "no node's name matches 'nonsense'"),
        (["--keep-float32", "("], "keep_float32 must hold regular expressions; got '('"),
        (["--placement", "fused"], "give freeze=True too"),
        (["--calibrate", "no.npz"], "No such file"),
        (["--calibrate", __file__], "does not hold named arrays of numbers; numpy.savez"),
    ],
)
def test_a_wrong_value_is_one_line(run, src, tmp_path, options, message):
    code, out, err = run("rewrite", src, tmp_path / "low", "--dtype", "bfloat16", *options)
    assert (code, out) == (1, "")
    assert one_line(err).startswith("tfamp: error: ")
    assert message in err
    assert not any(tmp_path.iterdir())


def test_missing_and_existing_directories_are_one_line(run, src, tmp_path):
    low, file = tmp_path / "low", tmp_path / "file"
    file.touch()
    assert run("rewrite", src, low, "--dtype", "bfloat16")[0] == 0
    for arguments, message in (
        (["rewrite", src.parent, low / "x"], "is not a SavedModel"),
        (["rewrite", src, low], "or allow to overwrite it (overwrite=True)"),
        (["rewrite", src, file / "low"], "could not be written"),
    ):
        code, out, err = run(*arguments, "--dtype", "float16")
        assert (code, out) == (1, "")
        assert one_line(err).startswith("tfamp: error: ")
        assert message in err
    assert run("rewrite", src, low, "--dtype", "float16", "--overwrite")[0] == 0
    function = tf.saved_model.load(str(low)).signatures["serving_default"]
    assert_computes_in("float16", function)


# ---- In a process of its own: what the system does to it, and what else reaches the screen -------

_PROCESS = """
import os, resource, shutil, signal, sys
from pathlib import Path
from tfamp.cli import main
from tfamp.core.profile import builtin_profile
from tfamp.machine.file_replacing import replace_text
src, here, *sizes = sys.argv[1:]
def say(what):
    sys.stdout.write(f"{what}\\n")
    sys.stdout.flush()
def rewrite(name, *options):
    say(main(["rewrite", src, here + name, "--dtype", "bfloat16", *options]))
def keep_profile(device):
    replace_text(Path(here, "cache", "machine.json"), builtin_profile(device).to_json())
def files():
    return {path: path.read_bytes() for path in Path(here).rglob("*") if path.is_file()}
rewrite("/frozen", "--freeze")
keep_profile("gpu")
before, limits = files(), resource.getrlimit(resource.RLIMIT_FSIZE)
for size in map(int, sizes):
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    rewrite("/frozen", "--overwrite")
    if size <= 100:
        try:
            keep_profile("cpu")
        except OSError as error:
            say(type(error).__name__)
rewrite("/new/too_large")
resource.setrlimit(resource.RLIMIT_FSIZE, limits)
say(files() == before)
copy = shutil.copytree
def copy_and_stop(*args, **kwargs):
    copy(*args, **kwargs)
    os.kill(os.getpid(), signal.SIGTERM)
    signal.pause()
shutil.copytree = copy_and_stop
rewrite("/new/terminated")
"""


@pytest.mark.slow
def test_a_full_disk_and_a_termination_are_one_line_and_leave_what_was_there(src, tmp_path):
    sizes = (0, 100, 5_000, 40_000)  # Bytes a file may have; the variables take more.
    assert any(each.stat().st_size > sizes[-1] for each in src.rglob("*") if each.is_file())
    command = [sys.executable, "-c", _PROCESS, str(src), str(tmp_path), *map(str, sizes)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    # Nothing else reaches the screen, such as TensorFlow's notes when it is imported.
    words = [line.split()[0] for line in done.stdout.splitlines()]
    full = ["1", "OSError"] * 2 + ["1"] * 2
    assert words == ["wrote", "nodes", "casts", "0", *full, "1", "True", "1"], done
    *full, terminated = done.stderr.splitlines()
    frozen, large = (f"The output {tmp_path}/{name}" for name in ("frozen", "new/too_large"))
    for where, line in zip([frozen] * len(sizes) + [large], full, strict=True):
        assert line.startswith(f"tfamp: error: {where} could not be written")
    assert "File too large" in full[-1]
    assert terminated == "tfamp: error: interrupted; nothing was written"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache", "frozen"]


@pytest.mark.parametrize("freeze", [[], ["--freeze"]])
def test_calibration_data_is_taken_by_name_and_has_to_fit(run, tmp_path, freeze):
    src, data = saved_models.overflowing(tmp_path / "src"), tmp_path / "data.npz"
    for name, width, message in (
        ("z", 4, "serving_default takes ['x']"),
        ("x", 5, "Calibration batch 0: the input"),
    ):
        np.savez(data, **{name: np.ones((2, width), np.float32)})
        wrong = run("rewrite", src, tmp_path / "low", "--dtype", "float16", "--calibrate", data)
        assert wrong[0] in (1, 2)
        assert message in one_line(wrong[2])
        assert not (tmp_path / "low").exists()
    np.savez(data, x=np.full((2, 4), 3.0, np.float32))
    options = ["--dtype", "float16", *freeze, "--calibrate", data]
    code, _, err = run("rewrite", src, tmp_path / "low", *options, "--report", tmp_path / "p.json")
    assert (code, err) == (0, "")
    plan = json.loads((tmp_path / "p.json").read_text())
    kept = [node for node in plan["nodes"] if node["rule"] == "calibration"]
    assert any(node["op"] == "MatMul" and "120000" in node["reason"] for node in kept)
    served = tf.saved_model.load(str(tmp_path / "low")).signatures["serving_default"]
    assert "float16" in op_dtypes(served)["MatMul"]
    assert np.isfinite(served(x=tf.fill((2, 4), 3.0))["y"]).all()
