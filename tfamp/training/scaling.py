"""The loss scale in variables, and what is still scaled by it.

The owner makes the variables, so that its checkpoints name them; these parts read and assign them.
"""

from __future__ import annotations

import inspect
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import keras
import tensorflow as tf
from keras import ops

from tfamp.core.dtypes import FLOAT_DTYPES, LOW_PRECISION
from tfamp.core.errors import TfampWarning
from tfamp.core.options import LossScale, LossScaleState, next_state
from tfamp.interop.keras_hooks import as_tensor, described
from tfamp.interop.patching import Patch, level_of_user
from tfamp.training.gradients import Gradients, dtype_name, widened

_State = TypeVar("_State")


def check_scales_no_loss(optimizer: Any, user: str) -> None:
    """Raises if an optimizer is none, or scales losses itself, and `user` scales them too."""
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        raise ValueError(
            f"{optimizer.name} is a LossScaleOptimizer already; with a {user} the loss would be "
            "scaled twice. Pass its inner_optimizer instead."
        )
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise TypeError(
            f"The optimizer for a {user} must be a keras.optimizers.Optimizer, e.g. "
            f"keras.optimizers.Adam(); got {described(optimizer)}"
        )
    factor = optimizer.loss_scale_factor
    if factor is not None:
        raise ValueError(
            f"{optimizer.name} has loss_scale_factor={factor}, so it scales losses itself. Create "
            f"it without; tfamp.LossScaleOptimizer(..., loss_scale={factor}) has a fixed scale."
        )


def scaled_loss(loss: Any, scale: Any) -> Any:
    """Multiplies a loss by the loss scale, in float32 or wider.

    A float16 loss is cast first: the default maximum scale, and already 2**16, is inf in float16.
    """
    try:
        wide = widened(loss)
    except (TypeError, ValueError, tf.errors.InvalidArgumentError) as error:
        raise TypeError(
            f"The loss must be a float tensor; got {type(loss).__name__}. To scale several losses, "
            "scale each of them."
        ) from error
    if dtype_name(wide) not in FLOAT_DTYPES:
        raise TypeError(f"The loss must be a float tensor; got dtype {dtype_name(wide)}.")
    return wide * ops.cast(scale, wide.dtype)


def advance(variables: LossScaleState, rule: LossScale, finite: Any) -> None:
    """Moves a loss scale on by one step, whose gradients were all `finite` or not.

    Counters that the rule does not look at are None.
    """
    # Not a Python 0: it would become an int32, which GPUs' hosts compare.
    zero = ops.zeros_like(as_tensor(variables.good_steps))
    before = LossScaleState(*(zero if v is None else as_tensor(v) for v in variables))
    after = next_state(rule, before, finite, ops)
    for variable, old, new in zip(variables, before, after, strict=True):
        if variable is not None and new is not old:
            variable.assign(ops.cast(new, variable.dtype))


def divisor_of(scale: Any, unscaled: bool | None, noted: Callable[[], Any]) -> Any:
    """What gradients are still to be divided by: the scale, or None where they are unscaled.

    `unscaled` is None where that only shows at run time; then `noted`, a scalar bool, says it.
    """
    if unscaled is None:
        return ops.where(noted(), 1.0, scale)
    return None if unscaled else scale


class UnscaledGradients:
    """Which gradients an optimizer has unscaled since its last apply, and whether they were finite.

    In the graph where they were unscaled that is a fact of the program text. For an apply in
    another graph two variables hold it.

    Args:
        scale: Variable with the loss scale.
        pending: Bool variable: something was unscaled and not applied.
        finite: Bool variable: everything that was unscaled was finite.
    """

    def __init__(self, scale: Any, pending: Any, finite: Any) -> None:
        self._scale, self._pending, self._finite = scale, pending, finite
        self._windows = PerTrace(_Window)

    @property
    def all_finite(self) -> Any:
        """Whether all that were unscaled since the last apply were finite, a bool tensor."""
        return as_tensor(self._finite)

    def unscale(self, optimizer: Any, gradients: list[Any]) -> list[Any]:
        """Unscales gradients for an optimizer, once; checks them and notes both."""
        window, given = self._windows.current(), _tensors(gradients)
        if any(key in window.tensors for key in given):
            raise ValueError(
                "These gradients have been unscaled already since the last apply; unscaling them "
                "again would divide by the loss scale twice. Call get_unscaled_gradients once on "
                "the gradients of each backward pass, then apply_gradients."
            )
        unscaled, finite = Gradients.unscaled_for(optimizer, gradients, as_tensor(self._scale))
        # The replicas agree on it when they apply: nothing is sent here.
        self._finite.assign(ops.logical_and(self.all_finite, finite))
        self._pending.assign(True)
        window.is_open = True
        window.tensors.update(given | _tensors(unscaled))
        return unscaled

    def known_here(self) -> bool:
        """Whether something was unscaled in this graph since the last apply."""
        return self._windows.current().is_open

    def take(
        self, gradients: list[Any], targets: list[Any], unscaled: bool | None = None
    ) -> Gradients:
        """Gradients with what they are still to be divided by; forgets what is known of them here.

        `unscaled` is what the caller says of them, None for nothing.
        """
        window = self._windows.take()
        # What the variable's own dtype can hold was not known when they were unscaled.
        checked = [
            id(gradient) in window.tensors and dtype_name(target) not in LOW_PRECISION
            for gradient, target in zip(gradients, targets, strict=True)
        ]
        if window.is_open and unscaled is None:
            unscaled = True
        divisor = divisor_of(as_tensor(self._scale), unscaled, lambda: as_tensor(self._pending))
        return Gradients(gradients, targets, divisor, checked)

    def drop_pending(self) -> None:
        """Forgets, unless it is known here, that something was unscaled and not applied."""
        if not self.known_here():
            self._pending.assign(False)

    def start_next(self) -> None:
        """Starts the next step."""
        self._pending.assign(False)
        self._finite.assign(True)


@dataclass
class _Window:
    """What was unscaled since the last apply, in one graph or in eager mode."""

    is_open: bool = False  # Whether anything was.
    # What was unscaled and the results, by identity: the one is finite if the other is. Weak: a
    # window must not keep a step's gradients alive.
    tensors: weakref.WeakValueDictionary[int, Any] = field(
        default_factory=weakref.WeakValueDictionary
    )


def _tensors(gradients: Iterable[Any]) -> dict[int, Any]:
    values = (g.values if isinstance(g, tf.IndexedSlices) else g for g in gradients)
    return {id(value): value for value in values if tf.is_tensor(value)}


class PerTrace(threading.local, Generic[_State]):
    """One state for each graph that is traced and one for eager mode, in each thread.

    Whether a method has been called is a fact of the program text, not of a step: it belongs to
    the graph that is being traced. Keeping it per graph makes it hold under retracing and in
    several functions; per thread, because each replica of a `MirroredStrategy` traces in a thread
    of its own.

    Args:
        make: Returns a new state. A state must not keep tensors alive, they keep their graph alive.
    """

    def __init__(self, make: Callable[[], _State]) -> None:
        super().__init__()
        self._make = make
        self._states: weakref.WeakKeyDictionary[Any, _State] = weakref.WeakKeyDictionary()

    def _here(self) -> Any:
        return self if tf.executing_eagerly() else tf.compat.v1.get_default_graph()

    def current(self) -> _State:
        """The state of the graph being traced, or of eager mode."""
        return self._states.setdefault(self._here(), self._make())

    def take(self) -> _State:
        """The same, for the last time: a new one takes its place."""
        state = self.current()
        del self._states[self._here()]
        return state

    def __deepcopy__(self, memo: dict[int, Any]) -> PerTrace[_State]:
        return PerTrace(self._make)  # What was called on one object says nothing of its copy.


# ---- A warning where every step is skipped -------------------------------------------------------

# A step does not wait for the device, so the counters are read between steps only: in `fit` every
# fifty steps and after each epoch, in eager loops every fifty steps. A loop around a `tf.function`
# can read `consecutive_skipped_steps`, or use a `NumericsMonitor`.
_EVERY, _MANY = 50, 20
_eager_steps: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
_warned: weakref.WeakSet[Any] = weakref.WeakSet()


def watch(optimizer: Any) -> None:
    """Has `fit` look at the skipped steps of an optimizer for as long as it lives."""
    _fits.acquire()
    weakref.finalize(optimizer, _fits.release).atexit = False


def note_eager_step(optimizer: Any) -> None:
    """Counts a step that was applied eagerly, and looks now and then."""
    if tf.executing_eagerly() and not tf.distribute.has_strategy():
        _eager_steps[optimizer] = steps = _eager_steps.get(optimizer, 0) + 1
        if steps % _EVERY == 0:
            _warn_of_skips(optimizer)


def _fit(original: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
    given = inspect.signature(original).bind(model, *args, **kwargs)
    callbacks = given.arguments.get("callbacks")
    if _counting(model) and not isinstance(callbacks, keras.callbacks.CallbackList):
        given.arguments["callbacks"] = [*keras.tree.flatten(callbacks or []), _SkipWatch()]
    return original(*given.args, **given.kwargs)


def _counting(model: Any) -> list[Any]:
    """The optimizers of a model that count skipped steps, those of its own included."""
    return [each for each in vars(model).values() if hasattr(each, "consecutive_skipped_steps")]


_fits = Patch(fit=_fit)


class _SkipWatch(keras.callbacks.Callback):
    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        # Not on_train_batch_end: for a callback that has it Keras waits for every step's loss.
        if batch and batch % _EVERY == 0:
            self.on_epoch_end(0)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        for optimizer in _counting(self.model):
            _warn_of_skips(optimizer)


def _warn_of_skips(optimizer: Any) -> None:
    """Warns, once, if an optimizer has skipped many steps in a row."""
    if optimizer in _warned or (in_a_row := int(optimizer.consecutive_skipped_steps)) < _MANY:
        return
    _warned.add(optimizer)
    warnings.warn(
        f"{optimizer.name} has skipped the last {in_a_row} steps, as their gradients were not "
        f"finite; its loss scale is {float(optimizer.dynamic_scale):g}. The model learns nothing. "
        "tfamp.diagnostics.find_nonfinite(model, x, y) on one batch finds the op at fault, or the "
        "inputs that are out of range, and what to change.",
        TfampWarning,
        stacklevel=level_of_user(),
    )
