"""The ratios of a run as bars."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks import results
from benchmarks.results import Run
from benchmarks.systems import BASE, SYSTEMS

_COLORS = {
    "float32_xla": "#d9dfe5",
    "keras_policy": "#9aa5b1",
    "keras_policy_xla": "#7b8794",
    "tensorflow_amp": "#52606d",
    "tfamp_policy": "#f9a26c",
    "rewrite_lists": "#e8590c",
    "rewrite": "#a33b00",
    "rewrite_fused": "#c2255c",
    "tune": "#3d0b45",
    "torch_float32": "#b7d3f2",
    "torch_autocast": "#3b7dd8",
}


def figure(run: Run) -> Any:
    """Bars of ratios to float32, by workload and system, with quartiles."""
    from matplotlib.figure import Figure

    measured = {name for each in run.workloads for name in each.systems if name != BASE}
    systems = [name for name in _COLORS if name in measured]
    picture = Figure(figsize=(max(6.0, 2.1 * len(run.workloads) + 1), 4.2), layout="constrained")
    axes = picture.subplots()
    width = 0.84 / max(1, len(systems))
    for number, name in enumerate(systems):
        offset = (number - (len(systems) - 1) / 2) * width
        at = {i: each for i, each in enumerate(run.workloads) if name in each.systems}
        speeds = [results.speed(each, name) for each in at.values()]
        axes.bar(
            [i + offset for i in at],
            [each.median for each in speeds],
            0.92 * width,
            yerr=list(zip(*((x.median - x.low, x.high - x.median) for x in speeds), strict=True)),
            color=_COLORS[name],
            label=SYSTEMS[name].title,
            error_kw={"linewidth": 0.8},
        )
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_xticks(range(len(run.workloads)), [each.workload for each in run.workloads])
    axes.set_ylabel("times as fast as float32")
    axes.margins(x=0.01, y=0.12)
    axes.spines[["top", "right"]].set_visible(False)
    picture.legend(loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    facts = run.machine
    where = facts["GPU"] if facts.get("GPU", "none") != "none" else facts.get("CPU", "")
    axes.set_title(
        f"Training step in {run.dtype}: {where}, {facts.get('cores')} cores", fontsize=10
    )
    return picture


def save(run: Run, path: Path) -> None:
    """Writes the picture; the ending tells the format."""
    figure(run).savefig(path, dpi=150)
