"""A graph with another dtype in the place of its low ones: node for node the same, so comparable.

What has to keep its dtype does: variables that are themselves low, and random numbers, which would
be others in another dtype. Casts come between these and the rest.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfamp.core.dtypes import LOW_PRECISION
from tfamp.graph.op_signatures import PYTHON
from tfamp.planning.structures import MAIN_GRAPH, RESULT, Edge, GraphIndex

# The attribute with the value of a constant before it was rounded; see `unrounded_constants`.
UNROUNDED = "_tfamp_unrounded"
_LOW = {tf.as_dtype(name).as_datatype_enum for name in LOW_PRECISION}
_RANDOM = re.compile(r"Random|(Uniform|Normal|Multinomial)(Int|V2)?$")
_SEEDS = ("seed", "seed2")


def low_dtypes(indexes: Sequence[GraphIndex]) -> list[str]:
    """Returns the low dtypes in a graph, the most frequent first."""
    found = [slot.dtype for index in indexes for slot in index.slots if slot.dtype in LOW_PRECISION]
    return sorted(set(found), key=found.count, reverse=True)


def seeded(graph_def: Any) -> Any:
    """Returns a copy of a graph whose random ops give the same numbers in every run."""
    result = tf.compat.v1.GraphDef()
    result.CopyFrom(graph_def)
    bodies = [result.node, *(function.node_def for function in result.library.function)]
    for number, node in enumerate(itertools.chain.from_iterable(bodies)):
        if all(seed in node.attr for seed in _SEEDS) and not any(node.attr[s].i for s in _SEEDS):
            node.attr["seed"].i = 1
            node.attr["seed2"].i = number + 1
    return result


def retyped(graph_def: Any, indexes: Sequence[GraphIndex], dtype: str) -> Any:
    """Returns a copy of a graph that computes in another dtype where it computes in a low one.

    Args:
        graph_def: A `tf.compat.v1.GraphDef`; it is not modified.
        indexes: Indexes of the graph and the functions to change.
        dtype: The dtype to compute in, such as "float32".

    Returns:
        The copy; names are the same, Casts come in addition.
    """
    result = tf.compat.v1.GraphDef()
    result.CopyFrom(graph_def)
    functions = {function.signature.name: function for function in result.library.function}
    number = tf.as_dtype(dtype).as_datatype_enum
    for index in indexes:
        function = None if index.scope == MAIN_GRAPH else functions[index.scope]
        _Scope(index, result.node if function is None else function.node_def, function).change(
            number
        )
    return result


class _Scope:
    """One scope to change."""

    def __init__(self, index: GraphIndex, nodes: Any, function: Any) -> None:
        self._index = index
        self._nodes = nodes
        self._function = function
        self._by_name = {node.name: node for node in nodes}
        self._keeping = set(_keeping(index))

    def change(self, dtype: int) -> None:
        for node in list(self._nodes):
            if node.name not in self._keeping:
                _retype_node(node, dtype)
        if self._function is not None:
            signature = self._function.signature
            for arg in (*signature.input_arg, *signature.output_arg):
                arg.type = dtype if arg.type in _LOW else arg.type
        casts: dict[tuple[str, int], str] = {}
        for edge in self._index.edges:
            self._cast(edge, dtype, casts)

    def _cast(self, edge: Edge, dtype: int, casts: dict[tuple[str, int], str]) -> None:
        own = tf.as_dtype(self._index.slots[edge.source].dtype).as_datatype_enum
        source, target = self._index.node_of(edge.source), self._index.node_of(edge.target)
        made = own if source.name in self._keeping else dtype
        wanted = own if target.name in self._keeping else dtype
        if own not in _LOW or made == wanted:
            return
        name = casts.get((edge.tensor, wanted))
        if name is None:
            name = self._new_cast(edge.tensor, made, wanted, len(casts))
            casts[edge.tensor, wanted] = name
        if target.op == RESULT:
            self._function.ret[target.name.removeprefix(RESULT)] = f"{name}:y:0"
        else:
            inputs = self._by_name[target.name].input
            inputs[edge.input] = name if self._function is None else f"{name}:y:0"

    def _new_cast(self, tensor: str, made: int, wanted: int, number: int) -> str:
        name = f"tfamp_retyped/cast_{number}"
        while name in self._by_name:
            name += "_"
        node = self._nodes.add(name=name, op="Cast", input=[tensor])
        node.attr["SrcT"].type = made
        node.attr["DstT"].type = wanted
        self._by_name[name] = node
        return name


def _keeping(index: GraphIndex) -> Iterator[str]:
    """Names of the nodes that keep their dtypes."""
    takes_resource = {
        index.slots[edge.target].node
        for edge in index.edges
        if index.slots[edge.target].dtype == "resource"
    }
    for position, node in enumerate(index.nodes):
        variable = position in takes_resource and not node.calls_function
        bits = node.op in PYTHON or node.op in ("Bitcast", "VarHandleOp")
        if variable or bits or (_RANDOM.search(node.op) and not node.calls_function):
            yield node.name


def _retype_node(node: Any, dtype: int) -> None:
    for name, value in node.attr.items():
        if name.startswith("_"):
            continue
        kind = value.WhichOneof("value")
        if kind == "type" and value.type in _LOW:
            value.type = dtype
        elif kind == "list":
            for i, each in enumerate(value.list.type):
                if each in _LOW:
                    value.list.type[i] = dtype
        elif kind == "tensor" and value.tensor.dtype in _LOW:
            _retype_value(node, value.tensor, dtype)


def _retype_value(node: Any, tensor: Any, dtype: int) -> None:
    rounded = tf.make_ndarray(tensor)
    if UNROUNDED in node.attr:
        rounded = tf.make_ndarray(node.attr[UNROUNDED].tensor)
    with np.errstate(over="ignore"):
        values = rounded.astype(tf.as_dtype(dtype).as_numpy_dtype)
    tensor.CopyFrom(tf.make_tensor_proto(values))
