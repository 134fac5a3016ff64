"""`find_nonfinite`: which op made the first NaN or infinity of a step, why, and what to change."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfamp.core.dtypes import LOW_PRECISION
from tfamp.diagnostics.model_runs import COMPUTE_DTYPES
from tfamp.diagnostics.searching import model_step
from tfamp.diagnostics.searching.finding_report import describe_finding
from tfamp.diagnostics.searching.investigation import Investigation
from tfamp.diagnostics.searching.known_before import bad_data, bad_scale, bad_variable
from tfamp.diagnostics.searching.nonfinite_report import NonFiniteReport
from tfamp.diagnostics.searching.step_graph import StepGraph, call_of, trace_step
from tfamp.graph.measuring.value_probes import measured_scopes
from tfamp.graph.transforms.retype import low_dtypes
from tfamp.rewriting.function import RewrittenFunction, rewrite

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
    report = bad_data(x, y)
    if report is not None:
        return report
    if isinstance(model_or_fn, keras.Layer):
        _check_batch(x)
        return _find_in_model(model_or_fn, x, y, loss, dtype)
    return _find_in_function(model_or_fn, x, y, loss, dtype)


def _check(model_or_fn: Any, x: Any, dtype: Any) -> None:
    if not callable(model_or_fn):
        raise TypeError(
            "model_or_fn must be a Keras model, a function or what tfamp.rewrite returned; got "
            f"{type(model_or_fn).__name__}."
        )
    if dtype is not None and dtype not in COMPUTE_DTYPES:
        raise ValueError(
            f"dtype must be one of {', '.join(COMPUTE_DTYPES)} or None; got {dtype!r}."
        )
    if isinstance(x, tf.data.Dataset):
        raise TypeError(
            "x must be one batch; got a data set. Give the x and y of next(iter(data))."
        )


def _check_batch(x: Any) -> None:
    sizes = {leaf.shape[0] for leaf in keras.tree.flatten(x) if len(getattr(leaf, "shape", ()))}
    if sizes == {0}:
        raise ValueError(
            "x is an empty batch, and the mean of no losses is NaN in any precision. Give a batch "
            "with at least one example."
        )


def _find_in_model(
    model: Any, x: Any, y: Any, loss: Any, dtype: str | None
) -> NonFiniteReport | None:
    if not model.built:
        model(keras.tree.map_structure(keras.ops.convert_to_tensor, x))
    report = bad_variable(model_step.all_variables(model), lambda v: model_step.owner_of(model, v))
    if report is not None:
        return report
    scale, holder = model_step.loss_scale(model)
    if not (np.isfinite(scale) and scale > 0):
        return bad_scale(scale, holder)
    step = model_step.trace_model(model, x, y, loss, dtype)
    investigation = Investigation(step, dtype, step.given - 1)
    describe = functools.partial(describe_finding, investigation, how="model")
    return _find(investigation, scale, model_step.scale_is_dynamic(model), describe)


def _find(
    investigation: Investigation,
    scale: float,
    dynamic: bool,
    describe: Callable[..., NonFiniteReport],
) -> NonFiniteReport | None:
    """Runs a step; if it is not finite, runs it without a loss scale, to see if that is why."""
    finding = investigation.look(scale)
    if finding is None or scale == 1.0:
        return None if finding is None else describe(finding)
    unscaled = investigation.look(1.0)
    if unscaled is not None:
        return describe(unscaled)
    best = investigation.largest_scale(investigation.run(1.0), 1.0)
    if dynamic and scale <= _USUAL_START and best is not None and best >= _USUAL_SCALE:
        return None  # A dynamic scale finds its place by itself, in a few skipped steps.
    return describe(finding, scale=scale, best_scale=best)


def _find_in_function(
    function: Any, x: Any, y: Any, loss: Any, dtype: str | None
) -> NonFiniteReport | None:
    arguments = call_of(function, x, None if loss is not None else y)
    how = "rewritten" if isinstance(function, RewrittenFunction) else "function"
    if isinstance(function, RewrittenFunction) and dtype in LOW_PRECISION:
        function = function.copy(dtype)
    step = _trace_function(function, arguments, y, loss)
    if (
        how == "function"
        and dtype in LOW_PRECISION
        and not low_dtypes(measured_scopes(step.graph_def))
    ):
        how = "rewritten"
        lowered = rewrite(function, dtype=dtype, placement="lists")
        step = _trace_function(lowered, arguments, y, loss)
    report = bad_variable(step.variables, names=step.names)
    if report is not None:
        return report
    scale = None if step.scale is None else float(step.scale.numpy())
    if scale is not None and not (np.isfinite(scale) and scale > 0):
        return bad_scale(scale, step.scale.name.partition(":")[0])
    investigation = Investigation(step, dtype)
    describe = functools.partial(describe_finding, investigation, how=how)
    return _find(investigation, 1.0 if scale is None else scale, True, describe)


def _trace_function(function: Any, arguments: tuple[Any, ...], y: Any, loss: Any) -> StepGraph:
    if loss is None:
        return trace_step(function, arguments)
    loss = model_step.checked_loss(loss)

    def step(*given: Any) -> Any:
        with tf.GradientTape() as tape:
            outputs = function(*given[:-1])
            with tf.name_scope(model_step.LOSS_SCOPE):
                value = tf.reduce_mean(model_step.call_loss(loss, given[-1], outputs))
        variables = tape.watched_variables()
        gradients = tape.gradient(value, variables) if variables else []
        return [*tf.nest.flatten(outputs, expand_composites=True), value, *gradients]

    return trace_step(step, (*arguments, y))
