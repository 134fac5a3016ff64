"""Private TensorFlow symbols for loops, functions, variables and effects of an imported graph.

`tf.graph_util.import_graph_def` copies nodes and definitions. What TensorFlow attaches to those
that it traces itself, and needs for gradients and for saving, is given to the copies here.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Collection, Iterable, Sequence
from typing import Any, TypeAlias, cast

import tensorflow as tf

from tfamp.core.kinds import FunctionDef, Handle, Op, Tensor, TFGraph, Trace, Variable
from tfamp.interop.patching import attempt
from tfamp.interop.tf_private import op_definition, outer_graph, private, private_symbol


def copy_handle_data(sources: Iterable[Handle], targets: Iterable[Handle]) -> None:
    """Copies dtype and shape of variables from handles to other handles of the same variables.

    Symbol: `tensorflow.python.ops.handle_data_util.copy_handle_data`. Second gradients need the
    dtypes and shapes of variables that a loop passes on; an imported loop has lost them.
    """
    copy = private("ops.handle_data_util:copy_handle_data")
    for source, target in zip(sources, targets, strict=True):
        copy(source, target)


def keep_handle_data(loop: Op, loops: Collection[str]) -> None:
    """Gives the handles of an imported loop, and of loops in its body, what they refer to.

    A loop passes its handles on as they are.
    """
    copy_handle_data(loop.inputs, loop.outputs)
    for body in kept_body_graphs(loop):
        copy_handle_data(loop.inputs, body.inputs)
        for op in body.get_operations():
            if op.type in loops:
                keep_handle_data(op, loops)


def kept_body_graphs(operation: Op) -> list[TFGraph]:
    """Returns the graphs of an imported loop's or conditional's bodies, which it keeps from now on.

    TensorFlow makes them again for each gradient, unless the op has them.

    Symbols: `while_v2._get_graph`, `cond_v2.get_func_graphs`, and the attributes in which ops
    keep the graphs: `_body_graph`, `_true_graph`, `_false_graph`, `_branch_graph_0` and so on.
    """
    if operation.type in ("While", "StatelessWhile"):
        operation._body_graph = private("ops.while_v2:_get_graph")(operation, "body", "_body_graph")
        return [operation._body_graph]
    if operation.type in ("If", "StatelessIf", "Case", "StatelessCase"):
        graphs = list(private("ops.cond_v2:get_func_graphs")(operation))
        of_if = ("_true_graph", "_false_graph")
        is_case = operation.type.endswith("Case")
        names = [f"_branch_graph_{i}" for i in range(len(graphs))] if is_case else of_if
        for name, graph in zip(names, graphs, strict=True):
            setattr(operation, name, graph)
        return graphs
    return []


def note_variables(variables: Iterable[Variable]) -> None:
    """Registers variables with the function being traced, so that tapes outside watch them.

    Symbol: `FuncGraph.watch_variable`. Reading a variable calls it; an imported node that reads
    its handle does not.
    """
    watch = private_symbol(tf.compat.v1.get_default_graph(), "watch_variable")
    for variable in variables:
        watch(variable)


def keep_order(imported: Sequence[Op]) -> None:
    """Leaves ops that were imported first into a traced function in the order that they have.

    When a trace ends TensorFlow orders ops with side effects, for which it looks at every op.
    Imported ops were ordered where they were traced; what is left is that they run before the
    function returns. Where other ops came first, or some are ordered by more than their
    resources, nothing is done, and TensorFlow orders all.

    Symbols: `Graph.experimental_acd_manager`, its attributes `_n_operations` and
    `ops_which_must_run`, `auto_control_deps.op_is_stateful` and
    `auto_control_deps_utils.RESOURCE_READ_OPS`.
    """
    graph = tf.compat.v1.get_default_graph()
    by_type = {op.type: op for op in imported}
    if any(map(_needs_more_than_resources, by_type.values())):
        return

    def keep() -> None:
        manager = private_symbol(graph, "experimental_acd_manager")
        if manager is None:
            return
        operations = graph.get_operations()
        first = private_symbol(manager, "_n_operations")
        before = operations[first : len(operations) - len(imported)]
        if any(op.type != "Placeholder" for op in before):
            return
        is_stateful = private("framework.auto_control_deps:op_is_stateful")
        reads = private("framework.auto_control_deps_utils:RESOURCE_READ_OPS")
        stateful = {kind for kind, op in by_type.items() if is_stateful(op)}
        private_symbol(manager, "ops_which_must_run").update(
            op
            for op in imported
            if op.type in stateful
            and (op.type not in reads or any(output.consumers() for output in op.outputs))
        )
        manager._n_operations = len(operations)

    attempt(keep, None, "the first call of a rewritten function takes longer.")


def _needs_more_than_resources(op: Op) -> bool:
    """Whether ops like this are ordered by more than their resources, or nobody knows.

    Collectives are ordered by their group, which calls may contain, and old control flow by
    switches.
    """
    name = op.type
    return (
        op_definition(name) is None
        or name.startswith("Collective")
        or name in ("Switch", "Merge", "StatefulPartitionedCall")
    )


def register_functions(definitions: Iterable[FunctionDef], owner: Any) -> None:
    """Registers functions with the eager runtime for the lifetime of an object.

    Symbols: `add_function_def` and `remove_function` of
    `tensorflow.python.eager.context.context()`. `tf.graph_util.import_graph_def` adds functions
    to the importing graph only. Their names must be new; a weak reference to the owner is kept.
    """
    context = private("eager.context:context")()
    for definition in definitions:
        context.add_function_def(definition)
        removal = weakref.finalize(owner, context.remove_function, definition.signature.name)
        removal.atexit = False  # The runtime itself is gone by then.


def give_graphs(names: Iterable[str]) -> None:
    """Gives imported functions of the current graph a graph each, made when it is asked for.

    Symbols: `Graph._functions`, `function_def_to_graph`. TensorFlow keeps the definitions only,
    and saves a function with a custom gradient only if it has a graph, as traced functions do.
    """
    registered = private_symbol(tf.compat.v1.get_default_graph(), "_functions")
    registered.update((name, _FunctionWithGraph(registered[name])) for name in names)


def graph_of_function(graph: TFGraph, name: str) -> TFGraph:
    """Returns the graph of a function that `give_graphs` was called for.

    Symbol: `Graph._functions`.
    """
    return private_symbol(graph, "_functions")[name].graph


class _FunctionWithGraph:
    """A function of an imported graph, with a graph."""

    def __init__(self, function: Any) -> None:
        self._function = function

    def __getattr__(self, name: str) -> Any:
        return getattr(self._function, name)

    @functools.cached_property
    def graph(self) -> TFGraph:
        """A `FuncGraph`."""
        build = private("framework.function_def_to_graph:function_def_to_graph")
        return build(self._function.cached_definition)


def differentiate_call(op: Op, gradients: Sequence[Tensor]) -> Sequence[Tensor]:
    """Returns the gradients of a call's inputs, by the function in the op's graph.

    Symbols: `function_def_to_graph`, `ConcreteFunction.from_func_graph` and its
    `_get_gradient_function`. TensorFlow attaches gradients to calls that it traces; an imported
    call lacks a valid one.
    """
    functions = _differentiable.setdefault(_outermost(op.graph), {})
    name = op.get_attr("f").name
    if name not in functions:
        functions[name] = _concrete_function(op, _function_definition(op.graph, name))
    differentiate = private_symbol(functions[name], "_get_gradient_function")()
    return cast("Sequence[Tensor]", differentiate(op, *gradients))


# The functions of every imported graph. TensorFlow derives the names of gradient functions from
# loop bodies: building a function twice would give two functions the same name.
_Functions: TypeAlias = dict[str, Trace]
_differentiable: weakref.WeakKeyDictionary[TFGraph, _Functions] = weakref.WeakKeyDictionary()


def _outermost(graph: TFGraph) -> TFGraph:
    while isinstance(outer := outer_graph(graph), type(graph)):
        graph = outer
    return graph


def _concrete_function(op: Op, definition: FunctionDef) -> Trace:
    build = private("framework.function_def_to_graph:function_def_to_graph")
    concrete = "eager.polymorphic_function.concrete_function:ConcreteFunction"
    types = private("eager.polymorphic_function.function_type_utils:function_type_lib")
    with op.graph.as_default():
        body = build(definition)
    copy_handle_data(op.inputs, body.inputs)
    for inner in body.get_operations():
        if inner.type in ("StatelessWhile", "While"):
            copy_handle_data(inner.inputs, inner.outputs)
    function_type = private_symbol(types, "from_structured_signature")(
        ((), {}), body.structured_outputs, body.function_captures.capture_types
    )
    attrs = {name: value for name, value in definition.attr.items() if name != "_input_shapes"}
    from_func_graph = private_symbol(private(concrete), "from_func_graph")
    return from_func_graph(body, function_type, attrs=attrs)


def _function_definition(graph: TFGraph | None, name: str) -> FunctionDef:
    while graph is not None:
        function = private_symbol(graph, "_get_function")(name)
        if function is not None:
            return function.cached_definition
        graph = outer_graph(graph)
    return private("eager.context:context")().get_function_def(name)
