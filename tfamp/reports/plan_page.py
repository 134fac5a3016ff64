"""A plan's plain data -> one HTML page, or text; framework-free.

The page is made of the files in `plan_page_assets`: a skeleton, a style sheet and a script in
parts. The script makes the tables in the browser from the plan's JSON, which the page holds once,
with nothing derived from it.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections import Counter
from collections.abc import Mapping
from importlib import resources
from typing import Any

from tfamp.reports import notebook_html
from tfamp.reports.text_table import table_lines

_ASSETS = "reports/plan_page_assets"
# In the order in which they build on one another.
_SCRIPTS = ("model.js", "tables.js", "main.js")


def render_page(plan: Mapping[str, Any]) -> str:
    """Returns a self-contained page that shows a plan, given as JSON has it; it loads nothing.

    Example:
        >>> summary = {"nodes": 0, "low_nodes": 0, "casts": 0}
        >>> plan = {"dtype": "float16", "nodes": [], "casts": [], "summary": summary}
        >>> "</html>" in render_page(plan)
        True
    """
    scripts = "\n".join(_asset(name) for name in _SCRIPTS)
    style = _asset("style.css")
    script = f'(() => {{\n"use strict";\n{scripts}}})();\n'
    # What the page allows its browser: its style sheet and script by hash, nothing else.
    rules = "default-src 'none'", f"style-src {_hash(style)}", f"script-src {_hash(script)}"
    parts = {
        "policy": "; ".join(rules),
        "style": style,
        "plan": _embeddable(plan),
        "script": script,
    }
    return _filled(_asset("page.html"), parts)


def _filled(skeleton: str, parts: Mapping[str, str]) -> str:
    """Returns a page: a skeleton with parts in the place of their names between "@@"."""
    # One pass over the skeleton, so that nothing in a part is taken for a placeholder.
    pieces = skeleton.split("@@")
    pieces[1::2] = [parts[name] for name in pieces[1::2]]
    return "".join(pieces)


def _asset(name: str) -> str:
    return resources.files("tfamp").joinpath(f"{_ASSETS}/{name}").read_text(encoding="utf-8")


def _embeddable(plan: Mapping[str, Any]) -> str:
    # Names come from whoever made the graph. Within a script element only "<" could end the element
    # or start a comment; as an escape in a JSON string it is the same character.
    text = json.dumps(plan, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


def plan_text(plan: Mapping[str, Any]) -> str:
    """Returns the plan as a table for people: nodes, Casts, totals."""
    lines = table_lines([_NODE_HEAD, *_node_rows(plan)])
    if plan["casts"]:
        lines += ["", *table_lines([_CAST_HEAD, *_cast_rows(plan)])]
    return "\n".join([*lines, "", _totals_text(plan)]) + "\n"


def plan_fragment(plan: Mapping[str, Any]) -> str:
    """Returns the plan as a notebook shows it: totals, op types, and all of it to unfold."""
    total = Counter(node["op"] for node in plan["nodes"])
    low = Counter(node["op"] for node in plan["nodes"] if node["dtype"] == plan["dtype"])
    gain = plan["summary"]["estimated_speed_up"]
    estimate = [] if gain is None else [f"estimated speed-up: {gain:.2f}"]
    ordered = sorted(total, key=lambda op: (-low[op], -total[op], op))
    counts = [(op, str(low[op]), str(total[op] - low[op])) for op in ordered]
    rest = ": plan.to_html() is a page of all"
    nodes = notebook_html.table(_NODE_HEAD, _node_rows(plan), rest=rest)
    casts = notebook_html.table(_CAST_HEAD, _cast_rows(plan), left=3, rest=rest)
    return notebook_html.fragment(
        "Plan of a rewrite",
        notebook_html.lines_of([_totals_text(plan), *estimate]),
        notebook_html.table(("op", plan["dtype"], "other"), counts, left=1),
        notebook_html.folded(f"{len(plan['nodes']):,} nodes, with reasons", nodes),
        notebook_html.folded(f"{len(plan['casts']):,} Casts", casts),
    )


_NODE_HEAD = ("node", "op", "dtype", "cost", "reason")
_CAST_HEAD = ("cast of", "from", "to", "bytes")


def _node_rows(plan: Mapping[str, Any]) -> list[tuple[str, ...]]:
    return [
        (_place(n["scope"], n["name"]), n["op"], n["dtype"], _cost(n["cost"]), n["reason"])
        for n in plan["nodes"]
    ]


def _cast_rows(plan: Mapping[str, Any]) -> list[tuple[str, ...]]:
    return [
        (_place(c["scope"], c["tensor"]), c["from"], c["to"], _known(c["bytes"]))
        for c in plan["casts"]
    ]


def _totals_text(plan: Mapping[str, Any]) -> str:
    totals = plan["summary"]
    return (
        f"{totals['low_nodes']} of {totals['nodes']} float nodes in {plan['dtype']}; "
        f"{totals['casts']} Casts inserted, {totals['cast_bytes']} bytes"
        f" and {totals['casts_of_unknown_size']} of unknown size"
    )


def _cost(seconds: float | None) -> str:
    return "unknown" if seconds is None else f"{1e6 * seconds:.3g} us, estimated"


def _known(count: int | None) -> str:
    return "unknown" if count is None else str(count)


def _place(scope: str, name: str) -> str:
    return f"{scope}: {name}" if scope else name
