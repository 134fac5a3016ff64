"""What a tuning found: a row for each candidate, the chosen one, text, JSON and HTML."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from tfamp.reports import tables
from tfamp.reports.tables import table_lines

FLOAT32 = "float32"
_HEADS = ("candidate", "time", "half of the times", "over float32", "error", "low ops", "")


@dataclass(frozen=True, slots=True)
class TuneRow:
    """One candidate.

    Attributes:
        candidate: Its name: "float32", or a placement of `tfamp.rewrite`.
        seconds: Median time of a call.
        quartiles: Between these two lies the middle half of the times.
        error: Relative error of its outputs against float32's: for each float output the root mean
            square of the differences over that of the values, and of these the largest. Values that
            are not finite in float32 do not count; inf where others are not finite, NaN where there
            is nothing to compare.
        chosen: Whether it is the one to use.
        low_nodes: How many nodes of its graph compute in the low dtype.

    Example:
        >>> TuneRow("lists", 0.002, (0.0019, 0.0022), 0.004, chosen=True, low_nodes=12).candidate
        'lists'
    """

    candidate: str
    seconds: float
    quartiles: tuple[float, float]
    error: float
    chosen: bool
    low_nodes: int = 0


@dataclass(frozen=True)
class TuneReport:
    """What `tune` found.

    Attributes:
        function: Name of the function.
        dtype: The low dtype.
        rows: A row for each candidate, float32's first; exactly one is chosen.
        max_error: The bound that was asked for, or None.
        rounds: How often each candidate that could still be chosen had its turn.
        best: The function to use from now on. Where float32 is chosen, that is the function as it
            was given, as a `tf.function`.
        notes: What else there is to know, in sentences.

    Example:
        >>> rows = (
        ...     TuneRow("float32", 0.002, (0.0019, 0.0021), 0.0, chosen=False),
        ...     TuneRow("lists", 0.001, (0.0009, 0.0011), 0.004, chosen=True, low_nodes=3),
        ... )
        >>> report = TuneReport("step", "bfloat16", rows, max_error=None, rounds=10)
        >>> report.chosen.candidate, report.speed_up
        ('lists', 2.0)
    """

    function: str
    dtype: str
    rows: tuple[TuneRow, ...]
    max_error: float | None
    rounds: int
    best: Any = field(default=None, repr=False, compare=False)
    notes: tuple[str, ...] = ()

    @property
    def chosen(self) -> TuneRow:
        """The row of the candidate that is the one to use."""
        return next(row for row in self.rows if row.chosen)

    @property
    def speed_up(self) -> float:
        """How many times as fast as float32 the chosen candidate is."""
        return self.rows[0].seconds / self.chosen.seconds

    def to_text(self) -> str:
        """Returns a table of the candidates, and in words what to use."""
        table = table_lines([_HEADS, *(_cells(self, row) for row in self.rows)])
        return "\n".join([*table, "", *self._verdict()])

    def to_json(self) -> str:
        """Returns one JSON object with the attributes as keys, without `best`; NaN is "nan"."""
        facts = {
            each.name: getattr(self, each.name)
            for each in dataclasses.fields(self)
            if each.name not in ("best", "rows")
        }
        facts["rows"] = [dataclasses.asdict(row) for row in self.rows]
        # JSON has no inf and no NaN.
        plain = json.loads(json.dumps(facts), parse_constant=lambda each: str(float(each)))
        return json.dumps(plain, indent=2)

    def _repr_html_(self) -> str:
        """Returns what a notebook shows: the table, and in words what to use; it loads nothing."""
        rounds = f"{self.rounds} rounds by turns"
        return tables.fragment(
            f"{self.function}, {self.dtype} against float32, {rounds}",
            tables.table(_HEADS, [_cells(self, row) for row in self.rows], left=1),
            tables.lines_of(self._verdict()),
        )

    def _verdict(self) -> Iterator[str]:
        chosen = self.chosen
        if chosen.candidate == FLOAT32:
            yield f"low precision does not pay here: {self._why_float32()}"
        else:
            yield (
                f"chosen: {chosen.candidate}, {self.speed_up:.2f} times as fast as float32, with "
                f"an error of {chosen.error:.2g}"
            )
            if not chosen.low_nodes:
                yield f"no op of it is worth converting to {self.dtype}: it computes in float32"
            elif chosen.quartiles[1] >= self.rows[0].quartiles[0]:
                yield "the times of both overlap: the difference may be noise"
        yield from self.notes

    def _why_float32(self) -> str:
        faster = min(self.rows, key=lambda row: row.seconds)
        if faster.candidate == FLOAT32:
            return f"no candidate in {self.dtype} is faster than float32"
        if math.isinf(faster.error):
            what = "it gives inf or NaN where float32 does not"
        elif self.max_error is None or faster.error <= self.max_error:
            what = "not in three quarters of the rounds: that may be noise"
        elif math.isnan(faster.error):
            what = "its error cannot be told"
        else:
            what = f"its error of {faster.error:.2g} is over the bound"
        return f"{faster.candidate} is {self._gain(faster):.2f} times as fast, but {what}"

    def _gain(self, row: TuneRow) -> float:
        return self.rows[0].seconds / row.seconds


def _cells(report: TuneReport, row: TuneRow) -> tuple[str, ...]:
    low, high = map(time_text, row.quartiles)
    gain = f"{report.rows[0].seconds / row.seconds:.2f}"
    mark = "<- chosen" if row.chosen else ""
    times = (time_text(row.seconds), f"{low} to {high}")
    return (row.candidate, *times, gain, f"{row.error:.2g}", str(row.low_nodes), mark)


def time_text(seconds: float) -> str:
    """Returns a time as people read it, such as "12.3 ms"."""
    for factor, unit in ((1.0, "s"), (1e3, "ms")):
        if seconds * factor >= 1.0:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"
