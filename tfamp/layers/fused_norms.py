"""Runs BatchNormalization layers of mixed policies on TensorFlow's fused kernel.

For Keras such a layer is float32: policy, variables and statistics. Only its call differs: a
low input is not cast to float32 first, and the output is low too, unless the layer makes an
output of a model. Other inputs are handled by Keras.

The kernel reads its input and writes its output once, in the low dtype, and computes in float32
in between. The same formula in separate ops casts to float32 first and reads that tensor
several times.

The methods are wrapped on single layers: a layer created under another policy is Keras's own,
and a wrapped one keeps its kernel when the policy changes. A file says which layers were wrapped,
where Keras looks only for shapes: loaded under the same policy, they are again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfamp.core.dtypes import FLOAT_DTYPES
from tfamp.core.kinds import Layer, Method, Tensor, Variable
from tfamp.interop import tf_private
from tfamp.interop.keras_hooks import runs_tensorflow
from tfamp.layers.layer_record import assignment_of

# Methods that a subclass may override without changing the arithmetic.
_HARMLESS = frozenset({"build", "get_config", "from_config"})
_OPS = ("FusedBatchNormV3", "FusedBatchNormGradV3")
# Key of a layer's build configuration: the low dtype, of a layer that used the kernel.
_FUSED = "tfamp_fused"
# Some versions of cuDNN refuse an epsilon below 1e-5; Keras's applications have this one.
_LEAST_EPSILON_ON_GPUS = 1.001e-5


def can_fuse(layer_class: type) -> bool:
    """Whether layers of a class compute the same as BatchNormalization, and on TensorFlow."""
    norm = keras.layers.BatchNormalization
    if not issubclass(layer_class, norm) or not runs_tensorflow():
        return False
    between = layer_class.__mro__[: layer_class.__mro__.index(norm)]
    added = {name for subclass in between for name in vars(subclass)} - _HARMLESS
    # Python gives every class a few __names__.
    changed = {name for name in added if name == "__call__" or not name.startswith("__")}
    return not any(hasattr(norm, name) for name in changed)


def _output_dtype(layer: Layer, low: str, inputs: Tensor) -> str:
    """Dtype of the output, also without the kernel: symbolic tensors have it."""
    assignment = assignment_of(layer)
    raised = assignment is not None and assignment.role == "output"
    if layer.compute_dtype == "float32" and _dtype_of(inputs) == low and not raised:
        return low
    return str(layer.compute_dtype)


def call(
    layer: Layer,
    low: str,
    original: Method,
    inputs: Tensor,
    training: bool | None = None,
    mask: Tensor = None,
) -> Tensor:
    """Computes a managed layer of a class that `can_fuse`, by the kernel for inputs of `low`."""
    returned = _output_dtype(layer, low, inputs)
    is_low = returned == low == _dtype_of(inputs)
    if is_low and mask is None and fits(layer, inputs, low, training):
        return normalize(layer, inputs, training)
    if not layer.autocast and _dtype_of(inputs) in FLOAT_DTYPES:
        inputs = keras.ops.cast(inputs, layer.input_dtype)
    return keras.ops.cast(original(inputs, training=training, mask=mask), returned)


def compute_output_spec(
    layer: Layer, low: str, original: Method, inputs: Tensor, *args: Any, **kwargs: Any
) -> Tensor:
    """Computes the spec of what `call` returns."""
    spec, dtype = original(inputs, *args, **kwargs), _output_dtype(layer, low, inputs)
    return keras.KerasTensor(spec.shape, dtype=dtype, sparse=spec.sparse)


def get_build_config(
    layer: Layer, low: str, original: Callable[[], dict[str, Any] | None]
) -> dict[str, Any] | None:
    """Notes in a file that a layer used the kernel; `was_fused` reads it."""
    config, assignment = original(), assignment_of(layer)
    is_fused = assignment is not None and assignment.role == "statistics"
    return {**config, _FUSED: low} if config and is_fused else config


def was_fused(config: dict[str, Any], low: str) -> bool:
    """Whether a layer whose build configuration it is used the kernel for a low dtype."""
    return bool(config.get(_FUSED) == low)


def fits(layer: Layer, inputs: Tensor, dtype: str, training: bool | None) -> bool:
    """Whether the kernel of a dtype can compute a layer of a class that `can_fuse`.

    `training` is whether the statistics are those of the batch.
    """
    if not isinstance(inputs, tf.Tensor) or inputs.shape.rank is None:
        return False
    rank = inputs.shape.rank
    # Keras 3.12 has no renorm.
    elsewhere = layer.synchronized or getattr(layer, "renorm", False)
    return (
        not elsewhere
        and rank >= 2
        and layer.axis in (-1, rank - 1)
        and inputs.shape[-1] is not None
        and has_fused_kernel(dtype, layer.epsilon, frozen=not (training and layer.trainable))
    )


def has_fused_kernel(dtype: str, epsilon: float, *, frozen: bool = False) -> bool:
    """Whether the kernel and its gradient take a dtype and an epsilon on the current device.

    That is where TensorFlow places the next op; `frozen` is with the moving statistics.
    """
    device = tf_private.device_kind_in_force() or tf_private.default_device_kind()
    if device == "gpu":
        # On GPUs the gradient with moving statistics raises an error under op determinism.
        raises = frozen and tf_private.op_determinism_is_enabled()
        if raises or epsilon < _LEAST_EPSILON_ON_GPUS:
            return False
    return all(dtype in tf_private.op_inputs(op, device)[0].floats for op in _OPS)


def normalize(layer: Layer, inputs: Tensor, training: bool | None) -> Tensor:
    """Computes a layer by the kernel, and updates its moving statistics like Keras.

    `training` is whether the statistics are those of the batch.
    """
    mean, variance = _float32(layer.moving_mean), _float32(layer.moving_variance)
    gamma = _float32(layer.gamma) if layer.scale else None
    beta = _float32(layer.beta) if layer.center else None
    if not (training and layer.trainable):
        return fused_norm(inputs, gamma, beta, layer.epsilon, (mean, variance))[0]
    outputs, batch_mean, batch_variance = fused_norm(inputs, gamma, beta, layer.epsilon)
    kept = layer.momentum
    layer.moving_mean.assign(mean * kept + batch_mean * (1.0 - kept))
    layer.moving_variance.assign(variance * kept + batch_variance * (1.0 - kept))
    return outputs


def fused_norm(
    x: tf.Tensor,
    gamma: Tensor,
    beta: Tensor,
    epsilon: float,
    statistics: tuple[Tensor, ...] = (),
) -> tuple[Tensor, Tensor, Tensor]:
    """Normalizes over all axes but the last, by the statistics of the batch or other ones.

    Scale and offset are float32 of shape [channels], None for one and zero; `statistics` are a
    mean and a variance, for inference. Gradients flow through the outputs only.

    Returns the outputs, of the input's shape and dtype, the mean, and the biased variance: the
    sum of squares over n.

    Example:
        >>> x = tf.constant([[1.0], [3.0]], tf.bfloat16)
        >>> outputs, mean, variance = fused_norm(x, None, None, epsilon=1e-3)
        >>> float(mean[0]), float(variance[0])
        (2.0, 1.0)
        >>> y, *_ = fused_norm(x, None, None, 0.0, (tf.ones([1]), tf.ones([1])))
        >>> y.dtype.name, float(y[1, 0])
        ('bfloat16', 2.0)
    """
    mean, variance = statistics or [tf.zeros([0], tf.float32)] * 2
    channels = x.shape[-1]
    # The kernel takes images. Statistics depend on the channels only, so other inputs become
    # one image of one row, the fastest of the possible shapes on a CPU.
    is_image = x.shape.rank == 4
    fused = tf.raw_ops.FusedBatchNormV3(
        x=x if is_image else tf.reshape(x, [1, 1, -1, channels]),
        scale=tf.ones([channels]) if gamma is None else gamma,
        offset=tf.zeros([channels]) if beta is None else beta,
        mean=mean,
        variance=variance,
        epsilon=epsilon,
        is_training=not statistics,
        data_format="NHWC",
    )
    outputs = fused.y if is_image else tf.reshape(fused.y, tf.shape(x))
    if not statistics:
        variance = _biased(fused.batch_variance, x)
    return outputs, fused.batch_mean, variance


def _biased(unbiased: tf.Tensor, x: tf.Tensor) -> tf.Tensor:
    """Converts the kernel's variance, the sum of squares over n - 1, to the sum over n."""
    size = tf.cast(tf.size(x, out_type=tf.int64) // x.shape[-1], tf.float32)
    # For one value the kernel returns 0 or NaN (0 / 0), depending on the device.
    return tf.where(tf.equal(size, 1.0), 0.0, unbiased * ((size - 1.0) / size))


def _dtype_of(tensor: Tensor) -> str:
    return str(keras.backend.standardize_dtype(tensor.dtype))


def _float32(variable: Variable) -> Tensor:
    return keras.ops.cast(variable, "float32")
