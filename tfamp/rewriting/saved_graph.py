"""Converts, calibrates and freezes one graph of a SavedModel, by the roles of its parts.

TensorFlow 2 keeps the model in functions that signatures and the object graph refer to by name,
TensorFlow 1 in the graph itself. Both also hold ops and functions that save, restore and
initialise: these are not part of the model and are not changed.

A frozen graph has constants instead of variables, in the low dtype where possible. It is saved
in TensorFlow 1's way, without objects, so that signatures share their constants.
"""

from __future__ import annotations

import itertools
import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import tensorflow as tf

from tfamp.core.errors import SavedModelError
from tfamp.core.kinds import Handle, MetaGraphDef, NodeDef, SignatureDef, Tensor
from tfamp.graph.body import Body
from tfamp.graph.calibration import Calibration, measure
from tfamp.graph.graph import Graph
from tfamp.graph.index import index_bodies
from tfamp.graph.nodes import (
    GRADIENT,
    SHAPES,
    called_by,
    control_inputs_of,
    is_control,
    tensor_inputs,
)
from tfamp.graph.observe import held_variables
from tfamp.graph.ops import CALLS
from tfamp.graph.passes.constants import fold_casts
from tfamp.graph.rewrite import convert_graph, resolved
from tfamp.planning.decision import make_plan
from tfamp.planning.options import RewriteOptions
from tfamp.planning.ranges import Ranges, TensorKey, TensorRange
from tfamp.planning.structures import BRANCHING, RewritePlan, node_name
from tfamp.rewriting.pipeline import graph_use

_Arrays: TypeAlias = Mapping[str, Any]  # By the names of a signature's inputs.

VARIABLES_PREFIX = "variables/variables"
_VARIABLES = ("VarHandleOp", "Variable", "VariableV2")
# Entries of the table of signatures that initialise or train.
_INIT_SIGNATURE = "__saved_model_init_op"
_NO_SIGNATURES = (_INIT_SIGNATURE, "__saved_model_train_op")
# Collections of the names of nodes that initialise.
_INIT_COLLECTIONS = ("saved_model_main_op", "legacy_init_op", "table_initializer")
# Children of an object, such as a lookup table, that create, fill and destroy it.
_RESOURCE_FUNCTIONS = frozenset({"_create_resource", "_destroy_resource", "_initialize"})
# Other ops of a function that only calls another, like a signature's.
_PASSING = frozenset({"Identity", "IdentityN", "NoOp"})
# A node that refers to the object graph's functions while a graph is rewritten.
_ROOT = "tfamp_functions_of_the_object_graph"
# Allowed uses of a variable that becomes a constant; control flow passes it on.
_READING = BRANCHING | CALLS | {"Identity", "ResourceGather", "ResourceGatherNd"}
_READ = "/Read/ReadVariableOp"
# Kept in a frozen graph.
_KEPT_COLLECTIONS = frozenset({"saved_model_main_op", "legacy_init_op", "saved_model_assets"})


@dataclass(frozen=True, slots=True)
class Roles:
    """The parts of a graph by their use.

    Attributes:
        feeds: Inputs of signatures.
        fetches: Outputs of signatures.
        init: Nodes that initialise, or hold the names of assets.
        bystanders: Nodes of the main graph that no signature uses.
        entries: Functions of the model that the object graph refers to.
    """

    feeds: tuple[str, ...]
    fetches: tuple[str, ...]
    init: tuple[str, ...]
    bystanders: tuple[str, ...]
    entries: tuple[str, ...]


def signatures_of(meta_graph: MetaGraphDef) -> dict[str, SignatureDef]:
    """Returns the signatures of a `MetaGraphDef` by name."""
    entries = sorted(meta_graph.signature_def.items())
    return {name: signature for name, signature in entries if name not in _NO_SIGNATURES}


def find_roles(meta_graph: MetaGraphDef) -> Roles:
    """Returns the roles of the parts of a `MetaGraphDef`; it is not modified."""
    signatures = signatures_of(meta_graph).values()
    feeds = _distinct(tensor for signature in signatures for tensor in tensors_of(signature.inputs))
    fetches = _distinct(
        tensor for signature in signatures for tensor in tensors_of(signature.outputs)
    )
    main = Graph(meta_graph.graph_def).main
    used = main.ancestors((*feeds, *fetches))
    return Roles(
        feeds=feeds,
        fetches=fetches,
        init=tuple(name for name in _init_nodes(meta_graph) if name in main.by_name),
        bystanders=tuple(name for name in main.by_name if name not in used),
        entries=_distinct(_functions_of_objects(meta_graph.object_graph_def.nodes)),
    )


def rewrite_meta_graph(
    meta_graph: MetaGraphDef, roles: Roles, options: RewriteOptions, ranges: Ranges | None = None
) -> RewritePlan:
    """Converts a graph of a SavedModel in place; returns the plan.

    Every function keeps its name, arguments and results: the object graph refers to them.
    """
    fetches = _distinct((*roles.fetches, *roles.bystanders))
    graph = _model_graph(meta_graph, roles, (*fetches, *roles.feeds))
    root = node_name(graph.main.add(_ROOT, "NoOp"))
    for name in roles.entries:
        graph.main.by_name[root].attr["functions"].list.func.add(name=name)
    options = options.keeping(_custom_gradients(graph))
    use = graph_use(fetches, roles.feeds, options, ranges)
    plan = convert_graph(graph, resolved(options), use)
    graph.main.drop({root})
    result = Graph(meta_graph.graph_def)
    result.main.replace_nodes(graph.main.nodes)
    for body in graph.functions.values():
        result.put_function(body.definition)
    return plan


def _model_graph(meta_graph: MetaGraphDef, roles: Roles, kept: Iterable[str] = ()) -> Graph:
    """Returns a copy of the graph with only the model's functions, and calls inlined in these.

    Inlining saves Casts between layers. A function that only calls another keeps the call, so
    that signatures still share functions.
    """
    graph = Graph(meta_graph.graph_def, kept).copy()
    used = (node for node in graph.main.nodes if node.name not in roles.bystanders)
    called = itertools.chain(roles.entries, *map(called_by, used))
    graph.keep_functions({body.scope for body in graph.reached(called)})
    inlined = graph.copy().inline_calls()
    for name, body in list(graph.functions.items()):
        doing = [node.op for node in body.nodes if node.op not in _PASSING]
        if len(doing) != 1 or doing[0] not in CALLS:
            graph.put_function(inlined.functions[name].definition)
    return graph


def tensors_of(infos: Mapping[str, Any]) -> Iterator[str]:
    """Yields the names of the tensors in a signature's inputs or outputs."""
    for _, info in sorted(infos.items()):
        sparse = info.coo_sparse
        yield from filter(None, (info.name, sparse.values_tensor_name))
        yield from filter(None, (sparse.indices_tensor_name, sparse.dense_shape_tensor_name))
        yield from (component.name for component in info.composite_tensor.components)


def _init_nodes(meta_graph: MetaGraphDef) -> tuple[str, ...]:
    names: list[str] = []
    for key in _NO_SIGNATURES:
        if key in meta_graph.signature_def:
            names += tensors_of(meta_graph.signature_def[key].outputs)
    for key in _INIT_COLLECTIONS:
        if key in meta_graph.collection_def:
            names += meta_graph.collection_def[key].node_list.value
    names += [asset.tensor_info.name for asset in meta_graph.asset_file_def]
    return _distinct(map(node_name, names))


def _functions_of_objects(objects: Sequence[Any]) -> Iterator[str]:
    """Yields the object graph's functions that do not manage resources, save or restore."""
    helping: set[int] = set()
    for saved_object in objects:
        for child in saved_object.children:
            if child.local_name in _RESOURCE_FUNCTIONS:
                helping.add(child.node_id)
        for saveable in saved_object.saveable_objects.values():
            helping |= {saveable.save_function, saveable.restore_function}
    for number, saved_object in enumerate(objects):
        if number not in helping:
            yield from saved_object.function.concrete_functions
            bare = saved_object.bare_concrete_function.concrete_function_name
            yield from filter(None, [bare])


def _custom_gradients(graph: Graph) -> list[str]:
    """Returns name patterns of nodes with a custom gradient, whose dtypes are float32."""
    reached = sorted(graph.reached(graph.main.calls()), key=lambda body: body.scope)
    nodes = (node for body in (graph.main, *reached) for node in body.nodes)
    names = (node.name for node in nodes if GRADIENT in node.attr)
    return [f"^{re.escape(name)}$" for name in _distinct(names)]


def _distinct(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(names))


# ---- Values and calibration ----------------------------------------------------------------------


def captured(src: Path, meta_graph: MetaGraphDef) -> tuple[Any, dict[str, Handle]]:
    """Loads a TensorFlow 2 model; returns it, and its resources by their nodes in the graph.

    One of TensorFlow 1 is not loaded, and has none here.

    Each signature's call in the graph takes the tensors that its loaded function captures. The
    graph cannot be restored in a session: `tf.saved_model.save` writes a restore op for other
    variables than the signatures of a Keras 3 model use.
    """
    if not meta_graph.object_graph_def.nodes:
        return None, {}
    # Variables live as long as the loaded model.
    loaded = tf.saved_model.load(str(src), tags=list(meta_graph.meta_info_def.tags))
    nodes = Graph(meta_graph.graph_def).main.by_name
    captures: dict[str, Tensor] = {}
    for key, signature in signatures_of(meta_graph).items():
        if signature.outputs:
            call = nodes[node_name(next(iter(signature.outputs.values())).name)]
            taken = list(map(node_name, tensor_inputs(call)))
            inputs = loaded.signatures[key].captured_inputs
            captures |= zip(taken[len(taken) - len(inputs) :], inputs, strict=True)
    handles = {name: value for name, value in captures.items() if value.dtype == tf.resource}
    return loaded, handles


def measure_meta_graph(
    meta_graph: MetaGraphDef,
    roles: Roles,
    src: Path,
    data: Calibration,
    resources: Mapping[str, Handle],
) -> Ranges:
    """Runs each call of a calibration on the signature with inputs of the same names.

    A call is a dict of arrays by input name, or an array for a signature with one input. The
    values of the variables and tables are `resources`, as `captured` returns them of `src`: those
    that a frozen graph still has.

    Raises:
        SavedModelError: No signature takes such inputs, or the model cannot run here.
    """
    graph = _model_graph(meta_graph, roles)
    # Freezing has made constants of variables, and kept their names.
    others = {name for name, node in graph.main.by_name.items() if node.op != "Const"}
    fed = {name: handle for name, handle in resources.items() if name in others}
    for name in fed:  # Runs are fed the loaded model's resource.
        graph.main.become(graph.main.by_name[name], "Placeholder", (), dtype=tf.resource)
    signatures = signatures_of(meta_graph)
    calls: dict[str, list[_Arrays]] = {}
    for args, kwargs in data.calls():
        name, batch = matching_signature(signatures, args, kwargs, src)
        calls.setdefault(name, []).append(batch)
    ranges: dict[TensorKey, TensorRange] = {}
    for name, batches in calls.items():
        inputs = sorted(signatures[name].inputs.items())
        feeds = [*(info.name for _, info in inputs), *fed]
        values = [[batch[key] for key, _ in inputs] for batch in batches]
        fetches = [info.name for _, info in sorted(signatures[name].outputs.items())]
        try:
            new_ranges = measure(graph, feeds, values, list(fed.values()), fetches)
        except tf.errors.OpError as error:
            raise SavedModelError(
                f"The signature {name!r} of {src} cannot be run on the calibration data: "
                f"{first_line(error)}"
            ) from error
        for key, tensor_range in new_ranges.items():
            ranges[key] = tensor_range.joined(ranges.get(key, tensor_range))
    return ranges


def matching_signature(
    signatures: Mapping[str, SignatureDef],
    args: Sequence[Any],
    kwargs: _Arrays,
    src: Path,
) -> tuple[str, _Arrays]:
    """Returns the name of the signature that takes a call of some data, and its arrays by name.

    Raises:
        SavedModelError: No signature takes them.
    """
    for name, signature in signatures.items():
        inputs = sorted(signature.inputs)
        if kwargs and inputs == sorted(kwargs):
            return name, kwargs
        if not kwargs and len(inputs) == len(args) == 1:
            return name, {inputs[0]: args[0]}
    got = f"arrays named {sorted(kwargs)}" if kwargs else f"{len(args)} arrays without names"
    known = "; ".join(
        f"{name} takes {sorted(signature.inputs)}" for name, signature in signatures.items()
    )
    raise SavedModelError(f"No signature of {src} takes {got}: {known or 'there is none'}.")


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's message, without the place in the graph."""
    text = getattr(error, "message", None) or str(error)
    return text.strip().splitlines()[0] if text.strip() else type(error).__name__


# ---- Freezing ------------------------------------------------------------------------------------


def freeze_meta_graph(meta_graph: MetaGraphDef, roles: Roles, src: Path) -> None:
    """Replaces the variables that signatures use by constants, in place.

    Calls are inlined, so that signatures share the constants. Objects and their functions are
    dropped: a frozen graph has only its signatures.

    Raises:
        SavedModelError: A signature writes to a variable, or a value cannot be read.
    """
    keep = (*roles.feeds, *roles.fetches, *roles.init)
    # A copy: variable values are found through the calls.
    graph = Graph(meta_graph.graph_def, keep).copy().inline_calls()
    main, nodes = graph.main, graph.main.by_name
    # Variables that are set when the model is loaded, such as paths of assets, remain.
    used = main.ancestors((*roles.feeds, *roles.fetches))
    constant = used - main.ancestors(roles.init)
    names = [name for name in nodes if name in constant and nodes[name].op in _VARIABLES]
    _check_reads_only([nodes[name] for name in nodes if name in used], names)
    if not roles.fetches:
        raise SavedModelError(
            f"{src} has no signatures, and a frozen model has nothing else. Convert without "
            "freezing, or save it with signatures."
        )
    if names:
        graph = _with_constants(graph, _variable_values(src, meta_graph, names), keep)
    meta_graph.graph_def.CopyFrom(graph.graph_def)
    _drop_objects(meta_graph, keep)


def store_low_constants(
    meta_graph: MetaGraphDef,
    roles: Roles,
    plan: RewritePlan,
) -> RewritePlan:
    """Stores constants of a frozen, converted graph in the low dtype if no other dtype is used.

    In place; returns the plan without the removed Casts.
    """
    keep = (*roles.feeds, *roles.fetches, *roles.init)
    graph = Graph(meta_graph.graph_def, keep)
    folded = fold_casts(graph)
    # Raises an error if dtypes disagree.
    index_bodies(graph, plan.dtype, "cpu")
    casts = tuple(cast for cast in plan.casts if (cast.scope, cast.name) not in folded)
    speed_up = plan.summary.estimated_speed_up
    return make_plan(plan.dtype, plan.nodes, casts, plan.retypes, speed_up)


def _check_reads_only(nodes: Iterable[NodeDef], variables: Sequence[str]) -> None:
    for node in nodes:
        taken = {node_name(name) for name in tensor_inputs(node)}
        reads = node.op in _READING or node.op.startswith("ReadVariable")
        for name in () if reads else taken.intersection(variables):
            raise SavedModelError(
                f"The variable {name!r} cannot be frozen: node {node.name!r} ({node.op}) does "
                "more with it than read it. Convert without freezing."
            )


class _ValuesInsteadOfSession:
    """Stands in for a session of `convert_variables_to_constants`, which asks for values only.

    Args:
        values: The values by the names of the variables' nodes.
    """

    def __init__(self, values: Mapping[str, np.ndarray]) -> None:
        self._values = values

    def run(self, reads: Iterable[str]) -> list[np.ndarray]:
        """Returns the values of variables by the tensors that read them, as a session would."""
        names = (read.removesuffix(":0").removesuffix(_READ) for read in reads)
        return [self._values[name] for name in names]


def _with_constants(
    graph: Graph,
    values: Mapping[str, np.ndarray],
    keep: Iterable[str],
) -> Graph:
    """Returns the graph with constants instead of variables.

    TensorFlow's `convert_variables_to_constants_v2` takes one concrete function and returns
    another, and so would give each signature its own graph with its own copy of the constants.
    """
    outputs = sorted({node_name(name) for name in keep})
    session = _ValuesInsteadOfSession(values)
    logger = tf.get_logger()
    level = logger.level
    logger.setLevel(logging.ERROR)  # The only public function for this is deprecated.
    try:
        graph_def = tf.compat.v1.graph_util.convert_variables_to_constants(
            session, graph.graph_def, outputs, variable_names_whitelist=list(values)
        )
    finally:
        logger.setLevel(level)
    frozen = Graph(graph_def, keep)
    for node in frozen.nodes:
        if node.op in BRANCHING | CALLS:
            node.attr.pop(SHAPES, None)  # They contain the shapes of handles.
    return frozen


def _drop_objects(meta_graph: MetaGraphDef, keep: Iterable[str]) -> None:
    """Removes everything that signatures and initialisation do not need."""
    graph = Graph(meta_graph.graph_def)
    _wait_for_no_constants(graph.main)
    graph.main.keep(graph.main.ancestors(keep))
    graph.drop_uncalled_functions()
    for field in ("object_graph_def", "saver_def"):
        meta_graph.ClearField(field)
    meta_graph.meta_info_def.function_aliases.clear()
    # TensorFlow 1's loader, which frozen models use, ignores the signature that initialises.
    if _INIT_SIGNATURE in meta_graph.signature_def:
        (info,) = meta_graph.signature_def[_INIT_SIGNATURE].outputs.values()
        names = meta_graph.collection_def["saved_model_main_op"].node_list
        names.value[:] = [node_name(info.name)]
        del meta_graph.signature_def[_INIT_SIGNATURE]
    for key in sorted(meta_graph.collection_def):
        if key not in _KEPT_COLLECTIONS:
            del meta_graph.collection_def[key]


def _wait_for_no_constants(main: Body) -> None:
    """Drops control inputs from reads of frozen variables, which calls used to wait for."""
    constant = {node.name for node in main.of_types("Const") if not node.input}
    reads = [node for node in main.of_types("Identity") if len(node.input) == 1]
    constant |= {node.name for node in reads if node.input[0] in constant}
    for node in main.nodes:
        if control_inputs_of(node):
            waits = [name for name in node.input if is_control(name) and name[1:] in constant]
            main.set_inputs(node, [name for name in node.input if name not in waits])


def _variable_values(
    src: Path, meta_graph: MetaGraphDef, names: Sequence[str]
) -> dict[str, np.ndarray]:
    """Reads the values of variables, by their nodes in the graph.

    Raises:
        SavedModelError: A value cannot be found.
    """
    if meta_graph.object_graph_def.nodes:
        loaded, resources = captured(src, meta_graph)
        held = {id(handle): value for handle, value in held_variables(resources.values())}
        values = {
            name: held[id(handle)].numpy()
            for name, handle in resources.items()
            if id(handle) in held
        }
    else:  # TensorFlow 1 saves variables by name.
        reader = tf.train.load_checkpoint(str(src / VARIABLES_PREFIX))
        values = {name: reader.get_tensor(name) for name in names if reader.has_tensor(name)}
    if missing := sorted(set(names) - values.keys()):
        raise SavedModelError(
            f"The variable {missing[0]!r} of {src} cannot be frozen: its value was not found. "
            "Convert without freezing."
        )
    return {name: values[name] for name in names}
