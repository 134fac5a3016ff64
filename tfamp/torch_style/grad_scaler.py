"""`GradScaler`: loss scaling with the interface of PyTorch and Paddle.

An *iteration* lasts from one update to the next. A mark is a variable with the number of the
iteration in which an event last occurred, readable in every `tf.function`. An update increments
the number and so clears all marks, including those of optimizers that its function never used.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import keras
import tensorflow as tf

from tfamp.core import options
from tfamp.core.dtypes import float_format
from tfamp.core.kinds import Optimizer, Tensor, Variable
from tfamp.core.loss_scale import (
    LossScaleState,
    TensorRule,
    checked_backoff_factor,
    checked_growth_factor,
    next_state,
)
from tfamp.core.options import checked_scale
from tfamp.interop.keras_hooks import as_tensor, require_tensorflow
from tfamp.interop.tf_private import as_written
from tfamp.training import gradients as gradient_lib
from tfamp.training import scaling
from tfamp.training.gradients import outside_the_graph
from tfamp.training.next_values import watch_tapes
from tfamp.training.scaling import GradientRecord, Mark
from tfamp.training.weights import PlainWeights, apply_if_finite

_FLOAT32 = float_format("float32")
# The entries of a state, with PyTorch's names, and their checks.
_CHECKS: dict[str, Callable[[Any], float]] = {
    "scale": partial(checked_scale, "scale"),
    "growth_factor": checked_growth_factor,
    "backoff_factor": checked_backoff_factor,
    "growth_interval": partial(options.checked_count, "growth_interval"),
    "_growth_tracker": lambda value: int(
        options.checked_number("_growth_tracker", value, low=0, high=2**31)
    ),
}


class GradScaler(tf.Module):
    """Scales losses and unscales gradients for any number of optimizers, as in PyTorch and Paddle.

    One scaler serves a training loop with several losses, models and optimizers. In each
    iteration scale the losses, take the gradients, `step` every optimizer and then `update`
    once. To clip or inspect gradients, `unscale` them before the step. A step with a non-finite
    gradient on any replica is skipped; the steps of other optimizers are not. `update` lets the
    scale back off if any optimizer's gradients were not finite, and grow after
    `growth_interval` iterations in a row with finite gradients.

    The scale follows PyTorch's rule step for step, with an additional lower bound: float32's
    smallest normal number, 2**-126, so that it never becomes 0. As in PyTorch, a scale that
    would grow to inf keeps its value.

    Calls out of order raise, in a function while it is traced. The order of calls in different
    functions is not checked.

    The methods work in eager mode, in a `tf.function`, in several, under
    `jit_compile=True` and in `strategy.run`; create the scaler under `strategy.scope()`.
    `tf.train.Checkpoint` saves it.

    Source: `torch.amp.GradScaler`, and `paddle.amp.GradScaler` for `minimize`.

    Args:
        init_scale: Scale of the first iteration.
        growth_factor: Factor the scale grows by, greater than 1.
        backoff_factor: Factor it backs off by after an overflow, between 0 and 1.
        growth_interval: Iterations in a row without overflow before the scale grows.
        enabled: False makes every method return its arguments unchanged.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: A number is out of range.
        UnsupportedBackendError: Keras runs on JAX or PyTorch.

    Example:
        >>> import keras, tensorflow as tf, tfamp
        >>> weight, optimizer = keras.Variable(3.0), keras.optimizers.SGD(0.25)
        >>> scaler = tfamp.GradScaler()
        >>> with tf.GradientTape() as tape:
        ...     scaled = scaler.scale(tf.square(weight))
        >>> gradients = scaler.unscale(optimizer, tape.gradient(scaled, [weight]))
        >>> gradients = [tf.clip_by_norm(g, 4.0) for g in gradients]
        >>> applied = scaler.step(optimizer, zip(gradients, [weight]))
        >>> scaler.update()
        >>> float(weight), bool(applied)
        (2.0, True)
    """

    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
    ) -> None:
        require_tensorflow("tfamp.GradScaler", "tfamp.LossScaleOptimizer")
        super().__init__(name="grad_scaler")
        self._enabled = options.checked_flag("enabled", enabled)
        scale = checked_scale("init_scale", init_scale)
        self._scale = _variable("float32", scale, "loss_scale")
        self._growth_tracker = _variable("int64", 0)
        # float64, as PyTorch computes with them: the scale is the same for any factor.
        self._growth_factor = _variable("float64", checked_growth_factor(growth_factor))
        self._backoff_factor = _variable("float64", checked_backoff_factor(backoff_factor))
        interval = options.checked_count("growth_interval", growth_interval)
        self._growth_interval = _variable("int64", interval)
        self._iteration = _Iteration(self._scale)
        watch_tapes(self)

    @as_written
    def scale(self, outputs: Any) -> Any:
        """Multiplies one or several losses by the current scale.

        Args:
            outputs: Float tensor of any shape, or a list, tuple or dict of such.

        Returns:
            The same structure, scaled: float32, or float64 for float64.

        Raises:
            TypeError: A loss is not a float tensor.
        """
        if not self._enabled:
            return outputs
        scale = as_tensor(self._scale)
        return tf.nest.map_structure(lambda loss: scaling.scaled_loss(loss, scale), outputs)

    @as_written
    def unscale(
        self,
        optimizer: keras.optimizers.Optimizer,
        grads: Iterable[Any],
        *,
        variables: Iterable[Any] | None = None,
    ) -> list[Any]:
        """Divides an optimizer's gradients by the current scale.

        "Gradients" of variables with `overwrite_with_gradient`, as in Keras's float8 layers,
        are their next values and stay as they are.

        Optional: without it `step` unscales. The gradients are checked here and the result is
        stored until `update`, so that clipping cannot hide an overflow.

        Args:
            optimizer: The optimizer of the gradients.
            grads: Float tensors, `tf.IndexedSlices` or None, as `tape.gradient` returns them.
            variables: Their variables, in the same order. Needed for float8 layers only, and
                only for other gradients than results of `tape.gradient` in this function.

        Returns:
            The unscaled gradients in the same order, float32 or float64.

        Raises:
            RuntimeError: The optimizer has been unscaled or stepped since the last `update`.
            TypeError: `optimizer` is not a Keras optimizer, or `grads` not a list of gradients.
            ValueError: The optimizer scales losses itself, or a gradient does not fit its
                variable.
        """
        grads = gradient_lib.listed(grads, "unscale")
        if not self._enabled:
            return grads
        scaling.check_scales_no_loss(optimizer, "GradScaler")
        record = self._iteration.record_for("unscale", optimizer)
        unscaled = record.unscale(optimizer, grads, variables, everywhere=True)
        self._iteration.note(record.all_finite)
        return unscaled

    @as_written
    def step(
        self, optimizer: keras.optimizers.Optimizer, grads_and_vars: Iterable[tuple[Any, Any]]
    ) -> Any:
        """Applies an optimizer's gradients, unless one of them is not finite.

        Args:
            optimizer: A bare Keras optimizer.
            grads_and_vars: Pairs of gradient and variable. The gradients are results of
                `unscale`, perhaps modified; without a call of it, scaled ones.

        Returns:
            Whether they were applied, a scalar bool tensor; equal on all replicas.

        Raises:
            RuntimeError: The optimizer has been stepped since the last `update`.
            TypeError: `optimizer` is not a Keras optimizer, or an element not a pair of a float
                gradient and a variable.
            ValueError: The optimizer scales losses itself, or all gradients are missing, or a
                shape does not match its variable.
        """
        grads, variables = gradient_lib.split_pairs(grads_and_vars, "step")
        return self._step("step", optimizer, grads, variables)

    def _step(
        self, call: str, optimizer: Optimizer, grads: list[Tensor], variables: list[Variable]
    ) -> Tensor:
        if not self._enabled:
            optimizer.apply_gradients(zip(grads, variables, strict=True))
            return tf.constant(True)
        scaling.check_scales_no_loss(optimizer, "GradScaler")
        gradient_lib.check_gradients(grads, variables)
        gradient_lib.check_in_replica()
        record = self._iteration.record_for(call, optimizer)
        if not optimizer.built:
            outside_the_graph(lambda: optimizer.build(variables))
        gradients = record.take(grads, variables)
        # An overflow that unscale found, perhaps in another function, may have been
        # clipped since.
        finite = gradients.all_finite_everywhere(record.all_finite)
        gradients = gradients.with_largest_next_values()
        record.stepped.set()
        self._iteration.note(finite)
        apply_if_finite(PlainWeights(optimizer), gradients, finite)
        return finite

    @as_written
    def update(self, new_scale: Any = None) -> None:
        """Updates the scale and starts the next iteration.

        Args:
            new_scale: A scale to set instead, a number or a scalar tensor; it is checked.
                A tensor that is not positive, normal and finite in float32 leaves the
                scale as it is.

        Raises:
            RuntimeError: No optimizer has been unscaled or stepped since the last update.
            TypeError: `new_scale` is not a number.
            ValueError: `new_scale` is out of range.
        """
        if not self._enabled:
            return
        if new_scale is None:
            self._iteration.check_noted()
            self._follow_the_rule(self._iteration.all_finite)
        elif tf.is_tensor(new_scale):
            scale = tf.reshape(tf.cast(new_scale, "float32"), [])
            usable = (scale >= _FLOAT32.tiny) & (scale <= _FLOAT32.max)
            self._scale.assign(tf.where(usable, scale, self._scale))
        else:
            self._scale.assign(checked_scale("new_scale", new_scale))
        self._iteration.start_next()

    @as_written
    def minimize(
        self,
        optimizer: keras.optimizers.Optimizer,
        scaled_loss: Any,
        tape: tf.GradientTape,
        variables: Sequence[Any],
    ) -> Any:
        """Takes the gradients of a scaled loss, steps and updates, as Paddle does.

        For one optimizer: with several call `step` for each and `update` once, as the first
        `minimize` may change the scale of the second loss.

        Args:
            optimizer: A bare Keras optimizer.
            scaled_loss: The result of `scale`, computed under `tape`.
            tape: The tape that recorded it.
            variables: The variables to update.

        Returns:
            Whether the gradients were applied, a scalar bool tensor.

        Raises:
            RuntimeError: The optimizer has been unscaled or stepped since the last update.
            TypeError: As `step`.
            ValueError: As `step`.
        """
        variables = list(variables)
        grads = list(tape.gradient(scaled_loss, variables))
        applied = self._step("minimize", optimizer, grads, variables)
        self.update()
        return applied

    def _follow_the_rule(self, finite: Tensor) -> None:
        """Updates the scale after an iteration with finite gradients or not."""
        zero = tf.zeros_like(self._growth_tracker)
        scale = tf.cast(self._scale, "float64")
        before = LossScaleState(scale, as_tensor(self._growth_tracker), zero, zero)
        after = next_state(self._rule(scale), before, finite, keras.ops)
        self._scale.assign(tf.cast(after.scale, "float32"))
        self._growth_tracker.assign(after.good_steps)

    def _rule(self, scale: Tensor) -> TensorRule:
        """PyTorch's rule, with a lower bound. A scale that would grow to inf keeps its value."""
        growth = as_tensor(self._growth_factor)
        overflows = tf.math.is_inf(tf.cast(scale * growth, "float32"))
        return TensorRule(
            growth_factor=tf.where(overflows, tf.ones_like(growth), growth),
            backoff_factor=as_tensor(self._backoff_factor),
            growth_steps=as_tensor(self._growth_interval),
            hysteresis=1,
            min_scale=_FLOAT32.tiny,
            max_scale=_FLOAT32.max,
        )

    def get_scale(self) -> Any:
        """The current scale, a scalar float32 tensor; 1 if not enabled."""
        return tf.convert_to_tensor(self._scale) if self._enabled else tf.constant(1.0)

    def is_enabled(self) -> bool:
        """Returns whether the scaler is enabled."""
        return self._enabled

    def get_growth_factor(self) -> float:
        """Returns the factor by which the scale grows. Waits for the device."""
        return float(self._growth_factor.numpy())

    def set_growth_factor(self, new_factor: float) -> None:
        """Sets the factor by which the scale grows, also in functions that were traced before.

        Args:
            new_factor: The factor, greater than 1.

        Raises:
            TypeError: It is not a number.
            ValueError: It is out of range.

        Example:
            >>> import tfamp
            >>> scaler = tfamp.GradScaler()
            >>> scaler.set_growth_factor(4.0)
            >>> scaler.get_growth_factor()
            4.0
        """
        self._growth_factor.assign(checked_growth_factor(new_factor))

    def get_backoff_factor(self) -> float:
        """Returns the factor by which the scale backs off. Waits for the device."""
        return float(self._backoff_factor.numpy())

    def set_backoff_factor(self, new_factor: float) -> None:
        """Sets the factor by which the scale backs off, also in functions that were traced before.

        Args:
            new_factor: The factor, between 0 and 1.

        Raises:
            TypeError: It is not a number.
            ValueError: It is out of range.
        """
        self._backoff_factor.assign(checked_backoff_factor(new_factor))

    def get_growth_interval(self) -> int:
        """Returns the iterations in a row after which the scale grows. Waits for the device."""
        return int(self._growth_interval.numpy())

    def set_growth_interval(self, new_interval: int) -> None:
        """Sets the iterations in a row without overflow after which the scale grows.

        Functions that were traced before use it too. If as many have passed, the
        next one grows.

        Args:
            new_interval: Number of iterations, at least 1.

        Raises:
            TypeError: It is not an integer.
            ValueError: It is less than 1.
        """
        self._growth_interval.assign(options.checked_count("growth_interval", new_interval))

    def state_dict(self) -> dict[str, Any]:
        """Returns the state as plain numbers, under PyTorch's names. Waits for the device.

        Returns:
            `scale`, `growth_factor`, `backoff_factor`, `growth_interval` and `_growth_tracker`;
            an empty dict if not enabled.
        """
        if not self._enabled:
            return {}
        return {name: variable.numpy().item() for name, variable in self._state.items()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restores a `state_dict`, PyTorch's or ours. Does nothing if not enabled.

        Args:
            state_dict: The state; not modified.

        Raises:
            RuntimeError: It is empty, as a disabled scaler's.
            KeyError: An entry is missing.
            TypeError: A value has the wrong type.
            ValueError: A value is out of range. After an error nothing is restored.
        """
        if not self._enabled:
            return
        missing = [name for name in _CHECKS if name not in state_dict]
        if missing:
            # As PyTorch, which distinguishes a disabled scaler's empty state from
            # a damaged one.
            raise (KeyError if state_dict else RuntimeError)(
                f"The state dict has no {', '.join(map(repr, missing))}, only "
                f"{list(state_dict)}. Pass what state_dict() of an enabled GradScaler returned."
            )
        # All are checked first: a bad value must not restore half a state.
        values = {name: check(state_dict[name]) for name, check in _CHECKS.items()}
        for name, variable in self._state.items():
            variable.assign(values[name])

    @property
    def _state(self) -> dict[str, tf.Variable]:
        """The variables under PyTorch's names."""
        return {name: getattr(self, f"_{name.removeprefix('_')}") for name in _CHECKS}


# ---- The order of calls ----------------------------------------------------------------------


# By method: the calls after which it raises until the next update.
_TOO_LATE = {"unscale": ("unscale", "step"), "step": ("step",), "minimize": ("unscale", "step")}


class _Record(GradientRecord):
    """Record of an optimizer's gradients since the last update, with its step."""

    def __init__(self, scale: tf.Variable, make_mark: Callable[[], Mark]) -> None:
        super().__init__(scale, unscaled=make_mark(), nonfinite=make_mark())
        self.stepped = make_mark()

    @property
    def last_call(self) -> str | None:
        """The last call, in eager mode also one in a function; None without one."""
        if not tf.executing_eagerly():
            return super().last_call
        return "step" if self.stepped.is_set else "unscale" if self.unscaled.is_set else None


class _Iteration:
    """Records of one scaler's optimizers since its last update.

    A call out of order raises in eager mode, and during tracing if both calls are in the trace.
    A check at run time would make the host wait for the device in every step.
    """

    def __init__(self, scale: tf.Variable) -> None:
        self._scale = scale
        # int64, as comparisons of int32 run on the host.
        self._number = _variable("int64", 0)
        self._checked, self._nonfinite = self._mark(), self._mark()
        self._records: weakref.WeakKeyDictionary[Optimizer, _Record]
        self._records = weakref.WeakKeyDictionary()

    def _mark(self) -> Mark:
        return Mark(_variable("int64", -1), self._number)

    def record_for(self, call: str, optimizer: keras.optimizers.Optimizer) -> _Record:
        """Returns an optimizer's record; raises if a call is out of order."""
        if optimizer not in self._records:
            self._create_record(optimizer)
        record = self._records[optimizer]
        last = record.last_call
        if last in _TOO_LATE[call]:
            fault = "has already been called" if call == last else f"is called after {last}()"
            raise RuntimeError(
                f"{call}() {fault} on this optimizer since the last update(). In each "
                "iteration call unscale() at most once, then step() or, without unscale(), "
                "minimize(), then update()."
            )
        if last is None:
            record.forget_here()  # Eager calls of an iteration that a function ended.
        return record

    def _create_record(self, optimizer: keras.optimizers.Optimizer) -> None:
        gradient_lib.check_created_in_scope(self._number, "GradScaler")

        def create() -> None:
            self._records[optimizer] = _Record(self._scale, self._mark)

        outside_the_graph(create)

    def note(self, finite: Tensor) -> None:
        """Records that gradients were checked, and whether they were finite."""
        self._checked.set()
        self._nonfinite.set(tf.logical_not(finite))

    def check_noted(self) -> None:
        """Raises, in eager mode, if no gradients were checked in this iteration."""
        if tf.executing_eagerly() and not self._checked.is_set:
            raise RuntimeError(
                "No inf checks were recorded prior to update(). Call step() or unscale() "
                "first, with every optimizer of the iteration."
            )

    @property
    def all_finite(self) -> Tensor:
        """Whether the gradients of all optimizers were finite in this iteration, a tensor."""
        return tf.logical_not(self._nonfinite.is_set)

    def start_next(self) -> None:
        """Starts the next iteration, which clears all marks."""
        self._number.assign_add(1)
        for record in self._records.values():
            record.forget_here()

    def __deepcopy__(self, memo: dict[int, Any]) -> _Iteration:
        return _Iteration(copy.deepcopy(self._scale, memo))  # A copy starts its own iteration.


# ---- Values ---------------------------------------------------------------------------------


def _variable(dtype: str, value: float, name: str | None = None) -> tf.Variable:
    # No aggregation: every replica assigns the same value to its own copy.
    return tf.Variable(value, dtype=dtype, trainable=False, name=name)
