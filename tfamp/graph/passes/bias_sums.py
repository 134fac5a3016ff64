"""Replaces gradients of biases with sums that accumulate in float32.

The bfloat16 kernels of BiasAddGrad lose small terms: over 8192 rows CPUs are off by half, and GPUs
by some percent, as their blocks add to the result in bfloat16. So the op is not listed, and would
need a Cast of the whole upstream gradient. Sum accumulates the same rows in float32, on both kinds
of device, and rounds once.

Source: `core/kernels/bias_op_gpu.cu.cc` and `reduction_gpu_kernels.cu.h` of TensorFlow 2.21.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import cast

import tensorflow as tf

from tfamp.graph.editor import GraphEditor, attribute
from tfamp.graph.op_lists import OpLists
from tfamp.planning.options import RewriteOptions
from tfamp.planning.structures import RewritePlan

_GRADIENT, _SUM, _LEAST_RANK = "BiasAddGrad", "Sum", 2


def with_sums(options: RewriteOptions, graph: GraphEditor) -> RewriteOptions:
    """Returns options that allow low gradients of biases, as `run` replaces them with sums.

    Unchanged if the op is on a list, as on Grappler's, if Sum may not be low, or if the rank of a
    gradient is unknown.
    """
    colors = options.colors
    safe = _GRADIENT not in colors and colors.get(_SUM) in ("allow", "infer")
    gradients = ((body, node) for body in graph.bodies for node in body.of_types(_GRADIENT))
    known = all(len(body.dims(node.input[0])) >= _LEAST_RANK for body, node in gradients)
    if options.device == "tpu" or not safe or not known:
        return options
    lists = _with_gradients(cast(OpLists, options.op_lists))
    changed = dataclasses.replace(options, op_lists=lists)
    return changed if changed.updates == options.updates else options


@functools.lru_cache
def _with_gradients(lists: OpLists) -> OpLists:
    return lists.with_changes(infer_add=[_GRADIENT])


def run(graph: GraphEditor, options: RewriteOptions, plan: RewritePlan) -> None:
    """Replaces each BiasAddGrad that the plan converted to bfloat16 with a Sum, in place."""
    retyped = {(retype.scope, retype.node) for retype in plan.retypes}
    for body in graph.bodies:
        for node in body.of_types(_GRADIENT):
            rank = len(body.dims(node.input[0]))
            if (body.scope, node.name) in retyped and rank >= _LEAST_RANK:
                channels = 1 if attribute(node, "data_format").s == b"NCHW" else rank - 1
                axes = [axis for axis in range(rank) if axis != channels]
                inputs = [node.input[0], body.constant(f"{node.name}/axes", axes, node.device)]
                dtype = tf.as_dtype(node.attr["T"].type)
                body.become(node, _SUM, inputs, T=dtype, Tidx=tf.int32, keep_dims=False)
