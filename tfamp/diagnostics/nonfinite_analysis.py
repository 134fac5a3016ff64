"""Finds where the run of a step first stops being finite, and why, by what was seen of its tensors.

A tensor is *bad* if it has an infinite value or a NaN. Where a step has a bad result, the place to
name is the first bad tensor that led to it, made by an op from inputs that were all finite. An
infinite constant alone is no fault: masks are made of these, and what a softmax makes of one is
finite. It is to blame when a NaN comes of it, or when a result is bad in the end.
"""

from __future__ import annotations

import functools
import math
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple, TypeAlias

import tensorflow as tf

from tfamp.core.dtypes import FLOAT_DTYPES, float_format
from tfamp.diagnostics.model_runs import layer_path
from tfamp.diagnostics.nonfinite_report import (
    ALSO_IN_FLOAT32,
    INVALID,
    OVERFLOW,
    UNDERFLOW,
    Finding,
    ValueRange,
)
from tfamp.diagnostics.nonfinite_step import LOSS_SCOPE, SCALE_SCOPE, Path, Place, Step, shown_name
from tfamp.graph.observe import (
    NEVER,
    Observer,
    Seen,
    TensorStats,
    drop_unused_nodes,
    observed_scopes,
)
from tfamp.graph.retype import low_dtypes, retyped
from tfamp.interop.tf_private import held_dtype
from tfamp.planning.ranges import TensorKey
from tfamp.planning.structures import (
    ARGUMENT,
    MAIN_GRAPH,
    GraphIndex,
    IndexedNode,
    node_name,
    op_types,
    reach,
)

# What was seen of each tensor in a run.
Run: TypeAlias = Mapping[TensorKey, Seen]
Keys: TypeAlias = Sequence[TensorKey]

_CONSTANTS = frozenset({"Const", "HostConst"})
_READS = frozenset({"ReadVariableOp", "ResourceGather"})
_INPUTS = frozenset({"Placeholder", "PlaceholderV2"})
# Ops that make an infinity of finite values only if these are large.
_GROWING = op_types("""
    AddV2 BatchMatMulV2 Conv2D Cumsum Einsum MatMul Mean Mul Prod Square SquaredDifference Sub
    Sum
""")
# What gives values on as they are.
_PASSING_ON = op_types("""
    Cast EnsureShape ExpandDims Identity IdentityN Reshape Squeeze StopGradient Transpose
""")
_BACKWARD = re.compile(r"(^|/)(gradient_tape|gradients)/")
_LOSS = re.compile(r"loss|cross_?entropy", re.IGNORECASE)


class Twins:
    """A step to run in its low dtype, or in `dtype`, and node for node the same in float32."""

    def __init__(self, step: Step, dtype: str | None) -> None:
        self._step = step
        results = dict.fromkeys([*step.outputs, *step.gradients])
        self._fetches = [*results, *step.operations]
        graph = drop_unused_nodes(step.graph_def, step.inputs, self._fetches)
        indexes = observed_scopes(graph)
        low = low_dtypes(indexes)
        if low and dtype is not None and low != [dtype]:
            graph = retyped(graph, indexes, dtype)
            indexes = observed_scopes(graph)
        self._graph, self._indexes = graph, indexes
        self._observer = self._observed(graph, indexes)
        self.nodes = Nodes(indexes)
        self.results = list(map(key_of, results))

    def run(self, scale: float) -> Run:
        """Runs the step with a loss scale."""
        return self._run(self._observer, scale)

    def run_float32(self, scale: float) -> Run | None:
        """Runs the float32 twin; None where the step is that itself."""
        return None if self._float32 is None else self._run(self._float32, scale)

    @functools.cached_property
    def _float32(self) -> Observer[Seen] | None:
        if not low_dtypes(self._indexes):
            return None
        graph = retyped(self._graph, self._indexes, "float32")
        return self._observed(graph, observed_scopes(graph))

    def _observed(self, graph: Any, indexes: Sequence[GraphIndex]) -> Observer[Seen]:
        return Observer(graph, indexes, self._step.inputs, self._fetches, Seen.look)

    def _run(self, observer: Observer[Seen], scale: float) -> Run:
        values, place = list(self._step.values), self._step.scale_at
        if place is not None:
            is_variable = values[place].dtype == tf.resource
            dtype = held_dtype(values[place]) if is_variable else tf.float32
            with tf.init_scope():
                variable = tf.Variable(scale, dtype=dtype)  # Kept here: a handle keeps none.
                values[place] = variable.handle if is_variable else variable.value()
        return observer.run([values])


def key_of(tensor: str) -> TensorKey:
    """Returns the key of a tensor of the graph itself, by its name there."""
    return MAIN_GRAPH, node_name(tensor), int(tensor.partition(":")[2])


class Nodes:
    """The nodes of all scopes by place, what they take and make, and the dtypes of these tensors.

    Of what is made only what something takes is there.
    """

    def __init__(self, indexes: Sequence[GraphIndex]) -> None:
        self.at: dict[Place, IndexedNode] = {}
        self.inputs: dict[Place, list[TensorKey]] = defaultdict(list)
        self.outputs: dict[Place, set[TensorKey]] = defaultdict(set)
        self.dtypes: dict[TensorKey, str] = {}
        self.order: dict[str, list[Place]] = {}  # Of each scope, producers first.
        for index in indexes:
            places = [(index.scope, node.name) for node in index.nodes]
            self.order[index.scope] = [places[position] for position in index.producers_first()]
            for edge in index.edges:
                source, target = index.slots[edge.source], index.slots[edge.target]
                tensor = (*places[source.node], edge.port)
                self.inputs[places[target.node]].append(tensor)
                self.outputs[tensor[:2]].add(tensor)
                self.dtypes[tensor] = source.dtype
            for place, node in zip(places, index.nodes, strict=True):
                self.at[place] = node
                dtypes = {index.slots[slot].dtype for slot in node.slots}
                if not self.outputs[place] and len(dtypes) == 1:  # Fetched, and taken by no node.
                    tensor = (*place, 0)
                    self.outputs[place].add(tensor)
                    self.dtypes[tensor] = dtypes.pop()

    def sources(self, place: Place) -> list[Place]:
        """The nodes that make what a node takes."""
        return [tensor[:2] for tensor in self.inputs[place]]

    def bodies(self, place: Place) -> list[str]:
        """The scopes that a node runs."""
        return [name for _, name in self.at[place].calls if name in self.order]

    def scopes_in(self, place: Place) -> Iterable[str]:
        """The scopes that a node runs, and those that these run."""
        return reach(self.bodies(place), lambda scope: chain(*map(self.bodies, self.order[scope])))

    def floats(self, tensors: Iterable[TensorKey]) -> list[TensorKey]:
        """Those of some tensors that are floats."""
        return [tensor for tensor in tensors if self.dtypes[tensor] in FLOAT_DTYPES]


class Runs(NamedTuple):
    """What was seen of a step in its low dtype and in float32, which may be the same."""

    step: Step
    nodes: Nodes
    low: Run
    float32: Run


# ---- Where ---------------------------------------------------------------------------------------

_OK, _EXCUSED, _BAD = 0, 1, 2
_States: TypeAlias = dict[TensorKey, int]
_EVER = sys.maxsize  # An execution that is after all others.


def first_bad(runs: Runs, results: Iterable[TensorKey]) -> tuple[Path, str] | None:
    """Finds the first op whose result is not finite although what it was given is.

    It is looked for among what led to bad results; if these are finite, among what is bad only in
    low precision, or bad because of large numbers. With it comes the name of the node that made a
    NaN of it, where it is an infinite constant.
    """
    bad_results = [key[:2] for key in results if runs.low.get(key, NEVER).bad]
    for excuse_constants in (True, False) if bad_results else (True,):
        walk = _Walk(runs, excuse_constants)
        states = walk.states(MAIN_GRAPH)
        leading = reach(bad_results, functools.partial(walk.sources_with, _BAD, states))
        for origin in walk.origins(MAIN_GRAPH, states):
            if origin in leading if bad_results else walk.is_fault(origin):
                return walk.descend(origin, states, ())
    return None


class _Walk:
    """Judges tensors: fine, infinite because of a constant, or bad."""

    def __init__(self, runs: Runs, excuse: bool) -> None:
        self._nodes, self._float32, self._excuse = runs.nodes, runs.float32, excuse
        self._low = {key: seen for key, seen in runs.low.items() if seen.bad is not None}
        self._bad_scopes = {key[0] for key in self._low}

    def states(self, scope: str, execution: int = _EVER) -> _States:
        """Returns the states of a scope's tensors; of a function's by one of its executions."""
        nodes = self._nodes
        states: _States = {}
        constants: set[Place] = set()
        for place in nodes.order[scope]:
            worst = max((states.get(each, _OK) for each in nodes.inputs[place]), default=_OK)
            sources = nodes.sources(place)
            if nodes.at[place].op in _CONSTANTS or (sources and constants.issuperset(sources)):
                constants.add(place)
            excusable = place in constants if worst == _OK else worst == _EXCUSED
            for tensor in nodes.outputs[place]:
                if nodes.dtypes[tensor] == "variant":
                    # What a list holds is seen where it is put in or taken out.
                    bad = worst == _BAD or self._is_bad_inside(place)
                    states[tensor] = _BAD if bad else _OK
                elif tensor in self._low:
                    states[tensor] = self._state(self._low[tensor], execution, excusable)
        return states

    def _state(self, seen: Seen, execution: int, excusable: bool) -> int:
        if seen.bad is None or not seen.is_bad_by(execution):
            return _OK
        return _EXCUSED if self._excuse and excusable and not seen.bad.nans else _BAD

    def _is_bad_inside(self, place: Place) -> bool:
        return not self._bad_scopes.isdisjoint(self._nodes.scopes_in(place))

    def sources_with(self, state: int, states: _States, place: Place) -> list[Place]:
        """Returns the nodes that give a node values of some state."""
        return [each[:2] for each in self._nodes.inputs[place] if states.get(each) == state]

    def origins(self, scope: str, states: _States) -> list[Place]:
        """Returns the nodes with a bad output and no bad input, in topological order."""
        return [
            place
            for place in self._nodes.order[scope]
            if self._nodes.at[place].op != ARGUMENT
            and (self._is_bad_inside(place) or _BAD in map(states.get, self._nodes.outputs[place]))
            and not self.sources_with(_BAD, states, place)
        ]

    def descend(self, place: Place, states: _States, callers: Path) -> tuple[Path, str]:
        """Returns an origin; of a call, the first one in what is called."""
        path = (*callers, place)
        for body in self._nodes.bodies(place) if place not in callers else ():
            numbers = [seen.bad_at for key, seen in self._low.items() if key[0] == body]
            inner = self.states(body, min(numbers, default=_EVER))
            if origins := self.origins(body, inner):
                return self.descend(origins[0], inner, path)
        blamed = self._blamed(place, states)
        return (path, "") if blamed is None else ((*callers, blamed), place[1])

    def _blamed(self, place: Place, states: _States) -> Place | None:
        """The constant that a NaN comes of, if that is infinite in low precision only."""
        current = None
        while excused := self.sources_with(_EXCUSED, states, place):
            current = place = excused[0]
        is_its = current is not None and self._float32.get((*current, 0), NEVER).bad is None
        return current if is_its else None

    def is_fault(self, place: Place) -> bool:
        """Whether a bad value is a fault though all results are finite.

        It is if it, or one inside a call, is bad in low precision only; or was made of large
        numbers, as the infinite variance that makes a normalization return zeros. Divisions by zero
        and logarithms of zero are often masked on purpose.
        """
        inside = self._nodes.scopes_in(place)
        keys = (key for key in self._low if key[:2] == place or key[0] in inside)
        return any(map(self._is_of_precision, keys))

    def _is_of_precision(self, key: TensorKey) -> bool:
        is_bad_in_float32 = self._float32.get(key, NEVER).is_bad_by(self._low[key].bad_at)
        return self._nodes.at[key[:2]].op in _GROWING or not is_bad_in_float32


# ---- Why -----------------------------------------------------------------------------------------


def look(step: Step, twins: Twins, scale: float) -> Finding | None:
    """Runs a step with a loss scale, and says what is the first in it that is not finite."""
    low = twins.run(scale)
    if all(seen.bad is None for seen in low.values()):
        return None
    runs = Runs(step, twins.nodes, low, twins.run_float32(scale) or low)
    found = first_bad(runs, twins.results)
    return None if found is None else _explained(runs, *found)


def _explained(runs: Runs, path: Path, spread: str) -> Finding:
    step, nodes, low, float32 = runs
    place = path[-1]
    inputs = nodes.floats(nodes.inputs[place])
    outputs = nodes.floats(sorted(nodes.outputs[place]))
    cause, vanished = _cause(runs, inputs, outputs)
    execution = cause["execution"]
    layer = step.layer_of(path)
    stage = _stage(step, nodes, path, cause["kind"], layer)
    gradient_of = _bad_gradient(runs, path)
    read = _variable_read(step, nodes, place)
    if vanished is not None:
        cause["vanished_op"] = nodes.at[vanished].op
        in_layer = step.layer_of((*path[:-1], vanished))
        cause["vanished_layer"] = _layer_or_scope(in_layer, nodes.at[vanished])
    return Finding(
        **cause,
        stage=stage,
        op=nodes.at[place].op,
        node=shown_name(place[1]),
        where=step.where_made(path[0][1]),
        layer=_layer_or_scope(layer, nodes.at[place]),
        layer_class=None if layer is None else type(layer).__name__,
        variable=(gradient_of or read) if stage == "backward" else read,
        gradient_of=gradient_of,
        ranges={
            "inputs": _ranges(low, inputs, execution, "input"),
            "outputs": _ranges(low, outputs, execution, "output"),
            "float32_inputs": _ranges(float32, inputs, execution, "input"),
            "float32": _ranges(float32, outputs, execution, "output"),
        },
        rewritten_by=step.rewritten_by,
        spread=shown_name(spread),
        callers=tuple(shown_name(caller) for _, caller in path[:-1]),
    )


def _cause(runs: Runs, inputs: Keys, outputs: Keys) -> tuple[dict[str, Any], Place | None]:
    """Why a result is not finite, as fields of a finding, and what made a value zero before.

    The execution is that of the function that the op is in.
    """
    found: dict[str, Any] = {"kind": ALSO_IN_FLOAT32, "dtype": "float32", "execution": 0}
    low = runs.low
    bad = [key for key in outputs if low.get(key, NEVER).bad is not None]
    if not bad:
        return found, None
    execution = min(low[key].bad_at for key in bad)
    dtype = _at(low, bad[0], execution).dtype
    found |= {"dtype": dtype, "execution": execution}
    float32 = [_at(runs.float32, key, execution) for key in bad]
    sizes = [stats.max_abs for stats in float32 if not stats.nonfinite]
    if not sizes:
        return found, None
    found["float32_max"] = max(sizes)
    if max(sizes) > float_format(dtype).max:
        return found | {"kind": OVERFLOW}, None
    vanished = _first_vanished(runs, inputs, execution)
    if vanished is not None:
        size = _at(runs.float32, vanished, execution).max_abs
        is_all = _at(low, vanished, execution).max_abs == 0.0
        return found | {"kind": UNDERFLOW, "vanished": size if is_all else None}, vanished[:2]
    # An infinity within the dtype's range is that of a sum inside, for example.
    is_infinite = any(_at(low, key, execution).infs for key in bad)
    return found | {"kind": OVERFLOW if is_infinite else INVALID}, None


def _at(run: Run, key: TensorKey, execution: int) -> TensorStats:
    return run.get(key, NEVER).at(execution) or TensorStats("float32", (), 0.0, 0.0)


def _first_vanished(runs: Runs, keys: Keys, execution: int) -> TensorKey | None:
    """The tensor in which values became zero, that are not in float32, before an op took them."""
    found = None
    for _ in runs.nodes.at:  # Graphs with loops of TensorFlow 1 have cycles.
        mine = [
            (key, _at(runs.low, key, execution), _at(runs.float32, key, execution)) for key in keys
        ]
        zero = [key for key, a, b in mine if a.zeros > b.zeros and not b.nonfinite]
        if not zero:
            break
        found = zero[-1]
        keys = runs.nodes.floats(runs.nodes.inputs[found[:2]])
    return found


def _ranges(run: Run, keys: Keys, execution: int, what: str) -> tuple[ValueRange, ...]:
    found = [(i, run.get(key, NEVER).at(execution)) for i, key in enumerate(keys)]
    return tuple(ValueRange.of(f"{what} {i}", stats) for i, stats in found if stats is not None)


def _stage(step: Step, nodes: Nodes, path: Path, kind: str, layer: Any) -> str:
    top = path[0]
    if _is_backward(nodes, top):
        return "backward"
    if len(path) == 1 and nodes.at[top].op == "Cast" and kind == OVERFLOW:
        arguments = {node_name(name) for name in step.inputs[: step.given]}
        if any(name in arguments for _, name in _given(nodes, top, _INPUTS)):
            return "input"
        if _variable_read(step, nodes, top) is not None:
            return "weights"
    in_loss = _LOSS.search(top[1]) if layer is None else LOSS_SCOPE in top[1]
    return "loss" if in_loss else "forward"


def _is_backward(nodes: Nodes, place: Place) -> bool:
    """Whether an op is part of the backward pass, or of what is done with its results."""
    # By floats alone: a loop of the forward pass takes lists that its gradient needs.
    sources = reach([place], lambda at: [each[:2] for each in nodes.floats(nodes.inputs[at])])
    return any(_BACKWARD.search(name) for _, name in sources)


def _given(nodes: Nodes, place: Place, ops: frozenset[str]) -> list[Place]:
    """The first node of some op types whose value an op takes, perhaps as a cast, if there is."""

    def passed_on(each: Place) -> list[Place]:
        passes = each == place or nodes.at[each].op in _PASSING_ON
        return nodes.sources(each) if passes else []

    return [each for each in reach([place], passed_on) if nodes.at[each].op in ops][:1]


def _variable_read(step: Step, nodes: Nodes, place: Place) -> str | None:
    """The name of a variable whose value an op takes, perhaps as a cast."""
    sources = [each for read in _given(nodes, place, _READS) for each in nodes.sources(read)]
    handles = (name for scope, name in sources if scope == MAIN_GRAPH)
    return next((step.reads[name] for name in handles if name in step.reads), None)


def _bad_gradient(runs: Runs, path: Path) -> str | None:
    """The first variable whose gradient is not finite because of what was found."""
    for tensor, variable in runs.step.gradients.items():
        key = key_of(tensor)
        is_bad = runs.low.get(key, NEVER).bad is not None
        if is_bad and path[0] in reach([key[:2]], runs.nodes.sources):
            return variable
    return None


def _layer_or_scope(layer: Any, node: IndexedNode) -> str | None:
    if layer is not None:
        return layer_path(layer)
    names = shown_name(node.name).removeprefix("gradient_tape/").split("/")[:-1]
    # `tf.cast` and others open a name scope of their own, which tells nothing.
    while names and re.sub(r"_\d+$", "", names[-1]).lower() == node.op.lower():
        names.pop()
    return "/".join(names) or None


def largest_scale(step: Step, twins: Twins) -> float | None:
    """Returns the largest power of two as loss scale with which a step would be finite.

    The step is finite with a scale of 1.
    """
    room = [
        float_format(stats.dtype).max / stats.max_abs
        for (_, node, _), seen in twins.run(1.0).items()
        if _BACKWARD.search(node) or node.startswith(f"{SCALE_SCOPE}/")
        if (stats := seen.stats) is not None and stats.max_abs > 0
    ]
    if not room:
        return None
    best = 2.0 ** math.floor(math.log2(min(room)))
    candidates = (best, best / 2, best / 4, best / 8)
    return next((scale for scale in candidates if look(step, twins, scale) is None), None)
