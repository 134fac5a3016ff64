"""BatchNormalization on TensorFlow's fused kernel."""

import keras
import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf

import tfamp
from helpers.acceptance import deterministic_ops
from helpers.graph_asserts import op_dtypes

pytestmark = pytest.mark.gpu
CHANNELS = 8
SHAPES = {2: (CHANNELS,), 3: (6, CHANNELS), 4: (5, 7, CHANNELS), 5: (3, 4, 5, CHANNELS)}
# Keras's default, and its ResNets' value, the smallest that cuDNN supports.
EPSILONS = (1e-3, 1.001e-5)
BOTH = pytest.mark.parametrize("dtype", ["float16", "bfloat16"])


def make_norm(dtype, epsilon, rank):
    with tfamp.policy_scope(f"mixed_{dtype}"):
        norm = keras.layers.BatchNormalization(epsilon=epsilon)
    norm.build((*[None] * (rank - 1), CHANNELS))
    norm.gamma.assign(np.linspace(0.5, 1.5, CHANNELS))
    norm.beta.assign(np.linspace(-1, 1, CHANNELS))
    return norm


def sample(shape, dtype, seed):
    return tf.cast(3.0 + 2.0 * tf.random.stateless_normal(shape, (len(shape), seed)), dtype)


def in_float32(norm, x, dy):
    """Returns the output and the gradient of the formula in float32."""
    x, dy = tf.cast(x, tf.float32), tf.cast(dy, tf.float32)
    with tf.GradientTape() as tape:
        tape.watch(x)
        mean, variance = tf.nn.moments(x, range(len(x.shape) - 1))
        y = (x - mean) * tf.math.rsqrt(variance + norm.epsilon) * norm.gamma.value
        y += norm.beta.value
    return y, tape.gradient(y, x, dy)


def error(actual, expected, dtype):
    """Returns the error in eps of the largest value, as sums over a batch may cancel."""
    eps = float(ml_dtypes.finfo(dtype).eps)
    largest = float(tf.reduce_max(tf.abs(expected)))
    difference = float(tf.reduce_max(tf.abs(tf.cast(actual, tf.float32) - expected)))
    return difference / (largest or 1.0) / eps


def worst_errors(rank, dtype, device):
    outputs, gradients, kernels = [0.0], [0.0], set()
    for epsilon in EPSILONS:
        norm = make_norm(dtype, epsilon, rank)

        @tf.function(autograph=False)
        def step(x, dy, norm=norm):
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = norm(x, training=True)
            return y, tape.gradient(y, x, dy)

        for batch in (1, device.size(64, 8)):
            shape = (batch, *SHAPES[rank])
            x, dy = sample(shape, dtype, 1), sample(shape, dtype, 2)
            y, gradient = step(x, dy)
            expected_y, expected_gradient = in_float32(norm, x, dy)
            outputs.append(error(y, expected_y, dtype))
            # The variance of one value is zero, and so is the gradient.
            gradients.append(error(gradient, expected_gradient, dtype))
        kernels |= op_dtypes(step, x, dy).get("FusedBatchNormV3", {"none"})
    return max(outputs), max(gradients), ", ".join(sorted(kernels))


@BOTH
def test_fused(device, check, dtype):
    """Fused BatchNormalization of ranks 2 to 5, of batch 1 too, with both epsilons."""
    device.needs(dtype)
    with tf.device(device.name):
        for rank in SHAPES:
            outputs, gradients, kernels = worst_errors(rank, dtype, device)
            check(f"dtype of the kernel, rank {rank}", kernels, equals=dtype)
            check(f"outputs, rank {rank}", outputs, at_most=2, unit="eps")
            check(f"gradients, rank {rank}", gradients, at_most=2, unit="eps")


@BOTH
def test_frozen(device, check, dtype):
    """Frozen BatchNormalization under a tape with deterministic ops."""
    device.needs(dtype)
    with deterministic_ops(), tf.device(device.name):
        norm = make_norm(dtype, 1e-3, 4)
        norm.trainable = False
        x = sample((8, 5, 7, CHANNELS), dtype, 1)

        @tf.function(autograph=False)
        def gradient_of(x):
            with tf.GradientTape() as tape:
                tape.watch(x)
                loss = tf.reduce_sum(tf.cast(norm(x, training=True), tf.float32))
            return tape.gradient(loss, x)

        found = gradient_of(x)
    # Moving statistics are 0 and 1.
    expected = norm.gamma.numpy() / np.sqrt(1 + 1e-3) * tf.ones(x.shape)
    check("gradient", error(found, expected, dtype), at_most=2, unit="eps")


@pytest.mark.long
def test_persistent_kernel(device, check):
    """A training step with and without TF_USE_CUDNN_BATCHNORM_SPATIAL_PERSISTENT."""
    sizes = [str(device.size(*each)) for each in ((128, 8), (56, 8), (7, 2))]
    without, persistent = (
        device.helper(
            *("acceptance_models", device.name, device.low, *sizes),
            TF_USE_CUDNN_BATCHNORM_SPATIAL_PERSISTENT=value,
        )
        for value in ("0", "1")
    )
    check("time, to that without", persistent["seconds"] / without["seconds"])
    check("loss at the end, to that without", persistent["loss"] / without["loss"])
