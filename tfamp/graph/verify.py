"""What must hold after a rewrite; a violation is a bug of tfamp's and never goes unnoticed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from tfamp.core.errors import RewriteError
from tfamp.graph.index import build_indexes
from tfamp.graph.op_signatures import SUCCESSORS
from tfamp.planning.linking import boundaries_agree
from tfamp.planning.plan import PaintedScope
from tfamp.planning.structures import GraphIndex, IndexedNode, RewritePlan

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
