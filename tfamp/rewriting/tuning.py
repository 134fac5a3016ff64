"""`tfamp.tune`: alternates runs of a function in float32 and low precision on real arguments.

candidates -> one trace -> the choice in the user's cache, or measured runs -> report

The caller's own traces do not run, so state that ops keep in a trace does not change either.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import keras
import tensorflow as tf

from tfamp.core.errors import NothingConvertedWarning, RewriteError
from tfamp.core.kinds import Function, Nest
from tfamp.core.names import CandidateName, LowDtypeLike
from tfamp.interop import keras_hooks
from tfamp.interop.tf_private import default_device_kind, device_kind_in_force, xla_works
from tfamp.machine.hardware import find_profile, key_of_found
from tfamp.planning.options import RewriteOptions, strings
from tfamp.planning.structures import FLOAT32
from tfamp.planning.ways import (
    AS_IT_IS,
    FUSED,
    Way,
    incumbent_of,
    usual_ways,
    ways_of,
    why_not_here,
)
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
    ROUNDS,
    SECONDS,
    Candidate,
    MeasuringLimits,
    State,
    choice_of,
    measured,
)
from tfamp.rewriting.pipeline import traced_once
from tfamp.rewriting.traced_function import TracedFunction
from tfamp.rewriting.tune_report import TuneReport
from tfamp.torch_style.modes import current_modes


def tune(
    fn: Any,
    *args: Any,
    dtype: LowDtypeLike | None = None,
    candidates: Sequence[CandidateName] | None = None,
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

    float32, the function as it is, is always a candidate: the result is slower by noise at
    most. What level "auto" of `prepare` would take is chosen unless another candidate was
    faster in three quarters of the rounds, and by more than the noise, which is measured too.
    Candidates share one trace, and those that XLA compiles as a whole another one; those with
    the same graph run once, unless variables are arguments: then each is traced and runs. The
    first call of each, which compiles, runs in a thread while the next one is rewritten. Then
    all are timed twice, and those within 15 % of the fastest twice more; a round that was still
    warming up, as kernels are loaded, does not count. Further rounds are for those that are not
    slower in three quarters of the rounds. No round begins after 2.5 times as long as the first
    two calls in float32 take.

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
        candidates: Names of placements of `tfamp.rewrite`, and "xla", "lists_xla" and
            "min_cut_xla": float32 and two placements with the whole function compiled by XLA.
            "float32" is added if it is missing. None for all that may be the fastest: the
            placements, on GPUs and TPUs all of XLA's, on CPUs "xla" for functions of few
            convolutions, without loops, that compile within `seconds`. The report says what was
            left out, and why: XLA cannot compile it, or the function has a `jit_compile`.
        max_error: Largest error of the outputs against float32's for a candidate to be chosen;
            see `TuneRow.error`. It is measured with the choice: a kept choice is not checked on
            other data. With None results must only be finite where float32's are.
        rounds: Largest number of times that each candidate is timed.
        seconds: After so many no round begins, except the first, and the second where float32,
            or what level "auto" takes, may be the fastest. No further candidate is compiled as a
            whole once these took so long. A candidate is dropped if its trace and first call
            take this much longer than float32's and those of what level "auto" takes.

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
    traced = TracedFunction.of(fn)
    fixed = traced.jit_compile
    why_not = "" if fixed is None else f"the function has jit_compile={fixed}"
    ways, left_out = candidates_of(fn, options, candidates, why_not)
    device = device_here()
    return compare_candidates(
        ways,
        args,
        name=traced.name,
        dtype=low,
        max_error=max_error,
        rounds=rounds,
        seconds=seconds,
        left_out=left_out,
        incumbent=incumbent_of(
            (each.way for each in ways), is_native=low_dtype(None) == low, device=device
        ),
    )


def device_here() -> str:
    """Returns the kind of device that functions run on here."""
    return device_kind_in_force() or default_device_kind()


def candidates_of(
    fn: Any, options: RewriteOptions, names: Iterable[str] | None, why_not_compiled: str = ""
) -> tuple[list[Candidate], dict[str, str]]:
    """Makes candidates of a function, float32 first; adds reasons for those left out.

    `names` is None for all that suit the device. `why_not_compiled` is why XLA must not compile
    the whole function, "" if it may.

    Raises:
        TypeError, ValueError: A name is not the name of a candidate; the message lists these.
        RewriteError: Functions cannot be traced and run here.
    """
    device = device_here()
    asked = names is not None
    ways = usual_ways(device) if names is None else ways_of(strings("candidates", names))
    if not tf.executing_eagerly():
        raise RewriteError("Tuning runs functions: call it where no function is being traced.")
    if tf.config.functions_run_eagerly():
        raise RewriteError("Tuning needs graphs: tf.config.run_functions_eagerly(True) is on.")
    uses_xla = any(way.is_compiled or way.placement == FUSED for way in ways)
    is_there = uses_xla and xla_works("")
    reasons = {
        way.name: why_not_here(way, xla_works=is_there, why_not_compiled=why_not_compiled)
        for way in ways
    }
    left_out = {name: reason for name, reason in reasons.items() if reason}
    ways = tuple(way for way in ways if way.name not in left_out)
    given, key = options, ""
    if options.profile is None and {way.placement for way in ways} - {FLOAT32, "lists"}:
        # With one profile all candidates share the graph after the first passes.
        with function_state.kept_random_states():
            found = find_profile().profile
        options, key = dataclasses.replace(options, profile=found), key_of_found(found)
    kinds = (tf.types.experimental.PolymorphicFunction, tf.types.experimental.ConcreteFunction)
    as_it_is = fn if isinstance(fn, kinds) else TracedFunction.of(fn).unchanged()
    compiled = TracedFunction.of(fn).compiled()

    def candidate(way: Way) -> Candidate:
        # float32's graph is that of the trace which all candidates share.
        is_float32 = way.placement == FLOAT32
        change: dict[str, Any] = {"dtype": FLOAT32} if is_float32 else {"placement": way.placement}
        written, best = (compiled, compiled) if way.is_compiled else (fn, as_it_is)
        rewritten: RewrittenFunction[..., Any]
        rewritten = RewrittenFunction(written, dataclasses.replace(options, **change))
        text = f"{dataclasses.replace(given, **change)!r} {way} {key}"
        suits = "" if asked else device
        return Candidate(way, rewritten, best if is_float32 else None, text, suits)

    return [candidate(way) for way in ways], left_out


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
    left_out: Mapping[str, str] = MappingProxyType({}),
    incumbent: Way = AS_IT_IS,
) -> TuneReport:
    """Alternates runs of candidates, float32's first, on the arguments of a call.

    `left_out` are reasons for ways that are not candidates, and `incumbent` is the one to use
    unless another one is faster. If the user's cache has the choice, nothing runs. `kept` are
    the numbers of layers that stay float32: the program does not show them. `program` is a hash
    of the program, if it is known without a trace. `before` is called before the function is
    traced.

    Raises:
        TypeError, ValueError: An argument is wrong, or calls change what cannot be restored.
        RewriteError: The function cannot be rewritten.
    """
    limits = MeasuringLimits(max_error, rounds, seconds)
    _check_have_values(name, args)
    subject = _Subject(candidates, args, program, kept, before, left_out, incumbent)
    # Autocast is off, and the report replaces the warning.
    with current_modes.set_to(None), warnings.catch_warnings(), subject.traced_once():
        warnings.simplefilter("ignore", NothingConvertedWarning)
        choice, best = _chosen(subject, limits)
    return TuneReport(name, dtype, max_error=limits.max_error, best=best, **choice._asdict())


def _chosen(subject: _Subject, limits: MeasuringLimits) -> tuple[Choice, Function]:
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
            runs, left_out = measured(
                subject.candidates, subject.args, state, limits, begin, subject.incumbent
            )
            left_out = {**subject.left_out, **left_out}
            found = choice_of(runs, limits.max_error, left_out, subject.incumbent)
            choice = keep_choice(file, found)
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
        left_out: Reasons for ways that are not candidates.
        incumbent: The way to use unless another one is faster.
    """

    candidates: Sequence[Candidate]
    args: Sequence[Nest]
    program: str
    kept: object
    before: Callable[[], object]
    left_out: Mapping[str, str]
    incumbent: Way

    def traced_once(self) -> contextlib.AbstractContextManager[None]:
        """A context in which all candidates share one trace."""
        return traced_once(TracedFunction.of(self.candidates[0].function.written))

    def candidate_of(self, choice: Choice) -> Candidate:
        """The candidate that a choice has chosen."""
        name = next(row.candidate for row in choice.rows if row.chosen)
        (chosen,) = (candidate for candidate in self.candidates if candidate.name == name)
        return chosen

    def file(self, limits: MeasuringLimits) -> Path | None:
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
        # Ways that are missing, as without XLA, would be candidates elsewhere.
        arguments = {
            "candidates": keys,
            "devices": [candidate.device for candidate in self.candidates],
            "left_out": dict(self.left_out),
            "incumbent": self.incumbent,
            "limits": limits,
            "kept": self.kept,
        }
        return choice_file(program, arguments)


def _check_have_values(name: str, args: Sequence[Nest]) -> None:
    for leaf in tf.nest.flatten(list(args)):
        if isinstance(leaf, tf.TypeSpec | keras.KerasTensor):
            raise TypeError(
                f"Tuning runs {name} on the arguments, which must have values: give a batch of "
                f"data, got {leaf!r}."
            )
