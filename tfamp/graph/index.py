"""GraphDef -> GraphIndex; with `tfamp.graph.graph` the only reader of protobuf.

Every type attribute of a node is a slot, and so is every dtype the op fixes. Reads of a
variable with nothing between them count as one tensor, so that they share one Cast. Indexing
compares the dtypes of both ends of every edge and raises for an invalid graph.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import tensorflow as tf

from tfamp.core.device_names import device_kind_of
from tfamp.core.errors import RewriteError
from tfamp.core.kinds import ArgDef, AttrValue, GraphDef, NodeDef
from tfamp.graph.body import Body
from tfamp.graph.graph import Graph
from tfamp.graph.nodes import (
    SHAPES,
    attribute_text,
    function_attributes,
    may_name_functions,
    tensor_inputs,
)
from tfamp.graph.ops import OpSignature, refused_options, signature
from tfamp.interop.tf_private import dtype_of_number, has_kernel
from tfamp.machine.hardware import detect
from tfamp.planning.kernels import OPS
from tfamp.planning.options import SUCCESSORS
from tfamp.planning.structures import (
    ARGUMENT,
    FLOAT32,
    MAIN_GRAPH,
    RESULT,
    Edge,
    GraphIndex,
    IndexedNode,
    TypeSlot,
    node_name,
)

# Attribute, position in it if it is a list, dtype.
_Place: TypeAlias = tuple[str, int | None, str]
_Shape: TypeAlias = tuple[int | None, ...]

# More tensors than any node has: limits the memory that a broken count takes.
_MOST_TENSORS = 2**20


def build_indexes(
    graph_def: GraphDef, *, dtype: str | None = None, device: str = "cpu"
) -> tuple[GraphIndex, ...]:
    """Indexes a graph and the functions it reaches; the graph is not modified.

    A function whose dtypes depend on its caller is left out: it stays as it is.

    Args:
        graph_def: A `tf.compat.v1.GraphDef`.
        dtype: The low dtype, for which kernels are looked up; None reads dtypes only, neither
            kernels nor shapes.
        device: Kind of device of nodes that are pinned to none: "cpu", "gpu" or "tpu".

    Returns:
        The index of the graph, then of each function in the order of the library.

    Raises:
        RewriteError: The graph is not valid, or has an op TensorFlow does not know.
    """
    return index_bodies(Graph(graph_def), dtype, device)


def index_bodies(graph: Graph, dtype: str | None, device: str) -> tuple[GraphIndex, ...]:
    """Indexes a graph and the functions it reaches, as `build_indexes` does."""
    if MAIN_GRAPH in graph.functions:
        raise RewriteError("The graph has a function without a name.")
    main = _Indexer(graph.main, dtype, device).index()
    called = (name for node in main.nodes for _, name in node.calls)
    reached = {body.scope for body in graph.reached(called)}
    functions = (
        body
        for name, body in graph.functions.items()
        if name in reached and not signature(body.definition.signature).allowed
    )
    return main, *(_Indexer(body, dtype, device).index() for body in functions)


class _OpFacts(NamedTuple):
    """Facts that all nodes of an op type in one scope share.

    Attributes:
        signature: The op's signature.
        may_call: Whether attributes of its nodes may name functions.
        is_function: Whether the op is a function of the graph.
        may_sum: Whether the table of kernels has it.
    """

    signature: OpSignature
    may_call: bool
    is_function: bool
    may_sum: bool


class _Kind(NamedTuple):
    """Slots of all nodes with the same op, device and attributes.

    Attributes:
        places: Where their dtypes are, each with whether it may be the low one.
        ins: For each input its position among these.
        outs: The same for outputs.
    """

    places: tuple[tuple[_Place, bool], ...]
    ins: tuple[int, ...]
    outs: tuple[int, ...]


@dataclass
class _Indexer:
    """Builds the index of one scope."""

    body: Body
    dtype: str | None
    device: str
    nodes: list[IndexedNode] = field(default_factory=list)
    slots: list[TypeSlot] = field(default_factory=list)
    # By name; reads of a variable at the same time have the position of the first.
    positions: dict[str, int] = field(default_factory=dict)
    tensors: list[list[str]] = field(default_factory=list)
    inputs: list[list[int]] = field(default_factory=list)
    outputs: list[list[int]] = field(default_factory=list)
    shapes: dict[tuple[int, int], _Shape] = field(default_factory=dict)
    largest: dict[int, float] = field(default_factory=dict)
    # First reads by device and inputs.
    reads: dict[tuple[str, ...], int] = field(default_factory=dict)
    kinds: dict[Hashable, _Kind] = field(default_factory=dict)
    ops: dict[str, _OpFacts] = field(default_factory=dict)

    def index(self) -> GraphIndex:
        body = self.body
        for position, arg in enumerate(body.arguments):
            self._add_boundary(arg.name, ARGUMENT, arg, [])
            self._add_shapes(position, ARGUMENT, body.argument_attrs(position))
        for node in body.nodes:
            self._add_node(node)
        for arg in body.results:
            # A result may have the name of a node.
            self._add_boundary(f"{RESULT}{arg.name}", RESULT, arg, [body.returned[arg.name]])
        return self._finish()

    def _add_boundary(self, name: str, op: str, arg: ArgDef, tensors: list[str]) -> None:
        places: tuple[tuple[_Place, bool], ...] = ((("", None, dtype_of_number(arg.type)), False),)
        kind = _Kind(places, (0,) if op == RESULT else (), (0,) if op == ARGUMENT else ())
        self._register(kind, tensors, name, op)

    def _add_node(self, node: NodeDef) -> None:
        # One read of each field, and attributes as bytes: most nodes are of a known kind.
        op, device, attrs = node.op, node.device, node.attr
        facts = self.ops.get(op)
        if facts is None:
            facts = self.ops[op] = self._facts(node)
        op_signature = facts.signature
        deciding = [
            attrs[name].SerializeToString() if name in attrs else b""
            for name in op_signature.deciding
        ]
        key = op, device, *deciding, self.dtype is not None and refused_options(node)
        kind = self.kinds.get(key)
        if kind is None:
            kind = self.kinds[key] = self._kind(node, op_signature)
        calls = tuple(function_attributes(node)) if facts.may_call else ()
        if facts.is_function:
            calls = (("", op), *calls)
        position = len(self.nodes)
        self._register(
            kind,
            tensor_inputs(node),
            node.name,
            op,
            device=device,
            calls=calls,
            uses_references=op_signature.uses_references,
            attrs=_summing_attributes(node) if facts.may_sum else None,
        )
        if op == "ReadVariableOp":
            time = (device, *sorted(node.input))
            self.positions[node.name] = self.reads.setdefault(time, position)
        self._add_shapes(position, op, attrs)
        if op == "Const" and self.dtype is not None and self.slots[-1].dtype == FLOAT32:
            self.largest[position] = largest_finite(attrs["value"].tensor)

    def _facts(self, node: NodeDef) -> _OpFacts:
        op = node.op
        op_signature, is_function = self.body.signature(node), op in self.body.functions
        return _OpFacts(op_signature, may_name_functions(op), is_function, op in OPS)

    def _kind(self, node: NodeDef, op_signature: OpSignature) -> _Kind:
        values = {attr: self._value(node, op_signature, attr) for attr in op_signature.deciding}
        ins = _places(op_signature.inputs, values)
        outs = _places(op_signature.outputs, values)
        types = {attr: values[attr] for attr in op_signature.allowed}
        low = {attr for attr in types if self._can_be_low(node, op_signature, types, attr)}
        # Single dtypes that no tensor uses too, as a TensorList's element dtype.
        unlisted = [attr for attr in types if attr not in op_signature.lists]
        single = ((attr, None, types[attr][0]) for attr in unlisted)
        places = list(dict.fromkeys((*ins, *outs, *single)))
        return _Kind(
            tuple((place, place[2] == FLOAT32 and place[0] in low) for place in places),
            tuple(map(places.index, ins)),
            tuple(map(places.index, outs)),
        )

    def _register(
        self,
        kind: _Kind,
        tensors: list[str],
        name: str,
        op: str,
        *,
        device: str = "",
        calls: tuple[tuple[str, str], ...] = (),
        uses_references: bool = False,
        attrs: Mapping[str, Any] | None = None,
    ) -> None:
        position, first = len(self.nodes), len(self.slots)
        self.slots += [TypeSlot(position, *place, low) for place, low in kind.places]
        numbers = tuple(range(first, len(self.slots)))
        node = IndexedNode(name, op, device, calls, uses_references, numbers, attrs or {})
        if self.positions.setdefault(name, position) != position:
            raise self.body.error(node, "another node has the same name")
        self.nodes.append(node)
        self.tensors.append(tensors)
        self.inputs.append([first + place for place in kind.ins])
        self.outputs.append([first + place for place in kind.outs])

    def _value(self, node: NodeDef, op_signature: OpSignature, attr: str) -> Any:
        """The dtypes that an attribute holds, or its number of tensors."""
        value = op_signature.value(node, attr)
        if value is None:
            raise self.body.error(node, f"the attribute {attr} is missing")
        if attr in op_signature.numbers:
            if not isinstance(value, int) or not 0 <= value <= _MOST_TENSORS:
                raise self.body.error(node, f"the attribute {attr} is {value}, a wrong count")
            return value
        if isinstance(value, int) or isinstance(value, tuple) != (attr in op_signature.lists):
            raise self.body.error(node, f"the attribute {attr} does not hold a dtype")
        return value if isinstance(value, tuple) else (value,)

    def _can_be_low(
        self,
        node: NodeDef,
        op_signature: OpSignature,
        types: Mapping[str, tuple[str, ...]],
        attr: str,
    ) -> bool:
        """Whether one dtype of an attribute, float32 as the graph is, may be the low one."""
        if self.dtype is None or FLOAT32 not in types[attr]:
            return False
        allowed = op_signature.allowed[attr]
        if allowed is not None and self.dtype not in allowed:
            return False
        # The dtypes of a kernel for the node with this one slot changed.
        dtypes = {name: set(listed) for name, listed in types.items()}
        if types[attr].count(FLOAT32) == 1:
            dtypes[attr].remove(FLOAT32)  # It is the slot itself; others would stay float32.
        dtypes[attr].add(self.dtype)
        device = device_kind_of(node.device) or self.device
        op = SUCCESSORS.get(node.op, node.op)
        refuses = device == "cpu" and any(refused_options(node))
        # Such a kernel of a CPU is TensorFlow's own, not oneDNN's.
        if refuses and (self.dtype == "float16" or not detect().cpu_bfloat16):
            return False
        kernel = tuple((name, tuple(sorted(kinds))) for name, kinds in dtypes.items())
        return has_kernel(op, device, kernel)

    def _add_shapes(self, position: int, op: str, attrs: Mapping[str, AttrValue]) -> None:
        shapes: Sequence[_Shape | None] = ()
        if self.dtype is None:
            return
        if SHAPES in attrs:
            shapes = _shapes(attrs[SHAPES].SerializeToString())
        elif op == "Const" and "value" in attrs:
            shapes = [_shape(attrs["value"].tensor.tensor_shape)]
        for port, shape in enumerate(shapes):
            if shape is not None:
                self.shapes[position, port] = shape

    def _finish(self) -> GraphIndex:
        return GraphIndex(
            scope=self.body.scope,
            nodes=tuple(self.nodes),
            slots=tuple(self.slots),
            edges=tuple(self._edges()),
            shapes=self.shapes,
            largest=self.largest,
        )

    def _edges(self) -> Iterator[Edge]:
        """Yields the edges into every node; a RewriteError names a node with wrong inputs."""
        sources: dict[str, tuple[int, int, str]] = {}
        for node, tensors, targets in zip(self.nodes, self.tensors, self.inputs, strict=True):
            if len(tensors) != len(targets):
                cause = f"it has {len(tensors)} inputs, not {len(targets)}"
                raise self.body.error(node, cause)
            for i, (tensor, target) in enumerate(zip(tensors, targets, strict=True)):
                found = sources.get(tensor)
                if found is None:
                    found = sources[tensor] = self._source(node, tensor)
                source, port, spelled = found
                made, taken = self.slots[source].dtype, self.slots[target].dtype
                if made != taken:
                    raise self.body.error(node, f"its input {tensor!r} is {made}, not {taken}")
                yield Edge(source, target, port, i, spelled)

    def _source(self, node: IndexedNode, tensor: str) -> tuple[int, int, str]:
        """Slot, port and name of an input's producer; reads of a variable have one name."""
        name = node_name(tensor)
        producer = self.positions.get(name)
        if producer is None:
            raise self.body.error(node, f"its input {tensor!r} is not the output of a node")
        port, slots = self.body.port(tensor), self.outputs[producer]
        if not 0 <= port < len(slots):
            raise self.body.error(node, f"its input {tensor!r} is not an output of {name!r}")
        first = self.nodes[producer].name
        return slots[port], port, tensor if first == name else tensor.replace(name, first, 1)


@functools.lru_cache(10_000)  # Few nodes have shapes that no other has.
def _shapes(serialized: bytes) -> tuple[_Shape | None, ...]:
    return tuple(map(_shape, tf.compat.v1.AttrValue.FromString(serialized).list.shape))


def _shape(proto: Any) -> _Shape | None:
    if proto.unknown_rank:
        return None
    return tuple([dim.size if dim.size >= 0 else None for dim in proto.dim])


def largest_finite(tensor: Any) -> float:
    """Returns the finite value of the largest magnitude of a float32 TensorProto, else 0."""
    content, numbers = tensor.tensor_content, tensor.float_val
    if not content and len(numbers) == 1:  # Most constants are; arrays take ten times as long.
        return float(numbers[0]) if math.isfinite(numbers[0]) else 0.0
    values = np.frombuffer(content, np.float32) if content else np.array(numbers, "float32")
    finite = values[np.isfinite(values)]
    return float(finite[np.argmax(np.abs(finite))]) if finite.size else 0.0


def _summing_attributes(node: NodeDef) -> dict[str, Any]:
    """The attributes of a node that decide how many values it adds up for each result."""
    lists: dict[str, Any] = {
        name: list(node.attr[name].list.i) for name in ("ksize", "strides") if name in node.attr
    }
    texts = [name for name in ("data_format", "equation") if name in node.attr]
    return lists | {name: attribute_text(node, name) for name in texts}


def _places(args: Iterable[ArgDef], values: Mapping[str, Any]) -> list[_Place]:
    places: list[_Place] = []
    for arg in args:
        attr = arg.type_list_attr or arg.type_attr
        if arg.type_list_attr:
            places += [(attr, i, dtype) for i, dtype in enumerate(values[attr])]
        else:
            dtype = values[attr][0] if attr else dtype_of_number(arg.type)
            places += [(attr, None, dtype)] * values.get(arg.number_attr, 1)
    return places
