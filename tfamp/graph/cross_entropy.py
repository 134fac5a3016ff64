"""The cross entropy of sparse labels, as XLA on CPUs compiles it well.

XLA's own makes a dense tensor of the labels, takes the loss from a pass over all classes, and
computes every exponential anew for the gradient and again for each sum of it.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import tensorflow as tf


@functools.cache
def cross_entropy_function(labels_dtype: int) -> Any:
    """A function, without a name, of float32 logits and labels: losses, gradients by the logits."""
    function = tf.function(_cross_entropy, autograph=False)
    with tf.Graph().as_default() as graph:
        logits = tf.compat.v1.placeholder(tf.float32, [None, None])
        function(logits, tf.compat.v1.placeholder(labels_dtype, [None]))
    (made,) = graph.as_graph_def().library.function
    made.signature.name = ""
    return made


def _cross_entropy(logits: Any, labels: Any) -> tuple[Any, Any]:
    """Labels that are no class give NaN, as XLA's op does."""
    top = tf.reduce_max(logits, -1)
    exponentials = tf.exp(logits - top[:, tf.newaxis])
    total = tf.reduce_sum(exponentials, -1)
    is_class = (labels >= 0) & (labels < tf.shape(logits, labels.dtype)[-1])
    nothing = tf.where(is_class, 0.0, math.nan)
    losses = tf.math.log(total) + (top - tf.gather(logits, labels, batch_dims=1)) + nothing
    shares = exponentials * (1.0 / total + nothing)[:, tf.newaxis]
    return losses, shares - tf.one_hot(labels, tf.shape(logits)[-1])
