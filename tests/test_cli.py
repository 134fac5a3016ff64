"""The command line: what it prints, its exit codes, and that a user never meets a traceback."""

import json
import subprocess
import sys

import keras
import pytest
import tensorflow as tf

import tfamp
from tfamp.cli import main
from tfamp.core.errors import UnsupportedVersionError
from tfamp.machine import hardware


def test_version_and_help(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"tfamp {tfamp.__version__}\n"
    assert main(["--help"]) == 0
    assert "doctor" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "required: COMMAND"),
        (["doctr"], "invalid choice: 'doctr'"),
        (["doctor", "--jsn"], "unrecognized arguments: --jsn"),
    ],
)
def test_wrong_usage_is_exit_code_2_and_says_what_is_wrong(argv, message, capsys):
    assert main(argv) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert not printed.out


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
    "error", [UnsupportedVersionError("TensorFlow 9 is too new"), ImportError("no tensorflow")]
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

    assert run("--version").stdout == f"tfamp {tfamp.__version__}\n"
    assert run("nonsense").returncode == 2
    # TensorFlow's notes when it is imported do not reach the screen.
    failed = run("rewrite", "no/model", "copy", "--dtype", "float16")
    assert failed.stderr.startswith("tfamp: error: There is no directory no/model")
    assert (failed.returncode, failed.stderr.count("\n")) == (1, 1)
