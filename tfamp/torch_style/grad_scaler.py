"""`GradScaler`: loss scaling in the shape PyTorch and Paddle gave it.

An *iteration* lasts from one update to the next. Whatever happens is noted in a variable as the
number of the iteration it last happened in. So it is known in every other `tf.function` too, and an
update forgets all of it by starting another iteration: also what belongs to an optimizer that the
function that updates has never heard of.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, TypeVar

import keras
import tensorflow as tf

from tfamp.core import options
from tfamp.core.dtypes import float_format
from tfamp.core.options import LossScaleState
from tfamp.interop.keras_hooks import as_tensor, require_tensorflow
from tfamp.interop.tf_private import as_written
from tfamp.training import gradients as gradient_lib
from tfamp.training import scaling
from tfamp.training.gradients import Gradients, outside_the_graph
from tfamp.training.scaling import PerTrace
from tfamp.training.weights import PlainWeights, apply_if_finite

_FLOAT32 = float_format("float32")
_Value = TypeVar("_Value")
_ByOptimizer = weakref.WeakKeyDictionary[keras.optimizers.Optimizer, _Value]
# What a state holds: PyTorch's names, and what may be there.
_CHECKS: dict[str, Callable[[Any], float]] = {
    "scale": partial(options.checked_scale, "scale"),
    "growth_factor": options.checked_growth_factor,
    "backoff_factor": options.checked_backoff_factor,
    "growth_interval": partial(options.checked_count, "growth_interval"),
    "_growth_tracker": lambda value: int(
        options.checked_number("_growth_tracker", value, low=0, high=2**31)
    ),
}


class GradScaler(tf.Module):
    """Scales losses and unscales gradients for any number of optimizers, as in PyTorch and Paddle.

    One scaler serves a training loop with several losses, models and optimizers. In each iteration
    scale the losses, take the gradients, `step` every optimizer and then `update` once. To clip or
    inspect gradients, `unscale` them before the step. A step with a gradient that is not finite,
    on any replica, is skipped; the other optimizers' steps are not. `update` makes the scale back
    off if any optimizer's gradients were not finite, and grow after `growth_interval` iterations
    in a row without.

    The scale follows PyTorch's rule step for step, with one bound that the rule lacks: it never
    falls below float32's smallest normal number, 2**-126, so never becomes 0. As in PyTorch, a
    scale that would grow to inf keeps its value.

    Calls out of order raise, in a function while it is traced. What another function has done only
    shows when this one runs: no step is applied from then on, and the next call outside a function
    raises. `get_scale` and `state_dict` are such calls.

    The methods work in eager mode, in a `tf.function`, in several, under `jit_compile=True` and in
    `strategy.run`; create the scaler under `strategy.scope()`. `tf.train.Checkpoint` saves it.

    Source: `torch.amp.GradScaler`; `minimize` is `paddle.amp.GradScaler`'s.

    Args:
        init_scale: Scale of the first iteration.
        growth_factor: Factor the scale grows by, greater than 1.
        backoff_factor: Factor it backs off by after an overflow, between 0 and 1.
        growth_interval: Iterations in a row without overflow before the scale grows.
        enabled: False makes every method pass on what it is given.

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
        scale = options.checked_scale("init_scale", init_scale)
        self._scale = _variable("float32", scale, "loss_scale")
        self._growth_tracker = _variable("int64", 0)
        # float64, as PyTorch computes with them: the scale is the same for any factor.
        self._growth_factor = _variable("float64", options.checked_growth_factor(growth_factor))
        self._backoff_factor = _variable("float64", options.checked_backoff_factor(backoff_factor))
        interval = options.checked_count("growth_interval", growth_interval)
        self._growth_interval = _variable("int64", interval)
        self._calls = _CallOrder()

    @as_written
    def scale(self, outputs: Any) -> Any:
        """Multiplies one or several losses by the current scale.

        Args:
            outputs: Float tensor of any shape, or a list, tuple or dict of such.

        Returns:
            The same, scaled: float32, or float64 for float64.

        Raises:
            TypeError: There is something else than a float tensor.
        """
        if not self._enabled:
            return outputs
        scale = as_tensor(self._scale)
        return tf.nest.map_structure(lambda loss: scaling.scaled_loss(loss, scale), outputs)

    @as_written
    def unscale(self, optimizer: keras.optimizers.Optimizer, grads: Iterable[Any]) -> list[Any]:
        """Divides an optimizer's gradients by the current scale.

        Optional: `step` does it if this was not called. The gradients are checked here and the
        result is remembered until `update`, so that clipping cannot hide an overflow.

        Args:
            optimizer: The optimizer they are for.
            grads: Float tensors, `tf.IndexedSlices` or None, as `tape.gradient` returns them.

        Returns:
            The unscaled gradients in the same order, float32 or float64.

        Raises:
            RuntimeError: The optimizer has been unscaled or stepped since the last `update`.
            TypeError: `optimizer` is no Keras optimizer, or `grads` no list of gradients.
            ValueError: The optimizer scales losses itself.
        """
        grads = gradient_lib.listed(grads, "unscale")
        if not self._enabled:
            return grads
        scaling.check_scales_no_loss(optimizer, "GradScaler")
        self._calls.check_order("unscale", optimizer)
        unscaled, finite = Gradients.unscaled_for(optimizer, grads, as_tensor(self._scale))
        self._calls.record(optimizer, "unscaled", gradient_lib.on_every_replica(finite))
        return unscaled

    @as_written
    def step(
        self, optimizer: keras.optimizers.Optimizer, grads_and_vars: Iterable[tuple[Any, Any]]
    ) -> Any:
        """Applies an optimizer's gradients, unless one of them is not finite.

        Args:
            optimizer: A bare Keras optimizer.
            grads_and_vars: Pairs of gradient and variable. The gradients are those that `unscale`
                returned, changed at will; or, where it was not called, scaled ones.

        Returns:
            Whether they were applied, a scalar bool tensor; equal on all replicas.

        Raises:
            RuntimeError: The optimizer has been stepped since the last `update`.
            TypeError: `optimizer` is no Keras optimizer, or an element is no pair of a float
                gradient and a variable.
            ValueError: The optimizer scales losses itself, or there is nothing to apply, or a
                shape does not fit its variable.
        """
        grads, variables = gradient_lib.split_pairs(grads_and_vars, "step")
        return self._step("step", optimizer, grads, variables)

    def _step(self, call: str, optimizer: Any, grads: list[Any], variables: list[Any]) -> Any:
        if not self._enabled:
            optimizer.apply_gradients(zip(grads, variables, strict=True))
            return tf.constant(True)
        scaling.check_scales_no_loss(optimizer, "GradScaler")
        gradient_lib.check_gradients(grads, variables)
        gradient_lib.check_in_replica()
        self._calls.check_order(call, optimizer)
        if not optimizer.built:
            outside_the_graph(lambda: optimizer.build(variables))
        divisor = self._calls.divisor(optimizer, as_tensor(self._scale))
        # Also what unscale found, perhaps in another function, and clipping has hidden since.
        gradients = Gradients(grads, variables, divisor)
        finite = gradients.all_finite_everywhere(self._calls.may_step(optimizer))
        self._calls.record(optimizer, "stepped", finite)
        apply_if_finite(PlainWeights(optimizer), gradients, finite)
        return finite

    @as_written
    def update(self, new_scale: Any = None) -> None:
        """Moves the scale on and starts the next iteration.

        Args:
            new_scale: A scale to set instead, a number or a scalar tensor; it is checked. A tensor
                that is not positive, normal and finite in float32 leaves the scale as it is.

        Raises:
            RuntimeError: No optimizer has been unscaled or stepped since the last update.
            TypeError: `new_scale` is no number.
            ValueError: `new_scale` is out of range.
        """
        if not self._enabled:
            return
        if new_scale is None:
            self._calls.check_recorded()
            self._follow_the_rule(self._calls.all_finite())
        else:
            self._calls.raise_fault()
            self._set_scale(new_scale)
        self._calls.start_next()

    @as_written
    def minimize(
        self,
        optimizer: keras.optimizers.Optimizer,
        scaled_loss: Any,
        tape: tf.GradientTape,
        variables: Sequence[Any],
    ) -> Any:
        """Takes the gradients of a scaled loss, steps and updates; Paddle's way for one optimizer.

        With several optimizers use `step` with each and `update` once: the second loss would have
        been scaled with a scale that the first `minimize` may have changed.

        Args:
            optimizer: A bare Keras optimizer.
            scaled_loss: What `scale` returned, computed under `tape`.
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

    def _follow_the_rule(self, finite: Any) -> None:
        """Moves the scale on by one iteration, whose gradients were all finite or not."""
        scale = tf.cast(self._scale, "float64")
        growth_factor = tf.convert_to_tensor(self._growth_factor)
        grown = tf.cast(scale * growth_factor, "float32")
        # A DynamicLossScale in tensors: a state that is loaded holds in traced functions too.
        rule = SimpleNamespace(
            growth_factor=growth_factor,
            backoff_factor=tf.convert_to_tensor(self._backoff_factor),
            growth_steps=tf.convert_to_tensor(self._growth_interval),
            # What cannot grow any more keeps its value.
            max_scale=tf.where(tf.math.is_finite(grown), tf.cast(_FLOAT32.max, "float64"), scale),
            min_scale=_FLOAT32.tiny,
            hysteresis=1,
        )
        state = LossScaleState(self._scale, self._growth_tracker, None, None)
        scaling.advance(state, rule, finite, dtype="float64")

    def _set_scale(self, new_scale: Any) -> None:
        if not tf.is_tensor(new_scale):
            self._scale.assign(options.checked_scale("new_scale", new_scale))
            return
        scale = tf.reshape(tf.cast(new_scale, "float32"), [])
        usable = (scale >= _FLOAT32.tiny) & (scale <= _FLOAT32.max)
        self._scale.assign(tf.where(usable, scale, self._scale))

    def get_scale(self) -> Any:
        """The current scale, a scalar float32 tensor; 1 if not enabled.

        Raises:
            RuntimeError: Calls were out of order, which showed when a traced function ran.
        """
        self._calls.raise_fault()
        return tf.convert_to_tensor(self._scale) if self._enabled else tf.constant(1.0)

    def is_enabled(self) -> bool:
        """Whether the scaler does anything."""
        return self._enabled

    def state_dict(self) -> dict[str, Any]:
        """The state in plain numbers, under PyTorch's names. Waits for the device.

        Returns:
            `scale`, `growth_factor`, `backoff_factor`, `growth_interval` and `_growth_tracker`;
            an empty dict if not enabled.

        Raises:
            RuntimeError: As `get_scale`.
        """
        if not self._enabled:
            return {}
        self._calls.raise_fault()
        return {name: variable.numpy().item() for name, variable in self._state.items()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restores what `state_dict` returned, PyTorch's or ours. Does nothing if not enabled.

        Args:
            state_dict: The state; not modified.

        Raises:
            RuntimeError: It is empty: it comes from a scaler that was not enabled.
            KeyError: Something is missing.
            TypeError: A value has the wrong type.
            ValueError: A value is out of range. Nothing is restored then.
        """
        if not self._enabled:
            return
        if not state_dict:
            raise RuntimeError(
                "The state dict is empty; it was probably saved by a GradScaler with "
                "enabled=False. Start this one without it, or disable it too."
            )
        missing = [name for name in _CHECKS if name not in state_dict]
        if missing:
            raise KeyError(
                f"The state dict has no {', '.join(map(repr, missing))}, only "
                f"{', '.join(map(repr, state_dict))}. Pass what state_dict() returned, whole."
            )
        # All are checked first: a bad value must not leave half a state.
        values = {name: check(state_dict[name]) for name, check in _CHECKS.items()}
        for name, variable in self._state.items():
            variable.assign(values[name])

    @property
    def _state(self) -> dict[str, tf.Variable]:
        """The variables under PyTorch's names."""
        return {name: getattr(self, f"_{name.removeprefix('_')}") for name in _CHECKS}


# ---- The order of calls ----------------------------------------------------------------------


# How far an optimizer has come in the iteration: "ready", "unscaled" or "stepped". In eager mode it
# is always known. While a function is traced it is known from the calls traced before; at the
# beginning it is not (None), since the gradients may have been unscaled elsewhere.
_Stage = str | None
_OUT_OF_ORDER = {
    "unscale": {
        "unscaled": "unscale() has already been called on this optimizer since the last update(). "
        "Call it once, when all its gradients have been added up.",
        "stepped": "unscale() is called after step() on this optimizer. Unscale, then step, then "
        "update().",
    },
    "step": {
        "stepped": "step() has already been called on this optimizer since the last update(). Call "
        "update() at the end of every iteration.",
    },
    "minimize": {
        "unscaled": "minimize() is called after unscale() on this optimizer. minimize() takes the "
        "gradients itself; to change them, call unscale(), step() and update().",
        "stepped": "minimize() is called after step() on this optimizer. It steps itself.",
    },
}
_NO_CHECKS = (
    "No inf checks were recorded prior to update(). Call step() or unscale() first, with every "
    "optimizer of the iteration."
)
_MESSAGES = (_NO_CHECKS, *(each for calls in _OUT_OF_ORDER.values() for each in calls.values()))


class _CallOrder:
    """What one scaler has been called with since its last update.

    A call out of order raises in eager mode, and where the trace tells. Where it only shows when a
    function runs, raising would make the host wait for the device in every step: it is noted as a
    fault, with which no step is applied, and the next call outside a function raises.
    """

    def __init__(self) -> None:
        # All int64: comparisons of int32 are made on the host.
        self._now = _variable("int64", 0)
        self._checked, self._nonfinite = _variable("int64", -1), _variable("int64", -1)
        self._fault = _variable("int64", 0)  # Number of the message, from 1 on.
        # The iterations in which each optimizer last reached a stage, or had nonfinite gradients.
        self._marks: _ByOptimizer[dict[str, tf.Variable]] = weakref.WeakKeyDictionary()
        self._traced: PerTrace[_ByOptimizer[str]] = PerTrace(weakref.WeakKeyDictionary)

    def _is_now(self, optimizer: keras.optimizers.Optimizer, mark: str) -> Any:
        return tf.equal(self._marks_of(optimizer)[mark], self._now)

    def _marks_of(self, optimizer: keras.optimizers.Optimizer) -> dict[str, tf.Variable]:
        def create() -> None:
            names = ("unscaled", "stepped", "nonfinite")
            self._marks[optimizer] = {name: _variable("int64", -1) for name in names}

        if optimizer not in self._marks:
            extended = tf.distribute.get_strategy().extended
            if tf.distribute.has_strategy() and not extended.variable_created_in_scope(self._now):
                raise ValueError(
                    "This GradScaler was created outside the scope of the strategy it is used in, "
                    "so its replicas would share one scale. Create it under strategy.scope()."
                )
            outside_the_graph(create)
        return self._marks[optimizer]

    def _stage(self, optimizer: keras.optimizers.Optimizer) -> _Stage:
        if not tf.executing_eagerly():
            return self._traced.current().get(optimizer)
        return next((s for s in ("stepped", "unscaled") if self._is_now(optimizer, s)), "ready")

    def check_order(self, call: str, optimizer: keras.optimizers.Optimizer) -> None:
        """Raises if a call, "unscale", "step" or "minimize", does not come in order."""
        self.raise_fault()
        known = self._stage(optimizer)
        for stage, message in _OUT_OF_ORDER[call].items():
            if known == stage:
                raise RuntimeError(message)
            if known is None:
                self._note_fault(self._is_now(optimizer, stage), message)

    def check_recorded(self) -> None:
        """Raises if nothing was recorded in this iteration."""
        self.raise_fault()
        missing = tf.not_equal(self._checked, self._now)
        if not tf.executing_eagerly():
            if not self._traced.current():
                self._note_fault(missing, _NO_CHECKS)
        elif missing:
            raise RuntimeError(_NO_CHECKS)

    def _note_fault(self, condition: Any, message: str) -> None:
        number = tf.constant(_MESSAGES.index(message) + 1, tf.int64)
        self._fault.assign(tf.where(condition & tf.equal(self._fault, 0), number, self._fault))

    def raise_fault(self) -> None:
        """Raises, in eager mode, for what was out of order when a function ran."""
        if tf.executing_eagerly() and (number := int(tf.convert_to_tensor(self._fault))):
            self._fault.assign(0)
            raise RuntimeError(f"{_MESSAGES[number - 1]} (Found when a tf.function ran.)")

    def record(self, optimizer: keras.optimizers.Optimizer, stage: str, finite: Any) -> None:
        """Notes that an optimizer has reached a stage, with finite gradients or not."""
        marks = self._marks_of(optimizer)
        for mark in (marks[stage], self._checked):
            mark.assign(self._now)
        for mark in (marks["nonfinite"], self._nonfinite):
            mark.assign(tf.where(finite, mark, self._now))
        if not tf.executing_eagerly():
            self._traced.current()[optimizer] = stage

    def divisor(self, optimizer: keras.optimizers.Optimizer, scale: Any) -> Any:
        """What an optimizer's gradients are still to be divided by."""
        stage = self._stage(optimizer)
        known = None if stage is None else stage == "unscaled"
        return scaling.divisor_of(scale, known, lambda: self._is_now(optimizer, "unscaled"))

    def may_step(self, optimizer: keras.optimizers.Optimizer) -> Any:
        """Whether nothing found so far, in any function, forbids a step; a bool tensor."""
        return tf.equal(self._fault, 0) & tf.logical_not(self._is_now(optimizer, "nonfinite"))

    def all_finite(self) -> Any:
        """Whether the gradients of all optimizers were finite in this iteration, a bool tensor."""
        return tf.not_equal(self._nonfinite, self._now)

    def start_next(self) -> None:
        """Forgets everything."""
        self._now.assign_add(1)
        self._traced.current().clear()

    def __deepcopy__(self, memo: dict[int, Any]) -> _CallOrder:
        return _CallOrder()  # What happened with one scaler says nothing of its copy.


# ---- Values ---------------------------------------------------------------------------------


def _variable(dtype: str, value: float, name: str | None = None) -> tf.Variable:
    # No aggregation: every replica assigns the same value to its own copy.
    return tf.Variable(value, dtype=dtype, trainable=False, name=name)
