"""What `compile` leaves in a model: its optimizer, losses, metrics and traced functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras

from tfamp import keras_hooks
from tfamp.levels import EffectiveLevel
from tfamp.methods import wrap_method
from tfamp.model_structure import layers_of
from tfamp.prepared_optimizer import prepared_optimizer, with_needed_masters

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
        model: The model to compile.
        other: A compiled model of the same outputs; it keeps its metrics to itself.
        optimizer: The optimizer of the model.
    """
    arguments = keras_hooks.compile_arguments(other)
    arguments |= {"optimizer": optimizer, "auto_scale_loss": False}
    for name in ("metrics", "weighted_metrics"):
        arguments[name] = keras.tree.map_structure(_fresh, arguments[name])
    model.compile(**arguments)


def _fresh(metric: Any) -> Any:
    if not isinstance(metric, keras.metrics.Metric):
        return metric
    return type(metric).from_config(metric.get_config())


def wrap_compile(model: Any, level: EffectiveLevel) -> None:
    """Makes `model.compile` give its optimizer what the level asks for, as `prepare` does.

    Args:
        model: The prepared model.
        level: Its level. `compile(..., auto_scale_loss=False)` takes the optimizer as it is.
    """
    depends = level.level == "O3" and not level.chose_master_weights
    if level.optimizer_rule is None and not depends:
        return

    def around(
        original: Callable[..., Any], optimizer: Any = "rmsprop", *args: Any, **kwargs: Any
    ) -> Any:
        if optimizer is not None and kwargs.get("auto_scale_loss", True):
            optimizer = keras.optimizers.get(optimizer)
            own = with_needed_masters(level, optimizer)
            if own.optimizer_rule is not None:
                optimizer = prepared_optimizer(optimizer, own)
        return original(optimizer, *args, **kwargs)

    wrap_method(model, "compile", around)
