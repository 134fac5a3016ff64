"""The part of a graph that a run needs."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import tensorflow as tf

from tfamp.graph.structures import reach
from tfamp.graph.tensor_names import node_name

PLACEHOLDERS = ("Placeholder", "PlaceholderV2", "PlaceholderWithDefault")
_MUST_BE_FED = PLACEHOLDERS[:2]


def drop_unused_nodes(graph_def: Any, inputs: Sequence[str], outputs: Sequence[str]) -> Any:
    """Returns a copy of a graph without the nodes that a run does not need.

    Args:
        graph_def: A `tf.compat.v1.GraphDef`; it is not modified.
        inputs: Tensors that are given a value.
        outputs: Tensors or operations to compute; all that need no other placeholder if empty.

    Returns:
        The copy, with its nodes in the same order and all functions.

    Raises:
        ValueError: The graph has no such output, or one needs a placeholder that is no input.
    """
    nodes = {node.name: node for node in graph_def.node}
    fed = {node_name(name) for name in inputs}
    if missing := [name for name in outputs if node_name(name) not in nodes]:
        raise ValueError(f"outputs: the graph has no node {missing[0]!r}.")
    if outputs:
        needed = set(reach([node_name(name) for name in outputs], _sources(nodes, fed)))
        for name in sorted(needed - fed):
            if nodes[name].op in _MUST_BE_FED:
                raise ValueError(
                    f"The outputs need the placeholder {name!r}, which inputs does not hold; it "
                    f"holds {list(inputs)}."
                )
    else:
        unfed = [n.name for n in graph_def.node if n.op in _MUST_BE_FED and n.name not in fed]
        needed = set(nodes) - set(reach(unfed, _consumers(nodes, fed)))
    result = tf.compat.v1.GraphDef()
    result.CopyFrom(graph_def)
    del result.node[:]
    needed |= fed
    result.node.extend(node for node in graph_def.node if node.name in needed)
    return result


def _sources(nodes: Any, fed: Collection[str]) -> Any:
    return lambda name: () if name in fed else map(node_name, nodes[name].input)


def _consumers(nodes: Any, fed: Collection[str]) -> Any:
    consumers: dict[str, list[str]] = {}
    for node in nodes.values():
        for tensor in node.input:
            if node.name not in fed:
                consumers.setdefault(node_name(tensor), []).append(node.name)
    return lambda name: consumers.get(name, ())
