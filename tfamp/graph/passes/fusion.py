"""Fuses elementwise arithmetic between products and convolutions into functions for XLA.

TensorFlow's kernels take a pass over memory for each op; XLA fuses many ops into one pass.
Products and convolutions stay: on CPUs oneDNN's kernels for low precision are faster than
XLA's.

A group must not contain both an ancestor and a descendant of a product: the call would wait for
itself. So every node has a depth, the largest number of times that a path to it enters or
leaves fusible nodes of a device. Connected nodes of one depth are a group: no path leaves and
returns. A node that only one later group uses belongs to that group, so that its result is not
stored.

Identical groups, as of repeated layers, call one function, which is compiled once.

Inside a function all arithmetic is float32: XLA on CPUs would round low arithmetic after every
op, which takes longer than the op. Results are rounded when they are stored. If a function
stores a float16 tensor and also uses it, it uses the unrounded values, but infinity where the
stored value overflows, so that every consumer sees the overflow. Nodes that depend on rounding
stay outside: a Cast that is cast back at once, and comparisons of two tensors.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence, Set
from typing import Any

import tensorflow as tf

from tfamp.core.dtypes import LOW_PRECISION
from tfamp.core.kinds import ArgDef, FunctionDef, NodeDef, Tensor
from tfamp.graph.body import Body
from tfamp.graph.graph import Graph
from tfamp.graph.nodes import SHAPES, attribute, control_inputs_of, tensor_inputs
from tfamp.graph.ops import FLOAT32_TYPE, FLOAT_TYPES, LOW_TYPES, OpSignature
from tfamp.planning import structures
from tfamp.planning.options import RewriteOptions

# Arithmetic with floats: each op is a pass over memory. Not Max and Min: XLA's CPU kernels do
# not propagate NaN.
_COMPUTES = structures.op_types("""
    Abs Add AddN AddV2 BiasAdd BiasAddGrad Cast Div DivNoNan Elu EluGrad Equal Erf Erfc Exp Expm1
    Greater GreaterEqual IsFinite LeakyRelu LeakyReluGrad Less LessEqual Log Log1p Maximum Mean
    Minimum Mul MulNoNan Neg NotEqual Pow RealDiv Reciprocal ReciprocalGrad Relu Relu6 Relu6Grad
    ReluGrad Rsqrt RsqrtGrad Select SelectV2 Selu SeluGrad Sigmoid SigmoidGrad Sign Softplus
    SoftplusGrad SparseSoftmaxCrossEntropyWithLogits Sqrt SqrtGrad Square SquaredDifference Sub Sum
    Tanh TanhGrad
""")
# Ops that only change the shape, which takes no time.
_RESHAPES = structures.op_types("ExpandDims Reshape Squeeze")
# Comparisons of two tensors may depend on rounding: a largest value equals its element only if
# both are rounded. Comparisons with a constant do not.
_COMPARES = structures.op_types("Equal Greater GreaterEqual Less LessEqual NotEqual")
# Ops that move values: they do not make a group pay, but may join one.
_MOVES = _RESHAPES | structures.op_types("""
    All Any BroadcastTo LogicalAnd LogicalNot LogicalOr OnesLike Tile Transpose ZerosLike
""")
# Ops with results that are known when a function is compiled if their inputs are.
_KNOWN_IF_INPUTS_ARE = structures.op_types("""
    BroadcastGradientArgs Cast ConcatV2 Pack StridedSlice
""")
_COMPUTED_IN = ("T", "SrcT", "DstT")  # Attributes with the dtype of the arithmetic.
# Elements of a constant whose value counts as known: shapes, axes and paddings have fewer, and a
# weight does not become part of the compiled program. A choice.
_MOST_KNOWN = 64
# With fewer ops, or smaller tensors, the overhead of a call exceeds its gain.
_LEAST = 4
_LEAST_ELEMENTS = 1 << 14
# Ops that are recomputed rather than stored: not reductions or error functions.
_CHEAP = (_COMPUTES | _RESHAPES) - structures.op_types("""
    AddN BiasAddGrad Erf Erfc Mean Pow SparseSoftmaxCrossEntropyWithLogits Sum
""")
# Bounds the ops that are recomputed for a tensor, and the search for a tensor to read instead: a
# choice, above which reading what was stored takes less time.
_MOST_COPIES = 12
_NOWHERE = frozenset({-1})
# The time to store a tensor of so many times fewer elements is negligible: a choice.
_SMALL = 16
_COMPILED = "_XlaMustCompile"
_FLOAT16_OVERFLOWS_AT = 65520.0  # Halfway from its largest number to the next: ties go to even.
# XLA's kernels ignore a NaN in the second operand.
_CHOOSES = {"Maximum": "Greater", "Minimum": "Less"}
_CROSS_ENTROPY = "SparseSoftmaxCrossEntropyWithLogits"
_CALL = "/fused"  # In the name of each call.


def run(graph: Graph, options: RewriteOptions, plan: structures.RewritePlan) -> None:
    """Has XLA compile groups of fusible nodes, in place."""
    fuse(graph)


def fuse(graph: Graph, least: int = _LEAST) -> int:
    """Replaces groups of fusible nodes with calls of compiled functions, in place.

    Functions, such as bodies of loops, stay as they are, and so does a graph with control flow
    of TensorFlow 1. Returns the number of calls; each group has at least `least` ops on large
    tensors.
    """
    if graph.main.has_old_control_flow:
        return 0
    _fold_shapes(graph.main)
    groups = _Groups(_Flow(graph.main), least)
    library = _Library(graph)
    functions = [_Function(groups, number, library) for number in range(len(groups.fused))]
    for group, function in zip(groups.fused, functions, strict=True):
        _insert(graph.main, group, function)
    gone = {name for group in groups.fused for name in group} - groups.staying
    graph.main.drop(gone.difference(*(function.dtypes_of_results for function in functions)))
    return len(functions)


def has_fused(graph: tf.Graph) -> bool:
    """Whether a graph has a call that `fuse` added."""
    ends = (op.name for op in graph.get_operations() if op.type == "PartitionedCall")
    return any(_CALL in name for name in ends)


# ---- Groups --------------------------------------------------------------------------------------


def _fold_shapes(graph: Body) -> None:
    """Makes known shapes constants, in place, and has constants wait for nothing."""
    for node in graph.of_types("Shape"):
        dims = graph.shape(node.input[0])
        if dims is None or -1 in dims:
            continue
        dtype = tf.as_dtype(attribute(node, "out_type").type or tf.int32)
        value = tf.compat.v1.AttrValue(tensor=tf.make_tensor_proto(dims, dtype))
        graph.become(node, "Const", (), dtype=dtype, value=value)
    for node in graph.of_types("Const"):
        graph.set_inputs(node, ())


class _Flow:
    """How values flow between the nodes of a graph, and which nodes XLA may compile.

    Attributes:
        graph: The graph.
        places: The place of each node in topological order.
        known: The names of nodes whose values are known when a function is compiled: small
            constants, shapes, and what is computed from them.
        inputs: The nodes that each node takes, without those that are known.
        devices: The devices of fusible nodes.
    """

    def __init__(self, graph: Body) -> None:
        self.graph = graph
        nodes = graph.by_name
        taken = {
            name: dict.fromkeys(map(structures.node_name, node.input))
            for name, node in nodes.items()
        }
        ordered = structures.producers_first(nodes, taken.__getitem__)
        self.places = {name: place for place, name in enumerate(ordered)}
        self.known: set[str] = set()
        for name in ordered:
            if self._is_known(nodes[name], taken[name]):
                self.known.add(name)
        computed = nodes.keys() - self.known
        self.inputs = {
            name: [source for source in taken[name] if source in computed] for name in ordered
        }
        self.devices = {
            name: str(nodes[name].device) for name in ordered if self._is_fusible(nodes[name])
        }

    def in_order(self, names: Iterable[str]) -> list[str]:
        """Names of nodes in topological order."""
        return sorted(names, key=self.places.__getitem__)

    def elements(self, tensor: str) -> float:
        """How many elements a tensor has; infinity if the graph does not have its shape."""
        shape = self.graph.shape(tensor)
        return math.inf if shape is None or -1 in shape else math.prod(shape)

    def _is_known(self, node: NodeDef, inputs: Iterable[str]) -> bool:
        if node.op != "Const":
            return node.op in _KNOWN_IF_INPUTS_ARE and self.known.issuperset(inputs)
        dims = node.attr["value"].tensor.tensor_shape.dim
        return math.prod(dim.size for dim in dims) <= _MOST_KNOWN

    def _is_fusible(self, node: NodeDef) -> bool:
        """Whether a node moves values, or computes with floats only: XLA supports these."""
        if node.name in self.known or self._is_rounding(node):
            return False
        sources = map(structures.node_name, node.input)
        if node.op in _COMPARES and self.known.isdisjoint(sources):
            return False
        dtypes = {node.attr[name].type for name in _COMPUTED_IN if name in node.attr}
        computes = node.op in _COMPUTES and bool(dtypes) and dtypes <= FLOAT_TYPES
        return computes or node.op in _MOVES

    def _is_rounding(self, node: NodeDef) -> bool:
        """Whether a Cast to a low dtype is cast back at once: XLA would remove the rounding."""
        if node.op != "Cast" or node.attr["DstT"].type not in LOW_TYPES:
            return False
        users = (self.graph.by_name[user] for user in self.graph.consumers[node.name])
        casts = (user for user in users if user.op == "Cast")
        return any(cast.attr["DstT"].type == FLOAT32_TYPE for cast in casts)

    def groups(self) -> Iterator[list[str]]:
        """Groups of nodes that can be one call, each in topological order."""
        depths = self._depths()
        linked = defaultdict[str, list[str]](list)
        for name, device in self.devices.items():
            for source in self.inputs[name]:
                if self.devices.get(source) == device and depths[source] == depths[name]:
                    linked[name].append(source)
                    linked[source].append(name)
        seen: set[str] = set()
        for name in self.devices:
            if name not in seen:
                group = structures.reach([name], linked.__getitem__)
                seen.update(group)
                yield self.in_order(group)

    def _depths(self) -> dict[str, int]:
        """How often the longest way to each node enters or leaves fusible nodes of one device.

        A node that only one later group uses has the depth of that group.
        """
        depths: dict[str, int] = {}
        for name in self.places:
            here = self.devices.get(name)
            ways = (
                depths[source] + (here != self.devices.get(source)) for source in self.inputs[name]
            )
            depths[name] = max(ways, default=0)
        users = defaultdict[str, set[tuple[str | None, int]]](set)
        for name in reversed(self.places):
            here = self.devices.get(name)
            if here is not None and len(users[name]) == 1:
                ((there, depth),) = users[name]
                depths[name] = depth if there == here else depths[name]
            for source in self.inputs[name]:
                users[source].add((here, depths[name]))
        return depths

    def pays(self, group: Sequence[str], least: int) -> bool:
        """Whether a call is faster than a group's ops: `least` of them on large tensors."""
        nodes = (self.graph.by_name[name] for name in group)
        computing = (node for node in nodes if node.op in _COMPUTES)
        sizes = (max(map(self.elements, (n.name, *tensor_inputs(n)))) for n in computing)
        return sum(size >= _LEAST_ELEMENTS for size in sizes) >= least


class _Groups:
    """The groups of a graph's nodes that become calls.

    Attributes:
        flow: The flow of the graph.
        fused: The nodes of each group, in the order they run in.
        members: All nodes that each group computes, recomputed ones of other groups included.
        staying: The nodes of groups that also stay in the graph.
    """

    def __init__(self, flow: _Flow, least: int) -> None:
        self.flow = flow
        self.fused = [group for group in flow.groups() if flow.pays(group, least)]
        self._in_a_group = {name for group in self.fused for name in group}
        self.members = [flow.in_order({*group, *self._copies(group)}) for group in self.fused]
        # For each node the groups that compute it.
        self._computing = defaultdict[str, set[int]](set)
        for number, members in enumerate(self.members):
            for name in members:
                self._computing[name].add(number)
        # A tensor is stored once: reshapes of it for consumers outside stay outside.
        self.staying: set[str] = set()
        for name in reversed(flow.in_order(self._computing)):
            if flow.graph.by_name[name].op in _RESHAPES and self.is_used_outside(name):
                self.staying.add(name)

    def is_used_outside(self, name: str) -> bool:
        """Whether a node of a group has consumers that do not compute it themselves."""
        graph = self.flow.graph
        computing = self._computing[name]
        return name in graph.kept or any(
            user in self.staying or not self._computing.get(user, _NOWHERE) <= computing
            for user in graph.consumers[name]
        )

    # ---- Recomputation ---------------------------------------------------------------------------

    def _copies(self, group: Sequence[str]) -> set[str]:
        """Nodes of other groups that a group recomputes, as storing and reading takes longer.

        From its other inputs, small tensors, and `_sources`.
        """
        sources = {source for name in group for source in self.flow.inputs[name]}
        taken = self.flow.in_order(sources - {*group})
        there = {name for name in taken if name not in self._in_a_group} | self._sources(taken)
        copies: set[str] = set()
        for name in taken:
            more = None
            if name in self._in_a_group:
                more = self._computed_from(name, there | copies)
            if more is None:
                there.add(name)
            else:
                copies |= more
        return copies

    def _sources(self, taken: Iterable[str]) -> set[str]:
        """Tensors to read instead of ones that are computed from them alone.

        A source exists anyway, as a product does, or replaces two tensors with one.
        """
        ways = [list(self._way_up(name)) for name in taken if name in self._in_a_group]
        counts = Counter(itertools.chain.from_iterable(ways))
        sources: set[str] = set()
        for way in ways:
            farthest_first = reversed(way)
            useful = (
                source
                for source in farthest_first
                if counts[source] > 1 or source not in self._in_a_group
            )
            sources.update(itertools.islice(useful, 1))
        return sources

    def _way_up(self, name: str) -> Iterator[str]:
        """A tensor, its only large input, the only large input of that, and so on."""
        small = self.flow.elements(name) / _SMALL
        for _ in range(_MOST_COPIES):
            yield name
            large = [i for i in self.flow.inputs[name] if self.flow.elements(i) > small]
            if not self._is_cheap(name) or len(large) != 1:
                return
            (name,) = large

    def _computed_from(self, name: str, there: Set[str]) -> set[str] | None:
        """The cheap nodes that compute a tensor from available ones; None if it needs others."""
        small = self.flow.elements(name) / _SMALL
        needed: set[str] = set()
        pending = [name]
        while pending:
            node = pending.pop()
            is_small = node != name and self.flow.elements(node) <= small
            if node in there or node in needed or is_small:
                continue
            needed.add(node)
            if not self._is_cheap(node) or len(needed) > _MOST_COPIES:
                return None
            pending += self.flow.inputs[node]
        return needed

    def _is_cheap(self, name: str) -> bool:
        return name in self._in_a_group and self.flow.graph.by_name[name].op in _CHEAP


# ---- Calls ---------------------------------------------------------------------------------------


def _insert(graph: Body, group: Sequence[str], function: _Function) -> None:
    """Adds the call of a group; nodes with outside consumers pass on its results."""
    nodes = [graph.by_name[name] for name in group]
    inside = {f"^{name}" for name in group}
    every = (name for node in nodes for name in control_inputs_of(node))
    waits = dict.fromkeys(name for name in every if name not in inside)
    inputs, attrs = [*function.arguments, *waits], {**function.call_attrs, _COMPILED: True}
    name, device = f"{group[0]}{_CALL}", nodes[0].device
    call = graph.by_name[graph.add(name, "PartitionedCall", inputs, device=device, **attrs)]
    ports = itertools.count()
    for name, dtypes in function.dtypes_of_results.items():
        node = graph.by_name[name]
        results = [graph.tensor(call, next(ports)) for _ in dtypes]
        graph.set_inputs(node, ())  # The call waits for what it waited for.
        if len(results) > 1:
            graph.become(node, "IdentityN", results, T=dtypes)
        elif SHAPES in node.attr:
            shape = tf.compat.v1.AttrValue(shape=node.attr[SHAPES].list.shape[0])
            graph.become(node, "EnsureShape", results, T=dtypes[0], shape=shape)
        else:
            graph.become(node, "Identity", results, T=dtypes[0])


class _Library:
    """The functions that calls are added for, each once."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._made: dict[bytes, str] = {}

    def call_attrs(self, definition: FunctionDef) -> dict[str, Any]:
        """The attributes of a call of a function; adds it unless an identical one exists."""
        key = definition.SerializeToString(deterministic=True)
        if key not in self._made:
            self._made[key] = self._graph.add_function(definition, "fused")
        called = tf.compat.v1.AttrValue()
        called.func.name = self._made[key]
        signature = definition.signature
        arguments = {"Tin": signature.input_arg, "Tout": signature.output_arg}
        types = {
            attr: [tf.as_dtype(argument.type) for argument in listed]
            for attr, listed in arguments.items()
        }
        return {"f": called, **types}


class _Function:
    """A function that computes the nodes of a group in float32, with new names.

    Attributes:
        arguments: The tensors of the graph that it is called with.
        call_attrs: The attributes of its call.
        dtypes_of_results: The output dtypes of each node with outside consumers.
    """

    def __init__(self, groups: _Groups, number: int, library: _Library) -> None:
        self._known, self._graph = groups.flow.known, groups.flow.graph
        self._library = library
        self._body = Body(tf.compat.v1.GraphDef().library.function.add())
        self.arguments: list[str] = []
        self._spelled: dict[str, str] = {}
        leaving = (name for name in groups.fused[number] if name not in groups.staying)
        results = [name for name in leaving if groups.is_used_outside(name)]
        dtypes: dict[str, list[tf.DType]] = {}
        for name in groups.members[number]:
            dtypes[name] = self._add(self._graph.by_name[name], stored=name in results)
        self.dtypes_of_results = {name: dtypes[name] for name in results}
        for name in results:
            for port, dtype in enumerate(dtypes[name]):
                result = f"result{len(self._body.results)}"
                wide = self._spelled[self._graph.tensor(self._graph.by_name[name], port)]
                tensor = self._cast(wide, _wide(dtype), dtype)
                self._body.add_result(result, dtype.as_datatype_enum, tensor)
        for attr in (_COMPILED, "_noinline"):
            self._body.definition.attr[attr].b = True
        self.call_attrs = library.call_attrs(self._body.definition)

    def _add(self, node: NodeDef, stored: bool = False) -> list[tf.DType]:
        """Adds the ops that compute a node; returns its output dtypes in the graph."""
        signature = self._body.signature(node)
        input_dtypes = _dtypes(node, signature, signature.inputs)
        named = zip(tensor_inputs(node), input_dtypes, strict=True)
        inputs = [self._tensor(name, dtype) for name, dtype in named]
        dtypes = _dtypes(node, signature, signature.outputs)
        made = self._computed(node, inputs)
        for port, dtype in enumerate(dtypes):
            tensor = made if len(dtypes) == 1 else self._body.tensor(self._node(made), port)
            if node.op == "Const":
                tensor = self._cast(tensor, dtype, _wide(dtype))
            if stored and dtype == tf.float16:
                tensor = self._overflowed(tensor)
            self._spelled[self._graph.tensor(node, port)] = tensor
        return dtypes

    def _node(self, tensor: str) -> NodeDef:
        return self._body.by_name[structures.node_name(tensor)]

    def _computed(self, node: NodeDef, inputs: Sequence[str]) -> str:
        """Adds the op of a node with other inputs; returns its first output."""
        if node.op in _CHOOSES:
            return self._chosen(_CHOOSES[node.op], *inputs)
        if node.op == _CROSS_ENTROPY:
            function = _cross_entropy_function(node.attr["Tlabels"].type)
            attrs = self._library.call_attrs(function)
            return self._op("PartitionedCall", inputs, **attrs)
        attrs = {k: v for k, v in node.attr.items() if not k.startswith("_")}
        low = [k for k in _COMPUTED_IN if k in attrs and attrs[k].type in LOW_TYPES]
        return self._op(node.op, inputs, **attrs | dict.fromkeys(low, tf.float32))

    def _overflowed(self, tensor: str) -> str:
        """Replaces values that overflow in float16 with infinity, without rounding the others.

        A Cast to float16 and back would not do: XLA for GPUs removes it
        (`SimplifyFPConversions`).
        """
        limit, infinity = map(self._constant, (_FLOAT16_OVERFLOWS_AT, math.inf))
        size = self._op("Abs", [tensor], T=tf.float32)
        fits = self._op("Less", [size, limit], T=tf.float32)
        infinite = self._op("Mul", [tensor, infinity], T=tf.float32)
        return self._op("SelectV2", [fits, tensor, infinite], T=tf.float32)

    def _chosen(self, comparison: str, one: str, other: str) -> str:
        """Selects by a comparison, propagating NaN."""
        better = self._op(comparison, [one, other], T=tf.float32)
        is_nan = self._op("NotEqual", [one, one], T=tf.float32)
        either = self._op("LogicalOr", [better, is_nan])
        return self._op("SelectV2", [either, one, other], T=tf.float32)

    def _constant(self, value: float) -> str:
        return self._body.constant(self._free_name, value, dtype=tf.float32)

    def _tensor(self, tensor: str, dtype: tf.DType) -> str:
        """The tensor in the function; an argument if the function does not compute it."""
        tensor, name = tensor.removesuffix(":0"), structures.node_name(tensor)
        if tensor not in self._spelled and name in self._known:
            self._add(self._graph.by_name[name])
        if tensor not in self._spelled:
            argument = f"argument{len(self.arguments)}"
            self._body.add_argument(argument, dtype.as_datatype_enum)
            self.arguments.append(tensor)
            self._spelled[tensor] = self._cast(argument, dtype, _wide(dtype))
        return self._spelled[tensor]

    def _cast(self, tensor: str, source: tf.DType, target: tf.DType) -> str:
        if source == target:
            return tensor
        return self._op("Cast", [tensor], SrcT=source, DstT=target)

    def _op(self, op: str, inputs: Sequence[str], **attrs: Any) -> str:
        return self._body.add(self._free_name, op, inputs, **attrs)

    @property
    def _free_name(self) -> str:
        return f"node{len(self._body.nodes)}"


def _wide(dtype: tf.DType) -> tf.DType:
    """The dtype in a function of tensors of a dtype in the graph."""
    return tf.float32 if dtype.name in LOW_PRECISION else dtype


def _dtypes(
    node: NodeDef,
    signature: OpSignature,
    arguments: Iterable[ArgDef],
) -> list[tf.DType]:
    """The dtype of each input or output of a node."""
    dtypes: list[tf.DType] = []
    for argument in arguments:
        count = signature.value(node, argument.number_attr, 1) if argument.number_attr else 1
        dtype = argument.type or signature.value(node, argument.type_attr)
        dtypes += [tf.as_dtype(dtype)] * count
    return dtypes


# XLA's own cross entropy makes a dense tensor of the labels, computes the loss in a pass over
# all classes, and recomputes every exponential for the gradient and for each sum of it.


@functools.cache
def _cross_entropy_function(labels_dtype: int) -> FunctionDef:
    """An unnamed function from float32 logits and labels to losses and logit gradients."""
    function = tf.function(_cross_entropy, autograph=False)
    with tf.Graph().as_default() as graph:
        logits = tf.compat.v1.placeholder(tf.float32, [None, None])
        function(logits, tf.compat.v1.placeholder(labels_dtype, [None]))
    (made,) = graph.as_graph_def().library.function
    made.signature.name = ""
    return made


def _cross_entropy(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Out-of-range labels give NaN, as with XLA's op."""
    top = tf.reduce_max(logits, -1)
    exponentials = tf.exp(logits - top[:, tf.newaxis])
    total = tf.reduce_sum(exponentials, -1)
    is_class = (labels >= 0) & (labels < tf.shape(logits, labels.dtype)[-1])
    nothing = tf.where(is_class, 0.0, math.nan)
    losses = tf.math.log(total) + (top - tf.gather(logits, labels, batch_dims=1)) + nothing
    shares = exponentials * (1.0 / total + nothing)[:, tf.newaxis]
    return losses, shares - tf.one_hot(labels, tf.shape(logits)[-1])
