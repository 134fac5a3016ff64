"""Writes a plan's plain data as a graph for Google's Model Explorer; framework-free."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from typing import Any, TypeAlias

from tfamp.reports.plan_rows import Json

# Background and border in Model Explorer, as on the page.
_LOW = {"backgroundColor": "#d3e8f6", "borderColor": "#0072b2"}
_FLOAT32 = {"backgroundColor": "#fdebc8", "borderColor": "#c77f00"}
_GIVEN = {"backgroundColor": "#d2efe5", "borderColor": "#00805d"}
_CAST = {"backgroundColor": "#f3e6fa", "borderColor": "#7b3fa0"}
# So many nodes without a name scope whose names differ only in a number are folded. A choice:
# fewer can be read beside each other.
_SERIES = 8


def explorer_graphs(plan: Json) -> dict[str, Any]:
    """Returns the graph, and every function as a separate graph, with Casts as nodes.

    The format is the "graph JSON" of the package `ai-edge-model-explorer`: nodes with a
    namespace, by which layers fold, edges, attributes and colours. The package is not
    needed to write it.

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


# A node for the viewer.
_Shown: TypeAlias = dict[str, Any]


def _explorer_nodes(plan: Json, scope: str) -> list[_Shown]:
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
            edges = [{"sourceNodeId": name} for name in dict.fromkeys(sources)]
            shown["incomingEdges"] += edges
    return made + [_cast(cast, names) for cast in casts]


def _stem(name: str) -> str:
    return re.sub(r"_\d+$", "", name)


def _node(node: Json, low: str) -> _Shown:
    style = _GIVEN if node["rule"] == "as given" else _LOW if node["dtype"] == low else _FLOAT32
    attributes = {"dtype": node["dtype"], "reason": node["reason"], "rule": node["rule"]}
    if node["cost"] is not None:
        attributes["estimated time"] = f"{1e6 * node['cost']:.3g} us"
    return _shown(node["name"], node["op"], node["name"], attributes, style)


def _cast(cast: Json, names: set[str]) -> _Shown:
    size = "unknown" if cast["bytes"] is None else f"{cast['bytes']:,}"
    attributes = {"tensor": cast["tensor"], "from": cast["from"], "bytes moved": size}
    producer = cast["producer"]
    shown = _shown(cast["name"], f"Cast to {cast['to']}", producer, attributes, _CAST)
    shown["incomingEdges"] += [{"sourceNodeId": producer}] if producer in names else []
    return shown


def _shown(
    name: str, label: str, place: str, attributes: Mapping[str, str], style: Mapping[str, str]
) -> _Shown:
    """Returns a node for the viewer, in the name scope of `place`."""
    return {
        "id": name,
        "label": label,
        "namespace": place.rpartition("/")[0],
        "attrs": [{"key": key, "value": value} for key, value in attributes.items()],
        "incomingEdges": [],
        "style": dict(style),
    }
