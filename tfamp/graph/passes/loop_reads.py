"""Hoists reads of weights out of the loops of a training step.

w -> While(body: w -> ReadVariableOp -> Cast -> MatMul) becomes w -> ReadVariableOp ->
While(body: MatMul), where the Cast is hoisted too: an LSTM casts its weights once a step, not once
a token.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from tfamp.graph import editor
from tfamp.graph.functions import calls_in, reached_bodies
from tfamp.graph.loops import Loop, own_loops
from tfamp.planning.options import RewriteOptions
from tfamp.planning.structures import LOOPS, node_name, reach


def run(graph: editor.GraphEditor, options: RewriteOptions) -> None:
    """Hoists reads of float32 variables out of the loops of a training step, in place.

    Only reads of variables that the graph later writes with values that depend on the loop: then no
    other graph needs gradients by them. Elsewhere, such as in a step that clips its weights before
    it uses them, a loop's invariants stay float32, as their gradients, which would get the same
    dtype, add up over the iterations. Loops in functions and fetched ones stay.

    Adds the new arguments of the loops' functions to `graph.weights`.
    """
    for loop in own_loops(graph):
        if loop.is_single and not _writes(graph, loop.node):
            reads = list(_invariant_reads(loop))
            written = _written_behind(loop, {handle for _, handle in reads})
            for read, handle in reads:
                if handle in written:
                    _hoist(loop, read, handle)


def _invariant_reads(loop: Loop) -> Iterator[tuple[Any, str]]:
    """The reads of float32 variables in the body of a loop, with their handles in the graph."""
    # A loop may carry handles, and exchange them.
    same = {
        argument.name: handle
        for (argument, result), handle in zip(loop.variables, loop.node.input, strict=False)
        if loop.body.graph.ret[result.name] in loop.copies(argument.name)
    }
    for node in loop.body.of_types("ReadVariableOp"):
        handles = [same[name] for name in node.input if name in same]
        if handles and editor.attribute(node, "dtype").type == editor.FLOAT32_TYPE:
            yield node, handles[0]


def _writes(graph: editor.GraphEditor, node: Any) -> bool:
    """Whether a node, or a function that it runs, may write variables."""
    inside = (op for body in reached_bodies(graph, calls_in([node])) for op in body.by_op)
    return any(editor.writes_variable(op) or op in editor.PYTHON for op in (node.op, *inside))


def _written_behind(loop: Loop, handles: set[str]) -> set[str]:
    """Selects the handles that are written with values that depend on a loop."""
    graph = loop.graph
    behind = _behind(graph, loop.node.name) if handles else ()
    users = ((each, graph.by_name[u]) for each in handles for u in graph.consumers[node_name(each)])
    return {
        handle
        for handle, user in users
        if user.name in behind and user.op not in LOOPS and _writes(graph, user)
    }


def _behind(graph: editor.GraphEditor, start: str) -> Collection[str]:
    """The descendants of a node, also through variables that are written and read."""

    def users(name: str) -> Iterator[str]:
        is_loop = name in loops
        for user in graph.consumers[name]:
            # A read waits for a write. A node that only waits for a loop does not depend on its
            # results.
            taken = map(node_name, editor.tensor_inputs(graph.by_name[user]))
            if not is_loop or name in taken:
                yield user

    loops = {node.name for node in graph.of_types(*LOOPS)}
    return reach([start], users)


def _hoist(loop: Loop, read: Any, handle: str) -> None:
    """Reads a variable before a loop, and passes the value to the loop."""
    node, body = loop.node, loop.body
    attrs = {name: read.attr[name] for name in ("dtype", editor.SHAPES) if name in read.attr}
    inputs = [handle, *editor.control_inputs_of(node)]
    before = loop.graph.add(
        f"{node.name}/{read.name}", "ReadVariableOp", inputs, device=node.device, **attrs
    )
    name = loop.add_variable(before, editor.FLOAT32_TYPE, f"{read.name}_before")
    body.set_inputs(read, [name, *editor.control_inputs_of(read)])
    body.become_identity(read, editor.FLOAT32_TYPE)
    body.settle()
    loop.graph.weights.add((body.scope, name))
