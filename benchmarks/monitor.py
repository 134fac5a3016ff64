"""What a NumericsMonitor costs: training steps with one, in ratios to those without.

Single steps of several models run by turns in one process: one without a monitor, one between two
records of its monitor, one that makes a record at every step, and both again with the outputs of
the layers counted too. The overhead at N follows: N - 1 steps of one kind and one of the other.
"CPU" adds up all threads. A figure is what the fastest fifth of the steps are under: other
programs make steps slower, never faster.

python -m benchmarks.monitor [--small] [--rounds N] [--every N] [--workload mlp cnn]
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Sequence

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import tensorflow as tf
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import tfamp
from tfamp.diagnostics import NumericsMonitor

WITHOUT = "without"
MONITORS = {"monitor": False, "monitor, activations": True}


def mlp(small: bool) -> tuple[keras.Model, tuple[int, ...], int]:
    """Returns six dense layers, the shape of an input and a batch size."""
    width = 256 if small else 1024
    hidden = [keras.layers.Dense(width, activation="relu") for _ in range(6)]
    model = keras.Sequential([keras.Input((width,)), *hidden, keras.layers.Dense(10)])
    return model, (width,), 64 if small else 128


def cnn(small: bool) -> tuple[keras.Model, tuple[int, ...], int]:
    """Returns a small ResNet-like CNN, the shape of an input and a batch size."""
    side, filters = (8, 8) if small else (16, 32)
    x = inputs = keras.Input((side, side, 3))
    for _ in range(6):
        x = keras.layers.Conv2D(filters, 3, padding="same")(x)
        x = keras.layers.ReLU()(keras.layers.BatchNormalization()(x))
    outputs = keras.layers.Dense(10)(keras.layers.GlobalAveragePooling2D()(x))
    return keras.Model(inputs, outputs), (side, side, 3), 64


WORKLOADS = {"mlp": mlp, "cnn": cnn}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--small", action="store_true", help="small models, for a try")
    parser.add_argument("--rounds", type=int, default=90, help="how many steps each is timed for")
    parser.add_argument("--every", type=int, default=100, help="steps from record to record")
    parser.add_argument("--workload", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--dtype", default="bfloat16", help="compute dtype")
    args = parser.parse_args()
    console = Console()
    for workload in args.workload:
        with Progress(console=console, transient=True) as progress:
            task = progress.add_task(workload, total=args.rounds)
            runs = make_runs(workload, args)
            for number in range(args.rounds):
                # Another one goes first each time: what runs behind which matters, too.
                for run in rotated(list(runs.values()), number):
                    run.step()
                progress.advance(task)
        parameters = runs[WITHOUT].model.count_params()
        title = f"{workload}: {parameters:,} parameters, mixed_{args.dtype}"
        console.print(table(title, runs, args.every))


def make_runs(workload: str, args: argparse.Namespace) -> dict[str, Run]:
    """Returns the models to time."""
    monitors = {WITHOUT: None}
    for name, activations in MONITORS.items():
        # No record falls into the timed steps of the first kind.
        between = NumericsMonitor(max(args.every, args.rounds + 10), activations=activations)
        monitors[f"{name}: between"] = between
        monitors[f"{name}: record"] = NumericsMonitor(1, activations=activations)
    made = {}
    for name, monitor in monitors.items():
        keras.utils.set_random_seed(0)
        with tfamp.policy_scope(f"mixed_{args.dtype}"):
            model, shape, batch = WORKLOADS[workload](args.small)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(tfamp.LossScaleOptimizer(keras.optimizers.SGD(1e-3, momentum=0.9)), loss)
        made[name] = Run(model, shape, batch, [monitor] if monitor else [])
    return made


def rotated(items: Sequence[Run], number: int) -> Sequence[Run]:
    """Returns the items, beginning with another one for each number."""
    first = number % len(items)
    return [*items[first:], *items[:first]]


class Run:
    """A model that `fit` would train, one step at a time.

    Attributes:
        wall: Seconds of each step.
        cpu: Processor seconds, of all threads, of each step.
    """

    def __init__(self, model, shape, batch, callbacks) -> None:
        random = np.random.default_rng(0)
        x = random.standard_normal((batch, *shape)).astype("float32")
        y = random.integers(0, 10, batch).astype("int32")
        self.model = model
        self._iterator = iter(tf.data.Dataset.from_tensors((x, y)).cache().repeat())
        self._callbacks = keras.callbacks.CallbackList(callbacks, model=model)
        model.make_train_function()
        self._callbacks.on_train_begin()
        self.wall: list[float] = []
        self.cpu: list[float] = []
        for _ in range(5):
            self.step()
        self.wall.clear()
        self.cpu.clear()

    def step(self) -> None:
        """Trains one step."""
        wall, cpu = time.perf_counter(), time.process_time()
        self._callbacks.on_train_batch_begin(0)
        logs = self.model.train_function(self._iterator)
        self._callbacks.on_train_batch_end(0, logs)
        float(logs["loss"])
        self.wall.append(time.perf_counter() - wall)
        self.cpu.append(time.process_time() - cpu)


def fast(seconds: Sequence[float]) -> float:
    """Returns what a fifth of the times are under."""
    return statistics.quantiles(seconds, n=5)[0]


def table(title: str, runs: dict[str, Run], every: int) -> Table:
    """Returns times of the kinds of steps, and the overhead that follows from them."""
    made = Table(title=title)
    for heading in ("", "clock", "between", "at a record", f"overhead at {every}"):
        made.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    for times, clock in (("wall", "wall"), ("cpu", "CPU")):
        without = fast(getattr(runs[WITHOUT], times))
        made.add_row(WITHOUT, clock, f"{1e3 * without:.2f}")
        for name in MONITORS:
            between, record = (
                fast(getattr(runs[f"{name}: {kind}"], times)) for kind in ("between", "record")
            )
            overhead = ((every - 1) * between + record) / every / without - 1
            cells = f"{1e3 * between:.2f}", f"{1e3 * record:.2f}", f"{overhead:+.1%}"
            made.add_row(name, clock, *cells)
    return made


if __name__ == "__main__":
    main()
