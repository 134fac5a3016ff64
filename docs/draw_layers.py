"""Draws docs/assets/layers.svg, the layers of tfamp, from the table in tests/test_architecture.py.

python docs/draw_layers.py
"""

from __future__ import annotations

import html
import importlib.util
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PICTURE = ROOT / "docs" / "assets" / "layers.svg"
# A row is named after one module that is in it, so that a new row shifts no name.
TITLES = {
    "errors": "leaves",
    "policy": "values: policy, scale, lists, profile",
    "graph.regions": "graph: decisions, without TensorFlow",
    "graph.op_signatures": "graph: what TensorFlow says of ops",
    "graph.index": "graph: reading and writing GraphDefs",
    "graph.rewrite": "graph: the stages in their order",
    "keras_hooks": "hooks and parts of each way",
    "autocasting.rules": "rules of each way",
    "optimizer": "optimizer, policy, SavedModels",
    "function": "the public ways",
    "mixed_precision": "old names",
    "levels.application": "levels",
    "levels.preparation": "levels: the public functions",
    "cli": "command line",
}
WIDTH, LEFT, SIDE, LINE, GAP = 1080, 232, 12, 21, 7
CHARACTER = 6.9  # Width of one in the font below.


def _architecture() -> Any:
    """The module tests/test_architecture.py, without running its tests."""
    path = ROOT / "tests" / "test_architecture.py"
    spec = importlib.util.spec_from_file_location("test_architecture", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _wrapped(names: tuple[str, ...]) -> list[list[tuple[float, str]]]:
    """The names of a row, line by line, each with its place from the left."""
    lines, x = [[]], LEFT
    for name in sorted(names):
        width = len(name) * CHARACTER + 14
        if x + width > WIDTH - SIDE:
            lines.append([])
            x = LEFT
        lines[-1].append((x, name))
        x += width + 5
    return lines


def picture(layers: tuple[tuple[str, ...], ...], framework_free: set[str]) -> str:
    """The picture as SVG: the row that imports the others on top."""
    parts, y = [], 40
    for row in reversed(layers):
        title = next((TITLES[name] for name in row if name in TITLES), "")
        lines = _wrapped(row)
        height = len(lines) * LINE + 11
        parts.append(
            f'<rect class="row" x="{SIDE}" y="{y}" width="{WIDTH - 2 * SIDE}" height="{height}"/>'
            f'<text class="title" x="{SIDE + 9}" y="{y + height / 2 + 4}">'
            f"{html.escape(title)}</text>"
        )
        for number, line in enumerate(lines):
            top = y + 6 + number * LINE
            for x, name in line:
                kind = "free" if name in framework_free else "bound"
                parts.append(
                    f'<rect class="{kind}" x="{x:.1f}" y="{top}" '
                    f'width="{len(name) * CHARACTER + 12:.1f}" height="{LINE - 3}" rx="4"/>'
                    f'<text class="name" x="{x + 6:.1f}" y="{top + 13}">{html.escape(name)}</text>'
                )
        y += height + GAP
    return _PAGE.format(width=WIDTH, height=y + 6, body="\n".join(parts))


_PAGE = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">
<title>The layers of tfamp: a module imports only from its own row and the rows below it</title>
<style>
.page {{ fill: #ffffff }}
.row {{ fill: #f4f4f6; stroke: #d5d5da }}
.free {{ fill: #d9ead3 }}
.bound {{ fill: #cfe0f5 }}
.title {{ font: 12px sans-serif; fill: #444444 }}
.name {{ font: 11.5px monospace; fill: #111111 }}
</style>
<rect class="page" width="{width}" height="{height}"/>
<text class="title" x="12" y="24">Imports point down.</text>
<rect class="free" x="232" y="12" width="14" height="14" rx="4"/>
<text class="title" x="252" y="24">imports neither TensorFlow nor Keras</text>
<rect class="bound" x="500" y="12" width="14" height="14" rx="4"/>
<text class="title" x="520" y="24">may import TensorFlow; outside graph, Keras too</text>
{body}
</svg>
"""


def main() -> int:
    """Writes the picture."""
    table = _architecture()
    PICTURE.write_text(picture(table.LAYERS, table.FRAMEWORK_FREE), encoding="utf-8")
    print(f"wrote {PICTURE}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
