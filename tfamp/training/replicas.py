"""Replicas of a `tf.distribute` strategy: their sums, their agreement, and where code may run."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import tensorflow as tf
from keras import ops

from tfamp.interop.keras_hooks import native, runs_tensorflow


def check_in_replica() -> None:
    """Raises if gradients cannot be applied here, because every replica has to apply its own."""
    if runs_tensorflow() and tf.distribute.in_cross_replica_context():
        raise ValueError(
            "Gradients must be applied inside strategy.run, once on each replica; this call is "
            "in cross-replica context."
        )


def outside_the_graph(create: Callable[[], None]) -> None:
    """Calls a function that creates variables, outside the graph being traced.

    Replicas trace one after the other: the first one creates, the others find it done.
    Variables created in a replica while it traces cannot be initialised; Keras's own optimizers
    fail there unless they were built before.
    """

    def create_in_scope(strategy: tf.distribute.Strategy) -> None:
        with strategy.scope():
            create()

    if tf.distribute.has_strategy() and not tf.distribute.in_cross_replica_context():
        # Under a strategy tf.init_scope leaves the graph, but not the tf.function's rule that only
        # its first trace creates variables. Another thread has never heard of that function.
        with ThreadPoolExecutor(1) as thread:
            thread.submit(create_in_scope, tf.distribute.get_strategy()).result()
    else:
        with tf.init_scope():
            create()


def several_replicas() -> bool:
    """Whether this is a replica, and one of several."""
    replica = tf.distribute.get_replica_context()
    return replica is not None and replica.num_replicas_in_sync > 1


def all_reduce_sum(tensors: Sequence[Any]) -> Any:
    """Sums tensors or `tf.IndexedSlices` over the replicas."""
    return tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, tensors)


def on_every_replica(finite: Any) -> Any:
    """Makes all replicas agree: True only where every replica of every worker said True."""
    if not several_replicas():
        return finite
    return tf.equal(all_reduce_sum(tf.cast(tf.logical_not(finite), "float32")), 0.0)


def call_if(condition: Any, function: Callable[[], Any]) -> None:
    """Calls a function that assigns to variables where a scalar bool tensor holds."""

    def branch() -> None:
        function()

    if runs_tensorflow():
        ops.cond(condition, branch, lambda: None)
    elif condition:  # JAX traces both branches of a cond: what they assign would be tracers.
        branch()


def update_everywhere(target: Any, function: Callable[..., Any], sources: Sequence[Any]) -> Any:
    """Calls `function(target, *sources)` with the copies that each device has of variables.

    Nothing is sent between devices: an assignment in a replica would average the replicas' values,
    which are the same.
    """
    target = native(target)
    strategy = tf.distribute.get_strategy()
    scope: Any = contextlib.nullcontext()
    # `model.fit` finalizes the variables outside the scope of their strategy.
    if not tf.distribute.has_strategy() and hasattr(target, "distribute_strategy"):
        strategy = target.distribute_strategy
        scope = strategy.scope()
    with scope:
        own = tuple(map(native, sources))
        return strategy.extended.update(target, function, args=own, group=False)
