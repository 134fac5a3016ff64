"""The parts of a training report -> one HTML page; framework-free."""

from __future__ import annotations

import base64
import html
import math
from collections.abc import Iterable, Sequence
from importlib import resources
from typing import Any

from tfamp.graph.plan_page import palette, security_policy, sources


def render_report(
    title: str,
    totals: Sequence[tuple[str, str]],
    sections: Iterable[str],
    *,
    with_plan: bool = False,
) -> str:
    """Returns a self-contained page.

    Args:
        title: Its title, plain text.
        totals: What stands at the top: labels and values, plain text.
        sections: HTML of the sections.
        with_plan: Whether one of them shows the page of a plan, which has a script.

    Returns:
        An HTML document that loads nothing: no file, no font, no network.
    """
    style = palette() + _asset("style.css")
    styles, scripts = [style], []
    if with_plan:
        plan_style, plan_script = sources()
        styles.append(plan_style)
        scripts.append(plan_script)
    parts = {
        "policy": security_policy(styles, scripts, images=True),
        "title": html.escape(title),
        "style": style,
        "totals": _totals(totals),
        "sections": "\n".join(sections),
    }
    # One pass over the skeleton, so that nothing in a name is taken for a placeholder.
    pieces = _asset("page.html").split("@@")
    pieces[1::2] = [parts[name] for name in pieces[1::2]]
    return "".join(pieces)


def section(heading: str, *parts: str) -> str:
    """Returns a section: its heading, plain text, and HTML below it."""
    return f"<section>\n<h2>{html.escape(heading)}</h2>\n" + "\n".join(parts) + "\n</section>"


def paragraph(text: str, *, note: bool = False) -> str:
    """Returns a paragraph of plain text."""
    kind = ' class="note"' if note else ""
    return f"<p{kind}>{html.escape(text)}</p>"


def preformatted(text: str) -> str:
    """Returns plain text as it is."""
    return f"<pre>{html.escape(text)}</pre>"


def picture(png: bytes, description: str) -> str:
    """Returns an image that is in the page itself.

    Args:
        png: The image.
        description: What it shows, for those who do not see it.
    """
    data = base64.b64encode(png).decode()
    return f'<img alt="{html.escape(description)}" src="data:image/png;base64,{data}">'


def table(
    headings: Sequence[str], rows: Iterable[Sequence[str]], marked: Iterable[bool] | None = None
) -> str:
    """Returns a table of plain text.

    Args:
        headings: Headings of the columns.
        rows: The rows.
        marked: For each row, whether it stands out.
    """
    listed = [list(row) for row in rows]
    marks = [False] * len(listed) if marked is None else list(marked)
    head = "".join(f'<th scope="col">{html.escape(each)}</th>' for each in headings)
    body = "\n".join(
        ('<tr class="bad">' if bad else "<tr>")
        + "".join(f"<td>{html.escape(str(cell))}</td>" for cell in row)
        + "</tr>"
        for row, bad in zip(listed, marks, strict=True)
    )
    return (
        f'<div class="rows"><table><thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody></table>'
        "</div>"
    )


def heat_strip(cells: Sequence[tuple[str, float, bool]]) -> str:
    """Returns a strip with one cell for each layer, the stronger the larger its error.

    Args:
        cells: Name, error and whether something is out of range, of each layer.
    """
    known = [math.log10(error) for _, error, _ in cells if 0 < error < math.inf]
    low, high = (min(known), max(known)) if known else (0.0, 1.0)
    width = 1000 / max(len(cells), 1)
    made = []
    for i, (name, error, out) in enumerate(cells):
        place = math.log10(error) if 0 < error < math.inf else (high if error else low)
        strength = 0.12 + 0.88 * ((place - low) / (high - low) if high > low else 1.0)
        made.append(
            f'<rect x="{i * width:.2f}" width="{width:.2f}" height="34" '
            f'fill-opacity="{strength:.2f}"{_out_class(out)}>'
            f"<title>{html.escape(f'{name}: {error:.2g}')}</title></rect>"
        )
    return (
        '<svg class="heat" viewBox="0 0 1000 34" preserveAspectRatio="none" role="img" '
        'aria-label="Error of each layer">' + "".join(made) + "</svg>"
    )


def frame(page: str, description: str) -> str:
    """Returns a frame that shows another page, which is in this one."""
    return (
        f'<iframe title="{html.escape(description)}" sandbox="allow-scripts" '
        f'srcdoc="{html.escape(page)}"></iframe>'
    )


def _out_class(out: bool) -> str:
    return ' class="out"' if out else ""


def _totals(totals: Sequence[tuple[str, str]]) -> str:
    if not totals:
        return ""
    cells = "".join(
        f"<div><dt>{html.escape(label)}</dt><dd>{html.escape(value)}</dd></div>"
        for label, value in totals
    )
    return f"<dl>{cells}</dl>"


def _asset(name: str) -> Any:
    folder = resources.files("tfamp.diagnostics") / "report_assets"
    return (folder / name).read_text(encoding="utf-8")
