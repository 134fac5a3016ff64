"""`tfamp.tune`: alternates runs of a function in float32 and low precision on real arguments.

Every run starts from the same state, and when all is done, or something was raised, that is the
state again. No trace that the caller has is run: what ops keep in a trace is as it was, too.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import statistics
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import keras
import tensorflow as tf

from tfamp.core.errors import NothingConvertedWarning, RewriteError
from tfamp.core.options import PLACEMENTS, checked_count, checked_number
from tfamp.graph.passes.fusion import has_fused
from tfamp.interop.keras_hooks import require_tensorflow
from tfamp.interop.tf_private import xla_works
from tfamp.machine.hardware import find_profile
from tfamp.machine.profile_measure import progress, together
from tfamp.planning.options import RewriteOptions, check_choice
from tfamp.policy import low_dtype
from tfamp.rewriting.function import RewrittenFunction, check_function
from tfamp.rewriting.function_state import (
    FunctionState,
    RandomStates,
    kept_random_states,
    random_ops,
    to_the_end,
)
from tfamp.rewriting.traced_function import TracedFunction, traced_once
from tfamp.rewriting.tune_report import FLOAT32, TuneReport, TuneRow
from tfamp.torch_style.state import current_modes

ROUNDS = 10
FUSED = "fused"
# Short calls are repeated for this long at each turn.
_LEAST_SECONDS = 3e-3
_MOST_REPEATS = 30


@dataclass(frozen=True)
class Candidate:
    """One way to run a function.

    Attributes:
        name: What it is called in the report.
        function: A `tf.function` that nobody else runs.
        fresh: Makes the same anew; also what to use of it, where `function` was only a copy.
        is_copy: Whether `function` was only a copy.
    """

    name: str
    function: Any
    fresh: Callable[[], Any]
    is_copy: bool = False


# Those of `tune` unless others are given.
CANDIDATES = (FLOAT32, "lists", "min_cut", FUSED)


def tune(
    fn: Any,
    *args: Any,
    dtype: Any = None,
    candidates: Sequence[str] = CANDIDATES,
    max_error: float | None = None,
    rounds: int = ROUNDS,
) -> TuneReport:
    """Runs a function in float32 and in low precision by turns, and keeps what is the fastest.

    The function runs some dozen times on the arguments given, a whole train step with its optimizer
    too. Afterwards, also after an exception, which is raised as it is, everything is bit for bit as
    before: variables, optimizers, iterators of datasets, and the random states of Keras,
    TensorFlow, NumPy and Python. What the first call of a function would create, such as the slots
    of an optimizer, is there afterwards, with the values that it is created with. Not taken back is
    what leaves TensorFlow: files that are written, and what `tf.py_function` does.

    float32 is the function as it is, always a candidate: the result is never slower than that.
    Another one is chosen only if it was faster in three quarters of the rounds, which noise is not;
    it is not run again once it cannot be.

    Args:
        fn: What `tfamp.rewrite` takes: a `tf.function`, a concrete function, a Keras model or a
            Python function, which is run as a `tf.function`. Or what `tfamp.rewrite` returned: then
            its arguments, such as `keep_float32` and `op_lists`, hold for all candidates.
        *args: The arguments of a call, with values. Those by name are given by a function of your
            own, such as `lambda x: fn(x, training=True)`.
        dtype: "float16" or "bfloat16"; None is what this machine multiplies natively, and bfloat16
            where that is neither.
        candidates: Names of placements of `tfamp.rewrite`; "float32" is added where it is missing.
            "fused" is left out where there is nothing for XLA to compile, or no XLA.
        max_error: Largest error of the outputs against float32's for a candidate to be chosen; see
            `TuneRow.error`. None is no bound, but results must be finite where float32's are.
        rounds: How often each candidate has its turn.

    Returns:
        The report: `report.best` is what to call from now on, `print(report.to_text())` tells why.

    Raises:
        TypeError, ValueError: An argument is wrong, or the function changes something that could
            not be put back, such as a lookup table or the order of a dataset that shuffles anew
            in each iteration; the message says what to do.
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
    require_tensorflow("tfamp.tune")
    options = RewriteOptions()
    if isinstance(fn, RewrittenFunction):
        fn, options = fn.written, fn.settings
        dtype = options.dtype if dtype is None and options.dtype != FLOAT32 else dtype
    low = low_dtype(dtype) or "bfloat16"
    options = dataclasses.replace(options, dtype=low)
    check_function(fn)
    ways = candidates_of(fn, options, candidates)
    name = TracedFunction.of(fn).name
    return compare_candidates(ways, args, name=name, dtype=low, max_error=max_error, rounds=rounds)


def candidates_of(fn: Any, options: RewriteOptions, names: Iterable[str]) -> list[Candidate]:
    """Makes candidates of a function, float32 first.

    Raises:
        TypeError, ValueError: The names are not those of candidates; the message lists these.
        RewriteError: Functions cannot be traced and run here.
    """
    if isinstance(names, str) or not isinstance(names, Iterable):
        got = f"the string {names!r}" if isinstance(names, str) else repr(names)
        raise TypeError(f"candidates must be a collection of names; got {got}.")
    chosen = tuple(dict.fromkeys((FLOAT32, *names)))
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
    return [_as_it_is(fn), *(_placed(fn, options, name) for name in placed)]


def _as_it_is(fn: Any) -> Candidate:
    traced = TracedFunction.of(fn)
    kinds = (tf.types.experimental.PolymorphicFunction, tf.types.experimental.ConcreteFunction)
    fresh = (lambda: fn) if isinstance(fn, kinds) else traced.unchanged
    return Candidate(FLOAT32, traced.unchanged(), fresh, is_copy=True)


def _placed(fn: Any, options: RewriteOptions, name: str) -> Candidate:
    options = dataclasses.replace(options, placement=name)
    made = partial(RewrittenFunction, fn, options)
    return Candidate(name, made(), made)


def compare_candidates(
    candidates: Sequence[Candidate],
    args: Sequence[Any],
    *,
    name: str,
    dtype: str,
    max_error: float | None = None,
    rounds: int = ROUNDS,
) -> TuneReport:
    """Runs candidates, float32's first, by turns on the arguments of a call.

    Raises:
        TypeError, ValueError: An argument is wrong, or calls change what cannot be put back.
        RewriteError: The function cannot be rewritten.
    """
    if max_error is not None:
        max_error = checked_number("max_error", max_error, low=0.0, high=math.inf)
    rounds = checked_count("rounds", rounds)
    check_call(candidates[0].function, args, name)
    once = traced_once(TracedFunction.of(candidates[0].function))
    with _undisturbed(), once, kept_random_states() as randoms:
        turns = [
            _Turns(each, each.function.get_concrete_function(*args), partial(each.function, *args))
            for each in candidates
        ]
        # One in which there is nothing to compile is "min_cut" once more.
        turns = [each for each in turns if each.name != FUSED or has_fused(each.trace.graph)]
        draws_from_new = randoms.keras_has_another()
        with tf.init_scope():  # A tape around it must not record the runs.
            _measure(turns, args, randoms, rounds)
        rows = _rows(turns, args, max_error)
    draws = [random_ops(each.trace) for each in turns]
    chosen = next(each.candidate for each, row in zip(turns, rows, strict=True) if row.chosen)
    anew = chosen.is_copy or any(draws) or draws_from_new
    return TuneReport(
        function=name,
        dtype=dtype,
        rows=rows,
        max_error=max_error,
        rounds=rounds,
        best=chosen.fresh() if anew else chosen.function,
        notes=tuple(_notes(rows, draws)),
    )


def check_call(function: Any, args: Sequence[Any], name: str) -> None:
    """Raises a TypeError for arguments that a `tf.function` cannot be run on."""
    signature = TracedFunction.of(function).signature
    try:
        signature.bind(*args)
    except TypeError as error:
        raise TypeError(
            f"{name} takes {signature}, and the arguments to tune it on do not fit: {error}. They "
            "are given by position: for others tune a function that gives them, such as "
            f"lambda x: {name}(x, training=True)."
        ) from None
    for leaf in tf.nest.flatten(list(args)):
        if isinstance(leaf, tf.TypeSpec | keras.KerasTensor):
            raise TypeError(
                f"Tuning runs {name} on the arguments, which must have values: give a batch of "
                f"data, got {leaf!r}."
            )


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Runs where no autocast casts, and nothing is said that the report says."""
    with current_modes.set_to(None), warnings.catch_warnings():
        warnings.simplefilter("ignore", NothingConvertedWarning)
        yield


def _low_nodes(function: Any, args: Sequence[Any]) -> int:
    if not hasattr(function, "plan"):
        return 0
    try:
        return int(function.plan(*args).summary.low_nodes)
    except RewriteError:  # It could not be rewritten, and `on_error` is "keep".
        return 0


# ---- Runs ----------------------------------------------------------------------------------------


@dataclass(eq=False)
class _Turns:
    """A candidate while it is measured: its trace, a call, the error and a time for each round."""

    candidate: Candidate
    trace: Any
    call: Callable[[], Any]
    error: float = math.nan
    times: list[float] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The name of the candidate."""
        return self.candidate.name

    @property
    def seconds(self) -> float:
        """The median of the times."""
        return statistics.median(self.times)


def _measure(turns: Sequence[_Turns], args: Any, randoms: RandomStates, rounds: int) -> None:
    state = FunctionState.of([each.trace for each in turns], args, randoms)
    float32, references = turns[0].times, None
    try:
        move_on = progress(len(turns) * (rounds + 1), "run")
        for each in turns:  # The very first runs are not timed: kernels are set up in them.
            state.put_back()
            outputs = _float_tensors(each.call())
            references = outputs if references is None else references
            each.error = output_error(outputs, references)
            move_on()
        repeats = [1 if state.iterators else _repeats(each.call, state) for each in turns]
        for _ in range(rounds):
            for each, count in zip(turns, repeats, strict=True):
                if each is turns[0] or _is_faster(each.times, float32, rounds):
                    state.put_back()
                    each.times.append(together(each.call, count))
                move_on()
    finally:
        to_the_end(state.put_back)


def _repeats(call: Callable[[], Any], state: FunctionState) -> int:
    state.put_back()
    seconds = together(call, 1)
    return min(math.ceil(_LEAST_SECONDS / max(seconds, 1e-9)), _MOST_REPEATS)


# ---- Errors --------------------------------------------------------------------------------------


def output_error(values: Sequence[Any], references: Sequence[Any]) -> float:
    """Returns the largest relative error of some tensors; NaN where one cannot be told."""
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
    if not error:
        return 0.0
    return error / size if size else math.inf


# ---- The report ----------------------------------------------------------------------------------


def _rows(turns: Sequence[_Turns], args: Any, max_error: float | None) -> tuple[TuneRow, ...]:
    float32, *others = turns
    allowed = [
        each
        for each in others
        if _is_within(each.error, max_error)
        and _is_faster(each.times, float32.times, len(float32.times))
    ]
    chosen = min((float32, *allowed), key=lambda each: each.seconds)
    return tuple(
        TuneRow(
            candidate=each.name,
            seconds=each.seconds,
            quartiles=_quartiles(each.times),
            error=each.error,
            chosen=each is chosen,
            low_nodes=_low_nodes(each.candidate.function, args),
        )
        for each in turns
    )


def _is_within(error: float, bound: float | None) -> bool:
    """Whether an error will do; one that cannot be told only if there is no bound."""
    return not math.isinf(error) if bound is None else error <= bound


def _is_faster(times: Sequence[float], others: Sequence[float], rounds: int) -> bool:
    """Whether times are shorter in at least three quarters of all rounds: in noise, in half.

    Those of a round are compared, as what slows the machine for a while slows both. While rounds
    are missing it is whether that can still be so.
    """
    longer = sum(time >= other for time, other in zip(times, others, strict=False))
    return 4 * longer <= rounds


def _quartiles(times: Sequence[float]) -> tuple[float, float]:
    if len(times) == 1:
        return times[0], times[0]
    low, _, high = statistics.quantiles(times, n=4, method="inclusive")
    return low, high


def _notes(
    rows: Sequence[TuneRow], draws: Sequence[Sequence[tuple[str, int, int]]]
) -> Iterator[str]:
    if all(math.isnan(row.error) for row in rows):
        yield (
            "float32 returns no float tensor with finite values, so that no error could be told: "
            "have the function return what its results are to be judged by"
        )
    loose = [each for drawn in draws for each in drawn if not any(each[1:])]
    if loose or any(drawn != draws[0] for drawn in draws):
        op = loose[0][0] if loose else draws[0][0][0]
        yield (
            f"the function draws random numbers that are others in each trace ({op}), and the "
            "errors hold that difference too: call tf.random.set_seed, or draw with keras.random"
        )
