"""A finding of an investigation -> what the user is told."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from tfamp.diagnostics.model_runs import layer_path
from tfamp.diagnostics.searching import causes, model_step
from tfamp.diagnostics.searching.fixes import Fault, fix_for
from tfamp.diagnostics.searching.investigation import Finding, Investigation
from tfamp.diagnostics.searching.nonfinite_report import NonFiniteReport, ValueRange
from tfamp.diagnostics.searching.step_graph import shown_name
from tfamp.graph.measuring.first_nonfinite import Place
from tfamp.graph.measuring.tensor_stats import Run
from tfamp.planning.ranges import TensorKey

_LOSS = re.compile(r"loss|cross_?entropy", re.IGNORECASE)
_CONSTANTS = frozenset({"Const", "HostConst"})


def describe_finding(
    investigation: Investigation,
    finding: Finding,
    *,
    how: str,
    scale: float | None = None,
    best_scale: float | None = None,
) -> NonFiniteReport:
    """Returns the report of a finding.

    Args:
        investigation: Where it was found.
        finding: What was found.
        how: "model", "function" or "rewritten", as in a `Fault`.
        scale: The loss scale, if that is the cause.
        best_scale: And the largest one with which the step is finite.
    """
    place, cause = finding.place, finding.cause
    callers = investigation.callers(place)
    layer = investigation.layers.layer(place.scope, place.node, callers)
    stage = "loss_scale" if scale is not None else _stage(investigation, finding, layer)
    kind = causes.OVERFLOW if stage == "loss_scale" else cause.kind
    variable = investigation.variable_read(place)
    if stage in ("backward", "loss_scale"):
        variable = next(iter(investigation.bad_gradients(finding)), variable)
    node = shown_name(place.node)
    path = _layer_or_scope(layer, place)
    fault = Fault(
        stage=stage,
        kind=kind,
        op=place.op,
        dtype=cause.dtype,
        how=how,
        layer=path,
        layer_class=None if layer is None else type(layer).__name__,
        node=node,
        variable=variable,
        float32_max=cause.float32_max,
        count=causes.reduced_values(place, finding.low),
        is_constant=place.op in _CONSTANTS or bool(place.spread),
        scale=scale,
        best_scale=best_scale,
        **_vanished(investigation, finding),
    )
    return NonFiniteReport(
        stage=stage,
        layer=path,
        op=place.op,
        variable=variable,
        kind=kind,
        ranges=_ranges(finding),
        fix=fix_for(fault),
        node=node,
        dtype=cause.dtype,
        where=investigation.step.wheres(place.callers[0] if place.callers else place.node),
        details=_details(fault, finding),
    )


def _stage(investigation: Investigation, finding: Finding, layer: Any) -> str:
    place = finding.place
    name = place.callers[0] if place.callers else place.node
    if investigation.is_backward(place):
        return "backward"
    if place.op == "Cast" and finding.cause.kind == causes.OVERFLOW:
        if investigation.argument_read(place) is not None:
            return "input"
        if investigation.variable_read(place) is not None:
            return "weights"
    in_loss = _LOSS.search(name) if layer is None else model_step.LOSS_SCOPE in name
    return "loss" if in_loss else "forward"


def _vanished(investigation: Investigation, finding: Finding) -> dict[str, Any]:
    place = finding.cause.vanished_in
    if place is None:
        return {}
    layer = investigation.layers.layer(place.scope, place.node, investigation.callers(place))
    return {
        "vanished_op": place.op,
        "vanished_layer": _layer_or_scope(layer, place),
        "vanished": finding.cause.vanished,
    }


def _layer_or_scope(layer: Any, place: Place) -> str | None:
    if layer is not None:
        return layer_path(layer)
    names = shown_name(place.node).removeprefix("gradient_tape/").split("/")[:-1]
    # `tf.cast` and others open a name scope of their own, which tells nothing.
    while names and re.sub(r"_\d+$", "", names[-1]).lower() == place.op.lower():
        names.pop()
    return "/".join(names) or None


def _details(fault: Fault, finding: Finding) -> list[str]:
    found = []
    if finding.place.spread:
        found.append(f"The first NaN came of it in {shown_name(finding.place.spread)}.")
    if finding.place.callers:
        callers = " in ".join(shown_name(each) for each in reversed(finding.place.callers))
        number = finding.cause.execution + 1
        found.append(f"It is in the function that {callers} runs, in its execution {number}.")
    if fault.scale is not None:
        found.append(f"The loss scale is {fault.scale:g}.")
    return found


def _ranges(finding: Finding) -> Mapping[str, tuple[ValueRange, ...]]:
    place, low, reference = finding.place, finding.low, finding.reference
    execution = finding.cause.execution
    found = {
        "inputs": _of_tensors(place.inputs, low, execution, "input"),
        "outputs": _of_tensors(place.outputs, low, execution, "output"),
    }
    if reference is None:
        return {**found, "float32_inputs": found["inputs"], "float32": found["outputs"]}
    return {
        **found,
        "float32_inputs": _of_tensors(place.inputs, reference, execution, "input"),
        "float32": _of_tensors(place.outputs, reference, execution, "output"),
    }


def _of_tensors(
    keys: tuple[TensorKey, ...], run: Run, execution: int, what: str
) -> tuple[ValueRange, ...]:
    return tuple(
        ValueRange.of(f"{what} {number}", stats)
        for number, key in enumerate(keys)
        if (stats := run.get(key).at(execution)) is not None
    )
