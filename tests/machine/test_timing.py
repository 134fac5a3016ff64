"""Measuring beside other jobs: memory is taken as it is needed."""

import pytest
import tensorflow as tf

from tfamp.interop import tf_private
from tfamp.machine import timing

GPU = tf.config.PhysicalDevice("/physical_device:GPU:1", "GPU")


@pytest.mark.parametrize(
    ("started", "growth", "changed"),
    [(False, None, [True]), (False, False, []), (False, True, []), (True, None, [])],
)
def test_memory_grows_where_tfamp_starts_the_runtime_but_not_of_a_divided_gpu(
    started, growth, changed, monkeypatch
):
    found = []

    def divided(gpu, value):
        raise ValueError("Cannot set memory growth on device when virtual devices configured")

    # The second of two GPUs is visible.
    monkeypatch.setattr(tf.config, "get_visible_devices", lambda kind: [GPU] * (kind == "GPU"))
    monkeypatch.setattr(tf_private, "runtime_has_started", lambda: started)
    experimental = tf.config.experimental
    monkeypatch.setattr(experimental, "get_memory_growth", lambda gpu: growth)
    monkeypatch.setattr(experimental, "set_memory_growth", lambda gpu, value: found.append(value))
    timing.let_memory_grow()
    assert found == changed
    monkeypatch.setattr(experimental, "set_memory_growth", divided)
    timing.let_memory_grow()
