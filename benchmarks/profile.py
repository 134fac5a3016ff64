"""Adds up the time of one training step by kind of op.

    python -m benchmarks.profile --workload transformer lstm --system rewrite_fused keras_policy

The step's graph runs in a session that records when every op starts and ends, each step in a
process of its own. Ops that run at the same time are counted in full, so the sum of all ops may
exceed the step.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

from benchmarks import report
from benchmarks.progress import reporting
from benchmarks.step_graph import Trace, trace
from benchmarks.systems import BASE, SYSTEMS, grappler_options
from benchmarks.tables import Table, show, to_markdown
from benchmarks.workloads import WORKLOADS
from tfamp.planning.cost import FLOP_FORMULAS, FREE_OPS, MOVING_OPS

_SYSTEMS = tuple(name for name, each in SYSTEMS.items() if not each.torch and not each.compiled)
KINDS = {
    "matmul": "matrix products",
    "conv": "convolutions",
    "conv_gradient": "convolutions, gradients",
    "cast": "Casts",
    "elementwise": "elementwise and reductions",
    "move": "moved, copied, gathered",
    "free": "shapes, variables, constants",
    "call": "called functions, not looked into",
}
# By op type; later ones hold. Others are elementwise.
_KIND_OF = {
    **{op: rule.kind for op, rule in FLOP_FORMULAS.items()},
    **dict.fromkeys(MOVING_OPS, "move"),
    # They move pointers only.
    **dict.fromkeys(FREE_OPS, "free"),
    **dict.fromkeys(("AssignVariableOp", "VarHandleOp", "_Arg", "_Retval", "_Recv"), "free"),
    **dict.fromkeys(("StatefulPartitionedCall", "PartitionedCall", "_XlaRun"), "call"),
    "Cast": "cast",
}


def kind_of(op: str) -> str:
    """The kind of an op type, a key of `KINDS`."""
    return _KIND_OF.get(op, "elementwise")


def table(found: Mapping[tuple[str, str], Trace]) -> Table:
    """Milliseconds by kind of op, by names of workloads and titles of systems."""
    totals: dict[tuple[str, str], Counter[str]] = {}
    for names, each in found.items():
        totals[names] = Counter()
        for node in each.nodes:
            totals[names][kind_of(node.op)] += node.median
    kinds = [kind for kind in KINDS if any(total[kind] for total in totals.values())]
    rows = []
    for names, each in found.items():
        seconds = [statistics.median(each.walls), *(totals[names][kind] for kind in kinds)]
        rows.append((*names, *(f"{1e3 * one:.0f}" for one in seconds)))
    headers = ("workload", "system", "step", *(KINDS[kind] for kind in kinds))
    return Table("Kinds of ops, ms", headers, tuple(rows), left=2)


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--workload", nargs="+", choices=WORKLOADS, default=["transformer"], metavar="W")
    add("--system", nargs="+", choices=_SYSTEMS, default=["rewrite"], metavar="S")
    add("--dtype", choices=["float16", "bfloat16"], default="bfloat16")
    add("--runs", type=int, default=10, help="steps to trace; medians are shown")
    add("--small", action="store_true", help="a small model")
    add("--page", type=Path, help="put the table between the page's marks")
    args = parser.parse_args()
    found = {}
    with (
        # A system sets what holds for its process.
        multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool,
        reporting("profile", len(args.workload) * len(args.system)) as progress,
    ):
        for name in args.workload:
            for system in args.system:
                progress(f"{name}, {system}")
                title = SYSTEMS[system].title + ("" if system == BASE else f", {args.dtype}")
                found[name, title] = pool.apply(_trace, (name, system, args))
    show([table(found)])
    if args.page:
        report.put_section(args.page, to_markdown(table(found)))


if __name__ == "__main__":
    main()
