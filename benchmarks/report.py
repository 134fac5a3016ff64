"""What a run found, as tables and as the section of a page. No framework is imported."""

from __future__ import annotations

from pathlib import Path
from statistics import geometric_mean

from benchmarks import results, tables
from benchmarks.results import Cell, Run, ScalingRun, Spread, WorkloadRun
from benchmarks.systems import BASE, CHOSEN, CONTROL, SYSTEMS
from benchmarks.tables import Table
from benchmarks.workloads import WORKLOADS

BEGIN, END = "<!-- benchmarks: begin -->", "<!-- benchmarks: end -->"
_SCALED = ("tfamp_policy", "rewrite")
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
    names = [name for name in SYSTEMS if any(name in each.systems for each in run.workloads)]
    rows = [
        (SYSTEMS[name].title, *(_speed(each, name) for each in run.workloads)) for name in names
    ]
    headers = ("times as fast as float32", *(each.workload for each in run.workloads))
    return Table(f"Training step, {run.dtype}", headers, tuple(rows))


def summary(run: Run) -> Table:
    """The chosen step beside the best peer and the best of tfamp's placements."""
    rows, over_peers, over_own = [], [], []
    for each in run.workloads:
        peer, placement = results.lead_over_peers(each), results.lead_over_own(each)
        if peer is None:
            continue
        over_peers.append(peer.speed.median)
        row = [each.workload, SYSTEMS[CHOSEN].title, _speed(each, CHOSEN)]
        row += [SYSTEMS[peer.other].title, f"{peer.speed.median:.2f}"]
        row += [_quartiles(peer.speed, 1, ".2f"), "-", "-"]
        if placement is not None:
            over_own.append(placement.speed.median)
            row[-2:] = [SYSTEMS[placement.other].title, f"{placement.speed.median:.2f}"]
        rows.append(tuple(row))
    means = [f"{geometric_mean(each):.2f}" if each else "-" for each in (over_peers, over_own)]
    rows.append(("geometric mean", "", "", "", means[0], "", "", means[1]))
    headers = ("workload", "chosen", "x float32", "best peer", "over it", "quartiles")
    headers += ("best placement", "over it")
    return Table(f"The chosen step, {run.dtype}", headers, tuple(rows))


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
    about = WORKLOADS[run.workload].about
    notes = [_why_not(run, name) for name in run.skipped]
    return Table(
        f"{run.workload}, {dtype}",
        _STEP_HEADERS,
        tuple(rows),
        notes=(f"{_sizes(run.size)}: {about}.", *notes),
    )


def _why_not(run: WorkloadRun, system: str) -> str:
    what = "Not measured completely" if system in run.systems else "Not measured"
    title = CONTROL.title if system == CONTROL.name else SYSTEMS[system].title
    return f"{what}: {title}: {run.skipped[system].rstrip('.')}."


def losses(run: Run) -> Table:
    """The losses after the long runs, beside float32's."""
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
    sizes = {each.workload: _sizes(each.loss_size) for each in run.workloads if each.loss_size}
    return Table(
        f"Loss after {run.loss_steps} steps, {run.dtype}",
        ("workload", "system", "first step", f"step {run.loss_steps}", "from float32"),
        tuple(rows),
        left=2,
        notes=tuple(f"{name}: {size}." for name, size in sizes.items()),
    )


def _loss_row(
    run: WorkloadRun, title: str, found: list[float], difference: float | None
) -> tuple[str, ...]:
    last = f"{results.final_loss(found):.4f}"
    moved = "-" if difference is None else f"{difference:+.2%}"
    return run.workload, title, f"{found[0]:.4f}", last, moved


def scaling(run: ScalingRun, dtype: str) -> Table:
    """How many times as fast as float32 tfamp is, by width and batch: the policy / the rewrite."""
    widths = list(dict.fromkeys(cell.width for cell in run.cells))
    batches = list(dict.fromkeys(cell.batch for cell in run.cells))
    by_size = {(cell.width, cell.batch): cell for cell in run.cells}
    rows = [
        (f"width {width}", *(_cell(by_size.get((width, batch))) for batch in batches))
        for width in widths
    ]
    headers = (f"{run.workload}, {dtype}", *(f"batch {batch}" for batch in batches))
    title = f"{run.workload}: tfamp policy / tfamp.rewrite, times as fast as float32"
    return Table(title, headers, tuple(rows))


def cell_speed(cell: Cell, system: str) -> Spread:
    """How many times as fast as float32 a system is at a size."""
    return results.ratio(cell.seconds[BASE], cell.seconds[system])


def _cell(cell: Cell | None) -> str:
    if cell is None:
        return "-"
    return " / ".join(f"{cell_speed(cell, name).median:.2f}" for name in _SCALED)


def machine(run: Run) -> Table:
    """The machine."""
    return Table("Machine", ("what", "which"), tuple(run.machine.items()), left=2)


def all_tables(run: Run) -> list[Table]:
    """Every table of a run, the ratios first."""
    found = []
    if run.workloads:
        found.append(overview(run))
        if any(CHOSEN in each.systems for each in run.workloads):
            found.append(summary(run))
        found += [steps(each, run.dtype) for each in run.workloads]
    if any(each.systems[BASE].losses for each in run.workloads):
        found.append(losses(run))
    found += [scaling(each, run.dtype) for each in run.scaling]
    return [*found, machine(run)]


def section(run: Run, picture: str | None = None) -> str:
    """The tables of a run as part of a page."""
    parts = [tables.to_markdown(table) for table in all_tables(run)]
    if picture is not None:
        parts.insert(1, f"![Times as fast as float32, by workload and system]({picture})\n")
    return "\n".join(parts)


def put_section(page: Path, text: str) -> None:
    """Replaces what is between the two marks of a page.

    Raises:
        ValueError: The page does not have both marks, each once.
    """
    before = page.read_text(encoding="utf-8")
    if before.count(BEGIN) != 1 or before.count(END) != 1:
        raise ValueError(f"{page} must have a line {BEGIN} and a line {END}, each once.")
    head, _, rest = before.partition(BEGIN)
    tail = rest.partition(END)[2]
    page.write_text(f"{head}{BEGIN}\n\n{text}\n{END}{tail}", encoding="utf-8")


def _quartiles(values: Spread, factor: float, form: str) -> str:
    return f"{factor * values.low:{form}} to {factor * values.high:{form}}"


def _sizes(size: dict[str, int]) -> str:
    return ", ".join(f"{name} {value}" for name, value in size.items())
