"""Sums over replicas that are sent as bfloat16 and computed in float32.

An all-reduce of bfloat16 tensors rounds to 8 digits after every addition. Here a number is rounded
twice, whatever the number of replicas: when it is sent, and when the sum is sent back.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from tfamp.core.kinds import Tensor
from tfamp.interop import tf_private

# From so many workers on, a worker would receive as many bytes of the others' bfloat16 gradients,
# 2 (n - 1) a parameter, as a ring all-reduce of float32 sends, 8 (n - 1) / n.
_MANY = 4


def sum_as_bfloat16(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Returns the float32 sums over the replicas of float32 or 16-bit tensors.

    The replicas of one process send parts of a half of float32's bytes to each other. Workers in
    processes of their own can only gather whole tensors: up to three do. More of them, and
    replicas that XLA compiles one by one, all-reduce in float32, which is exact and takes no more
    bytes.
    """
    if not tensors:
        return []
    tensors = [tf.cast(tensor, tf.bfloat16) for tensor in tensors]
    flat = tf.concat([tf.reshape(tensor, [-1]) for tensor in tensors], 0)
    total = _sum(flat)
    parts = tf.split(total, [_size(tensor) for tensor in tensors])
    return [tf.reshape(p, tf.shape(t)) for p, t in zip(parts, tensors, strict=True)]


def bits_of_bfloat16(values: Tensor) -> Tensor:
    """Rounds to bfloat16, as the bits of a float16: TensorFlow cannot gather bfloat16."""
    return tf.bitcast(tf.cast(values, tf.bfloat16), tf.float16)


def bits_as_bfloat16(bits: Tensor) -> Tensor:
    """Returns the float32 values of `bits_of_bfloat16`."""
    return tf.cast(tf.bitcast(bits, tf.bfloat16), tf.float32)


def _size(tensor: Tensor) -> Tensor:
    """The number of elements, where possible a Python int."""
    known = tensor.shape.num_elements()
    return tf.size(tensor) if known is None else known


def _sum(flat: Tensor) -> Tensor:
    replica = tf.distribute.get_replica_context()
    count = replica.num_replicas_in_sync
    if tf_private.strategy_needs_merge_call():  # Not in a replica that XLA compiles by itself.
        if len(replica.strategy.extended.worker_devices) == count:
            return tf.cast(replica.merge_call(_exchange, args=(flat,)), tf.float32)
        if count < _MANY:
            gathered = replica.all_gather(bits_of_bfloat16(flat)[None], 0)
            return tf.reduce_sum(bits_as_bfloat16(gathered), 0)
    return replica.all_reduce(tf.distribute.ReduceOp.SUM, tf.cast(flat, tf.float32))


def _exchange(strategy: tf.distribute.Strategy, per_replica: Tensor) -> Tensor:
    """Every device sums one part of all replicas' tensors, and sends the sum to all."""
    devices = strategy.extended.worker_devices
    parts = []
    for device, own in zip(devices, strategy.experimental_local_results(per_replica), strict=True):
        with tf.device(device):
            padding = -_size(own) % len(devices)
            parts.append(tf.split(tf.pad(own, [[0, padding]]), len(devices)))
    sums = []
    for device, received in zip(devices, zip(*parts, strict=True), strict=True):
        with tf.device(device):
            total = tf.reduce_sum(tf.cast(tf.stack(received), tf.float32), 0)
            sums.append(tf.cast(total, tf.bfloat16))

    def joined(own: Tensor) -> Tensor:
        return tf.concat(sums, 0)[: _size(own)]

    return strategy.extended.call_for_each_replica(joined, args=(per_replica,))
