"""`prepare`: puts a level of mixed precision on a model and its optimizer, in one line.

In place where the model's weights stay what they are, else on a copy.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import os
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import keras

from tfamp.core.dtypes import LOW_PRECISION
from tfamp.core.errors import NothingConvertedWarning, TfampWarning
from tfamp.core.options import GradClip, LossScale
from tfamp.interop.keras_hooks import described
from tfamp.interop.patching import level_of_user
from tfamp.layers import fused_norms
from tfamp.layers.layer_dtypes import (
    ManagedLayer,
    WeakMap,
    become_part,
    is_plain,
    managed_layers,
    quantization_of,
)
from tfamp.layers.model_calls import cast_outermost, manage, protect_values
from tfamp.levels import layer_policies, prepared_optimizer
from tfamp.levels.effective_settings import PrecisionSettings, own_settings_of, settings_of
from tfamp.levels.measured_level import check_measurable, measured_level, train_step_of
from tfamp.levels.model_copy import copy_model, same_layers
from tfamp.levels.model_structure import (
    computing_layers_of,
    correct_symbolic_dtypes,
    drop_traced_functions,
    functionals_of,
    is_graph,
    layers_of,
    models_held_by_models,
    path_of,
    select,
)
from tfamp.levels.precision_config import (
    EffectiveLevel,
    PrecisionConfig,
    effective_level,
    warn_of_variables,
    wrong_type,
)
from tfamp.levels.step_rewriting import rewrite_steps_of
from tfamp.machine import hardware
from tfamp.policy import Policy, prepares_data


class _NotGiven(str):
    """The default of an argument: equal to it, but not given by anyone."""

    __slots__ = ()


_DEFAULT_LEVEL = _NotGiven("O2")


@dataclass(frozen=True, slots=True)
class _Record:
    """A prepared model's level, the names of the layers kept in float32, and what rewrites it."""

    level: EffectiveLevel
    kept: tuple[str, ...]
    rewrite: Callable[..., Any] | None


_prepared: WeakMap[_Record] = WeakMap()
# The mixed policy that a prepared model's layers had before.
_made_under: WeakMap[str] = WeakMap()


class Prepared(tuple[Any, Any]):
    """What `prepare` returns: a pair of model and optimizer, and the settings in force.

    Attributes:
        settings: The settings; `print(prepared.settings)` is a table of them.

    Example:
        >>> import keras, tfamp
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
        >>> prepared = tfamp.prepare(model, keras.optimizers.SGD(), level="O0")
        >>> model, optimizer = prepared
        >>> prepared.settings.level
        'O0'
    """

    settings: PrecisionSettings

    def __new__(cls, model: Any, optimizer: Any, settings: PrecisionSettings) -> Prepared:
        """Makes the pair."""
        pair = super().__new__(cls, (model, optimizer))
        pair.settings = settings
        return pair

    @property
    def model(self) -> Any:
        """The model to use from now on."""
        return self[0]

    @property
    def optimizer(self) -> Any:
        """The optimizer to use from now on; None where there is none."""
        return self[1]


def prepare(
    model: Any,
    optimizer: Any = None,
    *,
    level: str = _DEFAULT_LEVEL,
    dtype: Any = None,
    loss_scale: LossScale | Mapping[str, Any] | str | float | None = None,
    grad_clip: GradClip | Mapping[str, Any] | float | None = None,
    keep_float32: Any = (),
    master_weights: bool | None = None,
    placement: str | None = None,
    weight_rounding: str | None = None,
    slots: str | None = None,
    config: PrecisionConfig | Mapping[str, Any] | str | os.PathLike[str] | None = None,
    example_batch: Any = None,
) -> Prepared:
    """Puts a level of mixed precision on a model and its optimizer.

    | level | compute | BatchNorm, outputs | weights | loss scale |
    |---|---|---|---|---|
    | O0 | float32 | float32 | float32 | none |
    | O1 | by op lists | by lists; outputs float32 | float32 | dynamic |
    | O2 | low dtype | float32 | float32, or low + float32 masters | dynamic |
    | O3 | low dtype | low dtype | low dtype | 1 unless given |
    | auto | O2 on GPUs and TPUs, O1 on CPUs that multiply bfloat16, else O0 | | | |

    bfloat16 has float32's range: it gets a scale of 1 by default. Below float32 the optimizer is a
    `LossScaleOptimizer`, which skips and counts steps that are not finite. Use what is returned. A
    model may be fresh, or built, trained and compiled: weights, the optimizer's state, compiled
    losses and metrics are kept. Levels can follow each other; O0 leads back to float32, with the
    very predictions of before, but for what was stored low without a master. Where the weights get
    another dtype (O3, master weights, and back from them) a new model is returned and the given one
    left as it was; otherwise it is changed in place. Later calls of `model.compile` wrap their
    optimizer as well.

    What is given here wins over `config`.

    Args:
        model: A `keras.Model`: Functional, Sequential or subclassed.
        optimizer: A Keras optimizer or its name; None for the compiled model's, if any.
        level: "O0", "O1", "O2", "O3" or "auto".
        dtype: "float16" or "bfloat16"; None for what this machine multiplies fast.
        loss_scale: A `FixedLossScale` or `DynamicLossScale`, a number for a fixed one, "dynamic",
            "none", or a dict of fields; None for the level's own.
        grad_clip: A `GradClip`, a dict such as `{"max_norm": 35, "norm_type": 2}`, or a number.
            Clips after unscaling.
        keep_float32: What stays float32, with all layers inside: names of layers, regular
            expressions, layer classes or layers; one or several.
        master_weights: True at level O2 or O3 stores the weights in the low dtype, with float32
            copies in the optimizer. None is False, but at O3 True for optimizers that keep averages
            of squared gradients, Adam for one: they learn nothing from low variables alone.
        placement: At level O1 what decides which ops are converted, as for `tfamp.rewrite`:
            "lists", "min_cut" or "fused". None is "lists", and with level "auto"
            "min_cut".
        weight_rounding: "stochastic" or "split" stores the weights in the low dtype at
            level O2 or O3 without float32 copies, and rounds their updates so that none is lost;
            see `LossScaleOptimizer`.
        slots: With it, the dtype of what the optimizer keeps: "bfloat16", "float16" or "float32".
        config: A `PrecisionConfig`, a dict of its fields, or the path of a JSON or TOML file.
        example_batch: With level "auto", a batch as `fit` takes it, such as (x, y): the train step
            of the compiled model runs on it some dozen times, as by `tfamp.tune`, and the fastest
            of O0, O1 with each placement and, where "auto" means it, O2 is taken. Weights,
            optimizer and random states are as before.

    Returns:
        The pair of model and optimizer, with `.settings`, which prints as a table.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: An argument is wrong or contradicts another, a layer does not run in the low
            dtype, or weights to be stored in another dtype belong to layers that Keras has
            quantized. Model, weights and optimizer are as they were then.

    Warns:
        TfampWarning: No low precision is fast on this machine, and one was asked for; or the
            optimizer is one that a low dtype does not serve, at level O3.
        NothingConvertedWarning: No layer computes in the low dtype.

    Example:
        >>> import keras, tfamp
        >>> model = keras.Sequential(
        ...     [keras.Input((8,)), keras.layers.Dense(16, "relu"), keras.layers.Dense(2)]
        ... )
        >>> model, optimizer = tfamp.prepare(
        ...     model, keras.optimizers.SGD(0.1), level="O2", dtype="float16", loss_scale=512.0
        ... )
        >>> [layer.compute_dtype for layer in model.layers], float(optimizer.loss_scale)
        (['float16', 'float32'], 512.0)
    """
    _check_model(model, "prepare")
    chosen = _config(
        config,
        level=None if isinstance(level, _NotGiven) else level,
        dtype=dtype,
        loss_scale=loss_scale,
        grad_clip=grad_clip,
        keep_float32=None if isinstance(keep_float32, tuple) and not keep_float32 else keep_float32,
        master_weights=master_weights,
        placement=placement,
        weight_rounding=weight_rounding,
        slots=slots,
    )
    given = _optimizer(model, optimizer)
    wanted = prepared_optimizer.with_needed_masters(
        effective_level(chosen, hardware.detect()), given
    )
    kept = tuple(select(layers_of(model)[1:], chosen.keep_float32, "keep_float32"))
    if example_batch is not None:
        wanted = _measured(model, wanted, kept, example_batch)
    if wanted.warning is not None:
        warnings.warn(wanted.warning, TfampWarning, stacklevel=level_of_user())
    is_there = _is_stored_so(model, wanted, kept)
    policy_before = _policy_before(model)
    if not is_there and (wanted.low_weights or _stores_low(model)):
        model, made = _level_on_copy(model, given, wanted, kept)
    else:
        made = None if given is None else prepared_optimizer.for_level(given, wanted)
        if not is_there:
            _level_in_place(model, wanted, kept)
    prepared_optimizer.warn_of_slots(made, wanted)
    prepared_optimizer.warn_of_own_optimizers(model, wanted)
    if model.compiled and made is not None:
        prepared_optimizer.give_optimizer(model, made)
    _made_under.set(model, policy_before)
    return Prepared(model, made, precision_settings(model))


def precision_settings(model: Any) -> PrecisionSettings:
    """Returns the settings in force for a model, as they are now.

    Args:
        model: Any `keras.Model`: one that `prepare` returned, possibly with dtypes set by hand
            since, one made under a policy of tfamp's or Keras's, or one that neither has touched.

    Returns:
        The settings; `print` shows them as a table, layer by layer, and so does a notebook.

    Raises:
        TypeError: It is no Keras model.

    Example:
        >>> import keras, tfamp
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
        >>> model, _ = tfamp.prepare(model, level="O2", dtype="float16")
        >>> tfamp.precision_settings(model).layers[0].why
        'output'
    """
    _check_model(model, "precision_settings")
    record = _prepared.get(model)
    if record is None:
        return own_settings_of(model)
    kept = tuple(layer for layer in layers_of(model) if layer.name in record.kept)
    before = _made_under.get(model)
    text = f"policy: the layers were made under {before}, whose place the level has taken."
    reasons = () if before is None else (text,)
    return settings_of(model, record.level, kept, record.rewrite, reasons)


def _check_model(model: Any, caller: str) -> None:
    if not isinstance(model, keras.Model):
        raise TypeError(
            f"{caller} takes a keras.Model; got {described(model)} For plain functions there are "
            "tfamp.rewrite and tfamp.autocast."
        )


def _policy_before(model: Any) -> str | None:
    """The mixed policy that a model's layers were made under; None if there was none."""
    if _prepared.get(model) is not None:
        return _made_under.get(model)
    own = layer_policies.default_policy(model)
    return own if own.startswith("mixed_") else None


def _config(config: Any, **given: Any) -> PrecisionConfig:
    warn_of_variables(os.environ)
    if config is None:
        found = PrecisionConfig()
    elif isinstance(config, PrecisionConfig):
        found = config
    elif isinstance(config, Mapping):
        found = PrecisionConfig.from_dict(config)
    elif isinstance(config, str | os.PathLike):
        found = PrecisionConfig.from_file(config)
    else:
        raise wrong_type("config must be a PrecisionConfig, a dict or the path of a file", config)
    return found.with_changes(**{name: x for name, x in given.items() if x is not None})


def _optimizer(model: Any, optimizer: Any) -> Any:
    if optimizer is None:
        return model.optimizer if model.compiled else None
    if isinstance(optimizer, str | dict):
        return keras.optimizers.get(optimizer)
    prepared_optimizer.check_optimizer(optimizer)
    return optimizer


def _measured(
    model: Any, level: EffectiveLevel, kept: tuple[Any, ...], batch: Any
) -> EffectiveLevel:
    """The fastest level for a model, measured on a batch; the model is as before then."""
    check_measurable(model, level.config, batch)
    if _stores_low(model):
        raise ValueError(
            f"{model.name} stores its weights in low precision, so that float32 cannot be measured "
            "on it: lead it back with prepare(model, level='O0') first."
        )
    with contextlib.ExitStack() as undo:
        undo.callback(layer_policies.note_state(model))
        chosen = layer_policies.take_off(model, keep_by_hand=True)
        for functional, _ in functionals_of(model):
            correct_symbolic_dtypes(functional)
        mixed_step = functools.partial(_mixed_step, model, level, kept, chosen)
        return measured_level(model, level, kept, batch, mixed_step)


def _mixed_step(
    model: Any, level: EffectiveLevel, kept: tuple[Any, ...], chosen: Iterable[int], data: Any
) -> Any:
    """The train step of a float32 model, traced as at level O2; the model is as before then."""
    with contextlib.ExitStack() as undo:
        undo.callback(layer_policies.note_state(model))
        _put_level_on(model, level, kept, chosen)
        step = train_step_of(model)
        step.get_concrete_function(data)
    return step


def _stores_low(model: Any) -> bool:
    """Whether weights of a model are stored in a low dtype, and not by a single layer's choice."""
    record = _prepared.get(model)
    if record is not None:
        return record.level.low_weights
    return layer_policies.default_policy(model) in LOW_PRECISION


def _is_stored_so(model: Any, level: EffectiveLevel, kept: tuple[Any, ...]) -> bool:
    """Whether a model is at this very level already, and is one that needed a copy."""
    record = _prepared.get(model)
    if record is None or not level.low_weights:
        return False
    choices = operator.attrgetter(
        "level", "dtype", "master_weights", "config.weight_rounding", "config.slots"
    )
    names = tuple(layer.name for layer in kept)
    return record.kept == names and choices(record.level) == choices(level)


def _level_in_place(model: Any, level: EffectiveLevel, kept: tuple[Any, ...]) -> None:
    """Puts a level on a model whose weights are float32."""
    with contextlib.ExitStack() as undo:
        undo.callback(layer_policies.note_state(model))
        chosen = layer_policies.take_off(model, keep_by_hand=level.level != "O0")
        for functional, _ in functionals_of(model):
            correct_symbolic_dtypes(functional)
        rewrite = _put_level_on(model, level, kept, chosen)
        undo.pop_all()
    _finish(model, level, kept, rewrite)


def _put_level_on(
    model: Any, level: EffectiveLevel, kept: Iterable[Any], chosen: Iterable[int]
) -> Callable[..., Any] | None:
    if level.level == "O2":
        # For layers that do not exist yet too: those of the classes kept.
        classes = tuple(each for each in level.config.keep_float32 if isinstance(each, type))
        name = f"mixed_{level.dtype}"
        policy = Policy(name, float32_layers=classes) if classes else Policy(name)
        layer_policies.put_on(model, policy, kept=kept, chosen=chosen)
    if level.level != "O1":
        return None
    return rewrite_steps_of(model, level.dtype, kept, placement=level.config.rewrite_placement)


def _finish(
    model: Any, level: EffectiveLevel, kept: tuple[Any, ...], rewrite: Callable[..., Any] | None
) -> None:
    if level.level != "O0":
        for layer in layers_of(model):
            protect_values(layer)
    prepared_optimizer.wrap_compile(model, level)
    drop_traced_functions(model)
    names = tuple(layer.name for layer in kept)
    _prepared.set(model, _Record(level, names, rewrite))
    layers = [layer for layer in layers_of(model) if not isinstance(layer, keras.Model)]
    is_low = any(layer.compute_dtype in LOW_PRECISION for layer in layers)
    if level.level in ("O2", "O3") and model.built and not is_low:
        warnings.warn(
            f"{model.name} is prepared for level {level.level}, and no layer of it computes in "
            f"{level.dtype}: all are outputs, BatchNormalization, kept in float32 or have a "
            "dtype of their own. Level O1 decides op by op.",
            NothingConvertedWarning,
            stacklevel=level_of_user(),
        )


def _level_on_copy(
    model: Any, optimizer: Any, level: EffectiveLevel, kept: tuple[Any, ...]
) -> tuple[Any, Any]:
    """Makes a model anew at a level whose weights are stored in another dtype, and its optimizer.

    The new model is compiled as the given one, which is left as it was, and so is its optimizer.
    """
    if not model.built:
        raise ValueError(
            f"{model.name} has no weights yet that could be stored in another dtype. Build it "
            "first: with an Input, with model.build(input_shape), or by calling it once."
        )
    _check_not_quantized(model, level)
    with contextlib.ExitStack() as undo:
        undo.callback(layer_policies.note_state(model))
        chosen = layer_policies.take_off(model, keep_by_hand=level.level != "O0")
        policies = _float32_for_low(model)
        # For the way back, what the layers are without a level.
        base = {id(x): policies.get(id(x), x.dtype_policy) for x in layers_of(model)}
        if level.level == "O3":
            policies |= _pure_policies(model, level.dtype, kept, chosen)
        values = functools.partial(prepared_optimizer.exact_values, optimizer)
        made = copy_model(model, policies, values)
        kept_numbers = {id(layer) for layer in kept}
        made_chosen = {id(layer) for layer in _copies_of(chosen, model, made)}
        made_kept = _copies_of(kept_numbers, model, made)
        rewrite = _put_level_on(made, level, made_kept, made_chosen)
        if level.level == "O2" and level.low_weights:
            made = _stored_low(made, level)
        _note_base(model, made, level, base)
        made_optimizer = None
        if optimizer is not None:
            made_optimizer = prepared_optimizer.for_copy(optimizer, level, model, made)
        if model.compiled:
            prepared_optimizer.compile_like(made, model, made_optimizer)
        _finish(made, level, _copies_of(kept_numbers, model, made), rewrite)
    return made, made_optimizer


def _note_base(model: Any, made: Any, level: EffectiveLevel, base: dict[int, Any]) -> None:
    """Notes on a copy which dtypes were set by hand, and what low layers are without the level."""
    for old, new in same_layers(model, made):
        layer_policies.set_by_hand.set(new, layer_policies.set_by_hand.get(old))
        if level.low_weights and not isinstance(new, keras.layers.InputLayer):
            own = keras.dtype_policies.get(base[id(old)])
            before = layer_policies.Before(own, new.autocast, new.dtype_policy.name)
            layer_policies.layers_before.set(new, before)


def _copies_of(numbers: set[int], model: Any, made: Any) -> tuple[Any, ...]:
    """The layers that a copy has for those of some numbers."""
    return tuple(new for old, new in same_layers(model, made) if id(old) in numbers)


def _float32_for_low(model: Any) -> dict[int, str]:
    """Float32 for the layers that have a low policy as all have; others keep theirs."""
    default = layer_policies.default_policy(model)
    layers = layers_of(model) if default in LOW_PRECISION else ()
    own = [layer for layer in layers if layer.dtype_policy.name == default]
    return {id(layer): "float32" for layer in own if is_plain(layer.dtype_policy)}


def _pure_policies(
    model: Any, dtype: str, kept: tuple[Any, ...], chosen: set[int]
) -> dict[int, str]:
    """One dtype for all layers, but for what is kept or chosen, and what prepares data."""
    layers = computing_layers_of(model)
    preparing = [layer for layer in layers if prepares_data(type(layer))]
    left = {id(layer) for layer in layers_of(*kept, *preparing)} | chosen
    plain = [layer for layer in layers if is_plain(layer.dtype_policy)]
    return {id(layer): dtype for layer in plain if id(layer) not in left}


def _check_not_quantized(model: Any, level: EffectiveLevel) -> None:
    """Raises where a copy could not get the integers of quantized layers, nor their calibration."""
    quantized = [layer for layer in layers_of(model) if quantization_of(layer) is not None]
    if quantized:
        names = ", ".join(f"{path_of(layer)} ({quantization_of(layer)})" for layer in quantized)
        raise ValueError(
            f"Keras has quantized layers of {model.name}: {names}. At level {level.level} here its "
            "weights are stored in another dtype, and quantized ones cannot be. Put the level on "
            "the model before it is quantized, or take a level for which it keeps its weights: "
            "of a model with float32 weights O0, O1, or O2 without master_weights."
        )


def _stored_low(mixed: Any, level: EffectiveLevel) -> Any:
    """A model of level O2 anew, with low weights where it computes low."""
    policy = Policy(f"mixed_{level.dtype}")
    # The code of a model makes all weights of those that it holds low.
    held = models_held_by_models(mixed)
    for each in held:
        become_part(each)
    low = [layer for layer in layers_of(mixed) if layer.dtype_policy.name == policy.name]
    made = copy_model(mixed, {id(layer): level.dtype for layer in low})
    for old, new in same_layers(mixed, made):
        record = managed_layers.get(old)
        if record is not None and record.follows_input and not record.raised:
            managed_layers.set(new, ManagedLayer(policy, follows_input=True))
            fused_norms.fuse(new, level.dtype)
        if any(old is each for each in held):
            cast_outermost(new)
    for functional, _ in functionals_of(made):
        correct_symbolic_dtypes(functional)
    if not is_graph(made):
        manage(made, policy)  # its outermost call returns float32
    return made
