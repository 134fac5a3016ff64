"""The command `tfamp`: parses arguments, prints what the library says, returns an exit code.

Exit codes: 0 done, 1 cannot be done (the message says why), 2 wrong usage.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import logging
import os
import re
import signal
import sys
import tempfile
import threading
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tfamp
from tfamp.core.dtypes import LOW_PRECISION
from tfamp.core.errors import TfampError, TfampWarning

if TYPE_CHECKING:
    from tfamp.planning.structures import RewritePlan

_COLORS = {
    "allow": "computes in low precision",
    "infer": "computes in low precision unless its inputs come from a denied op",
    "deny": "stays float32",
    "clear": "computes in low precision between ops that do",
}
# The library's messages name its arguments; these are the same on the command line.
_ARGUMENTS = re.compile(
    r"\b(dtype|device|placement)=(?:'(\w+)'|None)"
    r"|\b(keep_float32|force_low|placement|(?:allow|infer|deny|clear)_add)\b=?"
    r"|\b(overwrite|freeze)=True"
)
# Ending of a report's name -> what makes it.
_REPORTS = {".html": "to_html", ".json": "to_json", ".txt": "to_text"}


class _UsageError(Exception):
    """An option has a value that no model could do anything with."""


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
    except (ImportError, OSError, TfampError, ValueError, _UsageError) as error:
        print(f"tfamp: error: {_as_options(str(error))}", file=sys.stderr)
        return 2 if isinstance(error, _UsageError) else 1
    except KeyboardInterrupt:
        print("tfamp: error: interrupted; nothing was written", file=sys.stderr)
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
        help="tell what this machine computes fast, what 'auto' picks, what a model converts",
        description="Tells which low-precision dtypes this machine multiplies natively, which "
        "policy 'auto' therefore picks, which versions are installed, and how fast each dtype is: "
        "measured in about 3 s and kept in the user's cache folder, unless TFAMP_PROFILE says "
        "otherwise. Of a model it tells how much converts, what stays float32 and why, and how to "
        "measure what that gains. A .keras file is loaded in Keras's safe mode.",
    )
    rewrite = commands.add_parser(
        "rewrite",
        help="write a SavedModel that computes in low precision where it is safe",
        description="Writes the SavedModel DST, which is used as SRC is and computes in low "
        "precision where that is safe. SRC is not changed; DST appears when it is complete.",
    )
    inspect = commands.add_parser(
        "inspect",
        help="tell what rewrite would do, and write nothing",
        description="Prints the plan of a rewrite: the dtype of every node and why, and every "
        "Cast. Writes nothing.",
    )
    text = "directory of a SavedModel, or a .keras file"
    doctor.add_argument("model", metavar="MODEL", nargs="?", help=text)
    _add_dtype(doctor, "low dtype to plan for")
    for each in (rewrite, inspect):
        each.add_argument("src", metavar="SRC", help="directory of a SavedModel")
    rewrite.add_argument(
        "dst", metavar="DST", help="directory to write; a new one but for --overwrite"
    )
    for each in (rewrite, inspect):
        _add_choices(each)
    endings = ", ".join(_REPORTS)
    text = f"write every decision with its reason to FILE ({endings})"
    rewrite.add_argument("--report", metavar="FILE", type=_report_path, help=text)
    rewrite.add_argument("--overwrite", action="store_true", help="replace a SavedModel in DST")
    for each in (doctor, inspect):
        each.add_argument("--json", action="store_true", help="print one JSON object")
    runs = ((doctor, _doctor), (rewrite, _rewrite), (inspect, _inspect))
    for each, run in runs:
        each.set_defaults(run=run)
    return parser


def _add_dtype(parser: argparse.ArgumentParser, what: str) -> None:
    text = f"{what}; auto, the default: what this machine multiplies natively"
    parser.add_argument("--dtype", choices=(*LOW_PRECISION, "auto"), default="auto", help=text)


def _add_choices(parser: argparse.ArgumentParser) -> None:
    """Adds the options that decide what is converted; each is an argument of the library's."""
    add = parser.add_argument
    _add_dtype(parser, "low dtype to compute in")
    text = "kind of device the model will run on; auto, the default: this machine's"
    add("--device", choices=("auto", "cpu", "gpu", "tpu"), default="auto", help=text)
    text = (
        "what decides where Casts go: lists, the default, min_cut for what is worth it on a "
        "device of this kind, by tfamp's built-in table"
    )
    add("--placement", default="lists", help=text)
    for name, what in (("keep-float32", "stay float32"), ("force-low", "compute in low precision")):
        text = f"nodes with a name in which REGEX is found {what}; may be repeated"
        add(f"--{name}", metavar="REGEX", action="append", default=[], help=text)
    for color, what in _COLORS.items():
        text = f"the op type OP {what}; may be repeated"
        add(f"--{color}-add", metavar="OP", action="append", default=[], help=text)
    text = "inputs by name, on which ranges are measured: what gets too large stays float32"
    add("--calibrate", metavar="FILE.npz", help=text)
    text = "make constants of the variables, stored in the low dtype: about half the bytes"
    add("--freeze", action="store_true", help=text)


def _report_path(text: str) -> Path:
    path = Path(text)
    if path.suffix not in _REPORTS:
        raise argparse.ArgumentTypeError(f"{text!r} must end in {', '.join(_REPORTS)}")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no directory {str(path.parent)!r}")
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is a directory")
    return path


@contextlib.contextmanager
def _wrong_usage(option: str = "") -> Iterator[None]:
    """Makes what is wrong with the value of an option an error of usage."""
    try:
        yield
    except OSError as error:
        raise _UsageError(f"{option}cannot read {error.filename!r}: {error.strerror}") from error
    except ValueError as error:
        raise _UsageError(f"{option}{error}") from error


def _as_options(message: str) -> str:
    """Returns a message of the library's with options in the place of arguments."""

    def option(found: re.Match[str]) -> str:
        name = f"--{next(filter(None, found.groups())).replace('_', '-')}"
        return f"{name} {found[2] or 'auto'}" if found[1] else name

    return _ARGUMENTS.sub(option, message)


def _doctor(args: argparse.Namespace) -> int:
    found = []
    with _prepared():
        from tfamp.diagnostics import device, model_plan

        if args.model is not None:
            report_of_model = model_plan.model_report(args.model, dtype=args.dtype)
            # The machine's report tells the known issues.
            found.append(dataclasses.replace(report_of_model, known_issues=()))
        report = device.device_report()
    if args.json:
        facts = json.loads(report.to_json())
        if found:
            facts["model"] = json.loads(found[0].to_json())
        print(json.dumps(facts, indent=2))
    else:
        print("\n\n".join([report.to_text(), *(each.to_text() for each in found)]))
    return 1 if report.problems else 0


def _rewrite(args: argparse.Namespace) -> int:
    with _prepared() as saved_model:
        plan = saved_model.rewrite_saved_model(
            args.src, args.dst, overwrite=args.overwrite, **_choices(args, saved_model)
        )
    print(_what_was_done(args, plan), end="")
    if args.report is not None:
        text = getattr(plan, _REPORTS[args.report.suffix])()
        args.report.write_text(text, encoding="utf-8")
        print(f"report  {args.report}")
    return 0


def _inspect(args: argparse.Namespace) -> int:
    with _prepared() as saved_model:
        plan = saved_model.inspect_saved_model(args.src, **_choices(args, saved_model))
    print(plan.to_json() if args.json else plan.to_text().rstrip("\n"))
    return 0


def _choices(args: argparse.Namespace, saved_model: Any) -> dict[str, Any]:
    from tfamp.machine.profile_choice import device_kind
    from tfamp.planning.options import RewriteOptions

    dtype = saved_model.required_dtype(args.dtype)
    changes = {f"{color}_add": getattr(args, f"{color}_add") for color in _COLORS}
    plain = ("freeze", "keep_float32", "force_low", "placement", "device")
    choices, lists = {name: getattr(args, name) for name in plain}, None
    with _wrong_usage():
        names = ("placement", "keep_float32", "force_low")
        RewriteOptions(**{name: choices[name] for name in names})
        if any(changes.values()):
            lists = tfamp.OpLists.default(dtype, device_kind(args.device)).with_changes(**changes)
    with _wrong_usage("--calibrate: "):
        calibration = saved_model.calibration_of(args.calibrate)
    return choices | {"dtype": dtype, "calibration": calibration, "op_lists": lists}


def _what_was_done(args: argparse.Namespace, plan: RewritePlan) -> str:
    from tfamp.rewriting.saved_model import directory_bytes

    before, after = directory_bytes(Path(args.src)), directory_bytes(Path(args.dst))
    totals = plan.summary
    share = f"{after / before:.0%} of {_readable(before)}" if before else "from nothing"
    return (
        f"wrote   {args.dst}, {_readable(after)}: {share}\n"
        f"nodes   {totals.low_nodes} of {totals.nodes} float nodes in {plan.dtype}\n"
        f"casts   {totals.casts}, {_readable(totals.cast_bytes)}"
        f" and {totals.casts_of_unknown_size} of unknown size\n"
    )


def _readable(size: float) -> str:
    for unit in ("bytes", "kB", "MB"):
        if size < 1000:
            return f"{size:.4g} {unit}"
        size /= 1000
    return f"{size:.4g} GB"


@contextlib.contextmanager
def _prepared() -> Iterator[Any]:
    """Gives the module that rewrites, in a process that says what tfamp has to say and no more.

    A termination is taken like Ctrl-C, so that what was begun is removed. All is undone at the end.
    """
    _import_quietly()
    from tfamp.rewriting import saved_model

    logger = logging.getLogger("tensorflow")
    with contextlib.ExitStack() as undo:
        undo.callback(logger.setLevel, logger.level)
        logger.setLevel(logging.ERROR)
        if threading.current_thread() is threading.main_thread():
            before = signal.signal(signal.SIGTERM, signal.default_int_handler)
            undo.callback(signal.signal, signal.SIGTERM, before or signal.SIG_DFL)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", TfampWarning)
            yield saved_model
        for each in caught:
            if issubclass(each.category, TfampWarning):
                print(f"tfamp: warning: {_as_options(str(each.message))}", file=sys.stderr)
            else:
                warnings.showwarning(each.message, each.category, each.filename, each.lineno)


def _import_quietly() -> None:
    """Imports TensorFlow and finds its devices without the notes it writes before it can be told.

    They go to the process's standard error, past Python. If the import fails they are shown. GPUs
    give memory as it is needed.
    """
    if "tensorflow" in sys.modules:
        return
    sys.stderr.flush()
    with contextlib.ExitStack() as undo:
        shown = os.dup(2)
        undo.callback(os.close, shown)
        kept = undo.enter_context(tempfile.TemporaryFile())
        undo.callback(os.dup2, shown, 2)
        os.dup2(kept.fileno(), 2)
        try:
            import tensorflow as tf

            from tfamp.machine.timing import let_memory_grow

            let_memory_grow()
            tf.config.list_logical_devices()
        except BaseException:
            kept.seek(0)
            os.write(shown, kept.read())
            raise
