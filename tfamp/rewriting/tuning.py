"""`tfamp.tune`: alternates runs of a function in float32 and low precision on real arguments.

candidates -> one trace -> the choice in the user's cache, or measured runs -> report

The caller's own traces do not run, so state that ops keep in a trace does not change either.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from tfamp.core.errors import NothingConvertedWarning, RewriteError
from tfamp.core.kinds import Function, Nest
from tfamp.core.options import PLACEMENTS, checked_word
from tfamp.interop import keras_hooks
from tfamp.interop.tf_private import xla_works
from tfamp.machine.hardware import find_profile, key_of_found
from tfamp.planning.options import RewriteOptions, strings
from tfamp.planning.structures import FLOAT32
from tfamp.policy import low_dtype
from tfamp.rewriting import function_state
from tfamp.rewriting.choice_cache import (
    Choice,
    choice_file,
    fingerprint,
    keep_choice,
    kept_choice,
)
from tfamp.rewriting.function import RewrittenFunction, check_function
from tfamp.rewriting.measured_runs import (
    FUSED,
    ROUNDS,
    SECONDS,
    Candidate,
    Limits,
    State,
    choice_of,
    measured,
)
from tfamp.rewriting.pipeline import traced_once
from tfamp.rewriting.traced_function import TracedFunction
from tfamp.rewriting.tune_report import TuneReport
from tfamp.torch_style.modes import current_modes

# The candidates of `tune` unless others are given.
CANDIDATES = (FLOAT32, "lists", "min_cut", FUSED)


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

    The function, which may be a whole train step with its optimizer, runs a few times per
    candidate on the given arguments. Afterwards, also after an exception, the state is bit for
    bit as before: variables, optimizers, and the random states of Keras, TensorFlow, NumPy and
    Python. Variables that a first call would create, such as the slots of an optimizer, exist
    afterwards, with their initial values. Effects outside TensorFlow are not undone, such as
    written files and effects of `tf.py_function`.

    float32, the function as it is, is always a candidate: the result is never slower. Another
    candidate is chosen only if it was faster in three quarters of the rounds, which noise is
    not. Candidates share one trace, and those with the same graph run once, unless variables
    are arguments: then each is traced and runs. The first call of each, which compiles, runs in
    a thread while the next one is rewritten. Then all are timed twice, and those within 15 % of
    the fastest twice more; a round that was still warming up, as kernels are loaded, does not
    count. Further rounds are for those that are not slower in three quarters of the rounds. No
    round begins after 2.5 times as long as the first two calls in float32 take.

    The choice is kept in the user's cache: the next start of the program uses it without a run,
    and the report says so. It is measured again for another graph, version, machine or
    argument, for op lists or calibration data of your own, and with the environment variable
    `TFAMP_CACHE=off`.

    Args:
        fn: What `tfamp.rewrite` takes: a `tf.function`, a concrete function, a Keras model or a
            Python function, which is run as a `tf.function`. Or what `tfamp.rewrite` returned:
            then its arguments, such as `keep_float32` and `op_lists`, hold for all candidates.
        *args: The arguments of a call, with values. For keyword arguments tune a function of
            your own, such as `lambda x: fn(x, training=True)`.
        dtype: "float16" or "bfloat16"; None for the one that this machine multiplies natively,
            bfloat16 without one.
        candidates: Names of placements of `tfamp.rewrite`; "float32" is added if it is missing.
            "fused" is left out without ops for XLA to compile, or without XLA.
        max_error: Largest error of the outputs against float32's for a candidate to be chosen;
            see `TuneRow.error`. With None results must only be finite where float32's are.
        rounds: Largest number of times that each candidate is timed.
        seconds: After so many no round begins, except the first, and the second where float32
            may be the fastest. A candidate is dropped if its trace and first call take this
            much longer than float32's.

    Returns:
        The report: call `report.best` from now on; `print(report.to_text())` shows the reasons.

    Raises:
        TypeError, ValueError: An argument is wrong, or the function uses an object whose state
            cannot be restored, such as an iterator or a lookup table that it writes to; the
            message says what to do.
        RewriteError: The graph cannot be rewritten.

    Example:
        >>> import tensorflow as tf, tfamp
        >>> weights = tf.Variable(tf.ones((64, 64)))
        >>> def fn(x):
        ...     return x @ weights
        >>> report = tfamp.tune(fn, tf.ones((8, 64)), dtype="bfloat16", rounds=3)
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
        checked_word("candidates", name, (FLOAT32, *PLACEMENTS), exact=True)
    if not tf.executing_eagerly():
        raise RewriteError("Tuning runs functions: call it where no function is being traced.")
    if tf.config.functions_run_eagerly():
        raise RewriteError("Tuning needs graphs: tf.config.run_functions_eagerly(True) is on.")
    placed = [name for name in chosen[1:] if name != FUSED or xla_works("")]
    given, key = options, ""
    if options.profile is None and set(placed) - {"lists"}:
        # With one profile all candidates share the graph after the first passes.
        with function_state.kept_random_states():
            found = find_profile().profile
        options, key = dataclasses.replace(options, profile=found), key_of_found(found)
    kinds = (tf.types.experimental.PolymorphicFunction, tf.types.experimental.ConcreteFunction)
    as_it_is = fn if isinstance(fn, kinds) else TracedFunction.of(fn).unchanged()
    # Its graph is that of the trace which all candidates share.
    changes: dict[str, dict[str, Any]] = {FLOAT32: {"dtype": FLOAT32}}
    changes |= {name: {"placement": name} for name in placed}
    return [
        Candidate(
            name,
            RewrittenFunction(fn, dataclasses.replace(options, **change)),
            as_it_is if name == FLOAT32 else None,
            f"{dataclasses.replace(given, **change)!r} {key}",
        )
        for name, change in changes.items()
    ]


def compare_candidates(
    candidates: Sequence[Candidate],
    args: Sequence[Nest],
    *,
    name: str,
    dtype: str,
    max_error: float | None = None,
    rounds: int = ROUNDS,
    seconds: float = SECONDS,
    kept: object = (),
    program: str = "",
    before: Callable[[], object] = lambda: None,
) -> TuneReport:
    """Alternates runs of candidates, float32's first, on the arguments of a call.

    If the user's cache has the choice, nothing runs. `kept` are the numbers of layers that stay
    float32: the program does not show them. `program` is a hash of the program, if it is known
    without a trace. `before` is called before the function is traced.

    Raises:
        TypeError, ValueError: An argument is wrong, or calls change what cannot be restored.
        RewriteError: The function cannot be rewritten.
    """
    limits = Limits(max_error, rounds, seconds)
    _check_have_values(name, args)
    subject = _Subject(candidates, args, program, kept, before)
    # Autocast is off, and the report replaces the warning.
    with current_modes.set_to(None), warnings.catch_warnings(), subject.traced_once():
        warnings.simplefilter("ignore", NothingConvertedWarning)
        choice, best = _chosen(subject, limits)
    return TuneReport(name, dtype, max_error=limits.max_error, best=best, **choice._asdict())


def _chosen(subject: _Subject, limits: Limits) -> tuple[Choice, Function]:
    """The choice among candidates, kept or measured now, and the function to use."""
    with function_state.kept_random_states() as restore_randoms:
        begin, generator = time.monotonic(), keras_hooks.global_seed_generator()
        if not subject.program:
            subject.before()
        file = subject.file(limits)
        # A generator that the trace has made holds the state of this trace.
        is_random = keras_hooks.global_seed_generator() is not generator
        choice = kept_choice(file, (candidate.name for candidate in subject.candidates))
        if choice is None:
            subject.before()
            state = State(subject.args, restore_randoms)
            runs = measured(subject.candidates, subject.args, state, limits, begin)
            choice = keep_choice(file, choice_of(runs, limits.max_error))
        chosen = subject.candidate_of(choice)
        if chosen.best:
            return choice, chosen.best
        if not subject.program:  # The trace is there, by which the file was found.
            trace = chosen.function.get_concrete_function(*subject.args)
            is_random = is_random or bool(function_state.random_ops(trace))
    return choice, chosen.function.copy() if is_random else chosen.function


@dataclass(frozen=True)
class _Subject:
    """A function that is tuned: its candidates and arguments, and what its choice depends on.

    Attributes:
        candidates: Ways to run it, float32's first.
        args: The arguments of a call.
        program: A hash of the program, if it is known without a trace, else "".
        kept: Numbers of the layers that stay float32.
        before: Called before the function is traced.
    """

    candidates: Sequence[Candidate]
    args: Sequence[Nest]
    program: str
    kept: object
    before: Callable[[], object]

    def traced_once(self) -> contextlib.AbstractContextManager[None]:
        """A context in which all candidates share one trace."""
        return traced_once(TracedFunction.of(self.candidates[0].function.written))

    def candidate_of(self, choice: Choice) -> Candidate:
        """The candidate that a choice has chosen."""
        name = next(row.candidate for row in choice.rows if row.chosen)
        (chosen,) = (candidate for candidate in self.candidates if candidate.name == name)
        return chosen

    def file(self, limits: Limits) -> Path | None:
        """The file of the choice in the user's cache; None if the choice is not kept.

        Choices with the user's own op lists or calibration data are not kept.
        """
        settings = [getattr(each.function, "settings", None) for each in self.candidates]
        if any(option.op_lists or option.calibration for option in settings if option):
            return None
        program = self.program
        if not program:
            trace = self.candidates[0].function.get_concrete_function(*self.args)
            program = fingerprint(trace.graph.as_graph_def(add_shapes=True))
        keys = {candidate.name: candidate.key for candidate in self.candidates}
        arguments = {"candidates": keys, "limits": limits, "kept": self.kept}
        return choice_file(program, arguments)


def _check_have_values(name: str, args: Sequence[Nest]) -> None:
    for leaf in tf.nest.flatten(list(args)):
        if isinstance(leaf, tf.TypeSpec | keras.KerasTensor):
            raise TypeError(
                f"Tuning runs {name} on the arguments, which must have values: give a batch of "
                f"data, got {leaf!r}."
            )
