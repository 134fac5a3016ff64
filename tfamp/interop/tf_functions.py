"""The private TensorFlow symbols of traced functions; see `tfamp.interop.tf_private`."""

from __future__ import annotations

import contextlib
import inspect
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

import tensorflow as tf

from tfamp.interop.patching import patched_here
from tfamp.interop.tf_private import private, private_symbol

_Method = TypeVar("_Method", bound=Callable[..., Any])


def capture_into_graph(tensor: Any) -> Any:
    """Returns a tensor of the function being traced that has the value of a tensor from outside.

    Symbol: `FuncGraph.capture`. An op that takes an eager tensor captures it by itself, but the
    `input_map` of `tf.graph_util.import_graph_def` takes tensors of the graph only, and
    `tf.identity` copies what a resource handle says of its variable's shape for some dtypes only.
    """
    return private_symbol(tf.compat.v1.get_default_graph(), "capture")(tensor)


def copy_handle_data(sources: Iterable[Any], targets: Iterable[Any]) -> None:
    """Lets resource handles know of their variables what other handles of the same ones know.

    Symbol: `tensorflow.python.ops.handle_data_util.copy_handle_data`. A gradient of a gradient asks
    for the dtype and shape of the variables that a loop passes on; an imported loop has lost them.
    """
    copy = private("ops.handle_data_util:copy_handle_data")
    for source, target in zip(sources, targets, strict=True):
        copy(source, target)


def note_variables(variables: Iterable[Any]) -> None:
    """Tells the function being traced that it uses variables, so that tapes outside watch them.

    Symbol: `FuncGraph.watch_variable`. Reading a variable does it, but an imported node that reads
    its handle does not.
    """
    watch = private_symbol(tf.compat.v1.get_default_graph(), "watch_variable")
    for variable in variables:
        watch(variable)


def register_functions(definitions: Iterable[Any], owner: Any) -> None:
    """Makes functions callable for as long as an object lives.

    Symbols: `add_function_def` and `remove_function` of
    `tensorflow.python.eager.context.context()`. `tf.graph_util.import_graph_def` adds the functions
    to the graph it imports into, where the eager runtime does not find them. Their names must be
    new; a weak reference to the owner is kept.
    """
    context = private("eager.context:context")()
    for definition in definitions:
        context.add_function_def(definition)
        removal = weakref.finalize(owner, context.remove_function, definition.signature.name)
        removal.atexit = False  # The runtime itself is gone by then.


def registered_gradient(name: str) -> Any:
    """Returns the gradient function registered under a name; raises a LookupError without one.

    Symbol: `tensorflow.python.framework.ops.gradient_registry`. `tf.RegisterGradient` is public,
    but nothing that looks one up.
    """
    return private("framework.ops:gradient_registry").lookup(name)


def differentiate_call(op: Any, gradients: Sequence[Any]) -> Any:
    """Returns the gradients of a call's inputs, from the function that the op's graph has.

    Symbols: `function_def_to_graph`, `ConcreteFunction.from_func_graph` and its
    `_get_gradient_function`. TensorFlow attaches a gradient to the calls it traces; a call that was
    imported has none that is still right.
    """
    functions = _differentiable.setdefault(_outermost(op.graph), {})
    name = op.get_attr("f").name
    if name not in functions:
        functions[name] = _concrete_function(op, _definition(op.graph, name))
    return functions[name]._get_gradient_function()(op, *gradients)


# For each imported graph its functions. TensorFlow names what it makes of a loop's body, to take
# its gradient, after the body: of a function that is built twice there would be two of one name.
_differentiable: weakref.WeakKeyDictionary[Any, dict[str, Any]] = weakref.WeakKeyDictionary()


def _outermost(graph: Any) -> Any:
    while isinstance(getattr(graph, "outer_graph", None), type(graph)):
        graph = graph.outer_graph
    return graph


def _concrete_function(op: Any, definition: Any) -> Any:
    build = private("framework.function_def_to_graph:function_def_to_graph")
    concrete = private("eager.polymorphic_function.concrete_function:ConcreteFunction")
    types = private("eager.polymorphic_function.function_type_utils:function_type_lib")
    with op.graph.as_default():
        body = build(definition)
    copy_handle_data(op.inputs, body.inputs)
    for each in body.get_operations():
        if each.type in ("StatelessWhile", "While"):
            copy_handle_data(each.inputs, each.outputs)
    kind = types.from_structured_signature(
        ((), {}), body.structured_outputs, body.function_captures.capture_types
    )
    attrs = {name: value for name, value in definition.attr.items() if name != "_input_shapes"}
    return concrete.from_func_graph(body, kind, attrs=attrs)


def _definition(graph: Any, name: str) -> Any:
    while graph is not None:
        function = graph._get_function(name)
        if function is not None:
            return function.cached_definition
        graph = getattr(graph, "outer_graph", None)
    return private("eager.context:context")().get_function_def(name)


class FunctionOptions(NamedTuple):
    """How a `tf.function` was made."""

    input_signature: Any  # The specs it was given, or None.
    jit_compile: bool | None  # None leaves it to TensorFlow.
    reduce_retracing: bool
    autograph: bool
    experimental_autograph_options: Any


def function_options(function: Any) -> FunctionOptions:
    """Returns how a `tf.function` was made.

    Symbols: the attributes `_jit_compile`, `_reduce_retracing`, `_autograph` and
    `_experimental_autograph_options` of `tf.types.experimental.PolymorphicFunction`.
    """
    names = [f"_{name}" for name in FunctionOptions._fields[1:]]
    found = (private_symbol(function, name) for name in names)
    return FunctionOptions(function.input_signature, *found)


def function_signature(function: Any) -> inspect.Signature:
    """Returns the arguments a `tf.function` takes, with their defaults.

    Symbol: the attribute `_default_values` of `tf.types.experimental.PolymorphicFunction`. Of one
    restored from a SavedModel the Python function takes anything and knows no defaults.
    """
    defaults = private_symbol(function, "_default_values")
    parameters = [
        inspect.Parameter(each.name, each.kind, default=defaults.get(each.name, each.empty))
        for each in function.function_type.parameters.values()
    ]
    return inspect.Signature(parameters)


class SaveableFunction(private("eager.polymorphic_function.polymorphic_function:Function")):  # type: ignore[misc]
    """A `tf.function` with a class of its own, which TensorFlow tracks and saves like any other.

    Symbol: `tensorflow.python.eager.polymorphic_function.polymorphic_function.Function`. What saves
    a model asks of each attribute and signature whether it is one; no public base class will do.
    """


# ---- For diagnostics -----------------------------------------------------------------------------


def constants_noted(
    note: Callable[[Any, Any], None],
) -> contextlib.AbstractContextManager[None]:
    """Returns a context that tells of every constant that this thread adds to a graph.

    A Python number becomes a constant of the dtype of what it is added to, and the graph has the
    rounded value only. `note` gets the value as it was given and the constant's tensor.
    """

    def create(original: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        tensor = original(value, *args, **kwargs)
        note(value, tensor)
        return tensor

    return patched_here(constant=create)


def gradients_noted(
    note: Callable[[Any, Any], None],
) -> contextlib.AbstractContextManager[None]:
    """Returns a context that tells of every gradient this thread takes from a `tf.GradientTape`.

    A graph does not say of which variable a tensor in it is the gradient. `note` gets the sources
    and the gradients, in the same structure.
    """

    def gradient(
        original: Any, tape: Any, target: Any, sources: Any, *args: Any, **kwargs: Any
    ) -> Any:
        found = original(tape, target, sources, *args, **kwargs)
        note(sources, found)
        return found

    return patched_here(gradient=gradient)


def set_attribute(operation: Any, name: str, value: Any) -> None:
    """Gives an op one more attribute, a `TensorProto`. Symbol: `Operation._set_attr`."""
    attribute = tf.compat.v1.AttrValue(tensor=value)
    private_symbol(operation, "_set_attr")(name, attribute)


def ops_marked(name: str, text: str) -> contextlib.AbstractContextManager[None]:
    """Returns a context that gives the ops added to the current graph one more attribute.

    Symbol: `Graph._attr_scope`. Name scopes would be public, but rules that go by names would then
    see other names. The name begins with an underscore.
    """
    attribute = tf.compat.v1.AttrValue(s=text.encode())
    scope = private_symbol(tf.compat.v1.get_default_graph(), "_attr_scope")
    context: contextlib.AbstractContextManager[None] = scope({name: attribute})
    return context


def as_written(method: _Method) -> _Method:
    """Keeps AutoGraph, which rewrites all that a `tf.function` calls, from rewriting a method."""
    kept: _Method = tf.autograph.experimental.do_not_convert(method)
    return kept
