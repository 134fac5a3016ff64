"""The rules of a loss scale, fixed or dynamic, and the state that they change in each step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple

from tfamp.core.kinds import Tensor
from tfamp.core.options import checked_count, checked_flag, checked_number, checked_scale


def checked_growth_factor(value: object) -> float:
    """Returns `value` as a float after checking that a loss scale can grow by it."""
    return checked_number("growth_factor", value, low=1.0, high=math.inf, bounds="()")


def checked_backoff_factor(value: object) -> float:
    """Returns `value` as a float after checking that a loss scale can back off by it."""
    return checked_number("backoff_factor", value, low=0.0, high=1.0, bounds="()")


@dataclass(frozen=True)
class FixedLossScale:
    """A loss scale that never changes.

    Use it if the right scale is known, or for bit-reproducible comparisons. MindSpore calls it
    `FixedLossScaleManager`, and `skip_nonfinite=False` is its `drop_overflow_update=False`.

    Args:
        scale: The factor the loss is multiplied by, positive and finite.
        skip_nonfinite: Whether a step with inf or NaN in its gradients is skipped. With False
            it is applied and can write inf or NaN into the weights.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: `scale` is zero, negative, infinite or NaN.

    Example:
        >>> FixedLossScale(512.0)
        FixedLossScale(scale=512.0, skip_nonfinite=True)
    """

    scale: float = 128.0
    skip_nonfinite: bool = True

    def __post_init__(self) -> None:
        checked_flag("skip_nonfinite", self.skip_nonfinite)
        object.__setattr__(self, "scale", checked_scale("scale", self.scale))

    @property
    def initial_scale(self) -> float:
        """The scale at the start of training, which is the scale."""
        return self.scale


@dataclass(frozen=True)
class DynamicLossScale:
    """A loss scale that backs off after an overflow and grows after a run of good steps.

    The rule follows Micikevicius et al., "Mixed Precision Training" (2018), as in TensorFlow
    and PyTorch, with a floor, a ceiling and hysteresis.

    Args:
        initial_scale: Scale of the first step. If it is too high, a few steps are
            skipped; if it is too low, gradients are flushed to zero until it has grown.
            Prefer a high value.
        growth_factor: Factor the scale is multiplied by after `growth_steps` finite steps in a
            row; greater than 1.
        backoff_factor: Factor the scale is multiplied by after an overflow; between 0 and 1.
        growth_steps: Number of finite steps in a row before the scale grows.
        hysteresis: The scale backs off from the `hysteresis`-th overflow in a row on; earlier
            ones only skip their step. A finite step resets the count.
        min_scale: The scale never falls below this.
        max_scale: The scale never rises above this.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: An argument is out of its range, or `initial_scale` lies outside
            [`min_scale`, `max_scale`].

    Example:
        >>> DynamicLossScale(initial_scale=1024.0, growth_steps=100).max_scale
        4294967296.0
    """

    initial_scale: float = 2.0**15
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_steps: int = 2000
    hysteresis: int = 1
    min_scale: float = 2.0**-32
    max_scale: float = 2.0**32

    def __post_init__(self) -> None:
        low = checked_scale("min_scale", self.min_scale)
        high = checked_scale("max_scale", self.max_scale)
        if low > high:
            raise ValueError(
                f"min_scale must not be greater than max_scale; got min_scale={low:g} and "
                f"max_scale={high:g}."
            )
        checked = {
            "min_scale": low,
            "max_scale": high,
            "initial_scale": checked_number(
                "initial_scale", self.initial_scale, low=low, high=high
            ),
            "growth_factor": checked_growth_factor(self.growth_factor),
            "backoff_factor": checked_backoff_factor(self.backoff_factor),
            "growth_steps": checked_count("growth_steps", self.growth_steps),
            "hysteresis": checked_count("hysteresis", self.hysteresis),
        }
        for name, value in checked.items():
            object.__setattr__(self, name, value)

    @property
    def skip_nonfinite(self) -> bool:
        """Always True: a dynamic scale skips every step with a non-finite gradient."""
        return True


LossScale = FixedLossScale | DynamicLossScale


def resolve_loss_scale(
    loss_scale: LossScale | float | None, dynamic: bool, built: DynamicLossScale
) -> LossScale:
    """Resolves an optimizer's arguments to one rule."""
    checked_flag("dynamic", dynamic)
    if loss_scale is None:
        return built if dynamic else _without_changes(built)
    if built != DynamicLossScale() or not dynamic:
        raise ValueError(
            "loss_scale replaces dynamic, initial_scale and the arguments after it; give "
            f"either loss_scale or those. Got loss_scale={loss_scale!r} and other than default "
            "values."
        )
    if isinstance(loss_scale, (FixedLossScale, DynamicLossScale)):
        return loss_scale
    return FixedLossScale(loss_scale)


def loss_scale_of_keras_2(saved: Mapping[str, Any]) -> LossScale:
    """Returns the rule of a serialized loss scale, as Keras 2 wrote it up to TensorFlow 2.3."""
    values = saved["config"]
    if saved["class_name"] == "FixedLossScale":
        return FixedLossScale(values["loss_scale_value"])
    return DynamicLossScale(
        values["initial_loss_scale"],
        growth_factor=values["multiplier"],
        backoff_factor=1 / values["multiplier"],
        growth_steps=values["increment_period"],
    )


# The bounds are those of a fixed scale too.
_OF_CHANGES = ("growth_factor", "backoff_factor", "growth_steps", "hysteresis")


def _without_changes(built: DynamicLossScale) -> FixedLossScale:
    """Returns the scale of `dynamic=False`; raises if an argument would have no effect."""
    values = {name: getattr(built, name) for name in _OF_CHANGES}
    changes = [f"{n}={v!r}" for n, v in values.items() if v != getattr(DynamicLossScale, n)]
    if changes:
        raise ValueError(
            f"With dynamic=False the scale stays at initial_scale; got {', '.join(changes)} "
            "too. Leave it out, or leave out dynamic=False for a scale that changes."
        )
    return FixedLossScale(built.initial_scale)


# ---- The state -------------------------------------------------------------------------

# `LossScaleOptimizer` (Keras variables, traced or eager, any backend), `GradScaler` (in float64)
# and plain numbers share this code: the caller passes the array library. Nothing here branches in
# Python on a tensor, so a step never waits for the device.
#
#     finite step    good_steps + 1; at growth_steps: 0, and scale * growth_factor (at most
#                    max_scale)
#     overflow       good_steps 0; from the hysteresis-th in a row: scale * backoff_factor
#                    (at least min_scale)


class LossScaleState(NamedTuple):
    """The state that changes from step to step; its fields are scalar tensors or numbers.

    Attributes:
        scale: The loss scale, float32.
        good_steps: Finite steps since the scale last changed or a step overflowed, integer.
        skipped_steps: Steps skipped so far, integer.
        consecutive_skipped_steps: Steps skipped since the last finite one, integer.
    """

    scale: Tensor
    good_steps: Tensor
    skipped_steps: Tensor
    consecutive_skipped_steps: Tensor


class TensorRule(NamedTuple):
    """The fields of a `DynamicLossScale` that `next_state` reads, as scalar tensors or numbers.

    They can change after tracing, and are not checked here.
    """

    growth_factor: Tensor
    backoff_factor: Tensor
    growth_steps: Tensor
    hysteresis: Tensor
    min_scale: Tensor
    max_scale: Tensor


def initial_state(rule: LossScale) -> LossScaleState:
    """Returns the state at the start of training, in plain Python numbers."""
    return LossScaleState(rule.initial_scale, 0, 0, 0)


def next_state(
    rule: LossScale | TensorRule, state: LossScaleState, finite: Tensor, xp: ModuleType
) -> LossScaleState:
    """Returns the state after one step, whose gradients were all `finite` or not.

    `xp` is the array library of `state` and `finite`, such as `keras.ops`
    or `numpy`; it needs `where`, `minimum` and `maximum`.
    """
    if isinstance(rule, FixedLossScale) and not rule.skip_nonfinite:
        return state
    counted = state._replace(
        skipped_steps=xp.where(finite, state.skipped_steps, state.skipped_steps + 1),
        consecutive_skipped_steps=xp.where(finite, 0, state.consecutive_skipped_steps + 1),
    )
    if isinstance(rule, FixedLossScale):
        return counted
    return _rescaled(rule, counted, finite, xp)


def _rescaled(
    rule: DynamicLossScale | TensorRule, state: LossScaleState, finite: Tensor, xp: ModuleType
) -> LossScaleState:
    good_steps = xp.where(finite, state.good_steps + 1, 0)
    # ">=", not "==": an interval that is shortened below the count still takes effect.
    grows = good_steps >= rule.growth_steps
    backs_off = state.consecutive_skipped_steps >= rule.hysteresis
    factor = xp.where(grows, rule.growth_factor, xp.where(backs_off, rule.backoff_factor, 1.0))
    # Both bounds on every step: they also apply to a scale restored from elsewhere.
    scale = xp.maximum(xp.minimum(state.scale * factor, rule.max_scale), rule.min_scale)
    return state._replace(scale=scale, good_steps=xp.where(grows, 0, good_steps))
