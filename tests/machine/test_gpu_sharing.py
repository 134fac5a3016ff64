"""Beside other jobs: memory as it is needed, and no measurement of a GPU that is in use."""

from __future__ import annotations

import pytest
import tensorflow as tf

from tfamp.interop import tf_private
from tfamp.machine import gpu_sharing

GPU = tf.config.PhysicalDevice("/physical_device:GPU:1", "GPU")


@pytest.fixture
def one_gpu(monkeypatch):
    """The second of two GPUs is visible, and TensorFlow has not started."""
    monkeypatch.setattr(tf.config, "get_visible_devices", lambda kind: [GPU] * (kind == "GPU"))
    monkeypatch.setattr(tf_private, "runtime_has_started", lambda: False)


@pytest.mark.parametrize(
    ("started", "growth", "changed"),
    [(False, None, [True]), (False, False, []), (False, True, []), (True, None, [])],
)
def test_memory_grows_where_tfamp_starts_the_runtime(
    started, growth, changed, one_gpu, monkeypatch
):
    found = []
    monkeypatch.setattr(tf_private, "runtime_has_started", lambda: started)
    monkeypatch.setattr(tf.config.experimental, "get_memory_growth", lambda gpu: growth)
    monkeypatch.setattr(
        tf.config.experimental, "set_memory_growth", lambda gpu, value: found.append(value)
    )
    gpu_sharing.let_memory_grow()
    assert found == changed


def test_a_gpu_that_is_divided_is_left_alone(one_gpu, monkeypatch):
    def divided(gpu, value):
        raise ValueError("Cannot set memory growth on device when virtual devices configured")

    monkeypatch.setattr(tf.config.experimental, "get_memory_growth", lambda gpu: None)
    monkeypatch.setattr(tf.config.experimental, "set_memory_growth", divided)
    gpu_sharing.let_memory_grow()


def has_nvidia_smi(folder, monkeypatch, *answers):
    """Puts an nvidia-smi on the path that gives one answer after the other; returns its log."""
    log = folder / "log"
    script = folder / "nvidia-smi"
    lines = "".join(f"{i}) echo '{answer}';; " for i, answer in enumerate(answers, start=1))
    script.write_text(
        f'#!/bin/sh\necho "$@" >> {log}\ncase $(wc -l < {log} | tr -d " ") in {lines}esac\n'
    )
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=":")
    return log


@pytest.mark.parametrize(
    ("answer", "use"),
    [
        ("97, 3000, 16000", "it is busy 97 % of the time"),
        ("0, 15000, 16000", "15000 of its 16000 MiB of memory are taken"),
        ("3, 700, 16000", ""),  # shows a screen
        ("[N/A], 700, 16000", ""),
        ("No devices were found", ""),
        ("", ""),
    ],
)
def test_what_another_job_does_is_told_by_nvidia_smi(answer, use, one_gpu, monkeypatch, tmp_path):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    log = has_nvidia_smi(tmp_path, monkeypatch, answer)
    assert gpu_sharing.used_by_others() == use
    assert log.read_text().endswith("--id=1\n")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,GPU-7c2f")
    gpu_sharing.used_by_others()
    assert log.read_text().endswith("--id=GPU-7c2f\n")


def test_what_this_process_has_done_just_before_does_not_count(one_gpu, monkeypatch, tmp_path):
    monkeypatch.setattr(tf_private, "runtime_has_started", lambda: True)
    monkeypatch.setattr(gpu_sharing, "_LOOKS_BACK", 0.0)
    has_nvidia_smi(tmp_path, monkeypatch, "80, 15000, 16000", "0, 15000, 16000")
    assert not gpu_sharing.used_by_others()


def test_nothing_is_known_without_a_gpu_or_nvidia_smi(one_gpu, monkeypatch, tmp_path):
    has_nvidia_smi(tmp_path, monkeypatch, *["97, 3000, 16000"] * 2)
    assert gpu_sharing.used_by_others()
    with monkeypatch.context() as patch:
        patch.setattr(tf.config, "get_visible_devices", lambda kind: [])
        assert not gpu_sharing.used_by_others()
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    assert not gpu_sharing.used_by_others()
