"""Measured values, their statistics, and both as JSON. No framework is imported."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from benchmarks.systems import BASE, SYSTEMS

SCHEMA = 1


@dataclass(frozen=True)
class Spread:
    """A median and the quartiles around it."""

    median: float
    low: float
    high: float


@dataclass
class Measured:
    """The measurements of a system on a workload; times in seconds, memory in bytes.

    Attributes:
        seconds: Each step after the warm-up, in the order of the rounds.
        build: Making the model and its variables.
        first_call: The first step: tracing, rewriting, compiling, running.
        rewrite: Time of the graph rewrite in it; None without one.
        memory: Peak memory less the memory before the model was made.
        casts: Casts between float dtypes in a step; None without a graph.
        cast_bytes: Bytes these read and write.
        losses: Losses of the long run, by step.
    """

    seconds: list[float] = field(default_factory=list)
    build: float = 0.0
    first_call: float = 0.0
    rewrite: float | None = None
    memory: int = 0
    casts: int | None = None
    cast_bytes: int | None = None
    losses: list[float] = field(default_factory=list)


@dataclass
class WorkloadRun:
    """All systems on one workload.

    Attributes:
        workload: Its name.
        size: Its dimensions.
        loss_size: Dimensions of the model for losses.
        systems: The measurements, by system.
        skipped: Reasons why others were not measured, by system.
        control: Losses in float32 from initial weights rounded to the low dtype.
    """

    workload: str
    size: dict[str, int]
    loss_size: dict[str, int] = field(default_factory=dict)
    systems: dict[str, Measured] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    control: list[float] = field(default_factory=list)


@dataclass
class Run:
    """Everything that one command measured.

    Attributes:
        machine: Facts about the machine, by name.
        dtype: The low dtype.
        rounds: Steps of each system on a workload.
        loss_steps: Steps of each long run.
        workloads: One for each workload.
    """

    machine: dict[str, str]
    dtype: str
    rounds: int
    loss_steps: int = 0
    workloads: list[WorkloadRun] = field(default_factory=list)


def together(runs: Sequence[Run]) -> Run:
    """Runs of some workloads each, on one machine, as one run of all."""
    first, *others = runs
    for each in others:
        if (each.dtype, each.machine["CPU"]) != (first.dtype, first.machine["CPU"]):
            raise ValueError("Runs of one dtype on one machine go together; these differ in them.")
    return replace(
        first,
        rounds=min(each.rounds for each in runs),
        workloads=[workload for each in runs for workload in each.workloads],
    )


def spread(values: Sequence[float]) -> Spread:
    """The median of values, and their first and third quartile."""
    if not values:
        raise ValueError("A spread needs at least one value; got none.")
    if len(values) == 1:
        return Spread(values[0], values[0], values[0])
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return Spread(median, low, high)


def ratio(base: Sequence[float], own: Sequence[float]) -> Spread:
    """How many times as fast as `base`: of each round the ratio, of these median and quartiles.

    Their steps alternated, so whatever slows the machine for a while is in both.
    """
    return spread([before / after for before, after in zip(base, own, strict=True)])


def final_loss(losses: Sequence[float]) -> float:
    """The mean of the last tenth: single batches differ by more than systems do."""
    if not losses:
        raise ValueError("A final loss needs at least one step; got none.")
    return statistics.fmean(losses[-max(1, len(losses) // 10) :])


def loss_difference(run: WorkloadRun, system: str) -> float | None:
    """The final loss relative to the system's float32, less 1; None without either."""
    base = run.systems.get(SYSTEMS[system].base)
    own = run.systems[system]
    if base is None or not base.losses or not own.losses:
        return None
    return final_loss(own.losses) / final_loss(base.losses) - 1


def control_difference(run: WorkloadRun) -> float | None:
    """How far rounding the initial weights alone takes float32's final loss; None if not known."""
    base = run.systems[BASE].losses
    if not base or not run.control:
        return None
    return final_loss(run.control) / final_loss(base) - 1


def speed(run: WorkloadRun, system: str) -> Spread:
    """How many times as fast as float32 a system is."""
    return ratio(run.systems[BASE].seconds, run.systems[system].seconds)


@dataclass(frozen=True)
class Lead:
    """A system compared with the fastest of some others.

    Attributes:
        other: The fastest of them, by the median step.
        speed: How many times as fast as that one.
    """

    other: str
    speed: Spread


def lead(run: WorkloadRun, system: str, others: Sequence[str]) -> Lead | None:
    """Compares a system with the fastest of others; None without either."""
    measured = [name for name in others if name in run.systems]
    if system not in run.systems or not measured:
        return None
    best = min(measured, key=lambda name: spread(run.systems[name].seconds).median)
    return Lead(best, ratio(run.systems[best].seconds, run.systems[system].seconds))


def first_ratio(run: WorkloadRun, system: str, calls: int = 1) -> float | None:
    """The first call over float32's first calls, later ones median steps; None without."""
    if system not in run.systems:
        return None
    base = run.systems[BASE]
    later = (calls - 1) * spread(base.seconds).median
    return run.systems[system].first_call / (base.first_call + later)


def to_json(run: Run) -> dict[str, Any]:
    """The run as JSON, with its statistics."""
    found: dict[str, Any] = {"schema": SCHEMA, **asdict(run)}
    for workload, values in zip(run.workloads, found["workloads"], strict=True):
        for system, own in values["systems"].items():
            own["step"] = asdict(spread(own["seconds"]))
            own["speed"] = asdict(speed(workload, system))
            own["loss_difference"] = loss_difference(workload, system)
    return found


def from_json(found: Mapping[str, Any]) -> Run:
    """The run that `to_json` gave.

    Raises:
        ValueError: It was written in another form.
    """
    if found.get("schema") != SCHEMA:
        raise ValueError(
            f"The results must be of schema {SCHEMA}; got {found.get('schema')!r}. Measure again."
        )
    workloads = []
    for each in found["workloads"]:
        systems = {name: _made(Measured, of) for name, of in each["systems"].items()}
        workloads.append(_made(WorkloadRun, {**each, "systems": systems}))
    return _made(Run, {**found, "workloads": workloads})


def _made(kind: Any, values: Mapping[str, Any]) -> Any:
    """A record of the values that it has fields for; others follow from these."""
    return kind(**{each.name: values[each.name] for each in fields(kind) if each.name in values})
