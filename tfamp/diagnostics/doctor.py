"""`tfamp doctor`: what a machine computes fast, its known issues, and what of a model converts.

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
import warnings
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import keras
import tensorflow as tf

import tfamp
from tfamp.core.dtypes import LOW_PRECISION
from tfamp.core.errors import NothingConvertedWarning, SavedModelError
from tfamp.core.profile import KINDS, MachineProfile
from tfamp.diagnostics.model_runs import computing_in
from tfamp.interop.keras_hooks import HOW_TO_CHANGE, runs_tensorflow
from tfamp.machine import hardware
from tfamp.planning.cost import FREE_OPS
from tfamp.planning.structures import NodePlan, RewritePlan
from tfamp.policy import low_dtype
from tfamp.reports import tables
from tfamp.reports.tables import table_lines
from tfamp.rewriting.function import rewrite
from tfamp.rewriting.saved_graph import first_line
from tfamp.rewriting.saved_model import inspect_saved_model

# Instruction sets by oneDNN's names that have bfloat16 dot products.
_ISA_WITH_BFLOAT16 = re.compile(r"BF16|AMX|AVX10|FP16|AVX2_VNNI_2|ALL|DEFAULT", re.IGNORECASE)
_PIP = "https://www.tensorflow.org/install/pip"
_ISSUES = "https://github.com/tensorflow/tensorflow/issues"
_REQUIREMENT = re.compile(r"^(nvidia-[\w-]+).*?>=\s*([\d.]+)")
_ON = ("1", "true")
# What Keras raises for an archive or a configuration it cannot make a model of.
_KERAS_ERRORS = (AttributeError, ImportError, KeyError, OSError, TypeError, ValueError, BadZipFile)
_HOW_TO_MEASURE = (
    "tfamp.tune(step, x, y) alternates float32 and low-precision runs of a step; of a compiled "
    'model prepare(model, level="auto", example_batch=(x, y)) does so.'
)


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
        system: Operating system: "Linux", "Darwin" or "Windows".
        variables: Environment variables.
        cuda_build: Whether TensorFlow was built for CUDA.
        kernels: The targets of GPU kernels: "sm_80" for machine code of one generation,
            "compute_90" for code that later ones compile at first use.
        old_libraries: NVIDIA's Python packages that are older than TensorFlow requires.
        nvidia_driver: Whether a driver for NVIDIA GPUs is there.
        tensor_float_32: Whether float32 matmuls may use TensorFloat-32.
        grappler: Whether TensorFlow's own automatic mixed precision is on.
        eager: Whether `tf.function`s run eagerly.
    """

    hardware: hardware.Hardware
    tensorflow: str = "2.21.0"
    system: str = "Linux"
    variables: Mapping[str, str] = field(default_factory=dict)
    cuda_build: bool = False
    kernels: tuple[str, ...] = ()
    old_libraries: tuple[str, ...] = ()
    nvidia_driver: bool = False
    tensor_float_32: bool = True
    grappler: bool = False
    eager: bool = False


def read_environment(found: hardware.Hardware) -> Environment:
    """Returns versions, settings and libraries of this process."""
    build = tf.sysconfig.get_build_info()
    options = tf.config.optimizer.get_experimental_options()
    return Environment(
        hardware=found,
        tensorflow=tf.__version__,
        system=platform.system(),
        variables=dict(os.environ),
        cuda_build=bool(build.get("is_cuda_build")),
        kernels=tuple(build.get("cuda_compute_capabilities") or ()),
        old_libraries=old_libraries(importlib.metadata.version),
        nvidia_driver=Path("/proc/driver/nvidia/version").exists(),
        tensor_float_32=tf.config.experimental.tensor_float_32_execution_enabled(),
        grappler=os.environ.get("TF_ENABLE_AUTO_MIXED_PRECISION", "").lower() in _ON
        or any(value for name, value in options.items() if "auto_mixed_precision" in name),
        eager=tf.config.functions_run_eagerly(),
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


def _is_set(e: Environment, variable: str, values: tuple[str, ...]) -> bool:
    return e.variables.get(variable, "").lower() in values


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


def _limiting_isa(e: Environment) -> str | None:
    for name in ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"):
        value = e.variables.get(name, "")
        if value and not _ISA_WITH_BFLOAT16.search(value) and e.hardware.cpu_bfloat16:
            return f"{name}={value}"
    return None


# Name of an issue -> a rule, the text about what the rule found, advice and source. A new one needs
# a source, and a case in the tests.
RULES: dict[str, tuple[Callable[[Environment], Any], str, str, str]] = {
    "windows-gpu": (
        lambda e: e.system == "Windows",
        "From TensorFlow 2.11 on there is no GPU support on Windows itself.",
        "Use WSL2, or Linux.",
        _PIP,
    ),
    "gpu-not-seen": (
        lambda e: (
            e.nvidia_driver
            and not e.hardware.gpus
            and e.system != "Windows"
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
        lambda e: (
            (e.hardware.cpu_bfloat16 or e.hardware.cpu_float16)
            and _is_set(e, "TF_ENABLE_ONEDNN_OPTS", ("0", "false"))
        ),
        "TF_ENABLE_ONEDNN_OPTS=0 switches oneDNN off, and with it this CPU's low-precision "
        "instructions: bfloat16 is then slower than float32.",
        "Unset TF_ENABLE_ONEDNN_OPTS before Python starts.",
        "measured: TF_ENABLE_ONEDNN_OPTS=0 tfamp doctor",
    ),
    "onednn-isa": (
        _limiting_isa,
        "{0} hides this CPU's bfloat16 instructions from TensorFlow.",
        "Unset it before Python starts.",
        "https://uxlfoundation.github.io/oneDNN/dev_guide_cpu_dispatcher_control.html",
    ),
    "grappler": (
        lambda e: e.grappler,
        "TensorFlow's own automatic mixed precision is on: it converts every graph of the process, "
        "also those that are to be float32.",
        "Unset TF_ENABLE_AUTO_MIXED_PRECISION, and remove auto_mixed_precision from "
        "tf.config.optimizer.set_experimental_options.",
        f"{_ISSUES}/33435",
    ),
    "eager-functions": (
        lambda e: e.eager,
        "tf.functions run eagerly: no graph is optimized, and `tfamp.rewrite` has none to rewrite.",
        "Call tf.config.run_functions_eagerly(False).",
        "https://www.tensorflow.org/api_docs/python/tf/config/run_functions_eagerly",
    ),
}


# ---- A model -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class KeptOps:
    """Ops of one type that stay float32 by one rule.

    Attributes:
        op: Op type.
        nodes: How many there are.
        reason: Why they stay float32; where it names a node, that of the first of them.
    """

    op: str
    nodes: int
    reason: str


@dataclass(frozen=True)
class ModelReport:
    """What a rewrite would convert of a model, and what stays float32.

    Attributes:
        source: The path, or the model's name.
        plan: The plan: of a model that of `tfamp.rewrite`, of a SavedModel that of
            `tfamp.rewrite_saved_model`.

    Example:
        >>> import keras
        >>> model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(64, name="wide")])
        >>> report = model_report(model, dtype="bfloat16")
        >>> report.plan.dtype, report.plan.summary.low_nodes <= report.plan.summary.nodes
        ('bfloat16', True)
    """

    source: str
    plan: RewritePlan

    @property
    def float32_ops(self) -> tuple[KeptOps, ...]:
        """What computes and stays float32, what takes the longest by estimate first."""
        found: dict[tuple[str, str], list[NodePlan]] = defaultdict(list)
        for node in self.plan.nodes:
            if node.dtype != self.plan.dtype and node.op not in FREE_OPS:
                found[node.op, node.reason.rule].append(node)
        rows = sorted(found.values(), key=lambda row: -sum(node.cost or 0.0 for node in row))
        return tuple(KeptOps(row[0].op, len(row), row[0].reason.text) for row in rows)

    def to_text(self) -> str:
        """Returns the report as lines for people."""
        totals = self.plan.summary
        facts = [
            ("model", self.source),
            ("plan", f"{totals.low_nodes} of {totals.nodes} float nodes in {self.plan.dtype}"),
            ("casts", str(totals.casts)),
            ("measure", _HOW_TO_MEASURE),
        ]
        lines = table_lines(facts)
        if kept := self.float32_ops:
            lines += ["", "stays float32"]
            lines += [f"  {row.nodes:4d} {row.op}: {row.reason}" for row in kept]
        return "\n".join(lines)

    def to_json(self) -> str:
        """Returns the report as one JSON object."""
        facts = {
            "source": self.source,
            "dtype": self.plan.dtype,
            **dataclasses.asdict(self.plan.summary),
            "float32_ops": [dataclasses.asdict(each) for each in self.float32_ops],
        }
        return json.dumps(facts, indent=2)


def model_report(
    path_or_model: Any, *, dtype: Any = None, example_args: Sequence[Any] | None = None
) -> ModelReport:
    """Reports what a rewrite would convert of a model, and what stays float32 and why.

    Nothing of the model is run. A `.keras` file is loaded with Keras's `safe_mode` on: it runs no
    code that the file brings, but builds the layers it names. A SavedModel is read, not loaded.

    Args:
        path_or_model: Directory of a SavedModel, a `.keras` file, a Keras model, of which the call
            is looked at, or a function, such as a train step.
        dtype: "float16" or "bfloat16"; None is what this machine multiplies natively, and bfloat16
            where that is neither.
        example_args: Arguments of a call, for a function or a model that does not tell its inputs.

    Returns:
        The report.

    Raises:
        TypeError, ValueError: An argument is wrong; the message says what is needed.
        SavedModelError: The file cannot be read.
        RewriteError: The graph cannot be rewritten.

    Example:
        >>> report = model_report(lambda x: x @ x, dtype="bfloat16", example_args=[tf.eye(8)])
        >>> [(each.op, each.nodes) for each in report.float32_ops]
        []
    """
    low, source = low_dtype(dtype) or "bfloat16", path_or_model
    is_path = isinstance(source, str | os.PathLike)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NothingConvertedWarning)  # The report says it.
        if is_path and Path(source).suffix != ".keras":
            plan = inspect_saved_model(source, dtype=low)
        else:
            plan = _plan(_loaded(Path(source)) if is_path else source, low, example_args)
    name = source if is_path else getattr(source, "name", getattr(source, "__name__", ""))
    return ModelReport(source=os.fspath(name) or type(source).__name__, plan=plan)


def _plan(model: Any, dtype: str, example_args: Sequence[Any] | None) -> RewritePlan:
    if not callable(model):
        raise TypeError(
            "model_report takes the path of a SavedModel or a .keras file, a Keras model or a "
            f"function; got {type(model).__name__}."
        )
    args = _inputs(model) if example_args is None else tuple(example_args)
    if not isinstance(model, keras.Model):
        plan: RewritePlan = rewrite(model, dtype=dtype).plan(*args)
        return plan
    with computing_in(model, "float32"):
        return _plan(lambda *given: model(*given), dtype, args)


def _inputs(model: Any) -> tuple[Any, ...]:
    """Specs of what a model is called with."""
    if isinstance(model, keras.Model) and (tensors := getattr(model, "inputs", None)):
        # A Sequential takes one.
        structure = tensors[0] if isinstance(model, keras.Sequential) else model.input
        return (tf.nest.map_structure(lambda x: tf.TensorSpec(x.shape, x.dtype), structure),)
    raise ValueError(
        "The model does not tell the shape of its input: give example_args=(x,), the arguments of "
        "a call."
    )


def _loaded(path: Path) -> Any:
    try:
        return keras.saving.load_model(path, compile=False, safe_mode=True)
    except _KERAS_ERRORS as error:
        raise SavedModelError(
            f"{path} cannot be loaded: {first_line(error)} Load a model with "
            "code of its own in Python and give model_report the model."
        ) from error
