"""`find_nonfinite`: which op made the first NaN or infinity of a step, why, and what to change.

Data, then variables and loss scale, are looked at first; then the step is traced, run in its low
dtype and in float32, and what was seen of its tensors is analysed. Each stage ends in a finding or
in nothing; only the report is made of words.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfamp.core.dtypes import FLOAT_DTYPES
from tfamp.diagnostics.model_runs import check_compute_dtype, layer_path
from tfamp.diagnostics.nonfinite_analysis import Twins, largest_scale, look
from tfamp.diagnostics.nonfinite_report import (
    ALSO_IN_FLOAT32,
    OVERFLOW,
    Finding,
    NonFiniteReport,
    ValueRange,
    report_of,
)
from tfamp.diagnostics.nonfinite_step import Step, trace_function, trace_model
from tfamp.graph.observe import TensorStats, stats_of

# Where dynamic scales start, and a scale with which many models have been trained.
_USUAL_START, _USUAL_SCALE = 2.0**16, 2.0**7


def find_nonfinite(
    model_or_fn: Any,
    x: Any,
    y: Any = None,
    *,
    loss: Any = None,
    dtype: str | None = None,
) -> NonFiniteReport | None:
    """Finds the first infinity or NaN of a training step, and says why and what to do.

    Use it when a loss is NaN, or when a loss scale goes on falling. The step is traced and run
    twice, in its mixed precision and in float32 with the same weights, data and random numbers, and
    every float tensor in it is looked at: forward pass, loss, gradients, the bodies of loops. That
    takes seconds, so give it one batch.

    Weights, optimizer, seeds, moving statistics and policies are as before afterwards, also after
    an exception. What a Python function does to Python objects while it is traced is not undone,
    and other threads must not call the model meanwhile.

    Infinite constants, as in masks, are no fault while nothing but finite results comes of them.
    Neither is a dynamic loss scale of up to 2**16 that is too large, if 2**7 would do: it backs off
    by itself.

    Args:
        model_or_fn: A Keras model under any policy; or a function, a `tf.function`, or what
            `tfamp.rewrite` returned: a forward pass, or a whole training step with its tape,
            autocast and optimizer inside. Called as `fn(x)`, or `fn(x, y)`.
        x: One batch: arrays or tensors in the structure that the model or function takes. A tuple
            is spread over the arguments of a function that has as many.
        y: Targets of the batch, if there are any.
        loss: A loss as for `compile`, or a function of targets and outputs. None is the loss that
            the model is compiled with. With a function, `fn(x)` is the forward pass then, and
            gradients are taken with respect to the variables it uses.
        dtype: "float16", "bfloat16" or "float32" to run the step as if in that dtype: a model as
            under that mixed policy, a function as `tfamp.rewrite` would have it. None is what it
            computes in.

    Returns:
        The report; None where all is finite. The loss is scaled if the model is compiled with an
        optimizer that does so, or if the function does.

    Raises:
        TypeError: `model_or_fn` cannot be called, `x` is a data set, or `loss` is no loss.
        ValueError: There is no such dtype; there are targets, but no loss; or a model's batch is
            empty.

    Example:
        >>> import keras, numpy, tfamp
        >>> from tfamp.diagnostics import find_nonfinite
        >>> with tfamp.policy_scope("mixed_float16"):
        ...     model = keras.Sequential([
        ...         keras.Input((3,)),
        ...         keras.layers.Activation("exponential", name="growing"),
        ...         keras.layers.Dense(1),
        ...     ])
        >>> x, y = numpy.ones((2, 3)), numpy.ones((2, 1))
        >>> find_nonfinite(model, x, y, loss="mse") is None
        True
        >>> report = find_nonfinite(model, 12 * x, y, loss="mse")
        >>> report.stage, report.layer, report.op, report.kind
        ('forward', 'growing', 'Exp', 'overflow')
    """
    _check(model_or_fn, x, dtype)
    finding = _bad_data(x, y)
    if finding is None:
        step = _trace(model_or_fn, x, y, loss, dtype)
        finding = _bad_variable(step) or _bad_scale(step) or _search(step, dtype)
    return None if finding is None else report_of(finding)


def _check(model_or_fn: Any, x: Any, dtype: Any) -> None:
    if not callable(model_or_fn):
        raise TypeError(
            "model_or_fn must be a Keras model, a function or what tfamp.rewrite returned; got "
            f"{type(model_or_fn).__name__}."
        )
    check_compute_dtype(dtype)
    if isinstance(x, tf.data.Dataset):
        raise TypeError(
            "x must be one batch; got a data set. Give the x and y of next(iter(data))."
        )


def _trace(model_or_fn: Any, x: Any, y: Any, loss: Any, dtype: str | None) -> Step:
    if not isinstance(model_or_fn, keras.Layer):
        return trace_function(model_or_fn, x, y, loss, dtype)
    sizes = {leaf.shape[0] for leaf in keras.tree.flatten(x) if len(getattr(leaf, "shape", ()))}
    if sizes == {0}:
        raise ValueError(
            "x is an empty batch, and the mean of no losses is NaN in any precision. Give a batch "
            "with at least one example."
        )
    if not model_or_fn.built:
        model_or_fn(keras.tree.map_structure(keras.ops.convert_to_tensor, x))
    return trace_model(model_or_fn, x, y, loss, dtype)


def _search(step: Step, dtype: str | None) -> Finding | None:
    """Runs a step; if it is not finite, runs it without a loss scale, to see if that is why."""
    twins = Twins(step, dtype)
    finding = look(step, twins, step.scale)
    if finding is None or step.scale == 1.0:
        return finding
    unscaled = look(step, twins, 1.0)
    if unscaled is not None:
        return unscaled
    best = largest_scale(step, twins)
    usual = step.scale <= _USUAL_START and best is not None and best >= _USUAL_SCALE
    if step.scale_adapts and usual:
        return None  # A dynamic scale finds its place by itself, in a few skipped steps.
    return dataclasses.replace(
        finding,
        stage="loss_scale",
        kind=OVERFLOW,
        variable=finding.gradient_of or finding.variable,
        scale=step.scale,
        best_scale=best,
    )


# ---- What is not finite before a step is run -----------------------------------------------------


def _bad_data(x: Any, y: Any) -> Finding | None:
    """The first input that is not finite."""
    for name, value in (("x", x), ("y", y)):
        for number, leaf in enumerate(tf.nest.flatten(value, expand_composites=True)):
            stats = _bad_stats(leaf)
            if stats is not None:
                whole = name if leaf is value else f"{name}, part {number}"
                note = f"{whole}: {_where_bad(leaf)}."
                return _before("input", "Placeholder", whole, stats, note=note)
    return None


def _bad_variable(step: Step) -> Finding | None:
    """The first variable that is not finite."""
    for name, variable in step.variables:
        stats = _bad_stats(tf.convert_to_tensor(variable))
        if stats is not None:
            owner = step.owner_of(variable)
            layer = (name.rpartition("/")[0] or None) if owner is None else layer_path(owner)
            return _before("weights", "ReadVariableOp", name, stats, variable=name, layer=layer)
    return None


def _bad_scale(step: Step) -> Finding | None:
    """A loss scale that is no positive number."""
    scale, name = step.scale, step.scale_name
    if math.isfinite(scale) and scale > 0:
        return None
    stats = stats_of(np.array(scale, np.float32))
    return _before("loss_scale", "ReadVariableOp", "loss scale", stats, variable=name, scale=scale)


def _before(stage: str, op: str, name: str, stats: TensorStats, **more: Any) -> Finding:
    facts: dict[str, Any] = {"stage": stage, "op": op, "layer": None, "variable": None} | more
    facts["ranges"] = {"inputs": (), "outputs": (ValueRange.of(name, stats),)}
    return Finding(kind=ALSO_IN_FLOAT32, dtype=stats.dtype, **facts)


def _bad_stats(value: Any) -> TensorStats | None:
    """What an array is like that has values that are not finite; None for any other value."""
    # Not every tensor is an array: a variant is none.
    if not getattr(getattr(value, "dtype", None), "is_floating", True):
        return None
    array = np.asarray(value)
    stats = stats_of(array) if array.dtype.name in FLOAT_DTYPES else None
    return stats if stats is not None and stats.nonfinite else None


def _where_bad(value: Any) -> str:
    bad = np.argwhere(~np.isfinite(np.asarray(value).astype(np.float64)))
    rows = len(np.unique(bad[:, 0])) if bad.shape[1] else 1
    some = "1 row has one" if rows == 1 else f"{rows} rows have one"
    return f"the first such value is at index {bad[0].tolist()}, {some}"
