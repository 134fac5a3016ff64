"""What is remembered of training steps on the device, so that the host need not wait for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from tfamp.diagnostics.monitoring.exponents import FLOAT16_MAX
from tfamp.diagnostics.monitoring.value_counts import COLUMNS, count_values
from tfamp.training.replicas import outside_the_graph


@dataclass(frozen=True, slots=True)
class Sample:
    """Counts of the values of some tensors at one step.

    Attributes:
        step: The step, counted from 1; 0 where there has been none.
        loss_scale: The loss scale of the step.
        divisor: What the tensors are to be divided by to be without loss scale.
        counts: For every tensor, one row of counts for each replica.
    """

    step: int
    loss_scale: float
    divisor: float
    counts: tuple[tuple[Sequence[int], ...], ...]


class SampledCounts:
    """Variables that hold the counts of tensors at one step, each replica's of its own.

    Args:
        tensors: Number of tensors.
    """

    def __init__(self, tensors: int) -> None:
        self._counts = _local_variable(np.zeros((tensors, COLUMNS), "int64"))
        # Step, loss scale and divisor.
        self._facts = _local_variable(np.array([0.0, 1.0, 1.0]))

    def write(self, wanted: Any, counts: Any, facts: Any) -> None:
        """Replaces what is there where `wanted`, a scalar bool tensor, is True."""
        self._counts.assign(tf.where(wanted, counts, self._counts))
        self._facts.assign(tf.where(wanted, facts, self._facts))

    def write_row(self, tensor: Any, step: Any) -> None:
        """Counts one tensor, without loss scale, as the only row."""
        counts = count_values(tensor, FLOAT16_MAX, FLOAT16_MAX)
        self._counts.assign(counts[None])
        self._facts.assign(tf.stack([tf.cast(step, tf.float64), 1.0, 1.0]))

    def step(self) -> int:
        """Returns the step of the sample; waits for the device."""
        return int(_replicas(self._facts)[0][0])

    def read(self) -> Sample:
        """Returns the sample; waits for the device."""
        replicas = _replicas(self._counts)
        step, loss_scale, divisor = _replicas(self._facts)[0].tolist()
        rows = range(len(replicas[0]))
        counts = tuple(tuple(each[row].tolist() for each in replicas) for row in rows)
        return Sample(int(step), loss_scale, divisor, counts)


class StepStatistics:
    """Counts steps, remembers their loss scales, and samples gradients now and then.

    Args:
        every: Gradients are sampled at steps this many apart.
        remembered: Of how many steps the loss scales are remembered.
        start: Number of steps taken before.
        skipped: Number of them that were skipped.
    """

    def __init__(self, every: int, remembered: int, start: int, skipped: int) -> None:
        self._every = every
        self._remembered = remembered
        self._step = _local_variable(np.int64(start))
        # Loss scale of each step, and how many steps had been skipped before it. One variable: it
        # is written at every step.
        self._past = _local_variable(np.zeros((remembered, 2)))
        # For steps nobody else counts.
        self._skipped = _local_variable(np.int64(skipped))
        self._consecutive = _local_variable(np.int64(0))
        self._rows: dict[int, int] = {}
        self.variables: list[Any] = []
        self.sampled: SampledCounts | None = None
        self.faulty: SampledCounts | None = None

    def prepare(self, variables: Sequence[Any]) -> None:
        """Makes room for the gradients of variables.

        Args:
            variables: All variables whose gradients will be observed.

        Raises:
            ValueError: There is room for the gradients of others already.
        """
        if self.sampled is not None:
            unknown = [v for v in variables if id(v) not in self._rows]
            if unknown:
                raise ValueError(
                    f"This monitor observes {len(self.variables)} other variables; got "
                    f"{len(unknown)} it does not know. Use one NumericsMonitor for each set of "
                    "variables, or record the gradients of all of them together, None for those "
                    "that are not at hand."
                )
            return
        self.variables = list(variables)
        self._rows = {id(variable): row for row, variable in enumerate(self.variables)}
        self.sampled, self.faulty = (SampledCounts(len(self.variables)) for _ in range(2))

    def set_step(self, step: Any) -> None:
        """Makes the next step the one with this number, counted from 1."""
        self._step.assign(tf.cast(step, tf.int64) - 1)

    def next_is_due(self) -> tuple[Any, Any]:
        """Returns the number of the step that is under way, and whether it is to be sampled."""
        step = self._step + 1
        return step, tf.equal(step % self._every, 0)

    def own_skips(self, finite: Any) -> Any:
        """Counts a step as skipped or not; returns how many were skipped before it."""
        before = tf.identity(self._skipped)
        skipped = tf.cast(tf.logical_not(finite), tf.int64)
        self._skipped.assign_add(skipped)
        self._consecutive.assign((self._consecutive + 1) * skipped)
        return before

    def observe(
        self,
        gradients: Sequence[Any],
        variables: Sequence[Any],
        *,
        scale: Any,
        divisor: Any,
        skipped_before: Any,
        faulty: Any,
    ) -> None:
        """Looks at the gradients of one step; nothing here waits for the device.

        Args:
            gradients: Float tensors, `tf.IndexedSlices` or None.
            variables: The variables they belong to, in the same order.
            scale: The loss scale, scalar.
            divisor: What the gradients are still to be divided by, scalar.
            skipped_before: Number of steps skipped before this one, scalar.
            faulty: Whether the gradients are to be looked at because one is not finite, scalar
                bool.
        """
        if self.sampled is None or self.faulty is None:
            outside_the_graph(lambda: self.prepare(variables))
        else:
            self.prepare(variables)
        sampled, known_faulty = self.sampled, self.faulty
        if sampled is None or known_faulty is None:
            raise RuntimeError("The variables of a NumericsMonitor could not be created.")
        step, due = self.next_is_due()
        scale, divisor = (tf.cast(each, tf.float64) for each in (scale, divisor))
        here = tf.equal(tf.range(self._remembered, dtype=tf.int64), (step - 1) % self._remembered)
        now = tf.stack([scale, tf.cast(skipped_before, tf.float64)])
        self._past.assign(tf.where(here[:, None], now, self._past))

        def sample() -> None:
            bound = tf.cast(FLOAT16_MAX * divisor, tf.float32)
            scaled_bound = tf.cast(FLOAT16_MAX * divisor / scale, tf.float32)
            rows: list[Any] = [None] * len(self.variables)
            for gradient, variable in zip(gradients, variables, strict=True):
                # The "gradient" of such a variable is its next value, no derivative.
                if not getattr(variable, "overwrite_with_gradient", False):
                    rows[self._rows[id(variable)]] = gradient
            counts = tf.stack([count_values(row, bound, scaled_bound) for row in rows])
            facts = tf.stack([tf.cast(step, tf.float64), scale, divisor])
            sampled.write(due, counts, facts)
            known_faulty.write(faulty, counts, facts)

        only_if(tf.logical_or(due, faulty), sample)
        self._step.assign(step)

    def step(self) -> int:
        """Returns the number of steps taken; waits for the device."""
        return int(_replicas(self._step)[0])

    def skips(self) -> tuple[int, int]:
        """Returns how many steps `own_skips` counted, in all and in a row; waits for the device."""
        return int(_replicas(self._skipped)[0]), int(_replicas(self._consecutive)[0])

    def past(self, first: int, last: int) -> list[tuple[int, float, int]]:
        """Returns step, loss scale and steps skipped before, of the steps that are remembered.

        Args:
            first: The first step asked for, counted from 1.
            last: The last one, at most the number of steps taken.
        """
        rows = _replicas(self._past)[0]
        first = max(first, last - self._remembered + 1)
        places = ((step, rows[(step - 1) % self._remembered]) for step in range(first, last + 1))
        return [(step, float(scale), int(skipped)) for step, (scale, skipped) in places]


def only_if(wanted: Any, work: Callable[[], None]) -> None:
    """Does some work where a scalar bool tensor is True; elsewhere it costs next to nothing.

    Args:
        wanted: The tensor.
        work: The work. It is traced anew at each call, because each replica of a strategy has
            variables of its own.
    """
    if not tf.executing_eagerly():
        # One node in the branch: else TensorFlow would put all nodes of the work into the graph
        # around it, and pass on at every step, for each of them, that it is not to run.
        work = tf.function(work, autograph=False, experimental_attributes={"_noinline": True})

    def branch() -> None:
        work()

    tf.cond(wanted, branch, lambda: None)


def _local_variable(value: Any) -> tf.Variable:
    # Under a strategy every replica writes its own copy and nothing is sent.
    return tf.Variable(
        value,
        trainable=False,
        synchronization=tf.VariableSynchronization.ON_READ,
        aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA,
    )


def _replicas(variable: Any) -> list[np.ndarray]:
    strategy = getattr(variable, "distribute_strategy", None)
    if strategy is None:
        return [variable.numpy()]
    return [each.numpy() for each in strategy.experimental_local_results(variable)]
