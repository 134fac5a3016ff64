"""Carries out a RewritePlan, the only writer of dtypes, and checks the result.

What the check finds is a bug of tfamp's and never goes unnoticed.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfamp.core.errors import RewriteError
from tfamp.graph.editor import STATISTICS_ATTR, GraphEditor, set_shape
from tfamp.graph.index import build_indexes
from tfamp.interop import tf_private
from tfamp.planning.decision import PaintedScope
from tfamp.planning.options import SUCCESSORS
from tfamp.planning.structures import FLOAT32, RESULT, GraphIndex, Retype, RewritePlan


def apply_plan(graph: GraphEditor, plan: RewritePlan) -> None:
    """Carries out a plan in the graph it was made for, in place.

    Nodes keep their names and their order; a Cast comes right behind the node that makes its
    tensor. Functions keep their names and the names of their arguments and results.
    """
    for body in graph.bodies:
        _rewrite_scope(body, plan)


def connect(function: Any, by_name: Mapping[str, Any], cast: str, consumers: Any) -> None:
    """Has inputs of nodes, and results of a function, take what a Cast makes."""
    output = cast if function is None else f"{cast}:y:0"
    for consumer, position in consumers:
        if consumer.startswith(RESULT):
            function.ret[consumer.removeprefix(RESULT)] = output
        else:
            by_name[consumer].input[position] = output


def _rewrite_scope(body: GraphEditor, plan: RewritePlan) -> None:
    retypes = [retype for retype in plan.retypes if retype.scope == body.scope]
    casts = [cast for cast in plan.casts if cast.scope == body.scope]
    if not retypes and not casts:
        return
    function = body.graph if body.is_function else None
    by_name = dict(body.by_name)
    arguments = function.signature.input_arg if function else ()
    if function:
        by_name |= {each.name: each for each in arguments}
        by_name |= {RESULT + each.name: each for each in function.signature.output_arg}
    for retype in retypes:
        if retype.attr:
            change_dtype(by_name[retype.node], retype, plan.dtype)
        else:
            by_name[retype.node].type = tf_private.dtype_number(plan.dtype)
    following: dict[str, list[Any]] = defaultdict(list)
    for cast in casts:
        source, target = map(tf_private.dtype_number, (cast.from_, cast.to))
        node = cast_node(cast.name, cast.tensor, source, target, cast.device)
        if (dims := body.shape(cast.tensor)) is not None:
            set_shape(node, dims)
        following[cast.producer].append(node)
        connect(function, by_name, cast.name, cast.consumers)
    if casts:
        first = (following[argument.name] for argument in arguments)
        rest = ([node, *following.get(node.name, ())] for node in body.nodes)
        body.replace_nodes(itertools.chain(*first, *rest))


def change_dtype(node: Any, retype: Retype, dtype: str) -> None:
    """Gives one slot of a node another dtype, in place."""
    number = tf_private.dtype_number(dtype)
    if node.op in SUCCESSORS:
        node.op = SUCCESSORS[node.op]
        node.attr[STATISTICS_ATTR].type = tf_private.dtype_number(FLOAT32)
    if retype.index is None:
        node.attr[retype.attr].type = number
    else:
        node.attr[retype.attr].list.type[retype.index] = number


def cast_node(name: str, tensor: str, source: int, target: int, device: str = "") -> Any:
    """Returns a new Cast, between dtypes by number."""
    node = tf.compat.v1.NodeDef(name=name, op="Cast", input=[tensor], device=device)
    node.attr["SrcT"].type, node.attr["DstT"].type = source, target
    node.attr["Truncate"].b = False
    return node


# ---- The check -----------------------------------------------------------------------------------


def verify_rewrite(after: Any, scopes: Sequence[PaintedScope], plan: RewritePlan) -> None:
    """Checks a rewritten graph against the decisions.

    Both ends of every edge agree, every node is there under its name, what must not change is as it
    was, and all that is new are the plan's Casts; else a RewriteError.
    """
    # Indexing compares the dtypes of both ends of every edge.
    indexes = build_indexes(after, dtype=None, device="cpu")
    if [index.scope for index in indexes] != [scope.index.scope for scope in scopes]:
        raise _violation("the functions of the graph", "a function was lost or added")
    for scope, index in zip(scopes, indexes, strict=True):
        casts = {cast.name for cast in plan.casts if cast.scope == index.scope}
        _verify_nodes(scope, index, casts)


def _verify_nodes(scope: PaintedScope, index: GraphIndex, casts: set[str]) -> None:
    old = scope.index
    found = {node.name: node for node in index.nodes}
    if len(found) != len(old.nodes) + len(casts) or not casts <= found.keys():
        raise _violation(old.scope or "the graph", "nodes were lost or added")
    for node in old.nodes:
        now = found.get(node.name)
        if now is None or now.op not in (node.op, SUCCESSORS.get(node.op)):
            raise _violation(f"node {node.name!r} ({node.op})", "it was lost")
        # A dtype the op fixes has a slot of its own for each dtype: those are compared as a set.
        kept = {(slot.attr, slot.index): slot.dtype for slot in (index.slots[i] for i in now.slots)}
        for i in node.slots:
            slot = old.slots[i]
            found_dtype = kept.get((slot.attr, slot.index))
            if slot.attr and i in scope.kept and found_dtype != slot.dtype:
                cause = f"{slot.attr} became {found_dtype}, but must stay {slot.dtype}"
                raise _violation(f"node {node.name!r} ({node.op})", cause)


def _violation(place: str, cause: str) -> RewriteError:
    return RewriteError(
        f"Internal error of the rewrite, found by its check: {place}: {cause}. The graph is "
        "unchanged; please report this with the graph."
    )
