"""The books: which layers a mixed policy gave their dtype, and which roles they have in models."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import keras

from tfamp.interop import keras_hooks
from tfamp.policy import Policy

_Value = TypeVar("_Value")


class WeakMap(Generic[_Value]):
    """A dict from objects to values that keeps no object alive and compares by identity.

    Layers of a user's own may define `__eq__`, so weakref's dictionaries will not do.
    """

    def __init__(self) -> None:
        self._items: dict[int, tuple[weakref.ref[Any], _Value]] = {}

    def get(self, key: Any) -> _Value | None:
        """Returns the value of an object, None if it has none."""
        item = self._items.get(id(key))
        return item[1] if item is not None and item[0]() is key else None

    def set(self, key: Any, value: _Value) -> None:
        """Gives an object a value, in place of the one it has."""
        items, number = self._items, id(key)

        def drop(dead: weakref.ref[Any]) -> None:
            # The number may have been given to a new object since.
            if number in items and items[number][0] is dead:
                del items[number]

        items[number] = (weakref.ref(key, drop), value)

    def discard(self, key: Any) -> None:
        """Takes an object out, if it is there."""
        if self.get(key) is not None:
            del self._items[id(key)]

    def alive(self) -> list[Any]:
        """Returns the objects that still exist, in the order they came."""
        alive = [reference() for reference, _ in list(self._items.values())]
        return [key for key in alive if key is not None]


@dataclass(eq=False)
class ManagedLayer:
    """A layer whose dtype came from a mixed policy, and what its roles make of it.

    Attributes:
        policy: The policy it was created under.
        output_of: Functionals it is an output layer of.
        interior_of: Functionals it is an interior layer of.
        raised: The layer and those of its sublayers that had its policy, while they are raised.
        low_outputs: Which of its outputs were low before it was raised.
        follows_input: Whether its own policy is float32, and only its outputs are low: where its
            input is, and while it is not raised.
    """

    policy: Policy
    output_of: WeakMap[bool] = field(default_factory=WeakMap)
    interior_of: WeakMap[bool] = field(default_factory=WeakMap)
    raised: list[weakref.ref[Any]] = field(default_factory=list)
    low_outputs: tuple[int, ...] = ()
    follows_input: bool = False

    @property
    def policy_name(self) -> str:
        """Name of the Keras policy that the layer has while it is not raised."""
        return "float32" if self.follows_input else self.policy.name


@dataclass(eq=False)
class ModelGraph:
    """A Functional with managed layers, and its roles.

    Attributes:
        owner: The Sequential it is the inside of, if any.
        output_of: Functionals in which this model makes an output.
        nested: Whether it is a part of another model, so that its outputs are low.
        casts: Which of its outputs come from a cast that tfamp appended.
    """

    owner: weakref.ref[Any] | None = None
    output_of: WeakMap[bool] = field(default_factory=WeakMap)
    nested: bool = False
    casts: set[int] = field(default_factory=set)


managed_layers: WeakMap[ManagedLayer] = WeakMap()
# Layers whose `autocast` was switched off for the sake of those inside that prepare data.
uncast_inputs: WeakMap[bool] = WeakMap()
graphs: WeakMap[ModelGraph] = WeakMap()


def graph_of(layer: Any) -> tuple[Any, ModelGraph] | None:
    """The Functional that a Functional or a built Sequential runs, with its record."""
    functional: Any = None
    if isinstance(layer, keras_hooks.functional_class()):
        functional = layer
    elif isinstance(layer, keras.Sequential):
        functional = keras_hooks.functional_of(layer)
    graph = None if functional is None else graphs.get(functional)
    return None if graph is None else (functional, graph)


def is_built_in(layer: Any) -> bool:
    """Whether Keras itself defines the layer's class."""
    return type(layer).__module__.partition(".")[0] == "keras"
