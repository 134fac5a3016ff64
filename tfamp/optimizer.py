"""`LossScaleOptimizer`: a Keras optimizer wrapper whose loss scaling cannot corrupt a model."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf
from keras import ops

from tfamp.core.dtypes import LOW_PRECISION
from tfamp.core.errors import TfampWarning
from tfamp.core.grad_clip import GradClip, resolve_grad_clip
from tfamp.core.options import DynamicLossScale, LossScale, resolve_loss_scale
from tfamp.interop.tracing import as_written
from tfamp.training import gradients as gradient_lib
from tfamp.training.conditional_apply import apply_if_finite, check_in_replica, outside_the_graph
from tfamp.training.gradient_norm import clipped_scale, gradient_norm
from tfamp.training.inner_settings import InnerSettings
from tfamp.training.master_keeping import MasterKeeping
from tfamp.training.optimizer_config import (
    check_features,
    check_inner,
    rule_from_config,
    scale_config,
)
from tfamp.training.replica_sum import several_replicas, summed, summed_in_float16
from tfamp.training.scale_variables import as_tensor
from tfamp.training.stateless_apply import StatelessApply


@keras.saving.register_keras_serializable(package="tfamp")
class LossScaleOptimizer(
    InnerSettings, MasterKeeping, StatelessApply, keras.optimizers.LossScaleOptimizer
):
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
        initial_scale: Scale of the first step; None, Keras 2's default, is ours.
        dynamic_growth_steps: Finite steps in a row before the scale grows; None is the default.
        growth_factor: Factor it grows by, greater than 1.
        backoff_factor: Factor it backs off by after an overflow, between 0 and 1.
        hysteresis: The scale backs off from this overflow in a row on.
        min_scale: Smallest scale.
        max_scale: Largest scale.
        consecutive_hysteresis: Whether any finite step starts the count of `hysteresis` again, or
            only a growth of the scale.
        aggregate_in_float16: Sums the gradients of several replicas as float16 at the current
            scale, which sends half the bytes; unscales the sum in float32, then checks it.
        master_weights: Updates float16 and bfloat16 variables through float32 copies, kept and
            saved with the optimizer.
        grad_clip: A `GradClip`, a dict of its fields or a number for the Euclidean norm: clips the
            unscaled gradients, summed over the replicas, all together.
        name: Name of the optimizer.

    Raises:
        TypeError: `inner_optimizer` is no Keras optimizer, or an argument has the wrong type.
        ValueError: `inner_optimizer` scales losses itself, or a number is out of range, or
            `loss_scale` is given together with the arguments it replaces, or `grad_clip` or
            `aggregate_in_float16` with an inner optimizer that accumulates gradients.

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
        initial_scale: float | None = DynamicLossScale.initial_scale,
        dynamic_growth_steps: int | None = DynamicLossScale.growth_steps,
        growth_factor: float = DynamicLossScale.growth_factor,
        backoff_factor: float = DynamicLossScale.backoff_factor,
        hysteresis: int = DynamicLossScale.hysteresis,
        min_scale: float = DynamicLossScale.min_scale,
        max_scale: float = DynamicLossScale.max_scale,
        consecutive_hysteresis: bool = DynamicLossScale.consecutive_hysteresis,
        aggregate_in_float16: bool = False,
        master_weights: bool = False,
        grad_clip: GradClip | Mapping[str, Any] | float | None = None,
        name: str | None = None,
    ) -> None:
        check_inner(inner_optimizer)
        clip = resolve_grad_clip(grad_clip)
        # Keras 2's class has None for both, and programs hand it on.
        if initial_scale is None:
            initial_scale = DynamicLossScale.initial_scale
        if dynamic_growth_steps is None:
            dynamic_growth_steps = DynamicLossScale.growth_steps
        check_features(
            inner_optimizer,
            clip,
            aggregate_in_float16=aggregate_in_float16,
            master_weights=master_weights,
        )
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
                consecutive_hysteresis=consecutive_hysteresis,
            ),
        )
        # Not Keras's LossScaleOptimizer.__init__: it would clear the inner optimizer's settings.
        keras.optimizers.Optimizer.__init__(self, learning_rate=0.0, name=name)
        self.inner_optimizer = inner_optimizer
        self._aggregates_in_float16 = aggregate_in_float16
        self._start_masters(master_weights)
        self._start_scaling(rule)
        self._grad_clip = clip
        self._norm = None if clip is None else self._scalar("last_gradient_norm", "float32", 0.0)

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
        targets = self._create_masters(var_list)
        if not self.inner_optimizer.built:
            self.inner_optimizer.build(targets)
        self._register(list(var_list))

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
        targets = [self._target(variable) for variable in variables]
        sums_itself = several_replicas() and (
            self._aggregates_in_float16 or self._grad_clip is not None
        )
        unchecked = self._unchecked(grads, targets)
        scale = self._still_scaled_by(unscaled)
        given = grads, variables, scale
        if sums_itself:
            grads, scale = self._summed(grads, targets, scale)
            # The sum can overflow where no replica's gradient has.
            unchecked = (grads, targets)
        finite = ops.logical_and(gradient_lib.all_finite(*unchecked, scale), self._unscaled_finite)
        finite = gradient_lib.on_every_replica(finite)
        if self.gradient_observer is not None:
            self.gradient_observer(*given, finite)
        apply_if_finite(
            finite,
            self.inner_optimizer,
            grads,
            targets,
            self._clipped(grads, targets, scale),
            skips=self._rule.skip_nonfinite,
            record=self._record_step,
            summed=sums_itself,
            masters=self._masters.pairs(),
        )

    def _summed(self, grads: list[Any], targets: list[Any], scale: Any) -> tuple[list[Any], Any]:
        """Sums the gradients over the replicas; returns what the sums are to be divided by."""
        if self._aggregates_in_float16:
            return summed_in_float16(grads, targets, scale, self.get_scale())
        return summed(grads, targets, scale), None

    def _clipped(self, grads: list[Any], targets: list[Any], scale: Any) -> Any:
        """Returns what the gradients are to be divided by, clipping included."""
        if self._grad_clip is None or self._norm is None:
            return scale
        norm = gradient_norm(grads, targets, scale, self._grad_clip.norm_type)
        self._norm.assign(norm)
        return clipped_scale(self._grad_clip, norm, scale)

    @property
    def grad_clip(self) -> GradClip | None:
        """How gradients are clipped, if they are."""
        return self._grad_clip

    @property
    def aggregate_in_float16(self) -> bool:
        """Whether the gradients of several replicas are sent as float16."""
        return self._aggregates_in_float16

    @property
    def last_gradient_norm(self) -> Any:
        """Norm of the last step's gradients before clipping, of the type of `grad_clip`.

        A scalar float32 tensor: unscaled, of the sum over the replicas, and not finite where the
        step was skipped. None without `grad_clip`.
        """
        return None if self._norm is None else as_tensor(self._norm)

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

    def get_config(self) -> dict[str, Any]:
        """The constructor's arguments, serializable."""
        clip = self._grad_clip
        return {
            "name": self.name,
            "inner_optimizer": keras.saving.serialize_keras_object(self.inner_optimizer),
            **scale_config(self._rule),
            "aggregate_in_float16": self._aggregates_in_float16,
            "master_weights": self._has_masters,
            "grad_clip": None if clip is None else clip.to_dict(),
        }

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
        rule = rule_from_config(arguments.pop("loss_scale", None))
        return cls(inner, loss_scale=rule, **arguments)
