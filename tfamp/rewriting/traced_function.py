"""A function that is to be traced, and how: what `tf.function` was told about it."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from tfamp.interop import tf_functions
from tfamp.rewriting.flat_call import FlatCall, trace_flat

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
    options: tf_functions.FunctionOptions | None
    signature: inspect.Signature

    @classmethod
    def of(cls, fn: Any) -> TracedFunction:
        """Returns what is known of a `tf.function`, or of anything else that can be called."""
        if isinstance(fn, tf.types.experimental.PolymorphicFunction):
            options = tf_functions.function_options(fn)
            return cls(fn.python_function, options, tf_functions.function_signature(fn))
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

    def trace(self, call: FlatCall) -> Any:
        """Traces the function for a call; see `trace_flat`."""
        own = self.options
        autograph = True if own is None else own.autograph
        options = None if own is None else own.experimental_autograph_options
        return trace_flat(self.python_function, call, autograph, options)
