"""The command line: what it prints, its exit codes, and that a user never meets a traceback."""

import json
import os
import shutil
import signal
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp
from helpers import saved_models
from helpers.graph_asserts import assert_computes_in, op_dtypes
from tfamp.cli import main
from tfamp.machine import hardware
from tfamp.rewriting.saved_model import inspect_saved_model


def test_version_and_help(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"tfamp {tfamp.__version__}\n"
    assert main(["--help"]) == 0
    assert "doctor" in capsys.readouterr().out


def test_doctor_tells_versions_policy_and_reason(capsys):
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    name, reason = hardware.automatic_policy(hardware.detect())
    for expected in (tfamp.__version__, tf.__version__, keras.__version__, name, reason):
        assert expected in text
    assert main(["doctor", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["hardware"]["cpu_model"] == hardware.detect().cpu_model
    assert facts["auto_policy"] == {"name": name, "reason": reason}
    assert facts["problems"] == []


def test_doctor_reports_another_keras_backend(monkeypatch, capsys):
    monkeypatch.setattr(keras.backend, "backend", lambda: "jax")
    assert main(["doctor"]) == 1
    assert "Keras runs on the jax backend, where policies" in capsys.readouterr().out


@pytest.mark.parametrize(
    "error",
    [tfamp.UnsupportedVersionError("TensorFlow 9 is too new"), ImportError("no tensorflow")],
)
def test_what_cannot_be_done_is_one_line_and_exit_code_1(error, monkeypatch, capsys):
    def fail():
        raise error

    monkeypatch.setattr(hardware, "detect", fail)
    assert main(["doctor"]) == 1
    assert capsys.readouterr().err == f"tfamp: error: {error}\n"


def test_python_m_tfamp_exits_with_the_code_of_main():
    def run(*arguments):
        return subprocess.run(
            [sys.executable, "-m", "tfamp", *arguments], capture_output=True, text=True, check=False
        )

    assert run("nonsense").returncode == 2
    # TensorFlow's notes when it is imported do not reach the screen.
    failed = run("rewrite", "no/model", "copy", "--dtype", "float16")
    assert failed.stderr.startswith("tfamp: error: There is no directory no/model")
    assert (failed.returncode, failed.stderr.count("\n")) == (1, 1)


# ---- tfamp rewrite -------------------------------------------------------------------------------


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
        ([], "required: COMMAND"),
        (["doctr"], "invalid choice: 'doctr'"),
        (["doctor", "--jsn"], "unrecognized arguments: --jsn"),
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


def test_what_cannot_be_done_is_one_line_and_leaves_nothing(run, src, tmp_path):
    low, file, existing = tmp_path / "low", tmp_path / "file", tmp_path / "existing"
    file.touch()
    assert run("rewrite", src, existing, "--dtype", "bfloat16")[0] == 0
    before = sorted(tmp_path.rglob("*"))
    for arguments, message in (
        ([src, low, "--keep-float32", "nonsense"], "no node's name matches 'nonsense'"),
        ([src, low, "--keep-float32", "("], "keep_float32 must hold regular expressions; got '('"),
        ([src, low, "--placement", "fused"], "give freeze=True too"),
        ([src, low, "--calibrate", "no.npz"], "No such file"),
        ([src, low, "--calibrate", __file__], "does not hold named arrays of numbers; numpy.savez"),
        ([src.parent, low], "is not a SavedModel"),
        ([src, existing], "or allow to overwrite it (overwrite=True)"),
        ([src, file / "low"], "could not be written"),
    ):
        code, out, err = run("rewrite", *arguments, "--dtype", "float16")
        assert (code, out) == (1, "")
        assert one_line(err).startswith("tfamp: error: ")
        assert message in err
        assert sorted(tmp_path.rglob("*")) == before
    assert run("rewrite", src, existing, "--dtype", "float16", "--overwrite")[0] == 0
    function = tf.saved_model.load(str(existing)).signatures["serving_default"]
    assert_computes_in("float16", function)


def test_a_pattern_without_effect_is_a_warning(run, src, tmp_path):
    options = ("--dtype", "bfloat16", "--keep-float32", "^serving_default_x$")
    code, _, err = run("rewrite", src, tmp_path / "low", *options)
    assert code == 0
    message = "tfamp: warning: keep_float32: '^serving_default_x$' has no effect"
    assert one_line(err).startswith(message)


def test_a_termination_is_one_line_and_leaves_nothing(run, src, tmp_path, monkeypatch):
    copy = shutil.copytree

    def copy_and_stop(*args, **kwargs):
        copy(*args, **kwargs)
        os.kill(os.getpid(), signal.SIGTERM)
        signal.pause()

    monkeypatch.setattr(shutil, "copytree", copy_and_stop)
    code, _, err = run("rewrite", src, tmp_path / "new" / "low", "--dtype", "bfloat16")
    assert (code, err) == (1, "tfamp: error: interrupted; nothing was written\n")
    assert not any(tmp_path.iterdir())


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


def test_calibration_data_with_nan_is_named(run, tmp_path):
    src, data = saved_models.overflowing(tmp_path / "src"), tmp_path / "data.npz"
    np.savez(data, x=np.full((2, 4), np.nan, np.float32))
    options = ["--dtype", "float16", "--calibrate", data]
    code, _, err = run("rewrite", src, tmp_path / "low", *options)
    assert code == 0
    nan, nothing = err.splitlines()
    message = "Calibration batch 0: the input serving_default_x:0 holds NaN"
    assert nan.startswith(f"tfamp: warning: {message}")
    assert "no op that can be converted to float16 with this calibration data" in nothing
    assert "is not finite in float32 already" in nothing
