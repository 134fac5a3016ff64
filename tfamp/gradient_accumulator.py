"""`GradientAccumulator`: one update for several micro-batches, in a custom training loop."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import tensorflow as tf

from tfamp.core.kinds import Tensor, Variable
from tfamp.core.messages import described
from tfamp.core.options import checked_count
from tfamp.interop.keras_hooks import key_of
from tfamp.interop.tf_private import as_written
from tfamp.optimizer import LossScaleOptimizer
from tfamp.training import gradients as gradient_lib
from tfamp.training.weights import OnEach, once_for_all_replicas


class GradientAccumulator(tf.Module):
    """Sums the gradients of micro-batches and applies their mean, once for each window.

    A window is `steps` calls of `apply_gradients`; the last of them updates the weights with
    the mean of the gradients, computed in float32. One window is one optimizer step: the loss
    scale is constant within it, a micro-batch with an inf or NaN, on any replica, skips the
    whole window, and replicas communicate only at its end.

    In `model.fit` call it in a `train_step` of the model. The `gradient_accumulation_steps` of
    Keras's optimizers are simpler there, but every micro-batch is a step of the loss scale,
    which may change within a window; a non-finite micro-batch is left out while the sum of the
    others is still divided by the full number; and they fail under `MirroredStrategy`.

    Works in eager mode, in a `tf.function`, traced once, and in `strategy.run`; create it under
    `strategy.scope()`. Unless XLA compiles the step, the host reads from the device at every
    micro-batch whether it ends the window. In several functions, a window that ends in one of them
    leaves the sums of variables that had no gradient when that one was traced for the next window:
    give zeros in place of None. `tf.train.Checkpoint` saves it, with an unfinished window. The sums
    take as much memory as float32 gradients; a sparse gradient is added to its rows of a dense sum.
    "Gradients" of variables with `overwrite_with_gradient`, as in Keras's float8 layers, are their
    next values: the update takes the largest of the window.

    Source: `no_sync` and division by the number of micro-batches in PyTorch.

    Args:
        optimizer: A `tfamp.LossScaleOptimizer`. Where no loss scale is wanted, one with
            `loss_scale=1.0`.
        steps: Number of micro-batches in a window.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: `steps` is less than 1, or the inner optimizer accumulates as well.

    Example:
        >>> import keras, tensorflow as tf, tfamp
        >>> weight = keras.Variable(1.0)
        >>> optimizer = tfamp.LossScaleOptimizer(keras.optimizers.SGD(1.0))
        >>> accumulator = tfamp.GradientAccumulator(optimizer, steps=2)
        >>> for target in (0.0, 0.5):
        ...     with tf.GradientTape() as tape:
        ...         scaled = optimizer.get_scaled_loss(0.5 * tf.square(weight - target))
        ...     gradients = tape.gradient(scaled, [weight])
        ...     applied = accumulator.apply_gradients(zip(gradients, [weight]))
        ...     print(bool(applied), float(weight))
        False 1.0
        True 0.25
    """

    def __init__(self, optimizer: LossScaleOptimizer, steps: int) -> None:
        super().__init__(name="gradient_accumulator")
        if not isinstance(optimizer, LossScaleOptimizer):
            raise TypeError(
                "GradientAccumulator takes a tfamp.LossScaleOptimizer; got "
                f"{described(optimizer)} Wrap a Keras optimizer, with loss_scale=1.0 where no "
                "loss scale is wanted."
            )
        inner = optimizer.inner_optimizer
        if inner.gradient_accumulation_steps:
            raise ValueError(
                f"{inner.name} has gradient_accumulation_steps="
                f"{inner.gradient_accumulation_steps} and accumulates itself. Create it "
                "without."
            )
        self._optimizer = optimizer
        self._steps = checked_count("steps", steps)
        # Every replica has a counter; all are equal.
        self._count = tf.Variable(0, dtype=tf.int64, trainable=False, name="count")
        # Extended in place, so that a checkpoint restored earlier finds them.
        self._sums: list[tf.Variable] = []
        # The variables in the order of the first call, and the indices of those that had a
        # gradient in any graph. As attributes of the tf.Module lists would be saved.
        self._window = SimpleNamespace(variables=[], had_gradient=set())

    @property
    def optimizer(self) -> LossScaleOptimizer:
        """The optimizer that scales the loss and applies the mean."""
        return self._optimizer

    @property
    def steps(self) -> int:
        """Number of micro-batches in a window."""
        return self._steps

    @property
    def count(self) -> Any:
        """Micro-batches added since the last window ended, a scalar int64 tensor."""
        return tf.convert_to_tensor(self._count)

    @as_written
    def apply_gradients(self, grads_and_vars: Iterable[tuple[Any, Any]]) -> Any:
        """Adds the gradients of a micro-batch; applies the mean if it ends the window.

        Args:
            grads_and_vars: Pairs of gradient and variable, the same variables in each call. The
                gradients are of the scaled loss, or results of `get_unscaled_gradients`.

        Returns:
            Whether the window ended, a scalar bool tensor. Whether its gradients were finite is
            the optimizer's `last_step_finite`.

        Raises:
            ValueError: As `LossScaleOptimizer.apply_gradients`, or the variables differ, or the
                accumulator was created outside the scope of the strategy.
            TypeError: As `LossScaleOptimizer.apply_gradients`.
        """
        grads, variables = gradient_lib.split_pairs(grads_and_vars, "apply_gradients")
        gradient_lib.check_gradients(grads, variables)
        gradient_lib.check_in_replica()
        gradient_lib.check_created_in_scope(self._count, "GradientAccumulator")
        if not self._sums:
            gradient_lib.outside_the_graph(lambda: self._build(variables))
        self._check_variables(variables)
        self._add(grads, variables)
        return self._end_window_if(tf.equal(self._count.assign_add(1), self._steps))

    @as_written
    def flush(self) -> Any:
        """Ends the window early, with the mean of its micro-batches: for the end of an epoch.

        Returns:
            Whether the window had any, a scalar bool tensor.

        Raises:
            ValueError: Called outside a replica; or before the first micro-batch of this object,
                in a function that is being traced, or when a checkpoint's window is to end.
        """
        gradient_lib.check_in_replica()
        if not self._sums:
            if not tf.executing_eagerly() or int(self._count) > 0:
                raise ValueError(
                    "flush cannot end a window before the first micro-batch of this "
                    "GradientAccumulator, as it does not know the variables yet. Call "
                    "apply_gradients once before flush is traced, or after a checkpoint with an "
                    "unfinished window was restored."
                )
            return tf.constant(False)
        return self._end_window_if(self._count > 0)

    def _build(self, variables: list[Variable]) -> None:
        if not self._optimizer.built:
            self._optimizer.build(variables)
        self._window.variables += variables
        self._sums.extend(map(_zeros_like, variables))

    def _check_variables(self, variables: list[Variable]) -> None:
        key = key_of(self._optimizer)
        known = self._window.variables
        if list(map(key, variables)) != list(map(key, known)):
            raise ValueError(
                f"The first call of a GradientAccumulator was for {len(known)} variables, this "
                f"one is for {len(variables)} or for others. Give the same variables, in the "
                "same order, for every micro-batch, with None for those without a gradient."
            )

    def _add(self, grads: list[Tensor], variables: list[Variable]) -> None:
        # The sums hold unscaled gradients: micro-batches of one window may have been unscaled
        # by the user or not, in different graphs.
        record = self._optimizer.gradient_record
        gradients = record.take(grads, variables).unscaled()
        record.unscaled.clear()
        pairs = zip(gradients.values, self._sums, strict=True)
        for index, (gradient, total) in enumerate(pairs):
            if gradient is None:
                continue
            self._window.had_gradient.add(index)
            if gradient_lib.is_next_value(variables[index]):
                value = tf.cast(gradient, total.dtype)
                total.assign(tf.where(self._count > 0, tf.maximum(total, value), value))
            elif isinstance(gradient, tf.IndexedSlices):
                # Variables with a value per replica have no scatter_add.
                tf.raw_ops.ResourceScatterAdd(
                    resource=total.handle,
                    indices=gradient.indices,
                    updates=tf.cast(gradient.values, total.dtype),
                )
            else:
                total.assign_add(tf.cast(gradient, total.dtype))

    def _end_window_if(self, ends: Tensor) -> Tensor:
        def on_all_replicas(on_each: OnEach, ends: Tensor) -> None:
            gradient_lib.call_if(ends, lambda: on_each(self._apply_mean))

        once_for_all_replicas(on_all_replicas, ends)
        return ends

    def _apply_mean(self) -> None:
        count, had_gradient = tf.convert_to_tensor(self._count), self._window.had_gradient

        variables = self._window.variables

        def mean(index: int, total: tf.Variable) -> Tensor:
            is_largest = gradient_lib.is_next_value(variables[index])
            value = tf.convert_to_tensor(total)
            return value if is_largest else value / tf.cast(count, total.dtype)

        sums = enumerate(self._sums)
        means = [mean(index, total) if index in had_gradient else None for index, total in sums]
        self._optimizer.apply(means, variables, unscaled=True)
        for index in had_gradient:
            self._sums[index].assign(tf.zeros_like(self._sums[index]))
        self._count.assign(0)


def _zeros_like(variable: Variable) -> tf.Variable:
    # One sum per replica; saved as their total, but for the largest next values.
    saved = tf.VariableAggregation.SUM
    if gradient_lib.is_next_value(variable):
        saved = tf.VariableAggregation.ONLY_FIRST_REPLICA
    wide = "float64" if gradient_lib.dtype_name(variable) == "float64" else "float32"
    return tf.Variable(
        tf.zeros(variable.shape, wide),
        trainable=False,
        synchronization=tf.VariableSynchronization.ON_READ,
        aggregation=saved,
        name=f"{gradient_lib.variable_name(variable).partition(':')[0]}_sum",
    )
