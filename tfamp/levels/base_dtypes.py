"""What the layers of a model are without a level, to be found again in its copies."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import keras

from tfamp.core.dtypes import LOW_PRECISION
from tfamp.layers.float_policies import is_plain
from tfamp.levels.layer_policies import (
    Before,
    default_policy,
    layers_before,
    set_by_hand,
)
from tfamp.levels.model_copy import same_layers
from tfamp.levels.model_structure import layers_of
from tfamp.policy import prepares_data


class BaseDtypes:
    """The policies of a model's layers before any level.

    Args:
        model: A model from which everything was taken off.
        kept: Its layers that stay float32.
        chosen: Numbers of its layers whose dtype a user chose.
    """

    def __init__(self, model: Any, kept: Iterable[Any], chosen: set[int]) -> None:
        self._model = model
        self._default = default_policy(model)
        self._chosen = chosen
        self._kept = {id(layer) for layer in kept}
        layers = layers_of(model)
        preparing = [layer for layer in layers if prepares_data(type(layer))]
        self._left = {id(layer) for layer in layers_of(*kept, *preparing)} | chosen
        self._policies = {id(layer): self._base_policy(layer) for layer in layers}

    def own(self, layer: Any) -> str | None:
        """The float32 policy in place of a low one that all layers have; None for the layer's."""
        low = self._default in LOW_PRECISION and is_plain(layer.dtype_policy)
        return "float32" if low and layer.dtype_policy.name == self._default else None

    def _base_policy(self, layer: Any) -> Any:
        own = self.own(layer)
        return layer.dtype_policy if own is None else keras.DTypePolicy(own)

    def pure(self, dtype: str) -> Callable[[Any], str | None]:
        """Returns the policies of a copy that is all in one dtype, but for what is left alone."""

        def policy_of(layer: Any) -> str | None:
            plain = is_plain(layer.dtype_policy) and not isinstance(layer, keras.layers.InputLayer)
            return dtype if plain and id(layer) not in self._left else self.own(layer)

        return policy_of

    def kept_of(self, made: Any) -> tuple[Any, ...]:
        """The layers of a copy that the user keeps."""
        return tuple(new for old, new in same_layers(self._model, made) if id(old) in self._kept)

    def chosen_of(self, made: Any) -> set[int]:
        """Numbers of the layers of a copy whose dtype a user chose."""
        return {id(new) for old, new in same_layers(self._model, made) if id(old) in self._chosen}

    def mark_on(self, made: Any) -> None:
        """Notes on a copy which dtypes were set by hand."""
        for old, new in same_layers(self._model, made):
            if set_by_hand.get(old):
                set_by_hand.set(new, True)

    def record_on(self, made: Any) -> None:
        """Notes on a copy what its layers are without a level, for the way back."""
        self.mark_on(made)
        for old, new in same_layers(self._model, made):
            if not isinstance(new, keras.layers.InputLayer):
                given = new.dtype_policy.name
                layers_before.set(new, Before(self._policies[id(old)], new.autocast, given))
