"""Shows a run as tables and as the section of a page. No framework is imported."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import geometric_mean

from benchmarks import results, tables
from benchmarks.results import Run, Spread, WorkloadRun
from benchmarks.systems import BASE, CHOSEN, CONTROL, MIXED_PRECISION, PEERS, SYSTEMS, TORCH
from benchmarks.tables import Table

_STEP_HEADERS = (
    "system",
    "x float32",
    "quartiles",
    "step, ms",
    "quartiles, ms",
    "first call, s",
    "rewrite, s",
    "peak memory, MB",
    "Casts",
    "Cast MB",
)


def overview(run: Run) -> Table:
    """How many times as fast as float32 each system is on each workload."""
    names = [name for name in SYSTEMS if _measured(run, name)]
    rows = [
        (SYSTEMS[name].title, *(_speed(each, name) for each in run.workloads)) for name in names
    ]
    headers = ("times as fast as float32", *(each.workload for each in run.workloads))
    machine = ", ".join(f"{name} {value}" for name, value in run.machine.items())
    systems = {each.title: (name,) for name, each in (SYSTEMS | {CONTROL.name: CONTROL}).items()}
    notes = (f"Machine: {machine}.", *_not_measured(run, systems))
    return Table(f"Training step, {run.dtype}", headers, tuple(rows), notes=notes)


def _not_measured(run: Run, columns: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    """A sentence for each reason and the columns that it leaves empty on the same workloads."""
    found: dict[tuple[str, str], list[str]] = {}
    for each in run.workloads:
        empty: dict[str, list[str]] = {}
        for title, systems in columns.items():
            if any(name in each.systems for name in systems):
                continue
            reasons = (each.skipped[name].rstrip(".") for name in systems if name in each.skipped)
            for reason in dict.fromkeys(reasons):
                empty.setdefault(reason, []).append(title)
        for reason, stopped in empty.items():
            found.setdefault((" and ".join(stopped), reason), []).append(each.workload)
    return tuple(
        f"Not measured: {stopped} on {', '.join(workloads)}: {reason}."
        for (stopped, reason), workloads in found.items()
    )


def over_peers(run: Run, system: str) -> Table:
    """A system's speed over the fastest peer on TensorFlow, and over PyTorch's fastest way."""
    rows: list[tuple[str, ...]] = []
    medians: tuple[list[float], list[float]] = ([], [])
    for each in run.workloads:
        cells = [each.workload, _speed(each, system)]
        for others, found in zip((PEERS, TORCH), medians, strict=True):
            lead = results.lead(each, system, others)
            if lead is None:
                cells += ["-"] * 3
                continue
            found.append(lead.speed.median)
            cells += [SYSTEMS[lead.other].title, f"{lead.speed.median:.2f}"]
            cells.append(_quartiles(lead.speed, 1, ".2f"))
        rows.append(tuple(cells))
    tf_mean, torch_mean = (f"{geometric_mean(each):.2f}" if each else "-" for each in medians)
    rows.append(("geometric mean", "", "", tf_mean, "", "", torch_mean, ""))
    headers = ("workload", "x float32", "best peer", "over it", "quartiles")
    headers += ("PyTorch's best", "over it", "quartiles")
    return Table(f"{SYSTEMS[system].title} over peers, {run.dtype}", headers, tuple(rows))


def over_mixed_precision(run: Run, system: str) -> Table:
    """A system's speed over each other system that computes in the low dtype."""
    others = [name for name in MIXED_PRECISION if _measured(run, name)]
    rows, columns = [], {name: list[float]() for name in others}
    for each in run.workloads:
        cells = []
        for name, column in columns.items():
            if not {name, system} <= each.systems.keys():
                cells.append("-")
                continue
            pair = (each.systems[one].seconds for one in (name, system))
            column.append(results.ratio(*pair).median)
            cells.append(f"{column[-1]:.2f}")
        rows.append((each.workload, *cells))
    means = (f"{geometric_mean(column):.2f}" for column in columns.values())
    rows.append(("geometric mean", *means))
    headers = ("times as fast as", *(SYSTEMS[name].title for name in others))
    title = f"{SYSTEMS[system].title} over other mixed precision, {run.dtype}"
    return Table(title, headers, tuple(rows))


def first_calls(run: Run) -> Table:
    """How long the first call takes, over float32's."""
    names = [name for name in SYSTEMS if _measured(run, name)]
    rows = []
    for each in run.workloads:
        if BASE not in each.systems:
            continue
        seconds = each.systems[BASE].first_call
        ratios = [results.first_ratio(each, name) for name in names[1:]]
        ratios.append(results.first_ratio(each, "tune", calls=2))
        cells = ("-" if one is None else f"{one:.1f}" for one in ratios)
        rows.append((each.workload, f"{seconds:.1f}", *cells))
    headers = ("workload", "float32, s", *(SYSTEMS[name].title for name in names[1:]))
    headers += ("tfamp.tune over two calls",)
    return Table(f"First calls over float32's, {run.dtype}", headers, tuple(rows))


def _speed(run: WorkloadRun, system: str) -> str:
    return f"{results.speed(run, system).median:.2f}" if system in run.systems else "-"


def steps(run: WorkloadRun, dtype: str) -> Table:
    """Everything that was measured of a workload."""
    rows = []
    for name, each in run.systems.items():
        step, speed = results.spread(each.seconds), results.speed(run, name)
        rows.append(
            (
                SYSTEMS[name].title,
                f"{speed.median:.2f}",
                _quartiles(speed, 1, ".2f"),
                f"{1e3 * step.median:.1f}",
                _quartiles(step, 1e3, ".1f"),
                f"{each.first_call:.1f}",
                "-" if each.rewrite is None else f"{each.rewrite:.2f}",
                f"{each.memory / 1e6:.0f}",
                "-" if each.casts is None else str(each.casts),
                "-" if each.cast_bytes is None else f"{each.cast_bytes / 1e6:.1f}",
            )
        )
    return Table(f"{run.workload}, {dtype}", _STEP_HEADERS, tuple(rows))


def losses(run: Run) -> Table:
    """The losses after the long runs, compared with float32's."""
    rows = []
    for each in run.workloads:
        for name, measured in each.systems.items():
            if measured.losses:
                is_base = SYSTEMS[name].base == name
                difference = None if is_base else results.loss_difference(each, name)
                rows.append(
                    _loss_row(each, SYSTEMS[name].title, measured.losses, difference),
                )
            if name == BASE and each.control:
                difference = results.control_difference(each)
                rows.append(_loss_row(each, CONTROL.title, each.control, difference))
    headers = ("workload", "system", "first step", f"step {run.loss_steps}", "from float32")
    return Table(f"Loss after {run.loss_steps} steps, {run.dtype}", headers, tuple(rows), left=2)


def _loss_row(
    run: WorkloadRun, title: str, found: list[float], difference: float | None
) -> tuple[str, ...]:
    last = f"{results.final_loss(found):.4f}"
    moved = "-" if difference is None else f"{difference:+.2%}"
    return run.workload, title, f"{found[0]:.4f}", last, moved


def all_tables(run: Run) -> list[Table]:
    """Every table of a run, the ratios first."""
    return [*_summaries(run), *(steps(each, run.dtype) for each in run.workloads)]


def _summaries(run: Run) -> list[Table]:
    found = [overview(run)]
    chosen = [name for name in CHOSEN if _measured(run, name)]
    found += [over_peers(run, name) for name in chosen]
    if any(_measured(run, name) for name in MIXED_PRECISION):
        found += [over_mixed_precision(run, name) for name in chosen]
    found.append(first_calls(run))
    if any(each.systems[BASE].losses for each in run.workloads if BASE in each.systems):
        found.append(losses(run))
    return found


def _measured(run: Run, system: str) -> bool:
    return any(system in each.systems for each in run.workloads)


# The columns of a page: a short name, and the systems of which the fastest is shown.
_COLUMNS: dict[str, tuple[str, ...]] = {
    "Keras's policy": ("keras_policy",),
    "TensorFlow's pass": ("tensorflow_amp",),
    "float32, XLA": ("float32_xla",),
    "PyTorch's best": TORCH,
    "tfamp policy": ("tfamp_policy",),
    "tfamp policy, sums": ("tfamp_policy_sums",),
    "tfamp.rewrite": ("rewrite_lists", "rewrite", "rewrite_fused"),
    "tfamp.tune": ("tune",),
    'level "auto"': ("auto",),
}


def _page_columns(run: Run) -> dict[str, tuple[str, ...]]:
    """The columns that a run has something for."""
    columns = {
        name: systems
        for name, systems in _COLUMNS.items()
        if any(_measured(run, system) for system in systems)
    }
    if "tfamp.tune" in columns:  # It is the fastest of these.
        columns.pop("tfamp.rewrite", None)
    return columns


def by_model(run: Run) -> Table:
    """How many times as fast as float32 the systems are on each model, a row for each."""
    columns = _page_columns(run)
    rows, speeds = [], {name: list[float]() for name in columns}
    for each in run.workloads:
        if BASE not in each.systems:
            continue
        cells = [each.workload, f"{1e3 * results.spread(each.systems[BASE].seconds).median:.0f}"]
        for name, systems in columns.items():
            found = [results.speed(each, one).median for one in systems if one in each.systems]
            speeds[name] += [max(found)] if found else []
            cells.append(f"{max(found):.2f}" if found else "-")
        rows.append(tuple(cells))
    if len(rows) > 1:
        means = (f"{geometric_mean(found):.2f}" for found in speeds.values())
        rows.append(("geometric mean", "", *means))
    machine = ", ".join(f"{name} {value}" for name, value in run.machine.items())
    headers = ("model", "float32, ms", *columns)
    notes = (f"Machine: {machine}.", *_not_measured(run, columns))
    return Table(f"Training step, {run.dtype}", headers, tuple(rows), notes=notes)


def memory_by_model(run: Run) -> Table:
    """The peak memory of TensorFlow's systems over float32's on each model, a row for each."""
    columns = {name: each for name, each in _page_columns(run).items() if each != TORCH}
    rows = []
    for each in run.workloads:
        if BASE not in each.systems:
            continue
        base = each.systems[BASE].memory
        cells = [each.workload, f"{base / 1e6:.0f}"]
        for systems in columns.values():
            found = [each.systems[one].memory for one in systems if one in each.systems]
            cells.append(f"{min(found) / base:.2f}" if found else "-")
        rows.append(tuple(cells))
    headers = ("peak memory", "float32, MB", *columns)
    return Table(f"Peak memory, {run.dtype}", headers, tuple(rows))


def section(run: Run) -> str:
    """The tables by model, without headings, as part of a page."""
    both = (by_model(run), memory_by_model(run))
    return "\n".join(tables.to_markdown(table, heading=False) for table in both)


def put_section(page: Path, text: str) -> None:
    """Replaces what is between two marks of a page; `page#name` has the marks of a name.

    Raises:
        ValueError: The page does not have both marks, each once.
    """
    path, _, name = str(page).partition("#")
    page, (begin, end) = Path(path), marks(name)
    before = page.read_text(encoding="utf-8")
    if before.count(begin) != 1 or before.count(end) != 1:
        raise ValueError(f"{page} must have a line {begin} and a line {end}, each once.")
    head, _, rest = before.partition(begin)
    tail = rest.partition(end)[2]
    page.write_text(f"{head}{begin}\n\n{text}\n{end}{tail}", encoding="utf-8")


def marks(name: str = "") -> tuple[str, str]:
    """The lines around a generated section of a page."""
    subject = f"benchmarks {name}".strip()
    return f"<!-- {subject}: begin -->", f"<!-- {subject}: end -->"


def _quartiles(values: Spread, factor: float, form: str) -> str:
    return f"{factor * values.low:{form}} to {factor * values.high:{form}}"
