"""Runs a traced step and finds the first op in it whose result is not finite."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from tfamp.core.dtypes import FLOAT_DTYPES, float_format
from tfamp.diagnostics.searching import causes
from tfamp.diagnostics.searching.causes import Cause
from tfamp.diagnostics.searching.step_graph import LayerFinder, StepGraph
from tfamp.graph.function_names import called_functions
from tfamp.graph.measuring.first_nonfinite import Place, Scopes, find_first
from tfamp.graph.measuring.tensor_stats import Run
from tfamp.graph.measuring.value_probes import Observer, measured_scopes
from tfamp.graph.transforms.pruning import drop_unused_nodes
from tfamp.graph.transforms.retype import low_dtypes, retyped
from tfamp.planning.ranges import TensorKey
from tfamp.planning.structures import MAIN_GRAPH
from tfamp.planning.tensor_names import node_name

_BACKWARD = re.compile(r"(^|/)(gradient_tape|gradients)/")


@dataclass(frozen=True, slots=True)
class Finding:
    """An op whose result is not finite, and the runs that showed it.

    Attributes:
        place: The op.
        cause: Why.
        low: The run in which it is not finite.
        reference: The run in float32; None where that is the same.
    """

    place: Place
    cause: Cause
    low: Run
    reference: Run | None


class Investigation:
    """A step to run, in its own dtype or another, and in float32.

    Args:
        step: The step.
        dtype: The low dtype to run it in, "float32", or None for its own.
        scale_input: Position of the loss scale among the step's values; None if its scale, if any,
            is in a variable.
    """

    def __init__(self, step: StepGraph, dtype: str | None, scale_input: int | None = None) -> None:
        self.step = step
        self._scale_input = scale_input
        self._outputs = list(dict.fromkeys(root.tensor for root in step.roots))
        wanted = [*self._outputs, *step.operations]
        graph = drop_unused_nodes(step.graph_def, step.inputs, wanted)
        indexes = measured_scopes(graph)
        low = low_dtypes(indexes)
        if low and dtype is not None and low != [dtype]:
            graph = retyped(graph, indexes, dtype)
            indexes = measured_scopes(graph)
            low = low_dtypes(indexes)
        self.low_dtype = low[0] if low else None
        self._graph, self._indexes = graph, indexes
        self._observers: dict[bool, Observer] = {}
        self.scopes = Scopes(indexes, _called(graph))
        self.layers = LayerFinder(step)
        self._roots = [(MAIN_GRAPH, node_name(t), _port(t)) for t in self._outputs]

    def look(self, scale: float | None = None) -> Finding | None:
        """Runs the step and returns the first op whose result is not finite.

        Args:
            scale: The loss scale; None for the step's own.

        Returns:
            The finding; None if all is finite.
        """
        low = self.run(scale)
        if low.finite:
            return None
        reference = None if self.low_dtype is None else self.run(scale, in_float32=True)
        place = find_first(self.scopes, low, reference, self._roots)
        if place is None:
            return None
        return Finding(place, causes.cause_of(place, self.scopes, low, reference), low, reference)

    def run(self, scale: float | None = None, in_float32: bool = False) -> Run:
        """Runs the step; returns what was seen.

        Args:
            scale: The loss scale; None for the step's own.
            in_float32: Whether to run its twin in float32.
        """
        step, values = self.step, list(self.step.values)
        settings: list[tuple[Any, float]] = []
        if scale is not None and self._scale_input is not None:
            values[self._scale_input] = tf.constant(scale, tf.float32)
        elif scale is not None and step.scale is not None:
            settings.append((step.scale, scale))
        return self._observer(in_float32).run(values, settings)

    def _observer(self, in_float32: bool) -> Observer:
        if in_float32 not in self._observers:
            graph, indexes = self._graph, self._indexes
            if in_float32:
                graph = retyped(graph, indexes, "float32")
                indexes = measured_scopes(graph)
            step = self.step
            self._observers[in_float32] = Observer(
                graph, indexes, step.inputs, self._outputs, step.operations
            )
        return self._observers[in_float32]

    def is_backward(self, place: Place) -> bool:
        """Whether an op is part of the backward pass, or of what is done with its results."""
        graph = self.scopes.main
        pending = [graph.positions[place.callers[0] if place.callers else place.node]]
        seen = set(pending)
        while pending:
            position = pending.pop()
            if _BACKWARD.search(graph.index.nodes[position].name):
                return True
            # By floats alone: a loop of the forward pass takes lists that its gradient needs.
            floats = [n for n, _, dtype in graph.inputs[position] if dtype in FLOAT_DTYPES]
            sources = [n for n in floats if n not in seen]
            seen.update(sources)
            pending += sources
        return False

    def largest_scale(self, run: Run, scale: float) -> float | None:
        """Returns the largest power of two as loss scale with which the step would be finite.

        Args:
            run: A run in which all is finite.
            scale: The loss scale it was made with.
        """
        room = [
            float_format(stats.dtype).max / stats.max_abs
            for key, seen in run.tensors.items()
            if _BACKWARD.search(key[1]) or self._is_scaled_loss(key)
            if (stats := seen.stats) is not None and stats.max_abs > 0
        ]
        if not room:
            return None
        best = 2.0 ** math.floor(math.log2(min(room) * scale))
        for candidate in (best, best / 2, best / 4, best / 8):
            if self.look(candidate) is None:
                return candidate
        return None

    def _is_scaled_loss(self, key: TensorKey) -> bool:
        names = {node_name(root.tensor) for root in self.step.roots if root.role == "scaled loss"}
        return key[1] in names

    def bad_gradients(self, finding: Finding) -> list[str]:
        """Returns the variables whose gradients are not finite because of what was found."""
        graph = self.scopes.main
        name = finding.place.callers[0] if finding.place.callers else finding.place.node
        reached = _downstream(graph.inputs, graph.positions[name])
        return [
            root.variable
            for root in self.step.roots
            if root.variable is not None
            and graph.positions[node_name(root.tensor)] in reached
            and finding.low.get((MAIN_GRAPH, node_name(root.tensor), _port(root.tensor))).bad
        ]

    def callers(self, place: Place) -> list[tuple[str, str]]:
        """Returns scope and name of the nodes that run an op's function, the outermost first."""
        found, scope = [], MAIN_GRAPH
        for caller in place.callers:
            found.append((scope, caller))
            bodies = self.scopes.called[scope, caller]
            # The one that leads to the op, where a node has several, such as branches.
            scope = next((each for each in bodies if self._leads_to(each, place)), place.scope)
        return found

    def _leads_to(self, scope: str, place: Place) -> bool:
        if scope == place.scope:
            return True
        inner = (names for (inside, _), names in self.scopes.called.items() if inside == scope)
        return any(self._leads_to(name, place) for names in inner for name in names)

    def variable_read(self, place: Place) -> str | None:
        """Returns the name of a variable whose value an op takes, perhaps as a cast."""
        found = causes.source_of(place, self.scopes, causes.READS)
        if found is None or place.scope != MAIN_GRAPH:
            return None
        graph = self.scopes.main
        sources = (graph.index.nodes[n].name for n, _, _ in graph.inputs[graph.positions[found]])
        names = (self.step.variable_of.get(source) for source in sources)
        return next((name for name in names if name is not None), None)

    def argument_read(self, place: Place) -> int | None:
        """Returns which argument's value an op takes, perhaps as a cast; None if it takes none."""
        found = causes.source_of(place, self.scopes, causes.INPUTS)
        arguments = [node_name(name) for name in self.step.inputs[: self.step.given]]
        return arguments.index(found) if found in arguments else None


def _called(graph_def: Any) -> dict[tuple[str, str], list[str]]:
    library = {function.signature.name: function for function in graph_def.library.function}
    scopes = [(MAIN_GRAPH, graph_def.node)]
    scopes += [(name, function.node_def) for name, function in library.items()]
    return {
        (scope, node.name): [name for name in called_functions(node) if name in library]
        for scope, nodes in scopes
        for node in nodes
    }


def _port(tensor: str) -> int:
    return int(tensor.partition(":")[2] or 0)


def _downstream(inputs: list[list[tuple[int, int, str]]], start: int) -> set[int]:
    consumers: dict[int, list[int]] = {}
    for position, sources in enumerate(inputs):
        for node, _, _ in sources:
            consumers.setdefault(node, []).append(position)
    pending, seen = [start], {start}
    while pending:
        for consumer in consumers.get(pending.pop(), ()):
            if consumer not in seen:
                seen.add(consumer)
                pending.append(consumer)
    return seen
