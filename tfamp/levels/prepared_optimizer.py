"""Optimizers wrapped for a level, and models compiled with them."""

from __future__ import annotations

import dataclasses
import inspect
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import keras

from tfamp.core.errors import TfampWarning
from tfamp.core.kinds import Method, Model, Optimizer, Tensor, Variable
from tfamp.core.loss_scale import DynamicLossScale, FixedLossScale, LossScale
from tfamp.core.messages import described
from tfamp.interop import keras_hooks, tf_private
from tfamp.interop.patching import level_of_user, wrap_method
from tfamp.layers.records import WeakMap
from tfamp.levels.effective_level import EffectiveLevel
from tfamp.levels.model_structure import drop_traced_functions
from tfamp.optimizer import LossScaleOptimizer, continue_from
from tfamp.torch_style.grad_scaler import GradScaler
from tfamp.training.optimizer_state import exact_state_of, innermost, warn_of_low_state

# Wrappers made by `prepare`, which another level removes, unlike those of a user.
_made_here: WeakMap[bool] = WeakMap()


def read_optimizer(model: Model, optimizer: Any) -> Optimizer | None:
    """Returns an optimizer, perhaps by name; for None that of the model, if it has one."""
    if optimizer is None:
        return model.optimizer if model.compiled else None
    is_config = isinstance(optimizer, str | dict)
    resolved = keras.optimizers.get(optimizer) if is_config else optimizer
    if not isinstance(resolved, keras.optimizers.Optimizer):
        raise TypeError(
            "optimizer must be a keras.optimizers.Optimizer, e.g. keras.optimizers.Adam(), or "
            f"its name; got {described(optimizer)}"
        )
    return resolved


def for_copy(
    optimizer: Optimizer, level: EffectiveLevel, model: Model, new_model: Model
) -> Optimizer:
    """Creates an optimizer for a copied model that continues from that of the model.

    Its counters and slots have the values of the former one, if that was built; its masters, if
    any, start from the model's exact values. Raises a ValueError if the former optimizer was
    built for variables that the model does not have.
    """
    old = innermost(optimizer)
    # Layers may have been frozen or unfrozen since the optimizer was built.
    if optimizer.built or old.built:
        variables = keras_hooks.built_for(optimizer if optimizer.built else old)
    else:
        variables = model.trainable_variables
    weights = zip(model.weights, new_model.weights, strict=True)
    copies = {id(weight): new_weight for weight, new_weight in weights}
    if not all(id(variable) in copies for variable in variables):
        raise ValueError(
            f"{optimizer.name} was built for {len(variables)} variables that are not all in "
            f"{model.name}, whose weights get another dtype at this level: it cannot go on "
            "with the new ones. Give the model an optimizer of its own, or a new one."
        )
    new_variables = [copies[id(variable)] for variable in variables]
    new = _made_again(old)
    _exclude_like(old, new, copies, model.weights)
    wrapper = wrapped(optimizer, level, new)
    if old.built or level.master_weights or level.config.weight_rounding:
        wrapper.build(new_variables)
        values = exact_values(optimizer, variables)
        if isinstance(wrapper, LossScaleOptimizer):
            wrapper.stored_weights.set_exact(new_variables, values)
    if old.built:
        for target, source in zip(new.variables, old.variables, strict=True):
            target.assign(keras.ops.cast(source, target.dtype))
    return wrapper


def _made_again(optimizer: Optimizer) -> Optimizer:
    """Makes an optimizer from the configuration of another one."""
    try:
        return type(optimizer).from_config(optimizer.get_config())
    except (TypeError, ValueError, NotImplementedError) as error:
        raise ValueError(
            f"{optimizer.name} ({type(optimizer).__name__}) has to be made again from its "
            "configuration, as the weights get another dtype at this level, and that fails: "
            f"{error} Register its classes and functions with "
            "keras.saving.register_keras_serializable; a MultiOptimizer can take a "
            "keras.optimizers.OptimizerMap instead of a function."
        ) from error


def with_needed_masters(level: EffectiveLevel, optimizer: Optimizer | None) -> EffectiveLevel:
    """Adds master weights to level O3 if low slots cannot hold an optimizer's state.

    Other levels are returned unchanged, as is an explicit choice of the user.
    """
    state, config = _exact_state_at_o3(optimizer, level), level.config
    is_rounded = config.weight_rounding or getattr(optimizer, "weight_rounding", None)
    if not state or config.master_weights is not None or is_rounded:
        return level
    reason = f"master weights: yes, as {innermost(optimizer).name} keeps {state}."
    return dataclasses.replace(level, master_weights=True, reasons=(*level.reasons, reason))


def _exclude_like(
    old: Optimizer, new: Optimizer, copies: dict[int, Variable], weights: list[Variable]
) -> None:
    """Copies exclusions from weight decay, which configurations do not hold."""
    excluded, pattern = keras_hooks.excluded_from_decay(old)
    if not excluded and pattern is None:
        return
    key = keras_hooks.key_of(old)
    excluded_weights = [weight for weight in weights if key(weight) in excluded]
    new.exclude_from_weight_decay([copies[id(weight)] for weight in excluded_weights])
    keras_hooks.exclude_pattern(new, pattern)


def warn_of_slots(optimizer: Optimizer | None, level: EffectiveLevel) -> None:
    """Warns about optimizer state under O3 that low-precision slots may not hold."""
    state = _exact_state_at_o3(optimizer, level)
    remedies = ("master_weights", "weight_rounding")
    if not state or any(getattr(optimizer, name, None) for name in remedies):
        return
    warn_of_low_state(
        optimizer,
        f"{level.dtype} may not hold: at level O3 without master weights",
        "Leave master_weights out or give True, or use SGD.",
    )


def _exact_state_at_o3(optimizer: Optimizer | None, level: EffectiveLevel) -> str:
    """The state of an optimizer that low-precision slots cannot hold; "" at other levels."""
    return "" if optimizer is None or level.level != "O3" else exact_state_of(optimizer)


def warn_of_held_optimizers(model: Model, level: EffectiveLevel) -> None:
    """Warns of unwrapped optimizers in a model's attributes, which its `train_step` may use."""
    held = _held_values(model)
    bare = [name for name, value in held.items() if _is_bare_optimizer(value)]
    missing = []
    if level.optimizer_rule not in (None, FixedLossScale(1.0)):
        missing.append("have no loss scale and skip no step that is not finite")
    if level.master_weights:
        missing.append("have no float32 master weights")
    if not bare or not missing or any(isinstance(value, GradScaler) for value in held.values()):
        return
    warnings.warn(
        f"{type(model).__name__} has optimizers of its own ({', '.join(bare)}), which are left "
        f"as they are, and level {level.level} in {level.dtype} needs them wrapped: bare ones "
        f"{', and '.join(missing)}. In compile wrap each in tfamp.LossScaleOptimizer, and in "
        "train_step take the gradients of optimizer.scale_loss(loss).",
        TfampWarning,
        stacklevel=level_of_user(),
    )


def _is_bare_optimizer(value: Any) -> bool:
    return isinstance(value, keras.optimizers.Optimizer) and value is innermost(value)


def _held_values(model: Model) -> dict[str, Any]:
    """The values of a model's attributes, and in lists and dicts there, but its optimizer."""
    held: dict[str, Any] = {}
    for name, value in vars(model).items():
        if tf_private.is_tracking(name):
            continue
        if isinstance(value, dict):
            held |= {f"{name}[{key!r}]": item for key, item in value.items()}
        elif isinstance(value, list | tuple):
            held |= {f"{name}[{index}]": item for index, item in enumerate(value)}
        elif name != "optimizer":
            held[name] = value
    return held


def exact_values(
    optimizer: Optimizer | None, variables: Sequence[Variable]
) -> list[Tensor | Variable]:
    """The float32 values of variables, from their masters if they have any.

    A value assigned to a variable since the last step takes precedence, as in the next step.
    """
    if not isinstance(optimizer, LossScaleOptimizer):
        return list(variables)
    return optimizer.stored_weights.exact_values(variables)


def rule_of(optimizer: Optimizer | None) -> LossScale | None:
    """Returns the loss scaling rule of tfamp's or Keras's wrapper; None without one."""
    if isinstance(optimizer, LossScaleOptimizer):
        return optimizer.rule
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        steps = optimizer.dynamic_growth_steps
        return DynamicLossScale(optimizer.initial_scale, growth_steps=steps)
    return None


def wrapped_if_any(optimizer: Optimizer | None, level: EffectiveLevel) -> Optimizer | None:
    """Wraps an optimizer for a level; None for none."""
    return None if optimizer is None else wrapped(optimizer, level)


def wrapped(
    optimizer: Optimizer, level: EffectiveLevel, inner: Optimizer | None = None
) -> Optimizer:
    """Wraps an optimizer for a level; does not modify it.

    Returns a `LossScaleOptimizer` around an inner optimizer, by default the innermost of the
    argument, or the inner one if the level needs no loss scale, no clipping and no master
    weights, and a user's wrapper neither clips nor sends in a dtype of its own. A wrapper with
    equal settings is returned; a new one continues the scale and counters of the former one.
    Raises a ValueError if both the optimizer and the level scale losses or clip gradients.
    """
    inner = innermost(optimizer) if inner is None else inner
    rule, config = level.optimizer_rule, level.config
    features: dict[str, Any] = {
        "grad_clip": config.grad_clip,
        "master_weights": level.master_weights,
        "weight_rounding": config.weight_rounding,
        "slots": config.slots,
        "aggregate_in": None,
    }
    is_wrapper = isinstance(optimizer, LossScaleOptimizer)
    is_users = is_wrapper and not _made_here.get(optimizer)
    if is_users and level.level == "O0":
        # It needs no loss scale, but what it does in float32 too.
        for name in ("grad_clip", "aggregate_in"):
            features[name] = features[name] or getattr(optimizer, name)
        if any(features[name] for name in ("grad_clip", "aggregate_in")):
            rule = rule or FixedLossScale(1.0)
    elif is_users:
        # A user's wrapper keeps its features and, unless another is chosen, its rule.
        features = {name: value or getattr(optimizer, name) for name, value in features.items()}
        if not features["master_weights"] and config.master_weights is False:
            features["master_weights"] = False  # None would let the wrapper choose.
        rule = optimizer.rule if config.loss_scale is None else rule
    elif not is_wrapper and isinstance(rule, DynamicLossScale) and config.loss_scale is None:
        rule = rule_of(optimizer) or rule
    if rule is None:
        return inner
    settings = {"rule": rule, "inner_optimizer": inner, **features}
    if is_wrapper and all(getattr(optimizer, name) == settings[name] for name in settings):
        wrapper = optimizer
    else:
        wrapper = LossScaleOptimizer(inner, loss_scale=rule, **features)
        if is_wrapper:
            continue_from(wrapper, optimizer)
        _made_here.set(wrapper, True)
        wrapper.stored_weights.warned = True  # `warn_of_slots` does, also without a wrapper.
    wrapper.scaling_warnings.in_float16 = level.dtype == "float16" and level.level != "O0"
    return wrapper


def give_optimizer(model: Model, optimizer: Optimizer) -> None:
    """Replaces the optimizer of a compiled model; loss and metrics stay."""
    if model.optimizer is not optimizer:
        keras_hooks.set_compiled_optimizer(model, optimizer)
    drop_traced_functions(model)


def compile_like(model: Model, other: Model, optimizer: Optimizer | None) -> None:
    """Compiles a model like another one of the same outputs, with another optimizer.

    Warns and leaves the model as it is if its class has a `compile` with other arguments than
    Keras's that have no default. Metrics are copied, and what its `compile` stores besides, such
    as the sampler of KerasHub's tasks, is shared.
    """
    arguments = keras_hooks.compile_arguments(other)
    arguments |= _own_compile_arguments(other, arguments)
    arguments |= {"optimizer": optimizer, "auto_scale_loss": False}
    try:
        inspect.signature(model.compile).bind(**arguments)
    except TypeError:
        warnings.warn(
            f"{type(model).__name__}.compile takes other arguments than Keras's own: the new "
            "model that prepare returns is not compiled. Compile it.",
            TfampWarning,
            stacklevel=level_of_user(),
        )
        return
    for name in ("metrics", "weighted_metrics"):
        arguments[name] = keras.tree.map_structure(_copied_metric, arguments[name])
    model.compile(**arguments)
    for name in ("run_eagerly", "jit_compile", "steps_per_execution"):
        if getattr(model, name) != getattr(other, name):  # set since it was compiled
            setattr(model, name, getattr(other, name))


def _own_compile_arguments(model: Model, known: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the optional arguments that only the `compile` of the model's class has.

    Keras does not store them. They are read from the attributes of the same names.
    """
    parameters = inspect.signature(type(model).compile).parameters.values()
    names = [each.name for each in parameters if each.default is not each.empty]
    stored = vars(model)
    return {name: stored[name] for name in names if name not in known and name in stored}


def _copied_metric(metric: Any) -> Any:
    if not isinstance(metric, keras.Metric):
        return metric  # a name or a function
    config, accepted = metric.get_config(), inspect.signature(type(metric)).parameters
    takes_any = any(each.kind is each.VAR_KEYWORD for each in accepted.values())
    if metric.dtype == "float32" and not takes_any and "dtype" not in accepted:
        config.pop("dtype", None)  # Keras's get_config adds it for every metric.
    try:
        return type(metric).from_config(config)
    except TypeError as error:
        raise ValueError(
            f"The compiled metric {metric.name!r} ({type(metric).__name__}) cannot be copied for "
            f"the new model that stores its weights in another dtype: {error} Give its class a "
            "get_config that returns the arguments of its constructor, or compile the model after "
            "prepare instead of before."
        ) from error


def wrap_compile(model: Model, level: EffectiveLevel) -> None:
    """Makes `model.compile` wrap its optimizer for the level, as `prepare` does.

    `compile(..., auto_scale_loss=False)` uses the optimizer as it is.
    """
    if level.optimizer_rule is None and level.level != "O3":
        return

    def around(original: Method, *args: Any, **kwargs: Any) -> None:
        original(*args, **kwargs)
        if not kwargs.get("auto_scale_loss", True):
            return
        optimizer = model.optimizer
        if optimizer is not None:
            its_level = with_needed_masters(level, optimizer)
            if its_level.optimizer_rule is not None:
                give_optimizer(model, wrapped(optimizer, its_level))
            warn_of_slots(model.optimizer, its_level)
        warn_of_held_optimizers(model, level)

    wrap_method(model, "compile", around)
