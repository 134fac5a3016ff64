"""A hook of MkDocs: prepares the tables of a page for screens without room for them.

Names the column in each cell: `assets/site.css` shows a row as a list there, a line for each cell,
with the name before it. A table of numbers is marked, and stays a table that scrolls.
"""

from __future__ import annotations

import html
import re
from itertools import zip_longest
from typing import Any

_TABLE = re.compile(r"<table>.*?</table>", re.DOTALL)
_HEADER = re.compile(r"<th[^>]*>(.*?)</th>", re.DOTALL)
_ROW = re.compile(r"<tr\b[^>]*>(.*?)</tr>", re.DOTALL)
_CELL = re.compile(r"<td")
_CELL_TEXT = re.compile(r"<td[^>]*>(.*?)</td>", re.DOTALL)
_TAG = re.compile(r"<[^>]+>")
# Characters of a number with its unit, or of a word such as "none" in a column of numbers.
_NUMBER = 12


def on_page_content(content: str, **_: Any) -> str:
    """Returns the HTML of a page with its plain tables labelled, and those of numbers marked.

    A cell gets a `data-label`, a table of numbers gets `data-numbers`; no `class`, because the
    theme's rules are for tables without one.
    """
    return _TABLE.sub(lambda found: _labelled(found[0]), content)


def _labelled(table: str) -> str:
    names = [_text(header) for header in _HEADER.findall(table)]
    cells = [found for row in _ROW.findall(table) for found in _CELL_TEXT.findall(row)[1:]]

    def row(found: re.Match[str]) -> str:
        first, *cells = _CELL.split(found[0])
        labelled = (
            f'<td data-label="{html.escape(name or "", quote=True)}"{cell}'
            for name, cell in zip_longest(names[: len(cells)], cells)
        )
        return first + "".join(labelled)

    mark = "<table data-numbers>" if _are_numbers([_text(cell) for cell in cells]) else "<table>"
    return mark + _ROW.sub(row, table).removeprefix("<table>")


def _are_numbers(cells: list[str]) -> bool:
    """Whether all cells are short and most of those that are not empty have a digit."""
    filled = [cell for cell in cells if cell.strip("-")]
    with_digit = sum(any(map(str.isdigit, cell)) for cell in filled)
    return all(len(cell) <= _NUMBER for cell in cells) and 2 * with_digit > len(filled)


def _text(cell: str) -> str:
    return html.unescape(_TAG.sub("", cell)).strip()
