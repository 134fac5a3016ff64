"""The command `tfamp`: parses arguments, prints results of the library, returns an exit code.

Exit codes: 0 success, 1 failure (the message has the reason), 2 wrong usage.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import logging
import math
import os
import shlex
import signal
import sys
import tempfile
import threading
import warnings
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import tfamp
from tfamp.core.dtypes import LOW_PRECISION, dtype_by_other_name
from tfamp.core.errors import TfampError, TfampWarning
from tfamp.core.messages import spelled_by
from tfamp.core.options import checked_number
from tfamp.machine.file_replacing import replace_text

# As of a command that SIGPIPE ends, 128 + 13; Windows has no such signal.
_BROKEN_PIPE = 141
# Suffix of a report's file -> the method that writes it.
_REPORTS = {".html": "to_html", ".json": "to_json", ".txt": "to_text"}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Args:
        argv: Arguments without the program's name; by default the process's.

    Returns:
        The exit code: 0 success, 1 failure, 2 wrong usage, 141 if nobody reads the output.

    Example:
        >>> main(["--version"])
        tfamp ...
        0
    """
    try:
        code = _main(argv)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # The reader, such as `head`, has what it wants.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _BROKEN_PIPE


def _main(argv: Sequence[str] | None) -> int:
    try:
        args = build_parser().parse_args(argv)
        if problem := _of_two_arguments(args):
            args.wrong_usage(problem)
    except SystemExit as stop:  # argparse has printed help or an error
        return stop.code if isinstance(stop.code, int) else 2
    # Read by TensorFlow when it is imported; its start-up log would bury the answer.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    try:
        with _quiet_process(), spelled_by(functools.partial(_as_flag, args)):
            return int(args.run(args))
    except BrokenPipeError:
        raise
    except OSError as error:
        reason = f"{error.filename}: {error.strerror}" if error.filename else str(error)
        print(f"tfamp: error: {reason}", file=sys.stderr)
    except (ImportError, TfampError, ValueError) as error:
        print(f"tfamp: error: {error}", file=sys.stderr)
    except KeyboardInterrupt:
        written = getattr(args, "written", "nothing was written")
        print(f"tfamp: error: interrupted; {written}", file=sys.stderr)
    return 1


def build_parser() -> argparse.ArgumentParser:
    """Returns the parser of all commands."""
    parser = argparse.ArgumentParser(
        prog="tfamp", description="Automatic mixed precision for TensorFlow and Keras 3."
    )
    parser.add_argument("--version", action="version", version=f"tfamp {tfamp.__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    text = "report what this machine computes fast, what 'auto' picks, what a model converts"
    doctor = commands.add_parser("doctor", help=text, description=_doctor.__doc__)
    doctor.set_defaults(run=_doctor)
    text = "directory of a SavedModel, or a .keras file"
    doctor.add_argument("model", metavar="MODEL", nargs="?", help=text)
    doctor.add_argument("--json", action="store_true", help="print one JSON object")
    text = "write a SavedModel that computes in low precision where it is safe"
    rewrite = commands.add_parser("rewrite", help=text, description=_rewrite.__doc__)
    rewrite.set_defaults(run=_rewrite, wrong_usage=rewrite.error)
    add = rewrite.add_argument
    text = "directory of a SavedModel; of a Keras model, model.export(SRC) writes one"
    add("src", metavar="SRC", help=text)
    add("dst", metavar="DST", help="directory to write; must not exist unless --overwrite")
    text = "kind of device the model will run on; auto, the default: this machine's"
    add("--device", choices=("auto", "cpu", "gpu", "tpu"), default="auto", help=text)
    text = "lists, the default; min_cut, by estimated times too; or fused, which needs --freeze"
    add("--placement", choices=("lists", "min_cut", "fused"), default="lists", help=text)
    text = "nodes whose name matches REGEX anywhere stay float32; may be repeated"
    add("--keep-float32", metavar="REGEX", action="append", default=[], help=text)
    text = "inputs by name, to measure ranges with: nodes with too large values stay float32"
    add("--calibrate", metavar="FILE.npz", help=text)
    text = (
        "largest acceptable error of the outputs on --data, such as 0.01: name scopes stay float32 "
        "until it is at most this, proved by a run"
    )
    add("--bound", metavar="ERROR", type=_bound, help=text)
    add("--data", metavar="FILE.npz", type=_npz_path, help="inputs by name, for --bound")
    text = (
        "replace variables by constants, stored in the low dtype: about half the bytes; DST "
        "then has only the signatures of SRC, and cannot be trained"
    )
    add("--freeze", action="store_true", help=text)
    text = f"write every decision with its reason to FILE ({', '.join(_REPORTS)})"
    add("--report", metavar="FILE", type=_report_path, help=text)
    add("--overwrite", action="store_true", help="replace a SavedModel in DST")
    text = "low dtype to compute in; auto, the default: what this machine multiplies natively"
    dtypes = (*LOW_PRECISION, "auto")
    for command in (doctor, rewrite):
        command.add_argument("--dtype", type=_dtype, choices=dtypes, default="auto", help=text)
    return parser


def _as_flag(args: argparse.Namespace, name: str, values: tuple[object, ...]) -> str | None:
    """Returns an argument of the library as a flag of the command; None where it has no flag."""
    if name not in vars(args):
        return None
    flag = f"--{name.replace('_', '-')}"
    words = ["auto" if value is None else str(value) for value in values if value is not True]
    return " ".join((flag, *map(shlex.quote, words)))


def _dtype(text: str) -> str:
    """A dtype's name; other words are left to the parser, which lists the choices."""
    meant = dtype_by_other_name(text)
    if text not in LOW_PRECISION and meant in LOW_PRECISION:
        raise argparse.ArgumentTypeError(f"{text!r} is not a choice; did you mean {meant!r}?")
    return text


def _of_two_arguments(args: argparse.Namespace) -> str | None:
    """Returns what is wrong with arguments that go together; None for nothing."""
    given = vars(args)
    if (given.get("bound") is None) != (given.get("data") is None):
        return "--bound and --data go together: the error is measured on the data"
    return None


def _bound(text: str) -> float:
    try:
        return checked_number("it", float(text), low=0.0, high=math.inf)
    except ValueError:
        problem = f"{text!r} is not a number of at least 0, such as 0.01"
        raise argparse.ArgumentTypeError(problem) from None


def _npz_path(text: str) -> str:
    """A file of named arrays, as far as can be seen without NumPy."""
    if not os.path.isfile(text):
        raise argparse.ArgumentTypeError(f"there is no file {text!r}")
    if not zipfile.is_zipfile(text):
        raise argparse.ArgumentTypeError(
            f"{text!r} does not hold named arrays; numpy.savez(path, x=array) writes such a file"
        )
    return text


def _report_path(text: str) -> Path:
    path = Path(text)
    if path.suffix not in _REPORTS:
        raise argparse.ArgumentTypeError(f"{text!r} must end in {', '.join(_REPORTS)}")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no directory {str(path.parent)!r}")
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is a directory")
    return path


def _doctor(args: argparse.Namespace) -> int:
    """Reports which low-precision dtypes this machine multiplies natively, and how fast it is.

    Also which policy 'auto' therefore picks, and which versions are installed. Times are
    measured in about 2 s and kept in the user's cache folder, unless TFAMP_PROFILE says
    otherwise. Of a model it reports how much converts, what stays float32 and why, and how to
    measure what that gains. A .keras file is loaded in Keras's safe mode.
    """
    from tfamp.diagnostics import device_report, model_report

    # The model first: its error comes before a measurement.
    model = None if args.model is None else model_report(args.model, dtype=args.dtype)
    report = device_report()
    if args.json:
        facts = json.loads(report.to_json())
        facts |= {} if model is None else {"model": json.loads(model.to_json())}
        print(json.dumps(facts, indent=2))
    else:
        print(report.to_text(), *([] if model is None else ["", model.to_text()]), sep="\n")
    return 1 if report.problems else 0


def _rewrite(args: argparse.Namespace) -> int:
    """Writes DST, a drop-in replacement for SRC that computes in low precision where safe.

    Both are SavedModels. SRC is not changed; DST appears when it is complete. With --freeze DST
    replaces SRC for callers of signatures: it has none of its methods, such as the serve() that
    Keras's model.export() writes.
    """
    from tfamp.rewriting.saved_model import directory_bytes, rewrite_saved_model

    plan = rewrite_saved_model(
        args.src,
        args.dst,
        dtype=args.dtype,
        freeze=args.freeze,
        calibration=args.calibrate,
        keep_float32=args.keep_float32,
        placement=args.placement,
        device=args.device,
        overwrite=args.overwrite,
        bound=args.bound,
        data=args.data,
    )
    args.written = f"{args.dst} is written"
    old, new = directory_bytes(Path(args.src)), directory_bytes(Path(args.dst))
    totals = plan.summary
    print(f"wrote    {args.dst}, {new / 1e6:.4g} MB: {new / old:.0%} of {old / 1e6:.4g} MB")
    # Most float nodes hold or pass on values: the products are what a conversion is for.
    print(f"products {totals.low_products} of {totals.products} in {plan.dtype}")
    size = f"{totals.cast_bytes / 1e6:.4g} MB"
    unknown = totals.casts_of_unknown_size
    print(f"casts    {totals.casts}, {size} and {unknown} of unknown size")
    if (accuracy := plan.accuracy) is not None:
        errors = f"{accuracy.error:.2g} on the data, {accuracy.error_of_all:.2g} without a bound"
        print(f"error    {errors}")
        for scope in accuracy.float32_scopes:
            print(f"float32  {scope}")
    if args.report is not None:
        text = getattr(plan, _REPORTS[args.report.suffix])()
        replace_text(args.report, text)
        print(f"report   {args.report}")
    return 0


@contextlib.contextmanager
def _quiet_process() -> Iterator[None]:
    """Lets a command run in a process that prints tfamp's warnings only.

    SIGTERM is handled like Ctrl-C, so that unfinished output is removed. All is undone last.
    """
    _import_quietly()
    logger = logging.getLogger("tensorflow")
    with contextlib.ExitStack() as undo:
        undo.callback(logger.setLevel, logger.level)
        logger.setLevel(logging.ERROR)
        if threading.current_thread() is threading.main_thread():
            before = signal.signal(signal.SIGTERM, signal.default_int_handler)
            undo.callback(signal.signal, signal.SIGTERM, before or signal.SIG_DFL)
        undo.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        warnings.simplefilter("always", TfampWarning)
        warnings.showwarning = lambda message, *_, **__: print(
            f"tfamp: warning: {message}", file=sys.stderr
        )
        yield


def _import_quietly() -> None:
    """Imports TensorFlow and finds its devices without log lines that no setting suppresses.

    TensorFlow writes these to file descriptor 2. If the import fails they are shown. GPUs
    allocate memory as needed.
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

            from tfamp.machine.profile_measure import let_memory_grow

            let_memory_grow()
            tf.config.list_logical_devices()
        except BaseException:
            kept.seek(0)
            os.write(shown, kept.read())
            raise
