"""Trains two workloads to their end in float32, by Keras's policy and by tfamp's: the curves.

    python -m benchmarks.curves [--results DIR] [--size cpu|gpu|small] [--minutes N] ...
    python -m benchmarks.curves --read DIR_OR_JSON ... [--json F] [--picture P] [--markdown PAGE]

A transformer learns the next character of the standard library's source, a ResNet scikit-learn's
digits, shifted and with noise. All ways start from the same weights and see the same batches; the
losses are of held-out text and digits. A run is a process, and whatever is stopped goes on where it
was by the same command.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

from benchmarks import curve_results, report
from benchmarks.curve_results import Curve, Setup
from benchmarks.progress import reporting
from benchmarks.systems import BASE
from benchmarks.tables import show, to_markdown

# By name and task: dimensions, steps, and held-out batches.
SIZES: Mapping[str, Mapping[str, tuple[dict[str, int], int, int]]] = {
    "cpu": {
        "transformer": ({"layers": 4, "width": 160, "heads": 4, "tokens": 64, "batch": 16}, 500, 8),
        "resnet": ({"blocks": 3, "channels": 16, "pixels": 16, "batch": 32}, 560, 20),
    },
    "gpu": {
        "transformer": (
            {"layers": 8, "width": 512, "heads": 8, "tokens": 256, "batch": 64},
            *(4000, 16),
        ),
        "resnet": ({"blocks": 9, "channels": 32, "pixels": 32, "batch": 256}, 4000, 20),
    },
    "small": {
        "transformer": ({"layers": 1, "width": 8, "heads": 2, "tokens": 8, "batch": 2}, 6, 1),
        "resnet": ({"blocks": 1, "channels": 4, "pixels": 8, "batch": 4}, 6, 1),
    },
}
TASKS = tuple(SIZES["cpu"])
WAYS = (BASE, "keras_policy", "tfamp_policy")
_EVALUATIONS = 20
_SMALL_EVERY = 2


def setups(args: argparse.Namespace) -> list[Setup]:
    """All runs that are wanted, a seed after the other, so that any part of them compares ways."""
    found = []
    for seed in range(args.seeds):
        for task in args.task:
            size, steps, batches = SIZES[args.size][task]
            steps = args.steps or steps
            every = _SMALL_EVERY if args.size == "small" else max(1, steps // _EVALUATIONS)
            for system, dtype in _ways(args.system, args.dtype):
                about = (dict(size), steps, every, batches)
                found.append(Setup(task, system, dtype, seed, *about))
    return found


def _ways(systems: Sequence[str], dtypes: Sequence[str]) -> list[tuple[str, str]]:
    low = [(system, dtype) for dtype in dtypes for system in systems if system != BASE]
    return [(BASE, BASE), *low]


def train_all(wanted: Sequence[Setup], folder: Path, end: float | None, processes: int) -> None:
    """Trains what is not at its end yet; nothing is begun or goes on after a `time.time()`.

    Raises:
        subprocess.CalledProcessError: A run failed, for the reason that it printed.
    """

    def train(setup: Setup) -> None:
        # A process each: policies are of a process.
        command = [sys.executable, "-m", "benchmarks.curve_run"]
        work = json.dumps([asdict(setup), str(folder), end])
        subprocess.run(command, input=work, text=True, check=True)

    folder.mkdir(parents=True, exist_ok=True)
    with (
        ThreadPoolExecutor(processes) as pool,
        reporting("runs", len(wanted)) as progress,
    ):
        try:
            for setup, _ in zip(wanted, pool.map(train, wanted), strict=True):
                progress(setup.name)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


# ---- The picture ---------------------------------------------------------------------------------

_COLORS = {BASE: "black", "keras_policy": "tab:orange", "tfamp_policy": "tab:blue"}


def draw(curves: Sequence[Curve], path: Path) -> None:
    """Draws held-out losses, and below them how far each way is from float32.

    Lines are means over seeds, and bands reach from the least to the largest. The seeds are those
    at their end; all as far as they are, for a way that has none.
    """
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot, ticker

    tasks = list(dict.fromkeys(curve.setup.task for curve in curves))
    figure, axes = pyplot.subplots(
        2, len(tasks), figsize=(5.5 * len(tasks), 6.5), layout="constrained", squeeze=False
    )
    for (upper, lower), task in zip(axes.T, tasks, strict=True):
        own = _to_draw([curve for curve in curves if curve.setup.task == task])
        steps = max(curve.setup.steps for curve in own)
        for way in curve_results.ways(own):
            style = _style(own, way)
            losses = [_losses(curve) for curve in own if curve.setup.way == way]
            _line(upper, losses, label=way, **style)
            if way != BASE:
                both = curve_results.pairs(way, own)
                _line(lower, [_difference(*pair) for pair in both], **style)
        _spread_of_float32(lower, own)
        upper.set(title=task, ylabel="held-out loss", yscale="log", xlim=(0, steps))
        upper.yaxis.set_major_locator(ticker.LogLocator(subs=(1.0, 2.0, 3.0, 5.0), numticks=15))
        upper.yaxis.set_minor_locator(ticker.NullLocator())
        upper.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        upper.legend()
        lower.axhline(0, color="black", linewidth=1)
        lower.set(xlabel="step", ylabel="from float32, same seed, %", xlim=(0, steps))
        lower.legend()
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


def _to_draw(curves: Sequence[Curve]) -> list[Curve]:
    at_end = {curve.setup.way for curve in curves if curve.done}
    return [curve for curve in curves if curve.done or curve.setup.way not in at_end]


def _style(curves: Sequence[Curve], way: str) -> dict[str, Any]:
    setup = next(curve.setup for curve in curves if curve.setup.way == way)
    style = "--" if setup.dtype == "float16" else "-"
    return {"color": _COLORS.get(setup.system, "tab:green"), "linestyle": style}


def _losses(curve: Curve) -> dict[int, float]:
    return {each.step: each.loss for each in curve.held_out}


def _difference(own: Curve, base: Curve) -> dict[int, float]:
    exact = _losses(base)
    return {
        step: 100 * (loss / exact[step] - 1) for step, loss in _losses(own).items() if step in exact
    }


def _line(axis: Any, found: Sequence[Mapping[int, float]], **style: Any) -> None:
    steps, columns = _columns(found)
    axis.plot(steps, [statistics.fmean(column) for column in columns], **style)
    ends = [min(column) for column in columns], [max(column) for column in columns]
    axis.fill_between(steps, *ends, color=style["color"], alpha=0.15, linewidth=0)


def _columns(found: Sequence[Mapping[int, float]]) -> tuple[list[int], list[list[float]]]:
    """The steps that all have, and their values there."""
    common = set.intersection(*(set(each) for each in found)) if found else set()
    steps = sorted(common)
    return steps, [[each[step] for each in found] for step in steps]


def _spread_of_float32(axis: Any, curves: Sequence[Curve]) -> None:
    """A grey band: how far seeds of float32 are from their mean, the measure of a difference."""
    steps, columns = _columns([_losses(each) for each in curves if each.setup.system == BASE])
    off = [
        [100 * (loss / statistics.fmean(column) - 1) for loss in (min(column), max(column))]
        for column in columns
    ]
    below, above = zip(*off, strict=True) if off else ((), ())
    axis.fill_between(steps, below, above, color="0.85", linewidth=0, label="seeds of float32")


# ---- The command ---------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> None:
    parser = _parser()
    args = parser.parse_args(arguments)
    for name in ("seeds", "steps", "processes"):
        value = getattr(args, name)
        if value is not None and value < 1:
            parser.error(f"--{name} must be at least 1; got {value}")
    if args.read is None:
        end = None if args.minutes is None else time.time() + 60 * args.minutes
        train_all(setups(args), args.results, end, args.processes)
    curves = [each for path in args.read or [args.results] for each in curve_results.read(path)]
    table = curve_results.table(curves)
    show([table])
    if args.json:
        args.json.write_text(curve_results.to_json(curves), encoding="utf-8")
    if args.picture:
        draw(curves, args.picture)
    if args.markdown:
        report.put_section(args.markdown, section(curves))


def section(curves: Sequence[Curve]) -> str:
    """The table as part of a page."""
    return to_markdown(curve_results.table(curves), heading=False)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--results", type=Path, default=Path("curves"), metavar="DIR", help="files of the runs")
    add("--task", nargs="+", choices=TASKS, default=TASKS, metavar="T", help=f"of {TASKS}")
    about = f"of {', '.join(WAYS)}; float32 is always trained"
    add("--system", nargs="+", choices=WAYS, default=WAYS, metavar="S", help=about)
    add("--dtype", nargs="+", choices=("bfloat16", "float16"), default=["bfloat16"])
    add("--seeds", type=int, default=3, metavar="N", help="how many weights and data")
    about = "of the models: a CPU's are 1.3 million weights and 0.3, a GPU's 25 and 3.5"
    add("--size", choices=SIZES, default="cpu", help=about)
    add("--steps", type=int, metavar="N", help="others than the size's")
    about = "stop at the evaluation after so many minutes; the same command goes on from there"
    add("--minutes", type=float, metavar="N", help=about)
    add("--processes", type=int, default=1, metavar="N", help="how many runs at once")
    about = "train nothing: show the curves of folders or of what --json wrote"
    add("--read", type=Path, nargs="+", metavar="PATH", help=about)
    add("--json", type=Path, metavar="FILE", help="write all curves")
    add("--picture", type=Path, metavar="FILE", help="draw them; needs matplotlib")
    add("--markdown", type=Path, metavar="PAGE", help="put the table between marks of a PAGE#NAME")
    return parser


if __name__ == "__main__":
    main()
