"""The built-in machine profile that the facts of a machine select."""

import dataclasses

import pytest
import tensorflow as tf

from tfamp.core.profile import builtin_profile
from tfamp.graph import rewrite_graph_def
from tfamp.machine import hardware
from tfamp.machine.hardware import profile_of


def low_matmuls(dtype, **choices):
    function = tf.function(lambda x: x @ x @ x, autograph=False)
    graph = function.get_concrete_function(tf.TensorSpec((2048, 2048))).graph
    plan = rewrite_graph_def(
        graph.as_graph_def(add_shapes=True), ["Identity:0"], dtype=dtype, **choices
    ).plan
    return sum(node.dtype == dtype for node in plan.nodes if node.op == "MatMul")


@pytest.mark.filterwarnings("ignore::tfamp.NothingConvertedWarning")
def test_without_a_profile_the_machine_decides(monkeypatch):
    found = hardware.Hardware("", cpu_bfloat16=True, cpu_float16=False, gpus=(), tpu=False)
    monkeypatch.setattr(hardware, "detect", lambda: found)
    assert low_matmuls("bfloat16", device="cpu") == 2
    assert low_matmuls("float16", device="cpu") == 0
    assert low_matmuls("float16", device="gpu") == 2  # for another machine
    found = dataclasses.replace(found, cpu_bfloat16=False, cpu_float16=True)
    assert low_matmuls("bfloat16", device="cpu") == 0
    assert low_matmuls("float16", device="cpu") == 2
    found = dataclasses.replace(found, gpus=(hardware.Gpu("", (7, 5)), hardware.Gpu("", (8, 0))))
    assert low_matmuls("bfloat16", device="gpu") == 0
    assert low_matmuls("float16", device="gpu") == 2


def test_the_profile_of_this_machine_knows_its_gpu_and_tf32(monkeypatch):
    assert not tf.config.experimental.tensor_float_32_execution_enabled()  # in tests
    gpus = (hardware.Gpu("NVIDIA H100 PCIe", (9, 0)), hardware.Gpu("NVIDIA A100-PCIE", (8, 0)))
    found = hardware.Hardware("", cpu_bfloat16=True, cpu_float16=False, gpus=gpus, tpu=False)
    monkeypatch.setattr(hardware, "detect", lambda: found)
    assert profile_of("gpu") == builtin_profile("gpu", name="A100", tf32=False)
    enabled = tf.config.experimental
    monkeypatch.setattr(enabled, "tensor_float_32_execution_enabled", lambda: True)
    assert profile_of("gpu") == builtin_profile("gpu", name="A100")
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")
    assert profile_of("gpu") == builtin_profile("gpu", name="A100", tf32=False)
    found = dataclasses.replace(found, gpus=(hardware.Gpu("NVIDIA GeForce GTX 1650", (7, 5)),))
    peaks = profile_of("gpu").peaks["matmul"]
    assert max(peaks["float16"], peaks["bfloat16"]) < peaks["float32"]
