"""`tfamp.tune`: alternates runs of a function in float32 and low precision on real arguments.

Every run starts from the same state, which is restored at the end, after an error too. No trace of
the caller's is run: state that ops keep in a trace does not change either.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfamp.core.errors import NothingConvertedWarning, RewriteError
from tfamp.core.options import PLACEMENTS, checked_count, checked_number
from tfamp.graph.observe import held_variables, put_back
from tfamp.graph.passes.fusion import has_fused
from tfamp.interop import keras_hooks
from tfamp.interop.tf_private import xla_works
from tfamp.machine.hardware import find_profile
from tfamp.machine.profile_measure import together
from tfamp.planning.options import RewriteOptions, check_choice, strings
from tfamp.planning.structures import FLOAT32
from tfamp.policy import low_dtype
from tfamp.reports import tables
from tfamp.reports.tables import table_lines
from tfamp.rewriting.function import RewrittenFunction, check_function
from tfamp.rewriting.function_state import draws_random, kept_random_states, variables_of
from tfamp.rewriting.pipeline import TracedFunction, traced_once
from tfamp.torch_style.state import current_modes

FUSED = "fused"
# The candidates of `tune` unless others are given.
CANDIDATES = (FLOAT32, "lists", "min_cut", FUSED)
ROUNDS, SECONDS = 10, 10.0
# Rounds of all candidates; then only those run again that may still be the fastest.
_FIRST_ROUNDS = 3
# Short calls are repeated for this long in each round.
_LEAST_SECONDS = 3e-3
_MOST_REPEATS = 30
_HEADS = ("candidate", "time", "quartiles", "over float32", "error", "low ops", "")


@dataclass(frozen=True, slots=True)
class TuneRow:
    """One candidate.

    Attributes:
        candidate: Its name: "float32", or a placement of `tfamp.rewrite`.
        seconds: Median time of a call.
        quartiles: The middle half of the times lies between these two.
        error: Relative error of its outputs against float32's: for each float output the root mean
            square of the differences over that of the values, and of these the largest. Values that
            are not finite in float32 do not count; inf where others are not finite, NaN where there
            is nothing to compare.
        chosen: Whether it is the one to use.
        low_nodes: How many nodes of its graph compute in the low dtype.

    Example:
        >>> TuneRow("lists", 0.002, (0.0019, 0.0022), 0.004, chosen=True, low_nodes=12).candidate
        'lists'
    """

    candidate: str
    seconds: float
    quartiles: tuple[float, float]
    error: float
    chosen: bool
    low_nodes: int = 0


@dataclass(frozen=True)
class TuneReport:
    """The result of `tune`.

    Attributes:
        function: Name of the function.
        dtype: The low dtype.
        rows: A row for each candidate, float32's first; exactly one is chosen.
        max_error: The bound on errors, or None.
        rounds: How many times are measured of a candidate, at most.
        best: The function to use from now on. Where float32 is chosen, that is the function as it
            was given, as a `tf.function`.

    Example:
        >>> rows = (
        ...     TuneRow("float32", 0.002, (0.0019, 0.0021), 0.0, chosen=False),
        ...     TuneRow("lists", 0.001, (0.0009, 0.0011), 0.004, chosen=True, low_nodes=3),
        ... )
        >>> report = TuneReport("step", "bfloat16", rows, max_error=None, rounds=10)
        >>> report.chosen.candidate, report.speed_up
        ('lists', 2.0)
    """

    function: str
    dtype: str
    rows: tuple[TuneRow, ...]
    max_error: float | None
    rounds: int
    best: Any = field(default=None, repr=False, compare=False)

    @property
    def chosen(self) -> TuneRow:
        """The row of the candidate to use."""
        return next(row for row in self.rows if row.chosen)

    @property
    def speed_up(self) -> float:
        """How many times as fast as float32 the chosen candidate is."""
        return self.rows[0].seconds / self.chosen.seconds

    def to_text(self) -> str:
        """Returns a table of the candidates, and a verdict."""
        return "\n".join([*table_lines([_HEADS, *self._cells()]), "", *self._verdict()])

    def _repr_html_(self) -> str:
        """Returns self-contained HTML for a notebook: the table and the verdict."""
        return tables.fragment(
            f"{self.function}, {self.dtype} against float32, {self.rounds} rounds",
            tables.table(_HEADS, self._cells(), left=1),
            tables.lines_of(self._verdict()),
        )

    def _cells(self) -> list[tuple[str, ...]]:
        return [
            (
                row.candidate,
                time_text(row.seconds),
                " to ".join(map(time_text, row.quartiles)),
                f"{self.rows[0].seconds / row.seconds:.2f}",
                f"{row.error:.2g}",
                str(row.low_nodes),
                "<- chosen" if row.chosen else "",
            )
            for row in self.rows
        ]

    def _verdict(self) -> Iterator[str]:
        chosen = self.chosen
        if chosen.candidate == FLOAT32:
            yield f"low precision does not pay here: {self._why_float32()}"
        else:
            yield (
                f"chosen: {chosen.candidate}, {self.speed_up:.2f} times as fast as float32, with "
                f"an error of {chosen.error:.2g}"
            )
            if not chosen.low_nodes:
                yield f"no op of it is worth converting to {self.dtype}: it computes in float32"
        if all(math.isnan(row.error) for row in self.rows):
            yield (
                "float32 returns no float tensor with finite values, so the errors are unknown: "
                "have the function return the results to judge it by"
            )

    def _why_float32(self) -> str:
        faster = min(self.rows, key=lambda row: row.seconds)
        if faster.candidate == FLOAT32:
            return f"no candidate in {self.dtype} is faster than float32"
        why = f"its error is {faster.error:.2g}"
        if _is_within(faster.error, self.max_error):
            why = "not in three quarters of the rounds: that may be noise"
        gain = self.rows[0].seconds / faster.seconds
        return f"{faster.candidate} is {gain:.2f} times as fast, but {why}"


def time_text(seconds: float) -> str:
    """Returns a time as people read it, such as "12.3 ms"."""
    return f"{1e3 * seconds:.4g} ms"


# ---- Candidates ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Candidate:
    """One way to run a function.

    Attributes:
        name: Its name in the report.
        function: A `tf.function` that nobody else runs.
        fresh: Makes the same without traces; the function to use, where `function` is a copy.
        is_copy: Whether `function` is only a copy.
    """

    name: str
    function: Any
    fresh: Callable[[], Any]
    is_copy: bool = False


def tune(
    fn: Any,
    *args: Any,
    dtype: Any = None,
    candidates: Sequence[str] = CANDIDATES,
    max_error: float | None = None,
    rounds: int = ROUNDS,
    seconds: float = SECONDS,
) -> TuneReport:
    """Alternates runs of a function in float32 and low precision, and chooses the fastest.

    The function runs some dozen times on the arguments given, a whole train step with its optimizer
    too. Afterwards, also after an exception, which is raised as it is, everything is bit for bit as
    before: variables, optimizers, and the random states of Keras, TensorFlow, NumPy and Python.
    What the first call of a function would create, such as the slots of an optimizer, exists
    afterwards, with its initial values. Effects outside TensorFlow are not undone: files that are
    written, and effects of `tf.py_function`.

    float32 is the function as it is, always a candidate: the result is never slower than that.
    Another one is chosen only if it was faster in three quarters of the rounds, which noise is not.
    All candidates run three rounds; then only those that the fastest does not beat so.

    Args:
        fn: What `tfamp.rewrite` takes: a `tf.function`, a concrete function, a Keras model or a
            Python function, which is run as a `tf.function`. Or what `tfamp.rewrite` returned: then
            its arguments, such as `keep_float32` and `op_lists`, hold for all candidates.
        *args: The arguments of a call, with values. For arguments by name tune a function of your
            own, such as `lambda x: fn(x, training=True)`.
        dtype: "float16" or "bfloat16"; None is what this machine multiplies natively, and bfloat16
            where that is neither.
        candidates: Names of placements of `tfamp.rewrite`; "float32" is added where it is missing.
            "fused" is left out where there is nothing for XLA to compile, or no XLA.
        max_error: Largest error of the outputs against float32's for a candidate to be chosen; see
            `TuneRow.error`. None is no bound, but results must be finite where float32's are.
        rounds: How many times each candidate is timed at most.
        seconds: Time after which no round begins but the first three.

    Returns:
        The report: `report.best` is what to call from now on, `print(report.to_text())` tells why.

    Raises:
        TypeError, ValueError: An argument is wrong, or the function uses something whose state
            cannot be restored, such as an iterator or a lookup table that it writes to; the message
            says what to do.
        RewriteError: The graph cannot be rewritten.

    Example:
        >>> import tensorflow as tf, tfamp
        >>> weights = tf.Variable(tf.ones((64, 64)))
        >>> report = tfamp.tune(lambda x: x @ weights, tf.ones((8, 64)), dtype="bfloat16", rounds=3)
        >>> [row.candidate for row in report.rows][:3], sum(row.chosen for row in report.rows)
        (['float32', 'lists', 'min_cut'], 1)
        >>> report.best(tf.ones((8, 64))).dtype
        tf.float32
    """
    keras_hooks.require_tensorflow("tfamp.tune")
    options = RewriteOptions()
    if isinstance(fn, RewrittenFunction):
        fn, options = fn.written, fn.settings
        dtype = options.dtype if dtype is None and options.dtype != FLOAT32 else dtype
    low = low_dtype(dtype) or "bfloat16"
    options = dataclasses.replace(options, dtype=low)
    check_function(fn)
    ways = candidates_of(fn, options, candidates)
    name = TracedFunction.of(fn).name
    return compare_candidates(
        ways, args, name=name, dtype=low, max_error=max_error, rounds=rounds, seconds=seconds
    )


def candidates_of(fn: Any, options: RewriteOptions, names: Iterable[str]) -> list[Candidate]:
    """Makes candidates of a function, float32 first.

    Raises:
        TypeError, ValueError: A name is not a candidate's; the message lists these.
        RewriteError: Functions cannot be traced and run here.
    """
    chosen = tuple(dict.fromkeys((FLOAT32, *strings("candidates", names))))
    for name in chosen:
        check_choice("candidates", name, (FLOAT32, *PLACEMENTS))
    if not tf.executing_eagerly():
        raise RewriteError("Tuning runs functions: call it where no function is being traced.")
    if tf.config.functions_run_eagerly():
        raise RewriteError("Tuning needs graphs: tf.config.run_functions_eagerly(True) is on.")
    placed = [name for name in chosen[1:] if name != FUSED or xla_works("")]
    if options.profile is None and set(placed) - {"lists"}:
        # One profile for all of them, so that they share the graph behind its passes.
        with kept_random_states():
            options = dataclasses.replace(options, profile=find_profile().profile)
    traced = TracedFunction.of(fn)
    kinds = (tf.types.experimental.PolymorphicFunction, tf.types.experimental.ConcreteFunction)
    as_it_is = (lambda: fn) if isinstance(fn, kinds) else traced.unchanged
    found = [Candidate(FLOAT32, traced.unchanged(), as_it_is, is_copy=True)]
    for name in placed:
        fresh = partial(RewrittenFunction, fn, dataclasses.replace(options, placement=name))
        found.append(Candidate(name, fresh(), fresh))
    return found


# ---- Runs ----------------------------------------------------------------------------------------


@dataclass(eq=False)
class _Run:
    """A candidate while it is measured: its trace, a call, the error and a time for each round."""

    candidate: Candidate
    trace: Any
    call: Callable[[], Any]
    error: float = math.nan
    repeats: int = 1
    times: list[float] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """The median of the times."""
        return float(np.median(self.times))

    def is_faster_than(self, other: _Run) -> bool:
        """Whether it took less time in three quarters of the rounds of both: in noise, in half.

        Times of one round are compared, as a slow phase of the machine slows both.
        """
        ratios = [mine / theirs for mine, theirs in zip(self.times, other.times, strict=False)]
        return bool(np.percentile(ratios, 75) < 1.0)


def compare_candidates(
    candidates: Sequence[Candidate],
    args: Sequence[Any],
    *,
    name: str,
    dtype: str,
    max_error: float | None = None,
    rounds: int = ROUNDS,
    seconds: float = SECONDS,
) -> TuneReport:
    """Alternates runs of candidates, float32's first, on the arguments of a call.

    Raises:
        TypeError, ValueError: An argument is wrong, or calls change what cannot be restored.
        RewriteError: The function cannot be rewritten.
    """
    if max_error is not None:
        max_error = checked_number("max_error", max_error, low=0.0, high=math.inf)
    rounds = checked_count("rounds", rounds)
    seconds = checked_number("seconds", seconds, low=0.0, high=math.inf)
    for leaf in tf.nest.flatten(list(args)):
        if isinstance(leaf, tf.TypeSpec | keras.KerasTensor):
            raise TypeError(
                f"Tuning runs {name} on the arguments, which must have values: give a batch of "
                f"data, got {leaf!r}."
            )
    once = traced_once(TracedFunction.of(candidates[0].function))
    generator = keras_hooks.global_seed_generator()
    # No autocast casts here, and the report says what the warning would.
    with current_modes.set_to(None), warnings.catch_warnings(), once:
        warnings.simplefilter("ignore", NothingConvertedWarning)
        with kept_random_states() as restore_randoms:
            runs = [
                _Run(
                    each, each.function.get_concrete_function(*args), partial(each.function, *args)
                )
                for each in candidates
            ]
            # One in which there is nothing to compile is "min_cut" once more.
            runs = [r for r in runs if r.candidate.name != FUSED or has_fused(r.trace.graph)]
            new_generator = keras_hooks.global_seed_generator() is not generator
            with tf.init_scope():  # A tape around it must not record the runs.
                _measure(runs, args, restore_randoms, _rounds(runs, max_error, rounds, seconds))
        allowed = [each for each in runs if _is_within(each.error, max_error)]
        better = [each for each in allowed if each.is_faster_than(runs[0])]
        chosen = min([runs[0], *better], key=lambda each: each.seconds)
        rows = tuple(_row(each, args, each is chosen) for each in runs)
    anew = chosen.candidate.is_copy or new_generator or any(draws_random(r.trace) for r in runs)
    return TuneReport(
        function=name,
        dtype=dtype,
        rows=rows,
        max_error=max_error,
        rounds=max(len(each.times) for each in runs),
        best=chosen.candidate.fresh() if anew else chosen.candidate.function,
    )


def _measure(
    runs: Sequence[_Run],
    args: Any,
    restore_randoms: Callable[[], None],
    rounds: Iterable[Sequence[_Run]],
) -> None:
    """Fills in the errors and times of candidates, and restores the state."""
    held = held_variables(variables_of([each.trace for each in runs], args))

    def restore() -> None:
        put_back(held)
        restore_randoms()

    references: list[Any] | None = None
    try:
        for each in runs:  # The very first runs are not timed: kernels are set up in them.
            restore()
            outputs = _float_tensors(each.call())
            references = outputs if references is None else references
            each.error = output_error(outputs, references)
        for each in runs:
            restore()
            alone = max(together(each.call, 1), 1e-9)
            each.repeats = min(math.ceil(_LEAST_SECONDS / alone), _MOST_REPEATS)
        for each in itertools.chain.from_iterable(rounds):
            restore()
            each.times.append(together(each.call, each.repeats))
    finally:
        restore()


def _rounds(
    runs: Sequence[_Run], max_error: float | None, rounds: int, seconds: float
) -> Iterator[Sequence[_Run]]:
    """Yields the candidates of each round: all, then those that may still be the fastest."""
    end = time.monotonic() + seconds
    for number in range(rounds):
        open_ones = runs
        if number >= _FIRST_ROUNDS:
            allowed = [runs[0], *(each for each in runs[1:] if _is_within(each.error, max_error))]
            fastest = min(allowed, key=lambda each: each.seconds)
            open_ones = [each for each in allowed if not fastest.is_faster_than(each)]
            if len(open_ones) == 1 or time.monotonic() > end:
                return
        yield open_ones


def _is_within(error: float, bound: float | None) -> bool:
    """Whether an error is allowed; an unknown one (NaN) only without a bound."""
    return not math.isinf(error) if bound is None else error <= bound


def _row(run: _Run, args: Sequence[Any], chosen: bool) -> TuneRow:
    low_nodes = 0
    # Neither float32 nor a function that could not be rewritten (`on_error="keep"`) has a plan.
    with contextlib.suppress(AttributeError, RewriteError):
        low_nodes = int(run.candidate.function.plan(*args).summary.low_nodes)
    quartiles = (float(np.percentile(run.times, 25)), float(np.percentile(run.times, 75)))
    return TuneRow(run.candidate.name, run.seconds, quartiles, run.error, chosen, low_nodes)


# ---- Errors --------------------------------------------------------------------------------------


def output_error(values: Sequence[Any], references: Sequence[Any]) -> float:
    """Returns the largest relative error of some tensors; NaN where one is unknown."""
    errors = [_relative_error(*each) for each in zip(values, references, strict=True)]
    return math.nan if not errors or any(map(math.isnan, errors)) else max(errors)


def _float_tensors(outputs: Any) -> list[Any]:
    leaves = tf.nest.flatten(outputs, expand_composites=True)
    return [leaf for leaf in leaves if tf.is_tensor(leaf) and leaf.dtype.is_floating]


def _relative_error(value: Any, reference: Any) -> float:
    """Root mean square of the differences over that of the reference, where that is finite."""
    if value.shape != reference.shape:
        return math.inf
    # On the device, so that only numbers come from there.
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
