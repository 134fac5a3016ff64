"""Renders a plan's plain data as an HTML page, text, or a graph for Model Explorer; framework-free.

The page consists of the files in `plan_page_assets`: a skeleton, a style sheet and the parts of a
script. The script makes the tables in the browser from the plan's JSON, which the page holds once.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections import Counter
from collections.abc import Mapping
from importlib import resources
from typing import Any

from tfamp.reports import tables
from tfamp.reports.tables import table_lines

_ASSETS = "reports/plan_page_assets"
# Each part uses those before it.
_SCRIPTS = ("model.js", "tables.js", "main.js")
# Background and border in Model Explorer, as on the page.
_LOW = {"backgroundColor": "#d3e8f6", "borderColor": "#0072b2"}
_FLOAT32 = {"backgroundColor": "#fdebc8", "borderColor": "#c77f00"}
_GIVEN = {"backgroundColor": "#d2efe5", "borderColor": "#00805d"}
_CAST = {"backgroundColor": "#f3e6fa", "borderColor": "#7b3fa0"}
# So many nodes without a name scope whose names differ only in a number are folded.
_SERIES = 8


def render_page(plan: Mapping[str, Any]) -> str:
    """Returns a self-contained page of a plan, which is given in the structure of its JSON.

    Example:
        >>> summary = {"nodes": 0, "low_nodes": 0, "casts": 0}
        >>> plan = {"dtype": "float16", "nodes": [], "casts": [], "summary": summary}
        >>> "</html>" in render_page(plan)
        True
    """
    scripts = "\n".join(_asset(name) for name in _SCRIPTS)
    style = _asset("style.css")
    script = f'(() => {{\n"use strict";\n{scripts}}})();\n'
    # Content security policy: only this style sheet and script, by hash.
    rules = "default-src 'none'", f"style-src {_hash(style)}", f"script-src {_hash(script)}"
    parts = {"policy": "; ".join(rules), "style": style, "script": script}
    parts["plan"] = _embeddable(plan)
    # One pass over the skeleton, so that no text in a part is taken for a placeholder.
    return re.sub("@@(.*?)@@", lambda found: parts[found[1]], _asset("page.html"))


def _asset(name: str) -> str:
    return resources.files("tfamp").joinpath(f"{_ASSETS}/{name}").read_text(encoding="utf-8")


def _embeddable(plan: Mapping[str, Any]) -> str:
    # Names in the graph are untrusted. Within a script element only "<" could end the element or
    # start a comment; escaped in a JSON string it is the same character.
    text = json.dumps(plan, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


def plan_text(plan: Mapping[str, Any]) -> str:
    """Returns the plan as text: tables of nodes and Casts, and totals."""
    lines = table_lines([_NODE_HEAD, *_node_rows(plan)])
    if plan["casts"]:
        lines += ["", *table_lines([_CAST_HEAD, *_cast_rows(plan)])]
    return "\n".join([*lines, "", _totals_text(plan)]) + "\n"


def plan_fragment(plan: Mapping[str, Any]) -> str:
    """Returns the plan as notebooks show it: totals, op types, and foldable tables of the rest."""
    total = Counter(node["op"] for node in plan["nodes"])
    low = Counter(node["op"] for node in plan["nodes"] if node["dtype"] == plan["dtype"])
    gain = plan["summary"]["estimated_speed_up"]
    estimate = [] if gain is None else [f"estimated speed-up: {gain:.2f}"]
    ordered = sorted(total, key=lambda op: (-low[op], -total[op], op))
    counts = [(op, str(low[op]), str(total[op] - low[op])) for op in ordered]
    rest = ": plan.to_html() is a page of all"
    nodes = tables.table(_NODE_HEAD, _node_rows(plan), rest=rest)
    casts = tables.table(_CAST_HEAD, _cast_rows(plan), left=3, rest=rest)
    return tables.fragment(
        "Plan of a rewrite",
        tables.lines_of([_totals_text(plan), *estimate]),
        tables.table(("op", plan["dtype"], "other"), counts, left=1),
        tables.folded(f"{len(plan['nodes']):,} nodes, with reasons", nodes),
        tables.folded(f"{len(plan['casts']):,} Casts", casts),
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


# ---- Google's Model Explorer ---------------------------------------------------------------------


def explorer_graphs(plan: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the graph, and each function as a separate graph, with Casts as nodes.

    The format is the "graph JSON" of the package `ai-edge-model-explorer`: nodes with a namespace,
    by which layers fold, edges, attributes and colours. The package is not needed to write it.

    Example:
        >>> node = {"scope": "", "name": "dense/MatMul", "op": "MatMul", "dtype": "bfloat16"}
        >>> node |= {"rule": "allow", "reason": "on the list", "cost": None, "inputs": ["x"]}
        >>> plan = {"dtype": "bfloat16", "nodes": [node], "casts": []}
        >>> (shown,) = explorer_graphs(plan)["graphs"][0]["nodes"]
        >>> shown["namespace"], shown["label"]
        ('dense', 'MatMul')
    """
    scopes = dict.fromkeys(node["scope"] for node in plan["nodes"])
    return {
        "label": f"Rewrite to {plan['dtype']}",
        "graphs": [
            {"id": scope or "graph", "nodes": _explorer_nodes(plan, scope)} for scope in scopes
        ],
    }


def _explorer_nodes(plan: Mapping[str, Any], scope: str) -> list[dict[str, Any]]:
    nodes = [node for node in plan["nodes"] if node["scope"] == scope]
    casts = [cast for cast in plan["casts"] if cast["scope"] == scope]
    names = {node["name"] for node in nodes}
    # Producer and consumer -> the Casts between them.
    between: dict[tuple[str, str], list[str]] = {}
    for cast in casts:
        for consumer, _ in cast["consumers"]:
            between.setdefault((cast["producer"], consumer), []).append(cast["name"])
    series = Counter(_stem(name) for name in names if "/" not in name)
    made = [_node(node, plan["dtype"]) for node in nodes]
    for shown in made:
        if series[_stem(shown["id"])] >= _SERIES:
            shown["namespace"] = _stem(shown["id"])
    for node, shown in zip(nodes, made, strict=True):
        for source in node["inputs"]:
            sources = between.get((source, node["name"]), [source] if source in names else [])
            shown["incomingEdges"] += [{"sourceNodeId": each} for each in dict.fromkeys(sources)]
    return made + [_cast(cast, names) for cast in casts]


def _stem(name: str) -> str:
    return re.sub(r"_\d+$", "", name)


def _node(node: Mapping[str, Any], low: str) -> dict[str, Any]:
    style = _GIVEN if node["rule"] == "as given" else _LOW if node["dtype"] == low else _FLOAT32
    attributes = {"dtype": node["dtype"], "reason": node["reason"], "rule": node["rule"]}
    if node["cost"] is not None:
        attributes["estimated time"] = f"{1e6 * node['cost']:.3g} us"
    return _shown(node["name"], node["op"], node["name"], attributes, style)


def _cast(cast: Mapping[str, Any], names: set[str]) -> dict[str, Any]:
    size = "unknown" if cast["bytes"] is None else f"{cast['bytes']:,}"
    attributes = {"tensor": cast["tensor"], "from": cast["from"], "bytes moved": size}
    producer = cast["producer"]
    shown = _shown(cast["name"], f"Cast to {cast['to']}", producer, attributes, _CAST)
    shown["incomingEdges"] += [{"sourceNodeId": producer}] if producer in names else []
    return shown


def _shown(
    name: str, label: str, place: str, attributes: Mapping[str, str], style: Mapping[str, str]
) -> dict[str, Any]:
    """Returns a node for the viewer, in the name scope of `place`."""
    return {
        "id": name,
        "label": label,
        "namespace": place.rpartition("/")[0],
        "attrs": [{"key": key, "value": value} for key, value in attributes.items()],
        "incomingEdges": [],
        "style": dict(style),
    }
