"""Facts and tables as aligned text, or as HTML for notebooks.

`fragment` makes the result of `_repr_html_`: one element with its style sheet, without
scripts or external resources. Its colours are inherited or transparent, to suit light and
dark notebooks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from tfamp.core.dtypes import LOW_PRECISION

# Limit of rows: long tables make a notebook slow and its file large. The
# number is a choice.
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


def table_lines(
    rows: Sequence[Sequence[str]], *, left: int | None = None, texts: int = 0
) -> list[str]:
    """Returns the rows as lines.

    The first `left` columns, by default all, and the last `texts` are aligned left.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    count = len(widths) - texts if left is None else left
    numbers = [str.rjust] * (len(widths) - count - texts)
    align = [str.ljust] * count + numbers + [str.ljust] * texts
    return [
        "  ".join(
            put(cell, width) for put, cell, width in zip(align, row, widths, strict=True)
        ).rstrip()
        for row in rows
    ]


def fragment(title: str, *parts: str) -> str:
    """Returns a title over parts that the other functions returned."""
    inside = "\n".join([f'<div class="title">{escape(title)}</div>', *parts])
    return f'<div class="tfamp"><style>{_STYLE}</style>\n{inside}\n</div>'


def facts(rows: Iterable[tuple[str, str]]) -> str:
    """Returns a table of names and facts."""
    line = '<tr><td class="name">{}</td><td>{}</td></tr>'
    return f"<table>{''.join(line.format(*map(escape, row)) for row in rows)}</table>"


def table(
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    left: int | None = None,
    texts: int = 0,
    rest: str = "",
) -> str:
    """Returns a table of at most 200 rows.

    Columns between the first `left` and the last `texts` are numbers. `rest` is where to find
    the omitted rows.
    """
    numbers = range(len(head) - texts if left is None else left, len(head) - texts)
    lines = [_row("th", head, numbers), *(_row("td", row, numbers) for row in rows[:MOST_ROWS])]
    left_out = len(rows) - MOST_ROWS
    more = lines_of([f"and {left_out:,} more{rest}"]) if left_out > 0 else ""
    return f"<table>{''.join(lines)}</table>{more}"


def _row(tag: str, cells: Sequence[str], numbers: range) -> str:
    shown = []
    for column, cell in enumerate(cells):
        is_low = tag == "td" and cell.removeprefix("mixed_") in LOW_PRECISION
        kind = "number" if column in numbers else "low" if is_low else ""
        name = f' class="{kind}"' if kind else ""
        shown.append(f"<{tag}{name}>{escape(cell)}</{tag}>")
    return f"<tr>{''.join(shown)}</tr>"


def lines_of(texts: Iterable[str]) -> str:
    """Returns the texts as lines."""
    return "".join(f"<div>{escape(text)}</div>" for text in texts)


def folded(title: str, inside: str) -> str:
    """Returns an element that is shown when its title is clicked."""
    return f"<details><summary>{escape(title)}</summary>{inside}</details>"
