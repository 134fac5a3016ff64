"""`tfamp rewrite`: what it prints, writes and leaves behind."""

import json
import os
import shutil
import signal

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
