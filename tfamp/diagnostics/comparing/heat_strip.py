"""A `Comparison` as a strip of coloured cells, in HTML that needs nothing else; framework-free."""

from __future__ import annotations

import html
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tfamp.diagnostics.comparing.comparison import Comparison, ComparisonRow

# Errors from here on are the darkest; under a millionth, float32's own rounding, they are white.
_FULL, _NONE = 1.0, 1e-6
_WIDTH = 12
_TEXT = "font:13px/1.5 system-ui,sans-serif"


def render_strip(comparison: Comparison) -> str:
    """Returns the strip as one `<figure>`."""
    return "\n".join(_lines(comparison))


def _lines(comparison: Comparison) -> Iterator[str]:
    kept = set(comparison.keep_float32 or ())
    title = (
        f"{comparison.model}, {comparison.dtype} against float32: "
        f"output error {comparison.output_error:.2g}"
    )
    yield f'<figure class="tfamp-heat-strip" style="margin:1em 0;{_TEXT}">'
    yield f"<figcaption>{html.escape(title)}</figcaption>"
    for name, what in (("error so far", "relative_error"), ("own error", "own_error")):
        yield '<div style="display:flex;align-items:center;margin:2px 0">'
        yield f'<span style="flex:0 0 6.5em">{name}</span>'
        yield '<div style="display:flex;flex-wrap:wrap">'
        for row in comparison.rows:
            yield _cell(row, getattr(row, what), row.layer in kept)
        yield "</div></div>"
    yield _legend()
    yield "</figure>"


def _cell(row: ComparisonRow, error: float | None, kept: bool) -> str:
    tip = f"{row.layer} ({row.kind}, {row.dtype})\nerror {row.relative_error:.2g}"
    if row.own_error is not None:
        tip += f", own {row.own_error:.2g}"
    tip += f"\nlargest {row.max:.2g}, out of range {row.share_out_of_range:.1%}"
    if kept:
        tip += "\nto keep in float32"
    edge = "2px solid #1a6" if kept else "1px solid #999"
    return (
        f'<span title="{html.escape(tip)}" style="box-sizing:border-box;width:{_WIDTH}px;'
        f'height:24px;border:{edge};background:{color(error)}"></span>'
    )


def color(error: float | None) -> str:
    """Returns the colour of an error: white to red by its logarithm, black where it is not finite.

    Args:
        error: A relative error; None for a row that has none, which is grey.

    Example:
        >>> color(0.0), color(1.0), color(float("inf"))
        ('#ffffff', '#b10026', '#000000')
    """
    if error is None:
        return "#dddddd"
    if not math.isfinite(error):
        return "#000000"
    if error <= _NONE:
        return "#ffffff"
    part = min(math.log(error / _NONE) / math.log(_FULL / _NONE), 1.0)
    ends = ((255, 255, 255), (254, 178, 76), (177, 0, 38))
    low, high, where = (*ends[:2], 2 * part) if part < 0.5 else (*ends[1:], 2 * part - 1)
    mixed = (round(a + (b - a) * where) for a, b in zip(low, high, strict=True))
    return "#" + "".join(f"{each:02x}" for each in mixed)


def _legend() -> str:
    samples = (1e-6, 1e-4, 1e-2, 1.0, math.inf)
    cells = "".join(
        f'<span style="padding:0 .6em;color:{"#fff" if each >= 1 else "#000"};'
        f'background:{color(each)};border:1px solid #999">{each:g}</span>'
        for each in samples
    )
    return f'<div style="margin-top:4px">relative error {cells}</div>'
