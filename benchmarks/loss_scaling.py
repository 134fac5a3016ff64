"""Times the update of loss-scaling optimizers, in ratios to the bare Keras optimizer.

    python -m benchmarks.loss_scaling [--small] [--low] [--rounds N]

"scaled" is a LossScaleOptimizer, which also divides by the loss scale and checks for infs and NaNs.
With `--low` it is what weights and gradients of 16 bits cost instead, one line for each way to
store the weights, in ratios to tfamp's update of float32 ones, as mixed precision has them.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Mapping
from typing import Any

import keras
import tensorflow as tf

import tfamp
from benchmarks.rounds import Times, interleaved
from benchmarks.tables import Table, show

# 25 million parameters in rows whose lengths are a multiple of a processor's vectors, as widths of
# layers mostly are.
TENSORS, SIDE = 96, 512
OPTIMIZERS: Mapping[str, Callable[[], Any]] = {
    "SGD, momentum": lambda: keras.optimizers.SGD(1e-3, momentum=0.9),
    "Adam": lambda: keras.optimizers.Adam(1e-3),
    "AdamW": lambda: keras.optimizers.AdamW(1e-3),
    "Adafactor": lambda: keras.optimizers.Adafactor(1e-3),
}
# The dtype of weights and gradients, and the optimizer around one of those; others are compared
# with the first.
Systems = Mapping[str, tuple[str, Callable[[Any], Any]]]
SYSTEMS: Systems = {
    "bare Keras": ("float32", lambda inner: inner),
    "Keras, scaled": ("float32", keras.optimizers.LossScaleOptimizer),
    "tfamp, scaled": ("float32", tfamp.LossScaleOptimizer),
}


def _low(**arguments: Any) -> tuple[str, Callable[[Any], Any]]:
    return "bfloat16", lambda inner: tfamp.LossScaleOptimizer(inner, **arguments)


LOW_SYSTEMS: Systems = {
    "mixed": ("float32", tfamp.LossScaleOptimizer),
    "low, masters": _low(master_weights=True),
    "split": _low(weight_rounding="split"),
    "stochastic": _low(weight_rounding="stochastic"),
}
LOW_OPTIMIZERS = ("SGD, momentum", "AdamW", "Adafactor")


def steps(systems: Systems, make: Callable[[], Any], side: int) -> dict[str, Callable[[], object]]:
    """A step of each system, from the same variables and gradients."""
    return {name: _step(wrap(make()), dtype, side) for name, (dtype, wrap) in systems.items()}


def _step(optimizer: Any, dtype: str, side: int) -> Callable[[], object]:
    keras.utils.set_random_seed(0)
    values = [tf.random.normal((side, side)) for _ in range(TENSORS)]
    gradients = [tf.Variable(tf.cast(tf.random.normal((side, side)), dtype)) for _ in values]
    variables = [keras.Variable(value, dtype=dtype) for value in values]
    optimizer.build(variables)
    optimizer.scale_loss(tf.constant(1.0))  # As a training loop does; the gradients are ready.

    @tf.function
    def step() -> tf.Tensor:
        optimizer.apply([gradient.value() for gradient in gradients], variables)
        return tf.constant(0)

    return lambda: step().numpy()


def table(title: str, found: Mapping[str, Times]) -> Table:
    """Medians of each system, and their ratios to the first."""
    base, *_ = found
    medians = {name: [statistics.median(x) for x in (t.wall, t.cpu)] for name, t in found.items()}
    rows = [
        (
            name,
            *(f"{own / of:.2f}" for own, of in zip(medians[name], medians[base], strict=True)),
            *(f"{1e3 * own:.1f}" for own in medians[name]),
            f"{each.first:.1f}",
        )
        for name, each in found.items()
    ]
    headers = (f"of {base}, time", f"of {base}, CPU", "ms", "CPU ms", "first step, s")
    return Table(title, ("", *headers), tuple(rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--small", action="store_true", help="a 64th of the parameters")
    parser.add_argument("--low", action="store_true", help="weights of 16 bits")
    parser.add_argument("--rounds", type=int, default=30, help="how many steps each is timed for")
    args = parser.parse_args()
    side = SIDE // (8 if args.small else 1)
    for name in LOW_OPTIMIZERS if args.low else OPTIMIZERS:
        calls = steps(LOW_SYSTEMS if args.low else SYSTEMS, OPTIMIZERS[name], side)
        found = interleaved(calls, args.rounds, name)
        show([table(f"{name}: {TENSORS} tensors of {side} x {side}", found)])


if __name__ == "__main__":
    main()
