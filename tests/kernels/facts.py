"""Prints the table of kernels as Markdown, measured on this machine.

    python tests/kernels/facts.py [--paths raw rewrite ...] [--dtype bfloat16] [--library Eigen]
    python tests/kernels/facts.py --summary [--library Eigen]

With --library GPU, TensorFlow places the ops on the first GPU that it sees.

Each cell is the largest error of the cases for a row, as a root mean square relative to the result,
in per cent, with its bias in brackets, and its place if it is over 5: of the kernel itself, and of
functions and Keras layers that run it, gradients included, by each way to low precision. The
summary has a line for each op: of the kernel, of Keras's policy, and the largest of tfamp's ways.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

_SETTINGS = {"Eigen": "0", "oneDNN": "1", "GPU": "1"}
_KERAS = "Keras's policy"
_TFAMP = ("rewrite", "autocast", "policy", "O2")
_PATHS = ("raw", *_TFAMP, _KERAS)
# Per cent from which on a cell names its case.
_LARGE = 5


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    made.add_argument("--paths", nargs="+", choices=_PATHS, default=[*_PATHS], metavar="PATH")
    made.add_argument("--summary", action="store_true", help="a line for each op, both dtypes")
    made.add_argument("--dtype", choices=("bfloat16", "float16"), help="both without it")
    made.add_argument("--library", choices=_SETTINGS, help="TensorFlow's own choice without it")
    return made


def _device() -> str:
    import tensorflow as tf

    return "gpu" if tf.config.list_physical_devices("GPU") else "cpu"


def _cell(case: Any, path: str, dtype: str) -> Any:
    """The largest deviation of a case, or the error that it raised."""
    from helpers.kernel_paths import deviations, largest

    try:
        found = largest(deviations(case, path, dtype))
        return found._replace(of=f"{found.of} of {case}")
    except Exception as error:  # noqa: BLE001 - a path that fails is a result
        return type(error).__name__


def _text(cells: list[Any]) -> str:
    from helpers.kernel_paths import largest

    measured = [cell for cell in cells if not isinstance(cell, str)]
    if not measured:
        return ", ".join(sorted(set(cells))) or "-"
    worst = largest(measured)
    text = f"{100 * worst.error:.2f} ({100 * worst.bias:+.2f})"
    return f"{text}: {worst.of}" if 100 * worst.error > _LARGE else text


def _cases_of(fact: Any, path: str, dtype: str) -> list[Any]:
    from helpers import kernel_paths
    from helpers.kernel_cases import RAW_CASES
    from helpers.kernel_path_cases import FUNCTION_CASES, LAYER_CASES
    from tfamp.planning.kernels import FORMS, Fault

    if path == "raw" and fact.fault != Fault.ADDS_UP_LOW:
        return []  # faults.py runs them.
    if path != "raw":
        is_function = path in kernel_paths.FUNCTION_PATHS
        cases = [
            case
            for case in (FUNCTION_CASES if is_function else LAYER_CASES)
            if fact.op in case.rows
        ]
    else:
        cases = [
            case
            for case in RAW_CASES
            if case.rows[0] == fact.op
            and kernel_paths.has_kernel(fact.op, dtype, _device())
            and FORMS[fact.form](kernel_paths.op_call(case, dtype))
        ]
    return [case for case in cases if kernel_paths.is_available(case)]


class _Measured:
    """Cells of the table, each case measured once."""

    def __init__(self) -> None:
        self._cells: dict[tuple[str, str, str], Any] = {}

    def cells(self, fact: Any, path: str, dtype: str) -> list[Any]:
        found = []
        for case in _cases_of(fact, path, dtype):
            key = case.name, path, dtype
            if key not in self._cells:
                self._cells[key] = _cell(case, path, dtype)
            found.append(self._cells[key])
        return found


def _print_table(paths: list[str], dtypes: list[str]) -> None:
    from tfamp.machine.hardware import onednn_dtypes
    from tfamp.planning.kernels import KERNEL_FACTS, Fault, library_of

    _print_head(["op", "form", "dtype", "library", "table", *paths])
    measured = _Measured()
    for fact in KERNEL_FACTS:
        for dtype in dtypes:
            library = library_of(fact.op, dtype, _device(), onednn_dtypes())
            judged = "exact"
            if (library, dtype) in fact.low:
                judged = "low" if fact.fault == Fault.ADDS_UP_LOW else fact.fault.name.lower()
            row = [fact.op, fact.form, dtype, library, judged]
            row += [_text(measured.cells(fact, path, dtype)) for path in paths]
            print(f"| {' | '.join(row)} |", flush=True)


def _print_summary() -> None:
    from tfamp.planning.kernels import KERNEL_FACTS

    ways = [("kernel", ["raw"]), (_KERAS, [_KERAS]), ("tfamp", [*_TFAMP])]
    dtypes = ("bfloat16", "float16")
    _print_head(["op", *(f"{dtype}: {name}" for dtype in dtypes for name, _ in ways)])
    measured = _Measured()
    for op in dict.fromkeys(fact.op for fact in KERNEL_FACTS):
        facts = [fact for fact in KERNEL_FACTS if fact.op == op]
        row = [f"`{op}`"]
        for dtype in dtypes:
            for _, paths in ways:
                cells = [c for f in facts for p in paths for c in measured.cells(f, p, dtype)]
                row.append(_text(cells).partition(" (")[0])
        print(f"| {' | '.join(row)} |", flush=True)


def _print_head(columns: list[str]) -> None:
    print(f"| {' | '.join(columns)} |")
    print(f"|---{'|---:' * (len(columns) - 1)}|")


def main(arguments: list[str] | None = None) -> None:
    options = parser().parse_args(arguments)
    # All of this must come before TensorFlow is imported.
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    os.environ.setdefault("KERAS_BACKEND", "tensorflow")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    os.environ.update(TFAMP_PROFILE="builtin", TFAMP_CACHE="off")
    if options.library:
        os.environ["TF_ENABLE_ONEDNN_OPTS"] = _SETTINGS[options.library]
    if options.library != "GPU":
        os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
    import tensorflow as tf

    # A float32 reference on a GPU shall not be of TF32.
    tf.config.experimental.enable_tensor_float_32_execution(False)
    if options.summary:
        _print_summary()
        return
    _print_table(options.paths, [options.dtype] if options.dtype else ["bfloat16", "float16"])


if __name__ == "__main__":
    main()
