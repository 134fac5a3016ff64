"""Warnings where Keras's LossScaleOptimizer divides gradients that nobody scaled, or clipped ones.

Keras wraps the optimizer of every model that is compiled under "mixed_float16". Its own train step
scales the loss; one of the user's has to, and without it the weights stand still in silence.
tfamp's wrapper warns by itself, see `scaling_warnings`.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable
from typing import Any

import keras

from tfamp.core.errors import TfampWarning
from tfamp.core.kinds import Optimizer
from tfamp.interop.patching import Patch, level_of_user
from tfamp.training.clipped_gradients import were_clipped

# Optimizers that a loss was scaled with, perhaps in a trace that has not run yet, or that were
# warned of.
_settled: weakref.WeakSet[Optimizer] = weakref.WeakSet()
_told_of_clips: weakref.WeakSet[Optimizer] = weakref.WeakSet()


def watch(wanted: bool) -> None:
    """Watches the wrappers that are constructed while it is wanted, as long as they exist."""
    _constructors.keep(wanted)


def _init(original: Callable[..., Any], optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
    original(optimizer, *args, **kwargs)
    _steps.acquire()
    weakref.finalize(optimizer, _steps.release).atexit = False


def _scale_loss(
    original: Callable[..., Any], optimizer: Optimizer, *args: Any, **named: Any
) -> Any:
    _settled.add(optimizer)
    return original(optimizer, *args, **named)


def _apply(original: Callable[..., Any], optimizer: Optimizer, *args: Any, **named: Any) -> Any:
    # A class with a scale_loss of its own need not call Keras's.
    is_keras_s = type(optimizer).scale_loss is keras.optimizers.LossScaleOptimizer.scale_loss
    if is_keras_s and optimizer not in _settled:
        _settled.add(optimizer)
        _warn(optimizer)
    elif optimizer not in _told_of_clips and were_clipped(
        optimizer, *_gradients_and_scale(optimizer, *args, **named)
    ):
        _told_of_clips.add(optimizer)
        _warn_of_clip(optimizer)
    return original(optimizer, *args, **named)


def _gradients_and_scale(
    optimizer: Optimizer, grads: Any, trainable_variables: Any = None
) -> tuple[Any, Any]:
    """The arguments of `apply` that count, and the scale of the step."""
    return list(grads), optimizer.dynamic_scale if optimizer.built else optimizer.initial_scale


def _warn_of_clip(optimizer: Optimizer) -> None:
    inner = optimizer.inner_optimizer.name
    warnings.warn(
        f"{optimizer.name}, Keras's LossScaleOptimizer around {inner}, is given gradients that "
        "were clipped while they were multiplied by the loss scale, and divides them by it: they "
        "become far too small, and training stands still. Let the optimizer clip, which unscales "
        f"first: give {inner} global_clipnorm=1.0, or compile with "
        "tfamp.LossScaleOptimizer(..., grad_clip=1.0).",
        TfampWarning,
        stacklevel=level_of_user(),
    )


def _warn(optimizer: Optimizer) -> None:
    warnings.warn(
        f"{optimizer.name} is Keras's LossScaleOptimizer around {optimizer.inner_optimizer.name}, "
        "and its scale_loss has not been called: it divides gradients that nobody multiplied, by "
        f"{optimizer.initial_scale:g} at first, and training stands still. Keras wraps the "
        "optimizer of a model that is compiled under 'mixed_float16'. Take the gradients of "
        "self.optimizer.scale_loss(loss) in a train_step of your own, rather than multiply by the "
        "scale yourself; or give compile a tfamp.LossScaleOptimizer, which divides nothing until "
        "a loss is scaled.",
        TfampWarning,
        stacklevel=level_of_user(),
    )


_constructors = Patch(
    optional={
        "keras_scaling_init": "a loss that Keras's LossScaleOptimizer never scaled is not told of."
    },
    keras_scaling_init=_init,
)
_lost = "a loss that Keras's LossScaleOptimizer never scaled may be told of wrongly, or not at all."
_steps = Patch(
    optional={"keras_scale_loss": _lost, "scaled_step": _lost},
    keras_scale_loss=_scale_loss,
    scaled_step=_apply,
)
