"""Measures a machine profile in about two seconds.

Small pieces of work are timed in every dtype, in rounds over all pieces and dtypes: other load
on the machine then slows all of them alike, and the shortest time counts. The tensors of a
piece of work exist only while it is timed.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from tfamp.core.device_names import device_kind_of
from tfamp.core.kinds import Tensor
from tfamp.core.profile import DTYPES, KINDS, MachineProfile, builtin_profile, cpu_ops
from tfamp.interop import tf_private

# The speed of a kind of op in a dtype without a kernel, relative to float32. A choice: slower
# than any kernel, so that no placement picks the dtype.
NO_KERNEL = 1e-3
# Seconds for which short work is repeated in a round. A choice: much longer than a clock's and
# a start's error, and so short that two seconds hold many rounds; likewise the most repeats.
# The shortest of three rounds is the least to tell load from work.
_LEAST_SECONDS = 3e-3
_MOST_REPEATS = 30
_LEAST_ROUNDS = 3
# A smaller ratio of two speeds is within the noise of a few seconds' measurement.
_NOISE = 1.1


# The shapes that are timed, of the size that a small training step has: see `works`. On a GPU
# an op takes several times as long as TensorFlow takes to start the next one, some 10 us.
SIZES: dict[str, dict[str, Any]] = {
    "cpu": {
        "matmuls": ((256, 1024, 1024), (2048, 512, 256), (32, 512, 2048)),
        "convolutions": ((4, 32, 64, 32, 3), (8, 16, 256, 64, 1), (4, 8, 256, 128, 3)),
        "elements": 1 << 19,
        "traffic": 1 << 22,
    },
    "gpu": {
        "matmuls": ((2048, 4096, 4096), (16384, 1024, 1024)),
        "convolutions": ((256, 56, 64, 64, 3), (256, 28, 512, 128, 1), (256, 14, 256, 256, 3)),
        "elements": 1 << 25,
        "traffic": 1 << 25,
    },
}


@dataclass(frozen=True, slots=True)
class Work:
    """One piece of work: an op on tensors of ones.

    Attributes:
        kind: A kind of a profile's peaks, "traffic" or "cast traffic".
        amount: Amount of work: operations, elements or bytes.
        op: The op type.
        shapes: Shapes of the inputs in the dtype, by name.
        options: The other arguments of the op.
        dtypes: The dtypes to time; there must be a kernel for the first one.
        best: The best time in the dtypes that have a kernel, in seconds.
    """

    kind: str
    amount: float
    op: str
    shapes: Mapping[str, Sequence[int]]
    options: Mapping[str, Any] = field(default_factory=dict)
    dtypes: tuple[str, ...] = DTYPES
    best: dict[str, float] = field(default_factory=dict)

    @property
    def first(self) -> float:
        """Best seconds in the first dtype: in float32, but for Casts to it."""
        return self.best[self.dtypes[0]]

    def make(self, dtype: str) -> Callable[[], Tensor]:
        """Makes tensors of a dtype, and returns a function that does the work on them."""
        function = getattr(tf.raw_ops, self.op)
        tensors = {name: tf.ones(shape, dtype) for name, shape in self.shapes.items()}
        return lambda: function(**tensors, **self.options)

    def time_first(self) -> None:
        """Times the work once in all dtypes, and finds out which have a kernel."""
        for dtype in self.dtypes:
            try:
                taken, device = _first_run(self.make(dtype))
            except tf.errors.OpError as error:
                lacks_memory = isinstance(error, tf.errors.ResourceExhaustedError)
                if dtype == self.dtypes[0] or lacks_memory:
                    raise  # Otherwise this dtype has no kernel on this device.
                continue
            # TensorFlow's soft placement runs an op on the CPU that has no kernel on a GPU.
            wanted = tf_private.device_kind_in_force()
            if not wanted or device_kind_of(device) == wanted:
                self.best[dtype] = taken
            elif dtype == self.dtypes[0]:
                text = f"{self.op} has no {dtype} kernel on this {wanted.upper()}, or there is none"
                raise tf.errors.UnimplementedError(None, None, text)

    def time_again(self) -> None:
        """Times the work in the dtypes that have a kernel."""
        for dtype, known in self.best.items():
            repeats = min(math.ceil(_LEAST_SECONDS / max(known, 1e-9)), _MOST_REPEATS)
            seconds = together(self.make(dtype), repeats, tf.raw_ops.SyncDevice)
            self.best[dtype] = min(known, seconds)


def measure_profile(*, seconds: float = 2.0) -> MachineProfile:
    """Measures how fast this machine is by dtype: its first GPU, or its CPU without one.

    It can be called anywhere: it runs in a thread of its own, where no function is being
    traced, no autocast, tape, device or distribution strategy is active and nothing is in the
    default graph.

    Args:
        seconds: About how long to measure.

    Returns:
        The profile, every measured figure rounded to two digits: more would be noise. A dtype
        that is less than 10 % faster than float32 counts as equal, a dtype without a kernel as
        a thousand times slower. Overheads and the speeds of single op types come from the
        built-in profiles, in proportion to the measured speeds.

    Raises:
        tf.errors.OpError: It cannot be measured, for lack of memory for instance.

    Example:
        >>> measure_profile(seconds=0.01).peaks["matmul"]["float32"] > 1
        True
    """
    device = tf_private.default_device_kind()
    # A thread of its own leaves `tf.Graph().as_default()` too, as `tf.init_scope` does not.
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(_measure, device, seconds).result()


def let_memory_grow() -> None:
    """Makes GPUs allocate memory as it is needed, if tfamp is what starts TensorFlow's runtime.

    By default the first op allocates nearly all memory of every GPU, also on a GPU that another
    job uses. Nothing changes once the runtime has started, nor for GPUs with memory growth set
    or with logical devices.
    """
    if tf_private.runtime_has_started():
        return
    for gpu in tf.config.get_visible_devices("GPU"):
        if tf.config.experimental.get_memory_growth(gpu) is None:
            # Logical devices have limits of their own.
            with contextlib.suppress(ValueError):
                tf.config.experimental.set_memory_growth(gpu, True)


def _measure(device: str, seconds: float) -> MachineProfile:
    let_memory_grow()
    with tf.device(f"{device.upper()}:0"):
        timed = _timed(works(**SIZES[device]), seconds)
    usual = builtin_profile(device)
    peaks = {kind: _peaks([work for work in timed if work.kind == kind]) for kind in KINDS}
    return MachineProfile(
        name=f"{device.upper()}, measured with TensorFlow {tf.__version__}",
        peaks=peaks,
        bandwidth=_rate(work for work in timed if work.kind == "traffic"),
        cast_bandwidth=_rate(work for work in timed if work.kind == "cast traffic"),
        op_overhead=usual.op_overhead,
        least_gain=usual.least_gain,
        ops=cpu_ops(peaks) if device == "cpu" else {},
    )


def _timed(to_time: Iterable[Work], seconds: float) -> list[Work]:
    """Times all works in rounds, at least a few, for about that long."""
    end = time.perf_counter() + seconds
    timed = list(to_time)
    for work in timed:
        work.time_first()
    rounds = 0
    while rounds < _LEAST_ROUNDS or time.perf_counter() < end:
        for work in timed:
            work.time_again()
        rounds += 1
    return timed


def _first_run(run: Callable[[], Tensor]) -> tuple[float, str]:
    """Seconds of a run, and the device that it ran on."""
    made: list[Tensor] = []
    seconds = together(lambda: made.append(run()), 1, tf.raw_ops.SyncDevice)
    return seconds, str(made[0].device)


def _rate(timed: Iterable[Work]) -> float:
    amounts, seconds = zip(*((work.amount, work.first) for work in timed), strict=True)
    return _rounded(sum(amounts) / sum(seconds))


def _peaks(timed: Sequence[Work]) -> dict[str, float]:
    """Work per second by dtype; ratios to float32 are means over works with a kernel."""
    float32 = statistics.geometric_mean(work.amount / work.first for work in timed)
    peaks = {}
    for dtype in DTYPES:
        ratios = [work.first / work.best[dtype] for work in timed if dtype in work.best]
        ratio = statistics.geometric_mean(ratios) if ratios else NO_KERNEL
        # A small gain over float32 may be noise.
        peaks[dtype] = _rounded(float32 * (1.0 if 1.0 < ratio < _NOISE else ratio))
    return peaks


def _rounded(value: float) -> float:
    return float(f"{value:.1e}")


def together(
    run: Callable[[], object],
    repeats: int,
    wait: Callable[[], object] = tf.test.experimental.sync_devices,
) -> float:
    """Seconds of a run, of many that are started before the first one is waited for.

    `wait` returns when the devices have finished: all of them, or `tf.raw_ops.SyncDevice` for
    the current one, so that what others run does not count.
    """
    wait()
    start = time.perf_counter()
    for _ in range(repeats):
        run()
    wait()
    return (time.perf_counter() - start) / repeats


def works(
    matmuls: Iterable[tuple[int, int, int]],
    convolutions: Iterable[tuple[int, int, int, int, int]],
    elements: int,
    traffic: int,
) -> Iterator[Work]:
    """Yields the works that are timed for a profile, on the current device.

    Args:
        matmuls: Their (rows, depth, columns); the gradients are timed as well.
        convolutions: Their (batch, height and width, channels, filters, kernel).
        elements: Elements of the inputs of elementwise ops: on a CPU few enough for the cache,
            so that their arithmetic is timed and not the memory.
        traffic: Elements of the tensors that time the memory: more than fit in a cache.
    """
    for rows, depth, columns in matmuls:
        x, w, y = (rows, depth), (depth, columns), (rows, columns)
        flops = 2.0 * rows * depth * columns
        yield Work("matmul", flops, "MatMul", {"a": x, "b": w})
        # The gradients' products, which are slower in float32.
        yield Work("matmul", flops, "MatMul", {"a": y, "b": w}, {"transpose_b": True})
        yield Work("matmul", flops, "MatMul", {"a": x, "b": y}, {"transpose_a": True})
    for convolution in convolutions:
        yield from _convolutions(*convolution)
    names = {"AddV2": "x y", "Mul": "x y", "Relu": "features", "ReluGrad": "gradients features"}
    for op, inputs in names.items():
        yield Work("elementwise", elements, op, dict.fromkeys(inputs.split(), [elements]))
    large = {"x": [traffic]}
    # An Add reads two tensors and writes one.
    yield Work("traffic", 3 * 4 * traffic, "AddV2", {**large, "y": [traffic]}, {}, ("float32",))
    for low in ("bfloat16", "float16"):
        for source, target in (("float32", low), (low, "float32")):
            made = {"DstT": tf.as_dtype(target)}
            yield Work("cast traffic", 6 * traffic, "Cast", large, made, (source,))


def _convolutions(
    batch: int, size: int, channels: int, filters: int, kernel: int
) -> Iterator[Work]:
    """A convolution and its gradients by input and by filter."""
    x, y = [batch, size, size, channels], [batch, size, size, filters]
    w = [kernel, kernel, channels, filters]
    same = {"strides": [1, 1, 1, 1], "padding": "SAME"}
    flops = 2.0 * math.prod(y) * math.prod(w[:3])
    op = "Conv2DBackprop"
    yield Work("conv", flops, "Conv2D", {"input": x, "filter": w}, same)
    sizes: dict[str, Any] = {"input_sizes": x, **same}
    yield Work("conv_gradient", flops, f"{op}Input", {"filter": w, "out_backprop": y}, sizes)
    sizes = {"filter_sizes": w, **same}
    yield Work("conv_gradient", flops, f"{op}Filter", {"input": x, "out_backprop": y}, sizes)
