"""The optimizer of a level, wrapped once with what it asks for, and the model compiled with it.

What each Keras optimizer keeps from step to step decides whether low variables hold it.
"""

from __future__ import annotations

import dataclasses
import inspect
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import keras

from tfamp.core.errors import TfampWarning
from tfamp.core.options import DynamicLossScale, LossScale
from tfamp.interop import keras_hooks
from tfamp.interop.keras_hooks import described
from tfamp.interop.patching import level_of_user, wrap_method
from tfamp.layers.layer_dtypes import WeakMap
from tfamp.levels.model_structure import drop_traced_functions
from tfamp.levels.precision_config import EffectiveLevel
from tfamp.optimizer import LossScaleOptimizer, go_on_from
from tfamp.torch_style.grad_scaler import GradScaler

_VARIADIC = {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}
# Wrappers that `prepare` made: another level takes them off, where it leaves a user's own.
_made_here: WeakMap[bool] = WeakMap()


def for_level(optimizer: Any, level: EffectiveLevel) -> Any:
    """An optimizer as a level wants it; the given one is not modified, and returned if it will do.

    That is a `LossScaleOptimizer` around the innermost one, or that itself where the level asks for
    no loss scale, no clipping and no master weights. A ValueError says that it scales losses or
    clips gradients itself, and the level does too.
    """
    check_optimizer(optimizer)
    return _wrapped(optimizer, innermost(optimizer), level)


def check_optimizer(optimizer: Any) -> None:
    """Raises a TypeError for what is no Keras optimizer."""
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise TypeError(
            "optimizer must be a keras.optimizers.Optimizer, e.g. keras.optimizers.Adam(), or its "
            f"name; got {described(optimizer)}"
        )


def innermost(optimizer: Any) -> Any:
    """The optimizer inside a wrapper for loss scaling, itself where there is none."""
    while isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        optimizer = optimizer.inner_optimizer
    return optimizer


def for_copy(optimizer: Any, level: EffectiveLevel, model: Any, made: Any) -> Any:
    """A new optimizer for a copied model, which goes on where the model's own is.

    Its counters and slot variables have the values of the given one, if that was built; its
    masters, if it has any, start from the model's exact values. A ValueError says that the given
    optimizer was built for variables that the model does not have.
    """
    old = innermost(optimizer)
    known = _built_for(optimizer)
    # Layers may have been frozen, or set free, since the optimizer was built.
    before = model.trainable_variables if known is None else known
    copies = {id(old): new for old, new in zip(model.weights, made.weights, strict=True)}
    if not all(id(variable) in copies for variable in before):
        raise ValueError(
            f"{optimizer.name} was built for {len(before)} variables that are not all in "
            f"{model.name}, whose weights get another dtype at this level: it cannot go on with "
            "the new ones. Give the model an optimizer of its own, or a new one."
        )
    after = [copies[id(variable)] for variable in before]
    new = _made_again(old)
    _exclude_like(old, new, copies, model.weights)
    wrapped = _wrapped(optimizer, new, level)
    if old.built or level.master_weights or level.config.weight_rounding:
        wrapped.build(after)
        values = exact_values(optimizer, before)
        if isinstance(wrapped, LossScaleOptimizer):
            wrapped.stored_weights.set_exact(after, values)
    if old.built:
        for target, source in zip(new.variables, old.variables, strict=True):
            target.assign(keras.ops.cast(source, target.dtype))
    return wrapped


def _made_again(optimizer: Any) -> Any:
    """A new optimizer of the same settings."""
    try:
        return type(optimizer).from_config(optimizer.get_config())
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{optimizer.name} ({type(optimizer).__name__}) cannot be made again from its "
            "configuration, which takes an optimizer for weights of another dtype. Register its "
            "classes and functions with keras.saving.register_keras_serializable; a MultiOptimizer "
            "can take a keras.optimizers.OptimizerMap instead of a function."
        ) from error


def with_needed_masters(level: EffectiveLevel, optimizer: Any) -> EffectiveLevel:
    """Level O3 with master weights where low variables do not hold what an optimizer keeps.

    Other levels stay as they are, and so does one whose user has chosen.
    """
    slots = _slots_at_o3(optimizer, level)
    config = level.config
    is_rounded = config.weight_rounding or getattr(optimizer, "weight_rounding", None)
    if slots is None or config.master_weights is not None or is_rounded:
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
    return keras_hooks.built_for(optimizer)


def _exclude_like(old: Any, new: Any, copies: dict[int, Any], variables: list[Any]) -> None:
    """Takes out of weight decay what another optimizer has taken out; no configuration says it."""
    excluded, pattern = keras_hooks.excluded_from_decay(old)
    if not excluded and pattern is None:
        return
    key = keras_hooks.key_of(old)
    new.exclude_from_weight_decay([copies[id(v)] for v in variables if key(v) in excluded])
    keras_hooks.exclude_pattern(new, pattern)


def warn_of_slots(optimizer: Any, level: EffectiveLevel) -> None:
    """Says what there is to say of what an optimizer keeps at level O3."""
    slots = _slots_at_o3(optimizer, level)
    if slots is None:
        return
    name = innermost(optimizer).name
    if getattr(optimizer, "weight_rounding", None) is not None:
        return
    if not getattr(optimizer, "master_weights", False):
        text = (
            f"{name} keeps {slots.what}, which {slots.trouble(level.dtype)}: at level O3 without "
            "master weights it may learn nothing or diverge. Leave master_weights out or give "
            "True, or use SGD."
        )
    elif slots is _UNKNOWN and level.config.master_weights is None:
        text = (
            f"It is not known what {name} ({type(innermost(optimizer)).__name__}) keeps, nor "
            f"whether {level.dtype} holds it: at level O3 it gets float32 master weights, to be "
            "careful. Give master_weights=True, or False if it needs none."
        )
    else:
        return
    warnings.warn(text, TfampWarning, stacklevel=level_of_user())


def warn_of_own_optimizers(model: Any, level: EffectiveLevel) -> None:
    """Warns of unwrapped optimizers that a model's own `train_step` may use."""
    held = _attributes(model)
    own = [(name, x) for name, x in held if isinstance(x, keras.optimizers.Optimizer)]
    bare = {id(x): name for name, x in own if x is innermost(x)}  # TensorFlow notes some twice.
    names = dict.fromkeys(name for name in bare.values() if name != "optimizer")
    scales = any(isinstance(x, GradScaler) for _, x in held)
    if not names or scales or not level.needs_wrapper:
        return
    warnings.warn(
        f"{type(model).__name__} has optimizers of its own ({', '.join(names)}), which are left as "
        f"they are, and level {level.level} in {level.dtype} needs them wrapped: bare ones have no "
        "loss scale, skip no step that is not finite, clip nothing and keep no master weights. In "
        "compile wrap each in tfamp.LossScaleOptimizer, and in train_step take the gradients of "
        "optimizer.scale_loss(loss). bfloat16 needs no loss scale.",
        TfampWarning,
        stacklevel=level_of_user(),
    )


def _attributes(model: Any) -> list[tuple[str, Any]]:
    """Names of a model's attributes with their values, those in lists and dicts one by one."""
    found = []
    for name, value in vars(model).items():
        values = list(value.values()) if isinstance(value, dict) else value
        several = isinstance(values, list | tuple)
        found += [(name, each) for each in (values if several else (value,))]
    return found


def _slots_at_o3(optimizer: Any, level: EffectiveLevel) -> Slots | None:
    """What an optimizer keeps that the low dtype does not hold; None at other levels too."""
    if optimizer is None or level.level != "O3":
        return None
    slots = _slots_of(optimizer)
    return None if slots.trouble(level.dtype) is None else slots


def exact_values(optimizer: Any, variables: Sequence[Any]) -> list[Any]:
    """The float32 values of what stands for variables; variables that are as they are themselves.

    A value that was assigned to a variable since the last step holds, as it does for the next step.
    """
    if not isinstance(optimizer, LossScaleOptimizer):
        return list(variables)
    return optimizer.stored_weights.exact_values(variables)


def _wanted(optimizer: Any, level: EffectiveLevel) -> tuple[LossScale | None, dict[str, Any]]:
    """The rule of a wrapper, None for no wrapper, and its other arguments."""
    rule = level.optimizer_rule
    features: dict[str, Any] = {
        "grad_clip": level.config.grad_clip,
        "master_weights": level.master_weights,
        "weight_rounding": level.config.weight_rounding,
        "slots": level.config.slots,
        "aggregate_in_float16": False,
    }
    users = isinstance(optimizer, LossScaleOptimizer) and not _made_here.get(optimizer)
    if users and level.level != "O0":
        # Whoever wraps an optimizer wants it wrapped, and so.
        features = {name: value or getattr(optimizer, name) for name, value in features.items()}
        rule = optimizer.rule if level.config.loss_scale is None else rule
    return rule, features


def _wrapped(optimizer: Any, inner: Any, level: EffectiveLevel) -> Any:
    """The inner optimizer in a wrapper: the given one, if it will do and holds it, else a new one.

    The scale of a new one goes on from where the given one's is, if it can.
    """
    rule, features = _wanted(optimizer, level)
    if rule is None:
        return inner
    own = isinstance(optimizer, LossScaleOptimizer)
    wanted = {"rule": rule, "inner_optimizer": inner, **features}
    if own and all(getattr(optimizer, name) == value for name, value in wanted.items()):
        return optimizer
    wrapped_by_keras = isinstance(optimizer, keras.optimizers.LossScaleOptimizer) and not own
    if wrapped_by_keras and isinstance(rule, DynamicLossScale) and level.config.loss_scale is None:
        reached = float(optimizer.dynamic_scale) if optimizer.built else optimizer.initial_scale
        start = min(max(reached, rule.min_scale), rule.max_scale)
        steps = optimizer.dynamic_growth_steps
        rule = dataclasses.replace(rule, initial_scale=start, growth_steps=steps)
    wrapped = LossScaleOptimizer(inner, loss_scale=rule, **features)
    if own:
        go_on_from(wrapped, optimizer)
    _made_here.set(wrapped, True)
    return wrapped


@dataclass(frozen=True, slots=True)
class Slots:
    """What an optimizer keeps.

    Attributes:
        what: What that is, to be read after "keeps".
        in_float16: Why it needs more than float16, to be read after "which"; None where it does
            not.
        in_bfloat16: The same for bfloat16.
    """

    what: str
    in_float16: str | None = None
    in_bfloat16: str | None = None

    def trouble(self, dtype: str) -> str | None:
        """Why variables of a low dtype do not hold it; None where they do."""
        return self.in_float16 if dtype == "float16" else self.in_bfloat16


_SQUARED = "zero in float16 for gradients under 2.4e-4"
_MOMENTUM = Slots("nothing, or a momentum")
_AVERAGES = Slots(
    "running averages of squared gradients",
    f"are {_SQUARED}",
    "bfloat16 cannot hold: their decay is 1 or nearly so in it",
)
_SUMS = Slots(
    "sums of squared gradients",
    f"end at 65504 in float16, and whose squares are {_SQUARED}",
    "no longer grow in bfloat16 once they are 512 times a square",
)
_MAXIMA = Slots(
    "running maxima of gradients",
    "are zero in float16 for gradients under 6e-8, and divide the step",
    "never fall in bfloat16: their decay is 1 or nearly so in it",
)
_SIGNS = Slots(
    "running averages of gradients, of which it applies the signs",
    "are zero in float16 for gradients under 6e-6, and whose steps of one size low weights lose",
    "move by too little for bfloat16, and whose steps of one size low weights lose",
)
_WEIGHTS = Slots(
    "running averages of the weights (use_ema)",
    "move by too little for float16",
    "move by too little for bfloat16",
)
_UNKNOWN = Slots("what tfamp does not know", "float16 may not hold", "bfloat16 may not hold")

# By the names of Keras's classes, as not every release has all; a class made from one counts as it.
# None: it keeps what the optimizers in it keep.
SLOTS: dict[str, Slots | None] = {
    "SGD": _MOMENTUM,
    **dict.fromkeys(("RMSprop", "Adam", "AdamW", "Nadam", "Lamb", "Adadelta"), _AVERAGES),
    **dict.fromkeys(("Adafactor", "Muon", "ScheduleFreeAdamW"), _AVERAGES),
    **dict.fromkeys(("Adagrad", "Ftrl"), _SUMS),
    "Adamax": _MAXIMA,
    "Lion": _SIGNS,
    **dict.fromkeys(("LossScaleOptimizer", "MultiOptimizer"), None),
}
_DECAYS = ("beta_2", "rho", "adam_beta_2")


def _slots_of(optimizer: Any) -> Slots:
    """What an optimizer keeps; of a wrapper, what is hardest to hold of those inside."""
    name = _known_class(type(optimizer))
    if name is None:
        return _UNKNOWN
    slots = SLOTS[name]
    if slots is None:
        # Those of a MultiOptimizer that asks a function are known once it is built only.
        wraps_one = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
        held = [optimizer.inner_optimizer] if wraps_one else optimizer.optimizers
        inside = [_slots_of(each) for each in held] or [_UNKNOWN]
        return next((each for each in inside if each.in_bfloat16), inside[0])
    if slots.in_bfloat16 is None and getattr(optimizer, "use_ema", False):
        return _WEIGHTS
    decay = next((each for each in _DECAYS if hasattr(optimizer, each)), None)
    if decay is None or slots.in_bfloat16 is None:
        return slots
    shown = f"{decay}={getattr(optimizer, decay):g}"
    return dataclasses.replace(slots, in_bfloat16=slots.in_bfloat16.replace("their decay", shown))


def _known_class(kind: type) -> str | None:
    """The class of Keras's that an optimizer's class is, or is made from."""
    own = (each for each in kind.__mro__ if each.__module__.partition(".")[0] == "keras")
    return next((each.__name__ for each in own if each.__name__ in SLOTS), None)


def give_optimizer(model: Any, optimizer: Any) -> None:
    """Makes a compiled model train with another optimizer; loss and metrics stay."""
    if model.optimizer is not optimizer:
        keras_hooks.set_compiled_optimizer(model, optimizer)
    drop_traced_functions(model)


def compile_like(model: Any, other: Any, optimizer: Any) -> None:
    """Compiles a model with an optimizer, else as another one of the same outputs is compiled.

    It stays as it is, with a warning, where its class has a `compile` of its own that takes other
    arguments than Keras's: they are not known. The other model keeps its metrics to itself.
    """
    arguments = keras_hooks.compile_arguments(other)
    arguments |= {"optimizer": optimizer, "auto_scale_loss": False}
    if not _can_compile(model, arguments):
        warnings.warn(
            f"{type(model).__name__}.compile takes other arguments than Keras's own: the new model "
            "that prepare returns is not compiled. Compile it.",
            TfampWarning,
            stacklevel=level_of_user(),
        )
        return
    for name in ("metrics", "weighted_metrics"):
        arguments[name] = keras.tree.map_structure(
            lambda x: type(x).from_config(x.get_config()) if isinstance(x, keras.Metric) else x,
            arguments[name],
        )
    model.compile(**arguments)


def _can_compile(model: Any, arguments: dict[str, Any]) -> bool:
    """Whether the arguments of Keras's `compile` are all that a model's own one takes."""
    own = inspect.signature(model.compile)
    try:
        own.bind(**arguments)
    except TypeError:
        return False
    return all(x.name in arguments or x.kind in _VARIADIC for x in own.parameters.values())


def wrap_compile(model: Any, level: EffectiveLevel) -> None:
    """Makes `model.compile` give its optimizer what the level asks for, as `prepare` does.

    `compile(..., auto_scale_loss=False)` takes the optimizer as it is, and so does a `compile` of
    the model's own class that has no argument `optimizer`.
    """
    if level.optimizer_rule is None and level.level != "O3":
        return

    def around(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        signature = _compile_signature(original)
        if signature is None:
            result = original(*args, **kwargs)
            warn_of_own_optimizers(model, level)
            return result
        given = signature.bind(*args, **kwargs)
        default = signature.parameters["optimizer"].default
        optimizer = given.arguments.get("optimizer", default)
        if optimizer is not None and given.arguments.get("auto_scale_loss", True):
            optimizer = keras.optimizers.get(optimizer)
            own = with_needed_masters(level, optimizer)
            if own.optimizer_rule is not None:
                optimizer = for_level(optimizer, own)
            warn_of_slots(optimizer, own)
        given.arguments["optimizer"] = optimizer
        result = original(*given.args, **given.kwargs)
        warn_of_own_optimizers(model, level)
        return result

    wrap_method(model, "compile", around)


def _compile_signature(compile_model: Callable[..., Any]) -> inspect.Signature | None:
    """How a `compile` takes its arguments; None for one of a user's without `optimizer`."""
    own = inspect.signature(compile_model)
    if "optimizer" in own.parameters:
        return own
    kinds = {each.kind for each in own.parameters.values()}
    if not kinds <= _VARIADIC:
        return None
    passed_on = list(inspect.signature(keras.Model.compile).parameters.values())[1:]
    if inspect.Parameter.VAR_POSITIONAL not in kinds:
        keyword = inspect.Parameter.KEYWORD_ONLY
        passed_on = [each.replace(kind=keyword) for each in passed_on]
    return inspect.Signature(passed_on)
