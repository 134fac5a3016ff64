"""MirroredStrategy over all GPUs; with --on-cpu over two logical CPUs."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp
from helpers import acceptance_models as models
from helpers import replica_program

pytestmark = pytest.mark.gpu
WAYS = ("policy", "float16_reduce", "masters", "bfloat16_masters", "autocast", "scaler")
WAYS += ("rewrite", "rewrite_all", "level")
# Keras's "auto" is off under a strategy.
JIT = pytest.mark.parametrize("jit", [True, False], ids=["jit on", "jit off"])


def needs_jit(device, jit):
    if jit:
        device.needs_gpu("XLA cannot compile sums over CPUs; tests/integration simulates it")


@pytest.mark.parametrize(
    ("way", "jit"), [*((way, False) for way in WAYS), ("policy", True), ("scaler", True)]
)
def test_faults(device, check, strategy, way, jit):
    """Faults of random replicas: 500 steps with all replicas equal bit for bit."""
    needs_jit(device, jit)
    low = "bfloat16" if way == "bfloat16_masters" else "float16"
    device.needs(low)
    steps = device.size(500, 6)
    # Compares the replicas after each step, and counts steps and good batches.
    found = replica_program.train(strategy, way, steps, jit_compile=jit)
    check("replicas", found["replicas"], equals=device.count)
    check("steps after which all were equal", len(found["digests"]), equals=steps)
    check("steps taken, of those without a fault", found["applied"] / found["good"], equals=1.0)
    check("steps skipped", found["skipped"], at_least=1)
    check(f"products in {low}", low in found["products"], equals=True)


@JIT
def test_fit(device, check, strategy, jit):
    """fit: an epoch of good batches trains; faults of the last replica change nothing."""
    needs_jit(device, jit)
    batch = 4 * device.count
    x = np.random.default_rng(0).standard_normal((4 * batch, 6)).astype("float32")
    y = x.sum(-1, keepdims=True)
    with strategy.scope(), tfamp.policy_scope("mixed_float16"):
        model = replica_program.make_model()
        optimizer = tfamp.LossScaleOptimizer(keras.optimizers.Adam(0.01), initial_scale=2.0**10)
        model.compile(optimizer, "mse", jit_compile=jit)
    options = {"batch_size": batch, "shuffle": False, "verbose": 0}
    start = model.get_weights()
    model.fit(x, y, **options)
    before = model.get_weights()
    x[batch - 1 :: batch] = np.inf
    model.fit(x, y, **options)
    after = model.get_weights()

    def changed(a, b):
        return not all(np.array_equal(p, q) for p, q in zip(a, b, strict=True))

    check("four good steps change the weights", changed(start, before), equals=True)
    check("four bad steps change the weights", changed(before, after), equals=False)
    check("the scale after them", float(optimizer.loss_scale), equals=2.0**6)


def reduced_bytes(graph):
    """Returns the bytes of the float tensors of all-reduces, in called functions too."""
    total = 0
    for each in (graph, *(f.graph for f in graph._functions.values() if f.graph is not None)):
        for op in each.get_operations():
            tensor = op.inputs[0] if op.inputs else None
            sums = op.type.startswith("CollectiveReduce") or op.type == "NcclAllReduce"
            if sums and tensor.dtype.is_floating and tensor.shape.num_elements() > 1:
                total += tensor.shape.num_elements() * tensor.dtype.size
    return total


def test_float16_sums(device, check, strategy):
    """With aggregate_in_float16 the replicas send half the bytes."""
    found = {}
    for half in (False, True):
        with strategy.scope(), tfamp.policy_scope("mixed_float16"):
            model = models.mlp(device.size(1024, 16))
            sgd = keras.optimizers.SGD(0.1)
            optimizer = tfamp.LossScaleOptimizer(sgd, aggregate_in_float16=half)
            optimizer.build(model.trainable_variables)
        step = models.plain_step(model, optimizer)
        run = tf.function(lambda x, y, step=step: strategy.run(step, args=(x, y)), autograph=False)
        traced = run.get_concrete_function(tf.zeros((8, 64)), tf.zeros(8, "int32"))
        found[half] = reduced_bytes(traced.graph)
    check("bytes in float32", found[False], at_least=1)
    check("bytes in float16, to that", found[True] / max(found[False], 1), equals=0.5)
