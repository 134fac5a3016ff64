"""Training steps on a GPU, judged by the kernels that TensorFlow registers for GPUs."""

import contextlib

import keras
import pytest
import tensorflow as tf

import tfamp
from helpers.cases import tiers
from helpers.gpu_kernels import placement
from helpers.training import data, small_model
from tfamp.diagnostics import NumericsMonitor


def sgd():
    return keras.optimizers.SGD(0.01, momentum=0.9)


def adamw():
    return keras.optimizers.AdamW(0.01)


def model_of(policy):
    with tfamp.policy_scope(policy):
        return small_model()


def gradients_of(model, x, y, scale=lambda loss: loss, context=contextlib.nullcontext):
    with tf.GradientTape() as tape, context():
        predictions = tf.cast(model(x, training=True), tf.float32)
        loss = scale(tf.reduce_mean(tf.square(predictions - y)))
    return tape.gradient(loss, [v.value for v in model.trainable_variables])


def bare(inner):
    model, optimizer = small_model(), inner()
    optimizer.build(model.trainable_variables)
    return lambda x, y: optimizer.apply(gradients_of(model, x, y), model.trainable_variables)


def loss_scaling(inner, monitor=None, policy="mixed_float16", **options):
    model = model_of(policy)
    optimizer = tfamp.LossScaleOptimizer(inner(), **options)
    optimizer.build(model.trainable_variables)

    def step(x, y):
        gradients = gradients_of(model, x, y, optimizer.scale_loss)
        if monitor is not None:
            monitor.record(gradients, model.trainable_variables, optimizer=optimizer)
        optimizer.apply(gradients, model.trainable_variables)

    return step


def accumulated():
    model = model_of("mixed_float16")
    optimizer = tfamp.LossScaleOptimizer(adamw())
    optimizer.build(model.trainable_variables)
    accumulator = tfamp.GradientAccumulator(optimizer, steps=2)

    def step(x, y):
        gradients = gradients_of(model, x, y, optimizer.get_scaled_loss)
        accumulator.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    return step


def scaled_by_grad_scaler():
    model, optimizer, scaler = small_model(), adamw(), tfamp.GradScaler()
    optimizer.build(model.trainable_variables)

    def step(x, y):
        gradients = gradients_of(model, x, y, scaler.scale, lambda: tfamp.autocast("float16"))
        gradients = scaler.unscale(optimizer, gradients)
        scaler.step(optimizer, zip(gradients, model.trainable_variables, strict=True))
        scaler.update()

    return step


WAYS = {
    "sgd": lambda: loss_scaling(sgd),
    "adamw": lambda: loss_scaling(adamw),
    "clipping": lambda: loss_scaling(sgd, grad_clip=1.0),
    "masters": lambda: loss_scaling(adamw, policy="float16", master_weights=True),
    "accumulator": accumulated,
    "scaler_autocast": scaled_by_grad_scaler,
    "monitor": lambda: loss_scaling(sgd, monitor=NumericsMonitor(every=2)),
}


def found_in(step):
    x, y = (tf.constant(each) for each in data(1))
    return placement(tf.function(step, autograph=False), x, y)


@pytest.fixture(scope="module")
def keras_copies():
    """How often a step of Keras's optimizers waits for a tensor, control flow aside."""
    return max(len(found_in(bare(inner)).to_host()) for inner in (sgd, adamw))


@pytest.mark.filterwarnings("ignore:This CPU has no float16 arithmetic")
@pytest.mark.parametrize("way", tiers(["masters"], [each for each in WAYS if each != "masters"]))
def test_every_op_has_a_gpu_kernel_and_nothing_more_is_copied_than_by_keras(way, keras_copies):
    found = found_in(WAYS[way]())
    assert found.without_kernel == []
    assert len(found.to_host()) <= keras_copies, found.to_host()
    assert [copy for copy in found.copies if copy.size > 1024] == []
