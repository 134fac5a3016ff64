"""Constants of a frozen graph are stored as they are cast, and cast before the loops they enter.

w (Const) -> read (Identity) -> Cast -> MatMul becomes Const -> MatMul: the value is cast when the
graph is written, not each time it runs, and the constant takes half the bytes.
w -> While(body: w -> Cast -> MatMul) becomes w -> Cast -> While(body: w -> MatMul).
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence, Set
from typing import Any

import numpy as np
import tensorflow as tf

from tfamp.graph.apply import cast_node
from tfamp.graph.editor import (
    FLOAT32_TYPE,
    LOW_TYPES,
    become,
    become_identity,
    first_output,
    renamed_output,
    tensor_inputs,
)
from tfamp.graph.functions import bodies, copied, library_of, replace_nodes, respell
from tfamp.graph.loop_edits import copies_in, own_functions
from tfamp.planning.structures import node_name, reach


def cast_before_loops(graph_def: Any) -> tuple[Any, frozenset[tuple[str, str]]]:
    """Takes Casts of loop-invariant float32 arguments out of the loops of a graph.

    Only where the loop does nothing else with the argument, and nothing uses what it becomes. Loops
    in functions stay.

    Returns:
        A new `tf.compat.v1.GraphDef`, and the Casts that loops no longer have as (function, name).
    """
    result = copied(graph_def)
    library = library_of(result)
    used = {name.removeprefix("^") for node in result.node for name in node.input}
    gone: set[tuple[str, str]] = set()
    for body, condition, loops in own_functions(result, library):
        for i, number in enumerate(list(loops[0].attr["T"].list.type)):
            outputs = {loop.name if i == 0 else f"{loop.name}:{i}" for loop in loops}
            if number != FLOAT32_TYPE or outputs & used:
                continue
            users = _casting_users(body, condition, i)
            casts = [node for node in users if node.op == "Cast"]
            if casts:
                gone |= {(body.signature.name, node.name) for node in casts}
                low = int(casts[0].attr["DstT"].type)
                _convert_body(body, condition, i, users, low)
                for loop in loops:
                    _cast_before(result, loop, i, low)
    return result, frozenset(gone)


def _casting_users(body: Any, condition: Any, i: int) -> list[Any]:
    """The nodes that take a body's argument, if it is not changed, and only cast to one dtype."""
    tested = condition.signature.input_arg[i].name
    if tested in itertools.chain(condition.ret.values(), *(n.input for n in condition.node_def)):
        return []
    same = set(copies_in(body, body.signature.input_arg[i].name))
    users = [node for node in body.node_def if not same.isdisjoint(node.input)]
    results = [arg.name for arg in body.signature.output_arg]
    returned = [name for name in results if body.ret[name] in same]
    dtypes = {node.attr["DstT"].type for node in users if node.op == "Cast"}
    unchanged = returned == [results[i]] and all(map(_only_casts, users))
    return users if len(dtypes) == 1 and unchanged else []


def _convert_body(body: Any, condition: Any, i: int, users: Sequence[Any], low: int) -> None:
    """Makes an argument of a loop's functions low."""
    respell(body, renamed_output((n.name for n in users if n.op == "Cast"), "y", "output"))
    for node in users:
        become_identity(node, low)
    body.signature.output_arg[i].type = low
    for function in (body, condition):
        function.signature.input_arg[i].type = low


def _cast_before(graph: Any, loop: Any, i: int, low: int) -> None:
    name, types = f"{loop.name}/{i}-CastBefore", loop.attr["T"].list.type
    graph.node.append(cast_node(name, loop.input[i], types[i], low, loop.device))
    types[i] = low
    loop.input[i] = name


def fold_casts(graph_def: Any, keep: Iterable[str] = ()) -> tuple[Any, frozenset[tuple[str, str]]]:
    """Folds Casts of float32 constants to a low dtype, in functions also.

    A constant that is used in float32 as well keeps its Casts: two copies of it would take more
    bytes than one. So does one that is used from outside, among the tensors or nodes to keep. A
    value beyond the range of the dtype becomes infinite, as it does in a Cast.

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
    result = copied(graph_def)
    gone: set[tuple[str, str]] = set()
    for scope, nodes, function in bodies(result):
        if function is not None:
            keep = [*function.ret.values(), *function.control_ret.values()]
        casts = _fold_scope(nodes, set(map(node_name, keep)))
        if function is not None:
            # A Cast's output is "y", that of what it became "output".
            respell(
                function,
                renamed_output(casts, "y", "output"),
            )
        gone |= {(scope, name) for name in casts}
    return result, frozenset(gone)


def _fold_scope(nodes: Any, kept: Set[str]) -> list[str]:
    """Folds in place; returns the names of the Casts that are gone."""
    consumers = defaultdict[str, list[Any]](list)
    for node in nodes:
        for name in node.input:
            consumers[node_name(name)].append(node)

    def identities(name: str) -> Iterator[str]:
        return (node.name for node in consumers[name] if node.op == "Identity")

    gone: list[str] = []
    removed: set[str] = set()
    for constant in nodes:
        if constant.op != "Const" or constant.attr["dtype"].type != FLOAT32_TYPE:
            continue
        passing = reach([str(constant.name)], identities)
        users = [node for each in passing for node in consumers[each]]
        casts = sorted((n for n in users if n.op == "Cast"), key=lambda n: n.name)
        if casts and kept.isdisjoint(passing) and all(map(_only_casts, users)):
            stored_as(constant, casts)
            removed.update(passing)
            gone += [node.name for node in casts]
    if removed:
        replace_nodes(nodes, (node for node in nodes if node.name not in removed))
        places = {f"loc:@{name}".encode() for name in removed}
        for node in nodes:
            _forget_places(node, places)
    return gone


def _only_casts(node: Any) -> bool:
    """Whether a node does nothing but pass a constant on or cast it to a low dtype."""
    casts = node.op == "Cast" and node.attr["DstT"].type in LOW_TYPES
    alone = len(node.input) == 1 == len(tensor_inputs(node))
    return alone and (casts or node.op == "Identity")


def stored_as(constant: Any, casts: Iterable[Any], limit: float = math.inf) -> None:
    """Makes the first Cast to a dtype the constant, and the others its copies.

    Finite values of a larger magnitude than `limit` become it.
    """
    values: dict[int, str] = {}
    value = constant.attr["value"].tensor
    for node in casts:
        low = int(node.attr["DstT"].type)
        if low in values:
            node.input[:] = [first_output(values[low], ":" in node.input[0])]
            become_identity(node, low)
            continue
        values[low] = node.name
        become(node, "Const")
        node.device = constant.device
        del node.input[:]
        node.attr["dtype"].type = low
        given = tf.make_ndarray(value)
        with np.errstate(over="ignore"):
            ended = np.where(np.isfinite(given), np.clip(given, -limit, limit), given)
            content = ended.astype(tf.as_dtype(low).as_numpy_dtype)
        tensor = node.attr["value"].tensor
        tensor.dtype = low
        tensor.tensor_shape.CopyFrom(value.tensor_shape)
        # Not make_tensor_proto's half_val, which takes up to four bytes for a number of two.
        tensor.tensor_content = content.tobytes()


def _forget_places(node: Any, removed: Set[bytes]) -> None:
    """Takes out the wish to be on the device of a node that is no longer there."""
    places = node.attr["_class"].list.s if "_class" in node.attr else []
    left = [each for each in places if each not in removed]
    places[:] = left
    if "_class" in node.attr and not left:
        del node.attr["_class"]
