"""Shows a plan's rows as text, and as notebooks show them; framework-free."""

from __future__ import annotations

from tfamp.reports import tables
from tfamp.reports.plan_rows import CAST_HEAD, NODE_HEAD, Json, plan_rows
from tfamp.reports.tables import table_lines


def plan_text(plan: Json) -> str:
    """Returns the plan as text: tables of nodes and Casts, and totals."""
    rows = plan_rows(plan)
    lines = table_lines([NODE_HEAD, *rows.nodes])
    if rows.casts:
        lines += ["", *table_lines([CAST_HEAD, *rows.casts])]
    return "\n".join([*lines, "", rows.totals]) + "\n"


def plan_fragment(plan: Json) -> str:
    """Returns the plan as notebooks show it: totals, op types and folded tables of the rest."""
    rows = plan_rows(plan)
    estimate = [f"estimated speed-up: {rows.speed_up}"] if rows.speed_up else []
    rest = ": plan.to_html() is a page of all"
    nodes = tables.table(NODE_HEAD, rows.nodes, rest=rest)
    casts = tables.table(CAST_HEAD, rows.casts, left=3, rest=rest)
    return tables.fragment(
        "Plan of a rewrite",
        tables.lines_of([rows.totals, *estimate]),
        tables.table(("op", rows.low, "other"), rows.ops, left=1),
        tables.folded(f"{len(rows.nodes):,} nodes, with reasons", nodes),
        tables.folded(f"{len(rows.casts):,} Casts", casts),
    )
