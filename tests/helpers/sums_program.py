"""Prints the sums of random gradients over any number of replicas, as `aggregate_in` sends them.

Run as a program with the number of replicas: logical devices are set before anything else runs.
"""

from __future__ import annotations

import json
import os
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import tensorflow as tf

import tfamp

SIZE = 1001  # No multiple of the number of replicas.


def gradients(replicas: int) -> np.ndarray:
    """One row a replica, of magnitudes from 1e-8 to 1e4."""
    random = np.random.default_rng(0)
    shape = (replicas, SIZE)
    values = random.normal(size=shape) * 10 ** random.uniform(-8, 4, SIZE)
    return values.astype("float32")


def sums(strategy: tf.distribute.Strategy, aggregate_in: str | None, *, traced: bool) -> np.ndarray:
    """The update of a weight by `gradients`."""
    replicas = strategy.num_replicas_in_sync
    with strategy.scope():
        weight = keras.Variable(np.zeros(SIZE, "float32"), aggregation="mean")
        optimizer = tfamp.LossScaleOptimizer(
            keras.optimizers.SGD(1.0), loss_scale=1.0, aggregate_in=aggregate_in
        )
        optimizer.build([weight])
    rows = gradients(replicas)
    given = strategy.experimental_distribute_values_from_function(
        lambda context: tf.constant(rows[context.replica_id_in_sync_group])
    )

    def step(gradient):
        optimizer.apply([gradient], [weight])

    run = lambda: strategy.run(step, args=(given,))  # noqa: E731
    (tf.function(run) if traced else run)()
    return -weight.numpy()


def main() -> None:
    count = int(sys.argv[1])
    logical = [tf.config.LogicalDeviceConfiguration()] * count
    tf.config.set_logical_device_configuration(tf.config.list_physical_devices("CPU")[0], logical)
    strategy = tf.distribute.MirroredStrategy([f"CPU:{number}" for number in range(count)])
    found = {each: sums(strategy, each, traced=True).tolist() for each in ("bfloat16",)}
    print("RESULT" + json.dumps(found))


if __name__ == "__main__":
    main()
