"""What every pass does to nodes of a GraphDef: their shapes, constants, control inputs, types."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from tfamp.core.dtypes import LOW_PRECISION
from tfamp.graph.functions import calls_in, function_attributes, reached_functions
from tfamp.graph.spelling import SHAPES
from tfamp.planning.structures import LOOPS

FLOAT32_TYPE = tf.float32.as_datatype_enum


LOW_TYPES = {tf.as_dtype(name).as_datatype_enum for name in LOW_PRECISION}
FLOAT_TYPES = LOW_TYPES | {FLOAT32_TYPE}


def attributes_of(nodes: Iterable[Any], function: Any) -> dict[str, Any]:
    """The attributes of nodes, and of arguments where there are some, by name."""
    arguments = enumerate(function.signature.input_arg if function else ())
    known = {arg.name: function.arg_attr[i].attr for i, arg in arguments if i in function.arg_attr}
    return known | {node.name: node.attr for node in nodes}


def dims_of(tensor: str, attrs: Mapping[str, Any]) -> list[int]:
    """The dimensions of a tensor, -1 for one that the graph does not tell; [] for no known rank."""
    name, _, place = tensor.partition(":")
    shapes = attrs[name][SHAPES].list.shape if SHAPES in attrs.get(name, ()) else ()
    # In functions "name:output:0", where only an op with one output has no other "0".
    port = int(place) if place.isdigit() else 0
    if port >= len(shapes) or (":" in place and len(shapes) > 1) or shapes[port].unknown_rank:
        return []
    return [int(dim.size) for dim in shapes[port].dim]


def set_shape(node: Any, dims: Iterable[int | None]) -> None:
    """Says of a node that it makes one tensor, and of which shape."""
    del node.attr[SHAPES].list.shape[:]
    node.attr[SHAPES].list.shape.append(tf.TensorShape(dims).as_proto())


def add_constant(nodes: Any, name: str, values: Any, device: str, dtype: Any = tf.int32) -> Any:
    """Adds integers, mostly a vector, to nodes."""
    constant = nodes.add(name=name, op="Const", device=device)
    constant.attr["dtype"].type = dtype.as_datatype_enum
    constant.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(values, dtype))
    set_shape(constant, np.shape(values))
    return constant


def own_functions(graph: Any, library: Mapping[str, Any]) -> Iterator[tuple[Any, Any, list[Any]]]:
    """Each body and condition with the loops of the graph that run them, if nothing else does.

    Several loops share those of one model where a graph has several signatures.
    """
    groups = defaultdict[tuple[str, ...], list[Any]](list)
    for loop in graph.node:
        if loop.op in LOOPS:
            functions = dict(function_attributes(loop))
            groups[functions.get("body", ""), functions.get("cond", "")].append(loop)
    if not groups:
        return
    reached = reached_functions(library, calls_in(graph.node))
    uses = Counter(calls_in(itertools.chain(graph.node, *(library[n].node_def for n in reached))))
    for names, loops in groups.items():
        if all(name in library and uses[name] == len(loops) for name in names):
            yield library[names[0]], library[names[1]], loops


def become(node: Any, op: str) -> None:
    """Makes a node one of another op, without the attributes of its own."""
    for name in [name for name in node.attr if not name.startswith("_")]:
        del node.attr[name]
    node.op = op


def become_identity(node: Any, dtype: int) -> None:
    """Makes a node hand on its first input."""
    become(node, "Identity")
    node.attr["T"].type = dtype
