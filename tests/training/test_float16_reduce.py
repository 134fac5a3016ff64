"""`aggregate_in_float16`: what is sent between replicas, and that the result is right."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp
from helpers.cases import first_of, tiers
from helpers.collectives import bytes_sent
from helpers.replicas import halves, per_replica
from helpers.tolerances import assert_all_close, assert_close
from helpers.training import data, small_model, train_step


def momentum():
    return keras.optimizers.SGD(0.05, momentum=0.9)


def make(strategy, inner=momentum, **arguments):
    arguments = {"initial_scale": 2.0**10, "aggregate_in_float16": True, **arguments}
    with strategy.scope():
        model = small_model()
        optimizer = tfamp.LossScaleOptimizer(inner(), **arguments)
        optimizer.build(model.trainable_variables)
    return model, optimizer


def spread(strategy, step, traced=True):
    def run(x, y):
        strategy.run(step, args=(x, y))

    run = tf.function(run) if traced else run
    return lambda x, y: run(halves(strategy, x), halves(strategy, y))


def traced_bytes(strategy, model, optimizer, unscale):
    step = train_step(model, optimizer, unscale=unscale)
    run = tf.function(lambda x, y: strategy.run(step, args=(x, y)))
    return bytes_sent(run.get_concrete_function(tf.zeros((8, 4)), tf.zeros((8, 1))))


PARAMETERS = 4 * 8 + 8 + 8 + 1
FLAG = 4  # The replicas agree whether all is finite.


@pytest.mark.parametrize(
    ("unscale", "arguments"), first_of([(True, {}), (False, {"grad_clip": 1.0})])
)
def test_half_the_bytes_are_sent(two_replicas, unscale, arguments):
    for aggregate, sent in (
        (False, {"float32": 4 * PARAMETERS + FLAG}),
        (True, {"float16": 2 * PARAMETERS, "float32": FLAG}),
    ):
        made = make(two_replicas, aggregate_in_float16=aggregate, **arguments)
        assert traced_bytes(two_replicas, *made, unscale=unscale) == sent


def multi():
    by_path = keras.optimizers.OptimizerMap(momentum())
    by_path[".*bias"] = keras.optimizers.Adam(0.01)
    return keras.optimizers.MultiOptimizer(by_path)


INNER = {
    "SGD": momentum,
    "AdamW": lambda: keras.optimizers.AdamW(0.01, weight_decay=0.1),
    "clipping": lambda: keras.optimizers.SGD(0.05, clipnorm=0.5),
    "average": lambda: keras.optimizers.SGD(0.05, use_ema=True),
    "several": multi,
}


@pytest.mark.parametrize(
    ("inner", "unscale", "traced"),
    tiers([("SGD", True, False)], [(name, False, True) for name in INNER]),
)
def test_updates_are_those_of_the_summed_gradients(two_replicas, inner, unscale, traced):
    x, y = data(2)
    model, optimizer = make(two_replicas, INNER[inner])
    step = spread(two_replicas, train_step(model, optimizer, unscale=unscale), traced)
    reference, bare = small_model(), INNER[inner]()
    for _ in range(3):
        step(x, y)
        with tf.GradientTape() as tape:
            loss = 2 * tf.reduce_mean(tf.square(reference(x) - y))  # The sum of both replicas'.
        variables = reference.trainable_variables
        grads = tape.gradient(loss, [v.value for v in variables])
        bare.apply_gradients(zip(grads, variables, strict=True))
    assert_all_close(model.variables, reference.variables, "float16", depth=16)
    assert int(optimizer.iterations) == 3


def apply_constants(strategy, gradients, aggregate_in_float16=True, **arguments):
    """Applies one given gradient per replica to a weight of zero; returns it."""
    arguments = {"initial_scale": 2.0**10, **arguments}
    with strategy.scope():
        weight = keras.Variable(np.zeros(np.shape(gradients[0]), "float32"), aggregation="mean")
        optimizer = tfamp.LossScaleOptimizer(
            keras.optimizers.SGD(1.0), aggregate_in_float16=aggregate_in_float16, **arguments
        )
        optimizer.build([weight])

    def step(gradient):
        optimizer.apply_gradients([(optimizer.get_scaled_loss(gradient), weight)])

    run = tf.function(lambda g: strategy.run(step, args=(g,)))
    run(per_replica(strategy, *gradients))
    return weight.numpy(), optimizer


def test_gradients_are_sent_at_the_scale(two_replicas):
    # At a scale of 2**10: 24 is 24576; 2**-34 is 2**-24, float16's smallest number.
    first = np.float32([24.0, 2.0**-34, 2.0**-36, 1.0, 0.1])
    second = np.float32([24.0, 2.0**-34, 2.0**-36, -1.0, 0.3])
    weight, optimizer = apply_constants(two_replicas, (first, second))
    assert_close(-weight, [48.0, 2.0**-33, 0.0, 0.0, 0.4], "float16")
    assert int(optimizer.skipped_steps) == 0


@pytest.mark.parametrize("gradients", [(48.0, 48.0), (0.0, np.nan)])
def test_what_overflows_float16_is_skipped(two_replicas, gradients):
    # The sum of twice 48 * 2**10 is more than 65504, neither of both is.
    weight, optimizer = apply_constants(two_replicas, gradients)
    assert weight == 0.0
    assert int(optimizer.skipped_steps) == 1
    assert float(optimizer.loss_scale) == 2.0**9


@pytest.mark.parametrize("aggregate", [True, False])
def test_clipping_is_of_the_sum(two_replicas, aggregate):
    weight, optimizer = apply_constants(
        two_replicas, ([3.0, 1.0], [0.0, 3.0]), aggregate, grad_clip=1.0
    )
    dtype = "float16" if aggregate else "float32"
    assert_close(weight, [-0.6, -0.8], dtype)
    assert_close(optimizer.last_gradient_norm, 5.0, dtype)


def test_wide_and_sparse_gradients(two_replicas, monkeypatch):
    sent = {}
    original = tf.distribute.ReplicaContext.all_reduce

    def noted(context, reduce_op, value, *args, **kwargs):
        for each in tf.nest.flatten(value, expand_composites=True):
            sent.setdefault(tuple(each.shape), set()).add(each.dtype.name)
        return original(context, reduce_op, value, *args, **kwargs)

    monkeypatch.setattr(tf.distribute.ReplicaContext, "all_reduce", noted)
    with two_replicas.scope():
        table = keras.Variable(np.zeros((4, 2), "float32"), aggregation="mean")
        wide = keras.Variable(np.zeros(1), dtype="float64", aggregation="mean")
        unused = keras.Variable(np.zeros(1, "float32"), aggregation="mean")
        optimizer = tfamp.LossScaleOptimizer(
            keras.optimizers.SGD(1.0), aggregate_in_float16=True, initial_scale=4.0
        )
        optimizer.build([table, wide, unused])

    def step():
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        values = tf.fill([2, 2], tf.cast(replica + 1, tf.float32)) * optimizer.get_scale()
        slices = tf.IndexedSlices(values, tf.stack([1, 2 + replica]), tf.constant([4, 2]))
        exact = tf.constant([1 + 2.0**-40], tf.float64) * 4
        pairs = [(slices, table), (exact, wide), (None, unused)]
        optimizer.apply_gradients(pairs, unscaled=False)

    run = tf.function(lambda: two_replicas.run(step))
    run()
    np.testing.assert_array_equal(table.numpy()[:, 0], [0.0, -3.0, -1.0, -2.0])
    np.testing.assert_array_equal(wide.numpy(), [-2 - 2.0**-39])
    values_of_rows, wide_values, indices, flag = (2, 2), (1,), (2,), ()
    assert sent.pop(values_of_rows) == {"float16"}
    assert sent.pop(wide_values) == {"float64"}
    assert sent.pop(flag) == {"float32"}
    assert sent == {indices: {"int32"}}
