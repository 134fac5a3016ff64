"""Changes the dtypes of a model that exists: all of it, or single layers by hand; and back again.

Variables stay what they are. A level is put on a model in two steps: everything that tfamp did to
it is taken off, and then the policy put on, so that levels can follow each other in any order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import keras

from tfamp.interop.patching import unwrap_methods, wrap_method
from tfamp.layers import output_dtypes
from tfamp.layers.float_policies import float_policy, give_policy, policy_of, policy_with
from tfamp.layers.model_calls import functional_adopted, layer_adopted
from tfamp.layers.policy_state import policy_scope
from tfamp.layers.roles import WeakMap, managed_layers, uncast_inputs
from tfamp.levels.model_structure import (
    correct_symbolic_dtypes,
    functionals_of,
    is_graph,
    layers_of,
    most_common_policy,
)
from tfamp.policy import Policy, prepares_data


@dataclass(frozen=True, slots=True)
class Before:
    """What a layer was like when a policy was put on it.

    Attributes:
        policy: Its own policy.
        autocast: Its own `autocast`.
        given: Name of the policy it was given.
    """

    policy: Any
    autocast: bool
    given: str


layers_before: WeakMap[Before] = WeakMap()
set_by_hand: WeakMap[bool] = WeakMap()


def default_policy(model: Any) -> str:
    """Returns the name of the policy that a model's layers have unless someone chose another.

    A model read from a file does not know any more which it was made under, so it is the one that
    most layers have.
    """
    layers = [layer for layer in layers_of(model) if not isinstance(layer, keras.Model)]
    if any(layers_before.get(layer) for layer in layers):
        return "float32"
    own = float_policy(model) or "float32"
    common = own if own.startswith("mixed_") else most_common_policy(layers)
    return common if common != "float64" else "float32"


def take_off(model: Any, *, keep_by_hand: bool) -> dict[int, Any]:
    """Takes off a model what a policy of tfamp's, or a level before, put on it.

    Args:
        model: The model. Its layers then have the dtypes they had, or float32 where they were made
            under a mixed policy; its symbolic tensors do not say so yet.
        keep_by_hand: Whether dtypes that were set by hand since stay.

    Returns:
        For the number of each layer whose dtype a user chose: its policy.
    """
    default = default_policy(model)
    chosen: dict[int, Any] = {}
    for functional, _ in functionals_of(model):
        output_dtypes.dissolve(functional)
    for layer in layers_of(model):
        if isinstance(layer, keras.layers.InputLayer):
            continue
        now = policy_of(layer)
        is_chosen = _is_chosen(layer, default)
        _take_off(layer, default, is_chosen)
        before = layers_before.get(layer)
        if is_chosen and (keep_by_hand or before is None):
            give_policy(layer, now)
            chosen[id(layer)] = now
            if before is not None:
                set_by_hand.set(layer, True)
                continue  # for the way back, what it was at first
        else:
            set_by_hand.discard(layer)
        layers_before.discard(layer)
    return chosen


def _is_chosen(layer: Any, default: str) -> bool:
    """Whether a layer's dtype is a user's choice, as far as that can be known."""
    if set_by_hand.get(layer):
        return True
    if is_graph(layer):
        return False  # it computes nothing itself
    before, record = layers_before.get(layer), managed_layers.get(layer)
    name = float_policy(layer)
    raised = record is not None and bool(record.raised)
    if before is not None:
        return name != ("float32" if raised else before.given)
    if record is not None:
        return name != ("float32" if raised else record.policy_name)
    if name == "float32" and default.startswith("mixed_"):
        # In a model read from a file, BatchNormalization is so without anyone's choice.
        return not Policy(default).keeps_float32(type(layer))
    return name != default


def _take_off(layer: Any, default: str, is_chosen: bool) -> None:
    before = layers_before.get(layer)
    unwrap_methods(layer)
    managed_layers.discard(layer)
    if before is not None:
        layer.autocast = before.autocast
        give_policy(layer, before.policy)
        return
    if isinstance(layer, keras.layers.BatchNormalization) or uncast_inputs.get(layer):
        layer.autocast = True  # layers.fused_norms or layers.model_calls switched it off
    if not is_chosen and default.startswith("mixed_"):
        give_policy(layer, "float32")


def put_on(model: Any, policy: Policy, *, kept: Iterable[Any], chosen: Iterable[int]) -> None:
    """Puts a policy on every layer of a model that nothing keeps from it.

    Args:
        model: A model from which everything was taken off.
        policy: A mixed policy; it keeps BatchNormalization and outputs in float32.
        kept: Layers that stay float32, with all below them.
        chosen: Numbers of the layers whose dtype a user chose.

    Raises:
        ValueError: A layer of the user's own fails in the low dtype.
    """
    skipped = {id(layer) for layer in layers_of(*kept)} | set(chosen)
    for layer in layers_of(model):
        if id(layer) in skipped or isinstance(layer, keras.layers.InputLayer):
            continue
        if prepares_data(type(layer)) or _holds_its_dtype(layer, policy):
            skipped |= {id(each) for each in layers_of(layer)}
            continue
        keeps = policy.keeps_float32(type(layer))
        if keeps:
            skipped |= {id(each) for each in layers_of(layer)}
        _put_on(layer, policy, keeps)
    for functional, owner in functionals_of(model):
        correct_symbolic_dtypes(functional)
        functional_adopted(functional, owner)
    output_dtypes.models_below_become_parts(model)


def _put_on(layer: Any, policy: Policy, keeps: bool) -> None:
    given = "float32" if keeps else policy.name
    layers_before.set(layer, Before(policy_of(layer), layer.autocast, given))
    if not keeps:
        give_policy(layer, policy.name)
    layer_adopted(layer, policy)
    if not layer.built:
        # Layers that it makes in its own `build` get the policy there.
        wrap_method(layer, "build", _under(policy))


def _under(policy: Policy) -> Callable[..., Any]:
    def build(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with policy_scope(policy):
            return original(*args, **kwargs)

    return build


def _holds_its_dtype(layer: Any, policy: Policy) -> bool:
    """Whether a layer is quantized and cannot get a policy, or its code may mix it with such."""
    if is_graph(layer):
        return False  # the layers in it cast what they are given
    return any(policy_with(each, policy.name) is None for each in layers_of(layer))
