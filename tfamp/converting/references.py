"""Whether what the parts of a SavedModel name is there; a broken file may name anything."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def broken_reference(meta_graph: Any) -> str | None:
    """Finds a name or a number that refers to nothing.

    Not those inside the graph, which the rewrite compares edge by edge.

    Args:
        meta_graph: A `MetaGraphDef`.

    Returns:
        What is wrong, as half a sentence; None if all is there.
    """
    nodes = {node.name for node in meta_graph.graph_def.node}
    for tensor in _tensors_of_signatures(meta_graph):
        if tensor.removeprefix("^").partition(":")[0] not in nodes:
            return f"a signature uses the tensor {tensor!r}, which its graph does not have"
    count = len(meta_graph.object_graph_def.nodes)
    for number in _object_numbers(meta_graph.object_graph_def):
        if not 0 <= number < count:
            return f"an object refers to the object {number}, and there are {count}"
    return None


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
