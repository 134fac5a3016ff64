"""The optimizer of a level: wrapped once, with what the level asks for, or not at all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

from tfamp.layer_roles import WeakMap
from tfamp.levels import EffectiveLevel
from tfamp.optimizer import LossScaleOptimizer
from tfamp.options import DynamicLossScale, LossScale

# Wrappers that `prepare` made: another level takes them off, where it leaves a user's own.
_made_here: WeakMap[bool] = WeakMap()


def prepared_optimizer(optimizer: Any, level: EffectiveLevel) -> Any:
    """Returns an optimizer as a level wants it.

    Args:
        optimizer: A Keras optimizer, wrapped or not; it is not modified.
        level: The level.

    Returns:
        A `LossScaleOptimizer` around the innermost optimizer, or that itself where the level asks
        for no loss scale, no clipping and no master weights. The given one, if it will do.

    Raises:
        TypeError: `optimizer` is no Keras optimizer.
        ValueError: It scales losses or clips gradients itself, and the level does too.
    """
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise TypeError(
            "optimizer must be a keras.optimizers.Optimizer, e.g. keras.optimizers.Adam(), or its "
            f"name; got {optimizer!r} of type {type(optimizer).__name__}."
        )
    own = isinstance(optimizer, LossScaleOptimizer)
    rule = level.optimizer_rule
    users = own and not _made_here.get(optimizer)
    if users and level.level != "O0" and level.loss_scale is None and not _asks(level):
        return optimizer  # whoever wraps an optimizer wants it wrapped
    if rule is None:
        return innermost(optimizer)
    if users and not _scale_was_chosen(level):
        rule = optimizer.rule
    if own and _same(optimizer, rule, level):
        return optimizer
    wrapped = LossScaleOptimizer(
        innermost(optimizer), loss_scale=_with_scale_of(optimizer, rule), **_features(level)
    )
    _made_here.set(wrapped, True)
    return wrapped


def innermost(optimizer: Any) -> Any:
    """Returns the optimizer inside a wrapper for loss scaling, itself where there is none."""
    while isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        optimizer = optimizer.inner_optimizer
    return optimizer


def made_by_prepare(optimizer: Any) -> bool:
    """Whether `prepare` made a wrapper."""
    return bool(_made_here.get(optimizer))


def optimizer_for_copy(
    optimizer: Any, level: EffectiveLevel, before: Sequence[Any], after: Sequence[Any]
) -> Any:
    """Returns an optimizer for the variables of a copied model, which goes on where another is.

    Args:
        optimizer: The optimizer of the model that was copied; it is not modified.
        level: The level.
        before: The trainable variables of that model.
        after: Those of the copy, in the same order.

    Returns:
        A new optimizer. Its counters and slot variables have the values of the given one, if that
        was built; its masters, if it has any, start from `before`.
    """
    old = innermost(optimizer)
    new = type(old).from_config(old.get_config())
    wrapped = new
    rule = level.optimizer_rule
    if rule is not None:
        wrapped = LossScaleOptimizer(
            new, loss_scale=_with_scale_of(optimizer, rule), **_features(level)
        )
        _made_here.set(wrapped, True)
    if old.built or level.master_weights:
        wrapped.build(list(after))
    if level.master_weights:
        _start_masters(wrapped, before, after)
    if old.built:
        for target, source in zip(new.variables, old.variables, strict=True):
            target.assign(keras.ops.cast(source, target.dtype))
    return wrapped


def values_of(optimizer: Any, variables: Sequence[Any]) -> list[Any]:
    """Returns the values of variables, of masters where an optimizer has them, as float32.

    Args:
        optimizer: The optimizer that updates the variables; None will do.
        variables: The variables.
    """
    masters = getattr(optimizer, "master_of", lambda variable: None)
    found = [masters(variable) for variable in variables]
    return [
        keras.ops.cast(variable if master is None else master, "float32")
        for variable, master in zip(variables, found, strict=True)
    ]


def _start_masters(wrapped: Any, before: Sequence[Any], after: Sequence[Any]) -> None:
    for source, variable in zip(before, after, strict=True):
        master = wrapped.master_of(variable)
        if master is not None:
            master.assign(keras.ops.cast(source, "float32"))


def _features(level: EffectiveLevel) -> dict[str, Any]:
    features: dict[str, Any] = {}
    if level.grad_clip is not None:
        features["grad_clip"] = level.grad_clip
    if level.master_weights:
        features["master_weights"] = True
    return features


def _asks(level: EffectiveLevel) -> bool:
    return level.grad_clip is not None or level.master_weights


def _scale_was_chosen(level: EffectiveLevel) -> bool:
    return not any(reason.startswith("loss scale:") for reason in level.reasons)


def _same(optimizer: Any, rule: LossScale, level: EffectiveLevel) -> bool:
    return (
        optimizer.rule == rule
        and getattr(optimizer, "grad_clip", None) == level.grad_clip
        and bool(getattr(optimizer, "master_weights", False)) == level.master_weights
    )


def _with_scale_of(optimizer: Any, rule: LossScale) -> LossScale:
    """Returns a dynamic rule that starts at the scale which Keras's own wrapper has reached."""
    return rule
