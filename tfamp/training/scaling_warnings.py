"""Warnings about loops that scale a loss without unscaling its gradients, or the reverse.

tfamp's wrapper warns by itself. Keras puts its own wrapper around the optimizer of every model
that is compiled under "mixed_float16": its train step scales the loss, one of the user's has to,
and without it the weights stand still in silence. So Keras's wrapper is watched.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfamp.core.errors import TfampWarning
from tfamp.core.kinds import Optimizer, Tensor, Variable
from tfamp.interop.patching import Patch, level_of_user
from tfamp.training.clipped_gradients import were_clipped
from tfamp.training.gradients import dtype_name
from tfamp.training.scaling import GradientRecord

# What both wrappers do with gradients that were clipped while they were scaled.
_CLIPPED = (
    "is given gradients that were clipped while they were multiplied by the loss scale, and "
    "divides them by it: they become far too small, and training stands still."
)

# ---- tfamp's wrapper --------------------------------------------------------------------


class ScalingWarnings:
    """Warns of mistakes in the use of one optimizer's loss scale, once per kind.

    Args:
        name: Name of the optimizer.
        record: Record of its gradients.

    Attributes:
        in_float16: Whether layers compute in float16 although the policy of the process does
            not; `prepare` sets it.
    """

    def __init__(self, name: str, record: GradientRecord) -> None:
        self._name, self._record = name, record
        self._shown: set[str] = set()
        self.in_float16 = False

    def before_unscaling(self) -> None:
        """Warns if no loss was ever scaled."""
        if not self._record.was_used:
            self._warn_once(
                f"{self._name} divides gradients by its loss scale, but no loss has been "
                "scaled with it: they become far too small, and training stands still. Take "
                "the gradients of optimizer.get_scaled_loss(loss), or apply them as they are."
            )

    def before_step(self, gradients: Sequence[Tensor], variables: Sequence[Variable]) -> None:
        """Warns of gradients that were never scaled, or are divided by the scale too often."""
        if self._record.last_call == "unscale":
            return
        if not self._record.was_used and self._computes_in_float16([*gradients, *variables]):
            self._warn_once(
                f"No loss has been scaled with {self._name}, so it applies gradients as they "
                "are. In float16 small gradients are lost: they become zero. Take the gradients "
                "of optimizer.get_scaled_loss(loss), or pass loss_scale=1.0 to go without."
            )
        if self._record.was_read_after_scaling:
            self._warn_once(
                f"The scale of {self._name} was read after a loss was scaled with it, and "
                "apply divides the gradients by it. If they have been divided by it already, pass "
                "unscaled=True, or divide with optimizer.get_unscaled_gradients(gradients). If "
                "not, pass unscaled=False."
            )

    def before_dividing(
        self, optimizer: Optimizer, gradients: Sequence[Tensor], scale: Tensor, known: bool
    ) -> None:
        """Warns of gradients that were clipped and are still scaled.

        `known` is whether the caller says that they are scaled, rather than the calls before.
        """
        record = self._record
        scaled = record.was_used and record.last_call != "unscale"
        # One that divides by hand is told of that.
        if not known and (not scaled or record.was_read_after_scaling):
            return
        if were_clipped(optimizer, gradients, scale):
            self._warn_once(
                f"{self._name} {_CLIPPED} Unscale them first: clip the result of "
                "optimizer.get_unscaled_gradients(gradients), and apply that. Or let the "
                "optimizer clip: tfamp.LossScaleOptimizer(..., grad_clip=1.0)."
            )

    def _computes_in_float16(self, tensors: Sequence[Tensor]) -> bool:
        """Whether layers do, by the policy here, the dtypes of tensors and casts in a graph."""
        present = [tensor for tensor in tensors if tensor is not None]
        dtypes = {keras.config.dtype_policy().compute_dtype, *map(dtype_name, present)}
        return self.in_float16 or "float16" in dtypes or any(map(_was_float16, present))

    def _warn_once(self, message: str) -> None:
        if message not in self._shown:
            self._shown.add(message)
            warnings.warn(message, TfampWarning, stacklevel=level_of_user())


def _was_float16(gradient: Tensor) -> bool:
    """Whether a graph casts a gradient from float16, as for float32 weights of such layers."""
    if isinstance(gradient, tf.IndexedSlices):
        gradient = gradient.values
    if not tf.is_tensor(gradient) or not hasattr(gradient, "graph"):
        return False
    op = gradient.op
    return bool(op.type == "Cast" and op.inputs[0].dtype == tf.float16)


# ---- Keras's wrapper -------------------------------------------------------------------

# Optimizers that a loss was scaled with, perhaps in a trace that has not run yet, or that were
# warned of.
_settled: weakref.WeakSet[Optimizer] = weakref.WeakSet()
_told_of_clips: weakref.WeakSet[Optimizer] = weakref.WeakSet()


def watch_keras(wanted: bool) -> None:
    """Watches those that are constructed while it is wanted, as long as they exist."""
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
        _warn_of_unscaled(optimizer)
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
        f"{optimizer.name}, Keras's LossScaleOptimizer around {inner}, {_CLIPPED} Let the "
        f"optimizer clip, which unscales first: give {inner} global_clipnorm=1.0, or compile with "
        "tfamp.LossScaleOptimizer(..., grad_clip=1.0).",
        TfampWarning,
        stacklevel=level_of_user(),
    )


def _warn_of_unscaled(optimizer: Optimizer) -> None:
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
