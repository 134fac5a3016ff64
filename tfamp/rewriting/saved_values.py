"""The values of the variables that a SavedModel's signatures use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tensorflow as tf

from tfamp.core.errors import SavedModelError
from tfamp.planning.structures import node_name
from tfamp.rewriting.saved_files import VARIABLES_PREFIX, first_line
from tfamp.rewriting.saved_graph import NO_SIGNATURES


def variable_values(src: Path, meta_graph: Any, names: Sequence[str]) -> dict[str, Any]:
    """Reads the values of variables.

    Args:
        src: The SavedModel's directory.
        meta_graph: One of its graphs.
        names: Nodes of the graph itself that stand for variables.

    Returns:
        An array for each name.

    Raises:
        SavedModelError: A value cannot be read.
    """
    try:
        if meta_graph.object_graph_def.nodes:
            values = _of_objects(src, meta_graph)
        else:
            values = _of_graph(src, meta_graph, names)
    except SavedModelError:
        raise
    except Exception as error:  # What TensorFlow raises for broken objects and graphs is anything.
        raise SavedModelError(
            f"The variables of {src} cannot be read: {type(error).__name__}: {first_line(error)}"
        ) from error
    missing = sorted(set(names) - values.keys())
    if missing:
        raise SavedModelError(
            f"The variable {missing[0]!r} of {src} cannot be frozen: its value was not found. "
            "Convert without freezing."
        )
    return {name: values[name] for name in names}


def _of_objects(src: Path, meta_graph: Any) -> dict[str, Any]:
    """TensorFlow 2: what each signature is called with in the graph, its loaded function captures.

    Not by restoring the graph in a session: what `tf.saved_model.save` makes of a Keras 3 model
    restores other variables than its signatures use.
    """
    loaded = _loaded(src, meta_graph)
    nodes = {node.name: node for node in meta_graph.graph_def.node}
    values: dict[str, Any] = {}
    for key, signature in sorted(meta_graph.signature_def.items()):
        if key in NO_SIGNATURES or not signature.outputs:
            continue
        function = loaded.signatures[key]
        call = nodes[node_name(next(iter(signature.outputs.values())).name)]
        given = [node_name(name) for name in call.input if not name.startswith("^")]
        captured = function.captured_inputs
        for name, tensor in zip(given[len(given) - len(captured) :], captured, strict=True):
            found = [v for v in function.variables if v.handle is tensor]
            if found and name not in values:
                values[name] = found[0].numpy()
    return values


def _loaded(src: Path, meta_graph: Any) -> Any:
    """The loaded SavedModel, whose variables live as long as it does."""
    try:
        loaded = tf.saved_model.load(str(src), tags=list(meta_graph.meta_info_def.tags))
    except Exception as error:  # What the loader raises for broken objects is anything.
        raise SavedModelError(
            f"TensorFlow cannot load the SavedModel {src}, which freezing needs: "
            f"{type(error).__name__}: {first_line(error)}"
        ) from error
    for key in meta_graph.signature_def:
        if key not in NO_SIGNATURES and not hasattr(_signature(loaded, key), "captured_inputs"):
            raise SavedModelError(
                f"The SavedModel {src} is broken: its objects have no signature {key!r}, and its "
                "graph has."
            )
    return loaded


def _signature(loaded: Any, key: str) -> Any:
    signatures = getattr(loaded, "signatures", None)
    return signatures.get(key) if isinstance(signatures, Mapping) else None


def _of_graph(src: Path, meta_graph: Any, names: Sequence[str]) -> dict[str, Any]:
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
