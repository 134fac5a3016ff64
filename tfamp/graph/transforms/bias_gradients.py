"""Gradients of biases, which a CPU adds up in bfloat16 -> sums, which it adds up in float32.

On CPUs the bfloat16 kernel of BiasAddGrad loses small terms: over 8192 rows it is off by half, so
the op is on no list, and a Cast of the whole upstream gradient comes before it. Sum of the same
rows adds up in float32 and rounds once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any

import tensorflow as tf

from tfamp.planning.reason import Reason
from tfamp.planning.structures import MAIN_GRAPH, NodePlan, RewritePlan

_GRADIENT, _SUM = "BiasAddGrad", "Sum"
_SHAPES = "_output_shapes"
_FLOAT32 = tf.float32.as_datatype_enum
# Where the channels are, by data_format.
_CHANNELS = {b"NHWC": -1, b"NCHW": 1}
_LEAST_RANK = 2

# (scope, name) of each node that became a Sum -> the node as it was.
Sums = Mapping[tuple[str, str], Any]


def sums_are_better(colors: Mapping[str, str], dtype: str, device: str) -> bool:
    """Returns whether gradients of biases are to be lowered as sums.

    Not where they are on a list, as on Grappler's: then that list decides.
    """
    safe = _GRADIENT not in colors and colors.get(_SUM) in ("allow", "infer")
    return dtype == "bfloat16" and device == "cpu" and safe


def as_sums(graph_def: Any) -> Sums:
    """Makes every float32 BiasAddGrad of known rank a Sum, with a constant for its axes, in place.

    Returns:
        Which nodes these are.
    """
    sums: dict[tuple[str, str], Any] = {}
    for scope, nodes, arguments in _scopes(graph_def):
        gradients = [node for node in nodes if _is_gradient(node)]
        makers = {node.name: node for node in nodes} if gradients else {}
        for node in gradients:
            rank = _rank(node.input[0], makers, arguments)
            channels = _channels(node)
            if rank < _LEAST_RANK or channels is None or _axes_name(node) in makers:
                continue
            before = sums[scope, node.name] = type(node)()
            before.CopyFrom(node)
            axes = [axis for axis in range(rank) if axis != channels % rank]
            nodes.append(_constant(node, axes))
            _become_sum(node, "" if scope == MAIN_GRAPH else ":output:0")
    return sums


def without_idle_sums(graph_def: Any, plan: RewritePlan, sums: Sums) -> RewritePlan:
    """Takes back, in place, the Sums that were not lowered.

    Returns:
        The plan, which speaks of the nodes as they were.
    """
    if not sums:
        return plan
    idle = set()
    for scope, nodes, _ in _scopes(graph_def):
        unused = set()
        for node in nodes:
            was = sums.get((scope, node.name))
            if was is not None and node.attr["T"].type == _FLOAT32:
                idle.add((scope, node.name))
                unused.add(_axes_name(node))
                given = node.input[0]
                node.CopyFrom(was)
                node.input[0] = given  # Perhaps a Cast now.
        for position in reversed(range(len(nodes))):
            if nodes[position].name in unused:
                del nodes[position]
    nodes = tuple(
        _described(each, idle) if (each.scope, each.name) in sums else each for each in plan.nodes
    )
    return dataclasses.replace(plan, nodes=nodes)


def _described(plan: NodePlan, idle: Set[tuple[str, str]]) -> NodePlan:
    """What a plan says of a Sum, said of what it was."""
    inputs = tuple(name for name in plan.inputs if name != _axes_name(plan))
    reason = plan.reason
    if (plan.scope, plan.name) not in idle:
        reason = Reason(reason.rule, f"{reason}; as a Sum, which adds up in float32")
    return dataclasses.replace(plan, op=_GRADIENT, inputs=inputs, reason=reason)


def _is_gradient(node: Any) -> bool:
    """Whether a node is a float32 BiasAddGrad that runs on the CPU."""
    if node.op != _GRADIENT or "T" not in node.attr or not node.input:
        return False
    return node.attr["T"].type == _FLOAT32 and "GPU" not in node.device.upper()


def _rank(tensor: str, makers: Mapping[str, Any], arguments: Mapping[str, Any]) -> int:
    """The rank of a tensor, as far as the graph tells; else 0."""
    name, _, place = tensor.partition(":")
    attrs = makers[name].attr if name in makers else arguments.get(name, {})
    shapes = attrs[_SHAPES].list.shape if _SHAPES in attrs else ()
    # In functions "name:output:0", where only an op with one output has no other "0".
    port = int(place) if place.isdigit() else 0
    if port >= len(shapes) or (":" in place and len(shapes) > 1) or shapes[port].unknown_rank:
        return 0
    return len(shapes[port].dim)


def _scopes(graph_def: Any) -> Iterator[tuple[str, Any, Mapping[str, Any]]]:
    """Name, nodes and attributes of the arguments of the graph itself and of each function."""
    yield MAIN_GRAPH, graph_def.node, {}
    for function in graph_def.library.function:
        arguments = {
            each.name: function.arg_attr[i].attr
            for i, each in enumerate(function.signature.input_arg)
            if i in function.arg_attr
        }
        yield function.signature.name, function.node_def, arguments


def _channels(node: Any) -> int | None:
    given = node.attr["data_format"].s if "data_format" in node.attr else b"NHWC"
    return _CHANNELS.get(given)


def _axes_name(node: Any) -> str:
    return f"{node.name}/axes"


def _constant(node: Any, axes: Sequence[int]) -> Any:
    constant = type(node)(name=_axes_name(node), op="Const", device=node.device)
    constant.attr["dtype"].type = tf.int32.as_datatype_enum
    constant.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(axes, tf.int32))
    return constant


def _become_sum(node: Any, output: str) -> None:
    node.op = _SUM
    node.input.insert(1, f"{_axes_name(node)}{output}")
    node.attr.pop("data_format", None)
    node.attr["Tidx"].type = tf.int32.as_datatype_enum
    node.attr["keep_dims"].b = False
