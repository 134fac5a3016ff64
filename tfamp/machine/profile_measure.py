"""Measures a machine profile in about three seconds, and how slow float16 is in 0.3 s.

What is timed are small pieces of work, each in every dtype. Everything is timed by turns, again and
again: all kinds of work in all dtypes. What else the machine does then slows all of them, and the
best of the times is taken. The tensors of a piece of work are there for its turn only.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import itertools
import math
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from tfamp.core.profile import DTYPES, KINDS, OPS, STRIDED, WIDE, MachineProfile, builtin_profile
from tfamp.machine import hardware
from tfamp.machine.timing import NO_KERNEL_ERRORS, in_own_thread, let_memory_grow, some_values

# What a kind of op reaches in a dtype that it has no kernel for, in parts of float32's peak.
NO_KERNEL = 1e-3
_KINDS_OF_DEVICES = ("auto", "cpu", "gpu")
# Short works are repeated for this long at each turn.
_LEAST_SECONDS = 3e-3
_MOST_REPEATS = 30
_LEAST_TURNS = 3
# A turn that makes more than a few of the best times better by this much shows a busy machine:
# there it takes longer.
_IMPROVEMENT = 0.9
_FEW = 0.1
_LONGEST = 3.0
# Speeds closer than this cannot be told from equal ones in a few seconds.
_NOISE = 1.1
# From this many times float32's time on the ratio need not be precise: timed this often only. Once
# would not do, as the machine may have been busy just then.
_HOPELESS = 4.0
_HOPELESS_RUNS = 2
# A float16 below this many times float32's time may be as fast: the difference may be noise.
_SLOWER = 1.2
_SUMS = ("Mean", "Sum")
_ELEMENTWISE = ("AddV2", "Mul", "Relu", "ReluGrad")
_CHAIN = 60
_RESERVED = ("reserve_space_1", "reserve_space_2", "reserve_space_3")

Run = Callable[[], Any]


@dataclass(frozen=True, slots=True)
class Sizes:
    """The shapes that are timed: of the size that a small training step has.

    Args:
        matmuls: (rows, depth, columns) of each matmul; its gradients are timed as well.
        convolutions: (batch, height and width, channels, filters, kernel) of each convolution.
        elements: Elements of what elementwise ops take: few enough for the cache, so that it is
            their arithmetic that is timed and not the memory.
        images: (batch, height and width, channels) for pooling, normalization, softmax and so on.
        traffic: Elements of what is read and written to time the memory: more than a cache holds.
        depthwise: (batch, height and width, channels, kernel, stride) of each depthwise
            convolution: one with a wide filter and one with a stride of more than 1 among them.
    """

    matmuls: tuple[tuple[int, int, int], ...] = (
        (256, 1024, 1024),
        (2048, 512, 256),
        (32, 512, 2048),
    )
    convolutions: tuple[tuple[int, int, int, int, int], ...] = (
        (4, 32, 64, 32, 3),
        (8, 16, 256, 64, 1),
        (4, 8, 256, 128, 3),
    )
    elements: int = 1 << 19
    images: tuple[int, int, int] = (16, 32, 32)
    traffic: int = 1 << 22
    depthwise: tuple[tuple[int, int, int, int, int], ...] = (
        (8, 14, 128, 3, 1),
        (8, 14, 128, 7, 1),
        (8, 28, 128, 3, 2),
    )

    @staticmethod
    def of(device: str) -> Sizes:
        """Returns those for a kind of device: a GPU needs more work to be busy."""
        if device != "gpu":
            return Sizes()
        return Sizes(
            matmuls=((2048, 4096, 4096), (16384, 1024, 1024)),
            convolutions=((64, 56, 64, 64, 3), (64, 28, 512, 128, 1), (64, 14, 256, 256, 3)),
            elements=1 << 22,
            images=(64, 56, 64),
            traffic=1 << 25,
            depthwise=((64, 56, 128, 3, 1), (64, 14, 256, 7, 1), (64, 56, 128, 3, 2)),
        )


@dataclass(frozen=True, slots=True)
class Work:
    """One piece of work.

    Attributes:
        kind: A kind of a profile's peaks, one of `OPS`, or "traffic", "cast traffic", "short chain"
            or "long chain".
        amount: How much work it is: operations, elements, bytes or Casts.
        make: Makes tensors of a dtype, and returns what does the work on them.
        dtypes: The dtypes; for the first one there must be a kernel.
    """

    kind: str
    amount: float
    make: Callable[[str], Run]
    dtypes: tuple[str, ...] = DTYPES


def measure_profile(
    device: str = "auto", *, seconds: float = 2.0, sizes: Sizes | None = None
) -> MachineProfile:
    """Measures how fast this machine is in each dtype.

    It can be called anywhere: it runs in a thread of its own, where no function is being traced, no
    autocast, tape, device or distribution strategy is active and nothing is in the default graph.

    Args:
        device: "cpu", "gpu" for the first GPU, or "auto": the GPU if there is one.
        seconds: About how long to measure, on a machine with nothing else to do; up to three times
            as long on a busy one.
        sizes: What to time; `Sizes.of(device)` if None.

    Returns:
        The profile, every figure rounded to two digits: more would be noise. A dtype that is less
        than 10 % faster than float32 counts as equal, one that a kind of op has no kernel for as a
        thousand times slower. `least_gain` is that of the built-in profiles.

    Raises:
        ValueError: There is no such device, or `seconds` is not positive.
        tf.errors.OpError: It cannot be measured, for want of memory for instance.

    Example:
        >>> depthwise = ((1, 4, 2, 3, 1), (1, 4, 2, 5, 1), (1, 4, 2, 3, 2))
        >>> tiny = Sizes(((8, 8, 8),), ((1, 4, 2, 2, 3),), 64, (2, 4, 4), 64, depthwise)
        >>> measure_profile("cpu", seconds=0.01, sizes=tiny).peaks["matmul"]["float32"] > 1
        True
    """
    if device not in _KINDS_OF_DEVICES:
        raise ValueError(f"device must be one of {', '.join(_KINDS_OF_DEVICES)}; got {device!r}.")
    if not seconds > 0:
        raise ValueError(f"seconds must be a positive number; got {seconds!r}.")
    gpus = hardware.detect().gpus
    if device == "gpu" and not gpus:
        raise ValueError("device is 'gpu', but TensorFlow sees no GPU; 'cpu' can be measured.")
    kind = ("gpu" if gpus else "cpu") if device == "auto" else device
    return in_own_thread(lambda: _measure(kind, seconds, sizes or Sizes.of(kind)))


def _measure(device: str, seconds: float, sizes: Sizes) -> MachineProfile:
    let_memory_grow()
    asynchronous = device == "gpu" or not tf.config.experimental.get_synchronous_execution()
    with tf.device(f"{device.upper()}:0"), _nothing_placed_elsewhere():
        timers = _timed(works(sizes), together if asynchronous else _one_by_one, seconds)
    return _profile(device, timers)


@contextlib.contextmanager
def _nothing_placed_elsewhere() -> Iterator[None]:
    """What has no kernel on a device is an error, and does not run on the CPU in its place."""
    before = tf.config.get_soft_device_placement()
    tf.config.set_soft_device_placement(False)
    try:
        yield
    finally:
        tf.config.set_soft_device_placement(before)


def _timed(found: Iterable[Work], clock: Clock, seconds: float) -> list[_Timer]:
    """Times all by turns, a few times at least, for about that long."""
    start = time.perf_counter()
    timers = [_Timer(work, clock) for work in found]
    for number in itertools.count(1):
        better = [timer.time_once() for timer in timers]
        steady = sum(better) <= _FEW * len(timers)
        enough = time.perf_counter() - start >= seconds * (1.0 if steady else _LONGEST)
        if enough and number >= _LEAST_TURNS:
            break
    return timers


def _profile(device: str, timers: list[_Timer]) -> MachineProfile:
    by_kind: dict[str, list[_Timer]] = defaultdict(list)
    for timer in timers:
        by_kind[timer.work.kind].append(timer)
    (short,), (long,) = by_kind["short chain"], by_kind["long chain"]
    # A busy machine can make the long chain the faster one.
    overhead = (long.first - short.first) / long.work.amount
    found = hardware.detect()
    name = found.gpus[0].name if device == "gpu" else found.cpu_model or "CPU"
    usual = builtin_profile(device)
    return MachineProfile(
        name=f"{name}, measured with TensorFlow {tf.__version__}",
        peaks={kind: _peaks(by_kind[kind]) for kind in KINDS},
        bandwidth=_rate(by_kind["traffic"]),
        cast_bandwidth=_rate(by_kind["cast traffic"]),
        op_overhead=_rounded(overhead) if overhead > 0 else usual.op_overhead,
        least_gain=usual.least_gain,
        ops={op: _peaks(by_kind[op]) for op in OPS},
    )


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


# Runs something a number of times and returns the seconds of one run.
Clock = Callable[[Run, int], float]


class _Timer:
    """The best times of a piece of work, in each dtype that it has a kernel for."""

    def __init__(self, work: Work, clock: Clock) -> None:
        self.work, self._clock = work, clock
        self.best: dict[str, float] = {}
        self._times = 1
        # The first run also tells whether there is a kernel.
        for dtype in work.dtypes:
            try:
                self.best[dtype] = clock(work.make(dtype), 1)
            except NO_KERNEL_ERRORS:
                if dtype == work.dtypes[0]:
                    raise

    @property
    def first(self) -> float:
        """Best seconds in the first dtype: in float32, but for Casts to it."""
        return self.best[self.work.dtypes[0]]

    def time_once(self) -> bool:
        """Times it in each dtype, later not where it is slow anyway; tells what was improved."""
        improved = False
        for dtype, known in self.best.items():
            if known > _HOPELESS * self.first and self._times >= _HOPELESS_RUNS:
                continue
            repeats = min(math.ceil(_LEAST_SECONDS / max(known, 1e-9)), _MOST_REPEATS)
            self.best[dtype] = min(known, self._clock(self.work.make(dtype), repeats))
            improved |= self.best[dtype] < _IMPROVEMENT * known
        self._times += 1
        return improved


def _one_by_one(run: Run, repeats: int) -> float:
    """Seconds of the fastest run; for ops that are done when their call returns."""
    best = math.inf
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - start)
    return best


def together(run: Run, repeats: int) -> float:
    """Seconds of a run, of many that are started before the first one is waited for."""
    tf.test.experimental.sync_devices()
    start = time.perf_counter()
    for _ in range(repeats):
        run()
    tf.test.experimental.sync_devices()
    return (time.perf_counter() - start) / repeats


def float16_is_emulated(machine: hardware.Hardware) -> bool:
    """Whether float16 would run on a CPU that converts it to float32 and back at every op."""
    return not (machine.cpu_float16 or machine.gpus or machine.tpu)


def float16_warning() -> str | None:
    """What speaks against float16 on this machine, None if nothing does."""
    found = hardware.detect()
    if not float16_is_emulated(found):
        return None
    slowdown = float16_slowdown()
    if slowdown < _SLOWER:
        return None
    alternative = (
        'Use "bfloat16", which this CPU multiplies natively.'
        if found.cpu_bfloat16
        else "Use float32 here, and float16 on a GPU."
    )
    return (
        "This CPU has no float16 arithmetic: matmuls and convolutions with their gradients took "
        f"{slowdown:.1f} times as long in float16 as in float32, as just measured. {alternative}"
    )


@functools.lru_cache(maxsize=1)
def float16_slowdown() -> float:
    """Returns the time of small ops in float16 over float32's on this CPU; measured once."""
    return in_own_thread(_float16_slowdown)


def _float16_slowdown() -> float:
    works = (*_matmuls(256, 256, 256), *_convolution("Conv2D", [8, 16, 16], [3, 3, 16, 16]))
    in_both = [dataclasses.replace(work, dtypes=("float32", "float16")) for work in works]
    with tf.device("CPU:0"):
        timers = _timed(in_both, _one_by_one, seconds=0.0)
    return sum(each.best["float16"] for each in timers) / sum(each.first for each in timers)


def works(sizes: Sizes) -> Iterator[Work]:
    """Makes everything that is timed for a profile, on the device that is current."""
    for rows, depth, columns in sizes.matmuls:
        yield from _matmuls(rows, depth, columns)
    for batch, size, channels, filters, kernel in sizes.convolutions:
        weights = [kernel, kernel, channels, filters]
        yield from _convolution("Conv2D", [batch, size, size], weights)
    for batch, size, channels, kernel, stride in sizes.depthwise:
        weights = [kernel, kernel, channels, 1]
        name, places = "DepthwiseConv2dNative", [batch, size, size]
        yield from _convolution(name, places, weights, channels, stride)
    yield from _functions(sizes.elements)
    yield from _special(*sizes.images)
    yield from _traffic(sizes.traffic)
    yield from _chains()


def _matmuls(rows: int, depth: int, columns: int) -> Iterator[Work]:
    """A layer's product and those of its gradients, which are slower in float32."""
    x, w, y = (rows, depth), (depth, columns), (rows, columns)
    for make in (
        _run("MatMul", {"a": x, "b": w}),
        _run("MatMul", {"a": y, "b": w}, transpose_b=True),
        _run("MatMul", {"a": x, "b": y}, transpose_a=True),
    ):
        yield Work("matmul", 2.0 * rows * depth * columns, make)


def _convolution(
    op: str, places: list[int], weights: list[int], filters: int | None = None, stride: int = 1
) -> Iterator[Work]:
    """A convolution and its gradients by input and by filter."""
    made = [places[0], *(math.ceil(size / stride) for size in places[1:])]
    x, y = [*places, weights[2]], [*made, filters or weights[3]]
    by_input, by_filter = f"{op}BackpropInput", f"{op}BackpropFilter"
    options: dict[str, Any] = {"strides": [1, stride, stride, 1], "padding": "SAME"}
    forms = {by_input: STRIDED if stride > 1 else "", by_filter: WIDE if weights[0] > 3 else ""}
    for kind, name, shapes, sizes in (
        ("conv", op, {"input": x, "filter": weights}, {}),
        ("conv_input", by_input, {"filter": weights, "out_backprop": y}, {"input_sizes": x}),
        ("conv_filter", by_filter, {"input": x, "out_backprop": y}, {"filter_sizes": weights}),
    ):
        make = _run(name, shapes, **options, **sizes)
        own = f"{name} {forms.get(name, '')}".strip()
        kind = own if own in OPS else kind
        yield Work(kind, 2.0 * math.prod(made) * math.prod(weights), make)


def _run(
    op: str,
    shapes: Mapping[str, Sequence[int]],
    make_tensor: Callable[[Sequence[int], str], Any] = tf.ones,
    /,
    **options: Any,
) -> Callable[[str], Run]:
    """Runs an op on tensors, of shapes by the names of its inputs."""
    function = getattr(tf.raw_ops, op)

    def make(dtype: str) -> Run:
        tensors = {name: make_tensor(shape, dtype) for name, shape in shapes.items()}
        return lambda: function(**tensors, **options)

    return make


def _functions(elements: int) -> Iterator[Work]:
    columns = math.gcd(elements, 512)
    rows = [elements // columns, columns]
    for op in (*_ELEMENTWISE, *OPS):
        if op in _SUMS:
            yield Work(op, float(elements), _run(op, {"input": rows}, some_values, axis=1))
        elif "Conv" not in op:
            inputs = set(inspect.signature(getattr(tf.raw_ops, op)).parameters) - {"name"}
            make = _run(op, dict.fromkeys(inputs, [elements]), some_values)
            yield Work(op if op in OPS else "elementwise", float(elements), make)


def _special(batch: int, size: int, channels: int) -> Iterator[Work]:
    raw: Any = tf.raw_ops
    images, rows = [batch, size, size, channels], [batch * size, size * channels]
    pool = {"ksize": [1, 2, 2, 1], "strides": [1, 2, 2, 1], "padding": "SAME"}
    ones, nothing = tf.ones((channels,)), tf.zeros((0,))
    norm = {"scale": ones, "offset": ones, "mean": nothing, "variance": nothing}

    def pool_gradient(dtype: str) -> Run:
        x = some_values(images, dtype)
        y = raw.MaxPool(input=x, **pool)
        return lambda: raw.MaxPoolGrad(orig_input=x, orig_output=y, grad=y, **pool)

    def norm_gradient(dtype: str) -> Run:
        x = some_values(images, dtype)
        reserved = dict(zip(_RESERVED, raw.FusedBatchNormV3(x=x, **norm)[3:], strict=True))
        return lambda: raw.FusedBatchNormGradV3(y_backprop=x, x=x, scale=ones, **reserved)

    makers = (
        _run("Softmax", {"logits": rows}, some_values),
        _run("MaxPool", {"input": images}, some_values, **pool),
        pool_gradient,
        _run("FusedBatchNormV3", {"x": images}, some_values, **norm),
        norm_gradient,
    )
    for make in makers:
        yield Work("special", float(batch * size * size * channels), make)


def _traffic(elements: int) -> Iterator[Work]:
    # An Add reads two tensors and writes one.
    add = _run("AddV2", {"x": [elements], "y": [elements]})
    yield Work("traffic", 3.0 * 4 * elements, add, ("float32",))
    for low in (tf.bfloat16, tf.float16):
        for source, target in ((tf.float32, low), (low, tf.float32)):
            cast = _run("Cast", {"x": [elements]}, DstT=target)
            yield Work("cast traffic", 6.0 * elements, cast, (source.name,))


def _chains() -> Iterator[Work]:
    """Two chains of small Casts in traced functions: what the longer one takes more is overhead."""

    def chain(length: int) -> Callable[[str], Run]:
        def function(x: Any) -> Any:
            for _ in range(length):
                x = tf.raw_ops.Cast(x=tf.raw_ops.Cast(x=x, DstT=tf.bfloat16), DstT=tf.float32)
            return x

        @functools.cache
        def make(dtype: str) -> Run:
            # A concrete function runs as a graph also after tf.config.run_functions_eagerly(True).
            traced = tf.function(function, autograph=False)
            concrete = traced.get_concrete_function(tf.TensorSpec((8,), dtype))
            x = tf.ones((8,), dtype)
            return lambda: concrete(x)

        return make

    yield Work("short chain", 0.0, chain(1), ("float32",))
    yield Work("long chain", 2.0 * _CHAIN, chain(1 + _CHAIN), ("float32",))
