"""What a graph is run on, checked against its inputs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfamp.graph.op_signatures import writes_variable
from tfamp.graph.transforms.pruning import PLACEHOLDERS
from tfamp.planning.tensor_names import node_name


class Feeds:
    """The inputs of a graph and the values they get.

    Args:
        graph_def: A `tf.compat.v1.GraphDef`.
        inputs: Names of placeholders' tensors; the last ones get the captures.
        captures: Values that are the same for all batches.

    Raises:
        TypeError: `inputs` is a string.
        ValueError: An input is no placeholder of the graph, or there are more captures than inputs.
    """

    def __init__(self, graph_def: Any, inputs: Sequence[str], captures: Sequence[Any]) -> None:
        if isinstance(inputs, str):
            raise TypeError(f"inputs must be a collection of strings; got the string {inputs!r}.")
        # TensorFlow makes a constant of a captured tensor that is small.
        placeholders = {n.name: n for n in graph_def.node if n.op in (*PLACEHOLDERS, "Const")}
        self.inputs = [name if ":" in name else f"{name}:0" for name in inputs]
        for name in self.inputs:
            if node_name(name) not in placeholders:
                raise ValueError(f"inputs: the graph has no placeholder {name!r}.")
        if len(captures) > len(self.inputs):
            raise ValueError(f"There are {len(captures)} captures, but {len(self.inputs)} inputs.")
        self.specs = [_spec(placeholders[node_name(name)]) for name in self.inputs]
        self._captures = list(captures)

    def each(self, batches: Iterable[Sequence[Any]]) -> Iterator[list[Any]]:
        """Gives the values of all inputs, batch by batch, as tensors of the right dtypes.

        Raises:
            ValueError: A batch has the wrong number of values, or one of a wrong shape or dtype.
        """
        count = len(self.inputs) - len(self._captures)
        for number, batch in enumerate(batches):
            values = list(batch) if isinstance(batch, list | tuple) else [batch]
            if len(values) != count:
                raise ValueError(
                    f"Calibration batch {number} has {len(values)} values; the graph takes "
                    f"{count}: {', '.join(self.inputs[:count])}."
                )
            yield [
                self._tensor(number, i, value) for i, value in enumerate(values)
            ] + self._captures

    def check_variables(self, graph_def: Any, variables: Sequence[Any]) -> None:
        """Raises a ValueError if a graph changes variables and none are given to be restored."""
        if variables or not any(value.dtype == tf.resource for value in self._captures):
            return
        scopes = [graph_def.node, *(each.node_def for each in graph_def.library.function)]
        writers = (node for nodes in scopes for node in nodes if writes_variable(node.op))
        if writer := next(writers, None):
            raise ValueError(
                f"The graph assigns a variable ({writer.name}, {writer.op}), which calibration has "
                "to undo: give its variables as `variables`."
            )

    def _tensor(self, number: int, position: int, value: Any) -> Any:
        spec = self.specs[position]
        try:
            tensor = tf.convert_to_tensor(value, spec.dtype if _converts(value, spec) else None)
        except (TypeError, ValueError) as error:
            raise self._misfit(number, position, f"{type(value).__name__} ({error})") from error
        if tensor.dtype != spec.dtype or not spec.shape.is_compatible_with(tensor.shape):
            found = f"{tensor.dtype.name} of shape {tensor.shape}"
            raise self._misfit(number, position, found)
        return tensor

    def _misfit(self, number: int, position: int, found: str) -> ValueError:
        spec = self.specs[position]
        shape = "any shape" if spec.shape.rank is None else f"shape {spec.shape}"
        return ValueError(
            f"Calibration batch {number}: the input {self.inputs[position]} takes "
            f"{spec.dtype.name} of {shape}; got {found}."
        )


def _converts(value: Any, spec: Any) -> bool:
    """Whether TensorFlow may convert a value: one of Python's, or an array of another width."""
    if not hasattr(value, "dtype"):
        return True
    is_array = isinstance(value, np.ndarray | np.generic)
    return is_array and value.dtype.kind == np.dtype(spec.dtype.as_numpy_dtype).kind


def _spec(node: Any) -> Any:
    dtype = tf.as_dtype(node.attr["dtype"].type)
    if "shape" not in node.attr or node.attr["shape"].shape.unknown_rank:
        return tf.TensorSpec(None, dtype)
    return tf.TensorSpec(tf.TensorShape(node.attr["shape"].shape), dtype)
