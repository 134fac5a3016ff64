"""The origin of the machine profile: TFAMP_PROFILE, the cache, an argument of `tfamp.rewrite`."""

import dataclasses
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import platformdirs
import pytest
import tensorflow as tf

import tfamp
from tfamp import diagnostics
from tfamp.cli import main
from tfamp.core.profile import DTYPES, KINDS, builtin_profile
from tfamp.graph import MachineProfile
from tfamp.machine import hardware, profile_measure
from tfamp.machine.hardware import find_profile

USUAL = builtin_profile("cpu")
# A machine on which nothing low pays.
SLOW = dataclasses.replace(
    USUAL,
    name="slow",
    peaks={kind: {dtype: 1e9 if dtype == "float32" else 1e6 for dtype in DTYPES} for kind in KINDS},
)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty cache, and no variable set."""
    monkeypatch.delenv("TFAMP_PROFILE")
    monkeypatch.delenv("TFAMP_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    hardware._measured.cache_clear()
    yield Path(platformdirs.user_cache_dir("tfamp", False))
    hardware._measured.cache_clear()


@pytest.fixture
def measured(monkeypatch):
    """The measurements; a measurement takes no time and finds SLOW."""
    calls = []

    def measure():
        calls.append(SLOW)
        return SLOW

    monkeypatch.setattr(profile_measure, "measure_profile", measure)
    return calls


def another_process():
    hardware._measured.cache_clear()


def test_threads_measure_it_once_it_is_kept_and_damage_is_replaced(folder, measured):
    with ThreadPoolExecutor(8) as pool:
        first, *others = pool.map(lambda _: find_profile(), range(8))
    assert first.profile == SLOW
    assert "measured now, kept in" in first.source
    assert others == [first] * 7
    another_process()
    (path,) = folder.iterdir()  # nothing temporary is left
    assert find_profile() == (SLOW, f"measured before, kept in {path}")
    assert len(measured) == 1
    fields = json.loads(SLOW.to_json())
    half = path.read_bytes()[:100]
    spoilt = [half, b"", b"[]", b"\xff\xfe\x00", json.dumps({**fields, "bandwidth": -1}).encode()]
    for number, content in enumerate(spoilt, 2):
        path.write_bytes(content)
        another_process()
        assert "measured now" in find_profile().source
        assert len(measured) == number
        assert json.loads(path.read_text("utf-8")) == fields


CHANGES = {
    "tensorflow": lambda patch: patch.setattr(tf, "__version__", "9.9"),
    "isa": lambda patch: patch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2"),
    "cpu": lambda patch: set_machine(patch, cpu_model="another"),
    "native": lambda patch: set_machine(patch, cpu_bfloat16=not hardware.detect().cpu_bfloat16),
    "gpus": lambda patch: set_machine(patch, gpus=(hardware.Gpu("A100", (8, 0)),)),
}


def test_another_machine_or_tensorflow_is_measured_again(folder, measured, monkeypatch):
    find_profile()
    for number, change in enumerate(CHANGES.values(), 2):
        with monkeypatch.context() as patch:
            change(patch)
            find_profile()
        assert len(measured) == len(list(folder.iterdir())) == number


def set_machine(monkeypatch, **facts):
    found = dataclasses.replace(hardware.detect(), **facts)
    monkeypatch.setattr(hardware, "detect", lambda: found)


def test_a_machine_that_cannot_be_measured_gets_the_built_in_table(folder, monkeypatch):
    def fail():
        raise tf.errors.ResourceExhaustedError(None, None, "no memory")

    monkeypatch.setattr(profile_measure, "measure_profile", fail)
    with pytest.warns(tfamp.TfampWarning, match="cannot be measured.*no memory"):
        found = find_profile()
    assert found.profile.name.startswith("built-in")
    assert "cannot be measured" in found.source
    assert not folder.exists()


def test_processes_that_measure_at_once_all_use_the_first_kept_profile(folder, monkeypatch):
    monkeypatch.setattr(profile_measure, "measure_profile", lambda: USUAL)
    assert find_profile().profile == USUAL
    (path,) = folder.iterdir()
    first = path.rename(path.with_suffix(".first"))

    def measure():  # Meanwhile the other process keeps what it measured.
        first.rename(path)
        return SLOW

    monkeypatch.setattr(profile_measure, "measure_profile", measure)
    another_process()
    assert find_profile().profile == USUAL
    assert MachineProfile.from_json(path.read_text("utf-8")) == USUAL


@pytest.mark.parametrize("where", ["file/tfamp", "~/.cache/tfamp"])
def test_a_cache_that_cannot_be_written_warns(where, folder, measured, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    path = Path(where) if where.startswith("~") else tmp_path / where
    monkeypatch.setattr(hardware, "cache_folder", lambda: path)
    with pytest.warns(tfamp.TfampWarning, match=f"cannot be kept.*Make {path} writable"):
        found = find_profile()
    assert found == (SLOW, "measured now; it cannot be kept")


def test_the_variable_chooses(folder, measured, monkeypatch, tmp_path):
    monkeypatch.setenv("TFAMP_PROFILE", "builtin")
    found = find_profile()
    assert found.profile.name.startswith("built-in")
    assert found.source == "the built-in table, as TFAMP_PROFILE says"
    monkeypatch.setenv("TFAMP_PROFILE", "measure")
    assert not measured
    for _ in range(2):
        assert find_profile().profile == SLOW
    assert len(measured) == 1  # in a process
    assert not folder.exists()
    given = dataclasses.replace(USUAL, name="given")
    (tmp_path / "given.json").write_text(given.to_json())
    monkeypatch.setenv("TFAMP_PROFILE", str(tmp_path / "given.json"))
    assert find_profile().profile == given
    (tmp_path / "given.json").write_text("{}")
    with pytest.raises(ValueError, match="a profile must be a JSON object with name, peaks"):
        find_profile()


def test_with_the_cache_off_no_file_is_written_or_read(folder, measured, monkeypatch):
    monkeypatch.setenv("TFAMP_CACHE", "off")
    found = find_profile()
    assert found == (SLOW, "measured now, not kept, as TFAMP_CACHE=off says")
    assert find_profile() == found
    assert len(measured) == 1  # in a process
    assert not folder.exists()
    monkeypatch.delenv("TFAMP_CACHE")
    assert "kept in" in find_profile().source
    monkeypatch.setenv("TFAMP_CACHE", "off")
    another_process()
    assert "measured now" in find_profile().source
    monkeypatch.setenv("TFAMP_CACHE", "of")
    with pytest.raises(ValueError, match="TFAMP_CACHE must be \"off\", or unset.*got 'of'"):
        find_profile()


@pytest.mark.parametrize("value", ["buildin", "nowhere/profile.json", "."])
def test_another_value_of_the_variable_is_an_error_that_names_the_choices(
    value, folder, measured, monkeypatch, capsys
):
    monkeypatch.setenv("TFAMP_PROFILE", value)
    for call in (find_profile, matmul_dtypes):
        with pytest.raises(ValueError, match='"builtin" .*"measure" .*path of a JSON') as error:
            call()
        assert repr(value) in str(error.value)
    assert main(["doctor"]) == 1
    assert "TFAMP_PROFILE must be" in capsys.readouterr().err
    assert not measured


def matmul_dtypes(**choices):
    function = tfamp.rewrite(lambda x: x @ x @ x, dtype="bfloat16", **choices)
    plan = function.plan(tf.TensorSpec((2048, 2048)))
    return {node.dtype for node in plan.nodes if node.op == "MatMul"}


def test_a_rewrite_goes_by_the_measured_machine(folder, measured):
    with pytest.warns(tfamp.NothingConvertedWarning):
        assert matmul_dtypes() == {"float32"}
    assert len(measured) == 1
    assert list(folder.iterdir())


def test_an_argument_gives_the_profile_or_the_built_in_one(folder, measured, monkeypatch):
    set_machine(monkeypatch, cpu_bfloat16=True, gpus=())
    assert matmul_dtypes(profile="builtin") == {"bfloat16"}
    assert matmul_dtypes(profile=USUAL) == {"bfloat16"}
    with pytest.warns(tfamp.NothingConvertedWarning):
        assert matmul_dtypes(profile=SLOW) == {"float32"}
    assert matmul_dtypes(placement="lists") == {"bfloat16"}
    assert not measured
    assert not folder.exists()


@pytest.mark.filterwarnings("ignore::tfamp.NothingConvertedWarning")
def test_a_graph_def_is_rewritten_without_cache_or_environment(folder, measured, monkeypatch):
    monkeypatch.setenv("TFAMP_PROFILE", "nonsense")
    function = tf.function(lambda x: x @ x, autograph=False)
    graph = function.get_concrete_function(tf.TensorSpec((2048, 2048))).graph
    tfamp.graph.rewrite_graph_def(graph.as_graph_def(add_shapes=True), ["Identity:0"])
    assert not measured
    assert not folder.exists()


def test_the_report_and_doctor_show_the_profile(folder, measured, capsys):
    report = diagnostics.device_report()
    assert report.profile == SLOW
    assert "measured now, kept in" in report.profile_source
    assert main(["doctor"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["profile", "slow"] in lines
    assert ["speed", "float16", "bfloat16", "over", "float32's"] in lines
    assert all([kind, "0.001", "0.001"] in lines for kind in KINDS)
    assert all([name, "10", "GB/s"] in lines for name in ("memory", "Casts"))
    another_process()
    assert main(["doctor", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)["machine_profile"]
    assert facts["source"].startswith("measured before, kept in")
    fields = {name: value for name, value in facts.items() if name != "source"}
    assert type(SLOW).from_json(json.dumps(fields)) == SLOW
    assert len(measured) == 1


def test_one_thread_of_the_environment_is_another_machine(folder, measured, monkeypatch):
    # The program sets none: then TensorFlow reads the environment.
    monkeypatch.setattr(tf.config.threading, "get_intra_op_parallelism_threads", lambda: 0)
    first = hardware.find_profile().source
    monkeypatch.setenv("TF_NUM_INTRAOP_THREADS", "1")
    another_process()

    assert hardware.find_profile().source != first
    assert len(list(folder.rglob("machine-*.json"))) == 2
