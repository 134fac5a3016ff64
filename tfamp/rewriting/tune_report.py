"""The report of `tfamp.tune`: a row for each candidate, the choice, and why."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from tfamp.planning.structures import FLOAT32
from tfamp.planning.ways import Way
from tfamp.reports import tables
from tfamp.reports.tables import table_lines

_XLA = Way(FLOAT32, is_compiled=True).name
_HEADS = ("candidate", "time", "quartiles", "over float32", "error", "low ops", "")


@dataclass(frozen=True, slots=True)
class TuneRow:
    """One candidate.

    Attributes:
        candidate: Its name: "float32", a placement of `tfamp.rewrite`, or one of these with the
            whole function compiled by XLA: "xla", "lists_xla" or "min_cut_xla".
        seconds: Median time of a call.
        quartiles: Lower and upper quartile of the times.
        error: Relative error of its outputs against float32's: for each float output the root
            mean square of the differences over the root mean square of the values, and of these
            the largest. Values that are not finite in float32 do not count; inf if others are
            not finite, NaN without values to compare. In a report from the cache it is the
            error on the arguments of the measured call.
        chosen: Whether it is the one to use.
        low_nodes: Number of nodes of its graph that compute in the low dtype.
        same_as: The candidate of an earlier row with the same graph, which has these times and
            this error; "" if the graph was measured for this row.

    Example:
        >>> row = TuneRow("lists", 0.002, (0.0019, 0.0022), 0.004, chosen=True, low_nodes=12)
        >>> row.candidate
        'lists'
    """

    candidate: str
    seconds: float
    quartiles: tuple[float, float]
    error: float
    chosen: bool
    low_nodes: int = 0
    same_as: str = ""

    @classmethod
    def of(cls, fields: Any) -> TuneRow:
        """Makes a row from the dict of its fields; raises an error if a field is wrong."""
        low, high = map(float, fields["quartiles"])
        numbers = {name: float(fields[name]) for name in ("seconds", "error")}
        return cls(**{**fields, **numbers, "quartiles": (low, high)})


@dataclass(frozen=True)
class TuneReport:
    """The result of `tune`.

    Attributes:
        function: Name of the function.
        dtype: The low dtype.
        rows: A row for each candidate, float32's first; exactly one is chosen.
        max_error: The bound on errors, or None.
        rounds: The largest number of times measured for a candidate.
        source: Whether the choice was measured now or before, and the file that keeps it.
        dropped: Candidates that were not measured, since they compile too long.
        unseeded: Types of ops that draw other random numbers in each run, which counts as an
            error.
        left_out: Ways to run the function that were not measured, each with the reason.
        incumbent: The candidate that is chosen unless another one is faster by more than the
            noise: the one that level "auto" of `prepare` means, else "float32".
        noise: Standard deviation of a round's ratio of two times; NaN if it is not known.
        redrawn: Types of ops that draw other random numbers if XLA compiles them, which counts as
            an error of these candidates.
        best: The function to use from now on. If float32 is chosen, it is the function itself,
            as a `tf.function`; if XLA compiles it as a whole, it has `jit_compile=True`.

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
    source: str = "measured now"
    dropped: tuple[str, ...] = ()
    unseeded: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    incumbent: str = FLOAT32
    noise: float = math.nan
    redrawn: tuple[str, ...] = ()
    best: Any = field(default=None, repr=False, compare=False)

    @property
    def chosen(self) -> TuneRow:
        """The row of the candidate to use."""
        return next(row for row in self.rows if row.chosen)

    @property
    def speed_up(self) -> float:
        """Time of float32 over the time of the chosen candidate."""
        return self.rows[0].seconds / self.chosen.seconds

    def to_text(self) -> str:
        """Returns a table of the candidates, and a verdict."""
        return "\n".join([*table_lines([_HEADS, *self._cells()]), "", *self._verdict()])

    def _repr_html_(self) -> str:
        """Returns self-contained HTML for a notebook: the table and the verdict."""
        return tables.fragment(
            f"{self.function}, {self.dtype} against float32, {self.rounds} rounds",
            tables.table(_HEADS, self._cells(), left=1),
            tables.lines_of(self._verdict()),
        )

    def _cells(self) -> list[tuple[str, ...]]:
        return [
            (
                row.candidate,
                time_text(row.seconds),
                " to ".join(map(time_text, row.quartiles)),
                f"{self.rows[0].seconds / row.seconds:.2f}",
                f"{row.error:.2g}",
                str(row.low_nodes),
                "<- chosen" if row.chosen else row.same_as and f"same graph as {row.same_as}",
            )
            for row in self.rows
        ]

    def _verdict(self) -> Iterator[str]:
        chosen = self.chosen
        if chosen.candidate == FLOAT32:
            yield f"low precision does not pay here: {self._why_float32()}"
        else:
            yield (
                f"chosen: {chosen.candidate}, {self.speed_up:.2f} times as fast as float32, "
                f"with an error of {chosen.error:.2g}"
            )
            if chosen.candidate == _XLA:
                yield "it computes in float32, compiled by XLA as a whole"
            elif not chosen.low_nodes:
                yield (
                    f"none of its ops is worth converting to {self.dtype}: it computes in float32"
                )
            yield from self._why_incumbent()
        yield from self._compiler_alone()
        yield from (f"dropped: {name} takes too long to compile" for name in self.dropped)
        yield from (f"left out: {reason}" for reason in self.left_out)
        yield self.source
        if all(math.isnan(row.error) for row in self.rows):
            yield (
                "float32 returns no float tensor with finite values, so the errors are "
                "unknown: have the function return the results to judge it by"
            )
        if self.redrawn:
            yield (
                f"XLA draws other numbers for {', '.join(self.redrawn)}, and errors of what it "
                "compiles as a whole include that: judge them by a function without, such as "
                "one with training=False"
            )
        if self.unseeded:
            yield (
                f"{', '.join(self.unseeded)} drew other numbers in each run, and errors "
                "include that: call tf.random.set_seed, give the ops a seed, or draw with "
                "keras.random"
            )

    def _why_float32(self) -> str:
        faster = min(self.rows, key=lambda row: row.seconds)
        if faster.candidate == FLOAT32:
            return f"no candidate in {self.dtype} is faster than float32"
        why = f"its error is {faster.error:.2g}"
        if is_within(faster.error, self.max_error):
            why = f"not in three quarters of the rounds{self._noise_text()}: that may be noise"
        gain = self.rows[0].seconds / faster.seconds
        return f"{faster.candidate} is {gain:.2f} times as fast, but {why}"

    def _why_incumbent(self) -> Iterator[str]:
        """Says why a candidate with a shorter time was not chosen."""
        exact = [row for row in self.rows if is_within(row.error, self.max_error)]
        faster = min(exact, key=lambda row: row.seconds, default=self.chosen)
        if faster.seconds < self.chosen.seconds:
            yield (
                f"{self.incumbent} is what level 'auto' takes: {faster.candidate} is "
                f"{self.chosen.seconds / faster.seconds:.2f} times as fast, but not in three "
                f"quarters of the rounds{self._noise_text()}: that may be noise"
            )

    def _noise_text(self) -> str:
        known = not math.isnan(self.noise)
        return f", or by no more than the noise, {self.noise:.1%} a round" if known else ""

    def _compiler_alone(self) -> Iterator[str]:
        """Says what XLA brought to each way that was also timed without it."""
        seconds = {row.candidate: row.seconds for row in self.rows}
        pairs = {f"{name}_{_XLA}": name for name in seconds} | {_XLA: FLOAT32}
        gains = [
            f"{seconds[name] / seconds[compiled]:.2f} times as fast in {name} ({compiled})"
            for compiled, name in pairs.items()
            if compiled in seconds
        ]
        if gains:
            yield f"the compiler alone: {', '.join(gains)}"


def time_text(seconds: float) -> str:
    """Returns a time for people, such as "12.3 ms"."""
    return f"{1e3 * seconds:.4g} ms"


def is_within(error: float, bound: float | None) -> bool:
    """Whether an error is allowed; an unknown error (NaN) is allowed only without a bound."""
    return not math.isinf(error) if bound is None else error <= bound
