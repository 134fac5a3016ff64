"""`tfamp.rewrite`: a function whose graph is rewritten each time it is traced."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Concatenate, Generic, Literal, ParamSpec, TypeVar, overload

import tensorflow as tf

from tfamp.core.errors import NothingConvertedWarning, RewriteError, TfampWarning
from tfamp.core.kinds import Nest, TFGraph, Trace
from tfamp.core.names import ComputeDtype, LowDtypeLike, OnError, Placement
from tfamp.core.profile import MachineProfile
from tfamp.graph.calibration import Calibration
from tfamp.graph.op_lists import OpLists
from tfamp.interop.keras_hooks import require_tensorflow
from tfamp.interop.patching import level_of_user
from tfamp.interop.tf_private import SaveableFunction
from tfamp.machine import hardware
from tfamp.planning.options import RewriteOptions
from tfamp.planning.structures import FLOAT32, RewritePlan
from tfamp.policy import low_dtype
from tfamp.rewriting.pipeline import call_converted, shared_plan
from tfamp.rewriting.traced_function import FlatCall, TracedFunction
from tfamp.training import underflow

_EAGER = (
    "{} runs as written, in float32: after tf.config.run_functions_eagerly(True) no function "
    "is traced, so nothing is rewritten. In eager mode `tfamp.autocast` casts op by op."
)


_Arguments = ParamSpec("_Arguments")
_MethodArguments = ParamSpec("_MethodArguments")
_Result = TypeVar("_Result")
_MethodResult = TypeVar("_MethodResult")


@overload
def rewrite(
    *,
    dtype: LowDtypeLike | None = ...,
    op_lists: OpLists | None = ...,
    keep_float32: Iterable[str] = ...,
    force_low: Iterable[str] = ...,
    calibration: Any = ...,
    placement: Placement = ...,
    profile: MachineProfile | Literal["builtin"] | None = ...,
    on_error: OnError = ...,
    example_args: Sequence[Any] | None = ...,
) -> Callable[[Callable[_Arguments, _Result]], RewrittenFunction[_Arguments, _Result]]: ...


@overload
def rewrite(
    fn: Callable[_Arguments, _Result],
    *,
    dtype: LowDtypeLike | None = ...,
    op_lists: OpLists | None = ...,
    keep_float32: Iterable[str] = ...,
    force_low: Iterable[str] = ...,
    calibration: Any = ...,
    placement: Placement = ...,
    profile: MachineProfile | Literal["builtin"] | None = ...,
    on_error: OnError = ...,
    example_args: Sequence[Any] | None = ...,
) -> RewrittenFunction[_Arguments, _Result]: ...


def rewrite(
    fn: Any = None,
    *,
    dtype: LowDtypeLike | None = None,
    op_lists: OpLists | None = None,
    keep_float32: Iterable[str] = (),
    force_low: Iterable[str] = (),
    calibration: Any = None,
    placement: Placement = RewriteOptions.placement,
    profile: MachineProfile | Literal["builtin"] | None = None,
    on_error: OnError = RewriteOptions.on_error,
    example_args: Sequence[Any] | None = None,
) -> Any:
    """Returns a function that computes the same in low precision, where that is safe.

    Each trace is rewritten as a whole graph, a train step with its tape and its optimizer. On
    several replicas, rewrite the function that calls `strategy.run`. The result is called like
    `fn`, from Python, from other `tf.function`s and under a `tf.GradientTape`. Arguments,
    results and variables keep their dtypes.

    Args:
        fn: A `tf.function`, a concrete function, a Keras model or a Python function, which is
            traced as by `tf.function`. Without it a decorator is returned.
        dtype: "float16" or "bfloat16", also as a dtype of TensorFlow or NumPy; None or "auto"
            for the one this machine multiplies natively. If there is none, the function stays
            float32, with a `NothingConvertedWarning`.
        op_lists: Which ops can be converted; None for `OpLists.default(dtype, device)`.
        keep_float32: Regular expressions, searched for in node names: matching nodes stay
            float32. Nodes of branches, loops and functions that stay calls are prefixed with
            the name of their caller, as in "gate/cond/MatMul".
        force_low: Regular expressions too: matching nodes are converted wherever the op has a
            low-precision kernel.
        calibration: Data to run the float32 function on at its first trace: an iterable of
            calls, each a tuple of arguments, a dict of keyword arguments or the single
            argument; or a `tfamp.graph.Calibration`. Nodes with values too large for the dtype
            stay float32. Variables are restored afterwards.
        placement: "min_cut": the lists decide which ops can be converted, and a minimum cut
            over estimated times which conversions pay on this machine. "fused": the same, and
            XLA compiles the elementwise ops between products and convolutions. "lists": the
            lists alone decide. `tfamp.tune` measures which one is the fastest.
        profile: Speeds for the minimum cut: a `tfamp.graph.MachineProfile`, "builtin" for fixed
            figures, or None for this machine's, measured once (2 s) and cached; see
            `TFAMP_PROFILE`.
        on_error: "raise", or "keep": warn and run the float32 function where a graph cannot be
            rewritten.
        example_args: Arguments of a call, to rewrite at once instead of at the first call.

    Returns:
        A `RewrittenFunction`, for type checkers with the arguments and the result of `fn`.

    Raises:
        TypeError, ValueError: An argument is wrong; the message names what is allowed.
        RewriteError: At the first call: the graph cannot be rewritten.
        UnsupportedBackendError: Keras runs on JAX or PyTorch, which make no TensorFlow graph.

    Example:
        >>> import tensorflow as tf, tfamp
        >>> weights = tf.Variable(tf.ones((4, 4)))
        >>> @tfamp.rewrite(dtype="bfloat16")
        ... def layer(x):
        ...     return tf.nn.relu(x @ weights)
        >>> layer(tf.ones((1, 4))).dtype
        tf.float32
        >>> [(node.op, node.dtype) for node in layer.plan(tf.ones((1, 4))).nodes[-3:]]
        [('MatMul', 'bfloat16'), ('Relu', 'float32'), ('Identity', 'float32')]
    """
    require_tensorflow("tfamp.rewrite")
    hardware.warn_of_variables()
    options = RewriteOptions(
        dtype=_low_dtype(dtype),
        op_lists=op_lists,
        keep_float32=keep_float32,
        force_low=force_low,
        calibration=None if calibration is None else Calibration.of(calibration),
        placement=placement,
        profile=profile,
        on_error=on_error,
    )
    if options.dtype == "float16":
        underflow.watch_next_steps()
    if example_args is not None and not isinstance(example_args, list | tuple):
        raise TypeError(
            "example_args must be a list or tuple of the arguments of a call, e.g. (x,); got "
            f"{type(example_args).__name__}."
        )

    def make(fn: Any) -> RewrittenFunction[..., Any]:
        rewritten: RewrittenFunction[..., Any] = RewrittenFunction(fn, options)
        if example_args is not None:
            rewritten.concrete(*example_args)
        return rewritten

    return make if fn is None else make(fn)


def _low_dtype(dtype: LowDtypeLike | None) -> ComputeDtype:
    """Returns the dtype to convert to; warns where that is float32, the fastest here."""
    name = low_dtype(dtype)
    if name is None:
        warnings.warn(
            "This machine multiplies neither float16 nor bfloat16 natively, so the function "
            "stays in float32. Give dtype= to rewrite it all the same; `tfamp doctor` "
            "explains.",
            NothingConvertedWarning,
            stacklevel=level_of_user(),
        )
    return name or FLOAT32


_NOT_TRACED = {
    "a generator function": inspect.isgeneratorfunction,
    "a coroutine function": inspect.iscoroutinefunction,
    "an asynchronous generator function": inspect.isasyncgenfunction,
}


def check_function(fn: Any) -> None:
    """Raises a TypeError unless given a function that returns, or a model."""
    if isinstance(fn, type) or not callable(fn):
        got = f"the class {fn.__name__}" if isinstance(fn, type) else type(fn).__name__
        raise TypeError(
            "rewrite takes a tf.function, a concrete function, a Keras model or a Python "
            f"function; got {got}."
        )
    python = getattr(fn, "python_function", fn)
    for kind, is_kind in _NOT_TRACED.items():
        if is_kind(python) or is_kind(python.__call__):
            raise TypeError(
                "rewrite takes functions that return their result, which TensorFlow can trace; "
                f"got {kind}, {fn!r}. Rewrite the function that computes, and call it from "
                "this one."
            )


class RewrittenFunction(SaveableFunction, Generic[_Arguments, _Result]):
    """The result of `tfamp.rewrite`: a `tf.function`, tracked and saved like any other.

    Args:
        fn: The function.
        options: How to rewrite it.
        traced: The function to trace instead; None for the function itself.

    Attributes:
        written: The float32 function that it was made from.
        settings: The options it is rewritten by.
    """

    def __init__(
        self, fn: Any, options: RewriteOptions, traced: TracedFunction | None = None
    ) -> None:
        check_function(fn)
        self.written = fn
        self.settings = options
        self._traced = TracedFunction.of(fn) if traced is None else traced
        self._plans: weakref.WeakKeyDictionary[TFGraph, RewritePlan] = weakref.WeakKeyDictionary()
        super().__init__(**self._traced.wrapper(self._trace))
        # By the object that the function is a method of.
        self._bound: weakref.WeakKeyDictionary[object, RewrittenFunction[..., Any]]
        self._bound = weakref.WeakKeyDictionary()
        functools.update_wrapper(self, self._traced.python_function, updated=())
        # Without it, `inspect` takes an object with `__get__` for a builtin that has none.
        self.__signature__ = self._traced.signature

    if TYPE_CHECKING:
        # A `tf.function`'s own, which has no types.
        def __call__(self, *args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
            """Calls the function."""

    @overload
    def __get__(
        self, instance: None, owner: type | None = None
    ) -> RewrittenFunction[_Arguments, _Result]: ...

    @overload
    def __get__(
        self: RewrittenFunction[Concatenate[Any, _MethodArguments], _MethodResult],
        instance: object,
        owner: type | None = None,
    ) -> RewrittenFunction[_MethodArguments, _MethodResult]: ...

    def __get__(self, instance: object, owner: type | None = None) -> RewrittenFunction[..., Any]:
        """Returns the function as a method of an object; traces are not shared by objects."""
        if instance is None:
            return self
        if instance not in self._bound:
            traced = self._traced.bound_to(instance)
            method = traced.python_function
            self._bound[instance] = RewrittenFunction(method, self.settings, traced)
        return self._bound[instance]

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles the function and its options: graphs are bound to a process."""
        return RewrittenFunction, (self.written, self.settings)

    def copy(self, dtype: LowDtypeLike | None = None) -> RewrittenFunction[_Arguments, _Result]:
        """Returns an untraced copy, for another low dtype if one is given."""
        low = self.settings.dtype if dtype is None else _low_dtype(dtype)
        return RewrittenFunction(self.written, dataclasses.replace(self.settings, dtype=low))

    def __repr__(self) -> str:
        return f"<tfamp.rewrite of {self._traced.name} to {self.dtype}>"

    def concrete(self, *args: Any, **kwargs: Any) -> Trace:
        """Returns the concrete function that a call with these arguments runs.

        Args:
            *args: Arguments as in a call, or `tf.TensorSpec`s instead of tensors.
            **kwargs: The same by name.
        """
        return self.get_concrete_function(*args, **kwargs)

    def plan(self, *args: Any, **kwargs: Any) -> RewritePlan:
        """Returns every decision about the graph that a call with these arguments runs.

        Args:
            *args: Arguments as in a call, or `tf.TensorSpec`s instead of tensors.
            **kwargs: The same by name.

        Raises:
            RewriteError: The function runs in float32: it could not be rewritten and `on_error`
                is "keep", or this machine has no faster dtype.
        """
        plan = self._plans.get(self.get_concrete_function(*args, **kwargs).graph)
        if plan is None:
            raise RewriteError(f"{self._traced.name} was not rewritten: it runs in float32.")
        return plan

    def shared_plan(self) -> RewritePlan | None:
        """Returns the plan in a context in which the trace is shared; None if it is not."""
        return shared_plan(self._traced, self.settings)

    @property
    def dtype(self) -> str | None:
        """The low dtype; None if this machine has no faster dtype than float32."""
        dtype = self.settings.dtype
        return None if dtype == FLOAT32 else dtype

    def _trace(self, *args: Any, **kwargs: Any) -> Nest:
        if tf.executing_eagerly():
            text = _EAGER.format(self._traced.name)
            warnings.warn(text, TfampWarning, stacklevel=level_of_user())
            return self._traced.python_function(*args, **kwargs)
        try:
            result, plan = call_converted(self._traced, FlatCall(args, kwargs), self.settings)
        except RewriteError as error:
            if self.settings.on_error == "raise":
                raise
            text = f"{self._traced.name} cannot be rewritten and stays in float32: {error}"
            warnings.warn(text, TfampWarning, stacklevel=level_of_user())
            return self.written(*args, **kwargs)
        if plan is not None:
            self._plans[tf.compat.v1.get_default_graph()] = plan
        return result
