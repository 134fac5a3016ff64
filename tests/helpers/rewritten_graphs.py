"""Graphs of plain functions, rewritten and run: what tests of single transforms do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfamp.core.profile import builtin_profile
from tfamp.graph import rewrite_graph_def
from tfamp.graph.graph import Graph

# The same on every machine, whatever it multiplies natively.
RULES = {
    "device": "cpu",
    "placement": "lists",
    "profile": builtin_profile("cpu", bfloat16=True, float16=False),
}


def traced(function: Callable, *specs: Any):
    """The concrete function for float32 arguments of these shapes or `tf.TensorSpec`s."""
    specs = [each if isinstance(each, tf.TensorSpec) else tf.TensorSpec(each) for each in specs]
    return tf.function(function, autograph=False).get_concrete_function(*specs)


def rewritten(
    concrete: Any, dtype: str = "bfloat16", fetches: Sequence[str] = (), **choices: Any
) -> Any:
    """Returns the result of `rewrite_graph_def` for a concrete function, by `RULES`."""
    graph = concrete.graph.as_graph_def(add_shapes=True)
    names = [each.name for each in concrete.outputs]
    return rewrite_graph_def(graph, [*names, *fetches], dtype=dtype, **{**RULES, **choices})


def run(concrete: Any, result: Any, *args: Any) -> Any:
    """Runs a rewritten graph on the CPU."""
    graph = Graph(result.graph_def).copy().rename_functions("_rewritten").graph_def
    names = [each.name for each in concrete.outputs]

    def imported(*args):
        given = dict(zip((each.name for each in concrete.inputs), args, strict=True))
        return tf.graph_util.import_graph_def(graph, given, names)

    with tf.device("CPU:0"):
        return tf.compat.v1.wrap_function(imported, [tf.TensorSpec(a.shape) for a in args])(*args)


def random(*shapes: Sequence[int]) -> list[tf.Tensor]:
    """A float32 tensor of each shape, of a normal distribution; the same at every call."""
    numbers = np.random.default_rng(0)
    return [tf.constant(numbers.standard_normal(shape), tf.float32) for shape in shapes]
