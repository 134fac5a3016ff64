"""Shows a run as tables and as the section of a page. No framework is imported."""

from __future__ import annotations

from pathlib import Path
from statistics import geometric_mean

from benchmarks import results, tables
from benchmarks.results import Run, Spread, WorkloadRun
from benchmarks.systems import BASE, CHOSEN, CONTROL, OWN, PEERS, SYSTEMS
from benchmarks.tables import Table

BEGIN, END = "<!-- benchmarks: begin -->", "<!-- benchmarks: end -->"
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
    return Table(f"Training step, {run.dtype}", headers, tuple(rows), notes=_not_measured(run))


def _not_measured(run: Run) -> tuple[str, ...]:
    """A sentence for each reason."""
    titles = {name: each.title for name, each in SYSTEMS.items()} | {CONTROL.name: CONTROL.title}
    found: dict[str, tuple[list[str], list[str]]] = {}
    for each in run.workloads:
        for name, reason in each.skipped.items():
            systems, workloads = found.setdefault(reason.rstrip("."), ([], []))
            systems.append(titles[name])
            workloads.append(each.workload)
    return tuple(
        f"Not measured: {_once(systems, ' and ')} on {_once(workloads, ', ')}: {reason}."
        for reason, (systems, workloads) in found.items()
    )


def _once(names: list[str], separator: str) -> str:
    return separator.join(dict.fromkeys(names))


def summary(run: Run) -> Table:
    """The chosen step, compared with the best peer and the best of tfamp's placements."""
    rows, over_peers, over_own = [], [], []
    for each in run.workloads:
        peer, placement = results.lead(each, PEERS), results.lead(each, OWN)
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


def models(run: Run) -> Table:
    """The sizes of the models: those that are timed, and those that the losses are of."""
    rows = [
        (each.workload, _sizes(each.size), _sizes(each.loss_size) or "-") for each in run.workloads
    ]
    return Table("Models", ("workload", "timed", "losses"), tuple(rows), left=3)


def machine(run: Run) -> Table:
    """The machine."""
    return Table("Machine", ("what", "which"), tuple(run.machine.items()), left=2)


def all_tables(run: Run) -> list[Table]:
    """Every table of a run, the ratios first."""
    found = [overview(run)]
    if any(CHOSEN in each.systems for each in run.workloads):
        found.append(summary(run))
    found += [steps(each, run.dtype) for each in run.workloads]
    if any(each.systems[BASE].losses for each in run.workloads):
        found.append(losses(run))
    return [*found, models(run), machine(run)]


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
