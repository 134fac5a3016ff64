"""The command `tfamp`: parses arguments, prints what the library says, returns an exit code.

Exit codes: 0 done, 1 cannot be done (the message says why), 2 wrong usage.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import sys
from collections.abc import Sequence
from typing import Any

import tfamp
from tfamp import hardware
from tfamp.dtypes import LOW_PRECISION
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
    facts = _doctor_facts()
    print(json.dumps(facts, indent=2) if args.json else _doctor_text(facts))
    return 1 if facts["problems"] else 0


def _doctor_facts() -> dict[str, Any]:
    import keras
    import tensorflow as tf

    found = hardware.detect()
    policy, reason = hardware.automatic_policy(found)
    problems = []
    if keras.backend.backend() != "tensorflow":
        problems.append(
            f"Keras runs on the {keras.backend.backend()} backend; tfamp needs TensorFlow: "
            "set KERAS_BACKEND=tensorflow before Python starts."
        )
    return {
        "versions": {
            "tfamp": tfamp.__version__,
            "tensorflow": tf.__version__,
            "keras": keras.__version__,
            "python": platform.python_version(),
        },
        "hardware": dataclasses.asdict(found),
        "auto_policy": {"name": policy, "reason": reason},
        "problems": problems,
    }


def _doctor_text(facts: dict[str, Any]) -> str:
    machine = facts["hardware"]
    rows = list(facts["versions"].items())
    rows += [("CPU", machine["cpu_model"] or "unknown model")]
    rows += [
        (f"CPU {dtype}", "native" if machine[f"cpu_{dtype}"] else "not native")
        for dtype in LOW_PRECISION
    ]
    rows += [("GPU", _gpu_text(gpu)) for gpu in machine["gpus"]] or [("GPU", "none")]
    rows += [("TPU", "yes" if machine["tpu"] else "none")]
    rows += [("policy auto", facts["auto_policy"]["name"])]
    rows += [("because", facts["auto_policy"]["reason"])]
    rows += [("problem", problem) for problem in facts["problems"]]
    width = max(len(label) for label, _ in rows)
    return "\n".join(f"{label:<{width}}  {value}" for label, value in rows)


def _gpu_text(gpu: dict[str, Any]) -> str:
    if gpu["capability"] is None:
        return f"{gpu['name']}, compute capability unknown"
    major, minor = gpu["capability"]
    return f"{gpu['name']}, compute capability {major}.{minor}"
