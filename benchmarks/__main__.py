"""Training steps in mixed precision, in ratios to float32, on the machine at hand.

    python -m benchmarks [steps | scaling | all] [--workload W ...] [--json F] [--plot F] ...

"steps" measures each system on each workload, "scaling" where mixed precision starts to pay, "all"
both. docs/benchmarks.md says what the columns mean. Beside it are `benchmarks.profile`,
`benchmarks.autocast`, `benchmarks.loss_scaling` and `benchmarks.machine`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

from benchmarks import environment, report, results
from benchmarks.interleaved import Options, measure, stages
from benchmarks.progress import reporting
from benchmarks.results import Run
from benchmarks.scaling import measure_scaling, sizes
from benchmarks.systems import BASE, SYSTEMS, torch_version
from benchmarks.tables import show
from benchmarks.workloads import DEFAULT, WORKLOADS, Workload

_LOSS_STEPS, _SMALL_LOSS_STEPS = 200, 20
_ROUNDS, _SMALL_ROUNDS = 20, 3


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, or reads a run, and shows and writes what was asked for; returns an exit code."""
    args = _parser().parse_args(arguments)
    if args.read is not None:
        read = [json.loads(path.read_text(encoding="utf-8")) for path in args.read]
        run = results.together([results.from_json(each) for each in read])
    else:
        run = _measure(args)
    show(report.all_tables(run))
    _write(run, args)
    return 0


def _measure(args: argparse.Namespace) -> Run:
    options = _options(args)
    start = time.monotonic()
    run = Run(
        machine=environment.describe(torch_version(args.torch_python)),
        dtype=options.dtype,
        rounds=options.rounds,
        loss_steps=options.loss_steps if args.what != "scaling" else 0,
    )
    if args.what in ("steps", "all"):
        systems = [name for name in SYSTEMS if name in (BASE, *args.system)]
        for name in args.workload:
            with reporting(name, stages(options)) as progress:
                run.workloads.append(measure(WORKLOADS[name], systems, options, progress))
    if args.what in ("scaling", "all"):
        # The table shows where the ratio passes 1: half the rounds tell that.
        fewer = replace(options, rounds=max(1, options.rounds // 2))
        for workload in _scaled(args):
            grid = sizes(workload, small=args.small)
            with reporting(f"{workload.name}, scaling", len(grid)) as progress:
                run.scaling.append(measure_scaling(workload, grid, fewer, progress))
    run.machine["measured in"] = f"{(time.monotonic() - start) / 60:.1f} minutes"
    return run


def _scaled(args: argparse.Namespace) -> list[Workload]:
    return [WORKLOADS[name] for name in args.workload if WORKLOADS[name].smallest is not None]


def _options(args: argparse.Namespace) -> Options:
    size, rounds, loss_steps = "full", _ROUNDS, _LOSS_STEPS
    if args.small:
        size, rounds, loss_steps = "small", _SMALL_ROUNDS, _SMALL_LOSS_STEPS
    return Options(
        dtype=args.dtype or environment.low_dtype(),
        rounds=rounds if args.rounds is None else args.rounds,
        size=size,
        loss_steps=loss_steps if args.loss_steps is None else args.loss_steps,
        loss_size=args.loss_size or ("small" if args.small else "reduced"),
        torch_python=args.torch_python,
    )


def _write(run: Run, args: argparse.Namespace) -> None:
    for path in (args.json, args.plot):
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
    if args.json is not None:
        args.json.write_text(json.dumps(results.to_json(run), indent=1), encoding="utf-8")
    if args.plot is not None and run.workloads:
        from benchmarks import plot

        plot.save(run, args.plot)
    if args.markdown is not None:
        picture = None
        if args.plot is not None:
            picture = Path(os.path.relpath(args.plot, args.markdown.parent)).as_posix()
        report.put_section(args.markdown, report.section(run, picture))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__.partition("\n")[0]
    )
    names = f"some of {', '.join(WORKLOADS)}; default all but mobilenet_v2"
    add = parser.add_argument
    add("what", nargs="?", choices=("steps", "scaling", "all"), default="steps")
    add("--workload", nargs="+", choices=tuple(WORKLOADS), default=DEFAULT, metavar="W", help=names)
    add(
        "--system",
        nargs="+",
        choices=tuple(SYSTEMS),
        default=tuple(SYSTEMS),
        metavar="S",
        help=f"some of {', '.join(SYSTEMS)}; default all",
    )
    add("--dtype", choices=("float16", "bfloat16"), help="default: what this machine has")
    add("--rounds", type=_at_least(1), help=f"steps to time of each; default {_ROUNDS}")
    add(
        "--loss-steps",
        "--steps",
        type=_at_least(0),
        metavar="N",
        help=f"steps after which losses are compared; default {_LOSS_STEPS}, 0 leaves them out",
    )
    add(
        "--loss-size",
        choices=("full", "reduced"),
        help="of which size of the models; default reduced, which takes much less time",
    )
    add("--small", action="store_true", help="tiny models, to see that everything runs")
    add("--json", type=Path, metavar="FILE", help="write every number")
    add("--plot", type=Path, metavar="FILE", help="write a picture of the ratios")
    add("--markdown", type=Path, metavar="PAGE", help="put the tables between the page's marks")
    help_read = "measure nothing: show what --json wrote, of several runs as of one"
    add("--read", type=Path, nargs="+", metavar="FILE", help=help_read)
    add("--torch-python", default=sys.executable, metavar="PYTHON", help="where PyTorch is")
    return parser


def _at_least(least: int) -> type | object:
    def number(text: str) -> int:
        value = int(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"must be at least {least}; got {value}")
        return value

    return number


if __name__ == "__main__":
    sys.exit(main())
