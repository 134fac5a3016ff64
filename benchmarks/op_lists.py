"""What ops lose and gain in bfloat16 that tfamp lists otherwise than TensorFlow's own rewrite.

    python -m benchmarks.op_lists [--small] [--rounds N] [--no-steps]

For each op: the largest relative error of its bfloat16 kernel on bfloat16 inputs, against float64
on the same inputs, in units of eps = 2**-8 (what is only rounded is off by at most 0.5); the same
in float32 with the Casts that it needs between bfloat16 neighbours; and the time of that over the
time of the bfloat16 kernel, measured by turns. Normalizations, whose ops the default lists keep in
float32 by what they compute together, are rows as ops are; their errors are relative to the rms of
the result.

Then the same for whole training steps of the transformer: Casts and time with the normalizations
in float32 and in bfloat16, by turns.
"""

from __future__ import annotations

import argparse
import functools
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
        crosses_zero: Whether errors are relative to the rms of the result, not to each value.
    """

    listed: str
    inputs: Callable[[int], list[np.ndarray]]
    op: Callable[..., tf.Tensor]
    exact: Callable[..., np.ndarray]
    crosses_zero: bool = False


def _normal(rows: int, columns: int = 512) -> np.ndarray:
    return np.random.default_rng(0).standard_normal((rows, columns))


def _positive(rows: int) -> np.ndarray:
    return np.abs(_normal(rows)) + 0.1


def _layer_norm(x: tf.Tensor) -> tf.Tensor:
    mean = tf.reduce_mean(x, -1, keepdims=True)
    variance = tf.reduce_mean(tf.math.squared_difference(x, mean), -1, keepdims=True)
    return (x - mean) * tf.math.rsqrt(variance + tf.cast(1e-3, x.dtype))


def _rms_norm(x: tf.Tensor) -> tf.Tensor:
    squares = tf.reduce_mean(tf.square(x), -1, keepdims=True)
    return x * tf.math.rsqrt(squares + tf.cast(1e-3, x.dtype))


def _exact_rms_norm(x: np.ndarray) -> np.ndarray:
    return x / np.sqrt(np.mean(x**2, -1, keepdims=True) + 1e-3)


def _layer_norm_of(mean: float) -> Candidate:
    """Of values of deviation 1."""
    return Candidate(
        "float32 by structure (Grappler: infer)",
        lambda rows: [_normal(rows) + mean],
        _layer_norm,
        lambda x: (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-3),
        crosses_zero=True,
    )


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
    "LayerNormalization, mean 0.5": _layer_norm_of(0.5),
    "LayerNormalization, mean 4": _layer_norm_of(4.0),
    "RMSNormalization": Candidate(
        "float32 by structure (Grappler: infer)",
        lambda rows: [_normal(rows)],
        _rms_norm,
        _exact_rms_norm,
        crosses_zero=True,
    ),
}


@dataclass(frozen=True)
class Row:
    """What was found for a candidate: errors in eps, and how much longer float32 takes."""

    name: str
    listed: str
    low_error: float
    float32_error: float
    time_ratio: float


def measure(candidate: Candidate, name: str, rows: int, rounds: int) -> Row:
    low = [tf.cast(tf.constant(each), tf.bfloat16) for each in candidate.inputs(rows)]
    exact = candidate.exact(*(each.numpy().astype(np.float64) for each in low))

    @tf.function
    def in_low() -> tf.Tensor:
        return candidate.op(*low)

    @tf.function
    def in_float32() -> tf.Tensor:
        return tf.cast(candidate.op(*(tf.cast(each, tf.float32) for each in low)), tf.bfloat16)

    def error(found: tf.Tensor) -> float:
        size = np.sqrt(np.mean(exact**2)) if candidate.crosses_zero else np.abs(exact)
        off = np.abs(found.numpy().astype(np.float64) - exact)
        return float(np.max(off / np.maximum(size, 1e-30))) / EPS

    errors = error(in_low()), error(in_float32())
    return Row(name, candidate.listed, *errors, _time_ratio(in_float32, in_low, rounds))


def _time_ratio(one: Callable[[], object], other: Callable[[], object], rounds: int) -> float:
    """The time of one function over that of another, by turns; both have run before."""
    times: dict[Callable[[], object], list[float]] = {one: [], other: []}
    for _ in range(rounds):
        for function, taken in times.items():
            start = time.perf_counter()
            function()
            taken.append(time.perf_counter() - start)
    return statistics.median(times[one]) / statistics.median(times[other])


# ---- Training steps ------------------------------------------------------------------------------


def step_rows(rounds: int, *, small: bool) -> list[tuple[str, ...]]:
    """A row for each placement: Casts and their bytes without and with, time with over without."""
    import keras

    import tfamp
    from benchmarks import models
    from benchmarks.workloads import WORKLOADS

    workload = WORKLOADS["transformer"]
    size = workload.sizes["small" if small else "full"]
    x, y = map(tf.constant, workload.batch(size, 0))
    model = models.transformer(size)
    step = models.train_step(model, keras.optimizers.SGD(0.01, momentum=0.9))
    rows = []
    for placement in ("lists", "min_cut"):
        steps, cells = [], [placement]
        for exact in (False, True):
            lists = tfamp.OpLists.default("bfloat16").with_changes(exact_statistics=exact)
            fast = tfamp.rewrite(step, dtype="bfloat16", placement=placement, op_lists=lists)
            summary = fast.plan(x, y).summary
            cells += [str(summary.casts), f"{summary.cast_bytes / 1e6:.0f}"]
            steps.append(functools.partial(_finish, fast, x, y))
        for each in steps * 2:
            each()
        rows.append((*cells, f"{_time_ratio(steps[1], steps[0], rounds):.2f}"))
    return rows


def _finish(step: Callable[..., tf.Tensor], *batch: tf.Tensor) -> None:
    step(*batch).numpy()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--small", action="store_true", help="few rows, for a quick look")
    parser.add_argument("--rounds", type=int, default=20, help="how often each thing is timed")
    parser.add_argument("--no-steps", action="store_true", help="leave out the training steps")
    args = parser.parse_args()
    rows = 512 if args.small else 8192
    print(f"{rows} x 512 values, bfloat16, CPU, TensorFlow {tf.__version__}\n")
    print("| op | default list | error, eps | in float32 | time in float32 with Casts / bfloat16 |")
    print("|---|---|---:|---:|---:|")
    with tf.device("CPU:0"):
        for name, candidate in CANDIDATES.items():
            row = measure(candidate, name, rows, args.rounds)
            errors = f"{row.low_error:.3g} | {row.float32_error:.3g}"
            print(f"| {name} | {row.listed} | {errors} | {row.time_ratio:.2f} |", flush=True)
        if not args.no_steps:
            size = "small" if args.small else "full"
            print(f"\nTraining step of the transformer ({size}), normalizations in bfloat16\n")
            print("| placement | Casts | MB | Casts, float32 | MB, float32 | time, float32 / not |")
            print("|---|---:|---:|---:|---:|---:|")
            for cells in step_rows(args.rounds, small=args.small):
                print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
