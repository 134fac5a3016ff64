"""Einsums of attention become batches of products.

The kernel of Einsum moves the dimensions of its operands and of its result itself. On CPUs it
takes 1.1 to 1.7 times as long as Transposes around BatchMatMulV2 where it moves the result's.
Where it moves only the operands' it takes as long, or less; then a product pays only if others
have its operands transposed already.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from tfamp.graph.editor import (
    FLOAT_TYPES,
    add_constant,
    attributes_of,
    become,
    control_inputs_of,
    dims_of,
    first_output,
    set_shape,
)
from tfamp.graph.functions import bodies, respell
from tfamp.interop.tf_private import device_kind_of
from tfamp.planning.cost import counted_shape
from tfamp.planning.options import GraphUse, RewriteOptions
from tfamp.planning.structures import MAIN_GRAPH, free_name, node_name

_EINSUM, _PRODUCT = "Einsum", "BatchMatMulV2"


# Of the result. With fewer, starting three more ops takes what they gain.
_LEAST_ELEMENTS = 1 << 16


@dataclass(frozen=True)
class _Batches:
    """An Einsum as a batch of products of two matrices, in its labels.

    Attributes:
        exchanged: Whether its second operand is multiplied from the left.
        operands: What is multiplied, as it is given.
        transposed: The same as it is multiplied: batch, then rows and columns or these exchanged.
        adjoint: Which of both have rows and columns exchanged.
        product: What that gives.
        result: What the Einsum gives.
    """

    exchanged: bool
    operands: tuple[str, str]
    transposed: tuple[str, str]
    adjoint: tuple[bool, bool]
    product: str
    result: str


@dataclass(frozen=True)
class _AttentionProduct:
    """An Einsum of a graph, how it is multiplied, and how large each label is, -1 if not known."""

    node: Any
    batches: _Batches
    sizes: Mapping[str, int]

    @property
    def operands(self) -> Iterator[tuple[str, str, str]]:
        """The tensors that are multiplied, with their labels and those that they need."""
        tensors = self.node.input[:2][:: -1 if self.batches.exchanged else 1]
        return zip(tensors, self.batches.operands, self.batches.transposed, strict=True)

    @property
    def moved(self) -> set[tuple[str, str, tuple[int, ...]]]:
        """What is to be transposed: device, tensor and order."""
        return {
            (self.node.device, tensor, _order(given, needed))
            for tensor, given, needed in self.operands
            if given != needed
        }

    @property
    def moves_result(self) -> bool:
        """Whether the result is to be transposed."""
        return self.batches.product != self.batches.result

    def shape(self, labels: str) -> list[int | None]:
        return [None if self.sizes[label] < 0 else self.sizes[label] for label in labels]


def as_batches(graph_def: Any, options: RewriteOptions, use: GraphUse) -> None:
    """Makes Einsums on CPUs a BatchMatMulV2 each, between Transposes, where that pays, in place.

    Where the graph tells the shapes of both operands, and no tensor ("x:0") or node ("x") is to
    keep.
    """
    kept = set(map(node_name, use.names))
    for scope, nodes, function in bodies(graph_def):
        einsums = [node for node in nodes if _is_einsum(node, options.device)]
        if not einsums:
            continue
        attrs = attributes_of(nodes, function)
        found = [_attention_product(node, attrs) for node in einsums]
        known = [each for each in found if each is not None]
        paying = _paying([p for p in known if function is not None or p.node.name not in kept])
        moved: dict[tuple[str, str, tuple[int, ...]], str] = {}
        for each in paying:
            _multiply(nodes, each, moved, attrs, scope == MAIN_GRAPH)
        _move_results(nodes, [each for each in paying if each.moves_result], attrs, function)


def _is_einsum(node: Any, device: str) -> bool:
    """Whether a node is an Einsum of two floats that runs on the CPU."""
    if node.op != _EINSUM or "equation" not in node.attr or "T" not in node.attr:
        return False
    data = len(node.input) - len(control_inputs_of(node))
    place = device_kind_of(node.device) or device
    return bool(data == 2 and place == "cpu" and node.attr["T"].type in FLOAT_TYPES)


def _attention_product(node: Any, attrs: Mapping[str, Any]) -> _AttentionProduct | None:
    """How an Einsum is multiplied; None for one that is no batch of products of two matrices."""
    batches = _batches(node.attr["equation"].s.decode(errors="backslashreplace"))
    if batches is None:
        return None
    sizes: dict[str, int] = {}
    given = batches.operands[:: -1 if batches.exchanged else 1]
    for tensor, labels in zip(node.input[:2], given, strict=True):
        dims = dims_of(tensor, attrs)
        if len(dims) != len(labels):
            return None
        sizes |= {a: dim for a, dim in zip(labels, dims, strict=True) if dim >= sizes.get(a, -1)}
    return _AttentionProduct(node, batches, sizes)


def _batches(equation: str) -> _Batches | None:
    """An Einsum as products of matrices: of rows, columns and what is summed there is one each."""
    given, _, result = equation.replace(" ", "").partition("->")
    operands = given.split(",")
    # No ellipsis, no diagonal, and no result without an arrow.
    plain = all(each.isalpha() and len(set(each)) == len(each) for each in (*operands, result))
    if len(operands) != 2 or not plain:
        return None
    left, right = map(set, operands)
    batch = left & right & set(result)
    summed, rows, columns = (left & right) - batch, left - right, right - left
    if not batch or {len(summed), len(rows), len(columns)} != {1}:
        return None
    if set(result) != batch | rows | columns:
        return None
    (row,), (column,), (inner,) = rows, columns, summed
    exchanged = result.index(column) < result.index(row)
    x, y = operands[::-1] if exchanged else operands
    count = len(batch)
    first = next((e[:count] for e in (result, x, y) if set(e[:count]) == batch), None)
    front = first or "".join(label for label in result if label in batch)
    ends = ["".join(label for label in each if label not in batch) for each in (x, y)]
    adjoint = (ends[0][0] == inner, ends[1][1] == inner)
    product = front + "".join(label for label in ends[0] + ends[1] if label != inner)
    return _Batches(exchanged, (x, y), (front + ends[0], front + ends[1]), adjoint, product, result)


def _paying(products: Sequence[_AttentionProduct]) -> list[_AttentionProduct]:
    """Those of which results are moved, and those whose operands are transposed for these."""
    moving = [each for each in products if each.moves_result and _is_large(each)]
    moved = {key for each in moving for key in each.moved}
    also = [p for p in products if not p.moves_result and p.moved and p.moved <= moved]
    return moving + also


def _is_large(product: _AttentionProduct) -> bool:
    dims = counted_shape(product.shape(product.batches.result))
    return math.prod(dims) >= _LEAST_ELEMENTS


def _multiply(
    nodes: Any,
    product: _AttentionProduct,
    moved: dict[tuple[str, str, tuple[int, ...]], str],
    attrs: dict[str, Any],
    main: bool,
) -> None:
    """Makes an Einsum a BatchMatMulV2 of transposed operands, each of them transposed once."""
    node, batches = product.node, product.batches
    tensors = []
    for end, (tensor, given, needed) in zip("xy", tuple(product.operands), strict=True):
        key = (node.device, tensor, _order(given, needed))
        if given != needed and key not in moved:
            name = free_name(f"{node.name}/{end}_transposed", attrs)
            made = _add_transpose(nodes, name, key, node.attr["T"].type, attrs, main)
            set_shape(made, product.shape(needed))
            moved[key] = name if main else f"{name}:y:0"
        tensors.append(tensor if given == needed else moved[key])
    dtype = node.attr["T"].type
    become(node, _PRODUCT)
    node.attr["T"].type = dtype
    node.attr["adj_x"].b, node.attr["adj_y"].b = batches.adjoint
    node.input[:] = [*tensors, *control_inputs_of(node)]
    set_shape(node, product.shape(batches.product))


def _move_results(
    nodes: Any, products: Sequence[_AttentionProduct], attrs: dict[str, Any], function: Any
) -> None:
    """Transposes what products give, and gives that to all who take it."""
    inside = function is not None
    names = {p.node.name: free_name(f"{p.node.name}/transposed", attrs) for p in products}
    spelled = {
        first_output(name, inside): first_output(made, inside, "y") for name, made in names.items()
    }
    if not inside:
        spelled |= {f"{name}:0": made for name, made in names.items()}
        for node in nodes if spelled else ():
            node.input[:] = [spelled.get(name, name) for name in node.input]
    else:
        respell(function, spelled)
    for each in products:
        node, batches = each.node, each.batches
        order = _order(batches.product, batches.result)
        key = (node.device, first_output(node.name, inside), order)
        dtype = node.attr["T"].type
        made = _add_transpose(nodes, names[node.name], key, dtype, attrs, function is None)
        set_shape(made, each.shape(batches.result))


def _add_transpose(
    nodes: Any,
    name: str,
    key: tuple[str, str, tuple[int, ...]],
    dtype: int,
    attrs: dict[str, Any],
    main: bool,
) -> Any:
    """Adds a Transpose of a device, a tensor and an order."""
    device, tensor, order = key
    constant = add_constant(nodes, free_name(f"{name}/perm", attrs), order, device)
    perm = first_output(constant.name, not main)
    made = nodes.add(name=name, op="Transpose", input=[tensor, perm], device=device)
    made.attr["T"].type = dtype
    made.attr["Tperm"].type = tf.int32.as_datatype_enum
    attrs |= {constant.name: constant.attr, name: made.attr}
    return made


def _order(labels: str, wanted: str) -> tuple[int, ...]:
    return tuple(map(labels.index, wanted))
