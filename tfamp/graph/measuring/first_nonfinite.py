"""Finds where a graph's values first stop being finite, by what was seen in a run.

A tensor is *bad* if it has an infinite value or a NaN. Where a graph has a bad result, the place to
name is the first bad tensor that led to it, made by an op from inputs that were all finite. An
infinite constant alone is no fault: masks are made of these, and what a softmax makes of one is
finite. It is to blame when a NaN comes of it, or when a result is bad in the end.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from tfamp.core.dtypes import FLOAT_DTYPES
from tfamp.graph.measuring.tensor_stats import Run, TensorStats
from tfamp.planning.ranges import TensorKey
from tfamp.planning.structures import ARGUMENT, MAIN_GRAPH, RESULT, GraphIndex

_SOURCES = frozenset({"Const", "HostConst"})
# Ops that make an infinity of finite values only if these are large.
_GROWING = frozenset(
    {
        *("AddV2", "BatchMatMulV2", "Conv2D", "Cumsum", "Einsum", "MatMul", "Mean", "Mul"),
        *("Prod", "Square", "SquaredDifference", "Sub", "Sum"),
    }
)


@dataclass(frozen=True, slots=True)
class Place:
    """A node.

    Attributes:
        scope: The function it is in; "" for the graph itself.
        node: Its name.
        op: Its op type.
        inputs: The float tensors it takes.
        outputs: The float tensors it makes.
        callers: The nodes of the graph itself, and of functions, that run its scope, the outermost
            first.
        spread: The node that made a NaN of an infinite constant, where this is that constant.
    """

    scope: str
    node: str
    op: str
    inputs: tuple[TensorKey, ...]
    outputs: tuple[TensorKey, ...]
    callers: tuple[str, ...] = ()
    spread: str = ""


class Scopes:
    """The indexes of a graph and its functions, with what is asked of them.

    Args:
        indexes: The index of the graph, then those of functions.
        called: For each scope and node that calls functions, which.
    """

    def __init__(
        self, indexes: Sequence[GraphIndex], called: Mapping[tuple[str, str], Sequence[str]]
    ) -> None:
        self.by_name = {index.scope: ScopeGraph(index) for index in indexes}
        self.called = called

    @property
    def main(self) -> ScopeGraph:
        """The graph itself."""
        return self.by_name[MAIN_GRAPH]

    def bodies(self, scope: str, node: str) -> list[ScopeGraph]:
        """Returns the functions that a node calls."""
        names = self.called.get((scope, node), ())
        return [self.by_name[name] for name in names if name in self.by_name]


class ScopeGraph:
    """The data edges of one scope, by node position."""

    def __init__(self, index: GraphIndex) -> None:
        self.index = index
        # For each node: position of the producer, its port, the tensor's dtype.
        self.inputs: list[list[tuple[int, int, str]]] = [[] for _ in index.nodes]
        self.ports: list[dict[int, str]] = [{} for _ in index.nodes]
        for edge in index.edges:
            source = index.slots[edge.source]
            self.inputs[index.slots[edge.target].node].append(
                (source.node, edge.port, source.dtype)
            )
            self.ports[source.node][edge.port] = source.dtype
        self.positions = {node.name: i for i, node in enumerate(index.nodes)}
        for position, node in enumerate(index.nodes):
            dtypes = {index.slots[slot].dtype for slot in node.slots}
            if not self.ports[position] and len(dtypes) == 1:  # Fetched, and taken by no node.
                self.ports[position][0] = dtypes.pop()
        self.order = _topological(self.inputs)

    def key(self, position: int, port: int) -> TensorKey:
        """Returns the key of a tensor."""
        return self.index.scope, self.index.nodes[position].name, port

    def float_inputs(self, position: int) -> tuple[TensorKey, ...]:
        """Returns the keys of the float tensors that a node takes."""
        return tuple(
            self.key(node, port)
            for node, port, dtype in self.inputs[position]
            if dtype in FLOAT_DTYPES
        )

    def float_outputs(self, position: int) -> tuple[TensorKey, ...]:
        """Returns the keys of the float tensors of a node that something takes."""
        ports = self.ports[position].items()
        return tuple(
            self.key(position, port) for port, dtype in sorted(ports) if dtype in FLOAT_DTYPES
        )

    def place(self, position: int, callers: tuple[str, ...] = (), spread: str = "") -> Place:
        """Returns a node as a place."""
        node = self.index.nodes[position]
        return Place(
            self.index.scope,
            node.name,
            node.op,
            self.float_inputs(position),
            self.float_outputs(position),
            callers,
            spread,
        )


def find_first(
    scopes: Scopes,
    low: Run,
    reference: Run | None,
    roots: Iterable[TensorKey],
) -> Place | None:
    """Finds the first op whose result is not finite although what it was given is.

    Args:
        scopes: The graph.
        low: What was seen of it in the run to explain.
        reference: What was seen in float32; None where the run to explain is that one.
        roots: The results: the first op is looked for among what led to bad ones. If all are
            finite, among what is bad only in `low`, or bad because of large numbers.

    Returns:
        The op; None if there is nothing to explain.
    """
    bad_roots = [key for key in roots if low.get(key).bad is not None]
    for excuse_constants in (True, False) if bad_roots else (True,):
        walk = _Walk(scopes, low, reference, excuse_constants)
        states = walk.states(scopes.main, None)
        origins = walk.origins(scopes.main, states)
        if bad_roots:
            leading = _leading_to(scopes.main, states, bad_roots)
            origins = [origin for origin in origins if origin in leading]
        else:
            origins = [o for o in origins if _counts(scopes, scopes.main, o, low, reference)]
        if origins:
            return walk.descend(scopes.main, origins[0], states, None, ())
    return None


_OK, _EXCUSED, _BAD = 0, 1, 2


class _Walk:
    """Judges tensors: fine, infinite because of a constant, or bad."""

    def __init__(self, scopes: Scopes, low: Run, reference: Run | None, excuse: bool) -> None:
        self._scopes = scopes
        self._low = low
        self._reference = reference
        self._excuse = excuse
        self._inside: dict[str, bool] = {}

    def states(self, graph: ScopeGraph, execution: int | None) -> list[dict[int, int]]:
        """Returns for each node the state of each output; at one execution of a function."""
        states: list[dict[int, int]] = [{} for _ in graph.ports]
        of_constants: set[int] = set()
        for position in graph.order:
            node = graph.index.nodes[position]
            given = [states[n].get(port, _OK) for n, port, _ in graph.inputs[position]]
            sources = [n for n, _, _ in graph.inputs[position]]
            constant = node.op in _SOURCES or (
                bool(sources) and node.op not in (ARGUMENT, RESULT) and of_constants >= set(sources)
            )
            if constant:
                of_constants.add(position)
            for port, dtype in graph.ports[position].items():
                states[position][port] = self._state(
                    graph, position, port, dtype, max(given, default=_OK), constant, execution
                )
        return states

    def _state(
        self,
        graph: ScopeGraph,
        position: int,
        port: int,
        dtype: str,
        worst: int,
        constant: bool,
        execution: int | None,
    ) -> int:
        node = graph.index.nodes[position]
        if dtype == "variant":  # What a list holds is seen where it is put in and taken out.
            return _BAD if worst == _BAD or self._is_bad_inside(graph, node.name) else _OK
        if dtype not in FLOAT_DTYPES:
            return _OK
        stats = self._bad_stats(graph.key(position, port), execution)
        if stats is None:
            return _OK
        if self._excuse and not stats.nans and worst < _BAD and (constant or worst == _EXCUSED):
            return _EXCUSED
        return _BAD

    def _bad_stats(self, key: TensorKey, execution: int | None) -> TensorStats | None:
        seen = self._low.get(key)
        return seen.bad if execution is None or seen.is_bad_by(execution) else None

    def _is_bad_inside(self, graph: ScopeGraph, node: str) -> bool:
        return any(self._body_is_bad(body) for body in self._scopes.bodies(graph.index.scope, node))

    def _body_is_bad(self, body: ScopeGraph) -> bool:
        scope = body.index.scope
        if scope not in self._inside:
            self._inside[scope] = False  # A function that calls itself.
            own = any(
                self._low.get(key).bad is not None
                for position in range(len(body.ports))
                for key in body.float_outputs(position)
            )
            self._inside[scope] = own or any(
                self._is_bad_inside(body, node.name)
                for node in body.index.nodes
                if node.calls_function
            )
        return self._inside[scope]

    def origins(self, graph: ScopeGraph, states: list[dict[int, int]]) -> list[int]:
        """Returns the nodes with a bad output and no bad input, in topological order."""
        found = []
        for position in graph.order:
            node = graph.index.nodes[position]
            if node.op in (ARGUMENT, RESULT):
                continue
            bad = _BAD in states[position].values()
            bad = bad or (node.calls_function and self._is_bad_inside(graph, node.name))
            given = [states[n].get(port, _OK) for n, port, _ in graph.inputs[position]]
            if bad and _BAD not in given:
                found.append(position)
        return found

    def descend(
        self,
        graph: ScopeGraph,
        position: int,
        states: list[dict[int, int]],
        execution: int | None,
        callers: tuple[str, ...],
    ) -> Place:
        """Returns an origin; of a call, the first one in what is called."""
        node = graph.index.nodes[position]
        for body in self._scopes.bodies(graph.index.scope, node.name):
            if not self._body_is_bad(body) or node.name in callers:
                continue
            first = self._first_execution(body)
            inner = self.states(body, first)
            origins = self.origins(body, inner)
            if origins:
                return self.descend(body, origins[0], inner, first, (*callers, node.name))
        blamed = self._blamed(graph, position, states)
        if blamed is not None:
            return graph.place(blamed, callers, spread=node.name)
        return graph.place(position, callers)

    def _first_execution(self, body: ScopeGraph) -> int | None:
        numbers = [
            seen.bad_at
            for position in range(len(body.ports))
            for key in body.float_outputs(position)
            if (seen := self._low.get(key)).bad is not None
        ]
        return min(numbers, default=None)

    def _blamed(self, graph: ScopeGraph, position: int, states: list[dict[int, int]]) -> int | None:
        """The constant that a NaN comes of, if that is infinite in low precision only."""
        excused = [n for n, port, _ in graph.inputs[position] if states[n].get(port) == _EXCUSED]
        while excused:
            current = excused[0]
            excused = [n for n, port, _ in graph.inputs[current] if states[n].get(port) == _EXCUSED]
            if not excused and self._reference is not None:
                key = graph.key(current, 0)
                return current if self._reference.get(key).bad is None else None
        return None


def _counts(
    scopes: Scopes, graph: ScopeGraph, position: int, low: Run, reference: Run | None
) -> bool:
    """Whether a bad value is a fault though all results are finite.

    It is if it, or one inside a call, is bad in low precision only; or was made of large numbers,
    as the infinite variance that makes a normalization return zeros. Divisions by zero and
    logarithms of zero are often masked on purpose.
    """
    node = graph.index.nodes[position]
    bad = [key for key in graph.float_outputs(position) if low.get(key).bad is not None]
    if bad and node.op in _GROWING:
        return True
    if reference is not None and any(
        not reference.get(key).is_bad_by(low.get(key).bad_at) for key in bad
    ):
        return True
    return any(
        _counts(scopes, body, inner, low, reference)
        for body in scopes.bodies(graph.index.scope, node.name)
        for inner in range(len(body.ports))
    )


def _leading_to(
    graph: ScopeGraph, states: list[dict[int, int]], roots: Iterable[TensorKey]
) -> set[int]:
    """The nodes from which a chain of bad tensors leads to a root."""
    pending = [graph.positions[name] for _, name, _ in roots]
    found = set(pending)
    while pending:
        for node, port, _ in graph.inputs[pending.pop()]:
            if states[node].get(port) == _BAD and node not in found:
                found.add(node)
                pending.append(node)
    return found


def _topological(inputs: Sequence[Sequence[tuple[int, int, str]]]) -> list[int]:
    """Positions, producers before consumers, else as they are; what is in a cycle comes last."""
    consumers: list[list[int]] = [[] for _ in inputs]
    waiting = [0] * len(inputs)
    for position, sources in enumerate(inputs):
        for source in {node for node, _, _ in sources}:
            consumers[source].append(position)
            waiting[position] += 1
    ready = [position for position, count in enumerate(waiting) if not count]
    heapq.heapify(ready)
    order = []
    while ready:
        position = heapq.heappop(ready)
        order.append(position)
        for consumer in consumers[position]:
            waiting[consumer] -= 1
            if not waiting[consumer]:
                heapq.heappush(ready, consumer)
    done = set(order)
    return order + [position for position in range(len(inputs)) if position not in done]
