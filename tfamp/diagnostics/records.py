"""Records of a monitor, plain dicts: made, read again, and shown as text; framework-free."""

from __future__ import annotations

import itertools
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from tfamp.diagnostics.exponents import SHARES, ExponentHistogram, histogram, suggested_scale, total
from tfamp.reports.text_table import table_lines

if TYPE_CHECKING:
    from tfamp.diagnostics.step_statistics import Sample

_SHARES = ("zeros", "<2^-24", "<2^-14", ">65504")
_HEADINGS = ("gradients of", *_SHARES, "unscaled <2^-24", "unscaled size")
# A step, its loss scale, and the number of steps skipped before.
PastStep: TypeAlias = tuple[int, float, int]
_MOST_ROWS = 12


def make_record(
    sample: Sample, names: Sequence[str], past: Sequence[PastStep], skips: tuple[int, int]
) -> dict[str, Any]:
    """Makes the record of a sample of gradients, as `NumericsMonitor` describes it.

    `names` are those of the variables, in the sample's order. `past` is of the steps since
    the last record; `skips` are the numbers of skipped steps, in all and in a row.
    """
    # Of scales that are no power of two the next one below stands for them.
    exponent = math.frexp(sample.loss_scale)[1] - 1
    unscaled: dict[str, ExponentHistogram] = {}
    scaled: dict[str, ExponentHistogram] = {}
    for name, rows in zip(names, sample.counts, strict=True):
        unscaled[name], over = histogram(rows, sample.divisor)
        scaled[name] = unscaled[name].shifted(exponent, over)
    everything = total(unscaled.values()), total(scaled.values())
    bad = [name for name, each in unscaled.items() if each.nonfinite]
    return {
        "step": sample.step,
        "loss_scale": sample.loss_scale,
        "suggested_scale": suggested_scale(everything[0]),
        "skipped_steps": skips[0],
        "consecutive_skipped_steps": skips[1],
        "loss_scales": [list(each) for each in changes((step, scale) for step, scale, _ in past)],
        "skipped": _skipped(past, skips[0]),
        "first_nonfinite": bad[0] if bad else None,
        "gradients": _described(*everything),
        "variables": {name: _described(unscaled[name], scaled[name]) for name in names},
    }


def _described(unscaled: ExponentHistogram, scaled: ExponentHistogram) -> dict[str, Any]:
    return {**unscaled.to_dict(), **scaled.shares(), "unscaled": unscaled.shares()}


def changes(steps: Iterable[Sequence[float]]) -> Iterator[tuple[float, float]]:
    """Yields the steps at which the loss scale changed, of pairs of step and scale."""
    for scale, group in itertools.groupby(steps, key=lambda each: each[1]):
        yield next(group)[0], scale


def _skipped(past: Sequence[PastStep], skipped: int) -> list[int]:
    after = [before for _, _, before in past[1:]] + [skipped]
    return [step for (step, _, before), then in zip(past, after, strict=False) if then > before]


# ---- As people have them -------------------------------------------------------------------------


def records_of(history: Any) -> list[Mapping[str, Any]]:
    """Returns the records of a monitor, its `history`, one record, or a path of JSON lines."""
    records = getattr(history, "history", history)
    if isinstance(records, Mapping):
        records = [records]
    elif isinstance(records, (str, os.PathLike)):
        lines = Path(records).read_text(encoding="utf-8").splitlines()
        records = [json.loads(line) for line in lines if line.strip()]
    elif not isinstance(records, Iterable):
        raise TypeError(
            "history must be a NumericsMonitor, its history, one of its records or the path of its "
            f"JSON lines; got {type(records).__name__}."
        )
    records = list(records)
    if not records:
        raise ValueError(
            "There is no record to show. A NumericsMonitor makes one every `every` steps: train "
            "for more steps, or make `every` smaller."
        )
    if not all(isinstance(each, Mapping) and "gradients" in each for each in records):
        raise TypeError(f"Expected records of a NumericsMonitor; got {records[0]!r:.80}.")
    return records


def scale_steps(records: Sequence[Mapping[str, Any]]) -> tuple[list[int], list[float]]:
    """Returns the steps at which the loss scale changed, and the scale from each on.

    The first and the last step are among them; the last repeats the last scale.
    """
    found = list(changes(each for record in records for each in record["loss_scales"]))
    last = max(step for record in records for step in (record["step"], *record["skipped"]))
    steps, scales = [int(step) for step, _ in found], [float(scale) for _, scale in found]
    return [*steps, last], [*scales, *scales[-1:]]


def exponents_of(described: Mapping[str, Any]) -> dict[int, int]:
    """Returns exponent -> number of values; in JSON the exponents are text."""
    return {int(exponent): number for exponent, number in described["exponents"].items()}


# ---- In words -----------------------------------------------------------------------------------


def scale_text(scale: float | None) -> str:
    """Returns a loss scale as people say it: "2^15", "1000", "none"."""
    if scale is None:
        return "none"
    mantissa, exponent = math.frexp(scale)
    return f"{scale:g}" if mantissa != 0.5 else f"2^{exponent - 1}"


def summary_lines(record: Mapping[str, Any]) -> list[str]:
    """Returns what a record says of the run as a whole, in sentences."""
    gradients = record["gradients"]
    lost, without = gradients[SHARES[0]], gradients["unscaled"][SHARES[0]]
    lines = [
        f"step {record['step']}: loss scale {scale_text(record['loss_scale'])}, skipped "
        f"{record['skipped_steps']} steps, {record['consecutive_skipped_steps']} in a row",
        f"suggested loss scale: {scale_text(record['suggested_scale'])}",
        f"float16 flushes gradients under 2^-24 to zero: {lost:.1%} of them, {without:.1%} without "
        "loss scale",
    ]
    if record["first_nonfinite"] is not None:
        lines.append(f"first variable with an inf or NaN: {record['first_nonfinite']}")
    return lines


def _summary_rows(record: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Returns one row for all gradients and one for each variable, those that lose most first."""
    variables = sorted(record["variables"].items(), key=lambda item: -item[1]["under_2**-14"])
    rows = [_row(*each) for each in (("all variables", record["gradients"]), *variables)]
    if rest := len(rows[_MOST_ROWS + 1 :]):
        rows[_MOST_ROWS + 1 :] = [(f"and {rest} others", *[""] * (len(_HEADINGS) - 1))]
    return rows


def to_text(history: Sequence[Mapping[str, Any]]) -> str:
    """Returns the summary of the last record as plain text."""
    if not history:
        return "no record yet"
    table = table_lines([_HEADINGS, *_summary_rows(history[-1])], left=1)
    return "\n".join([*summary_lines(history[-1]), *table])


def _row(name: str, described: Mapping[str, Any]) -> tuple[str, ...]:
    exponents = exponents_of(described)
    span = f"2^{min(exponents)}..2^{max(exponents) + 1}" if exponents else "-"
    unscaled = f"{described['unscaled'][SHARES[0]]:.1%}"
    shares = [f"{described[key]:.1%}" for key in ("zeros", *SHARES)]
    return (name, *shares, unscaled, span)
