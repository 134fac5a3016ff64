"""The command `tfamp`: parses arguments, prints what the library says, returns an exit code.

Exit codes: 0 done, 1 cannot be done (the message says why), 2 wrong usage.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

import tfamp
from tfamp.diagnostics import device
from tfamp.errors import TfampError


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Args:
        argv: Arguments without the program's name; by default those of the process.

    Returns:
        The exit code: 0 done, 1 cannot be done, 2 wrong usage.

    Example:
        >>> main(["--version"])
        tfamp ...
        0
    """
    try:
        args = build_parser().parse_args(argv)
    except SystemExit as stop:  # argparse has printed the help or what is wrong
        return stop.code if isinstance(stop.code, int) else 2
    # TensorFlow reads it when it is imported; its start-up notes would bury the answer.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    try:
        return int(args.run(args))
    except (ImportError, OSError, TfampError, ValueError) as error:
        print(f"tfamp: error: {error}", file=sys.stderr)
        return 1


def build_parser() -> argparse.ArgumentParser:
    """Returns the parser of all commands."""
    parser = argparse.ArgumentParser(
        prog="tfamp", description="Automatic mixed precision for TensorFlow and Keras 3."
    )
    parser.add_argument("--version", action="version", version=f"tfamp {tfamp.__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    doctor = commands.add_parser(
        "doctor",
        help="tell what this machine computes fast, and which policy 'auto' picks and why",
        description="Tells which low-precision dtypes this machine multiplies natively, which "
        "policy 'auto' therefore picks, and which versions are installed. Changes nothing.",
    )
    doctor.add_argument("--json", action="store_true", help="print one JSON object")
    doctor.set_defaults(run=_doctor)
    return parser


def _doctor(args: argparse.Namespace) -> int:
    report = device.device_report()
    print(report.to_json() if args.json else report.to_text())
    return 1 if report.problems else 0
