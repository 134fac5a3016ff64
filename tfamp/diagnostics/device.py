"""What this machine computes fast: facts, the policy `auto` makes of them, and measurements."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import platform
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import tfamp
from tfamp.core.dtypes import LOW_PRECISION
from tfamp.core.profile import KINDS, MachineProfile
from tfamp.diagnostics.known_issues import Environment, KnownIssue, known_issues
from tfamp.machine import hardware
from tfamp.reports import notebook_html
from tfamp.reports.text_table import table_lines

_CUDA_VERSIONS = {"cuda": "cuda_version", "cudnn": "cudnn_version"}
_DRIVER = Path("/proc/driver/nvidia/version")
_REQUIREMENT = re.compile(r"^(nvidia-[\w-]+).*?>=\s*([\d.]+)")
_ON = ("1", "true")


@dataclass(frozen=True)
class DeviceReport:
    """What a machine computes natively and what follows from it; `tfamp doctor` prints it.

    Attributes:
        versions: "tfamp", "tensorflow", "keras" and "python" -> version; "cuda" and "cudnn" -> the
            versions TensorFlow was built for, if it was.
        hardware: CPU, GPUs and TPU, as `tfamp.machine.hardware.Hardware`.
        policy: What the policy "auto" stands for here.
        reason: Why.
        float16_slowdown: Measured time of float16 matmuls and convolutions with their gradients
            over float32's, on a CPU that does not compute float16 natively and has no GPU or TPU
            beside it; None elsewhere.
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
    float16_slowdown: float | None
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
            "float16_slowdown": self.float16_slowdown,
            "machine_profile": {"source": self.profile_source, **profile},
            "problems": list(self.problems),
            "known_issues": [dataclasses.asdict(issue) for issue in self.known_issues],
        }
        return json.dumps(facts, indent=2)

    def to_text(self) -> str:
        """Returns the report as a table of two columns."""
        return "\n".join(table_lines(self._rows()))

    def _repr_html_(self) -> str:
        # Sources are told without what makes an address of them: what is shown refers to nothing.
        rows = [(name, text.replace("https://", "")) for name, text in self._rows()]
        title = f"This machine: auto is {self.policy}"
        return notebook_html.fragment(title, notebook_html.facts(rows))

    def _rows(self) -> list[tuple[str, str]]:
        machine = self.hardware
        native = {"bfloat16": machine.cpu_bfloat16, "float16": machine.cpu_float16}
        rows = [*self.versions.items(), ("CPU", machine.cpu_model or "unknown model")]
        rows += _native_rows("CPU", native)
        rows += [("GPU", _gpu_text(gpu)) for gpu in machine.gpus] or [("GPU", "none")]
        rows += _gpu_dtypes(machine.weakest_gpu)
        rows += [("TPU", "yes" if machine.tpu else "none")]
        if self.float16_slowdown is not None:
            rows += [("float16 takes", f"{self.float16_slowdown:.1f} times as long as float32")]
        rows += [("policy auto", self.policy), ("because", self.reason)]
        rows += [("profile", self.profile.name), ("from", self.profile_source)]
        rows += _speed_rows(self.profile)
        rows += [("problem", problem) for problem in self.problems]
        for issue in self.known_issues:
            rows += [("known issue", f"{issue.name}: {issue.text}")]
            rows += [("", issue.advice), ("", f"source: {issue.source}")]
        return rows


def device_report() -> DeviceReport:
    """Looks at this machine; measures where only a measurement can tell.

    That is how slow float16 is, some ms, and for about three seconds the machine profile, unless it
    is in the user's cache folder already. `TFAMP_PROFILE` gives another; see `tfamp.rewrite`.

    Returns:
        The report.

    Raises:
        ValueError: TFAMP_PROFILE is neither "builtin", nor "measure", nor the file of a profile.

    Example:
        >>> print(device_report().to_text())
        tfamp ...
    """
    import keras
    import tensorflow as tf

    from tfamp.interop.keras_hooks import how_to_change, runs_tensorflow
    from tfamp.machine import profile_measure
    from tfamp.machine.hardware import find_profile

    found = hardware.detect()
    build = tf.sysconfig.get_build_info()
    profile = find_profile()
    policy, reason = hardware.automatic_policy(found)
    wrong_backend = (
        f"Keras runs on the {keras.backend.backend()} backend, where policies and "
        "LossScaleOptimizer work, and autocast, rewrite and GradScaler do not. "
    )
    return DeviceReport(
        versions={
            "tfamp": tfamp.__version__,
            "tensorflow": tf.__version__,
            "keras": keras.__version__,
            "python": platform.python_version(),
            **{name: str(build[key]) for name, key in _CUDA_VERSIONS.items() if build.get(key)},
        },
        hardware=found,
        policy=policy,
        reason=reason,
        float16_slowdown=profile_measure.float16_slowdown() if found.emulates_float16 else None,
        profile=profile.profile,
        profile_source=profile.source,
        problems=() if runs_tensorflow() else (wrong_backend + how_to_change(),),
        known_issues=known_issues(read_environment(found)),
    )


def _speed_rows(profile: MachineProfile) -> Iterator[tuple[str, str]]:
    yield "speed", "".join(f"{dtype:>10}" for dtype in LOW_PRECISION) + "  over float32's"
    for kind in KINDS:
        peaks = profile.peaks[kind]
        ratios = (peaks[dtype] / peaks["float32"] for dtype in LOW_PRECISION)
        yield kind, "".join(f"{ratio:10.2g}" for ratio in ratios)
    yield "memory", f"{profile.bandwidth / 1e9:.3g} GB/s"
    yield "Casts", f"{profile.cast_bandwidth / 1e9:.3g} GB/s"


def _gpu_dtypes(gpu: hardware.Gpu | None) -> list[tuple[str, str]]:
    """Whether a GPU multiplies a dtype on Tensor Cores."""
    if gpu is None or gpu.capability is None:
        return []
    return _native_rows("GPU", {dtype: dtype in gpu.native for dtype in LOW_PRECISION})


def _native_rows(what: str, native: Mapping[str, bool]) -> list[tuple[str, str]]:
    words = {dtype: "native" if native[dtype] else "not native" for dtype in LOW_PRECISION}
    return [(f"{what} {dtype}", word) for dtype, word in words.items()]


def _gpu_text(gpu: hardware.Gpu) -> str:
    capability = "unknown" if gpu.capability is None else ".".join(map(str, gpu.capability))
    return f"{gpu.name}, compute capability {capability}"


def read_environment(found: hardware.Hardware) -> Environment:
    """Returns what `known_issues` judges: versions, settings and libraries in use."""
    import keras
    import tensorflow as tf

    build = tf.sysconfig.get_build_info()
    options = tf.config.optimizer.get_experimental_options()
    wanted = _wanted_libraries()
    return Environment(
        hardware=found,
        tensorflow=tf.__version__,
        keras=keras.__version__,
        system=platform.system(),
        variables=dict(os.environ),
        cuda_build=bool(build.get("is_cuda_build")),
        kernels=tuple(build.get("cuda_compute_capabilities") or ()),
        wanted_libraries=wanted,
        libraries={name: version for name in wanted if (version := _installed(name))},
        nvidia_driver=_DRIVER.exists(),
        tensor_float_32=tf.config.experimental.tensor_float_32_execution_enabled(),
        grappler=os.environ.get("TF_ENABLE_AUTO_MIXED_PRECISION", "").lower() in _ON
        or any(value for name, value in options.items() if "auto_mixed_precision" in name),
        eager=tf.config.functions_run_eagerly(),
        intel_extension=_installed("intel-extension-for-tensorflow"),
    )


def _wanted_libraries() -> dict[str, str]:
    try:
        requirements = importlib.metadata.requires("tensorflow") or []
    except importlib.metadata.PackageNotFoundError:  # Such as tensorflow-cpu.
        return {}
    found = (_REQUIREMENT.match(each) for each in requirements)
    return {match[1]: match[2] for match in found if match}


def _installed(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""
