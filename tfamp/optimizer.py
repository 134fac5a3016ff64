"""`LossScaleOptimizer`: a Keras optimizer wrapper whose loss scaling cannot corrupt a model."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import keras
import tensorflow as tf
from keras import ops

from tfamp import gradients as gradient_lib
from tfamp.conditional_apply import apply_if_finite, check_in_replica, outside_the_graph
from tfamp.dtypes import LOW_PRECISION
from tfamp.errors import TfampWarning
from tfamp.loss_scaling import LossScaling
from tfamp.options import DynamicLossScale, FixedLossScale, LossScale, resolve_loss_scale
from tfamp.tracing import as_written


@keras.saving.register_keras_serializable(package="tfamp")
class LossScaleOptimizer(LossScaling, keras.optimizers.LossScaleOptimizer):
    """Wraps a Keras optimizer with loss scaling, so that float16 gradients do not underflow.

    The loss is multiplied by a scale before the gradients are taken and the gradients are divided
    by it before they are applied. A step in which any gradient on any replica is inf or NaN is
    skipped: no weight, no slot variable, no moving average and no iteration count changes, and
    the scale backs off. After `dynamic_growth_steps` finite steps in a row it grows. It never
    leaves [`min_scale`, `max_scale`].

    `model.fit` needs nothing else. In a custom loop scale the loss with `get_scaled_loss`, take
    the gradients, and either hand them to `apply_gradients` as they are or unscale them first
    with `get_unscaled_gradients`, for example to clip them.

    Source: Micikevicius et al., "Mixed Precision Training", ICLR 2018; the methods are those of
    `tf.keras.mixed_precision.LossScaleOptimizer`. A `keras.optimizers.LossScaleOptimizer`, so
    `compile` does not wrap it again.

    Args:
        inner_optimizer: The `keras.optimizers.Optimizer` to wrap. It is not modified.
        loss_scale: A `FixedLossScale` or `DynamicLossScale`; a number means a fixed scale. None
            builds a `DynamicLossScale` from the arguments below.
        dynamic: False keeps the scale at `initial_scale`; steps that overflow are still skipped.
        initial_scale: Scale of the first step.
        dynamic_growth_steps: Finite steps in a row before the scale grows.
        growth_factor: Factor it grows by, greater than 1.
        backoff_factor: Factor it backs off by after an overflow, between 0 and 1.
        hysteresis: The scale backs off from this overflow in a row on.
        min_scale: Smallest scale.
        max_scale: Largest scale.
        name: Name of the optimizer.

    Raises:
        TypeError: `inner_optimizer` is no Keras optimizer, or an argument has the wrong type.
        ValueError: `inner_optimizer` scales losses itself, or a number is out of range, or
            `loss_scale` is given together with the arguments it replaces.

    Example:
        >>> import keras, numpy, tfamp
        >>> optimizer = tfamp.LossScaleOptimizer(keras.optimizers.SGD(0.5), initial_scale=4.0)
        >>> weight = keras.Variable(1.0)
        >>> gradient = numpy.float32(optimizer.get_scaled_loss(1.0))
        >>> _ = optimizer.apply_gradients([(gradient, weight)])
        >>> float(weight)
        0.5
    """

    def __init__(
        self,
        inner_optimizer: keras.optimizers.Optimizer,
        *,
        loss_scale: LossScale | float | None = None,
        dynamic: bool = True,
        initial_scale: float = DynamicLossScale.initial_scale,
        dynamic_growth_steps: int = DynamicLossScale.growth_steps,
        growth_factor: float = DynamicLossScale.growth_factor,
        backoff_factor: float = DynamicLossScale.backoff_factor,
        hysteresis: int = DynamicLossScale.hysteresis,
        min_scale: float = DynamicLossScale.min_scale,
        max_scale: float = DynamicLossScale.max_scale,
        name: str | None = None,
    ) -> None:
        _check_inner(inner_optimizer)
        rule = resolve_loss_scale(
            loss_scale,
            dynamic,
            DynamicLossScale(
                initial_scale=initial_scale,
                growth_factor=growth_factor,
                backoff_factor=backoff_factor,
                growth_steps=dynamic_growth_steps,
                hysteresis=hysteresis,
                min_scale=min_scale,
                max_scale=max_scale,
            ),
        )
        # Not Keras's LossScaleOptimizer.__init__: it would clear the inner optimizer's settings.
        keras.optimizers.Optimizer.__init__(self, learning_rate=0.0, name=name)
        self.inner_optimizer = inner_optimizer
        self._start_scaling(rule)

    def build(self, var_list: Sequence[Any]) -> None:
        """Creates the inner optimizer's variables.

        Args:
            var_list: The trainable variables. With an empty list nothing happens: the first apply
                builds the optimizer then.
        """
        # Keras builds with an empty list when it loads a compiled model from an .h5 file. Built
        # for no variables, the optimizer would refuse the model's ever after.
        if not var_list:
            return
        if not self.inner_optimizer.built:
            self.inner_optimizer.build(var_list)
        # Past Keras's LossScaleOptimizer.build, which would make a second set of state variables.
        keras.optimizers.Optimizer.build(self, var_list)

    def exclude_from_weight_decay(
        self, var_list: Sequence[Any] | None = None, var_names: Sequence[str] | None = None
    ) -> None:
        """Takes variables out of the inner optimizer's weight decay; call it before it is built.

        Args:
            var_list: The variables to take out.
            var_names: Parts of names; variables whose name contains one are taken out.
        """
        self.inner_optimizer.exclude_from_weight_decay(var_list=var_list, var_names=var_names)

    @as_written
    def minimize(
        self, loss: Any, var_list: Sequence[Any], tape: tf.GradientTape | None = None
    ) -> None:
        """Scales the loss, takes its gradients and applies them.

        Args:
            loss: A function without arguments that returns the loss, or the loss itself, computed
                under `tape`.
            var_list: The variables to update.
            tape: The tape that recorded `loss`, if `loss` is a tensor.

        Raises:
            ValueError: `loss` is a tensor and `tape` is missing, or `var_list` is empty.
        """
        variables = list(var_list)
        is_function = callable(loss) and not ops.is_tensor(loss)
        if not is_function and tape is None:
            raise ValueError(
                "minimize needs the tape that recorded the loss, or the loss as a function without "
                "arguments; got a loss tensor and tape=None."
            )
        # A tape that was left can be entered again; the multiplication has to be on it.
        with tape or tf.GradientTape() as recording:
            scaled = self.scale_loss(loss() if is_function else loss)
        gradients = recording.gradient(scaled, variables)
        self.apply(gradients, variables, unscaled=False)

    @as_written
    def apply_gradients(
        self, grads_and_vars: Iterable[tuple[Any, Any]], *, unscaled: bool | None = None
    ) -> Any:
        """Applies gradients, unless one of them is not finite.

        Args:
            grads_and_vars: Pairs of gradient and variable.
            unscaled: Whether the gradients have been unscaled. None: they have if
                `get_unscaled_gradients` was called since the last apply.

        Returns:
            `iterations`, as Keras's optimizers do.

        Raises:
            ValueError: There is no pair, or no gradient, or a shape does not fit its variable, or
                the optimizer was built for other variables.
            TypeError: An element is no pair of a float gradient and a variable.
        """
        grads, variables = gradient_lib.split_pairs(grads_and_vars, "apply_gradients")
        self.apply(grads, variables, unscaled=unscaled)
        return self.iterations

    @as_written
    def apply(
        self,
        grads: Sequence[Any],
        trainable_variables: Sequence[Any] | None = None,
        *,
        unscaled: bool | None = None,
    ) -> None:
        """Applies gradients, unless one of them is not finite.

        Args:
            grads: Float tensors, `tf.IndexedSlices` or None.
            trainable_variables: The variables, in the same order. None: those the optimizer was
                built with.
            unscaled: As in `apply_gradients`.

        Raises:
            ValueError: As in `apply_gradients`, or called outside a replica.
            TypeError: As in `apply_gradients`.
        """
        grads = list(grads)
        variables = list(
            self._trainable_variables if trainable_variables is None else trainable_variables
        )
        gradient_lib.check_gradients(grads, variables)
        check_in_replica()
        if not self.built:
            outside_the_graph(lambda: self.build(variables))
        self._check_known(variables)
        unchecked = self._unchecked(grads, variables)
        scale = self._still_scaled_by(unscaled)
        finite = gradient_lib.on_every_replica(gradient_lib.all_finite(*unchecked, scale))
        apply_if_finite(
            ops.logical_and(finite, self._unscaled_finite),
            self.inner_optimizer,
            grads,
            variables,
            scale,
            skips=self._rule.skip_nonfinite,
            record=self._record_step,
        )

    def _check_known(self, variables: list[Any]) -> None:
        # Keras checks it too, but some releases fail there while they put the message together.
        for variable in variables:
            if self._var_key(variable) not in self._trainable_variables_indices:
                raise ValueError(
                    f"Unknown variable {gradient_lib.variable_name(variable)}: {self.name} was "
                    f"built for {len(self._trainable_variables)} other variables. Create a new "
                    "optimizer for a new set of variables, or build it with all of them first."
                )

    def _unchecked(self, grads: list[Any], variables: list[Any]) -> tuple[list[Any], list[Any]]:
        """Returns the gradients, with their variables, that were not checked when unscaled."""
        checked = self._windows.current().came_out(grads)
        pairs = [
            (gradient, variable)
            for gradient, variable, known in zip(grads, variables, checked, strict=True)
            # What the variable's own dtype can hold was not known there.
            if not known or gradient_lib.dtype_name(variable) in LOW_PRECISION
        ]
        return [gradient for gradient, _ in pairs], [variable for _, variable in pairs]

    def _still_scaled_by(self, unscaled: bool | None) -> Any:
        """Returns what the gradients are to be divided by; None where they have been."""
        known_unscaled = self._windows.current().close() or unscaled
        if unscaled is False or (unscaled is None and not known_unscaled):
            return self._divisor(certainly_scaled=unscaled is False)
        return None

    def _divisor(self, certainly_scaled: bool) -> Any:
        if certainly_scaled:
            return self.get_scale()
        if not self._scale_was_used:
            self._scale_was_used = True  # Say it once.
            warnings.warn(
                f"{self.name} divides the gradients it applies by its loss scale, but no loss has "
                "been scaled with it yet. In a custom loop take the gradients of "
                "optimizer.get_scaled_loss(loss), or pass unscaled=True.",
                TfampWarning,
                stacklevel=7,
            )
        # Gradients unscaled in another tf.function, or in eager mode, only show at run time.
        return ops.where(self._unscaled_pending, 1.0, self.get_scale())

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

    def get_config(self) -> dict[str, Any]:
        """The constructor's arguments, serializable."""
        config: dict[str, Any] = {
            "name": self.name,
            "inner_optimizer": keras.saving.serialize_keras_object(self.inner_optimizer),
        }
        rule = self._rule
        if isinstance(rule, FixedLossScale):
            config["loss_scale"] = {"scale": rule.scale, "skip_nonfinite": rule.skip_nonfinite}
        else:
            config |= {
                "initial_scale": rule.initial_scale,
                "dynamic_growth_steps": rule.growth_steps,
                "growth_factor": rule.growth_factor,
                "backoff_factor": rule.backoff_factor,
                "hysteresis": rule.hysteresis,
                "min_scale": rule.min_scale,
                "max_scale": rule.max_scale,
            }
        return config

    @classmethod
    def from_config(
        cls, config: dict[str, Any], custom_objects: dict[str, Any] | None = None
    ) -> LossScaleOptimizer:
        """Makes an optimizer from `get_config`'s result, which is not modified.

        Args:
            config: The configuration; that of a `keras.optimizers.LossScaleOptimizer` will do.
            custom_objects: Names of user-defined classes of the inner optimizer.

        Returns:
            The optimizer, without its state.
        """
        arguments = dict(config)
        inner = keras.saving.deserialize_keras_object(
            arguments.pop("inner_optimizer"), custom_objects=custom_objects
        )
        fixed = arguments.pop("loss_scale", None)
        rule = FixedLossScale(**fixed) if fixed else None
        return cls(inner, loss_scale=rule, **arguments)


def _check_inner(inner: Any) -> None:
    if isinstance(inner, keras.optimizers.LossScaleOptimizer):
        raise ValueError(
            f"{inner.name} is a LossScaleOptimizer already; wrapping it again would scale twice. "
            "Pass its inner_optimizer instead."
        )
    if not isinstance(inner, keras.optimizers.Optimizer):
        raise TypeError(
            "inner_optimizer must be a keras.optimizers.Optimizer, e.g. keras.optimizers.Adam(); "
            f"got {inner!r} of type {type(inner).__name__}."
        )
    if inner.loss_scale_factor is not None:
        raise ValueError(
            f"{inner.name} has loss_scale_factor={inner.loss_scale_factor}, so it scales losses "
            "itself. Create it without, and pass LossScaleOptimizer(..., "
            f"loss_scale={inner.loss_scale_factor}) for a fixed scale."
        )
