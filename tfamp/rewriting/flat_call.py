"""A call of a function with nested arguments, as one of a function from tensors to tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tensorflow as tf

from tfamp.interop.tracing import as_written


@dataclass(frozen=True)
class FlatCall:
    """The arguments of one call, split into tensors and all else.

    Composite tensors count as their components. Variables are not tensors here: the function
    refers to them, as to Python values.

    Attributes:
        args: Positional arguments.
        kwargs: Keyword arguments.
        tensors: The tensors in them.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    tensors: tuple[Any, ...] = field(init=False)

    def __post_init__(self) -> None:
        flat = [each for leaf in self._leaves() if _is_tensor(leaf) for each in _components(leaf)]
        object.__setattr__(self, "tensors", tuple(flat))

    def values(self) -> tuple[Any, ...]:
        """Returns what `tf.function` makes tensors of: the tensors, and NumPy's arrays."""
        leaves = self._leaves()
        tensors = iter(self.tensors)
        found: list[Any] = []
        for leaf in leaves:
            if _is_tensor(leaf):
                found += [next(tensors) for _ in _components(leaf)]
            elif isinstance(leaf, np.ndarray | np.generic):
                found.append(leaf)
        return tuple(found)

    @as_written
    def with_tensors(self, tensors: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns the arguments with other tensors, in the order of `tensors`."""
        remaining = iter(tensors)
        leaves = [self._filled(leaf, remaining) for leaf in self._leaves()]
        args, kwargs = tf.nest.pack_sequence_as((self.args, dict(self.kwargs)), leaves)
        return args, kwargs

    def _leaves(self) -> list[Any]:
        return tf.nest.flatten((self.args, dict(self.kwargs)))

    @staticmethod
    def _filled(leaf: Any, remaining: Any) -> Any:
        if not _is_tensor(leaf):
            return leaf
        parts = [next(remaining) for _ in _components(leaf)]
        return tf.nest.pack_sequence_as(leaf, parts, expand_composites=True)


class FlatResult:
    """What a function returned, as tensors; keeps the structure to put them back in."""

    def __init__(self) -> None:
        self._structure: Any = None
        self._present: list[bool] = []

    @as_written
    def flatten(self, result: Any) -> list[Any]:
        """Returns the tensors of a result; None and operations stand for nothing."""
        self._structure = tf.nest.map_structure(_as_value, result)
        leaves = tf.nest.flatten(self._structure, expand_composites=True)
        self._present = [leaf is not None for leaf in leaves]
        return [leaf for leaf in leaves if leaf is not None]

    def pack(self, tensors: Sequence[Any]) -> Any:
        """Returns the structure with other tensors in it."""
        remaining = iter(tensors)
        leaves = [next(remaining) if there else None for there in self._present]
        return tf.nest.pack_sequence_as(self._structure, leaves, expand_composites=True)


def trace_flat(
    function: Callable[..., Any], call: FlatCall, autograph: bool, options: Any
) -> tuple[Any, FlatResult]:
    """Traces a function for one call.

    Args:
        function: What to trace.
        call: Its arguments, with tensors of the current graph.
        autograph: Whether Python control flow is converted.
        options: `experimental_autograph_options` of `tf.function`.

    Returns:
        The concrete function, from the call's tensors to the result's, and the result's structure.
    """
    result = FlatResult()

    def flat(*tensors: Any) -> list[Any]:
        args, kwargs = call.with_tensors(tensors)
        return result.flatten(function(*args, **kwargs))

    specs = [_spec(tensor) for tensor in call.tensors]
    traced = tf.function(
        flat, autograph=autograph, experimental_autograph_options=options
    ).get_concrete_function(*specs)
    return traced, result


def _spec(tensor: Any) -> tf.TensorSpec:
    name = None if tf.executing_eagerly() else tensor.op.name
    return tf.TensorSpec(tensor.shape, tensor.dtype, name=name)


def _is_tensor(leaf: Any) -> bool:
    if isinstance(leaf, tf.experimental.ExtensionType):
        return True
    return tf.is_tensor(leaf) and not isinstance(leaf, tf.Variable)


def _components(leaf: Any) -> list[Any]:
    return tf.nest.flatten(leaf, expand_composites=True)


def _as_value(leaf: Any) -> Any:
    if leaf is None or isinstance(leaf, tf.Operation):
        return None
    if isinstance(leaf, tf.TensorArray):
        raise TypeError(
            "A function to rewrite returned a tf.TensorArray, which belongs to the graph it was "
            "made in. Return its stack() or concat()."
        )
    if isinstance(leaf, tf.Variable) or not _is_composite(leaf):
        return leaf if _is_tensor(leaf) else tf.convert_to_tensor(leaf)
    return leaf


def _is_composite(leaf: Any) -> bool:
    """Whether it is made of tensors, such as a ragged tensor, a data set or an ExtensionType."""
    parts = _components(leaf)
    return len(parts) != 1 or parts[0] is not leaf
