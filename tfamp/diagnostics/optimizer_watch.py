"""Seeing the gradients that an optimizer applies, and its loss scale."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras

from tfamp.gradient_accumulator import GradientAccumulator
from tfamp.interop.keras_hooks import as_tensor, built_for, described
from tfamp.interop.patching import unwrap_methods, wrap_method, wrapped_methods
from tfamp.interop.tf_private import as_written
from tfamp.optimizer import LossScaleOptimizer
from tfamp.torch_style.grad_scaler import GradScaler
from tfamp.training.gradients import Gradients, on_every_replica, outside_the_graph

# Called with gradients, variables, what the gradients are still to be divided by, and whether all
# are finite; None where the optimizer does not skip steps.
Observer = Callable[[list[Any], list[Any], Any, Any], None]


@dataclass(frozen=True, slots=True)
class Scaling:
    """How losses are scaled.

    Attributes:
        scale: Returns the scale as a tensor or number.
        skips: Returns the numbers of skipped steps, in all and in a row, as tensors; None where
            nobody counts them.
        steps: Returns the number of steps taken so far, skipped ones included.
    """

    scale: Callable[[], Any] = lambda: 1.0
    skips: Callable[[], tuple[Any, Any]] | None = None
    steps: Callable[[], int] = lambda: 0


def scaling_of(optimizer: Any) -> Scaling:
    """Returns how an optimizer scales losses.

    Args:
        optimizer: A `keras.optimizers.Optimizer`, a `tfamp.LossScaleOptimizer`, a
            `tfamp.GradScaler`, a `tfamp.GradientAccumulator`, which scales as its optimizer does,
            or None for no scaling.

    Raises:
        TypeError: It is something else.
    """
    if isinstance(optimizer, GradientAccumulator):
        optimizer = optimizer.optimizer
    if optimizer is None:
        return Scaling()
    if isinstance(optimizer, LossScaleOptimizer):
        return Scaling(
            lambda: as_tensor(optimizer.dynamic_scale),
            lambda: (optimizer.skipped_steps, optimizer.consecutive_skipped_steps),
            lambda: _iterations(optimizer) + int(optimizer.skipped_steps),
        )
    if isinstance(optimizer, GradScaler):
        return Scaling(optimizer.get_scale)
    if isinstance(optimizer, keras.optimizers.Optimizer):
        return Scaling(lambda: _keras_scale(optimizer), None, lambda: _iterations(optimizer))
    raise TypeError(
        "optimizer must be a Keras optimizer, a tfamp.LossScaleOptimizer, a tfamp.GradScaler or a "
        f"tfamp.GradientAccumulator; got {described(optimizer)}"
    )


def _keras_scale(optimizer: keras.optimizers.Optimizer) -> Any:
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return as_tensor(optimizer.dynamic_scale) if optimizer.built else 1.0
    return optimizer.loss_scale_factor or 1.0


def _iterations(optimizer: keras.optimizers.Optimizer) -> int:
    return int(as_tensor(optimizer.iterations))


def watch_optimizer(optimizer: Any, observer: Observer) -> Callable[[], None]:
    """Has a function see all gradients an optimizer applies.

    Functions traced before do not know of it: trace them again.

    Args:
        optimizer: A built or unbuilt `keras.optimizers.Optimizer`.
        observer: The function.

    Returns:
        A function that takes the observer off again.
    """
    if isinstance(optimizer, LossScaleOptimizer):
        optimizer.gradient_observer = observer

        def drop() -> None:
            if optimizer.gradient_observer is observer:
                optimizer.gradient_observer = None

        return drop
    scales = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)

    @as_written
    def apply(original: Any, grads: Any, trainable_variables: Any = None, **options: Any) -> Any:
        grads, given = list(grads), trainable_variables
        variables = built_for(optimizer) if given is None else list(given)
        if variables and not optimizer.built:
            outside_the_graph(lambda: optimizer.build(variables))
        if variables:
            # Keras's own loss scaling tells nobody what it found.
            finite = on_every_replica(Gradients.of_any(grads).all_finite()) if scales else None
            observer(grads, variables, scaling_of(optimizer).scale(), finite)
        return original(grads, trainable_variables, **options)

    unwrap_methods(optimizer)  # One may have been left here by a fit that was interrupted.
    take_off = wrap_method(optimizer, "apply", apply)
    wrapped_methods(optimizer)["apply"].observer = observer  # type: ignore[attr-defined]
    return take_off


def is_watched_by(optimizer: Any, observer: Observer) -> bool:
    """Whether it is this observer that sees the gradients an optimizer applies."""
    if isinstance(optimizer, LossScaleOptimizer):
        return optimizer.gradient_observer is observer
    return getattr(wrapped_methods(optimizer).get("apply"), "observer", None) is observer
