"""Batch normalization by TensorFlow's fused kernel: low-precision tensors, float32 statistics.

Only arithmetic on tensors; which layers call it, and when, is in `layers.fused_norms`. The kernel
reads its input once and writes its output once, in the low dtype, and computes in float32 in
between. The same formula in separate ops casts to float32 first and passes over that tensor several
times.
"""

from __future__ import annotations

from typing import NamedTuple

import tensorflow as tf

from tfamp.interop import tf_private

_OPS = ("FusedBatchNormV3", "FusedBatchNormGradV3")
# cuDNN refuses smaller ones in some of its versions; TensorFlow's public function raises them.
_LEAST_EPSILON_ON_GPUS = 1.001e-5


class Normalized(NamedTuple):
    """What a training step makes of a batch.

    Attributes:
        outputs: Normalized tensor, of the input's shape and dtype.
        mean: Mean per channel, float32 of shape [channels].
        variance: Biased variance per channel (the sum of squares over n), of the same shape.
    """

    outputs: tf.Tensor
    mean: tf.Tensor
    variance: tf.Tensor


def has_fused_kernel(dtype: str, epsilon: float) -> bool:
    """Whether the fused kernel, and its gradient, run here in a dtype.

    Args:
        dtype: Name of the tensor's dtype, e.g. "bfloat16".
        epsilon: What is added to the variance.
    """
    if epsilon < _LEAST_EPSILON_ON_GPUS and tf.config.list_physical_devices("GPU"):
        return False
    return all(dtype in tf_private.op_inputs(op)[0].floats for op in _OPS)


def normalize_batch(
    x: tf.Tensor, gamma: tf.Tensor | None, beta: tf.Tensor | None, epsilon: float
) -> Normalized:
    """Normalizes a batch by its own statistics, over all axes but the last.

    Args:
        x: Tensor of two axes or more, the last of static size; a dtype with a fused kernel.
        gamma: Scale per channel, float32 of shape [channels]; None for one.
        beta: Offset per channel, likewise; None for zero.
        epsilon: What is added to the variance.

    Returns:
        The outputs and the batch's statistics. Gradients flow through the outputs only.

    Example:
        >>> x = tf.constant([[1.0], [3.0]], tf.bfloat16)
        >>> found = normalize_batch(x, None, None, epsilon=1e-3)
        >>> float(found.mean[0]), float(found.variance[0])
        (2.0, 1.0)
    """
    nothing = tf.zeros([0], tf.float32)
    fused = _fused(x, gamma, beta, nothing, nothing, epsilon, is_training=True)
    return Normalized(
        tf.reshape(fused.y, tf.shape(x)) if x.shape.rank != 4 else fused.y,
        fused.batch_mean,
        _biased(fused.batch_variance, x),
    )


def normalize_by(
    x: tf.Tensor,
    mean: tf.Tensor,
    variance: tf.Tensor,
    gamma: tf.Tensor | None,
    beta: tf.Tensor | None,
    epsilon: float,
) -> tf.Tensor:
    """Normalizes by given statistics, as inference does.

    Args:
        x: As for `normalize_batch`.
        mean: Mean per channel, float32 of shape [channels]. No gradient flows to it.
        variance: Variance per channel, likewise.
        gamma: As for `normalize_batch`.
        beta: As for `normalize_batch`.
        epsilon: What is added to the variance.

    Returns:
        Tensor of `x`'s shape and dtype.

    Example:
        >>> x = tf.constant([[1.0], [3.0]], tf.bfloat16)
        >>> y = normalize_by(x, tf.ones([1]), tf.ones([1]), None, None, epsilon=0.0)
        >>> y.dtype.name, float(y[1, 0])
        ('bfloat16', 2.0)
    """
    fused = _fused(x, gamma, beta, mean, variance, epsilon, is_training=False)
    return tf.reshape(fused.y, tf.shape(x)) if x.shape.rank != 4 else fused.y


def _fused(
    x: tf.Tensor,
    gamma: tf.Tensor | None,
    beta: tf.Tensor | None,
    mean: tf.Tensor,
    variance: tf.Tensor,
    epsilon: float,
    *,
    is_training: bool,
) -> tf.Tensor:
    channels = x.shape[-1]
    # The kernel takes images. Statistics only ask what the channels are, so any others are one
    # image of one row; of the shapes possible it is the one measured fastest on a CPU.
    images = x if x.shape.rank == 4 else tf.reshape(x, [1, 1, -1, channels])
    return tf.raw_ops.FusedBatchNormV3(
        x=images,
        scale=tf.ones([channels]) if gamma is None else gamma,
        offset=tf.zeros([channels]) if beta is None else beta,
        mean=mean,
        variance=variance,
        epsilon=epsilon,
        data_format="NHWC",
        is_training=is_training,
    )


def _biased(unbiased: tf.Tensor, x: tf.Tensor) -> tf.Tensor:
    """Turns the variance the kernel returns, the sum of squares over n - 1, into that over n."""
    channels = x.shape[-1]
    if x.shape.is_fully_defined():
        count = x.shape.num_elements() // channels
        # Of one value the kernel returns 0 or NaN (0 / 0), depending on the device.
        return tf.zeros_like(unbiased) if count == 1 else unbiased * ((count - 1) / max(count, 1))
    size = tf.cast(tf.size(x, out_type=tf.int64) // channels, tf.float32)
    return tf.where(tf.equal(size, 1.0), 0.0, unbiased * ((size - 1.0) / size))
