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
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from typing import Any

import tensorflow as tf

from tfamp.core.dtypes import LOW_PRECISION
from tfamp.graph.editor import (
    FLOAT32_TYPE,
    FLOAT_TYPES,
    LOW_TYPES,
    SHAPES,
    GraphEditor,
    OpSignature,
    attribute,
    control_inputs_of,
    tensor_inputs,
)
from tfamp.graph.functions import has_old_control_flow
from tfamp.planning.options import RewriteOptions
from tfamp.planning.structures import (
    RewritePlan,
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
_FLOAT16_OVERFLOWS_AT = 65520.0  # Halfway from its largest number to the next: ties go to even.
# XLA's take no notice of a NaN in their second operand.
_CHOOSES = {"Maximum": "Greater", "Minimum": "Less"}
_CROSS_ENTROPY = "SparseSoftmaxCrossEntropyWithLogits"
_CALL = "/fused"  # In the name of each call.


def run(graph: GraphEditor, options: RewriteOptions, plan: RewritePlan) -> None:
    """Has XLA compile groups of fusible nodes, in place."""
    fuse(graph)


def fuse(graph: GraphEditor, least: int = _LEAST) -> int:
    """Replaces groups of fusible nodes with calls of compiled functions, in place.

    Nodes of functions, as of loops, are left alone, and so is all of a graph with control flow of
    TensorFlow 1. Returns how many calls there are; each group computes with large tensors in at
    least so many ops.
    """
    if has_old_control_flow(graph):
        return 0
    groups = _Groups(graph, least)
    made: dict[bytes, str] = {}
    bodies = [_Body(groups, number, made) for number in range(len(groups.own))]
    for group, body in zip(groups.own, bodies, strict=True):
        _insert(graph, group, body)
    gone = {name for group in groups.own for name in group} - groups.staying
    graph.drop(gone.difference(*(body.dtypes_of_results for body in bodies)))
    return len(bodies)


def has_fused(graph: tf.Graph) -> bool:
    """Whether a graph has a call that `fuse` has made."""
    ends = (op.name for op in graph.get_operations() if op.type == "PartitionedCall")
    return any(_CALL in name for name in ends)


# ---- Groups --------------------------------------------------------------------------------------


class _Groups:
    """The groups of a graph's nodes that become calls.

    Attributes:
        graph: The graph.
        known: The names of nodes whose values are known when a function is compiled: small
            constants, shapes, and what is computed from them.
        own: The nodes of each group, in the order they run in.
        members: What each group computes, copies of other groups' nodes included, in order.
        staying: The nodes of groups that stay in the graph too.
    """

    def __init__(self, graph: GraphEditor, least: int) -> None:
        self.graph = graph
        for node in graph.of_types("Shape"):
            if self._elements(node.input[0]) < math.inf:
                dtype = tf.as_dtype(attribute(node, "out_type").type or tf.int32)
                shape = tf.make_tensor_proto(graph.shape(node.input[0]), dtype)
                value = tf.compat.v1.AttrValue(tensor=shape)
                graph.become(node, "Const", (), dtype=dtype, value=value)
        for node in graph.of_types("Const"):
            graph.set_inputs(node, ())  # It waits for nothing.
        nodes = graph.by_name
        taken = {name: dict.fromkeys(map(node_name, n.input)) for name, n in nodes.items()}
        self.known: set[str] = set()
        self._places: dict[str, int] = {}
        # The inputs of each node without those that are known, and devices of fusible nodes.
        self._inputs: dict[str, list[str]] = {}
        self._devices: dict[str, str] = {}
        depths: dict[str, int] = {}
        for place, name in enumerate(producers_first(nodes, taken.__getitem__)):
            node = nodes[name]
            if self._is_known(node, taken[name]):
                self.known.add(name)
            self._inputs[name] = [e for e in taken[name] if e in nodes and e not in self.known]
            if self._is_fusible(node):
                self._devices[name] = str(node.device)
            self._places[name] = place
            depths[name] = self._depth(name, depths)
        self._move_to_later_groups(depths)
        self.own = [group for group in self._connected(depths) if self._pays(group, least)]
        self._fused = {name for group in self.own for name in group}
        self.members = [self._in_order({*group, *self._copies(group)}) for group in self.own]
        # For each node the groups that compute it.
        self._computing = defaultdict[str, set[int]](set)
        for number, members in enumerate(self.members):
            for name in members:
                self._computing[name].add(number)
        # A tensor is stored once: who takes it in another shape reshapes it outside.
        self.staying: set[str] = set()
        for name in reversed(self._in_order(self._computing)):
            if nodes[name].op in _RESHAPES and self.is_used_outside(name):
                self.staying.add(name)

    def is_used_outside(self, name: str) -> bool:
        """Whether something takes what a group computes, and not in that group or again."""
        return name in self.graph.kept or any(
            user in self.staying or not self._computing.get(user, _NOWHERE) <= self._computing[name]
            for user in self.graph.consumers[name]
        )

    def _in_order(self, names: Iterable[str]) -> list[str]:
        return sorted(names, key=self._places.__getitem__)

    def _elements(self, tensor: str) -> float:
        """How many elements a tensor has; infinity if the graph does not have its shape."""
        shape = self.graph.shape(tensor)
        return math.inf if shape is None or -1 in shape else math.prod(shape)

    def _is_known(self, node: Any, inputs: Iterable[str]) -> bool:
        if node.op != "Const":
            return node.op in _KNOWN_IF_INPUTS_ARE and self.known.issuperset(inputs)
        dims = node.attr["value"].tensor.tensor_shape.dim
        return math.prod(dim.size for dim in dims) <= _MOST_KNOWN

    def _is_fusible(self, node: Any) -> bool:
        """Whether a node moves values, or computes with floats, of which XLA has every kernel."""
        if node.name in self.known or self._is_rounding(node):
            return False
        if node.op in _COMPARES and self.known.isdisjoint(map(node_name, node.input)):
            return False
        dtypes = {node.attr[name].type for name in _COMPUTED_IN if name in node.attr}
        computes = node.op in _COMPUTES and bool(dtypes) and dtypes <= FLOAT_TYPES
        return computes or node.op in _MOVES

    def _is_rounding(self, node: Any) -> bool:
        """Whether a Cast to a low dtype is cast back at once: it rounds, which XLA would omit."""
        if node.op != "Cast" or node.attr["DstT"].type not in LOW_TYPES:
            return False
        users = (self.graph.by_name[user] for user in self.graph.consumers[node.name])
        return any(u.op == "Cast" and u.attr["DstT"].type == FLOAT32_TYPE for u in users)

    def _depth(self, name: str, depths: Mapping[str, int]) -> int:
        """How often the longest way to a node enters or leaves fusible nodes of one device."""
        here = self._devices.get(name)
        inputs = self._inputs[name]
        return max((depths.get(i, 0) + (here != self._devices.get(i)) for i in inputs), default=0)

    def _move_to_later_groups(self, depths: dict[str, int]) -> None:
        """Gives nodes that only one later group uses its depth."""
        later = defaultdict[str, set[tuple[str | None, int]]](set)
        for name in reversed(self._places):
            here = self._devices.get(name)
            if here is not None and len(later[name]) == 1:
                ((there, depth),) = later[name]
                depths[name] = depth if there == here else depths[name]
            for each in self._inputs[name]:
                later[each].add((here, depths[name]))

    def _connected(self, depths: Mapping[str, int]) -> Iterator[list[str]]:
        """Nodes that can be one call, in the order they run in."""
        linked = defaultdict[str, list[str]](list)
        for name, device in self._devices.items():
            for each in self._inputs[name]:
                if self._devices.get(each) == device and depths[each] == depths[name]:
                    linked[name].append(each)
                    linked[each].append(name)
        seen: set[str] = set()
        for name in self._devices:
            if name not in seen:
                group = reach([name], linked.__getitem__)
                seen.update(group)
                yield self._in_order(group)

    def _pays(self, group: Sequence[str], least: int) -> bool:
        """Whether a call takes less than the ops of a group."""
        nodes = (self.graph.by_name[name] for name in group)
        computing = (node for node in nodes if node.op in _COMPUTES)
        sizes = (max(map(self._elements, (n.name, *tensor_inputs(n)))) for n in computing)
        return sum(size >= _LEAST_ELEMENTS for size in sizes) >= least

    # ---- Recomputation ---------------------------------------------------------------------------

    def _copies(self, group: Sequence[str]) -> set[str]:
        """What a group takes from others and computes faster than it is stored and read.

        From tensors that it takes anyway, from small ones, and from those of `_sources`.
        """
        given = self._in_order({each for name in group for each in self._inputs[name]} - {*group})
        there = {name for name in given if name not in self._fused} | self._sources(given)
        copies: set[str] = set()
        for name in given:
            more = self._computed_from(name, there | copies) if name in self._fused else None
            if more is None:
                there.add(name)
            else:
                copies |= more
        return copies

    def _sources(self, given: Iterable[str]) -> set[str]:
        """What is taken instead of tensors that are computed of it alone.

        It is there anyway, as a product, or two need it: one is stored instead of two.
        """
        ways = [list(self._way_up(name)) for name in given if name in self._fused]
        counts = Counter(itertools.chain.from_iterable(ways))
        sources: set[str] = set()
        for way in ways:
            found = (e for e in reversed(way) if counts[e] > 1 or e not in self._fused)
            sources.update(itertools.islice(found, 1))
        return sources

    def _way_up(self, name: str) -> Iterator[str]:
        """A tensor, what it is computed of if that is only one that is not small, and so on."""
        small = self._elements(name) / _SMALL
        for _ in range(_MOST_COPIES):
            yield name
            large = [each for each in self._inputs[name] if self._elements(each) > small]
            if not self._is_cheap(name) or len(large) != 1:
                return
            (name,) = large

    def _computed_from(self, name: str, there: Set[str]) -> set[str] | None:
        """The nodes that compute a tensor of what is there; None if others or too many would."""
        small = self._elements(name) / _SMALL
        needed: set[str] = set()
        pending = [name]
        while pending:
            each = pending.pop()
            if each in there or each in needed or (each != name and self._elements(each) <= small):
                continue
            needed.add(each)
            if not self._is_cheap(each) or len(needed) > _MOST_COPIES:
                return None
            pending += self._inputs[each]
        return needed

    def _is_cheap(self, name: str) -> bool:
        return name in self._fused and self.graph.by_name[name].op in _CHEAP


# ---- Calls ---------------------------------------------------------------------------------------


def _insert(graph: GraphEditor, group: Sequence[str], body: _Body) -> None:
    """Adds the call of a group; nodes whose results others take pass on what it returns."""
    nodes = [graph.by_name[name] for name in group]
    inside = {f"^{name}" for name in group}
    waits = dict.fromkeys(w for node in nodes for w in control_inputs_of(node) if w not in inside)
    inputs, attrs = [*body.given, *waits], {**body.call_attrs, _COMPILED: True}
    name, device = f"{group[0]}{_CALL}", nodes[0].device
    call = graph.by_name[graph.add(name, "PartitionedCall", inputs, device=device, **attrs)]
    ports = itertools.count()
    for name, dtypes in body.dtypes_of_results.items():
        node = graph.by_name[name]
        given = [graph.tensor(call, next(ports)) for _ in dtypes]
        graph.set_inputs(node, ())  # The call waits for what it waited for.
        if len(given) > 1:
            graph.become(node, "IdentityN", given, T=dtypes)
        elif SHAPES in node.attr:
            shape = tf.compat.v1.AttrValue(shape=node.attr[SHAPES].list.shape[0])
            graph.become(node, "EnsureShape", given, T=dtypes[0], shape=shape)
        else:
            graph.become(node, "Identity", given, T=dtypes[0])


def _call_attrs(graph: GraphEditor, made: dict[bytes, str], function: Any) -> dict[str, Any]:
    """The attributes of a call of a function, which is added if none that was made is like it."""
    key = function.SerializeToString(deterministic=True)
    library = graph.graph.library.function
    if key not in made:
        made[key] = free_name("fused", {each.signature.name for each in library})
        library.add().CopyFrom(function)
        library[-1].signature.name = made[key]
    called = tf.compat.v1.AttrValue()
    called.func.name = made[key]
    taken, given = function.signature.input_arg, function.signature.output_arg
    types = {"Tin": taken, "Tout": given}
    return {"f": called, **{k: [tf.as_dtype(arg.type) for arg in v] for k, v in types.items()}}


class _Body:
    """A function that computes the nodes of a group, in float32. Names in it do not depend on its.

    Attributes:
        given: The tensors of the graph that it is called with.
        call_attrs: The attributes of its call.
        dtypes_of_results: Those of the outputs of each node whose results others take.
    """

    def __init__(self, groups: _Groups, number: int, made: dict[bytes, str]) -> None:
        self._known, self._graph, self._made = groups.known, groups.graph, made
        function = tf.compat.v1.GraphDef().library.function.add()
        self._body = GraphEditor(function)
        self.given: list[str] = []
        self._spelled: dict[str, str] = {}
        own = (name for name in groups.own[number] if name not in groups.staying)
        results = [name for name in own if groups.is_used_outside(name)]
        dtypes: dict[str, list[tf.DType]] = {}
        for name in groups.members[number]:
            dtypes[name] = self._add(self._graph.by_name[name], stored=name in results)
        self.dtypes_of_results = {name: dtypes[name] for name in results}
        for name in results:
            for port, dtype in enumerate(dtypes[name]):
                result = function.signature.output_arg.add(type=dtype.as_datatype_enum)
                result.name = f"result{len(function.ret)}"
                wide = self._spelled[self._graph.tensor(self._graph.by_name[name], port)]
                function.ret[result.name] = self._cast(wide, _wide(dtype), dtype)
        for attr in (_COMPILED, "_noinline"):
            function.attr[attr].b = True
        self.call_attrs = _call_attrs(self._graph, made, function)

    def _add(self, node: Any, stored: bool = False) -> list[tf.DType]:
        """Adds what computes a node; returns the dtypes of its outputs in the graph."""
        own = self._body.signature(node)
        taken = zip(tensor_inputs(node), _dtypes(node, own, own.inputs), strict=True)
        inputs = [self._tensor(name, dtype) for name, dtype in taken]
        dtypes = _dtypes(node, own, own.outputs)
        made = self._computed(node, inputs)
        for port, dtype in enumerate(dtypes):
            tensor = made if len(dtypes) == 1 else self._body.tensor(self._node(made), port)
            if node.op == "Const":
                tensor = self._cast(tensor, dtype, _wide(dtype))
            if stored and dtype == tf.float16:
                tensor = self._overflowed(tensor)
            self._spelled[self._graph.tensor(node, port)] = tensor
        return dtypes

    def _node(self, tensor: str) -> Any:
        return self._body.by_name[node_name(tensor)]

    def _computed(self, node: Any, inputs: Sequence[str]) -> str:
        """The first tensor that a node makes of inputs."""
        if node.op in _CHOOSES:
            return self._chosen(_CHOOSES[node.op], *inputs)
        if node.op == _CROSS_ENTROPY:
            function = _cross_entropy_function(node.attr["Tlabels"].type)
            attrs = _call_attrs(self._graph, self._made, function)
            return self._op("PartitionedCall", inputs, **attrs)
        attrs = {k: v for k, v in node.attr.items() if not k.startswith("_")}
        low = [k for k in _COMPUTED_IN if k in attrs and attrs[k].type in LOW_TYPES]
        return self._op(node.op, inputs, **attrs | dict.fromkeys(low, tf.float32))

    def _overflowed(self, tensor: str) -> str:
        """The values unrounded, and infinite where float16 has none.

        Casts to float16 and back would do the same, but XLA for GPUs removes them
        (`SimplifyFPConversions`).
        """
        limit, infinity = map(self._constant, (_FLOAT16_OVERFLOWS_AT, math.inf))
        size = self._op("Abs", [tensor], T=tf.float32)
        fits = self._op("Less", [size, limit], T=tf.float32)
        infinite = self._op("Mul", [tensor, infinity], T=tf.float32)
        return self._op("SelectV2", [fits, tensor, infinite], T=tf.float32)

    def _chosen(self, comparison: str, one: str, other: str) -> str:
        """The one that compares so with the other, and NaN where either is."""
        better = self._op(comparison, [one, other], T=tf.float32)
        is_nan = self._op("NotEqual", [one, one], T=tf.float32)
        either = self._op("LogicalOr", [better, is_nan])
        return self._op("SelectV2", [either, one, other], T=tf.float32)

    def _constant(self, value: float) -> str:
        return self._body.constant(self._free_name, value, dtype=tf.float32)

    def _tensor(self, tensor: str, dtype: tf.DType) -> str:
        """How a tensor is spelled in the function, which takes it if it does not compute it."""
        tensor, name = tensor.removesuffix(":0"), node_name(tensor)
        if tensor not in self._spelled and name in self._known:
            self._add(self._graph.by_name[name])
        if tensor not in self._spelled:
            given = f"given{len(self.given)}"
            self._body.graph.signature.input_arg.add(name=given, type=dtype.as_datatype_enum)
            self.given.append(tensor)
            self._spelled[tensor] = self._cast(given, dtype, _wide(dtype))
        return self._spelled[tensor]

    def _cast(self, tensor: str, given: tf.DType, dtype: tf.DType) -> str:
        return tensor if given == dtype else self._op("Cast", [tensor], SrcT=given, DstT=dtype)

    def _op(self, op: str, inputs: Sequence[str], **attrs: Any) -> str:
        return self._body.add(self._free_name, op, inputs, **attrs)

    @property
    def _free_name(self) -> str:
        return f"node{len(self._body.nodes)}"


def _wide(dtype: tf.DType) -> tf.DType:
    """The dtype in which a function has what is of a dtype in the graph."""
    return tf.float32 if dtype.name in LOW_PRECISION else dtype


def _dtypes(node: Any, own: OpSignature, arguments: Iterable[Any]) -> list[tf.DType]:
    """The dtype of each input or output of a node."""
    found: list[tf.DType] = []
    for arg in arguments:
        count = own.value(node, arg.number_attr, 1) if arg.number_attr else 1
        found += [tf.as_dtype(arg.type or own.value(node, arg.type_attr))] * count
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
