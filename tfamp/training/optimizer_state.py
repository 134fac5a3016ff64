"""The state of Keras's optimizers, and whether low-precision slots can hold it."""

from __future__ import annotations

import warnings
from typing import Any

import keras

from tfamp.core.errors import TfampWarning
from tfamp.core.kinds import Optimizer
from tfamp.interop.patching import level_of_user

_UNKNOWN = "state unknown to tfamp"
_AVERAGES = "running averages of squared gradients"
_SUMS = "sums of squared gradients"

# State of Keras's optimizers that low-precision slots cannot hold; docs/guides/master_weights.md
# has the reasons. SGD has none but a momentum; wrappers have the state of the optimizers inside.
# By names, as not every release of Keras has all; subclasses inherit the entry.
STATE_NEEDING_FLOAT32 = {
    "SGD": "",
    **dict.fromkeys(("RMSprop", "Adam", "AdamW", "Nadam", "Lamb", "Adadelta"), _AVERAGES),
    **dict.fromkeys(("Adafactor", "Muon", "ScheduleFreeAdamW"), _AVERAGES),
    **dict.fromkeys(("Adagrad", "Ftrl"), _SUMS),
    "Adamax": "running maxima of gradients",
    "Lion": "running averages of gradients, whose signs it applies",
    **dict.fromkeys(("LossScaleOptimizer", "MultiOptimizer"), ""),
}


def innermost(optimizer: Optimizer) -> Optimizer:
    """Unwraps an optimizer from loss scaling."""
    while isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        optimizer = optimizer.inner_optimizer
    return optimizer


def exact_state_of(optimizer: Optimizer) -> str:
    """The state of an optimizer that low-precision slots cannot hold, in words; "" for none."""
    inside: Any = getattr(optimizer, "optimizers", None)
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        inside = [optimizer.inner_optimizer]
    if inside is not None:
        # A MultiOptimizer with a selector function has its parts only once it is built.
        default = "" if inside else _UNKNOWN
        return next(filter(None, map(exact_state_of, inside)), default)
    if getattr(optimizer, "use_ema", False):
        return "running averages of the weights (use_ema)"
    for base in type(optimizer).__mro__:
        if base.__module__.partition(".")[0] == "keras" and base.__name__ in STATE_NEEDING_FLOAT32:
            return STATE_NEEDING_FLOAT32[base.__name__]
    return _UNKNOWN


def warn_of_low_state(optimizer: Optimizer, where: str, remedy: str) -> None:
    """Warns that low-precision slots may not hold the state of an optimizer, if so.

    Args:
        optimizer: The optimizer, perhaps wrapped.
        where: The dtype of the slots, and why they have it.
        remedy: The sentence that says what to do.
    """
    if state := exact_state_of(optimizer):
        warnings.warn(
            f"{innermost(optimizer).name} keeps {state}, which {where} it may learn nothing or "
            f"diverge. {remedy}",
            TfampWarning,
            stacklevel=level_of_user(),
        )
