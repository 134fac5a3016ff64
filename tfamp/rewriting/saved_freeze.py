"""A SavedModel's graph without variables: constants hold the values, in the low dtype if possible.

A frozen graph is saved as TensorFlow 1 does, without objects: so signatures share their constants.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import tensorflow as tf

from tfamp.core.errors import SavedModelError
from tfamp.graph.functions import called_functions, inline_calls, reached_functions
from tfamp.graph.index import build_indexes
from tfamp.graph.transforms import cast_before_loops, fold_casts
from tfamp.planning.structures import CastSite, RewritePlan, node_name
from tfamp.rewriting.saved_graph import (
    Roles,
    add_op_definitions,
    ancestors,
)
from tfamp.rewriting.saved_values import variable_values

# What a frozen model keeps of the files.
KEPT_IN_FROZEN = frozenset({"assets", "assets.extra"})
# What may be done to a variable that becomes a constant; control flow passes it on.
_READING = frozenset(
    {
        "Case",
        "Identity",
        "If",
        "PartitionedCall",
        "ReadVariableOp",
        "ResourceGather",
        "ResourceGatherNd",
        "StatefulPartitionedCall",
        "StatelessIf",
        "StatelessWhile",
        "While",
    }
)
_READ = "/Read/ReadVariableOp"
_KEPT_COLLECTIONS = frozenset({"saved_model_main_op", "legacy_init_op", "saved_model_assets"})
_INIT_SIGNATURE = "__saved_model_init_op"


def freeze_meta_graph(meta_graph: Any, roles: Roles, src: Path) -> None:
    """Replaces the variables that signatures use by constants, in place.

    Calls of functions are inlined, so that signatures share the constants. Objects and their
    functions are dropped: a frozen graph has its signatures only.

    Args:
        meta_graph: A `MetaGraphDef`.
        roles: What its parts are for.
        src: The SavedModel's directory.

    Raises:
        SavedModelError: A signature writes to a variable, or a value cannot be read.
    """
    keep = (*roles.feeds, *roles.fetches, *roles.init)
    graph = inline_calls(meta_graph.graph_def, keep)
    nodes = {node.name: node for node in graph.node}
    # A variable that is set when the model is loaded, such as the path of an asset, stays one.
    set_at_start = {
        name for name in ancestors(nodes, roles.init) if nodes[name].op == "VarHandleOp"
    }
    used = ancestors(nodes, (*roles.feeds, *roles.fetches))
    _check_reads_only(nodes, used, set_at_start)
    names = [
        name
        for name, node in nodes.items()
        if name in used - set_at_start and node.op in ("VarHandleOp", "Variable", "VariableV2")
    ]
    if not roles.fetches:
        raise SavedModelError(
            f"{src} has no signatures, and a frozen model has nothing else. Convert without "
            "freezing, or save it with signatures."
        )
    if names:
        graph = _with_constants(graph, variable_values(src, meta_graph, names), keep)
    meta_graph.graph_def.CopyFrom(graph)
    _drop_objects(meta_graph, keep)


def store_low_constants(meta_graph: Any, roles: Roles, plan: RewritePlan) -> RewritePlan:
    """Casts constants now, in place, where only the low dtype of them is used.

    Args:
        meta_graph: A frozen and rewritten `MetaGraphDef`.
        roles: What its parts are for.
        plan: The plan of the rewrite.

    Returns:
        The plan without the Casts that are no longer needed.
    """
    keep = (*roles.feeds, *roles.fetches, *roles.init)
    graph, hoisted = cast_before_loops(meta_graph.graph_def)
    graph, folded = fold_casts(graph, keep)
    folded |= hoisted
    build_indexes(graph, dtype=plan.dtype, device="cpu")  # It raises where dtypes do not agree.
    meta_graph.graph_def.CopyFrom(graph)

    def left(casts: Iterable[CastSite]) -> tuple[CastSite, ...]:
        return tuple(cast for cast in casts if (cast.scope, cast.name) not in folded)

    casts = left(plan.casts)
    return dataclasses.replace(
        plan,
        casts=casts,
        scopes=tuple(dataclasses.replace(each, casts=left(each.casts)) for each in plan.scopes),
        summary=dataclasses.replace(
            plan.summary,
            casts=len(casts),
            cast_bytes=sum(cast.bytes or 0 for cast in casts),
            casts_of_unknown_size=sum(cast.bytes is None for cast in casts),
        ),
    )


def _check_reads_only(nodes: Mapping[str, Any], used: set[str], set_at_start: set[str]) -> None:
    for name in nodes:
        node = nodes[name]
        if name not in used or node.op in _READING or node.op.startswith("ReadVariable"):
            continue
        for each in node.input:
            source = node_name(each)
            written = source in nodes and nodes[source].op == "VarHandleOp"
            if written and source not in set_at_start and not each.startswith("^"):
                raise SavedModelError(
                    f"The variable {source!r} cannot be frozen: node {name!r} ({node.op}) does "
                    "more with it than read it. Convert without freezing."
                )


def _with_constants(graph: Any, values: Mapping[str, Any], keep: Iterable[str]) -> Any:
    """Returns the graph with constants in the place of variables."""
    outputs = sorted({node_name(name) for name in keep})
    with _without_notes_of_tensorflow():
        try:
            frozen = tf.compat.v1.graph_util.convert_variables_to_constants(
                _Values(values), graph, outputs, variable_names_whitelist=list(values)
            )
        except Exception as error:  # What it raises for broken graphs is anything.
            raise SavedModelError(
                f"TensorFlow cannot freeze the graph: {type(error).__name__}: {error}. Convert "
                "without freezing, which says what is wrong with a graph that is."
            ) from error
    for node in (*frozen.node, *(n for f in frozen.library.function for n in f.node_def)):
        if "_output_shapes" in node.attr and any(
            each in node.attr for each in ("f", "body", "cond")
        ):
            del node.attr["_output_shapes"]  # Of variables they are those of handles.
    return frozen


class _Values:
    """What that function wants of a session: the values that variables have."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values

    def run(self, tensors: Iterable[str]) -> list[Any]:
        """Returns the values of tensors that read variables."""
        names = [name.removesuffix(":0").removesuffix(_READ) for name in tensors]
        return [self._values[name] for name in names]


@contextlib.contextmanager
def _without_notes_of_tensorflow() -> Iterator[None]:
    """Keeps back that the only public function that freezes graphs with loops is deprecated."""
    note = "is deprecated"
    logger = tf.get_logger()

    def is_no_note(record: logging.LogRecord) -> bool:
        return note not in record.getMessage() and note not in str(record.msg)

    logger.addFilter(is_no_note)
    try:
        yield
    finally:
        logger.removeFilter(is_no_note)


def _drop_objects(meta_graph: Any, keep: Iterable[str]) -> None:
    """Leaves of a graph what signatures and initialisation need."""
    graph = meta_graph.graph_def
    _wait_for_no_constants(graph)
    needed = ancestors({node.name: node for node in graph.node}, keep)
    nodes = [node for node in graph.node if node.name in needed]
    library = {function.signature.name: function for function in graph.library.function}
    called = reached_functions(library, (name for node in nodes for name in called_functions(node)))
    functions = [function for name, function in library.items() if name in called]
    slim = tf.compat.v1.GraphDef(versions=graph.versions, node=nodes)
    slim.library.function.extend(functions)
    slim.library.gradient.extend(
        each for each in graph.library.gradient if each.function_name in called
    )
    meta_graph.graph_def.CopyFrom(slim)
    for field in ("object_graph_def", "saver_def"):
        meta_graph.ClearField(field)
    meta_graph.meta_info_def.function_aliases.clear()
    _keep_initialization(meta_graph)
    for key in sorted(meta_graph.collection_def):
        if key not in _KEPT_COLLECTIONS:
            del meta_graph.collection_def[key]
    everything = [*nodes, *(node for function in functions for node in function.node_def)]
    add_op_definitions(meta_graph, sorted({node.op for node in everything}))


def _keep_initialization(meta_graph: Any) -> None:
    """Names what initialises as TensorFlow 1 does; its loader takes another way for a signature."""
    if _INIT_SIGNATURE in meta_graph.signature_def:
        (info,) = meta_graph.signature_def[_INIT_SIGNATURE].outputs.values()
        names = meta_graph.collection_def["saved_model_main_op"].node_list
        names.value[:] = [node_name(info.name)]
        del meta_graph.signature_def[_INIT_SIGNATURE]


def _wait_for_no_constants(graph: Any) -> None:
    """Drops control inputs from reads of what was a variable: a call waited for its reads."""
    constant: set[str] = set()
    for node in graph.node:
        if node.op == "Const" and not node.input:
            constant.add(node.name)
    reads = [node for node in graph.node if node.op == "Identity" and len(node.input) == 1]
    constant |= {node.name for node in reads if node.input[0] in constant}
    for node in graph.node:
        if any(name.startswith("^") for name in node.input):
            node.input[:] = [
                name for name in node.input if not name.startswith("^") or name[1:] not in constant
            ]
