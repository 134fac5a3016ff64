"""What the layers of a model are without a level, to be found again in its copies."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import keras

from tfamp.dtypes import LOW_PRECISION
from tfamp.layer_policies import (
    Before,
    default_policy,
    is_preprocessing,
    layers_before,
    set_by_hand,
)
from tfamp.model_structure import is_plain, layers_of


class BaseDtypes:
    """The policies of a model's layers before any level, by name: copies have the same names.

    Args:
        model: A model from which everything was taken off.
        kept: Its layers that stay float32.
        chosen: Numbers of its layers whose dtype a user chose.
    """

    def __init__(self, model: Any, kept: Iterable[Any], chosen: set[int]) -> None:
        self._default = default_policy(model)
        layers = layers_of(model)
        prepares_data = [layer for layer in layers if is_preprocessing(layer)]
        self._left = {id(layer) for layer in layers_of(*kept, *prepares_data)} | chosen
        self._kept = {layer.name for layer in kept}
        self._chosen = {layer.name for layer in layers if id(layer) in chosen}
        self._by_hand = {layer.name for layer in layers if set_by_hand.get(layer)}
        self._policies: dict[str, list[Any]] = {}
        for layer in layers:
            own = self.own(layer)
            policy = layer.dtype_policy if own is None else keras.DTypePolicy(own)
            self._policies.setdefault(layer.name, []).append(policy)

    def own(self, layer: Any) -> str | None:
        """The float32 policy in place of a low one that all layers have; None for the layer's."""
        low = self._default in LOW_PRECISION and is_plain(layer.dtype_policy)
        return "float32" if low and layer.dtype_policy.name == self._default else None

    def pure(self, dtype: str) -> Callable[[Any], str | None]:
        """Returns the policies of a copy that is all in one dtype, but for what is left alone."""

        def policy_of(layer: Any) -> str | None:
            plain = is_plain(layer.dtype_policy) and not isinstance(layer, keras.layers.InputLayer)
            return dtype if plain and id(layer) not in self._left else self.own(layer)

        return policy_of

    def kept_of(self, made: Any) -> tuple[Any, ...]:
        """The layers of a copy that the user keeps."""
        return tuple(layer for layer in layers_of(made) if layer.name in self._kept)

    def chosen_of(self, made: Any) -> set[int]:
        """Numbers of the layers of a copy whose dtype a user chose."""
        return {id(layer) for layer in layers_of(made) if layer.name in self._chosen}

    def mark_on(self, made: Any) -> None:
        """Notes on a copy which dtypes were set by hand."""
        for layer in layers_of(made):
            if layer.name in self._by_hand:
                set_by_hand.set(layer, True)

    def record_on(self, made: Any) -> None:
        """Notes on a copy what its layers are without a level, for the way back."""
        self.mark_on(made)
        remaining = {name: list(policies) for name, policies in self._policies.items()}
        for layer in layers_of(made):
            known = remaining.get(layer.name)
            if known and not isinstance(layer, keras.layers.InputLayer):
                given = layer.dtype_policy.name
                layers_before.set(layer, Before(known.pop(0), layer.autocast, given))
