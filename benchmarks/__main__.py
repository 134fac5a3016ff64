"""Training steps in mixed precision, in ratios to float32, on the machine at hand.

    python -m benchmarks [--workload W ...] [--system S ...] [--json F] [--markdown P] ...

docs/benchmarks.md explains the columns and lists the other commands.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

from benchmarks import environment, report, results
from benchmarks.interleaved import Options, measure, stages
from benchmarks.progress import reporting
from benchmarks.results import Run
from benchmarks.systems import BASE, SYSTEMS, torch_version
from benchmarks.tables import show
from benchmarks.workloads import WORKLOADS

_LOSS_STEPS, _ROUNDS = 200, 20


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures or reads a run, prints it, writes its files and returns an exit code."""
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
    run = Run(
        machine=environment.describe(torch_version(args.torch_python)),
        dtype=options.dtype,
        rounds=options.rounds,
        loss_steps=options.loss_steps,
    )
    systems = [name for name in SYSTEMS if name in (BASE, *args.system)]
    for name in args.workload:
        with reporting(name, stages(options)) as progress:
            run.workloads.append(measure(WORKLOADS[name], systems, options, progress))
    return run


def _options(args: argparse.Namespace) -> Options:
    size, loss_size = ("small", "small") if args.small else ("full", "reduced")
    size = "gpu" if args.gpu else size
    end = None if args.minutes is None else time.monotonic() + 60 * args.minutes
    return Options(
        dtype=args.dtype or environment.low_dtype(),
        rounds=args.rounds,
        size=size,
        loss_steps=args.loss_steps,
        loss_size=args.loss_size or loss_size,
        torch_python=args.torch_python,
        end=end,
    )


def _write(run: Run, args: argparse.Namespace) -> None:
    if args.json is not None:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(results.to_json(run), indent=1), encoding="utf-8")
    if args.markdown is not None:
        report.put_section(args.markdown, report.section(run))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__.partition("\n")[0]
    )
    add = parser.add_argument
    for option, choices in {"--workload": tuple(WORKLOADS), "--system": tuple(SYSTEMS)}.items():
        about = f"some of {', '.join(choices)}; default all"
        add(option, nargs="+", choices=choices, default=choices, metavar="NAME", help=about)
    add("--dtype", choices=("float16", "bfloat16"), help="default: what this machine has")
    add("--rounds", type=_at_least(1), default=_ROUNDS, help="steps to time of each")
    about = "steps after which losses are compared; 0 leaves them out"
    add("--loss-steps", type=_at_least(0), metavar="N", default=_LOSS_STEPS, help=about)
    about = "size of the models for losses; default reduced, which takes much less time"
    add("--loss-size", choices=("full", "reduced"), help=about)
    add("--small", action="store_true", help="tiny models, to see that everything runs")
    add("--gpu", action="store_true", help="mlp, transformer, resnet50: a GPU's sizes")
    about = "begin nothing after so many minutes, and make first calls at once; needs several cores"
    add("--minutes", type=float, metavar="N", help=about)
    add("--json", type=Path, metavar="FILE", help="write every number")
    add(
        "--markdown",
        type=Path,
        metavar="PAGE",
        help="put tables between a PAGE's marks, or PAGE#NAME's",
    )
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
