"""A function that is to be traced, and how: what `tf.function` was told about it."""

from __future__ import annotations

import inspect
import itertools
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
    """

    python_function: Callable[..., Any]
    options: tf_functions.FunctionOptions | None

    @classmethod
    def of(cls, fn: Any) -> TracedFunction:
        """Returns what is known of a `tf.function`, or of anything else that can be called."""
        if isinstance(fn, tf.types.experimental.PolymorphicFunction):
            return cls(fn.python_function, tf_functions.function_options(fn))
        return cls(fn, None)

    @property
    def name(self) -> str:
        """The function's name, for people."""
        return getattr(self.python_function, "__name__", type(self.python_function).__name__)

    def wrap(self, body: Callable[..., Any]) -> Any:
        """Returns a `tf.function` like the given one, with another body."""

        def rewritten(*args: Any, **kwargs: Any) -> Any:
            return body(*args, **kwargs)

        rewritten.__name__ = self.name
        # TensorFlow counts the traces of each code object, and warns of too many.
        code = rewritten.__code__.replace(co_name=f"rewritten_{self.name}_{next(_NUMBERS)}")
        rewritten.__code__ = code
        rewritten.__signature__ = inspect.signature(self.python_function)  # type: ignore[attr-defined]
        own = self.options
        if own is None:
            return tf.function(rewritten, autograph=False)
        return tf.function(
            rewritten,
            autograph=False,
            input_signature=own.input_signature,
            jit_compile=own.jit_compile,
            reduce_retracing=own.reduce_retracing,
        )

    def trace(self, call: FlatCall) -> Any:
        """Traces the function for a call; see `trace_flat`."""
        own = self.options
        autograph = True if own is None else own.autograph
        options = None if own is None else own.experimental_autograph_options
        return trace_flat(self.python_function, call, autograph, options)
