"""Known bad combinations of hardware, versions and settings, each with its reason and its source.

One table of pure rules. `Environment` is what they look at; `device.read_environment` fills it in.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from tfamp.machine.hardware import BFLOAT16_CAPABILITY, Hardware

# Release series that tfamp is tested with; see CHANGELOG.md and the continuous integration.
TESTED_TENSORFLOW = ((2, 19), (2, 21))
TESTED_KERAS = 3
# Instruction sets by oneDNN's names that have bfloat16 dot products.
_ISA_WITH_BFLOAT16 = re.compile(r"BF16|AMX|AVX10|FP16|AVX2_VNNI_2|ALL|DEFAULT", re.IGNORECASE)
_GTX_16 = re.compile(r"\bGTX 16\d\d\b")

_PIP = "https://www.tensorflow.org/install/pip"
_ONEDNN_ISA = "https://uxlfoundation.github.io/oneDNN/dev_guide_cpu_dispatcher_control.html"


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
        for name, test, advice, source in _TABLE
        if (text := test(environment))
    )


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text)[:3])


def _series(text: str) -> tuple[int, ...]:
    return _version(text)[:2]


def _is_set(e: Environment, variable: str, values: tuple[str, ...]) -> bool:
    return e.variables.get(variable, "").lower() in values


def _untested(e: Environment) -> str:
    low, high = TESTED_TENSORFLOW
    if low <= _series(e.tensorflow) <= high:
        return ""
    tested = " to ".join(".".join(map(str, each)) for each in TESTED_TENSORFLOW)
    return f"TensorFlow {e.tensorflow} is not among the releases tfamp was tested with: {tested}."


def _driver_without_gpu(e: Environment) -> str:
    if not e.nvidia_driver or e.hardware.gpus or e.system == "Windows":
        return ""
    why = "its CUDA libraries did not load" if e.cuda_build else "it was built without CUDA"
    return f"An NVIDIA driver is installed but TensorFlow sees no GPU: {why}, or GPUs are hidden."


def _old_libraries(e: Environment) -> str:
    old = [
        f"{name} {e.libraries[name]} (at least {least})"
        for name, least in sorted(e.wanted_libraries.items())
        if name in e.libraries and _version(e.libraries[name]) < _version(least)
    ]
    if not e.hardware.gpus or not old:
        return ""
    return f"Older than TensorFlow {e.tensorflow} was built for: {', '.join(old)}."


def _maxwell(e: Environment) -> str:
    old = [gpu.name for gpu in e.hardware.gpus if gpu.capability and gpu.capability < (6, 0)]
    if not old or _series(e.tensorflow) < (2, 17):
        return ""
    return (
        f"{old[0]} has a compute capability under 6.0: TensorFlow's wheels have no kernels for it."
    )


def _no_tensor_cores(e: Environment) -> str:
    named = [gpu.name for gpu in e.hardware.gpus if _GTX_16.search(gpu.name)]
    if not named:
        return ""
    return (
        f"{named[0]} has compute capability 7.5 but no Tensor Cores: float16 saves memory, not "
        "time, and can be slower than float32."
    )


def _no_machine_code(e: Environment) -> str:
    for gpu in e.hardware.gpus:
        if gpu.capability and e.kernels and not _has_machine_code(gpu.capability, e.kernels):
            dotted = ".".join(map(str, gpu.capability))
            return (
                f"{gpu.name} has compute capability {dotted} and TensorFlow was built for "
                f"{', '.join(e.kernels)}: its kernels are compiled when they are first used, for "
                "minutes, or not at all."
            )
    return ""


def _has_machine_code(capability: tuple[int, int], kernels: tuple[str, ...]) -> bool:
    """Whether kernels run as they are: same major version, no later minor one."""
    major, minor = capability
    # Code for exactly this generation is compiled once, without trouble.
    found = (re.match(rf"sm_{major}(\d)\D*$", kernel) for kernel in kernels)
    return f"compute_{major}{minor}" in kernels or any(int(f[1]) <= minor for f in found if f)


def _tf32(e: Environment) -> str:
    found = (g.name for g in e.hardware.gpus if (g.capability or (0, 0)) >= BFLOAT16_CAPABILITY)
    capable = next(found, None)
    if capable is None or not e.tensor_float_32:
        return ""
    return (
        f"On {capable} float32 matmuls and convolutions run in TensorFloat-32 on Tensor Cores "
        "already: low precision gains less over that than over full float32."
    )


def _isa_limited(e: Environment) -> str:
    for name in ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"):
        value = e.variables.get(name, "")
        if value and not _ISA_WITH_BFLOAT16.search(value) and e.hardware.cpu_bfloat16:
            return f"{name}={value} hides this CPU's bfloat16 instructions from TensorFlow."
    return ""


# Name; what is wrong in an environment, or ""; advice, source. A new row needs a source, and a case
# in the tests.
_TABLE: tuple[tuple[str, Callable[[Environment], str], str, str], ...] = (
    (
        "keras-2",
        lambda e: (
            f"Keras {e.keras} is not Keras 3, which tfamp's policies and optimizer are made for."
            if _version(e.keras) < (TESTED_KERAS,)
            else ""
        ),
        "Install keras 3.",
        "https://keras.io/keras_3/",
    ),
    (
        "legacy-keras",
        lambda e: (
            "TF_USE_LEGACY_KERAS makes tf.keras the package tf_keras, Keras 2: tfamp's "
            "policies reach models of `import keras` only."
            if _is_set(e, "TF_USE_LEGACY_KERAS", ("1", "true"))
            else ""
        ),
        "Unset TF_USE_LEGACY_KERAS, and import keras.",
        "https://keras.io/getting_started/#tensorflow--keras-2-backwards-compatibility",
    ),
    (
        "tensorflow-untested",
        _untested,
        "Run tfamp's tests on it, or install a release it was tested with.",
        "tfamp's continuous integration",
    ),
    (
        "windows-gpu",
        lambda e: (
            "From TensorFlow 2.11 on there is no GPU support on Windows itself."
            if e.system == "Windows" and _series(e.tensorflow) >= (2, 11)
            else ""
        ),
        "Use WSL2, or Linux.",
        _PIP,
    ),
    (
        "gpu-not-seen",
        _driver_without_gpu,
        "Install with `pip install tensorflow[and-cuda]`, and look at CUDA_VISIBLE_DEVICES.",
        _PIP,
    ),
    (
        "old-cuda-libraries",
        _old_libraries,
        "Reinstall with `pip install -U tensorflow[and-cuda]`; another package may have asked for "
        "older ones.",
        "https://github.com/tensorflow/tensorflow/issues/60913",
    ),
    (
        "maxwell",
        _maxwell,
        "Use TensorFlow 2.16, which tfamp is not tested with, or a newer GPU.",
        "https://github.com/tensorflow/tensorflow/releases/tag/v2.17.0",
    ),
    (
        "no-tensor-cores",
        _no_tensor_cores,
        "Stay with float32, or use float16 to save memory.",
        "https://github.com/tensorflow/tensorflow/issues/44191",
    ),
    (
        "no-machine-code",
        _no_machine_code,
        "Install a TensorFlow built for this GPU, such as NVIDIA's container.",
        "https://github.com/tensorflow/tensorflow/issues/89272",
    ),
    (
        "tensor-float-32",
        _tf32,
        "Nothing to repair: compare after tf.config.experimental."
        "enable_tensor_float_32_execution(False) to see the gain over full float32.",
        "https://www.tensorflow.org/guide/mixed_precision",
    ),
    (
        "onednn-off",
        lambda e: (
            "TF_ENABLE_ONEDNN_OPTS=0 switches oneDNN off, and with it this CPU's low-precision "
            "instructions: bfloat16 is then slower than float32."
            if _is_set(e, "TF_ENABLE_ONEDNN_OPTS", ("0", "false"))
            and (e.hardware.cpu_bfloat16 or e.hardware.cpu_float16)
            else ""
        ),
        "Unset TF_ENABLE_ONEDNN_OPTS before Python starts.",
        "measured: TF_ENABLE_ONEDNN_OPTS=0 tfamp doctor",
    ),
    (
        "onednn-isa",
        _isa_limited,
        "Unset it before Python starts.",
        _ONEDNN_ISA,
    ),
    (
        "grappler",
        lambda e: (
            "TensorFlow's own automatic mixed precision is on: it converts every graph of the "
            "process, also those that are to be float32."
            if e.grappler
            else ""
        ),
        "Unset TF_ENABLE_AUTO_MIXED_PRECISION, and remove auto_mixed_precision from "
        "tf.config.optimizer.set_experimental_options.",
        "https://github.com/tensorflow/tensorflow/issues/33435",
    ),
    (
        "eager-functions",
        lambda e: (
            "tf.functions run eagerly: no graph is optimized, and `tfamp.rewrite` has none to "
            "rewrite."
            if e.eager
            else ""
        ),
        "Call tf.config.run_functions_eagerly(False).",
        "https://www.tensorflow.org/api_docs/python/tf/config/run_functions_eagerly",
    ),
    (
        "intel-extension",
        lambda e: (
            f"intel-extension-for-tensorflow {e.intel_extension} is installed; it does not "
            f"support TensorFlow from 2.17 on, and this is {e.tensorflow}."
            if e.intel_extension and _series(e.tensorflow) >= (2, 17)
            else ""
        ),
        "Uninstall it: TensorFlow's own oneDNN kernels compute bfloat16.",
        "https://intel.github.io/intel-extension-for-tensorflow/latest/get_started.html",
    ),
)
