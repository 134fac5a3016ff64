"""Nodes of a GraphDef: names of their tensors, signatures of their ops, and edits in place.

The definitions of ops come from TensorFlow's registry, or from a graph's function library: a
function may be called by its name, like an op.
"""

from __future__ import annotations

import functools
import itertools
from collections import ChainMap, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Set
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tfamp.core.dtypes import LOW_PRECISION
from tfamp.core.errors import RewriteError
from tfamp.interop import tf_private
from tfamp.planning.options import SUCCESSORS
from tfamp.planning.structures import FLOAT32, MAIN_GRAPH, RESULT, free_name, node_name, op_types

# The attribute that holds the shapes of a node's outputs, in a graph exported with shapes.
SHAPES = "_output_shapes"


def is_control(name: str) -> bool:
    """Whether an input is a node that is waited for ("^node"), not a tensor."""
    return name.startswith("^")


def tensor_inputs(node: Any) -> list[str]:
    """Returns the tensors that a node takes."""
    return [name for name in node.input if not is_control(name)]


def control_inputs_of(node: Any) -> list[str]:
    """Returns the inputs that a node only waits for."""
    return [name for name in node.input if is_control(name)]


# ---- Signatures of ops ---------------------------------------------------------------------------

# The type attribute the successors have in addition.
STATISTICS_ATTR = "U"

# Ops that run Python, which may do anything to a variable.
PYTHON = frozenset({"EagerPyFunc", "PyFunc", "PyFuncStateless"})
# What writes variables besides Assign..VariableOp, ResourceApply.. and ResourceScatter..
_OTHER_WRITES = frozenset(
    {"AssignVariableXlaConcatND", "ResourceCountUpTo", "ResourceStridedSliceAssign"}
)


class OpSignature(NamedTuple):
    """Arguments and type attributes of an op.

    Attributes:
        inputs: The `OpDef.ArgDef`s of its inputs, shared by all callers: not to be changed.
        outputs: The same of its outputs.
        allowed: For each type attribute, lists of types included, the dtypes it may be; None
            stands for any.
        lists: The type attributes that are lists.
        defaults: Default values of attributes a node may leave out: a dtype, a tuple or a number.
        numbers: Attributes that hold the number of tensors of an argument.
        deciding: The type attributes and these.
        uses_references: Whether an argument is a reference to a variable's memory.
    """

    inputs: tuple[Any, ...]
    outputs: tuple[Any, ...]
    allowed: Mapping[str, frozenset[str] | None]
    lists: frozenset[str]
    defaults: Mapping[str, Any]
    numbers: frozenset[str]
    deciding: tuple[str, ...]
    uses_references: bool

    def value(self, node: Any, attr: str, otherwise: Any = None) -> Any:
        """Returns an attribute of a node as a plain value, or its default if it is left out."""
        given = _plain(node.attr[attr]) if attr in node.attr else None
        return self.defaults.get(attr, otherwise) if given is None else given


def signature(definition: Any) -> OpSignature:
    """Returns the signature that an `OpDef` defines."""
    arguments = (*definition.input_arg, *definition.output_arg)
    types = [attr for attr in definition.attr if attr.type in ("type", "list(type)")]
    given = [attr for attr in definition.attr if attr.HasField("default_value")]
    allowed = {attr.name: _allowed(attr) for attr in types}
    numbers = frozenset(arg.number_attr for arg in arguments) - {""}
    return OpSignature(
        inputs=tuple(definition.input_arg),
        outputs=tuple(definition.output_arg),
        allowed=allowed,
        lists=frozenset(attr.name for attr in types if attr.type == "list(type)"),
        defaults={attr.name: _plain(attr.default_value) for attr in given},
        numbers=numbers,
        deciding=(*allowed, *sorted(numbers)),
        uses_references=any(arg.is_ref for arg in arguments),
    )


@functools.cache
def registered_signature(op: str) -> OpSignature | None:
    """Returns the signature of an op type, or of its successor; None if TensorFlow knows none."""
    definition = tf_private.op_definition(SUCCESSORS.get(op, op))
    own = None if definition is None else signature(definition)
    if own is None or op not in SUCCESSORS:
        return own
    return own._replace(defaults={**own.defaults, STATISTICS_ATTR: FLOAT32})


def _plain(value: Any) -> Any:
    """An `AttrValue` as a plain value: a dtype's name, a tuple of these, or a number.

    Other kinds of attributes decide no dtype: they are None.
    """
    kind = value.WhichOneof("value")
    if kind == "type":
        return tf_private.dtype_name(value.type)
    if kind == "i":
        return value.i
    if kind == "list":
        return tuple(tf_private.dtype_name(each) for each in value.list.type)
    return None


def writes_variable(op: str) -> bool:
    """Whether an op assigns or updates variables."""
    if op in _OTHER_WRITES or (op.startswith("Assign") and op.endswith("VariableOp")):
        return True
    return op.startswith(("ResourceApply", "ResourceSparse", "ResourceScatter"))


def first_ports(own: OpSignature, node: Any) -> dict[str, int]:
    """Returns which output of a node is the first of each output its op names."""
    values = (own.value(node, arg.type_list_attr or arg.number_attr, 1) for arg in own.outputs)
    counts = (len(value) if isinstance(value, tuple) else int(value or 0) for value in values)
    firsts = itertools.accumulate(counts, initial=0)
    return {arg.name: first for arg, first in zip(own.outputs, firsts, strict=False)}


def _allowed(attr: Any) -> frozenset[str] | None:
    if not attr.HasField("allowed_values"):
        return None
    return frozenset(tf_private.dtype_name(each) for each in attr.allowed_values.list.type)


# Options that registered kernels refuse at run time. A CPU's float16 kernels of these ops are
# TensorFlow's own; its float32 and bfloat16 kernels are oneDNN's, which support all options. The
# former do not support dilation. Conv2D's kernel does, but its gradients, which TensorFlow adds in
# the dtype of the op, do not.
_NOT_DILATED = op_types("""
    Conv2D Conv2DBackpropFilter Conv2DBackpropInput Conv3D Conv3DBackpropFilterV2
    Conv3DBackpropInputV2 DepthwiseConv2dNative
""")
# These support NHWC only.
_CHANNELS_LAST = _NOT_DILATED | {
    "AvgPool",
    "AvgPoolGrad",
    "DepthwiseConv2dNativeBackpropFilter",
    "DepthwiseConv2dNativeBackpropInput",
    "MaxPool",
    "MaxPoolGrad",
}


def refused_options(node: Any) -> tuple[bool, bool]:
    """Whether a node is NCHW, and whether it dilates its filter."""
    attr = node.attr if node.op in _CHANNELS_LAST else {}
    first = "data_format" in attr and attr["data_format"].s.startswith(b"NC")
    dilated = node.op in _NOT_DILATED and "dilations" in attr
    return first, dilated and any(each > 1 for each in attr["dilations"].list.i)


# ---- Edits ---------------------------------------------------------------------------------------

FLOAT32_TYPE = tf.float32.as_datatype_enum
LOW_TYPES = {tf.as_dtype(name).as_datatype_enum for name in LOW_PRECISION}
FLOAT_TYPES = LOW_TYPES | {FLOAT32_TYPE}
_COLOCATION, _WITH = "_class", "loc:@"
_NOTHING = tf.compat.v1.AttrValue()


def attribute(node: Any, name: str) -> Any:
    """Returns an attribute of a node, an empty one if it has none: reading `attr` would add it."""
    return node.attr.get(name, _NOTHING)


class GraphEditor:
    """Adds, replaces, rewires and drops nodes of one body of a graph, in place.

    A body is the graph itself or a function of its library. The name of a tensor is "node" or
    "node:1" in a graph, and "node:output:0", with the op's name of the output, in a function.

    Args:
        graph: A `tf.compat.v1.GraphDef`, or a function of one.
        kept: Tensors or nodes of the graph that are used from outside.
        library: The editors of the other functions, for one that is a function.

    Attributes:
        graph: The graph or function.
        is_function: Whether it is a function.
        nodes: Its nodes.
        library: The editors of the graph's functions, by name, which all bodies share.
        weights: Arguments of loops' functions that hold weights, as (function, argument).
    """

    def __init__(
        self, graph: Any, kept: Iterable[str] = (), library: dict[str, GraphEditor] | None = None
    ) -> None:
        self.graph = graph
        self.is_function = hasattr(graph, "node_def")
        self.nodes = graph.node_def if self.is_function else graph.node
        self.library = {} if library is None else library
        for each in () if self.is_function else graph.library.function:
            self.library[each.signature.name] = GraphEditor(each, (), self.library)
        self.weights: set[tuple[str, str]] = set()
        self._fetched = frozenset(map(node_name, kept))
        self._respelled: dict[str, str] = {}

    def copy_function(self, name: str) -> str:
        """Copies a function of the library; returns the name of the copy."""
        copy = self.graph.library.function.add()
        copy.CopyFrom(self.library[name].graph)
        copy.signature.name = free_name(name, self.library)
        self.library[copy.signature.name] = GraphEditor(copy, (), self.library)
        return str(copy.signature.name)

    @property
    def scope(self) -> str:
        """Name of the function; "" for the graph itself."""
        return str(self.graph.signature.name) if self.is_function else MAIN_GRAPH

    @property
    def bodies(self) -> tuple[GraphEditor, ...]:
        """The graph and its functions."""
        return self, *self.library.values()

    def body(self, scope: str) -> GraphEditor:
        """Returns the editor of a function by name, or of the graph for ""."""
        return self.library[scope] if scope else self

    @functools.cached_property
    def by_name(self) -> dict[str, Any]:
        """The nodes by name."""
        found: dict[str, Any] = {}
        for node in self.nodes:
            if found.setdefault(node.name, node) is not node:
                raise self.error(node, "another node has the same name")
        return found

    @functools.cached_property
    def by_op(self) -> defaultdict[str, list[Any]]:
        """The nodes by op type, also under op types that they had before."""
        found = defaultdict[str, list[Any]](list)
        for node in self.by_name.values():
            found[node.op].append(node)
        return found

    def of_types(self, *ops: str) -> list[Any]:
        """Returns the nodes of some op types."""
        return [node for op in ops for node in self.by_op.get(op, ()) if node.op == op]

    @functools.cached_property
    def consumers(self) -> defaultdict[str, list[str]]:
        """For each node the names of its consumers, control edges included, once an input."""
        found = defaultdict[str, list[str]](list)
        for node in self.by_name.values():
            for name in node.input:
                found[node_name(name)].append(node.name)
        return found

    @property
    def kept(self) -> frozenset[str]:
        """Names of the nodes that are used from outside."""
        if not self.is_function:
            return self._fetched
        results = itertools.chain(self.graph.ret.values(), self.graph.control_ret.values())
        return frozenset(map(node_name, results))

    def named(self, name: str) -> Any:
        """Returns the node of a name, or the argument or result (`RESULT`) of the function."""
        node = self.by_name.get(name)
        if node is not None or not self.is_function:
            return node
        signature, own = self.graph.signature, name.removeprefix(RESULT)
        arguments = signature.input_arg if own == name else signature.output_arg
        return next((each for each in arguments if each.name == own), None)

    def taken(self, name: str) -> list[str]:
        """Returns the inputs of a node, or of a result (`RESULT`)."""
        if name.startswith(RESULT):
            return [self.graph.ret[name.removeprefix(RESULT)]]
        return list(self.by_name[name].input)

    def uses(self, name: str) -> int:
        """Returns how often a node is used, from outside included."""
        return len(self.consumers[name]) + (name in self.kept)

    def signature(self, node: Any) -> OpSignature:
        """Returns the signature of a node's op; a RewriteError names an op that is not known."""
        if node.op in self.library:
            return signature(self.library[node.op].graph.signature)
        own = registered_signature(node.op)
        if own is None:
            cause = "TensorFlow does not know this op; load its library before the rewrite"
            raise self.error(node, cause)
        return own

    def error(self, node: Any, cause: str) -> RewriteError:
        """Returns an error that names a node and its function."""
        place = f" of function {self.scope!r}" if self.is_function else ""
        return RewriteError(f"Node {node.name!r} ({node.op}){place}: {cause}.")

    def tensor(self, node: Any, port: int = 0) -> str:
        """Returns the name of an output of a node."""
        if not self.is_function:
            return f"{node.name}:{port}" if port else str(node.name)
        firsts = first_ports(self.signature(node), node)
        output, first = [each for each in firsts.items() if each[1] <= port][-1]
        return f"{node.name}:{output}:{port - first}"

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
        attrs, port = self._argument_attrs(tensor) if node is None else node.attr, self.port(tensor)
        shapes = attrs[SHAPES].list.shape if SHAPES in attrs else ()
        if not 0 <= port < len(shapes) or shapes[port].unknown_rank:
            return None
        return [int(dim.size) for dim in shapes[port].dim]

    def dims(self, tensor: str) -> list[int]:
        """Returns the same, but [] for an unknown rank."""
        return self.shape(tensor) or []

    def _argument_attrs(self, name: str) -> Any:
        """The attributes of an argument of the function."""
        arguments = self.graph.signature.input_arg if self.is_function else ()
        position = next((i for i, each in enumerate(arguments) if each.name == name), -1)
        known = position in self.graph.arg_attr if arguments else False
        return self.graph.arg_attr[position].attr if known else {}

    def free_name(self, wanted: str) -> str:
        """Returns a name that no node and no argument or result of the function has."""
        wanted = node_name(wanted)  # In a broken graph a node may have the name of a tensor.
        if not self.is_function:
            return free_name(wanted, self.by_name)
        signature = self.graph.signature
        taken = dict.fromkeys(each.name for each in (*signature.input_arg, *signature.output_arg))
        return free_name(wanted, ChainMap(self.by_name, taken))

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

    def constant(self, name: str, values: Any, device: str = "", dtype: tf.DType = tf.int32) -> str:
        """Adds a constant; returns its tensor."""
        value = tf.compat.v1.AttrValue(tensor=tf.make_tensor_proto(values, dtype))
        return self.add(name, "Const", (), np.shape(values), device, dtype=dtype, value=value)

    def become(
        self,
        node: Any,
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
        node.op = op
        self.by_op[op].append(node)
        self.set_inputs(node, [*inputs, *control_inputs_of(node)])
        self._fill(node, dims, attrs)
        if self.tensor(node) != before:
            self._respelled[before] = self.tensor(node)

    def become_identity(self, node: Any, dtype: int) -> None:
        """Replaces a node with an Identity of its first input."""
        self.become(node, "Identity", node.input[:1], T=tf.as_dtype(dtype))

    def settle(self) -> None:
        """Rewires the consumers of nodes whose output was renamed by `become`."""
        spelled, self._respelled = self._respelled, {}
        self.rewire(spelled)

    def rewire(self, spelled: Mapping[str, str]) -> None:
        """Rewires consumers of some tensors to others, results of the function included."""
        users = {each for tensor in spelled for each in self.consumers[node_name(tensor)]}
        for node in (self.by_name[name] for name in sorted(users)):
            self.set_inputs(node, [spelled.get(name, name) for name in node.input])
        for name, tensor in list(self.graph.ret.items() if self.is_function else ()):
            self.graph.ret[name] = spelled.get(tensor, tensor)

    def set_inputs(self, node: Any, inputs: Iterable[str]) -> None:
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
                self.graph.ret[consumer.removeprefix(RESULT)] = tensor
            else:
                node = self.by_name[consumer]
                inputs = list(node.input)
                inputs[position] = tensor
                self.set_inputs(node, inputs)

    def drop(self, names: Set[str]) -> None:
        """Removes nodes, and colocation constraints with them."""
        places = {f"{_WITH}{name}".encode() for name in names}

        def left() -> Iterator[Any]:
            for node in self.nodes:
                if node.name not in names:
                    if _COLOCATION in node.attr:
                        _drop_colocation(node, places)
                    yield node

        if names:
            self.replace_nodes(left())

    def replace_nodes(self, left: Iterable[Any]) -> None:
        """Replaces all nodes."""
        replace_nodes(self.nodes, left)
        for name in ("by_name", "by_op", "consumers"):
            self.__dict__.pop(name, None)

    def _fill(self, node: Any, dims: Iterable[int] | None, attrs: Mapping[str, Any]) -> None:
        for name, value in attrs.items():
            node.attr[name].CopyFrom(_attr_value(value))
        if dims is not None:
            shape = tf.TensorShape([None if size < 0 else size for size in dims])
            del node.attr[SHAPES].list.shape[:]
            node.attr[SHAPES].list.shape.append(shape.as_proto())


def _drop_colocation(node: Any, places: Set[bytes]) -> None:
    found = node.attr[_COLOCATION].list.s
    found[:] = [each for each in found if each not in places]
    if not found:
        del node.attr[_COLOCATION]


def _attr_value(value: Any) -> Any:
    """A plain value as an `AttrValue`."""
    make = tf.compat.v1.AttrValue
    if isinstance(value, make):
        return value
    if isinstance(value, tf.DType):
        return make(type=value.as_datatype_enum)
    for kind, field in ((bool, "b"), (bytes, "s"), (int, "i")):  # A bool is an int too.
        if isinstance(value, kind):
            return make(**{field: value})
    types = [each.as_datatype_enum for each in value if isinstance(each, tf.DType)]
    return make(list=make.ListValue(type=types, i=[] if types else value))


def replace_nodes(nodes: Any, left: Iterable[Any]) -> None:
    """Replaces the nodes of a graph or a function."""
    kept = list(left)
    del nodes[:]
    nodes.extend(kept)
