"""Constant -> Cast becomes a constant of the dtype it is cast to.

w (Const) -> read (Identity) -> Cast -> MatMul becomes Const -> MatMul: the value is cast when the
graph is written, not each time it runs, and the constant takes half the bytes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tensorflow as tf

from tfamp.core.dtypes import LOW_PRECISION
from tfamp.interop import tf_private
from tfamp.planning.structures import FLOAT32, MAIN_GRAPH


def fold_casts(graph_def: Any, keep: Iterable[str] = ()) -> tuple[Any, frozenset[tuple[str, str]]]:
    """Folds Casts of float32 constants to a low dtype, in functions also.

    A constant that is used in float32 as well keeps its Casts: two copies of it would take more
    bytes than one. A value beyond the range of the dtype becomes infinite, as it does in a Cast.

    Args:
        graph_def: A `tf.compat.v1.GraphDef`; it is not modified.
        keep: Tensors ("x:0") or nodes ("x") that are used from outside the graph.

    Returns:
        A new `tf.compat.v1.GraphDef`, and the Casts it no longer has as (function, name); the
        function is "" for the graph itself.

    Example:
        >>> import tensorflow as tf
        >>> half = tf.function(lambda: tf.cast(tf.constant([1.0, 2.0]), tf.float16))
        >>> graph = half.get_concrete_function().graph.as_graph_def()
        >>> folded, casts = fold_casts(graph, keep=["Identity:0"])
        >>> [node.op for node in folded.node], sorted(casts)
        (['Const', 'Identity'], [('', 'Cast')])
    """
    result = tf.compat.v1.GraphDef()
    result.CopyFrom(graph_def)
    kept = {name.removeprefix("^").partition(":")[0] for name in keep}
    gone = {(MAIN_GRAPH, name) for name in _fold_scope(result.node, kept)}
    for function in result.library.function:
        used = {tensor.partition(":")[0] for tensor in function.ret.values()}
        used |= set(function.control_ret.values())
        name = function.signature.name
        casts = set(_fold_scope(function.node_def, used))
        _spell_outputs(function, casts)
        gone |= {(name, cast) for cast in casts}
    return result, frozenset(gone)


@dataclass(slots=True)
class _Uses:
    """A scope's nodes, and who uses each."""

    nodes: Mapping[str, Any]
    kept: set[str]
    consumers: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))

    def find(self) -> None:
        for node in self.nodes.values():
            for name in node.input:
                self.consumers[name.removeprefix("^").partition(":")[0]].append(node.name)

    def way_to_casts(self, constant: str) -> tuple[list[str], list[str]] | None:
        """The Identities behind a constant and the Casts behind them, if there is nothing else."""
        passing, casts, pending = [], [], [constant]
        while pending:
            name = pending.pop()
            if name in self.kept:
                return None
            for each in self.consumers[name]:
                node = self.nodes[each]
                if len(node.input) != 1 or node.input[0].startswith("^"):
                    return None
                if node.op == "Identity":
                    passing.append(each)
                    pending.append(each)
                elif node.op == "Cast" and _low_target(node) is not None:
                    casts.append(each)
                else:
                    return None
        return passing, casts


def _fold_scope(nodes: Any, kept: set[str]) -> Iterator[str]:
    """Folds in place; gives the names of the Casts that are gone."""
    uses = _Uses({node.name: node for node in nodes}, kept)
    uses.find()
    removed: set[str] = set()
    for name, node in uses.nodes.items():
        if node.op != "Const" or tf_private.dtype_name(node.attr["dtype"].type) != FLOAT32:
            continue
        way = uses.way_to_casts(name)
        if way is None or not way[1]:
            continue
        passing, casts = way
        _fold(uses.nodes, name, casts)
        removed |= {name, *passing}
        yield from casts
    if not removed:
        return
    left = [node for node in nodes if node.name not in removed]
    for node in left:
        _forget_places(node, removed)
    copies = [tf.compat.v1.NodeDef.FromString(node.SerializeToString()) for node in left]
    del nodes[:]
    nodes.extend(copies)


def _fold(nodes: Mapping[str, Any], constant: str, casts: list[str]) -> None:
    """Makes the first Cast the constant, and the others its copies."""
    values: dict[str, str] = {}
    value = tf.make_ndarray(nodes[constant].attr["value"].tensor)
    for name in sorted(casts):
        node = nodes[name]
        low = _low_target(node)
        if low is None:
            continue
        attr = nodes[constant].attr
        if low in values:
            suffix = ":output:0" if ":" in node.input[0] else ""
            node.op = "Identity"
            node.input[:] = [f"{values[low]}{suffix}"]
            _set_attributes(node, {"T": tf_private.dtype_number(low)})
            continue
        values[low] = name
        node.op, node.device = "Const", nodes[constant].device
        del node.input[:]
        _set_attributes(node, {"dtype": tf_private.dtype_number(low)})
        with np.errstate(over="ignore"):
            content = value.astype(tf.as_dtype(low).as_numpy_dtype)
        tensor = node.attr["value"].tensor
        tensor.dtype = tf_private.dtype_number(low)
        tensor.tensor_shape.CopyFrom(attr["value"].tensor.tensor_shape)
        # Not make_tensor_proto's half_val, which takes up to four bytes for a number of two.
        tensor.tensor_content = content.tobytes()


def _spell_outputs(function: Any, casts: set[str]) -> None:
    """A function spells an output by its name: a Cast's is "y", that of what it became "output"."""
    spelled = {f"{name}:y:0": f"{name}:output:0" for name in casts}
    for node in function.node_def if casts else ():
        node.input[:] = [spelled.get(name, name) for name in node.input]
    for name, tensor in list(function.ret.items()):
        function.ret[name] = spelled.get(tensor, tensor)


def _set_attributes(node: Any, types: Mapping[str, int]) -> None:
    kept = {name: value for name, value in node.attr.items() if name.startswith("_")}
    copies = {
        name: type(value).FromString(value.SerializeToString()) for name, value in kept.items()
    }
    node.attr.clear()
    for name, value in copies.items():
        node.attr[name].CopyFrom(value)
    for name, number in types.items():
        node.attr[name].type = number


def _low_target(node: Any) -> str | None:
    target = tf_private.dtype_name(node.attr["DstT"].type)
    return target if target in LOW_PRECISION else None


def _forget_places(node: Any, removed: set[str]) -> None:
    """Takes out the wish to be on the device of a node that is no longer there."""
    if "_class" not in node.attr:
        return
    places = [
        each
        for each in node.attr["_class"].list.s
        if each.decode().removeprefix("loc:@") not in removed
    ]
    if places:
        node.attr["_class"].list.s[:] = places
    else:
        del node.attr["_class"]
