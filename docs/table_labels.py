"""A hook of MkDocs: names the column in every cell of a table, for screens without room for it.

`assets/site.css` shows a row as a list there, a line for each cell, with the name before it.
"""

from __future__ import annotations

import html
import re
from itertools import zip_longest
from typing import Any

_TABLE = re.compile(r"<table>.*?</table>", re.DOTALL)
_HEADER = re.compile(r"<th[^>]*>(.*?)</th>", re.DOTALL)
_ROW = re.compile(r"<tr>(.*?)</tr>", re.DOTALL)
_CELL = re.compile(r"<td")
_TAG = re.compile(r"<[^>]+>")


def on_page_content(content: str, **_: Any) -> str:
    """Returns the HTML of a page with a `data-label` in each cell of its plain tables."""
    return _TABLE.sub(lambda found: _labelled(found[0]), content)


def _labelled(table: str) -> str:
    names = [_TAG.sub("", header).strip() for header in _HEADER.findall(table)]

    def row(found: re.Match[str]) -> str:
        first, *cells = _CELL.split(found[0])
        labelled = (
            f'<td data-label="{html.escape(html.unescape(name or ""), quote=True)}"{cell}'
            for name, cell in zip_longest(names[: len(cells)], cells)
        )
        return first + "".join(labelled)

    return _ROW.sub(row, table)
