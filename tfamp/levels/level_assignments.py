"""The assignments of a level to the layers of a model: making them, applying, taking them back.

A level is applied in two steps: `take_back` removes all changes of tfamp's, and `apply_policy`
gives every layer what `level_assignments`, a pure function, says. So levels can follow each
other in any order. Variables keep their dtypes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import keras

from tfamp.core.kinds import Layer, Method, Model
from tfamp.interop import keras_hooks
from tfamp.interop.keras_hooks import layers_of
from tfamp.interop.patching import rewrap_methods, wrap_method, wrapped_methods
from tfamp.layers import layer_dtypes, model_calls, model_roles, records, symbolic_dtypes
from tfamp.layers.layer_plan import Assignment, Before
from tfamp.layers.layer_record import before_level, decider_of, set_by_hand
from tfamp.layers.policy_in_force import policy_scope
from tfamp.levels.model_structure import (
    computing_layers_of,
    functionals_of,
)
from tfamp.policy import Policy, prepares_data


def note_state(root: Model) -> Callable[[], None]:
    """Returns a function that restores a model's dtypes, methods and appended casts.

    With it a failed `prepare` leaves the model as it was.
    """
    layers = layers_of(root)
    functionals = [functional for functional, _ in functionals_of(root)]
    states = [
        (layer, wrapped_methods(layer), layer_dtypes.policy_of(layer), layer.autocast)
        for layer in layers
    ]
    # A Sequential is a layer, and the Functional that it runs is not.
    owners = (*layers, *functionals)
    snapshots = [(owner, records.snapshot(owner)) for owner in owners]
    outputs = [keras_hooks.outputs_of(functional) for functional in functionals]
    # Outputs of the ops behind a layer too, such as a sum of two outputs.
    symbolic = [
        (tensor, tensor.dtype)
        for layer in layers
        for node in (*keras_hooks.inbound_nodes(layer), *keras_hooks.outbound_nodes(layer))
        for tensor in node.outputs
    ]

    def restore() -> None:
        for layer, methods, policy, autocast in states:
            rewrap_methods(layer, methods)
            layer_dtypes.give_policy(layer, policy)
            layer.autocast = autocast
        for functional, before in zip(functionals, outputs, strict=True):
            now = keras_hooks.outputs_of(functional)
            if any(x is not y for x, y in zip(before, now, strict=True)):
                keras_hooks.set_outputs(functional, before)
        for owner, record in snapshots:
            records.restore(owner, record)
        for tensor, dtype in symbolic:
            keras_hooks.set_symbolic_dtype(tensor, dtype)

    return restore


def default_policy(model: Model) -> str:
    """Returns the name of the policy that a model's layers have by default.

    A model read from a file does not record the policy it was made under, so it is the one of
    most layers, "float32" in a tie.
    """
    layers = [x for x in computing_layers_of(model) if not isinstance(x, keras.Model)]
    if any(map(before_level, layers)):
        return "float32"
    models_policy = layer_dtypes.float_policy(model) or "float32"
    if models_policy.startswith("mixed_"):
        return models_policy
    names = map(layer_dtypes.float_policy, layers)
    counts = Counter(name for name in names if name is not None)

    def rank(name: str) -> tuple[int, bool, str]:
        return counts[name], name == "float32", name

    most = max(counts, key=rank, default="float32")
    return most if most != "float64" else "float32"


def take_back(model: Model, *, keep_by_hand: bool) -> set[int]:
    """Removes what a policy of tfamp's, or a former level, changed about a model.

    Its layers then have the dtypes that they were made with, or float32 if made under a mixed
    policy; its symbolic tensors are not corrected yet. Returns the `id`s of the layers whose
    dtype a user chose. `keep_by_hand` keeps those set by hand since.
    """
    default = default_policy(model)
    chosen: set[int] = set()
    for functional, _ in functionals_of(model):
        model_roles.dissolve(functional)
    for layer in computing_layers_of(model):
        policy_now, before = layer_dtypes.policy_of(layer), before_level(layer)
        is_chosen = _is_chosen(layer, default)
        model_calls.release(layer, before)
        if is_chosen and (keep_by_hand or before is None):
            layer_dtypes.give_policy(layer, policy_now)
            model_calls.guard_kernels(layer)
            chosen.add(id(layer))
            # Level O0 restores the policy before the levels later.
            is_noted = before is not None or set_by_hand(layer)
            model_roles.assign(layer, by_hand(layer, before) if is_noted else None)
            continue
        if before is None and default.startswith("mixed_"):
            layer_dtypes.give_policy(layer, "float32")
        model_roles.assign(layer, None)
    return chosen


def _is_chosen(layer: Layer, default: str) -> bool:
    """Whether a user chose a layer's dtype; Functionals and Sequentials compute nothing."""
    if set_by_hand(layer):
        return True
    return not model_roles.is_graph(layer) and decider_of(layer, default) == "user"


def float32_by_hand(model: Model, chosen: Iterable[int]) -> list[Layer]:
    """Returns the layers of a model whose dtype, float32, a user chose; `chosen` has their ids."""
    ids = set(chosen)
    layers = (layer for layer in computing_layers_of(model) if id(layer) in ids)
    return [layer for layer in layers if layer.compute_dtype == "float32"]


def by_hand(layer: Layer, before: Before | None) -> Assignment:
    """The assignment of a layer whose dtype a user chose."""
    policy_name = layer_dtypes.float_policy(layer) or layer_dtypes.policy_of(layer).name
    return Assignment(policy_name, "user", before=before)


def level_assignments(
    model: Model, policy: Policy, *, kept: Iterable[Layer], chosen: Iterable[int]
) -> list[tuple[Layer, Assignment]]:
    """Returns what a mixed policy assigns to the layers of a model at a level; changes nothing.

    Kept layers stay as they are, float32, and so do layers whose dtype a user chose, those that
    prepare data, and quantized ones that cannot compute in another dtype.

    Args:
        model: A model from which `take_back` has removed everything of tfamp's.
        policy: The policy.
        kept: Layers that stay float32, sublayers included.
        chosen: `id`s of the layers whose dtype a user chose.

    Returns:
        Layers with their assignments, in the model's order. Sublayers of a layer whose class
        stays float32 follow it and have none.
    """
    skipped = {id(layer) for layer in layers_of(*kept)} | set(chosen)
    result: list[tuple[Layer, Assignment]] = []
    for layer in computing_layers_of(model):
        if id(layer) in skipped:
            continue
        stays = prepares_data(type(layer)) or _holds_its_dtype(layer, policy)
        if stays or policy.keeps_float32(type(layer)):
            skipped |= {id(below) for below in layers_of(layer)}
        if not stays:
            before = Before(layer_dtypes.policy_of(layer), layer.autocast)
            assignment = model_calls.assignment_under(layer, policy, "level", before)
            result.append((layer, assignment))
    return result


def apply_policy(
    model: Model, policy: Policy, *, kept: Iterable[Layer], chosen: Iterable[int]
) -> None:
    """Applies a mixed policy to every layer of a model, as `level_assignments` says.

    A ValueError names a layer that fails in the low dtype.
    """
    for layer, assignment in level_assignments(model, policy, kept=kept, chosen=chosen):
        if assignment.policy_name != "float32":
            layer_dtypes.give_policy(layer, assignment.policy_name)
        model_calls.manage(layer, policy, assignment)
        # Before its output is computed, which may show what state it updates.
        model_calls.guard_kernels(layer)
        if not layer.built:
            _build_under(layer, policy)
    for functional, owner in functionals_of(model):
        symbolic_dtypes.correct(functional)
        model_calls.manage_functional(functional, owner)
    model_roles.models_below_become_parts(model)


def _build_under(layer: Layer, policy: Policy) -> None:
    """Gives the policy to the sublayers that a layer makes in its `build`."""

    def build(original: Method, *args: Any, **kwargs: Any) -> Any:
        with policy_scope(policy):
            return original(*args, **kwargs)

    wrap_method(layer, "build", build)


def _holds_its_dtype(layer: Layer, policy: Policy) -> bool:
    """Whether a layer, or one whose results it may mix, is quantized and cannot change."""
    if model_roles.is_graph(layer):
        return False  # the layers in it cast their inputs
    parts = layers_of(layer)
    return any(layer_dtypes.policy_with(part, policy.name) is None for part in parts)
