"""The plan of a layer: what a mixed policy makes of its calls, as one value.

`plan_layer`, a pure function, makes it from the facts of a layer and its role in models. A new
place in a model gives a new role, and so another plan, by the same function. `model_calls`
carries plans out, and reports print them.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Literal, TypeAlias

# The roles of `assignment.Role`, and "" for a layer whose dtype no policy manages.
Role: TypeAlias = Literal["", "hidden", "output", "statistics", "exact", "data"]
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
    """

    kind: Kind = "layer"
    float32_inside: str = ""
    takes_ids: bool = False
    takes_exact: bool = False
    turns_positions: bool = False
    adds_up: bool = True
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


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """The steps in the calls of a layer.

    Attributes:
        role: Its role, "" without one.
        inputs: How it takes its inputs.
        float32_inside: Why it computes in float32 between low inputs and outputs; "" if not.
        turns_positions: Whether it computes angles in float32, by a view of itself.
        guarded: Whether kernels that add up in its low dtype are avoided.
        float32_losses: Whether losses that it adds are float32.
        regularized_in_float32: Whether the loss of its outputs is computed in float32.
        float32_sublayers: The policy of the sublayers that stay float32 with it; "" for none.
        looks_inside: Whether its first call shows what layers inside of it need.
        float32_features: Whether an InputLayer that it makes takes float32 features.
        fused: The low dtype of the fused kernel; "" without it.
        low_product: The low dtype of its product, in an output layer that is float32 otherwise.
        outputs: What becomes of its outputs.
    """

    role: Role = ""
    inputs: Inputs = "cast"
    float32_inside: str = ""
    turns_positions: bool = False
    guarded: bool = False
    float32_losses: bool = False
    regularized_in_float32: bool = False
    float32_sublayers: str = ""
    looks_inside: bool = False
    float32_features: bool = False
    fused: str = ""
    low_product: str = ""
    outputs: Outputs = "own"

    def to_text(self) -> str:
        """Returns the differences from a layer of Keras's in words; "" for none.

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
            self.role: bool(self.role),
            inputs.get(self.inputs, ""): self.inputs in inputs,
            f"float32 inside, as it {self.float32_inside}": bool(self.float32_inside),
            "float32 angles": self.turns_positions,
            "exact sums": self.guarded,
            "float32 losses": self.float32_losses,
            "all in it float32": bool(self.float32_sublayers),
            outputs.get(self.outputs, ""): self.outputs in outputs,
            f"product in {self.low_product}": bool(self.low_product),
        }
        return "; ".join(text for text, holds in said.items() if holds)


@functools.lru_cache(maxsize=1024)
def plan_layer(facts: LayerFacts, role: Role) -> LayerPlan:
    """Returns the plan of a layer with a role in models.

    Example:
        >>> facts = LayerFacts("model", managed=True, float32_outputs=True, low="bfloat16")
        >>> plan_layer(facts, "hidden").outputs
        'outermost'
    """
    protected, losses = facts.protected, facts.protected or facts.losses
    angles = protected and facts.turns_positions
    inside = facts.float32_inside if protected else ""
    fused = facts.low if facts.managed and facts.can_fuse else ""
    low_product = role == "output" and facts.low_products and facts.has_product
    return LayerPlan(
        role=role,
        inputs=_inputs(facts, inside, angles),
        float32_inside=inside,
        turns_positions=angles,
        guarded=(protected or facts.guarded) and facts.adds_up and not facts.turns_positions,
        float32_losses=losses and (facts.adds_losses or facts.is_regularized),
        regularized_in_float32=losses and facts.is_regularized,
        float32_sublayers=facts.policy_name if facts.stays else "",
        looks_inside=protected and facts.holds_layers,
        float32_features=protected and facts.kind == "sequential",
        fused=fused,
        low_product=facts.low if low_product else "",
        outputs=_outputs(facts, fused),
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
