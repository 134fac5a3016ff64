"""Elementwise arithmetic between products and convolutions, as functions that XLA compiles.

TensorFlow's kernels take a pass over memory for each op; XLA makes one of many. Products and
convolutions stay: on CPUs oneDNN's kernels for low precision are faster than XLA's.

What may be one call: of two nodes on a way that leads through a product, the product waits for the
first and the second for the product. So every node has a depth, how often the longest way to it
goes into a device's arithmetic or out of it, and what hangs together at one depth is a group: no
way leads out of it and back. A node that only one later group uses belongs to that: its result is
not stored.

Groups that are alike, as layers that repeat have them, call one function, which is compiled once.

In a function all arithmetic is float32: a low one would be rounded behind every op, which takes
XLA on CPUs longer than the op. What is stored is rounded. What a function computes of a float16
tensor that it stores too is computed of the unrounded one, but of infinity where the stored one has
overflowed: all see an overflow or none. Outside stays what asks for the rounding of a value: a Cast
that is cast back at once, and comparisons of two tensors.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from tfamp.core.dtypes import LOW_PRECISION
from tfamp.core.errors import RewriteError
from tfamp.graph.editor import (
    SHAPES,
    OpSignature,
    control_inputs_of,
    first_output,
    first_ports,
    registered_signature,
    tensor_inputs,
)
from tfamp.graph.functions import has_old_control_flow, library_of, replace_nodes
from tfamp.planning.structures import (
    FLOAT32,
    free_name,
    node_name,
    op_types,
    producers_first,
    reach,
)

# What computes with floats, as many passes over memory as there are ops. Not Max and Min, of which
# XLA's take no notice of NaN on CPUs.
_COMPUTES = op_types("""
    Abs Add AddN AddV2 BiasAdd BiasAddGrad Cast Div DivNoNan Elu EluGrad Equal Erf Erfc Exp Expm1
    Greater GreaterEqual IsFinite LeakyRelu LeakyReluGrad Less LessEqual Log Log1p Maximum Mean
    Minimum Mul MulNoNan Neg NotEqual Pow RealDiv Reciprocal ReciprocalGrad Relu Relu6 Relu6Grad
    ReluGrad Rsqrt RsqrtGrad Select SelectV2 Selu SeluGrad Sigmoid SigmoidGrad Sign Softplus
    SoftplusGrad SparseSoftmaxCrossEntropyWithLogits Sqrt SqrtGrad Square SquaredDifference Sub Sum
    Tanh TanhGrad
""")
# What gives a tensor another shape, which takes no time.
_RESHAPES = op_types("ExpandDims Reshape Squeeze")
# Of tensors it may ask whether one is taken from the other, as a largest value is: only where both
# are rounded is it equal. With a constant it asks no such thing.
_COMPARES = op_types("Equal Greater GreaterEqual Less LessEqual NotEqual")
# What moves values, and counts in no group, but may stand between what computes.
_MOVES = _RESHAPES | op_types("""
    All Any BroadcastTo LogicalAnd LogicalNot LogicalOr OnesLike Tile Transpose ZerosLike
""")
# What is known when a function is compiled if its inputs are.
_KNOWN_IF_INPUTS_ARE = op_types("BroadcastGradientArgs Cast ConcatV2 Pack StridedSlice")
_FLOATS = {tf.as_dtype(name).as_datatype_enum for name in (*LOW_PRECISION, FLOAT32)}
_COMPUTED_IN = ("T", "SrcT", "DstT")  # The attributes that tell it.
_MOST_KNOWN = 64
# With fewer ops, or on tensors with fewer elements, a call takes what it gains.
_LEAST = 4
_LEAST_ELEMENTS = 1 << 14
# What is computed again where that saves storing it: no reductions, and no error functions.
_CHEAP = (_COMPUTES | _RESHAPES) - op_types("""
    AddN BiasAddGrad Erf Erfc Mean Pow SparseSoftmaxCrossEntropyWithLogits Sum
""")
_MOST_COPIES = 12
_NOWHERE = frozenset({-1})
# A tensor of so many times fewer elements is stored in no time.
_SMALL = 16
_COMPILED = "_XlaMustCompile"
_WIDE = tf.float32.as_datatype_enum
_LOW = _FLOATS - {_WIDE}
_FLOAT16 = tf.float16.as_datatype_enum
_FLOAT16_OVERFLOWS_AT = 65520.0  # Halfway from its largest number to the next: ties go to even.
# XLA's take no notice of a NaN in their second operand.
_CHOOSES = {"Maximum": "Greater", "Minimum": "Less"}
_CROSS_ENTROPY = "SparseSoftmaxCrossEntropyWithLogits"
_CALL = "/fused"  # In the name of each call.
_CLASS, _BESIDE = "_class", "loc:@"  # The attribute, and the text, that tell of colocation.


def fuse(graph_def: Any, keep: Collection[str] = (), least: int = _LEAST) -> int:
    """Puts calls of compiled functions in the place of groups of fusible nodes, in place.

    Args:
        graph_def: The graph. Nodes of its functions, as of loops, are left alone, and so is all of
            a graph with control flow of TensorFlow 1.
        keep: Names of nodes or tensors that are used from outside: these names stay.
        least: How many ops that compute with large tensors a group has at least.

    Returns:
        How many calls there are now.
    """
    if has_old_control_flow(graph_def.node):
        return 0
    graph = _Graph.of(graph_def, keep)
    groups = _Groups.of(graph, least)
    library = _Library(graph_def)
    calls = [library.call(groups, number) for number in range(len(groups.own))]
    gone = {name for call in calls for name in call.gone}
    left = [node for name, node in graph.nodes.items() if name not in gone]
    replace_nodes(graph_def.node, [*left, *(node for call in calls for node in call.nodes)])
    _forget_places(graph_def.node)
    return len(calls)


def _forget_places(nodes: Any) -> None:
    """Takes from nodes that they are where another one is, if that one is not there any more."""
    there = {node.name for node in nodes}
    for node in nodes:
        if _CLASS in node.attr:
            classes = node.attr[_CLASS].list.s
            classes[:] = [each for each in classes if _is_there(each.decode(), there)]


def _is_there(place: str, there: Collection[str]) -> bool:
    return not place.startswith(_BESIDE) or place.removeprefix(_BESIDE) in there


def has_fused(graph: tf.Graph) -> bool:
    """Whether a graph has a call that `fuse` has made."""
    ends = (op.name for op in graph.get_operations() if op.type == "PartitionedCall")
    return any(_CALL in name for name in ends)


# ---- Groups --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Graph:
    """A graph and what of it can be fused.

    Attributes:
        nodes: By name.
        fusible: The names of those that can be part of a group.
        known: Nodes whose values are known when a function is compiled: small constants, shapes,
            and what is computed from them.
        inputs: For each node those that run before it, without the known ones.
        users: For each node those that run behind it; "" for what is outside.
        ordered: The names, each behind those of its inputs.
    """

    nodes: Mapping[str, Any]
    fusible: Set[str]
    known: Mapping[str, Any]
    inputs: Mapping[str, Sequence[str]]
    users: Mapping[str, Set[str]]
    ordered: Sequence[str]

    @classmethod
    def of(cls, graph_def: Any, keep: Iterable[str]) -> _Graph:
        """Returns what can be fused of a graph some names of which are used from outside."""
        given = {node.name: node for node in graph_def.node}
        nodes = {name: _with_known_shape(node, given) for name, node in given.items()}
        for node in nodes.values():
            if node.op == "Const":  # It waits for nothing.
                del node.input[:]
        known = _known_nodes(nodes)
        users = defaultdict[str, set[str]](set)
        for name in keep:
            users[node_name(name)].add("")
        inputs = {}
        for name, node in nodes.items():
            before = dict.fromkeys(map(node_name, node.input))
            for each in before:
                users[each].add(name)
            inputs[name] = [each for each in before if each in nodes and each not in known]
        fusible = {name for name in nodes.keys() - known.keys() if _is_fusible(nodes[name], known)}
        fusible -= {name for name in fusible if _is_rounding(name, nodes, users)}
        ordered = producers_first(inputs, inputs.__getitem__)
        return cls(nodes, fusible, known, inputs, users, ordered)

    @functools.cached_property
    def places(self) -> Mapping[str, int]:
        """How many nodes run before each."""
        return {name: number for number, name in enumerate(self.ordered)}

    def groups(self) -> Iterator[list[str]]:
        """Nodes that can be one call, in the order they run in."""
        depths = self._depths()
        linked = defaultdict[str, list[str]](list)
        for name in self.fusible:
            for each in self.inputs[name]:
                if self._place(each) == self._place(name) and depths[each] == depths[name]:
                    linked[name].append(each)
                    linked[each].append(name)
        seen: set[str] = set()
        for name in self.ordered:
            if name in self.fusible and name not in seen:
                group = reach([name], linked.__getitem__)
                seen.update(group)
                yield sorted(group, key=self.places.__getitem__)

    def _place(self, name: str) -> str | None:
        """The device of a node that can be part of a group; None for others."""
        return str(self.nodes[name].device) if name in self.fusible else None

    def _depths(self) -> dict[str, int]:
        depths: dict[str, int] = {}
        later = defaultdict[str, set[tuple[str | None, int]]](set)
        for name in self.ordered:
            here = self._place(name)
            ways = (depths[i] + (here != self._place(i)) for i in self.inputs[name])
            depths[name] = max(ways, default=0)
        for name in reversed(self.ordered):
            here = self._place(name)
            if here is not None and len(later[name]) == 1:
                ((there, depth),) = later[name]
                depths[name] = depth if there == here else depths[name]
            for each in self.inputs[name]:
                later[each].add((here, depths[name]))
        return depths

    def pays(self, group: Sequence[str], least: int) -> bool:
        """Whether a call takes less than the ops of a group."""
        large = (name for name in group if self._passes_over_much(self.nodes[name]))
        return len(list(itertools.islice(large, least))) == least

    def _passes_over_much(self, node: Any) -> bool:
        tensors = (node.name, *tensor_inputs(node))
        return node.op in _COMPUTES and max(map(self.elements, tensors)) >= _LEAST_ELEMENTS

    def elements(self, tensor: str) -> float:
        """How many elements a tensor has; infinity if the graph does not tell."""
        shape = _static_shape(tensor, self.nodes)
        return math.inf if shape is None else math.prod(shape)


def _is_fusible(node: Any, known: Collection[str]) -> bool:
    """Whether a node moves values, or computes with floats, of which XLA has every kernel."""
    if node.op in _MOVES:
        return True
    if node.op in _COMPARES and not any(node_name(each) in known for each in node.input):
        return False
    dtypes = {node.attr[name].type for name in _COMPUTED_IN if name in node.attr}
    return node.op in _COMPUTES and bool(dtypes) and dtypes <= _FLOATS


def _is_rounding(name: str, nodes: Mapping[str, Any], users: Mapping[str, Set[str]]) -> bool:
    """Whether a Cast to a low dtype is cast back at once: it rounds, and XLA would leave it out."""
    if nodes[name].op != "Cast" or nodes[name].attr["DstT"].type not in _LOW:
        return False
    return any(
        user in nodes and nodes[user].op == "Cast" and nodes[user].attr["DstT"].type == _WIDE
        for user in users[name]
    )


def _known_nodes(nodes: Mapping[str, Any]) -> dict[str, Any]:
    known: dict[str, Any] = {}
    for name in producers_first(nodes, lambda each: map(node_name, nodes[each].input)):
        node = nodes[name]
        if node.op == "Const":
            dims = node.attr["value"].tensor.tensor_shape.dim
            is_known = math.prod(dim.size for dim in dims) <= _MOST_KNOWN
        else:
            ends = all(node_name(each) in known for each in node.input)
            is_known = ends and node.op in _KNOWN_IF_INPUTS_ARE
        if is_known:
            known[name] = node
    return known


def _static_shape(tensor: str, nodes: Mapping[str, Any]) -> list[int] | None:
    """The shape of a tensor; None unless the graph tells all of it."""
    node = nodes.get(node_name(tensor))
    while node is not None and node.op == "Cast" and SHAPES not in node.attr:
        tensor = node.input[0]  # Of a Cast that was inserted.
        node = nodes.get(node_name(tensor))
    port = int(tensor.partition(":")[2] or 0)
    shapes = node.attr[SHAPES].list.shape if node is not None and SHAPES in node.attr else ()
    if port >= len(shapes) or shapes[port].unknown_rank:
        return None
    shape = [int(dim.size) for dim in shapes[port].dim]
    return None if -1 in shape else shape


def _with_known_shape(node: Any, nodes: Mapping[str, Any]) -> Any:
    """The node; a constant for one that gives a shape that the graph tells."""
    shape = _static_shape(node.input[0], nodes) if node.op == "Shape" else None
    if shape is None:
        return node
    dtype = node.attr["out_type"].type if "out_type" in node.attr else 0
    value = tf.make_tensor_proto(shape, tf.as_dtype(dtype) if dtype else tf.int32)
    constant = tf.compat.v1.NodeDef(name=node.name, op="Const", device=node.device)
    constant.input[:] = control_inputs_of(node)
    constant.attr["dtype"].type = value.dtype
    constant.attr["value"].tensor.CopyFrom(value)
    return constant


# ---- What is computed again ----------------------------------------------------------------------


@dataclass(frozen=True)
class _Groups:
    """The groups of a graph that are calls.

    Attributes:
        graph: The graph.
        own: The nodes of each group.
        copies: The nodes of others that each computes again.
    """

    graph: _Graph
    own: Sequence[Sequence[str]]
    copies: Sequence[Set[str]]

    @classmethod
    def of(cls, graph: _Graph, least: int) -> _Groups:
        """Returns the groups of at least so many ops that compute with large tensors."""
        own = [group for group in graph.groups() if graph.pays(group, least)]
        owners = {name for group in own for name in group}
        return cls(graph, own, [_copies(graph, group, owners) for group in own])

    def members(self, number: int) -> list[str]:
        """What a group computes, in the order it runs in."""
        place = self.graph.places
        return sorted({*self.own[number], *self.copies[number]}, key=place.__getitem__)

    @functools.cached_property
    def computing(self) -> Mapping[str, Set[int]]:
        """For each node the groups that compute it."""
        found = defaultdict[str, set[int]](set)
        for number in range(len(self.own)):
            for name in self.members(number):
                found[name].add(number)
        return found

    @functools.cached_property
    def staying(self) -> Set[str]:
        """The nodes of groups that stay in the graph too.

        What others take in another shape they reshape themselves: it is not stored twice.
        """
        stays: set[str] = set()
        for name in reversed(self.graph.ordered):
            reshapes = name in self.computing and self.graph.nodes[name].op in _RESHAPES
            if reshapes and self.is_used_outside(name, stays):
                stays.add(name)
        return stays

    def is_used_outside(self, name: str, stays: Set[str]) -> bool:
        """Whether something takes what a group computes, and not in that group or again."""
        return any(
            user in stays or not self.computing.get(user, _NOWHERE) <= self.computing[name]
            for user in self.graph.users[name]
        )


def _copies(graph: _Graph, group: Sequence[str], fused: Set[str]) -> set[str]:
    """What a group takes from others and computes faster than it is stored and read.

    From tensors that it takes anyway, from small ones, and from those of `_sources`.
    """
    inside = set(group)
    taken = {each for name in group for each in graph.inputs[name]}
    given = sorted(taken - inside, key=graph.places.__getitem__)
    there = {name for name in given if name not in fused} | _sources(graph, given, fused)
    copies: set[str] = set()
    for name in given:
        found = _computed_from(graph, name, there | copies, fused) if name in fused else None
        if found is None:
            there.add(name)
        else:
            copies |= found
    return copies


def _sources(graph: _Graph, given: Iterable[str], fused: Set[str]) -> set[str]:
    """What is taken instead of tensors that are computed of it alone.

    It is there anyway, as a product, or two need it: one is stored instead of two.
    """
    ways = [list(_way_up(graph, name, fused)) for name in given if name in fused]
    counts = Counter(itertools.chain.from_iterable(ways))
    found = (
        next((each for each in reversed(way) if counts[each] > 1 or each not in fused), None)
        for way in ways
    )
    return {each for each in found if each is not None}


def _way_up(graph: _Graph, name: str, fused: Set[str]) -> Iterator[str]:
    """A tensor, what it is computed of if that is only one that is not small, and so on."""
    small = graph.elements(name) / _SMALL
    for _ in range(_MOST_COPIES):
        yield name
        large = [each for each in graph.inputs[name] if graph.elements(each) > small]
        if name not in fused or graph.nodes[name].op not in _CHEAP or len(large) != 1:
            return
        (name,) = large


def _computed_from(graph: _Graph, name: str, there: Set[str], fused: Set[str]) -> set[str] | None:
    """The nodes that compute a tensor of what is there; None if others or too many would."""
    small = graph.elements(name) / _SMALL
    found: set[str] = set()
    pending = [name]
    while pending:
        each = pending.pop()
        if each in there or each in found or (each != name and graph.elements(each) <= small):
            continue
        found.add(each)
        if each not in fused or graph.nodes[each].op not in _CHEAP or len(found) > _MOST_COPIES:
            return None
        pending += graph.inputs[each]
    return found


# ---- Calls ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Call:
    """A call of a function.

    Attributes:
        nodes: The node that calls, and what stands for nodes whose results others take.
        gone: The nodes that are in the function now.
    """

    nodes: Sequence[Any]
    gone: Sequence[str]


class _Library:
    """The functions of a graph; of those that are alike there is one."""

    def __init__(self, graph_def: Any) -> None:
        self._functions = graph_def.library.function
        self._names = set(library_of(graph_def))
        self._nodes = {node.name for node in graph_def.node}
        self._made: dict[bytes, str] = {}

    def call(self, groups: _Groups, number: int) -> _Call:
        """Returns what stands in the place of a group."""
        group, nodes = groups.own[number], groups.graph.nodes
        gone = [name for name in group if name not in groups.staying]
        results = [name for name in gone if groups.is_used_outside(name, groups.staying)]
        body = _Body(groups.graph, groups.members(number), results, self._named)
        name = free_name(f"{group[0]}{_CALL}", self._nodes)
        self._nodes.add(name)
        node = tf.compat.v1.NodeDef(name=name, op="PartitionedCall", device=nodes[group[0]].device)
        node.input[:] = [*body.given, *_control_inputs(groups.graph, group)]
        node.attr["f"].func.name = self._named(body.function)
        node.attr[_COMPILED].b = True
        for attr, args in (("Tin", "input_arg"), ("Tout", "output_arg")):
            types = [each.type for each in getattr(body.function.signature, args)]
            node.attr[attr].list.type.extend(types)
        ports = itertools.count()
        taken = [[next(ports) for _ in body.dtypes[each]] for each in results]
        stand_ins = (
            _stand_in(nodes[each], body.dtypes[each], [f"{name}:{port}" for port in own])
            for each, own in zip(results, taken, strict=True)
        )
        return _Call([node, *stand_ins], gone)

    def _named(self, function: Any) -> str:
        key = function.SerializeToString(deterministic=True)
        if key not in self._made:
            self._made[key] = free_name("fused", self._names)
            self._names.add(self._made[key])
            self._functions.add().CopyFrom(function)
            self._functions[-1].signature.name = self._made[key]
        return self._made[key]


def _control_inputs(graph: _Graph, group: Sequence[str]) -> list[str]:
    inside = {f"^{name}" for name in group}
    waits = (each for name in group for each in control_inputs_of(graph.nodes[name]))
    return [each for each in dict.fromkeys(waits) if each not in inside]


def _stand_in(node: Any, dtypes: Sequence[int], tensors: Sequence[str]) -> Any:
    """A node of the same name that passes on what a call has computed, and tells its shape."""
    made = tf.compat.v1.NodeDef(name=node.name, op="IdentityN", device=node.device)
    made.input[:] = tensors
    if len(tensors) > 1:
        made.attr["T"].list.type.extend(dtypes)
        return made
    made.op = "Identity"
    made.attr["T"].type = dtypes[0]
    if SHAPES in node.attr:
        made.op = "EnsureShape"
        made.attr["shape"].shape.CopyFrom(node.attr[SHAPES].list.shape[0])
        made.attr[SHAPES].CopyFrom(node.attr[SHAPES])
    return made


class _Body:
    """A function that computes some nodes, in float32. Its names tell nothing of theirs.

    Attributes:
        function: The function, which has no name yet.
        given: The tensors of the graph that it is called with.
        dtypes: Those of the outputs of each node, in the graph.
    """

    def __init__(
        self,
        graph: _Graph,
        names: Sequence[str],
        results: Sequence[str],
        named: Callable[[Any], str],
    ) -> None:
        self._graph, self._named = graph, named
        self.function = tf.compat.v1.GraphDef().library.function.add()
        self.given: list[str] = []
        self.dtypes: dict[str, list[int]] = {}
        self._spelled: dict[str, str] = {}
        for name in names:
            self._add(graph.nodes[name], stored=name in results)
        for name in results:
            for port, dtype in enumerate(self.dtypes[name]):
                result = self.function.signature.output_arg.add(type=dtype)
                result.name = f"result{len(self.function.ret)}"
                wide = self._spelled[_spelling(name, port)]
                self.function.ret[result.name] = self._cast(wide, _wide(dtype), dtype)
        for attr in (_COMPILED, "_noinline"):
            self.function.attr[attr].b = True

    def _add(self, node: Any, stored: bool = False) -> None:
        own = _signature(node)
        taken = tensor_inputs(node)
        inputs = [
            self._tensor(name, dtype)
            for name, dtype in zip(taken, _dtypes(node, own, own.inputs), strict=True)
        ]
        if node.op == _CROSS_ENTROPY:
            self._add_cross_entropy(node, inputs)
            return
        if node.op in _CHOOSES:
            chosen = self._chosen(_CHOOSES[node.op], *inputs)
            self.dtypes[node.name] = [node.attr["T"].type]
            self._note(node, 0, chosen, stored)
            return
        copy = self._node(node.op, inputs)
        for attr, value in node.attr.items():
            if not attr.startswith("_"):
                copy.attr[attr].CopyFrom(value)
            if attr in _COMPUTED_IN and value.type in _LOW:
                copy.attr[attr].type = _WIDE
        firsts = sorted((first, output) for output, first in first_ports(own, node).items())
        self.dtypes[node.name] = _dtypes(node, own, own.outputs)
        made = _dtypes(copy, own, own.outputs)
        for port, dtype in enumerate(self.dtypes[node.name]):
            first, output = max(each for each in firsts if each[0] <= port)
            tensor = self._cast(f"{copy.name}:{output}:{port - first}", made[port], _wide(dtype))
            self._note(node, port, tensor, stored)

    def _note(self, node: Any, port: int, tensor: str, stored: bool) -> None:
        dtype = self.dtypes[node.name][port]
        if stored and dtype == _FLOAT16:
            tensor = self._overflowed(tensor)
        self._spelled[_spelling(node.name, port)] = tensor

    def _overflowed(self, tensor: str) -> str:
        """The values unrounded, and infinite where float16 has none.

        Casts to float16 and back would do the same, but XLA for GPUs removes them
        (`SimplifyFPConversions`).
        """
        size = self._node("Abs", [tensor])
        fits = self._node("Less", [f"{size.name}:y:0", self._constant(_FLOAT16_OVERFLOWS_AT)])
        infinite = self._node("Mul", [tensor, self._constant(math.inf)])
        chosen = self._node("SelectV2", [f"{fits.name}:z:0", tensor, f"{infinite.name}:z:0"])
        for node in (size, fits, infinite, chosen):
            node.attr["T"].type = _WIDE
        return first_output(chosen.name, True)

    def _constant(self, value: float) -> str:
        constant = self._node("Const", [])
        constant.attr["dtype"].type = _WIDE
        constant.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(value, tf.float32))
        return first_output(constant.name, True)

    def _chosen(self, comparison: str, one: str, other: str) -> str:
        """The one that compares so with the other, and NaN where either is."""
        better, is_nan = self._node(comparison, [one, other]), self._node("NotEqual", [one, one])
        either = self._node("LogicalOr", [f"{better.name}:z:0", f"{is_nan.name}:z:0"])
        chosen = self._node("SelectV2", [f"{either.name}:z:0", one, other])
        for node in (better, is_nan, chosen):
            node.attr["T"].type = _WIDE
        return first_output(chosen.name, True)

    def _add_cross_entropy(self, node: Any, inputs: Sequence[str]) -> None:
        called = _cross_entropy_function(node.attr["Tlabels"].type)
        call = self._node("PartitionedCall", inputs)
        call.attr["f"].func.name = self._named(called)
        for attr, args in (("Tin", "input_arg"), ("Tout", "output_arg")):
            types = [each.type for each in getattr(called.signature, args)]
            call.attr[attr].list.type.extend(types)
        self.dtypes[node.name] = [node.attr["T"].type] * 2
        for port in range(2):
            self._spelled[_spelling(node.name, port)] = f"{call.name}:output:{port}"

    def _tensor(self, tensor: str, dtype: int) -> str:
        """How a tensor reads in the function, which is given it if it does not compute it."""
        tensor = tensor.removesuffix(":0")
        if tensor not in self._spelled and node_name(tensor) in self._graph.known:
            self._add(self._graph.known[node_name(tensor)])
        if tensor not in self._spelled:
            name = f"given{len(self.given)}"
            self.function.signature.input_arg.add(name=name, type=dtype)
            self.given.append(tensor)
            self._spelled[tensor] = self._cast(name, dtype, _wide(dtype))
        return self._spelled[tensor]

    def _cast(self, tensor: str, given: int, dtype: int) -> str:
        if given == dtype:
            return tensor
        cast = self._node("Cast", [tensor])
        cast.attr["SrcT"].type, cast.attr["DstT"].type = given, dtype
        return f"{cast.name}:y:0"

    def _node(self, op: str, inputs: Sequence[str]) -> Any:
        name = f"node{len(self.function.node_def)}"
        return self.function.node_def.add(name=name, op=op, input=inputs)


def _wide(dtype: int) -> int:
    """The dtype in which a function has what is of a dtype in the graph."""
    return _WIDE if dtype in _LOW else dtype


def _spelling(name: str, port: int) -> str:
    return f"{name}:{port}" if port else name


def _signature(node: Any) -> OpSignature:
    own = registered_signature(node.op)
    if own is None:
        raise RewriteError(f"TensorFlow does not know the op {node.op!r} of node {node.name!r}.")
    return own


def _dtypes(node: Any, own: OpSignature, arguments: Iterable[Any]) -> list[int]:
    """The dtype of each input or output of a node."""
    found: list[int] = []
    for arg in arguments:
        count = own.value(node, arg.number_attr, 1) if arg.number_attr else 1
        dtype = arg.type or tf.as_dtype(own.value(node, arg.type_attr)).as_datatype_enum
        found += [dtype] * count
    return found


# XLA's own cross entropy makes a dense tensor of the labels, takes the loss from a pass over all
# classes, and computes every exponential again for the gradient and for each sum of it.


@functools.cache
def _cross_entropy_function(labels_dtype: int) -> Any:
    """A function, without a name, of float32 logits and labels: losses, gradients by the logits."""
    function = tf.function(_cross_entropy, autograph=False)
    with tf.Graph().as_default() as graph:
        logits = tf.compat.v1.placeholder(tf.float32, [None, None])
        function(logits, tf.compat.v1.placeholder(labels_dtype, [None]))
    (made,) = graph.as_graph_def().library.function
    made.signature.name = ""
    return made


def _cross_entropy(logits: Any, labels: Any) -> tuple[Any, Any]:
    """Labels that are no class give NaN, as XLA's op does."""
    top = tf.reduce_max(logits, -1)
    exponentials = tf.exp(logits - top[:, tf.newaxis])
    total = tf.reduce_sum(exponentials, -1)
    is_class = (labels >= 0) & (labels < tf.shape(logits, labels.dtype)[-1])
    nothing = tf.where(is_class, 0.0, math.nan)
    losses = tf.math.log(total) + (top - tf.gather(logits, labels, batch_dims=1)) + nothing
    shares = exponentials * (1.0 / total + nothing)[:, tf.newaxis]
    return losses, shares - tf.one_hot(labels, tf.shape(logits)[-1])
