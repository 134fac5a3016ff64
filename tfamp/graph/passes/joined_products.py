"""Products that are added up become one.

For [b, n, d] x [d, k] TensorFlow multiplies b times [d, n] x [n, k] and then adds up the b
products, as in every projection of Keras's attention. One product of [b * n, d] and [b * n, k] is
the same; it adds up in float32 in every dtype, and b - 1 matrices less are written and read.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from tfamp.graph.editor import (
    FLOAT_TYPES,
    add_constant,
    attributes_of,
    become,
    become_identity,
    control_inputs_of,
    dims_of,
    first_output,
    set_shape,
    tensor_inputs,
)
from tfamp.graph.functions import bodies
from tfamp.planning.options import GraphUse, RewriteOptions
from tfamp.planning.structures import MAIN_GRAPH, free_name, node_name

_BATCHED, _GRADIENT_AXES = "BatchMatMulV2", "BroadcastGradientArgs"


def join_products(graph_def: Any, options: RewriteOptions, use: GraphUse) -> None:
    """Makes each batch of products that is summed over its batch only one product, in place.

    Where ranks, widths and axes are known, and nothing else uses the batch of products, of which no
    tensor ("x:0") or node ("x") is to keep. The Sums become Identities.
    """
    for scope, nodes, function in bodies(graph_def):
        batched = {node.name: node for node in nodes if _is_batch_of_gradients(node)}
        if not batched:
            continue
        uses = Counter(node_name(name) for node in nodes for name in node.input)
        uses.update(map(node_name, function.ret.values() if function else use.names))
        attrs = attributes_of(nodes, function)
        made = {node.name: node for node in nodes}
        for total in [node for node in nodes if node.op == "Sum" and len(node.input) > 1]:
            product = batched.get(node_name(total.input[0]))
            if product is not None and uses[product.name] == 1:
                widths = _joined_widths(product, total, attrs, made)
                if widths:
                    _join(nodes, product, total, widths, attrs, scope == MAIN_GRAPH)


def _join(
    nodes: Any, product: Any, total: Any, widths: list[int], attrs: dict[str, Any], main: bool
) -> None:
    dtype = product.attr["T"].type
    for i, width in enumerate(widths):
        product.input[i] = _as_rows(nodes, product, i, width, attrs, main)
    grads = {
        f"grad_{'ab'[i]}": product.attr[name].b
        for i, name in enumerate(("grad_x", "grad_y"))
        if name in product.attr
    }
    become(product, "MatMul")
    product.attr["T"].type = dtype
    for name, value in {"transpose_a": True, "transpose_b": False, **grads}.items():
        product.attr[name].b = value
    set_shape(product, widths)
    total.input[:] = [f"{product.name}{'' if main else ':product:0'}", *control_inputs_of(total)]
    become_identity(total, dtype)


def _is_batch_of_gradients(node: Any) -> bool:
    """Whether a node multiplies transposed matrices, as gradients by weights do."""
    data = len(tensor_inputs(node))
    transposed = "adj_x" in node.attr and node.attr["adj_x"].b
    plain = transposed and not ("adj_y" in node.attr and node.attr["adj_y"].b)
    known = "T" in node.attr and node.attr["T"].type in FLOAT_TYPES
    return bool(node.op == _BATCHED and plain and known and data == 2)


def _joined_widths(
    product: Any, total: Any, attrs: Mapping[str, Any], made: Mapping[str, Any]
) -> list[int]:
    """The widths of the matrices, if a sum over all of their batch, and no more, follows; or []."""
    left, right = (dims_of(name, attrs) for name in product.input[:2])
    axes = made.get(node_name(total.input[1]))
    if axes is None or not len(left) == len(right) > 2 or min(left[-1], right[-1]) < 1:
        return []
    if "keep_dims" in total.attr and total.attr["keep_dims"].b:
        return []
    batches = list(zip(left[:-2], right[:-2], strict=True))
    if axes.op == "Const":
        same = all(a == b >= 0 for a, b in batches)
        summed = sorted(int(axis) % len(left) for axis in _value(axes).flat)
        fit = same and summed == [*range(len(batches))]
    else:
        fit = _are_batch_axes(axes, total.input[1], len(batches), attrs)
        fit = fit and not any(a != b and min(a, b) >= 0 for a, b in batches)
    return [left[-1], right[-1]] if fit else []


def _value(constant: Any) -> Any:
    return tf.make_ndarray(constant.attr["value"].tensor)


def _are_batch_axes(axes: Any, tensor: str, count: int, attrs: Mapping[str, Any]) -> bool:
    """Whether axes are the first ones, where a batch meets a weight that has none.

    The weight's batch is a shape of no numbers. Only the gradient of a product sums products by
    such axes, and there both operands have one batch, known or not.
    """
    if axes.op != _GRADIENT_AXES or len(axes.input) < 2:
        return False
    second = tensor.endswith((":1", ":r1:0"))
    batch, weight = (dims_of(name, attrs) for name in axes.input[:2][:: 1 if second else -1])
    return weight == [0] and batch == [count]


def _as_rows(
    nodes: Any, product: Any, i: int, width: int, attrs: dict[str, Any], main: bool
) -> str:
    """Adds nodes that put the rows of a batch of matrices below each other; returns the tensor."""
    shape_name, name = (
        free_name(f"{product.name}/{'xy'[i]}{what}", attrs) for what in ("_shape", "_rows")
    )
    shape = add_constant(nodes, shape_name, [-1, width], product.device)
    rows = nodes.add(name=name, op="Reshape", device=product.device)
    rows.input[:] = [product.input[i], first_output(shape_name, not main)]
    rows.attr["T"].type = product.attr["T"].type
    rows.attr["Tshape"].type = tf.int32.as_datatype_enum
    above = dims_of(product.input[i], attrs)[:-1]
    set_shape(rows, [None if -1 in above else math.prod(above), width])
    attrs |= {shape_name: shape.attr, name: rows.attr}
    return first_output(name, not main)
