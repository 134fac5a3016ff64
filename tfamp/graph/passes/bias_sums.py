"""Replaces low gradients of biases with sums that accumulate in float32.

The low kernels of BiasAddGrad lose small terms: see its row in `planning.kernels`. In float32
the op would need a Cast of the whole upstream gradient. Where Sum is exact, it adds up the same
rows and rounds once, so that `planning.inexact_kernels` lets the op be low.
"""

from __future__ import annotations

import tensorflow as tf

from tfamp.core.kinds import NodeDef
from tfamp.graph.body import Body
from tfamp.graph.graph import Graph
from tfamp.graph.nodes import attribute_text
from tfamp.planning.inexact_kernels import exact_instead
from tfamp.planning.kernel_calls import call_of_recorded_shapes
from tfamp.planning.kernels import OpCall
from tfamp.planning.options import RewriteOptions
from tfamp.planning.structures import RewritePlan

_GRADIENT, _SUM = "BiasAddGrad", "Sum"


def run(graph: Graph, options: RewriteOptions, plan: RewritePlan) -> None:
    """Replaces each BiasAddGrad that the plan converted with a Sum that is exact, in place."""
    retyped = {(retype.scope, retype.node) for retype in plan.retypes}
    for body in graph.bodies:
        for node in body.of_types(_GRADIENT):
            call = _call(body, node)
            converted = (body.scope, node.name) in retyped
            if not converted or exact_instead(call, node.device, options) != _SUM:
                continue
            rank = len(call.inputs[0] or ())
            channels = 1 if call.attrs["data_format"] == "NCHW" else rank - 1
            axes = [axis for axis in range(rank) if axis != channels]
            inputs = [node.input[0], body.constant(f"{node.name}/axes", axes, node.device)]
            dtype = tf.as_dtype(node.attr["T"].type)
            body.become(node, _SUM, inputs, T=dtype, Tidx=tf.int32, keep_dims=False)


def _call(body: Body, node: NodeDef) -> OpCall:
    taken, made = body.dims(node.input[0]), body.dims(body.tensor(node))
    attrs = {"data_format": attribute_text(node, "data_format")}
    return call_of_recorded_shapes(_GRADIENT, [taken], made, attrs)
