"""All that tfamp knows of a layer or model, as one record on the object itself.

Its fields are values: the assignment of the layer, the facts that its plan follows from, and
its places in models. Who changes one puts a new record in the place of the old one, so copies of
a layer share nothing.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import keras

from tfamp.core.kinds import Functional, Layer, Model
from tfamp.interop import keras_hooks
from tfamp.layers.layer_dtypes import float_policy
from tfamp.layers.layer_plan import Assignment, Before, Decider, LayerFacts
from tfamp.layers.records import WeakMap
from tfamp.policy import Policy, policy_named

# An ordered set of models; they may be deleted before the layers that it belongs to.
Models: TypeAlias = weakref.WeakKeyDictionary[Functional, None]


@dataclass(eq=False)
class Places:
    """The Functionals that a managed layer is part of.

    Attributes:
        output_of: Functionals it is an output layer of.
        interior_of: Functionals it is an interior layer of.
        raised: The layer and its sublayers with the same policy, while they are raised.
    """

    output_of: Models = field(default_factory=weakref.WeakKeyDictionary)
    interior_of: Models = field(default_factory=weakref.WeakKeyDictionary)
    raised: list[Layer] = field(default_factory=list)


@dataclass(eq=False)
class ModelGraph:
    """A Functional with managed layers, and its roles.

    Attributes:
        functional: The Functional.
        owner: The Sequential that it is inside of, if any.
        output_of: Functionals in which this model makes an output.
        nested: Whether it is part of another model, so that its outputs are low.
        casts: Indexes of its outputs that an appended cast makes.
        inner: `id`s of layers and ops whose low outputs such a cast and others consume.
    """

    functional: Functional
    owner: Callable[[], Model | None] = lambda: None
    output_of: Models = field(default_factory=weakref.WeakKeyDictionary)
    nested: bool = False
    casts: set[int] = field(default_factory=set)
    inner: set[int] = field(default_factory=set)


@dataclass(frozen=True, eq=False)
class LayerRecord:
    """Everything that tfamp knows of a layer or model.

    Attributes:
        assignment: The dtype that it computes in, and who decided that.
        facts: What its plan follows from; None for a layer that tfamp leaves to Keras.
        places: Its places in models; None before the first.
        graph: Its own roles, of a Functional with managed layers.
        inside: The last Functional that a Sequential has built.
        autocast: Whether Keras cast its inputs before its plan said otherwise; None without that.
        handed_down: The policy in force, of which another layer handed its dtype on to this one.
        warned: Whether a warning has said that it trains in float32 under a later policy.
        warned_of_ids: Whether a warning has said that its ids, of an Embedding, are rounded.
    """

    assignment: Assignment | None = None
    facts: LayerFacts | None = None
    places: Places | None = None
    graph: ModelGraph | None = None
    inside: weakref.ref[Functional] | None = None
    autocast: bool | None = None
    handed_down: Policy | None = None
    warned: bool = False
    warned_of_ids: bool = False


_records: WeakMap[LayerRecord] = WeakMap()
_NOTHING = LayerRecord()


def record_of(layer: Layer) -> LayerRecord:
    """Returns the record of a layer or model; one without contents if there is none."""
    return _records.get(layer) or _NOTHING


def note(layer: Layer, **changes: Any) -> None:
    """Changes fields of the record of a layer or model."""
    _records.set(layer, dataclasses.replace(record_of(layer), **changes))


def assignment_of(layer: Layer) -> Assignment | None:
    """Returns the assignment of a layer, None for one that has the dtype it was made with."""
    return record_of(layer).assignment


def places_of(layer: Layer) -> Places:
    """The places of a managed layer in models."""
    places = record_of(layer).places
    if places is None:
        places = Places()
        note(layer, places=places)
    return places


def graph_of(layer: Layer) -> ModelGraph | None:
    """The roles of a Functional, or of the one inside a built Sequential."""
    is_sequential = isinstance(layer, keras.Sequential)
    functional = keras_hooks.functional_of(layer) if is_sequential else layer
    return None if functional is None else record_of(functional).graph


def managed_by(layer: Layer) -> Policy | None:
    """Returns the mixed policy that manages a layer, None for other layers."""
    assignment = assignment_of(layer)
    return None if assignment is None else assignment.policy


def set_by_hand(layer: Layer) -> bool:
    """Whether a user set a layer's dtype, by `tfamp.set_layer_dtype` or since a level."""
    assignment = assignment_of(layer)
    return assignment is not None and assignment.by == "user"


def before_level(layer: Layer) -> Before | None:
    """Returns what a layer had before the level that it is at; None without a level."""
    assignment = assignment_of(layer)
    return None if assignment is None else assignment.before


def decider_of(layer: Layer, default: str) -> Decider:
    """Returns who decided the dtype that a layer has now.

    A layer without an assignment was made without tfamp or read from a file, which does not say
    whether its dtype was chosen: a user chose it if it is not that of the model's other layers.

    Args:
        layer: A layer that computes something itself.
        default: Name of the float policy of most layers of its model.
    """
    assignment = assignment_of(layer)
    name_now = float_policy(layer)
    if assignment is not None:
        return assignment.by if name_now == assignment.policy_name else "user"
    usual_names = {default}
    if default.startswith("mixed_") and policy_named(default).keeps_float32(type(layer)):
        # A BatchNormalization, in a model made under a policy of tfamp's.
        usual_names.add("float32")
    return "policy" if name_now in usual_names else "user"
