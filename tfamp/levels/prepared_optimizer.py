"""The optimizer of a level: wrapped once, with what the level asks for, or not at all."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import keras

from tfamp.core.options import DynamicLossScale, LossScale
from tfamp.interop.keras_backend import described
from tfamp.layers.roles import WeakMap
from tfamp.levels.meaning import EffectiveLevel
from tfamp.levels.model_copy import counterparts
from tfamp.levels.optimizer_slots import Slots, slots_of
from tfamp.optimizer import LossScaleOptimizer

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
            f"name; got {described(optimizer)}"
        )
    rule, features = _wanted(optimizer, level)
    if rule is None:
        return innermost(optimizer)
    if isinstance(optimizer, LossScaleOptimizer) and _has(optimizer, rule, features):
        return optimizer
    return _wrap(optimizer, innermost(optimizer), rule, features, level)


def innermost(optimizer: Any) -> Any:
    """Returns the optimizer inside a wrapper for loss scaling, itself where there is none."""
    while isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        optimizer = optimizer.inner_optimizer
    return optimizer


def optimizer_for_copy(optimizer: Any, level: EffectiveLevel, model: Any, made: Any) -> Any:
    """Returns an optimizer for a copied model, which goes on where the model's own is.

    Args:
        optimizer: The optimizer of the model that was copied; it is not modified.
        level: The level.
        model: That model.
        made: The copy.

    Returns:
        A new optimizer. Its counters and slot variables have the values of the given one, if that
        was built; its masters, if it has any, start from the model's exact values.

    Raises:
        ValueError: The given optimizer was built for variables that the model does not have.
    """
    old = innermost(optimizer)
    known = _built_for(optimizer)
    # Layers may have been frozen, or set free, since the optimizer was built.
    before = model.trainable_variables if known is None else known
    after = counterparts(model, made, before)
    if after is None:
        raise ValueError(
            f"{optimizer.name} was built for {len(before)} variables that are not all in "
            f"{model.name}, whose weights get another dtype at this level: it cannot go on with "
            "the new ones. Give the model an optimizer of its own, or a new one."
        )
    new = type(old).from_config(old.get_config())
    _exclude_like(old, new, model, made)
    rule, features = _wanted(optimizer, level)
    wrapped = new if rule is None else _wrap(optimizer, new, rule, features, level)
    if old.built or level.master_weights:
        wrapped.build(after)
        _start_masters(wrapped, exact_values(optimizer, before), after)
    if old.built:
        for target, source in zip(new.variables, old.variables, strict=True):
            target.assign(keras.ops.cast(source, target.dtype))
    return wrapped


def with_needed_masters(level: EffectiveLevel, optimizer: Any) -> EffectiveLevel:
    """Returns level O3 with master weights where low variables do not hold what an optimizer keeps.

    Args:
        level: Any level; others are returned as they are, and so is one whose user has chosen.
        optimizer: The optimizer, or None.
    """
    slots = _slots_at_o3(optimizer, level)
    if slots is None or level.chose_master_weights:
        return level
    reason = (
        f"master weights: yes, as {innermost(optimizer).name} keeps {slots.what}, which "
        f"{slots.trouble(level.dtype)}."
    )
    return dataclasses.replace(level, master_weights=True, reasons=(*level.reasons, reason))


def _built_for(optimizer: Any) -> list[Any] | None:
    """The model's variables that an optimizer was built for; None where it is not built."""
    while not optimizer.built:
        if not isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
            return None
        optimizer = optimizer.inner_optimizer
    return list(optimizer._trainable_variables)


def _exclude_like(old: Any, new: Any, model: Any, made: Any) -> None:
    """Takes out of weight decay what another optimizer has taken out; no configuration says it."""
    excluded: set[Any] = getattr(old, "_exclude_from_weight_decay", set())
    pattern = getattr(old, "_exclude_from_weight_decay_pattern", None)
    if not excluded and pattern is None:
        return
    copies = zip(model.weights, made.weights, strict=True)
    new.exclude_from_weight_decay([b for a, b in copies if old._var_key(a) in excluded])
    new._exclude_from_weight_decay_pattern = pattern


def trouble_with_slots(optimizer: Any, level: EffectiveLevel) -> str | None:
    """Returns what there is to say of what an optimizer keeps at level O3, None for nothing.

    Args:
        optimizer: The optimizer, as it is at the level; None will do.
        level: Its level.
    """
    slots = _slots_at_o3(optimizer, level)
    if slots is None:
        return None
    name, trouble = innermost(optimizer).name, slots.trouble(level.dtype)
    if not getattr(optimizer, "master_weights", False):
        return (
            f"{name} keeps {slots.what}, which {trouble}: at level O3 without master weights it "
            "may learn nothing or diverge. Leave master_weights out or give True, or use SGD."
        )
    if slots.known or level.chose_master_weights:
        return None
    return (
        f"It is not known what {name} ({type(innermost(optimizer)).__name__}) keeps, nor whether "
        f"{level.dtype} holds it: at level O3 it gets float32 master weights, to be careful. Give "
        "master_weights=True, or False if it needs none."
    )


def _slots_at_o3(optimizer: Any, level: EffectiveLevel) -> Slots | None:
    """What an optimizer keeps that the low dtype does not hold; None at other levels too."""
    if optimizer is None or level.level != "O3":
        return None
    slots = slots_of(optimizer)
    return None if slots.trouble(level.dtype) is None else slots


def exact_values(optimizer: Any, variables: Sequence[Any]) -> list[Any]:
    """Returns the float32 values of the masters of variables; variables that have none themselves.

    A value that was assigned to a variable since the last step holds, as it does for the next step.

    Args:
        optimizer: The optimizer that updates the variables; None will do.
        variables: Variables of a model.
    """
    masters = _masters(optimizer)
    return [_exact(variable, masters.get(id(variable))) for variable in variables]


def _exact(variable: Any, master: Any) -> Any:
    if master is None:
        return variable
    value = keras.ops.cast(variable, "float32")
    rounded = keras.ops.cast(keras.ops.cast(master, variable.dtype), "float32")
    return keras.ops.where(keras.ops.equal(rounded, value), master, value)


def _start_masters(wrapped: Any, values: Sequence[Any], variables: Sequence[Any]) -> None:
    masters = _masters(wrapped)
    for value, variable in zip(values, variables, strict=True):
        if id(variable) in masters:
            masters[id(variable)].assign(keras.ops.cast(value, "float32"))


def _masters(optimizer: Any) -> dict[int, Any]:
    """Returns the master of each variable that has one, by the variable's number."""
    if not isinstance(optimizer, LossScaleOptimizer):
        return {}
    return {id(variable): master for variable, master in optimizer.stored_weights.pairs()}


def _wanted(optimizer: Any, level: EffectiveLevel) -> tuple[LossScale | None, dict[str, Any]]:
    """Returns the rule of a wrapper, None for no wrapper, and its other arguments."""
    rule = level.optimizer_rule
    features: dict[str, Any] = {
        "grad_clip": level.grad_clip,
        "master_weights": level.master_weights,
        "aggregate_in_float16": False,
    }
    users = isinstance(optimizer, LossScaleOptimizer) and not _made_here.get(optimizer)
    if users and level.level != "O0":
        # Whoever wraps an optimizer wants it wrapped, and so.
        features = {name: value or getattr(optimizer, name) for name, value in features.items()}
        rule = rule if level.chose_loss_scale else optimizer.rule
    return rule, features


def _has(optimizer: Any, rule: LossScale, features: dict[str, Any]) -> bool:
    return optimizer.rule == rule and all(
        getattr(optimizer, name) == value for name, value in features.items()
    )


def _wrap(
    optimizer: Any, inner: Any, rule: LossScale, features: dict[str, Any], level: EffectiveLevel
) -> Any:
    """Wraps an optimizer; the scale goes on from where an earlier wrapper's is, if it can."""
    own = isinstance(optimizer, LossScaleOptimizer)
    wrapped_by_keras = isinstance(optimizer, keras.optimizers.LossScaleOptimizer) and not own
    if wrapped_by_keras and isinstance(rule, DynamicLossScale) and not level.chose_loss_scale:
        reached = float(optimizer.dynamic_scale) if optimizer.built else optimizer.initial_scale
        start = min(max(reached, rule.min_scale), rule.max_scale)
        steps = optimizer.dynamic_growth_steps
        rule = dataclasses.replace(rule, initial_scale=start, growth_steps=steps)
    wrapped = LossScaleOptimizer(inner, loss_scale=rule, **features)
    if own and optimizer.rule == rule:
        wrapped.dynamic_scale.assign(optimizer.dynamic_scale)
        wrapped.step_counter.assign(optimizer.step_counter)
    _made_here.set(wrapped, True)
    return wrapped
