"""`prepare`: applies a level of mixed precision to a model and its optimizer.

In place where the weights keep their dtypes, else on a copy. At level O1 the steps of the model
are rewritten, as `rewritten_steps` says. Other calls of the model, eager or in the
`tf.function` of a custom loop, run under autocast, so that the model never silently computes in
float32.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import os
import warnings
import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import keras
import tensorflow as tf

from tfamp.core.dtypes import LOW_PRECISION
from tfamp.core.errors import NothingConvertedWarning, TfampWarning
from tfamp.core.kinds import Layer, Method, Model, Nest, Optimizer
from tfamp.core.loss_scale import LossScale
from tfamp.core.messages import described
from tfamp.core.names import (
    ComputeDtype,
    Float32Outputs,
    Level,
    LowDtypeLike,
    Placement,
    ScaleName,
    WeightRounding,
)
from tfamp.core.options import GradClip
from tfamp.interop.keras_hooks import layers_of, set_jit_compile
from tfamp.interop.patching import level_of_user, wrap_method
from tfamp.interop.tf_private import xla_works
from tfamp.layers import layer_dtypes, low_products, model_roles
from tfamp.layers.layer_plan import Assignment, Before, assigned_to_copy
from tfamp.layers.layer_record import assignment_of, note
from tfamp.layers.model_calls import assignment_under, cast_outermost, manage, protect_values
from tfamp.layers.records import WeakMap
from tfamp.levels import level_assignments, model_structure, prepared_optimizer
from tfamp.levels.effective_level import EffectiveLevel, effective_level
from tfamp.levels.measured_level import measured_level
from tfamp.levels.model_copy import copy_model, same_layers
from tfamp.levels.model_structure import computing_layers_of, select
from tfamp.levels.precision_config import PrecisionConfig, with_arguments
from tfamp.levels.precision_settings import PrecisionSettings, settings_of
from tfamp.levels.rewritten_steps import Rewrite, rewrite_steps_of, step_options
from tfamp.machine import hardware
from tfamp.planning.ways import FUSED
from tfamp.policy import FLOAT32_SUMS, policy_named, prepares_data


class _Default(str):
    """The default of an argument, which a configuration overrides."""

    __slots__ = ()


_DEFAULT_LEVEL: Any = _Default("O2")


@dataclass(frozen=True, slots=True)
class _Record:
    """A prepared model's level, the layers kept in float32, and its rewriting.

    `own_jit_compile` is the model's value where the level has another one.
    """

    level: EffectiveLevel
    kept: tuple[weakref.ref[Layer], ...]
    rewrite: Rewrite | None
    own_jit_compile: bool | None = None


_prepared: WeakMap[_Record] = WeakMap()


# Weights of an output layer from which on level "auto" multiplies low: 512 units by 2048 words.
# Below, a product is too short to matter in a step.
_LARGE_PRODUCT = 2**20


_Model = TypeVar("_Model")


if TYPE_CHECKING:
    from typing_extensions import Self

    class _Pair(tuple[_Model, Optimizer], Generic[_Model]):
        # Properties, as pyright, which does not know all bases of Keras's classes, takes a field
        # of such a class for a descriptor.
        def __new__(cls, model: _Model, optimizer: Optimizer) -> Self:
            """Makes a pair."""

        @property
        def model(self) -> _Model:
            """The model to use from now on."""

        @property
        def optimizer(self) -> Optimizer:
            """The optimizer to use from now on, or None."""

else:  # Python 3.10 has no generic named tuples.

    class _Pair(NamedTuple):
        model: Model
        optimizer: Optimizer

    _Pair.__class_getitem__ = classmethod(lambda cls, parameters: cls)


class Prepared(_Pair[_Model]):
    """A pair of model and optimizer, as `prepare` returns it, with the settings in force.

    Attributes:
        model: The model to use from now on.
        optimizer: The optimizer to use from now on, or None.
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


def prepare(
    model: _Model,
    optimizer: Any = None,
    *,
    level: Level = _DEFAULT_LEVEL,
    dtype: LowDtypeLike | ComputeDtype | None = None,
    loss_scale: LossScale | Mapping[str, Any] | ScaleName | float | None = None,
    grad_clip: GradClip | Mapping[str, Any] | float | None = None,
    keep_float32: Any = (),
    master_weights: bool | None = None,
    placement: Placement | None = None,
    weight_rounding: WeightRounding | None = None,
    slots: ComputeDtype | None = None,
    float32_outputs: Float32Outputs | None = None,
    config: PrecisionConfig | Mapping[str, Any] | str | os.PathLike[str] | None = None,
    example_batch: Any = None,
) -> Prepared[_Model]:
    """Applies a level of mixed precision to a model and its optimizer.

    | level | compute | BatchNorm, outputs | weights | loss scale |
    |---|---|---|---|---|
    | O0 | float32 | float32 | float32 | none |
    | O1 | by op lists | by lists; outputs float32 | float32 | dynamic |
    | O2 | low dtype | float32 | float32, or low + float32 masters | dynamic |
    | O3 | low dtype | low dtype | low dtype | 1 unless given |
    | auto | O2 on GPUs and TPUs, O1 on CPUs that multiply bfloat16, else O0 | | | |

    bfloat16 has float32's range and gets a scale of 1 by default. Below float32 the optimizer
    is a `LossScaleOptimizer`, which skips and counts steps that are not finite. Use the
    returned pair. The model may be new, or built, trained and compiled: weights, the
    optimizer's state, compiled losses and metrics are kept. Levels can follow each other; O0
    restores float32 and the former predictions, except for weights that were stored low without
    a master. Where the weights get another dtype (O3, master weights, and back from them) a new
    model is returned and the former one is not modified; otherwise the model is changed in
    place. Later calls of `model.compile` wrap their optimizer as well.

    Arguments override the fields of `config`, which are checked together with them.

    Args:
        model: A `keras.Model`: Functional, Sequential or subclassed.
        optimizer: A Keras optimizer or its name; None for the compiled model's, if any.
        level: "O0", "O1", "O2", "O3" or "auto".
        dtype: "float16" or "bfloat16"; None for the one that this machine multiplies natively.
        loss_scale: A `FixedLossScale` or `DynamicLossScale`, a number for a fixed one,
            "dynamic", "none", or a dict of fields; None for the level's.
        grad_clip: A `GradClip`, a dict such as `{"max_norm": 35, "norm_type": 2}`, or a number.
            Clips after unscaling.
        keep_float32: Layers that stay float32, sublayers included: their names, regular
            expressions, layer classes or layers; one or several.
        master_weights: True at level O2 or O3 stores the weights in the low dtype, with float32
            copies in the optimizer. None is False, but at O3 True for optimizers that keep
            averages of squared gradients, such as Adam, which do not learn with low variables
            alone.
        placement: At level O1 what decides which ops are converted, as for `tfamp.rewrite`:
            "lists", "min_cut" or "fused". None is "lists"; with level "auto" it is "fused" for
            models whose inputs have known shapes but for the batch, and "min_cut" for others.
        weight_rounding: "stochastic" or "split" stores the weights in the low dtype at
            level O2 or O3 without float32 copies, and rounds updates so that none is lost;
            see `LossScaleOptimizer`.
        slots: With it, the dtype of the optimizer's slots: "bfloat16", "float16" or "float32".
        float32_outputs: At level O2, True for output layers that compute in float32, or "sums"
            for low operands of their products, as for `Policy`. None is True; with level "auto"
            it is "sums" where an output layer multiplies by 2 ** 20 weights or more.
        config: A `PrecisionConfig`, a dict of its fields, or the path of a JSON or TOML file.
        example_batch: With level "auto", a batch as `fit` takes it, such as (x, y): the train
            step of the compiled model runs on it some dozen times, as by `tfamp.tune`, and the
            fastest of O0, O1 with each placement and, where "auto" means it, O2 is chosen, each
            also compiled by XLA as a whole where that may be faster. What "auto" means without
            a batch is replaced only by what is faster by more than the noise. `jit_compile` of
            the model is set accordingly, unless it was compiled with another value than "auto"
            means. Weights, optimizer and random states are restored.

    Returns:
        The pair of model and optimizer, with `.settings`, which prints as a table.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: An argument is wrong or contradicts another, a layer does not run in the low
            dtype, or weights to be stored in another dtype belong to layers that Keras has
            quantized. Model, weights and optimizer have not changed.

    Warns:
        TfampWarning: No low precision is fast on this machine, and one was requested; or a low
            dtype cannot hold the optimizer's state, at level O3.
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
    checked_config = _config(
        config,
        level=None if isinstance(level, _Default) else level,
        dtype=dtype,
        loss_scale=loss_scale,
        grad_clip=grad_clip,
        keep_float32=keep_float32 if keep_float32 != () else None,
        master_weights=master_weights,
        placement=placement,
        weight_rounding=weight_rounding,
        slots=slots,
        float32_outputs=float32_outputs,
    )
    old_optimizer = prepared_optimizer.read_optimizer(model, optimizer)
    level_here = effective_level(checked_config, hardware.detect())
    kept = tuple(select(layers_of(model)[1:], checked_config.keep_float32, "keep_float32"))
    level_here = _with_automatic_outputs(model, level_here, kept)
    effective = prepared_optimizer.with_needed_masters(level_here, old_optimizer)
    if example_batch is not None:
        _check_stored_in_float32(model, checked_config)
        with _own_jit_compile(model):
            effective = measured_level(model, effective, kept, example_batch, _put_level_on)
    if effective.warning is not None:
        warnings.warn(effective.warning, TfampWarning, stacklevel=level_of_user())
    record = _prepared.get(model)
    is_there = record is not None and record.level == effective and effective.low_weights
    used: Any = model
    if not is_there and (effective.low_weights or _stores_low(model)):
        with _own_jit_compile(model):  # The copy is compiled like it.
            used, new_optimizer = _level_on_copy(model, old_optimizer, effective, kept)
    else:
        new_optimizer = prepared_optimizer.wrapped_if_any(old_optimizer, effective)
        if not is_there:
            _level_in_place(model, effective, kept)
    prepared_optimizer.warn_of_slots(new_optimizer, effective)
    prepared_optimizer.warn_of_held_optimizers(used, effective)
    if used.compiled and new_optimizer is not None:
        prepared_optimizer.give_optimizer(used, new_optimizer)
    prepared = Prepared(used, new_optimizer)
    prepared.settings = precision_settings(used)
    return prepared


def precision_settings(model: Any) -> PrecisionSettings:
    """Returns the settings in force for a model, as they are now.

    Args:
        model: Any `keras.Model`: one that `prepare` returned, possibly with dtypes set by hand
            since, one made under a policy of tfamp's or Keras's, or one that neither has
            touched.

    Returns:
        The settings; `print` shows them as a table, layer by layer, and so does a notebook.

    Raises:
        TypeError: It is not a Keras model.

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
        return settings_of(model, None)
    kept = {id(reference()) for reference in record.kept}
    layers = tuple(layer for layer in layers_of(model) if id(layer) in kept)
    return settings_of(model, record.level, layers, record.rewrite)


def _check_model(model: Model, caller: str) -> None:
    if not isinstance(model, keras.Model):
        raise TypeError(
            f"{caller} takes a keras.Model; got {described(model)} For plain functions there "
            "are tfamp.rewrite and tfamp.autocast."
        )


def _config(config: Any, **arguments: Any) -> PrecisionConfig:
    hardware.warn_of_variables()
    overrides = {name: value for name, value in arguments.items() if value is not None}
    return with_arguments({} if config is None else config, overrides)


def _stores_low(model: Model) -> bool:
    """Whether a model, and not only single layers of it, stores its weights in a low dtype."""
    record = _prepared.get(model)
    if record is not None:
        return record.level.low_weights
    return level_assignments.default_policy(model) in LOW_PRECISION


def _check_stored_in_float32(model: Model, config: PrecisionConfig) -> None:
    """Refuses to measure weights that are, or would be, stored in low precision."""
    is_low = config.master_weights or config.weight_rounding or _stores_low(model)
    if config.level == "auto" and is_low:
        raise ValueError(
            "Weights stored in low precision are not measured: leave example_batch out, or "
            f"lead {model.name} back with prepare(model, level='O0') first."
        )


def _level_in_place(model: Model, level: EffectiveLevel, kept: tuple[Layer, ...]) -> None:
    """Applies a level to a model whose weights are float32."""
    with contextlib.ExitStack() as undo:
        undo.callback(level_assignments.note_state(model))
        chosen = level_assignments.take_back(model, keep_by_hand=level.level != "O0")
        model_structure.correct_symbolic_dtypes(model)
        rewrite = _put_level_on(model, level, kept, chosen)
        undo.pop_all()
    _finish(model, level, kept, rewrite)


def _put_level_on(
    model: Model, level: EffectiveLevel, kept: Iterable[Layer], chosen: Iterable[int]
) -> Rewrite | None:
    if level.level == "O2":
        # Layers of these classes stay float32 if made later, too.
        classes = [value for value in level.config.keep_float32 if isinstance(value, type)]
        policy = policy_named(
            f"mixed_{level.dtype}",
            float32_layers=("BatchNormalization", *classes),
            float32_outputs=level.config.float32_outputs or True,
        )
        level_assignments.apply_policy(model, policy, kept=kept, chosen=chosen)
    if level.level != "O1":
        return None
    options = step_options(level.dtype, _placement(model, level.config))
    by_hand = level_assignments.float32_by_hand(model, chosen)
    return rewrite_steps_of(model, options, [*kept, *by_hand])


def _with_automatic_outputs(
    model: Model, level: EffectiveLevel, kept: Iterable[Layer]
) -> EffectiveLevel:
    """Returns a level with low products of large output layers, if it is automatic."""
    config = level.config
    is_open = config.level == "auto" and config.float32_outputs is None
    if not is_open or level.level != "O2" or level.low_weights:
        return level
    kept_ids = set(map(id, layers_of(*kept)))
    layers = [x for x in model_structure.output_layers_of(model) if id(x) not in kept_ids]
    sizes = {layer.name: low_products.size_of(layer) for layer in layers}
    name = max(sizes, key=lambda name: sizes[name], default="")
    if sizes.get(name, 0) < _LARGE_PRODUCT:
        return level
    reason = f"float32 outputs: sums, as {name} multiplies by {sizes[name]:,} weights."
    with_sums = dataclasses.replace(config, float32_outputs=FLOAT32_SUMS)
    return dataclasses.replace(level, config=with_sums, reasons=(*level.reasons, reason))


def _placement(model: Model, config: PrecisionConfig) -> Placement:
    """Returns how steps are rewritten: at level "auto" fused, if that costs few compilations.

    XLA compiles once for each shape that tensors have, so only the batch size may vary.
    """
    if config.level != "auto" or config.placement or not xla_works(""):
        return config.rewrite_placement
    shapes = [tensor.shape[1:] for tensor in getattr(model, "inputs", ())]
    is_alone = model.distribute_strategy.num_replicas_in_sync == 1
    is_static = shapes and all(None not in shape for shape in shapes)
    return FUSED if is_alone and is_static else config.rewrite_placement


def _finish(
    model: Model, level: EffectiveLevel, kept: tuple[Layer, ...], rewrite: Rewrite | None
) -> None:
    if level.level != "O0":
        for layer in layers_of(model):
            protect_values(layer)
        wrap_method(model, "compute_metrics", _metrics_of_float32)
    prepared_optimizer.wrap_compile(model, level)
    own_jit_compile = _put_jit_compile(model, level)
    model_structure.drop_traced_functions(model)
    references = tuple(map(weakref.ref, kept))
    _prepared.set(model, _Record(level, references, rewrite, own_jit_compile))
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


@contextlib.contextmanager
def _own_jit_compile(model: Model) -> Iterator[None]:
    """A context in which a model has its own `jit_compile` instead of a measured one."""
    record = _prepared.get(model)
    if record is None or record.level.jit_compile is None or record.own_jit_compile is None:
        yield
        return
    set_jit_compile(model, record.own_jit_compile)
    try:
        yield
    finally:
        set_jit_compile(model, record.level.jit_compile)


def _put_jit_compile(model: Model, level: EffectiveLevel) -> bool | None:
    """Gives a model the `jit_compile` of a level, or back its own; returns its own, if changed.

    Later calls of `model.compile` that name no `jit_compile` get the level's too.
    """
    record, own = _prepared.get(model), None
    if record is not None and record.level.jit_compile is not None:
        own = record.own_jit_compile
    if level.jit_compile is None:
        if own is not None:
            set_jit_compile(model, own)
        return None
    own = bool(model.jit_compile) if own is None else own
    measured = level.jit_compile
    set_jit_compile(model, measured)

    def around(original: Method, *args: Any, **kwargs: Any) -> None:
        original(*args, **kwargs)
        given = inspect.signature(type(model).compile).bind(model, *args, **kwargs).arguments
        given = {**given, **given.get("kwargs", {})}
        if given.get("jit_compile", "auto") in ("auto", None) and not model.run_eagerly:
            set_jit_compile(model, measured)
            return
        now = _prepared.get(model)  # The user has chosen.
        if now is not None:
            its_level = dataclasses.replace(now.level, jit_compile=None)
            _prepared.set(model, dataclasses.replace(now, level=its_level, own_jit_compile=None))

    wrap_method(model, "compile", around)
    return own


def _metrics_of_float32(
    original: Method, x: Nest, y: Nest, y_pred: Nest, sample_weight: Nest = None
) -> dict[str, Any]:
    """Computes metrics of float32 predictions: a user's may subtract them from float32 labels.

    Keras's metrics cast them themselves; at level O3 predictions are low.
    """
    exact = keras.tree.map_structure(layer_dtypes.in_float32, y_pred)
    return dict(original(x, y, exact, sample_weight))


# ---- Weights of another dtype ----------------------------------------------------------------


def _level_on_copy(
    model: Model, optimizer: Optimizer | None, level: EffectiveLevel, kept: tuple[Layer, ...]
) -> tuple[Model, Optimizer | None]:
    """Copies a model, and its optimizer, for a level that stores weights in another dtype.

    The copy is compiled as the original. That and its optimizer are not modified.
    """
    if not model.built:
        raise ValueError(
            f"{model.name} is not built, so a copy of it with weights of another dtype cannot be "
            "made. Build it first, also if its layers are built: with an Input, with "
            "model.build(input_shape), or by calling it once."
        )
    names = model_structure.quantized_names(layers_of(model))
    if names:  # A copy cannot get their integers, nor their calibration.
        raise ValueError(
            f"Keras has quantized layers of {model.name}: {names}. Level {level.level} stores "
            "its weights in another dtype here, and quantized ones cannot be. Put the level on "
            "the model before it is quantized, or take one that keeps its weights: O0, O1 or "
            "O2 without master_weights for float32 weights."
        )
    with contextlib.ExitStack() as undo:
        undo.callback(level_assignments.note_state(model))
        if model.distribute_strategy is not tf.distribute.get_strategy():
            undo.enter_context(model.distribute_strategy.scope())
        chosen = level_assignments.take_back(model, keep_by_hand=level.level != "O0")
        # The original has the policies of the copy while it is copied.
        for layer in _low_layers(model):
            layer_dtypes.give_policy(layer, "float32")
        # The policies without a level, to restore them later.
        policies = {id(layer): layer.dtype_policy for layer in layers_of(model)}
        autocasts = {id(layer): layer.autocast for layer in layers_of(model)}
        is_mixed = level.level == "O2" and level.low_weights
        if is_mixed:
            _put_level_on(model, level, kept, chosen)
        _make_pure(model, level, kept, chosen)
        exact_values = functools.partial(prepared_optimizer.exact_values, optimizer)
        new_model = copy_model(model, exact_values)
        pairs = same_layers(model, new_model)
        for old, new in pairs:  # Configurations do not hold it.
            new.autocast = autocasts.get(id(old), new.autocast)
        model_structure.correct_symbolic_dtypes(new_model)
        kept_ids = {id(layer) for layer in kept}
        new_kept = tuple(new for old, new in pairs if id(old) in kept_ids)
        if is_mixed:
            rewrite = None
            _manage_as(pairs, new_model, level)
        else:
            new_chosen = {id(new) for old, new in pairs if id(old) in chosen}
            rewrite = _put_level_on(new_model, level, new_kept, new_chosen)
        for old, new in pairs:
            policy = policies.get(id(old), old.dtype_policy)  # the latter for appended casts
            _assign_as(old, new, Before(policy, new.autocast) if level.low_weights else None)
        new_optimizer = None
        if optimizer is not None:
            new_optimizer = prepared_optimizer.for_copy(optimizer, level, model, new_model)
        if model.compiled:
            prepared_optimizer.compile_like(new_model, model, new_optimizer)
        _finish(new_model, level, new_kept, rewrite)
    return new_model, new_optimizer


def _low_layers(model: Model) -> list[Any]:
    """Returns the layers whose low policy is the model's default, not a user's choice."""
    default = level_assignments.default_policy(model)
    if default not in LOW_PRECISION:
        return []
    layers = [layer for layer in layers_of(model) if layer.dtype_policy.name == default]
    return [layer for layer in layers if layer_dtypes.is_plain(layer.dtype_policy)]


def _make_pure(
    model: Model, level: EffectiveLevel, kept: tuple[Layer, ...], chosen: set[int]
) -> None:
    """Gives the layers whose weights a level stores low a policy of the low dtype alone.

    At O3 all layers except kept, chosen and preprocessing ones; at O2 those that compute in the
    low dtype.
    """
    layers = []
    if level.level == "O3":
        computing = computing_layers_of(model)
        preparing = [layer for layer in computing if prepares_data(type(layer))]
        left = {id(layer) for layer in layers_of(*kept, *preparing)} | chosen
        changeable = [layer for layer in computing if layer_dtypes.is_plain(layer.dtype_policy)]
        layers = [layer for layer in changeable if id(layer) not in left]
    elif level.low_weights:
        for held in model_structure.models_held_by_models(model):
            model_roles.become_part(held)  # its weights become low, like its holder's
        mixed = f"mixed_{level.dtype}"
        layers = [layer for layer in layers_of(model) if layer.dtype_policy.name == mixed]
    for layer in layers:
        layer_dtypes.give_policy(layer, level.dtype)


def _assign_as(old: Layer, new: Layer, before: Before | None) -> None:
    """Gives a layer of a copy the assignment of the layer that it was made from.

    `before` is for a level that stores weights in another dtype.
    """
    if isinstance(new, keras.layers.InputLayer):
        return
    source = assignment_of(old)
    policy_name = layer_dtypes.float_policy(new) or new.dtype_policy.name
    role = "hidden" if source is None else source.role
    copied = assignment_of(new) or Assignment(policy_name, "level", role)
    assignment = assigned_to_copy(source, copied, before)
    if assignment is not None:
        note(new, assignment=assignment)


def _manage_as(
    pairs: list[tuple[Layer, Layer]],
    new_model: Model,
    level: EffectiveLevel,
) -> None:
    """Gives a copy with low weights the kernels and outputs of the O2 model it came from."""
    policy = policy_named(f"mixed_{level.dtype}")
    for old, new in pairs:
        assignment = assignment_of(old)
        if assignment is not None and assignment.role == "statistics":
            manage(new, policy, assignment_under(new, policy, "level"))
    for held in model_structure.models_held_by_models(new_model):
        cast_outermost(held)
    model_structure.correct_symbolic_dtypes(new_model)
    if not model_roles.is_graph(new_model):
        # Its outermost call returns float32.
        manage(new_model, policy, assignment_under(new_model, policy, "level"))
