"""Weights that a loop of a training step reads in every round -> read once, before the loop.

w -> While(body: w -> ReadVariableOp -> Cast -> MatMul) becomes w -> ReadVariableOp ->
While(body: MatMul), where the Cast then goes before the loop too: an LSTM casts its weights once a
step and not once a token.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from tfamp.graph.function_names import (
    called_functions,
    function_attributes,
    reached_functions,
)
from tfamp.graph.op_signatures import PYTHON, writes_variable
from tfamp.interop import tf_private
from tfamp.planning.control_flow import LOOPS
from tfamp.planning.structures import FLOAT32
from tfamp.planning.tensor_names import node_name

# How many of a loop's first results TensorFlow differentiates: those behind them are what the loop
# keeps for a gradient that is in the graph already.
_ORIGINAL = "_num_original_outputs"
_SHAPES = "_output_shapes"


@dataclass(frozen=True, slots=True)
class _Read:
    """A read of a variable in the body of a loop.

    Attributes:
        node: The node in the body.
        handle: Position of the variable's handle among the loop's inputs.
    """

    node: Any
    handle: int


def read_before_loops(graph_def: Any, keep: Collection[str] = ()) -> frozenset[tuple[str, str]]:
    """Takes reads of float32 variables out of the loops of a training step, in place.

    Only reads of variables that the graph writes behind the loop, with what the loop led to: such a
    graph is the last to need gradients by them. In others, one that clips its weights before it
    uses them included, a loop's constants stay float32, as their gradients, which would get the
    same dtype, add up over the rounds.

    Args:
        graph_def: A `tf.compat.v1.GraphDef`. Loops in functions stay.
        keep: Tensors ("x:0") or nodes ("x") that are used from outside: loops among them stay.

    Returns:
        The new arguments of loops' functions as (function, argument): what was read. The reads in
        the bodies are Identities of these now.
    """
    library = {function.signature.name: function for function in graph_def.library.function}
    used = _uses(graph_def.node, library)
    kept = {node_name(name) for name in keep}
    found = {}
    for loop in graph_def.node:
        if loop.op not in LOOPS or loop.name in kept:
            continue
        functions = dict(function_attributes(loop))
        names = [functions.get(part, "") for part in ("body", "cond")]
        if all(name in library and used[name] == 1 for name in names):
            reads = _invariant_reads(loop, library)
            handles = {loop.input[each.handle] for each in reads}
            written = _written_behind(loop, graph_def.node, library, handles)
            reads = [each for each in reads if loop.input[each.handle] in written]
            if reads:
                found[loop.name] = reads
    added: set[tuple[str, str]] = set()
    for loop in [node for node in graph_def.node if node.name in found]:
        added |= _hoist(graph_def, loop, found[loop.name], library)
    return frozenset(added)


def _uses(nodes: Sequence[Any], library: Mapping[str, Any]) -> Counter[str]:
    """How often functions are called, by functions that are called themselves."""
    reached = reached_functions(library, [n for node in nodes for n in called_functions(node)])
    bodies = [nodes, *(library[name].node_def for name in reached)]
    return Counter(name for body in bodies for node in body for name in called_functions(node))


def _invariant_reads(loop: Any, library: Mapping[str, Any]) -> list[_Read]:
    """The reads of float32 variables in the body of a loop in which nothing can be written."""
    if _writes(loop, library):
        return []
    body = library[loop.attr["body"].func.name]
    arguments, results = body.signature.input_arg, body.signature.output_arg
    if not len(arguments) == len(results) == len(loop.attr["T"].list.type):
        return []  # No valid loop.
    # A loop may carry handles, and exchange them.
    same = {
        argument.name: i
        for i, (argument, result) in enumerate(zip(arguments, results, strict=True))
        if _origin(body, body.ret[result.name]) == argument.name
    }
    return [
        _Read(node, same[node.input[0]])
        for node in body.node_def
        if node.op == "ReadVariableOp"
        and node.input[0] in same
        and tf_private.dtype_name(node.attr["dtype"].type) == FLOAT32
    ]


def _origin(body: Any, tensor: str) -> str:
    """Where a tensor of a body comes from, past Identity nodes."""
    identities = {f"{n.name}:output:0": n.input[0] for n in body.node_def if n.op == "Identity"}
    passed: set[str] = set()  # In a broken function a node may feed itself.
    while tensor in identities and tensor not in passed:
        passed.add(tensor)
        tensor = identities[tensor]
    return tensor


def _writes(node: Any, library: Mapping[str, Any]) -> bool:
    """Whether a node, or a function that it runs, may write variables."""
    inside = reached_functions(library, called_functions(node))
    return _may_write(node) or any(_may_write(n) for name in inside for n in library[name].node_def)


def _may_write(node: Any) -> bool:
    return writes_variable(node.op) or node.op in PYTHON


def _written_behind(
    loop: Any, nodes: Sequence[Any], library: Mapping[str, Any], handles: Set[str]
) -> set[str]:
    """Those of some handles that are written with values that depend on a loop."""
    consumers = [
        node
        for node in nodes
        if node.op not in LOOPS and handles & set(node.input) and _writes(node, library)
    ]
    if not consumers:
        return set()
    behind = _behind(loop.name, nodes)
    return {name for node in consumers if node.name in behind for name in handles & set(node.input)}


def _behind(start: str, nodes: Sequence[Any]) -> set[str]:
    """The nodes that a node's results lead to, also through variables that are written and read."""
    loops = {node.name for node in nodes if node.op in LOOPS}
    users = defaultdict(list)
    for node in nodes:
        for name in node.input:
            # A read waits for a write. What only waits for a loop does not depend on its results.
            if not (name.startswith("^") and node_name(name) in loops):
                users[node_name(name)].append(node.name)
    found, pending = {start}, [start]
    while pending:
        for name in users[pending.pop()]:
            if name not in found:
                found.add(name)
                pending.append(name)
    return found


def _hoist(
    graph: Any, loop: Any, reads: Sequence[_Read], library: Mapping[str, Any]
) -> set[tuple[str, str]]:
    """Reads before a loop, and gives the loop what was read."""
    body, condition = (library[loop.attr[name].func.name] for name in ("body", "cond"))
    place = _place(loop)
    before = _reads_before(graph, loop, reads)
    _extend_loop(loop, place, before)
    _renumber(graph.node, loop.name, place, len(reads))
    names = _free_names([each.node.name for each in reads], (body, condition))
    kind = type(body.signature.input_arg[0])
    arguments = [kind(name=name, type=tf.float32.as_datatype_enum) for name in names]
    for function in (body, condition):
        _insert(function.signature.input_arg, place, arguments)
        for table in (function.arg_attr, function.resource_arg_unique_id):
            _shift(table, place, len(names))
        for position, node in enumerate(before, place):
            if _SHAPES in node.attr:
                attrs = function.arg_attr[position].attr
                attrs[_SHAPES].CopyFrom(node.attr[_SHAPES])
    _insert(body.signature.output_arg, place, arguments)
    for name, read in zip(names, reads, strict=True):
        body.ret[name] = name
        _pass_on(body, read.node.name, name)
    return {(body.signature.name, name) for name in names}


def _place(loop: Any) -> int:
    """Where new variables of a loop go: TensorFlow differentiates those before it only."""
    if _ORIGINAL in loop.attr:
        return int(loop.attr[_ORIGINAL].i)
    return len(loop.attr["T"].list.type)


def _reads_before(graph: Any, loop: Any, reads: Sequence[_Read]) -> list[Any]:
    control = [name for name in loop.input if name.startswith("^")]
    taken = {node.name for node in graph.node}
    nodes = []
    for read in reads:
        name = _free_name(f"{loop.name}/{read.node.name}", taken)
        taken.add(name)
        inputs = [loop.input[read.handle], *control]
        node = graph.node.add(name=name, op="ReadVariableOp", input=inputs, device=loop.device)
        for attr in ("dtype", _SHAPES):
            if attr in read.node.attr:
                node.attr[attr].CopyFrom(read.node.attr[attr])
        nodes.append(node)
    return nodes


def _extend_loop(loop: Any, place: int, before: Sequence[Any]) -> None:
    inputs = list(loop.input)
    loop.input[:] = [*inputs[:place], *(node.name for node in before), *inputs[place:]]
    types = list(loop.attr["T"].list.type)
    new = [node.attr["dtype"].type for node in before]
    loop.attr["T"].list.type[:] = [*types[:place], *new, *types[place:]]
    shapes = [_shape(node) for node in before]
    for name in ("output_shapes", _SHAPES):
        if name in loop.attr and len(loop.attr[name].list.shape):
            _insert(loop.attr[name].list.shape, place, shapes)
    if _ORIGINAL in loop.attr:
        loop.attr[_ORIGINAL].i += len(before)


def _shape(read: Any) -> Any:
    if _SHAPES in read.attr and len(read.attr[_SHAPES].list.shape):
        return read.attr[_SHAPES].list.shape[0]
    return tf.TensorShape(None).as_proto()


def _renumber(nodes: Iterable[Any], loop: str, place: int, count: int) -> None:
    """Follows the results of a loop that new ones came before."""
    for node in nodes:
        for i, name in enumerate(node.input):
            made, _, port = name.partition(":")
            if made == loop and port and int(port) >= place:
                node.input[i] = f"{loop}:{int(port) + count}"


def _insert(values: Any, place: int, new: Sequence[Any]) -> None:
    """Inserts messages into a repeated field."""
    copies = [type(each).FromString(each.SerializeToString()) for each in values]
    del values[:]
    values.extend([*copies[:place], *new, *copies[place:]])


def _shift(table: Any, place: int, count: int) -> None:
    """Moves what a map of protobuf says of arguments from a place on."""
    for position in sorted((each for each in table if each >= place), reverse=True):
        value = table.pop(position)
        if hasattr(value, "SerializeToString"):
            table[position + count].CopyFrom(value)
        else:
            table[position + count] = value


def _pass_on(body: Any, read: str, argument: str) -> None:
    """Makes a read in a body an Identity of an argument."""
    node = next(each for each in body.node_def if each.name == read)
    control = [name for name in node.input if name.startswith("^")]
    node.op = "Identity"
    node.input[:] = [argument, *control]
    node.attr["T"].type = node.attr["dtype"].type
    node.attr.pop("dtype")
    old, new = f"{read}:value:0", f"{read}:output:0"
    for each in body.node_def:
        each.input[:] = [new if name == old else name for name in each.input]
    for name, tensor in list(body.ret.items()):
        if tensor == old:
            body.ret[name] = new


def _free_names(names: Iterable[str], functions: Iterable[Any]) -> list[str]:
    """Names that functions have for no argument, result or node, for new arguments."""
    taken = {
        each.name
        for function in functions
        for group in (
            function.signature.input_arg,
            function.signature.output_arg,
            function.node_def,
        )
        for each in group
    }
    free = []
    for name in names:
        free.append(_free_name(f"{name.replace('/', '_').lower()}_before", taken))
        taken.add(free[-1])
    return free


def _free_name(name: str, taken: Collection[str]) -> str:
    numbered = (f"{name}_{i}" for i in itertools.count(1))
    return next(each for each in itertools.chain([name], numbered) if each not in taken)
