"""`tfamp doctor`: native dtypes of a machine, the policy "auto", the profile, known issues.

Known issues are bad combinations of hardware, versions and settings, each with a reason and a
source: a table of pure checks over an `Environment`, which `read_environment` reads.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import json
import os
import platform
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import keras
import tensorflow as tf

import tfamp
from tfamp.core.dtypes import LOW_PRECISION
from tfamp.core.profile import KINDS, MachineProfile
from tfamp.interop.keras_hooks import HOW_TO_CHANGE, runs_tensorflow
from tfamp.interop.tf_private import uses_onednn
from tfamp.machine import hardware
from tfamp.planning.kernels import UNMENDABLE, unusable_kernels
from tfamp.reports import tables
from tfamp.reports.tables import table_lines

_PIP = "https://www.tensorflow.org/install/pip"
_ISSUES = "https://github.com/tensorflow/tensorflow/issues"
_KERNELS = "https://github.com/tensorflow/tensorflow/blob/v2.21.0/tensorflow/core/kernels"
_PAGES = "https://github.com/tfamp/tfamp/blob/main/docs"
_PERSISTENT = "TF_USE_CUDNN_BATCHNORM_SPATIAL_PERSISTENT"
_REQUIREMENT = re.compile(r"^(nvidia-[\w-]+).*?>=\s*([\d.]+)")


@dataclass(frozen=True)
class DeviceReport:
    """Native dtypes of a machine, policy "auto" and its profile; `tfamp doctor` prints them.

    Attributes:
        versions: "tfamp", "tensorflow", "keras" and "python" -> version; "cuda" and "cudnn" ->
            the versions TensorFlow was built for, if it was.
        hardware: CPU, GPUs and TPU, as `tfamp.machine.hardware.Hardware`.
        policy: The policy that "auto" resolves to.
        reason: The reason for that policy.
        profile: Speeds of the machine in each dtype, from which a rewrite estimates costs.
        profile_source: Source of the profile, for people: the built-in table, a file, the
            cache, or a new measurement.
        problems: Settings with which parts of tfamp do not work.
        known_issues: Versions, settings and devices that are known to fail or to be slow; each
            a `KnownIssue` with reason, advice and source.

    Example:
        >>> report = device_report()
        >>> report.policy in ("mixed_bfloat16", "mixed_float16", "float32")
        True
    """

    versions: Mapping[str, str]
    hardware: hardware.Hardware
    policy: str
    reason: str
    profile: MachineProfile
    profile_source: str
    problems: tuple[str, ...]
    known_issues: tuple[KnownIssue, ...] = ()

    def to_json(self) -> str:
        """Returns the report as one JSON object."""
        profile = json.loads(self.profile.to_json())
        facts = {
            "versions": dict(self.versions),
            "hardware": dataclasses.asdict(self.hardware),
            "auto_policy": {"name": self.policy, "reason": self.reason},
            "machine_profile": {"source": self.profile_source, **profile},
            "problems": list(self.problems),
            "known_issues": [dataclasses.asdict(issue) for issue in self.known_issues],
        }
        return json.dumps(facts, indent=2)

    def to_text(self) -> str:
        """Returns the report as a table of two columns."""
        return "\n".join(table_lines(self._rows()))

    def _repr_html_(self) -> str:
        # Notebooks link addresses, and the page must not refer to other pages.
        rows = [(name, text.replace("https://", "")) for name, text in self._rows()]
        title = f"This machine: auto is {self.policy}"
        return tables.fragment(title, tables.facts(rows))

    def _rows(self) -> list[tuple[str, str]]:
        machine, profile = self.hardware, self.profile
        rows = [*self.versions.items(), ("CPU", machine.cpu_model or "unknown model")]
        rows += _native("CPU", bfloat16=machine.cpu_bfloat16, float16=machine.cpu_float16)
        for gpu in machine.gpus:
            capability = ".".join(map(str, gpu.capability or ("unknown",)))
            rows += [("GPU", f"{gpu.name}, compute capability {capability}")]
        if weakest := machine.weakest_gpu:
            native = {dtype: dtype in weakest.native for dtype in LOW_PRECISION}
            rows += _native("GPU", **native)
        else:
            rows += [("GPU", "none")]
        rows += [("TPU", "yes" if machine.tpu else "none")]
        rows += [("policy auto", self.policy), ("because", self.reason)]
        rows += [("profile", profile.name), ("from", self.profile_source)]
        heads = "".join(f"{dtype:>10}" for dtype in LOW_PRECISION)
        rows += [("speed", f"{heads}  over float32's")]
        for kind in KINDS:
            speeds = profile.peaks[kind]
            ratios = (speeds[dtype] / speeds["float32"] for dtype in LOW_PRECISION)
            rows += [(kind, "".join(f"{ratio:10.2g}" for ratio in ratios))]
        rows += [("memory", f"{profile.bandwidth / 1e9:.3g} GB/s")]
        rows += [("Casts", f"{profile.cast_bandwidth / 1e9:.3g} GB/s")]
        rows += [("problem", problem) for problem in self.problems]
        for issue in self.known_issues:
            rows += [("known issue", f"{issue.name}: {issue.text}")]
            rows += [("", issue.advice), ("", f"source: {issue.source}")]
        return rows


def _native(kind: str, **native: bool) -> list[tuple[str, str]]:
    return [
        (f"{kind} {dtype}", "native" if is_native else "not native")
        for dtype, is_native in native.items()
    ]


def device_report() -> DeviceReport:
    """Detects the hardware, resolves the policy "auto" and loads the machine profile.

    The profile is measured in about two seconds unless the user's cache folder has it. The
    environment variable `TFAMP_PROFILE` selects another one; see `tfamp.rewrite`.

    Returns:
        The report.

    Raises:
        ValueError: TFAMP_PROFILE is not "builtin", "measure" or the file of a profile.

    Example:
        >>> print(device_report().to_text())
        tfamp ...
    """
    hardware.warn_of_variables()
    machine = hardware.detect()
    build = tf.sysconfig.get_build_info()
    versions = {
        "tfamp": tfamp.__version__,
        "tensorflow": tf.__version__,
        "keras": keras.__version__,
        "python": platform.python_version(),
        **{library: build.get(f"{library}_version") for library in ("cuda", "cudnn")},
    }
    profile, source = hardware.find_profile()
    policy, reason = hardware.automatic_policy(machine)
    speed = _speed_of(policy.removeprefix("mixed_"), profile)
    environment = dataclasses.replace(read_environment(machine), speed_of_auto=speed)
    wrong_backend = (
        f"Keras runs on the {keras.backend.backend()} backend, where policies and "
        "LossScaleOptimizer work, and autocast, rewrite and GradScaler do not. "
    )
    return DeviceReport(
        versions={name: str(version) for name, version in versions.items() if version},
        hardware=machine,
        policy=policy,
        reason=reason,
        profile=profile,
        profile_source=source,
        problems=() if runs_tensorflow() else (wrong_backend + HOW_TO_CHANGE,),
        known_issues=known_issues(environment),
    )


def _speed_of(dtype: str, profile: MachineProfile) -> float | None:
    """The speed of matmuls in a low dtype over float32's."""
    speeds = profile.peaks["matmul"]
    return speeds[dtype] / speeds["float32"] if dtype in LOW_PRECISION else None


# ---- Known issues --------------------------------------------------------------------------------


@dataclass(frozen=True)
class KnownIssue:
    """A known failure or slowdown on a machine with this set-up.

    Attributes:
        name: Short, stable name.
        text: The issue on this machine, and its reason.
        advice: What to do.
        source: Address of a description, or the command that measures it.
    """

    name: str
    text: str
    advice: str
    source: str


@dataclass(frozen=True)
class Environment:
    """The facts that known issues depend on.

    Attributes:
        hardware: CPU, GPUs and TPU.
        onednn: Whether TensorFlow uses oneDNN's kernels, where it has them.
        cuda_build: Whether TensorFlow was built for CUDA.
        kernels: The targets of GPU kernels: "sm_80" for machine code of one generation,
            "compute_90" for code that later ones compile at first use.
        old_libraries: NVIDIA's Python packages that are older than TensorFlow requires.
        nvidia_driver: Whether a driver for NVIDIA GPUs is installed.
        tensor_float_32: Whether float32 matmuls may use TensorFloat-32.
        nhwc_batch_norm: Whether cuDNN may normalize NHWC tensors in training as they are.
        speed_of_auto: The speed of matmuls in the dtype of the policy "auto" over float32's, by
            the machine profile; None if that policy is float32.
        inexact_ops: Ops that add up in the low dtype of a variable, if the machine has such
            dtypes.
        unusable_kernels: What TensorFlow's low-precision kernels for the CPU do instead of
            returning soon: a text each.
    """

    hardware: hardware.Hardware
    onednn: bool = True
    cuda_build: bool = False
    kernels: tuple[str, ...] = ()
    old_libraries: tuple[str, ...] = ()
    nvidia_driver: bool = False
    tensor_float_32: bool = True
    nhwc_batch_norm: bool = True
    speed_of_auto: float | None = None
    inexact_ops: tuple[str, ...] = ()
    unusable_kernels: tuple[str, ...] = ()


def read_environment(machine: hardware.Hardware) -> Environment:
    """Reads the settings and libraries of this process."""
    build = tf.sysconfig.get_build_info()
    return Environment(
        hardware=machine,
        onednn=uses_onednn(),
        cuda_build=bool(build.get("is_cuda_build")),
        kernels=tuple(build.get("cuda_compute_capabilities") or ()),
        old_libraries=old_libraries(importlib.metadata.version),
        nvidia_driver=Path("/proc/driver/nvidia/version").exists(),
        tensor_float_32=tf.config.experimental.tensor_float_32_execution_enabled(),
        nhwc_batch_norm=os.environ.get(_PERSISTENT, "0").lower() not in ("0", "false"),
        inexact_ops=tuple(UNMENDABLE) if machine.gpus or machine.cpu_bfloat16 else (),
        unusable_kernels=unusable_kernels("cpu", hardware.onednn_dtypes()),
    )


def old_libraries(installed: Callable[[str], str]) -> tuple[str, ...]:
    """Returns the NVIDIA packages older than TensorFlow requires, by `installed` versions."""
    old, not_installed = [], contextlib.suppress(importlib.metadata.PackageNotFoundError)
    with not_installed:  # The package tensorflow, where tensorflow-cpu is installed.
        for match in map(_REQUIREMENT.match, importlib.metadata.requires("tensorflow") or ()):
            with not_installed:
                if match and _version(version := installed(match[1])) < _version(match[2]):
                    old.append(f"{match[1]} {version} (at least {match[2]})")
    return tuple(old)


def known_issues(environment: Environment) -> tuple[KnownIssue, ...]:
    """Returns the known issues of an environment; a pure function."""
    return tuple(
        KnownIssue(name, text.format(detail), advice, source)
        for name, (check, text, advice, source) in CHECKS.items()
        if (detail := check(environment))
    )


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text)[:3])


def _gpu(e: Environment, has_issue: Callable[[hardware.Gpu], object]) -> str | None:
    """Returns the name of the first GPU with an issue."""
    return next((gpu.name for gpu in e.hardware.gpus if has_issue(gpu)), None)


def _without_machine_code(e: Environment) -> str | None:
    """Describes the first GPU for which TensorFlow has no machine code."""
    for gpu in e.hardware.gpus:
        if gpu.capability and e.kernels:
            major, minor = gpu.capability
            # Machine code runs on the same major and a later minor version. PTX of exactly this
            # version is compiled once.
            same_major = (re.match(rf"sm_{major}(\d)\D*$", kernel) for kernel in e.kernels)
            runs = any(int(match[1]) <= minor for match in same_major if match)
            if not runs and f"compute_{major}{minor}" not in e.kernels:
                capability = f"{gpu.name} has compute capability {major}.{minor}"
                return f"{capability} and TensorFlow was built for {', '.join(e.kernels)}"
    return None


def _why_not_seen(e: Environment) -> str:
    return "its CUDA libraries did not load" if e.cuda_build else "it was built without CUDA"


# Name of an issue -> its check, the text for what the check returned, advice and source. A new
# issue needs a source and a test case.
CHECKS: dict[str, tuple[Callable[[Environment], object], str, str, str]] = {
    "gpu-not-seen": (
        lambda e: e.nvidia_driver and not e.hardware.gpus and _why_not_seen(e),
        "An NVIDIA driver is installed but TensorFlow sees no GPU: {0}, or GPUs are hidden.",
        "Install with `pip install tensorflow[and-cuda]`, and look at CUDA_VISIBLE_DEVICES.",
        _PIP,
    ),
    "old-cuda-libraries": (
        lambda e: e.hardware.gpus and ", ".join(e.old_libraries),
        "Older than this TensorFlow was built for: {0}.",
        "Reinstall with `pip install -U tensorflow[and-cuda]`; another package may have "
        "required older ones.",
        f"{_ISSUES}/60913",
    ),
    "no-tensor-cores": (
        lambda e: _gpu(e, lambda gpu: gpu.lacks_tensor_cores),
        "{0} has no Tensor Cores: float16 saves memory, not time, and can be slower than float32.",
        "Stay with float32, or use float16 to save memory.",
        f"{_ISSUES}/44191",
    ),
    "no-machine-code": (
        _without_machine_code,
        "{0}: its kernels are compiled when they are first used, for minutes, or not at all.",
        "Install a TensorFlow built for this GPU, such as NVIDIA's container.",
        f"{_ISSUES}/89272",
    ),
    "float16-sums": (
        lambda e: _gpu(e, lambda gpu: gpu.native == ("float16",)),
        "On {0} TensorFlow sums float16 tensors in float16: keras.ops.sum overflows from "
        "65520 on and rounds at every addition. Means have a float32 accumulator.",
        "Rewrites, autocast and the layers of a policy sum in float32. Cast to float32 before "
        "sums outside of these.",
        f"{_KERNELS}/reduction_gpu_kernels.cu.h",
    ),
    "batch-norm-transposes": (
        lambda e: not e.nhwc_batch_norm and _gpu(e, lambda gpu: gpu.native),
        "On {0} training transposes NHWC inputs and outputs of low-precision BatchNormalization.",
        f"Set {_PERSISTENT}=1 before Python starts. Compare losses: "
        "the kernel that needs no transposes can overflow on large values.",
        f"{_KERNELS}/fused_batch_norm_op.cc",
    ),
    "tensor-float-32": (
        lambda e: e.tensor_float_32 and _gpu(e, lambda gpu: "bfloat16" in gpu.native),
        "On {0} float32 matmuls and convolutions run in TensorFloat-32 on Tensor Cores "
        "already: low precision gains less over that than over full float32.",
        "Nothing to repair: compare after tf.config.experimental."
        "enable_tensor_float_32_execution(False) to see the gain over full float32.",
        "https://www.tensorflow.org/guide/mixed_precision",
    ),
    "auto-is-slower": (
        lambda e: (
            not e.hardware.gpus
            and e.speed_of_auto is not None
            and e.speed_of_auto < 1
            and f"{e.speed_of_auto:.2g}"
        ),
        'In the dtype of the policy "auto" matmuls are {0} times as fast as in float32 here, '
        "so layers under it are slower.",
        'Give the policy "float32", or rewrite: tfamp.rewrite and levels "O1" and "auto" '
        "convert only what this machine runs faster, and tfamp.tune measures it.",
        f"{_PAGES}/benchmarks.md",
    ),
    "sums-in-low-variables": (
        lambda e: ", ".join(e.inexact_ops),
        "These add to a variable in its own dtype, and tfamp leaves that dtype alone: {0}. In "
        "bfloat16 such a sum stops growing at 256 times its terms, in float16 at 2048 times. Sums "
        "that a loop makes under tfamp.autocast (tf.while_loop, Python's sum) are rounded at "
        "every addition; rewrites add them up in float32.",
        "Store what you count or average in float32, as tfamp's policies store all weights.",
        f"{_PAGES}/guides/policy.md",
    ),
    "unusable-kernels": (
        lambda e: ", ".join(e.unusable_kernels),
        "Low-precision kernels that do not return, crash, or can take many times float32's time "
        "on this CPU, some at certain sizes only: {0}.",
        "Rewrites, levels, autocast and the layers of a policy run these ops in float32. Cast to "
        "float32 yourself outside of them, and where force_low or lists of your own name the op.",
        f"{_PAGES}/explanation/sums.md",
    ),
    "onednn-off": (
        lambda e: not e.onednn and not e.hardware.gpus,
        "TensorFlow does not use oneDNN's kernels: TF_ENABLE_ONEDNN_OPTS=0, or the default of "
        "CPUs without AVX512-VNNI and AMX. This can slow float32, and slows bfloat16 on "
        "AVX512.",
        "Set TF_ENABLE_ONEDNN_OPTS=1 before Python starts, and compare times.",
        "https://github.com/tensorflow/tensorflow/blob/v2.21.0/tensorflow/core/util/port.cc",
    ),
}
