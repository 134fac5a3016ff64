"""Each fact of a layer changes some plan, and each field of a plan is set by some facts."""

import dataclasses
import random
import typing

import pytest

from tfamp.layers.layer_plan import LayerFacts, LayerPlan, Role, plan_layer
from tfamp.policy import Policy

_HINTS = typing.get_type_hints(LayerFacts)
_TRIES = 2000


def values_of(name):
    """Values of a fact: both truths, the words of a Literal, no text or policy and some."""
    hint = _HINTS[name]
    known = {bool: (False, True), str: ("", "bfloat16")}
    known[Policy | None] = (None, Policy("mixed_bfloat16"))
    return known.get(hint) or typing.get_args(hint)


def some_facts(chooser):
    return LayerFacts(**{field: chooser.choice(values_of(field)) for field in _HINTS})


@pytest.mark.parametrize("name", _HINTS)
def test_each_fact_changes_some_plan(name):
    chooser, roles = random.Random(0), typing.get_args(Role)
    for _ in range(_TRIES):
        facts, role = some_facts(chooser), chooser.choice(roles)
        plans = {
            plan_layer(dataclasses.replace(facts, **{name: value}), role)
            for value in values_of(name)
        }
        if len(plans) > 1:
            return
    pytest.fail(
        f"LayerFacts.{name} changes no plan: use it in plan_layer (tfamp/layers/layer_plan.py), or "
        "delete it"
    )


def test_each_field_of_a_plan_is_set_by_some_facts():
    chooser, roles = random.Random(0), typing.get_args(Role)
    plans = [
        plan_layer(
            some_facts(chooser), chooser.choice(roles), chooser.choice(("", "it is a model"))
        )
        for _ in range(_TRIES)
    ]
    constant = [
        field.name
        for field in dataclasses.fields(LayerPlan)
        if len({getattr(plan, field.name) for plan in plans}) == 1
    ]
    assert not constant, f"{', '.join(constant)}: plan_layer never sets it, whatever the facts are"
