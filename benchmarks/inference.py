"""Small batches of inference: what casting the weights costs, and what keeping copies saves.

    python -m benchmarks.inference [--small] [--rounds N]

A multilayer perceptron is called from Python with batches of several sizes, in float32, under
Keras's mixed_bfloat16 policy, and rewritten with and without `cache_weights=True`, by turns.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import tensorflow as tf

import tfamp


def build(width: int) -> keras.Model:
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(width, activation="relu") for _ in range(6)]
    return keras.Sequential([keras.Input((width,)), *layers, keras.layers.Dense(10)])


def systems(width: int) -> dict[str, Callable[[tf.Tensor], tf.Tensor]]:
    rewritten = {
        f"tfamp.rewrite, {placement}{', cached weights' if cached else ''}": tfamp.rewrite(
            build(width), dtype="bfloat16", placement=placement, cache_weights=cached
        )
        for placement in ("lists", "min_cut")
        for cached in (False, True)
    }
    float32 = tf.function(build(width))
    keras.config.set_dtype_policy("mixed_bfloat16")
    policy = tf.function(build(width))
    keras.config.set_dtype_policy("float32")
    return {"float32": float32, "Keras policy": policy, **rewritten}


def measure(width: int, batch: int, rounds: int) -> dict[str, float]:
    """Median seconds of a call by system."""
    x = tf.random.stateless_normal((batch, width), (1, 2))
    functions = systems(width)
    times: dict[str, list[float]] = {name: [] for name in functions}
    for number in range(rounds + 2):
        for name, function in functions.items():
            start = time.perf_counter()
            function(x).numpy()
            if number >= 2:  # The first calls trace and warm up.
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(taken) for name, taken in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--small", action="store_true", help="a quick run of a small model")
    parser.add_argument("--rounds", type=int, default=20, help="how often each call is timed")
    args = parser.parse_args()
    width, batches = (256, (1, 8)) if args.small else (2048, (1, 8, 64))
    rows = {batch: measure(width, batch, args.rounds) for batch in batches}
    print(f"6 x Dense {width}, bfloat16, TensorFlow {tf.__version__}: float32's time / time\n")
    print("| system | " + " | ".join(f"batch {batch}" for batch in batches) + " |")
    print("|---|" + "---|" * len(batches))
    for name in rows[batches[0]]:
        ratios = (rows[batch]["float32"] / rows[batch][name] for batch in batches)
        print(f"| {name} | " + " | ".join(f"{ratio:.2f}" for ratio in ratios) + " |")


if __name__ == "__main__":
    main()
