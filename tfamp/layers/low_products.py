"""Low products of output layers, for a policy with `float32_outputs="sums"`.

An output layer is float32: its bias, its activation and what it returns. Of its arithmetic only
the product of inputs and kernel takes long, and with a large vocabulary longer than all other
layers. Here the operands of that product, and of the two products of its gradient, are low.

The forward sums stay float32: rounding logits to bfloat16 changes the loss of small transformers
20 to 700 times as much as all hidden layers together. XLA has a product of low operands with
float32 results. TensorFlow has no such kernel. On a CPU with AMX, XLA compiles that product alone
in the graph of a training step: it took a quarter of float32's time for 2,048 rows, 512 inputs and
8,000 words. Elsewhere the forward product of a bfloat16 policy without XLA stays float32; float16
has eight times as many steps, and its product is rounded once. The results of the backward
products are rounded, like those of hidden layers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfamp import kernel_guard
from tfamp.core.kinds import Layer, Method, Tensor
from tfamp.interop import op_calls, tf_private
from tfamp.machine import hardware

# The key in a file of a layer whose product was low.
_LOW_PRODUCT = "tfamp_low_product"
# Of TensorFlow: before, XLA multiplied low operands on a CPU in float32's time.
_FIRST_ON_TILES = (2, 21)
# Weights of a product that XLA compiles alone: smaller ones took as long in float32.
_LEAST_COMPILED = 2**18

_CLASSES = (keras.layers.Dense, keras.layers.EinsumDense)
# Keras 3.12 has none.
_TIED = tuple(filter(None, [getattr(keras.layers, "ReversibleEmbedding", None)]))


def has_product(layer_class: type[Layer]) -> bool:
    """Whether a class computes as one of Keras's with a product; a `call` of its own may not."""
    return any(layer_class.call is known.call for known in (*_CLASSES, *_TIED))


def call(
    layer: Layer, low: str, original: Method, inputs: Tensor, *args: Any, **kwargs: Any
) -> Tensor:
    """Computes an output layer in float32, but for low operands of its product."""
    if isinstance(layer, _TIED):
        return _call_tied(layer, low, original, inputs, *args, **kwargs)
    axes = contracted_axes(layer)
    is_dense_tensor = isinstance(inputs, tf.Tensor)  # not sparse, ragged or of another backend
    if not axes or not is_dense_tensor or layer.compute_dtype != "float32":
        return original(inputs, *args, **kwargs)
    kernel = keras.ops.convert_to_tensor(layer.kernel)
    outputs = product(inputs, kernel, axes, low)
    if layer.bias is not None:
        outputs = keras.ops.add(outputs, layer.bias)
    return outputs if layer.activation is None else layer.activation(outputs)


def _call_tied(
    layer: Layer, low: str, original: Method, inputs: Tensor, reverse: bool = False
) -> Tensor:
    """Computes an embedding, whose product is that of its reverse call."""
    has_dtype = layer.reverse_dtype is not None or layer.compute_dtype != "float32"
    if not reverse or has_dtype or not isinstance(inputs, tf.Tensor):
        return original(inputs, reverse=reverse)
    weights = layer.embeddings if layer.tie_weights else layer.reverse_embeddings
    kernel = keras.ops.convert_to_tensor(weights)
    logits = product(inputs, tf.transpose(kernel) if layer.tie_weights else kernel, 1, low)
    cap = layer.logit_soft_cap
    return logits if cap is None else cap * tf.tanh(logits / cap)


def contracted_axes(layer: Layer) -> int:
    """Returns how many last axes of the inputs a layer multiplies by the first of its kernel.

    0 for an EinsumDense with another equation.

    Example:
        >>> contracted_axes(keras.layers.EinsumDense("abc,cd->abd", output_shape=(None, 2)))
        1
        >>> contracted_axes(keras.layers.EinsumDense("ab,bc->cb", output_shape=2))
        0
    """
    if isinstance(layer, keras.layers.Dense):
        return 1
    operands, _, result = layer.equation.replace(" ", "").partition("->")
    features, _, kernel = operands.partition(",")
    for axes in range(1, min(len(features), len(kernel)) + 1):
        rows, summed = features[:-axes], features[-axes:]
        new = kernel[axes:]
        labels = rows + summed + new
        is_product = kernel[:axes] == summed and result == rows + new
        if is_product and labels.isalpha() and len(set(labels)) == len(labels):
            return axes
    return 0


def size_of(layer: Layer) -> int:
    """Returns how many weights the product of a layer has, 0 where it cannot be low."""
    if not has_product(type(layer)) or not layer.built:
        return 0
    if isinstance(layer, _TIED):
        return int(np.prod(layer.embeddings.shape))
    return int(np.prod(layer.kernel.shape)) if contracted_axes(layer) else 0


def product(inputs: Tensor, kernel: Tensor, axes: int, low: str) -> Tensor:
    """Multiplies the last `axes` axes of inputs by the first ones of a kernel.

    Returns float32. All operands are low, but those of the forward product in bfloat16 where XLA
    does not multiply.
    """
    batch = tf.shape(inputs)[: inputs.shape.rank - axes]
    shape = inputs.shape[:-axes].concatenate(kernel.shape[axes:])
    size = kernel.shape[:axes].num_elements()
    rows = tf.reshape(tf.cast(inputs, tf.float32), (-1, size))
    matrix = tf.reshape(tf.cast(kernel, tf.float32), (size, -1))
    outputs = _product(rows, matrix, low, _is_compiled(inputs, rows, matrix, low))
    outputs = tf.reshape(outputs, tf.concat([batch, kernel.shape[axes:].as_list()], 0))
    outputs.set_shape(shape)
    return outputs


@functools.cache
def xla_multiplies_on_tiles() -> bool:
    """Whether XLA has a fast product of low operands with float32 results on this CPU.

    Example:
        >>> isinstance(xla_multiplies_on_tiles(), bool)
        True
    """
    version = tuple(map(int, tf.__version__.split(".")[:2]))
    return version >= _FIRST_ON_TILES and hardware.has_tiles()


def _is_compiled(inputs: Tensor, rows: Tensor, matrix: Tensor, low: str) -> bool:
    """Whether XLA multiplies: with all of a step, or alone where TensorFlow is slower.

    Alone only in the graph of a step that a tape differentiates, as a saved model may run where no
    XLA is, and for one size of inputs but for the batch, as XLA compiles each again. Not in a
    `tf.vectorized_map`, which takes the function apart, nor in forward mode, which looks into it.
    """
    if tf.executing_eagerly():
        return False
    is_wanted = tf_private.is_compiled_by_xla() or (
        low == "bfloat16"
        and xla_multiplies_on_tiles()
        and (matrix.shape.num_elements() or 0) >= _LEAST_COMPILED
        and inputs.shape[1:].is_fully_defined()
        and op_calls.may_record()
        and (tf_private.device_kind_in_force() or tf_private.default_device_kind()) == "cpu"
    )
    return is_wanted and not (tf_private.is_vectorized() or tf_private.has_tangent(rows, matrix))


def _product(rows: Tensor, matrix: Tensor, low: str, by_xla: bool) -> Tensor:
    @tf.custom_gradient
    def multiply(rows: Tensor, matrix: Tensor) -> tuple[Tensor, Callable[[Tensor], Any]]:
        def gradient(upstream: Tensor) -> tuple[Tensor, Tensor]:
            upstream = tf.cast(upstream, low)
            with kernel_guard.guarded():
                of_rows = tf.matmul(upstream, tf.cast(matrix, low), transpose_b=True)
                of_matrix = tf.matmul(tf.cast(rows, low), upstream, transpose_a=True)
            return tf.cast(of_rows, tf.float32), tf.cast(of_matrix, tf.float32)

        return _forward(rows, matrix, low, by_xla), gradient

    return multiply(rows, matrix)


def _forward(rows: Tensor, matrix: Tensor, low: str, by_xla: bool) -> Tensor:
    if by_xla:
        # A function of its own, which XLA inlines: TensorFlow reuses what it has traced here
        # where XLA does not compile, and nothing but XLA has this product.
        compiled = tf.function(_float32_sums, jit_compile=True, autograph=False)
        # The guard knows no kernel with these dtypes, and a tape no gradient for them but ours.
        with kernel_guard.guarded(is_on=False), op_calls.not_recording():
            return compiled(tf.cast(rows, low), tf.cast(matrix, low))
    if low == "bfloat16":
        return tf.matmul(rows, matrix)
    with kernel_guard.guarded():
        return tf.cast(tf.matmul(tf.cast(rows, low), tf.cast(matrix, low)), tf.float32)


def _float32_sums(rows: Tensor, matrix: Tensor) -> Tensor:
    return tf.raw_ops.BatchMatMulV3(x=rows, y=matrix, Tout=tf.float32)


def get_build_config(
    layer: Layer, low: str, original: Callable[[], dict[str, Any] | None]
) -> dict[str, Any] | None:
    """Notes in a file that a layer's product was low, and its dtype float32; `was_low` reads it."""
    config = original()
    return {**config, _LOW_PRODUCT: low} if config else config


def was_low(config: dict[str, Any], low: str) -> bool:
    """Whether the product of a layer whose build configuration it is was low."""
    return bool(config.get(_LOW_PRODUCT) == low)
