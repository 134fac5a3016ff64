"""`tfamp.tune`: which way to run a function is the fastest here, measured on itself."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from tfamp.interop.keras_hooks import require_tensorflow
from tfamp.policy import low_dtype
from tfamp.rewriting.function import RewrittenFunction, check_function
from tfamp.rewriting.pipeline import RewriteSettings
from tfamp.rewriting.traced_function import TracedFunction
from tfamp.rewriting.tune_report import TuneReport
from tfamp.rewriting.tuning import CANDIDATES, ROUNDS, candidates_of, compare_candidates


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
    settings = RewriteSettings()
    if isinstance(fn, RewrittenFunction):
        fn, settings = fn.written, fn.settings
        dtype = settings.dtype if dtype is None else dtype
    settings = dataclasses.replace(settings, dtype=low_dtype(dtype) or "bfloat16")
    check_function(fn)
    return compare_candidates(
        candidates_of(fn, settings, RewrittenFunction, candidates),
        args,
        name=TracedFunction.of(fn).name,
        dtype=str(settings.dtype),
        max_error=max_error,
        rounds=rounds,
    )
