"""Times training steps of an MLP with and without a NumericsMonitor.

    python -m benchmarks.monitor [--small] [--rounds N] [--every N]

Interleaved: a step without a monitor, one between two records of its monitor, and one that makes a
record. The overhead at N follows: N - 1 steps of one kind and one of the other. A figure is what
the fastest fifth of the steps are under.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Callable, Mapping

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import tensorflow as tf

import tfamp
from benchmarks.rounds import Times, interleaved
from benchmarks.tables import Table, show
from tfamp.diagnostics import NumericsMonitor

WITHOUT = "without"


def calls(small: bool, rounds: int) -> dict[str, Callable[[], object]]:
    """A step of each kind, by name."""
    # No record falls into the timed steps of the first kind.
    kinds = {"between": rounds + 10, "record": 1}
    monitored = {kind: _step(small, NumericsMonitor(every)) for kind, every in kinds.items()}
    return {WITHOUT: _step(small), **monitored}


def _step(small: bool, *monitors: NumericsMonitor) -> Callable[[], object]:
    """A model that `fit` would train, one step at a time."""
    keras.utils.set_random_seed(0)
    width, batch = (256, 64) if small else (1024, 128)
    with tfamp.policy_scope("mixed_bfloat16"):
        hidden = [keras.layers.Dense(width, activation="relu") for _ in range(6)]
        model = keras.Sequential([keras.Input((width,)), *hidden, keras.layers.Dense(10)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(tfamp.LossScaleOptimizer(keras.optimizers.SGD(1e-3, momentum=0.9)), loss)
    data = tf.random.normal((batch, width)), tf.random.uniform((batch,), 0, 10, tf.int32)
    iterator = iter(tf.data.Dataset.from_tensors(data).cache().repeat())
    callbacks = keras.callbacks.CallbackList([*monitors], model=model)
    model.make_train_function()
    callbacks.on_train_begin()

    def step() -> float:
        callbacks.on_train_batch_begin(0)
        logs = model.train_function(iterator)
        callbacks.on_train_batch_end(0, logs)
        return float(logs["loss"])

    return step


def table(found: Mapping[str, Times], every: int) -> Table:
    """Times of the kinds of steps, and the overhead that follows from them."""
    # Other programs make steps slower, never faster.
    fast = {name: statistics.quantiles(each.wall, n=5)[0] for name, each in found.items()}
    overhead = ((every - 1) * fast["between"] + fast["record"]) / every / fast[WITHOUT] - 1
    times = (f"{1e3 * fast[name]:.2f}" for name in (WITHOUT, "between", "record"))
    rows = [(*times, f"{overhead:+.1%}")]
    headers = ("step, ms", "between records", "at a record", f"overhead at {every}")
    return Table("Steps of an MLP, mixed_bfloat16", headers, tuple(rows), left=0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--small", action="store_true", help="a small model, for a try")
    parser.add_argument("--rounds", type=int, default=90, help="how many steps each is timed for")
    parser.add_argument("--every", type=int, default=100, help="steps from record to record")
    args = parser.parse_args()
    show([table(interleaved(calls(args.small, args.rounds), args.rounds, "monitor"), args.every)])


if __name__ == "__main__":
    main()
