"""The scale of a `GradScaler` and its rule, in variables; a part of `GradScaler`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import tensorflow as tf
from keras import ops

from tfamp.core.dtypes import float_format
from tfamp.core.loss_scale import LossScaleState, next_state
from tfamp.core.options import checked_count, checked_number

_FLOAT32 = float_format("float32")


class _Rule(NamedTuple):
    """The rule as scalar tensors, so that what a setter changes holds in traced functions too."""

    growth_factor: Any
    backoff_factor: Any
    growth_steps: Any
    max_scale: Any
    min_scale: float = _FLOAT32.tiny
    hysteresis: int = 1
    consecutive_hysteresis: bool = True


class ScalerState(tf.Module):
    """Adds the scale, its setters and its state dict to a scaler.

    Args:
        init_scale: Scale of the first iteration.
        growth_factor: Factor the scale grows by.
        backoff_factor: Factor it backs off by.
        growth_interval: Iterations in a row without overflow before it grows.
        enabled: Whether the scaler does anything.
    """

    def __init__(
        self,
        init_scale: float,
        growth_factor: float,
        backoff_factor: float,
        growth_interval: int,
        enabled: bool,
    ) -> None:
        super().__init__(name="grad_scaler")
        if not isinstance(enabled, bool):
            raise TypeError(f"enabled must be True or False; got {enabled!r}.")
        self._enabled = enabled
        self._scale = _variable("float32", _checked_scale("init_scale", init_scale), "loss_scale")
        self._growth_tracker = _variable("int64", 0)
        # float64, as PyTorch computes with them: the scale is the same for any factor.
        self._growth_factor = _variable("float64", _checked_growth_factor(growth_factor))
        self._backoff_factor = _variable("float64", _checked_backoff_factor(backoff_factor))
        self._growth_interval = _variable("int64", _checked_interval(growth_interval))

    def _follow_the_rule(self, finite: Any) -> None:
        """Moves the scale on by one iteration, whose gradients were all finite or not."""
        scale = tf.cast(self._scale, "float64")
        growth_factor = tf.convert_to_tensor(self._growth_factor)
        grown = tf.cast(scale * growth_factor, "float32")
        rule = _Rule(
            growth_factor,
            tf.convert_to_tensor(self._backoff_factor),
            tf.convert_to_tensor(self._growth_interval),
            # What cannot grow any more keeps its value.
            max_scale=tf.where(tf.math.is_finite(grown), tf.cast(_FLOAT32.max, "float64"), scale),
        )
        tracker = tf.convert_to_tensor(self._growth_tracker)
        state = next_state(rule, LossScaleState(scale, tracker, 0, 0), finite, ops)
        self._scale.assign(tf.cast(state.scale, "float32"))
        self._growth_tracker.assign(state.good_steps)

    def _set_scale(self, new_scale: Any) -> None:
        if not tf.is_tensor(new_scale):
            self._scale.assign(_checked_scale("new_scale", new_scale))
            return
        scale = tf.reshape(tf.cast(new_scale, "float32"), [])
        usable = (scale >= _FLOAT32.tiny) & (scale <= _FLOAT32.max)
        self._scale.assign(tf.where(usable, scale, self._scale))

    def get_scale(self) -> Any:
        """The current scale, a scalar float32 tensor; 1 if not enabled."""
        return tf.convert_to_tensor(self._scale) if self._enabled else tf.constant(1.0)

    def is_enabled(self) -> bool:
        """Whether the scaler does anything."""
        return self._enabled

    def get_growth_factor(self) -> float:
        """The factor the scale grows by. Waits for the device."""
        return float(self._growth_factor.numpy())

    def set_growth_factor(self, new_factor: float) -> None:
        """Sets the factor the scale grows by, greater than 1."""
        self._growth_factor.assign(_checked_growth_factor(new_factor))

    def get_backoff_factor(self) -> float:
        """The factor the scale backs off by. Waits for the device."""
        return float(self._backoff_factor.numpy())

    def set_backoff_factor(self, new_factor: float) -> None:
        """Sets the factor the scale backs off by, between 0 and 1."""
        self._backoff_factor.assign(_checked_backoff_factor(new_factor))

    def get_growth_interval(self) -> int:
        """Iterations in a row without overflow before the scale grows. Waits for the device."""
        return int(self._growth_interval.numpy())

    def set_growth_interval(self, new_interval: int) -> None:
        """Sets the iterations in a row without overflow before the scale grows, at least 1."""
        self._growth_interval.assign(_checked_interval(new_interval))

    def state_dict(self) -> dict[str, Any]:
        """The state in plain numbers, under PyTorch's names. Waits for the device.

        Returns:
            `scale`, `growth_factor`, `backoff_factor`, `growth_interval` and `_growth_tracker`;
            an empty dict if not enabled.
        """
        if not self._enabled:
            return {}
        return {
            "scale": float(self._scale.numpy()),
            "growth_factor": self.get_growth_factor(),
            "backoff_factor": self.get_backoff_factor(),
            "growth_interval": self.get_growth_interval(),
            "_growth_tracker": int(self._growth_tracker.numpy()),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restores what `state_dict` returned, PyTorch's or ours. Does nothing if not enabled.

        Args:
            state_dict: The state; not modified.

        Raises:
            RuntimeError: It is empty: it comes from a scaler that was not enabled.
            KeyError: Something is missing.
            TypeError: It is no dict, or a value has the wrong type.
            ValueError: A value is out of range. Nothing is restored then.
        """
        if not self._enabled:
            return
        if not isinstance(state_dict, Mapping):
            raise TypeError(
                "load_state_dict takes the dict that state_dict() returned; got "
                f"{state_dict!r} of type {type(state_dict).__name__}."
            )
        if not state_dict:
            raise RuntimeError(
                "The state dict is empty; it was probably saved by a GradScaler with "
                "enabled=False. Start this one without it, or disable it too."
            )
        tracker = checked_number(
            "_growth_tracker", state_dict["_growth_tracker"], low=0, high=2**31
        )
        values = (
            (self._scale, _checked_scale("scale", state_dict["scale"])),
            (self._growth_factor, _checked_growth_factor(state_dict["growth_factor"])),
            (self._backoff_factor, _checked_backoff_factor(state_dict["backoff_factor"])),
            (self._growth_interval, _checked_interval(state_dict["growth_interval"])),
            (self._growth_tracker, int(tracker)),
        )
        for variable, value in values:  # Only now: a bad value must not leave half a state.
            variable.assign(value)


def _variable(dtype: str, value: float, name: str | None = None) -> tf.Variable:
    # No aggregation: every replica assigns the same value to its own copy.
    return tf.Variable(value, dtype=dtype, trainable=False, name=name)


def _checked_scale(name: str, value: Any) -> float:
    return checked_number(name, value, low=_FLOAT32.tiny, high=_FLOAT32.max)


def _checked_growth_factor(value: Any) -> float:
    return checked_number("growth_factor", value, low=1.0, high=math.inf, bounds="()")


def _checked_backoff_factor(value: Any) -> float:
    return checked_number("backoff_factor", value, low=0.0, high=1.0, bounds="()")


def _checked_interval(value: Any) -> int:
    return checked_count("growth_interval", value)
