"""`tfamp.tune`: alternates runs of a function in float32 and low precision on real arguments.

Every run starts from the same state, which is restored at the end, also after an error. The
caller's own traces do not run, so state that ops keep in a trace does not change either.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import math
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfamp.core.errors import NothingConvertedWarning, RewriteError, TfampWarning
from tfamp.core.options import PLACEMENTS, checked_count, checked_number
from tfamp.graph.observe import held_variables, put_back
from tfamp.graph.passes.fusion import has_fused
from tfamp.interop import keras_hooks
from tfamp.interop.patching import level_of_user
from tfamp.interop.tf_private import device_scope, xla_works
from tfamp.machine.hardware import find_profile, keep_in_cache
from tfamp.machine.profile_measure import together
from tfamp.planning.options import RewriteOptions, check_choice, strings
from tfamp.planning.structures import FLOAT32, RewritePlan
from tfamp.policy import low_dtype
from tfamp.reports import tables
from tfamp.reports.tables import table_lines
from tfamp.rewriting import function_state
from tfamp.rewriting.choice_cache import VARIABLE, choice_file, fingerprint
from tfamp.rewriting.function import RewrittenFunction, check_function
from tfamp.rewriting.pipeline import TracedFunction, traced_once
from tfamp.torch_style.state import current_modes

FUSED = "fused"
# The candidates of `tune` unless others are given.
CANDIDATES = (FLOAT32, "lists", "min_cut", FUSED)
ROUNDS, SECONDS = 10, 10.0
# Rounds after the first are for candidates within the first factor of the fastest, those after the
# second within the other one, and later ones for those not slower in three quarters of the rounds.
_FAR, _CLOSE, _CLOSE_ROUNDS = 1.5, 1.15, 4
# A candidate may always compile this many seconds longer than float32.
_LEAST_LIMIT = 1.0
# After so many times float32's first two calls no round begins, unless float32 may be the fastest.
_MOST_STARTS = 2.5
# Short calls are repeated for this long in each round.
_LEAST_SECONDS = 3e-3
_MOST_REPEATS = 30
# The op of BatchNormalization layers in traces to rewrite; Keras has other ops in float32.
_NORMALIZES = "FusedBatchNormV3"
_HEADS = ("candidate", "time", "quartiles", "over float32", "error", "low ops", "")


@dataclass(frozen=True, slots=True)
class TuneRow:
    """One candidate.

    Attributes:
        candidate: Its name: "float32", or a placement of `tfamp.rewrite`.
        seconds: Median time of a call.
        quartiles: Lower and upper quartile of the times.
        error: Relative error of its outputs against float32's: for each float output the root mean
            square of the differences over the root mean square of the values, and of these the
            largest. Values that are not finite in float32 do not count; inf if others are not
            finite, NaN without values to compare. In a report from the cache it is the error on the
            arguments of the measured call.
        chosen: Whether it is the one to use.
        low_nodes: Number of nodes of its graph that compute in the low dtype.
        same_as: The candidate of an earlier row with the same graph, which has these times and this
            error; "" if the graph was measured for this row.

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
    same_as: str = ""

    @classmethod
    def of(cls, fields: Any) -> TuneRow:
        """Makes a row from the dict of its fields; raises an error if a field is wrong."""
        low, high = map(float, fields["quartiles"])
        numbers = {name: float(fields[name]) for name in ("seconds", "error")}
        return cls(**{**fields, **numbers, "quartiles": (low, high)})


@dataclass(frozen=True)
class TuneReport:
    """The result of `tune`.

    Attributes:
        function: Name of the function.
        dtype: The low dtype.
        rows: A row for each candidate, float32's first; exactly one is chosen.
        max_error: The bound on errors, or None.
        rounds: The largest number of times measured for a candidate.
        source: Whether the choice was measured now or before, and the file that keeps it.
        dropped: Candidates that were not measured, since they compile too long.
        unseeded: Types of ops that draw other random numbers in each run, which counts as an error.
        best: The function to use from now on. If float32 is chosen, it is the given function, as a
            `tf.function`.

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
    source: str = "measured now"
    dropped: tuple[str, ...] = ()
    unseeded: tuple[str, ...] = ()
    best: Any = field(default=None, repr=False, compare=False)

    @property
    def chosen(self) -> TuneRow:
        """The row of the candidate to use."""
        return next(row for row in self.rows if row.chosen)

    @property
    def speed_up(self) -> float:
        """Time of float32 over the time of the chosen candidate."""
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
                "<- chosen" if row.chosen else row.same_as and f"same graph as {row.same_as}",
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
                yield f"none of its ops is worth converting to {self.dtype}: it computes in float32"
        yield from (f"dropped: {name} takes too long to compile" for name in self.dropped)
        yield self.source
        if all(math.isnan(row.error) for row in self.rows):
            yield (
                "float32 returns no float tensor with finite values, so the errors are unknown: "
                "have the function return the results to judge it by"
            )
        if self.unseeded:
            yield (
                f"{', '.join(self.unseeded)} drew other numbers in each run, and errors include "
                "that: call tf.random.set_seed, give the ops a seed, or draw with keras.random"
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
    """Returns a time for people, such as "12.3 ms"."""
    return f"{1e3 * seconds:.4g} ms"


# ---- Candidates ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Candidate:
    """One way to run a function.

    Attributes:
        name: Its name in the report.
        function: A `tf.function` for tuning alone.
        best: The function to use afterwards, if it is not `function`.
    """

    name: str
    function: Any
    best: Any = None


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

    The function, which may be a whole train step with its optimizer, runs a few times per candidate
    on the given arguments. Afterwards, also after an exception, the state is bit for bit as before:
    variables, optimizers, and the random states of Keras, TensorFlow, NumPy and Python. Variables
    that a first call would create, such as the slots of an optimizer, exist afterwards, with their
    initial values. Effects outside TensorFlow are not undone, such as written files and effects of
    `tf.py_function`.

    float32, the function as it is, is always a candidate: the result is never slower. Another
    candidate is chosen only if it was faster in three quarters of the rounds, which noise is not.
    Candidates share one trace, and those with the same graph run once, unless variables are
    arguments: then each is traced and runs. The first call of each, which compiles, runs in a
    thread while the next one is rewritten. Then all are timed once, those within a factor of 1.5 of
    the fastest again, and those within 15 % twice more. Further rounds are for those that are not
    slower in three quarters of the rounds. No round begins after 2.5 times as long as the first two
    calls in float32 take.

    The choice is kept in the user's cache: the next start of the program uses it without a run, and
    the report says so. It is measured again for another graph, version, machine or argument, for op
    lists or calibration data of your own, and with the environment variable `TFAMP_CACHE=off`.

    Args:
        fn: What `tfamp.rewrite` takes: a `tf.function`, a concrete function, a Keras model or a
            Python function, which is run as a `tf.function`. Or what `tfamp.rewrite` returned: then
            its arguments, such as `keep_float32` and `op_lists`, hold for all candidates.
        *args: The arguments of a call, with values. For keyword arguments tune a function of your
            own, such as `lambda x: fn(x, training=True)`.
        dtype: "float16" or "bfloat16"; None for the one that this machine multiplies natively,
            bfloat16 without one.
        candidates: Names of placements of `tfamp.rewrite`; "float32" is added if it is missing.
            "fused" is left out without ops for XLA to compile, or without XLA.
        max_error: Largest error of the outputs against float32's for a candidate to be chosen; see
            `TuneRow.error`. With None results must only be finite where float32's are.
        rounds: Largest number of times that each candidate is timed.
        seconds: After so many no round begins, except the first, and the second where float32 may
            be the fastest. A candidate is dropped if its trace and first call take this much longer
            than float32's.

    Returns:
        The report: call `report.best` from now on; `print(report.to_text())` shows the reasons.

    Raises:
        TypeError, ValueError: An argument is wrong, or the function uses an object whose state
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
        TypeError, ValueError: A name is not the name of a candidate; the message lists these.
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
        # With one profile all candidates share the graph after the first passes.
        with function_state.kept_random_states():
            options = dataclasses.replace(options, profile=find_profile().profile)
    kinds = (tf.types.experimental.PolymorphicFunction, tf.types.experimental.ConcreteFunction)
    as_it_is = fn if isinstance(fn, kinds) else TracedFunction.of(fn).unchanged()
    # Its graph is that of the trace which all candidates share.
    float32 = RewrittenFunction(fn, dataclasses.replace(options, dtype=FLOAT32))
    settings = {name: dataclasses.replace(options, placement=name) for name in placed}
    rewritten = [Candidate(name, RewrittenFunction(fn, settings[name])) for name in placed]
    return [Candidate(FLOAT32, float32, as_it_is), *rewritten]


# ---- Runs ----------------------------------------------------------------------------------------


@dataclass(eq=False)
class _Run:
    """A graph while it is measured: its trace, a call, the error and a time for each round.

    `key` is equal for equal graphs, and `names` are the candidates with this graph. `first` is the
    time of its trace and its first call in seconds.
    """

    key: Any
    trace: Any
    call: Callable[[], Any]
    low_nodes: int
    names: list[str]
    error: float = math.nan
    first: float = 0.0
    repeats: int = 0
    times: list[float] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """The median of the times."""
        return float(np.median(self.times))

    def is_faster_than(self, other: _Run) -> bool:
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


def compare_candidates(
    candidates: Sequence[Candidate],
    args: Sequence[Any],
    *,
    name: str,
    dtype: str,
    max_error: float | None = None,
    rounds: int = ROUNDS,
    seconds: float = SECONDS,
    kept: Any = (),
    program: str = "",
    before: Callable[[], Any] = lambda: None,
) -> TuneReport:
    """Alternates runs of candidates, float32's first, on the arguments of a call.

    If the user's cache has the choice, nothing runs. `kept` are the numbers of layers that stay
    float32: the program does not show them. `program` is a hash of the program, if it is known
    without a trace. `before` is called before the function is traced.

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
    limits = (max_error, rounds, seconds)
    once = traced_once(TracedFunction.of(candidates[0].function.written))
    # Autocast is off, and the report replaces the warning.
    with current_modes.set_to(None), warnings.catch_warnings(), once:
        warnings.simplefilter("ignore", NothingConvertedWarning)
        with function_state.kept_random_states() as restore_randoms:
            begin, generator = time.monotonic(), keras_hooks.global_seed_generator()
            if not program:
                before()
            path = _file_of(candidates, args, program, (*limits, kept))
            draws = keras_hooks.global_seed_generator() is not generator
            found = _kept_choice(path, candidates)
            if found is None:
                before()
                state = _State(args, restore_randoms)
                runs = _measured(candidates, args, state, limits, begin)
                found = _keep(path, _choice_of(runs, max_error))
            chosen = next(row for row in found.rows if row.chosen)
            (way,) = (each for each in candidates if each.name == chosen.candidate)
            if not (way.best or program):  # Its trace is there, which the graph was looked up by.
                trace = way.function.get_concrete_function(*args)
                draws = draws or bool(function_state.random_ops(trace))
    best = way.best or (way.function.copy() if draws else way.function)
    return TuneReport(name, dtype, max_error=max_error, best=best, **found._asdict())


# ---- The cache -----------------------------------------------------------------------------------


class _Choice(NamedTuple):
    """The measured part of a report."""

    rows: tuple[TuneRow, ...]
    rounds: int
    dropped: tuple[str, ...]
    unseeded: tuple[str, ...]
    source: str = "measured now"


def _file_of(candidates: Sequence[Candidate], args: Any, program: str, limits: Any) -> Path | None:
    """The file of the choice in the user's cache; None if the choice is not kept.

    Choices with the user's own op lists or calibration data are not kept.
    """
    settings = {each.name: getattr(each.function, "settings", None) for each in candidates}
    if any(each and (each.op_lists or each.calibration) for each in settings.values()):
        return None
    if not program:
        trace = candidates[0].function.get_concrete_function(*args)
        program = fingerprint(trace.graph.as_graph_def(add_shapes=True))
    return choice_file(program, {"candidates": settings, "limits": limits})


def _kept_choice(path: Path | None, candidates: Sequence[Candidate]) -> _Choice | None:
    """Reads a choice; a damaged file is a warning and counts as missing."""
    try:
        fields = json.loads("null" if path is None else path.read_text(encoding="utf-8"))
        if fields is None:
            return None
        rows = tuple(map(TuneRow.of, fields["rows"]))
        names = {each.name for each in candidates}
        (_,) = (row for row in rows if row.chosen and row.candidate in names)  # Exactly one.
        source = f"measured before, kept in {path}"
        dropped, unseeded = tuple(fields["dropped"]), tuple(fields["unseeded"])
        return _Choice(rows, int(fields["rounds"]), dropped, unseeded, source)
    except OSError:
        return None
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        text = f"{path} is damaged or not a file of tfamp's, so tune measures again: {error!r}"
        warnings.warn(text, TfampWarning, stacklevel=level_of_user())
        return None


def _keep(path: Path | None, found: _Choice) -> _Choice:
    """Writes a choice to its file; returns it with its origin."""
    if path is None:
        return found
    fields = {name: value for name, value in found._asdict().items() if name != "source"}
    text = json.dumps({**fields, "rows": [dataclasses.asdict(row) for row in found.rows]})
    costs = "The choice of tune cannot be kept, so the next start of the program measures again"
    return found._replace(source=keep_in_cache(path, text, costs, f'set {VARIABLE} to "off"'))


# ---- Measuring -----------------------------------------------------------------------------------


def _choice_of(runs: Sequence[_Run], max_error: float | None) -> _Choice:
    """Returns the fastest of measured runs that is faster than float32's and exact enough."""
    timed = [each for each in runs if each.times]
    better = [each for each in timed if _is_within(each.error, max_error)]
    better = [each for each in better if each.is_faster_than(runs[0])]
    chosen = min([runs[0], *better], key=lambda each: each.seconds)
    rows = tuple(row for each in timed for row in each.rows(each is chosen))
    dropped = tuple(name for each in runs if not each.times for name in each.names)
    unseeded = function_state.unseeded_ops([each.trace for each in timed])
    return _Choice(rows, max(len(each.times) for each in timed), dropped, unseeded)


class _State:
    """State that runs change: random states and variables of graphs, each noted once."""

    def __init__(self, args: Sequence[Any], restore_randoms: Callable[[], None]) -> None:
        self._args, self._restore_randoms = args, restore_randoms
        self._known: dict[int, Any] = {}
        self._held: list[tuple[Any, Any]] = []

    def note(self, trace: Any) -> None:
        """Notes the values of a trace's variables, before its first call."""
        handles = {id(each): each for each in function_state.variables_of([trace], self._args)}
        new = [handle for key, handle in handles.items() if key not in self._known]
        self._held += held_variables(new)
        self._known |= handles

    def restore(self) -> None:
        put_back(self._held)
        self._restore_randoms()


def _measured(
    candidates: Sequence[Candidate],
    args: Sequence[Any],
    state: _State,
    limits: tuple[float | None, int, float],
    begin: float,
) -> list[_Run]:
    """Traces candidates and times their runs, since a time; restores the state.

    The first calls, which compile for seconds, are made in a thread, while this one traces.
    """
    bar = keras.utils.Progbar(None, verbose=int(sys.stdout.isatty()), unit_name="run")
    device = device_scope()
    thread, calls, runs = ThreadPoolExecutor(1), list[Future[None]](), list[_Run]()
    references: list[Any] = []

    def call_first(run: _Run) -> None:
        with tf.device(device):
            state.restore()
            state.note(run.trace)
            called = time.monotonic()
            outputs = _float_tensors(run.trace(*args))
            run.first += time.monotonic() - called
            references.extend(outputs if run is runs[0] else ())
            run.error = output_error(outputs, references)
            bar.add(1)

    try:
        for run in _graphs(candidates, args, begin, lambda: wait(calls)):
            runs.append(run)
            calls.append(thread.submit(call_first, run))
        for call in calls:
            call.result()
        order = [each.name for each in candidates]
        runs.sort(key=lambda run: order.index(run.names[0]))
        with tf.init_scope():  # A tape around it must not record the runs.
            for run in itertools.chain.from_iterable(_rounds(runs, begin, *limits)):
                state.restore()
                _time(run, state.restore)
                bar.add(1)
    finally:
        thread.shutdown(cancel_futures=True)
        state.restore()
    bar.update(sum(1 + len(each.times) for each in runs), finalize=True)
    return runs


def _graphs(
    candidates: Sequence[Candidate], args: Sequence[Any], start: float, settle: Callable[[], Any]
) -> Iterator[_Run]:
    """Yields each graph once, traced since a time: float32's, then what compiles longest.

    `settle` waits for the runs of the graphs before.
    """
    runs: list[_Run] = []
    for each in sorted(candidates, key=lambda each: (each.name != FLOAT32, each.name != FUSED)):
        if candidates[0].function.settings.calibration:  # The plan needs runs of the function.
            settle()
        plan = _shared_plan_of(each)
        key = each.name if plan is None else (plan.retypes, plan.casts, each.name == FUSED)
        same = next((run for run in runs if run.key == key), None)
        if same is not None:
            same.names.append(each.name)
            continue
        if plan is None:  # A trace may run Python code that uses random numbers.
            settle()
        if (run := _traced(each, args, key)) is not None:
            run.first, start = time.monotonic() - start, time.monotonic()
            runs.append(run)
            yield run


def _time(run: _Run, restore: Callable[[], None]) -> None:
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


def _traced(candidate: Candidate, args: Sequence[Any], key: Any) -> _Run | None:
    """Traces a candidate; None if XLA has nothing to compile: it equals "min_cut"."""
    function, low_nodes = candidate.function, 0
    trace = function.get_concrete_function(*args)
    if candidate.name == FLOAT32 and _NORMALIZES in function_state.ops_of(trace):
        function = TracedFunction.of(function.written).unchanged()
        trace = function.get_concrete_function(*args)
    if candidate.name == FUSED and not has_fused(trace.graph):
        return None
    # float32 has no plan, nor a function that could not be rewritten.
    with contextlib.suppress(AttributeError, RewriteError):
        low_nodes = function.plan(*args).summary.low_nodes
    return _Run(key, trace, partial(function, *args), low_nodes, [candidate.name])


def _rounds(
    runs: Sequence[_Run], begin: float, max_error: float | None, rounds: int, seconds: float
) -> Iterator[Sequence[_Run]]:
    """Yields the runs of each round: first all, then those that may still be the fastest."""
    limit = runs[0].first + max(seconds, _LEAST_LIMIT)
    runs = [each for each in runs if each.first <= limit]
    for number in range(rounds):
        open_ones = runs
        if number:
            allowed = [runs[0], *(each for each in runs[1:] if _is_within(each.error, max_error))]
            fastest = min(allowed, key=lambda each: each.seconds)
            longest = (_FAR if number == 1 else _CLOSE) * fastest.seconds
            near = (each for each in allowed if each.seconds < longest)
            is_early = number < _CLOSE_ROUNDS
            open_ones = [each for each in near if is_early or not fastest.is_faster_than(each)]
            end = min(seconds, _MOST_STARTS * (runs[0].first + runs[0].seconds))
            is_late = time.monotonic() - begin > end
            if len(open_ones) == 1 or (is_late and (number > 1 or runs[0] not in open_ones)):
                return
        yield open_ones


def _is_within(error: float, bound: float | None) -> bool:
    """Whether an error is allowed; an unknown error (NaN) is allowed only without a bound."""
    return not math.isinf(error) if bound is None else error <= bound


# ---- Errors --------------------------------------------------------------------------------------


def output_error(values: Sequence[Any], references: Sequence[Any]) -> float:
    """Returns the largest relative error of some tensors; NaN if one is unknown."""
    errors = [_relative_error(*each) for each in zip(values, references, strict=True)]
    return math.nan if not errors or any(map(math.isnan, errors)) else max(errors)


def _float_tensors(outputs: Any) -> list[Any]:
    leaves = tf.nest.flatten(outputs, expand_composites=True)
    return [leaf for leaf in leaves if tf.is_tensor(leaf) and leaf.dtype.is_floating]


def _relative_error(value: Any, reference: Any) -> float:
    """Root mean square of the differences over the reference's, where the reference is finite."""
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
