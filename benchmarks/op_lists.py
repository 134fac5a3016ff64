"""What ops lose and gain in bfloat16 that tfamp lists otherwise than TensorFlow's own rewrite.

    python -m benchmarks.op_lists [--small] [--rounds N]

For each op: the largest relative error of its bfloat16 kernel on bfloat16 inputs, against float64
on the same inputs, in units of eps = 2**-8 (what is only rounded is off by at most 0.5); and the
time of the float32 kernel with the Casts that it needs between bfloat16 neighbours, over the time
of the bfloat16 kernel, measured by turns.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
import tensorflow as tf

EPS = 2.0**-8


@dataclass(frozen=True)
class Candidate:
    """An op with inputs like those it meets in training.

    Attributes:
        listed: What the default lists for CPUs do with it, beside what Grappler's do.
        inputs: Its inputs in float64, for a number of rows.
        op: Runs it on tensors of one dtype.
        exact: The same in float64.
    """

    listed: str
    inputs: Callable[[int], list[np.ndarray]]
    op: Callable[..., tf.Tensor]
    exact: Callable[..., np.ndarray]


def _normal(rows: int, columns: int = 512) -> np.ndarray:
    return np.random.default_rng(0).standard_normal((rows, columns))


def _positive(rows: int) -> np.ndarray:
    return np.abs(_normal(rows)) + 0.1


CANDIDATES = {
    "Pow, cube": Candidate(
        "infer (Grappler: deny)",
        lambda rows: [_normal(rows), np.float64(3.0)],
        lambda x, y: tf.raw_ops.Pow(x=x, y=y),
        lambda x, y: x**y,
    ),
    "Pow, square root": Candidate(
        "infer (Grappler: deny)",
        lambda rows: [_positive(rows), np.float64(0.5)],
        lambda x, y: tf.raw_ops.Pow(x=x, y=y),
        lambda x, y: x**y,
    ),
    "RsqrtGrad": Candidate(
        "infer (Grappler: no list)",
        lambda rows: [_positive(rows), _normal(rows)],
        lambda y, dy: tf.raw_ops.RsqrtGrad(y=y, dy=dy),
        lambda y, dy: -0.5 * dy * y**3,
    ),
    "Exp": Candidate(
        "deny, as Grappler",
        lambda rows: [-8.0 * np.abs(_normal(rows))],
        lambda x: tf.raw_ops.Exp(x=x),
        np.exp,
    ),
    "BiasAddGrad": Candidate(
        "no list (Grappler: infer)",
        lambda rows: [_positive(rows)],
        lambda x: tf.raw_ops.BiasAddGrad(out_backprop=x),
        lambda x: x.sum(0),
    ),
    "Sum, first axis": Candidate(
        "infer, as Grappler",
        lambda rows: [_positive(rows)],
        lambda x: tf.raw_ops.Sum(input=x, axis=0),
        lambda x: x.sum(0),
    ),
    "Mean, last axis": Candidate(
        "infer, as Grappler",
        lambda rows: [_positive(rows)],
        lambda x: tf.raw_ops.Mean(input=x, axis=-1),
        lambda x: x.mean(-1),
    ),
}


@dataclass(frozen=True)
class Row:
    """What was found for a candidate: error in eps, and times in seconds."""

    name: str
    listed: str
    error: float
    float32: float
    low: float


def measure(candidate: Candidate, name: str, rows: int, rounds: int) -> Row:
    low = [tf.cast(tf.constant(each), tf.bfloat16) for each in candidate.inputs(rows)]
    exact = candidate.exact(*(each.numpy().astype(np.float64) for each in low))

    @tf.function
    def in_low() -> tf.Tensor:
        return candidate.op(*low)

    @tf.function
    def in_float32() -> tf.Tensor:
        return tf.cast(candidate.op(*(tf.cast(each, tf.float32) for each in low)), tf.bfloat16)

    found = in_low().numpy().astype(np.float64)
    error = float(np.max(np.abs(found - exact) / np.maximum(np.abs(exact), 1e-30)))
    in_float32()
    times: dict[Callable[[], tf.Tensor], list[float]] = {in_low: [], in_float32: []}
    for _ in range(rounds):
        for function, taken in times.items():
            start = time.perf_counter()
            function()
            taken.append(time.perf_counter() - start)
    medians = {function: statistics.median(taken) for function, taken in times.items()}
    return Row(name, candidate.listed, error / EPS, medians[in_float32], medians[in_low])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--small", action="store_true", help="few rows, for a quick look")
    parser.add_argument("--rounds", type=int, default=20, help="how often each op is timed")
    args = parser.parse_args()
    rows = 512 if args.small else 8192
    print(f"{rows} x 512 values, bfloat16, CPU, TensorFlow {tf.__version__}\n")
    print("| op | default list | error, eps | time with float32 and Casts / bfloat16 |")
    print("|---|---|---|---|")
    with tf.device("CPU:0"):
        for name, candidate in CANDIDATES.items():
            row = measure(candidate, name, rows, args.rounds)
            ratio = row.float32 / row.low
            print(f"| {row.name} | {row.listed} | {row.error:.3g} | {ratio:.2f} |", flush=True)


if __name__ == "__main__":
    main()
