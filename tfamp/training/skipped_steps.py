"""One warning where every step is skipped, which otherwise only the counters show.

Reading a counter waits for the device, so steps are counted on the host, in eager mode and by
calls of the functions that apply gradients, and a counter is read between steps when it can have
reached twenty: after c skipped steps in a row, 20 - c steps later. The first reads follow after
1, 2, 4, 8 and 16 calls, as a call may run many steps. A call of a function counts when the next
one begins: the trace holds a value that is asked for at the start of every call.
"""

from __future__ import annotations

import functools
import inspect
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import keras
import tensorflow as tf

from tfamp.core.errors import TfampWarning
from tfamp.core.kinds import Model, Optimizer
from tfamp.interop import tf_private
from tfamp.interop.keras_hooks import as_tensor
from tfamp.interop.patching import Patch, level_of_user
from tfamp.training.scaling import build_optimizer

# So many skipped steps in a row are warned of. A choice: the first loss scale, 2**15, falls to 1
# within 15 skipped steps, so that after 20 it is not the cause.
_MANY = 20


# A method that a patch replaces.
_Method: TypeAlias = Callable[..., Any]


@dataclass
class _Watch:
    """The steps counted on the host, the step after which to read, and what was warned of.

    `has_call` is whether a function that takes steps has been called.
    """

    steps: int = 0
    due: int = 1
    has_call: bool = False
    warned_of_many: bool = False
    warned_of_fit: bool = False


_watches: weakref.WeakKeyDictionary[Optimizer, _Watch] = weakref.WeakKeyDictionary()


def watch(optimizer: Optimizer) -> None:
    """Makes `fit` check for skipped steps while an optimizer exists."""
    _hooks.acquire()
    weakref.finalize(optimizer, _hooks.release).atexit = False


def note_step(optimizer: Optimizer) -> None:
    """Counts an eager step; of a function that is being traced, the steps of all its calls."""
    if not tf.executing_eagerly():
        begin = functools.partial(_begin_call, weakref.ref(optimizer))
        tf_private.call_at_calls(begin, f"tfamp_steps_{id(optimizer)}")
    elif not tf.distribute.has_strategy() or tf.distribute.in_cross_replica_context():
        _count_step(optimizer)


def _begin_call(reference: weakref.ref[Optimizer]) -> None:
    """Counts the step of the call before this one, which has run or waits for the device."""
    optimizer = reference()
    if optimizer is not None:
        watch = _watches.setdefault(optimizer, _Watch())
        if watch.has_call:
            _count_step(optimizer)
        watch.has_call = True


def _count_step(optimizer: Optimizer) -> None:
    watch = _watches.setdefault(optimizer, _Watch())
    watch.steps += 1
    if watch.steps >= watch.due and not watch.warned_of_many:
        left = _MANY - _warn_of_many(optimizer)
        watch.due = watch.steps + min(watch.steps, left)


def _fit(original: _Method, model: Model, *args: Any, **kwargs: Any) -> Any:
    bound = inspect.signature(original).bind(model, *args, **kwargs)
    callbacks = bound.arguments.get("callbacks")
    if _counting(model) and not isinstance(callbacks, keras.callbacks.CallbackList):
        bound.arguments["callbacks"] = [*keras.tree.flatten(callbacks or []), _SkipWatch()]
        build_optimizer(model)
    return original(*bound.args, **bound.kwargs)


def _counting(model: Model) -> list[Optimizer]:
    """The optimizers among a model's attributes that count skipped steps.

    Other attributes are not touched: reading one of theirs may raise or take long.
    """
    kinds = [(type(value), value) for value in vars(model).values()]
    scaling = keras.optimizers.LossScaleOptimizer
    return [
        value
        for kind, value in kinds
        if issubclass(kind, scaling) and hasattr(kind, "consecutive_skipped_steps")
    ]


_hooks = Patch(
    optional={"fit": "a fit whose steps are all skipped is not told of."},
    fit=_fit,
)


class _SkipWatch(keras.callbacks.Callback):
    """Reads the counters after every epoch, and whether a run has updated anything."""

    def on_train_begin(self, logs: Any = None) -> None:
        self._before = [(optimizer, *_numbers(optimizer)) for optimizer in _counting(self.model)]

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        for optimizer in _counting(self.model):
            _warn_of_many(optimizer)

    def on_train_end(self, logs: Any = None) -> None:
        for optimizer, updates, skipped in self._before:
            updates_now, skipped_now = _numbers(optimizer)
            if updates_now == updates and skipped_now > skipped:
                _warn_of_fit(optimizer, skipped_now - skipped)


def _numbers(optimizer: Optimizer) -> tuple[int, int]:
    """Returns the numbers of updates and of skipped steps."""
    return int(as_tensor(optimizer.iterations)), int(optimizer.skipped_steps)


def _warn_of_many(optimizer: Optimizer) -> int:
    """Returns the skipped steps in a row; warns once if they are many."""
    watch = _watches.setdefault(optimizer, _Watch())
    in_a_row = int(optimizer.consecutive_skipped_steps)
    if in_a_row >= _MANY and not watch.warned_of_many:
        watch.warned_of_many = True
        _warn(optimizer, f"has skipped the last {in_a_row} steps")
    return in_a_row


def _warn_of_fit(optimizer: Optimizer, skipped: int) -> None:
    """Warns once of a run without an update, unless a warning said so."""
    watch = _watches.setdefault(optimizer, _Watch())
    if not (watch.warned_of_many or watch.warned_of_fit):
        watch.warned_of_fit = True
        steps = "1 step" if skipped == 1 else f"{skipped} steps"
        normal = (
            "The first steps in float16 are often skipped while the scale falls: train for more "
            f"steps. After {_MANY} in a row the scale is not the cause: then "
        )
        what = f"has updated nothing in this fit and skipped {steps}"
        _warn(optimizer, what, normal if skipped < _MANY else _LEARNS_NOTHING)


_LEARNS_NOTHING = "The model learns nothing. "


def _warn(optimizer: Optimizer, what: str, then: str = _LEARNS_NOTHING) -> None:
    warnings.warn(
        f"{optimizer.name} {what}, as their gradients were not finite; its loss scale is "
        f"{float(as_tensor(optimizer.dynamic_scale)):g}. {then}"
        "tfamp.diagnostics.find_nonfinite(model_or_step, x, y) on one batch finds the op at "
        "fault, or the inputs that are out of range, and what to change.",
        TfampWarning,
        stacklevel=level_of_user(),
    )
