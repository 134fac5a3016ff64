"""Weights that a loop of a training step reads in every iteration are read before it.

w -> While(body: w -> ReadVariableOp -> Cast -> MatMul) becomes w -> ReadVariableOp ->
While(body: MatMul), where the Cast then goes before the loop too: an LSTM casts its weights once
a step and not once a token.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from tfamp.graph.editor import (
    FLOAT32_TYPE,
    PYTHON,
    SHAPES,
    become_identity,
    control_inputs_of,
    is_control,
    renamed_output,
    writes_variable,
)
from tfamp.graph.functions import calls_in, library_of, reached_functions, respell
from tfamp.graph.loop_edits import add_loop_variable, copies_in, own_functions
from tfamp.planning.structures import LOOPS, free_name, node_name, reach


def read_before_loops(graph_def: Any, keep: Collection[str] = ()) -> frozenset[tuple[str, str]]:
    """Takes reads of float32 variables out of the loops of a training step, in place.

    Only reads of variables that the graph writes behind the loop, with what the loop led to: such a
    graph is the last to need gradients by them. In others, one that clips its weights before it
    uses them included, a loop's constants stay float32, as their gradients, which would get the
    same dtype, add up over the iterations. Loops in functions stay, and those of which a tensor
    ("x:0") or the node ("x") is to keep.

    Returns:
        The new arguments of loops' functions as (function, argument): what was read. The reads in
        the bodies are Identities of these now.
    """
    kept = set(map(node_name, keep))
    library = library_of(graph_def)
    added = []
    for body, condition, loops in own_functions(graph_def, library):
        loop = loops[0]
        if len(loops) == 1 and loop.name not in kept and not _writes(loop, library):
            reads = _invariant_reads(loop, body)
            handles = {handle for _, handle in reads}
            written = _written_behind(loop, graph_def.node, library, handles)
            wanted = [(node, handle) for node, handle in reads if handle in written]
            added += [_hoist(graph_def, loop, body, condition, *each) for each in wanted]
    return frozenset(added)


def _invariant_reads(loop: Any, body: Any) -> list[tuple[Any, str]]:
    """The reads of float32 variables in the body of a loop, with the handles that it takes."""
    arguments, results = body.signature.input_arg, body.signature.output_arg
    if not len(arguments) == len(results) == len(loop.attr["T"].list.type):
        return []  # No valid loop.
    # A loop may carry handles, and exchange them.
    same = {
        argument.name: handle
        for argument, result, handle in zip(arguments, results, loop.input, strict=False)
        if body.ret[result.name] in copies_in(body, argument.name)
    }
    return [
        (node, same[node.input[0]])
        for node in body.node_def
        if node.op == "ReadVariableOp"
        and node.input[0] in same
        and node.attr["dtype"].type == FLOAT32_TYPE
    ]


def _writes(node: Any, library: Mapping[str, Any]) -> bool:
    """Whether a node, or a function that it runs, may write variables."""
    inside = reached_functions(library, calls_in([node]))
    return _may_write(node) or any(_may_write(n) for name in inside for n in library[name].node_def)


def _may_write(node: Any) -> bool:
    return writes_variable(node.op) or node.op in PYTHON


def _written_behind(
    loop: Any, nodes: Sequence[Any], library: Mapping[str, Any], handles: set[str]
) -> set[str]:
    """Those of some handles that are written with values that depend on a loop."""
    behind = _behind(loop.name, nodes) if handles else ()
    return {
        name
        for node in nodes
        for name in handles.intersection(node.input)
        if node.name in behind and node.op not in LOOPS and _writes(node, library)
    }


def _behind(start: str, nodes: Sequence[Any]) -> Collection[str]:
    """The nodes that a node's results lead to, also through variables that are written and read."""
    loops = {node.name for node in nodes if node.op in LOOPS}
    users = defaultdict[str, list[str]](list)
    for node in nodes:
        for name in node.input:
            # A read waits for a write. What only waits for a loop does not depend on its results.
            if not (is_control(name) and node_name(name) in loops):
                users[node_name(name)].append(node.name)
    return reach([start], users.__getitem__)


def _hoist(
    graph: Any, loop: Any, body: Any, condition: Any, read: Any, handle: str
) -> tuple[str, str]:
    """Reads a variable before a loop, and gives the loop what was read."""
    before = _read_before(graph, loop, read, handle)
    wanted = f"{read.name}_before"
    name = add_loop_variable(graph, loop, (body, condition), before, FLOAT32_TYPE, wanted)
    read.input[:] = [name, *control_inputs_of(read)]
    become_identity(read, FLOAT32_TYPE)
    respell(body, renamed_output([read.name], "value", "output"))
    return body.signature.name, name


def _read_before(graph: Any, loop: Any, read: Any, handle: str) -> Any:
    name = free_name(f"{loop.name}/{read.name}", {node.name for node in graph.node})
    inputs = [handle, *control_inputs_of(loop)]
    node = graph.node.add(name=name, op="ReadVariableOp", input=inputs, device=loop.device)
    for attr in ("dtype", SHAPES):
        if attr in read.attr:
            node.attr[attr].CopyFrom(read.attr[attr])
    return node
