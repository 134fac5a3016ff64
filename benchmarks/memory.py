"""Measures the memory of a training step with AdamW for every way to store weights.

Each way trains an MLP in a process of its own: "variables" are the bytes of the model's and the
optimizer's, "gradients" the gradients', and "peak" is the process's peak memory during a
step, less the memory before the model was made.

python -m benchmarks.memory [--small] [--dtype bfloat16]
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
from typing import Any

import keras
import tensorflow as tf

import tfamp
from benchmarks import process_memory
from benchmarks.tables import Table, show

DEPTH, WIDTH, SMALL_WIDTH, BATCH = 6, 4096, 256, 8
# The policy of every layer, as at level O3, and the optimizer's arguments.
WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "float32": ("float32", {}),
    "mixed": ("mixed_{}", {}),
    "low, masters": ("{}", {"master_weights": True}),
    "split": ("{}", {"weight_rounding": "split"}),
    "split, low slots": ("{}", {"weight_rounding": "split", "slots": "bfloat16"}),
    "stochastic": ("{}", {"weight_rounding": "stochastic"}),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--small", action="store_true", help="a small model")
    parser.add_argument("--dtype", choices=("float16", "bfloat16"), default="bfloat16")
    parser.add_argument("--way", choices=WAYS, help="measure one, in this process, and print JSON")
    args = parser.parse_args()
    width = SMALL_WIDTH if args.small else WIDTH
    if args.way is not None:
        print(json.dumps(measure(args.way, args.dtype, width)))
        return
    ways = [way for way in WAYS if args.dtype == "bfloat16" or "split" not in way]
    found = {way: _in_process(way, args) for way in ways}
    show([table(f"{DEPTH * width**2 / 1e6:.1f} M parameters, {args.dtype}", found)])


def _in_process(way: str, args: argparse.Namespace) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.memory", "--way", way, "--dtype", args.dtype]
    command += ["--small"] if args.small else []
    # XLA's memory is given back where it can be, so that a peak belongs to the step.
    environment = {**os.environ, "MALLOC_TRIM_THRESHOLD_": "65536"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def measure(way: str, dtype: str, width: int) -> dict[str, float]:
    """The bytes for each parameter of a step of training."""
    keras.utils.set_random_seed(0)
    before = process_memory.resident()
    model, optimizer = _made(way, dtype, width)
    x, y = tf.random.normal((BATCH, width)), tf.random.normal((BATCH, width))
    sizes: dict[str, int] = {}

    @tf.function
    def step() -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(tf.cast(model(x, training=True), tf.float32) - y))
            scaled = optimizer.get_scaled_loss(loss)
        gradients = tape.gradient(scaled, model.trainable_variables)
        sizes["gradients"] = sum(g.shape.num_elements() * g.dtype.size for g in gradients)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    step()  # traces and compiles
    process_memory.reset_peak()
    step()
    variables = [*model.variables, *optimizer.variables]
    parameters = model.count_params()
    return {
        "variables": sum(v.value.dtype.size * v.value.shape.num_elements() for v in variables)
        / parameters,
        "gradients": sizes["gradients"] / parameters,
        "peak": (process_memory.peak() - before) / parameters,
    }


def _made(way: str, dtype: str, width: int) -> tuple[keras.Model, tfamp.LossScaleOptimizer]:
    policy, arguments = WAYS[way]
    with tfamp.policy_scope(policy.format(dtype)):
        layers = [keras.layers.Dense(width, use_bias=False) for _ in range(DEPTH)]
        model = keras.Sequential([keras.Input((width,)), *layers])
    optimizer = tfamp.LossScaleOptimizer(keras.optimizers.AdamW(1e-3), loss_scale=1.0, **arguments)
    optimizer.build(model.trainable_variables)
    gc.collect()
    return model, optimizer


def table(title: str, found: dict[str, dict[str, float]]) -> Table:
    """A row for each way."""
    rows = []
    for way, sizes in found.items():
        together = sizes["variables"] + sizes["gradients"]
        row = (sizes["variables"], sizes["gradients"], together, sizes["peak"])
        rows.append((way, *(f"{size:.2f}" for size in row)))
    headers = ("AdamW, bytes a parameter", "variables", "gradients", "together", "peak")
    return Table(title, headers, tuple(rows))


if __name__ == "__main__":
    main()
