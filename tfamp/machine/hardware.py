"""What this machine multiplies natively, and which policy `auto` makes of it.

`detect` collects facts, `automatic_policy` is a pure function of them. TensorFlow is asked about
GPUs and TPUs only, here and nowhere else in tfamp, and being asked does not start its runtime.
Importing this file does not import it.
"""

from __future__ import annotations

import functools
import platform
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BFLOAT16_CAPABILITY = (8, 0)
FLOAT16_CAPABILITY = (7, 0)
# Of compute capability 7.5, as the T4 is, and without its Tensor Cores (TU116 and TU117).
_WITHOUT_TENSOR_CORES = re.compile(
    r"\b(GTX 16\d\d|T4\d\d|T5\d\d|T6\d\d|T1000|T1200|T2000|MX450|MX550)\b"
)

# Instruction sets that multiply the dtype, as /proc/cpuinfo spells them on x86 and on ARM.
# avx512_bf16 and bf16 have dot products, amx_* tiles; f16c and fphp's scalar half would not pay.
_BFLOAT16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
_FLOAT16_FLAGS = frozenset({"avx512_fp16", "amx_fp16", "asimdhp"})


@dataclass(frozen=True)
class Gpu:
    """One GPU.

    Attributes:
        name: The device's name, or "unknown GPU".
        capability: CUDA compute capability as (major, minor), None where there is none.
    """

    name: str
    capability: tuple[int, int] | None

    @property
    def lacks_tensor_cores(self) -> bool:
        """Whether it is one of those that have none although their capability promises them."""
        return bool(_WITHOUT_TENSOR_CORES.search(self.name))

    @property
    def native(self) -> tuple[str, ...]:
        """The low-precision dtypes that it multiplies on Tensor Cores."""
        if self.lacks_tensor_cores or self.capability is None:
            return ()
        least = {"bfloat16": BFLOAT16_CAPABILITY, "float16": FLOAT16_CAPABILITY}
        return tuple(dtype for dtype, need in least.items() if self.capability >= need)

    def rank(self) -> tuple[int, tuple[int, int]]:
        """Something to compare GPUs by: one that multiplies less natively has a lower one."""
        return len(self.native), self.capability or (0, 0)


@dataclass(frozen=True)
class Hardware:
    """The facts that decide which low-precision dtype pays on a machine.

    Attributes:
        cpu_model: The CPU's name, "" where it is not known.
        cpu_bfloat16: Whether the CPU has bfloat16 multiply instructions.
        cpu_float16: Whether the CPU has vector float16 arithmetic.
        gpus: The GPUs that are visible to TensorFlow.
        tpu: Whether a TPU is.
    """

    cpu_model: str
    cpu_bfloat16: bool
    cpu_float16: bool
    gpus: tuple[Gpu, ...]
    tpu: bool

    @property
    def weakest_gpu(self) -> Gpu | None:
        """The GPU that decides for all, as a model has one policy."""
        return min(self.gpus, key=Gpu.rank, default=None)


def detect() -> Hardware:
    """Looks at this machine, once for each set of devices that are visible.

    Returns:
        What was found. What cannot be found out counts as absent.

    Example:
        >>> isinstance(detect().cpu_bfloat16, bool)
        True
    """
    from tfamp.interop.tf_private import visible_devices

    return _detected(visible_devices("GPU"), bool(visible_devices("TPU")))


@functools.cache
def _detected(gpus: tuple[Any, ...], tpu: bool) -> Hardware:
    model, flags = _cpu()
    return Hardware(
        cpu_model=model,
        cpu_bfloat16=bool(flags & _BFLOAT16_FLAGS),
        cpu_float16=bool(flags & _FLOAT16_FLAGS),
        gpus=tuple(map(_gpu, gpus)),
        tpu=tpu,
    )


def automatic_policy(hardware: Hardware) -> tuple[str, str]:
    """Decides what the policy `auto` stands for on a machine.

    Where there are GPUs they decide, the weakest one for all: a model has one policy.

    Args:
        hardware: The machine's facts.

    Returns:
        The policy's name, and the reason in words.

    Example:
        >>> laptop = Hardware("", cpu_bfloat16=False, cpu_float16=False, gpus=(), tpu=False)
        >>> automatic_policy(laptop)
        ('float32', 'this CPU multiplies neither ... no GPU and no TPU')
    """
    if hardware.tpu:
        return "mixed_bfloat16", "TPUs multiply bfloat16 natively"
    if hardware.weakest_gpu is not None:
        return _policy_of(hardware.weakest_gpu)
    if hardware.cpu_bfloat16:
        return "mixed_bfloat16", "this CPU multiplies bfloat16 natively"
    if hardware.cpu_float16:
        return "float32", (
            "this CPU has float16 arithmetic but no bfloat16, and float16 training pays on GPUs "
            "only; there is no GPU and no TPU"
        )
    return "float32", (
        "this CPU multiplies neither bfloat16 nor float16 natively, and there is no GPU and no TPU"
    )


def _policy_of(gpu: Gpu) -> tuple[str, str]:
    if gpu.capability is None:
        return "float32", f"the compute capability of {gpu.name} is not known"
    what = f"{gpu.name} has compute capability {gpu.capability[0]}.{gpu.capability[1]}"
    if gpu.lacks_tensor_cores:
        return "float32", f"{what} but no Tensor Cores: its chip is a TU116 or TU117"
    if "bfloat16" in gpu.native:
        return "mixed_bfloat16", f"{what}: bfloat16 Tensor Cores from 8.0 on"
    if "float16" in gpu.native:
        return "mixed_float16", f"{what}: float16 Tensor Cores from 7.0 on, bfloat16 from 8.0 on"
    return "float32", f"{what}: Tensor Cores come with 7.0"


def _gpu(device: Any) -> Gpu:
    import tensorflow as tf

    from tfamp.interop import tf_private

    try:
        details = tf.config.experimental.get_device_details(device)
    except RuntimeError as error:  # Of a capability such as "9.0a", which it quotes.
        details = {"compute_capability": str(error), **tf_private.device_details(device)}
    capability = details.get("compute_capability")
    if isinstance(capability, str):
        found = re.search(r"(\d+)\.(\d+)", capability)
        capability = (int(found[1]), int(found[2])) if found else None
    return Gpu(details.get("device_name", "unknown GPU"), capability)


def _cpu() -> tuple[str, frozenset[str]]:
    """Returns the CPU's name and its instruction set flags as /proc/cpuinfo spells them."""
    system = platform.system()
    if system == "Linux":
        try:
            text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return platform.processor(), frozenset()
        return parse_cpuinfo(text)
    if system == "Darwin":
        return _mac_cpu()
    return platform.processor(), frozenset()


def parse_cpuinfo(text: str) -> tuple[str, frozenset[str]]:
    r"""Reads the first processor of a /proc/cpuinfo.

    Args:
        text: The file's contents.

    Returns:
        The model's name ("" on most ARM kernels, which give none) and the set of flags.

    Example:
        >>> parse_cpuinfo("model name : Xeon\nflags : fpu amx_bf16")[0]
        'Xeon'
    """
    fields: dict[str, str] = {}
    for line in text.splitlines():
        key, separator, value = line.partition(":")
        if separator:
            fields.setdefault(key.strip().lower(), value.strip())
    flags = fields.get("flags") or fields.get("features") or ""
    return fields.get("model name", ""), frozenset(flags.split())


def _mac_cpu() -> tuple[str, frozenset[str]]:
    features = {"bf16": "hw.optional.arm.FEAT_BF16", "asimdhp": "hw.optional.arm.FEAT_FP16"}
    flags = frozenset(flag for flag, name in features.items() if _sysctl(name) == "1")
    return _sysctl("machdep.cpu.brand_string"), flags


def _sysctl(name: str) -> str:
    command = ("sysctl", "-n", name)
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=5)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()
