"""What a `LossScaleOptimizer` is made with: checks, and its serializable form."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import keras

from tfamp.core.grad_clip import GradClip
from tfamp.core.options import DynamicLossScale, FixedLossScale, LossScale
from tfamp.interop.keras_backend import described, runs_tensorflow

# Fields of DynamicLossScale that are arguments of the optimizer under another name.
_RENAMED = {"growth_steps": "dynamic_growth_steps"}


def check_inner(inner: Any) -> None:
    """Raises if an object cannot be the inner optimizer.

    Args:
        inner: What the user gave.

    Raises:
        TypeError: It is no Keras optimizer.
        ValueError: It scales losses itself.
    """
    if isinstance(inner, keras.optimizers.LossScaleOptimizer):
        raise ValueError(
            f"{inner.name} is a LossScaleOptimizer already; wrapping it again would scale twice. "
            "Pass its inner_optimizer instead."
        )
    if not isinstance(inner, keras.optimizers.Optimizer):
        raise TypeError(
            "inner_optimizer must be a keras.optimizers.Optimizer, e.g. keras.optimizers.Adam(); "
            f"got {described(inner)}"
        )
    if inner.loss_scale_factor is not None:
        raise ValueError(
            f"{inner.name} has loss_scale_factor={inner.loss_scale_factor}, so it scales losses "
            "itself. Create it without, and pass LossScaleOptimizer(..., "
            f"loss_scale={inner.loss_scale_factor}) for a fixed scale."
        )


def check_features(inner: Any, grad_clip: GradClip | None, **flags: Any) -> None:
    """Raises if what is asked of the optimizer cannot be had together.

    Args:
        inner: The inner optimizer.
        grad_clip: The clipping, if any.
        **flags: The arguments that switch something on, by name.

    Raises:
        TypeError: A flag is not True or False.
        ValueError: The inner optimizer accumulates gradients, or the backend is not TensorFlow.
    """
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            raise TypeError(f"{name} must be True or False; got {flag!r}.")
    asked = [name for name, flag in flags.items() if flag] + ["grad_clip"] * (grad_clip is not None)
    if asked and not runs_tensorflow():
        raise ValueError(
            f"{', '.join(asked)} need Keras's TensorFlow backend; got {keras.backend.backend()}."
        )
    if inner.gradient_accumulation_steps and set(asked) - {"master_weights"}:
        raise ValueError(
            f"{inner.name} has gradient_accumulation_steps={inner.gradient_accumulation_steps}: "
            f"{' and '.join(asked)} would act on the gradients of every micro-batch instead of "
            "their mean. Create it without, and accumulate with tfamp.GradientAccumulator."
        )


def scale_config(rule: LossScale) -> dict[str, Any]:
    """Returns the arguments of `LossScaleOptimizer` that mean a loss scale.

    Args:
        rule: The `FixedLossScale` or `DynamicLossScale`.

    Returns:
        Keyword arguments, serializable; a fixed scale as the dict of its fields.
    """
    fields = asdict(rule)
    if isinstance(rule, FixedLossScale):
        return {"loss_scale": fields}
    return {_RENAMED.get(name, name): value for name, value in fields.items()}


def rule_from_config(saved: Any) -> LossScale | None:
    """Returns the loss scale that is saved as `loss_scale`.

    Args:
        saved: A dict of the fields of a `FixedLossScale` or `DynamicLossScale`, or nothing.

    Returns:
        The rule, or None.
    """
    if not saved:
        return None
    return FixedLossScale(**saved) if "scale" in saved else DynamicLossScale(**saved)
