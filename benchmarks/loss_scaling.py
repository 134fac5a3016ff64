"""What loss scaling costs: the update of wrapped optimizers, in ratios to the bare Keras optimizer.

"scaled" is a LossScaleOptimizer, which also divides by the loss scale and checks for infs and NaNs.
All run by turns in one process, on the same variables and gradients; "CPU" adds up all threads.
With `--low` it is what weights and gradients of 16 bits cost instead, one line for each way to
store the weights, in ratios to tfamp's update of float32 ones, as mixed precision has them.

python -m benchmarks.loss_scaling [--small] [--low] [--rounds N]
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import keras
import tensorflow as tf
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import tfamp

# 25 million parameters in rows whose lengths are a multiple of a processor's vectors, as widths of
# layers mostly are.
TENSORS, SIDE = 96, 512
OPTIMIZERS = {
    "SGD, momentum": lambda: keras.optimizers.SGD(1e-3, momentum=0.9),
    "Adam": lambda: keras.optimizers.Adam(1e-3),
    "AdamW": lambda: keras.optimizers.AdamW(1e-3),
    "Adafactor": lambda: keras.optimizers.Adafactor(1e-3),
}
SYSTEMS = {
    "bare Keras": lambda inner: inner,
    "Keras, scaled": lambda inner: keras.optimizers.LossScaleOptimizer(inner),
    "tfamp, scaled": lambda inner: tfamp.LossScaleOptimizer(inner),
}

# The dtype of the weights and gradients, and what the optimizer is told; the first is compared to.
LOW_OPTIMIZERS = ("SGD, momentum", "AdamW", "Adafactor")
WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixed": ("float32", {}),
    "low, masters": ("bfloat16", {"master_weights": True}),
    "split": ("bfloat16", {"weight_rounding": "split"}),
    "stochastic": ("bfloat16", {"weight_rounding": "stochastic"}),
}


@dataclass
class Measured:
    """Times of one system.

    Attributes:
        step: Applies the gradients once.
        first_step: Seconds of the first step, tracing and compiling included.
        wall: Seconds of each later step.
        cpu: Processor seconds, of all threads, of each later step.
    """

    step: Callable[[], None]
    first_step: float = 0.0
    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--small", action="store_true", help="a 64th of the parameters")
    parser.add_argument("--low", action="store_true", help="weights of 16 bits")
    parser.add_argument("--rounds", type=int, default=30, help="how many steps each is timed for")
    args = parser.parse_args()
    console = Console()
    side = SIDE // (8 if args.small else 1)
    for name in LOW_OPTIMIZERS if args.low else OPTIMIZERS:
        steps = (ways if args.low else systems)(OPTIMIZERS[name], side)
        with Progress(console=console, transient=True) as progress:
            task = progress.add_task(name, total=args.rounds * len(steps))
            found = measure(steps, args.rounds, lambda task=task, p=progress: p.advance(task))
        console.print(table(f"{name}: {TENSORS} tensors of {side} x {side}", found))


def systems(
    make: Callable[[], keras.optimizers.Optimizer], side: int
) -> dict[str, Callable[[], None]]:
    """A step of each system, on the same float32 variables and gradients."""
    tensors = _tensors(side, "float32")
    return {name: _step(wrap(make()), *tensors) for name, wrap in SYSTEMS.items()}


def ways(
    make: Callable[[], keras.optimizers.Optimizer], side: int
) -> dict[str, Callable[[], None]]:
    """A step of tfamp's optimizer for each way to store weights."""
    return {
        name: _step(tfamp.LossScaleOptimizer(make(), **told), *_tensors(side, dtype))
        for name, (dtype, told) in WAYS.items()
    }


def _tensors(side: int, dtype: str) -> tuple[list[keras.Variable], list[tf.Variable]]:
    keras.utils.set_random_seed(0)
    values = [tf.random.normal((side, side)) for _ in range(TENSORS)]
    gradients = [tf.Variable(tf.cast(tf.random.normal((side, side)), dtype)) for _ in values]
    return [keras.Variable(value, dtype=dtype) for value in values], gradients


def measure(
    steps: dict[str, Callable[[], None]], rounds: int, progress: Callable[[], None]
) -> dict[str, Measured]:
    """Takes `rounds` steps of each by turns."""
    found = {name: Measured(step) for name, step in steps.items()}
    for each in found.values():
        start = time.perf_counter()
        each.step()
        each.first_step = time.perf_counter() - start
        each.step()
    for _ in range(rounds):
        for each in found.values():
            wall, cpu = time.perf_counter(), _processor_seconds()
            each.step()
            each.wall.append(time.perf_counter() - wall)
            each.cpu.append(_processor_seconds() - cpu)
            progress()
    return found


def _step(
    optimizer: keras.optimizers.Optimizer,
    variables: list[keras.Variable],
    gradients: list[tf.Variable],
) -> Callable[[], None]:
    optimizer.build(variables)
    optimizer.scale_loss(tf.constant(1.0))  # As a training loop does; the gradients are ready.

    @tf.function
    def step() -> tf.Tensor:
        optimizer.apply([gradient.value() for gradient in gradients], variables)
        return tf.constant(0)

    return lambda: step().numpy()


def _processor_seconds() -> float:
    times = os.times()
    return times.user + times.system


def table(title: str, found: dict[str, Measured]) -> Table:
    result = Table(title=title)
    result.add_column("")
    first = next(iter(found))
    columns = (f"of {first}, time", f"of {first}, CPU", "ms", "CPU ms", "first step, s")
    for column in columns:
        result.add_column(column, justify="right")
    wall, cpu = (_medians(found, kind) for kind in ("wall", "cpu"))
    for name, each in found.items():
        result.add_row(
            name,
            f"{wall[name] / wall[first]:.2f}",
            f"{cpu[name] / cpu[first]:.2f}",
            f"{1e3 * wall[name]:.1f}",
            f"{1e3 * cpu[name]:.1f}",
            f"{each.first_step:.1f}",
        )
    return result


def _medians(found: dict[str, Measured], kind: str) -> dict[str, float]:
    # The clock of processor time moves in steps of 10 ms: its mean says more than its median.
    average = statistics.median if kind == "wall" else statistics.fmean
    return {name: average(getattr(each, kind)) for name, each in found.items()}


if __name__ == "__main__":
    main()
