"""This machine: the dtypes it multiplies natively, the policy `auto`, and its speed.

`detect` collects facts, `automatic_policy` is a pure function of them, and `find_profile`
returns the machine profile: built-in, from a file, cached, or measured now. Importing this file
does not import TensorFlow, and reading the facts does not start TensorFlow's runtime.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import platform
import re
import threading
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import platformdirs

from tfamp.core.dtypes import LOW_PRECISION
from tfamp.core.errors import TfampWarning
from tfamp.core.names import Device
from tfamp.core.profile import MachineProfile, builtin_profile
from tfamp.machine.file_replacing import replace_text

BFLOAT16_CAPABILITY = (8, 0)
FLOAT16_CAPABILITY = (7, 0)
# GPUs of compute capability 7.5, as the T4, but without Tensor Cores (TU116 and TU117).
_WITHOUT_TENSOR_CORES = re.compile(
    r"\b(GTX 16\d\d|T4\d\d|T5\d\d|T6\d\d|T1000|T1200|T2000|MX450|MX550)\b"
)

# Instruction sets that multiply the dtype, as spelled in /proc/cpuinfo on x86 and on ARM.
# avx512_bf16 and bf16 have dot products, amx_* tiles; f16c and scalar fphp would not pay.
_BFLOAT16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
_FLOAT16_FLAGS = frozenset({"avx512_fp16", "amx_fp16", "asimdhp"})
# Tiles multiply bfloat16 faster than float32; Intel's dot products in vectors take twice as long.
_TILES = "amx_bf16"
_SLOW_VENDOR = "GenuineIntel"
# With one of these TensorFlow runs oneDNN's kernels for the dtype, otherwise Eigen's, whatever
# the CPU multiplies. Source: IsDataTypeSupportedByOneDNNOnThisCPU in
# `core/graph/mkl_graph_util.h`.
_ONEDNN_FLAGS = {
    "bfloat16": frozenset({"avx512f", "amx_bf16", "avx_ne_convert"}),
    "float16": frozenset({"avx512_fp16", "amx_fp16"}),
}

VARIABLE = "TFAMP_PROFILE"
_CHOICES = (
    f'{VARIABLE} must be "builtin" for the built-in table, "measure" to measure and leave the '
    "cache alone, or the path of a JSON file that MachineProfile.to_json() wrote; unset it for "
    "the cached measurement"
)
# Environment variables that limit the instructions oneDNN and cuBLAS use.
_LIBRARY_SETTINGS = re.compile(r"(TF_(ENABLE|SET)_)?(ONEDNN|DNNL)_|NVIDIA_TF32_OVERRIDE")
# Increased when the contents of a profile, or its measurement, change: older files
# are not used.
_FORMAT = 6
# Of two measurements at once one would slow the other.
_MEASURING = threading.Lock()
# The environment variables that tfamp reads.
CACHE_VARIABLE = "TFAMP_CACHE"
_VARIABLES = (CACHE_VARIABLE, VARIABLE)


def keeps_files() -> bool:
    """Returns whether measurements are kept in the cache, which TFAMP_CACHE=off prevents.

    Raises:
        ValueError: TFAMP_CACHE has another value.
    """
    wanted = os.environ.get(CACHE_VARIABLE, "")
    if wanted not in ("", "off"):
        raise ValueError(f'{CACHE_VARIABLE} must be "off", or unset for the cache; got {wanted!r}.')
    return not wanted


def warn_of_variables() -> None:
    """Warns about environment variables that only look like tfamp's, and values without meaning.

    A value of TFAMP_PROFILE is checked where the profile is read.
    """
    try:
        keeps_files()
    except ValueError as error:
        warnings.warn(str(error), TfampWarning, stacklevel=1)
    for variable in os.environ:
        if variable.startswith("TFAMP_") and variable not in _VARIABLES:
            warnings.warn(
                f"The environment variable {variable!r} is not one of tfamp's, which ignores "
                f"it. Known: {', '.join(_VARIABLES)}. Settings of prepare are its arguments or "
                "its config=, a dict or the path of a file.",
                TfampWarning,
                stacklevel=1,
            )


@dataclass(frozen=True)
class Gpu:
    """One GPU.

    Attributes:
        name: The device's name, or "unknown GPU".
        capability: CUDA compute capability as (major, minor), None if unknown.
    """

    name: str
    capability: tuple[int, int] | None

    @property
    def lacks_tensor_cores(self) -> bool:
        """Whether it has no Tensor Cores although its capability promises them."""
        return bool(_WITHOUT_TENSOR_CORES.search(self.name))

    @property
    def native(self) -> tuple[str, ...]:
        """Low-precision dtypes that it multiplies on Tensor Cores."""
        if self.lacks_tensor_cores or self.capability is None:
            return ()
        least = {"bfloat16": BFLOAT16_CAPABILITY, "float16": FLOAT16_CAPABILITY}
        return tuple(dtype for dtype, need in least.items() if self.capability >= need)


@dataclass(frozen=True)
class Hardware:
    """The facts that decide which low-precision dtype pays on a machine.

    Attributes:
        cpu_model: The CPU's name, "" if unknown.
        cpu_bfloat16: Whether the CPU has bfloat16 multiply instructions.
        cpu_float16: Whether the CPU has vector float16 arithmetic.
        gpus: The GPUs visible to TensorFlow.
        tpu: Whether a TPU is visible.
        cpu_slow_bfloat16: Whether those instructions are slower than float32's: AVX512-BF16 of
            Intel CPUs, without AMX.
    """

    cpu_model: str
    cpu_bfloat16: bool
    cpu_float16: bool
    gpus: tuple[Gpu, ...]
    tpu: bool
    cpu_slow_bfloat16: bool = False

    @property
    def weakest_gpu(self) -> Gpu | None:
        """The GPU that decides for all: a model has one policy."""
        return min(
            self.gpus, key=lambda gpu: (len(gpu.native), gpu.capability or (0, 0)), default=None
        )


def detect() -> Hardware:
    """Looks at this machine, once per set of visible devices.

    Returns:
        The facts. Whatever cannot be detected counts as absent.

    Example:
        >>> isinstance(detect().cpu_bfloat16, bool)
        True
    """
    import tensorflow as tf

    visible = tf.config.get_visible_devices
    return _detected(tuple(visible("GPU")), bool(visible("TPU")))


@functools.cache
def _cpuinfo() -> str:
    try:
        return Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return f"model name: {platform.processor()}"


@functools.cache
def onednn_dtypes() -> frozenset[str]:
    """Returns the low dtypes for which TensorFlow runs oneDNN's kernels on this CPU.

    Eigen's kernels run for the others, and add up otherwise: see `tfamp.planning.kernels`. A
    CPU whose flags cannot be read, or that is not of x86, counts as one without oneDNN.

    Example:
        >>> onednn_dtypes() <= {"bfloat16", "float16"}
        True
    """
    from tfamp.interop import tf_private

    if not tf_private.uses_onednn():
        return frozenset()
    _, flags = parse_cpuinfo(_cpuinfo())
    return frozenset(dtype for dtype, needed in _ONEDNN_FLAGS.items() if flags & needed)


@functools.cache
def has_tiles() -> bool:
    """Whether this CPU has AMX, tiles that multiply bfloat16 and add up in float32.

    Example:
        >>> isinstance(has_tiles(), bool)
        True
    """
    return _TILES in parse_cpuinfo(_cpuinfo())[1]


@functools.cache
def _detected(gpus: tuple[Any, ...], tpu: bool) -> Hardware:
    model, flags = parse_cpuinfo(_cpuinfo())
    return Hardware(
        cpu_model=model,
        cpu_bfloat16=bool(flags & _BFLOAT16_FLAGS),
        cpu_float16=bool(flags & _FLOAT16_FLAGS),
        gpus=tuple(map(_gpu, gpus)),
        tpu=tpu,
        cpu_slow_bfloat16=has_slow_bfloat16(_cpuinfo()),
    )


def automatic_policy(hardware: Hardware) -> tuple[str, str]:
    """Decides what the policy `auto` stands for on a machine.

    On a machine with GPUs the weakest one decides for all: a model has one policy.

    Args:
        hardware: The machine's facts.

    Returns:
        The policy's name, and the reason.

    Example:
        >>> laptop = Hardware("", cpu_bfloat16=False, cpu_float16=False, gpus=(), tpu=False)
        >>> automatic_policy(laptop)
        ('float32', 'this CPU does not multiply bfloat16 ... no GPU and no TPU')
    """
    if hardware.tpu:
        return "mixed_bfloat16", "TPUs multiply bfloat16 natively"
    if hardware.weakest_gpu is not None:
        return _policy_of(hardware.weakest_gpu)
    if hardware.cpu_slow_bfloat16:
        return "float32", (
            "this Intel CPU has AVX512-BF16 and no AMX: it multiplies bfloat16 at about half of "
            "float32's speed, and the machine has no GPU and no TPU"
        )
    if hardware.cpu_bfloat16:
        return "mixed_bfloat16", "this CPU multiplies bfloat16 natively"
    # float16 needs a loss scale and pays on GPUs only, even if a CPU has float16 arithmetic.
    why = "this CPU does not multiply bfloat16 natively, and the machine has no GPU and no TPU"
    return "float32", why


def _policy_of(gpu: Gpu) -> tuple[str, str]:
    if gpu.capability is None:
        return "float32", f"the compute capability of {gpu.name} is not known"
    what = f"{gpu.name} has compute capability {gpu.capability[0]}.{gpu.capability[1]}"
    if gpu.lacks_tensor_cores:
        return "float32", f"{what} but no Tensor Cores: its chip is a TU116 or TU117"
    policy = f"mixed_{gpu.native[0]}" if gpu.native else "float32"
    return policy, f"{what}: Tensor Cores multiply float16 from 7.0 on, bfloat16 from 8.0 on"


def _gpu(device: Any) -> Gpu:
    import tensorflow as tf

    from tfamp.interop import tf_private

    try:
        details = tf.config.experimental.get_device_details(device)
    except RuntimeError as error:  # It quotes a capability such as "9.0a".
        details = {"compute_capability": str(error), **tf_private.device_details(device)}
    capability = details.get("compute_capability")
    if isinstance(capability, str):
        match = re.search(r"(\d+)\.(\d+)", capability)
        capability = (int(match[1]), int(match[2])) if match else None
    return Gpu(details.get("device_name", "unknown GPU"), capability)


def parse_cpuinfo(text: str) -> tuple[str, frozenset[str]]:
    r"""Reads the first processor of a /proc/cpuinfo.

    Args:
        text: The file's contents.

    Returns:
        The model's name ("" on most ARM kernels) and the set of flags.

    Example:
        >>> parse_cpuinfo("model name : Xeon\nflags : fpu amx_bf16")[0]
        'Xeon'
    """
    fields = _fields(text)
    flags = fields.get("flags") or fields.get("features") or ""
    return fields.get("model name", ""), frozenset(flags.split())


def has_slow_bfloat16(text: str) -> bool:
    r"""Whether a CPU multiplies bfloat16 by its own instructions, and slower than float32.

    From its description alone, not from a measurement, so that all workers of a job agree.

    Args:
        text: The contents of /proc/cpuinfo.

    Example:
        >>> has_slow_bfloat16("vendor_id : GenuineIntel\nflags : avx512f avx512_bf16")
        True
        >>> has_slow_bfloat16("vendor_id : AuthenticAMD\nflags : avx512f avx512_bf16")
        False
    """
    _, flags = parse_cpuinfo(text)
    is_slow_vendor = _fields(text).get("vendor_id") == _SLOW_VENDOR
    return is_slow_vendor and bool(flags & _BFLOAT16_FLAGS) and _TILES not in flags


def _fields(text: str) -> dict[str, str]:
    """The first value of each key of a /proc/cpuinfo, by the key in small letters."""
    fields: dict[str, str] = {}
    for line in text.splitlines():
        key, _, value = line.partition(":")
        fields.setdefault(key.strip().lower(), value.strip())
    return fields


# ---- The machine profile ---------------------------------------------------------------


class FoundProfile(NamedTuple):
    """A machine profile and its origin, for people."""

    profile: MachineProfile
    source: str


def device_kind(device: Device) -> Device:
    """Returns the kind of device for nodes without a device; "auto" is this machine's."""
    from tfamp.interop import tf_private

    return tf_private.default_device_kind() if device == "auto" else device


def profile_of(kind: str) -> MachineProfile:
    """Returns the built-in profile of a kind of device, adapted to this machine."""
    hardware = detect()
    if kind == "cpu":
        gains = hardware.cpu_bfloat16 and not hardware.cpu_slow_bfloat16
        return builtin_profile(kind, bfloat16=gains, float16=hardware.cpu_float16)
    gpu = hardware.weakest_gpu
    if kind != "gpu" or gpu is None:
        return builtin_profile(kind)
    native = {dtype: dtype in gpu.native for dtype in LOW_PRECISION}
    return builtin_profile(kind, **native, name=gpu.name, tf32=_multiplies_in_tf32())


def _multiplies_in_tf32() -> bool:
    import tensorflow as tf

    return (
        tf.config.experimental.tensor_float_32_execution_enabled()
        and os.environ.get("NVIDIA_TF32_OVERRIDE") != "0"
    )


def find_profile() -> FoundProfile:
    """Returns the profile of this machine, selected by the environment variable TFAMP_PROFILE.

    If it is unset, the profile comes from the cache; without a cached one, the machine is
    measured, which takes about two seconds, once per process. TFAMP_CACHE=off leaves the cache
    alone. A machine that cannot be measured gets the built-in profile and a `TfampWarning`; so does
    a cache that cannot be written.

    Raises:
        ValueError: One of the two variables has a value without meaning.
    """
    choice = os.environ.get(VARIABLE, "")
    if choice == "builtin":
        return _built_in(f"the built-in table, as {VARIABLE} says")
    if choice not in ("", "measure"):
        try:
            text = Path(choice).expanduser().read_text(encoding="utf-8")
            return FoundProfile(MachineProfile.from_json(text), f"{choice}, as {VARIABLE} says")
        except (OSError, ValueError) as error:
            raise ValueError(f"{_CHOICES}. Got {choice!r}: {error}") from error
    facts = json.dumps({"format": _FORMAT, **machine_facts()})
    name = f"machine-{hashlib.sha256(facts.encode()).hexdigest()[:20]}.json"
    if not keeps_files():
        told_by = f"{CACHE_VARIABLE}=off"
    else:
        told_by = f"{VARIABLE}=measure" if choice else ""
    with _MEASURING:
        return _measured(facts, None if told_by else cache_folder() / name, told_by)


def key_of_found(profile: MachineProfile) -> str:
    """Returns a text for a profile that `find_profile` returned, the same in every process.

    Every measurement of a machine has digits of its own. What it is of, `machine_facts`, is the
    same.
    """
    is_measured = os.environ.get(VARIABLE, "") in ("", "measure")
    # A machine that cannot be measured has the built-in figures.
    return "measured" if is_measured and profile != _built_in("").profile else repr(profile)


def machine_facts() -> dict[str, str]:
    """Returns the facts that the speed of this machine depends on, by name."""
    import tensorflow as tf

    hardware = detect()
    cores = os.cpu_count()
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    facts = {
        "tensorflow": tf.__version__,
        "cpu": hardware.cpu_model,
        "cpu native": f"bfloat16 {hardware.cpu_bfloat16}, float16 {hardware.cpu_float16}",
        "cores": str(cores),
        "threads": _threads_set(),
        "gpus": ", ".join(gpu.name for gpu in hardware.gpus),
    }
    if hardware.gpus:
        facts["tf32"] = str(_multiplies_in_tf32())
    settings = sorted(name for name in os.environ if _LIBRARY_SETTINGS.match(name))
    return facts | {name: os.environ[name] for name in settings}


def _threads_set() -> str:
    """The number of threads of an op as the program or the environment sets it; "0" if unset."""
    import tensorflow as tf

    threads = tf.config.threading.get_intra_op_parallelism_threads()
    return str(threads or os.environ.get("TF_NUM_INTRAOP_THREADS", "").strip() or 0)


def cache_folder() -> Path:
    """Returns the folder for tfamp's files in the user's cache folder; it may not exist yet."""
    return Path(platformdirs.user_cache_dir("tfamp", appauthor=False))


def keep_in_cache(path: Path, text: str, costs: str, advice: str) -> str:
    """Writes a file in the cache folder, and returns the origin of its contents, for people.

    A file that cannot be written is a `TfampWarning` with the costs and the advice.
    """
    try:
        if not path.is_absolute():  # Without a home folder it is "~/..." as it stands.
            raise FileNotFoundError(f"{path} needs a home folder")
        replace_text(path, text)
    except OSError as error:
        text = f"{costs}: {error}. Make {path.parent} writable, or {advice}."
        warnings.warn(text, TfampWarning, stacklevel=4)
        return "measured now; it cannot be kept"
    return f"measured now, kept in {path}"


def _built_in(source: str) -> FoundProfile:
    return FoundProfile(profile_of(device_kind("auto")), source)


@functools.cache
def _measured(facts: str, path: Path | None, told_by: str) -> FoundProfile:
    """Reads a profile from its file or measures it; once per process for these facts.

    Without a path `told_by` is the variable that keeps the cache out of it.
    """
    import tensorflow as tf

    from tfamp.machine import profile_measure

    if path is not None and (cached := _read(path)):
        return cached
    try:
        profile = profile_measure.measure_profile()
    except tf.errors.OpError as error:
        text = f"This machine cannot be measured, tfamp's built-in figures are used: {error}"
        warnings.warn(text, TfampWarning, stacklevel=3)
        return _built_in("the built-in table, as this machine cannot be measured")
    if path is None:
        return FoundProfile(profile, f"measured now, not kept, as {told_by} says")
    if cached := _read(path):  # Processes that started together share one measurement.
        return cached
    costs = (
        "The measured machine profile cannot be kept, so every process that needs it takes two "
        "seconds to measure it again"
    )
    advice = f'set {VARIABLE} to "builtin" or to a file'
    return FoundProfile(profile, keep_in_cache(path, profile.to_json(), costs, advice))


def _read(path: Path) -> FoundProfile | None:
    """Reads a cached profile; a file that cannot be read counts as missing and is replaced."""
    try:
        profile = MachineProfile.from_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return FoundProfile(profile, f"measured before, kept in {path}")
