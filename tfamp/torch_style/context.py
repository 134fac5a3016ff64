"""`autocast`: op-by-op mixed precision, as in PyTorch and Paddle, for eager and traced code."""

from __future__ import annotations

import functools
import inspect
import threading
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

from tfamp.core.dtypes import FLOAT_DTYPES, LOW_PRECISION
from tfamp.core.errors import TfampWarning
from tfamp.core.options import checked_flag
from tfamp.graph.op_lists import OpLists
from tfamp.interop.keras_hooks import require_tensorflow
from tfamp.interop.patching import level_of_user
from tfamp.policy import low_dtype
from tfamp.torch_style.rules import hooks
from tfamp.torch_style.state import Block, Mode, current_modes

_Callable = TypeVar("_Callable", bound=Callable[..., Any])


class autocast:  # noqa: N801 - a context manager, named as torch's and Paddle's are
    """Runs ops in a low-precision dtype where that pays, and in float32 where it must be.

    A context manager and a decorator, for eager code and for code being traced:

    - matmuls, einsums and convolutions cast their float32 inputs down;
    - exponentials, logarithms, powers, softmaxes, sums, means, norms and cross-entropies cast
      low-precision inputs up to float32;
    - arithmetic and joining ops promote mixed inputs to the widest dtype among them;
    - all other ops run in the dtype they are given.

    float64, integer and complex tensors are never touched. What you cast yourself inside, with
    `tf.cast` or `keras.ops.cast` between float32 and low precision, is used in the dtype you chose.
    Gradients are computed in the dtypes of the forward pass and arrive in the variable's dtype;
    call `tape.gradient` inside or outside, as you like. A custom gradient runs in the mode of its
    forward pass. Keras layers called inside are cast too, their variables with them; optimizers
    are not. Loops keep the dtypes of their variables, the branches of a condition meet in the
    widest one.

    It counts in its own thread and its own coroutine, and one object can be entered again while it
    is in force. A `tf.function` called inside is traced anew for it, whenever it was traced before;
    a `ConcreteFunction` stays what it is, and warns. Put the context inside the function that
    `tf.distribute.Strategy.run` is given: replicas run in threads of their own.

    Source: the semantics are those of `torch.autocast` and `paddle.amp.auto_cast`; the lists are
    in `tfamp.OpLists`.

    Args:
        dtype: "float16", "bfloat16" or the TensorFlow dtype; any float dtype if not enabled. None
            picks what the hardware multiplies natively, as the policy "auto" does; where it
            multiplies neither, nothing is cast.
        enabled: False makes a float32 island inside another autocast: ops run as given.
        op_lists: A `tfamp.OpLists`; None for tfamp's own for the dtype.
        cache_casts: Whether what several ops use is cast once: in a trace a variable that is not
            assigned in between, for each tape; in eager mode a tensor, while no tape records. Its
            gradients are then added up in the low dtype.

    Warns:
        TfampWarning: Once per process, where float16 is in force on a CPU without float16
            arithmetic, with the slowdown measured. Once for each function called inside whose
            graph was finished before and has float32 ops that would be cast down.

    Raises:
        ValueError: `dtype` is no low-precision dtype.
        TypeError: `op_lists` is no `OpLists`, or a flag is no bool.
        UnsupportedBackendError: Keras runs on JAX or PyTorch, whose ops it cannot cast.

    Example:
        >>> import tensorflow as tf, tfamp
        >>> with tfamp.autocast("bfloat16"):
        ...     product = tf.matmul(tf.ones((2, 2)), tf.ones((2, 2)))
        ...     total = tf.reduce_sum(product)
        >>> product.dtype.name, total.dtype.name
        ('bfloat16', 'float32')
    """

    def __init__(
        self,
        dtype: Any = None,
        enabled: bool = True,
        *,
        op_lists: OpLists | None = None,
        cache_casts: bool = True,
    ) -> None:
        checked_flag("enabled", enabled)
        checked_flag("cache_casts", cache_casts)
        if op_lists is not None and not isinstance(op_lists, OpLists):
            raise TypeError(
                f"op_lists must be a tfamp.OpLists; got {op_lists!r}. Start from "
                'tfamp.OpLists.default("float16").with_changes(...).'
            )
        low = _low_dtype(dtype, enabled)
        if enabled:
            require_tensorflow("tfamp.autocast")
        self._entered: list[Block] = []  # in all contexts and threads
        self._mode: Mode | None = None
        if enabled and low is not None:
            self._mode = Mode.of(low, op_lists or OpLists.default(low), cache_casts)

    def __enter__(self) -> autocast:
        if self._mode is not None and self._mode.dtype == "float16":
            _warn_once_where_float16_is_slow()
        hooks.acquire()
        self._entered.append(current_modes.enter(self._mode))
        return self

    def __exit__(self, *exception: object) -> None:
        if not self._entered:
            raise RuntimeError("autocast was left more often than it was entered.")
        # An asynchronous generator, for one, may be closed in another context.
        here = [block for block in self._entered if current_modes.holds(block)]
        block = (here or self._entered)[-1]
        self._entered.remove(block)
        current_modes.leave(block)
        hooks.release()

    def __call__(self, function: _Callable) -> _Callable:
        """Decorates a function, or a layer's or model's `call`, to run under this autocast."""
        if not callable(function):
            raise TypeError(f"autocast decorates functions; got {function!r}.")
        if inspect.isasyncgenfunction(function):
            raise TypeError(
                f"{function.__name__} is an asynchronous generator, and would run what awaits its "
                "items under autocast too: use `with tfamp.autocast(...)` inside, around code that "
                "does not yield."
            )
        if inspect.iscoroutinefunction(function):
            return _coroutine_under(self, function)
        if inspect.isgeneratorfunction(function):
            return _generator_under(self, function)

        @functools.wraps(function)
        def under_autocast(*args: Any, **kwargs: Any) -> Any:
            with self:
                return function(*args, **kwargs)

        return under_autocast  # type: ignore[return-value]


def _coroutine_under(context: autocast, function: Callable[..., Any]) -> Any:
    @functools.wraps(function)
    async def under_autocast(*args: Any, **kwargs: Any) -> Any:
        with context:
            return await function(*args, **kwargs)

    return under_autocast


def _generator_under(context: autocast, function: Callable[..., Any]) -> Any:
    @functools.wraps(function)
    def under_autocast(*args: Any, **kwargs: Any) -> Any:
        generator = function(*args, **kwargs)
        step, value = generator.send, None
        try:
            while True:
                # Only while the generator runs: in between, its caller's code does.
                with context:
                    try:
                        item = step(value)
                    except StopIteration as stop:
                        return stop.value
                try:
                    step, value = generator.send, (yield item)
                except GeneratorExit:
                    raise
                except BaseException as error:  # noqa: BLE001 - handed on to the generator
                    step, value = generator.throw, error
        finally:
            with context:
                generator.close()

    return under_autocast


_slow_float16_checked = threading.Event()


def _warn_once_where_float16_is_slow() -> None:
    if _slow_float16_checked.is_set():
        return
    _slow_float16_checked.set()
    from tfamp.machine import hardware

    with current_modes.set_to(None):
        message = hardware.float16_warning()
    if message is not None:
        warnings.warn(message, TfampWarning, stacklevel=level_of_user())


def _low_dtype(dtype: Any, enabled: bool) -> str | None:
    if dtype is None:
        return low_dtype(None)
    name = getattr(dtype, "name", getattr(dtype, "__name__", dtype))  # also NumPy's types
    if not enabled and name in FLOAT_DTYPES:
        return None  # A loop over dtypes can keep one line for all of them.
    if name not in LOW_PRECISION:
        raise ValueError(
            f"autocast casts to {' or '.join(LOW_PRECISION)}; got dtype={dtype!r}. For a float32 "
            "part inside another autocast use autocast(enabled=False)."
        )
    return str(name)
