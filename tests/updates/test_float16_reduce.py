"""`aggregate_in_float16`: what is sent between replicas, and that the result is right."""

import json
import os
import socket
import subprocess
import sys
import textwrap

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp
from helpers.collectives import bytes_sent
from helpers.replicas import halves
from helpers.tolerances import assert_close
from helpers.training import assert_identical, data, small_model, snapshot, train_step


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


def traced_bytes(strategy, model, optimizer, unscale=False, branches=True):
    step = train_step(model, optimizer, unscale=unscale)
    run = tf.function(lambda x, y: strategy.run(step, args=(x, y)))
    concrete = run.get_concrete_function(tf.zeros((8, 4)), tf.zeros((8, 1)))
    return bytes_sent(concrete, branches=branches)


PARAMETERS = 4 * 8 + 8 + 8 + 1
FLAG = 4  # The replicas agree whether all is finite.


@pytest.mark.parametrize("unscale", [True, False], ids=["explicit", "fit_way"])
def test_half_the_bytes_are_sent(two_replicas, unscale):
    plain = traced_bytes(
        two_replicas, *make(two_replicas, aggregate_in_float16=False), unscale=unscale
    )
    assert plain == {"float32": 4 * PARAMETERS + FLAG}
    halved = traced_bytes(two_replicas, *make(two_replicas), unscale=unscale)
    assert halved == {"float16": 2 * PARAMETERS, "float32": FLAG}


@pytest.mark.slow
def test_clipping_sends_no_more(two_replicas):
    clipping = make(two_replicas, aggregate_in_float16=False, grad_clip=1.0)
    assert traced_bytes(two_replicas, *clipping) == {"float32": 4 * PARAMETERS + FLAG}
    both = make(two_replicas, grad_clip=1.0)
    assert traced_bytes(two_replicas, *both) == {"float16": 2 * PARAMETERS, "float32": FLAG}


INNER = {
    "SGD": momentum,
    "AdamW": lambda: keras.optimizers.AdamW(0.01, weight_decay=0.1),
    "clipping": lambda: keras.optimizers.SGD(0.05, clipnorm=0.5),
    "average": lambda: keras.optimizers.SGD(0.05, use_ema=True),
}


@pytest.mark.parametrize(
    ("inner", "unscale", "traced"),
    [
        ("SGD", True, False),
        *(pytest.param(name, False, True, marks=pytest.mark.slow) for name in INNER),
    ],
)
def test_updates_are_those_of_the_summed_gradients(two_replicas, inner, unscale, traced):
    x, y = data(2)
    model, optimizer = make(two_replicas, INNER[inner])
    step = spread(two_replicas, train_step(model, optimizer, unscale=unscale), traced)
    reference, bare = small_model(), INNER[inner]()
    for _ in range(3):
        step(x, y)
        with tf.GradientTape() as tape:
            losses = [
                tf.reduce_mean(tf.square(reference(part) - target))
                for part, target in zip(np.split(x, 2), np.split(y, 2), strict=True)
            ]
            loss = sum(losses)
        variables = reference.trainable_variables
        grads = tape.gradient(loss, [v.value for v in variables])
        bare.apply_gradients(zip(grads, variables, strict=True))
    for actual, expected in zip(model.variables, reference.variables, strict=True):
        assert_close(actual.numpy(), expected.numpy(), "float16", depth=16)
    assert int(optimizer.iterations) == 3


@pytest.mark.parametrize("traced", [True, False], ids=["function", "eager"])
@pytest.mark.parametrize("bad_row", [0, 15], ids=["replica0", "replica1"])
def test_inf_on_any_one_replica_skips_all(two_replicas, bad_row, traced):
    model, optimizer = make(two_replicas)
    step = spread(two_replicas, train_step(model, optimizer, unscale=False), traced)
    x, y = data(2)
    step(x, y)
    before = snapshot(model, optimizer.inner_optimizer)
    x[bad_row] = np.inf
    step(x, y)
    assert_identical(snapshot(model, optimizer.inner_optimizer), before)
    assert [float(v) for v in optimizer.dynamic_scale.value.values] == [2.0**9, 2.0**9]
    assert int(optimizer.skipped_steps) == 1


def apply_constants(strategy, gradients, **arguments):
    """Applies one given gradient per replica to a weight of zero; returns it."""
    with strategy.scope():
        weight = keras.Variable(np.zeros(1, "float32"), aggregation="mean")
        optimizer = tfamp.LossScaleOptimizer(
            keras.optimizers.SGD(1.0), aggregate_in_float16=True, **arguments
        )
        optimizer.build([weight])
    given = strategy.experimental_distribute_values_from_function(
        lambda context: tf.fill([1], np.float32(gradients[context.replica_id_in_sync_group]))
    )

    def step(gradient):
        optimizer.apply_gradients([(optimizer.get_scaled_loss(gradient), weight)])

    run = tf.function(lambda g: strategy.run(step, args=(g,)))
    run(given)
    return weight.numpy()[0], optimizer


# At a scale of 2**10: 2**-34 is 2**-24 there, float16's smallest number; 24 is 24576.
@pytest.mark.parametrize(
    ("gradients", "total"),
    [
        ((24.0, 24.0), 48.0),
        ((2.0**-34, 2.0**-34), 2.0**-33),
        ((2.0**-36, 2.0**-36), 0.0),  # What float16 cannot hold at this scale.
        ((1.0, -1.0), 0.0),
        ((0.1, 0.3), 0.4),
    ],
)
def test_gradients_are_sent_at_the_scale(two_replicas, gradients, total):
    weight, optimizer = apply_constants(two_replicas, gradients, initial_scale=2.0**10)
    assert_close(-weight, total, "float16")
    assert int(optimizer.skipped_steps) == 0


@pytest.mark.parametrize("gradients", [(100.0, 0.0), (48.0, 48.0), (-100.0, 0.0)])
def test_what_overflows_float16_is_skipped(two_replicas, gradients):
    # 100 * 2**10 is more than 65504; so is the sum of twice 48 * 2**10, each of which is not.
    weight, optimizer = apply_constants(two_replicas, gradients, initial_scale=2.0**10)
    assert weight == 0.0
    assert int(optimizer.skipped_steps) == 1
    assert float(optimizer.loss_scale) == 2.0**9


def test_clipping_is_of_the_sum(two_replicas):
    weight, optimizer = apply_constants(
        two_replicas, (3.0, 5.0), initial_scale=2.0**10, grad_clip=2.0
    )
    assert_close(-weight, 2.0, "float16")
    assert_close(optimizer.last_gradient_norm, 8.0, "float16")


def test_clipping_of_the_sum_without_float16(two_replicas):
    with two_replicas.scope():
        weight = keras.Variable(np.zeros(2, "float32"), aggregation="mean")
        optimizer = tfamp.LossScaleOptimizer(keras.optimizers.SGD(1.0), grad_clip=1.0)
        optimizer.build([weight])
    given = two_replicas.experimental_distribute_values_from_function(
        lambda context: tf.constant([[3.0, 1.0], [0.0, 3.0]][context.replica_id_in_sync_group])
    )
    run = tf.function(
        lambda g: two_replicas.run(
            lambda g: optimizer.apply_gradients([(optimizer.get_scaled_loss(g), weight)]),
            args=(g,),
        )
    )
    run(given)
    assert_close(weight.numpy(), [-0.6, -0.8], "float32")
    assert_close(optimizer.last_gradient_norm, 5.0, "float32")


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


@pytest.mark.slow
def test_multi_optimizer(two_replicas):
    x, y = data(2)
    results = []

    def multi():
        by_path = keras.optimizers.OptimizerMap(keras.optimizers.SGD(0.05))
        by_path[".*bias"] = keras.optimizers.Adam(0.01)
        return keras.optimizers.MultiOptimizer(by_path)

    for aggregate in (True, False):
        model, optimizer = make(two_replicas, multi, aggregate_in_float16=aggregate)
        step = spread(two_replicas, train_step(model, optimizer, unscale=False))
        step(x, y)
        step(x, y)
        results.append(snapshot(model))
    for actual, expected in zip(*(result.values() for result in results), strict=True):
        assert_close(actual, expected, "float16", depth=16)


def test_an_optimizer_that_sums_elsewhere_is_refused(two_replicas):
    class Own(keras.optimizers.SGD):
        def _backend_update_step(self, grads, variables, learning_rate):
            return None

    model, optimizer = make(two_replicas, lambda: Own(0.1))
    step = spread(two_replicas, train_step(model, optimizer, unscale=False))
    with pytest.raises(tfamp.UnsupportedVersionError, match="_all_reduce_sum_gradients"):
        step(*data(2))


@pytest.mark.slow
def test_fit(two_replicas):
    x, y = data()
    with two_replicas.scope():
        model = small_model()
        model.compile(
            tfamp.LossScaleOptimizer(
                keras.optimizers.Adam(0.01), initial_scale=2.0**10, aggregate_in_float16=True
            ),
            "mse",
            jit_compile=False,
        )
    fit = {"batch_size": 8, "shuffle": False, "verbose": 0}
    model.fit(x, y, **fit)
    assert int(model.optimizer.iterations) == 4
    before = snapshot(model, model.optimizer.inner_optimizer)
    x[7::8] = np.inf  # The last row of every batch: the second replica's.
    model.fit(x, y, **fit)
    assert_identical(snapshot(model, model.optimizer.inner_optimizer), before)
    assert float(model.optimizer.loss_scale) == 2.0**6


def test_one_replica_takes_the_plain_path():
    x, y = data(1)
    results = []
    for aggregate in (True, False):
        model = small_model()
        optimizer = tfamp.LossScaleOptimizer(
            keras.optimizers.SGD(0.05), aggregate_in_float16=aggregate
        )
        tf.function(train_step(model, optimizer))(x, y)
        results.append(model.get_weights())
    for actual, expected in zip(*results, strict=True):
        np.testing.assert_array_equal(actual, expected)


def test_config_round_trip_and_wrong_values():
    optimizer = tfamp.LossScaleOptimizer(keras.optimizers.SGD(), aggregate_in_float16=True)
    assert tfamp.LossScaleOptimizer.from_config(optimizer.get_config()).aggregate_in_float16
    with pytest.raises(TypeError, match="aggregate_in_float16 must be True or False; got 16"):
        tfamp.LossScaleOptimizer(keras.optimizers.SGD(), aggregate_in_float16=16)
    accumulating = keras.optimizers.SGD(gradient_accumulation_steps=2)
    with pytest.raises(ValueError, match="GradientAccumulator"):
        tfamp.LossScaleOptimizer(accumulating, aggregate_in_float16=True)


def free_ports(count):
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


WORKER = textwrap.dedent(
    """
    import json, sys
    import keras, numpy as np, tensorflow as tf

    # Before anything else: it starts the servers the workers talk through.
    strategy = tf.distribute.MultiWorkerMirroredStrategy()

    import tfamp
    from helpers.collectives import bytes_sent
    from helpers.training import data, small_model, snapshot, train_step

    with strategy.scope():
        model = small_model()
        optimizer = tfamp.LossScaleOptimizer(
            keras.optimizers.SGD(0.05, momentum=0.9),
            initial_scale=2.0**10, aggregate_in_float16=True, grad_clip=1e6,
        )
        optimizer.build(model.trainable_variables)
    step = train_step(model, optimizer, unscale=False)
    run = tf.function(lambda x, y: strategy.run(step, args=(x, y)))
    rank = strategy.cluster_resolver.task_id
    x, y = (np.split(value, 2)[rank] for value in data(2))
    for number in range(4):
        bad = number == 2 and rank == 1
        run(tf.constant(np.full_like(x, np.inf) if bad else x), tf.constant(y))
    concrete = run.get_concrete_function(tf.TensorSpec(x.shape), tf.TensorSpec(y.shape))
    print("RESULT", json.dumps({
        "weights": [value.tolist() for value in snapshot(model).values()],
        "scale": float(optimizer.loss_scale),
        "steps": [int(optimizer.iterations), int(optimizer.skipped_steps)],
        "sent": bytes_sent(concrete),
    }))
    """
)


@pytest.mark.nightly  # CI has them in tests/integration/test_distribution.py, without the bytes.
def test_two_workers(two_replicas):
    """Two processes: the same numbers as two replicas in one, and the same bytes."""
    workers = [f"127.0.0.1:{port}" for port in free_ports(2)]
    paths = [
        os.path.dirname(os.path.dirname(__file__)),
        os.path.dirname(os.path.dirname(tfamp.__file__)),
    ]
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER],
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(paths),
                "TF_CONFIG": json.dumps(
                    {"cluster": {"worker": workers}, "task": {"type": "worker", "index": rank}}
                ),
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    try:
        outputs = [process.communicate(timeout=300) for process in processes]
    finally:
        for process in processes:
            process.kill()
    results = []
    for out, err in outputs:
        lines = [line for line in out.splitlines() if line.startswith("RESULT")]
        assert lines, err[-2000:]
        results.append(json.loads(lines[0].removeprefix("RESULT")))
    assert results[0] == results[1], "bit-identical workers"
    assert results[0]["scale"] == 2.0**9
    assert results[0]["steps"] == [3, 1]
    assert results[0]["sent"] == {"float16": 2 * PARAMETERS, "float32": FLAG}

    model, optimizer = make(two_replicas)
    step = spread(two_replicas, train_step(model, optimizer, unscale=False))
    x, y = data(2)
    for number in range(4):
        step(np.concatenate([x[:8], np.full_like(x[8:], np.inf)]) if number == 2 else x, y)
    for actual, expected in zip(results[0]["weights"], snapshot(model).values(), strict=True):
        assert_close(actual, expected, "float16", depth=16)
