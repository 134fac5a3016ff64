"""Replaces Einsums of attention with batched matrix products.

Einsum's kernel transposes its operands and its result itself. On CPUs it takes 1.1 to 1.7 times as
long as Transposes around BatchMatMulV2 if it transposes the result. If it transposes only operands
it is as fast, or faster; then a product pays only where others share its transposed operands.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import tensorflow as tf

from tfamp.graph.editor import FLOAT_TYPES, GraphEditor, attribute, tensor_inputs
from tfamp.interop.tf_private import device_kind_of
from tfamp.planning.cost import counted_shape
from tfamp.planning.options import RewriteOptions
from tfamp.planning.structures import node_name

# Of the result. With fewer, the overhead of three more ops exceeds their gain.
_LEAST_ELEMENTS = 1 << 16
# A tensor to transpose: device, tensor, labels as given and as needed.
_Moved: TypeAlias = tuple[str, str, str, str]


class _Product(NamedTuple):
    """An Einsum as a batched matrix product, in its labels.

    Attributes:
        node: The Einsum.
        operands: The factors, with their labels and the order needed: the batch, then rows and
            columns or the reverse.
        adjoint: Which of both are transposed matrices.
        made: Labels of the product.
        result: Labels of the Einsum's result.
        sizes: How large each label is, -1 if not known.
    """

    node: Any
    operands: tuple[_Moved, _Moved]
    adjoint: tuple[bool, bool]
    made: str
    result: str
    sizes: Mapping[str, int]

    @property
    def transposes(self) -> set[_Moved]:
        return {each for each in self.operands if each[2] != each[3]}

    def dims(self, labels: str) -> list[int]:
        return [self.sizes[label] for label in labels]


def run(graph: GraphEditor, options: RewriteOptions) -> None:
    """Replaces Einsums on CPUs with BatchMatMulV2 between Transposes, where that pays, in place.

    Needs the shapes of both operands; fetched Einsums stay.
    """
    for body in graph.bodies:
        found = [_product(body, node) for node in body.of_types("Einsum")]
        products = _paying([each for each in found if each is not None])
        transposed: dict[_Moved, str] = {}
        for each in products:
            _multiply(body, each, transposed)
        for each in products:
            if each.made != each.result:
                _move_result(body, each)


def _product(body: GraphEditor, node: Any) -> _Product | None:
    """Returns an Einsum as a product; None if it is not a batched product of two matrices."""
    text = attribute(node, "equation").s.decode(errors="backslashreplace").replace(" ", "")
    given, _, result = text.partition("->")
    labels, tensors = given.split(","), tensor_inputs(node)
    # No ellipsis, no diagonal, and no result without an arrow.
    plain = all(each.isalpha() and len(set(each)) == len(each) for each in (*labels, result))
    on_cpu = (device_kind_of(node.device) or "cpu") == "cpu"
    is_float = attribute(node, "T").type in FLOAT_TYPES
    fetched = not body.is_function and node.name in body.kept
    if fetched or not (plain and on_cpu and is_float and len(labels) == len(tensors) == 2):
        return None
    dims = list(map(body.dims, tensors))
    sizes: dict[str, int] = {}
    for own, known in zip(dims, labels, strict=True):
        if len(own) != len(known):
            return None
        sizes |= {a: dim for a, dim in zip(known, own, strict=True) if dim >= sizes.get(a, -1)}
    left, right = map(set, labels)
    front = "".join(label for label in result if label in left & right)
    summed, rows, columns = (left & right) - set(front), left - right, right - left
    one_each = len(summed) == len(rows) == len(columns) == 1
    if not front or not one_each or set(result) != {*front, *rows, *columns}:
        return None
    operands = list(zip(tensors, labels, strict=True))
    if result.index(*columns) < result.index(*rows):  # The second is multiplied from the left.
        operands.reverse()
    ends = ["".join(label for label in own if label not in front) for _, own in operands]
    moved = [
        (str(node.device), tensor, own, front + end)
        for (tensor, own), end in zip(operands, ends, strict=True)
    ]
    adjoint = (ends[0][0] in summed, ends[1][1] in summed)
    made = front + "".join(label for label in ends[0] + ends[1] if label not in summed)
    return _Product(node, (moved[0], moved[1]), adjoint, made, result, sizes)


def _paying(products: Sequence[_Product]) -> list[_Product]:
    """Products with transposed results, and others that share their transposed operands."""
    moving = [each for each in products if each.made != each.result and _is_large(each)]
    moved = {key for each in moving for key in each.transposes}
    still = (each for each in products if each.made == each.result)
    return moving + [each for each in still if each.transposes and each.transposes <= moved]


def _is_large(product: _Product) -> bool:
    dims = [None if size < 0 else size for size in product.dims(product.result)]
    return math.prod(counted_shape(dims)) >= _LEAST_ELEMENTS


def _multiply(body: GraphEditor, product: _Product, transposed: dict[_Moved, str]) -> None:
    """Replaces an Einsum with a BatchMatMulV2; all products share one Transpose an operand."""
    node, tensors = product.node, []
    for end, key in zip("xy", product.operands, strict=True):
        _, tensor, given, needed = key
        if given != needed and key not in transposed:
            wanted = f"{node.name}/{end}_transposed"
            dims = product.dims(needed)
            transposed[key] = _transpose(body, node, wanted, tensor, (given, needed), dims)
        tensors.append(transposed.get(key, tensor))
    adjoint, dtype = product.adjoint, tf.as_dtype(node.attr["T"].type)
    attrs = {"T": dtype, "adj_x": adjoint[0], "adj_y": adjoint[1]}
    body.become(node, "BatchMatMulV2", tensors, product.dims(product.made), **attrs)


def _move_result(body: GraphEditor, product: _Product) -> None:
    """Transposes the result of a product once for all its consumers."""
    node, order = product.node, (product.made, product.result)
    tensor, dims = body.tensor(node), product.dims(product.result)
    made = _transpose(body, node, f"{node.name}/transposed", tensor, order, dims)
    itself = body.by_name[node_name(made)]
    inputs = list(itself.input)
    body.rewire({tensor: made} | ({f"{node.name}:0": made} if not body.is_function else {}))
    body.set_inputs(itself, inputs)


def _transpose(
    body: GraphEditor, node: Any, name: str, tensor: str, labels: tuple[str, str], dims: list[int]
) -> str:
    order = [labels[0].index(label) for label in labels[1]]
    inputs = [tensor, body.constant(f"{name}/perm", order, node.device)]
    types = {"T": tf.as_dtype(node.attr["T"].type), "Tperm": tf.int32}
    return body.add(name, "Transpose", inputs, dims, node.device, **types)
