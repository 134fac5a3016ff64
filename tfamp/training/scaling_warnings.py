"""Warnings about loops that scale a loss without unscaling its gradients, or the reverse."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import keras
import tensorflow as tf

from tfamp.core.errors import TfampWarning
from tfamp.core.kinds import Optimizer, Tensor, Variable
from tfamp.interop.patching import level_of_user
from tfamp.training.clipped_gradients import were_clipped
from tfamp.training.gradients import dtype_name
from tfamp.training.scaling import GradientRecord


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
                f"{self._name} is given gradients that were clipped while they were multiplied by "
                "the loss scale, and divides them by it: they become far too small, and training "
                "stands still. Unscale them first: clip the result of "
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
