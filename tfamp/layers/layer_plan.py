"""Decisions of a mixed policy about a layer, as values: its assignment, and the plan of its calls.

An `Assignment` is the dtype that a layer computes in, who decided that, and its role. `assigned`
makes it from the class of the layer and a policy: a policy does so when it constructs a layer, and
a level for every layer of a finished model. A layer without one has the dtype that it was made
with, without tfamp.

A `LayerPlan` says what happens in the calls of a layer. `plan_layer`, a pure function, makes it
from the facts of the layer and its role in models. A new place in a model gives a new role, and
so another plan, by the same function. `model_calls` carries plans out, and reports print them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from tfamp.core.kinds import KerasPolicy
from tfamp.policy import Policy, prepares_data

# "hidden" layers compute in the policy's dtype. "output" layers are raised to float32 while
# they make an output of a model. "statistics" is a BatchNormalization, whose statistics are
# float32 and whose output has the dtype of its input. "exact" layers are float32 with all that
# is in them, as their class is, and "data" layers as they prepare data. "" is the role of a layer
# whose dtype no policy manages.
Role: TypeAlias = Literal["", "hidden", "output", "statistics", "exact", "data"]
Decider: TypeAlias = Literal["policy", "level", "user"]
# A "model" has a class with code that calls its layers.
Kind: TypeAlias = Literal["layer", "functional", "sequential", "model"]
# How a layer takes its inputs: "cast" by Keras to its compute dtype; "uncast", as they come;
# "ids", cast but for its first argument; "lowered", cast by its own wrapper, which remembers the
# exact values for layers inside.
Inputs: TypeAlias = Literal["cast", "uncast", "ids", "lowered"]
# What becomes of outputs: "own", as computed; "fused", of the input's dtype by the fused kernel;
# "part", those of a model that may be part of another layer; "outermost", float32 where no layer
# is around; "part or outermost" of a Sequential.
Outputs: TypeAlias = Literal["own", "fused", "part", "outermost", "part or outermost"]


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


@dataclass(frozen=True, slots=True)
class LayerFacts:
    """Facts of a layer, and requests for it.

    Attributes:
        kind: Its kind.
        float32_inside: Why its class computes in float32 between low inputs and outputs; "" if
            it does not.
        takes_ids: Whether its first argument are indexes.
        takes_exact: Whether its results need the exact inputs.
        turns_positions: Whether it turns positions into angles.
        adds_up: Whether it, or what it calls, may run kernels that add up.
        drops: Whether it drops values at a rate, and does nothing else.
        loops: Whether it loops over the steps of a sequence.
        adds_losses: Whether it may add losses.
        is_regularized: Whether Keras adds a loss for its outputs.
        holds: What layers inside of it need: "data" as it came, or "exact" inputs; "" if nothing.
        holds_layers: Whether it may hold layers of a user.
        runs_user_code: Whether a class of a user's calls the layers inside of it.
        guarded: Whether sums of kernels were asked to be exact.
        protected: Whether losses, features and sums were asked to be float32.
        losses: Whether only its losses were asked to be float32.
        managed: Whether a policy gives it its dtype.
        stays: Whether it stays float32 under that policy, with all that is in it.
        float32_outputs: Whether that policy makes models return float32.
        low_products: Whether that policy lets products of output layers be low.
        has_product: Whether its class multiplies by a kernel, and does little else.
        casts: Whether its outputs were asked to be float32 where it is the outermost model.
        low: The compute dtype of that policy.
        policy_name: The name of that policy.
        can_fuse: Whether its class has a fused kernel.
        uncast: Whether Keras must not cast its inputs, as the fused kernel takes low ones.
        loads_under: The policy that manages it once a file says that it did before.
    """

    kind: Kind = "layer"
    float32_inside: str = ""
    takes_ids: bool = False
    takes_exact: bool = False
    turns_positions: bool = False
    adds_up: bool = True
    drops: bool = False
    loops: bool = False
    adds_losses: bool = True
    is_regularized: bool = False
    holds: Literal["", "data", "exact"] = ""
    holds_layers: bool = False
    runs_user_code: bool = False
    guarded: bool = False
    protected: bool = False
    losses: bool = False
    managed: bool = False
    stays: bool = False
    float32_outputs: bool = False
    low_products: bool = False
    has_product: bool = False
    casts: bool = False
    low: str = ""
    policy_name: str = ""
    can_fuse: bool = False
    uncast: bool = False
    loads_under: Policy | None = None


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """The steps in the calls of a layer.

    Attributes:
        role: Its role, "" without one.
        policy: Name of the float policy that its role gives it; "" where it has its own.
        refusal: Why it stays low though it makes an output of a model; "" if it does not.
        inputs: How it takes its inputs.
        autocast: Whether Keras casts its inputs.
        float32_inside: Why it computes in float32 between low inputs and outputs; "" if not.
        turns_positions: Whether it computes angles in float32, by a view of itself.
        guarded: Whether kernels that add up in its low dtype are avoided.
        exact_rate: Whether it draws random numbers in float32, which it compares with a rate.
        casts_once: Whether weights of Keras's own cells are cast before its loop over a sequence.
        float32_losses: Whether losses that it adds are float32.
        regularized_in_float32: Whether the loss of its outputs is computed in float32.
        float32_sublayers: The policy of the sublayers that stay float32 with it; "" for none.
        looks_inside: Whether its first call shows what layers inside of it need.
        float32_features: Whether an InputLayer that it makes takes float32 features.
        fused: The low dtype of the fused kernel; "" without it.
        low_product: The low dtype of its product, in an output layer that is float32 otherwise.
        outputs: What becomes of its outputs.
        loads_under: The policy that manages it once a file says that it did before.
    """

    role: Role = ""
    policy: str = ""
    refusal: str = ""
    inputs: Inputs = "cast"
    autocast: bool = True
    float32_inside: str = ""
    turns_positions: bool = False
    guarded: bool = False
    exact_rate: bool = False
    casts_once: bool = False
    float32_losses: bool = False
    regularized_in_float32: bool = False
    float32_sublayers: str = ""
    looks_inside: bool = False
    float32_features: bool = False
    fused: str = ""
    low_product: str = ""
    outputs: Outputs = "own"
    loads_under: Policy | None = None

    def to_text(self, output_of: Sequence[str] = ()) -> str:
        """Returns the differences from a layer of Keras's in words; "" for none.

        `output_of` are names of the models that it makes outputs of.

        Example:
            >>> facts = LayerFacts(takes_ids=True, protected=True, adds_losses=False)
            >>> plan_layer(facts, "hidden").to_text()
            'hidden; exact ids; exact sums'
        """
        inputs = {
            "uncast": "inputs as they come",
            "ids": "exact ids",
            "lowered": "exact inputs kept",
        }
        outputs = {
            "fused": f"fused kernel in {self.fused}",
            "part": "low as a part of another layer",
            "outermost": "float32 where it is the outermost model",
            "part or outermost": "float32 unless it is a part of another layer",
        }
        said = {
            self._role_in(output_of): bool(self.role),
            f"low, and cast behind it, as {self.refusal}": bool(self.refusal),
            inputs.get(self.inputs, ""): self.inputs in inputs,
            f"float32 inside, as it {self.float32_inside}": bool(self.float32_inside),
            "float32 angles": self.turns_positions,
            "exact sums": self.guarded,
            "exact rate": self.exact_rate,
            "weights cast once": self.casts_once,
            "float32 losses": self.float32_losses,
            "all in it float32": bool(self.float32_sublayers),
            outputs.get(self.outputs, ""): self.outputs in outputs,
            f"product in {self.low_product}": bool(self.low_product),
        }
        return "; ".join(text for text, holds in said.items() if holds)

    def _role_in(self, models: Sequence[str]) -> str:
        makes_outputs = self.role == "output" and models
        return f"output of {' and '.join(models)}" if makes_outputs else self.role


def role_in_models(
    usual: Role, *, makes_outputs: bool, is_interior: bool, float32_outputs: bool
) -> Role:
    """Returns the role of a managed layer, from its places in models.

    Args:
        usual: Its role outside of models' outputs.
        makes_outputs: Whether a model has it as an output layer.
        is_interior: Whether a model has it as another layer. Raising it would slow that down:
            the first gets a cast.
        float32_outputs: Whether its policy makes models return float32.

    Example:
        >>> places = dict(makes_outputs=True, float32_outputs=True)
        >>> [role_in_models("hidden", is_interior=inner, **places) for inner in (False, True)]
        ['output', 'hidden']
    """
    return "output" if makes_outputs and not is_interior and float32_outputs else usual


@functools.lru_cache(maxsize=4096)
def plan_layer(facts: LayerFacts, role: Role, refusal: str = "") -> LayerPlan:
    """Returns the plan of a layer with a role in models.

    `refusal` is why it stays low though it makes an output of a model.

    Example:
        >>> facts = LayerFacts("model", managed=True, float32_outputs=True, low="bfloat16")
        >>> plan_layer(facts, "hidden").outputs
        'outermost'
    """
    protected, losses = facts.protected, facts.protected or facts.losses
    angles = protected and facts.turns_positions
    is_guarded = protected or facts.guarded
    inside = facts.float32_inside if protected else ""
    fused = facts.low if facts.managed and facts.can_fuse else ""
    inputs = _inputs(facts, inside, angles)
    is_low = role in ("", "hidden") and not facts.stays
    low_product = role == "output" and facts.low_products and facts.has_product
    return LayerPlan(
        role=role,
        policy=(facts.policy_name if is_low else "float32") if facts.managed else "",
        refusal=refusal,
        inputs=inputs,
        autocast=not (facts.uncast or inputs in ("uncast", "lowered")),
        float32_inside=inside,
        turns_positions=angles,
        guarded=is_guarded and facts.adds_up and not facts.turns_positions,
        exact_rate=is_guarded and facts.drops,
        casts_once=is_guarded and facts.loops,
        float32_losses=losses and (facts.adds_losses or facts.is_regularized),
        regularized_in_float32=losses and facts.is_regularized,
        float32_sublayers=facts.policy_name if facts.stays else "",
        looks_inside=protected and facts.holds_layers,
        float32_features=protected and facts.kind == "sequential",
        fused=fused,
        low_product=facts.low if low_product else "",
        outputs=_outputs(facts, fused),
        loads_under=facts.loads_under,
    )


def _inputs(facts: LayerFacts, inside: str, angles: bool) -> Inputs:
    if facts.protected and facts.takes_ids:
        return "ids"
    if facts.holds == "exact" and facts.runs_user_code:
        return "lowered"
    return "uncast" if facts.holds or angles or (inside and facts.takes_exact) else "cast"


def _outputs(facts: LayerFacts, fused: str) -> Outputs:
    if facts.casts:
        return "outermost"
    if not facts.managed or facts.stays:
        return "own"
    if fused:
        return "fused"
    if facts.kind == "functional":
        return "part"
    if not facts.float32_outputs or facts.kind == "layer":
        return "own"
    return "part or outermost" if facts.kind == "sequential" else "outermost"
