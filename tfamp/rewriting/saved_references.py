"""Whether what the parts of a SavedModel name is there; a broken file may name anything."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

# TensorFlow reads these unseen: where they are not, the process dies.
_READ_UNSEEN = {
    "Const": ("dtype", "value"),
    "PartitionedCall": ("f",),
    "StatefulPartitionedCall": ("f",),
}


def broken_reference(meta_graph: Any) -> str | None:
    """Finds a name or a number that refers to nothing, or an attribute that must be there.

    Not names inside the graph, which the rewrite compares edge by edge.

    Args:
        meta_graph: A `MetaGraphDef`.

    Returns:
        What is wrong, as half a sentence; None if all is there.
    """
    nodes = {node.name for node in meta_graph.graph_def.node}
    for tensor in _tensors_of_signatures(meta_graph):
        if tensor.removeprefix("^").partition(":")[0] not in nodes:
            return f"a signature uses the tensor {tensor!r}, which its graph does not have"
    for node in _all_nodes(meta_graph.graph_def):
        for attr in _READ_UNSEEN.get(node.op, ()):
            if attr not in node.attr:
                return f"its node {node.name!r}, a {node.op}, has no attribute {attr!r}"
    count = len(meta_graph.object_graph_def.nodes)
    for number in _object_numbers(meta_graph.object_graph_def):
        if not 0 <= number < count:
            return f"an object refers to the object {number}, and there are {count}"
    return None


def _all_nodes(graph_def: Any) -> Iterator[Any]:
    yield from graph_def.node
    for function in graph_def.library.function:
        yield from function.node_def


def _tensors_of_signatures(meta_graph: Any) -> Iterator[str]:
    for _, signature in sorted(meta_graph.signature_def.items()):
        for infos in (signature.inputs, signature.outputs):
            for _, info in sorted(infos.items()):
                if info.name:
                    yield info.name


def _object_numbers(objects: Any) -> Iterator[int]:
    for each in objects.nodes:
        yield from (child.node_id for child in each.children)
        for _, saveable in sorted(each.saveable_objects.items()):
            yield saveable.save_function
            yield saveable.restore_function
    for _, function in sorted(objects.concrete_functions.items()):
        yield from function.bound_inputs
