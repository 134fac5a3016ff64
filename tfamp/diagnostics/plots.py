"""Plots of a monitor's records; matplotlib is loaded on the first."""

from __future__ import annotations

import bisect
import contextlib
import io
import itertools
import json
import math
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tfamp.diagnostics.step_statistics import LARGEST, NORMAL, SUBNORMAL, Record

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# From Okabe and Ito's palette, which suits all common kinds of colour blindness.
BLUE, ORANGE, GREEN, RED, SKY = "#0072b2", "#e69f00", "#009e73", "#d55e00", "#56b4e9"
INK, FAINT = "#1c2430", "#5b6675"
# The exponents that are drawn, a choice around float16's ranges; values further out are drawn at
# the ends.
_SPAN = (-60, 28)
# Bounds of loss scales that are drawn: float32's.
_LEAST_SCALE, _LARGEST_SCALE = 2.0**-149, 2.0**128
# Float16's ranges of exponents, each with its colour.
_RANGES = (
    (_SPAN[0], SUBNORMAL, RED),
    (SUBNORMAL, NORMAL, ORANGE),
    (NORMAL, LARGEST + 1, SKY),
    (LARGEST + 1, _SPAN[1], RED),
)


@contextlib.contextmanager
def _default_style() -> Iterator[None]:
    """Draws in matplotlib's default style, which suits pages of any colour."""
    try:
        from matplotlib import style
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            'Plots need matplotlib: pip install "tfamp[plot]".', name="matplotlib"
        ) from error
    with style.context("default"):
        yield


@_default_style()
def plot_loss_scale(history: Any) -> Figure:
    """Draws the loss scale over the steps, with the skipped ones marked.

    Args:
        history: A `NumericsMonitor`, its `history`, or the path of its JSON lines.

    Returns:
        A matplotlib figure; `figure.savefig("scale.png")` writes it.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
        ValueError: There are no records yet.

    Example:
        >>> from tfamp.diagnostics import NumericsMonitor, plot_loss_scale
        >>> plot_loss_scale(NumericsMonitor())
        Traceback (most recent call last):
        ...
        ValueError: The history has no record to show. ...
    """
    records = _records_of(history)
    steps, scales = _scale_steps(records)
    # Keras's own scale may grow to inf or fall to 0: as far as float32 goes.
    exponents = [math.log2(min(max(scale, _LEAST_SCALE), _LARGEST_SCALE)) for scale in scales]
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    figure = _new_figure(3.4)
    (axes,) = figure.axes
    axes.step(steps, exponents, where="post", color=BLUE, linewidth=1.8, label="loss scale")
    good = [record for record in records if not record["gradients"]["nonfinite"]]
    pairs = ((record["step"], record["suggested_scale"]) for record in good)
    suggested = [(step, math.log2(scale)) for step, scale in pairs if scale]
    if suggested:
        label = "suggested: most gradients in float16's normal range"
        axes.plot(*zip(*suggested, strict=True), "o--", color=GREEN, markersize=3, label=label)
    skipped = [step for record in records for step in record["skipped"]]
    if skipped:
        heights = [exponents[bisect.bisect(steps, step) - 1] for step in skipped]
        label = f"skipped step ({len(skipped)})"
        axes.plot(
            skipped,
            heights,
            "x",
            color=RED,
            markersize=7,
            markeredgewidth=1.8,
            label=label,
        )
    axes.margins(y=0.15)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
    axes.yaxis.set_major_formatter(FuncFormatter(_power_of_two))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.5)
    axes.set(xlabel="step", ylabel="loss scale")
    figure.legend(loc="outside upper left", ncols=3, frameon=False, fontsize=9)
    return figure


@_default_style()
def plot_exponents(history: Any, *, variable: str | None = None) -> Figure:
    """Draws the magnitudes of gradients against the ranges of float16.

    The upper plot is without loss scale, the lower with the one they had. Shaded are the ranges
    in which float16 flushes to zero, loses digits, is exact to its 11 bits, and overflows. The
    title has the share of zeros.

    Source: Figure 3 of Micikevicius et al., "Mixed Precision Training", ICLR 2018.

    Args:
        history: A `NumericsMonitor`, its `history`, one record of it, or the path of its JSON
            lines. Several records are drawn together.
        variable: Name of the variable whose gradient to draw; None draws all gradients.

    Returns:
        A matplotlib figure; `figure.savefig("exponents.png")` writes it.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
        ValueError: There are no records yet, or none of this variable.

    Example:
        >>> from tfamp.diagnostics import NumericsMonitor, plot_exponents
        >>> plot_exponents(NumericsMonitor())
        Traceback (most recent call last):
        ...
        ValueError: The history has no record to show. ...
    """
    records = _records_of(history)
    unscaled: Counter[int] = Counter()
    scaled: Counter[int] = Counter()
    values = zeros = 0.0
    for record in records:
        described = _described(record, variable)
        shift = _shift_of(record)
        values += described["values"]
        zeros += described["values"] * described["zeros"]
        for exponent, number in described["exponents"].items():
            # In JSON the exponents are text.
            unscaled[int(exponent)] += number
            scaled[int(exponent) + shift] += number
    figure = _new_figure(5.2, rows=2)
    above, below = figure.axes
    shifts = list(map(_shift_of, records))
    scales = dict.fromkeys(map(_power_of_two, (min(shifts), max(shifts))))
    titles = "without loss scale", f"with loss scale {' to '.join(scales)}"
    for axes, counts, title in zip((above, below), (unscaled, scaled), titles, strict=True):
        axes.set_title(title, loc="left", fontsize=10)
        _draw_exponents(axes, counts)
    _name_ranges(above)
    below.set_xlabel("size of a gradient value (zeros left out)")
    whose = "all variables" if variable is None else variable
    share = zeros / values if values else 0.0
    first, last = records[0]["step"], records[-1]["step"]
    when = f"step {first}" if first == last else f"{len(records)} steps from {first} to {last}"
    title = f"Gradients of {whose}, {when}; {share:.1%} of the values are zero"
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    return figure


def _scale_of(value: float | None) -> float:
    """A loss scale of a record; a file has None for inf, which JSON lacks."""
    return math.inf if value is None else value


def _shift_of(record: Record) -> int:
    """The exponent of a record's loss scale; 0 for 0, inf and NaN."""
    scale = _scale_of(record["loss_scale"])
    return math.frexp(scale)[1] - 1 if 0.0 < scale < math.inf else 0


def _described(record: Record, variable: str | None) -> Record:
    if variable is None:
        return record["gradients"]
    if variable not in record["variables"]:
        names = ", ".join(record["variables"])
        raise ValueError(f"The history has no record of {variable!r}; there are {names}.")
    return record["variables"][variable]


def _draw_exponents(axes: Axes, counts: Mapping[int, int]) -> None:
    from matplotlib.ticker import FuncFormatter, MultipleLocator, PercentFormatter

    for first, last, color in _RANGES:
        axes.axvspan(first, last, color=color, alpha=0.16, linewidth=0)
    drawn: Counter[int] = Counter()
    for exponent, number in counts.items():
        drawn[min(max(exponent, _SPAN[0]), _SPAN[1] - 1)] += number
    total = max(sum(counts.values()), 1)
    heights = [number / total for number in drawn.values()]
    axes.bar(list(drawn), heights, width=0.86, align="edge", color=INK)
    axes.set_xlim(*_SPAN)
    axes.xaxis.set_major_locator(MultipleLocator(8))
    axes.xaxis.set_major_formatter(FuncFormatter(_power_of_two))
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.set_ylabel("share of values")
    in_range = [sum(drawn[e] for e in range(first, last)) / total for first, last, _ in _RANGES]
    flushed, subnormal, _, over = in_range
    words = f"flushed {flushed:.1%}   subnormal {subnormal:.1%}   overflow {over:.1%}"
    axes.set_title(words, loc="right", fontsize=9, color=FAINT)


def _name_ranges(axes: Axes) -> None:
    """Writes the names of float16's ranges into the upper plot."""
    names = ("flushed to 0", "subnormal", "float16's normal range", "inf")
    top = axes.get_ylim()[1]
    axes.set_ylim(0, top * 1.2)
    for (first, last, _), name in zip(_RANGES, names, strict=True):
        axes.text((first + last) / 2, top * 1.1, name, ha="center", va="center", fontsize=8.5)


# ---- Reading records -----------------------------------------------------------------------------


def _records_of(history: Any) -> list[Record]:
    """Returns the records of a monitor, its `history`, one record, or a path of JSON lines."""
    records = getattr(history, "history", history)
    if isinstance(records, Mapping):
        records = [records]
    elif isinstance(records, (str, os.PathLike)):
        lines = Path(records).read_text(encoding="utf-8").splitlines()
        records = [json.loads(line) for line in lines if line.strip()]
    if not records:
        raise ValueError(
            "The history has no record to show. Train for more steps, or give NumericsMonitor "
            "a smaller `every`."
        )
    if not all(isinstance(record, Mapping) and "loss_scales" in record for record in records):
        raise ValueError(
            "Plots take a NumericsMonitor, its history, a record of it, or the file of its "
            f"jsonl=; got {history!r}."
        )
    return list(records)


def _scale_steps(records: Sequence[Record]) -> tuple[list[int], list[float]]:
    """Returns the steps at which the loss scale changed, and the scale from each on.

    The first and the last step are included; the last repeats the last scale.
    """
    listed = (
        record["loss_scales"] or [(record["step"], record["loss_scale"])] for record in records
    )
    pairs = ((step, _scale_of(scale)) for each in listed for step, scale in each)
    groups = itertools.groupby(pairs, key=lambda pair: pair[1])
    steps, scales = map(list, zip(*(next(group) for _, group in groups), strict=True))
    last = max(step for record in records for step in (record["step"], *record["skipped"]))
    return [*steps, last], [*scales, scales[-1]]


# ---- Shared by all plots -------------------------------------------------------------------------


def _new_figure(height: float, rows: int = 1) -> Figure:
    """Returns a figure with stacked axes and without a window; notebooks show it."""
    from matplotlib.figure import Figure

    class NotebookFigure(Figure):
        """IPython shows other figures without a window only after pyplot is imported."""

        def _repr_png_(self) -> bytes:
            data = io.BytesIO()
            self.savefig(data, format="png")
            return data.getvalue()

    figure = NotebookFigure(figsize=(8, height), dpi=120, layout="constrained")
    figure.subplots(rows, sharex=True, sharey=True)
    return figure


def _power_of_two(exponent: float, _: object = None) -> str:
    """Returns the label of a tick at an exponent."""
    return f"$2^{{{exponent:.0f}}}$"
