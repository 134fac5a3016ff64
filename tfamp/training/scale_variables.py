"""The variables of a loss scale: created, read and moved on; a part of `LossScaleOptimizer`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf
from keras import ops

from tfamp.core.loss_scale import LossScaleState, initial_state, next_state
from tfamp.core.options import DynamicLossScale, LossScale
from tfamp.interop.keras_backend import runs_tensorflow

if TYPE_CHECKING:
    from keras.optimizers import Optimizer as _Base
else:
    _Base = object


class ScaleVariables(_Base):
    """Adds the scale, its counters and their read-only properties to an optimizer."""

    inner_optimizer: keras.optimizers.Optimizer

    def _create_scale_variables(self, rule: LossScale) -> None:
        self._rule = rule
        self._scale_was_used = False
        # Created here, not in build: a scale that is read while a function is traced before the
        # first apply would otherwise be baked into its graph as a constant.
        start = initial_state(rule)
        self.dynamic_scale = self._scalar("dynamic_scale", "float32", start.scale)
        self.step_counter = self._scalar("step_counter", "int", start.good_steps)
        self._skipped = self._scalar("skipped_steps", "int", start.skipped_steps)
        self._consecutive = self._scalar(
            "consecutive_skipped_steps", "int", start.consecutive_skipped_steps
        )
        self._overflows = (
            self._scalar("overflows", "int", start.overflows)
            if isinstance(rule, DynamicLossScale) and not rule.consecutive_hysteresis
            else None
        )
        self._last_finite = self._scalar("last_step_finite", "bool", True)
        # What get_unscaled_gradients leaves for an apply in another function.
        self._unscaled_pending = self._scalar("unscaled_pending", "bool", False)
        self._unscaled_finite = self._scalar("unscaled_finite", "bool", True)

    def _scalar(self, name: str, dtype: str, value: float | bool) -> keras.Variable:
        return self.add_variable(
            shape=(),
            dtype=dtype,
            # Every replica computes the same value: each updates its own copy, nothing is sent.
            aggregation="none",
            initializer=keras.initializers.Constant(value),
            name=name,
        )

    def _record_step(self, finite: Any) -> None:
        """Moves the state on by one step, whose gradients were all finite or not."""
        variables = [self.dynamic_scale, self.step_counter, self._skipped, self._consecutive]
        if self._overflows is not None:
            variables.append(self._overflows)
        before = LossScaleState(*map(as_tensor, variables))
        after = next_state(self._rule, before, finite, ops)
        # The last field has a variable only where the rule looks at it.
        for variable, old, new in zip(variables, before, after, strict=False):
            if new is not old:
                variable.assign(ops.cast(new, variable.dtype))
        self._last_finite.assign(finite)
        self._unscaled_pending.assign(False)
        self._unscaled_finite.assign(True)

    def get_scale(self) -> Any:
        """The current loss scale, a scalar float32 tensor."""
        self._scale_was_used = True
        return as_tensor(self.dynamic_scale)

    @property
    def loss_scale(self) -> Any:
        """The current loss scale, a scalar float32 tensor."""
        return self.get_scale()

    @property
    def rule(self) -> LossScale:
        """How the scale moves: a `FixedLossScale` or a `DynamicLossScale`."""
        return self._rule

    @property
    def dynamic(self) -> bool:
        """Whether the scale adapts."""
        return isinstance(self._rule, DynamicLossScale)

    @property
    def initial_scale(self) -> float:
        """The scale of the first step."""
        return self._rule.initial_scale

    @property
    def dynamic_growth_steps(self) -> int | None:
        """Finite steps in a row before the scale grows; None for a fixed scale."""
        return self._rule.growth_steps if isinstance(self._rule, DynamicLossScale) else None

    @property
    def dynamic_counter(self) -> Any:
        """Finite steps since the scale last changed, a scalar integer tensor."""
        return as_tensor(self.step_counter)

    @property
    def iterations(self) -> Any:
        """Steps applied so far, the inner optimizer's variable; on several replicas a tensor."""
        count = self.inner_optimizer.iterations
        value = getattr(count, "value", None)
        # A variable with a value per replica cannot be made a number.
        distributed = isinstance(value, tf.distribute.DistributedValues)
        return as_tensor(count) if distributed else count

    @property
    def skipped_steps(self) -> Any:
        """Steps skipped so far because a gradient was not finite, a scalar integer tensor."""
        return as_tensor(self._skipped)

    @property
    def consecutive_skipped_steps(self) -> Any:
        """Steps skipped since the last finite one, a scalar integer tensor."""
        return as_tensor(self._consecutive)

    @property
    def last_step_finite(self) -> Any:
        """Whether every gradient of the last step was finite, a scalar bool tensor."""
        return as_tensor(self._last_finite)


def as_tensor(variable: keras.Variable) -> Any:
    """The value of a variable as a tensor; on several replicas this one's, or the first one's."""
    # Keras takes its own variable for a tensor, so ops.convert_to_tensor would hand it out.
    value = variable.value
    return tf.convert_to_tensor(value) if runs_tensorflow() else value
