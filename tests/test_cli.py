"""The command line: what it prints, its exit codes, and that a user never meets a traceback."""

import json
import os
import re
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


def test_a_dtype_by_another_name_is_suggested(capsys):
    assert main(["rewrite", "src", "dst", "--dtype", "fp16"]) == 2
    assert "did you mean 'float16'" in capsys.readouterr().err
    assert main(["doctor", "--dtype", "int8"]) == 2
    assert "invalid choice: 'int8'" in capsys.readouterr().err


def test_a_file_that_is_not_there_and_an_output_without_a_name_are_named(tmp_path, capsys):
    saved_models.module(tmp_path / "source")
    source, new = str(tmp_path / "source"), str(tmp_path / "new")
    calibrated = ["rewrite", source, new, "--dtype", "float16", "--calibrate", "none.npz"]
    assert main(calibrated) == 1
    assert capsys.readouterr().err.endswith("error: none.npz: No such file or directory\n")
    assert main(["rewrite", source, "", "--dtype", "float16"]) == 1
    assert "The output has no name" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_a_reader_that_has_enough_ends_a_command_silently():
    program = "import os, sys; from tfamp.cli import main; sys.exit(main(['--version']))"
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run([sys.executable, "-c", program], stdout=write, stderr=subprocess.PIPE)
    os.close(write)
    assert not done.stderr
    # Without a buffer argparse itself meets the closed pipe, and ignores it.
    assert done.returncode in (0, 141)


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


def test_a_value_of_tfamp_cache_without_meaning_is_reported(monkeypatch, capsys):
    for value in ("on", "1", "OFF"):
        monkeypatch.setenv("TFAMP_CACHE", value)
        assert main(["doctor"]) == 0
        assert f'TFAMP_CACHE must be "off", or unset for the cache; got {value!r}' in (
            capsys.readouterr().err
        )
    monkeypatch.setenv("TFAMP_CACHE", "off")
    assert main(["doctor"]) == 0
    assert "TFAMP_CACHE" not in capsys.readouterr().err


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


@pytest.mark.slow
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


def speaks_python(text):
    """Whether a message has an argument as Python code writes it, for which there is a flag."""
    return re.search(
        r"\b(?:dtype|placement|freeze|overwrite|device)=|keep_float32|calibration=", text
    )


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
    # Matmuls are counted, not the variables and constants around them; "back$" stays float32.
    products = [node.dtype for node in plan.nodes if node.op == "MatMul"]
    assert 0 < products.count("float16") < len(products)
    assert f"products {products.count('float16')} of {len(products)} in float16\n" in out
    assert f"casts    {plan.summary.casts}," in out
    assert not (tmp_path / "low" / "variables").exists()


def test_a_bound_keeps_scopes_in_float32_and_prints_which(run, src, tmp_path):
    inputs = {"x": saved_models.FLOATS, "count": np.int32(1)}
    np.savez(tmp_path / "data.npz", **inputs)
    options = ("--dtype", "bfloat16", "--data", tmp_path / "data.npz", "--bound")
    code, out, err = run("rewrite", src, tmp_path / "loose", *options, "0.1")
    assert (code, err) == (0, "")
    assert "float32  " not in out
    error = float(re.search(r"^error +(\S+) on the data", out, re.MULTILINE)[1])
    assert 0 < error < 0.1
    code, out, _ = run("rewrite", src, tmp_path / "tight", *options, str(error / 2))
    assert code == 0
    assert re.search(r"^float32  \S+$", out, re.MULTILINE)
    assert float(re.search(r"^error +(\S+) on the data", out, re.MULTILINE)[1]) <= error / 2
    np.savez(tmp_path / "data.npz", z=inputs["x"])
    code, out, err = run("rewrite", src, tmp_path / "none", *options, "0.1")
    assert (code, out, (tmp_path / "none").exists()) == (1, "", False)
    assert "No signature of" in one_line(err)


def test_reports_are_the_plan_as_text_and_as_a_page(run, src, tmp_path):
    plan = inspect_saved_model(src, dtype="float16")
    for name, text in (("plan.txt", plan.to_text()), ("plan.html", plan.to_html())):
        arguments = (src, tmp_path / name.replace(".", "-"), "--report", tmp_path / name)
        code, out, _ = run("rewrite", *arguments, "--dtype", "float16")
        assert (code, out.splitlines()[-1]) == (0, f"report   {tmp_path / name}")
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
        (["rewrite", "a", "b", "--bound", "0.01"], "--bound and --data go together"),
        (["rewrite", "a", "b", "--data", "y.npz"], "--bound and --data go together"),
        (["rewrite", "a", "b", "--bound", "-1"], "--bound: '-1' is not a number of at least 0"),
        (["rewrite", "a", "b", "--bound", "nan"], "'nan' is not a number of at least 0"),
        (["rewrite", "a", "b", "--bound", "1", "--data", "no.npz"], "there is no file 'no.npz'"),
        (["rewrite", "a", "b", "--bound", "1", "--data", "x.npz"], "'x.npz' does not hold named"),
    ],
)
def test_wrong_usage_is_exit_code_2(run, arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plan.json").mkdir()
    (tmp_path / "x.npz").write_text("no arrays")
    np.savez(tmp_path / "y.npz", x=np.ones(1))
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert message in err


def test_what_cannot_be_done_is_one_line_and_leaves_nothing(run, src, tmp_path):
    low, file, existing = tmp_path / "low", tmp_path / "file", tmp_path / "existing"
    file.touch()
    assert run("rewrite", src, existing, "--dtype", "bfloat16")[0] == 0
    before = sorted(tmp_path.rglob("*"))
    for arguments, message in (
        (
            [src, low, "--keep-float32", "nonsense"],
            "--keep-float32: no node's name",
        ),
        (
            [src, low, "--keep-float32", "("],
            "--keep-float32 holds '('",
        ),
        ([src, low, "--placement", "fused"], "give --freeze too, or --placement min_cut"),
        ([src, low, "--calibrate", "no.npz"], "No such file"),
        ([src, low, "--calibrate", __file__], "does not hold named arrays of numbers; numpy.savez"),
        ([src.parent, low], "is not a SavedModel"),
        ([src, existing], "exists; give another directory, or --overwrite"),
        ([src, file / "low"], "could not be written"),
    ):
        code, out, err = run("rewrite", *arguments, "--dtype", "float16")
        assert (code, out) == (1, "")
        assert one_line(err).startswith("tfamp: error: ")
        assert message in err
        assert not speaks_python(err)
        assert sorted(tmp_path.rglob("*")) == before
    assert run("rewrite", src, existing, "--dtype", "float16", "--overwrite")[0] == 0
    function = tf.saved_model.load(str(existing)).signatures["serving_default"]
    assert_computes_in("float16", function)


def test_the_library_names_arguments_as_in_python_and_the_command_line_its_flags(
    run, src, tmp_path, monkeypatch
):
    low, existing = tmp_path / "freeze=True", tmp_path / "overwrite=True"
    existing.mkdir()
    code, _, err = run("rewrite", src, existing, "--dtype", "float16")
    assert (code, str(existing) in err) == (1, True)  # What a user wrote stays as it is.
    assert one_line(err).endswith("--overwrite to replace it.")
    with pytest.raises(tfamp.SavedModelError, match="or overwrite=True to replace it"):
        tfamp.rewrite_saved_model(src, existing, dtype="float16")
    with pytest.raises(ValueError, match="give freeze=True too, or placement='min_cut'"):
        tfamp.rewrite_saved_model(src, low, dtype="float16", placement="fused")
    monkeypatch.setattr(hardware, "automatic_policy", lambda _: ("float32", "an old CPU"))
    code, _, err = run("rewrite", src, low)
    assert code == 1
    assert "--dtype auto takes what this machine multiplies natively" in one_line(err)
    assert "Give --dtype float16 or --dtype bfloat16" in err
    assert not speaks_python(err)
    with pytest.raises(ValueError, match="Give dtype='float16' or dtype='bfloat16'"):
        tfamp.rewrite_saved_model(src, low)


@pytest.fixture(scope="module")
def other_files(tmp_path_factory):
    """A directory with the files of a model that are not a SavedModel."""
    folder = tmp_path_factory.mktemp("files")
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    for name in ("m.keras", "m.h5"):
        model.save(folder / name)
    model.save_weights(folder / "m.weights.h5")
    tf.train.Checkpoint(model=model).save(str(folder / "checkpoints" / "c"))
    saved_models.module(folder / "saved")
    (folder / "empty").mkdir()
    return folder


@pytest.mark.filterwarnings("ignore:You are saving your model as an HDF5 file")
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("m.weights.h5", ["weights without a model", "model.load_weights(", "model.export("]),
        ("m.h5", ["HDF5", "keras.saving.load_model(", "model.load_weights(", "model.export("]),
        *(
            (f"checkpoints{name}", ["is a checkpoint", "c-1')", ".restore(", "model.export("])
            for name in ("", "/c-1", "/c-1.index", "/c-1.data-00000-of-00001", "/checkpoint")
        ),
        ("saved/saved_model.pb", ["part of one; give its directory"]),
        ("saved/variables/variables.index", ["part of one; give its directory"]),
        ("empty", ["is not a SavedModel", "model.export("]),
        ("nothing.weights.h5", ["There is no directory"]),
        ("nothing.keras", ["nothing.keras"]),
    ],
)
def test_a_file_that_is_not_a_saved_model_is_recognized(run, other_files, tmp_path, name, words):
    low = tmp_path / "low"
    for arguments in (("rewrite", other_files / name, low), ("doctor", other_files / name)):
        code, out, err = run(*arguments, "--dtype", "bfloat16")
        assert (code, out) == (1, "")
        assert all(word in one_line(err) for word in words)
        assert not low.exists()


def test_rewrite_of_a_keras_file_tells_how_to_export_it(run, other_files, tmp_path):
    code, _, err = run("rewrite", other_files / "m.keras", tmp_path / "low", "--dtype", "float16")
    assert code == 1
    path = str(other_files / "m.keras")
    for word in ("is a Keras model", f"keras.saving.load_model({path!r}", "model.export("):
        assert word in one_line(err)


def test_help_of_freeze_is_true(run, tmp_path, other_files):
    code, out, _ = run("rewrite", "--help")
    text = " ".join(out.split())
    assert code == 0
    assert "a drop-in replacement for SRC that computes in low precision where safe" in text
    assert "only the signatures of SRC" in text
    model = keras.saving.load_model(other_files / "m.keras")
    model.export(tmp_path / "src", verbose=False)
    for name, options in (("same", []), ("frozen", ["--freeze"])):
        assert (
            run("rewrite", tmp_path / "src", tmp_path / name, "--dtype", "bfloat16", *options)[0]
            == 0
        )
    same, frozen = (tf.saved_model.load(str(tmp_path / name)) for name in ("same", "frozen"))
    assert hasattr(same, "serve")
    assert not hasattr(frozen, "serve")
    assert set(same.signatures) == set(frozen.signatures) == {"serve", "serving_default"}


def test_a_pattern_without_effect_is_a_warning(run, src, tmp_path):
    options = ("--dtype", "bfloat16", "--keep-float32", "^serving_default_x$")
    code, _, err = run("rewrite", src, tmp_path / "low", *options)
    assert code == 0
    message = "tfamp: warning: --keep-float32: '^serving_default_x$' has no effect"
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


def test_a_termination_after_the_copy_says_what_is_written(run, src, tmp_path, monkeypatch):
    report = tmp_path / "report.txt"
    report.write_text("before")

    def stop(plan):
        os.kill(os.getpid(), signal.SIGTERM)
        signal.pause()

    monkeypatch.setattr(tfamp.graph.RewritePlan, "to_text", stop)
    dst = tmp_path / "low"
    code, _, err = run("rewrite", src, dst, "--dtype", "bfloat16", "--report", report)
    assert (code, err) == (1, f"tfamp: error: interrupted; {dst} is written\n")
    assert dst.is_dir()
    assert report.read_text() == "before"


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
