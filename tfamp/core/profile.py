"""The speed of a machine in each dtype, as a value; framework-free.

The built-in profiles allow reproducible plans without a measurement. The figures for CPUs were
measured, as by `tfamp.machine.profile_measure`; the figures for GPUs and TPUs, and for CPUs
with float16 arithmetic, are estimates from data sheets. A placement depends on ratios only:
between dtypes, and between arithmetic, memory and overhead.
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

DTYPES = ("float32", "bfloat16", "float16")
# Gradients of convolutions are a separate kind: on CPUs oneDNN has no float16 kernels for them.
KINDS = ("matmul", "conv", "conv_gradient", "elementwise")
_DEVICES = ("cpu", "gpu", "tpu")


@dataclass(frozen=True, slots=True)
class MachineProfile:
    """How fast a machine is in each dtype; a minimum-cut placement depends on it.

    Args:
        name: Name for people.
        peaks: For each kind of op ("matmul", "conv", "conv_gradient", "elementwise") and each
            dtype ("float32", "bfloat16", "float16") the floating-point operations, or
            elements, per second.
        bandwidth: Bytes per second that an op reads and writes.
        cast_bandwidth: The same for a Cast.
        op_overhead: Seconds that every op takes in addition.
        least_gain: Seconds that a placement must save over the lists' placement to replace it.
        ops: The same as `peaks` for single op types with unusual kernels, such as error
            functions and depthwise convolutions; it overrides their kind. The name of a form
            with kernels of its own follows the op type, as in
            "DepthwiseConv2dNativeBackpropInput strided".

    Raises:
        ValueError: A kind or a dtype is missing or unknown, or a number is not
            positive and finite.

    Example:
        >>> profile = builtin_profile("cpu", bfloat16=True)
        >>> profile.peaks["matmul"]["bfloat16"] > profile.peaks["matmul"]["float32"]
        True
        >>> MachineProfile.from_json(profile.to_json()) == profile
        True
    """

    name: str
    peaks: Mapping[str, Mapping[str, float]]
    bandwidth: float
    cast_bandwidth: float
    op_overhead: float
    least_gain: float = 0.0
    ops: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check_names("peaks", self.peaks, KINDS)
        names = ("bandwidth", "cast_bandwidth", "op_overhead", "least_gain")
        numbers = {name: getattr(self, name) for name in names}
        for name, table in (("peaks", self.peaks), ("ops", self.ops)):
            for key, row in table.items():
                _check_names(f"{name}[{key!r}]", row, DTYPES)
                for dtype, value in row.items():
                    numbers[f"{name}[{key!r}][{dtype!r}]"] = value
        for name, value in numbers.items():
            is_none = value == 0 and name in ("op_overhead", "least_gain")
            if not isinstance(value, int | float) or not (is_none or 0 < value < math.inf):
                raise ValueError(f"{name} must be a positive finite number; got {value!r}.")

    def to_json(self) -> str:
        """Returns the profile as a JSON object with the fields as keys."""
        return json.dumps(asdict(self), indent=1)

    @staticmethod
    def from_json(text: str) -> MachineProfile:
        """Returns the profile that `to_json` wrote.

        Args:
            text: A JSON object with the fields as keys; those with a default may be missing.

        Returns:
            The profile.

        Raises:
            ValueError: It is not JSON, a field is missing or unknown, or a value is wrong.
        """
        try:
            return MachineProfile(**json.loads(text))
        except (AttributeError, TypeError) as error:
            raise ValueError(
                f"a profile must be a JSON object with {', '.join(MachineProfile.__slots__)}, "
                f"as MachineProfile.to_json() writes it: {error}"
            ) from error


def _check_names(what: str, got: object, expected: tuple[str, ...]) -> None:
    if not isinstance(got, Mapping) or set(got) != set(expected):
        names = f"{', '.join(map(str, got))}" if isinstance(got, Mapping) else repr(got)
        raise ValueError(f"{what} must have exactly {', '.join(expected)}; got {names}.")


@functools.cache
def builtin_profile(
    device: str,
    *,
    bfloat16: bool = True,
    float16: bool | None = None,
    name: str = "",
    tf32: bool = True,
) -> MachineProfile:
    """Returns tfamp's own figures for a kind of device.

    Args:
        device: "cpu", "gpu" or "tpu".
        bfloat16: Whether it multiplies bfloat16 natively.
        float16: The same for float16; None stands for what is usual: GPUs do.
        name: The name of a GPU. There are figures for the T4, V100, A100, A10G, L4, L40S, H100,
            H200, GH200, B200, GB200 and the series GeForce RTX 30, 40 and 50; any other counts
            as an A100, or as a V100 if it does not multiply bfloat16.
        tf32: Whether a GPU that can multiplies float32 as TensorFloat-32.

    Returns:
        The profile; equal for equal arguments.

    Raises:
        ValueError: The device is none of these.

    Example:
        >>> builtin_profile("cpu").name
        'built-in cpu, native: bfloat16'
        >>> builtin_profile("gpu", name="NVIDIA H100 80GB HBM3", tf32=False).name
        'built-in gpu H100 without TF32, native: bfloat16, float16'
    """
    if device not in _DEVICES:
        raise ValueError(f"device must be one of {', '.join(_DEVICES)}; got {device!r}.")
    native = {"bfloat16": bfloat16, "float16": device == "gpu" if float16 is None else float16}
    if device == "gpu":
        return _gpu_profile(name, native, tf32)
    float32, bandwidth, cast_bandwidth, op_overhead = _BASES[device]
    ratios = {"float32": dict.fromkeys(KINDS, 1.0)}
    for dtype, is_native in native.items():
        ratios[dtype] = _RATIOS[device, "native" if is_native else dtype]
    peaks = {k: {dtype: float32[k] * ratios[dtype][k] for dtype in DTYPES} for k in KINDS}
    return MachineProfile(
        f"built-in {device}, {_names(native)}",
        peaks,
        bandwidth,
        cast_bandwidth,
        op_overhead,
        least_gain=_LEAST_GAIN[device],
        ops=cpu_ops(peaks) if device == "cpu" else {},
    )


def _gpu_profile(name: str, native: Mapping[str, bool], tf32: bool) -> MachineProfile:
    usual = "A100" if native["bfloat16"] else "V100"
    key = next((key for key in _GPUS if re.search(_pattern(key), name)), usual)
    gpu = _GPUS[key]
    # Compute capability 8.0 brought bfloat16 and TF32 at once.
    native = {**native, "bfloat16": native["bfloat16"] and gpu.tf32 > 0}
    tf32 = tf32 and native["bfloat16"]
    product = gpu.tf32 if tf32 else gpu.float32
    speeds = {"float32": _reached(product, gpu.float32)}
    for dtype, is_native in native.items():
        low = (gpu.low, 2 * gpu.float32) if is_native else (product / 2, gpu.float32)
        speeds[dtype] = _reached(*low)
    return MachineProfile(
        name=f"built-in gpu {key} {'with' if tf32 else 'without'} TF32, {_names(native)}",
        peaks={kind: {dtype: speeds[dtype][kind] for dtype in DTYPES} for kind in KINDS},
        bandwidth=0.85e12 * gpu.bandwidth,
        cast_bandwidth=0.85e12 * gpu.bandwidth,
        op_overhead=_LAUNCH,
        least_gain=_LEAST_GAIN["gpu"],
    )


def _pattern(key: str) -> str:
    """Matches names of GPUs: L4 does not match "L40S", nor RTX 40 "Quadro RTX 4000"."""
    return rf"\bGeForce {key}\d\d\b" if key.startswith("RTX") else rf"\b{key}(?!\d)"


def _reached(product: float, other: float) -> dict[str, float]:
    """Operations per second that kernels reach in products and in other arithmetic."""
    return _by_kind(*[0.4e12 * product] * 3, 0.5e12 * other)


def _names(native: Mapping[str, bool]) -> str:
    names = ", ".join(dtype for dtype, is_native in native.items() if is_native)
    return f"native: {names or 'float32 only'}"


def cpu_ops(peaks: Mapping[str, Mapping[str, float]]) -> dict[str, dict[str, float]]:
    """Returns the speeds of op types whose speed on a CPU differs from their kind's."""
    ops = {}
    for kind, rows in _CPU_OPS.items():
        for op, (speed, *ratios) in rows.items():
            float32 = peaks[kind]["float32"] * speed * 1e9 / _BASES["cpu"][0][kind]
            if kind != "elementwise":
                # Without instructions for bfloat16, convolutions of all kinds are slow in it.
                ratios[0] = min(ratios[0], peaks[kind]["bfloat16"] / peaks[kind]["float32"])
            speeds = (float32, *(float32 * ratio for ratio in ratios))
            ops[op] = dict(zip(DTYPES, speeds, strict=True))
    return ops


def _by_kind(*values: float) -> dict[str, float]:
    return dict(zip(KINDS, values, strict=True))


# About the time from the end of a kernel on a GPU to the start of the next, however
# small they are.
_LAUNCH = 2e-6
# A smaller gain in seconds is within the error of these figures, and small graphs get the same
# placement on every machine. On a CPU it is about the time in which TensorFlow dispatches the
# ops of a small step. A GPU computes meanwhile: there it is ten launches, as many as compilers
# may save by fusing Casts with their neighbours.
_LEAST_GAIN = {"cpu": 1e-3, "gpu": 10 * _LAUNCH, "tpu": 10 * _LAUNCH}


@dataclass(frozen=True, slots=True)
class _Gpu:
    """A GPU's peaks without sparsity: 10^12 operations a second, and 10^12 bytes."""

    float32: float
    low: float  # On Tensor Cores, accumulated in float32.
    bandwidth: float
    tf32: float = 0.0


# By parts of GPU names. The figures are from NVIDIA's data sheets and, for GeForce, its white
# papers on each architecture, without sparsity, which doubles the rates of the Tensor Cores.
_GPUS = {
    "T4": _Gpu(8.1, 65, 0.32),
    "V100": _Gpu(15.7, 125, 0.9),  # SXM2
    "A100": _Gpu(19.5, 312, 1.555, tf32=156),  # SXM, 40 GB
    "A10G": _Gpu(31.5, 70, 0.6, tf32=35),
    "L4": _Gpu(30.3, 121, 0.3, tf32=60),
    "L40S": _Gpu(91.6, 362, 0.864, tf32=183),
    "H100": _Gpu(67, 989.5, 3.35, tf32=494.5),  # SXM
    "H200": _Gpu(67, 989.5, 4.8, tf32=494.5),  # SXM
    "GH200": _Gpu(67, 989.5, 4.0, tf32=494.5),  # 96 GB
    "B200": _Gpu(75, 2250, 7.7, tf32=1100),  # One of an HGX
    "GB200": _Gpu(80, 2500, 8.0, tf32=1250),  # One of the two
    # A series has about the same ratios; the figures are for its largest GPU.
    "RTX 30": _Gpu(35.6, 71, 0.936, tf32=35.6),  # 3090
    "RTX 40": _Gpu(82.6, 165.2, 1.008, tf32=82.6),  # 4090
    "RTX 50": _Gpu(104.8, 209.5, 1.792, tf32=104.8),  # 5090
}

# In float32: operations per second, bytes per second of ops and of Casts, seconds an op takes.
_BASES = {
    # Two cores of an AMD EPYC with AVX512-BF16, TensorFlow 2.21; tensors larger
    # than the caches.
    "cpu": (_by_kind(100e9, 90e9, 75e9, 2.2e9), 10e9, 10e9, 0.3e-6),
    # A TPU v4; float32 takes several passes through bfloat16 units. Its compiler fuses Casts.
    "tpu": (_by_kind(92e12, 92e12, 92e12, 4e12), 1.2e12, 4e12, 0.2e-6),
}
# Speed in a low dtype over the speed in float32: where the dtype is native, or by dtype
# where it is not.
_RATIOS = {
    ("cpu", "native"): _by_kind(2.1, 1.8, 1.7, 0.7),
    # With AVX512-BF16 disabled in oneDNN.
    ("cpu", "bfloat16"): _by_kind(0.37, 0.43, 0.45, 0.7),
    # oneDNN has no kernels for gradients of float16 convolutions.
    ("cpu", "float16"): _by_kind(0.93, 0.9, 0.13, 1.1),
    ("tpu", "native"): _by_kind(3, 3, 3, 2),
    ("tpu", "bfloat16"): _by_kind(1, 1, 1, 1),
    ("tpu", "float16"): _by_kind(1, 1, 1, 1),
}

# Forms of depthwise convolutions: filters of more than 3 x 3; strides of more than 1.
WIDE, STRIDED = "wide", "strided"

# Reductions over channels or windows.
_SLOW_OPS = (
    *("AvgPool", "AvgPoolGrad", "MaxPool", "MaxPoolGrad", "LogSoftmax", "Softmax"),
    *("FusedBatchNormV3", "FusedBatchNormGradV3", "_FusedBatchNormEx"),
)
# Kind -> op types whose speed on CPUs differs from their kind's: the speed in float32, in 10^9
# elements or operations per second for the machine of `_BASES`, and bfloat16 and
# float16 over it.
_CPU_OPS: dict[str, dict[str, tuple[float, float, float]]] = {
    "elementwise": {
        "Erf": (0.7, 0.5, 0.8),
        "Erfc": (0.8, 0.14, 0.13),
        "Exp": (0.6, 0.6, 0.8),
        "Log": (0.4, 0.65, 0.3),
        "Pow": (0.04, 1.9, 1.9),
        "Rsqrt": (1.7, 0.4, 0.9),
        "RsqrtGrad": (1.9, 0.12, 0.4),
        "Sigmoid": (0.5, 0.33, 0.55),
        "SigmoidGrad": (2.1, 0.15, 0.5),
        "SquaredDifference": (2.2, 0.2, 0.7),
        "Tanh": (0.9, 0.5, 0.9),
        "TanhGrad": (2.2, 0.16, 0.5),
        **dict.fromkeys(_SLOW_OPS, (0.9, 0.85, 0.6)),
    },
    "conv": {"DepthwiseConv2dNative": (20, 1.4, 0.24)},
    "conv_gradient": {
        "DepthwiseConv2dNativeBackpropInput": (14, 1.3, 0.2),
        # oneDNN has no bfloat16 kernel for a strided one.
        f"DepthwiseConv2dNativeBackpropInput {STRIDED}": (8, 0.1, 0.2),
        "DepthwiseConv2dNativeBackpropFilter": (13, 1.2, 1.0),
        f"DepthwiseConv2dNativeBackpropFilter {WIDE}": (5, 0.45, 1.0),
    },
}
