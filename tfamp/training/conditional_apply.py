"""Applying gradients unless they are not finite, and creating variables, on any strategy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import keras
import tensorflow as tf
from keras import ops

from tfamp.interop.keras_backend import runs_tensorflow
from tfamp.interop.tf_private import strategy_needs_merge_call
from tfamp.training import gradients as gradient_lib
from tfamp.training.fused_update import update_variables
from tfamp.training.master_weights import Mastered, follow_model, write_to_model
from tfamp.training.reduced_apply import apply_summed


def check_in_replica() -> None:
    """Raises if gradients cannot be applied here, because every replica has to apply its own.

    Raises:
        ValueError: Called outside `strategy.run`, in the strategy's scope.
    """
    if runs_tensorflow() and tf.distribute.in_cross_replica_context():
        raise ValueError(
            "Gradients must be applied inside strategy.run, once on each replica; this call is "
            "in cross-replica context."
        )


def outside_the_graph(create: Callable[[], None]) -> None:
    """Calls a function that creates variables, outside the graph being traced and once.

    Variables that a replica creates while it traces cannot be initialised; Keras's own optimizers
    fail there unless they were built before.

    Args:
        create: Creates the variables.
    """

    def create_in_scope(strategy: tf.distribute.Strategy) -> None:
        with strategy.scope():
            create()

    def create_elsewhere(strategy: tf.distribute.Strategy) -> None:
        # Under a strategy tf.init_scope leaves the graph, but not the tf.function's rule that only
        # its first trace creates variables. Another thread has never heard of that function.
        with ThreadPoolExecutor(1) as thread:
            thread.submit(create_in_scope, strategy).result()

    replica = tf.distribute.get_replica_context()
    if tf.distribute.has_strategy() and replica is not None:
        replica.merge_call(create_elsewhere)
    else:
        with tf.init_scope():
            create()


def apply_if_finite(
    finite: Any,
    optimizer: keras.optimizers.Optimizer,
    gradients: Sequence[Any],
    variables: Sequence[Any],
    scale: Any = None,
    *,
    skips: bool = True,
    record: Callable[[Any], None] = lambda finite: None,
    summed: bool = False,
    masters: Sequence[Mastered] = (),
) -> None:
    """Applies gradients where they are finite, and otherwise changes nothing.

    Args:
        finite: Scalar bool tensor, the same on all replicas.
        optimizer: The bare Keras optimizer, built.
        gradients: Float tensors, `tf.IndexedSlices` or None.
        variables: The variables they belong to, in the same order; where a variable has a float32
            copy, the copy.
        scale: Scalar float32 the gradients are still to be divided by; None: they have been.
        skips: False applies the gradients in any case.
        record: Called with `finite` after the update, once for all replicas.
        summed: Whether the gradients are sums over all replicas already.
        masters: The float32 copies, with the variables they are written to.
    """

    def finish(finite: Any, update: Callable[[], None]) -> None:
        def update_all() -> None:
            follow_model(masters)
            update()
            write_to_model(masters)

        if not skips:
            update_all()
        elif runs_tensorflow():
            ops.cond(finite, update_all, lambda: None)
        elif finite:  # JAX traces both branches of a cond: what they assign would be tracers.
            update_all()
        record(finite)

    def apply(gradients: Sequence[Any], scale: Any) -> None:
        if summed:
            gradients = gradient_lib.unscale_all(gradients, variables, scale)
            apply_summed(optimizer, gradients, variables)
        else:
            update_variables(optimizer, gradients, variables, scale)

    def finish_on_all_replicas(
        strategy: tf.distribute.Strategy, finite: Any, gradients: Sequence[Any], scale: Any
    ) -> None:
        def update() -> None:
            strategy.extended.call_for_each_replica(apply, args=(gradients, scale))

        # The replicas agreed on it, so any one's answer will do.
        finish(strategy.experimental_local_results(finite)[0], update)

    if runs_tensorflow() and strategy_needs_merge_call():
        tf.distribute.get_replica_context().merge_call(
            finish_on_all_replicas, args=(finite, gradients, scale)
        )
    else:
        finish(finite, lambda: apply(gradients, scale))
