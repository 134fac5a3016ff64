"""`GradScaler`: loss scaling in the shape PyTorch and Paddle gave it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfamp.interop.keras_backend import described, require_tensorflow
from tfamp.interop.tracing import as_written
from tfamp.training import gradients as gradient_lib
from tfamp.training.conditional_apply import apply_if_finite, check_in_replica, outside_the_graph
from tfamp.training.scaler_rounds import Rounds, Stage
from tfamp.training.scaler_state import ScalerState


class GradScaler(ScalerState):
    """Scales losses and unscales gradients for any number of optimizers, as in PyTorch and Paddle.

    One scaler serves a training loop with several losses, models and optimizers. In each iteration
    scale the losses, take the gradients, `step` every optimizer and then `update` once. To clip or
    inspect gradients, `unscale` them before the step. A step with a gradient that is not finite,
    on any replica, is skipped; the other optimizers' steps are not. `update` makes the scale back
    off if any optimizer's gradients were not finite, and grow after `growth_interval` iterations
    in a row without.

    The scale follows PyTorch's rule step for step, with two bounds that the rule lacks: it never
    falls below float32's smallest normal number, 2**-126, so never becomes 0; and a growth interval
    that is made shorter than the count of good iterations takes effect. As in PyTorch, a scale
    that would grow to inf keeps its value.

    The methods work in eager mode, in a `tf.function`, in several, under `jit_compile=True` and in
    `strategy.run`; create the scaler under `strategy.scope()`. `tf.train.Checkpoint` saves it.

    Source: `torch.amp.GradScaler`; `minimize` is `paddle.amp.GradScaler`'s.

    Args:
        init_scale: Scale of the first iteration.
        growth_factor: Factor the scale grows by, greater than 1.
        backoff_factor: Factor it backs off by after an overflow, between 0 and 1.
        growth_interval: Iterations in a row without overflow before the scale grows.
        enabled: False makes every method pass on what it is given.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: A number is out of range.
        UnsupportedBackendError: Keras runs on JAX or PyTorch.

    Example:
        >>> import keras, tensorflow as tf, tfamp
        >>> weight, optimizer = keras.Variable(3.0), keras.optimizers.SGD(0.25)
        >>> scaler = tfamp.GradScaler()
        >>> with tf.GradientTape() as tape:
        ...     scaled = scaler.scale(tf.square(weight))
        >>> gradients = scaler.unscale(optimizer, tape.gradient(scaled, [weight]))
        >>> gradients = [tf.clip_by_norm(g, 4.0) for g in gradients]
        >>> applied = scaler.step(optimizer, zip(gradients, [weight]))
        >>> scaler.update()
        >>> float(weight), bool(applied)
        (2.0, True)
    """

    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
    ) -> None:
        require_tensorflow("tfamp.GradScaler", "tfamp.LossScaleOptimizer")
        super().__init__(init_scale, growth_factor, backoff_factor, growth_interval, enabled)
        self._rounds = Rounds()

    @as_written
    def scale(self, outputs: Any) -> Any:
        """Multiplies one or several losses by the current scale.

        Args:
            outputs: Float tensor of any shape, or a list, tuple or dict of such.

        Returns:
            The same, scaled: float32, or float64 for float64.

        Raises:
            TypeError: There is something else than a float tensor.
        """
        if not self._enabled:
            return outputs
        scale = self.get_scale()
        return tf.nest.map_structure(lambda loss: gradient_lib.scaled_loss(loss, scale), outputs)

    @as_written
    def unscale(self, optimizer: keras.optimizers.Optimizer, grads: Iterable[Any]) -> list[Any]:
        """Divides an optimizer's gradients by the current scale.

        Optional: `step` does it if this was not called. The gradients are checked here and the
        result is remembered until `update`, so that clipping cannot hide an overflow.

        Args:
            optimizer: The optimizer they are for.
            grads: Float tensors, `tf.IndexedSlices` or None, as `tape.gradient` returns them.

        Returns:
            The unscaled gradients in the same order, float32 or float64.

        Raises:
            RuntimeError: The optimizer has been unscaled or stepped since the last `update`.
            TypeError: `optimizer` is no Keras optimizer, or `grads` no list of gradients.
            ValueError: The optimizer scales losses itself.
        """
        grads = gradient_lib.listed(grads, "unscale")
        if not self._enabled:
            return grads
        _check_optimizer(optimizer)
        guards = self._rounds.check_order("unscale", optimizer)
        variables = getattr(optimizer, "_trainable_variables", ())
        unscaled = gradient_lib.unscale_all(grads, variables, self.get_scale())
        finite = gradient_lib.on_every_replica(gradient_lib.all_finite(unscaled))
        with tf.control_dependencies(guards):
            self._rounds.record(optimizer, Stage.UNSCALED, tf.identity(finite))
        return unscaled

    @as_written
    def step(
        self, optimizer: keras.optimizers.Optimizer, grads_and_vars: Iterable[tuple[Any, Any]]
    ) -> Any:
        """Applies an optimizer's gradients, unless one of them is not finite.

        Args:
            optimizer: A bare Keras optimizer.
            grads_and_vars: Pairs of gradient and variable. The gradients are those that `unscale`
                returned, changed at will; or, where it was not called, scaled ones.

        Returns:
            Whether they were applied, a scalar bool tensor; equal on all replicas.

        Raises:
            RuntimeError: The optimizer has been stepped since the last `update`.
            TypeError: `optimizer` is no Keras optimizer, or an element is no pair of a float
                gradient and a variable.
            ValueError: The optimizer scales losses itself, or there is nothing to apply, or a
                shape does not fit its variable.
        """
        grads, variables = gradient_lib.split_pairs(grads_and_vars, "step")
        return self._step("step", optimizer, grads, variables)

    def _step(
        self,
        call: str,
        optimizer: keras.optimizers.Optimizer,
        grads: list[Any],
        variables: list[Any],
    ) -> Any:
        if not self._enabled:
            optimizer.apply_gradients(zip(grads, variables, strict=True))
            return tf.constant(True)
        _check_optimizer(optimizer)
        gradient_lib.check_gradients(grads, variables)
        check_in_replica()
        guards = self._rounds.check_order(call, optimizer)
        if not optimizer.built:
            outside_the_graph(lambda: optimizer.build(variables))
        scale = self._still_scaled_by(optimizer)
        finite = gradient_lib.on_every_replica(gradient_lib.all_finite(grads, variables, scale))
        with tf.control_dependencies(guards):
            # Also what unscale found, perhaps in another function, and clipping has hidden since.
            found = self._rounds.of(optimizer).nonfinite.is_set()
            finite = tf.logical_and(finite, tf.logical_not(found))
        self._rounds.record(optimizer, Stage.STEPPED, finite)
        apply_if_finite(finite, optimizer, grads, variables, scale)
        return finite

    def _still_scaled_by(self, optimizer: keras.optimizers.Optimizer) -> Any:
        """Returns what the gradients are to be divided by; None where they have been."""
        stage = self._rounds.stage(optimizer)
        if stage is Stage.UNSCALED:
            return None
        scale = self.get_scale()
        if stage is Stage.UNKNOWN:
            unscaled = self._rounds.of(optimizer).reached[Stage.UNSCALED].is_set()
            return tf.where(unscaled, 1.0, scale)
        return scale

    @as_written
    def update(self, new_scale: Any = None) -> None:
        """Moves the scale on and starts the next iteration.

        Args:
            new_scale: A scale to set instead, a number or a scalar tensor; it is checked. A tensor
                that is not positive, normal and finite in float32 leaves the scale as it is.

        Raises:
            RuntimeError: No optimizer has been unscaled or stepped since the last update.
            TypeError: `new_scale` is no number.
            ValueError: `new_scale` is out of range.
        """
        if not self._enabled:
            return
        if new_scale is None:
            with tf.control_dependencies(self._rounds.check_recorded()):
                finite = self._rounds.all_finite()
            self._follow_the_rule(finite)
        else:
            self._set_scale(new_scale)
        self._rounds.start_next()

    @as_written
    def minimize(
        self,
        optimizer: keras.optimizers.Optimizer,
        scaled_loss: Any,
        tape: tf.GradientTape,
        variables: Sequence[Any],
    ) -> Any:
        """Takes the gradients of a scaled loss, steps and updates; Paddle's way for one optimizer.

        With several optimizers use `step` with each and `update` once: the second loss would have
        been scaled with a scale that the first `minimize` may have changed.

        Args:
            optimizer: A bare Keras optimizer.
            scaled_loss: What `scale` returned, computed under `tape`.
            tape: The tape that recorded it.
            variables: The variables to update.

        Returns:
            Whether the gradients were applied, a scalar bool tensor.

        Raises:
            RuntimeError: The optimizer has been unscaled or stepped since the last update.
            TypeError: As `step`.
            ValueError: As `step`.
        """
        variables = list(variables)
        grads = list(tape.gradient(scaled_loss, variables))
        applied = self._step("minimize", optimizer, grads, variables)
        self.update()
        return applied


def _check_optimizer(optimizer: Any) -> None:
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        raise ValueError(
            f"{optimizer.name} is a LossScaleOptimizer; with a GradScaler the loss would be "
            "scaled twice. Pass its inner_optimizer instead."
        )
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise TypeError(
            "GradScaler takes a keras.optimizers.Optimizer, e.g. keras.optimizers.Adam(); got "
            f"{described(optimizer)}"
        )
    if optimizer.loss_scale_factor is not None:
        raise ValueError(
            f"{optimizer.name} has loss_scale_factor={optimizer.loss_scale_factor}, so it "
            "scales losses itself. Create it without."
        )
