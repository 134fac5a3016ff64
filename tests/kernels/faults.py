"""Searches low-precision kernels that do not return, crash, or take far longer than float32's.

    python tests/kernels/faults.py [--dtype bfloat16] [--only DepthwiseConv2dNative] [--minutes 10]

Runs every case of `helpers.fault_cases` eagerly and in a graph, with the gradients that it names,
in processes of which one runs a case after the other until one fails. A process whose case exceeds
the time limit is ended; a case that failed is run once more in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

# A kernel is slow if it takes more than this many times float32's time, and this long: shorter
# times are those of starting an op.
_TIMES, _SHORTEST = 10, 5e-3
_HANGS, _CRASHES, _SLOW = _FAULTS = "does not return", "crashes", "slow"
# Seconds that a process has to load TensorFlow, and that a case has.
_START, _LIMIT = 120, 30


class Result(NamedTuple):
    """The outcome of a case: "ok", "slow", "does not return", "crashes" or an error's type."""

    name: str
    dtype: str
    outcome: str
    low: float = 0.0
    float32: float = 0.0


# ---- The search ----------------------------------------------------------------------------------


class _Process:
    """A process that runs cases: it says which one it starts, and what became of it."""

    def __init__(self, command: Sequence[str], cases: Sequence[tuple[str, str]]) -> None:
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            text=True, encoding="utf-8",
        )  # fmt: skip
        self._lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()
        assert self._process.stdin
        self._process.stdin.write(json.dumps(cases))
        self._process.stdin.close()

    def _read(self) -> None:
        for line in self._process.stdout or ():
            self._lines.put(line)
        self._lines.put("")

    def line(self, seconds: float) -> str | None:
        """The next line; "" at the end of the process, None after the time."""
        try:
            return self._lines.get(timeout=seconds)
        except queue.Empty:
            return None

    def end(self) -> None:
        self._process.kill()
        self._process.wait()


def search(
    cases: Sequence[tuple[str, str]],
    command: Sequence[str],
    limit: float = _LIMIT,
    until: float = float("inf"),
    processes: Callable[[], None] = lambda: None,
) -> Iterator[Result]:
    """Runs pairs of a name and a dtype in processes; yields a result for each.

    Args:
        cases: The pairs.
        command: Starts a process that reads the pairs and writes results, as `_work` does.
        limit: Seconds that a case may take.
        until: The time, by `time.monotonic`, at which no further case is started.
        processes: Called for each process.
    """
    left = list(cases)
    while left and time.monotonic() < until:
        processes()
        process = _Process(command, left)
        wait: float = _START
        try:
            while left and time.monotonic() < until:
                line = process.line(wait)
                if not line:
                    if wait == _START:  # It was still loading.
                        raise RuntimeError(f"{' '.join(command)} does not start")
                    yield Result(*left.pop(0), _HANGS if line is None else _CRASHES)
                    break
                wait = limit
                if line.startswith("{"):
                    left.pop(0)
                    yield Result(**json.loads(line))
        finally:
            process.end()


def confirmed(results: Iterator[Result], command: Sequence[str], limit: float) -> Iterator[Result]:
    """Results, where those of cases that failed are from processes of their own.

    A kernel that writes over the memory of others makes later ones fail.
    """
    for result in results:
        if result.outcome in _FAULTS:
            yield from search([(result.name, result.dtype)], command, limit)
        else:
            yield result


# ---- A process of the search ---------------------------------------------------------------------


def _work() -> None:
    from helpers.fault_cases import fault_cases

    cases = {case.name: case for case in fault_cases()}
    wanted = json.loads(sys.stdin.read())
    for name, dtype in wanted:
        print("start", flush=True)
        print(json.dumps(_run(cases[name], dtype)._asdict()), flush=True)


def _run(case: Any, dtype: str) -> Result:
    from helpers.kernel_paths import arrays_of

    arrays = arrays_of(case, dtype)
    try:
        low = _seconds(case, arrays, dtype)
    except Exception as error:  # noqa: BLE001 - what it raises is a result
        return Result(case.name, dtype, type(error).__name__)
    try:
        wide = _seconds(case, arrays, "float32")
    except Exception:  # noqa: BLE001 - float32 has no such kernel
        return Result(case.name, dtype, "ok", low)
    outcome = _SLOW if low > _TIMES * wide and low > _SHORTEST else "ok"
    return Result(case.name, dtype, outcome, low, wide)


def _seconds(case: Any, arrays: Sequence[Any], dtype: str) -> float:
    """The time of a case in a graph, with its gradients, after eager runs; the best of some."""
    import tensorflow as tf

    tensors = [
        tf.cast(array, dtype) if array.dtype.kind == "f" else tf.constant(array) for array in arrays
    ]

    def run(*tensors: Any) -> list[Any]:
        watched = [tensors[i] for i in case.wrt if tensors[i].dtype.is_floating]
        with tf.GradientTape() as tape:
            tape.watch(watched)
            result = case.call(*tensors)
        if not watched or not result.dtype.is_floating:
            return [result]
        try:
            gradients = tape.gradient(result, watched)
        except LookupError:  # The op has none.
            gradients = []
        return [result, *(tf.convert_to_tensor(g) for g in gradients if g is not None)]

    in_graph = tf.function(run, autograph=False)
    for function in (run, in_graph):
        _ = [value.numpy() for value in function(*tensors)]
    best = float("inf")
    for _ in range(3):
        start = time.perf_counter()
        _ = [value.numpy() for value in in_graph(*tensors)]
        best = min(best, time.perf_counter() - start)
        if best > 1:
            break
    return best


# ---- The command ---------------------------------------------------------------------------------


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    made.add_argument("--dtype", choices=("bfloat16", "float16"), help="both without it")
    made.add_argument("--only", default="", help="cases whose names contain this")
    made.add_argument("--every", type=int, default=1, metavar="N", help="every N-th case")
    made.add_argument("--limit", type=float, default=_LIMIT, help="seconds that a case may take")
    made.add_argument(
        "--minutes", type=float, default=float("inf"), help="then it stops; its cases are random"
    )
    made.add_argument("--library", choices=("Eigen", "oneDNN"), help="TensorFlow's without it")
    made.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return made


def _wanted(options: argparse.Namespace) -> list[tuple[str, str]]:
    from helpers.fault_cases import fault_cases

    dtypes = [options.dtype] if options.dtype else ["bfloat16", "float16"]
    cases = [case for case in fault_cases() if options.only in case.name]
    wanted = [(c.name, d) for c in cases for d in dtypes if d in c.dtypes][:: options.every]
    random.Random(0).shuffle(wanted)  # What a short search runs is of all kinds.
    return wanted


def _row(case: Any, dtype: str) -> str:
    """The row of the table that keeps a call from the kernel; "-" for a function of several ops."""
    from helpers.kernel_paths import op_call
    from tfamp.machine.hardware import onednn_dtypes
    from tfamp.planning.kernels import fact_about

    try:
        fact = fact_about(op_call(case, dtype), dtype, "cpu", onednn_dtypes())
    except ValueError:
        return "-"
    return "no row: add one" if fact is None else fact.fault.name.lower()


def _print_report(results: Iterator[Result], processes: Sequence[None], all_cases: int) -> None:
    from helpers.fault_cases import fault_cases, uncalled_ops

    print("| case | dtype | outcome | ms | ms in float32 | table |\n|---|---|---|---:|---:|---|")
    cases = {case.name: case for case in fault_cases()}
    ran = []
    for result in results:
        ran.append(result)
        if result.outcome in _FAULTS:
            times = f"{1e3 * result.low:.2f} | {1e3 * result.float32:.2f}"
            row = _row(cases[result.name], result.dtype)
            cells = (result.name, result.dtype, result.outcome, times, row)
            print(f"| {' | '.join(cells)} |", flush=True)
    ops = {cases[result.name].rows[0] for result in ran}
    refused = [result for result in ran if result.outcome not in (*_FAULTS, "ok")]
    print(f"\n{len(ran)} of {all_cases} cases of {len(ops)} ops in {len(processes)} processes.")
    print(f"TensorFlow refuses {len(refused)} of them.")
    print(f"Ops that no case calls: {' '.join(uncalled_ops())}.")


def main(arguments: list[str] | None = None) -> None:
    options = parser().parse_args(arguments)
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    # All of this must come before TensorFlow is imported.
    os.environ.setdefault("KERAS_BACKEND", "tensorflow")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    os.environ.update(TFAMP_PROFILE="builtin", TFAMP_CACHE="off", CUDA_VISIBLE_DEVICES="-1")
    if options.library:
        os.environ["TF_ENABLE_ONEDNN_OPTS"] = {"Eigen": "0", "oneDNN": "1"}[options.library]
    if options.worker:
        _work()
        return
    command = [sys.executable, __file__, "--worker"]
    wanted, started = _wanted(options), []
    until = time.monotonic() + 60 * options.minutes
    found = search(wanted, command, options.limit, until, lambda: started.append(None))
    _print_report(confirmed(found, command, options.limit), started, len(wanted))


if __name__ == "__main__":
    main()
