"""Copies of a training step to the host, and the cost of a monitor."""

import keras
import pytest
import tensorflow as tf

import tfamp
from helpers import acceptance_models as models
from helpers.acceptance import interleaved_seconds, ratio
from helpers.cases import first_of
from helpers.device_trace import copies_to_host

pytestmark = pytest.mark.gpu
STEPS = 10


def traced_copies(folder, step, x, y):
    for _ in range(3):
        step(x, y)
    tf.test.experimental.sync_devices()
    with tf.profiler.experimental.Profile(str(folder)):
        for _ in range(STEPS):
            step(x, y)
        tf.test.experimental.sync_devices()
    copies = copies_to_host(folder)
    if copies is None:
        pytest.skip("the profiler sees no GPU: NVIDIA's driver may keep that to administrators")
    return copies


@pytest.mark.parametrize("inner", first_of(["SGD", "Adam", "AdamW"], pytest.mark.long))
def test_copies_of_a_step(device, check, tmp_path, inner):
    """A training step with a loss scale makes at most 3 copies to the host."""
    device.needs_gpu("a CPU copies nothing to itself")
    make = getattr(keras.optimizers, inner)
    with tf.device(device.name):
        images, y = models.digits(64, 32)
        training = models.train(
            lambda: models.cnn(32, 32), "policy", "float16", inner=lambda: make(1e-3)
        )
        copies = traced_copies(tmp_path, training.step, tf.constant(images), tf.constant(y))
    check("copies to the host a step", len(copies) / STEPS, at_most=3)
    check("bytes of the largest", max(copies, default=0), at_most=1000, unit="B")


@pytest.mark.long
def test_copies_of_a_monitored_step(device, check, tmp_path):
    """A step that a NumericsMonitor samples copies no gradient to the host."""
    device.needs_gpu("a CPU copies nothing to itself")
    with tf.device(device.name):
        step, _ = monitored_step("float16", 1024, 4, 1)
        x, y = tf.random.normal((64, 1024)), tf.zeros(64, "int32")
        copies = traced_copies(tmp_path, step, x, y)
    check("copies to the host a step", len(copies) / STEPS)
    check("bytes of the largest", max(copies, default=0), at_most=1000, unit="B")


@pytest.mark.long
@pytest.mark.usefixtures("as_users_have_it")
def test_cost_of_a_monitor(device, check):
    """A NumericsMonitor at 100 million parameters with a record every 100 steps costs under 5 %."""
    width, depth = device.size(3162, 32), device.size(10, 2)
    with tf.device(device.name):
        rows = device.size(256, 8)
        x, y = tf.random.normal((rows, width)), tf.zeros(rows, "int32")
        ways, counts = {}, {}
        for name, every in (("without", None), ("with", 100), ("each step", 1)):
            step, model = monitored_step(device.low, width, depth, every)
            ways[name] = lambda step=step: step(x, y)
            counts[name] = model.count_params()
        seconds = interleaved_seconds(ways, rounds=device.size(7, 2), calls=device.size(100, 2))
    check("parameters", counts["with"] / 1e6, unit="million")
    check("time, to that without", ratio(seconds, "with", "without"), at_most=1.05, timing=True)
    check("with a record at each step", ratio(seconds, "each step", "without"))


def monitored_step(dtype, width, depth, every):
    with tfamp.policy_scope(f"mixed_{dtype}"):
        model = models.mlp(width, depth, width)
    optimizer = tfamp.LossScaleOptimizer(keras.optimizers.SGD(1e-4))
    optimizer.build(model.trainable_variables)
    if every is None:
        step = models.step_of(model, optimizer.get_scaled_loss, optimizer.apply)
    else:
        step = models.monitored_step(model, optimizer, every)
    return tf.function(step, autograph=False), model
