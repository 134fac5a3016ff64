"""`tfamp.rewrite`: a function whose graph is rewritten each time it is traced."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from tfamp.autocasting.state import current_modes
from tfamp.core.dtypes import LOW_PRECISION
from tfamp.core.errors import NothingToLowerWarning, RewriteError, TfampWarning
from tfamp.core.profile import MachineProfile
from tfamp.graph import request
from tfamp.graph.calibration import Calibration, measure
from tfamp.graph.op_lists import OpLists
from tfamp.graph.transforms.inline import inline_calls
from tfamp.interop.keras_backend import require_tensorflow
from tfamp.planning.ranges import Ranges
from tfamp.planning.structures import RewritePlan
from tfamp.policy import Policy
from tfamp.rewriting.flat_call import FlatCall
from tfamp.rewriting.fused_tracing import fused_batch_normalization
from tfamp.rewriting.graft import graft
from tfamp.rewriting.graph_rewriter import GraphRewriter, RewriteSettings, rewrite_gradient
from tfamp.rewriting.traced_function import TracedFunction
from tfamp.rewriting.weight_cache import WeightCache, cacheable_variables, cached_casts

_EAGER = (
    "{} runs as written, in float32: after tf.config.run_functions_eagerly(True) no function is "
    "traced, so there is no graph to rewrite. In eager mode `tfamp.autocast` lowers op by op."
)


def rewrite(
    fn: Any = None,
    *,
    dtype: str | None = None,
    op_lists: OpLists | None = None,
    keep_float32: Iterable[str] = (),
    force_low: Iterable[str] = (),
    calibration: Any = None,
    placement: str = "min_cut",
    profile: MachineProfile | str | None = None,
    on_error: str = "raise",
    cache_weights: bool = False,
    example_args: Sequence[Any] | None = None,
) -> Any:
    """Returns a function that computes the same in low precision, where that is safe.

    Each time it is traced, the whole graph is rewritten: what a train step does inside, the tape
    and the optimizer included, is decided as one. It is called like `fn`, from Python, from other
    `tf.function`s and under a `tf.GradientTape`. Arguments, results and variables keep their
    dtypes.

    Args:
        fn: A `tf.function`, a concrete function, a Keras model or a Python function, which is
            traced as by `tf.function`. Without it a decorator is returned.
        dtype: "float16" or "bfloat16"; None is what this machine multiplies fast.
        op_lists: Which ops may be low; `OpLists.default(dtype)` if None.
        keep_float32: Regular expressions, searched for in node names: these stay float32.
        force_low: The same: these are lowered wherever the op has a kernel for it.
        calibration: Data to run the float32 function on at its first trace: an iterable of calls,
            each a tuple of arguments, a dict of keyword arguments or the single argument; or a
            `tfamp.graph.Calibration`. Nodes with values too large for the dtype stay float32.
            Variables are as before afterwards.
        placement: "min_cut": the lists decide what may be low, a minimum cut what is worth it on
            this machine. "lists": the lists decide alone.
        profile: What min_cut goes by: a `tfamp.graph.MachineProfile`, "builtin" for fixed figures,
            or None for this machine's, measured in 3 s once and cached; see `TFAMP_PROFILE`.
        on_error: "raise", or "keep": warn and run the float32 function where a graph cannot be
            rewritten.
        cache_weights: Keeps low-precision copies of the weights that the function only reads from
            call to call, for calls from Python outside tapes: inference, and frozen layers of a
            train step. They are made again when a weight has changed. Takes two bytes for each
            weight, and about 10 us a weight and call to look.
        example_args: Arguments of a call, to rewrite at once instead of at the first call.

    Returns:
        A `RewrittenFunction`.

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
        [('MatMul', 'bfloat16'), ('Relu', 'bfloat16'), ('Identity', 'float32')]
    """
    require_tensorflow("tfamp.rewrite")
    settings = RewriteSettings(
        dtype=_low_dtype(dtype),
        op_lists=op_lists,
        keep_float32=request.tensor_names("keep_float32", keep_float32),
        force_low=request.tensor_names("force_low", force_low),
        calibration=None if calibration is None else Calibration.of(calibration),
        placement=placement,
        profile=profile,
        on_error=on_error,
        cache_weights=cache_weights,
    )
    if fn is None:
        return functools.partial(_make, settings=settings, example_args=example_args)
    return _make(fn, settings, example_args)


def rewrite_step(
    fn: Any, *, dtype: str, keep_float32: Iterable[str], placement: str
) -> RewrittenFunction:
    """Returns a rewritten step of a model's, some of whose layers are to stay float32.

    Args:
        fn: As for `rewrite`.
        dtype: As for `rewrite`.
        keep_float32: As for `rewrite`, but a pattern may mean no node: a step need not run every
            layer of its model.
        placement: As for `rewrite`.
    """
    settings = RewriteSettings(
        dtype=dtype,
        op_lists=None,
        keep_float32=request.tensor_names("keep_float32", keep_float32),
        force_low=(),
        calibration=None,
        placement=placement,
        profile=None,
        on_error="raise",
        patterns_may_miss=True,
    )
    return _make(fn, settings, None)


def _low_dtype(dtype: str | None) -> str | None:
    """Returns the dtype to lower to; None where float32 is the fastest this machine has."""
    if dtype is not None:
        name = tf.as_dtype(dtype).name if isinstance(dtype, tf.DType) else dtype
        request.check_choice("dtype", name, LOW_PRECISION)
        return name
    automatic = Policy("auto").compute_dtype
    if automatic in LOW_PRECISION:
        return automatic
    warnings.warn(
        "This machine multiplies neither float16 nor bfloat16 natively, so the function stays in "
        "float32. Give dtype= to rewrite it all the same; `tfamp doctor` explains.",
        NothingToLowerWarning,
        stacklevel=3,
    )
    return None


def _make(
    fn: Any, settings: RewriteSettings, example_args: Sequence[Any] | None
) -> RewrittenFunction:
    if example_args is not None and not isinstance(example_args, list | tuple):
        raise TypeError(
            "example_args must be a list or tuple of the arguments of a call, e.g. (x,); got "
            f"{type(example_args).__name__}."
        )
    rewritten = RewrittenFunction(fn, settings)
    if example_args is not None:
        rewritten.concrete(*example_args)
    return rewritten


class RewrittenFunction:
    """What `tfamp.rewrite` returns: call it like the function it was made from.

    Args:
        fn: The function.
        settings: How to rewrite it.
        traced: What to trace in its place; None for the function itself.
    """

    def __init__(
        self, fn: Any, settings: RewriteSettings, traced: TracedFunction | None = None
    ) -> None:
        if not callable(fn) or isinstance(fn, type):
            got = f"the class {fn.__name__}" if isinstance(fn, type) else type(fn).__name__
            raise TypeError(
                f"rewrite takes a tf.function, a concrete function, a Keras model or a Python "
                f"function; got {got}."
            )
        self._fn = fn
        self._settings = settings
        self._instance: Any = None
        self._traced = TracedFunction.of(fn) if traced is None else traced
        self._plans: weakref.WeakKeyDictionary[Any, RewritePlan] = weakref.WeakKeyDictionary()
        self._function = self._traced.wrap(functools.partial(self._trace, None))
        self._cache = WeightCache() if settings.cache_weights and settings.dtype else None
        self._cached_function = self._traced.wrap(functools.partial(self._trace, self._cache))
        self._bound: weakref.WeakKeyDictionary[Any, RewrittenFunction] = weakref.WeakKeyDictionary()
        self._handles: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
        functools.update_wrapper(self, self._traced.python_function, updated=())
        # Without it, `inspect` takes an object with `__get__` for a builtin of unknown arguments.
        self.__signature__ = inspect.signature(self._traced.python_function)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the function; the first call with arguments of a kind traces and rewrites it."""
        if self._cache is None or not self._cache.can_be_used():
            return self._function(*args, **kwargs)
        self._cache.refresh()
        return self._cached_function(*args, **kwargs)

    def __get__(self, instance: Any, owner: Any = None) -> RewrittenFunction:
        """A method: the function of each object is traced for itself."""
        if instance is None:
            return self
        if instance not in self._bound:
            method = _method_of(instance, self._traced.python_function)
            traced = dataclasses.replace(self._traced, python_function=method)
            self._bound[instance] = RewrittenFunction(method, self._settings, traced)
        known = self._handles.get(instance)
        handle = None if known is None else known()
        if handle is None:
            handle = object.__new__(type(self))
            handle.__dict__.update(self._bound[instance].__dict__)
            handle._instance = instance  # As a method does, keep it: what is cached does not.
            self._handles[instance] = weakref.ref(handle)
        return handle

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles as what it was made from: graphs belong to a process."""
        return _make, (self._fn, self._settings, None)

    def __repr__(self) -> str:
        return f"<tfamp.rewrite of {self._traced.name} to {self._settings.dtype}>"

    def concrete(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the concrete function that a call with these arguments runs.

        Args:
            *args: Arguments as in a call, or `tf.TensorSpec`s in the place of tensors.
            **kwargs: The same by name.
        """
        return self._function.get_concrete_function(*args, **kwargs)

    def plan(self, *args: Any, **kwargs: Any) -> RewritePlan:
        """Returns every decision about the graph that a call with these arguments runs.

        Args:
            *args: Arguments as in a call, or `tf.TensorSpec`s in the place of tensors.
            **kwargs: The same by name.

        Raises:
            RewriteError: There is none, as the function runs in float32: it could not be rewritten
                and `on_error` is "keep", or this machine has no faster dtype.
        """
        function = self._function if self._cache is None else self._cached_function
        plan = self._plans.get(function.get_concrete_function(*args, **kwargs).graph)
        if plan is None:
            raise RewriteError(f"{self._traced.name} was not rewritten: it runs in float32.")
        return plan

    def copy(self, dtype: str | None = None) -> RewrittenFunction:
        """Returns the same function, not traced yet.

        Args:
            dtype: What to lower to; None for the dtype of this one.
        """
        settings = self._settings
        if dtype is not None:
            settings = dataclasses.replace(settings, dtype=_low_dtype(dtype))
        return RewrittenFunction(self._fn, settings)

    @property
    def tf_function(self) -> Any:
        """The `tf.function` that is called: TensorFlow can save it and count its traces."""
        return self._function

    @property
    def dtype(self) -> str | None:
        """The low dtype; None where float32 is the fastest this machine has."""
        return self._settings.dtype

    def float32_trace(self, call: FlatCall) -> Any:
        """Returns the concrete function of a call as it is before it is rewritten."""
        return self._float32_trace(call)[0]

    def _float32_trace(self, call: FlatCall) -> Any:
        # An autocast around the call would decide before the rewrite, about the outputs too.
        with fused_batch_normalization(), current_modes.set_to(None):
            return self._traced.trace(call)

    def rewritten_graph(self, call: FlatCall, *, keep_float32: Iterable[str] = ()) -> Any:
        """Returns the float32 trace of a call, and what its graph, inlined, is rewritten to.

        Args:
            call: The call.
            keep_float32: Patterns of names of more nodes that stay float32.
        """
        traced = self.float32_trace(call)
        patterns = (*self._settings.keep_float32, *keep_float32)
        settings = dataclasses.replace(self._settings, keep_float32=patterns)
        outputs = [tensor.name for tensor in traced.outputs]
        inputs = [tensor.name for tensor in traced.inputs]
        graph_def = inline_calls(traced.graph.as_graph_def(add_shapes=True), (*outputs, *inputs))
        rewriter = GraphRewriter(settings, functools.partial(self._measure, traced))
        return traced, rewriter(graph_def, outputs, inputs)

    def _trace(self, cache: WeightCache | None, *args: Any, **kwargs: Any) -> Any:
        if tf.executing_eagerly():
            warnings.warn(_EAGER.format(self._traced.name), TfampWarning, stacklevel=2)
            return self._traced.python_function(*args, **kwargs)
        host = tf.compat.v1.get_default_graph()
        call = FlatCall(args, kwargs)
        traced, result = self._float32_trace(call)
        variables = functools.partial(cacheable_variables, traced)
        measured = functools.partial(self._measure, traced)
        rewriter = GraphRewriter(self._settings, measured, None if cache is None else variables)

        def substitutes(before: Any, after: Any) -> dict[str, Any]:
            if cache is None or self._settings.dtype is None:
                return {}
            return cached_casts(after, variables(before), cache, self._settings.dtype)

        try:
            tensors = graft(
                traced,
                [*call.tensors, *traced.captured_inputs],
                rewriter,
                functools.partial(rewrite_gradient, self._settings),
                substitutes,
            )
        except RewriteError as error:
            if self._settings.on_error == "raise":
                raise
            text = f"{self._traced.name} cannot be rewritten and stays in float32: {error}"
            warnings.warn(text, TfampWarning, stacklevel=2)
            return self._fn(*args, **kwargs)
        if rewriter.plans:
            self._plans[host] = rewriter.plans[0]
        return result.pack(tensors)

    def _measure(self, traced: Any, graph_def: Any, calibration: Calibration) -> Ranges:
        """Runs the calls of a calibration on the float32 graph of a trace."""
        signature = inspect.signature(self._traced.python_function)

        def batches() -> Iterator[tuple[Any, ...]]:
            for args, kwargs in calibration.calls():
                bound = signature.bind(*args, **kwargs)
                bound.apply_defaults()
                yield FlatCall(bound.args, bound.kwargs).values()

        return measure(
            graph_def,
            [tensor.name for tensor in traced.inputs],
            batches(),
            traced.captured_inputs,
            [tensor.name for tensor in traced.outputs],
        )


def _method_of(instance: Any, function: Callable[..., Any]) -> Callable[..., Any]:
    """Binds a function to an object without keeping the object alive."""
    reference = weakref.ref(instance)

    def method(*args: Any, **kwargs: Any) -> Any:
        return function(reference(), *args, **kwargs)

    functools.update_wrapper(method, function)
    parameters = list(inspect.signature(function).parameters.values())
    method.__signature__ = inspect.Signature(parameters[1:])  # type: ignore[attr-defined]
    return method
