"""A SavedModel's graph without variables: constants hold the values, in the low dtype if possible.

A frozen graph is saved as TensorFlow 1 does, without objects: so signatures share their constants.
"""

from __future__ import annotations

import logging
import types
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tensorflow as tf

from tfamp.core.errors import SavedModelError
from tfamp.graph.editor import SHAPES, control_inputs_of, is_control, tensor_inputs
from tfamp.graph.functions import CALLS, copied, inline_calls, rename_functions
from tfamp.graph.index import build_indexes
from tfamp.graph.passes.constants import fold_casts
from tfamp.planning.decision import make_plan
from tfamp.planning.structures import BRANCHING, RewritePlan, ScopePlan, node_name
from tfamp.rewriting.pipeline import all_nodes
from tfamp.rewriting.saved_files import VARIABLES_PREFIX, first_line
from tfamp.rewriting.saved_graph import (
    VARIABLES,
    Roles,
    add_op_definitions,
    ancestors,
    signatures_of,
)

# What a frozen model keeps of the files.
KEPT_IN_FROZEN = frozenset({"assets", "assets.extra"})
# What may be done to a variable that becomes a constant; control flow passes it on.
_READING = BRANCHING | CALLS | {"Identity", "ResourceGather", "ResourceGatherNd"}
_READ = "/Read/ReadVariableOp"
# Attributes of what runs functions.
_FUNCTIONS = ("f", "body", "cond")
_KEPT_COLLECTIONS = frozenset({"saved_model_main_op", "legacy_init_op", "saved_model_assets"})
_INIT_SIGNATURE = "__saved_model_init_op"


def freeze_meta_graph(meta_graph: Any, roles: Roles, src: Path) -> None:
    """Replaces the variables that signatures use by constants, in place.

    Calls of functions are inlined, so that signatures share the constants. Objects and their
    functions are dropped: a frozen graph has its signatures only.

    Raises:
        SavedModelError: A signature writes to a variable, or a value cannot be read.
    """
    keep = (*roles.feeds, *roles.fetches, *roles.init)
    # A copy: the values are looked up by the calls.
    graph = inline_calls(copied(meta_graph.graph_def), keep)
    nodes = {node.name: node for node in graph.node}
    # A variable that is set when the model is loaded, such as the path of an asset, stays one.
    set_at_start = {
        name for name in ancestors(nodes, roles.init) if nodes[name].op == "VarHandleOp"
    }
    used = ancestors(nodes, (*roles.feeds, *roles.fetches))
    _check_reads_only(nodes, used, set_at_start)
    names = [
        name for name, node in nodes.items() if name in used - set_at_start and node.op in VARIABLES
    ]
    if not roles.fetches:
        raise SavedModelError(
            f"{src} has no signatures, and a frozen model has nothing else. Convert without "
            "freezing, or save it with signatures."
        )
    if names:
        graph = _with_constants(graph, _variable_values(src, meta_graph, names), keep)
    meta_graph.graph_def.CopyFrom(graph)
    _drop_objects(meta_graph, keep)


def store_low_constants(meta_graph: Any, roles: Roles, plan: RewritePlan) -> RewritePlan:
    """Casts constants of a frozen, converted graph now, where only their low dtype is used.

    In place; returns the plan without the Casts that are no longer needed.
    """
    keep = (*roles.feeds, *roles.fetches, *roles.init)
    folded = fold_casts(meta_graph.graph_def, keep)
    # It raises where dtypes do not agree.
    build_indexes(meta_graph.graph_def, dtype=plan.dtype, device="cpu")
    scopes = tuple(
        ScopePlan(
            each.scope,
            each.retypes,
            tuple(cast for cast in each.casts if (cast.scope, cast.name) not in folded),
        )
        for each in plan.scopes
    )
    return make_plan(plan.dtype, plan.nodes, scopes, plan.summary.estimated_speed_up)


def _check_reads_only(nodes: Mapping[str, Any], used: set[str], set_at_start: set[str]) -> None:
    for name, node in nodes.items():
        if name not in used or node.op in _READING or node.op.startswith("ReadVariable"):
            continue
        for each in node.input:
            source = node_name(each)
            written = source in nodes and nodes[source].op == "VarHandleOp"
            if written and source not in set_at_start and not is_control(each):
                raise SavedModelError(
                    f"The variable {source!r} cannot be frozen: node {name!r} ({node.op}) does "
                    "more with it than read it. Convert without freezing."
                )


def _with_constants(graph: Any, values: Mapping[str, Any], keep: Iterable[str]) -> Any:
    """Returns the graph with constants in the place of variables."""
    outputs = sorted({node_name(name) for name in keep})

    def run(tensors: Iterable[str]) -> list[Any]:
        names = [name.removesuffix(":0").removesuffix(_READ) for name in tensors]
        return [values[name] for name in names]

    # All it wants of a session is the values of tensors that read variables.
    session = types.SimpleNamespace(run=run)
    # The only public function that freezes graphs with loops says that it is deprecated.
    logger = tf.get_logger()
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        frozen = tf.compat.v1.graph_util.convert_variables_to_constants(
            session, graph, outputs, variable_names_whitelist=list(values)
        )
    except Exception as error:  # What it raises for broken graphs is anything.
        raise SavedModelError(
            f"TensorFlow cannot freeze the graph: {type(error).__name__}: {error}. Convert "
            "without freezing, which says what is wrong with a graph that is."
        ) from error
    finally:
        logger.setLevel(level)
    for node in all_nodes(frozen):
        if SHAPES in node.attr and any(each in node.attr for each in _FUNCTIONS):
            del node.attr[SHAPES]  # Of variables they are those of handles.
    return frozen


def _drop_objects(meta_graph: Any, keep: Iterable[str]) -> None:
    """Leaves of a graph what signatures and initialisation need."""
    graph = meta_graph.graph_def
    _wait_for_no_constants(graph)
    needed = ancestors({node.name: node for node in graph.node}, keep)
    nodes = [node for node in graph.node if node.name in needed]
    slim = tf.compat.v1.GraphDef(versions=graph.versions, library=graph.library, node=nodes)
    graph.CopyFrom(rename_functions(slim, ""))  # It leaves out what no node calls.
    for field in ("object_graph_def", "saver_def"):
        meta_graph.ClearField(field)
    meta_graph.meta_info_def.function_aliases.clear()
    # Names what initialises as TensorFlow 1 does; its loader differs for a signature.
    if _INIT_SIGNATURE in meta_graph.signature_def:
        (info,) = meta_graph.signature_def[_INIT_SIGNATURE].outputs.values()
        names = meta_graph.collection_def["saved_model_main_op"].node_list
        names.value[:] = [node_name(info.name)]
        del meta_graph.signature_def[_INIT_SIGNATURE]
    for key in sorted(meta_graph.collection_def):
        if key not in _KEPT_COLLECTIONS:
            del meta_graph.collection_def[key]
    add_op_definitions(meta_graph, sorted({node.op for node in all_nodes(graph)}))


def _wait_for_no_constants(graph: Any) -> None:
    """Drops control inputs from reads of what was a variable: a call waited for its reads."""
    constant = {node.name for node in graph.node if node.op == "Const" and not node.input}
    reads = [node for node in graph.node if node.op == "Identity" and len(node.input) == 1]
    constant |= {node.name for node in reads if node.input[0] in constant}
    for node in graph.node:
        if control_inputs_of(node):
            node.input[:] = [
                name for name in node.input if not is_control(name) or name[1:] not in constant
            ]


# ---- The values of variables ---------------------------------------------------------------------


def _variable_values(src: Path, meta_graph: Any, names: Sequence[str]) -> dict[str, Any]:
    """Reads the values of variables, by the nodes of the graph itself that stand for them.

    Raises:
        SavedModelError: A value cannot be read.
    """
    try:
        if meta_graph.object_graph_def.nodes:
            values = _values_of_objects(src, meta_graph)
        else:
            values = _values_of_graph(src, meta_graph, names)
    except Exception as error:  # What TensorFlow raises for broken objects and graphs is anything.
        raise SavedModelError(
            f"The variables of the SavedModel {src} cannot be read, which freezing needs: "
            f"{type(error).__name__}: {first_line(error)}"
        ) from error
    missing = sorted(set(names) - values.keys())
    if missing:
        raise SavedModelError(
            f"The variable {missing[0]!r} of {src} cannot be frozen: its value was not found. "
            "Convert without freezing."
        )
    return {name: values[name] for name in names}


def _values_of_objects(src: Path, meta_graph: Any) -> dict[str, Any]:
    """TensorFlow 2: what each signature is called with in the graph, its loaded function captures.

    Not by restoring the graph in a session: what `tf.saved_model.save` makes of a Keras 3 model
    restores other variables than its signatures use.
    """
    # It keeps the variables alive that its signatures refer to.
    loaded = tf.saved_model.load(str(src), tags=list(meta_graph.meta_info_def.tags))
    nodes = {node.name: node for node in meta_graph.graph_def.node}
    values: dict[str, Any] = {}
    for key, signature in signatures_of(meta_graph).items():
        if not signature.outputs:
            continue
        call = nodes[node_name(next(iter(signature.outputs.values())).name)]
        given = list(map(node_name, tensor_inputs(call)))
        captured = loaded.signatures[key].captured_inputs
        for name, tensor in zip(given[len(given) - len(captured) :], captured, strict=True):
            found = [v for v in loaded.signatures[key].variables if v.handle is tensor]
            if found and name not in values:
                values[name] = found[0].numpy()
    return values


def _values_of_graph(src: Path, meta_graph: Any, names: Sequence[str]) -> dict[str, Any]:
    """TensorFlow 1: restored in a session."""
    copy = tf.compat.v1.MetaGraphDef()
    copy.CopyFrom(meta_graph)
    with tf.Graph().as_default() as graph, tf.compat.v1.Session() as session:
        saver = tf.compat.v1.train.import_meta_graph(copy, clear_devices=True)
        if saver is None:
            return {}
        saver.restore(session, str(src / VARIABLES_PREFIX))
        tensors = {name: graph.get_tensor_by_name(f"{name}:0") for name in names}
        reads = {
            name: tf.raw_ops.ReadVariableOp(resource=tensor, dtype=tensor.op.get_attr("dtype"))
            if tensor.dtype == tf.resource
            else tensor
            for name, tensor in tensors.items()
        }
        return dict(session.run(reads))
