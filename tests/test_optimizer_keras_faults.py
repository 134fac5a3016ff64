"""Three faults of Keras 3.15's LossScaleOptimizer; each test passes with ours, fails with theirs.

The parametrisation with Keras's class is expected to fail, strictly: when Keras mends a fault, the
test says so and the comparison in the docs has to change.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp
from helpers.replicas import per_replica

KERAS = pytest.param(
    keras.optimizers.LossScaleOptimizer,
    id="keras",
    marks=pytest.mark.xfail(strict=True, reason="a fault of Keras 3.15's optimizer"),
)
BOTH = pytest.mark.parametrize(
    "wrapper", [pytest.param(tfamp.LossScaleOptimizer, id="tfamp"), KERAS]
)


@BOTH
def test_scale_that_grew_to_its_limit_still_trains(wrapper):
    weight = keras.Variable(1.0)
    optimizer = wrapper(keras.optimizers.SGD(0.5), dynamic_growth_steps=1)
    optimizer.build([weight])

    @tf.function
    def step():  # A loss so small that its scaled gradient stays finite at any scale.
        with tf.GradientTape() as tape:
            scaled = optimizer.scale_loss(weight.value * 1e-20)
        optimizer.apply_gradients([(tape.gradient(scaled, weight.value), weight)])

    for _ in range(200):
        step()
    before = int(optimizer.iterations)
    for _ in range(10):
        step()
    assert int(optimizer.iterations) > before, "stuck: every step is skipped for ever"
    assert np.isfinite(float(optimizer.dynamic_scale))


@BOTH
def test_scale_that_shrank_to_its_limit_writes_no_nan(wrapper):
    weight = keras.Variable(1.0)
    optimizer = wrapper(keras.optimizers.SGD(0.5))
    optimizer.build([weight])

    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            scaled = optimizer.scale_loss(weight.value * x)
        optimizer.apply_gradients([(tape.gradient(scaled, weight.value), weight)])

    for _ in range(300):
        step(tf.constant(np.inf))
    step(tf.constant(1.0))
    assert float(weight) == 0.5
    assert float(optimizer.dynamic_scale) > 0.0


@BOTH
def test_inf_on_one_replica_alone_is_not_applied(wrapper, two_replicas):
    with two_replicas.scope():
        weight = keras.Variable([1.0], aggregation="mean")
        optimizer = wrapper(keras.optimizers.SGD(0.5))
        optimizer.build([weight])

    @tf.function
    def step(x):
        def replica_step(x):
            with tf.GradientTape() as tape:
                scaled = optimizer.scale_loss(tf.reduce_sum(weight.value * x))
            optimizer.apply_gradients([(tape.gradient(scaled, weight.value), weight)])

        two_replicas.run(replica_step, args=(x,))

    step(per_replica(two_replicas, [1.0], [np.inf]))
    np.testing.assert_array_equal(weight.numpy(), [1.0])
