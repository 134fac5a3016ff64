"""What autocast costs per op, and how long a transformer's training step takes with it.

    python -m benchmarks.autocast [--small] [--rounds N] [--no-steps | --no-ops]

Per op: an eager op in an interpreter that never imported tfamp, and in one that did, with autocast
nowhere active, active in another thread, and active here. Per step: float32, Keras's mixed_bfloat16
policy and autocast("bfloat16"), by turns, so that a busy machine slows all of them.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

NEVER, IDLE, ELSEWHERE, HERE = "never imported", "not active", "active in another thread", "here"
OPS = {
    "Tanh": "on no list",
    "AddV2": "listed, nothing to cast",
    "MatMul": "listed, both inputs cast (kept)",
}
BATCH = 2000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--small", action="store_true", help="a quick run of a small model")
    parser.add_argument("--rounds", type=int, help="how often each thing is timed")
    parser.add_argument("--no-ops", action="store_true", help="leave out the costs per op")
    parser.add_argument("--no-steps", action="store_true", help="leave out the training steps")
    parser.add_argument("--child", choices=["bare", "tfamp"], help=argparse.SUPPRESS)
    args = parser.parse_args()
    rounds = args.rounds or (5 if args.small else 20)
    if args.child:
        print(json.dumps(time_ops(rounds, with_tfamp=args.child == "tfamp")))
        return
    if not args.no_ops:
        print_ops(rounds)
    if not args.no_steps:
        print_steps(rounds, small=args.small)


# ---- Cost per op ---------------------------------------------------------------------------------


def time_ops(rounds: int, *, with_tfamp: bool) -> dict[str, dict[str, float]]:
    """Nanoseconds per eager op in this process, by state and op; the best of the rounds."""
    import tensorflow as tf

    x = tf.ones((2, 2))
    calls = {
        "Tanh": lambda: tf.raw_ops.Tanh(x=x),
        "AddV2": lambda: tf.raw_ops.AddV2(x=x, y=x),
        "MatMul": lambda: tf.raw_ops.MatMul(a=x, b=x),
    }
    states = [IDLE, ELSEWHERE, HERE] if with_tfamp else [NEVER]
    found: dict[str, dict[str, float]] = {state: {} for state in states}
    for _ in range(rounds):
        for state in states:
            with _in_state(state):
                for op, call in calls.items():
                    best = found[state].get(op, float("inf"))
                    found[state][op] = min(best, _nanoseconds(call))
    return found


def _in_state(state: str):
    import contextlib

    if state in (NEVER, IDLE):
        return contextlib.nullcontext()
    import tfamp

    if state == HERE:
        return tfamp.autocast("bfloat16")
    return _ActiveElsewhere()


class _ActiveElsewhere:
    """Another thread that is inside an autocast and waits there."""

    def __enter__(self) -> None:
        self._entered, self._leave = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._wait)
        self._thread.start()
        self._entered.wait()

    def _wait(self) -> None:
        import tfamp

        with tfamp.autocast("bfloat16"):
            self._entered.set()
            self._leave.wait()

    def __exit__(self, *_: object) -> None:
        self._leave.set()
        self._thread.join()


def _nanoseconds(call: Callable[[], object]) -> float:
    for _ in range(50):
        call()
    start = time.perf_counter_ns()
    for _ in range(BATCH):
        call()
    return (time.perf_counter_ns() - start) / BATCH


def print_ops(rounds: int) -> None:
    """Times the ops in new interpreters, by turns, and prints a table."""
    from rich.console import Console
    from rich.table import Table

    best: dict[str, dict[str, float]] = {}
    for child in ("bare", "tfamp") * 3:
        for state, ops in _child(child, rounds).items():
            known = best.setdefault(state, ops)
            best[state] = {op: min(known[op], ops[op]) for op in ops}
    table = Table(title="Eager ops: ns per call, and more than without tfamp")
    table.add_column("autocast")
    for op, what in OPS.items():
        table.add_column(f"{op}\n{what}", justify="right")
    for state, ops in best.items():
        extra = {op: ops[op] - best[NEVER][op] for op in ops}
        table.add_row(state, *(f"{ops[op]:.0f}  ({extra[op]:+.0f})" for op in OPS))
    Console().print(table)


def _child(kind: str, rounds: int) -> dict[str, dict[str, float]]:
    command = [sys.executable, "-m", "benchmarks.autocast", "--child", kind]
    done = subprocess.run(
        [*command, "--rounds", str(rounds)], capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout.splitlines()[-1])


# ---- Training steps ------------------------------------------------------------------------------


def print_steps(rounds: int, *, small: bool) -> None:
    """Times the training steps by turns, and prints a table."""
    from rich.console import Console
    from rich.table import Table

    steps = training_steps(small=small)
    times: dict[str, list[float]] = {name: [] for name in steps}
    for step in steps.values():  # traces, and the first run of every kernel
        for _ in range(2):
            step()
    for _ in range(rounds):
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            times[name].append(time.perf_counter() - start)
    median = {name: statistics.median(each) for name, each in times.items()}
    size = "2 layers, width 128" if small else "4 layers, width 512"
    table = Table(title=f"Training step of a transformer ({size}), median of {rounds}")
    table.add_column("")
    for title in ("ms", "times as fast as float32", "as Keras's policy"):
        table.add_column(title, justify="right")
    for name, seconds in median.items():
        ratios = (median["float32"] / seconds, median["Keras mixed_bfloat16"] / seconds)
        table.add_row(name, f"{1e3 * seconds:.1f}", *(f"{ratio:.2f}" for ratio in ratios))
    Console().print(table)


def training_steps(*, small: bool) -> dict[str, Callable[[], None]]:
    """Name -> one step, which returns when it is done."""
    import keras
    import tensorflow as tf

    import tfamp
    from benchmarks import models
    from benchmarks.workloads import WORKLOADS

    workload = WORKLOADS["transformer"]
    size = workload.sizes["small" if small else "full"]
    x, y = map(tf.constant, workload.batch(size, 0))

    def make(policy: str) -> Callable[[], None]:
        keras.utils.set_random_seed(0)
        keras.config.set_dtype_policy(policy)
        try:
            model = models.transformer(size)
        finally:
            keras.config.set_dtype_policy("float32")
        step = models.train_step(model, keras.optimizers.SGD(0.01, momentum=0.9))
        return lambda: step(x, y).numpy()

    plain = make("float32")

    def under_autocast() -> None:
        with tfamp.autocast("bfloat16"):
            cast()

    cast = make("float32")
    return {
        "float32": plain,
        "Keras mixed_bfloat16": make("mixed_bfloat16"),
        'autocast("bfloat16")': under_autocast,
    }


if __name__ == "__main__":
    main()
