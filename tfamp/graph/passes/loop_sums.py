"""What a loop adds up in every round -> one op behind the loop.

The gradient of a weight that a loop uses is a product in every round, of as many rows as the batch
has, and the sum of these products: each round writes and reads matrices as large as the weight. One
product of the rows of all rounds is the same. It adds up in float32 in every dtype, and the loop
keeps the rows, which others have made, in lists. So with the gradient of a bias.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from tfamp.graph.editor import (
    SHAPES,
    add_constant,
    attributes_of,
    control_inputs_of,
    dims_of,
    first_ports,
    registered_signature,
    set_shape,
)
from tfamp.graph.functions import library_of, replace_nodes
from tfamp.graph.loop_edits import add_loop_variable, new_place, own_functions
from tfamp.planning.cost import counted_shape
from tfamp.planning.structures import LOOPS, free_name, node_name

_FLOAT32 = tf.float32.as_datatype_enum
_VARIANT = tf.variant.as_datatype_enum
_ADDING = frozenset({"Add", "AddN", "AddV2"})
_PRODUCT, _BIAS = "MatMul", "BiasAddGrad"
# What hands a list on, by its first input.
_PASSING = frozenset({"Identity", "TensorListPopBack", "TensorListPushBack"})


@dataclass(frozen=True)
class _Sum:
    """A loop variable that only adds up.

    Attributes:
        variable: Its number.
        argument: The body's argument.
        term: The node that makes what is added in a round: it adds up rows itself.
        total: The node that adds it.
        copies: Identities on the way.
        dims: The dimensions of what the term takes, -1 for one that is not known.
    """

    variable: int
    argument: str
    term: Any
    total: Any
    copies: Sequence[Any]
    dims: Sequence[Sequence[int]]

    @property
    def pays(self) -> bool:
        """Whether the rows of a round take less memory than the sum."""
        if self.term.op != _PRODUCT:
            return False
        known = ([None if dim < 0 else dim for dim in each] for each in self.dims)
        (rows, first), (_, second) = map(counted_shape, known)
        return bool(rows * (first + second) < first * second)


def add_up_behind_loops(graph_def: Any, keep: Collection[str] = ()) -> None:
    """Takes sums of products of rows out of the loops of gradients, in place.

    Where nothing else uses the sum in the loop, ranks and widths are known, and the rows of a round
    take less memory than the sum does. A loop counts as one of a gradient if it takes from a list
    in every round what a loop before it kept there: then the rows of all rounds are no more than
    that list may hold, which XLA has to know. Loops in functions stay, and those of which a tensor
    ("x:0") or the node ("x") is to keep.
    """
    kept = set(map(node_name, keep))
    library = library_of(graph_def)
    for body, condition, loops in list(own_functions(graph_def, library)):
        loop = loops[0]
        if len(loops) == 1 and loop.name not in kept and _fits(loop, body, condition):
            length = _most_rounds(graph_def, library, loop, body)
            sums = _paying(list(_sums(loop, body, condition))) if length else []
            if length and sums:
                _Behind(graph_def, loop, body, condition, length).add_up(sums)


def _fits(loop: Any, body: Any, condition: Any) -> bool:
    """Whether a loop takes and returns what its functions do."""
    data = len(loop.input) - len(control_inputs_of(loop))
    signatures = body.signature.input_arg, body.signature.output_arg, condition.signature.input_arg
    types = len(loop.attr["T"].list.type) if "T" in loop.attr else 0
    results = {arg.name for arg in body.signature.output_arg}
    return {data, *map(len, signatures)} == {types} and results == set(body.ret)


def _paying(sums: Sequence[_Sum]) -> list[_Sum]:
    """Products that pay, and other sums of rows that these need too."""
    products = [each for each in sums if each.pays]
    rows = {tensor for each in products for tensor in each.term.input}
    return [each for each in sums if each.pays or rows.issuperset(each.term.input)]


# ---- How often a loop runs -----------------------------------------------------------------------


def _most_rounds(graph: Any, library: Mapping[str, Any], loop: Any, body: Any) -> str | None:
    """A tensor that no loop of a gradient runs more often than: the length of what it takes."""
    nodes = {node.name: node for node in graph.node}
    made = {node.name: node for node in body.node_def}
    for i, (argument, result) in enumerate(_variables(body)):
        popped = [
            node
            for node in body.node_def
            if node.op == "TensorListPopBack" and argument.name in node.input
        ]
        if len(popped) == 1 and _list_behind(body.ret[result.name], made) == argument.name:
            length = _length(loop.input[i], nodes, library)
            if length:
                return length
    return None


def _length(tensor: str, nodes: Mapping[str, Any], library: Mapping[str, Any]) -> str | None:
    """How many elements a list may have that a loop has pushed its elements to."""
    name, _, port = tensor.partition(":")
    loop = nodes.get(name)
    body = library.get(loop.attr["body"].func.name) if loop and loop.op in LOOPS else None
    place = int(port or 0)
    if loop is None or body is None or place >= min(len(loop.input), len(body.ret)):
        return None
    argument, result = list(_variables(body))[place]
    made = {node.name: node for node in body.node_def}
    start = nodes.get(loop.input[place])
    if start is None or start.op != "EmptyTensorList" or len(start.input) < 2:
        return None
    same = _list_behind(body.ret[result.name], made) == argument.name
    return str(start.input[1]) if same else None


def _variables(body: Any) -> Iterator[tuple[Any, Any]]:
    return zip(body.signature.input_arg, body.signature.output_arg, strict=False)


def _list_behind(tensor: str, made: Mapping[str, Any]) -> str:
    """What a handle of a list was before elements were pushed or popped."""
    while (node := made.get(node_name(tensor))) is not None and node.op in _PASSING:
        tensor = node.input[0]
    return tensor


# ---- What a loop only adds up --------------------------------------------------------------------


def _sums(loop: Any, body: Any, condition: Any) -> Iterator[_Sum]:
    made = {node.name: node for node in body.node_def}
    attrs = attributes_of(body.node_def, body)
    uses = Counter(node_name(name) for node in body.node_def for name in node.input)
    uses.update(map(node_name, itertools.chain(body.ret.values(), body.control_ret.values())))
    tested = itertools.chain(condition.ret.values(), *(node.input for node in condition.node_def))
    tested_names = set(map(node_name, tested))
    variables = list(_variables(body))[: new_place(loop)]
    for i, (argument, result) in enumerate(variables):
        unseen = condition.signature.input_arg[i].name not in tested_names
        if argument.type != _FLOAT32 or uses[argument.name] != 1 or not unseen:
            continue
        end, copies = _past_copies(body.ret[result.name], made, uses)
        total = made.get(node_name(end))
        if total is None or total.op not in _ADDING or not _is_free(total, 2, uses):
            continue
        ends = {name: _past_copies(name, made, uses) for name in total.input}
        copies += [node for _, passed in ends.values() for node in passed]
        found = [name for name, _ in ends.values()]
        others = [name for name in found if name != argument.name]
        term = made.get(node_name(others[0])) if len(found) == 2 and len(others) == 1 else None
        dims = _row_dims(term, made, attrs, uses) if term is not None else []
        if dims:
            yield _Sum(i, argument.name, term, total, copies, dims)


def _past_copies(
    tensor: str, made: Mapping[str, Any], uses: Mapping[str, int]
) -> tuple[str, list[Any]]:
    """What a tensor is a copy of that nothing else uses, and the Identities between."""
    copies = []
    while (node := made.get(node_name(tensor))) is not None and node.op == "Identity":
        if not _is_free(node, 1, uses):
            break
        copies.append(node)
        tensor = node.input[0]
    return tensor, copies


def _is_free(node: Any, inputs: int, uses: Mapping[str, int]) -> bool:
    """Whether a node is used once, takes so many tensors, and waits for nothing."""
    return uses[node.name] == 1 and len(node.input) == inputs and not control_inputs_of(node)


def _row_dims(
    term: Any, made: Mapping[str, Any], attrs: Mapping[str, Any], uses: Mapping[str, int]
) -> list[list[int]]:
    """The dimensions of what a node takes, if it adds up rows and they are known; else []."""
    product = term.op == _PRODUCT
    if not product and term.op != _BIAS or not _is_free(term, 1 + product, uses):
        return []
    if "T" not in term.attr or term.attr["T"].type != _FLOAT32:
        return []
    if product and (_is_set(term, "transpose_b") or not _is_set(term, "transpose_a")):
        return []
    dims = [dims_of(_by_port(tensor, made), attrs) for tensor in term.input]
    return dims if all(len(each) == 2 and each[1] >= 1 for each in dims) else []


def _by_port(tensor: str, made: Mapping[str, Any]) -> str:
    """A tensor of a function, written as in graphs."""
    name, _, output = tensor.partition(":")
    node = made.get(name)
    own = registered_signature(node.op) if node is not None else None
    output, _, place = output.partition(":")
    if own is None or not place.isdigit():
        return tensor
    return f"{name}:{first_ports(own, node).get(output, 0) + int(place)}"


def _is_set(node: Any, attr: str) -> bool:
    return attr in node.attr and bool(node.attr[attr].b)


# ---- The same behind the loop --------------------------------------------------------------------


class _Behind:
    """A loop that is given lists for rows, and the nodes behind it."""

    def __init__(self, graph: Any, loop: Any, body: Any, condition: Any, length: str) -> None:
        self._graph = graph
        self._loop = loop
        self._body = body
        self._condition = condition
        self._length = length
        self._taken = {node.name for node in graph.node}
        self._rows: dict[str, str] = {}

    def add_up(self, sums: Sequence[_Sum]) -> None:
        """Takes sums out of the loop; what they were in it starts, and ends, as it was given."""
        for each in sums:
            for tensor, dims in zip(each.term.input, each.dims, strict=True):
                if tensor not in self._rows:
                    self._rows[tensor] = self._keep(tensor, dims)
            self._move(each)
        gone = {n.name for each in sums for n in (each.term, each.total, *each.copies)}
        left = [node for node in self._body.node_def if node.name not in gone]
        replace_nodes(self._body.node_def, left)

    def _keep(self, tensor: str, dims: Sequence[int]) -> str:
        """Keeps a tensor of each round; returns all of them below each other."""
        place = new_place(self._loop)
        wanted = f"{node_name(tensor)}/rows"
        shape = self._constant(f"{wanted}/shape", dims)
        start = self._add(f"{wanted}/list", "EmptyTensorList", [shape, self._length], [])
        start.attr["element_dtype"].type = _FLOAT32
        start.attr["shape_type"].type = tf.int32.as_datatype_enum
        functions = self._body, self._condition
        name = add_loop_variable(self._graph, self._loop, functions, start, _VARIANT, wanted)
        inner = {node.name for node in self._body.node_def} | {name}
        push = self._body.node_def.add(op="TensorListPushBack", input=[name, tensor])
        push.name = free_name(f"{wanted}/push", inner)
        push.attr["element_dtype"].type = _FLOAT32
        set_shape(push, [])
        self._body.ret[name] = f"{push.name}:output_handle:0"
        lengths = self._constant(f"{wanted}/lengths", [], tf.int64)
        given = [f"{self._loop.name}:{place}", shape, lengths]
        rows = self._add(wanted, "TensorListConcatV2", given, [None, dims[1]])
        rows.attr[SHAPES].list.shape.add().dim.add().size = -1
        rows.attr["element_dtype"].type = _FLOAT32
        rows.attr["shape_type"].type = tf.int32.as_datatype_enum
        return str(rows.name)

    def _move(self, each: _Sum) -> None:
        """Copies what adds up in and over the rounds behind the loop."""
        term = self._copy(each.term, [self._rows[tensor] for tensor in each.term.input])
        total = self._copy(each.total, [self._loop.input[each.variable], term])
        name = self._loop.name
        outputs = {f"{name}:{each.variable}", *([name] if each.variable == 0 else [])}
        for node in self._graph.node:
            node.input[:] = [total if given in outputs else given for given in node.input]
        result = self._body.signature.output_arg[each.variable].name
        self._body.ret[result] = each.argument

    def _copy(self, node: Any, inputs: Sequence[str]) -> str:
        made = self._graph.node.add()
        made.CopyFrom(node)
        made.name = self._free(node.name)
        made.device = node.device or self._loop.device
        made.input[:] = inputs
        made.attr.pop("_class", None)  # A device by a node of the body.
        return str(made.name)

    def _constant(self, wanted: str, values: Sequence[int], dtype: Any = tf.int32) -> str:
        name = self._free(wanted)
        return str(add_constant(self._graph.node, name, values, self._loop.device, dtype).name)

    def _add(self, wanted: str, op: str, inputs: Sequence[str], dims: Sequence[int | None]) -> Any:
        name, device = self._free(wanted), self._loop.device
        node = self._graph.node.add(name=name, op=op, input=inputs, device=device)
        set_shape(node, dims)
        return node

    def _free(self, wanted: str) -> str:
        """A name as a node of the body has it behind that of the loop."""
        name = free_name(f"{self._loop.name}/{wanted}", self._taken)
        self._taken.add(name)
        return name
