"""A body of a graph, the graph itself or a function: its nodes, and edits of them in place."""

from __future__ import annotations

import functools
import itertools
from collections import ChainMap, defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping, MutableMapping, Sequence, Set
from typing import Any

import numpy as np
import tensorflow as tf

from tfamp.core.errors import RewriteError
from tfamp.core.kinds import ArgDef, AttrValue, FunctionDef, NodeDef
from tfamp.graph.nodes import (
    SHAPES,
    called_by,
    control_inputs_of,
    may_name_functions,
    named_functions,
)
from tfamp.graph.ops import (
    OLD_CONTROL_FLOW,
    OpSignature,
    first_ports,
    registered_signature,
    signature,
)
from tfamp.planning.structures import MAIN_GRAPH, RESULT, free_name, node_name, reach

_COLOCATION, _WITH = "_class", "loc:@"


class Body:
    """The nodes of a body of a graph: reads, adds, replaces, rewires and drops them, in place.

    A body is the graph itself or a function of its library. The name of a tensor is "node" or
    "node:1" in a graph, and "node:output:0", with the op's name of the output, in a function.

    Args:
        definition: A `tf.compat.v1.GraphDef`, or a function of one.
        functions: The functions of the graph by name, which all its bodies share.
        kept: Tensors or nodes of the graph that are used from outside.

    Attributes:
        definition: The graph or function.
        functions: The functions of the graph by name.
        is_function: Whether it is a function.
        nodes: Its nodes.
        replaced: What inlining has put in the place of the outputs of calls, by their names. Both
            are named as in a graph that is traced: "node:1".
    """

    def __init__(
        self,
        definition: FunctionDef,
        functions: Mapping[str, Body] | None = None,
        kept: Iterable[str] = (),
    ) -> None:
        self.definition = definition
        self.functions = {} if functions is None else functions
        self.is_function = hasattr(definition, "node_def")
        self.nodes = definition.node_def if self.is_function else definition.node
        self._fetched = frozenset(map(node_name, kept))
        self.replaced: dict[str, str] = {}
        self._respelled: dict[str, str] = {}

    # ---- Nodes -----------------------------------------------------------------------------------

    @property
    def scope(self) -> str:
        """Name of the function; "" for the graph itself."""
        return str(self.definition.signature.name) if self.is_function else MAIN_GRAPH

    @functools.cached_property
    def by_name(self) -> dict[str, NodeDef]:
        """The nodes by name."""
        nodes: dict[str, NodeDef] = {}
        for node in self.nodes:
            if nodes.setdefault(node.name, node) is not node:
                raise self.error(node, "another node has the same name")
        return nodes

    @functools.cached_property
    def by_op(self) -> defaultdict[str, list[NodeDef]]:
        """The nodes by op type, also under op types that they had before."""
        nodes = defaultdict[str, list[NodeDef]](list)
        for node in self.by_name.values():
            nodes[node.op].append(node)
        return nodes

    def of_types(self, *ops: str) -> list[NodeDef]:
        """Returns the nodes of some op types."""
        return [node for op in ops for node in self.by_op.get(op, ()) if node.op == op]

    @functools.cached_property
    def consumers(self) -> defaultdict[str, list[str]]:
        """For each node the names of its consumers, control edges included, once an input."""
        consumers = defaultdict[str, list[str]](list)
        for node in self.by_name.values():
            for name in node.input:
                consumers[node_name(name)].append(node.name)
        return consumers

    @property
    def kept(self) -> frozenset[str]:
        """Names of the nodes that are used from outside."""
        if not self.is_function:
            return self._fetched
        results = itertools.chain(self.returned.values(), self.definition.control_ret.values())
        return frozenset(map(node_name, results))

    @property
    def arguments(self) -> Sequence[ArgDef]:
        """The arguments of the function; a graph has none."""
        return self.definition.signature.input_arg if self.is_function else ()

    @property
    def results(self) -> Sequence[ArgDef]:
        """The results of the function; a graph has none."""
        return self.definition.signature.output_arg if self.is_function else ()

    @property
    def returned(self) -> MutableMapping[str, str]:
        """The tensor of each result of the function by its name."""
        return self.definition.ret if self.is_function else {}

    @property
    def has_old_control_flow(self) -> bool:
        """Whether it has control flow of TensorFlow 1."""
        return not OLD_CONTROL_FLOW.isdisjoint(self.by_op)

    def named(self, name: str) -> NodeDef:
        """Returns the node of a name, or the argument or result (`RESULT`) of the function."""
        node = self.by_name.get(name)
        if node is not None or not self.is_function:
            return node
        plain = name.removeprefix(RESULT)
        entries = self.arguments if plain == name else self.results
        return next((argument for argument in entries if argument.name == plain), None)

    def taken(self, name: str) -> list[str]:
        """Returns the inputs of a node, or of a result (`RESULT`)."""
        if name.startswith(RESULT):
            return [self.returned[name.removeprefix(RESULT)]]
        return list(self.by_name[name].input)

    def uses(self, name: str) -> int:
        """Returns how often a node is used, from outside included."""
        return len(self.consumers[name]) + (name in self.kept)

    def ancestors(self, names: Iterable[str], fed: Iterable[str] = ()) -> set[str]:
        """Returns the nodes that some tensors or nodes depend on, themselves included.

        Nodes that are fed depend on nothing; names of no node are left out.
        """
        nodes, ends = self.by_name, set(map(node_name, fed))

        def taken(name: str) -> Iterator[str]:
            inputs = () if name in ends else nodes[name].input
            return filter(nodes.__contains__, map(node_name, inputs))

        return set(reach(filter(nodes.__contains__, map(node_name, names)), taken))

    def error(self, node: NodeDef, cause: str) -> RewriteError:
        """Returns an error that names a node and its function."""
        place = f" of function {self.scope!r}" if self.is_function else ""
        return RewriteError(f"Node {node.name!r} ({node.op}){place}: {cause}.")

    # ---- Called functions ------------------------------------------------------------------------

    @property
    def callers(self) -> list[NodeDef]:
        """The nodes that may call functions."""
        ops = (op for op in self.by_op if op in self.functions or may_name_functions(op))
        return self.of_types(*list(ops))

    def calls(self) -> Iterator[str]:
        """The names by which its nodes may call functions."""
        return itertools.chain.from_iterable(map(called_by, self.callers))

    def reached(self, names: Iterable[str]) -> list[Body]:
        """The functions that these call, directly or not, by their names in the graph."""
        functions = self.functions

        def called(name: str) -> Iterator[str]:
            return filter(functions.__contains__, functions[name].calls())

        known = filter(functions.__contains__, names)
        return [functions[name] for name in reach(known, called)]

    def rename_calls(self, names: Container[str], suffix: str) -> None:
        """Appends a suffix to the names of some functions where nodes call them."""
        for node in self.callers:
            for _, called in named_functions(node):
                if called.name in names:
                    called.name += suffix
            if node.op in names:
                self.set_op(node, f"{node.op}{suffix}")

    # ---- Tensors ---------------------------------------------------------------------------------

    def signature(self, node: NodeDef) -> OpSignature:
        """Returns the signature of a node's op; a RewriteError names an unknown op."""
        if node.op in self.functions:
            return signature(self.functions[node.op].definition.signature)
        known = registered_signature(node.op)
        if known is None:
            cause = "TensorFlow does not know this op; load its library before the rewrite"
            raise self.error(node, cause)
        return known

    def tensor(self, node: NodeDef, port: int = 0) -> str:
        """Returns the name of an output of a node."""
        if not self.is_function:
            return f"{node.name}:{port}" if port else str(node.name)
        firsts = first_ports(self.signature(node), node)
        starts = [(first, output) for output, first in firsts.items() if first <= port]
        first, output = starts[-1]
        return f"{node.name}:{output}:{port - first}"

    def spelled(self, traced: str) -> str:
        """Returns the name of a tensor, which is "node:1" in a graph that is traced."""
        name, _, port = traced.partition(":")
        node = self.by_name.get(name)
        return name if node is None else self.tensor(node, int(port))

    def traced(self, tensor: str) -> str:
        """Returns the name that a tensor would have in a graph that is traced: "node:1"."""
        return f"{node_name(tensor)}:{max(self.port(tensor), 0)}"

    def port(self, tensor: str) -> int:
        """Returns the output port of a tensor; -1 for a wrong name."""
        name, _, rest = tensor.partition(":")
        output, _, number = rest.rpartition(":")
        if not (number or "0").isdecimal():
            return -1
        if not output:
            return int(number or 0)
        node = self.by_name.get(name)
        ports = {} if node is None else first_ports(self.signature(node), node)
        return ports[output] + int(number) if output in ports else -1

    def shape(self, tensor: str) -> list[int] | None:
        """Returns the dimensions of a tensor, -1 for unknown ones; None for an unknown rank."""
        node = self.by_name.get(node_name(tensor))
        attrs = self._argument_attrs(tensor) if node is None else node.attr
        port = self.port(tensor)
        shapes = attrs[SHAPES].list.shape if SHAPES in attrs else ()
        if not 0 <= port < len(shapes) or shapes[port].unknown_rank:
            return None
        return [int(dim.size) for dim in shapes[port].dim]

    def dims(self, tensor: str) -> list[int]:
        """Returns the same, but [] for an unknown rank."""
        return self.shape(tensor) or []

    def _argument_attrs(self, name: str) -> Mapping[str, AttrValue]:
        """The attributes of an argument of the function."""
        places = {argument.name: i for i, argument in enumerate(self.arguments)}
        return self.argument_attrs(places[name]) if name in places else {}

    def argument_attrs(self, position: int) -> Mapping[str, AttrValue]:
        """The attributes of an argument of the function by its position, {} if it has none."""
        known = self.is_function and position in self.definition.arg_attr
        return self.definition.arg_attr[position].attr if known else {}

    def free_name(self, wanted: str) -> str:
        """Returns a name that no node and no argument or result of the function has."""
        wanted = node_name(wanted)  # In a broken graph a node may have the name of a tensor.
        if not self.is_function:
            return free_name(wanted, self.by_name)
        taken = dict.fromkeys(argument.name for argument in (*self.arguments, *self.results))
        return free_name(wanted, ChainMap(self.by_name, taken))

    # ---- Edits -----------------------------------------------------------------------------------

    def add(
        self,
        name: str,
        op: str,
        inputs: Iterable[str] = (),
        dims: Iterable[int] | None = None,
        device: str = "",
        **attrs: Any,
    ) -> str:
        """Adds a node under a free name; returns its first tensor.

        Dimensions that are not known are -1.
        """
        name = self.free_name(name)
        by_op, node = self.by_op, self.nodes.add(name=name, op=op, device=device)
        by_op[op].append(node)
        self.by_name[name] = node
        self.set_inputs(node, inputs)
        self._fill(node, dims, attrs)
        return self.tensor(node)

    def cast(
        self,
        name: str,
        tensor: str,
        dtypes: tuple[tf.DType, tf.DType],
        dims: Iterable[int] | None = None,
        device: str = "",
    ) -> str:
        """Adds a Cast from one dtype to another; returns its tensor."""
        types = {"SrcT": dtypes[0], "DstT": dtypes[1], "Truncate": False}
        return self.add(name, "Cast", [tensor], dims, device, **types)

    def constant(
        self,
        name: str,
        values: Any,
        device: str = "",
        dtype: tf.DType = tf.int32,
    ) -> str:
        """Adds a constant; returns its tensor."""
        value = tf.compat.v1.AttrValue(tensor=tf.make_tensor_proto(values, dtype))
        return self.add(name, "Const", (), np.shape(values), device, dtype=dtype, value=value)

    def become(
        self,
        node: NodeDef,
        op: str,
        inputs: Iterable[str],
        dims: Iterable[int] | None = None,
        **attrs: Any,
    ) -> None:
        """Replaces op, inputs and attributes of a node; it keeps its control inputs.

        `settle` rewires its consumers where the output of the new op has another name.
        """
        before = self.tensor(node)
        for name in [name for name in node.attr if not name.startswith("_")]:
            del node.attr[name]
        self.set_op(node, op)
        self.set_inputs(node, [*inputs, *control_inputs_of(node)])
        self._fill(node, dims, attrs)
        if self.tensor(node) != before:
            self._respelled[before] = self.tensor(node)

    def become_identity(self, node: NodeDef, dtype: int) -> None:
        """Replaces a node with an Identity of its first input."""
        self.become(node, "Identity", node.input[:1], T=tf.as_dtype(dtype))

    def settle(self) -> None:
        """Rewires the consumers of nodes whose output was renamed by `become`."""
        spelled, self._respelled = self._respelled, {}
        self.rewire(spelled)

    def rewire(self, spelled: Mapping[str, str]) -> None:
        """Rewires consumers of some tensors to others, results of the function included."""
        users = {user for tensor in spelled for user in self.consumers[node_name(tensor)]}
        for node in (self.by_name[name] for name in sorted(users)):
            self.set_inputs(node, [spelled.get(name, name) for name in node.input])
        for name, tensor in list(self.returned.items()):
            self.returned[name] = spelled.get(tensor, tensor)

    def set_op(self, node: NodeDef, op: str) -> None:
        """Gives a node another op type."""
        if node.op != op:
            self.by_op[op].append(node)
            node.op = op

    def set_inputs(self, node: NodeDef, inputs: Iterable[str]) -> None:
        """Gives a node other inputs."""
        before = list(node.input)
        node.input[:] = inputs
        if "consumers" in self.__dict__:
            for name in before:
                self.consumers[node_name(name)].remove(node.name)
            for name in node.input:
                self.consumers[node_name(name)].append(node.name)

    def connect(self, tensor: str, consumers: Iterable[tuple[str, int]]) -> None:
        """Connects a tensor to inputs of nodes, and to results of the function (`RESULT`)."""
        for consumer, position in consumers:
            if consumer.startswith(RESULT):
                self.returned[consumer.removeprefix(RESULT)] = tensor
            else:
                node = self.by_name[consumer]
                inputs = list(node.input)
                inputs[position] = tensor
                self.set_inputs(node, inputs)

    def drop(self, names: Set[str]) -> None:
        """Removes nodes, and colocation constraints with them."""
        places = {f"{_WITH}{name}".encode() for name in names}

        def left() -> Iterator[NodeDef]:
            for node in self.nodes:
                if node.name not in names:
                    if _COLOCATION in node.attr:
                        _drop_colocation(node, places)
                    yield node

        if names:
            self.replace_nodes(left())

    def keep(self, names: Set[str]) -> None:
        """Removes all other nodes, as `drop` does."""
        self.drop(self.by_name.keys() - names)

    def replace_nodes(self, left: Iterable[NodeDef]) -> None:
        """Replaces all nodes."""
        refill(self.nodes, left)
        for name in ("by_name", "by_op", "consumers"):
            self.__dict__.pop(name, None)

    def add_argument(
        self, name: str, dtype: int, place: int | None = None, shapes: AttrValue = None
    ) -> None:
        """Adds an argument to the function, before the one that is at a position now."""
        place = len(self.arguments) if place is None else place
        for table in (self.definition.arg_attr, self.definition.resource_arg_unique_id):
            _make_room(table, place)
        _insert(self.arguments, place, name, dtype)
        if shapes is not None:
            self.definition.arg_attr[place].attr[SHAPES].CopyFrom(shapes)

    def add_result(self, name: str, dtype: int, tensor: str, place: int | None = None) -> None:
        """Adds a result to the function, before the one that is at a position now."""
        _insert(self.results, len(self.results) if place is None else place, name, dtype)
        self.returned[name] = tensor

    def add_control_result(self, name: str, node: str) -> None:
        """Has the function run a node that no result depends on."""
        self.definition.signature.control_output.append(name)
        self.definition.control_ret[name] = node

    def _fill(self, node: NodeDef, dims: Iterable[int] | None, attrs: Mapping[str, Any]) -> None:
        for name, value in attrs.items():
            node.attr[name].CopyFrom(_attr_value(value))
        if dims is not None:
            shape = tf.TensorShape([None if size < 0 else size for size in dims])
            del node.attr[SHAPES].list.shape[:]
            node.attr[SHAPES].list.shape.append(shape.as_proto())


def _drop_colocation(node: NodeDef, places: Set[bytes]) -> None:
    constraints = node.attr[_COLOCATION].list.s
    constraints[:] = [place for place in constraints if place not in places]
    if not constraints:
        del node.attr[_COLOCATION]


def _attr_value(value: Any) -> AttrValue:
    """A plain value as an `AttrValue`."""
    make = tf.compat.v1.AttrValue
    if isinstance(value, make):
        return value
    if isinstance(value, tf.DType):
        return make(type=value.as_datatype_enum)
    for kind, field in ((bool, "b"), (bytes, "s"), (int, "i")):  # A bool is an int too.
        if isinstance(value, kind):
            return make(**{field: value})
    types = [dtype.as_datatype_enum for dtype in value if isinstance(dtype, tf.DType)]
    return make(list=make.ListValue(type=types, i=[] if types else value))


def _insert(entries: Any, place: int, name: str, dtype: int) -> None:
    """Inserts an argument or result of a function."""
    if place >= len(entries):
        entries.add(name=name, type=dtype)
    else:
        entries.insert(place, type(entries[place])(name=name, type=dtype))


def _make_room(table: Any, place: int) -> None:
    """Shifts the entries of a protobuf map of arguments by one from a position on."""
    for position in sorted((key for key in table if key >= place), reverse=True):
        value = table.pop(position)
        if hasattr(value, "SerializeToString"):
            table[position + 1].CopyFrom(value)
        else:
            table[position + 1] = value


def refill(entries: Any, left: Iterable[Any]) -> None:
    """Replaces the entries of a repeated field, such as the nodes of a graph."""
    kept = list(left)
    del entries[:]
    entries.extend(kept)
