"""One warning where every step is skipped, which otherwise only its counters show.

A step does not wait for the device, so the counters are read between steps: in `fit` every fifty
steps and after each epoch, in eager loops every fifty steps. A loop around a `tf.function` is not
seen: it can read `consecutive_skipped_steps`, or use a `NumericsMonitor`.
"""

from __future__ import annotations

import inspect
import warnings
import weakref
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfamp.core.dtypes import float_format
from tfamp.core.errors import TfampWarning
from tfamp.interop.patching import Patch, level_of_user

_EVERY, _MANY, _ROWS = 50, 20, 4096
_FLOAT16_MAX = float_format("float16").max

_warned: weakref.WeakSet[Any] = weakref.WeakSet()
_eager_steps: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


def watch(optimizer: Any) -> None:
    """Has `fit` look at the skipped steps of an optimizer for as long as it lives."""
    _fits.acquire()
    weakref.finalize(optimizer, _fits.release).atexit = False


def note_eager_step(optimizer: Any) -> None:
    """Counts a step that was applied eagerly, and looks now and then."""
    if tf.executing_eagerly() and not tf.distribute.has_strategy():
        _eager_steps[optimizer] = steps = _eager_steps.get(optimizer, 0) + 1
        if steps % _EVERY == 0:
            _look(optimizer, None)


def _fit(original: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
    given = inspect.signature(original).bind(model, *args, **kwargs)
    callbacks = given.arguments.get("callbacks")
    if _scaling(model) and not isinstance(callbacks, keras.callbacks.CallbackList):
        watched = _SkipWatch(given.arguments.get("x"))
        given.arguments["callbacks"] = [*keras.tree.flatten(callbacks or []), watched]
    return original(*given.args, **given.kwargs)


_fits = Patch(fit=_fit)


def _scaling(model: Any) -> list[Any]:
    """The optimizers of a model that count skipped steps, those of its own included."""
    return [each for each in vars(model).values() if hasattr(each, "consecutive_skipped_steps")]


class _SkipWatch(keras.callbacks.Callback):
    """Looks at the optimizers of the model that is trained on some data."""

    def __init__(self, x: Any) -> None:
        super().__init__()
        self._x, self._steps = x, 0

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        # Not on_train_batch_end: for a callback that has it Keras waits for every step's loss.
        if self._steps and self._steps % _EVERY == 0:
            self._look()
        self._steps += 1

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._look()

    def _look(self) -> None:
        for optimizer in _scaling(self.model):
            _look(optimizer, self._x)


def _look(optimizer: Any, x: Any) -> None:
    """Warns, once, if an optimizer has skipped many steps in a row."""
    if optimizer in _warned or (in_a_row := int(optimizer.consecutive_skipped_steps)) < _MANY:
        return
    _warned.add(optimizer)
    beyond = list(_beyond_float16(_first_rows(x)))[:3]
    features = (
        f" {' and '.join(beyond)}, and float16 ends at {_FLOAT16_MAX:g}: if the model computes in "
        "float16, scale the data in float32 first, as keras.layers.Normalization does, or use "
        "bfloat16."
    )
    warnings.warn(
        f"{optimizer.name} has skipped the last {in_a_row} steps, as their gradients were not "
        f"finite; its loss scale is {float(optimizer.dynamic_scale):g}. The model learns nothing. "
        "tfamp.diagnostics.find_nonfinite(model, x, y) on one batch finds the op at fault and what "
        f"to change.{features if beyond else ''}",
        TfampWarning,
        stacklevel=level_of_user(),
    )


def _first_rows(x: Any) -> Any:
    """The first inputs that `fit` was given, if they can be had without using them up."""
    if isinstance(x, tf.data.Dataset):
        x = keras.utils.unpack_x_y_sample_weight(next(iter(x.take(1)), None))[0]
    elif isinstance(x, keras.utils.PyDataset):
        x = keras.utils.unpack_x_y_sample_weight(x[0])[0]
    return x


def _beyond_float16(x: Any) -> Iterator[str]:
    """What of some inputs float16 cannot hold, with the largest value."""
    for path, leaf in keras.tree.flatten_with_path(x):
        # Generators and sparse tensors are not arrays.
        array = np.asarray(leaf[:_ROWS] if hasattr(leaf, "__array__") else ())
        if array.dtype.kind != "f" or not array.size:
            continue
        sizes = np.abs(array).reshape(-1, array.shape[-1] if array.ndim > 1 else 1).max(axis=0)
        name = "x" + "".join(f"[{key!r}]" for key in path)
        columns = getattr(leaf, "columns", None)
        for number in np.flatnonzero(sizes > _FLOAT16_MAX):
            index = f"..., {number}" if columns is None else repr(columns[number])
            part = "" if len(sizes) == 1 else f"[{index}]"
            yield f"{name}{part} reaches {sizes[number]:g}"
