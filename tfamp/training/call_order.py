"""The order of the calls of a `GradScaler`: what it did with each optimizer since the last update.

An *iteration* lasts from one update to the next. Whatever happens is noted in a variable as the
number of the iteration it last happened in. So it is known in every other `tf.function` too, and an
update forgets all of it by starting another iteration: also what belongs to an optimizer that the
function that updates has never heard of.
"""

from __future__ import annotations

import enum
import weakref
from typing import Any

import keras
import tensorflow as tf

from tfamp.interop.tracing import PerTrace
from tfamp.training.replicas import outside_the_graph


class Stage(enum.Enum):
    """How far an optimizer has come in the iteration, as far as is known where it is asked.

    In eager mode it is always known. While a function is traced it is known from the calls traced
    before; at the beginning it is not, since the gradients may have been unscaled elsewhere.
    """

    UNKNOWN = "unknown"
    READY = "ready"
    UNSCALED = "unscaled"
    STEPPED = "stepped"


_OUT_OF_ORDER = {
    "unscale": {
        Stage.UNSCALED: "unscale() has already been called on this optimizer since the last "
        "update(). Call it once, when all its gradients have been added up.",
        Stage.STEPPED: "unscale() is called after step() on this optimizer. Unscale, then step, "
        "then update().",
    },
    "step": {
        Stage.STEPPED: "step() has already been called on this optimizer since the last update(). "
        "Call update() at the end of every iteration.",
    },
    "minimize": {
        Stage.UNSCALED: "minimize() is called after unscale() on this optimizer. minimize() takes "
        "the gradients itself; to change them, call unscale(), step() and update().",
        Stage.STEPPED: "minimize() is called after step() on this optimizer. It steps itself.",
    },
}
_NO_CHECKS = (
    "No inf checks were recorded prior to update(). Call step() or unscale() first, with every "
    "optimizer of the iteration."
)


class Mark:
    """Notes that something happened in the current iteration, whose number is `now`."""

    def __init__(self, now: tf.Variable) -> None:
        self._now = now
        self._last = _counter(-1)

    def set_if(self, condition: Any) -> None:
        """Notes it where a scalar bool holds."""
        self._last.assign(tf.where(condition, self._now, self._last))

    def set(self) -> None:
        """Notes it."""
        self._last.assign(self._now)

    def is_set(self) -> Any:
        """Whether it was noted in this iteration, a scalar bool tensor."""
        return tf.equal(self._last, self._now)


class OptimizerMarks:
    """What happened to one optimizer."""

    def __init__(self, now: tf.Variable) -> None:
        self.reached = {Stage.UNSCALED: Mark(now), Stage.STEPPED: Mark(now)}
        self.nonfinite = Mark(now)


class CallOrder:
    """What one scaler has been called with since its last update."""

    def __init__(self) -> None:
        self._now = _counter(0)
        self._checked = Mark(self._now)
        self._nonfinite = Mark(self._now)
        self._marks: weakref.WeakKeyDictionary[keras.optimizers.Optimizer, OptimizerMarks] = (
            weakref.WeakKeyDictionary()
        )
        self._traced: PerTrace[weakref.WeakKeyDictionary[keras.optimizers.Optimizer, Stage]] = (
            PerTrace(weakref.WeakKeyDictionary)
        )

    def knows(self, optimizer: keras.optimizers.Optimizer) -> bool:
        """Whether the optimizer has been unscaled or stepped before, in any iteration."""
        return optimizer in self._marks

    def of(self, optimizer: keras.optimizers.Optimizer) -> OptimizerMarks:
        """The marks of an optimizer."""
        if not self.knows(optimizer):
            self._check_scope()
            outside_the_graph(lambda: self._create_marks(optimizer))
        return self._marks[optimizer]

    def _check_scope(self) -> None:
        if not tf.distribute.has_strategy():
            return
        strategy = tf.distribute.get_strategy()
        if not strategy.extended.variable_created_in_scope(self._now):
            raise ValueError(
                "This GradScaler was created outside the scope of the strategy it is used in, so "
                "its replicas would share one scale. Create it under strategy.scope()."
            )

    def _create_marks(self, optimizer: keras.optimizers.Optimizer) -> None:
        self._marks[optimizer] = OptimizerMarks(self._now)

    def stage(self, optimizer: keras.optimizers.Optimizer) -> Stage:
        """How far the optimizer has come."""
        if not tf.executing_eagerly():
            return self._traced.current().get(optimizer, Stage.UNKNOWN)
        reached = self.of(optimizer).reached
        for stage in (Stage.STEPPED, Stage.UNSCALED):
            if reached[stage].is_set():
                return stage
        return Stage.READY

    def check_order(self, call: str, optimizer: keras.optimizers.Optimizer) -> list[Any]:
        """Raises if a call, "unscale", "step" or "minimize", does not come in order.

        Returns the control dependencies that check it when the traced function runs.
        """
        known, reached = self.stage(optimizer), self.of(optimizer).reached
        later = []
        for stage, message in _OUT_OF_ORDER[call].items():
            if known is stage:
                raise RuntimeError(message)
            if known is Stage.UNKNOWN:
                in_order = tf.logical_not(reached[stage].is_set())
                later.append(tf.debugging.Assert(in_order, [message]))
        return later

    def check_recorded(self) -> list[Any]:
        """Checks that something was recorded in this iteration; as `check_order`."""
        if not tf.executing_eagerly():
            known = bool(self._traced.current())
            return [] if known else [tf.debugging.Assert(self._checked.is_set(), [_NO_CHECKS])]
        if not self._checked.is_set():
            raise RuntimeError(_NO_CHECKS)
        return []

    def record(self, optimizer: keras.optimizers.Optimizer, stage: Stage, finite: Any) -> None:
        """Notes that an optimizer has reached a stage, with finite gradients or not."""
        marks, nonfinite = self.of(optimizer), tf.logical_not(finite)
        marks.reached[stage].set()
        marks.nonfinite.set_if(nonfinite)
        self._nonfinite.set_if(nonfinite)
        self._checked.set()
        if not tf.executing_eagerly():
            self._traced.current()[optimizer] = stage

    def all_finite(self) -> Any:
        """Whether the gradients of all optimizers were finite in this iteration, a bool tensor."""
        return tf.logical_not(self._nonfinite.is_set())

    def start_next(self) -> None:
        """Forgets everything."""
        self._now.assign(self._now + 1)
        self._traced.current().clear()

    def __deepcopy__(self, memo: dict[int, Any]) -> CallOrder:
        return CallOrder()  # What happened with one scaler says nothing of its copy.


def _counter(start: int) -> tf.Variable:
    # No aggregation: every replica assigns the same value to its own copy.
    return tf.Variable(start, dtype="int64", trainable=False)
