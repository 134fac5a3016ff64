"""The policy `auto` picks for a machine, and how the machine's facts are read."""

import dataclasses
from pathlib import Path

import pytest
import tensorflow as tf
from tensorflow.python import pywrap_tfe

import tfamp
from tfamp.layers.fused_norms import has_fused_kernel
from tfamp.levels.effective_level import effective_level
from tfamp.machine import hardware
from tfamp.machine.hardware import Gpu, Hardware, automatic_policy, parse_cpuinfo

NOTHING = {"cpu_model": "", "cpu_bfloat16": False, "cpu_float16": False, "gpus": (), "tpu": False}


WITHOUT_TENSOR_CORES = (
    *("GeForce GTX 1650", "T400 4GB", "T500", "T550 Laptop GPU", "T600", "T1000 8GB", "T1200"),
    *("Quadro T1000", "Quadro T2000 with Max-Q Design", "GeForce MX450", "GeForce MX550"),
)
WITH_TENSOR_CORES = ("T4", "RTX 2060", "Quadro RTX 4000", "TITAN RTX")


def turing(name):
    return (Gpu(f"NVIDIA {name}", (7, 5)),)


def machine(**facts):
    return Hardware(**{**NOTHING, **facts})


def gpus(*capabilities):
    return tuple(Gpu(f"GPU {i}", capability) for i, capability in enumerate(capabilities))


@pytest.mark.parametrize(
    ("facts", "policy", "reason"),
    [
        ({}, "float32", "does not multiply bfloat16"),
        ({"cpu_bfloat16": True}, "mixed_bfloat16", "this CPU"),
        ({"cpu_float16": True}, "float32", "no GPU"),
        ({"tpu": True}, "mixed_bfloat16", "TPU"),
        ({"gpus": gpus((8, 0))}, "mixed_bfloat16", "8.0"),
        ({"gpus": gpus((12, 0))}, "mixed_bfloat16", "12.0"),
        ({"gpus": gpus((7, 5))}, "mixed_float16", "7.5"),
        ({"gpus": gpus((7, 0))}, "mixed_float16", "7.0"),
        ({"gpus": gpus((6, 1))}, "float32", "6.1"),
        ({"gpus": gpus((9, 0), (7, 0))}, "mixed_float16", "GPU 1"),
        ({"gpus": gpus((9, 0), (6, 0))}, "float32", "GPU 1"),
        ({"gpus": gpus(None)}, "float32", "not known"),
        # Of capability 7.5 as the T4, without its Tensor Cores.
        ({"gpus": gpus((8, 0), (7, 0)) + turing("GeForce GTX 1660 Ti")}, "float32", "GTX 1660"),
        *(({"gpus": turing(name)}, "float32", "no Tensor Cores") for name in WITHOUT_TENSOR_CORES),
        *(({"gpus": turing(name)}, "mixed_float16", "7.5") for name in WITH_TENSOR_CORES),
        # GPUs decide, not the CPU.
        ({"gpus": gpus((6, 1)), "cpu_bfloat16": True}, "float32", "6.1"),
        ({"gpus": gpus((7, 0)), "cpu_bfloat16": True}, "mixed_float16", "7.0"),
    ],
)
def test_policy_and_reason(facts, policy, reason):
    name, why = automatic_policy(machine(**facts))
    assert name == policy
    assert reason in why


@pytest.mark.parametrize(
    ("text", "model", "flag"),
    [
        ("processor : 0\nmodel name\t: Xeon\nflags\t\t: fpu avx512_bf16\n", "Xeon", "avx512_bf16"),
        ("processor : 0\nFeatures\t: fp asimdhp bf16\n", "", "bf16"),
        ("flags : amx_bf16\n\nprocessor : 1\nflags : other\n", "", "amx_bf16"),
        ("", "", None),
    ],
)
def test_cpuinfo(text, model, flag):
    found_model, flags = parse_cpuinfo(text)
    assert found_model == model
    assert (flag in flags) == bool(flag)
    assert "other" not in flags


@pytest.fixture
def undetected():
    hardware._cpuinfo.cache_clear()
    hardware._detected.cache_clear()
    yield
    hardware._cpuinfo.cache_clear()
    hardware._detected.cache_clear()


def test_a_cpu_without_cpuinfo_is_known_by_name_only(undetected, monkeypatch):
    monkeypatch.setattr(hardware, "Path", lambda path: Path("/nowhere", path.lstrip("/")))
    found = hardware.detect()
    assert hardware.detect() is found
    assert not (found.cpu_bfloat16)
    assert not (found.cpu_float16)


def test_gpus_are_those_that_are_not_hidden_known_or_not(undetected, monkeypatch):
    details = {"device_name": "NVIDIA L4", "compute_capability": (8, 9)}
    assert has_fused_kernel("float32", 1e-6)
    gpu = tf.config.PhysicalDevice("/physical_device:GPU:0", "GPU")
    visible = [gpu]
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind=None: [gpu])
    monkeypatch.setattr(tf.config, "get_visible_devices", lambda kind: visible * (kind == "GPU"))
    monkeypatch.setattr(tf.config.experimental, "get_device_details", lambda _: details)
    assert hardware.automatic_policy(hardware.detect())[0] == "mixed_bfloat16"
    assert hardware.machine_facts()["gpus"] == "NVIDIA L4"
    assert hardware.device_kind("auto") == "gpu"
    assert not has_fused_kernel("float32", 1e-6)  # cuDNN's limit
    visible.clear()  # after tfamp has looked
    assert not hardware.detect().gpus
    assert hardware.machine_facts()["gpus"] == ""
    assert hardware.device_kind("auto") == "cpu"
    assert has_fused_kernel("float32", 1e-6)
    visible.append(gpu)
    details.clear()
    hardware._cpuinfo.cache_clear()
    hardware._detected.cache_clear()
    assert hardware.detect().gpus == (Gpu("unknown GPU", None),)


@pytest.mark.parametrize(
    ("given", "capability", "policy"),
    [
        ("9.0a", (9, 0), "mixed_bfloat16"),
        ("7.5", (7, 5), "mixed_float16"),
        ("new", None, "float32"),
    ],
)
def test_a_capability_tensorflow_cannot_parse(given, capability, policy, undetected, monkeypatch):
    # TensorFlow's own function, of a device that is there, given what a GPU's driver gives.
    (device,) = tf.config.list_physical_devices("CPU")
    details = {"device_name": "NVIDIA H100", "compute_capability": given}
    monkeypatch.setattr(pywrap_tfe, "TF_GetDeviceDetails", lambda _: dict(details))
    monkeypatch.setattr(
        tf.config, "get_visible_devices", lambda kind: [device] if kind == "GPU" else []
    )
    assert hardware.detect().gpus == (Gpu("NVIDIA H100", capability),)
    assert "NVIDIA H100" in hardware.automatic_policy(hardware.detect())[1]
    tfamp.set_global_policy("auto")
    assert tfamp.global_policy().name == policy


# Vendor and flags of CPUs with bfloat16 instructions, and whether "auto" uses them.
CPUS = {
    "Cooper Lake": ("GenuineIntel", "avx512f avx512_bf16", False),
    "Sapphire Rapids": ("GenuineIntel", "avx512f avx512_bf16 amx_tile amx_bf16", True),
    "Sapphire Rapids, tiles hidden by the machine's host": ("GenuineIntel", "avx512_bf16", False),
    "Zen 4": ("AuthenticAMD", "avx512f avx512_bf16", True),
    "Zen 5": ("AuthenticAMD", "avx512f avx512_bf16 avx_vnni", True),
    "Graviton 3": ("", "fphp asimdhp bf16", True),
}


@pytest.mark.parametrize(("vendor", "flags", "gains"), CPUS.values(), ids=CPUS)
def test_auto_is_float32_where_bfloat16_is_slow_by_the_description_of_the_cpu(
    vendor, flags, gains, undetected, monkeypatch, tmp_path
):
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"vendor_id\t: {vendor}\nmodel name\t: X\nflags\t\t: fpu {flags}\n" * 2)
    monkeypatch.setattr(hardware, "Path", lambda path: cpuinfo)
    found = dataclasses.replace(hardware.detect(), gpus=(), tpu=False)
    assert found.cpu_bfloat16, "doctor says that it multiplies bfloat16 in any case"
    policy, reason = automatic_policy(found)
    assert policy == ("mixed_bfloat16" if gains else "float32")
    assert ("half of float32's speed" in reason) == (not gains)
    level = effective_level(tfamp.PrecisionConfig(level="auto"), found)
    assert (level.level, level.dtype) == (("O1", "bfloat16") if gains else ("O0", "float32"))
    profile = hardware.profile_of("cpu")
    speeds = profile.peaks["matmul"]
    assert (speeds["bfloat16"] > speeds["float32"]) == gains


def test_a_gpu_decides_beside_a_cpu_whose_bfloat16_is_slow():
    found = machine(cpu_bfloat16=True, cpu_slow_bfloat16=True, gpus=gpus((8, 0)))
    assert automatic_policy(found)[0] == "mixed_bfloat16"
