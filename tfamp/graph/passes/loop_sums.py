"""Replaces sums over the iterations of a loop with one op behind the loop.

The gradient of a weight that a loop uses is a sum of products, one an iteration, each with as
many rows as the batch: an iteration reads and writes matrices as large as the weight. One
product of the rows of all iterations is equal, and accumulates in float32 in every dtype; the
loop stores the rows in TensorLists. The same holds for the gradient of a bias.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from tfamp.graph.body import Body
from tfamp.graph.graph import Graph
from tfamp.graph.loops import Loop
from tfamp.graph.nodes import SHAPES, attribute, control_inputs_of
from tfamp.graph.ops import FLOAT32_TYPE
from tfamp.planning.cost import counted_shape
from tfamp.planning.options import RewriteOptions
from tfamp.planning.structures import node_name, reach

_VARIANT = tf.variant.as_datatype_enum
_ADDING = frozenset({"Add", "AddN", "AddV2"})
_PRODUCT, _BIAS = "MatMul", "BiasAddGrad"
# Ops whose result is the list of their first input, or derived from it.
_PASSING = frozenset({"Identity", "TensorListPopBack", "TensorListPushBack"})
_LISTS = {"element_dtype": tf.float32, "shape_type": tf.int32}


@dataclass(frozen=True)
class _Sum:
    """A loop variable that accumulates a sum.

    Attributes:
        variable: Its number.
        term: The node that computes the summand of an iteration; it reduces rows itself.
        total: The node that adds the summand.
        copies: Identities between.
        dims: The dimensions of the term's inputs, -1 for unknown ones.
    """

    variable: int
    term: Any
    total: Any
    copies: Sequence[Any]
    dims: Sequence[Sequence[int]]

    @property
    def pays(self) -> bool:
        """Whether the rows of an iteration take less memory than the sum."""
        if self.term.op != _PRODUCT:
            return False
        known = ([None if dim < 0 else dim for dim in each] for each in self.dims)
        (rows, first), (_, second) = map(counted_shape, known)
        return bool(rows * (first + second) < first * second)


def run(graph: Graph, options: RewriteOptions) -> None:
    """Hoists sums of products of rows out of the loops of gradients, in place.

    Only if nothing else in the loop uses the sum, ranks and widths are known, and the rows of
    an iteration take less memory than the sum. A loop belongs to a gradient if every iteration
    pops from a list that an earlier loop pushed to: the size of that list bounds the number of
    rows, which XLA requires. Loops in functions and fetched ones stay.
    """
    loops = {loop.node.name: loop for loop in graph.own_loops()}
    for loop in loops.values():
        length = _most_rounds(loop, loops) if loop.is_single else None
        sums = list(_sums(loop)) if length else []
        rows = {tensor for each in sums if each.pays for tensor in each.term.input}
        if length and rows:
            # Other sums are hoisted too if they only need rows that are stored anyway.
            sums = [each for each in sums if rows.issuperset(each.term.input)]
            _add_up_behind(loop, sums, length)


# ---- The number of iterations --------------------------------------------------------------------


def _most_rounds(loop: Loop, loops: Mapping[str, Loop]) -> str | None:
    """A bound of the iterations of a gradient's loop: the length of a list that it empties."""
    popped = [node.input[0] for node in loop.body.of_types("TensorListPopBack")]
    lengths = (
        _length(loop.node.input[i], loop.graph, loops)
        for i, (argument, _) in enumerate(loop.variables)
        if popped.count(argument.name) == 1 and _is_one_list(loop, i)
    )
    return next(filter(None, lengths), None)


def _length(tensor: str, graph: Body, loops: Mapping[str, Loop]) -> str | None:
    """The maximal length of a list that a loop has pushed its elements to."""
    loop, place = loops.get(node_name(tensor)), graph.port(tensor)
    if loop is None or not 0 <= place < len(loop.variables):
        return None
    start = graph.by_name.get(loop.node.input[place])
    if start is None or start.op != "EmptyTensorList" or len(start.input) < 2:
        return None
    return str(start.input[1]) if _is_one_list(loop, place) else None


def _is_one_list(loop: Loop, variable: int) -> bool:
    """Whether a variable is a single list that is only pushed to and popped from."""
    argument, result = loop.variables[variable]

    def made_of(tensor: str) -> Sequence[str]:
        node = loop.body.by_name.get(node_name(tensor))
        return node.input[:1] if node is not None and node.op in _PASSING else ()

    *_, start = reach([loop.body.returned[result.name]], made_of)
    return bool(start == argument.name)


# ---- Sums in a loop ------------------------------------------------------------------------------


def _sums(loop: Loop) -> Iterator[_Sum]:
    body = loop.body
    for i, (argument, result) in enumerate(loop.variables[: loop.new_place]):
        is_free = body.uses(argument.name) == 1 and not loop.is_tested(i)
        if argument.type != FLOAT32_TYPE or not is_free:
            continue
        end, copies = _past_copies(body, body.returned[result.name])
        total = body.by_name.get(node_name(end))
        if total is None or total.op not in _ADDING or not _is_free(body, total, 2):
            continue
        found = [_past_copies(body, name) for name in total.input]
        others = [name for name, _ in found if name != argument.name]
        term = body.by_name.get(node_name(others[0])) if len(others) == 1 else None
        dims = [] if term is None else _row_dims(body, term)
        if dims:
            copies += [node for _, passed in found for node in passed]
            yield _Sum(i, term, total, copies, dims)


def _past_copies(body: Body, tensor: str) -> tuple[str, list[Any]]:
    """The origin of a tensor past Identities with no other consumers, and these Identities."""
    copies = []
    while (node := body.by_name.get(node_name(tensor))) is not None and node.op == "Identity":
        if not _is_free(body, node, 1) or node in copies:
            break
        copies.append(node)
        tensor = node.input[0]
    return tensor, copies


def _is_free(body: Body, node: Any, inputs: int) -> bool:
    """Whether a node has one consumer, so many inputs, and no control inputs."""
    return body.uses(node.name) == 1 and len(node.input) == inputs and not control_inputs_of(node)


def _row_dims(body: Body, term: Any) -> list[list[int]]:
    """The dimensions of a node's inputs, if it reduces rows and they are known; else []."""
    is_product = term.op == _PRODUCT
    transposed = attribute(term, "transpose_a").b and not attribute(term, "transpose_b").b
    adds_rows = transposed if is_product else term.op == _BIAS
    if not adds_rows or not _is_free(body, term, 1 + is_product):
        return []
    if attribute(term, "T").type != FLOAT32_TYPE:
        return []
    dims = list(map(body.dims, term.input))
    return dims if all(len(each) == 2 and each[1] >= 1 for each in dims) else []


# ---- One op behind the loop ----------------------------------------------------------------------


def _add_up_behind(loop: Loop, sums: Sequence[_Sum], length: str) -> None:
    """Moves sums behind a loop, which stores their rows; the variables become invariant."""
    graph, node, body = loop.graph, loop.node, loop.body
    rows: dict[str, str] = {}
    for each in sums:
        for tensor, dims in zip(each.term.input, each.dims, strict=True):
            if tensor not in rows:
                rows[tensor] = _keep_rows(loop, tensor, dims, length)
        term = _copy(loop, each.term, [rows[tensor] for tensor in each.term.input])
        total = _copy(loop, each.total, [node.input[each.variable], term])
        outputs = {graph.tensor(node, each.variable), f"{node.name}:{each.variable}"}
        graph.rewire(dict.fromkeys(outputs, total))
        argument, result = loop.variables[each.variable]
        body.returned[result.name] = argument.name
    body.drop({n.name for each in sums for n in (each.term, each.total, *each.copies)})


def _keep_rows(loop: Loop, tensor: str, dims: Sequence[int], length: str) -> str:
    """Stores a tensor of each iteration in a list; returns the concatenation of all."""
    graph, body, device = loop.graph, loop.body, loop.node.device
    own = f"{node_name(tensor)}/rows"
    wanted = f"{loop.node.name}/{own}"
    shape = graph.constant(f"{wanted}/shape", dims, device)
    start = graph.add(f"{wanted}/list", "EmptyTensorList", [shape, length], (), device, **_LISTS)
    place = loop.new_place
    name = loop.add_variable(start, _VARIANT, own)
    body.returned[name] = body.add(
        f"{own}/push", "TensorListPushBack", [name, tensor], (), element_dtype=tf.float32
    )
    lengths = graph.constant(f"{wanted}/lengths", [], device, tf.int64)
    inputs = [graph.tensor(loop.node, place), shape, lengths]
    rows = graph.add(wanted, "TensorListConcatV2", inputs, (-1, dims[1]), device, **_LISTS)
    graph.by_name[rows].attr[SHAPES].list.shape.add().dim.add().size = -1  # Of the lengths.
    return rows


def _copy(loop: Loop, node: Any, inputs: Sequence[str]) -> str:
    """Copies a node of the body behind the loop."""
    # Without colocation constraints with nodes of the body.
    attrs = {name: value for name, value in node.attr.items() if name != "_class"}
    name, device = f"{loop.node.name}/{node.name}", node.device or loop.node.device
    return loop.graph.add(name, node.op, inputs, device=device, **attrs)
