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
from tfamp.graph.apply import cast_node, connect
from tfamp.graph.editor import PYTHON
from tfamp.graph.functions import bodies, copied
from tfamp.planning.structures import GraphIndex, free_name

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
    result = copied(graph_def)
    nodes = itertools.chain.from_iterable(body for _, body, _ in bodies(result))
    for number, node in enumerate(nodes):
        if all(seed in node.attr for seed in _SEEDS) and not any(node.attr[s].i for s in _SEEDS):
            node.attr["seed"].i = 1
            node.attr["seed2"].i = number + 1
    return result


def retyped(graph_def: Any, indexes: Sequence[GraphIndex], dtype: str) -> Any:
    """Returns a copy of a graph that computes in another dtype where it computes in a low one.

    Changed are the scopes that have an index. Names are the same, Casts come in addition.
    """
    result = copied(graph_def)
    by_scope = {index.scope: index for index in indexes}
    for scope, nodes, function in bodies(result):
        if scope in by_scope:
            _change(by_scope[scope], nodes, function, tf.as_dtype(dtype).as_datatype_enum)
    return result


def _change(index: GraphIndex, nodes: Any, function: Any, dtype: int) -> None:
    """Changes one scope."""
    by_name = {node.name: node for node in nodes}
    keeping = set(_keeping(index))
    for name, node in by_name.items():
        if name not in keeping:
            _retype_node(node, dtype)
    if function is not None:
        for arg in (*function.signature.input_arg, *function.signature.output_arg):
            arg.type = dtype if arg.type in _LOW else arg.type
    casts: dict[tuple[str, int], str] = {}
    for edge in index.edges:
        own = tf.as_dtype(index.slots[edge.source].dtype).as_datatype_enum
        target = index.node_of(edge.target)
        made = own if index.node_of(edge.source).name in keeping else dtype
        wanted = own if target.name in keeping else dtype
        if own not in _LOW or made == wanted:
            continue
        if (edge.tensor, wanted) not in casts:
            name = free_name(f"tfamp_retyped/cast_{len(casts)}", by_name)
            nodes.append(cast_node(name, edge.tensor, made, wanted))
            casts[edge.tensor, wanted] = name
        connect(function, by_name, casts[edge.tensor, wanted], [(target.name, edge.input)])


def _keeping(index: GraphIndex) -> Iterator[str]:
    """Names of the nodes that keep their dtypes."""
    takes_resource = {
        index.slots[edge.target].node
        for edge in index.edges
        if index.slots[edge.target].dtype == "resource"
    }
    for position, node in enumerate(index.nodes):
        variable = position in takes_resource and not node.calls
        bits = node.op in PYTHON or node.op in ("Bitcast", "VarHandleOp")
        if variable or bits or (_RANDOM.search(node.op) and not node.calls):
            yield node.name


def _retype_node(node: Any, dtype: int) -> None:
    for name, value in node.attr.items():
        if name.startswith("_"):
            continue
        kind = value.WhichOneof("value")
        if kind == "type" and value.type in _LOW:
            value.type = dtype
        elif kind == "list":
            types = value.list.type
            types[:] = [dtype if each in _LOW else each for each in types]
        elif kind == "tensor" and value.tensor.dtype in _LOW:
            _retype_value(node, value.tensor, dtype)


def _retype_value(node: Any, tensor: Any, dtype: int) -> None:
    rounded = tf.make_ndarray(tensor)
    if UNROUNDED in node.attr:
        rounded = tf.make_ndarray(node.attr[UNROUNDED].tensor)
    with np.errstate(over="ignore"):
        values = rounded.astype(tf.as_dtype(dtype).as_numpy_dtype)
    tensor.CopyFrom(tf.make_tensor_proto(values))
