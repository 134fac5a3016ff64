"""Alternating runs of candidates of a function, each from the same state, and the choice.

Every run starts from the same state, which is restored at the end, also after an error.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import sys
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType

import keras
import numpy as np
import tensorflow as tf

from tfamp.core.errors import RewriteError
from tfamp.core.kinds import Function, Handle, Nest, Tensor, Trace
from tfamp.core.options import checked_count, checked_number
from tfamp.graph.observe import held_variables, put_back
from tfamp.graph.passes.fusion import has_fused
from tfamp.interop.tf_private import device_scope
from tfamp.machine.profile_measure import together
from tfamp.planning.measured_choice import fastest, noise_of
from tfamp.planning.structures import FLOAT32, RewritePlan
from tfamp.planning.ways import AS_IT_IS, FUSED, Way, why_not_worth_it
from tfamp.rewriting import function_state
from tfamp.rewriting.choice_cache import Choice
from tfamp.rewriting.function import RewrittenFunction
from tfamp.rewriting.traced_function import TracedFunction
from tfamp.rewriting.tune_report import TuneRow, is_within

# Ends of a measurement: choices, for medians and quartiles of a few times, and a wait that a user
# accepts.
ROUNDS, SECONDS = 10, 10.0
# Rounds after the second are for candidates within the second factor of the fastest, and later
# ones for those not slower in three quarters of the rounds; the first factor holds where only one
# run of each is known. Choices: wide there, and twice the 8 % by which medians vary on a machine
# that is not idle. With them tune takes about three first calls.
_FAR, _CLOSE, _CLOSE_ROUNDS = 1.5, 1.15, 4
# A round whose successor takes less than this share of its time warmed up and does not count: an
# H100 took 2.3 s for the second call of a step, which then takes milliseconds. Noise is smaller.
_WARM = 2 / 3
# A candidate may always compile this many seconds longer than float32: short steps compile
# fast.
_LEAST_LIMIT = 1.0
# After so many times float32's first two calls no round begins, unless float32 may be the
# fastest: all of tune is to take at most three first calls.
_MOST_STARTS = 2.5
# Short calls are repeated for this long in each round: a clock and a Python call take
# microseconds.
_LEAST_SECONDS = 3e-3
# At most so many, a choice: the state is not restored between them, and a train step moves
# on.
_MOST_REPEATS = 30
# The op of BatchNormalization layers in traces to rewrite; Keras has other ops in float32.
_NORMALIZES = "FusedBatchNormV3"


@dataclass(frozen=True)
class MeasuringLimits:
    """Bounds of a measurement; raises a TypeError or ValueError for a wrong one.

    Attributes:
        max_error: Largest error of a candidate to be chosen; None for any that is finite.
        rounds: Largest number of times that a candidate is timed.
        seconds: After so many no round begins, except the first ones.
    """

    max_error: float | None = None
    rounds: int = ROUNDS
    seconds: float = SECONDS

    def __post_init__(self) -> None:
        if self.max_error is not None:
            error = checked_number("max_error", self.max_error, low=0.0, high=math.inf)
            object.__setattr__(self, "max_error", error)
        object.__setattr__(self, "rounds", checked_count("rounds", self.rounds))
        seconds = checked_number("seconds", self.seconds, low=0.0, high=math.inf)
        object.__setattr__(self, "seconds", seconds)


@dataclass(frozen=True)
class Candidate:
    """A function that runs in one way.

    Attributes:
        way: The way.
        function: A `tf.function` for tuning alone.
        best: The function to use afterwards, if it is not `function`.
        key: Its options, as a text that is the same in every process.
        device: Kind of the device, for a way that is left out where it is not worth it; "" for
            one that the user asked for.
    """

    way: Way
    function: Function
    best: Function = None
    key: str = ""
    device: str = ""

    @property
    def name(self) -> str:
        """Its name in the report."""
        return self.way.name


# ---- Runs ----------------------------------------------------------------------------------------


@dataclass(eq=False)
class Run:
    """A graph while it is measured: its trace, a call, the error and a time for each round.

    `key` is equal for equal graphs, and `names` are the candidates with this graph. `first` is
    the time of its trace and its first call in seconds. `why_not` is why it cannot be timed.
    """

    key: Hashable
    trace: Trace
    call: Callable[[], Nest]
    low_nodes: int
    names: list[str]
    way: Way
    why_not: str = ""
    error: float = math.nan
    was_called: bool = False
    first: float = 0.0
    repeats: int = 0
    times: list[float] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """The median of the times."""
        return float(np.median(self.times))

    @property
    def was_warming_up(self) -> bool:
        """Whether the second time is so much shorter that the first one does not count."""
        return self.times[1] < _WARM * self.times[0]

    def forget_first_round(self) -> None:
        """Drops the first time; the number of calls in a round is found again."""
        self.repeats = 0
        if len(self.times) > 1:
            del self.times[0]

    def is_faster_than(self, other: Run) -> bool:
        """Whether it took less time in three quarters of the common rounds: noise does in half.

        Times of the same round are compared, as a slow phase of the machine slows both.
        """
        ratios = [mine / theirs for mine, theirs in zip(self.times, other.times, strict=False)]
        return bool(np.percentile(ratios, 75) < 1.0)

    def rows(self, is_chosen: bool) -> Iterator[TuneRow]:
        """Yields a row for each candidate with this graph."""
        first, *others = self.names
        quartiles = (float(np.percentile(self.times, 25)), float(np.percentile(self.times, 75)))
        row = TuneRow(first, self.seconds, quartiles, self.error, is_chosen, self.low_nodes)
        yield row
        for name in others:
            yield dataclasses.replace(row, candidate=name, chosen=False, same_as=first)


class State:
    """State that runs change: random states and variables of graphs, each noted once."""

    def __init__(self, args: Sequence[Nest], restore_randoms: Callable[[], None]) -> None:
        self._args, self._restore_randoms = args, restore_randoms
        self._known: dict[int, Handle] = {}
        self._held: list[tuple[Handle, Tensor]] = []

    def note(self, trace: Trace) -> None:
        """Notes the values of a trace's variables, before its first call."""
        variables = function_state.variables_of([trace], self._args)
        handles = {id(handle): handle for handle in variables}
        new = [handle for key, handle in handles.items() if key not in self._known]
        self._held += held_variables(new)
        self._known |= handles

    def restore(self) -> None:
        """Restores all that was noted."""
        put_back(self._held)
        self._restore_randoms()


def measured(
    candidates: Sequence[Candidate],
    args: Sequence[Nest],
    state: State,
    limits: MeasuringLimits,
    begin: float,
    incumbent: Way = AS_IT_IS,
) -> tuple[list[Run], dict[str, str]]:
    """Traces candidates and times their runs, since a time; restores the state.

    The first calls, which compile for seconds, are made in a thread, while this one traces.
    Returns the runs, and a reason for each candidate that was left out.
    """
    left_out: dict[str, str] = {}
    bar = keras.utils.Progbar(None, verbose=int(sys.stdout.isatty()), unit_name="run")
    device = device_scope()
    thread, calls, runs = ThreadPoolExecutor(1), list[Future[None]](), list[Run]()
    references: list[Tensor] = []
    timings = 0

    def call_first(run: Run) -> None:
        with tf.device(device):
            state.restore()
            state.note(run.trace)
            called = time.monotonic()
            spent = sum(each.first for each in runs if each.way.is_compiled and each.was_called)
            if run.way.is_compiled and run.way != incumbent and spent > limits.seconds:
                run.why_not = (
                    f"others that XLA compiles took {spent:.1f} s, longer than "
                    f"seconds={limits.seconds:g}"
                )
                return
            try:
                outputs = _float_tensors(run.trace(*args))
            except tf.errors.OpError as error:
                # An error of the function's own was raised by the call in float32, too.
                if not run.way.is_compiled:
                    raise
                run.why_not = f"XLA cannot compile it: {_first_line(error)}"
                return
            run.first += time.monotonic() - called
            references.extend(outputs if run is runs[0] else ())
            run.error, run.was_called = output_error(outputs, references), True
            bar.add(1)

    def graphs() -> Iterator[Run]:
        ordered = sorted(candidates, key=lambda each: _turn(each.way, incumbent))
        return _graphs(ordered, args, begin, limits, left_out, lambda: wait(calls))

    try:
        for run in graphs():
            runs.append(run)
            calls.append(thread.submit(call_first, run))
        for call in calls:  # float32's first: an error of the function's is raised by it.
            call.result()
        left_out |= {name: run.why_not for run in runs if run.why_not for name in run.names}
        runs = [run for run in runs if not run.why_not]
        order = [candidate.name for candidate in candidates]
        runs.sort(key=lambda run: order.index(run.names[0]))
        with tf.init_scope():  # A tape around it must not record the runs.
            for run in itertools.chain.from_iterable(_rounds(runs, begin, limits, incumbent)):
                state.restore()
                _time(run, state.restore)
                timings += 1
                bar.add(1)
    finally:
        thread.shutdown(cancel_futures=True)
        state.restore()
    bar.update(len(runs) + timings, finalize=True)
    return runs, left_out


def _turn(way: Way, incumbent: Way) -> tuple[bool, ...]:
    """Sorts ways: float32's, then what compiles longest, of that the incumbent first."""
    return way != AS_IT_IS, not way.is_compiled, way != incumbent, way.placement != FUSED


def _graphs(
    candidates: Sequence[Candidate],
    args: Sequence[Nest],
    start: float,
    limits: MeasuringLimits,
    left_out: dict[str, str],
    settle: Callable[[], object],
) -> Iterator[Run]:
    """Yields each graph once, traced since a time; adds reasons for those that are left out.

    `settle` waits for the runs of the graphs before.
    """
    runs: list[Run] = []
    for candidate in candidates:
        if runs and candidate.device:
            ops = function_state.op_counts(runs[0].trace)
            narrow = function_state.convolutions_along_one_axis(runs[0].trace)
            why_not = why_not_worth_it(candidate.way, candidate.device, ops, limits.seconds, narrow)
            if why_not:
                left_out[candidate.name] = why_not
                continue
        if candidates[0].function.settings.calibration:  # The plan needs runs of the function.
            settle()
        plan = _shared_plan_of(candidate)
        key: Hashable = candidate.name
        if plan is not None:
            way = candidate.way
            key = plan.retypes, plan.casts, way.placement == FUSED, way.is_compiled
        same = next((run for run in runs if run.key == key), None)
        if same is not None:
            same.names.append(candidate.name)
            continue
        if plan is None:  # A trace may run Python code that uses random numbers.
            settle()
        if (run := _traced(candidate, args, key)) is None:
            left_out[candidate.name] = "it has no ops that XLA would fuse"
            continue
        run.first, start = time.monotonic() - start, time.monotonic()
        runs.append(run)
        yield run


def _time(run: Run, restore: Callable[[], None]) -> None:
    seconds = together(run.call, max(run.repeats, 1))
    if not run.repeats:
        run.repeats = min(math.ceil(_LEAST_SECONDS / max(seconds, 1e-9)), _MOST_REPEATS)
        if run.repeats > 1:
            restore()
            seconds = together(run.call, run.repeats)
    run.times.append(seconds)


def _shared_plan_of(candidate: Candidate) -> RewritePlan | None:
    """The plan of a candidate whose trace is shared; others are traced by themselves."""
    if isinstance(candidate.function, RewrittenFunction):
        with contextlib.suppress(RewriteError):
            return candidate.function.shared_plan()
    return None


def _traced(candidate: Candidate, args: Sequence[Nest], key: Hashable) -> Run | None:
    """Traces a candidate; None if XLA has nothing to compile: it equals "min_cut"."""
    function, low_nodes = candidate.function, 0
    trace = function.get_concrete_function(*args)
    if candidate.way.placement == FLOAT32 and _NORMALIZES in function_state.ops_of(trace):
        function = TracedFunction.of(function.written).unchanged()
        trace = function.get_concrete_function(*args)
    if candidate.way.placement == FUSED and not has_fused(trace.graph):
        return None
    # float32 has no plan, nor a function that could not be rewritten.
    with contextlib.suppress(AttributeError, RewriteError):
        low_nodes = function.plan(*args).summary.low_nodes
    call, names = partial(function, *args), [candidate.name]
    return Run(key, trace, call, low_nodes, names, candidate.way)


def _first_line(error: tf.errors.OpError) -> str:
    """The first line of an error's text that says something, without a period at its end."""
    lines = (line.strip() for line in error.message.splitlines())
    return next((line.rstrip(".") for line in lines if line), type(error).__name__)


def _rounds(
    runs: Sequence[Run], begin: float, limits: MeasuringLimits, incumbent: Way
) -> Iterator[Sequence[Run]]:
    """Yields the runs of each round: twice all, then those that may still be the fastest."""
    usual = next((run for run in runs if incumbent.name in run.names), runs[0])
    # The usual way compiles for as long without tune.
    longest_first_call = max(runs[0].first, usual.first) + max(limits.seconds, _LEAST_LIMIT)
    timed = [run for run in runs if run.first <= longest_first_call]
    float32, number = timed[0], 0  # Of rounds that count.
    for _ in range(limits.rounds):
        candidates = timed
        if number:
            end = min(limits.seconds, _MOST_STARTS * (float32.first + float32.seconds))
            is_late = time.monotonic() - begin > end
            if number > 1 or is_late:
                candidates = _still_open(timed, number, limits.max_error)
            if len(candidates) == 1 or (is_late and (number > 1 or usual not in candidates)):
                return
        yield candidates
        number += 1
        if number == 2 and any(run.was_warming_up for run in candidates):
            for run in timed:
                run.forget_first_round()
            number = 1


def _still_open(runs: Sequence[Run], number: int, max_error: float | None) -> list[Run]:
    """The runs that may still be the fastest: float32's, and exact ones near it."""
    allowed = [run for run in runs if run is runs[0] or is_within(run.error, max_error)]
    fastest = min(allowed, key=lambda run: run.seconds)
    longest = (_FAR if number == 1 else _CLOSE) * fastest.seconds
    near = [run for run in allowed if run.seconds < longest]
    if number < _CLOSE_ROUNDS:
        return near
    return [run for run in near if not fastest.is_faster_than(run)]


def choice_of(
    runs: Sequence[Run],
    max_error: float | None,
    left_out: Mapping[str, str] = MappingProxyType({}),
    incumbent: Way = AS_IT_IS,
) -> Choice:
    """Returns the incumbent, or a run that is exact enough and faster by more than the noise.

    Where the incumbent was not timed or is not exact enough, it is float32.
    """
    timed = [run for run in runs if run.times]
    allowed = [run for run in timed if run is runs[0] or is_within(run.error, max_error)]
    first = next((run for run in allowed if incumbent.name in run.names), runs[0])
    times = {run.names[0]: run.times for run in allowed}
    noise = noise_of(times, first.names[0])
    name = fastest(times, first.names[0], noise)
    (chosen,) = (run for run in allowed if run.names[0] == name)
    rows = tuple(row for run in timed for row in run.rows(run is chosen))
    dropped = tuple(name for run in runs if not run.times for name in run.names)
    unseeded = function_state.unseeded_ops([run.trace for run in timed])
    rounds = max(len(run.times) for run in timed)
    reasons = tuple(f"{name}: {reason}" for name, reason in left_out.items())
    incumbent_name = incumbent.name if incumbent.name in first.names else FLOAT32
    compiled = [run.trace for run in timed if run.way.is_compiled]
    redrawn = function_state.drawing_ops(compiled)
    return Choice(rows, rounds, dropped, unseeded, reasons, incumbent_name, noise, redrawn)


# ---- Errors --------------------------------------------------------------------------------------


def output_error(values: Sequence[Tensor], references: Sequence[Tensor]) -> float:
    """Returns the largest relative error of some tensors; NaN if one is unknown."""
    pairs = zip(values, references, strict=True)
    errors = [_relative_error(value, reference) for value, reference in pairs]
    return math.nan if not errors or any(map(math.isnan, errors)) else max(errors)


def _float_tensors(outputs: Nest) -> list[Tensor]:
    leaves = tf.nest.flatten(outputs, expand_composites=True)
    return [leaf for leaf in leaves if tf.is_tensor(leaf) and leaf.dtype.is_floating]


def _relative_error(value: Tensor, reference: Tensor) -> float:
    """Root mean square of the differences over that of the reference, where it is finite."""
    if value.shape != reference.shape:
        return math.inf
    # Computed on the device, so that only scalars are copied from it.
    value, reference = tf.cast(value, "float64"), tf.cast(reference, "float64")
    counts = tf.math.is_finite(reference)
    if value.shape.num_elements() and not tf.reduce_any(counts):
        return math.nan
    zeros = tf.zeros_like(reference)
    error = float(tf.norm(tf.where(counts, value - reference, zeros)))
    size = float(tf.norm(tf.where(counts, reference, zeros)))
    if not math.isfinite(error):
        return math.inf
    return error / size if size else math.inf if error else 0.0
