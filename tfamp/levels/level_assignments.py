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

from tfamp.interop import keras_hooks
from tfamp.interop.keras_hooks import layers_of
from tfamp.interop.patching import rewrap_methods, unwrap_methods, wrap_method, wrapped_methods
from tfamp.layers import layer_dtypes, model_calls, model_roles, records
from tfamp.layers.assignment import Assignment, Before, before_level, decider_of, set_by_hand
from tfamp.layers.policy_state import policy_scope
from tfamp.levels.model_structure import (
    computing_layers_of,
    correct_symbolic_dtypes_of,
    functionals_of,
    is_graph,
)
from tfamp.policy import Policy, prepares_data


def note_state(root: Any) -> Callable[[], None]:
    """Returns a function that restores the dtypes, replaced methods and appended casts of a model.

    With it a failed `prepare` leaves the model as it was.
    """
    layers, functionals = layers_of(root), [found for found, _ in functionals_of(root)]
    noted = [(x, wrapped_methods(x), layer_dtypes.policy_of(x), x.autocast) for x in layers]
    # A Sequential is a layer, and the Functional that it runs is not.
    noted_records = [(x, records.snapshot(x)) for x in (*layers, *functionals)]
    outputs = [keras_hooks.outputs_of(x) for x in functionals]
    # Outputs of the ops behind a layer too, such as a sum of two outputs.
    symbolic = [
        (tensor, tensor.dtype)
        for layer in layers
        for node in (*keras_hooks.inbound_nodes(layer), *keras_hooks.outbound_nodes(layer))
        for tensor in node.outputs
    ]

    def restore() -> None:
        for layer, methods, policy, autocast in noted:
            rewrap_methods(layer, methods)
            layer_dtypes.give_policy(layer, policy)
            layer.autocast = autocast
        for functional, before in zip(functionals, outputs, strict=True):
            now = keras_hooks.outputs_of(functional)
            if any(x is not y for x, y in zip(before, now, strict=True)):
                keras_hooks.set_outputs(functional, before)
        for key, record in noted_records:
            records.restore(key, record)
        for tensor, dtype in symbolic:
            keras_hooks.set_symbolic_dtype(tensor, dtype)

    return restore


def default_policy(model: Any) -> str:
    """Returns the name of the policy that a model's layers have by default.

    A model read from a file does not record the policy it was made under, so it is the one of
    most layers, "float32" in a tie.
    """
    layers = [x for x in computing_layers_of(model) if not isinstance(x, keras.Model)]
    if any(map(before_level, layers)):
        return "float32"
    own = layer_dtypes.float_policy(model) or "float32"
    if own.startswith("mixed_"):
        return own
    counts = Counter(name for name in map(layer_dtypes.float_policy, layers) if name is not None)
    most = max(counts, key=lambda x: (counts[x], x == "float32", x), default="float32")
    return most if most != "float64" else "float32"


def take_back(model: Any, *, keep_by_hand: bool) -> set[int]:
    """Removes what a policy of tfamp's, or a former level, changed about a model.

    Its layers then have their own dtypes, or float32 if made under a mixed policy; its symbolic
    tensors are not corrected yet. Returns the `id`s of the layers whose dtype a user chose.
    `keep_by_hand` keeps those set by hand since.
    """
    default = default_policy(model)
    chosen: set[int] = set()
    for functional, _ in functionals_of(model):
        model_roles.dissolve(functional)
    for layer in computing_layers_of(model):
        now, before = layer_dtypes.policy_of(layer), before_level(layer)
        is_chosen = _is_chosen(layer, default)
        _restore(layer, before)
        if is_chosen and (keep_by_hand or before is None):
            layer_dtypes.give_policy(layer, now)
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


def _is_chosen(layer: Any, default: str) -> bool:
    """Whether a user chose a layer's dtype; a Functional or Sequential computes nothing itself."""
    if set_by_hand(layer):
        return True
    return not is_graph(layer) and decider_of(layer, default) == "user"


def _restore(layer: Any, before: Before | None) -> None:
    """Removes what a policy or a level changed about a layer, but its policy without a level."""
    unwrap_methods(layer)
    if before is not None:
        layer.autocast = before.autocast
        layer_dtypes.give_policy(layer, before.policy)
    elif model_calls.uncast_inputs.get(layer) or isinstance(layer, keras.layers.BatchNormalization):
        layer.autocast = True  # layers.fused_norms or layers.model_calls switched it off


def by_hand(layer: Any, before: Before | None) -> Assignment:
    """The assignment of a layer whose dtype a user chose."""
    given = layer_dtypes.float_policy(layer) or layer_dtypes.policy_of(layer).name
    return Assignment(given, "user", before=before)


def level_assignments(
    model: Any, policy: Policy, *, kept: Iterable[Any], chosen: Iterable[int]
) -> list[tuple[Any, Assignment]]:
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
    found: list[tuple[Any, Assignment]] = []
    for layer in computing_layers_of(model):
        if id(layer) in skipped:
            continue
        stays = prepares_data(type(layer)) or _holds_its_dtype(layer, policy)
        if stays or policy.keeps_float32(type(layer)):
            skipped |= {id(below) for below in layers_of(layer)}
        if not stays:
            before = Before(layer_dtypes.policy_of(layer), layer.autocast)
            found.append((layer, model_calls.assignment_under(layer, policy, "level", before)))
    return found


def apply_policy(model: Any, policy: Policy, *, kept: Iterable[Any], chosen: Iterable[int]) -> None:
    """Applies a mixed policy to every layer of a model, as `level_assignments` says.

    A ValueError names a layer that fails in the low dtype.
    """
    for layer, assignment in level_assignments(model, policy, kept=kept, chosen=chosen):
        if assignment.policy_name != "float32":
            layer_dtypes.give_policy(layer, assignment.policy_name)
        model_calls.manage(layer, policy, assignment)
        if not layer.built:
            _build_under(layer, policy)
    for functional, owner in functionals_of(model):
        correct_symbolic_dtypes_of(functional)
        model_calls.manage_functional(functional, owner)
    model_roles.models_below_become_parts(model)


def _build_under(layer: Any, policy: Policy) -> None:
    """Gives the policy to the sublayers that a layer makes in its own `build`."""

    def build(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with policy_scope(policy):
            return original(*args, **kwargs)

    wrap_method(layer, "build", build)


def _holds_its_dtype(layer: Any, policy: Policy) -> bool:
    """Whether a layer, or one whose results its code may mix, is quantized and cannot change."""
    if is_graph(layer):
        return False  # the layers in it cast their inputs
    return any(layer_dtypes.policy_with(each, policy.name) is None for each in layers_of(layer))
