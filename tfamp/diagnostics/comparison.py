"""What a comparison of float32 with mixed precision found: errors, rows, text and JSON."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tfamp.core.dtypes import float_format
from tfamp.reports import tables
from tfamp.reports.tables import table_lines


@dataclass(frozen=True, slots=True)
class ComparisonRow:
    """One layer.

    Attributes:
        layer: The layer's path.
        kind: Class of the layer.
        dtype: What it computes in, in the mixed run.
        relative_error: Of its outputs in the mixed run over those in the float32 run: the largest
            difference over the largest magnitude. It holds all errors made up to there; inf where
            a value is not finite that should be.
        own_error: The same for this layer alone in the low dtype, on float32 inputs; None where it
            computes in float32, or cannot be run so.
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
        model: Name of the model.
        dtype: The low dtype.
        rows: Its layers, in the order in which they ended.
        output_error: Relative error of the outputs in mixed precision.
        bound: The bound that was asked for, or None.
        keep_float32: The shortest list found of layers to keep in float32, with all that is in
            them, that brings the output error under the bound. Empty where it is under the bound
            already, and where no bound was asked for; None where no list brings it there.
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
        lines = table_lines([_HEAD, *self._ordered_cells()], left=3)
        return "\n".join([*lines, "", *self._verdict()])

    def _ordered_cells(self) -> list[tuple[str, ...]]:
        ordered = sorted(self.rows, key=lambda row: (-(row.own_error or 0.0), -row.relative_error))
        return [_cells(row) for row in ordered]

    def _repr_html_(self) -> str:
        rows = tables.table(_HEAD, self._ordered_cells(), left=3, rest=": to_json() has all")
        verdict = tables.lines_of(self._verdict())
        title = f"Comparison of {self.model}"
        return tables.fragment(title, verdict, rows)

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
        # JSON has no inf and no NaN.
        plain = json.loads(json.dumps(facts), parse_constant=lambda each: str(float(each)))
        return json.dumps(plain, indent=2)


_HEAD = ("layer", "kind", "dtype", "error", "own", "largest", "too large", "too small")


def _cells(row: ComparisonRow) -> tuple[str, ...]:
    own = "" if row.own_error is None else _number(row.own_error)
    shares = (f"{share:.1%}" if share else "0" for share in (row.overflow, row.underflow))
    error, largest = _number(row.relative_error), _number(row.max)
    return (row.layer, row.kind, row.dtype, error, own, largest, *shares)


def _number(value: float) -> str:
    return f"{value:.2g}"


# ---- Errors --------------------------------------------------------------------------------------


def relative_error(value: Any, reference: Any) -> float:
    """Returns the largest difference over the largest magnitude of what is finite in the reference.

    A value that is not finite where the reference is makes the error inf.
    """
    value, reference = _float64(value), _float64(reference)
    if value.shape != reference.shape:
        raise ValueError(f"The shapes differ: {value.shape} and {reference.shape}.")
    finite = np.isfinite(reference)
    value, reference = value[finite], reference[finite]
    if not np.isfinite(value).all():
        return math.inf
    difference = float(np.max(np.abs(value - reference), initial=0.0))
    magnitude = float(np.max(np.abs(reference), initial=0.0))
    if not difference:
        return 0.0
    return difference / magnitude if magnitude else math.inf


def largest_error(values: Sequence[Any], references: Sequence[Any]) -> float:
    """Returns the largest relative error of several tensors; 0 for none."""
    return max(map(relative_error, values, references), default=0.0)


def range_shares(values: Sequence[Any], dtype: str) -> dict[str, Any]:
    """Returns `max`, `overflow` and `underflow` of some values, as a `ComparisonRow` has them."""
    limits = float_format(dtype)
    size = np.concatenate([np.zeros(0), *(np.abs(_float64(value)).ravel() for value in values)])
    count = max(size.size, 1)
    finite = size[np.isfinite(size)]
    small = (finite > 0) & (finite < limits.smallest_subnormal)
    return {
        "max": float(np.max(finite, initial=0.0)),
        "overflow": float(np.count_nonzero(finite > limits.max) / count),
        "underflow": float(np.count_nonzero(small) / count),
    }


def _float64(value: Any) -> np.ndarray[Any, Any]:
    return np.asarray(value).astype(np.float64)
