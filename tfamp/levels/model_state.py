"""What `prepare` may change about a model, noted so that a failure leaves no trace of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tfamp.interop import keras_hooks
from tfamp.interop.patching import rewrap_methods, wrapped_methods
from tfamp.layers.float_policies import give_policy, policy_of
from tfamp.layers.roles import ManagedLayer, ModelGraph, WeakMap, graphs, managed_layers
from tfamp.levels.layer_policies import Before, layers_before, set_by_hand
from tfamp.levels.model_structure import functionals_of, layers_of


@dataclass(frozen=True, slots=True)
class _LayerState:
    layer: Any
    policy: Any
    autocast: bool
    methods: dict[str, Callable[..., Any]]
    managed: ManagedLayer | None
    before: Before | None
    by_hand: bool | None
    symbolic: tuple[tuple[Any, str], ...]


@dataclass(frozen=True, slots=True)
class _FunctionalState:
    functional: Any
    outputs: tuple[Any, ...]
    graph: ModelGraph | None


class ModelState:
    """The dtypes, replaced methods and appended casts of models, as they are now.

    Args:
        *roots: The models, or single layers.
    """

    def __init__(self, *roots: Any) -> None:
        self._layers = [_layer_state(layer) for layer in layers_of(*roots)]
        self._functionals = [
            _FunctionalState(functional, tuple(functional.outputs), graphs.get(functional))
            for functional, _ in functionals_of(*roots)
        ]

    def restore(self) -> None:
        """Puts all of it back."""
        for state in self._layers:
            layer = state.layer
            rewrap_methods(layer, state.methods)
            give_policy(layer, state.policy)
            layer.autocast = state.autocast
            _put(managed_layers, layer, state.managed)
            _put(layers_before, layer, state.before)
            _put(set_by_hand, layer, state.by_hand)
        for known in self._functionals:
            same = zip(known.outputs, known.functional.outputs, strict=True)
            if not all(before is now for before, now in same):
                keras_hooks.set_outputs(known.functional, known.outputs)
            _put(graphs, known.functional, known.graph)
        for state in self._layers:
            for tensor, dtype in state.symbolic:
                keras_hooks.set_symbolic_dtype(tensor, dtype)


def _layer_state(layer: Any) -> _LayerState:
    nodes = [
        *keras_hooks.inbound_nodes(layer),
        # Ops that are no layers, such as a sum of two outputs.
        *keras_hooks.outbound_nodes(layer),
    ]
    tensors = {id(tensor): tensor for node in nodes for tensor in node.outputs}
    return _LayerState(
        layer,
        policy_of(layer),
        layer.autocast,
        wrapped_methods(layer),
        managed_layers.get(layer),
        layers_before.get(layer),
        set_by_hand.get(layer),
        tuple((tensor, tensor.dtype) for tensor in tensors.values()),
    )


def _put(books: WeakMap[Any], key: Any, value: Any) -> None:
    if value is None:
        books.discard(key)
    else:
        books.set(key, value)
