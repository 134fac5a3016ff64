"""Known bad combinations of hardware, versions and settings, each with its reason and its source.

Pure rules look at an `Environment`, which `device.read_environment` fills in.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from tfamp.machine.hardware import BFLOAT16_CAPABILITY, Hardware

# Release series that tfamp is tested with; see CHANGELOG.md and the continuous integration.
TESTED_TENSORFLOW = ((2, 19), (2, 21))
TESTED_KERAS = 3
# Instruction sets by oneDNN's names that have bfloat16 dot products.
_ISA_WITH_BFLOAT16 = re.compile(r"BF16|AMX|AVX10|FP16|AVX2_VNNI_2|ALL|DEFAULT", re.IGNORECASE)

_PIP = "https://www.tensorflow.org/install/pip"


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
    """What decides whether a known issue is there.

    Attributes:
        hardware: CPU, GPUs and TPU.
        tensorflow: TensorFlow's version.
        keras: Keras's version.
        system: Operating system: "Linux", "Darwin" or "Windows".
        variables: Environment variables.
        cuda_build: Whether TensorFlow was built for CUDA.
        kernels: What the GPU kernels were built for: "sm_80" for machine code of one generation,
            "compute_90" for code that later ones compile at first use.
        wanted_libraries: NVIDIA's Python packages -> lowest version TensorFlow asks for.
        libraries: Those that are installed -> version.
        nvidia_driver: Whether a driver for NVIDIA GPUs is there.
        tensor_float_32: Whether float32 matmuls may use TensorFloat-32.
        grappler: Whether TensorFlow's own automatic mixed precision is on.
        eager: Whether `tf.function`s run eagerly.
        intel_extension: Version of intel-extension-for-tensorflow, "" where it is not installed.
    """

    hardware: Hardware
    tensorflow: str = "2.21.0"
    keras: str = "3.15.0"
    system: str = "Linux"
    variables: Mapping[str, str] = field(default_factory=dict)
    cuda_build: bool = False
    kernels: tuple[str, ...] = ()
    wanted_libraries: Mapping[str, str] = field(default_factory=dict)
    libraries: Mapping[str, str] = field(default_factory=dict)
    nvidia_driver: bool = False
    tensor_float_32: bool = True
    grappler: bool = False
    eager: bool = False
    intel_extension: str = ""


def known_issues(environment: Environment) -> tuple[KnownIssue, ...]:
    """Returns the known issues that an environment has; a pure function."""
    return tuple(
        KnownIssue(name, text, advice, source)
        for name, (rule, advice, source) in RULES.items()
        if (text := next(rule(environment), None))
    )


# Yields what is wrong in an environment, if anything is; the first text is told.
Rule: TypeAlias = Callable[[Environment], Iterator[str]]
# Name of an issue -> its rule, advice and source, in the order in which they are told.
RULES: dict[str, tuple[Rule, str, str]] = {}


def _issue(name: str, advice: str, source: str) -> Callable[[Rule], Rule]:
    """Adds a rule; a new one needs a source, and a case in the tests."""

    def add(rule: Rule) -> Rule:
        RULES[name] = rule, advice, source
        return rule

    return add


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text)[:3])


def _series(text: str) -> tuple[int, ...]:
    return _version(text)[:2]


def _is_set(e: Environment, variable: str, values: tuple[str, ...]) -> bool:
    return e.variables.get(variable, "").lower() in values


@_issue("keras-2", "Install keras 3.", "https://keras.io/keras_3/")
def _keras_2(e: Environment) -> Iterator[str]:
    if _version(e.keras) < (TESTED_KERAS,):
        yield f"Keras {e.keras} is not Keras 3, which tfamp's policies and optimizer are made for."


@_issue(
    "legacy-keras",
    "Unset TF_USE_LEGACY_KERAS, and import keras.",
    "https://keras.io/getting_started/#tensorflow--keras-2-backwards-compatibility",
)
def _legacy_keras(e: Environment) -> Iterator[str]:
    if _is_set(e, "TF_USE_LEGACY_KERAS", ("1", "true")):
        yield (
            "TF_USE_LEGACY_KERAS makes tf.keras the package tf_keras, Keras 2: tfamp's "
            "policies reach models of `import keras` only."
        )


@_issue(
    "tensorflow-untested",
    "Run tfamp's tests on it, or install a release it was tested with.",
    "tfamp's continuous integration",
)
def _untested(e: Environment) -> Iterator[str]:
    low, high = TESTED_TENSORFLOW
    tested = " to ".join(".".join(map(str, each)) for each in TESTED_TENSORFLOW)
    if not low <= _series(e.tensorflow) <= high:
        text = f"TensorFlow {e.tensorflow} is not among the releases tfamp was tested with"
        yield f"{text}: {tested}."


@_issue("windows-gpu", "Use WSL2, or Linux.", _PIP)
def _windows(e: Environment) -> Iterator[str]:
    if e.system == "Windows" and _series(e.tensorflow) >= (2, 11):
        yield "From TensorFlow 2.11 on there is no GPU support on Windows itself."


@_issue(
    "gpu-not-seen",
    "Install with `pip install tensorflow[and-cuda]`, and look at CUDA_VISIBLE_DEVICES.",
    _PIP,
)
def _driver_without_gpu(e: Environment) -> Iterator[str]:
    if e.nvidia_driver and not e.hardware.gpus and e.system != "Windows":
        why = "its CUDA libraries did not load" if e.cuda_build else "it was built without CUDA"
        text = "An NVIDIA driver is installed but TensorFlow sees no GPU"
        yield f"{text}: {why}, or GPUs are hidden."


@_issue(
    "old-cuda-libraries",
    "Reinstall with `pip install -U tensorflow[and-cuda]`; another package may have asked for "
    "older ones.",
    "https://github.com/tensorflow/tensorflow/issues/60913",
)
def _old_libraries(e: Environment) -> Iterator[str]:
    old = [
        f"{name} {e.libraries[name]} (at least {least})"
        for name, least in sorted(e.wanted_libraries.items())
        if name in e.libraries and _version(e.libraries[name]) < _version(least)
    ]
    if e.hardware.gpus and old:
        yield f"Older than TensorFlow {e.tensorflow} was built for: {', '.join(old)}."


@_issue(
    "maxwell",
    "Use TensorFlow 2.16, which tfamp is not tested with, or a newer GPU.",
    "https://github.com/tensorflow/tensorflow/releases/tag/v2.17.0",
)
def _maxwell(e: Environment) -> Iterator[str]:
    for gpu in e.hardware.gpus:
        if gpu.capability and gpu.capability < (6, 0) and _series(e.tensorflow) >= (2, 17):
            yield (
                f"{gpu.name} has a compute capability under 6.0: TensorFlow's wheels have no "
                "kernels for it."
            )


@_issue(
    "no-tensor-cores",
    "Stay with float32, or use float16 to save memory.",
    "https://github.com/tensorflow/tensorflow/issues/44191",
)
def _no_tensor_cores(e: Environment) -> Iterator[str]:
    for gpu in e.hardware.gpus:
        if gpu.lacks_tensor_cores:
            yield (
                f"{gpu.name} has compute capability 7.5 but no Tensor Cores: float16 saves memory, "
                "not time, and can be slower than float32."
            )


@_issue(
    "no-machine-code",
    "Install a TensorFlow built for this GPU, such as NVIDIA's container.",
    "https://github.com/tensorflow/tensorflow/issues/89272",
)
def _no_machine_code(e: Environment) -> Iterator[str]:
    for gpu in e.hardware.gpus:
        if gpu.capability and e.kernels and not _has_machine_code(gpu.capability, e.kernels):
            dotted = ".".join(map(str, gpu.capability))
            yield (
                f"{gpu.name} has compute capability {dotted} and TensorFlow was built for "
                f"{', '.join(e.kernels)}: its kernels are compiled when they are first used, for "
                "minutes, or not at all."
            )


@_issue(
    "float16-sums",
    "Cast to float32 before the sums of layers of your own, or train at level O1 or under "
    "tfamp.autocast, which keep sums in float32.",
    "https://github.com/tensorflow/tensorflow/blob/v2.21.0/tensorflow/core/kernels/"
    "reduction_gpu_kernels.cu.h",
)
def _float16_sums(e: Environment) -> Iterator[str]:
    for gpu in e.hardware.gpus:
        if gpu.native == ("float16",):
            yield (
                f"TensorFlow's kernel for {gpu.name} adds float16 up in float16: keras.ops.sum of "
                "a low-precision tensor overflows from 65520 on and rounds at every addition. "
                "Means have a float32 accumulator."
            )


def _has_machine_code(capability: tuple[int, int], kernels: tuple[str, ...]) -> bool:
    """Whether kernels run as they are: same major version, no later minor one."""
    major, minor = capability
    # Code for exactly this generation is compiled once, without trouble.
    found = (re.match(rf"sm_{major}(\d)\D*$", kernel) for kernel in kernels)
    return f"compute_{major}{minor}" in kernels or any(int(f[1]) <= minor for f in found if f)


@_issue(
    "tensor-float-32",
    "Nothing to repair: compare after tf.config.experimental."
    "enable_tensor_float_32_execution(False) to see the gain over full float32.",
    "https://www.tensorflow.org/guide/mixed_precision",
)
def _tf32(e: Environment) -> Iterator[str]:
    for gpu in e.hardware.gpus:
        if gpu.capability and gpu.capability >= BFLOAT16_CAPABILITY and e.tensor_float_32:
            yield (
                f"On {gpu.name} float32 matmuls and convolutions run in TensorFloat-32 on Tensor "
                "Cores already: low precision gains less over that than over full float32."
            )


@_issue(
    "onednn-off",
    "Unset TF_ENABLE_ONEDNN_OPTS before Python starts.",
    "measured: TF_ENABLE_ONEDNN_OPTS=0 tfamp doctor",
)
def _onednn_off(e: Environment) -> Iterator[str]:
    has_instructions = e.hardware.cpu_bfloat16 or e.hardware.cpu_float16
    if has_instructions and _is_set(e, "TF_ENABLE_ONEDNN_OPTS", ("0", "false")):
        yield (
            "TF_ENABLE_ONEDNN_OPTS=0 switches oneDNN off, and with it this CPU's low-precision "
            "instructions: bfloat16 is then slower than float32."
        )


@_issue(
    "onednn-isa",
    "Unset it before Python starts.",
    "https://uxlfoundation.github.io/oneDNN/dev_guide_cpu_dispatcher_control.html",
)
def _isa_limited(e: Environment) -> Iterator[str]:
    for name in ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"):
        value = e.variables.get(name, "")
        if value and not _ISA_WITH_BFLOAT16.search(value) and e.hardware.cpu_bfloat16:
            yield f"{name}={value} hides this CPU's bfloat16 instructions from TensorFlow."


@_issue(
    "grappler",
    "Unset TF_ENABLE_AUTO_MIXED_PRECISION, and remove auto_mixed_precision from "
    "tf.config.optimizer.set_experimental_options.",
    "https://github.com/tensorflow/tensorflow/issues/33435",
)
def _grappler(e: Environment) -> Iterator[str]:
    if e.grappler:
        yield (
            "TensorFlow's own automatic mixed precision is on: it converts every graph of the "
            "process, also those that are to be float32."
        )


@_issue(
    "eager-functions",
    "Call tf.config.run_functions_eagerly(False).",
    "https://www.tensorflow.org/api_docs/python/tf/config/run_functions_eagerly",
)
def _eager(e: Environment) -> Iterator[str]:
    if e.eager:
        yield (
            "tf.functions run eagerly: no graph is optimized, and `tfamp.rewrite` has none to "
            "rewrite."
        )


@_issue(
    "intel-extension",
    "Uninstall it: TensorFlow's own oneDNN kernels compute bfloat16.",
    "https://intel.github.io/intel-extension-for-tensorflow/latest/get_started.html",
)
def _intel_extension(e: Environment) -> Iterator[str]:
    if e.intel_extension and _series(e.tensorflow) >= (2, 17):
        yield (
            f"intel-extension-for-tensorflow {e.intel_extension} is installed; it does not "
            f"support TensorFlow from 2.17 on, and this is {e.tensorflow}."
        )
