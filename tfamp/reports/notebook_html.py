"""Facts and tables of text -> HTML that a notebook shows in the place of a value.

What `_repr_html_` returns: one element with its style sheet, no script, nothing loaded from
anywhere. Colours are the notebook's own and shades of grey between, so that it is light on light
pages and dark on dark ones.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

from tfamp.core.dtypes import LOW_PRECISION

# More rows than anyone reads make a notebook slow, and its file large.
MOST_ROWS = 200

_STYLE = """
.tfamp{font:13px/1.5 system-ui,sans-serif;color:inherit;max-width:100%;overflow-x:auto}
.tfamp table{border-collapse:collapse;margin:.3em 0 .8em;width:auto;border:0;background:none}
.tfamp th,.tfamp td{padding:.15em .8em;text-align:left;vertical-align:top;border:0;
border-bottom:1px solid rgba(128,128,128,.35);background:none;color:inherit;font-size:13px}
.tfamp th{font-weight:600;border-bottom-width:2px}
.tfamp .number{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}
.tfamp .name{font-weight:600;white-space:nowrap}
.tfamp .low{background:rgba(0,158,115,.22)}
.tfamp .title{font-weight:600;font-size:15px}
.tfamp summary{cursor:pointer}
.tfamp pre{margin:.3em 0;white-space:pre-wrap;background:none;color:inherit;font-size:12px}
"""


def fragment(title: str, *parts: str) -> str:
    """Returns the whole: a title over what the other functions here returned."""
    inside = "\n".join([f'<div class="title">{html.escape(title)}</div>', *parts])
    return f'<div class="tfamp"><style>{_STYLE}</style>\n{inside}\n</div>'


def facts(rows: Iterable[tuple[str, str]]) -> str:
    """Returns a table of names and what is to be said of each."""
    lines = (
        f'<tr><td class="name">{html.escape(name)}</td><td>{html.escape(text)}</td></tr>'
        for name, text in rows
    )
    return f"<table>{''.join(lines)}</table>"


def table(
    head: Sequence[str], rows: Sequence[Sequence[str]], *, left: int | None = None, rest: str = ""
) -> str:
    """Returns a table of at most 200 rows; cells after the first `left` columns are numbers.

    `rest` says where the rows are that are left out.
    """
    count = len(head) if left is None else left
    titles = "".join(
        f'<th class="number">{html.escape(each)}</th>' if i >= count else _head(each)
        for i, each in enumerate(head)
    )
    lines = [
        "<tr>" + "".join(_cell(each, i >= count) for i, each in enumerate(row)) + "</tr>"
        for row in rows[:MOST_ROWS]
    ]
    text = f"<table><tr>{titles}</tr>{''.join(lines)}</table>"
    left_out = len(rows) - MOST_ROWS
    return text if left_out <= 0 else text + lines_of([f"and {left_out:,} more{rest}"])


def lines_of(texts: Iterable[str]) -> str:
    """Returns each text as a line."""
    return "".join(f"<div>{html.escape(text)}</div>" for text in texts)


def folded(title: str, inside: str) -> str:
    """Returns something that is shown when its title is clicked."""
    return f"<details><summary>{html.escape(title)}</summary>{inside}</details>"


def _head(text: str) -> str:
    return f"<th>{html.escape(text)}</th>"


def _cell(text: str, is_number: bool) -> str:
    kind = "number" if is_number else "low" if text.removeprefix("mixed_") in LOW_PRECISION else ""
    return (
        f'<td class="{kind}">{html.escape(text)}</td>' if kind else f"<td>{html.escape(text)}</td>"
    )
