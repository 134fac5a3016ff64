"""Carries out a RewritePlan; the only writer of dtypes."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import tensorflow as tf

from tfamp.graph.op_signatures import STATISTICS_ATTR, SUCCESSORS
from tfamp.interop import tf_private
from tfamp.planning.structures import ARGUMENT, FLOAT32, MAIN_GRAPH, RESULT, CastSite, RewritePlan
from tfamp.planning.structures import Retype as _Retype


def apply_plan(graph_def: Any, plan: RewritePlan) -> None:
    """Carries out a plan, in place.

    Nodes keep their names and their order; a Cast comes right behind the node that makes its
    tensor. Functions keep their names and the names of their arguments and results.

    Args:
        graph_def: The `tf.compat.v1.GraphDef` the plan was made for.
        plan: What to change.
    """
    functions = {function.signature.name: function for function in graph_def.library.function}
    for scope in plan.scopes:
        if not scope.retypes and not scope.casts:
            continue
        if scope.scope == MAIN_GRAPH:
            _rewrite_nodes(graph_def.node, scope.retypes, scope.casts, plan.dtype, "")
        else:
            function = functions[scope.scope]
            _rewrite_signature(function.signature, scope.retypes, plan.dtype)
            _rewrite_nodes(function.node_def, scope.retypes, scope.casts, plan.dtype, ":y:0")
            for cast in scope.casts:
                for consumer, _ in cast.consumers:
                    if consumer.startswith(RESULT):
                        function.ret[consumer.removeprefix(RESULT)] = f"{cast.name}:y:0"


def _rewrite_signature(signature: Any, retypes: tuple[_Retype, ...], dtype: str) -> None:
    """Changes the arguments and results of a function: the retypes without an attribute."""
    named = {each.name: each for each in signature.input_arg}
    named |= {f"{RESULT}{each.name}": each for each in signature.output_arg}
    for retype in retypes:
        if not retype.attr:
            named[retype.node].type = tf_private.dtype_number(dtype)


def _rewrite_nodes(
    nodes: Any,
    retypes: tuple[_Retype, ...],
    casts: tuple[CastSite, ...],
    dtype: str,
    output: str,
) -> None:
    """Changes the nodes of a scope; `output` is how the scope spells an op's first output."""
    by_name = {node.name: node for node in nodes}
    for retype in retypes:
        if retype.attr:
            _retype(by_name[retype.node], retype, dtype)
    following: dict[str, list[Any]] = defaultdict(list)
    for cast in casts:
        following[cast.producer if cast.producer in by_name else ARGUMENT].append(_cast_node(cast))
        for consumer, position in cast.consumers:
            if not consumer.startswith(RESULT):
                node = by_name[consumer]
                node.input[position] = f"{cast.name}{output}"
    ordered = following[ARGUMENT]
    for node in list(nodes):
        ordered.append(node)
        ordered += following.get(node.name, [])
    del nodes[:]
    nodes.extend(ordered)


def _retype(node: Any, retype: _Retype, dtype: str) -> None:
    number = tf_private.dtype_number(dtype)
    if node.op in SUCCESSORS:
        node.op = SUCCESSORS[node.op]
        node.attr[STATISTICS_ATTR].type = tf_private.dtype_number(FLOAT32)
    if retype.index is None:
        node.attr[retype.attr].type = number
    else:
        node.attr[retype.attr].list.type[retype.index] = number


def _cast_node(cast: CastSite) -> Any:
    node = tf.compat.v1.NodeDef(name=cast.name, op="Cast", input=[cast.tensor], device=cast.device)
    node.attr["SrcT"].type = tf_private.dtype_number(cast.source)
    node.attr["DstT"].type = tf_private.dtype_number(cast.target)
    node.attr["Truncate"].b = False
    return node
