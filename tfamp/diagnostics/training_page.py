"""`training_report`: everything known of a training run, as one HTML page."""

from __future__ import annotations

import base64
import html
import io
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tfamp.diagnostics import plots
from tfamp.diagnostics.records import (
    HEADINGS,
    all_rows,
    lost_updates_text,
    raised,
    records_of,
    scale_text,
    share_cells,
)
from tfamp.machine.file_replacing import replace_text
from tfamp.planning.plan_page import asset, filled, palette, security_policy, sources

_ASSETS = "diagnostics/report_assets"
_MARK = ' class="bad"'
_COLORS = (plots.BLUE, plots.RED, plots.GREEN, plots.ORANGE, plots.SKY)


def training_report(
    path: str | os.PathLike[str],
    *,
    monitor: Any = None,
    history: Any = None,
    comparison: Any = None,
    plan: Any = None,
    device: Any = None,
    nonfinite: Any = None,
    title: str = "Training report",
) -> Path:
    """Writes one HTML page with all that is known of a training run.

    The page loads nothing and opens without a network. A file that is there is replaced as a whole,
    so half a report is never seen. The pictures need matplotlib.

    Args:
        path: The file to write; its folder is made if need be.
        monitor: A `NumericsMonitor`, its `history`, or the path of its JSON lines: loss scale,
            sizes of gradients and outputs.
        history: What `model.fit` returned, or a dict of metric name -> values: curves.
        comparison: What `tfamp.diagnostics.compare` returned: errors layer by layer.
        plan: The `RewritePlan` of a rewritten function: its page, in a frame.
        device: What `device_report` returned.
        nonfinite: What `find_nonfinite` returned.
        title: Title of the page.

    Returns:
        The path of the file.

    Raises:
        TypeError: `history` or `monitor` is something else.
        ValueError: There is nothing to report.
        ModuleNotFoundError: matplotlib is not installed, and there is something to draw.

    Example:
        >>> import tempfile
        >>> from tfamp.diagnostics import device_report, training_report
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     training_report(f"{folder}/report.html", device=device_report()).name
        'report.html'
    """
    totals: list[tuple[str, str]] = []
    sections: list[str] = []
    if monitor is not None:
        records = records_of(monitor)
        totals += _totals(records[-1])
        sections += _monitor_sections(records)
    if history is not None:
        sections.append(_history_section(getattr(history, "history", history)))
    if nonfinite is not None:
        sections.append(_section("Not finite", _element("pre", nonfinite.to_text())))
    if comparison is not None:
        sections.append(_comparison_section(comparison))
    if plan is not None:
        totals += _plan_totals(plan)
        page = _frame(plan.to_html(), "Plan of the rewrite")
        sections.append(_section("Plan of the rewrite", page))
    if device is not None:
        sections.append(_section("Machine", _element("pre", device.to_text())))
    if not sections:
        raise ValueError(
            "There is nothing to report: give training_report at least one of monitor, history, "
            "comparison, plan, device and nonfinite."
        )
    style = palette() + asset(f"{_ASSETS}/style.css")
    # The page of a plan has a style sheet and a script, the heat strip of a comparison has styles.
    plan_style, plan_script = ([], []) if plan is None else ([each] for each in sources())
    parts = {
        "policy": security_policy(
            [style, *plan_style], plan_script, images=True, inline_styles=comparison is not None
        ),
        "title": html.escape(title),
        "style": style,
        "totals": _totals_list(totals),
        "sections": "\n".join(sections),
    }
    replace_text(Path(path), filled(asset(f"{_ASSETS}/page.html"), parts))
    return Path(path)


def _totals(last: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [
        ("steps", f"{last['step']:,}"),
        ("loss scale", scale_text(last["loss_scale"], superscript=True)),
        ("suggested", scale_text(last["suggested_scale"], superscript=True)),
        ("skipped steps", f"{last['skipped_steps']:,}"),
    ]


def _monitor_sections(records: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    last = records[-1]
    yield _section(
        "Is float16 enough?",
        _element("p", _verdict(last)),
        _picture(plots.plot_exponents(records), "Gradients by size, against float16's range"),
        '<p class="note">What was zero already when it was counted is not drawn: float16 may have '
        "flushed it before.</p>",
    )
    scale = _picture(plots.plot_loss_scale(records), "Loss scale over the steps")
    yield _section("Loss scale", scale, _element("p", _skips(records)))
    if (sentence := lost_updates_text(last)) is not None:
        words = sentence[0].upper() + sentence[1:]
        yield _section("Do weights need more than 16 bits?", _element("p", f"{words}."))
    rows = all_rows(last)
    bad = [False, *(bool(last["variables"][name]["nonfinite"]) for name, *_ in rows[1:])]
    # Only what is ours: a name may have such a sign too.
    cells = [(name, *map(raised, each)) for name, *each in rows]
    table = _table([raised(heading) for heading in HEADINGS], cells, bad)
    yield _section(f"Gradients at step {last['step']}", table)
    if last.get("activations"):
        outputs = last["activations"].items()
        rows = [(name, *share_cells(e), f"{e['largest']:.3g}") for name, e in outputs]
        headings = ("outputs of", "zeros", "< 2⁻²⁴", "< 2⁻¹⁴", "> 65504", "largest")
        bad = [each["over_65504"] > 0 for _, each in outputs]
        yield _section("Outputs of layers", _table(headings, rows, bad))


def _verdict(record: Mapping[str, Any]) -> str:
    gradients, bad = record["gradients"], record["first_nonfinite"]
    named = "" if bad is None else f" The first variable with an inf or NaN in its gradient: {bad}."
    return (
        f"At step {record['step']} float16 flushes {gradients['under_2**-24']:.1%} of the gradient "
        f"values to zero with the loss scale {scale_text(record['loss_scale'], superscript=True)}; "
        f"without it {gradients['unscaled']['under_2**-24']:.1%}. Below float16's normal range, "
        f"where digits are lost, are {gradients['under_2**-14']:.1%}; without loss scale "
        f"{gradients['unscaled']['under_2**-14']:.1%}.{named}"
    )


def _skips(records: Sequence[Mapping[str, Any]]) -> str:
    skipped = [step for record in records for step in record["skipped"]]
    if not skipped:
        return "No step was skipped."
    shown = ", ".join(map(str, skipped[:20])) + (", …" if len(skipped) > 20 else "")
    return f"Skipped steps: {records[-1]['skipped_steps']:,} ({shown})."


def _history_section(metrics: Mapping[str, Sequence[float]]) -> str:
    if not isinstance(metrics, Mapping):
        raise TypeError(
            "history must be what model.fit returned, or a dict of metric name -> values; got "
            f"{type(metrics).__name__}. The history of a NumericsMonitor goes to monitor=."
        )
    names = [name for name in metrics if not name.startswith("val_") and metrics[name]]
    if not names:
        raise ValueError("history has no metric; give what model.fit returned.")
    # The first to need matplotlib: its error says what to install.
    figure = plots.new_figure(8, 2.9)
    from matplotlib.ticker import MaxNLocator

    for axes, name in zip(figure.subplots(1, len(names), squeeze=False)[0], names, strict=True):
        plots.dress(axes, title=name)
        axes.grid(color=plots.GRID, linewidth=0.7)
        for each, color in zip((name, f"val_{name}"), _COLORS, strict=False):
            if metrics.get(each):
                epochs = range(1, len(metrics[each]) + 1)
                label = "validation" if each.startswith("val_") else "training"
                axes.plot(epochs, metrics[each], color=color, label=label, marker=".")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_xlabel("epoch")
    axes.legend(frameon=False, fontsize=9, labelcolor=plots.INK)
    rows = [(name, f"{values[-1]:.4g}") for name, values in metrics.items() if len(values)]
    picture = _picture(figure, "Metrics over the epochs")
    return _section("Metrics", picture, _table(("metric", "last"), rows))


def _comparison_section(comparison: Any) -> str:
    rows = list(comparison.rows)
    kept = getattr(comparison, "keep_float32", None)
    parts = [_element("p", f"To keep in float32: {', '.join(map(str, kept))}.")] if kept else []
    parts.append(_picture(plots.plot_compare(comparison), "Relative error of each layer"))
    parts.append(comparison.to_html_fragment())
    figures = [(row.relative_error, row.max, row.share_out_of_range) for row in rows]
    cells = [(f"{error:.2e}", f"{size:.3g}", f"{share:.2%}") for error, size, share in figures]
    bad = [share > 0 or not math.isfinite(error) for error, _, share in figures]
    headings = ("layer", "relative error", "largest", "out of range")
    named = [(row.layer, *each) for row, each in zip(rows, cells, strict=True)]
    return _section("Against float32, layer by layer", *parts, _table(headings, named, bad))


def _plan_totals(plan: Any) -> Iterator[tuple[str, str]]:
    summary = plan.summary
    yield f"ops in {plan.dtype}", f"{summary.low_nodes:,} of {summary.nodes:,}"
    yield "Casts", f"{summary.casts:,}"
    if summary.estimated_speed_up is not None:
        yield "estimated speed-up", f"{summary.estimated_speed_up:.2f}×"


# ---- The page ------------------------------------------------------------------------------------


def _section(heading: str, *parts: str) -> str:
    """Returns a section: its heading, plain text, and HTML below it."""
    return "\n".join(["<section>", _element("h2", heading), *parts, "</section>"])


def _element(tag: str, text: str, attributes: str = "") -> str:
    """Returns an element of plain text."""
    return f"<{tag}{attributes}>{html.escape(text)}</{tag}>"


def _picture(figure: Any, description: str) -> str:
    """An image that is in the page itself; the description is for those who do not see it."""
    file = io.BytesIO()
    # Without the name and version of the program that wrote it: the same run, the same bytes.
    figure.savefig(file, format="png", dpi=144, metadata={"Software": None})
    data = base64.b64encode(file.getvalue()).decode()
    return f'<img alt="{html.escape(description)}" src="data:image/png;base64,{data}">'


def _table(
    headings: Sequence[str], rows: Sequence[Sequence[str]], marked: Sequence[bool] | None = None
) -> str:
    """Returns a table of plain text; `marked` says for each row whether it stands out."""
    head = "".join(_element("th", each, ' scope="col"') for each in headings)
    body = "\n".join(
        f"<tr{_MARK * bad}>{''.join(_element('td', str(cell)) for cell in row)}</tr>"
        for row, bad in zip(rows, marked or [False] * len(rows), strict=True)
    )
    table = f"<table><thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody></table>"
    return f'<div class="rows">{table}</div>'


def _frame(page: str, description: str) -> str:
    """Returns a frame that shows another page, which is in this one."""
    title, source = html.escape(description), html.escape(page)
    return f'<iframe title="{title}" sandbox="allow-scripts" srcdoc="{source}"></iframe>'


def _totals_list(totals: Sequence[tuple[str, str]]) -> str:
    cells = (f"<div>{_element('dt', name)}{_element('dd', value)}</div>" for name, value in totals)
    return f"<dl>{''.join(cells)}</dl>" if totals else ""
