"""Draws docs/assets/layers.svg, tfamp's packages, from the table in tests/test_architecture.py.

python docs/draw_layers.py
"""

from __future__ import annotations

import ast
import graphlib
import html
import importlib.util
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PICTURE = ROOT / "docs" / "assets" / "layers.svg"
# The sources: the installed wheel where there is one, else the checkout.
SOURCES = Path(importlib.util.find_spec("tfamp").submodule_search_locations[0])
WIDTH, HEIGHT, GAP, SIDE, TOP = 900, 46, 9, 12, 40
NAME, PURPOSE = 26, 190


def _architecture() -> Any:
    """The module tests/test_architecture.py, without running its tests."""
    path = ROOT / "tests" / "test_architecture.py"
    spec = importlib.util.spec_from_file_location("test_architecture", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _purpose(name: str) -> str:
    """The first line of the package's or the module's docstring."""
    package = SOURCES / name / "__init__.py"
    path = package if package.is_file() else SOURCES / f"{name}.py"
    return ast.get_docstring(ast.parse(path.read_text("utf-8"))).partition("\n")[0].replace("`", "")


def picture(edges: Mapping[str, str], pure: Sequence[str]) -> str:
    """The picture as SVG: a box each, above what it imports."""
    graph = {name: allowed.split() for name, allowed in edges.items()}
    parts, y = [], TOP
    for name in reversed(list(graphlib.TopologicalSorter(graph).static_order())):
        kind = "free" if name in pure else "bound"
        imports = ", ".join(graph[name]) or "nothing of tfamp"
        parts.append(
            f'<rect class="{kind}" x="{SIDE}" y="{y}" width="{WIDTH - 2 * SIDE}" '
            f'height="{HEIGHT}" rx="6"/>'
            f'<text class="name" x="{NAME}" y="{y + 28}">{html.escape(name)}</text>'
            f'<text class="purpose" x="{PURPOSE}" y="{y + 19}">{html.escape(_purpose(name))}</text>'
            f'<text class="imports" x="{PURPOSE}" y="{y + 36}">may import: {imports}</text>'
        )
        y += HEIGHT + GAP
    return _PAGE.format(width=WIDTH, height=y + 6, body="\n".join(parts))


_PAGE = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">
<title>The packages of tfamp: each imports only from boxes below it</title>
<style>
.page {{ fill: #ffffff }}
.free {{ fill: #e3f1dd; stroke: #b5d3a8 }}
.bound {{ fill: #e4eefb; stroke: #b9cfe8 }}
.name {{ font: bold 14px monospace; fill: #111111 }}
.purpose {{ font: 13px sans-serif; fill: #222222 }}
.imports {{ font: 11px sans-serif; fill: #666666 }}
</style>
<rect class="page" width="{width}" height="{height}"/>
<text class="purpose" x="12" y="24">Imports point down.</text>
<rect class="free" x="232" y="12" width="14" height="14" rx="4"/>
<text class="purpose" x="252" y="24">imports neither TensorFlow nor Keras</text>
<rect class="bound" x="500" y="12" width="14" height="14" rx="4"/>
<text class="purpose" x="520" y="24">may import TensorFlow; outside graph, Keras too</text>
{body}
</svg>
"""


def main() -> int:
    """Writes the picture."""
    table = _architecture()
    PICTURE.write_text(picture(table.EDGES, table.PURE), encoding="utf-8")
    print(f"wrote {PICTURE}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
