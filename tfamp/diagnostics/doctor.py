"""`tfamp doctor`: what a machine computes fast, what "auto" stands for there, its known issues.

Known issues are bad combinations of hardware, versions and settings, each with its reason and its
source: a table of pure rules over an `Environment`, which `read_environment` fills in.
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
from typing import Any

import keras
import tensorflow as tf

import tfamp
from tfamp.core.dtypes import LOW_PRECISION
from tfamp.core.profile import KINDS, MachineProfile
from tfamp.interop.keras_hooks import HOW_TO_CHANGE, runs_tensorflow
from tfamp.machine import hardware
from tfamp.reports import tables
from tfamp.reports.tables import table_lines

_PIP = "https://www.tensorflow.org/install/pip"
_ISSUES = "https://github.com/tensorflow/tensorflow/issues"
_REQUIREMENT = re.compile(r"^(nvidia-[\w-]+).*?>=\s*([\d.]+)")


@dataclass(frozen=True)
class DeviceReport:
    """What a machine computes natively and what follows from it; `tfamp doctor` prints it.

    Attributes:
        versions: "tfamp", "tensorflow", "keras" and "python" -> version; "cuda" and "cudnn" -> the
            versions TensorFlow was built for, if it was.
        hardware: CPU, GPUs and TPU, as `tfamp.machine.hardware.Hardware`.
        policy: What the policy "auto" stands for here.
        reason: Why.
        profile: How fast the machine is in each dtype, which a rewrite's placement goes by.
        profile_source: Where the profile comes from, in words: the built-in table, a file, the
            cache, or a measurement made just now.
        problems: What keeps tfamp from working here.
        known_issues: What is known to go wrong, or to cost the speed-up, with these versions,
            settings and devices; each a `KnownIssue` with reason, advice and source.

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
        # Without what makes an address of a source: the page refers to nothing.
        rows = [(name, text.replace("https://", "")) for name, text in self._rows()]
        title = f"This machine: auto is {self.policy}"
        return tables.fragment(title, tables.facts(rows))

    def _rows(self) -> list[tuple[str, str]]:
        machine, profile = self.hardware, self.profile
        native = {"bfloat16": machine.cpu_bfloat16, "float16": machine.cpu_float16}
        rows = [*self.versions.items(), ("CPU", machine.cpu_model or "unknown model")]
        rows += [(f"CPU {dtype}", _native(native[dtype])) for dtype in LOW_PRECISION]
        for gpu in machine.gpus:
            capability = ".".join(map(str, gpu.capability or ("unknown",)))
            rows += [("GPU", f"{gpu.name}, compute capability {capability}")]
        weakest = machine.weakest_gpu
        if weakest is None:
            rows += [("GPU", "none")]
        else:
            rows += [(f"GPU {dtype}", _native(dtype in weakest.native)) for dtype in LOW_PRECISION]
        rows += [("TPU", "yes" if machine.tpu else "none")]
        rows += [("policy auto", self.policy), ("because", self.reason)]
        rows += [("profile", profile.name), ("from", self.profile_source)]
        titles = "".join(f"{dtype:>10}" for dtype in LOW_PRECISION)
        rows += [("speed", f"{titles}  over float32's")]
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


def _native(is_native: bool) -> str:
    return "native" if is_native else "not native"


def device_report() -> DeviceReport:
    """Looks at this machine.

    The machine profile is measured in about two seconds, unless it is in the user's cache folder
    already. `TFAMP_PROFILE` gives another; see `tfamp.rewrite`.

    Returns:
        The report.

    Raises:
        ValueError: TFAMP_PROFILE is neither "builtin", nor "measure", nor the file of a profile.

    Example:
        >>> print(device_report().to_text())
        tfamp ...
    """
    found = hardware.detect()
    build = tf.sysconfig.get_build_info()
    versions = {
        "tfamp": tfamp.__version__,
        "tensorflow": tf.__version__,
        "keras": keras.__version__,
        "python": platform.python_version(),
        "cuda": build.get("cuda_version"),
        "cudnn": build.get("cudnn_version"),
    }
    profile, source = hardware.find_profile()
    policy, reason = hardware.automatic_policy(found)
    wrong_backend = (
        f"Keras runs on the {keras.backend.backend()} backend, where policies and "
        "LossScaleOptimizer work, and autocast, rewrite and GradScaler do not. "
    )
    return DeviceReport(
        versions={name: str(version) for name, version in versions.items() if version},
        hardware=found,
        policy=policy,
        reason=reason,
        profile=profile,
        profile_source=source,
        problems=() if runs_tensorflow() else (wrong_backend + HOW_TO_CHANGE,),
        known_issues=known_issues(read_environment(found)),
    )


# ---- Known issues --------------------------------------------------------------------------------


@dataclass(frozen=True)
class KnownIssue:
    """Something that is known to go wrong, or to cost the speed-up, on a machine set up like this.

    Attributes:
        name: Short name that does not change.
        text: What it is here, and why.
        advice: What to do.
        source: Where it is described: an address, or the command that measures it.
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
        tensorflow: TensorFlow's version.
        onednn: Whether TensorFlow may use oneDNN.
        cuda_build: Whether TensorFlow was built for CUDA.
        kernels: The targets of GPU kernels: "sm_80" for machine code of one generation,
            "compute_90" for code that later ones compile at first use.
        old_libraries: NVIDIA's Python packages that are older than TensorFlow requires.
        nvidia_driver: Whether a driver for NVIDIA GPUs is there.
        tensor_float_32: Whether float32 matmuls may use TensorFloat-32.
    """

    hardware: hardware.Hardware
    tensorflow: str = "2.21.0"
    onednn: bool = True
    cuda_build: bool = False
    kernels: tuple[str, ...] = ()
    old_libraries: tuple[str, ...] = ()
    nvidia_driver: bool = False
    tensor_float_32: bool = True


def read_environment(found: hardware.Hardware) -> Environment:
    """Returns versions, settings and libraries of this process."""
    build = tf.sysconfig.get_build_info()
    return Environment(
        hardware=found,
        tensorflow=tf.__version__,
        onednn=os.environ.get("TF_ENABLE_ONEDNN_OPTS", "").lower() not in ("0", "false"),
        cuda_build=bool(build.get("is_cuda_build")),
        kernels=tuple(build.get("cuda_compute_capabilities") or ()),
        old_libraries=old_libraries(importlib.metadata.version),
        nvidia_driver=Path("/proc/driver/nvidia/version").exists(),
        tensor_float_32=tf.config.experimental.tensor_float_32_execution_enabled(),
    )


def old_libraries(installed: Callable[[str], str]) -> tuple[str, ...]:
    """Returns the NVIDIA packages older than TensorFlow requires, by a look-up of versions."""
    old = []
    try:
        for match in map(_REQUIREMENT.match, importlib.metadata.requires("tensorflow") or ()):
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                if match and _version(version := installed(match[1])) < _version(match[2]):
                    old.append(f"{match[1]} {version} (at least {match[2]})")
    except importlib.metadata.PackageNotFoundError:  # TensorFlow itself, as tensorflow-cpu.
        return ()
    return tuple(old)


def known_issues(environment: Environment) -> tuple[KnownIssue, ...]:
    """Returns the known issues that an environment has; a pure function."""
    return tuple(
        KnownIssue(name, text.format(found, e=environment), advice, source)
        for name, (rule, text, advice, source) in RULES.items()
        if (found := rule(environment))
    )


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text)[:3])


def _gpu(e: Environment, has_issue: Callable[[hardware.Gpu], Any]) -> str | None:
    """Returns the name of the first GPU with an issue."""
    return next((gpu.name for gpu in e.hardware.gpus if has_issue(gpu)), None)


def _without_machine_code(e: Environment) -> str | None:
    """Describes the first GPU that kernels do not run on as they are."""
    for gpu in e.hardware.gpus:
        if gpu.capability and e.kernels:
            major, minor = gpu.capability
            # Same major version, no later minor one; code for exactly this generation is compiled
            # once, without trouble.
            found = (re.match(rf"sm_{major}(\d)\D*$", kernel) for kernel in e.kernels)
            runs = any(int(match[1]) <= minor for match in found if match)
            if not runs and f"compute_{major}{minor}" not in e.kernels:
                built = ", ".join(e.kernels)
                text = f"{gpu.name} has compute capability {major}.{minor} and TensorFlow was built"
                return f"{text} for {built}"
    return None


# Name of an issue -> a rule, the text about what the rule found, advice and source. A new one needs
# a source, and a case in the tests.
RULES: dict[str, tuple[Callable[[Environment], Any], str, str, str]] = {
    "gpu-not-seen": (
        lambda e: (
            e.nvidia_driver
            and not e.hardware.gpus
            and ("its CUDA libraries did not load" if e.cuda_build else "it was built without CUDA")
        ),
        "An NVIDIA driver is installed but TensorFlow sees no GPU: {0}, or GPUs are hidden.",
        "Install with `pip install tensorflow[and-cuda]`, and look at CUDA_VISIBLE_DEVICES.",
        _PIP,
    ),
    "old-cuda-libraries": (
        lambda e: e.hardware.gpus and ", ".join(e.old_libraries),
        "Older than TensorFlow {e.tensorflow} was built for: {0}.",
        "Reinstall with `pip install -U tensorflow[and-cuda]`; another package may have asked for "
        "older ones.",
        f"{_ISSUES}/60913",
    ),
    "no-tensor-cores": (
        lambda e: _gpu(e, lambda gpu: gpu.lacks_tensor_cores),
        "{0} has compute capability 7.5 but no Tensor Cores: float16 saves memory, not time, and "
        "can be slower than float32.",
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
        "TensorFlow's kernel for {0} adds float16 up in float16: keras.ops.sum of a low-precision "
        "tensor overflows from 65520 on and rounds at every addition. Means have a float32 "
        "accumulator.",
        "Cast to float32 before the sums of layers of your own, or train at level O1 or under "
        "tfamp.autocast, which keep sums in float32.",
        "https://github.com/tensorflow/tensorflow/blob/v2.21.0/tensorflow/core/kernels/"
        "reduction_gpu_kernels.cu.h",
    ),
    "tensor-float-32": (
        lambda e: e.tensor_float_32 and _gpu(e, lambda gpu: "bfloat16" in gpu.native),
        "On {0} float32 matmuls and convolutions run in TensorFloat-32 on Tensor Cores already: "
        "low precision gains less over that than over full float32.",
        "Nothing to repair: compare after tf.config.experimental."
        "enable_tensor_float_32_execution(False) to see the gain over full float32.",
        "https://www.tensorflow.org/guide/mixed_precision",
    ),
    "onednn-off": (
        lambda e: not e.onednn and (e.hardware.cpu_bfloat16 or e.hardware.cpu_float16),
        "TF_ENABLE_ONEDNN_OPTS=0 switches oneDNN off, and with it this CPU's low-precision "
        "instructions: bfloat16 is then slower than float32.",
        "Unset TF_ENABLE_ONEDNN_OPTS before Python starts.",
        "measured: TF_ENABLE_ONEDNN_OPTS=0 tfamp doctor",
    ),
}
