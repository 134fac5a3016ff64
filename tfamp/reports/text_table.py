"""Rows of text -> lines of a table with aligned columns."""

from __future__ import annotations

from collections.abc import Sequence


def table_lines(rows: Sequence[Sequence[str]], *, left: int | None = None) -> list[str]:
    """Returns a line for each row; cells are aligned left, after the first `left` columns right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    count = len(widths) if left is None else left
    align = [str.ljust] * count + [str.rjust] * (len(widths) - count)
    return [
        "  ".join(
            put(cell, width) for put, cell, width in zip(align, row, widths, strict=True)
        ).rstrip()
        for row in rows
    ]
