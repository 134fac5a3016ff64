"""A plan's plain data -> one HTML page; framework-free.

The page is made of the files in `plan_page_assets`: a skeleton, a style sheet and a script in
parts. Everything else, the layout of the graph included, is done by the script, in the browser,
from the plan's JSON: so the page has that JSON in it once and nothing derived from it.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any

# In the order in which they build on one another.
_SCRIPTS = (
    "text.js",
    "dom.js",
    "grouping.js",
    "model.js",
    "layout.js",
    "viewport.js",
    "graph.js",
    "tables.js",
    "details.js",
    "main.js",
)


def render_page(plan: Mapping[str, Any]) -> str:
    """Returns a self-contained page that shows a plan.

    Args:
        plan: What `RewritePlan.to_json` writes, before it is text.

    Returns:
        An HTML document that loads nothing: no file, no font, no network.

    Example:
        >>> summary = {"nodes": 0, "low_nodes": 0, "casts": 0}
        >>> plan = {"dtype": "float16", "nodes": [], "casts": [], "summary": summary}
        >>> "</html>" in render_page(plan)
        True
    """
    style, script = _style(), _script()
    parts_of_page = {
        "policy": security_policy([style], [script]),
        "style": style,
        "plan": _embeddable(plan),
        "script": script,
    }
    # One pass over the skeleton, so that nothing in the plan is taken for a placeholder.
    pieces = _asset("page.html").split("@@")
    pieces[1::2] = [parts_of_page[name] for name in pieces[1::2]]
    return "".join(pieces)


def _asset(name: str) -> str:
    folder = resources.files("tfamp.planning") / "plan_page_assets"
    return (folder / name).read_text(encoding="utf-8")


def _embeddable(plan: Mapping[str, Any]) -> str:
    # Names come from whoever made the graph. Within a script element only "<" could end the element
    # or start a comment; as an escape in a JSON string it is the same character.
    text = json.dumps(plan, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def security_policy(
    styles: Sequence[str],
    scripts: Sequence[str],
    *,
    images: bool = False,
    inline_styles: bool = False,
) -> str:
    """Returns what a page allows its browser: style sheets and scripts by hash, nothing else.

    Args:
        styles: The style sheets.
        scripts: The scripts.
        images: Whether images that are in the page itself are shown.
        inline_styles: Whether elements may have styles of their own.
    """
    rules = ["default-src 'none'"]
    rules += [f"style-src {' '.join(map(_hash, styles))}"] * bool(styles)
    rules += [f"script-src {' '.join(map(_hash, scripts))}"] * bool(scripts)
    rules += ["img-src data:"] * images
    rules += ["style-src-attr 'unsafe-inline'"] * inline_styles
    return "; ".join(rules)


def palette() -> str:
    """Returns the colours of the page, light and dark, as custom properties of CSS."""
    return _asset("palette.css")


def sources() -> tuple[str, str]:
    """Returns the style sheet and the script of every such page, for one that shows it in a frame.

    The policy of the outer page holds for the inner one too.
    """
    return _style(), _script()


def _style() -> str:
    return palette() + _asset("style.css")


def _script() -> str:
    parts = "\n".join(_asset(name) for name in _SCRIPTS)
    return f'(() => {{\n"use strict";\n{parts}}})();\n'


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"
