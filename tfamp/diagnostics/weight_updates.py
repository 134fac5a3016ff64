"""How many updates of weights 16-bit dtypes lose, seen from outside of a training step.

Nothing is added to the step: its weights are copied before it and compared behind it, on the
device. The host reads the counts when a record is made. Of steps that are executed together it
sees only the sum of their updates, which hides those that are lost, so that nothing is counted.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfamp.core.dtypes import LOW_PRECISION, float_format

# For a dtype the number of updates that it loses, and of all.
Lost = dict[str, tuple[int, int]]
ExactValues = Callable[[Sequence[Any]], Sequence[Any]]


class WeightUpdates:
    """Counts the updates of one step that are lost, from the weights before and behind it."""

    def __init__(self) -> None:
        self._step = 0
        self._weights: list[Any] = []
        self._before: list[Any] = []
        self._counts: list[Any] = []

    @property
    def is_waiting(self) -> bool:
        """Whether for the end of a step."""
        return bool(self._before)

    def before(self, step: int, weights: Sequence[Any], exact_values: ExactValues) -> None:
        """Keeps the values of weights before a step."""
        self._step, self._weights, self._counts = step, list(weights), []
        self._before = [tf.identity(tf.convert_to_tensor(each)) for each in exact_values(weights)]

    def behind(self, exact_values: ExactValues) -> None:
        """Counts what the step has changed."""
        before, self._before = self._before, []
        after = [tf.convert_to_tensor(each) for each in exact_values(self._weights)]
        # They are not where the optimizer was built, and its masters made, by this very step.
        if [each.dtype for each in before] == [each.dtype for each in after]:
            self._counts = [_counted(*pair) for pair in zip(before, after, strict=True)]

    def forget(self) -> None:
        """Waits for no step."""
        self._before = []

    def read(self, variables: Sequence[Any]) -> tuple[int, list[Lost]]:
        """The step that was seen since the last call, and what each variable has lost in it.

        Waits for the device.
        """
        counts, self._counts = [each.numpy().tolist() for each in self._counts], []
        named = (zip(LOW_PRECISION, each, strict=True) for each in counts)
        lost = [{dtype: (a, b) for dtype, (a, b) in each if b} for each in named]
        by_weight = dict(zip(map(id, self._weights), lost, strict=False))  # Perhaps there is none.
        return self._step, [by_weight.get(id(variable), {}) for variable in variables]


def _counted(before: Any, after: Any) -> Any:
    if before.dtype.name in LOW_PRECISION:
        return _standing_still(before, after)
    return _under_half_a_spacing(tf.cast(before, tf.float32), tf.cast(after, tf.float32))


# One trace for weights of all shapes.
_once_traced = functools.partial(tf.function, autograph=False, reduce_retracing=True)


@_once_traced
def _standing_still(before: Any, after: Any) -> Any:
    """Counts for weights of which nothing but the low number is known: lost is what has not moved.

    The other dtype gets zeros.
    """
    still = tf.math.count_nonzero(tf.equal(before, after))
    own = tf.stack([still, tf.size(before, tf.int64)])
    return tf.stack([own * (dtype == before.dtype.name) for dtype in LOW_PRECISION])


@_once_traced
def _under_half_a_spacing(before: Any, after: Any) -> Any:
    """Counts of updates under half the distance to the next number of each dtype, zeros left out.

    Weights that are added to so stay what they are.
    """
    update = tf.abs(after - before)
    exponent = tf.bitwise.bitwise_and(tf.bitcast(before, tf.int32), 0x7F800000)
    power = tf.bitcast(exponent, tf.float32)  # The power of two at or below a weight's size.
    moved = update > 0.0

    def count(dtype: str) -> Any:
        form = float_format(dtype)
        half = tf.maximum(power, form.tiny) * (form.eps / 2)
        return tf.stack(
            [tf.math.count_nonzero(moved & (update < half)), tf.math.count_nonzero(moved)]
        )

    return tf.stack([count(dtype) for dtype in LOW_PRECISION])
