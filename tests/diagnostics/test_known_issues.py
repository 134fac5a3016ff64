"""`known_issues`: every check has a machine that has it, a sound machine has none."""

import dataclasses
import importlib.metadata
import json

import pytest
from tensorflow.python.util import _pywrap_util_port

from tfamp.core.profile import builtin_profile
from tfamp.diagnostics import device_report
from tfamp.diagnostics.doctor import (
    CHECKS,
    Environment,
    known_issues,
    old_libraries,
    read_environment,
)
from tfamp.machine import hardware
from tfamp.planning.kernels import unusable_kernels

CPU = hardware.Hardware("Xeon", cpu_bfloat16=True, cpu_float16=False, gpus=(), tpu=False)
SOUND = Environment(CPU, kernels=("sm_60", "sm_70", "sm_80", "sm_89", "compute_90"))


def gpu(name, *capability) -> Environment:
    machine = dataclasses.replace(CPU, gpus=(hardware.Gpu(name, capability or None),))
    return dataclasses.replace(SOUND, hardware=machine, tensor_float_32=False)


CASES = {
    "gpu-not-seen": dataclasses.replace(SOUND, nvidia_driver=True, cuda_build=True),
    "old-cuda-libraries": dataclasses.replace(
        gpu("A100", 8, 0), old_libraries=("nvidia-cudnn-cu12 9.1.0.70 (at least 9.3.0.75)",)
    ),
    "no-tensor-cores": gpu("NVIDIA GeForce GTX 1660 Ti", 7, 5),
    "no-machine-code": gpu("NVIDIA GeForce RTX 5090", 12, 0),
    "float16-sums": gpu("Tesla T4", 7, 5),
    "tensor-float-32": dataclasses.replace(gpu("A100", 8, 0), tensor_float_32=True),
    "batch-norm-transposes": dataclasses.replace(gpu("A100", 8, 0), nhwc_batch_norm=False),
    "auto-is-slower": dataclasses.replace(SOUND, speed_of_auto=0.6),
    "sums-in-low-variables": dataclasses.replace(SOUND, inexact_ops=("ResourceScatterAdd",)),
    "unusable-kernels": dataclasses.replace(
        SOUND, unusable_kernels=unusable_kernels("cpu", frozenset({"bfloat16"}))
    ),
    "onednn-off": dataclasses.replace(SOUND, onednn=False),
}


@pytest.mark.parametrize("name", CHECKS)
def test_an_issue_is_found_alone_with_advice_and_source(name):
    (issue,) = known_issues(CASES[name])
    assert issue.name == name
    assert issue.text.endswith(".")
    assert issue.advice.endswith(".")
    assert issue.source.startswith("https://")


@pytest.mark.parametrize(
    "environment", [SOUND, gpu("H100", 9, 0), gpu("RTX 4090", 8, 9), gpu("unknown GPU")], ids=str
)
def test_a_sound_machine_has_none(environment):
    assert known_issues(environment) == ()


def test_the_texts_name_what_was_found(monkeypatch):
    (code,) = known_issues(CASES["no-machine-code"])
    assert "12.0 and TensorFlow was built for sm_60, " in code.text
    (code,) = known_issues(gpu("GTX 980", 5, 2))
    assert code.name == "no-machine-code"
    wanted = ["nvidia-cudnn-cu12<10.0,>=9.3.0.75; extra", "nvidia-nccl-cu12>=2.27.7", "numpy>=1"]
    monkeypatch.setattr(importlib.metadata, "requires", lambda _: [*wanted, "nvidia-missing>=1"])
    there = {"nvidia-cudnn-cu12": "9.1.0.70", "nvidia-nccl-cu12": "2.27.7"}

    def installed(name):
        if name not in there:
            raise importlib.metadata.PackageNotFoundError
        return there[name]

    assert old_libraries(installed) == CASES["old-cuda-libraries"].old_libraries


def test_the_process_is_read_and_the_report_shows_its_issues(monkeypatch):
    monkeypatch.setattr(_pywrap_util_port, "IsMklEnabled", lambda: True)
    assert read_environment(CPU).onednn
    monkeypatch.setattr(_pywrap_util_port, "IsMklEnabled", lambda: False)
    monkeypatch.delenv("TF_USE_CUDNN_BATCHNORM_SPATIAL_PERSISTENT", raising=False)
    found = read_environment(CPU)
    assert (found.nhwc_batch_norm, found.onednn) == (False, False)
    monkeypatch.setenv("TF_USE_CUDNN_BATCHNORM_SPATIAL_PERSISTENT", "1")
    assert read_environment(CPU).nhwc_batch_norm
    monkeypatch.setattr(hardware, "detect", lambda: CPU)
    report = device_report()
    assert "onednn-off" in {issue.name for issue in report.known_issues}
    for issue in report.known_issues:
        assert {issue.text in report.to_text(), issue.advice in report.to_text()} == {True}
        assert dataclasses.asdict(issue) in json.loads(report.to_json())["known_issues"]


@pytest.mark.parametrize("is_faster", [True, False])
def test_a_machine_that_multiplies_the_dtype_of_auto_slowly_is_told(monkeypatch, is_faster):
    monkeypatch.setattr(hardware, "detect", lambda: CPU)
    profile = builtin_profile("cpu", bfloat16=is_faster)
    monkeypatch.setattr(hardware, "find_profile", lambda: hardware.FoundProfile(profile, "a test"))
    report = device_report()
    assert report.policy == "mixed_bfloat16"
    found = [issue.text for issue in report.known_issues if issue.name == "auto-is-slower"]
    assert len(found) == (not is_faster)
    speeds = profile.peaks["matmul"]
    assert is_faster or f"{speeds['bfloat16'] / speeds['float32']:.2g} times" in found[0]
