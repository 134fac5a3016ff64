"""A plan as text for people and as JSON for programs; framework-free."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tfamp.planning.structures import CastSite, NodePlan, RewritePlan


def plan_text(plan: RewritePlan) -> str:
    """Returns the plan as a table for people: nodes, Casts, totals."""
    rows = [("node", "op", "dtype", "reason")]
    rows += [(_place(n.scope, n.name), n.op, n.dtype, n.reason.text) for n in plan.nodes]
    lines = _aligned(rows)
    if plan.casts:
        casts = [("cast of", "from", "to", "bytes")]
        casts += [
            (_place(c.scope, c.tensor), c.source, c.target, _known(c.bytes)) for c in plan.casts
        ]
        lines += ["", *_aligned(casts)]
    totals = plan.summary
    lines += [
        "",
        f"{totals.low_nodes} of {totals.nodes} float nodes in {plan.dtype}; "
        f"{totals.casts} Casts inserted, {totals.cast_bytes} bytes"
        f" and {totals.casts_of_unknown_size} of unknown size",
    ]
    return "\n".join(lines) + "\n"


def plan_json(plan: RewritePlan) -> dict[str, Any]:
    """Returns a plan as an object of JSON: dtype, nodes, casts and summary."""
    summary = plan.summary
    return {
        "dtype": plan.dtype,
        "nodes": [_node_json(node) for node in plan.nodes],
        "casts": [_cast_json(cast) for cast in plan.casts],
        "summary": {name: getattr(summary, name) for name in summary.__slots__},
    }


def _node_json(node: NodePlan) -> dict[str, Any]:
    return {
        "scope": node.scope,
        "name": node.name,
        "op": node.op,
        "dtype": node.dtype,
        "rule": node.reason.rule,
        "reason": node.reason.text,
        "cost": node.cost,
        "inputs": list(node.inputs),
    }


def _cast_json(cast: CastSite) -> dict[str, Any]:
    return {
        "scope": cast.scope,
        "tensor": cast.tensor,
        "from": cast.source,
        "to": cast.target,
        "bytes": cast.bytes,
        "name": cast.name,
        "producer": cast.producer,
        "consumers": [list(consumer) for consumer in cast.consumers],
    }


def _known(count: int | None) -> str:
    return "unknown" if count is None else str(count)


def _place(scope: str, name: str) -> str:
    return f"{scope}: {name}" if scope else name


def _aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
