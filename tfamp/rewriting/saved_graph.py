"""One graph of a SavedModel: what in it is used for what, and its rewrite.

TensorFlow 2 keeps the model in functions that signatures, and the object graph, refer to by name;
TensorFlow 1 keeps it in the graph itself. Both also hold what saves, restores and initialises: that
is no part of the model and stays as it is.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from tfamp.graph.functions import called_functions, inline_calls, reached_functions
from tfamp.graph.rewrite import convert, make_request
from tfamp.interop import tf_private
from tfamp.planning.choices import NodeChoices
from tfamp.planning.structures import RewritePlan, node_name

# Entries of the table of signatures that are none.
NO_SIGNATURES = ("__saved_model_init_op", "__saved_model_train_op")
# Collections that name what initialises.
_INIT_COLLECTIONS = ("saved_model_main_op", "legacy_init_op", "table_initializer")
# Children of an object that make, fill and remove what it stands for, such as a lookup table.
_RESOURCE_FUNCTIONS = frozenset({"_create_resource", "_destroy_resource", "_initialize"})
CALLS = ("PartitionedCall", "StatefulPartitionedCall")
# What else a function may hold that only calls another, as those of signatures do.
_PASSING = frozenset({"Identity", "IdentityN", "NoOp"})
# Holds the functions that only the object graph refers to, while a graph is rewritten.
_ROOT = "tfamp_functions_of_the_object_graph"


@dataclass(frozen=True, slots=True)
class Roles:
    """What the parts of a graph are for.

    Attributes:
        feeds: Tensors that signatures take.
        fetches: Tensors that signatures give.
        init: Nodes that initialise, or hold the names of assets.
        bystanders: Nodes of the graph itself that no signature uses.
        helpers: Functions that save, restore or initialise.
    """

    feeds: tuple[str, ...]
    fetches: tuple[str, ...]
    init: tuple[str, ...]
    bystanders: tuple[str, ...]
    helpers: frozenset[str]


def find_roles(meta_graph: Any) -> Roles:
    """Returns what the parts of a `MetaGraphDef` are for; it is not modified."""
    signatures = [
        signature
        for name, signature in sorted(meta_graph.signature_def.items())
        if name not in NO_SIGNATURES
    ]
    feeds = _distinct(each for s in signatures for each in _tensors(s.inputs))
    fetches = _distinct(each for s in signatures for each in _tensors(s.outputs))
    init = _init_nodes(meta_graph)
    nodes = {node.name: node for node in meta_graph.graph_def.node}
    used = ancestors(nodes, (*feeds, *fetches))
    saver = meta_graph.saver_def
    saving = (saver.filename_tensor_name, saver.save_tensor_name, saver.restore_op_name)
    helping = ancestors(nodes, (*filter(None, saving), *init)) - used
    called = {name for each in helping for name in called_functions(nodes[each])}
    library = {f.signature.name: f for f in meta_graph.graph_def.library.function}
    return Roles(
        feeds=feeds,
        fetches=fetches,
        init=tuple(name for name in init if name in nodes),
        bystanders=tuple(name for name in nodes if name not in used),
        helpers=frozenset(
            reached_functions(library, called | set(_resource_functions(meta_graph)))
        ),
    )


def rewrite_meta_graph(meta_graph: Any, roles: Roles, options: Mapping[str, Any]) -> RewritePlan:
    """Rewrites a graph of a SavedModel in place.

    Every function keeps its name, arguments and results, so that the object graph and what loads it
    find what they look for.

    Args:
        meta_graph: A `MetaGraphDef`; its `graph_def` is replaced.
        roles: What its parts are for.
        options: Arguments of `make_request`, and keep_float32 and force_low.

    Returns:
        The plan.
    """
    library = meta_graph.graph_def.library
    helpers = [f for f in library.function if f.signature.name in roles.helpers]
    order = [f.signature.name for f in library.function]
    graph = model_graph(meta_graph, roles)
    root = graph.node.add(name=_ROOT, op="NoOp")
    entries = set(meta_graph.object_graph_def.concrete_functions)
    for function in graph.library.function:
        if function.signature.name in entries:
            root.attr["functions"].list.func.add(name=function.signature.name)
    chosen = dict(options)
    custom = _custom_gradients(graph)
    keep = (*chosen.pop("keep_float32", ()), *custom)
    fetches = _distinct((*roles.fetches, *roles.bystanders))
    choices = NodeChoices(fetches, roles.feeds, keep, chosen.pop("force_low", ()), custom)
    result = convert(graph, make_request(choices, **chosen))
    rewritten = result.graph_def
    nodes = [node for node in rewritten.node if node.name != _ROOT]
    functions = {f.signature.name: f for f in (*rewritten.library.function, *helpers)}
    meta_graph.graph_def.ClearField("node")
    meta_graph.graph_def.node.extend(nodes)
    del meta_graph.graph_def.library.function[:]
    meta_graph.graph_def.library.function.extend(functions[name] for name in order)
    add_op_definitions(meta_graph, ("Cast",))
    return result.plan


def model_graph(meta_graph: Any, roles: Roles) -> Any:
    """Returns a copy of the graph without its helpers, calls inlined inside its functions."""
    graph = tf.compat.v1.GraphDef()
    graph.CopyFrom(meta_graph.graph_def)
    model = [f for f in graph.library.function if f.signature.name not in roles.helpers]
    del graph.library.function[:]
    graph.library.function.extend(model)
    _inline_inside(graph)
    return graph


def add_op_definitions(meta_graph: Any, ops: Iterable[str]) -> None:
    """Adds ops to the list of those the graph uses, by which loaders judge whether they can."""
    listed = meta_graph.meta_info_def.stripped_op_list.op
    names = {op.name for op in listed}
    for op in ops:
        definition = tf_private.op_definition(op)
        if op not in names and definition is not None:
            listed.add().CopyFrom(definition)


def ancestors(nodes: Mapping[str, Any], names: Iterable[str]) -> set[str]:
    """Returns the names of the nodes that tensors or nodes are computed from, with their own."""
    pending = [node_name(name) for name in names]
    found: set[str] = set()
    while pending:
        name = pending.pop()
        if name in nodes and name not in found:
            found.add(name)
            pending += [node_name(each) for each in nodes[name].input]
    return found


def _tensors(infos: Mapping[str, Any]) -> Iterator[str]:
    for _, info in sorted(infos.items()):
        kind = info.WhichOneof("encoding")
        if kind == "coo_sparse":
            sparse = info.coo_sparse
            yield sparse.values_tensor_name
            yield sparse.indices_tensor_name
            yield sparse.dense_shape_tensor_name
        elif kind == "composite_tensor":
            yield from (each.name for each in info.composite_tensor.components)
        elif info.name:
            yield info.name


def _init_nodes(meta_graph: Any) -> tuple[str, ...]:
    names: list[str] = []
    for key in NO_SIGNATURES:
        if key in meta_graph.signature_def:
            names += _tensors(meta_graph.signature_def[key].outputs)
    for key in _INIT_COLLECTIONS:
        if key in meta_graph.collection_def:
            names += meta_graph.collection_def[key].node_list.value
    names += [asset.tensor_info.name for asset in meta_graph.asset_file_def]
    return _distinct(node_name(name) for name in names)


def _resource_functions(meta_graph: Any) -> Iterator[str]:
    """The functions of the object graph that make, fill, remove, save or restore something."""
    objects = meta_graph.object_graph_def.nodes
    for each in objects:
        numbers = [c.node_id for c in each.children if c.local_name in _RESOURCE_FUNCTIONS]
        for saveable in each.saveable_objects.values():
            numbers += [saveable.save_function, saveable.restore_function]
        for number in numbers:
            yield from objects[number].function.concrete_functions
            if name := objects[number].bare_concrete_function.concrete_function_name:
                yield name


def _inline_inside(graph: Any) -> None:
    """Puts what functions call into them, so that no Casts are needed between layers; in place.

    Not into functions that only call another: signatures then still share the function that they
    have in common. What only those called that it is now a part of stays in the library as it is.
    """
    flat = tf.compat.v1.GraphDef()
    flat.CopyFrom(graph)
    inlined = {f.signature.name: f for f in inline_calls(flat).library.function}
    for function in graph.library.function:
        doing = [node.op for node in function.node_def if node.op not in _PASSING]
        if len(doing) != 1 or doing[0] not in CALLS:
            function.CopyFrom(inlined[function.signature.name])


def _custom_gradients(graph: Any) -> list[str]:
    """Patterns of the names of nodes with a custom gradient, which takes and gives float32."""
    library = {function.signature.name: function for function in graph.library.function}
    reached = reached_functions(library, (c for node in graph.node for c in called_functions(node)))
    scopes = [graph.node, *(library[name].node_def for name in sorted(reached))]
    names = [node.name for nodes in scopes for node in nodes if "_gradient_op_type" in node.attr]
    return [f"^{re.escape(name)}$" for name in _distinct(names)]


def _distinct(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(names))
