"""A plan's plain data, and the rows that its tables have; framework-free.

`RewritePlan` gives its plain data, an object of JSON, to the modules that show it: `plan_tables`
as text and in notebooks, `plan_page` as a page and `plan_explorer` for Model Explorer. A value that
more than one of them has stands here, as do the columns of tables.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

# A plan, a node or a Cast as an object of JSON.
Json: TypeAlias = Mapping[str, Any]
Row: TypeAlias = tuple[str, ...]

NODE_HEAD = ("node", "op", "dtype", "cost", "reason")
CAST_HEAD = ("cast of", "from", "to", "bytes")


@dataclass(frozen=True, slots=True)
class PlanRows:
    """The cells of a plan's tables, in the order of the plan.

    Attributes:
        low: The low dtype.
        nodes: A row for each node, with the columns of `NODE_HEAD`.
        casts: A row for each Cast, with the columns of `CAST_HEAD`.
        ops: Op type, number of its nodes in the low dtype and of others: the most low ones first.
        totals: A line with the totals.
        speed_up: The estimated speed-up; "" if it is unknown.
    """

    low: str
    nodes: tuple[Row, ...]
    casts: tuple[Row, ...]
    ops: tuple[Row, ...]
    totals: str
    speed_up: str


def plan_rows(plan: Json) -> PlanRows:
    """Returns the rows of a plan, of its plain data.

    Example:
        >>> summary = {"nodes": 0, "casts": 0, "cast_bytes": 0, "casts_of_unknown_size": 0}
        >>> summary |= {"low_nodes": 0, "estimated_speed_up": None}
        >>> plan = {"dtype": "float16", "nodes": [], "casts": [], "summary": summary}
        >>> plan_rows(plan).totals
        '0 of 0 float nodes in float16; 0 Casts inserted, 0 bytes and 0 of unknown size'
    """
    gain = plan["summary"]["estimated_speed_up"]
    return PlanRows(
        low=plan["dtype"],
        nodes=tuple(
            (place(n["scope"], n["name"]), n["op"], n["dtype"], _cost(n["cost"]), n["reason"])
            for n in plan["nodes"]
        ),
        casts=tuple(
            (place(c["scope"], c["tensor"]), c["from"], c["to"], _known(c["bytes"]))
            for c in plan["casts"]
        ),
        ops=_ops(plan),
        totals=_totals(plan),
        speed_up="" if gain is None else f"{gain:.2f}",
    )


def place(scope: str, name: str) -> str:
    """Returns a name with the function that it is in before it; "" is the graph itself."""
    return f"{scope}: {name}" if scope else name


def _ops(plan: Json) -> tuple[Row, ...]:
    total = Counter(node["op"] for node in plan["nodes"])
    low = Counter(node["op"] for node in plan["nodes"] if node["dtype"] == plan["dtype"])
    ordered = sorted(total, key=lambda op: (-low[op], -total[op], op))
    return tuple((op, str(low[op]), str(total[op] - low[op])) for op in ordered)


def _totals(plan: Json) -> str:
    totals = plan["summary"]
    accuracy = filter(None, [accuracy_text(plan)])
    return (
        f"{totals['low_nodes']} of {totals['nodes']} float nodes in {plan['dtype']}; "
        f"{totals['casts']} Casts inserted, {totals['cast_bytes']} bytes"
        f" and {totals['casts_of_unknown_size']} of unknown size{'; '.join(['', *accuracy])}"
    )


def accuracy_text(plan: Json) -> str:
    """Returns the errors that were measured for a bound in one line; "" without a bound."""
    if (measured := plan.get("accuracy")) is None:
        return ""
    scopes = ", ".join(measured["float32_scopes"])
    kept = (
        f" with {scopes} in float32, {float(measured['error_of_all']):.2g} without"
        if scopes
        else ""
    )
    return f"error on the data {measured['error']:.2g}{kept}; bound {measured['bound']:g}"


def _cost(seconds: float | None) -> str:
    return "unknown" if seconds is None else f"{1e6 * seconds:.3g} us, estimated"


def _known(count: int | None) -> str:
    return "unknown" if count is None else str(count)
