"""Replaces sums over the iterations of a loop with one op behind the loop.

The gradient of a weight that a loop uses is a sum of products, one an iteration, each with as
many rows as the batch: an iteration reads and writes matrices as large as the weight. One
product of the rows of all iterations is equal, and accumulates in float32 in every dtype; the
loop stores the rows in TensorLists. The same holds for the gradient of a bias.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import tensorflow as tf

from tfamp.core.kinds import NodeDef
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
    term: NodeDef
    total: NodeDef
    copies: Sequence[NodeDef]
    dims: Sequence[Sequence[int]]

    @property
    def pays(self) -> bool:
        """Whether the rows of an iteration take less memory than the sum."""
        if self.term.op != _PRODUCT:
            return False
        known = ([None if dim < 0 else dim for dim in dims] for dims in self.dims)
        (rows, first), (_, second) = map(counted_shape, known)
        return bool(rows * (first + second) < first * second)


def run(graph: Graph, options: RewriteOptions) -> None:
    """Hoists sums of products of rows out of the loops of gradients, in place.

    Only if nothing else in the loop uses the sum, ranks and widths are known, and the rows of
    an iteration take less memory than the sum. A loop belongs to a gradient if every iteration
    pops from a list that an earlier loop pushed to: the size of that list bounds the number of
    rows, which XLA requires. Loops in functions and fetched ones stay.
    """
    loops = {loop.node.name: loop for loop in graph.changeable_loops()}
    for loop in loops.values():
        length = _most_rounds(loop, loops) if loop.is_single else None
        sums = list(_sums(loop)) if length else []
        rows = {tensor for total in sums if total.pays for tensor in total.term.input}
        if length and rows:
            # Other sums are hoisted too if they only need rows that are stored anyway.
            sums = [total for total in sums if rows.issuperset(total.term.input)]
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
        terms = [_past_copies(body, name) for name in total.input]
        others = [name for name, _ in terms if name != argument.name]
        term = body.by_name.get(node_name(others[0])) if len(others) == 1 else None
        dims = [] if term is None else _row_dims(body, term)
        if dims:
            copies += [node for _, passed in terms for node in passed]
            yield _Sum(i, term, total, copies, dims)


def _past_copies(body: Body, tensor: str) -> tuple[str, list[NodeDef]]:
    """The origin of a tensor past Identities with no other consumers, and these Identities."""
    copies = []
    while (node := body.by_name.get(node_name(tensor))) is not None and node.op == "Identity":
        if not _is_free(body, node, 1) or node in copies:
            break
        copies.append(node)
        tensor = node.input[0]
    return tensor, copies


def _is_free(body: Body, node: NodeDef, inputs: int) -> bool:
    """Whether a node has one consumer, so many inputs, and no control inputs."""
    has_control = bool(control_inputs_of(node))
    return body.uses(node.name) == 1 and len(node.input) == inputs and not has_control


def _row_dims(body: Body, term: NodeDef) -> list[list[int]]:
    """The dimensions of a node's inputs, if it reduces rows and they are known; else []."""
    is_product = term.op == _PRODUCT
    transposed = attribute(term, "transpose_a").b and not attribute(term, "transpose_b").b
    adds_rows = transposed if is_product else term.op == _BIAS
    if not adds_rows or not _is_free(body, term, 1 + is_product):
        return []
    if attribute(term, "T").type != FLOAT32_TYPE:
        return []
    dims = list(map(body.dims, term.input))
    known = all(len(matrix) == 2 and matrix[1] >= 1 for matrix in dims)
    return dims if known else []


# ---- One op behind the loop ----------------------------------------------------------------------


def _add_up_behind(loop: Loop, sums: Sequence[_Sum], length: str) -> None:
    """Moves sums behind a loop, which stores their rows; the variables become invariant."""
    graph, node, body = loop.graph, loop.node, loop.body
    rows: dict[str, str] = {}
    for moved in sums:
        for tensor, dims in zip(moved.term.input, moved.dims, strict=True):
            if tensor not in rows:
                rows[tensor] = _keep_rows(loop, tensor, dims, length)
        term = _copy(loop, moved.term, [rows[tensor] for tensor in moved.term.input])
        total = _copy(loop, moved.total, [node.input[moved.variable], term])
        outputs = {graph.tensor(node, moved.variable), f"{node.name}:{moved.variable}"}
        graph.rewire(dict.fromkeys(outputs, total))
        argument, result = loop.variables[moved.variable]
        body.returned[result.name] = argument.name
    body.drop({n.name for moved in sums for n in (moved.term, moved.total, *moved.copies)})


def _keep_rows(loop: Loop, tensor: str, dims: Sequence[int], length: str) -> str:
    """Stores a tensor of each iteration in a list; returns the concatenation of all."""
    graph, body, device = loop.graph, loop.body, loop.node.device
    inside = f"{node_name(tensor)}/rows"
    wanted = f"{loop.node.name}/{inside}"
    shape = graph.constant(f"{wanted}/shape", dims, device)
    made_of = [shape, length]
    start = graph.add(f"{wanted}/list", "EmptyTensorList", made_of, (), device, **_LISTS)
    place = loop.new_place
    name = loop.add_variable(start, _VARIANT, inside)
    body.returned[name] = body.add(
        f"{inside}/push", "TensorListPushBack", [name, tensor], (), element_dtype=tf.float32
    )
    lengths = graph.constant(f"{wanted}/lengths", [], device, tf.int64)
    inputs = [graph.tensor(loop.node, place), shape, lengths]
    rows = graph.add(wanted, "TensorListConcatV2", inputs, (-1, dims[1]), device, **_LISTS)
    graph.by_name[rows].attr[SHAPES].list.shape.add().dim.add().size = -1  # Of the lengths.
    return rows


def _copy(loop: Loop, node: NodeDef, inputs: Sequence[str]) -> str:
    """Copies a node of the body behind the loop."""
    # Without colocation constraints with nodes of the body.
    attrs = {name: value for name, value in node.attr.items() if name != "_class"}
    name, device = f"{loop.node.name}/{node.name}", node.device or loop.node.device
    return loop.graph.add(name, node.op, inputs, device=device, **attrs)
