"""Very many optimizer steps in one tf.function, one in twenty of them not finite."""

import resource
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp

LEAST, MOST = 2.0**-6, 2.0**12


def resident_bytes():
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
@pytest.mark.parametrize(
    ("steps", "calls"), [(5_000, 5), pytest.param(200_000, 20, marks=pytest.mark.nightly)]
)
def test_counters_are_exact_and_memory_does_not_grow(steps, calls):
    weight = keras.Variable(np.ones(4, "float32"))
    optimizer = tfamp.LossScaleOptimizer(
        keras.optimizers.SGD(1e-4, momentum=0.9),
        initial_scale=2.0**8,
        dynamic_growth_steps=10,
        min_scale=LEAST,
        max_scale=MOST,
    )
    optimizer.build([weight])

    @tf.function
    def train(bad, lowest, highest):
        for is_bad in bad:
            gradient = weight.value * optimizer.get_scale()
            gradient = tf.where(is_bad, gradient * np.inf, gradient)
            optimizer.apply_gradients([(gradient, weight)], unscaled=False)
            scale = optimizer.get_scale()
            lowest, highest = tf.minimum(lowest, scale), tf.maximum(highest, scale)
        return lowest, highest

    random = np.random.default_rng(0)
    lowest, highest = tf.constant(MOST), tf.constant(LEAST)
    faults, memory = 0, []
    expected, growth = 2.0**8, 0
    for _ in range(calls):
        bad = random.random(steps // calls) < 0.05
        lowest, highest = train(tf.constant(bad), lowest, highest)
        for each in bad:  # The rule, in Python.
            growth = 0 if each else growth + 1
            if each:
                expected = max(LEAST, expected / 2)
            elif growth == 10:
                expected, growth = min(MOST, expected * 2), 0
        faults += int(bad.sum())
        memory.append(resident_bytes())
        assert np.isfinite(weight.numpy()).all()
    assert int(optimizer.skipped_steps) == faults > 0
    assert int(optimizer.iterations) == steps - faults
    assert float(optimizer.loss_scale) == expected
    assert int(optimizer.dynamic_counter) == growth
    assert LEAST <= float(lowest) <= float(highest) <= MOST
    assert float(lowest) < float(highest)
    assert train.experimental_get_tracing_count() == 1
    # From the second call on: the first traces and fills the allocator's pools.
    slope = np.polyfit(np.arange(calls - 1), memory[1:], 1)[0] / (steps // calls)
    assert slope < 500, f"{slope:.1f} bytes a step"
