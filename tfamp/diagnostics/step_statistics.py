"""Counts gradient values by binary exponent on the device; reads histograms and records.

The counts stay on the device until a record is made, so that the host need not wait for each
step.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, TypeAlias

import numpy as np
import tensorflow as tf

from tfamp.core.kinds import Function, Tensor, Variable
from tfamp.interop import tf_private
from tfamp.training.gradients import outside_the_graph

# Exponents of float16's smallest subnormal, smallest normal and largest number.
SUBNORMAL, NORMAL, LARGEST = -24, -14, 15
FLOAT16_MAX = 65504.0
SHARES = ("under_2**-24", "under_2**-14", "over_65504")

# Columns of counts: one for each biased exponent of float32; then NaNs, values over either
# bound, and the bits of the largest finite value.
EXPONENTS, MANTISSA_BITS = 256, 23
_BIAS = 127
# Bits of the mantissa that divide the counts of an exponent on GPUs: additions to one number wait
# for one another. A choice, for 64 times as many numbers of 4 bytes.
_APART_BITS = 6
_NANS, _OVER, _OVER_SECOND, _LARGEST = range(EXPONENTS, EXPONENTS + 4)
COLUMNS = EXPONENTS + 4


# A record that `make_record` returns, or its part about a variable.
Record: TypeAlias = Mapping[str, Any]
# A step, its loss scale, and the number of steps skipped before.
PastStep: TypeAlias = tuple[int, float, int]


@dataclass(frozen=True, slots=True)
class Sample:
    """Counts of the values of several tensors at one step."""

    step: int  # From 1; 0 before the first.
    loss_scale: float
    divisor: float  # The tensors divided by it have no loss scale.
    counts: tuple[tuple[Sequence[int], ...], ...]  # For every tensor, a row for each replica.


class SampledCounts:
    """Variables with the counts of tensors at one step, separate for each replica."""

    def __init__(self, tensors: int) -> None:
        self._counts = _local_variable(np.zeros((tensors, COLUMNS), "int64"))
        # Step, loss scale and divisor.
        self._facts = _local_variable(np.array([0.0, 1.0, 1.0]))

    def write(self, wanted: Tensor, counts: Tensor, facts: Tensor) -> None:
        """Replaces the counts if `wanted`, a scalar bool tensor, is True."""
        self._counts.assign(tf.where(wanted, counts, self._counts))
        self._facts.assign(tf.where(wanted, facts, self._facts))

    def read(self) -> Sample:
        """Returns the sample; waits for the device."""
        replicas = _replicas(self._counts)
        step, loss_scale, divisor = _replicas(self._facts)[0].tolist()
        rows = range(len(replicas[0]))
        counts = tuple(tuple(replica[row].tolist() for replica in replicas) for row in rows)
        return Sample(int(step), loss_scale, divisor, counts)


class StepStatistics:
    """Counts steps, keeps their loss scales, and samples gradients of every `every`-th step.

    The loss scales of the last `remembered` steps are kept. `start` is the number of steps
    taken before, `skipped` the number of skipped ones among them.
    """

    def __init__(self, every: int, remembered: int, start: int, skipped: int) -> None:
        self._every = every
        self._remembered = remembered
        self._step = _local_variable(np.int64(start))
        # Number of a step, its loss scale, and the number of steps skipped before it. One
        # variable, as it is written at every step.
        self._past = _local_variable(np.zeros((remembered, 3)))
        # For optimizers that do not count skipped steps.
        self._skipped = _local_variable(np.int64(skipped))
        self._consecutive = _local_variable(np.int64(0))
        self._rows: dict[int, int] = {}
        self.variables: list[Variable] = []
        # Samples of the last step that was due, and of the last that was not finite.
        self.samples: list[SampledCounts] = []

    def _make_room(self, variables: Sequence[Variable]) -> None:
        self.variables = list(variables)
        self._rows = {id(variable): row for row, variable in enumerate(self.variables)}
        self.samples = [SampledCounts(len(self.variables)) for _ in range(2)]

    def set_step(self, step: Tensor) -> None:
        """Makes the next step the one with this number, counted from 1."""
        self._step.assign(tf.cast(step, tf.int64) - 1)

    def count_skip(self, finite: Tensor) -> Tensor:
        """Counts a step as skipped or not; returns the number of steps skipped before it."""
        before = tf.identity(self._skipped)
        skipped = tf.cast(tf.logical_not(finite), tf.int64)
        self._skipped.assign_add(skipped)
        self._consecutive.assign((self._consecutive + 1) * skipped)
        return before

    def observe(
        self,
        gradients: Sequence[Tensor],
        variables: Sequence[Variable],
        *,
        scale: Tensor,
        divisor: Tensor,
        skipped_before: Tensor,
        faulty: Tensor,
    ) -> None:
        """Counts a step, and samples its gradients if it is due or `faulty` (not all finite).

        Nothing here waits for the device. The gradients still have to be divided by `divisor`.
        All keyword arguments are scalars.
        """
        if not self.samples:
            outside_the_graph(lambda: self._make_room(variables))
        unknown = [variable for variable in variables if id(variable) not in self._rows]
        if unknown:
            raise ValueError(
                f"This monitor observes {len(self.variables)} other variables than the "
                f"{len(unknown)} given. Use one NumericsMonitor for each set of variables, or "
                "give all of them each time, with None for a missing gradient."
            )
        step = self._step + 1
        due = tf.equal(step % self._every, 0)
        scale, divisor = tf.cast(scale, tf.float64), tf.cast(divisor, tf.float64)
        places: np.ndarray = np.arange(self._remembered, dtype="int64")
        here = tf.equal(places, (step - 1) % self._remembered)
        now = tf.stack([tf.cast(step, tf.float64), scale, tf.cast(skipped_before, tf.float64)])
        self._past.assign(tf.where(here[:, None], now, self._past))

        def sample() -> None:
            bound = tf.cast(FLOAT16_MAX * divisor, tf.float32)
            scaled_bound = tf.cast(FLOAT16_MAX * divisor / scale, tf.float32)
            rows: list[Tensor] = [None] * len(self.variables)
            for gradient, variable in zip(gradients, variables, strict=True):
                # The "gradient" of such a variable is its next value, not a derivative.
                if not getattr(variable, "overwrite_with_gradient", False):
                    rows[self._rows[id(variable)]] = gradient
            counts = count_values(rows, bound, scaled_bound)
            facts = tf.stack([tf.cast(step, tf.float64), scale, divisor])
            for target, wanted in zip(self.samples, (due, faulty), strict=True):
                target.write(wanted, counts, facts)

        only_if(tf.logical_or(due, faulty), sample)
        self._step.assign(step)

    def step(self) -> int:
        """Returns the number of steps taken; waits for the device."""
        return int(_replicas(self._step)[0])

    def skips(self) -> tuple[int, int]:
        """Returns the steps counted as skipped, in all and in a row; waits for the device."""
        return int(_replicas(self._skipped)[0]), int(_replicas(self._consecutive)[0])

    def past(self, first: int, last: int) -> list[PastStep]:
        """Returns the remembered steps from `first` to `last`, at most the last taken.

        Steps that were not taken, as `set_step` skipped them, are left out.
        """
        rows = _replicas(self._past)[0]
        first = max(first, last - self._remembered + 1)
        steps = range(first, last + 1)
        places = ((step, rows[(step - 1) % self._remembered]) for step in steps)
        return [
            (step, float(scale), int(skipped))
            for step, (taken, scale, skipped) in places
            if taken == step
        ]


def count_values(tensors: Sequence[Tensor], bound: Tensor, second_bound: Tensor) -> Tensor:
    """Counts values of tensors by binary exponent, and those over two bounds, float32 scalars.

    Only the values of `tf.IndexedSlices` count, and None has none. The exponent is read from
    the bits. XLA can compile it. Values below float32's normal range, 2**-126, count as zero,
    as most ops of TensorFlow flush them.

    Returns:
        A row of int64 columns for each tensor, which `histogram` reads.
    """
    bounds = tf.cast(tf.stack([bound, second_bound]), tf.float32)
    nothing = tf.zeros((COLUMNS,), tf.int64)
    count = _counter(tf_private.op_determinism_is_enabled())

    def row(tensor: Tensor) -> Tensor:
        if tensor is None:
            return nothing
        values = tensor.values if isinstance(tensor, tf.IndexedSlices) else tensor
        return count(_as_float32(values), bounds)

    return tf.stack([row(tensor) for tensor in tensors])


@functools.cache
def _counter(deterministic: bool) -> Function:
    """Returns the function for a tensor: one trace for all, in a graph a node for each."""
    counts = _deterministic_counts if deterministic else _counts
    return tf.function(
        functools.partial(_counted, counts),
        input_signature=[tf.TensorSpec(None, tf.float32), tf.TensorSpec([2], tf.float32)],
        autograph=False,
        experimental_attributes={"_noinline": True},
    )


def _counted(counts_of: Callable[[Tensor], Tensor], values: Tensor, bounds: Tensor) -> Tensor:
    """Returns the row of a tensor.

    Sums are int64: TensorFlow computes int32 sums on the host, wherever the tensors are.
    """
    sizes = tf.abs(tf.reshape(values, (-1,)))
    counts = counts_of(tf.bitcast(sizes, tf.uint32))
    masks = [tf.math.is_nan(sizes), *(sizes > bound for bound in tf.unstack(bounds))]
    numbers = [tf.reduce_sum(tf.cast(mask, tf.int64)) for mask in masks]
    finite = tf.where(tf.math.is_finite(sizes), sizes, 0.0)
    largest = tf.maximum(tf.reduce_max(finite), 0.0)  # The maximum of an empty tensor is -inf.
    largest_bits = tf.cast(tf.bitcast(largest, tf.uint32), tf.int64)
    return tf.concat([tf.cast(counts, tf.int64), tf.stack([*numbers, largest_bits])], 0)


def _counts(bits: Tensor) -> Tensor:
    """Returns how many of the bit patterns have each exponent."""
    exponents = tf.bitwise.right_shift(bits, np.uint32(MANTISSA_BITS))
    return tf.raw_ops.DenseBincount(
        input=tf.bitcast(exponents, tf.int32),
        size=EXPONENTS,
        weights=tf.zeros((0,), tf.int32),
        binary_output=False,
    )


def _deterministic_counts(bits: Tensor) -> Tensor:
    """The same by sums of integers: under determinism GPUs reject DenseBincount, the faster op.

    GPUs add up atomically: apart by leading bits of the mantissa, additions wait less.
    """
    leading = np.uint32(MANTISSA_BITS - _APART_BITS)
    rows = tf.bitcast(tf.bitwise.right_shift(bits, leading), tf.int32)
    # Cast, as TensorFlow makes int32 ones on the host.
    ones = tf.cast(tf.ones_like(bits, tf.float32), tf.int32)
    apart = tf.math.unsorted_segment_sum(ones, rows, EXPONENTS << _APART_BITS)
    return tf.reduce_sum(tf.reshape(tf.cast(apart, tf.int64), (EXPONENTS, -1)), 1)


def _as_float32(values: Tensor) -> Tensor:
    if values.dtype != tf.float64:
        return tf.cast(values, tf.float32)
    # Values out of float32's range count as its largest or its smallest normal number.
    limits = tf.float32.max, tf.constant(2.0**-126, tf.float64)
    held = tf.clip_by_value(tf.abs(values), limits[1], limits[0])
    inside = tf.math.is_finite(values) & tf.not_equal(values, 0.0)
    return tf.cast(tf.where(inside, held, values), tf.float32)


def only_if(wanted: Tensor, work: Callable[[], None]) -> None:
    """Does some work if a scalar bool tensor is True; otherwise it costs almost nothing.

    The work is traced again at each call: each replica of a strategy has its own variables.
    """
    if not tf.executing_eagerly():
        # One node in the branch: otherwise TensorFlow would lower the branch into the graph
        # around it, and propagate a dead tensor to each of its nodes at every step.
        work = tf.function(work, autograph=False, experimental_attributes={"_noinline": True})

    def branch() -> None:
        work()

    tf.cond(wanted, branch, lambda: None)


def _local_variable(value: np.ndarray) -> tf.Variable:
    # Under a strategy every replica writes its own copy and nothing is communicated.
    return tf.Variable(
        value,
        trainable=False,
        synchronization=tf.VariableSynchronization.ON_READ,
        aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA,
    )


def _replicas(variable: Variable) -> list[np.ndarray]:
    strategy = getattr(variable, "distribute_strategy", None)
    if strategy is None:
        return [variable.numpy()]
    return [replica.numpy() for replica in strategy.experimental_local_results(variable)]


# ---- Histograms ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ExponentHistogram:
    """Numbers of a tensor's values by binary exponent.

    For each exponent e the number of finite values with 2**e <= |value| < 2**(e + 1); numbers
    of zeros, infs of either sign, NaNs, and values over 65504, infs included. `largest` is the
    largest finite absolute value, or 0.
    """

    counts: Mapping[int, int] = field(default_factory=dict)
    zeros: int = 0
    infs: int = 0
    nans: int = 0
    over: int = 0
    largest: float = 0.0

    @property
    def nonfinite(self) -> int:
        """Number of infs and NaNs."""
        return self.infs + self.nans

    @property
    def values(self) -> int:
        """Number of all values."""
        return sum(self.counts.values()) + self.zeros + self.nonfinite

    def shares(self) -> dict[str, float]:
        """Returns the shares that float16 loses of the values that are neither zero nor NaN."""
        total = max(sum(self.counts.values()) + self.infs, 1)
        under = (
            sum(number for e, number in self.counts.items() if e < limit)
            for limit in (SUBNORMAL, NORMAL)
        )
        parts = (*under, self.over)
        return {name: part / total for name, part in zip(SHARES, parts, strict=True)}

    def shifted(self, exponent: int, over: int) -> ExponentHistogram:
        """Returns the histogram of the values times 2**exponent; `over` of these exceed 65504."""
        counts = {e + exponent: number for e, number in self.counts.items()}
        largest = self.largest * 2.0**exponent
        return ExponentHistogram(counts, self.zeros, self.infs, self.nans, over, largest)

    def to_dict(self) -> dict[str, Any]:
        """Returns a monitor's record of one tensor, without the shares."""
        values = self.values
        return {
            "values": values,
            "zeros": self.zeros / values if values else 0.0,
            "nonfinite": self.nonfinite,
            "largest": self.largest,
            "exponents": dict(sorted(self.counts.items())),
        }


def total(histograms: Iterable[ExponentHistogram]) -> ExponentHistogram:
    """Returns the histogram of all values of several tensors together."""
    listed = list(histograms)
    counts = sum((Counter(part.counts) for part in listed), Counter())
    names = ("zeros", "infs", "nans", "over")
    sums = {name: sum(getattr(part, name) for part in listed) for name in names}
    largest = max((part.largest for part in listed), default=0.0)
    return ExponentHistogram(dict(counts), **sums, largest=largest)


def suggested_scale(unscaled: ExponentHistogram) -> float | None:
    """Returns the loss scale with the most unscaled values in float16's normal range.

    It is a power of two with which no value exceeds 65504; of several with as many values of
    2**-14 or more the one in the middle, with equal margins. None without a finite nonzero
    value.
    """
    if not unscaled.counts or not unscaled.largest:
        return None
    top = LARGEST - max(unscaled.counts)
    if unscaled.largest * 2.0**top > FLOAT16_MAX:
        top -= 1
    # Below this no value is in the normal range.
    bottom = NORMAL - max(unscaled.counts)
    shifts = range(min(bottom, top), top + 1)

    def in_normal_range(shift: int) -> int:
        return sum(number for e, number in unscaled.counts.items() if e + shift >= NORMAL)

    in_range = {shift: in_normal_range(shift) for shift in shifts}
    most = max(in_range.values())
    best = [shift for shift in shifts if in_range[shift] == most]
    return 2.0 ** best[len(best) // 2]


def histogram(rows: Sequence[Sequence[int]], scale: float) -> tuple[ExponentHistogram, int]:
    """Returns the histogram of values over `scale`, and the number over the second bound.

    `rows` are the counts of each replica. Other scales than powers of two are rounded down to
    one.
    """
    columns = [sum(int(row[i]) for row in rows) for i in range(_LARGEST)]
    counts = {i - _BIAS: n for i, n in enumerate(columns[:EXPONENTS]) if n}
    # Zeros have the exponent bits of subnormal numbers, and NaNs have the bits of infs.
    zeros, nans = counts.pop(-_BIAS, 0), columns[_NANS]
    infs = counts.pop(EXPONENTS - 1 - _BIAS, 0) - nans
    bits = max(int(row[_LARGEST]) for row in rows)  # In the order of the values.
    largest = float(np.uint32(bits).view(np.float32)) if bits >> MANTISSA_BITS else 0.0
    seen = ExponentHistogram(counts, zeros, infs, nans, columns[_OVER], largest)
    return seen.shifted(-math.frexp(scale)[1] + 1, seen.over), columns[_OVER_SECOND]


# ---- Records -------------------------------------------------------------------------------------


def make_record(
    sample: Sample, names: Sequence[str], past: Sequence[PastStep], skips: Sequence[int]
) -> dict[str, Any]:
    """Returns the record of a sample of gradients, as `NumericsMonitor` describes it.

    `names` are the variables', in the sample's order; `past` has the steps since the last
    record, `skips` the numbers of skipped steps, in all and in a row.
    """
    # A scale that is not a power of two is rounded down to one.
    exponent = math.frexp(sample.loss_scale)[1] - 1
    unscaled, scaled = {}, {}
    for name, rows in zip(names, sample.counts, strict=True):
        unscaled[name], over = histogram(rows, sample.divisor)
        scaled[name] = unscaled[name].shifted(exponent, over)
    everything = total(unscaled.values()), total(scaled.values())
    bad = [name for name, described in unscaled.items() if described.nonfinite]
    return {
        "step": sample.step,
        "loss_scale": sample.loss_scale,
        "suggested_scale": suggested_scale(everything[0]),
        "skipped_steps": skips[0],
        "consecutive_skipped_steps": skips[1],
        "loss_scales": _changes(past),
        "skipped": _skipped(past, skips[0]),
        "first_nonfinite": bad[0] if bad else None,
        "gradients": _described(*everything),
        "variables": {name: _described(unscaled[name], scaled[name]) for name in names},
    }


def _described(unscaled: ExponentHistogram, scaled: ExponentHistogram) -> dict[str, Any]:
    return {**unscaled.to_dict(), **scaled.shares(), "unscaled": unscaled.shares()}


def _changes(past: Sequence[PastStep]) -> list[list[float]]:
    """Pairs of the step at which the loss scale changed, and the scale from it on."""
    groups = groupby(past, key=lambda taken: taken[1])
    return [list(next(group)[:2]) for _, group in groups]


def _skipped(past: Sequence[PastStep], skipped: int) -> list[int]:
    after = [before for _, _, before in past[1:]] + [skipped]
    pairs = zip(past, after, strict=False)
    return [step for (step, _, before), then in pairs if then > before]
