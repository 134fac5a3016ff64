"""Puts a level on a model: in place where its weights stay what they are, else on a copy."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import keras

from tfamp.core.dtypes import LOW_PRECISION
from tfamp.core.errors import NothingConvertedWarning
from tfamp.layers import fused_norms
from tfamp.layers.float_policies import quantization_of
from tfamp.layers.model_calls import layer_adopted, protect_values
from tfamp.layers.roles import ManagedLayer, WeakMap, managed_layers
from tfamp.levels.base_dtypes import BaseDtypes
from tfamp.levels.compiled_model import compile_like, drop_traced_functions, wrap_compile
from tfamp.levels.layer_policies import default_policy, put_on, take_off
from tfamp.levels.meaning import EffectiveLevel
from tfamp.levels.model_copy import copy_model, same_layers
from tfamp.levels.model_state import ModelState
from tfamp.levels.model_structure import (
    correct_symbolic_dtypes,
    functionals_of,
    is_graph,
    layers_of,
    path_of,
)
from tfamp.levels.prepared_optimizer import exact_values, optimizer_for_copy, prepared_optimizer
from tfamp.levels.step_rewriting import KEPT_NODES, GraphRewrite, rewrite_steps_of
from tfamp.policy import Policy


@dataclass(frozen=True, slots=True)
class PreparedModel:
    """What is known of a prepared model.

    Attributes:
        level: Its level.
        kept: Names of the layers that the user keeps in float32.
        rewrite: What rewrites its steps, if anything does.
    """

    level: EffectiveLevel
    kept: tuple[str, ...]
    rewrite: GraphRewrite | None


prepared_models: WeakMap[PreparedModel] = WeakMap()


def stores_low(model: Any) -> bool:
    """Whether weights of a model are stored in a low dtype, and not by a single layer's choice."""
    record = prepared_models.get(model)
    if record is not None:
        return record.level.low_weights
    return default_policy(model) in LOW_PRECISION


def is_stored_so(model: Any, level: EffectiveLevel, kept: tuple[Any, ...]) -> bool:
    """Whether a model is at this very level already, and is one that needed a copy."""
    record = prepared_models.get(model)
    if record is None or not level.low_weights:
        return False
    known = record.level
    return (known.level, known.dtype, known.master_weights, record.kept) == (
        level.level,
        level.dtype,
        level.master_weights,
        tuple(layer.name for layer in kept),
    )


def level_in_place(model: Any, optimizer: Any, level: EffectiveLevel, kept: tuple[Any, ...]) -> Any:
    """Puts a level on a model whose weights are float32.

    Args:
        model: The model. It is as it was if anything fails.
        optimizer: Its optimizer, or None.
        level: A level of float32 weights.
        kept: Layers that stay float32.

    Returns:
        The optimizer for the level, or None.

    Raises:
        ValueError: A layer fails in the low dtype.
    """
    made = None if optimizer is None else prepared_optimizer(optimizer, level)
    state = ModelState(model)
    try:
        chosen = take_off(model, keep_by_hand=level.level != "O0")
        for functional, _ in functionals_of(model):
            correct_symbolic_dtypes(functional)
        rewrite = _put_level_on(model, level, kept, chosen)
    except BaseException:
        state.restore()
        raise
    _finish(model, level, kept, rewrite)
    return made


def _put_level_on(
    model: Any, level: EffectiveLevel, kept: Iterable[Any], chosen: Iterable[int]
) -> GraphRewrite | None:
    if level.level == "O2":
        put_on(model, _policy(level, kept), kept=kept, chosen=chosen)
    if level.level != "O1":
        return None
    rewrite = GraphRewrite(level.dtype, (KEPT_NODES,), level.placement)
    rewrite_steps_of(model, rewrite, kept)
    return rewrite


def _policy(level: EffectiveLevel, kept: Iterable[Any]) -> Policy:
    """The policy of a level, for layers that do not exist yet too: those of the classes kept."""
    classes = tuple(each for each in level.keep_float32 if isinstance(each, type))
    name = f"mixed_{level.dtype}"
    return Policy(name, float32_layers=classes) if classes else Policy(name)


def _finish(
    model: Any, level: EffectiveLevel, kept: tuple[Any, ...], rewrite: GraphRewrite | None
) -> None:
    if level.level != "O0":
        for layer in layers_of(model):
            protect_values(layer)
    wrap_compile(model, level)
    drop_traced_functions(model)
    names = tuple(layer.name for layer in kept)
    prepared_models.set(model, PreparedModel(level, names, rewrite))
    computing = [layer for layer in layers_of(model) if not isinstance(layer, keras.Model)]
    if level.level in ("O2", "O3") and model.built:
        low = [layer for layer in computing if layer.compute_dtype in LOW_PRECISION]
        if not low:
            warnings.warn(
                f"{model.name} is prepared for level {level.level}, and no layer of it computes in "
                f"{level.dtype}: all are outputs, BatchNormalization, kept in float32 or have a "
                "dtype of their own. Level O1 decides op by op.",
                NothingConvertedWarning,
                stacklevel=4,
            )


def level_on_copy(
    model: Any, optimizer: Any, level: EffectiveLevel, kept: tuple[Any, ...]
) -> tuple[Any, Any]:
    """Makes a model anew at a level whose weights are stored in another dtype.

    Args:
        model: A built model. It is left as it was.
        optimizer: Its optimizer, or None; left as it was.
        level: The level.
        kept: Layers of the model that stay float32.

    Returns:
        The new model, compiled as the given one, and its optimizer or None.

    Raises:
        ValueError: The model is not built or cannot be made anew, or a weight has no value in the
            low dtype.
    """
    if not model.built:
        raise ValueError(
            f"{model.name} has no weights yet that could be stored in another dtype. Build it "
            "first: with an Input, with model.build(input_shape), or by calling it once."
        )
    _check_not_quantized(model, level)
    values = functools.partial(exact_values, optimizer)
    state = ModelState(model)
    try:
        chosen = set(take_off(model, keep_by_hand=level.level != "O0"))
        base = BaseDtypes(model, kept, chosen)
        if level.level == "O3":
            made = copy_model(model, base.pure(level.dtype), values)
            base.record_on(made)
        else:
            made = copy_model(model, base.own, values)
            base.mark_on(made)
    finally:
        state.restore()
    made_kept = base.kept_of(made)
    rewrite = None
    if level.level != "O3":
        rewrite = _put_level_on(made, level, made_kept, base.chosen_of(made))
    if level.level == "O2" and level.master_weights:
        made = _stored_low(made, level, base)
        made_kept = base.kept_of(made)
    made_optimizer = None
    if optimizer is not None:
        made_optimizer = optimizer_for_copy(optimizer, level, model, made)
    if model.compiled:
        compile_like(made, model, made_optimizer)
    _finish(made, level, made_kept, rewrite)
    return made, made_optimizer


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


def _stored_low(mixed: Any, level: EffectiveLevel, base: BaseDtypes) -> Any:
    """Returns a model of level O2 anew, with low weights where it computes low."""
    policy = Policy(f"mixed_{level.dtype}")

    def policy_of(layer: Any) -> str | None:
        return level.dtype if layer.dtype_policy.name == policy.name else None

    made = copy_model(mixed, policy_of)
    for old, new in same_layers(mixed, made):
        record = managed_layers.get(old)
        if record is not None and record.follows_input and not record.raised:
            managed_layers.set(new, ManagedLayer(policy, follows_input=True))
            fused_norms.fuse(new, level.dtype)
    for functional, _ in functionals_of(made):
        correct_symbolic_dtypes(functional)
    base.record_on(made)
    if not is_graph(made):
        layer_adopted(made, policy)  # its outermost call returns float32
    return made
