"""Renders a plan's plain data as an HTML page; framework-free.

The page is HTML and a style sheet, without scripts: its skeleton and the style sheet are the
files in `plan_page_assets`. The other outputs of a plan are beside it: `plan_tables` and
`plan_explorer`.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from html import escape
from importlib import resources

from tfamp.reports.plan_rows import Json, accuracy_text, place

_ASSETS = "reports/plan_page_assets"

# Where a reason names another node: after these words.
_NAMED = re.compile(
    r"(?:(?<=\bfrom )|(?<=\bnext to )|(?<=\bgives )|(?<=\bby )|(?<=\bthrough )|(?<=\binput )"
    r"|(?<=\bconstant ))(\S+?)(?=,? |,?$)"
)
# Up to so many rows are shown at once, a choice. Others open on a click, and when a link leads to
# one of them.
_SHORT = 500


def render_page(plan: Json) -> str:
    """Returns a self-contained page of a plan, in the structure of its JSON.

    Example:
        >>> summary = {"nodes": 0, "casts": 0, "cast_bytes": 0, "casts_of_unknown_size": 0}
        >>> summary |= {"low_nodes": 0, "estimated_speed_up": None}
        >>> plan = {"dtype": "float16", "nodes": [], "casts": [], "summary": summary}
        >>> "</html>" in render_page(plan)
        True
    """
    style = _asset("style.css")
    anchors = _Anchors(plan)
    parts = {
        # Content security policy: only this style sheet, by hash.
        "policy": f"default-src 'none'; style-src {_hash(style)}",
        "style": style,
        "totals": _totals(plan),
        "accuracy": _accuracy(plan),
        "rules": _rules(plan),
        "casts": _casts(plan, anchors),
        "nodes": "\n".join(_functions(plan, anchors)),
        "plan": _embeddable(plan),
    }
    # One pass over the skeleton, so that no text in a part is taken for a placeholder.
    return re.sub("@@(.*?)@@", lambda match: parts[match[1]], _asset("page.html"))


def _asset(name: str) -> str:
    return resources.files("tfamp").joinpath(f"{_ASSETS}/{name}").read_text(encoding="utf-8")


def _embeddable(plan: Json) -> str:
    # Names in the graph are untrusted. Within a script element only "<" could end the element
    # or start a comment; escaped in a JSON string it is the same character.
    text = json.dumps(plan, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


class _Anchors:
    """Ids of nodes and Casts on the page, and links to them."""

    def __init__(self, plan: Json) -> None:
        self._nodes = {(n["scope"], n["name"]): f"n{i}" for i, n in enumerate(plan["nodes"])}
        # Scope, producer and consumer -> the Casts between these.
        self._casts: dict[tuple[str, str, str], list[str]] = {}
        for i, cast in enumerate(plan["casts"]):
            for consumer in dict.fromkeys(name for name, _ in cast["consumers"]):
                between = cast["scope"], cast["producer"], consumer
                self._casts.setdefault(between, []).append(f"c{i}")

    def to_node(self, scope: str, name: str, shown: str) -> str:
        """Returns a text that links to a node, if that is on the page."""
        anchor = self._nodes.get((scope, name))
        return _link(anchor, shown) if anchor else _shown_name(shown)

    def reason(self, node: Json) -> str:
        """Returns the reason of a node's dtype; the names of other nodes in it are links."""
        pieces = _NAMED.split(node["reason"])
        return "".join(
            self.to_node(node["scope"], piece, piece) if i % 2 else escape(piece, quote=False)
            for i, piece in enumerate(pieces)
        )

    def inputs(self, node: Json) -> str:
        """Returns links to the producers of a node, or to the Casts between."""
        scope, name, links = node["scope"], node["name"], []
        for producer in node["inputs"]:
            shown = _relative(producer, name)
            casts = self._casts.get((scope, producer, name), ())
            links += [_link(anchor, f"Cast of {shown}") for anchor in casts] or [
                self.to_node(scope, producer, shown)
            ]
        return ", ".join(links)


def _link(anchor: str, shown: str) -> str:
    return f'<a href="#{anchor}">{_shown_name(shown)}</a>'


def _shown_name(name: str) -> str:
    """Returns a name that may be broken after a name scope."""
    return escape(name, quote=False).replace("/", "/<wbr>")


def _relative(name: str, other: str) -> str:
    """Returns a name without the name scopes that it shares with another one."""
    parts, others = name.split("/"), other.split("/")
    shared = 0
    while shared < min(len(parts), len(others)) - 1 and parts[shared] == others[shared]:
        shared += 1
    return "/".join(parts[shared:])


def _table(kind: str, head: Sequence[str], rows: Iterable[str], anchor: str = "") -> str:
    """Returns a table of rows that are HTML already."""
    cells = "".join(f'<th scope="col">{title}</th>' for title in head)
    named = f' id="{anchor}"' if anchor else ""
    return (
        f'<table class="{kind}"{named}><thead><tr>{cells}</tr></thead>\n'
        f"<tbody>\n{''.join(rows)}</tbody></table>"
    )


def _row(color: str, cells: Iterable[str], anchor: str = "") -> str:
    named = f' id="{anchor}"' if anchor else ""
    return f'<tr{named} class="{color}">{"".join(f"<td>{cell}</td>" for cell in cells)}</tr>\n'


def _color(node: Json, low: str) -> str:
    if node["rule"] == "as given":
        return "given"
    return "low" if node["dtype"] == low else "float32"


def _totals(plan: Json) -> str:
    nodes, dtype, totals = plan["nodes"], plan["dtype"], plan["summary"]
    number = Counter(_color(node, dtype) for node in nodes)
    unknown, gain = totals["casts_of_unknown_size"], totals["estimated_speed_up"]
    moved = f", {unknown:,} of unknown size" if unknown else ""

    def share(color: str) -> str:
        return f"{number[color]:,} ({number[color] / max(len(nodes), 1):.1%})"

    cards = [
        ("", dtype, "low dtype"),
        ("", f"{len(nodes):,}", _link("nodes", "float nodes")),
        ("low", share("low"), f"converted to {escape(dtype)}"),
        ("float32", share("float32"), "float32"),
        *([("given", share("given"), f"{escape(dtype)} as given")] if number["given"] else []),
        ("", f"{totals['casts']:,}", _link("casts", "Casts inserted")),
        ("", _size(totals["cast_bytes"]), f"read and written by Casts{moved}"),
        ("", "unknown" if gain is None else f"{gain:.2f}", "estimated speed-up"),
    ]
    return "\n".join(
        f'<li class="{color}"><strong>{escape(value)}</strong> {words}</li>'
        for color, value, words in cards
    )


def _accuracy(plan: Json) -> str:
    text = accuracy_text(plan)
    return f'<p id="accuracy">{escape(text, quote=False)}</p>' if text else ""


def _size(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{_rounded(count)} {unit}"
        count /= 1024
    return f"{_rounded(count)} TiB"


def _rounded(number: float) -> str:
    """Returns a number with three digits, and without an exponent where it is large."""
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def _groups(plan: Json) -> dict[str, dict[tuple[str, str], list[int]]]:
    """Positions of nodes by function, rule and dtype: large groups of a function come first."""
    functions: dict[str, dict[tuple[str, str], list[int]]] = {}
    for i, node in enumerate(plan["nodes"]):
        function = functions.setdefault(node["scope"], {})
        function.setdefault((node["rule"], node["dtype"]), []).append(i)
    return {
        scope: dict(sorted(rules.items(), key=lambda item: (-len(item[1]), item[0])))
        for scope, rules in functions.items()
    }


def _group_anchor(members: Sequence[int]) -> str:
    """Id of a group: of its first node."""
    return f"g{members[0]}"


def _rules(plan: Json) -> str:
    nodes = plan["nodes"]
    groups: dict[tuple[str, str], list[int]] = {}
    for function in _groups(plan).values():
        for key, group in function.items():
            groups.setdefault(key, []).extend(group)
    rows = []
    largest_first = sorted(groups.items(), key=lambda item: (-len(item[1]), item[0]))
    for (rule, dtype), members in largest_first:
        ops = Counter(nodes[i]["op"] for i in members)
        frequent = sorted(ops, key=lambda op: (-ops[op], op))
        shown = ", ".join(f"{op}\u00a0×{ops[op]:,}" for op in frequent)
        link = _link(_group_anchor(members), rule)
        cells = link, f"{len(members):,}", escape(dtype), escape(shown, quote=False)
        rows.append(_row(_color(nodes[members[0]], plan["dtype"]), cells))
    return _table("rules", ("Rule", "Nodes", "Dtype", "Ops"), rows)


def _opened(rows: Sequence[object]) -> str:
    return " open" if len(rows) <= _SHORT else ""


def _functions(plan: Json, anchors: _Anchors) -> Iterable[str]:
    """Yields an element for every function, with one for every rule in it."""
    opened = _opened(plan["nodes"])
    for scope, rules in _groups(plan).items():
        count = sum(map(len, rules.values()))
        title = f"Function {escape(scope, quote=False)}" if scope else "The graph"
        yield f"<details open><summary>{title}: {count:,} nodes</summary>"
        for (rule, dtype), members in rules.items():
            nodes = {f"n{i}": plan["nodes"][i] for i in members}
            color = _color(plan["nodes"][members[0]], plan["dtype"])
            # A reason that all have is told once.
            differ = len({node["reason"] for node in nodes.values()}) > 1
            reason = anchors.reason(plan["nodes"][members[0]])
            shared = "" if differ else f" <small>{reason}</small>"
            columns = slice(None) if differ else slice(-1)
            rows = (
                _row(color, _node_cells(node, anchors)[columns], anchor)
                for anchor, node in nodes.items()
            )
            head = _PAGE_NODE_HEAD[columns]
            yield (
                f"<details{opened}><summary>{escape(rule, quote=False)}: {len(nodes):,} "
                f'<span class="{color}">{escape(dtype)}</span>{shared}</summary>'
            )
            yield _table("nodes", head, rows, _group_anchor(members))
            yield "</details>"
        yield "</details>"


_PAGE_NODE_HEAD = ("Node", "Op", "Dtype", "Time", "Takes from", "Reason")
_PAGE_CAST_HEAD = ("Cast of", "From", "To", "Bytes", "Used by")


def _node_cells(node: Json, anchors: _Anchors) -> tuple[str, ...]:
    name, op, dtype = _shown_name(node["name"]), node["op"], node["dtype"]
    links, reason = anchors.inputs(node), anchors.reason(node)
    return name, escape(op, quote=False), escape(dtype), _time(node["cost"]), links, reason


def _time(seconds: float | None) -> str:
    if seconds is None:
        return "unknown"
    for unit, factor in (("s", 1.0), ("ms", 1e3)):
        if seconds * factor >= 1:
            return f"{_rounded(seconds * factor)} {unit}"
    return f"{_rounded(1e6 * seconds)} µs"


def _casts(plan: Json, anchors: _Anchors) -> str:
    """Returns the table of Casts: the largest first, those of unknown size last."""
    casts = plan["casts"]
    if not casts:
        return "<p>None.</p>"
    # Sorting is stable: equal sizes keep the plan's order.
    order = sorted(
        range(len(casts)), key=lambda i: (casts[i]["bytes"] is None, -(casts[i]["bytes"] or 0))
    )
    rows = []
    for i in order:
        cast = casts[i]
        color = "low" if cast["to"] == plan["dtype"] else "float32"
        rows.append(_row(color, _cast_cells(cast, anchors), f"c{i}"))
    table = _table("casts", _PAGE_CAST_HEAD, rows)
    return f"<details{_opened(casts)}><summary>{len(casts):,} Casts</summary>{table}</details>"


def _cast_cells(cast: Json, anchors: _Anchors) -> tuple[str, ...]:
    scope = cast["scope"]
    tensor = anchors.to_node(scope, cast["producer"], place(scope, cast["tensor"]))
    consumers = dict.fromkeys(name for name, _ in cast["consumers"])
    used = ", ".join(anchors.to_node(scope, name, name) for name in consumers)
    size = "unknown" if cast["bytes"] is None else f"{cast['bytes']:,}"
    return tensor, escape(cast["from"]), escape(cast["to"]), size, used
