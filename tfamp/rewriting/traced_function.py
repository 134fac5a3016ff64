"""A function to trace, a call of it, and the graphs that are traced for a rewrite."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import tensorflow as tf

from tfamp.core.kinds import Function, Layer, Nest, Tensor, TFGraph, Trace
from tfamp.interop import tf_private
from tfamp.interop.patching import Patch
from tfamp.interop.tf_private import as_written
from tfamp.layers.fused_norms import can_fuse, fits, normalize

_NUMBERS = itertools.count(1)
_DEFAULTS = {"autograph": True}

PythonFunction: TypeAlias = Callable[..., Any]

# ---- Functions and calls -------------------------------------------------------------------------


@dataclass(frozen=True)
class TracedFunction:
    """A function to trace, with its options.

    Attributes:
        python_function: The function to run while tracing.
        options: How the `tf.function` was made, or would be by default.
        signature: The arguments it takes, with their defaults.
    """

    python_function: PythonFunction
    options: dict[str, Any]
    signature: inspect.Signature

    @classmethod
    def of(cls, fn: Function | PythonFunction) -> TracedFunction:
        """Describes a `tf.function`, or any other callable."""
        if isinstance(fn, tf.types.experimental.PolymorphicFunction):
            options = tf_private.function_options(fn)
            return cls(fn.python_function, options, tf_private.function_signature(fn))
        return cls(fn, _DEFAULTS, inspect.signature(fn))

    def bound_to(self, instance: object) -> TracedFunction:
        """Returns the function as a method of an object, which it does not keep alive."""
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
        """The function's name, for messages."""
        return getattr(self.python_function, "__name__", type(self.python_function).__name__)

    def wrapper(self, body: PythonFunction) -> dict[str, Any]:
        """Returns the arguments of a `tf.function` like this one, with another body."""

        def rewritten(*args: Any, **kwargs: Any) -> Any:
            return body(*args, **kwargs)

        rewritten.__name__ = self.name
        # TensorFlow counts the traces of each code object, and warns about too many.
        code_name = f"rewritten_{self.name}_{next(_NUMBERS)}"
        rewritten.__code__ = rewritten.__code__.replace(co_name=code_name)
        # TensorFlow binds the arguments of a call by it and fills in defaults.
        rewritten.__signature__ = self.signature  # type: ignore[attr-defined]
        options = {
            option: value for option, value in self.options.items() if "autograph" not in option
        }
        options |= {"python_function": rewritten, "name": self.name, "autograph": False}
        return options

    def unchanged(self) -> Function:
        """Returns a `tf.function` that runs it unchanged, with its own traces."""
        return tf.function(self.python_function, **self.options)

    def compiled(self) -> Function:
        """Returns a `tf.function` that XLA compiles as a whole, with its own traces."""
        return tf.function(self.python_function, **{**self.options, "jit_compile": True})

    @property
    def jit_compile(self) -> bool | None:
        """Whether XLA compiles it; None if nobody chose."""
        chosen: bool | None = self.options.get("jit_compile")
        return chosen

    def call(self, *args: Any, **kwargs: Any) -> FlatCall:
        """Returns a call with its arguments bound to the signature, defaults included."""
        bound = self.signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return FlatCall(bound.args, bound.kwargs)

    def trace(self, call: FlatCall, *, to_rewrite: bool = False) -> Trace:
        """Traces the function for a call with tensors of the current graph.

        Returns the concrete function, from the call's tensors to the result. In a graph to
        rewrite BatchNormalization layers are the fused op.
        """

        def flat(*tensors: Tensor) -> Nest:
            if to_rewrite:
                _to_rewrite.add(tf.compat.v1.get_default_graph())
            args, kwargs = call.with_tensors(tensors)
            return _returned(self.python_function(*args, **kwargs))

        traced = tf.function(
            flat,
            autograph=self.options["autograph"],
            experimental_autograph_options=self.options.get("experimental_autograph_options"),
        )
        with _fused_batch_normalization.held():
            return traced.get_concrete_function(*map(_spec, call.tensors))


@dataclass(frozen=True)
class FlatCall:
    """The arguments of one call, with the tensors in them.

    Composite tensors count as their components. Variables are not tensors here: the function
    captures them like Python values.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    @functools.cached_property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors in the arguments."""
        return self._components(_is_tensor)

    def values(self) -> tuple[Tensor | np.ndarray, ...]:
        """Returns what `tf.function` makes tensors of: tensors and NumPy arrays."""
        arrays = (np.ndarray, np.generic)
        return self._components(lambda leaf: _is_tensor(leaf) or isinstance(leaf, arrays))

    @as_written
    def with_tensors(self, tensors: Sequence[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns the arguments with other tensors, in the order of `tensors`."""
        remaining = iter(tensors)

        def filled(leaf: Nest) -> Nest:
            if not _is_tensor(leaf):
                return leaf
            parts = [next(remaining) for _ in _components(leaf)]
            return tf.nest.pack_sequence_as(leaf, parts, expand_composites=True)

        args, kwargs = tf.nest.map_structure(filled, (self.args, dict(self.kwargs)))
        return args, kwargs

    def _components(self, is_wanted: Callable[[Any], bool]) -> tuple[Tensor, ...]:
        leaves = filter(is_wanted, tf.nest.flatten((self.args, dict(self.kwargs))))
        return tuple(itertools.chain.from_iterable(map(_components, leaves)))


def _spec(tensor: Tensor) -> tf.TensorSpec:
    name = None if tf.executing_eagerly() else tensor.op.name
    return tf.TensorSpec(tensor.shape, tensor.dtype, name=name)


def _is_tensor(leaf: Any) -> bool:
    is_extension = isinstance(leaf, tf.experimental.ExtensionType)
    return is_extension or (tf.is_tensor(leaf) and not isinstance(leaf, tf.Variable))


def _components(value: Nest) -> list[Tensor]:
    return tf.nest.flatten(value, expand_composites=True)


@as_written
def _returned(result: Nest) -> Nest:
    """Returns a result with operations replaced by None, as a traced function returns them."""
    return tf.nest.map_structure(
        lambda leaf: None if isinstance(leaf, tf.Operation) else leaf, result
    )


# ---- Graphs to rewrite ---------------------------------------------------------------------------

# By graph and not by thread: the replicas of a strategy trace theirs in other threads.
_to_rewrite: weakref.WeakSet[TFGraph] = weakref.WeakSet()


def traces_for_a_rewrite() -> bool:
    """Whether a function whose graph will be rewritten is being traced here."""
    current = tf.compat.v1.get_default_graph()
    return any(graph in _to_rewrite for graph in enclosing(current))


def _normalize(
    original: PythonFunction,
    layer: Layer,
    inputs: Tensor,
    training: bool | Tensor | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """Computes a float32 BatchNormalization layer by the fused op, where that is the same.

    Keras computes it in a dozen ops, and most need float32. One op with float32 statistics
    takes and returns low-precision tensors in the rewritten graph.
    """
    if (
        mask is None
        and traces_for_a_rewrite()
        and getattr(inputs, "dtype", None) == layer.compute_dtype == "float32"
        and can_fuse(type(layer))
        and fits(layer, inputs, "float32", training)
    ):
        return normalize(layer, inputs, training)
    return original(layer, inputs, training=training, mask=mask)


_fused_batch_normalization = Patch(batch_normalization=_normalize)


def enclosing(graph: TFGraph) -> Iterator[TFGraph]:
    """Yields a graph, the graph in which its function is traced, and so on outwards."""
    while graph is not None:
        yield graph
        graph = tf_private.outer_graph(graph)
