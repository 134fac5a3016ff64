"""What a comparison of float32 with mixed precision found, as rows, text, JSON and HTML."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tfamp.diagnostics.comparing.heat_strip import render_strip


@dataclass(frozen=True, slots=True)
class ComparisonRow:
    """One layer, or one op of a function.

    Attributes:
        layer: The layer's path; the node's name for an op.
        kind: Class of the layer; type of the op.
        dtype: What it computes in, in the mixed run.
        relative_error: Of its outputs in the mixed run over those in the float32 run: the largest
            difference over the largest magnitude. It holds all errors made up to there; inf where
            a value is not finite that should be.
        own_error: The same for this layer alone in the low dtype, on float32 inputs; None where it
            computes in float32, or cannot be run so. For an op: what its error exceeds that of its
            inputs by.
        max: Largest magnitude of its float32 outputs.
        overflow: Share of its float32 outputs that are too large for the low dtype.
        underflow: Share of its float32 outputs that are too small for it, and not 0.
        calls: How many times it was called; the row tells the largest figures of all calls.

    Example:
        >>> row = ComparisonRow("dense", "Dense", "float16", 0.01, 0.01, 7e4, 0.25, 0.5)
        >>> row.share_out_of_range
        0.75
    """

    layer: str
    kind: str
    dtype: str
    relative_error: float
    own_error: float | None
    max: float
    overflow: float
    underflow: float
    calls: int = 1

    @property
    def share_out_of_range(self) -> float:
        """Share of the float32 outputs that the low dtype cannot hold."""
        return self.overflow + self.underflow


@dataclass(frozen=True)
class Comparison:
    """What `compare` found.

    Attributes:
        model: Name of the model or function.
        dtype: The low dtype.
        rows: Its layers, or ops, in the order in which they ended.
        output_error: Relative error of the outputs in mixed precision.
        bound: The bound that was asked for, or None.
        keep_float32: The shortest list found of layers to keep in float32, with all that is in
            them, that brings the output error under the bound. Empty where it is under the bound
            already, and where no bound was asked for; None where no list brings it there. For
            `tfamp.rewrite` they are names of nodes; for a function under autocast, op types.
        proved_error: The output error of a run with these layers in float32; None without a list.
        runs: How many lists were run to find it.
        noise: Relative error between two runs in float32: 0 unless the model is random. No error
            below it means anything.

    Example:
        >>> rows = [ComparisonRow(n, "Dense", "float16", e, e, 1.0, 0.0, 0.0) for n, e in
        ...         [("first", 0.001), ("second", 0.1)]]
        >>> Comparison("model", "float16", tuple(rows), output_error=0.1).worst.layer
        'second'
    """

    model: str
    dtype: str
    rows: tuple[ComparisonRow, ...]
    output_error: float
    bound: float | None = None
    keep_float32: tuple[str, ...] | None = ()
    proved_error: float | None = None
    runs: int = 0
    noise: float = 0.0

    @property
    def worst(self) -> ComparisonRow | None:
        """The row with the largest error of its own, the first one of equals; None without any."""
        own = [row for row in self.rows if row.own_error is not None]
        return max(own, key=lambda row: row.own_error or 0.0, default=None)

    def to_text(self) -> str:
        """Returns a table with the largest errors first, and what to keep in float32."""
        heads = ("layer", "kind", "dtype", "error", "own", "largest", "too large", "too small")
        ordered = sorted(self.rows, key=lambda row: (-(row.own_error or 0.0), -row.relative_error))
        rows = [heads, *map(_cells, ordered)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = []
        for row in rows:
            words = [cell.ljust(width) for cell, width in zip(row[:3], widths[:3], strict=True)]
            words += [cell.rjust(width) for cell, width in zip(row[3:], widths[3:], strict=True)]
            lines.append("  ".join(words).rstrip())
        return "\n".join([*lines, "", *self._verdict()])

    def _verdict(self) -> Iterator[str]:
        yield f"output error of {self.model} in {self.dtype}: {_number(self.output_error)}"
        if not any(row.dtype == self.dtype for row in self.rows):
            yield f"nothing of it computes in {self.dtype}: there was nothing to compare"
        if self.noise:
            yield (
                f"two runs in float32 differ by {_number(self.noise)}: the model is random, and "
                "smaller errors mean nothing"
            )
        if self.bound is None:
            return
        bound = _number(self.bound)
        if self.keep_float32 is None:
            yield f"no list of layers in float32 brings it under {bound}; {self.runs} were run"
        elif not self.keep_float32:
            yield f"it is under {bound} with no layer kept in float32"
        else:
            yield (
                f"under {bound} with these in float32, proved by a run "
                f"({_number(self.proved_error or 0.0)}; {self.runs} lists were run):"
            )
            yield from (f"  {layer}" for layer in self.keep_float32)

    def to_json(self) -> str:
        """Returns one JSON object with the attributes as keys; inf is written as "inf"."""
        facts = dataclasses.asdict(self)
        for row, values in zip(self.rows, facts["rows"], strict=True):
            values["share_out_of_range"] = row.share_out_of_range
        return json.dumps(_plain(facts), indent=2)

    def to_html_fragment(self) -> str:
        """Returns a heat strip: a cell for each row, coloured by the logarithm of its error.

        The HTML needs no style sheet, no script and no network, so that a page can embed it.
        """
        return render_strip(self)


def _cells(row: ComparisonRow) -> tuple[str, ...]:
    own = "" if row.own_error is None else _number(row.own_error)
    shares = (f"{share:.1%}" if share else "0" for share in (row.overflow, row.underflow))
    error, largest = _number(row.relative_error), _number(row.max)
    return (row.layer, row.kind, row.dtype, error, own, largest, *shares)


def _number(value: float) -> str:
    return f"{value:.2g}"


def _plain(value: Any) -> Any:
    """JSON has no inf and no NaN."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    return list(map(_plain, value)) if isinstance(value, list | tuple) else value
