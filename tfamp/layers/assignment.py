"""The assignment of a layer: what it computes in, who decided that, and in which role.

One frozen value per layer. `assigned` makes it from the layer's class and a policy; a policy
does so when it constructs a layer, and a level for every layer of a finished model. The modules
that change a layer's dtype store it, and settings and levels read it. A layer without one has
the dtype that it was made with, without tfamp.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal, TypeAlias

from tfamp.core.kinds import KerasPolicy, Layer
from tfamp.layers.layer_dtypes import float_policy
from tfamp.layers.records import WeakMap
from tfamp.policy import Policy, prepares_data

Decider: TypeAlias = Literal["policy", "level", "user"]
# "hidden" layers compute in the policy's dtype. "output" layers are raised to float32 while
# they make an output of a model. "statistics" is a BatchNormalization, whose statistics are
# float32 and whose output has the dtype of its input. "exact" layers are float32 with all that
# is in them, as their class is, and "data" layers as they prepare data.
Role: TypeAlias = Literal["hidden", "output", "statistics", "exact", "data"]


@dataclass(frozen=True, slots=True)
class Before:
    """State of a layer before a level: its Keras policy, and whether Keras casts its inputs."""

    policy: KerasPolicy
    autocast: bool


@dataclass(frozen=True, slots=True)
class Assignment:
    """The dtype a layer computes in, who decided that, and its role.

    Attributes:
        policy_name: Name of the float policy that the layer got. If it has another one now, a
            user has set that since.
        by: Who decided.
        role: The layer's role.
        policy: The mixed policy that manages the layer (see `layers.model_roles`), or None.
        before: What a level restores when it is taken back; None without a level.
    """

    policy_name: str
    by: Decider
    role: Role = "hidden"
    policy: Policy | None = None
    before: Before | None = None


assignments: WeakMap[Assignment] = WeakMap()


def assigned(
    layer_class: type,
    policy: Policy,
    by: Decider,
    *,
    fused: bool = False,
) -> Assignment:
    """Returns what a mixed policy assigns to a layer of a class, outside of models' outputs.

    `fused` is whether the class has a kernel with float32 statistics for low inputs.

    Example:
        >>> import keras
        >>> policy = Policy("mixed_float16", float32_layers=["Softmax"])
        >>> for layer in (keras.layers.Dense, keras.layers.Softmax):
        ...     assignment = assigned(layer, policy, "policy")
        ...     print(assignment.policy_name, assignment.role)
        mixed_float16 hidden
        float32 exact
    """
    if not policy.keeps_float32(layer_class):
        return Assignment(policy.name, by, "hidden", policy)
    if fused:
        return Assignment("float32", by, "statistics", policy)
    return Assignment("float32", by, "data" if prepares_data(layer_class) else "exact")


def assigned_to_copy(
    source: Assignment | None, copied: Assignment, before: Before | None
) -> Assignment | None:
    """Returns the assignment of a layer of a copied model, None for none.

    Args:
        source: The assignment of the layer that it was made from.
        copied: The assignment that it got when it was made, or would get as a hidden layer.
        before: What a level that stores weights in another dtype restores; None without one.
    """
    is_by_user = source is not None and source.by == "user"
    if before is None and not is_by_user:
        return None
    by = "user" if is_by_user else copied.by
    return dataclasses.replace(copied, by=by, before=before or copied.before)


def managed_by(layer: Layer) -> Policy | None:
    """Returns the mixed policy that manages a layer, None for other layers."""
    assignment = assignments.get(layer)
    return None if assignment is None else assignment.policy


def set_by_hand(layer: Layer) -> bool:
    """Whether a user set a layer's dtype, by `tfamp.set_layer_dtype` or since a level."""
    assignment = assignments.get(layer)
    return assignment is not None and assignment.by == "user"


def before_level(layer: Layer) -> Before | None:
    """Returns what a layer had before the level that it is at; None without a level."""
    assignment = assignments.get(layer)
    return None if assignment is None else assignment.before


def decider_of(layer: Layer, default: str) -> Decider:
    """Returns who decided the dtype that a layer has now.

    A layer without an assignment was made without tfamp or read from a file, which does not say
    whether its dtype was chosen: a user chose it if it is not that of the model's other layers.

    Args:
        layer: A layer that computes something itself.
        default: Name of the float policy of most layers of its model.
    """
    assignment = assignments.get(layer)
    name_now = float_policy(layer)
    if assignment is not None:
        return assignment.by if name_now == assignment.policy_name else "user"
    usual_names = {default}
    if default.startswith("mixed_") and Policy(default).keeps_float32(type(layer)):
        # A BatchNormalization, in a model made under a policy of tfamp's.
        usual_names.add("float32")
    return "policy" if name_now in usual_names else "user"
