"""Training runs to their end as values, as JSON, as a table. No framework is imported."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.systems import BASE, SYSTEMS
from benchmarks.tables import Table

SCHEMA = 1
_DIGITS = 6


@dataclass(frozen=True)
class Setup:
    """A run to be made: a system on a task, from a seed.

    Attributes:
        task: The name of the task.
        system: The system that trains.
        dtype: Its low dtype; "float32" for the system float32.
        seed: Seed of weights and data.
        size: The dimensions of the model and the batch.
        steps: How many batches it learns from.
        every: The steps from one evaluation to the next.
        batches: How many held-out batches an evaluation reads.
    """

    task: str
    system: str
    dtype: str
    seed: int
    size: Mapping[str, int]
    steps: int
    every: int
    batches: int

    @property
    def way(self) -> str:
        """The system and its low dtype, for tables."""
        title = SYSTEMS[self.system].title
        return title if self.system == BASE else f"{title}, {self.dtype}"

    @property
    def name(self) -> str:
        """The name of its files."""
        return f"{self.task}-{self.system}-{self.dtype}-{self.seed}"


class Evaluation(NamedTuple):
    """The loss and the share of right answers on held-out data after some steps."""

    step: int
    loss: float
    accuracy: float


@dataclass
class Curve:
    """A run, as far as it is.

    Attributes:
        setup: What it trains.
        parameters: The trainable numbers of its model.
        machine: Facts about the machine it began on, by name.
        losses: The loss of each step's batch, before the step.
        held_out: The evaluations.
    """

    setup: Setup
    parameters: int = 0
    machine: dict[str, str] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    held_out: list[Evaluation] = field(default_factory=list)

    @property
    def step(self) -> int:
        """How many steps are taken."""
        return len(self.losses)

    @property
    def done(self) -> bool:
        """Whether it is at its end."""
        return bool(self.held_out) and self.held_out[-1].step == self.setup.steps


# ---- JSON ----------------------------------------------------------------------------------------


def to_json(curves: Iterable[Curve]) -> str:
    """The curves as JSON, a line for each; numbers have six digits."""
    lines = []
    for curve in curves:
        found = asdict(curve)
        found["losses"] = [_rounded(loss) for loss in curve.losses]
        found["held_out"] = [[x.step, _rounded(x.loss), x.accuracy] for x in curve.held_out]
        lines.append(json.dumps(found))
    return f'{{"schema": {SCHEMA}, "curves": [\n' + ",\n".join(lines) + "\n]}\n"


def _rounded(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")


def from_json(text: str) -> list[Curve]:
    """The curves that `to_json` gave.

    Raises:
        ValueError: They were written in another form.
    """
    found = json.loads(text)
    if found.get("schema") != SCHEMA:
        raise ValueError(
            f"The curves must be of schema {SCHEMA}; got {found.get('schema')!r}. Train again."
        )
    return [curve_of(each) for each in found["curves"]]


def curve_of(values: Mapping[str, Any]) -> Curve:
    """The curve of the values that `asdict` gave."""
    evaluations = [Evaluation(*each) for each in values["held_out"]]
    setup = Setup(**values["setup"])
    return Curve(**{**values, "setup": setup, "held_out": evaluations})


def read(path: Path) -> list[Curve]:
    """The curves of a file, or of a folder of results."""
    paths = sorted(path.glob("*.json")) if path.is_dir() else [path]
    curves = [curve for each in paths for curve in from_json(each.read_text(encoding="utf-8"))]
    return sorted(curves, key=lambda curve: _order(curve.setup))


def _order(setup: Setup) -> tuple[Any, ...]:
    return setup.task, setup.dtype != "float32", setup.dtype, setup.system, setup.seed


# ---- Comparison with float32 ---------------------------------------------------------------------


def ways(curves: Iterable[Curve]) -> list[str]:
    """The ways of curves, in their order."""
    return list(dict.fromkeys(curve.setup.way for curve in curves))


def pairs(way: str, curves: Sequence[Curve]) -> list[tuple[Curve, Curve]]:
    """The curves of a way in a task, each with float32's of the same seed."""
    base = {curve.setup.seed: curve for curve in curves if curve.setup.system == BASE}
    own = (curve for curve in curves if curve.setup.way == way)
    return [(curve, base[curve.setup.seed]) for curve in own if curve.setup.seed in base]


def table(curves: Sequence[Curve]) -> Table:
    """The ends of the runs: a row for each task and way, over the seeds that are at their end."""
    rows = []
    for task in dict.fromkeys(curve.setup.task for curve in curves):
        done = [curve for curve in curves if curve.setup.task == task and curve.done]
        for way in ways(done):
            rows.append((task, *_row(way, done)))
    heads = "seeds", "loss", "of seeds", "from float32", "accuracy", "points from float32"
    notes = (*_about(curves), *_unfinished(curves))
    return Table("Held-out data at the end", ("task", "way", *heads), tuple(rows), 2, notes)


def _row(way: str, done: Sequence[Curve]) -> tuple[str, ...]:
    ends = [curve.held_out[-1] for curve in done if curve.setup.way == way]
    losses = [end.loss for end in ends]
    both = [(own.held_out[-1], base.held_out[-1]) for own, base in pairs(way, done)]
    of_float32 = [f"{own.loss / base.loss - 1:+.2%}" for own, base in _by_loss(both)]
    points = sorted(100 * (own.accuracy - base.accuracy) for own, base in both)
    is_base = any(curve.setup.way == way and curve.setup.system == BASE for curve in done)
    return (
        way,
        str(len(ends)),
        f"{statistics.fmean(losses):.4f}",
        _from_to([f"{loss:.4f}" for loss in sorted(losses)]),
        "" if is_base else _from_to(of_float32),
        f"{statistics.fmean(end.accuracy for end in ends):.2%}",
        "" if is_base else _from_to([f"{each:+.2f}" for each in points]),
    )


def _by_loss(both: list[tuple[Evaluation, Evaluation]]) -> list[tuple[Evaluation, Evaluation]]:
    return sorted(both, key=lambda pair: pair[0].loss / pair[1].loss)


def _from_to(values: Sequence[str]) -> str:
    """The first and the last of sorted values; "-" of none."""
    if not values:
        return "-"
    return values[0] if values[0] == values[-1] else f"{values[0]} to {values[-1]}"


def _about(curves: Sequence[Curve]) -> list[str]:
    """Sentences on what was trained, and on which machines."""
    found = []
    for curve in curves:
        setup = curve.setup
        size = ", ".join(f"{name} {value}" for name, value in setup.size.items())
        found.append(
            f"{setup.task}: {curve.parameters:,} parameters, {setup.steps} steps; {size}. Evaluated"
            f" every {setup.every} steps, on {setup.batches} batches."
        )
    for curve in curves:
        facts = ", ".join(f"{name} {value}" for name, value in curve.machine.items())
        found.append(f"Machine: {facts}.")
    return list(dict.fromkeys(found))


def _unfinished(curves: Sequence[Curve]) -> list[str]:
    return [
        f"Not at its end: {curve.setup.task}, {curve.setup.way}, seed {curve.setup.seed},"
        f" at step {curve.step} of {curve.setup.steps}."
        for curve in curves
        if not curve.done
    ]
