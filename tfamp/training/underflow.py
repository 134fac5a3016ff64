"""One warning where a bare optimizer is given float16 gradients that have underflowed to zero.

Without a loss scale float16 gradients below 2**-25 are zero, and training stands still in silence.
Zeros alone prove nothing: a relu makes them in float32 too. What gives float16 away is the other
gradients: they are small multiples of its smallest number, 2**-24, which float32 or a loss scale
would have spread over the numbers in between. Or whole gradients are zero, and those of float32
layers, such as a model's head, are too small for float16.

The first eager steps of each optimizer are read; nothing is read or counted after that. A traced
step is not watched: its counters would be variables that no SavedModel of the function tracks.
"""

from __future__ import annotations

import contextlib
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from tfamp.core.errors import TfampWarning
from tfamp.core.kinds import Optimizer, Tensor
from tfamp.interop.keras_hooks import runs_tensorflow
from tfamp.interop.patching import Patch, level_of_user

# Steps of an optimizer that are counted.
_STEPS = 3
# A choice: a float16 number of so many times its smallest one has 4 digits, at an error of 3 %.
_COARSE = 16
_SMALLEST = 2.0**-24


@dataclass
class _Counts:
    """The gradients of an optimizer's first steps, as `_of_step` counts them."""

    steps: int = 0
    numbers: list[float] = field(default_factory=lambda: [0.0] * 5)


_counts: weakref.WeakKeyDictionary[Optimizer, _Counts] = weakref.WeakKeyDictionary()
_users: set[str] = set()


def watch(user: str, wanted: bool = True) -> None:
    """Watches the steps of bare optimizers while any user wants it."""
    (_users.add if wanted else _users.discard)(user)
    _hooks.keep(bool(_users))


def watch_next_steps() -> None:
    """Watches the next steps, until one optimizer's first ones have been looked at."""
    if runs_tensorflow() and not _counts:
        watch("next steps")


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """Returns a context in which steps are not watched: their gradients are of a scaled loss."""
    before, _here.paused = _here.paused, True
    try:
        yield
    finally:
        _here.paused = before


class _Here(threading.local):
    paused = False


_here = _Here()


def _apply(
    original: Callable[..., Any], optimizer: Optimizer, grads: Any, *rest: Any, **named: Any
) -> Any:
    grads = list(grads)
    is_watched = runs_tensorflow() and tf.executing_eagerly() and not _here.paused
    if is_watched and not tf.distribute.has_strategy():
        _look_at(optimizer, grads)
    with paused():  # Of the parts of a MultiOptimizer.
        return original(optimizer, grads, *rest, **named)


def _look_at(optimizer: Optimizer, grads: Sequence[Tensor]) -> None:
    counts = _counts.setdefault(optimizer, _Counts())
    values = [g.values if isinstance(g, tf.IndexedSlices) else g for g in grads if g is not None]
    if values and counts.steps < _STEPS:
        counts.steps += 1
        _add(counts, _of_step([tf.convert_to_tensor(value) for value in values]).numpy())
        _decide(optimizer, counts)


_hooks = Patch(
    optional={"step": "underflow in float16 without a loss scale is not warned of."}, step=_apply
)


def _of_step(gradients: Sequence[Tensor]) -> Tensor:
    """Returns how many numbers there are in gradients, and of these how many are special.

    Special ones are zeros, small numbers, small multiples of 2**-24, and zeros of gradients that
    are zero as a whole.
    """

    def count(gradient: Tensor) -> Tensor:
        multiple = tf.abs(tf.cast(gradient, tf.float32)) / _SMALLEST
        zero = tf.equal(multiple, 0.0)
        small = (multiple <= _COARSE) & ~zero
        coarse = small & tf.equal(multiple, tf.round(multiple))
        flags = (tf.ones_like(zero), zero, small, coarse)
        numbers = [tf.reduce_sum(tf.cast(each, tf.float32)) for each in flags]
        whole = tf.where(tf.reduce_all(zero), numbers[0], 0.0)
        return tf.stack([*numbers, whole])

    return tf.add_n([count(gradient) for gradient in gradients])


def _add(counts: _Counts, numbers: Sequence[float]) -> None:
    counts.numbers = [a + float(b) for a, b in zip(counts.numbers, numbers, strict=True)]


def _decide(optimizer: Optimizer, counts: _Counts) -> None:
    """Warns if the steps so far show underflow; after the last one nothing is watched."""
    total, zeros, small, coarse, whole = counts.numbers
    others = total - zeros
    # Not before the last step, as a first batch may be masked out.
    are_gone = counts.steps >= _STEPS and 2 * whole >= total and 2 * small >= others
    if are_gone or (2 * zeros >= total > zeros and 2 * coarse >= others):
        counts.steps = _STEPS
        _warn(optimizer, zeros / total, small / others if others else None)
    if counts.steps >= _STEPS:
        watch("next steps", wanted=False)


def _warn(optimizer: Optimizer, zeros: float, small: float | None) -> None:
    rest = "" if small is None else f", and {small:.0%} of the others are below 1e-6"
    warnings.warn(
        f"{zeros:.0%} of the gradients that {optimizer.name} was given in its first steps are "
        f"exactly zero{rest}: float16, whose smallest number is 6e-8, rounds small gradients to "
        "zero, and no loss scale multiplies the loss. The model does not learn from them. Wrap the "
        "optimizer in tfamp.LossScaleOptimizer and take the gradients of "
        "optimizer.get_scaled_loss(loss), use a tfamp.GradScaler, or compute in bfloat16.",
        TfampWarning,
        stacklevel=level_of_user(),
    )
