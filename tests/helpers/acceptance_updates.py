"""Updates of tfamp's optimizer against Keras's, and bits of rounded weights; a program, too.

As a program it also reports whether XLA compiles here: without XLA, updates must be equal too.
"""

from __future__ import annotations

import json
import sys

import keras
import numpy as np
import tensorflow as tf

import tfamp
from helpers.acceptance import relative_difference
from tfamp.training.fused_update import FUSED_OPTIMIZERS

RULES = {
    "sgd": lambda: keras.optimizers.SGD(2.0**-6),
    "momentum": lambda: keras.optimizers.SGD(0.01, momentum=0.9),
    "nesterov": lambda: keras.optimizers.SGD(0.01, momentum=0.9, nesterov=True),
    "adam": lambda: keras.optimizers.Adam(1e-3),
    "adamw": lambda: keras.optimizers.AdamW(1e-3, weight_decay=0.01),
}
ROUNDED = {
    **{name: RULES[name] for name in ("sgd", "adam", "adamw")},
    "lion": lambda: keras.optimizers.Lion(1e-3),
    "nadam": lambda: keras.optimizers.Nadam(1e-3),
    "adafactor": lambda: keras.optimizers.Adafactor(1e-3),
}
if ROUNDED.keys() != {name.lower() for name in FUSED_OPTIMIZERS}:
    raise RuntimeError(f"ROUNDED needs an optimizer for every rule: {', '.join(FUSED_OPTIMIZERS)}")


def rounded_bits(device: str, name: str, *, dtype: str, jit: bool, **options) -> np.ndarray:
    """Returns bit patterns of low-precision weights after 5 steps of an optimizer in `ROUNDED`."""
    keras.utils.set_random_seed(1)
    random = np.random.default_rng(1)
    with tf.device(device):
        weights = keras.Variable(random.uniform(0.5, 2, (256, 16)), dtype=dtype)
        optimizer = tfamp.LossScaleOptimizer(ROUNDED[name](), loss_scale=1.0, **options)
        optimizer.build([weights])

        @tf.function(jit_compile=jit, autograph=False)
        def step(gradient: tf.Tensor) -> None:
            optimizer.apply([gradient], [weights], unscaled=True)

        for _ in range(5):
            # Few bits, so that sums of weights and updates are exact in float32.
            step(tf.constant(random.integers(-256, 256, weights.shape) / 256, dtype))
    return weights.numpy().view("uint16")


def difference(rule: str, *, steps: int, width: int) -> float:
    """Returns the largest relative difference of weights and slots from Keras's."""
    shapes = [(width, width), (width,), (3, 3, 8, 16), ()]

    def make(wrap) -> tuple:
        variables = [
            keras.Variable(tf.random.stateless_normal(shape, (number, 1)))
            for number, shape in enumerate(shapes)
        ]
        optimizer = wrap(RULES[rule]())
        optimizer.build(variables)
        return variables, optimizer

    ours, optimizer = make(lambda inner: tfamp.LossScaleOptimizer(inner, initial_scale=2.0**10))
    theirs, bare = make(lambda inner: inner)

    @tf.function(autograph=False)
    def step(number: tf.Tensor) -> None:
        gradients = [
            tf.random.stateless_normal(shape, tf.stack([number, index]))
            for index, shape in enumerate(shapes)
        ]
        bare.apply(gradients, theirs)
        # A power of two, so scaling is exact.
        optimizer.apply([optimizer.scale_loss(each) for each in gradients], ours)

    for number in range(steps):
        step(tf.constant(number))
    inner = optimizer.inner_optimizer
    pairs = zip([*ours, *inner.variables], [*theirs, *bare.variables], strict=True)
    floats = [(a, b) for a, b in pairs if "float" in str(a.dtype)]
    if int(bare.iterations) != steps or int(inner.iterations) != steps:
        raise RuntimeError(f"{rule}: not every one of {steps} steps was taken")
    return relative_difference([a.value for a, _ in floats], [b.value for _, b in floats])


def xla_works() -> bool:
    """Whether XLA compiles for the first device."""
    try:
        tf.function(lambda x: tf.exp(tf.tanh(x)), jit_compile=True)(tf.ones((8, 8)))
    except (tf.errors.OpError, NotImplementedError):
        return False
    return True


def main(steps: str, width: str) -> None:
    found = {rule: difference(rule, steps=int(steps), width=int(width)) for rule in RULES}
    print("RESULT", json.dumps({"xla": xla_works(), "differences": found}))


if __name__ == "__main__":
    main(*sys.argv[1:])
