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

    systems = [
        name
        for name in _COLORS
        if name != BASE and any(name in each.systems for each in run.workloads)
    ]
    picture = Figure(figsize=(max(6.0, 2.1 * len(run.workloads) + 1), 4.2), layout="constrained")
    axes = picture.subplots()
    width = 0.84 / max(1, len(systems))
    for number, name in enumerate(systems):
        places, speeds = [], []
        for position, each in enumerate(run.workloads):
            if name in each.systems:
                places.append(position + (number - (len(systems) - 1) / 2) * width)
                speeds.append(results.speed(each, name))
        heights = [each.median for each in speeds]
        below = [each.median - each.low for each in speeds]
        above = [each.high - each.median for each in speeds]
        axes.bar(
            places,
            heights,
            0.92 * width,
            yerr=(below, above),
            color=_COLORS[name],
            label=SYSTEMS[name].title,
            error_kw={"linewidth": 0.8},
        )
        for place, height, more in zip(places, heights, above, strict=True):
            axes.annotate(
                f"{height:.2f}",
                (place, height + more),
                (0, 2),
                textcoords="offset points",
                ha="center",
                va="bottom",
                fontsize=6.5,
                rotation=90,
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.4},
            )
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_xticks(range(len(run.workloads)), [each.workload for each in run.workloads])
    axes.set_ylabel("times as fast as float32")
    axes.margins(x=0.01, y=0.12)
    axes.spines[["top", "right"]].set_visible(False)
    columns = 2 if len(run.workloads) < 4 else 4
    picture.legend(loc="outside lower center", ncols=columns, fontsize=8, frameon=False)
    facts = run.machine
    where = facts["GPU"] if facts.get("GPU", "none") != "none" else facts.get("CPU", "")
    axes.set_title(
        f"Training step in {run.dtype}: {where}, {facts.get('cores')} cores, "
        f"TensorFlow {facts.get('TensorFlow')}",
        fontsize=10,
    )
    return picture


def save(run: Run, path: Path) -> None:
    """Writes the picture; the ending tells the format."""
    figure(run).savefig(path, dpi=150)
