"""Scaling losses and unscaling their gradients; a part of `LossScaleOptimizer`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import keras
from keras import ops

from tfamp.core.options import LossScale
from tfamp.interop.tracing import PerTrace, as_written
from tfamp.training import gradients as gradient_lib
from tfamp.training.scale_variables import ScaleVariables
from tfamp.training.unscaled_window import UnscaledWindow

_Loss = TypeVar("_Loss")


class LossScaling(ScaleVariables):
    """Adds the methods a training loop scales with to an optimizer."""

    # Called with what `apply` is about to apply: gradients, variables, what the gradients are still
    # to be divided by (None: nothing) and whether all are finite. A NumericsMonitor puts itself
    # here while it watches; a function that was traced before does not know of it.
    gradient_observer: Callable[[list[Any], list[Any], Any, Any], None] | None = None

    def _start_scaling(self, rule: LossScale) -> None:
        self._windows = PerTrace(UnscaledWindow)
        self._create_scale_variables(rule)

    @as_written
    def get_scaled_loss(self, loss: _Loss) -> _Loss:
        """Multiplies the loss by the current scale.

        Args:
            loss: Float tensor of any shape, or a function without arguments that returns one.

        Returns:
            The scaled loss, float32 (float64 for a float64 loss), or a function returning it.

        Raises:
            TypeError: `loss` is neither.

        Example:
            >>> import keras, tfamp
            >>> optimizer = tfamp.LossScaleOptimizer(keras.optimizers.SGD(), initial_scale=8.0)
            >>> float(optimizer.get_scaled_loss(2.0))
            16.0
        """
        if callable(loss) and not keras.ops.is_tensor(loss):
            compute: Callable[[], Any] = loss
            return lambda: self.scale_loss(compute())  # type: ignore[return-value]
        return self.scale_loss(loss)

    @as_written
    def scale_loss(self, loss: Any) -> Any:
        """Multiplies the loss by the current scale; what `model.fit` calls.

        Args:
            loss: Float tensor of any shape.

        Returns:
            The scaled loss, float32 (float64 for a float64 loss).

        Raises:
            TypeError: `loss` is no float tensor.
        """
        scaled = gradient_lib.scaled_loss(loss, self.get_scale())
        if not self._windows.current().is_open():
            # What was unscaled elsewhere and never applied (to look at it, or because something
            # failed in between) says nothing of the gradients of this loss.
            self._unscaled_pending.assign(False)
        return scaled

    @as_written
    def get_unscaled_gradients(self, grads: Iterable[Any]) -> list[Any]:
        """Divides gradients of a scaled loss by the current scale.

        The gradients are checked here and the result is remembered until the next apply, so
        nothing done to them in between (clipping by value, say) can hide an overflow. May be
        called several times before one apply, for gradients of several backward passes.

        Args:
            grads: Float tensors, `tf.IndexedSlices` or None, as `tape.gradient` returns them.

        Returns:
            The unscaled gradients, in the same order.

        Raises:
            TypeError: `grads` is no list or tuple of gradients.
            ValueError: One of them has been unscaled already.

        Example:
            >>> import keras, tensorflow as tf, tfamp
            >>> optimizer = tfamp.LossScaleOptimizer(keras.optimizers.SGD(), initial_scale=8.0)
            >>> [float(g) for g in optimizer.get_unscaled_gradients([tf.constant(24.0)])]
            [3.0]
        """
        grads = gradient_lib.listed(grads, "get_unscaled_gradients")
        window = self._windows.current()
        window.check_not_unscaled(grads)
        unscaled = gradient_lib.unscale_all(grads, self._trainable_variables, self.get_scale())
        # The replicas agree on it when they apply: nothing is sent here.
        finite = gradient_lib.all_finite(unscaled)
        self._unscaled_finite.assign(ops.logical_and(self._unscaled_finite, finite))
        self._unscaled_pending.assign(True)
        window.remember(grads, unscaled)
        return unscaled
