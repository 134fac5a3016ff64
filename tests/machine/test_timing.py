"""Measuring beside other jobs: memory is taken as it is needed."""

from __future__ import annotations

import pytest
import tensorflow as tf

from tfamp.interop import tf_private
from tfamp.machine import timing

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
    timing.let_memory_grow()
    assert found == changed


def test_a_gpu_that_is_divided_is_left_alone(one_gpu, monkeypatch):
    def divided(gpu, value):
        raise ValueError("Cannot set memory growth on device when virtual devices configured")

    monkeypatch.setattr(tf.config.experimental, "get_memory_growth", lambda gpu: None)
    monkeypatch.setattr(tf.config.experimental, "set_memory_growth", divided)
    timing.let_memory_grow()
