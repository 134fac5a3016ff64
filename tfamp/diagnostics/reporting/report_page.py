"""The parts of a training report -> one HTML page; framework-free."""

from __future__ import annotations

import base64
import html
from collections.abc import Iterable, Sequence
from importlib import resources
from typing import Any

from tfamp.planning.plan_page import palette, security_policy, sources


def render_report(
    title: str,
    totals: Sequence[tuple[str, str]],
    sections: Iterable[str],
    *,
    with_plan: bool = False,
    with_inline_styles: bool = False,
) -> str:
    """Returns a self-contained page.

    Args:
        title: Its title, plain text.
        totals: What stands at the top: labels and values, plain text.
        sections: HTML of the sections.
        with_plan: Whether one of them shows the page of a plan, which has a script.
        with_inline_styles: Whether one of them has elements with styles of their own.

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
        "policy": security_policy(styles, scripts, images=True, inline_styles=with_inline_styles),
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


def frame(page: str, description: str) -> str:
    """Returns a frame that shows another page, which is in this one."""
    return (
        f'<iframe title="{html.escape(description)}" sandbox="allow-scripts" '
        f'srcdoc="{html.escape(page)}"></iframe>'
    )


def _totals(totals: Sequence[tuple[str, str]]) -> str:
    if not totals:
        return ""
    cells = "".join(
        f"<div><dt>{html.escape(label)}</dt><dd>{html.escape(value)}</dd></div>"
        for label, value in totals
    )
    return f"<dl>{cells}</dl>"


def _asset(name: str) -> Any:
    folder = resources.files("tfamp.diagnostics.reporting") / "report_assets"
    return (folder / name).read_text(encoding="utf-8")
