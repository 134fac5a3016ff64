"""Values that the stages of the rewrite pass on, without protobuf; framework-free.

A graph and every function of its library are a *scope* each. Nodes and type slots of a scope
are integers: positions in the tuples of its `GraphIndex`. Dtypes are names, such as "float32".
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import math
import os
import pathlib
from collections import defaultdict
from collections.abc import Callable, Container, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, TypeAlias, TypeVar

from tfamp.reports.plan_explorer import explorer_graphs
from tfamp.reports.plan_page import render_page
from tfamp.reports.plan_tables import plan_fragment, plan_text

K = TypeVar("K", bound=Hashable)
# A tensor by the position of its producer and its output port.
NodeOutput: TypeAlias = tuple[int, int]
# An ordered set of slots or nodes.
Ordered: TypeAlias = dict[int, None]

FLOAT32: Final = "float32"
MAIN_GRAPH = ""


def op_types(names: str) -> frozenset[str]:
    """Returns a set of op types from a text with their names."""
    return frozenset(names.split())


# Ops that run functions of the library as parts of a graph.
LOOPS = frozenset({"StatelessWhile", "While"})
BRANCHING = LOOPS | {"Case", "If", "StatelessCase", "StatelessIf"}
# Pseudo-ops for a function's arguments and results, and for the arguments and results of a
# loop's function that `planning.decision` joined with its caller.
ARGUMENT = "<argument>"
RESULT = "<result>"
LINK = "<link>"


class Reason(str):
    """The reason for a slot's dtype: a text with the names involved, and a rule.

    Args:
        rule: Short name of the rule that decided, such as "allow" or "no kernel".
        text: The text.

    Example:
        >>> reason = Reason("allow", "MatMul is on the allow list")
        >>> reason.rule, "MatMul" in reason
        ('allow', True)
    """

    __slots__ = ("rule",)
    rule: str

    def __new__(cls, rule: str, text: str) -> Reason:
        """Makes a text with a rule."""
        reason = super().__new__(cls, text)
        reason.rule = rule
        return reason

    def __reduce__(self) -> tuple[type[Reason], tuple[str, str]]:
        return Reason, (self.rule, self.text)

    @property
    def text(self) -> str:
        """The text as a plain string."""
        return str(self)


class TypeSlot(NamedTuple):
    """One place of a node that holds a dtype: all tensors that use it have that dtype.

    Attributes:
        node: The node's position in its index.
        attr: Attribute that holds the dtype, such as "T"; "" if the op fixes it.
        entry: Position in the attribute where that is a list of dtypes, else None.
        dtype: The dtype in the graph as it is.
        can_be_low: Whether the op accepts the low dtype here and the node's device has a
            kernel.
    """

    node: int
    attr: str
    entry: int | None
    dtype: str
    can_be_low: bool


class Edge(NamedTuple):
    """A tensor as an input of one consumer.

    Attributes:
        source: Slot with the tensor's dtype at its producer.
        target: Slot with the dtype that its consumer expects.
        port: Which output of the producer it is.
        input: Which input of the consumer it is, control inputs not counted.
        tensor: The tensor's name.
    """

    source: int
    target: int
    port: int
    input: int
    tensor: str


_NO_ATTRS: Mapping[str, Any] = {}


class IndexedNode(NamedTuple):
    """A node of a scope.

    Attributes:
        name: Its name.
        op: Its op type; `ARGUMENT` or `RESULT` for a function's boundary.
        device: The device it is pinned to, as the graph spells it, or "".
        calls: The functions of the library that it calls, as While and If do: pairs of
            attribute and name, by attribute; the attribute is "" where the op itself
            is the function.
        uses_references: Whether an argument of the op is a reference to a variable's memory.
        slots: Its type slots.
        attrs: Attributes that decide how it adds up, as Python values: see `planning.kernels`.
    """

    name: str
    op: str
    device: str
    calls: tuple[tuple[str, str], ...]
    uses_references: bool
    slots: tuple[int, ...]
    attrs: Mapping[str, Any] = _NO_ATTRS

    @property
    def equation(self) -> str:
        """The equation of an Einsum, for its FLOPs; "" for other ops."""
        return str(self.attrs.get("equation", ""))


@dataclass(frozen=True)
class GraphIndex:
    """A scope as integers.

    Attributes:
        scope: Name of the function; "" for the graph itself.
        nodes: Its nodes in graph order; a function's arguments come first, its results last.
        slots: The type slots of all nodes.
        edges: All edges but control edges, which no rewrite touches.
        shapes: Shape of a tensor, by its producer's position and output port, with None for an
            unknown dimension. Tensors of unknown rank are left out.
        largest: The finite value of the largest magnitude in a float32 constant, by its position.
    """

    scope: str
    nodes: tuple[IndexedNode, ...]
    slots: tuple[TypeSlot, ...]
    edges: tuple[Edge, ...]
    shapes: Mapping[NodeOutput, tuple[int | None, ...]] = field(default_factory=dict)
    largest: Mapping[int, float] = field(default_factory=dict)

    @functools.cached_property
    def fanin(self) -> tuple[tuple[int, ...], ...]:
        """For each slot the slots its tensors come from."""
        return self._neighbours((edge.target, edge.source) for edge in self.edges)

    @functools.cached_property
    def fanout(self) -> tuple[tuple[int, ...], ...]:
        """For each slot the slots its tensors go to."""
        return self._neighbours((edge.source, edge.target) for edge in self.edges)

    @functools.cached_property
    def ops(self) -> Sequence[str]:
        """For each slot the op of its node."""
        return [self.nodes[slot.node].op for slot in self.slots]

    @functools.cached_property
    def inputs(self) -> Sequence[Sequence[Edge]]:
        """For each node the edges to it, in the order of its inputs."""
        edges_to: list[list[Edge]] = [[] for _ in self.nodes]
        for edge in self.edges:
            edges_to[self.slots[edge.target].node].append(edge)
        return edges_to

    def _neighbours(self, pairs: Iterable[tuple[int, int]]) -> tuple[tuple[int, ...], ...]:
        table: list[list[int]] = [[] for _ in self.slots]
        for slot, neighbour in pairs:
            table[slot].append(neighbour)
        return tuple(tuple(dict.fromkeys(near)) for near in table)

    def size(self, tensor: NodeOutput) -> int | None:
        """Returns a tensor's number of elements; None if its shape is unknown."""
        shape = self.shapes.get(tensor, (None,))
        known = [dimension for dimension in shape if dimension is not None]
        return math.prod(known) if len(known) == len(shape) else None

    def node_of(self, slot: int) -> IndexedNode:
        """Returns the node a slot belongs to."""
        return self.nodes[self.slots[slot].node]

    @functools.cached_property
    def users(self) -> Mapping[str, set[int]]:
        """For each dtype the nodes that take or make tensors of it, by position."""
        users = defaultdict[str, set[int]](set)
        for position, node in enumerate(self.nodes):
            for slot in node.slots:
                users[self.slots[slot].dtype].add(position)
        return users

    def cast_ends(self) -> Iterator[tuple[int, tuple[int, ...]]]:
        """Yields the float32 slots of Casts with their neighbours, if there are any."""
        for slot, type_slot in enumerate(self.slots):
            if type_slot.dtype == FLOAT32 and self.nodes[type_slot.node].op == "Cast":
                ends = (self.fanout if type_slot.attr == "DstT" else self.fanin)[slot]
                if ends:
                    yield slot, ends

    @functools.cached_property
    def producers_first(self) -> list[int]:
        """The positions of the nodes in topological order."""
        sources: list[dict[int, None]] = [{} for _ in self.nodes]
        for slot, near in zip(self.slots, self.fanin, strict=True):
            for source in near:
                sources[slot.node][self.slots[source].node] = None
        return producers_first(range(len(self.nodes)), sources.__getitem__)

    def tensor(self, edge: Edge) -> NodeOutput:
        """Returns the tensor of an edge: the position of its producer, and the output port."""
        return self.slots[edge.source].node, edge.port


@dataclass(frozen=True, slots=True)
class Regions:
    """Constraints on slots by the structure of a scope.

    Attributes:
        fixed: Slots that must not change, with the reason.
        lists: Groups of float32 slots that hold elements of the same TensorLists.
        unsafe: Slots of groups that must stay float32, with the reason.
        loops: Each NextIteration slot, followed by the Merge slots it feeds.
    """

    fixed: Mapping[int, Reason]
    lists: tuple[tuple[int, ...], ...]
    unsafe: Mapping[int, Reason]
    loops: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Painting:
    """Colours of a scope's slots; every pass adds to them.

    Attributes:
        low: Slots that are to be converted, with the reason.
        denied: Slots that need float32, with the reason.
        left: Slots that may be low but are cheaper in float32, with the reason.
    """

    low: dict[int, Reason]
    denied: dict[int, Reason]
    left: dict[int, Reason] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Retype:
    """One slot to change to the plan's low dtype.

    Attributes:
        scope: The function it is in; "" for the graph itself.
        node: Name of the node, or of an argument or result of the function as in its index.
        attr: The attribute that holds the dtype; "" for an argument or a result.
        entry: Position in the attribute where that is a list of dtypes, else None.
    """

    scope: str
    node: str
    attr: str
    entry: int | None


@dataclass(frozen=True, slots=True)
class CastSite:
    """A Cast to insert: one for all consumers of a tensor that need the other dtype.

    Attributes:
        scope: The function it is in; "" for the graph itself.
        tensor: Name of the tensor that is cast.
        from_: Its dtype.
        to: The dtype it is cast to.
        bytes: Bytes it reads and writes; None if the shape is unknown.
        name: Name of the new node.
        producer: Name of the node that makes the tensor.
        device: Device of the new node: the producer's.
        consumers: Pairs (node name, position of the input) that take its result.
    """

    scope: str
    tensor: str
    from_: str
    to: str
    bytes: int | None
    name: str
    producer: str
    device: str
    consumers: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class NodePlan:
    """The decision about a node that computes with floats.

    Attributes:
        scope: The function it is in; "" for the graph itself.
        name: Its name.
        op: Its op type.
        dtype: Name of the dtype it computes in after the rewrite.
        reason: Why.
        cost: Its estimated time in seconds; None if shapes are unknown.
        inputs: Names of its producers in the scope, each once, in the order of its inputs, also
            without floats.
    """

    scope: str
    name: str
    op: str
    dtype: str
    reason: Reason
    cost: float | None = None
    inputs: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RewriteSummary:
    """Totals of a plan.

    Attributes:
        nodes: Number of nodes that compute with floats.
        low_nodes: Number of these that are in the low dtype after the rewrite.
        retyped_nodes: Number of these that the rewrite changes.
        casts: Number of Casts inserted.
        cast_bytes: Bytes these read and write, as far as shapes are known.
        casts_of_unknown_size: Number of Casts left out of `cast_bytes`.
        estimated_speed_up: Ratio of the estimated times before and after, each function run
            once; None if shapes are unknown.
        products: Number of matmuls, convolutions and recurrent cells, which take most of the
            time; a product that two signatures have a copy of counts twice.
        low_products: Number of these that are in the low dtype after the rewrite.
    """

    nodes: int
    low_nodes: int
    retyped_nodes: int
    casts: int
    cast_bytes: int
    casts_of_unknown_size: int
    estimated_speed_up: float | None = None
    products: int = 0
    low_products: int = 0


@dataclass(frozen=True, slots=True)
class Accuracy:
    """The error of a rewritten SavedModel on data, with what stays float32 for it.

    Errors are the largest difference of an output from float32's over its largest magnitude, as
    in `tfamp.diagnostics.compare`.

    Attributes:
        bound: The largest acceptable error.
        error: The error of a run with these scopes in float32.
        error_of_all: The error with all in the low dtype that the other arguments let be.
        float32_scopes: The name scopes, or names of nodes outside of any, that stay float32 for
            the bound; the plan's reasons name their patterns.
    """

    bound: float
    error: float
    error_of_all: float
    float32_scopes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RewritePlan:
    """Every decision of a rewrite, made before anything is changed.

    Attributes:
        dtype: The low dtype.
        nodes: Every node that computes with floats, in graph order, functions after the graph.
        casts: Every Cast to insert.
        retypes: Every slot to change.
        summary: Totals.
        accuracy: What `rewrite_saved_model` measured for its `bound`; None without one.

    Example:
        >>> import tensorflow as tf
        >>> from tfamp.graph import rewrite_graph_def
        >>> spec = tf.TensorSpec((64, 64))
        >>> graph = tf.function(lambda x: x @ x).get_concrete_function(spec).graph
        >>> plan = rewrite_graph_def(
        ...     graph.as_graph_def(), ["Identity:0"], dtype="bfloat16", placement="lists"
        ... ).plan
        >>> [(node.op, node.dtype) for node in plan.nodes], len(plan.casts)
        ([('Placeholder', 'float32'), ('MatMul', 'bfloat16'), ('Identity', 'float32')], 2)
    """

    dtype: str
    nodes: tuple[NodePlan, ...]
    casts: tuple[CastSite, ...]
    retypes: tuple[Retype, ...]
    summary: RewriteSummary
    accuracy: Accuracy | None = None

    def to_text(self) -> str:
        """Returns the plan as a text table: nodes, Casts, totals."""
        return plan_text(self._as_dict())

    def to_json(self) -> str:
        """Returns the plan as JSON: an object with dtype, nodes, casts and summary.

        With a `bound` also accuracy.
        """
        return json.dumps(self._as_dict(), indent=1)

    def to_html(self) -> str:
        """Returns the plan as a self-contained HTML page.

        It has the totals, a table of the rules, one of the Casts with the largest first, and
        the nodes by function and rule, with links between nodes and Casts. It needs no script
        and no network: write it to a file and open that in a browser.
        Equal plans give equal text. `to_model_explorer` draws the graph.

        Returns:
            The document. In its element with the id "plan" is the JSON of `to_json`.

        Example:
            >>> import tensorflow as tf
            >>> from tfamp.graph import rewrite_graph_def
            >>> spec = tf.TensorSpec((2, 2))
            >>> graph = tf.function(lambda x: x @ x).get_concrete_function(spec).graph
            >>> result = rewrite_graph_def(graph.as_graph_def(), ["Identity:0"], dtype="bfloat16")
            >>> result.plan.to_html().startswith("<!doctype html>")
            True
        """
        return render_page(self._as_dict())

    def to_model_explorer(self, path: str | os.PathLike[str]) -> None:
        """Writes the graph, with dtypes, reasons and Casts, for Google's Model Explorer.

        It draws graphs of tens of thousands of nodes, folds layers, and shows attributes:
        `pip install "tfamp[explorer]"`, then `model-explorer plan.json`.

        Args:
            path: The file to write, which should end with ".json".

        Raises:
            OSError: The file cannot be written.

        Example:
            >>> import json, pathlib, tempfile, tensorflow as tf
            >>> from tfamp.graph import rewrite_graph_def
            >>> spec = tf.TensorSpec((2, 2))
            >>> graph = tf.function(lambda x: x @ x).get_concrete_function(spec).graph
            >>> result = rewrite_graph_def(graph.as_graph_def(), ["Identity:0"], dtype="bfloat16")
            >>> path = pathlib.Path(tempfile.mkdtemp(), "plan.json")
            >>> result.plan.to_model_explorer(path)
            >>> [node["label"] for node in json.loads(path.read_text())["graphs"][0]["nodes"]][:2]
            ['Placeholder', 'MatMul']
        """
        graphs = explorer_graphs(self._as_dict())
        pathlib.Path(path).write_text(json.dumps(graphs), encoding="utf-8")

    def _repr_html_(self) -> str:
        return plan_fragment(self._as_dict())

    def _as_dict(self) -> dict[str, Any]:
        """The plan as an object of JSON: dtype, nodes, casts, summary, and accuracy if known."""
        summary = self.summary
        accuracy = {} if self.accuracy is None else {"accuracy": _accuracy_dict(self.accuracy)}
        return {
            **accuracy,
            "dtype": self.dtype,
            "nodes": [_node_dict(node) for node in self.nodes],
            "casts": [_cast_dict(cast) for cast in self.casts],
            "summary": {name: getattr(summary, name) for name in summary.__slots__},
        }


def _accuracy_dict(accuracy: Accuracy) -> dict[str, Any]:
    fields = dataclasses.asdict(accuracy)
    # JSON has no inf, the error of outputs that overflow.
    overflows = math.isinf(accuracy.error_of_all)
    return {**fields, "error_of_all": "inf"} if overflows else fields


def _node_dict(node: NodePlan) -> dict[str, Any]:
    fields = {name: getattr(node, name) for name in node.__slots__}
    return {**fields, "rule": node.reason.rule, "reason": node.reason.text}


def _cast_dict(cast: CastSite) -> dict[str, Any]:
    fields = {name: getattr(cast, name) for name in cast.__slots__ if name != "device"}
    return {"from": fields.pop("from_"), "to": fields.pop("to"), **fields}


@dataclass(frozen=True, slots=True)
class RewriteResult:
    """The result of a rewrite.

    Attributes:
        graph_def: The rewritten graph, a new `tf.compat.v1.GraphDef`.
        plan: Every decision that led to it.

    Example:
        >>> import tensorflow as tf
        >>> from tfamp.graph import rewrite_graph_def
        >>> spec = tf.TensorSpec((64, 64))
        >>> graph = tf.function(lambda x: x @ x).get_concrete_function(spec).graph
        >>> result = rewrite_graph_def(graph.as_graph_def(), ["Identity:0"], dtype="bfloat16")
        >>> type(result.graph_def).__name__, result.plan.dtype
        ('GraphDef', 'bfloat16')
    """

    graph_def: Any
    plan: RewritePlan


def node_name(tensor: str) -> str:
    """Returns the name of the node of a tensor ("x:0") or of a control input ("^x")."""
    return tensor.removeprefix("^").partition(":")[0]


def free_name(name: str, taken: Container[str]) -> str:
    """Returns a name, with a number behind it if it is taken."""
    numbered = (f"{name}_{number}" for number in itertools.count(1))
    return next(free for free in itertools.chain([name], numbered) if free not in taken)


def reach(roots: Iterable[K], neighbours: Callable[[K], Iterable[K]]) -> dict[K, K]:
    """Returns the keys that can be reached from roots, breadth first, with their predecessors.

    A root, reached from itself, comes first.
    """
    predecessors = {root: root for root in roots}
    pending = list(predecessors)
    for near in pending:  # It grows while it is iterated.
        for key in neighbours(near):
            if key not in predecessors:
                predecessors[key] = near
                pending.append(key)
    return predecessors


def along(
    enters: Callable[[int], bool], *tables: Sequence[Iterable[int]]
) -> Callable[[int], Iterable[int]]:
    """Returns a neighbour function for `reach`: those in some tables that may be entered."""
    return lambda slot: [near for table in tables for near in table[slot] if enters(near)]


def producers_first(keys: Iterable[K], sources: Callable[[K], Iterable[K]]) -> list[K]:
    """Returns keys in topological order, otherwise in theirs."""
    pending = list(keys)[::-1]
    known = set(pending)
    ordered: dict[K, None] = {}
    started: set[K] = set()
    while pending:
        key = pending[-1]
        # The sources of a started key are done, or it is in a loop of TensorFlow 1.
        near = () if key in started else sources(key)
        started.add(key)
        waits = [source for source in near if source in known and source not in started]
        pending += waits[::-1]
        if not waits:
            ordered[pending.pop()] = None
    return list(ordered)
