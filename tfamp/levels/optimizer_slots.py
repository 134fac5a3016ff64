"""What each Keras optimizer keeps from step to step, and why low variables do not hold it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import keras


@dataclass(frozen=True, slots=True)
class Slots:
    """What an optimizer keeps.

    Attributes:
        what: What that is, to be read after "keeps".
        in_float16: Why it needs more than float16, to be read after "which"; None where it does
            not.
        in_bfloat16: The same for bfloat16.
        known: Whether it is known at all what the optimizer keeps.
    """

    what: str
    in_float16: str | None = None
    in_bfloat16: str | None = None
    known: bool = True

    def trouble(self, dtype: str) -> str | None:
        """Why variables of a low dtype do not hold it; None where they do."""
        return self.in_float16 if dtype == "float16" else self.in_bfloat16


_SQUARED = "zero in float16 for gradients under 2.4e-4"
_MOMENTUM = Slots("nothing, or a momentum")
_AVERAGES = Slots(
    "running averages of squared gradients",
    f"are {_SQUARED}",
    "bfloat16 cannot hold: their decay is 1 or nearly so in it",
)
_SUMS = Slots(
    "sums of squared gradients",
    f"end at 65504 in float16, and whose squares are {_SQUARED}",
    "no longer grow in bfloat16 once they are 512 times a square",
)
_MAXIMA = Slots(
    "running maxima of gradients",
    "are zero in float16 for gradients under 6e-8, and divide the step",
    "never fall in bfloat16: their decay is 1 or nearly so in it",
)
_SIGNS = Slots(
    "running averages of gradients, of which it applies the signs",
    "are zero in float16 for gradients under 6e-6, and whose steps of one size low weights lose",
    "move by too little for bfloat16, and whose steps of one size low weights lose",
)
_WEIGHTS = Slots(
    "running averages of the weights (use_ema)",
    "move by too little for float16",
    "move by too little for bfloat16",
)
_UNKNOWN = Slots(
    "what tfamp does not know",
    "float16 may not hold",
    "bfloat16 may not hold",
    known=False,
)

# By the names of Keras's classes, as not every release has all; a class made from one counts as it.
# None: it keeps what the optimizers in it keep.
SLOTS: dict[str, Slots | None] = {
    "SGD": _MOMENTUM,
    "RMSprop": _AVERAGES,
    "Adam": _AVERAGES,
    "AdamW": _AVERAGES,
    "Nadam": _AVERAGES,
    "Lamb": _AVERAGES,
    "Adadelta": _AVERAGES,
    "Adafactor": _AVERAGES,
    "Muon": _AVERAGES,
    "ScheduleFreeAdamW": _AVERAGES,
    "Adagrad": _SUMS,
    "Ftrl": _SUMS,
    "Adamax": _MAXIMA,
    "Lion": _SIGNS,
    "LossScaleOptimizer": None,
    "MultiOptimizer": None,
}
_DECAYS = ("beta_2", "rho", "adam_beta_2")


def slots_of(optimizer: Any) -> Slots:
    """Returns what an optimizer keeps; of a wrapper, what is hardest to hold of those inside.

    Args:
        optimizer: A Keras optimizer.
    """
    name = _known_class(type(optimizer))
    if name is None:
        return _UNKNOWN
    slots = SLOTS[name]
    if slots is None:
        # Those of a MultiOptimizer that asks a function are known once it is built only.
        inside = [slots_of(each) for each in _inside(optimizer)] or [_UNKNOWN]
        return next((each for each in inside if each.in_bfloat16), inside[0])
    if slots.in_bfloat16 is None and getattr(optimizer, "use_ema", False):
        return _WEIGHTS
    decay = next((each for each in _DECAYS if hasattr(optimizer, each)), None)
    if decay is None or slots.in_bfloat16 is None:
        return slots
    shown = f"{decay}={getattr(optimizer, decay):g}"
    return dataclasses.replace(slots, in_bfloat16=slots.in_bfloat16.replace("their decay", shown))


def _known_class(kind: type) -> str | None:
    """The class of Keras's that an optimizer's class is, or is made from."""
    own = (each for each in kind.__mro__ if each.__module__.partition(".")[0] == "keras")
    return next((each.__name__ for each in own if each.__name__ in SLOTS), None)


def _inside(optimizer: Any) -> list[Any]:
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return [optimizer.inner_optimizer]
    return list(optimizer.optimizers)
