"""Measures a machine profile in about three seconds.

Everything is timed by turns, round after round: all kinds of work in all dtypes. What else the
machine does then slows all of them, and the best of the rounds is taken.
"""

from __future__ import annotations

import itertools
import math
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import tensorflow as tf

from tfamp.core.profile import DTYPES, KINDS, MachineProfile, builtin_profile
from tfamp.machine import hardware
from tfamp.machine.profile_works import OPS, Run, Sizes, Work, works

# What a kind of op reaches in a dtype that it has no kernel for, in parts of float32's peak.
NO_KERNEL = 1e-3
_KINDS_OF_DEVICES = ("auto", "cpu", "gpu")
# Short works are repeated for this long in a round.
_LEAST_SECONDS = 3e-3
_MOST_REPEATS = 30
_LEAST_ROUNDS = 3
# A round that makes more than a few of the best times better by this much shows a busy machine:
# there it takes longer.
_IMPROVEMENT = 0.9
_FEW = 0.1
_LONGEST = 3.0
# Speeds closer than this cannot be told from equal ones in a few seconds; see `_believed`.
_NOISE = 1.1
# From this many times float32's time on the ratio need not be precise: timed this often only. Once
# would not do, as the machine may have been busy just then.
_HOPELESS = 4.0
_HOPELESS_RUNS = 2
# How TensorFlow says that there is no kernel, or none for this dtype on this device.
_NO_KERNEL_ERRORS = (
    tf.errors.InvalidArgumentError,
    tf.errors.NotFoundError,
    tf.errors.UnimplementedError,
    tf.errors.InternalError,
    tf.errors.UnknownError,
)


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
        >>> tiny = Sizes(((8, 8, 8),), ((1, 4, 2, 2, 3),), 64, (2, 4, 4), 64, ((1, 4, 2, 3),))
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
    return _in_own_thread(lambda: _measure(kind, seconds, sizes or Sizes.of(kind)))


def _in_own_thread(measure: Callable[[], MachineProfile]) -> MachineProfile:
    """Runs it where none of TensorFlow's and tfamp's per-thread state is: scopes, graphs, modes."""
    results: list[MachineProfile] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(measure())
        except BaseException as error:  # noqa: BLE001  # raised again where it was asked for
            errors.append(error)

    thread = threading.Thread(target=run, name="tfamp machine profile", daemon=True)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


def _measure(device: str, seconds: float, sizes: Sizes) -> MachineProfile:
    start = time.perf_counter()
    clock = _together if _is_asynchronous(device) else _one_by_one
    with tf.device(f"{device.upper()}:0"):
        timers = [_Timer(work) for work in works(sizes)]
        for timer in timers:
            timer.warm_up(clock)
        for number in itertools.count(1):
            better = [timer.time_once(clock) for timer in timers]
            elapsed = time.perf_counter() - start
            steady = sum(better) <= _FEW * len(timers)
            enough = elapsed >= seconds if steady else elapsed >= _LONGEST * seconds
            if enough and number >= _LEAST_ROUNDS:
                break
    return _profile(device, timers)


def _profile(device: str, timers: list[_Timer]) -> MachineProfile:
    def total(kind: str) -> float:
        return sum(each.first for each in timers if each.work.kind == kind)

    def amount(kind: str) -> float:
        return sum(each.work.amount for each in timers if each.work.kind == kind)

    found = hardware.detect()
    name = found.gpus[0].name if device == "gpu" else found.cpu_model or "CPU"
    # A busy machine can make the long chain the faster one.
    overhead = (total("long chain") - total("short chain")) / amount("long chain")
    usual = builtin_profile(device)
    return MachineProfile(
        name=f"{name}, measured with TensorFlow {tf.__version__}",
        peaks={kind: _peaks([each for each in timers if each.work.kind == kind]) for kind in KINDS},
        bandwidth=_rounded(amount("traffic") / total("traffic")),
        cast_bandwidth=_rounded(amount("cast traffic") / total("cast traffic")),
        op_overhead=_rounded(overhead) if overhead > 0 else usual.op_overhead,
        least_gain=usual.least_gain,
        ops={op: _peaks([each for each in timers if each.work.kind == op]) for op in OPS},
    )


def _peaks(timers: list[_Timer]) -> dict[str, float]:
    """Work per second by dtype; ratios to float32 are means over the works that have a kernel."""
    float32 = statistics.geometric_mean(each.work.amount / each.first for each in timers)
    peaks = {}
    for dtype in DTYPES:
        ratios = [each.first / each.best[dtype] for each in timers if dtype in each.best]
        ratio = statistics.geometric_mean(ratios) if ratios else NO_KERNEL
        peaks[dtype] = _rounded(float32 * _believed(ratio))
    return peaks


def _believed(ratio: float) -> float:
    """Counts a dtype that is hardly faster than float32 as equal, so that noise lowers nothing."""
    return 1.0 if 1.0 < ratio < _NOISE else ratio


def _rounded(value: float) -> float:
    return float(f"{value:.1e}")


# Runs something a number of times and returns the seconds of one run.
Clock = Callable[[Run, int], float]


@dataclass(slots=True)
class _Timer:
    """The best times of a piece of work, in each dtype that it has a kernel for.

    Attributes:
        work: The work.
        runs: What to run, by dtype.
        repeats: How often to run it for one time, by dtype.
        times: How often it was timed, by dtype.
        best: Seconds, by dtype.
    """

    work: Work
    runs: dict[str, Run] = field(default_factory=dict)
    repeats: dict[str, int] = field(default_factory=dict)
    times: dict[str, int] = field(default_factory=dict)
    best: dict[str, float] = field(default_factory=dict)

    @property
    def first(self) -> float:
        """Best seconds in the first dtype: in float32, but for Casts to it."""
        return self.best[self.work.dtypes[0]]

    def warm_up(self, clock: Clock) -> None:
        """Makes the work and runs it once, which also tells whether there is a kernel."""
        for dtype in self.work.dtypes:
            try:
                run = self.work.make(dtype)
                seconds = clock(run, 1)
            except _NO_KERNEL_ERRORS:
                if dtype == self.work.dtypes[0]:
                    raise
                continue
            self.runs[dtype] = run
            self.best[dtype], self.repeats[dtype], self.times[dtype] = seconds, 1, 1

    def time_once(self, clock: Clock) -> bool:
        """Times it in each dtype, later not where it is slow anyway; tells what was improved."""
        improved = False
        for dtype, run in self.runs.items():
            known = self.best[dtype]
            hopeless = known > _HOPELESS * self.first
            if hopeless and self.times[dtype] >= _HOPELESS_RUNS:
                continue
            best = self.best[dtype] = min(known, clock(run, self.repeats[dtype]))
            self.times[dtype] += 1
            repeats = math.ceil(_LEAST_SECONDS / max(best, 1e-9))
            self.repeats[dtype] = min(repeats, _MOST_REPEATS)
            improved |= best < _IMPROVEMENT * known
        return improved


def _is_asynchronous(device: str) -> bool:
    return device == "gpu" or not tf.config.experimental.get_synchronous_execution()


def _one_by_one(run: Run, repeats: int) -> float:
    """Seconds of the fastest run; for ops that are done when their call returns."""
    best = math.inf
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - start)
    return best


def _together(run: Run, repeats: int) -> float:
    """Seconds of a run, of many that are started before the first one is waited for."""
    tf.test.experimental.sync_devices()
    start = time.perf_counter()
    for _ in range(repeats):
        run()
    tf.test.experimental.sync_devices()
    return (time.perf_counter() - start) / repeats
