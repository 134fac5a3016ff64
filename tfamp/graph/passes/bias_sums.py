"""Gradients of biases become sums that add up in float32.

The bfloat16 kernels of BiasAddGrad lose small terms: over 8192 rows CPUs are off by half, and GPUs
by some percent, as their blocks add to the result in bfloat16. So the op is on no list, and a Cast
of the whole upstream gradient comes before it. Sum of the same rows adds up in float32, on both,
and rounds once.

Source: `core/kernels/bias_op_gpu.cu.cc` and `reduction_gpu_kernels.cu.h` of TensorFlow 2.21.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from tfamp.graph.editor import FLOAT32_TYPE, add_constant, attributes_of, dims_of, first_output
from tfamp.graph.functions import bodies, replace_nodes
from tfamp.interop.tf_private import device_kind_of
from tfamp.planning.structures import FLOAT32, MAIN_GRAPH, NodePlan, Reason, RewritePlan

_GRADIENT, _SUM = "BiasAddGrad", "Sum"


# Where the channels are, by data_format.
_CHANNELS = {b"NHWC": -1, b"NCHW": 1}


_LEAST_RANK = 2


# (scope, name) of each node that became a Sum -> the node as it was.
Sums = Mapping[tuple[str, str], Any]


def sums_are_better(colors: Mapping[str, str], dtype: str) -> bool:
    """Returns whether gradients of biases are to be converted as sums.

    Not where they are on a list, as on Grappler's: then that list decides.
    """
    safe = _GRADIENT not in colors and colors.get(_SUM) in ("allow", "infer")
    return dtype == "bfloat16" and safe


def as_sums(graph_def: Any, device: str) -> Sums:
    """Makes each float32 BiasAddGrad of known rank on a CPU or a GPU a Sum, in place.

    Each gets a constant for its axes. The device is that of nodes that are pinned to none. Returns
    which nodes these are.
    """
    sums: dict[tuple[str, str], Any] = {}
    for scope, nodes, function in bodies(graph_def):
        gradients = [node for node in nodes if _is_gradient(node, device)]
        attrs = attributes_of(nodes, function) if gradients else {}
        for node in gradients:
            rank = _rank(node.input[0], attrs)
            given = node.attr["data_format"].s if "data_format" in node.attr else b"NHWC"
            channels = _CHANNELS.get(given)
            if rank < _LEAST_RANK or channels is None or _axes_name(node) in attrs:
                continue
            before = sums[scope, node.name] = type(node)()
            before.CopyFrom(node)
            axes = [axis for axis in range(rank) if axis != channels % rank]
            add_constant(nodes, _axes_name(node), axes, node.device)
            _become_sum(node, scope != MAIN_GRAPH)
    return sums


def without_idle_sums(graph_def: Any, plan: RewritePlan, sums: Sums) -> RewritePlan:
    """Takes back, in place, Sums that stayed float32; the plan tells of nodes as they were."""
    for scope, nodes, _ in bodies(graph_def) if sums else ():
        made = [node for node in nodes if (scope, node.name) in sums]
        back = [node for node in made if node.attr["T"].type == FLOAT32_TYPE]
        for node in back:
            given = node.input[0]
            node.CopyFrom(sums[scope, node.name])
            node.input[0] = given  # Perhaps a Cast now.
        unused = set(map(_axes_name, back))
        if unused:
            replace_nodes(nodes, (node for node in nodes if node.name not in unused))
    nodes = tuple(
        _described(each) if (each.scope, each.name) in sums else each for each in plan.nodes
    )
    return dataclasses.replace(plan, nodes=nodes)


def _described(plan: NodePlan) -> NodePlan:
    """What a plan says of a Sum, said of what it was."""
    inputs = tuple(name for name in plan.inputs if name != _axes_name(plan))
    reason = plan.reason
    if plan.dtype != FLOAT32:
        reason = Reason(reason.rule, f"{reason}; as a Sum, which adds up in float32")
    return dataclasses.replace(plan, op=_GRADIENT, inputs=inputs, reason=reason)


def _is_gradient(node: Any, device: str) -> bool:
    """Whether a node is a float32 BiasAddGrad that runs on a CPU or a GPU."""
    if node.op != _GRADIENT or "T" not in node.attr or not node.input:
        return False
    place = device_kind_of(node.device) or device
    return bool(node.attr["T"].type == FLOAT32_TYPE and place in ("cpu", "gpu"))


def _rank(tensor: str, attrs: Mapping[str, Any]) -> int:
    """The rank of a tensor, as far as the graph tells; else 0."""
    return len(dims_of(tensor, attrs))


def _axes_name(node: Any) -> str:
    return f"{node.name}/axes"


def _become_sum(node: Any, in_function: bool) -> None:
    node.op = _SUM
    node.input.insert(1, first_output(_axes_name(node), in_function))
    node.attr.pop("data_format", None)
    node.attr["Tidx"].type = tf.int32.as_datatype_enum
    node.attr["keep_dims"].b = False
