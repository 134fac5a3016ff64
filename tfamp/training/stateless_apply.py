"""`stateless_apply`, which Keras's JAX backend calls; a part of `LossScaleOptimizer`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
from keras import ops

from tfamp.training import gradients as gradient_lib
from tfamp.training.loss_scaling import LossScaling


class StatelessApply(LossScaling):
    """Adds `stateless_apply` to an optimizer."""

    def stateless_apply(
        self,
        optimizer_variables: Sequence[Any],
        grads: Sequence[Any],
        trainable_variables: Sequence[Any],
    ) -> tuple[list[Any], list[Any]]:
        """Returns what `apply` would assign, without assigning it; for Keras's JAX backend.

        Args:
            optimizer_variables: Values of `variables`, in that order.
            grads: Gradients of the scaled loss.
            trainable_variables: Values of the variables the optimizer was built with.

        Returns:
            The new values of the trainable variables and of `variables`.

        Raises:
            ValueError: The optimizer is not built, or the backend is TensorFlow, where Keras's
                optimizers do not support it.
        """
        if not self.built:
            raise ValueError(
                f"{self.name} must be built before stateless_apply: call "
                "optimizer.build(model.trainable_variables)."
            )
        mapping = list(zip(self.variables, optimizer_variables, strict=True))
        inner_values = list(optimizer_variables[len(self._variables) :])
        with keras.StatelessScope(state_mapping=mapping) as scope:
            scale = self.dynamic_scale.value
            grads = gradient_lib.unscale_all(grads, self._trainable_variables, scale)
            finite = gradient_lib.all_finite(grads, self._trainable_variables)
            self._record_step(finite)
        own_values = [scope.get_current_value(variable) for variable in self._variables]

        def update() -> tuple[list[Any], list[Any]]:
            values: tuple[list[Any], list[Any]] = self.inner_optimizer.stateless_apply(
                inner_values, grads, trainable_variables
            )
            return values

        skips = self._rule.skip_nonfinite
        new_trainable, new_inner = (
            ops.cond(finite, update, lambda: (list(trainable_variables), inner_values))
            if skips
            else update()
        )
        return new_trainable, own_values + list(new_inner)
