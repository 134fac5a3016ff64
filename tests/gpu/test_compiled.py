"""Steps that XLA compiles, as a whole or in groups of ops, against the same steps without XLA."""

import keras
import pytest
import tensorflow as tf

import tfamp
from helpers import acceptance_models as models
from helpers.acceptance import relative_difference
from helpers.cases import first_of

pytestmark = pytest.mark.gpu


def wrapped(**options):
    return tfamp.LossScaleOptimizer(sgd(), initial_scale=2.0**10, **options)


def sgd():
    # Small enough to keep differences of float16 rounding below the limit, and large enough for a
    # gradient left scaled, unclipped or out to exceed it.
    return keras.optimizers.SGD(2e-4, momentum=0.9)


def make_model(policy="mixed_float16", dtype=None):
    keras.utils.set_random_seed(5)
    with tfamp.policy_scope(policy):
        layers = [keras.layers.Dense(32, "relu", dtype=dtype), keras.layers.Dense(10, dtype=dtype)]
        return keras.Sequential([keras.Input((64,)), *layers])


def of_optimizer(**options):
    model, optimizer = make_model(), wrapped(**options)
    optimizer.build(model.trainable_variables)
    return models.plain_step(model, optimizer), model.trainable_variables


def policy():
    return of_optimizer()


def clipping():
    return of_optimizer(grad_clip=1.0)


def master_weights():
    model, optimizer = make_model("float32", "float16"), wrapped(master_weights=True)
    optimizer.build(model.trainable_variables)
    # The weights themselves are rounded to float16.
    return models.plain_step(model, optimizer), optimizer.master_variables


def accumulator():
    model, optimizer = make_model(), wrapped()
    optimizer.build(model.trainable_variables)
    accumulated = tfamp.GradientAccumulator(optimizer, steps=2)

    def apply(gradients, variables):
        accumulated.apply_gradients(zip(gradients, variables, strict=True))

    return models.step_of(model, optimizer.get_scaled_loss, apply), model.trainable_variables


def scaler():
    model, optimizer = make_model("float32"), sgd()
    optimizer.build(model.trainable_variables)
    step = models.scaler_step(model, optimizer, tfamp.GradScaler(init_scale=2.0**10))
    return step, model.trainable_variables


def monitor():
    model, optimizer = make_model(), wrapped()
    optimizer.build(model.trainable_variables)
    return models.monitored_step(model, optimizer, 1), model.trainable_variables


def rewritten():
    model, optimizer = make_model("float32"), wrapped()
    optimizer.build(model.trainable_variables)
    step = tfamp.rewrite(models.plain_step(model, optimizer), dtype="float16", placement="lists")
    return step, model.trainable_variables


FEATURES = (policy, clipping, master_weights, accumulator, scaler, monitor, rewritten)


@pytest.mark.parametrize("feature", first_of(FEATURES, pytest.mark.long))
def test_compiled(device, check, feature):
    """The step compiles under XLA and computes the same."""
    found = {}
    with tf.device(device.name):
        x, y = models.digits(32)
        x, y = tf.reshape(tf.constant(x), (32, 64)), tf.constant(y)
        for jit in (False, True):
            step, variables = feature()
            before = [tf.identity(each.value) for each in variables]
            step = tf.function(step, jit_compile=jit, autograph=False)
            for _ in range(4):
                step(x, y)
            found[jit] = [tf.identity(each.value) for each in variables]
    starts_at_zero = [not tf.reduce_any(tf.cast(each, tf.bool)) for each in before]
    pairs = list(zip(found[True], found[False], starts_at_zero, strict=True))
    # All of a bias is updates, which another order of float16 sums changes by up to its eps.
    for name, is_bias, limit in (("weights", False, 1e-5), ("biases", True, 1e-3)):
        of_kind = [pair[:2] for pair in pairs if bool(pair[2]) is is_bias]
        difference = relative_difference(*zip(*of_kind, strict=True))
        check(f"relative difference of the {name}", difference, at_most=limit)
    moved = relative_difference(found[False], before)
    check("relative change of the weights in 4 steps", moved, at_least=1e-4)


def test_partial_batch(device, check):
    """A step with placement="fused" takes a last batch of fewer rows."""
    found = {}
    with tf.device(device.name):
        x, y = models.digits(52)
        x, y = tf.constant(models.words(x)), tf.constant(y)
        for placement in ("lists", "fused"):
            training = models.train(
                lambda: models.encoder(1, 64, 4, tokens=64, vocabulary=16),
                *("rewrite", device.low),
                placement=placement,
                force_low=["MatMul"],
            )
            rows = (slice(0, 32), slice(32, 52), slice(0, 32))
            found[placement] = [training.step(x[each], y[each]) for each in rows]
            library = training.step.concrete(x[:32], y[:32]).graph.as_graph_def().library
            groups = sum(each.attr["_XlaMustCompile"].b for each in library.function)
    check("groups that XLA compiles", groups, at_least=1)
    check("relative difference of the losses", relative_difference(*found.values()), at_most=0.02)
