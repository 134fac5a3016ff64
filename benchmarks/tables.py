"""Tables as plain text and as Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Table:
    """Cells with a title.

    Attributes:
        title: Its heading.
        headers: Names of the columns.
        rows: The cells.
        left: How many columns, from the first, are words.
        notes: Sentences below it.
    """

    title: str
    headers: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    left: int = 1
    notes: tuple[str, ...] = ()


def to_text(table: Table) -> str:
    """The table in columns of spaces, readable in a file."""
    cells = (table.headers, *table.rows)
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = []
    for row in cells:
        parts = [
            cell.ljust(width) if column < table.left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(parts).rstrip())
    body = "\n".join([table.title, "", *lines, *(f"- {note}" for note in table.notes)])
    return f"{body}\n"


def to_markdown(table: Table, *, heading: bool = True) -> str:
    """The table in Markdown, below its title as a heading, or alone."""
    head, *body = ["| " + " | ".join(row) + " |" for row in (table.headers, *table.rows)]
    sides = ["---|" if column < table.left else "---:|" for column in range(len(table.headers))]
    parts = [f"### {table.title}"] if heading else []
    parts.append("\n".join([head, "|" + "".join(sides), *body]))
    if table.notes:
        parts.append("\n".join(f"- {note}" for note in table.notes))
    return "\n\n".join(parts) + "\n"


def show(tables: Sequence[Table]) -> None:
    """Prints tables as plain text."""
    for table in tables:
        print(to_text(table))
