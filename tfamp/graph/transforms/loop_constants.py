"""Weights that a loop carries unchanged and casts in every round -> cast once, before the loop.

w -> While(body: w -> Cast -> MatMul) becomes w -> Cast -> While(body: w -> MatMul). Where w is a
constant, `tfamp.graph.transforms.fold` then takes the Cast away.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from tfamp.core.dtypes import LOW_PRECISION
from tfamp.interop import tf_private
from tfamp.planning.control_flow import LOOPS
from tfamp.planning.structures import FLOAT32


def cast_before_loops(graph_def: Any) -> tuple[Any, frozenset[tuple[str, str]]]:
    """Takes Casts of loop-invariant float32 arguments out of the loops of a graph.

    Only where the loop does nothing else with the argument, and nothing uses what it becomes.

    Args:
        graph_def: A `tf.compat.v1.GraphDef`; it is not modified. Loops in functions stay.

    Returns:
        A new `tf.compat.v1.GraphDef`, and the Casts that loops no longer have as (function, name).
    """
    result = tf.compat.v1.GraphDef()
    result.CopyFrom(graph_def)
    library = {function.signature.name: function for function in result.library.function}
    everything = [*result.node, *(n for f in result.library.function for n in f.node_def)]
    calls = Counter(
        value.func.name
        for node in everything
        for value in node.attr.values()
        if value.HasField("func")
    )
    used = {name.removeprefix("^") for node in result.node for name in node.input}
    gone: set[tuple[str, str]] = set()
    for (body_name, condition_name), loops in _groups(result.node).items():
        names = (body_name, condition_name)
        if any(name not in library or calls[name] != len(loops) for name in names):
            continue
        body, condition = library[body_name], library[condition_name]
        for i, number in enumerate(list(loops[0].attr["T"].list.type)):
            outputs = {loop.name if i == 0 else f"{loop.name}:{i}" for loop in loops}
            if tf_private.dtype_name(number) != FLOAT32 or outputs & used:
                continue
            casts = _casts_of_invariant(body, condition, i)
            if casts:
                gone |= {(body_name, name) for name in casts}
                low = _lower_body(body, condition, i, casts)
                for loop in loops:
                    _cast_before(result, loop, i, low)
    return result, frozenset(gone)


def _casts_of_invariant(body: Any, condition: Any, i: int) -> list[str]:
    """The Casts of a body's argument to one low dtype, if it is not changed nor used otherwise."""
    argument = body.signature.input_arg[i].name
    tested = condition.signature.input_arg[i].name
    if any(tested in node.input for node in condition.node_def):
        return []
    if tested in condition.ret.values():
        return []
    same, casts = {argument}, []
    for node in _behind(body, argument):
        if node.op == "Identity" and len(node.input) == 1:
            same.add(f"{node.name}:output:0")
        elif node.op == "Cast" and len(node.input) == 1:
            casts.append(node)
        else:
            return []
    results = [arg.name for arg in body.signature.output_arg]
    returned = [name for name in results if body.ret[name] in same]
    dtypes = {tf_private.dtype_name(node.attr["DstT"].type) for node in casts}
    if returned != [results[i]] or len(dtypes) != 1 or not dtypes <= set(LOW_PRECISION):
        return []
    return [node.name for node in casts]


def _behind(body: Any, tensor: str) -> list[Any]:
    """The nodes that take a tensor, or what Identities make of it."""
    found, pending = [], [tensor]
    while pending:
        name = pending.pop()
        for node in body.node_def:
            if name in node.input:
                found.append(node)
                if node.op == "Identity":
                    pending.append(f"{node.name}:output:0")
    return found


def _groups(nodes: Iterable[Any]) -> dict[tuple[str, str], list[Any]]:
    """The loops of a graph by body and condition: signatures share those of one model."""
    groups: dict[tuple[str, str], list[Any]] = {}
    for node in nodes:
        if node.op in LOOPS:
            key = node.attr["body"].func.name, node.attr["cond"].func.name
            groups.setdefault(key, []).append(node)
    return groups


def _lower_body(body: Any, condition: Any, i: int, casts: list[str]) -> int:
    """Makes an argument of a loop's functions low; returns the number of its dtype."""
    nodes = {node.name: node for node in body.node_def}
    low = int(nodes[casts[0]].attr["DstT"].type)
    for node in _behind(body, body.signature.input_arg[i].name):
        if node.op == "Cast":
            node.op = "Identity"
            for name in ("SrcT", "DstT", "Truncate"):
                node.attr.pop(name, None)
        node.attr["T"].type = low
    spelled = {f"{name}:y:0": f"{name}:output:0" for name in casts}
    for node in body.node_def:
        node.input[:] = [spelled.get(name, name) for name in node.input]
    for name, tensor in list(body.ret.items()):
        body.ret[name] = spelled.get(tensor, tensor)
    for function in (body, condition):
        function.signature.input_arg[i].type = low
    body.signature.output_arg[i].type = low
    return low


def _cast_before(graph: Any, loop: Any, i: int, low: int) -> None:
    name = f"{loop.name}/{i}-CastBefore"
    cast = graph.node.add(name=name, op="Cast", input=[loop.input[i]], device=loop.device)
    cast.attr["SrcT"].type, cast.attr["DstT"].type = loop.attr["T"].list.type[i], low
    cast.attr["Truncate"].b = False
    loop.attr["T"].list.type[i] = low
    loop.input[i] = name
