"""What `compile` leaves in a model: its optimizer, losses, metrics and traced functions."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from typing import Any

import keras

from tfamp.core.errors import TfampWarning
from tfamp.interop import keras_hooks
from tfamp.interop.patching import wrap_method
from tfamp.levels.meaning import EffectiveLevel
from tfamp.levels.model_structure import layers_of
from tfamp.levels.prepared_optimizer import (
    prepared_optimizer,
    trouble_with_slots,
    with_needed_masters,
)

_FUNCTIONS = ("train_function", "test_function", "predict_function")


def drop_traced_functions(model: Any) -> None:
    """Makes a model, and those inside it, trace their steps anew: they have other dtypes now."""
    for layer in layers_of(model):
        if isinstance(layer, keras.Model):
            for name in _FUNCTIONS:
                setattr(layer, name, None)


def give_optimizer(model: Any, optimizer: Any) -> None:
    """Makes a compiled model train with another optimizer; loss and metrics stay.

    Args:
        model: The model; it traces its steps anew.
        optimizer: The optimizer.
    """
    if model.optimizer is not optimizer:
        keras_hooks.set_compiled_optimizer(model, optimizer)
    drop_traced_functions(model)


def compile_like(model: Any, other: Any, optimizer: Any) -> None:
    """Compiles a model as another one is compiled.

    Args:
        model: The model to compile. It stays as it is, with a warning, where its class has a
            `compile` of its own that takes other arguments than Keras's: they are not known.
        other: A compiled model of the same outputs; it keeps its metrics to itself.
        optimizer: The optimizer of the model.
    """
    arguments = keras_hooks.compile_arguments(other)
    arguments |= {"optimizer": optimizer, "auto_scale_loss": False}
    if not _can_compile(model, arguments):
        warnings.warn(
            f"{type(model).__name__}.compile takes other arguments than Keras's own: the new model "
            "that prepare returns is not compiled. Compile it.",
            TfampWarning,
            stacklevel=4,
        )
        return
    for name in ("metrics", "weighted_metrics"):
        arguments[name] = keras.tree.map_structure(_fresh, arguments[name])
    model.compile(**arguments)


def _fresh(metric: Any) -> Any:
    if not isinstance(metric, keras.metrics.Metric):
        return metric
    return type(metric).from_config(metric.get_config())


def _can_compile(model: Any, arguments: dict[str, Any]) -> bool:
    """Whether the arguments of Keras's `compile` are all that a model's own one takes."""
    own = inspect.signature(model.compile)
    named = {
        each.name
        for each in own.parameters.values()
        if each.kind not in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    }
    try:
        own.bind(**arguments)
    except TypeError:
        return False
    return named <= set(arguments)


def wrap_compile(model: Any, level: EffectiveLevel) -> None:
    """Makes `model.compile` give its optimizer what the level asks for, as `prepare` does.

    Args:
        model: The prepared model.
        level: Its level. `compile(..., auto_scale_loss=False)` takes the optimizer as it is, and so
            does a `compile` of the model's own class that has no argument `optimizer`.
    """
    if level.optimizer_rule is None and level.level != "O3":
        return

    def around(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        signature = _compile_signature(original)
        if signature is None and level.optimizer_rule is None:
            return original(*args, **kwargs)
        if signature is None:
            warnings.warn(_unknown_optimizers(model, level), TfampWarning, stacklevel=3)
            return original(*args, **kwargs)
        given = signature.bind(*args, **kwargs)
        default = signature.parameters["optimizer"].default
        optimizer = given.arguments.get("optimizer", default)
        if optimizer is not None and given.arguments.get("auto_scale_loss", True):
            optimizer = keras.optimizers.get(optimizer)
            own = with_needed_masters(level, optimizer)
            if own.optimizer_rule is not None:
                optimizer = prepared_optimizer(optimizer, own)
            trouble = trouble_with_slots(optimizer, own)
            if trouble is not None:
                warnings.warn(trouble, TfampWarning, stacklevel=3)
        given.arguments["optimizer"] = optimizer
        return original(*given.args, **given.kwargs)

    wrap_method(model, "compile", around)


def _compile_signature(compile_model: Callable[..., Any]) -> inspect.Signature | None:
    """Returns how a `compile` takes its arguments; None for one of a user's without `optimizer`."""
    own = inspect.signature(compile_model)
    if "optimizer" in own.parameters:
        return own
    kinds = {each.kind for each in own.parameters.values()}
    if not kinds <= {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}:
        return None
    passed_on = list(inspect.signature(keras.Model.compile).parameters.values())[1:]
    if inspect.Parameter.VAR_POSITIONAL not in kinds:
        keyword = inspect.Parameter.KEYWORD_ONLY
        passed_on = [each.replace(kind=keyword) for each in passed_on]
    return inspect.Signature(passed_on)


def _unknown_optimizers(model: Any, level: EffectiveLevel) -> str:
    return (
        f"{type(model).__name__}.compile takes no argument named optimizer, so its optimizers are "
        f"left as they are. Level {level.level} in {level.dtype} needs them wrapped: give compile "
        "a LossScaleOptimizer around each, and scale the losses in train_step."
    )
