"""Elementwise arithmetic between products and convolutions, marked for XLA to fuse.

TensorFlow's kernels take a pass over memory for each op; XLA makes one of many. Products and
convolutions are not marked: on CPUs oneDNN's kernels for low precision are faster than XLA's.
TensorFlow clusters the marked nodes when it runs the graph, as those of
`tf.xla.experimental.jit_scope`.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import tensorflow as tf

from tfamp.core.dtypes import LOW_PRECISION
from tfamp.planning.structures import FLOAT32, node_name, op_types, reach

_MARK = "_XlaCompile"
_FLOATS = {tf.as_dtype(name).as_datatype_enum for name in (*LOW_PRECISION, FLOAT32)}
# What moves values or nothing counts in no group, but may stand between what computes.
_MOVES = op_types("BroadcastTo ExpandDims Reshape Squeeze")
_FUSIBLE = _MOVES | op_types("""
    Abs Add AddN AddV2 BiasAdd Cast Div DivNoNan Erf Erfc Exp Expm1 Log Log1p Max Maximum Mean
    Minimum Mul MulNoNan Neg Pow RealDiv Reciprocal ReciprocalGrad Relu Relu6 Relu6Grad ReluGrad
    Rsqrt RsqrtGrad Select SelectV2 Sigmoid SigmoidGrad Sign Softmax Softplus SoftplusGrad Sqrt
    SqrtGrad Square SquaredDifference Sub Sum Tanh TanhGrad
""")
# TensorFlow compiles every cluster that is asked for, and each is a call.
_LEAST = 4


def mark_fusible(graph_def: Any, least: int = _LEAST) -> int:
    """Marks the fusible nodes of a graph that hang together, in place; returns how many.

    Args:
        graph_def: The graph. Nodes of its functions, as of loops, are left alone.
        least: How many ops that compute a group has at least.
    """
    fusible = {node.name: node for node in graph_def.node if _is_fusible(node)}
    neighbours = defaultdict[str, list[str]](list)
    for node in fusible.values():
        for name in map(node_name, node.input):
            if name in fusible:
                neighbours[node.name].append(name)
                neighbours[name].append(node.name)
    marked: set[str] = set()
    seen: set[str] = set()
    for name in fusible:
        if name not in seen:
            group = reach([name], neighbours.__getitem__)
            seen.update(group)
            if sum(fusible[each].op not in _MOVES for each in group) >= least:
                marked.update(group)
    for name in marked:
        fusible[name].attr[_MARK].b = True
    return len(marked)


def _is_fusible(node: Any) -> bool:
    """Whether a node is of a fusible op and of floats, of which XLA has every kernel."""
    dtypes = {node.attr[name].type for name in ("T", "SrcT", "DstT") if name in node.attr}
    return node.op in _FUSIBLE and bool(dtypes) and dtypes <= _FLOATS
