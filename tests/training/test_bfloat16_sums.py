"""`aggregate_in="bfloat16"`: what is sent between replicas, and that sums are those of float32."""

import json
import os
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp
from helpers import sums_program
from helpers.cases import tiers
from helpers.collectives import bytes_sent
from helpers.replicas import halves, per_replica
from helpers.tolerances import assert_all_close
from helpers.training import data, small_model, train_step

TESTS = Path(__file__).resolve().parents[1]


def assert_sums(actual, rows):
    """Each gradient is rounded once, and the sum once: by 2**-8 at most."""
    rows = rows.astype("float64")
    allowed = 2.0**-8 * (np.abs(rows).sum(0) + np.abs(rows.sum(0))) * 1.01
    assert (np.abs(actual - rows.sum(0)) <= allowed).all()
    assert (actual != rows.sum(0).astype("float32")).any(), "nothing was sent in bfloat16"


@pytest.mark.parametrize("traced", [True, False])
def test_sums_of_two_replicas(two_replicas, traced):
    actual = sums_program.sums(two_replicas, "bfloat16", traced=traced)
    assert_sums(actual, sums_program.gradients(2))


@pytest.mark.slow
def test_sums_of_eight_replicas_are_rounded_no_more_often():
    paths = [str(TESTS), str(Path(tfamp.__file__).parents[1])]
    done = subprocess.run(
        [sys.executable, str(TESTS / "helpers" / "sums_program.py"), "8"],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert "RESULT" in done.stdout, done.stderr[-3000:]
    sums = json.loads(done.stdout.partition("RESULT")[2])["bfloat16"]
    assert_sums(np.array(sums), sums_program.gradients(8))


def make(strategy, inner=lambda: keras.optimizers.SGD(0.05, momentum=0.9), **arguments):
    with strategy.scope():
        model = small_model()
        optimizer = tfamp.LossScaleOptimizer(inner(), aggregate_in="bfloat16", **arguments)
        optimizer.build(model.trainable_variables)
    return model, optimizer


@pytest.mark.parametrize(
    ("arguments", "unscale"), tiers([({}, False)], [({"grad_clip": 100.0}, True)])
)
def test_training_goes_as_with_float32_sums(two_replicas, arguments, unscale):
    x, y = data(2)
    model, optimizer = make(two_replicas, initial_scale=2.0**10, **arguments)
    reference, bare = small_model(), keras.optimizers.SGD(0.05, momentum=0.9)
    step = train_step(model, optimizer, unscale=unscale)
    run = tf.function(lambda *args: two_replicas.run(step, args=args))
    for _ in range(3):
        run(halves(two_replicas, x), halves(two_replicas, y))
        with tf.GradientTape() as tape:
            loss = 2 * tf.reduce_mean(tf.square(reference(x) - y))  # The sum of both replicas'.
        variables = reference.trainable_variables
        grads = tape.gradient(loss, [v.value for v in variables])
        bare.apply_gradients(zip(grads, variables, strict=True))
    assert_all_close(model.variables, reference.variables, "bfloat16", depth=16)
    assert int(optimizer.iterations) == 3


def bytes_between_devices(graph):
    """Bytes that one of two devices sends to the other, by dtype."""
    found = {}
    for op in graph.get_operations():
        for tensor in op.inputs:
            if tensor.op.device.endswith("CPU:0") and op.device.endswith("CPU:1"):
                size = tensor.shape.num_elements() * tensor.dtype.size
                found[tensor.dtype.name] = found.get(tensor.dtype.name, 0) + size
    return found


def test_half_the_bytes_are_sent(two_replicas):
    model, optimizer = make(two_replicas)
    step = train_step(model, optimizer, unscale=True)
    run = tf.function(lambda x, y: two_replicas.run(step, args=(x, y)))
    concrete = run.get_concrete_function(tf.zeros((8, 4)), tf.zeros((8, 1)))
    parameters = 4 * 8 + 8 + 8 + 1
    # A half of the gradients, and the sum of the other half: an all-reduce in float32 sends 4 bytes
    # a parameter. Padding makes halves of an odd number equal.
    assert bytes_between_devices(concrete.graph)["bfloat16"] == 2 * (parameters + 1)
    assert bytes_sent(concrete) == {"float32": 4}, "whether all is finite"


@pytest.mark.parametrize("gradients", [(0.0, np.nan), (np.inf, 1.0), (3e38, 3e38)])
def test_what_is_not_finite_or_overflows_is_skipped(two_replicas, gradients):
    with two_replicas.scope():
        weight = keras.Variable(0.0, aggregation="mean")
        optimizer = tfamp.LossScaleOptimizer(
            keras.optimizers.SGD(1.0), initial_scale=4.0, aggregate_in="bfloat16"
        )
        optimizer.build([weight])

    def step(gradient):
        optimizer.apply_gradients([(gradient, weight)], unscaled=True)

    run = tf.function(lambda g: two_replicas.run(step, args=(g,)))
    run(per_replica(two_replicas, *np.float32(gradients)))
    assert weight.numpy() == 0.0
    assert int(optimizer.skipped_steps) == 1
    assert float(optimizer.loss_scale) == 2.0


def test_wide_sparse_missing_and_16_bit_gradients(two_replicas):
    with two_replicas.scope():
        table = keras.Variable(np.zeros((4, 2), "float32"), aggregation="mean")
        wide = keras.Variable(np.zeros(1), dtype="float64", aggregation="mean")
        low = keras.Variable(np.zeros(3, "float32"), aggregation="mean")
        unused = keras.Variable(np.zeros(1, "float32"), aggregation="mean")
        optimizer = tfamp.LossScaleOptimizer(
            keras.optimizers.SGD(1.0), aggregate_in="bfloat16", initial_scale=4.0
        )
        optimizer.build([table, wide, low, unused])

    def step():
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        values = tf.fill([2, 2], tf.cast(replica + 1, tf.float32)) * optimizer.get_scale()
        slices = tf.IndexedSlices(values, tf.stack([1, 2 + replica]), tf.constant([4, 2]))
        exact = tf.constant([1 + 2.0**-40], tf.float64) * 4
        halved = tf.constant([1.0, 2.0, 2.0**-24], tf.float16)
        pairs = [(slices, table), (exact, wide), (halved, low), (None, unused)]
        optimizer.apply_gradients(pairs, unscaled=False)

    run = tf.function(lambda: two_replicas.run(step))
    run()
    np.testing.assert_array_equal(table.numpy()[:, 0], [0.0, -3.0, -1.0, -2.0])
    np.testing.assert_array_equal(wide.numpy(), [-2 - 2.0**-39])
    np.testing.assert_array_equal(low.numpy(), [-0.5, -1.0, -(2.0**-25)])


def test_the_older_argument_means_float16_and_both_are_saved():
    def make(**arguments):
        return tfamp.LossScaleOptimizer(keras.optimizers.SGD(), **arguments)

    for arguments, expected in (
        ({}, None),
        ({"aggregate_in_float16": True}, "float16"),
        ({"aggregate_in_float16": True, "aggregate_in": "float16"}, "float16"),
        ({"aggregate_in": "bfloat16"}, "bfloat16"),
    ):
        made = make(**arguments)
        again = tfamp.LossScaleOptimizer.from_config(made.get_config())
        assert made.aggregate_in == again.aggregate_in == expected
        assert made.aggregate_in_float16 is (expected == "float16")
    old = {**make().get_config(), "aggregate_in_float16": True}
    del old["aggregate_in"]
    assert tfamp.LossScaleOptimizer.from_config(old).aggregate_in == "float16"
    with pytest.raises(ValueError, match=r"aggregate_in must be 'float16', 'bfloat16' or None.*8"):
        make(aggregate_in="float8")
    with pytest.raises(ValueError, match="contradict each other"):
        make(aggregate_in="bfloat16", aggregate_in_float16=True)
    accumulating = keras.optimizers.SGD(gradient_accumulation_steps=2)
    with pytest.raises(ValueError, match=r"every micro-batch.*GradientAccumulator"):
        tfamp.LossScaleOptimizer(accumulating, aggregate_in="bfloat16")
