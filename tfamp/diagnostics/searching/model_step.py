"""The training step of a Keras model as a graph: forward, loss, scaled loss, gradients."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfamp.core.dtypes import FLOAT_DTYPES
from tfamp.diagnostics.model_runs import all_layers, computing_in, float_tensors
from tfamp.diagnostics.searching.step_graph import StepGraph, trace_step, variable_names
from tfamp.interop import keras_hooks
from tfamp.layers.float32_losses import add_losses_in_float32
from tfamp.layers.methods import rewrap_methods, wrapped_methods

LOSS_SCOPE, SCALE_SCOPE = "tfamp_loss", "tfamp_loss_scale"


def trace_model(model: Any, x: Any, y: Any, loss: Any, dtype: str | None) -> StepGraph:
    """Traces the training step of a model; the last of the step's values is the loss scale.

    Args:
        model: A built Keras model.
        x: Its input.
        y: The targets, or None.
        loss: A loss as `compile` takes it, a function of targets and outputs, or None for the
            model's own. Without any, only the forward pass is traced.
        dtype: As for `model_runs.computing_in`.

    Returns:
        The step.
    """
    roles: list[tuple[str, str | None]] = []
    compute_loss = loss_function(model, y, loss)
    # As in `fit`, AutoGraph leaves the code of layers as it is.
    body = tf.autograph.experimental.do_not_convert(_StepBody(model, compute_loss, dtype, roles))
    names = variable_names(model.variables)
    args = (keras.tree.map_structure(_as_input, x), keras.tree.map_structure(_as_input, y))
    with computing_in(model, dtype), _losses_kept(model):
        return trace_step(body, (*args, tf.constant(1.0)), roles=lambda: roles, names=names)


class _StepBody:
    """The function that is traced."""

    def __init__(
        self,
        model: Any,
        compute_loss: Callable[[Any, Any, Any], Any] | None,
        dtype: str | None,
        roles: list[tuple[str, str | None]],
    ) -> None:
        self._model = model
        self._compute_loss = compute_loss
        self._dtype = dtype
        self._roles = roles
        self.__name__ = "step"

    def __call__(self, x: Any, y: Any, scale: Any) -> list[Any]:
        model, compute_loss = self._model, self._compute_loss
        self._roles.clear()
        results: list[Any] = []
        with tf.GradientTape() as tape:
            outputs = model(x, training=compute_loss is not None)
            if self._dtype is not None:  # As a policy of tfamp's would have it.
                outputs = keras.tree.map_structure(_as_float32, outputs)
            for tensor in float_tensors(outputs):
                self._add(results, tensor, "output")
            if compute_loss is None:
                return results
            with tf.name_scope(LOSS_SCOPE):
                loss = compute_loss(x, y, outputs)
            self._add(results, loss, "loss")
            with tf.name_scope(SCALE_SCOPE):
                # In float32, as a scaled loss easily exceeds float16's range.
                scaled = tf.cast(loss, tf.float32) * scale
            self._add(results, scaled, "scaled loss")
        variables = model.trainable_variables
        gradients = tape.gradient(scaled, [variable.value for variable in variables])
        for variable, gradient in zip(variables, gradients, strict=True):
            if gradient is not None:
                values = gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient
                self._add(results, values, "gradient", variable.path)
        return results

    def _add(self, results: list[Any], tensor: Any, role: str, variable: str | None = None) -> None:
        results.append(tensor)
        self._roles.append((role, variable))


def loss_function(model: Any, y: Any, loss: Any) -> Callable[[Any, Any, Any], Any] | None:
    """Returns what computes the loss from inputs, targets and outputs; None if there is none.

    Raises:
        ValueError: There are targets, but the model is not compiled and no loss is given.
        TypeError: `loss` is no loss.
    """
    if loss is not None:
        return _GivenLoss(model, checked_loss(loss))
    has_own = getattr(model, "compiled", False)
    own = getattr(type(model), "compute_loss", None)
    computes = own is not None and own is not keras.Model.compute_loss
    if has_own and (y is not None or computes):
        return lambda x, y, outputs: model.compute_loss(x, y, outputs, training=True)
    if y is not None:
        raise ValueError(
            "find_nonfinite got targets y, but no loss: the model is not compiled. Give loss=, as "
            "for compile, or leave y out to look at the forward pass only."
        )
    return None


class _GivenLoss:
    def __init__(self, model: Any, loss: Callable[..., Any]) -> None:
        self._model = model
        self._loss = loss

    def __call__(self, x: Any, y: Any, outputs: Any) -> Any:
        values = call_loss(self._loss, y, outputs)
        total = tf.reduce_mean(values) if values.shape.rank != 0 else values
        for extra in self._model.losses:
            total += tf.cast(extra, total.dtype)
        return total


def call_loss(loss: Callable[..., Any], y: Any, outputs: Any) -> Any:
    """Calls a loss with targets and outputs, or with outputs alone if it takes one argument."""
    if y is None and not isinstance(loss, keras.losses.Loss):
        required = [
            parameter
            for parameter in inspect.signature(loss).parameters.values()
            if parameter.default is parameter.empty
            and parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        ]
        if len(required) == 1:
            return tf.convert_to_tensor(loss(outputs))
    return tf.convert_to_tensor(loss(y, outputs))


def checked_loss(loss: Any) -> Callable[..., Any]:
    """Returns a loss by name as a function; raises a TypeError for what is no loss."""
    if not isinstance(loss, str) and not callable(loss):
        raise TypeError(
            f"loss must be the name of a Keras loss, a keras.losses.Loss or a function of targets "
            f"and outputs; got {loss!r}."
        )
    found: Callable[..., Any] = keras.losses.get(loss)
    return found


def loss_scale(model: Any) -> tuple[float, str | None]:
    """Returns the loss scale a model is trained with.

    Args:
        model: A Keras model.

    Returns:
        The scale, and the name of the variable that holds it; 1 and None where nothing does.
    """
    optimizer = getattr(model, "optimizer", None)
    dynamic = getattr(optimizer, "dynamic_scale", None)
    if dynamic is not None:
        return float(keras.ops.convert_to_numpy(dynamic)), str(dynamic.path)
    fixed = getattr(optimizer, "loss_scale_factor", None)
    if fixed:
        return float(fixed), "loss_scale_factor"
    return 1.0, None


def scale_is_dynamic(model: Any) -> bool:
    """Whether the loss scale of a model adapts by itself."""
    optimizer = getattr(model, "optimizer", None)
    return hasattr(optimizer, "dynamic_scale") and bool(getattr(optimizer, "dynamic", True))


def all_variables(model: Any) -> list[Any]:
    """Returns the variables of a model and of the optimizer it is compiled with."""
    optimizer = getattr(model, "optimizer", None)
    return [*model.variables, *(optimizer.variables if optimizer is not None else ())]


def owner_of(model: Any, variable: Any) -> Any:
    """Returns the innermost layer that holds a variable; None if no layer does."""
    holders = [
        layer for layer in all_layers(model) if any(variable is each for each in layer.variables)
    ]
    return min(holders, key=lambda layer: len(all_layers(layer)), default=None)


@contextlib.contextmanager
def _losses_kept(model: Any) -> Iterator[None]:
    """Drops the losses that layers add while they are traced: these belong to the trace.

    They are float32, as where the model computes in a low dtype because of tfamp.
    """
    with contextlib.ExitStack() as undo:
        for layer in all_layers(model):
            undo.callback(keras_hooks.replace_losses(layer))
            undo.callback(rewrap_methods, layer, wrapped_methods(layer))
            add_losses_in_float32(layer)
        yield


def _as_input(value: Any) -> Any:
    """A value as Keras would feed it."""
    if value is None or tf.is_tensor(value):
        return value
    array = np.asarray(value)
    return tf.convert_to_tensor(array.astype(keras.config.floatx()) if _wide(array) else array)


def _wide(array: Any) -> bool:
    return array.dtype == np.float64


def _as_float32(value: Any) -> Any:
    low = keras.ops.is_tensor(value) and value.dtype.name in FLOAT_DTYPES[:2]
    return tf.cast(value, tf.float32) if low else value
