"""One graph of a SavedModel: what in it is used for what, its conversion, and its calibration.

TensorFlow 2 keeps the model in functions that signatures, and the object graph, refer to by name;
TensorFlow 1 keeps it in the graph itself. Both also hold what saves, restores and initialises: that
is no part of the model and stays as it is.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tensorflow as tf

from tfamp.core.errors import SavedModelError
from tfamp.graph.calibration import Calibration, measure
from tfamp.graph.editor import SHAPES, replace_nodes
from tfamp.graph.functions import (
    CALLS,
    GRADIENT,
    calls_in,
    copied,
    inline_calls,
    library_of,
    reached_functions,
)
from tfamp.graph.rewrite import convert, resolved
from tfamp.interop import tf_private
from tfamp.planning.options import RewriteOptions
from tfamp.planning.ranges import Ranges, TensorKey, TensorRange
from tfamp.planning.structures import RewritePlan, node_name, reach
from tfamp.rewriting.pipeline import graph_use

VARIABLES = ("VarHandleOp", "Variable", "VariableV2")
# Entries of the table of signatures that are none.
_NO_SIGNATURES = ("__saved_model_init_op", "__saved_model_train_op")
# Collections that name what initialises.
_INIT_COLLECTIONS = ("saved_model_main_op", "legacy_init_op", "table_initializer")
# Children of an object that make, fill and remove what it stands for, such as a lookup table.
_RESOURCE_FUNCTIONS = frozenset({"_create_resource", "_destroy_resource", "_initialize"})
# What else a function may hold that only calls another, as those of signatures do.
_PASSING = frozenset({"Identity", "IdentityN", "NoOp"})
# Holds the functions that only the object graph refers to, while a graph is rewritten.
_ROOT = "tfamp_functions_of_the_object_graph"
_CALL = "signature"


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


def signatures_of(meta_graph: Any) -> dict[str, Any]:
    """Returns the signatures of a `MetaGraphDef` by name."""
    found = sorted(meta_graph.signature_def.items())
    return {name: signature for name, signature in found if name not in _NO_SIGNATURES}


def find_roles(meta_graph: Any) -> Roles:
    """Returns what the parts of a `MetaGraphDef` are for; it is not modified."""
    signatures = signatures_of(meta_graph).values()
    feeds = _distinct(each for s in signatures for each in tensors_of(s.inputs))
    fetches = _distinct(each for s in signatures for each in tensors_of(s.outputs))
    init = _init_nodes(meta_graph)
    nodes = {node.name: node for node in meta_graph.graph_def.node}
    used = ancestors(nodes, (*feeds, *fetches))
    saver = meta_graph.saver_def
    saving = (saver.filename_tensor_name, saver.save_tensor_name, saver.restore_op_name)
    helping = ancestors(nodes, (*filter(None, saving), *init)) - used
    called = calls_in(nodes[each] for each in helping)
    library = library_of(meta_graph.graph_def)
    return Roles(
        feeds=feeds,
        fetches=fetches,
        init=tuple(name for name in init if name in nodes),
        bystanders=tuple(name for name in nodes if name not in used),
        helpers=frozenset(reached_functions(library, (*called, *_resource_functions(meta_graph)))),
    )


def rewrite_meta_graph(
    meta_graph: Any, roles: Roles, options: RewriteOptions, ranges: Ranges | None = None
) -> RewritePlan:
    """Converts a graph of a SavedModel in place; returns the plan.

    Every function keeps its name, arguments and results, so that the object graph and what loads it
    find what they look for.
    """
    functions = library_of(meta_graph.graph_def)
    graph = _model_graph(meta_graph, roles)
    root = graph.node.add(name=_ROOT, op="NoOp")
    entries = set(meta_graph.object_graph_def.concrete_functions)
    for name in library_of(graph):
        if name in entries:
            root.attr["functions"].list.func.add(name=name)
    fetches = _distinct((*roles.fetches, *roles.bystanders))
    options = options.keeping(_custom_gradients(graph))
    use = graph_use(fetches, roles.feeds, options, ranges)
    plan = convert(graph, resolved(options), use).plan
    functions |= library_of(graph)
    result = meta_graph.graph_def
    replace_nodes(result.node, (node for node in graph.node if node.name != _ROOT))
    replace_nodes(result.library.function, functions.values())
    add_op_definitions(meta_graph, ("Cast",))
    return plan


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

    def inputs(name: str) -> Iterator[str]:
        return (each for each in map(node_name, nodes[name].input) if each in nodes)

    return set(reach((each for each in map(node_name, names) if each in nodes), inputs))


def _model_graph(meta_graph: Any, roles: Roles) -> Any:
    """A copy of the graph without its helpers, calls inlined inside its functions.

    So no Casts are needed between layers. Calls stay in functions that only call another:
    signatures then still share the function that they have in common. What only those called that
    it is now a part of stays in the library as it is.
    """
    graph = copied(meta_graph.graph_def)
    model = (f for name, f in library_of(graph).items() if name not in roles.helpers)
    replace_nodes(graph.library.function, model)
    inlined = library_of(inline_calls(copied(graph)))
    for name, function in library_of(graph).items():
        doing = [node.op for node in function.node_def if node.op not in _PASSING]
        if len(doing) != 1 or doing[0] not in CALLS:
            function.CopyFrom(inlined[name])
    return graph


def tensors_of(infos: Mapping[str, Any]) -> Iterator[str]:
    """The names of the tensors that a signature takes or gives."""
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
    for key in _NO_SIGNATURES:
        if key in meta_graph.signature_def:
            names += tensors_of(meta_graph.signature_def[key].outputs)
    for key in _INIT_COLLECTIONS:
        if key in meta_graph.collection_def:
            names += meta_graph.collection_def[key].node_list.value
    names += [asset.tensor_info.name for asset in meta_graph.asset_file_def]
    return _distinct(map(node_name, names))


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


def _custom_gradients(graph: Any) -> list[str]:
    """Patterns of the names of nodes with a custom gradient, which takes and gives float32."""
    library = library_of(graph)
    reached = reached_functions(library, calls_in(graph.node))
    scopes = [graph.node, *(library[name].node_def for name in sorted(reached))]
    names = [node.name for nodes in scopes for node in nodes if GRADIENT in node.attr]
    return [f"^{re.escape(name)}$" for name in _distinct(names)]


def _distinct(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(names))


# ---- Calibration ---------------------------------------------------------------------------------


def measure_meta_graph(
    meta_graph: Any, roles: Roles, src: Path, calibration: Calibration
) -> Ranges:
    """Runs each call of a calibration on the signature that takes inputs of its names.

    A call is a dict of arrays by input name, or an array where a signature has one input. The
    variables are those of the SavedModel in `src`.

    Raises:
        SavedModelError: No signature takes such inputs, or the model cannot be run here.
    """
    graph = _model_graph(meta_graph, roles)
    signatures = signatures_of(meta_graph)
    calls: dict[str, list[Mapping[str, Any]]] = {}
    for args, kwargs in calibration.calls():
        name, values = _matching(signatures, args, kwargs, src)
        calls.setdefault(name, []).append(values)
    tensors: dict[TensorKey, TensorRange] = {}
    depths: dict[tuple[str, str], int] = {}
    for name, batches in calls.items():
        try:
            found = _run(graph, name, signatures[name], src, batches)
        except tf.errors.OpError as error:
            cause = error.message.partition("\n")[0]
            raise SavedModelError(
                f"The signature {name!r} of {src} cannot be run on the calibration data: {cause}"
            ) from error
        for key, each in found.tensors.items():
            tensors[key] = each.joined(tensors.get(key, each))
        for node, depth in found.depths.items():
            depths[node] = max(depth, depths.get(node, 0))
    return Ranges(tensors, depths)


def _matching(
    signatures: Mapping[str, Any], args: Sequence[Any], kwargs: Mapping[str, Any], src: Path
) -> tuple[str, Mapping[str, Any]]:
    for name, signature in signatures.items():
        inputs = sorted(signature.inputs)
        if kwargs and inputs == sorted(kwargs):
            return name, kwargs
        if not kwargs and len(inputs) == len(args) == 1:
            return name, {inputs[0]: args[0]}
    given = f"arrays named {sorted(kwargs)}" if kwargs else f"{len(args)} arrays without names"
    taken = "; ".join(f"{name} takes {sorted(each.inputs)}" for name, each in signatures.items())
    raise SavedModelError(
        f"No signature of {src} takes {given}: {taken or 'it has no signatures'}."
    )


def _run(
    graph: Any, name: str, signature: Any, src: Path, batches: Sequence[Mapping[str, Any]]
) -> Ranges:
    """Runs a signature: in the graph, or its function where that takes variables."""
    nodes = {node.name: node for node in graph.node}
    results = [info.name for _, info in sorted(signature.outputs.items())]
    if any(nodes[each].op in VARIABLES for each in ancestors(nodes, results)):
        callers = {node_name(each) for each in results}
        call = nodes[callers.pop()]
        if callers or call.op not in CALLS:
            raise SavedModelError(
                f"The signature {name!r} of {src} is a TensorFlow 1 graph with variables, which "
                "cannot be calibrated. Freeze it first (freeze=True)."
            )
        return _run_function(graph, call.attr["f"].func.name, name, src, batches)
    names = sorted(signature.inputs)
    feeds = [signature.inputs[each].name for each in names]
    return measure(graph, feeds, _in_order(names, batches), outputs=results)


def _run_function(
    graph: Any, function_name: str, name: str, src: Path, batches: Sequence[Mapping[str, Any]]
) -> Ranges:
    """Runs the function of a signature, with the variables of the model as loaded."""
    loaded = tf.saved_model.load(str(src))
    signature = loaded.signatures[name]
    function = library_of(graph)[function_name]
    takes, gives = function.signature.input_arg, function.signature.output_arg
    around = tf.compat.v1.GraphDef(versions=graph.versions, library=graph.library)
    node = around.node.add(name=_CALL, op="StatefulPartitionedCall")
    node.attr["f"].func.name = function_name
    node.attr["Tin"].list.type.extend(arg.type for arg in takes)
    node.attr["Tout"].list.type.extend(arg.type for arg in gives)
    for position, arg in enumerate(takes):
        node.input.append(arg.name)
        placeholder = around.node.add(name=arg.name, op="Placeholder")
        placeholder.attr["dtype"].type = arg.type
        known = function.arg_attr[position].attr
        if SHAPES in known:
            shape = known[SHAPES].list.shape[0]
            placeholder.attr["shape"].shape.CopyFrom(shape)
    return measure(
        around,
        [f"{arg.name}:0" for arg in takes],
        _in_order(sorted(signature.structured_input_signature[1]), batches),
        signature.captured_inputs,
        [f"{_CALL}:{i}" for i in range(len(gives))],
    )


def _in_order(names: Sequence[str], batches: Iterable[Mapping[str, Any]]) -> list[list[Any]]:
    return [[batch[name] for name in names] for batch in batches]
