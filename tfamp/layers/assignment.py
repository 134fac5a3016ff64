"""The assignment of a layer: what it computes in, who decided that, and in which role.

One frozen value per layer. `assigned` makes it from the layer's class and a policy; a policy
does so when it constructs a layer, and a level for every layer of a finished model. The modules
that change a layer's dtype store it in the record of the layer, and settings and levels read it.
A layer without one has the dtype that it was made with, without tfamp.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal, TypeAlias

from tfamp.core.kinds import KerasPolicy
from tfamp.layers.layer_plan import Role
from tfamp.policy import Policy, prepares_data

Decider: TypeAlias = Literal["policy", "level", "user"]


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
        refusal: Why it stays low where it makes an output of a model; "" if it does not.
    """

    policy_name: str
    by: Decider
    role: Role = "hidden"
    policy: Policy | None = None
    before: Before | None = None
    refusal: str = ""


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
