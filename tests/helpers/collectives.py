"""Reads the collectives of a traced function from its graph, branches included."""

from __future__ import annotations

from collections.abc import Iterator

import tensorflow as tf


def bytes_sent(concrete, *, branches: bool = True) -> dict[str, int]:
    """Bytes that the first of two replicas puts into all-reduces, by dtype.

    Args:
        concrete: A concrete function that runs on the replicas.
        branches: Whether what the branches of conditions send counts too.
    """
    found: dict[str, int] = {}
    for graph in _graphs(concrete.graph) if branches else [concrete.graph]:
        for op in graph.get_operations():
            if op.type.startswith("CollectiveReduce") and not op.device.endswith("CPU:1"):
                tensor = op.inputs[0]
                size = tensor.shape.num_elements() * tensor.dtype.size
                found[tensor.dtype.name] = found.get(tensor.dtype.name, 0) + size
    return found


def _graphs(graph: tf.Graph) -> Iterator[tf.Graph]:
    yield graph
    # Only these know static shapes: a GraphDef has none.
    for function in graph._functions.values():
        if function.graph is not None:
            yield from _graphs(function.graph)
