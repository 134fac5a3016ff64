"""Measures a machine profile in about two seconds.

Small pieces of work are timed in every dtype, in rounds over all pieces and dtypes: other load on
the machine then slows all of them alike, and the best of the times counts. The tensors of a piece
of work exist during its turn only.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import tensorflow as tf

from tfamp.core.profile import DTYPES, KINDS, MachineProfile, builtin_profile, cpu_ops
from tfamp.interop import tf_private

# The speed of a kind of op in a dtype that it has no kernel for, in parts of float32's.
NO_KERNEL = 1e-3
# The errors of a missing kernel, or of one missing for this dtype on this device.
_NO_KERNEL_ERRORS = (
    tf.errors.InvalidArgumentError,
    tf.errors.NotFoundError,
    tf.errors.UnimplementedError,
    tf.errors.InternalError,
    tf.errors.UnknownError,
)
# Short works are repeated for this long at each turn.
_LEAST_SECONDS = 3e-3
_MOST_REPEATS = 30
_LEAST_ROUNDS = 3
# A round that makes more than a few of the best times better by this much shows a busy machine:
# there it takes longer.
_IMPROVEMENT = 0.9
_FEW = 0.1
_LONGEST = 3.0
# Speeds closer than this cannot be told from equal ones in a few seconds.
_NOISE = 1.1

_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class Sizes:
    """The shapes that are timed: of the size that a small training step has.

    Attributes:
        matmuls: (rows, depth, columns) of each matmul; its gradients are timed as well.
        convolutions: (batch, height and width, channels, filters, kernel) of each convolution.
        elements: Elements of what elementwise ops take: on a CPU few enough for the cache, so that
            their arithmetic is timed and not the memory.
        images: (batch, height and width, channels) for pooling, normalization and softmax.
        traffic: Elements that are read and written to time the memory: more than a cache holds.
    """

    matmuls: Sequence[tuple[int, int, int]]
    convolutions: Sequence[tuple[int, int, int, int, int]]
    elements: int
    images: tuple[int, int, int]
    traffic: int


# A GPU needs more work to be busy.
SIZES = {
    "cpu": Sizes(
        matmuls=((256, 1024, 1024), (2048, 512, 256), (32, 512, 2048)),
        convolutions=((4, 32, 64, 32, 3), (8, 16, 256, 64, 1), (4, 8, 256, 128, 3)),
        elements=1 << 19,
        images=(16, 32, 32),
        traffic=1 << 22,
    ),
    "gpu": Sizes(
        matmuls=((2048, 4096, 4096), (16384, 1024, 1024)),
        convolutions=((64, 56, 64, 64, 3), (64, 28, 512, 128, 1), (64, 14, 256, 256, 3)),
        elements=1 << 22,
        images=(64, 56, 64),
        traffic=1 << 25,
    ),
}


@dataclass(frozen=True, slots=True)
class Work:
    """One piece of work.

    Attributes:
        kind: A kind of a profile's peaks, "traffic" or "cast traffic".
        amount: How much work it is: operations, elements or bytes.
        make: Makes tensors of a dtype, and returns a function that does the work on them.
        dtypes: The dtypes; there must be a kernel for the first one.
    """

    kind: str
    amount: float
    make: Callable[[str], Callable[[], Any]]
    dtypes: tuple[str, ...] = DTYPES


def measure_profile(*, seconds: float = 2.0) -> MachineProfile:
    """Measures how fast this machine is in each dtype: its first GPU, or its CPU without one.

    It can be called anywhere: it runs in a thread of its own, where no function is being traced, no
    autocast, tape, device or distribution strategy is active and nothing is in the default graph.

    Args:
        seconds: About how long to measure, on a machine with nothing else to do; up to three times
            as long on a busy one.

    Returns:
        The profile, every measured figure rounded to two digits: more would be noise. A dtype that
        is less than 10 % faster than float32 counts as equal, one that a kind of op has no kernel
        for as a thousand times slower. Overheads and single op types are those of the built-in
        profiles, in proportion to the measured speeds.

    Raises:
        tf.errors.OpError: It cannot be measured, for want of memory for instance.

    Example:
        >>> measure_profile(seconds=0.01).peaks["matmul"]["float32"] > 1
        True
    """
    device = tf_private.default_device_kind()
    return _in_own_thread(lambda: _measure(device, seconds))


def _in_own_thread(function: Callable[[], _Result]) -> _Result:
    """Runs a function free of TensorFlow's and tfamp's per-thread state: scopes, graphs, modes.

    It runs eagerly wherever this is called: in a function that is being traced, and under
    `tf.Graph().as_default()`, which `tf.init_scope` does not leave.
    """
    with ThreadPoolExecutor(1) as own_thread:
        return own_thread.submit(function).result()


def let_memory_grow() -> None:
    """Makes GPUs give memory as it is needed, if it is tfamp that starts TensorFlow's runtime.

    By default the first op takes nearly all memory of every GPU, also from a job that runs beside.
    Nothing is changed once the runtime has started, and of GPUs for which growth has been set or
    that have been divided.
    """
    if tf_private.runtime_has_started():
        return
    for gpu in tf.config.get_visible_devices("GPU"):
        if tf.config.experimental.get_memory_growth(gpu) is None:
            with contextlib.suppress(ValueError):  # It is divided, so that each part has a limit.
                tf.config.experimental.set_memory_growth(gpu, True)


def _measure(device: str, seconds: float) -> MachineProfile:
    let_memory_grow()
    # An op without a kernel on the device is an error then, and does not run on the CPU instead.
    before = tf.config.get_soft_device_placement()
    tf.config.set_soft_device_placement(False)
    try:
        with tf.device(f"{device.upper()}:0"):
            timers = _timed(works(SIZES[device]), seconds)
    finally:
        tf.config.set_soft_device_placement(before)
    by_kind: dict[str, list[_Timer]] = defaultdict(list)
    for timer in timers:
        by_kind[timer.work.kind].append(timer)
    usual = builtin_profile(device)
    peaks = {kind: _peaks(by_kind[kind]) for kind in KINDS}
    return MachineProfile(
        name=f"{device.upper()}, measured with TensorFlow {tf.__version__}",
        peaks=peaks,
        bandwidth=_rate(by_kind["traffic"]),
        cast_bandwidth=_rate(by_kind["cast traffic"]),
        op_overhead=usual.op_overhead,
        least_gain=usual.least_gain,
        ops=cpu_ops(peaks) if device == "cpu" else {},
    )


def _timed(found: Iterable[Work], seconds: float) -> list[_Timer]:
    """Times all in rounds, a few at least, for about that long."""
    start = time.perf_counter()
    timers = [_Timer(work) for work in found]
    for number in itertools.count(1):
        better = [timer.time_once() for timer in timers]
        steady = sum(better) <= _FEW * len(timers)
        enough = time.perf_counter() - start >= seconds * (1.0 if steady else _LONGEST)
        if enough and number >= _LEAST_ROUNDS:
            break
    return timers


def _rate(timers: Sequence[_Timer]) -> float:
    return _rounded(sum(each.work.amount for each in timers) / sum(each.first for each in timers))


def _peaks(timers: Sequence[_Timer]) -> dict[str, float]:
    """Work per second by dtype; ratios to float32 are means over the works that have a kernel."""
    float32 = statistics.geometric_mean(each.work.amount / each.first for each in timers)
    peaks = {}
    for dtype in DTYPES:
        ratios = [each.first / each.best[dtype] for each in timers if dtype in each.best]
        ratio = statistics.geometric_mean(ratios) if ratios else NO_KERNEL
        # A dtype that is hardly faster than float32 counts as equal: that may be noise.
        peaks[dtype] = _rounded(float32 * (1.0 if 1.0 < ratio < _NOISE else ratio))
    return peaks


def _rounded(value: float) -> float:
    return float(f"{value:.1e}")


class _Timer:
    """The best times of a piece of work, in each dtype that it has a kernel for."""

    def __init__(self, work: Work) -> None:
        self.work = work
        self.best: dict[str, float] = {}
        # The first run also shows whether there is a kernel.
        for dtype in work.dtypes:
            try:
                self.best[dtype] = together(work.make(dtype), 1)
            except _NO_KERNEL_ERRORS:
                if dtype == work.dtypes[0]:
                    raise

    @property
    def first(self) -> float:
        """Best seconds in the first dtype: in float32, but for Casts to it."""
        return self.best[self.work.dtypes[0]]

    def time_once(self) -> bool:
        """Times the work in each dtype; returns whether a time improved."""
        improved = False
        for dtype, known in self.best.items():
            repeats = min(math.ceil(_LEAST_SECONDS / max(known, 1e-9)), _MOST_REPEATS)
            self.best[dtype] = min(known, together(self.work.make(dtype), repeats))
            improved |= self.best[dtype] < _IMPROVEMENT * known
        return improved


def together(run: Callable[[], Any], repeats: int) -> float:
    """Seconds of a run, of many that are started before the first one is waited for."""
    tf.test.experimental.sync_devices()
    start = time.perf_counter()
    for _ in range(repeats):
        run()
    tf.test.experimental.sync_devices()
    return (time.perf_counter() - start) / repeats


# ---- The works -----------------------------------------------------------------------------------


def works(sizes: Sizes) -> Iterator[Work]:
    """Makes everything that is timed for a profile, on the current device."""
    for matmul in sizes.matmuls:
        yield from _matmuls(*matmul)
    for convolution in sizes.convolutions:
        yield from _convolution(*convolution)
    flat = [sizes.elements]
    inputs = {"AddV2": "x y", "Mul": "x y", "Relu": "features", "ReluGrad": "gradients features"}
    for op, names in inputs.items():
        yield Work(
            "elementwise", float(sizes.elements), _run(op, dict.fromkeys(names.split(), flat))
        )
    yield from _special(*sizes.images)
    # An Add reads two tensors and writes one.
    add = _run("AddV2", {"x": [sizes.traffic], "y": [sizes.traffic]})
    yield Work("traffic", 3.0 * 4 * sizes.traffic, add, ("float32",))
    for low in (tf.bfloat16, tf.float16):
        for source, target in ((tf.float32, low), (low, tf.float32)):
            cast = _run("Cast", {"x": [sizes.traffic]}, DstT=target)
            yield Work("cast traffic", 6.0 * sizes.traffic, cast, (source.name,))


def _run(
    op: str, shapes: Mapping[str, Sequence[int]], **options: Any
) -> Callable[[str], Callable[[], Any]]:
    """Runs an op on tensors of ones, of shapes by the names of its inputs."""
    function = getattr(tf.raw_ops, op)

    def make(dtype: str) -> Callable[[], Any]:
        tensors = {name: tf.ones(shape, dtype) for name, shape in shapes.items()}
        return lambda: function(**tensors, **options)

    return make


def _matmuls(rows: int, depth: int, columns: int) -> Iterator[Work]:
    """A layer's product and those of its gradients, which are slower in float32."""
    x, w, y = (rows, depth), (depth, columns), (rows, columns)
    for make in (
        _run("MatMul", {"a": x, "b": w}),
        _run("MatMul", {"a": y, "b": w}, transpose_b=True),
        _run("MatMul", {"a": x, "b": y}, transpose_a=True),
    ):
        yield Work("matmul", 2.0 * rows * depth * columns, make)


def _convolution(batch: int, size: int, channels: int, filters: int, kernel: int) -> Iterator[Work]:
    """A convolution and its gradients by input and by filter."""
    x, y = [batch, size, size, channels], [batch, size, size, filters]
    w = [kernel, kernel, channels, filters]
    options: dict[str, Any] = {"strides": [1, 1, 1, 1], "padding": "SAME"}
    for kind, make in (
        ("conv", _run("Conv2D", {"input": x, "filter": w}, **options)),
        (
            "conv_input",
            _run("Conv2DBackpropInput", {"filter": w, "out_backprop": y}, input_sizes=x, **options),
        ),
        (
            "conv_filter",
            _run(
                "Conv2DBackpropFilter", {"input": x, "out_backprop": y}, filter_sizes=w, **options
            ),
        ),
    ):
        yield Work(kind, 2.0 * math.prod(y) * math.prod(w[:3]), make)


def _special(batch: int, size: int, channels: int) -> Iterator[Work]:
    images = [batch, size, size, channels]
    pool: dict[str, Any] = {"ksize": [1, 2, 2, 1], "strides": [1, 2, 2, 1], "padding": "SAME"}
    ones, nothing = tf.ones((channels,)), tf.zeros((0,))
    norm = {"scale": ones, "offset": ones, "mean": nothing, "variance": nothing}
    for make in (
        _run("Softmax", {"logits": [batch * size, size * channels]}),
        _run("MaxPool", {"input": images}, **pool),
        _run("FusedBatchNormV3", {"x": images}, **norm),
    ):
        yield Work("special", float(math.prod(images)), make)
