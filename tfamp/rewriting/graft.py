"""The graph of a traced function, rewritten, as part of the function that is being traced now.

Its nodes become nodes of the current graph, so TensorFlow differentiates them like any others. What
names alone do not carry over is put right here: functions get names of their own, and gradients
that refer to tensors of the first trace refer to their counterparts.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import tensorflow as tf

from tfamp.graph.function_names import (
    called_functions,
    new_suffix,
    reached_functions,
    rename_functions,
    unshare_branches,
)
from tfamp.graph.transforms.inline import INLINED_INTO, inline_calls
from tfamp.interop import tf_functions
from tfamp.planning.control_flow import LOOPS
from tfamp.rewriting.custom_gradients import Origin, adopt_gradients

# GraphDef, fetches, feeds -> GraphDef
Transform: TypeAlias = Callable[[Any, Sequence[str], Sequence[str]], Any]
# The graph as it was and as it is -> tensors to use in the place of some of the latter's, by name
Substitutes: TypeAlias = Callable[[Any, Any], Mapping[str, Any]]

_SCOPES = itertools.count(1)


def graft(
    traced: Any,
    values: Sequence[Any],
    transform: Transform,
    gradient_transform: Transform,
    substitutes: Substitutes | None = None,
) -> list[Any]:
    """Adds the graph of a traced function to the function that is being traced.

    Args:
        traced: A `tf.types.experimental.ConcreteFunction`.
        values: A tensor for each of `traced.inputs`, captured ones included; dtypes as there.
        transform: What to do with its GraphDef: gets the graph with its calls inlined, the names of
            its outputs and inputs; returns a graph with the same names.
        gradient_transform: The same for the graphs of custom gradients, when they are needed.
        substitutes: Tells which tensors of the transformed graph to take from elsewhere; what makes
            them is left out.

    Returns:
        The tensors of the current graph that stand for `traced.outputs`.
    """
    outputs = [tensor.name for tensor in traced.outputs]
    inputs = [tensor.name for tensor in traced.inputs]
    graph_def = inline_calls(traced.graph.as_graph_def(add_shapes=True), keep=outputs)
    given = unshare_branches(graph_def)
    suffix = new_suffix()
    graph_def = rename_functions(transform(given, outputs, inputs), suffix)
    host = tf.compat.v1.get_default_graph()
    values = [tf_functions.capture_into_graph(value) for value in values]
    by_name = dict(zip(inputs, values, strict=True))
    scope = _free_scope(graph_def, host, inputs)

    def differentiate(gradient_function: Any, tensors: Sequence[Any]) -> list[Any]:
        return graft(gradient_function, tensors, gradient_transform, gradient_transform)

    origin = Origin(traced.graph, rename_functions(given, suffix))
    adopt_gradients(graph_def, origin, _Host(host, scope, by_name), differentiate)
    others = substitutes(given, graph_def) if substitutes is not None else {}
    results = _import(graph_def, {**by_name, **others}, outputs, scope)
    tf_functions.note_variables(traced.graph.variables)
    return results


class _Host:
    """The graph a function was grafted onto; finds the counterparts of the function's tensors."""

    def __init__(self, graph: Any, scope: str, inputs: Mapping[str, Any]) -> None:
        self.graph = graph
        self.scope = scope
        self._inputs = inputs

    def counterpart(self, name: str) -> Any:
        """Returns the tensor that stands for one of the function's own; KeyError if none does."""
        if name in self._inputs:
            return self._inputs[name]
        return self.graph.get_tensor_by_name(self._full(name))

    def operation(self, name: str) -> Any:
        """Returns the operation that stands for one of the function's own."""
        return self.graph.get_operation_by_name(self._full(name))

    def _full(self, name: str) -> str:
        return f"{self.scope}/{name}" if self.scope else name


def _import(
    graph_def: Any, values: Mapping[str, Any], outputs: Sequence[str], scope: str
) -> list[Any]:
    fed = {name.partition(":")[0] for name in values}
    nodes = [node for node in graph_def.node if node.name not in fed]
    bare = tf.compat.v1.GraphDef(versions=graph_def.versions, library=graph_def.library)
    bare.node.extend(in_topological_order(nodes))
    for node in itertools.chain(bare.node, *(each.node_def for each in bare.library.function)):
        # Shapes are inferred again; what nodes are colocated with may have been an input.
        for attr in ("_output_shapes", "_class", INLINED_INTO):
            if attr in node.attr:
                del node.attr[attr]
    tf_functions.register_functions(bare.library.function, tf.compat.v1.get_default_graph())
    used = {_full_name(name) for node in bare.node for name in node.input}
    waited_for = {f"^{name}" for name in fed} & {n for node in bare.node for n in node.input}
    mapped = {name: value for name, value in values.items() if name in used}
    mapped |= {name: values[f"{name[1:]}:0"] for name in waited_for}
    made = [name for name in dict.fromkeys(outputs) if name not in values]
    loops = _single_loops(bare)
    imported = tf.graph_util.import_graph_def(
        bare, input_map=mapped, return_elements=[*made, *loops], name=scope
    )
    for loop in imported[len(made) :]:
        tf_functions.copy_handle_data(loop.inputs, loop.outputs)
    found = dict(zip(made, imported, strict=False))
    return [found[name] if name in found else tf.identity(values[name]) for name in outputs]


def _single_loops(graph_def: Any) -> list[str]:
    """Names of the loops with no loop inside.

    Only these learn what their handles know of variables, which a gradient of a gradient asks for.
    An imported loop in a loop has lost it for good, and TensorFlow would take the inner gradient to
    be zero; without the outer loop's it raises an error.
    """
    library = {function.signature.name: function for function in graph_def.library.function}
    names = []
    for node in graph_def.node:
        if node.op in LOOPS:
            reached = reached_functions(library, called_functions(node))
            inside = (each for name in reached for each in library[name].node_def)
            if not any(each.op in LOOPS for each in inside):
                names.append(node.name)
    return names


def in_topological_order(nodes: Sequence[Any]) -> list[Any]:
    """Returns nodes in an order in which each follows its inputs, as given as far as possible.

    TensorFlow adds control edges between ops with side effects in the order they are in, so an op
    must not come before one that it waits for.
    """
    by_name = {node.name: node for node in nodes}
    done: set[str] = set()
    started: set[str] = set()
    ordered = []
    for node in nodes:
        pending = [node.name]
        while pending:
            name = pending[-1]
            current = by_name.get(name)
            if current is None or name in done:
                pending.pop()
            elif name in started:  # Its inputs are done, or it is in a loop of TensorFlow 1.
                pending.pop()
                done.add(name)
                ordered.append(current)
            else:
                started.add(name)
                names = (each.lstrip("^").partition(":")[0] for each in reversed(current.input))
                pending += [each for each in names if each not in started]
    return ordered


def _free_scope(graph_def: Any, host: Any, inputs: Sequence[str]) -> str:
    """A name scope for the nodes: none, so that names stay, unless one of them is taken."""
    fed = {name.partition(":")[0] for name in inputs}
    taken = {op.name for op in host.get_operations()}
    if not any(node.name in taken and node.name not in fed for node in graph_def.node):
        return ""
    return f"rewritten_{next(_SCOPES)}"


def _full_name(name: str) -> str:
    return name if ":" in name or name.startswith("^") else f"{name}:0"
