"""Carries out a RewritePlan; the only writer of dtypes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import tensorflow as tf

from tfamp.core.errors import RewriteError
from tfamp.graph.index import build_indexes
from tfamp.graph.op_signatures import STATISTICS_ATTR, SUCCESSORS
from tfamp.interop import tf_private
from tfamp.planning.decision import PaintedScope
from tfamp.planning.linking import boundaries_agree
from tfamp.planning.structures import (
    ARGUMENT,
    FLOAT32,
    MAIN_GRAPH,
    RESULT,
    CastSite,
    GraphIndex,
    IndexedNode,
    RewritePlan,
)
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


ControlInputs: TypeAlias = Mapping[tuple[str, str], tuple[str, ...]]


def verify_rewrite(
    before: ControlInputs, after: Any, scopes: Sequence[PaintedScope], plan: RewritePlan
) -> None:
    """Checks a rewritten graph against the graph it was made from.

    Both ends of every edge agree, every node is there under its name with its control inputs, what
    must not change has not, denied slots are float32, and all that is new are the plan's Casts.

    Args:
        before: The control inputs of the graph that was rewritten.
        after: The result.
        scopes: The decisions.
        plan: The plan.

    Raises:
        RewriteError: One of these does not hold.
    """
    # Indexing compares the dtypes of both ends of every edge.
    indexes = build_indexes(after, dtype=None, device="cpu")
    if [index.scope for index in indexes] != [scope.index.scope for scope in scopes]:
        raise _violation("the functions of the graph", "a function was lost or added")
    for node, function, agrees in boundaries_agree(indexes):
        if not agrees:
            cause = f"its dtypes are not those of {function!r}, which it runs"
            raise _violation(f"node {node.name!r} ({node.op})", cause)
    for scope, index, changes in zip(scopes, indexes, plan.scopes, strict=True):
        _verify_nodes(scope, index, {cast.name for cast in changes.casts})
    now = control_inputs(after)
    for place, expected in before.items():
        if now.get(place) != expected:
            raise _violation(f"node {place[1]!r}", "its control inputs changed")


def _verify_nodes(scope: PaintedScope, index: GraphIndex, casts: set[str]) -> None:
    old = scope.index
    found = {node.name: node for node in index.nodes}
    if len(found) != len(old.nodes) + len(casts) or not casts <= found.keys():
        raise _violation(old.scope or "the graph", "nodes were lost or added")
    for node in old.nodes:
        now = found.get(node.name)
        if now is None or now.op not in (node.op, SUCCESSORS.get(node.op)):
            raise _violation(f"node {node.name!r} ({node.op})", "it was lost")
        _verify_slots(scope, index, node, now)


def _verify_slots(
    scope: PaintedScope, index: GraphIndex, node: IndexedNode, now: IndexedNode
) -> None:
    # A dtype the op fixes has a slot of its own for each dtype: those are compared as a set.
    kept = {(slot.attr, slot.index): slot.dtype for slot in (index.slots[i] for i in now.slots)}
    for i in node.slots:
        slot = scope.index.slots[i]
        must_stay = i in scope.regions.fixed or i in scope.painting.denied or not slot.attr
        if slot.attr and must_stay and kept[slot.attr, slot.index] != slot.dtype:
            raise _violation(
                f"node {node.name!r} ({node.op})",
                f"{slot.attr} became {kept[slot.attr, slot.index]}, but must stay {slot.dtype}",
            )


def control_inputs(graph_def: Any) -> dict[tuple[str, str], tuple[str, ...]]:
    """Returns what each node waits for, by the names of its function and its own."""
    scopes = [("", graph_def.node)]
    scopes += [(each.signature.name, each.node_def) for each in graph_def.library.function]
    return {
        (scope, node.name): tuple(name for name in node.input if name.startswith("^"))
        for scope, nodes in scopes
        for node in nodes
    }


def _violation(place: str, cause: str) -> RewriteError:
    return RewriteError(
        f"Internal error of the rewrite, found by its check: {place}: {cause}. The graph is "
        "unchanged; please report this with the graph."
    )
