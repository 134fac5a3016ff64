"""Draws docs/assets/values.svg: which values of a training step a rewrite keeps in float32.

python docs/draw_values.py
"""

from __future__ import annotations

from html import escape
from pathlib import Path

LOW, EXACT, GIVEN = ("#dbe9ff", "#2f6fd0"), ("#fff1d6", "#b8741a"), ("#f1f1f1", "#777777")
WIDTH, HEIGHT, BOX, ROW = 980, 420, 150, 46
# (text, below it, x, y, colours)
NODES = (
    ("data", "float32", 20, 80, GIVEN),
    ("product", "with a weight", 205, 80, LOW),
    ("activations", "", 390, 80, LOW),
    ("product", "with a weight", 575, 80, LOW),
    ("result", "softmax, logits", 790, 80, EXACT),
    ("loss", "Gram products, sums", 790, 165, EXACT),
    ("product", "of the loss's gradient", 575, 250, LOW),
    ("gradients", "of activations", 390, 250, LOW),
    ("product", "gradient of a weight", 205, 250, LOW),
    ("optimizer", "÷ scale, is it finite", 20, 250, EXACT),
    ("product", "of positions", 205, 340, EXACT),
    ("sin, floor", "angles, indices", 390, 340, EXACT),
    ("product", "in a loop", 575, 340, EXACT),
    ("tolerance", "condition of the loop", 790, 340, EXACT),
)
ARROWS = (
    (0, 1),
    (1, 2),
    (2, 3),
    (3, 4),
    (4, 5),
    (5, 6),
    (6, 7),
    (7, 8),
    (8, 9),
    (10, 11),
    (12, 13),
)


def box(text: str, below: str, x: int, y: int, colours: tuple[str, str]) -> str:
    fill, line = colours
    middle = x + BOX / 2
    title = f'<text x="{middle}" y="{y + (20 if below else 28)}" class="t">{escape(text)}</text>'
    small = f'<text x="{middle}" y="{y + 36}" class="s">{escape(below)}</text>' if below else ""
    shape = f'<rect x="{x}" y="{y}" width="{BOX}" height="{ROW}" rx="7"'
    return f'{shape} fill="{fill}" stroke="{line}"/>{title}{small}'


def arrow(first: int, last: int) -> str:
    (*_, x1, y1, _), (*_, x2, y2, _) = NODES[first], NODES[last]
    if x1 == x2:
        points = x1 + BOX / 2, y1 + ROW, x2 + BOX / 2, y2 - 5
    elif x2 > x1:
        points = x1 + BOX, y1 + ROW / 2, x2 - 5, y2 + ROW / 2
    elif y1 == y2:
        points = x1, y1 + ROW / 2, x2 + BOX + 5, y2 + ROW / 2
    else:
        points = x1, y1 + ROW, x2 + BOX + 4, y2 + 10
    return '<line x1="{}" y1="{}" x2="{}" y2="{}" marker-end="url(#a)"/>'.format(*points)


def picture() -> str:
    legend = [
        box("low", "float16 or bfloat16", 20, 0, LOW).replace('y="0"', 'y="2"'),
        box("float32", "kept by a rule", 205, 0, EXACT).replace('y="0"', 'y="2"'),
    ]
    return f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 -10 {WIDTH} {HEIGHT}" role="img"
 aria-label="A training step: products and activations are low; results, losses, updates are not">
<style>text{{font-family:system-ui,sans-serif;text-anchor:middle;fill:#222}}.t{{font-size:15px}}
.s{{font-size:12px;fill:#555}}line{{stroke:#666;stroke-width:1.6}}</style>
<defs><marker id="a" viewBox="0 0 8 8" refX="6" refY="4" markerWidth="7" markerHeight="7"
 orient="auto"><path d="M0 0L8 4L0 8z" fill="#666"/></marker></defs>
<rect x="0" y="-10" width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>
{"".join(legend)}
{"".join(arrow(*each) for each in ARROWS)}
{"".join(box(*each) for each in NODES)}
</svg>
"""


if __name__ == "__main__":
    target = Path(__file__).parent / "assets" / "values.svg"
    target.write_text(picture(), encoding="utf-8")
    print(target)
