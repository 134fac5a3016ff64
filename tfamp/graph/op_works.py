"""What ops of a graph do, as works that a machine can be timed with; and the times of these.

A work is a node without its name on inputs of the shapes it has in the graph. Inputs that are
constants of the graph, or shapes, have their values. Only ops without state are run: none that
takes a resource, draws random numbers or calls a function.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from tfamp.core.dtypes import FLOAT_DTYPES
from tfamp.graph.apply import cast_node, change_dtype
from tfamp.graph.functions import bodies
from tfamp.graph.transforms import Sums
from tfamp.interop import tf_private
from tfamp.interop.tf_private import device_kind_of
from tfamp.machine.op_times import measuring_is_off, op_times
from tfamp.machine.op_timing import Given, OpWork, Turns
from tfamp.planning.cost import FREE_OPS, ScopeCosts, bytes_of, counted_shape, estimate
from tfamp.planning.decision import Request
from tfamp.planning.measured_costs import MeasuredTimes, elements_of
from tfamp.planning.structures import (
    ARGUMENT,
    FLOAT32,
    RESULT,
    GraphIndex,
    Retype,
    Tensor,
    op_types,
)

# No more than this is allocated to time an op.
MOST_BYTES = 1 << 30
# Of a constant up to so many elements count as values, of more only the shape.
_MOST_VALUES = 1024
# Ops whose integers are data: with zeros they take as long as with others.
_TAKES_ZEROS = op_types("""
    Gather GatherNd GatherV2 OneHot SparseSoftmaxCrossEntropyWithLogits UnsortedSegmentSum
""")
_INTEGERS = ("int32", "int64")
_DTYPES = frozenset({*FLOAT_DTYPES, *_INTEGERS, "bool", "int8", "uint8"})
# Whose input of unknown rank, at this place, is what cuDNN keeps from the forward pass: nothing.
_RESERVED = {"FusedBatchNormGradV3": 5}
# On CPUs Grappler makes a bias that only the product behind it takes part of the product, and an
# activation that only the bias takes. So they take next to nothing if all have one dtype.
_PRODUCTS = op_types("Conv2D DepthwiseConv2dNative MatMul")
_BIASES = op_types("Add AddV2 BiasAdd")
_ACTIVATIONS = op_types("Elu LeakyRelu Relu Relu6 Sigmoid Tanh")
_NO_TIME = FREE_OPS | {ARGUMENT, RESULT, "Cast"}


def measured_times(
    graph_def: Any, indexes: Sequence[GraphIndex], request: Request, sums: Sums
) -> MeasuredTimes | None:
    """Returns the times of what is in a graph, measured before or now; None if there are none.

    Args:
        graph_def: The graph.
        indexes: Its index and those of its functions.
        request: What is asked.
        sums: Nodes that are sums in low precision only, as they are in float32.
    """
    if measuring_is_off():
        return None
    found = _Found()
    for number, (scope, nodes, _) in enumerate(_indexed(graph_def, indexes)):
        index = indexes[number]
        originals = {name: node for (place, name), node in sums.items() if place == scope}
        by_name = {node.name: node for node in nodes}
        _Scope(index, by_name, originals, request).add_to(found, number)
    return found.times(request.measure_seconds)


def _indexed(graph_def: Any, indexes: Sequence[GraphIndex]) -> Iterator[tuple[str, Any, Any]]:
    scopes = {index.scope for index in indexes}
    return (body for body in bodies(graph_def) if body[0] in scopes)


@dataclass(slots=True)
class _Weight:
    """How much of a graph's time depends on some works.

    Attributes:
        decides: Whether they tell what is converted.
        once: About how many seconds they take once.
        all: The same for all nodes that they are of.
    """

    decides: bool = False
    once: float = 0.0
    all: float = 0.0

    def add(self, decides: bool, seconds: float) -> None:
        self.decides |= decides
        self.once = max(self.once, seconds)
        self.all += seconds


class _Found:
    """The works of a graph and its functions: one or, where an op may be low, two for each."""

    def __init__(self) -> None:
        self._nodes: dict[tuple[int, int], tuple[OpWork, ...]] = {}
        self._casts: dict[int, tuple[OpWork, ...]] = {}
        self._weights: dict[tuple[OpWork, ...], _Weight] = defaultdict(_Weight)
        self.fused: set[tuple[int, int]] = set()

    def add_node(
        self, place: tuple[int, int], works: tuple[OpWork, ...], decides: bool, seconds: float
    ) -> None:
        self._nodes[place] = works
        self._weights[works].add(decides, seconds)

    def add_cast(self, elements: int, works: tuple[OpWork, ...], seconds: float) -> None:
        self._casts[elements] = works
        self._weights[works].add(True, seconds)

    def times(self, seconds: float) -> MeasuredTimes | None:
        """Returns their times, those known before and those measured in so many seconds."""
        ranked = sorted(self._weights.items(), key=lambda pair: (not pair[1].decides, -pair[1].all))
        known = op_times([Turns(works, weight.once) for works, weight in ranked], seconds)
        nodes = {
            place: (known[works[0]], known[works[-1]])
            for place, works in self._nodes.items()
            if all(work in known for work in works)
        }
        casts = {
            elements: (known[there] + known[back]) / 2
            for elements, (there, back) in self._casts.items()
            if there in known and back in known
        }
        return MeasuredTimes(nodes, casts, self.fused) if nodes or casts else None


class _Scope:
    """A graph or a function, with what its nodes take by estimate."""

    def __init__(
        self,
        index: GraphIndex,
        nodes: Mapping[str, Any],
        originals: Mapping[str, Any],
        request: Request,
    ) -> None:
        self._index, self._nodes, self._originals = index, nodes, originals
        self._request = request
        self._costs: ScopeCosts = estimate(index, request.profile, request.dtype, request.cached)
        # For each node its inputs in order: the tensor, and the slot with its dtype here.
        self._inputs: list[dict[int, tuple[Tensor, int]]] = [{} for _ in index.nodes]
        for edge in index.edges:
            target = index.slots[edge.target].node
            self._inputs[target][edge.input] = index.tensor(edge), edge.target
        self._uses = Counter(index.tensor(edge) for edge in index.edges)

    def add_to(self, found: _Found, number: int) -> None:
        """Adds the works of all nodes and Casts that can be timed."""
        index, colors = self._index, self._request.colors
        for position, node in enumerate(index.nodes):
            low = [slot for slot in node.slots if index.slots[slot].can_be_low]
            if self._device(position) == "cpu" and self._is_fused(position):
                found.fused.add((number, position))
                continue
            if not self._can_be_timed(position) or len(low) > 1:
                continue
            decides = bool(low) and colors.get(node.op) in ("allow", "infer", "clear")
            works = self._works(position, low if decides else ())
            if works:
                seconds = self._costs.node(index, position, ())
                found.add_node((number, position), works, decides, seconds)
        for tensor in self._crossing():
            seconds = self._costs.casts.get(tensor, 0.0)
            elements = elements_of(index, tensor)
            if seconds and 0 < elements <= MOST_BYTES // 6:
                found.add_cast(elements, self._cast_works(elements), seconds)

    def _is_fused(self, position: int) -> bool:
        op = self._index.nodes[position].op
        if op not in _BIASES | _ACTIVATIONS:
            return False
        before = self._inputs[position][0][0]
        if self._uses[before] > 1:
            return False
        if op in _ACTIVATIONS:
            return self._index.nodes[before[0]].op in _BIASES and self._is_fused(before[0])
        bias = self._index.shapes.get(self._inputs[position][1][0], ())
        return self._index.nodes[before[0]].op in _PRODUCTS and len(bias) == 1

    def _can_be_timed(self, position: int) -> bool:
        node, index = self._index.nodes[position], self._index
        if node.op in _NO_TIME or node.calls or node.uses_references:
            return False
        definition = tf_private.op_definition(node.op)
        dtypes = {index.slots[slot].dtype for slot in node.slots}
        return (
            definition is not None
            and not definition.is_stateful
            and dtypes <= _DTYPES
            and not dtypes.isdisjoint(FLOAT_DTYPES)
            and self._bytes(position) <= MOST_BYTES
        )

    def _bytes(self, position: int) -> int:
        """What a node reads and writes, as far as the graph tells."""
        slots = self._index.nodes[position].slots
        widest = max(bytes_of(self._index.slots[slot].dtype) for slot in slots)
        taken = [tensor for tensor, _ in self._inputs[position].values()]
        made = [tensor for tensor in self._index.shapes if tensor[0] == position]
        return widest * sum(elements_of(self._index, tensor) for tensor in (*taken, *made))

    def _device(self, position: int) -> str:
        return device_kind_of(self._index.nodes[position].device) or self._request.device

    def _works(self, position: int, low: Sequence[int]) -> tuple[OpWork, ...]:
        """A node as it is, and as it is with these slots low; nothing if it cannot be told."""
        name = self._index.nodes[position].name
        node = self._nodes[name]
        inputs = self._given(position, ())
        if inputs is None:
            return ()
        before = self._originals.get(name, node)
        taken = sum(not each.startswith("^") for each in before.input)
        works = [OpWork(_bare(before), inputs[:taken], self._device(position))]
        if low:
            converted = type(node)()
            converted.CopyFrom(node)
            for slot in low:
                place = self._index.slots[slot]
                retype = Retype(name, place.attr, place.index)
                change_dtype(converted, retype, self._request.dtype)
            inputs = self._given(position, low) or ()
            works.append(OpWork(_bare(converted), inputs, self._device(position)))
        return tuple(works)

    def _given(self, position: int, low: Sequence[int]) -> tuple[Given, ...] | None:
        """What a node takes with these slots low; None if the graph does not tell it."""
        op, given = self._index.nodes[position].op, []
        for number, (tensor, slot) in sorted(self._inputs[position].items()):
            dtype = self._request.dtype if slot in low else self._index.slots[slot].dtype
            value, shape = self._value(tensor), self._index.shapes.get(tensor)
            if value is not None:
                given.append(Given(dtype, value.shape, _serialized(tf.make_tensor_proto(value))))
            elif shape is not None and (dtype not in _INTEGERS or op in _TAKES_ZEROS):
                given.append(Given(dtype, counted_shape(shape)))
            elif _RESERVED.get(op) == number:
                given.append(Given(dtype, (0,)))
            else:
                return None
        return tuple(given)

    def _value(self, tensor: Tensor) -> Any:
        """The value of a small constant, or of what is computed of shapes; None of others."""
        position, port = tensor
        node, op = self._index.nodes[position], self._index.nodes[position].op
        sources = [source for _, (source, _) in sorted(self._inputs[position].items())]
        if op == "Const":
            value = self._nodes[node.name].attr["value"].tensor
            count = math.prod(dim.size for dim in value.tensor_shape.dim)
            return tf.make_ndarray(value) if count <= _MOST_VALUES else None
        if op in ("Identity", "StopGradient"):
            return self._value(sources[0])
        if op in ("Shape", "ShapeN"):
            shape = self._index.shapes.get(sources[port])
            return None if shape is None else np.array(counted_shape(shape), np.int32)
        values = [self._value(source) for source in sources] if op in _FOLDED else [None]
        if any(value is None for value in values):
            return None
        return _FOLDED[op](self._nodes[node.name].attr, *values)[port]

    def _crossing(self) -> dict[Tensor, None]:
        """Tensors of float32 that may need a Cast, of what the device has that most nodes have."""
        index = self._index
        return {
            index.tensor(edge): None
            for edge in index.edges
            if index.slots[edge.source].dtype == FLOAT32
            and (index.slots[edge.source].can_be_low or index.slots[edge.target].can_be_low)
            and self._device(index.slots[edge.source].node) == self._request.device
        }

    def _cast_works(self, elements: int) -> tuple[OpWork, ...]:
        numbers = [tf_private.dtype_number(each) for each in (FLOAT32, self._request.dtype)]
        return tuple(
            OpWork(
                _bare(cast_node("", "", source, target)),
                (Given(tf_private.dtype_name(source), (elements,)),),
                self._request.device,
            )
            for source, target in (numbers, numbers[::-1])
        )


def _stretched(left: Any, right: Any) -> tuple[Any, Any]:
    """The dimensions along which either of two shapes is repeated to fit the other."""
    rank = max(len(left), len(right))
    padded = [np.concatenate([np.ones(rank - len(each), int), each]) for each in (left, right)]
    differ = not np.array_equal(left, right)
    first, second = (np.flatnonzero((each == 1) & differ) for each in padded)
    return np.int32(first), np.int32(second)


def _sliced(attr: Any, value: Any, begin: Any, end: Any, strides: Any) -> Sequence[Any]:
    """A part of a vector; None for what slices otherwise."""
    if value.ndim != 1 or begin.size != 1 or attr["ellipsis_mask"].i or attr["new_axis_mask"].i:
        return [None]
    if attr["shrink_axis_mask"].i:
        return (value[begin[0]],)
    first = None if attr["begin_mask"].i else begin[0]
    last = None if attr["end_mask"].i else end[0]
    return (value[first : last : strides[0]],)


# What is computed of shapes: op type -> its outputs, of its attributes and its inputs.
_FOLDED: dict[str, Callable[..., Sequence[Any]]] = {
    "BroadcastGradientArgs": lambda attr, *shapes: _stretched(*shapes),
    "InvertPermutation": lambda attr, order: (np.argsort(order).astype(order.dtype),),
    "StridedSlice": _sliced,
}


def _bare(node: Any) -> bytes:
    """A node with nothing but what it computes: equal for all that compute the same."""
    bare = type(node)(op=node.op)
    for name in node.attr:
        if not name.startswith("_"):
            bare.attr[name].CopyFrom(node.attr[name])
    return _serialized(bare)


def _serialized(message: Any) -> bytes:
    data: bytes = message.SerializeToString(deterministic=True)
    return data
