"""A function that is to be traced: how, and each call of it as one from tensors to tensors."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import inspect
import itertools
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tensorflow as tf

from tfamp.interop import tf_private
from tfamp.interop.patching import patched_here
from tfamp.interop.tf_private import as_written
from tfamp.layers.fused_norms import can_fuse, fits, normalize

_NUMBERS = itertools.count(1)


@dataclass(frozen=True)
class TracedFunction:
    """A function to trace, and how.

    Attributes:
        python_function: What is run while tracing.
        options: How the `tf.function` was made; None for a Python function.
        signature: The arguments it takes, with their defaults.
    """

    python_function: Callable[..., Any]
    options: tf_private.FunctionOptions | None
    signature: inspect.Signature

    @classmethod
    def of(cls, fn: Any) -> TracedFunction:
        """Returns what is known of a `tf.function`, or of anything else that can be called."""
        if isinstance(fn, tf.types.experimental.PolymorphicFunction):
            options = tf_private.function_options(fn)
            return cls(fn.python_function, options, tf_private.function_signature(fn))
        return cls(fn, None, inspect.signature(fn))

    def bound_to(self, instance: Any) -> TracedFunction:
        """Returns the same as a method of an object, which it does not keep alive."""
        reference, function = weakref.ref(instance), self.python_function

        def method(*args: Any, **kwargs: Any) -> Any:
            return function(reference(), *args, **kwargs)

        functools.update_wrapper(method, function)
        parameters = list(self.signature.parameters.values())[1:]
        signature = inspect.Signature(parameters)
        method.__signature__ = signature  # type: ignore[attr-defined]
        return dataclasses.replace(self, python_function=method, signature=signature)

    @property
    def name(self) -> str:
        """The function's name, for people."""
        return getattr(self.python_function, "__name__", type(self.python_function).__name__)

    def wrapper(self, body: Callable[..., Any]) -> dict[str, Any]:
        """Returns the arguments for a `tf.function` like the given one, with another body.

        Those of `tf.function` and of its class: `python_function` and options.
        """

        def rewritten(*args: Any, **kwargs: Any) -> Any:
            return body(*args, **kwargs)

        rewritten.__name__ = self.name
        # TensorFlow counts the traces of each code object, and warns of too many.
        code = rewritten.__code__.replace(co_name=f"rewritten_{self.name}_{next(_NUMBERS)}")
        rewritten.__code__ = code
        # By it TensorFlow binds the arguments of a call and fills in defaults.
        rewritten.__signature__ = self.signature  # type: ignore[attr-defined]
        arguments = {"python_function": rewritten, "name": self.name, "autograph": False}
        if self.options is not None:
            for name in ("input_signature", "jit_compile", "reduce_retracing"):
                arguments[name] = getattr(self.options, name)
        return arguments

    def unchanged(self) -> Any:
        """Returns a `tf.function` that runs it as it is, with traces of its own."""
        own = self.options
        return tf.function(self.python_function, **({} if own is None else own._asdict()))

    def call(self, *args: Any, **kwargs: Any) -> FlatCall:
        """Returns a call with its arguments, defaults included, in the places they are taken in."""
        bound = self.signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return FlatCall(bound.args, bound.kwargs)

    def trace(self, call: FlatCall) -> Any:
        """Traces the function for a call with tensors of the current graph.

        Returns the concrete function, from the call's tensors to the result.
        """
        shared = _shared.get()
        if shared is None or shared.python_function is not self.python_function:
            return self._new_trace(call)
        if shared.trace is None:
            found = self._new_trace(call)
            if any(map(tf.is_symbolic_tensor, found.captured_inputs)):
                return found  # It holds tensors, an iterator's for instance, of the caller's graph.
            shared.trace = found
        return shared.trace

    def _new_trace(self, call: FlatCall) -> Any:
        own = self.options

        def flat(*tensors: Any) -> Any:
            args, kwargs = call.with_tensors(tensors)
            return _returned(self.python_function(*args, **kwargs))

        traced = tf.function(
            flat,
            autograph=own is None or own.autograph,
            experimental_autograph_options=own and own.experimental_autograph_options,
        )
        return traced.get_concrete_function(*map(_spec, call.tensors))

    @staticmethod
    def packed(traced: Any, tensors: Iterable[Any]) -> Any:
        """Returns the result of a trace with other tensors in it."""
        remaining = iter(tensors)
        return tf.nest.map_structure(
            lambda leaf: None if leaf is None else next(remaining),
            traced.structured_outputs,
            expand_composites=True,
        )


@dataclass
class _Shared:
    """The trace of a function that several functions use.

    Attributes:
        python_function: What is traced.
        trace: The trace, once there is one.
        values: What was made of the trace.
    """

    python_function: Callable[..., Any]
    trace: Any = None
    values: dict[str, Any] = field(default_factory=dict)


_shared: contextvars.ContextVar[_Shared | None] = contextvars.ContextVar("shared", default=None)


@contextlib.contextmanager
def traced_once(function: TracedFunction) -> Iterator[None]:
    """A context in which rewrites of a function, all of the same call, share one trace.

    Not where an argument is of its own graph for each of them, as a dataset's iterator is.
    """
    token = _shared.set(_Shared(function.python_function))
    try:
        yield
    finally:
        _shared.reset(token)


def made_of(traced: Any) -> dict[str, Any]:
    """Returns a dict for values made of a trace: one for all that share it, else a new one."""
    shared = _shared.get()
    return {} if shared is None or shared.trace is not traced else shared.values


@dataclass(frozen=True)
class FlatCall:
    """The arguments of one call, with the tensors in them.

    Composite tensors count as their components. Variables are not tensors here: the function
    refers to them, as to Python values.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    @functools.cached_property
    def tensors(self) -> tuple[Any, ...]:
        """The tensors in the arguments."""
        return tuple(
            each for leaf in self._leaves() if _is_tensor(leaf) for each in _components(leaf)
        )

    def values(self) -> tuple[Any, ...]:
        """Returns what `tf.function` makes tensors of: the tensors, and NumPy's arrays."""
        return tuple(
            each
            for leaf in self._leaves()
            if _is_tensor(leaf) or isinstance(leaf, np.ndarray | np.generic)
            for each in _components(leaf)
        )

    @as_written
    def with_tensors(self, tensors: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns the arguments with other tensors, in the order of `tensors`."""
        remaining = iter(tensors)

        def filled(leaf: Any) -> Any:
            if not _is_tensor(leaf):
                return leaf
            parts = [next(remaining) for _ in _components(leaf)]
            return tf.nest.pack_sequence_as(leaf, parts, expand_composites=True)

        leaves = [filled(leaf) for leaf in self._leaves()]
        args, kwargs = tf.nest.pack_sequence_as((self.args, dict(self.kwargs)), leaves)
        return args, kwargs

    def _leaves(self) -> list[Any]:
        return tf.nest.flatten((self.args, dict(self.kwargs)))


def _spec(tensor: Any) -> tf.TensorSpec:
    name = None if tf.executing_eagerly() else tensor.op.name
    return tf.TensorSpec(tensor.shape, tensor.dtype, name=name)


def _is_tensor(leaf: Any) -> bool:
    if isinstance(leaf, tf.experimental.ExtensionType):
        return True
    return tf.is_tensor(leaf) and not isinstance(leaf, tf.Variable)


def _components(value: Any) -> list[Any]:
    return tf.nest.flatten(value, expand_composites=True)


@as_written
def _returned(result: Any) -> Any:
    """A result as a traced function may return it; operations stand for nothing."""

    def value(leaf: Any) -> Any:
        if isinstance(leaf, tf.TensorArray):
            raise TypeError(
                "A function to rewrite returned a tf.TensorArray, which belongs to the graph it "
                "was made in. Return its stack() or concat()."
            )
        return None if isinstance(leaf, tf.Operation) else leaf

    return tf.nest.map_structure(value, result)


# ---- BatchNormalization --------------------------------------------------------------------------

# Keras spells a float32 BatchNormalization out in a dozen ops, most of which need float32. As one
# op with float32 statistics it takes and gives low-precision tensors once the graph is rewritten.
_thread = threading.local()


def traces_for_a_rewrite() -> bool:
    """Whether this thread is tracing a function whose graph will be rewritten."""
    return getattr(_thread, "traces", False)


@contextlib.contextmanager
def fused_batch_normalization() -> Iterator[None]:
    """A context in which this thread traces BatchNormalization layers as the fused op.

    Layers that Keras computes differently, by mask, axis or synchronization, stay as they are.
    """
    outer, _thread.traces = traces_for_a_rewrite(), True
    try:
        with patched_here(batch_normalization=_call):
            yield
    finally:
        _thread.traces = outer


def _call(original: Any, layer: Any, inputs: Any, training: Any = None, mask: Any = None) -> Any:
    if (
        mask is None
        and getattr(inputs, "dtype", None) == layer.compute_dtype == "float32"
        and can_fuse(type(layer))
        and fits(layer, inputs, "float32", training)
    ):
        return normalize(layer, inputs, training)
    return original(layer, inputs, training=training, mask=mask)
