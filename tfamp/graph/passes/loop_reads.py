"""Hoists reads of weights out of the loops of a training step.

w -> While(body: w -> ReadVariableOp -> Cast -> MatMul) becomes w -> ReadVariableOp ->
While(body: MatMul), where the Cast is hoisted too: an LSTM casts its weights once a step, not
once a token.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from tfamp.core.kinds import NodeDef
from tfamp.graph.body import Body
from tfamp.graph.graph import Graph
from tfamp.graph.loops import Loop
from tfamp.graph.nodes import SHAPES, attribute, called_by, control_inputs_of, tensor_inputs
from tfamp.graph.ops import FLOAT32_TYPE, PYTHON, writes_variable
from tfamp.planning.options import RewriteOptions
from tfamp.planning.structures import LOOPS, node_name, reach


def run(graph: Graph, options: RewriteOptions) -> None:
    """Hoists reads of float32 variables out of the loops of a training step, in place.

    Only reads of variables that the graph later writes with values that depend on the loop:
    then no other graph needs gradients by them. Elsewhere, such as in a step that clips its
    weights before it uses them, a loop's invariants stay float32, as their gradients, which
    would get the same dtype, add up over the iterations. Loops in functions and fetched ones
    stay.

    Adds the new arguments of the loops' functions to `graph.weights`.
    """
    for loop in graph.changeable_loops():
        if loop.is_single and not _writes(graph, loop.node):
            reads = list(_invariant_reads(loop))
            written = _written_behind(graph, loop, {handle for _, handle in reads})
            for read, handle in reads:
                if handle in written:
                    name = _hoist(loop, read, handle)
                    graph.weights.add((loop.body.scope, name))


def _invariant_reads(loop: Loop) -> Iterator[tuple[NodeDef, str]]:
    """The reads of float32 variables in the body of a loop, with their handles in the graph."""
    # A loop may carry handles, and exchange them.
    same = {
        argument.name: handle
        for (argument, result), handle in zip(loop.variables, loop.node.input, strict=False)
        if loop.body.returned[result.name] in loop.copies(argument.name)
    }
    for node in loop.body.of_types("ReadVariableOp"):
        handles = [same[name] for name in node.input if name in same]
        if handles and attribute(node, "dtype").type == FLOAT32_TYPE:
            yield node, handles[0]


def _writes(graph: Graph, node: NodeDef) -> bool:
    """Whether a node, or a function that it runs, may write variables."""
    inside = (op for body in graph.reached(called_by(node)) for op in body.by_op)
    return any(writes_variable(op) or op in PYTHON for op in (node.op, *inside))


def _written_behind(graph: Graph, loop: Loop, handles: set[str]) -> set[str]:
    """Selects the handles that are written with values that depend on a loop."""
    main = graph.main
    behind = _behind(main, loop.node.name) if handles else ()
    users = (
        (handle, main.by_name[user])
        for handle in handles
        for user in main.consumers[node_name(handle)]
    )
    return {
        handle
        for handle, user in users
        if user.name in behind and user.op not in LOOPS and _writes(graph, user)
    }


def _behind(main: Body, start: str) -> Collection[str]:
    """The descendants of a node, also through variables that are written and read."""

    def users(name: str) -> Iterator[str]:
        is_loop = name in loops
        for user in main.consumers[name]:
            # A read waits for a write. A node that only waits for a loop does not depend on its
            # results.
            taken = map(node_name, tensor_inputs(main.by_name[user]))
            if not is_loop or name in taken:
                yield user

    loops = {node.name for node in main.of_types(*LOOPS)}
    return reach([start], users)


def _hoist(loop: Loop, read: NodeDef, handle: str) -> str:
    """Reads a variable before a loop; returns the argument that passes it to the loop."""
    node, body = loop.node, loop.body
    attrs = {name: read.attr[name] for name in ("dtype", SHAPES) if name in read.attr}
    inputs = [handle, *control_inputs_of(node)]
    before = loop.graph.add(
        f"{node.name}/{read.name}", "ReadVariableOp", inputs, device=node.device, **attrs
    )
    name = loop.add_variable(before, FLOAT32_TYPE, f"{read.name}_before")
    body.set_inputs(read, [name, *control_inputs_of(read)])
    body.become_identity(read, FLOAT32_TYPE)
    body.settle()
    return name
