"""Gradients of biases in front of BatchNormalization become zeros.

BatchNormalization takes the mean of its batch off, and with it any bias before it: in training
its gradient adds up to 0 for every channel. What the sum gives is what rounding left.
"""

from __future__ import annotations

from typing import Any

from tfamp.graph.editor import FLOAT32_TYPE, become, renamed_output
from tfamp.graph.functions import bodies, respell
from tfamp.planning.options import GraphUse, RewriteOptions
from tfamp.planning.structures import MAIN_GRAPH, op_types

NORMALIZATION_GRADIENTS = op_types("FusedBatchNormGrad FusedBatchNormGradV2 FusedBatchNormGradV3")


def as_zeros(graph_def: Any, options: RewriteOptions, use: GraphUse) -> None:
    """Makes each float32 gradient of a bias that BatchNormalization takes off zeros, in place."""
    for scope, nodes, function in bodies(graph_def):
        gradients = [node for node in nodes if node.op == "BiasAddGrad" and node.input]
        made = {node.name: node for node in nodes if node.op in NORMALIZATION_GRADIENTS}
        changed = []
        for node in gradients if made else ():
            name, _, port = node.input[0].partition(":")
            behind = made.get(name)
            if behind is not None and port in _FIRST and _sums_to_zero(node, behind):
                scale = behind.input[2]
                become(node, "ZerosLike")
                node.attr["T"].type = FLOAT32_TYPE
                node.input[0] = scale
                changed.append(node.name)
        if scope != MAIN_GRAPH:
            respell(function, renamed_output(changed, "output", "y"))


# How the first output of a normalization's gradient is written, in graphs and in functions.
_FIRST = ("", "x_backprop:0")


def _sums_to_zero(gradient: Any, normalization: Any) -> bool:
    """Whether both have their channels in one place, and the statistics are those of the batch."""
    attrs = normalization.attr
    formats = (
        node.attr["data_format"].s if "data_format" in node.attr else b"NHWC"
        for node in (gradient, normalization)
    )
    training = "is_training" not in attrs or attrs["is_training"].b
    plain = all(
        "T" in node.attr and node.attr["T"].type == FLOAT32_TYPE
        for node in (gradient, normalization)
    )
    return bool(training and plain and len(set(formats)) == 1 and len(normalization.input) > 2)
