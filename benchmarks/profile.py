"""Where the time of one training step goes, by op type and dtype, beside the roofline.

    python -m benchmarks.profile --workload transformer --system rewrite [--markdown FILE]
    python -m benchmarks.profile --workload transformer lstm ... --system rewrite_fused keras_policy

Of several there are two tables for all: what the kinds of ops take, and, of the first system, the
ops that take 3 % of a step and more. Each runs in a process of its own. The step's graph runs in a
session that records when every op starts and ends; ops that run at the same time are counted in
full, so the sum of all ops may exceed the step. The roofline is what each op would take at the
peaks of this machine's profile, on all cores: the longer of its arithmetic and its memory traffic.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

from benchmarks import report
from benchmarks.progress import reporting
from benchmarks.roofline import compute_dtype, work
from benchmarks.step_graph import Trace, trace
from benchmarks.systems import BASE, SYSTEMS, grappler_options
from benchmarks.tables import Table, show, to_markdown
from benchmarks.workloads import WORKLOADS
from tfamp.core.profile import MachineProfile

# Below this a ratio to the roofline tells only what starting an op takes.
_NOTICEABLE = 1e-5
# The share of a step from which an op is in the table of several workloads.
_MUCH = 0.03
_SYSTEMS = tuple(name for name, each in SYSTEMS.items() if not each.torch and not each.xla)
HEADERS = ("op", "dtype", "count", "ms", "share", "roofline ms", "times roofline")
KINDS = {
    "matmul": "matrix products",
    "conv": "convolutions",
    "conv_input": "convolutions, gradient by input",
    "conv_filter": "convolutions, gradient by filter",
    "cast": "Casts",
    "elementwise": "elementwise and reductions",
    "special": "softmax, pooling, batch normalization",
    "move": "moved, copied, gathered",
    "free": "shapes, variables, constants",
    "call": "called functions, not looked into",
}


@dataclass
class Line:
    """What the ops of one type and dtype, or of one kind, took in a step.

    Attributes:
        op: Op type, or kind.
        dtype: What they compute in; "" for a kind.
        count: How many ran.
        seconds: What they took.
        roofline: What they would take at the machine's peaks.
    """

    op: str
    dtype: str
    count: int = 0
    seconds: float = 0.0
    roofline: float = 0.0

    def add(self, count: int, seconds: float, roofline: float) -> None:
        """Adds what one op of the graph took."""
        self.count += count
        self.seconds += seconds
        self.roofline += roofline

    def times_roofline(self) -> str:
        """How much longer they took; "-" where nothing was computed."""
        return f"{self.seconds / self.roofline:.1f}" if self.roofline > _NOTICEABLE else "-"


@dataclass(frozen=True)
class StepProfile:
    """Where a step's time goes.

    Attributes:
        ops: By op type and dtype, the longest first.
        kinds: By kind of op, the longest first.
        step: Median seconds of a step that is not traced.
        traced: The same of the traced steps.
    """

    ops: tuple[Line, ...]
    kinds: tuple[Line, ...]
    step: float
    traced: float

    @property
    def total(self) -> float:
        """Sum of what all ops took."""
        return sum(line.seconds for line in self.kinds)


def profile_step(found: Trace, machine: MachineProfile) -> StepProfile:
    """Adds up a trace by op type and dtype, and by kind."""
    ops: dict[tuple[str, str], Line] = {}
    kinds: dict[str, Line] = {}
    for node in found.nodes:
        each = work(node, machine)
        key = node.op, compute_dtype(node)
        lines = (
            ops.setdefault(key, Line(*key)),
            kinds.setdefault(each.kind, Line(KINDS[each.kind], "")),
        )
        for line in lines:
            line.add(node.count, node.median, node.count * each.seconds)
    return StepProfile(
        _longest_first(ops.values()),
        _longest_first(kinds.values()),
        statistics.median(found.walls),
        statistics.median(found.traced_walls),
    )


def _longest_first(lines: Iterable[Line]) -> tuple[Line, ...]:
    return tuple(sorted(lines, key=lambda line: -line.seconds))


def rows(lines: Sequence[Line], total: float, most: int) -> list[tuple[str, ...]]:
    """The cells of a table: `most` lines, one for the rest, one for all."""
    shown = list(lines[:most])
    for title, left in (("other", lines[most:]), ("all", lines)):
        if left:
            line = Line(f"{title} {len(left)}" if title == "other" else title, "")
            for each in left:
                line.add(each.count, each.seconds, each.roofline)
            shown.append(line)
    return [
        (
            line.op,
            line.dtype,
            str(line.count),
            f"{1e3 * line.seconds:.2f}",
            f"{line.seconds / total:.1%}" if total else "-",
            f"{1e3 * line.roofline:.2f}",
            line.times_roofline(),
        )
        for line in shown
    ]


def to_tables(title: str, found: StepProfile, machine: str, most: int) -> list[Table]:
    """The profile by kind of op, and by op type and dtype."""
    about = (
        f"A step takes {1e3 * found.step:.1f} ms, traced {1e3 * found.traced:.1f} ms; its ops add "
        f"up to {1e3 * found.total:.1f} ms. Roofline: {machine}."
    )
    kinds = tuple((row[0], *row[2:]) for row in rows(found.kinds, found.total, len(found.kinds)))
    return [
        Table(f"{title}: kinds of ops", ("kind", *HEADERS[2:]), kinds, notes=(about,)),
        Table(f"{title}: ops", HEADERS, tuple(rows(found.ops, found.total, most)), left=2),
    ]


def overview(found: Mapping[tuple[str, str], StepProfile], machine: str) -> list[Table]:
    """The profiles of several workloads, each under several systems, by their names and titles.

    What the kinds of ops take, and of the first system all ops that take much of a step.
    """
    kinds = [
        kind for kind in KINDS.values() if any(_seconds(each, kind) for each in found.values())
    ]
    by_kind = [
        (*names, *(f"{1e3 * ms:.0f}" for ms in (each.step, *(_seconds(each, k) for k in kinds))))
        for names, each in found.items()
    ]
    (_, first), *_ = found
    ops = [
        (
            workload,
            line.op,
            line.dtype,
            str(line.count),
            f"{line.seconds / each.total:.1%}",
            line.times_roofline(),
        )
        for (workload, system), each in found.items()
        for line in each.ops
        if system == first and line.seconds >= _MUCH * each.total
    ]
    headers = ("workload", "op", "dtype", "count", "share", "times roofline")
    return [
        Table("Kinds of ops, ms", ("workload", "system", "step", *kinds), tuple(by_kind), left=2),
        Table(
            f"Ops of {_MUCH:.0%} of a step and more, {first}",
            headers,
            tuple(ops),
            left=3,
            notes=(f"Roofline: {machine}.",),
        ),
    ]


def _seconds(found: StepProfile, kind: str) -> float:
    return sum(line.seconds for line in found.kinds if line.op == kind)


def main() -> None:
    args = _arguments()
    from tfamp.machine.profile_choice import find_profile

    machine = find_profile().profile
    jobs = [(name, system) for name in args.workload for system in args.system]
    found = {}
    with (
        # A system sets what holds for its process.
        multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool,
        reporting("profile", len(jobs)) as tell,
    ):
        for name, system in jobs:
            tell(f"{name}, {system}")
            title = SYSTEMS[system].title + ("" if system == BASE else f", {args.dtype}")
            found[name, title] = profile_step(pool.apply(_trace, (name, system, args)), machine)
    shown = overview(found, machine.name) if args.page or len(found) > 1 else []
    if not args.page:
        for (name, title), each in found.items():
            shown += to_tables(f"{name}, {title}", each, machine.name, args.rows)
    show(shown)
    if args.page:
        report.put_section(args.page, "\n".join(map(to_markdown, shown)))
    if args.markdown:
        args.markdown.write_text("\n".join(map(to_markdown, shown)), encoding="utf-8")


def _trace(name: str, system: str, args: argparse.Namespace) -> Trace:
    from benchmarks.keras_side import Trainer

    workload = WORKLOADS[name]
    size = workload.sizes["small" if args.small else "full"]
    trainer = Trainer(system, args.dtype)
    batch = trainer.put(workload.batch(size, 0))
    trainer.build(workload, size)
    trainer.first_step(batch)
    options = grappler_options(system, args.dtype)
    return trace(trainer.concrete(batch), batch, runs=args.runs, rewriter_options=options)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--workload", nargs="+", choices=tuple(WORKLOADS), default=["transformer"], metavar="W"
    )
    parser.add_argument("--system", nargs="+", choices=_SYSTEMS, default=["rewrite"], metavar="S")
    parser.add_argument("--dtype", choices=["float16", "bfloat16"], default="bfloat16")
    parser.add_argument("--runs", type=int, default=10, help="steps to trace; medians are shown")
    parser.add_argument("--rows", type=int, default=25, help="how many op types to list")
    parser.add_argument("--small", action="store_true", help="a small model")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write tables there too")
    parser.add_argument(
        "--page", type=Path, help="put the tables of all workloads between the page's marks"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
