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
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import tensorflow as tf

from tfamp.core.dtypes import FLOAT_DTYPES, float_format
from tfamp.diagnostics.model_runs import layer_path, unchanged
from tfamp.diagnostics.nonfinite_report import (
    ALSO_IN_FLOAT32,
    INVALID,
    OVERFLOW,
    UNDERFLOW,
    Finding,
    ValueRange,
)
from tfamp.diagnostics.nonfinite_step import (
    LOSS_SCOPE,
    SCALE_SCOPE,
    Path,
    Step,
    layer_of,
    shown_name,
    where_made,
)
from tfamp.graph.observe import (
    NEVER,
    Observer,
    Seen,
    TensorStats,
    drop_unused_nodes,
    observed_scopes,
)
from tfamp.graph.retype import low_dtypes, retyped
from tfamp.planning.ranges import TensorKey
from tfamp.planning.structures import (
    ARGUMENT,
    MAIN_GRAPH,
    RESULT,
    GraphIndex,
    IndexedNode,
    node_name,
    producers_first,
    reach,
)

# What was seen of each tensor in a run.
Run: TypeAlias = Mapping[TensorKey, Seen]

_CONSTANTS = frozenset({"Const", "HostConst"})
_READS = frozenset({"ReadVariableOp", "ResourceGather"})
_INPUTS = frozenset({"Placeholder", "PlaceholderV2"})
_SUMS = frozenset({"Mean", "Sum", "Prod", "BiasAddGrad"})
# Ops that make an infinity of finite values only if these are large.
_GROWING = frozenset(
    {
        *("AddV2", "BatchMatMulV2", "Conv2D", "Cumsum", "Einsum", "MatMul", "Mean", "Mul"),
        *("Prod", "Square", "SquaredDifference", "Sub", "Sum"),
    }
)
# What gives values on as they are.
_PASSING_ON = frozenset(
    {
        *("Cast", "EnsureShape", "ExpandDims", "Identity", "IdentityN", "Reshape", "Squeeze"),
        *("StopGradient", "Transpose"),
    }
)
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
        self.scopes = {index.scope: Scope(index) for index in indexes}
        self.results = list(map(_key_of, results))

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
        values = list(self._step.values)
        if self._step.scale_at is not None:
            values[self._step.scale_at] = tf.constant(scale, tf.float32)
        held = [variable for variable in (self._step.scale_in,) if variable is not None]
        with unchanged(held):
            for variable in held:
                variable.assign(scale)
            return observer.run([values])


def _key_of(tensor: str) -> TensorKey:
    return MAIN_GRAPH, node_name(tensor), int(tensor.partition(":")[2])


class Scope:
    """The nodes of one scope and the data edges between them, by node position."""

    def __init__(self, index: GraphIndex) -> None:
        self.name = index.scope
        self.nodes = index.nodes
        self.positions = {node.name: i for i, node in enumerate(index.nodes)}
        # For each node: position of the producer, its port, the tensor's dtype.
        self.inputs: list[list[tuple[int, int, str]]] = [[] for _ in index.nodes]
        self.ports: list[dict[int, str]] = [{} for _ in index.nodes]
        for edge in index.edges:
            source, target = index.slots[edge.source], index.slots[edge.target]
            self.inputs[target.node].append((source.node, edge.port, source.dtype))
            self.ports[source.node][edge.port] = source.dtype
        for position, node in enumerate(index.nodes):
            dtypes = {index.slots[slot].dtype for slot in node.slots}
            if not self.ports[position] and len(dtypes) == 1:  # Fetched, and taken by no node.
                self.ports[position][0] = dtypes.pop()
        self.order = producers_first(index)

    def key(self, position: int, port: int) -> TensorKey:
        """The key of a tensor."""
        return self.name, self.nodes[position].name, port

    def sources(self, position: int) -> list[int]:
        """The nodes that make what a node takes."""
        return [node for node, _, _ in self.inputs[position]]

    def float_inputs(self, position: int) -> list[TensorKey]:
        """The float tensors that a node takes."""
        given = self.inputs[position]
        return [self.key(node, port) for node, port, dtype in given if dtype in FLOAT_DTYPES]

    def float_outputs(self, position: int) -> list[TensorKey]:
        """The float tensors of a node that something takes."""
        made = sorted(self.ports[position].items())
        return [self.key(position, port) for port, dtype in made if dtype in FLOAT_DTYPES]


# ---- Where ---------------------------------------------------------------------------------------

_OK, _EXCUSED, _BAD = 0, 1, 2
# The state of each output, by position and port.
_States: TypeAlias = dict[tuple[int, int], int]


def first_bad(
    scopes: Mapping[str, Scope], low: Run, reference: Run | None, results: Iterable[TensorKey]
) -> tuple[Path, str] | None:
    """Finds the first op whose result is not finite although what it was given is.

    It is looked for among what led to bad results; if these are finite, among what is bad only in
    low precision, or bad because of large numbers. With it comes the name of the node that made a
    NaN of it, where it is an infinite constant.
    """
    main = scopes[MAIN_GRAPH]
    bad_results = [main.positions[key[1]] for key in results if low.get(key, NEVER).bad]
    for excuse_constants in (True, False) if bad_results else (True,):
        walk = _Walk(scopes, low, reference, excuse_constants)
        states = walk.states(main, None)
        origins = walk.origins(main, states)
        if bad_results:
            leading = set(reach(bad_results, functools.partial(_bad_sources, main, states)))
            origins = [origin for origin in origins if origin in leading]
        else:
            origins = [origin for origin in origins if walk.is_fault(main, origin)]
        if origins:
            return walk.descend(main, origins[0], states, ())
    return None


def _bad_sources(scope: Scope, states: _States, position: int) -> list[int]:
    return [node for node, port, _ in scope.inputs[position] if states.get((node, port)) == _BAD]


class _Walk:
    """Judges tensors: fine, infinite because of a constant, or bad."""

    def __init__(
        self, scopes: Mapping[str, Scope], low: Run, reference: Run | None, excuse: bool
    ) -> None:
        self._scopes = scopes
        self._low = {key: seen for key, seen in low.items() if seen.bad is not None}
        self._reference = reference
        self._excuse = excuse
        callers: dict[str, list[str]] = {name: [] for name in scopes}
        for scope in scopes.values():
            for body in {body.name for node in scope.nodes for body in self._bodies(node)}:
                callers[body].append(scope.name)
        self._bad_scopes = set(reach({key[0] for key in self._low}, callers.__getitem__))

    def _bodies(self, node: IndexedNode) -> list[Scope]:
        return [self._scopes[name] for _, name in node.calls if name in self._scopes]

    def states(self, scope: Scope, execution: int | None) -> _States:
        """Returns the states of a scope's tensors; of a function's by one of its executions."""
        states: _States = {}
        constants: set[int] = set()
        for position in scope.order:
            node, given = scope.nodes[position], scope.inputs[position]
            worst = max((states.get(each[:2], _OK) for each in given), default=_OK)
            made_of_constants = bool(given) and constants.issuperset(scope.sources(position))
            if node.op in _CONSTANTS or (made_of_constants and node.op not in (ARGUMENT, RESULT)):
                constants.add(position)
            may_excuse = self._excuse and worst < _BAD
            may_excuse = may_excuse and (position in constants or worst == _EXCUSED)
            for port, dtype in scope.ports[position].items():
                if dtype == "variant":  # What a list holds is seen where it is put in or taken out.
                    bad = worst == _BAD or self._is_bad_inside(node)
                    states[position, port] = _BAD if bad else _OK
                elif dtype in FLOAT_DTYPES:
                    key = scope.key(position, port)
                    states[position, port] = self._state(key, execution, may_excuse)
        return states

    def _state(self, key: TensorKey, execution: int | None, may_excuse: bool) -> int:
        seen = self._low.get(key, NEVER)
        if seen.bad is None or not (execution is None or seen.is_bad_by(execution)):
            return _OK
        return _EXCUSED if may_excuse and not seen.bad.nans else _BAD

    def _is_bad_inside(self, node: IndexedNode) -> bool:
        return any(body.name in self._bad_scopes for body in self._bodies(node))

    def origins(self, scope: Scope, states: _States) -> list[int]:
        """Returns the nodes with a bad output and no bad input, in topological order."""
        found = []
        for position in scope.order:
            node = scope.nodes[position]
            bad = any(states.get((position, port)) == _BAD for port in scope.ports[position])
            if node.op not in (ARGUMENT, RESULT) and (bad or self._is_bad_inside(node)):
                found += [] if _bad_sources(scope, states, position) else [position]
        return found

    def descend(
        self, scope: Scope, position: int, states: _States, callers: Path
    ) -> tuple[Path, str]:
        """Returns an origin; of a call, the first one in what is called."""
        node = scope.nodes[position]
        path = (*callers, (scope.name, node.name))
        for body in self._bodies(node) if path[-1] not in callers else ():
            numbers = [seen.bad_at for key, seen in self._low.items() if key[0] == body.name]
            inner = self.states(body, min(numbers, default=None))
            origins = self.origins(body, inner) if body.name in self._bad_scopes else []
            if origins:
                return self.descend(body, origins[0], inner, path)
        blamed = self._blamed(scope, position, states)
        if blamed is not None:
            return (*callers, (scope.name, scope.nodes[blamed].name)), node.name
        return path, ""

    def _blamed(self, scope: Scope, position: int, states: _States) -> int | None:
        """The constant that a NaN comes of, if that is infinite in low precision only."""
        current = None
        while excused := [
            node for node, port, _ in scope.inputs[position] if states.get((node, port)) == _EXCUSED
        ]:
            current = position = excused[0]
        if current is None or self._reference is None:
            return None
        return current if self._reference.get(scope.key(current, 0), NEVER).bad is None else None

    def is_fault(self, scope: Scope, position: int) -> bool:
        """Whether a bad value is a fault though all results are finite.

        It is if it, or one inside a call, is bad in low precision only; or was made of large
        numbers, as the infinite variance that makes a normalization return zeros. Divisions by zero
        and logarithms of zero are often masked on purpose.
        """
        node = scope.nodes[position]
        inside = reach((body.name for body in self._bodies(node)), self._called)
        keys = [key for key in self._low if key[0] in inside]
        return any(map(self._is_of_precision, [*scope.float_outputs(position), *keys]))

    def _called(self, scope: str) -> list[str]:
        return [body.name for node in self._scopes[scope].nodes for body in self._bodies(node)]

    def _is_of_precision(self, key: TensorKey) -> bool:
        if key not in self._low:
            return False
        scope = self._scopes[key[0]]
        if scope.nodes[scope.positions[key[1]]].op in _GROWING:
            return True
        reference = self._reference
        return reference is not None and not (
            reference.get(key, NEVER).is_bad_by(self._low[key].bad_at)
        )


# ---- Why -----------------------------------------------------------------------------------------


def look(step: Step, twins: Twins, scale: float) -> Finding | None:
    """Runs a step with a loss scale, and says what is the first in it that is not finite."""
    low = twins.run(scale)
    if all(seen.bad is None for seen in low.values()):
        return None
    reference = twins.run_float32(scale)
    found = first_bad(twins.scopes, low, reference, twins.results)
    return None if found is None else _explained(step, twins, *found, low, reference)


def _explained(
    step: Step, twins: Twins, path: Path, spread: str, low: Run, reference: Run | None
) -> Finding:
    scope = twins.scopes[path[-1][0]]
    position = scope.positions[path[-1][1]]
    op = scope.nodes[position].op
    inputs, outputs = scope.float_inputs(position), scope.float_outputs(position)
    cause, vanished = _cause(scope, low, reference, inputs, outputs)
    execution = cause["execution"]
    layer = layer_of(step, path)
    stage = _stage(step, twins, path, cause["kind"], layer)
    gradient_of = _bad_gradient(step, twins, path, low)
    read = _variable_read(step, scope, position)
    if vanished is not None:
        vanishing = scope.nodes[scope.positions[vanished[1]]]
        cause["vanished_op"] = vanishing.op
        in_layer = layer_of(step, (*path[:-1], vanished[:2]))
        cause["vanished_layer"] = _layer_or_scope(in_layer, vanishing)
    wide = low if reference is None else reference
    return Finding(
        **cause,
        stage=stage,
        op=op,
        node=shown_name(path[-1][1]),
        where=where_made(step, path[0][1]),
        layer=_layer_or_scope(layer, scope.nodes[position]),
        layer_class=None if layer is None else type(layer).__name__,
        variable=(gradient_of or read) if stage == "backward" else read,
        gradient_of=gradient_of,
        ranges={
            "inputs": _ranges(low, inputs, execution, "input"),
            "outputs": _ranges(low, outputs, execution, "output"),
            "float32_inputs": _ranges(wide, inputs, execution, "input"),
            "float32": _ranges(wide, outputs, execution, "output"),
        },
        rewritten=step.rewritten,
        count=_reduced_values(low, inputs, outputs) if op in _SUMS else None,
        is_constant=op in _CONSTANTS or bool(spread),
        spread=shown_name(spread),
        callers=tuple(shown_name(caller) for _, caller in path[:-1]),
    )


def _cause(
    scope: Scope,
    low: Run,
    reference: Run | None,
    inputs: Sequence[TensorKey],
    outputs: Sequence[TensorKey],
) -> tuple[dict[str, Any], TensorKey | None]:
    """Why a result is not finite, as fields of a finding, and the tensor that became zero before.

    The execution is that of the function that the op is in.
    """
    bad = [key for key in outputs if low.get(key, NEVER).bad is not None]
    if not bad:
        return {"kind": ALSO_IN_FLOAT32, "dtype": "float32", "execution": 0}, None
    execution = min(low[key].bad_at for key in bad)
    dtype = _at(low, bad[0], execution).dtype
    found: dict[str, Any] = {"kind": ALSO_IN_FLOAT32, "dtype": dtype, "execution": execution}
    wide = [] if reference is None else [_at(reference, key, execution) for key in bad]
    sizes = [stats.max_abs for stats in wide if not stats.nonfinite]
    if reference is None or not sizes:
        return found, None
    found["float32_max"] = max(sizes)
    if max(sizes) > float_format(dtype).max:
        return found | {"kind": OVERFLOW}, None
    vanished = _first_vanished(scope, inputs, low, reference, execution)
    if vanished is not None:
        size = _at(reference, vanished, execution).max_abs
        is_all = _at(low, vanished, execution).max_abs == 0.0
        return found | {"kind": UNDERFLOW, "vanished": size if is_all else None}, vanished
    # An infinity within the dtype's range is that of a sum inside, for example.
    is_infinite = any(_at(low, key, execution).infs for key in bad)
    return found | {"kind": OVERFLOW if is_infinite else INVALID}, None


def _at(run: Run, key: TensorKey, execution: int) -> TensorStats:
    return run.get(key, NEVER).at(execution) or TensorStats("float32", (), 0.0, 0.0)


def _first_vanished(
    scope: Scope, keys: Sequence[TensorKey], low: Run, reference: Run, execution: int
) -> TensorKey | None:
    """The tensor in which values became zero, that are not in float32, before an op took them."""
    found = None
    for _ in scope.nodes:  # Graphs with loops of TensorFlow 1 have cycles.
        mine = [(key, _at(low, key, execution), _at(reference, key, execution)) for key in keys]
        zero = [key for key, a, b in mine if a.zeros > b.zeros and not b.nonfinite]
        if not zero:
            break
        found = zero[-1]
        keys = scope.float_inputs(scope.positions[found[1]])
    return found


def _ranges(
    run: Run, keys: Sequence[TensorKey], execution: int, what: str
) -> tuple[ValueRange, ...]:
    found = [(i, run.get(key, NEVER).at(execution)) for i, key in enumerate(keys)]
    return tuple(ValueRange.of(f"{what} {i}", stats) for i, stats in found if stats is not None)


def _reduced_values(
    low: Run, inputs: Sequence[TensorKey], outputs: Sequence[TensorKey]
) -> int | None:
    """How many values a sum adds up for each result."""
    sizes = [_at(low, keys[0], 0).size for keys in (inputs, outputs) if keys]
    return sizes[0] // sizes[1] if len(sizes) > 1 and sizes[1] else None


def _stage(step: Step, twins: Twins, path: Path, kind: str, layer: Any) -> str:
    main = twins.scopes[MAIN_GRAPH]
    top = main.positions[path[0][1]]
    if _is_backward(main, top):
        return "backward"
    if len(path) == 1 and main.nodes[top].op == "Cast" and kind == OVERFLOW:
        arguments = {node_name(name) for name in step.inputs[: step.given]}
        if _source(main, top, _INPUTS) in arguments:
            return "input"
        if _variable_read(step, main, top) is not None:
            return "weights"
    name = path[0][1]
    in_loss = _LOSS.search(name) if layer is None else LOSS_SCOPE in name
    return "loss" if in_loss else "forward"


def _is_backward(main: Scope, position: int) -> bool:
    """Whether an op is part of the backward pass, or of what is done with its results."""

    def float_sources(position: int) -> list[int]:
        # By floats alone: a loop of the forward pass takes lists that its gradient needs.
        return [node for node, _, dtype in main.inputs[position] if dtype in FLOAT_DTYPES]

    before = reach([position], float_sources)
    return any(_BACKWARD.search(main.nodes[each].name) for each in before)


def _source(scope: Scope, position: int, ops: frozenset[str]) -> str | None:
    """The name of a node of some op type whose value an op takes, perhaps as a cast."""

    def passed_on(each: int) -> list[int]:
        passes = each == position or scope.nodes[each].op in _PASSING_ON
        return scope.sources(each) if passes else []

    names = (scope.nodes[each] for each in reach([position], passed_on))
    return next((node.name for node in names if node.op in ops), None)


def _variable_read(step: Step, scope: Scope, position: int) -> str | None:
    """The name of a variable whose value an op takes, perhaps as a cast."""
    read = _source(scope, position, _READS)
    if read is None or scope.name != MAIN_GRAPH:
        return None
    sources = (scope.nodes[each].name for each in scope.sources(scope.positions[read]))
    return next((step.reads[name] for name in sources if name in step.reads), None)


def _bad_gradient(step: Step, twins: Twins, path: Path, low: Run) -> str | None:
    """The first variable whose gradient is not finite because of what was found."""
    main = twins.scopes[MAIN_GRAPH]
    consumers: dict[int, list[int]] = {}
    for position in main.order:
        for source in main.sources(position):
            consumers.setdefault(source, []).append(position)
    reached = set(reach([main.positions[path[0][1]]], lambda each: consumers.get(each, ())))
    for tensor, variable in step.gradients.items():
        key = _key_of(tensor)
        if main.positions[key[1]] in reached and low.get(key, NEVER).bad is not None:
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
