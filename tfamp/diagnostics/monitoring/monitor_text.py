"""Records of a monitor -> a summary, as text and as a table of rich."""

from __future__ import annotations

import importlib.util
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

HEADINGS = (
    "gradients of",
    "zeros",
    "<2^-24",
    "<2^-14",
    ">65504",
    "unscaled <2^-24",
    "unscaled size",
)
_MOST_ROWS = 12
_RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def scale_text(scale: float | None, *, superscript: bool = False) -> str:
    """Returns a loss scale as people say it: "2^15" or "2¹⁵", "1000", "none"."""
    if scale is None:
        return "none"
    mantissa, exponent = math.frexp(scale)
    text = f"{scale:g}" if mantissa != 0.5 else f"2^{exponent - 1}"
    return raised(text) if superscript else text


def raised(text: str) -> str:
    """Returns a text with the numbers behind "^" raised: "2⁻²⁴" for "2^-24"."""
    return re.sub(r"\^(-?\d+)", lambda match: match[1].translate(_RAISED), text)


def summary_lines(record: Mapping[str, Any]) -> list[str]:
    """Returns what a record says of the run as a whole, in sentences."""
    gradients = record["gradients"]
    lines = [
        f"step {record['step']}: loss scale {scale_text(record['loss_scale'])}, skipped "
        f"{record['skipped_steps']} steps, {record['consecutive_skipped_steps']} in a row",
        f"suggested loss scale: {scale_text(record['suggested_scale'])}",
    ]
    lost = gradients["under_2**-24"]
    without = gradients["unscaled"]["under_2**-24"]
    lines.append(
        f"float16 flushes gradients under 2^-24 to zero: {lost:.1%} of them, {without:.1%} without "
        "loss scale"
    )
    if record["first_nonfinite"] is not None:
        lines.append(f"first variable with an inf or NaN: {record['first_nonfinite']}")
    return lines


def all_rows(record: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Returns one row for all gradients and one for each variable, those that lose most first."""
    variables = sorted(record["variables"].items(), key=lambda item: -item[1]["under_2**-14"])
    rows = [_row("all variables", record["gradients"])]
    return rows + [_row(name, described) for name, described in variables]


def _summary_rows(record: Mapping[str, Any]) -> list[tuple[str, ...]]:
    rows = all_rows(record)
    rest = len(rows) - 1 - _MOST_ROWS
    if rest <= 0:
        return rows
    return [*rows[: _MOST_ROWS + 1], (f"and {rest} others", *[""] * (len(HEADINGS) - 1))]


def to_text(history: Sequence[Mapping[str, Any]]) -> str:
    """Returns the summary of the last record as plain text."""
    if not history:
        return "no record yet"
    table = [HEADINGS, *_summary_rows(history[-1])]
    widths = [max(len(row[i]) for row in table) for i in range(len(HEADINGS))]
    lines = summary_lines(history[-1])
    for row in table:
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def to_rich(history: Sequence[Mapping[str, Any]]) -> Any:
    """Returns the summary of the last record as something rich prints."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    if not history:
        return Text("no record yet")
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    # A name may take several lines; the numbers are not cut.
    table.add_column(HEADINGS[0], overflow="fold")
    for heading in HEADINGS[1:]:
        table.add_column(heading, justify="right", min_width=max(map(len, heading.split())))
    for row in _summary_rows(history[-1]):
        table.add_row(*(Text(cell) for cell in row))
    return Group(*(Text(line) for line in summary_lines(history[-1])), table)


def write_summary(history: Sequence[Mapping[str, Any]], file: Any) -> None:
    """Writes the summary to a text file: a table where rich is installed, else plain text."""
    if importlib.util.find_spec("rich") is None:
        file.write(to_text(history) + "\n")
        return
    from rich.console import Console

    Console(file=file).print(to_rich(history))


def _row(name: str, described: Mapping[str, Any]) -> tuple[str, ...]:
    exponents = [int(e) for e in described["exponents"]]
    span = f"2^{min(exponents)}..2^{max(exponents) + 1}" if exponents else "-"
    shares = (described[key] for key in ("zeros", "under_2**-24", "under_2**-14", "over_65504"))
    flushed = described["unscaled"]["under_2**-24"]
    return (name, *(f"{share:.1%}" for share in shares), f"{flushed:.1%}", span)
