"""Which matmuls and convolutions have sizes that Tensor Cores do not like; framework-free.

Tensor Cores multiply tiles, and load 16 bytes at a time: sizes that are multiples of 8 elements of
16 bits keep both full. CPUs pad inside their kernels and lose less. NVIDIA's rule and its
measurements: https://docs.nvidia.com/deeplearning/performance/dl-performance-matrix-multiplication/
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from tfamp.planning.cost import FLOP_RULES
from tfamp.planning.structures import GraphIndex

MULTIPLE = 8

_Shape: TypeAlias = tuple[int | None, ...]
_Sizes: TypeAlias = dict[str, int | None]

_MATMULS = frozenset({"BatchMatMul", "BatchMatMulV2", "BatchMatMulV3", "MatMul", "_FusedMatMul"})
_CALLS = ("PartitionedCall", "StatefulPartitionedCall")
_CONVOLUTIONS = frozenset({"Conv2D", "Conv3D", "_FusedConv2D"})


@dataclass(frozen=True, slots=True)
class Misfit:
    """A matmul or convolution with sizes that are no multiples of 8.

    Attributes:
        node: The node's name.
        layer: The name scope it is in: its layer's path.
        op: Op type.
        sizes: What it multiplies. A matmul: "rows", "inner", "columns"; a convolution: "input
            channels", "output channels". None for a size the graph does not tell, as the batch's.
        padded: For each size that misses, the next multiple of 8.
        share: Share of the model's estimated float32 time that the node takes.
    """

    node: str
    layer: str
    op: str
    sizes: Mapping[str, int | None]
    padded: Mapping[str, int]
    share: float = 0.0


def find_misfits(index: GraphIndex) -> list[Misfit]:
    """Returns the matmuls and convolutions with sizes that are no multiples of 8, in graph order.

    Sizes that the graph does not tell are passed over, and so is size 1: a vector is no tile. Of
    the backward pass, which has the sizes of the forward pass, only what has other sizes is there.

    Args:
        index: A graph or a function of one.
    """
    inputs = _inputs(index)
    found: list[Misfit] = []
    seen: set[tuple[int | None, ...]] = set()
    for position, node in enumerate(index.nodes):
        if node.op not in FLOP_RULES:
            continue
        sizes = _sizes(node.op, inputs[position], index.shapes.get((position, 0)), node.equation)
        padded = {
            what: MULTIPLE * math.ceil(size / MULTIPLE)
            for what, size in sizes.items()
            if size is not None and size > 1 and size % MULTIPLE
        }
        known = tuple(sorted((size or 0) for size in sizes.values()))
        backward = "gradient_tape/" in node.name
        if padded and not (backward and known in seen):
            found.append(Misfit(node.name, _layer(node.name), node.op, sizes, padded))
        seen.add(known)
    return found


def _inputs(index: GraphIndex) -> list[dict[int, _Shape]]:
    inputs: list[dict[int, _Shape]] = [{} for _ in index.nodes]
    for edge in index.edges:
        shape = index.shapes.get((index.slots[edge.source].node, edge.port))
        if shape is not None:
            inputs[index.slots[edge.target].node][edge.input] = shape
    return inputs


def _sizes(
    op: str, inputs: Mapping[int, _Shape], output: _Shape | None, equation: str
) -> Mapping[str, int | None]:
    if op in _CONVOLUTIONS and 1 in inputs:
        return {"input channels": inputs[1][-2], "output channels": inputs[1][-1]}
    if len(inputs) < 2:
        return {}
    if op in _MATMULS and output is not None:
        return _matmul(inputs[0], inputs[1], output)
    if op == "Einsum" and len(inputs) == 2:
        return _einsum((inputs[0], inputs[1]), equation)
    return {}


def _matmul(left: _Shape, right: _Shape, output: _Shape) -> _Sizes:
    """Of matrices that may be transposed: what is not in the output is inner."""
    rows, columns = output[-2], output[-1]
    inner = _other(left[-2:], rows)
    return {
        "rows": rows,
        "inner": _other(right[-2:], columns) if inner is None else inner,
        "columns": columns,
    }


def _other(pair: _Shape, one: int | None) -> int | None:
    first, second = pair
    if one is None:
        # The unknown size is the rows'; if one of the pair is known it is the inner one.
        known = [size for size in pair if size is not None]
        return known[0] if len(known) == 1 else None
    return second if first == one else first


def _einsum(shapes: Sequence[_Shape], equation: str) -> _Sizes:
    operands, _, result = equation.replace(" ", "").partition("->")
    labels = operands.split(",")
    if "." in equation or any(len(a) != len(b) for a, b in zip(labels, shapes, strict=True)):
        return {}
    pairs = zip(labels, shapes, strict=True)
    left, right = (dict(zip(names, shape, strict=True)) for names, shape in pairs)
    return {
        "rows": _product(left, set(left) - set(right), result),
        "inner": _product(left, set(left) & set(right) - set(result), None),
        "columns": _product(right, set(right) - set(left), result),
    }


def _product(
    sizes: Mapping[str, int | None], names: Collection[str], kept: str | None
) -> int | None:
    result = 1
    for name in names:
        if kept is not None and name not in kept:
            continue
        size = sizes[name]
        if size is None:
            return None
        result *= size
    return result


def _layer(node: str) -> str:
    # What a function holds is named after the call once it is in its place.
    parts = [part for part in node.split("/") if not part.startswith(_CALLS)]
    return "/".join(parts[:-1]) or node
