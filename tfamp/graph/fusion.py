"""Elementwise arithmetic between products and convolutions, marked for XLA to fuse.

TensorFlow's kernels take a pass over memory for each op; XLA makes one of many. Products and
convolutions are not marked: on CPUs oneDNN's kernels for low precision are faster than XLA's.
TensorFlow clusters the marked nodes when it runs the graph, as those of
`tf.xla.experimental.jit_scope`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence, Set
from typing import Any

import tensorflow as tf

from tfamp.core.dtypes import LOW_PRECISION
from tfamp.planning.structures import FLOAT32, node_name, op_types, reach

_MARK = "_XlaCompile"
_FLOATS = {tf.as_dtype(name).as_datatype_enum for name in (*LOW_PRECISION, FLOAT32)}
# What computes with floats, as many passes over memory as there are ops.
_COMPUTES = op_types("""
    Abs Add AddN AddV2 BiasAdd BiasAddGrad Cast Div DivNoNan Elu EluGrad Equal Erf Erfc Exp Expm1
    Greater GreaterEqual IsFinite LeakyRelu LeakyReluGrad Less LessEqual Log Log1p Max Maximum Mean
    Min Minimum Mul MulNoNan Neg NotEqual Pow RealDiv Reciprocal ReciprocalGrad Relu Relu6 Relu6Grad
    ReluGrad Rsqrt RsqrtGrad Select SelectV2 Selu SeluGrad Sigmoid SigmoidGrad Sign Softplus
    SoftplusGrad SparseSoftmaxCrossEntropyWithLogits Sqrt SqrtGrad Square SquaredDifference Sub Sum
    Tanh TanhGrad
""")
# What moves values, or says of which shape they are, counts in no group, but may stand between
# what computes: gradients of broadcasts are Sums over axes that are found from shapes.
_MOVES = op_types("""
    All Any BroadcastGradientArgs BroadcastTo ExpandDims LogicalAnd LogicalNot LogicalOr OnesLike
    Pack Reshape Squeeze Tile Transpose ZerosLike
""")
# TensorFlow compiles every cluster that is asked for, and each is a call.
_LEAST = 4


def mark_fusible(graph_def: Any, least: int = _LEAST) -> int:
    """Marks the fusible nodes of a graph that hang together, in place; returns how many.

    Their constants too, which are not counted.

    Args:
        graph_def: The graph. Nodes of its functions, as of loops, are left alone.
        least: How many ops that compute a group has at least.
    """
    fusible = {node.name: node for node in graph_def.node if _is_fusible(node)}
    neighbours = _neighbours(fusible)
    marked: set[str] = set()
    seen: set[str] = set()
    for name in fusible:
        if name not in seen:
            group = reach([name], neighbours.__getitem__)
            seen.update(group)
            if sum(fusible[each].op in _COMPUTES for each in group) >= least:
                marked.update(group)
    for name in marked:
        fusible[name].attr[_MARK].b = True
    _mark_constants(graph_def, marked)
    return len(marked)


def _neighbours(nodes: Mapping[str, Any]) -> Mapping[str, Sequence[str]]:
    """The nodes that each of them takes from or gives to."""
    found = defaultdict[str, list[str]](list)
    for node in nodes.values():
        for name in map(node_name, node.input):
            if name in nodes:
                found[node.name].append(name)
                found[name].append(node.name)
    return found


def _mark_constants(graph_def: Any, marked: Set[str]) -> None:
    """Marks the constants that marked nodes alone use: XLA computes with their values."""
    users = defaultdict[str, set[str]](set)
    for node in graph_def.node:
        for name in map(node_name, node.input):
            users[name].add(node.name)
    for node in graph_def.node:
        if node.op == "Const" and users[node.name] and users[node.name] <= marked:
            node.attr[_MARK].b = True


def _is_fusible(node: Any) -> bool:
    """Whether a node moves values, or computes with floats, of which XLA has every kernel."""
    if node.op in _MOVES:
        return True
    dtypes = {node.attr[name].type for name in ("T", "SrcT", "DstT") if name in node.attr}
    return node.op in _COMPUTES and bool(dtypes) and dtypes <= _FLOATS
