"""One warning where a bare optimizer is given float16 gradients that have underflowed to zero.

Without a loss scale float16 gradients below 2**-25 are zero, and training stands still in silence.
Zeros alone prove nothing: a relu makes them in float32 too. What gives float16 away is the other
gradients: they are small multiples of its smallest number, 2**-24, which float32 or a loss scale
would have spread over the numbers in between. Or whole gradients are zero, and those of float32
layers, such as a model's head, are too small for float16.

The first steps of each optimizer are counted; nothing is read or counted after that. Eager steps
are counted as they run. A traced step counts on the device, and the host reads the sums when a
later call begins. A variable for the sums would be captured by the function, and one that no
object tracks keeps the function from being saved. So the graph finds its sums by name, and counts
only while this process has a gate of that name: a loaded copy elsewhere has none.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from tfamp.core.errors import TfampWarning
from tfamp.core.kinds import Optimizer, Tensor
from tfamp.interop import tf_private
from tfamp.interop.keras_hooks import runs_tensorflow
from tfamp.interop.patching import Patch, level_of_user

# Steps of an optimizer that are counted.
_STEPS = 3
# A choice: a float16 number of so many times its smallest one has 4 digits, at an error of 3 %.
_COARSE = 16
_SMALLEST = 2.0**-24


# Steps, and what `_of_step` counts.
_NUMBERS = 6
_names = itertools.count(1)


@dataclass
class _Counts:
    """The gradients of an optimizer's first steps, as `_of_step` counts them.

    `traced` has the sums of traced steps, and `calls` the calls of functions that take them.
    """

    numbers: tuple[float, ...] = (0.0,) * _NUMBERS
    is_decided: bool = False
    traced: _TracedSums | None = None
    calls: int = 0


class _TracedSums:
    """Sums that graphs add to, found by name, while the gate of that name is open.

    The gate is a resource of its own: a step in another thread may have passed it when it closes,
    and still adds. The sums therefore stay for the process, 24 bytes for each optimizer.
    """

    def __init__(self) -> None:
        self._name = f"tfamp_underflow_{next(_names)}"
        with tf.init_scope():
            self._set(self._sums())
            self._set(self._gate())

    def add(self, numbers: Callable[[], Tensor]) -> None:
        """Makes the graph being traced add numbers, which are computed if the gate is open."""

        def add() -> None:
            # Inlined, every later step would pass over the ops of all gradients one by one.
            attributes = {"_noinline": True}
            values = tf.function(numbers, autograph=False, experimental_attributes=attributes)()
            with tf.device("/CPU:0"):
                tf.raw_ops.AssignAddVariableOp(resource=self._sums(), value=values)

        with tf.device("/CPU:0"):
            is_open = tf.raw_ops.VarIsInitializedOp(resource=self._gate())
        tf.cond(is_open, add, lambda: None)

    def take(self) -> Tensor:
        """Returns the sums, in eager mode, and sets them to zero."""
        value = tf.raw_ops.ReadVariableOp(resource=self._sums(), dtype=tf.float32)
        self._set(self._sums())
        return value

    def close(self) -> None:
        tf.raw_ops.DestroyResourceOp(resource=self._gate(), ignore_lookup_error=True)

    def _sums(self) -> Tensor:
        return self._handle("sums")

    def _gate(self) -> Tensor:
        return self._handle("gate")

    def _handle(self, which: str) -> Tensor:
        with tf.device("/CPU:0"):
            return tf.raw_ops.VarHandleOp(
                dtype=tf.float32, shape=[_NUMBERS], shared_name=f"{self._name}_{which}"
            )

    def _set(self, handle: Tensor) -> None:
        with tf.device("/CPU:0"):
            tf.raw_ops.AssignVariableOp(resource=handle, value=tf.zeros([_NUMBERS]))


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
    if runs_tensorflow() and not _here.paused and not tf.distribute.has_strategy():
        _look_at(optimizer, grads)
    with paused():  # Of the parts of a MultiOptimizer.
        return original(optimizer, grads, *rest, **named)


def _apply_scaled(original: Callable[..., Any], *args: Any, **named: Any) -> Any:
    with paused():  # Keras's wrapper unscales gradients, and gives them to the optimizer in it.
        return original(*args, **named)


def _look_at(optimizer: Optimizer, grads: Sequence[Tensor]) -> None:
    values = [g.values if isinstance(g, tf.IndexedSlices) else g for g in grads if g is not None]
    if not values:
        return
    if tf.executing_eagerly():
        counts = _counts.setdefault(optimizer, _Counts())
        if not counts.is_decided:
            _add(optimizer, counts, _of_step([tf.convert_to_tensor(value) for value in values]))
    elif tf.compat.v1.executing_eagerly_outside_functions() and not tf_private.is_compiled_by_xla():
        counts = _counts.setdefault(optimizer, _Counts())  # XLA has no resources found by name.
        if not counts.is_decided:
            _count_in_graph(optimizer, counts, [tf.convert_to_tensor(value) for value in values])


def _count_in_graph(optimizer: Optimizer, counts: _Counts, values: Sequence[Tensor]) -> None:
    if counts.traced is None:
        counts.traced = _TracedSums()
    counts.traced.add(functools.partial(_of_step, values))
    begin = functools.partial(_begin_call, weakref.ref(optimizer))
    tf_private.call_at_calls(begin, f"tfamp_underflow_{id(optimizer)}")


def _begin_call(reference: weakref.ref[Optimizer]) -> None:
    """Reads what the calls before this one have counted.

    Reading waits for the device. Of calls that take no step, as while gradients are accumulated,
    fewer and fewer are read after.
    """
    optimizer = reference()
    counts = None if optimizer is None else _counts.get(optimizer)
    if counts is None or counts.is_decided or counts.traced is None:
        return
    counts.calls += 1
    if counts.calls & (counts.calls - 1) == 0:  # A power of two, such as 2 and 4.
        _add(optimizer, counts, counts.traced.take())


_hooks = Patch(
    optional={
        "step": "underflow in float16 without a loss scale is not warned of.",
        "scaled_step": "Keras's LossScaleOptimizer may be warned of gradients that are zero.",
    },
    step=_apply,
    scaled_step=_apply_scaled,
)


def _of_step(gradients: Sequence[Tensor]) -> Tensor:
    """Returns 1, how many numbers there are in gradients, and how many of these are special.

    Special ones are zeros, small numbers, small multiples of 2**-24, and zeros of gradients that
    are zero as a whole. In float64, which neither a rewrite nor autocast converts.
    """

    def count(gradient: Tensor) -> Tensor:
        multiple = tf.abs(tf.cast(gradient, tf.float64)) / _SMALLEST
        zero = tf.equal(multiple, 0.0)
        small = (multiple <= _COARSE) & ~zero
        coarse = small & tf.equal(multiple, tf.round(multiple))
        flags = (tf.ones_like(zero), zero, small, coarse)
        numbers = [tf.reduce_sum(tf.cast(each, tf.float64)) for each in flags]
        whole = tf.where(tf.reduce_all(zero), numbers[0], tf.zeros_like(numbers[0]))
        return tf.stack([*numbers, whole])

    total = tf.add_n([count(gradient) for gradient in gradients])
    return tf.cast(tf.concat([tf.ones([1], tf.float64), total], 0), tf.float32)


def _add(optimizer: Optimizer, counts: _Counts, numbers: Tensor) -> None:
    """Adds numbers of steps, and warns if those so far show underflow.

    After the last of the first steps nothing is watched.
    """
    counts.numbers = tuple(map(float, tf.add(counts.numbers, numbers).numpy()))
    steps, total, zeros, small, coarse, whole = counts.numbers
    others = total - zeros
    # Not before the last step, as a first batch may be masked out.
    are_gone = steps >= _STEPS and 2 * whole >= total and 2 * small >= others
    is_coarse = 2 * zeros >= total > zeros and 2 * coarse >= others
    if steps >= _STEPS or is_coarse:
        counts.is_decided = True
        if counts.traced is not None:
            counts.traced.close()
        watch("next steps", wanted=False)
    if total and (are_gone or is_coarse):
        _warn(optimizer, zeros / total, small / others if others else None)


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
