"""Runs the signatures of a SavedModel on given data and measures the range of every tensor."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import tensorflow as tf

from tfamp.core.errors import SavedModelError
from tfamp.graph.calibration import Calibration, measure
from tfamp.planning.ranges import Ranges
from tfamp.planning.structures import node_name
from tfamp.rewriting.saved_graph import CALLS, NO_SIGNATURES, Roles, ancestors, model_graph

_VARIABLES = frozenset({"VarHandleOp", "Variable", "VariableV2"})
_CALL = "signature"


def measure_meta_graph(
    meta_graph: Any, roles: Roles, src: Path, calibration: Calibration
) -> Ranges:
    """Runs each call of a calibration on the signature that takes inputs of its names.

    Args:
        meta_graph: A `MetaGraphDef`, float32; it is not modified.
        roles: What its parts are for.
        src: The SavedModel it is from, for its variables.
        calibration: The data; each call a dict of arrays by input name, or an array where a
            signature has one input.

    Returns:
        The ranges, by the names of functions and nodes in the graph that is rewritten.

    Raises:
        SavedModelError: No signature takes such inputs, or the model cannot be run here.
    """
    graph = model_graph(meta_graph, roles)
    signatures = {
        name: signature
        for name, signature in sorted(meta_graph.signature_def.items())
        if name not in NO_SIGNATURES
    }
    nodes = {node.name: node for node in graph.node}
    calls: dict[str, list[Mapping[str, Any]]] = {}
    for args, kwargs in calibration.calls():
        name, values = _matching(signatures, args, kwargs, src)
        calls.setdefault(name, []).append(values)
    found = Ranges()
    for name, batches in calls.items():
        signature = signatures[name]
        used = ancestors(nodes, [info.name for info in signature.outputs.values()])
        call = _call_of(nodes, signature)
        is_closed = not any(nodes[each].op in _VARIABLES for each in used)
        if call is None and not is_closed:
            raise SavedModelError(
                f"The signature {name!r} of {src} is a TensorFlow 1 graph with variables, which "
                "cannot be calibrated. Freeze it first (freeze=True)."
            )
        try:
            if call is None or is_closed:
                ranges = _run_graph(graph, signature, batches)
            else:
                ranges = _run_function(graph, call, name, src, batches)
        except tf.errors.OpError as error:
            cause = error.message.partition("\n")[0]
            raise SavedModelError(
                f"The signature {name!r} of {src} cannot be run on the calibration data: {cause}"
            ) from error
        found = _larger(found, ranges)
    return found


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


def _call_of(nodes: Mapping[str, Any], signature: Any) -> Any | None:
    """The node of the graph that calls the signature's function; None if it is no call."""
    callers = {node_name(info.name) for info in signature.outputs.values()}
    call = nodes.get(callers.pop()) if len(callers) == 1 else None
    return call if call is not None and call.op in CALLS else None


def _run_graph(graph: Any, signature: Any, batches: Sequence[Mapping[str, Any]]) -> Ranges:
    names = sorted(signature.inputs)
    return measure(
        graph,
        [signature.inputs[name].name for name in names],
        [[batch[name] for name in names] for batch in batches],
        outputs=[info.name for _, info in sorted(signature.outputs.items())],
    )


def _run_function(
    graph: Any, call: Any, name: str, src: Path, batches: Sequence[Mapping[str, Any]]
) -> Ranges:
    """Runs the function of a signature, with the variables of the model as loaded."""
    loaded = tf.saved_model.load(str(src))
    signature = loaded.signatures[name]
    function = next(
        each for each in graph.library.function if each.signature.name == call.attr["f"].func.name
    )
    around = tf.compat.v1.GraphDef(versions=graph.versions, library=graph.library)
    around.node.extend(_arguments(function))
    node = around.node.add(name=_CALL, op="StatefulPartitionedCall")
    node.input.extend(arg.name for arg in function.signature.input_arg)
    node.attr["f"].func.name = function.signature.name
    node.attr["Tin"].list.type.extend(arg.type for arg in function.signature.input_arg)
    node.attr["Tout"].list.type.extend(arg.type for arg in function.signature.output_arg)
    names = sorted(signature.structured_input_signature[1])
    return measure(
        around,
        [f"{arg.name}:0" for arg in function.signature.input_arg],
        [[batch[each] for each in names] for batch in batches],
        signature.captured_inputs,
        [f"{_CALL}:{i}" for i in range(len(function.signature.output_arg))],
    )


def _arguments(function: Any) -> Iterator[Any]:
    for position, arg in enumerate(function.signature.input_arg):
        node = tf.compat.v1.NodeDef(name=arg.name, op="Placeholder")
        node.attr["dtype"].type = arg.type
        known = function.arg_attr[position].attr
        if "_output_shapes" in known:
            node.attr["shape"].shape.CopyFrom(known["_output_shapes"].list.shape[0])
        yield node


def _larger(one: Ranges, other: Ranges) -> Ranges:
    tensors = dict(one.tensors)
    for key, found in other.tensors.items():
        known = tensors.get(key)
        tensors[key] = found if known is None else known.joined(found)
    depths = dict(one.depths)
    for node, depth in other.depths.items():
        depths[node] = max(depth, depths.get(node, 0))
    return Ranges(tensors, depths)
