"""A plan's plain data -> the graph as Google's Model Explorer reads it; framework-free.

The format is the "graph JSON" of the package `ai-edge-model-explorer`: nodes with a namespace, by
which layers fold, edges, attributes and colours. It is plain data, so that writing it does not need
the package.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

# Background and border, as on the plan's page.
_LOW = {"backgroundColor": "#d3e8f6", "borderColor": "#0072b2"}
_FLOAT32 = {"backgroundColor": "#fdebc8", "borderColor": "#c77f00"}
_GIVEN = {"backgroundColor": "#d2efe5", "borderColor": "#00805d"}
_CAST = {"backgroundColor": "#f3e6fa", "borderColor": "#7b3fa0"}

# So many nodes without a name scope that differ in a number only, as updates of weights, fold.
_SERIES = 8


def explorer_graphs(plan: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the graph, and each function as a graph of its own, with Casts as nodes.

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
        "graphs": [{"id": scope or "graph", "nodes": _nodes(plan, scope)} for scope in scopes],
    }


def _nodes(plan: Mapping[str, Any], scope: str) -> list[dict[str, Any]]:
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
    return _shown(node["name"], node["op"], node["name"].rpartition("/")[0], attributes, style)


def _cast(cast: Mapping[str, Any], names: set[str]) -> dict[str, Any]:
    size = "unknown" if cast["bytes"] is None else f"{cast['bytes']:,}"
    attributes = {"tensor": cast["tensor"], "from": cast["from"], "bytes moved": size}
    namespace = cast["producer"].rpartition("/")[0]
    shown = _shown(cast["name"], f"Cast to {cast['to']}", namespace, attributes, _CAST)
    if cast["producer"] in names:
        shown["incomingEdges"].append({"sourceNodeId": cast["producer"]})
    return shown


def _shown(
    name: str, label: str, namespace: str, attributes: Mapping[str, str], style: Mapping[str, str]
) -> dict[str, Any]:
    return {
        "id": name,
        "label": label,
        "namespace": namespace,
        "attrs": [{"key": key, "value": value} for key, value in attributes.items()],
        "incomingEdges": [],
        "style": dict(style),
    }
