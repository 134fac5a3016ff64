"""A training step, or any function, as one graph that says which layer each op belongs to."""

from __future__ import annotations

import contextlib
import inspect
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfamp
from tfamp.core.dtypes import FLOAT_DTYPES
from tfamp.diagnostics.model_runs import layer_path, observing_layers
from tfamp.graph.function_names import unshare_branches
from tfamp.graph.transforms.inline import inline_calls
from tfamp.graph.transforms.retype import UNROUNDED, seeded
from tfamp.interop import tf_functions
from tfamp.rewriting.flat_call import FlatCall
from tfamp.rewriting.function import RewrittenFunction
from tfamp.rewriting.traced_function import TracedFunction

_LAYER = "_tfamp_layer"
_MARKER = re.compile(r"tfamp_layer_(\d+)(?:_\d+)?(?:/|$)")
_SCALE = re.compile(r"(^|/)(dynamic_scale|loss_scale)(_\d+)?$")
_DTYPES_TO_NOTE = ("float16", "bfloat16")


@dataclass(frozen=True, slots=True)
class Root:
    """A result of the step.

    Attributes:
        tensor: Its name in the graph.
        role: "output", "loss", "scaled loss", "gradient" or "assigned".
        variable: The variable it is the gradient of.
    """

    tensor: str
    role: str
    variable: str | None = None


@dataclass(frozen=True, slots=True, eq=False)
class StepGraph:
    """A traced step.

    Attributes:
        graph_def: The graph, with its calls inlined.
        inputs: Names of its inputs.
        values: Their values, handles of variables included.
        given: How many of these are arguments; the rest is captured.
        roots: Its results.
        operations: Operations that have to run as well.
        variables: The `tf.Variable`s it uses.
        variable_of: Names of variables by the input that is their handle or value.
        layers: The layers that were called, in the order of their first calls.
        scale: The `tf.Variable` that holds the loss scale, if there is one.
        names: Names of variables, by `id` of the `tf.Variable`.
        wheres: Where in the user's code an op was made, by its name.
    """

    graph_def: Any
    inputs: tuple[str, ...]
    values: tuple[Any, ...]
    given: int
    roots: tuple[Root, ...]
    operations: tuple[str, ...]
    variables: tuple[Any, ...]
    variable_of: Mapping[str, str]
    layers: tuple[Any, ...]
    scale: Any
    names: Mapping[int, str]
    wheres: Callable[[str], str | None]


@dataclass(eq=False)
class _Notes:
    """What is noted while a step is traced."""

    layers: list[Any] = field(default_factory=list)
    gradients: list[tuple[Any, Any]] = field(default_factory=list)

    def call_layer(self, layer: Any, call: Callable[[], Any], mark_names: bool) -> Any:
        if tf.executing_eagerly():
            return call()
        known = (i for i, each in enumerate(self.layers) if each is layer)
        number = next(known, len(self.layers))
        if number == len(self.layers):
            self.layers.append(layer)
        # What a tape computes from these ops is named after their name scope, and has no attribute.
        scope = tf.name_scope(f"tfamp_layer_{number}") if mark_names else contextlib.nullcontext()
        with tf_functions.ops_marked(_LAYER, str(number)), scope:
            return call()

    def take_gradient(self, sources: Any, gradients: Any) -> None:
        self.gradients += zip(
            tf.nest.flatten(sources),
            tf.nest.flatten(gradients, expand_composites=False),
            strict=False,
        )


def trace_step(
    function: Any,
    args: tuple[Any, ...],
    *,
    roles: Callable[[], Sequence[tuple[str, str | None]]] | None = None,
    names: Mapping[int, str] | None = None,
) -> StepGraph:
    """Traces a function for a call.

    Args:
        function: A function, a `tf.function`, a concrete function or what `tfamp.rewrite` returned.
        args: Its arguments; arrays count as tensors.
        roles: Returns, once the function is traced, role and variable of each of its results; all
            are outputs if None.
        names: Names of variables, by `id` of the `tf.Variable`.

    Returns:
        The step.

    Raises:
        TypeError, ValueError: The function cannot be traced.
    """
    args = tf.nest.map_structure(_as_tensor, args)
    notes = _Notes()
    rewritten = isinstance(function, RewrittenFunction)
    with _noting(notes, mark_names=not rewritten):
        call = FlatCall(args, {})
        traced = _traced(function, call)
    results = [tensor.name for tensor in traced.outputs]
    found = list(roles()) if roles is not None else [("output", None)] * len(results)
    names = {**(names or {}), **_names_of_layers(notes.layers)}
    roots = [Root(t, role, variable) for t, (role, variable) in zip(results, found, strict=True)]
    roots += _gradient_roots(traced.graph, notes.gradients, names, {r.variable for r in roots})
    operations = [operation.name for operation in traced.graph.control_outputs]
    keep = [*(root.tensor for root in roots), *operations]
    graph_def = inline_calls(traced.graph.as_graph_def(add_shapes=False), keep=keep)
    variables = tuple(traced.graph.variables)
    return StepGraph(
        graph_def=seeded(unshare_branches(graph_def)),
        inputs=tuple(tensor.name for tensor in traced.inputs),
        values=(*call.tensors, *traced.captured_inputs),
        given=len(call.tensors),
        roots=tuple(roots),
        operations=tuple(operations),
        variables=variables,
        variable_of=_variables_of_inputs(traced, names),
        layers=tuple(notes.layers),
        scale=next((v for v in variables if _SCALE.search(_bare(v))), None),
        names=names,
        wheres=_Wheres(traced.graph),
    )


@contextlib.contextmanager
def _noting(notes: _Notes, mark_names: bool) -> Iterator[None]:
    def call_layer(layer: Any, call: Callable[[], Any]) -> Any:
        return notes.call_layer(layer, call, mark_names)

    with (
        observing_layers(call_layer),
        tf_functions.constants_noted(_note_rounding),
        tf_functions.gradients_noted(notes.take_gradient),
    ):
        yield


def _note_rounding(value: Any, tensor: Any) -> None:
    """Keeps what a low-precision constant was before it was rounded."""
    if tensor.dtype.name not in _DTYPES_TO_NOTE:
        return
    with np.errstate(all="ignore"):
        given = np.asarray(value, np.float64)
        rounded = given.astype(tensor.dtype.as_numpy_dtype).astype(np.float64)
    if given.size and not np.array_equal(given, rounded, equal_nan=True):
        shaped = np.broadcast_to(given, tensor.shape) if given.size == 1 else given
        proto = tf.make_tensor_proto(shaped.reshape(tensor.shape).astype(np.float32))
        tf_functions.set_attribute(tensor.op, UNROUNDED, proto)


def _traced(function: Any, call: FlatCall) -> Any:
    """The concrete function of a call; its inputs are the call's tensors, then what it captures."""
    if isinstance(function, RewrittenFunction):
        function = function.copy().concrete(*call.args)  # Traced now, with notes.
    elif not isinstance(function, tf.types.experimental.ConcreteFunction):
        return TracedFunction.of(function).trace(call)[0]
    given = len(function.inputs) - len(function.captured_inputs)
    if given == len(call.tensors):
        return function
    # It has arguments that are no tensors: what was made of them is known inside a call only.
    return TracedFunction.of(lambda *args: function(*args)).trace(call)[0]


def _as_tensor(value: Any) -> Any:
    return tf.convert_to_tensor(value) if isinstance(value, np.ndarray | np.generic) else value


def _gradient_roots(
    graph: Any, gradients: Sequence[tuple[Any, Any]], names: Mapping[int, str], known: set[Any]
) -> Iterator[Root]:
    for source, gradient in gradients:
        values = gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient
        if not tf.is_tensor(values) or getattr(values, "graph", None) is not graph:
            continue
        name = _variable_name(source, names)
        if name not in known and values.dtype.name in FLOAT_DTYPES:
            yield Root(values.name, "gradient", name)


def _variable_name(source: Any, names: Mapping[int, str]) -> str | None:
    value = source.value if isinstance(source, keras.Variable) else source
    if isinstance(source, keras.Variable):
        return str(source.path)
    return names.get(id(value), _bare(value)) if isinstance(value, tf.Variable) else None


def variable_names(variables: Sequence[Any]) -> dict[int, str]:
    """Returns the paths of Keras variables by the `id` of the `tf.Variable` behind each."""
    return {id(v.value): str(v.path) for v in variables if isinstance(v, keras.Variable)}


def _names_of_layers(layers: Sequence[Any]) -> dict[int, str]:
    return variable_names([variable for layer in layers for variable in layer.variables])


def _bare(variable: Any) -> str:
    return str(variable.name).partition(":")[0]


def _variables_of_inputs(traced: Any, names: Mapping[int, str]) -> dict[str, str]:
    handles = {id(variable.handle): variable for variable in traced.graph.variables}
    count = len(traced.inputs) - len(traced.captured_inputs)
    found = {}
    for tensor, value in zip(traced.inputs[count:], traced.captured_inputs, strict=True):
        variable = handles.get(id(value))
        if variable is not None:
            found[tensor.op.name] = names.get(id(variable), _bare(variable))
    return found


class _Wheres:
    """Finds the line of the user's code that made an op."""

    def __init__(self, graph: Any) -> None:
        self._graph = graph
        modules = (tf, keras, tfamp)
        self._libraries = tuple(os.path.dirname(os.path.abspath(str(m.__file__))) for m in modules)

    def __call__(self, name: str) -> str | None:
        try:
            operation = self._graph.get_operation_by_name(name)
        except (KeyError, ValueError):  # It was inlined, and has another name where it was made.
            return None
        for frame in reversed(operation.traceback or ()):
            if not self._is_of_a_library(frame.filename):
                return f"{frame.filename}:{frame.lineno} in {frame.name}"
        return None

    def _is_of_a_library(self, file: str) -> bool:
        installed = "site-packages" in file or "dist-packages" in file
        # TensorFlow and others name code that they generate "<...>", and put it into no folder.
        return installed or file.startswith("<") or file.startswith(self._libraries)


class LayerFinder:
    """Tells which layer an op belongs to.

    Args:
        step: The step it is part of.
    """

    def __init__(self, step: StepGraph) -> None:
        self._layers = step.layers
        scopes = [("", step.graph_def.node)]
        scopes += [(f.signature.name, f.node_def) for f in step.graph_def.library.function]
        self._marks: dict[tuple[str, str], int] = {}
        by_scope: dict[str, list[int]] = {}
        for scope, nodes in scopes:
            for node in nodes:
                if _LAYER in node.attr:
                    mark = int(node.attr[_LAYER].s)
                    self._marks[scope, node.name] = mark
                    by_scope.setdefault(node.name.rpartition("/")[0], []).append(mark)
        self._by_scope = {
            scope: marks[0] for scope, marks in by_scope.items() if len(set(marks)) == 1
        }

    def layer(self, scope: str, node: str, callers: Sequence[tuple[str, str]] = ()) -> Any:
        """Returns the layer of an op; None if it is in none.

        Args:
            scope: The function the op is in.
            node: Its name.
            callers: Scope and name of the nodes that run its function, the outermost first.
        """
        for where in ((scope, node), *reversed(callers)):
            if where in self._marks:
                return self._layers[self._marks[where]]
            name = where[1]
            if marked := _MARKER.findall(name):
                return self._layers[int(marked[-1])]
            found = self._by_name_scope(name)
            if found is not None:
                return found
        return None

    def _by_name_scope(self, name: str) -> Any:
        scope = name.partition("gradient_tape/")[2] if "gradient_tape/" in name else name
        while "/" in scope:
            scope = scope.rpartition("/")[0]
            if scope in self._by_scope:
                return self._layers[self._by_scope[scope]]
        return None


def shown_name(node: str) -> str:
    """Returns a node's name as it would be without the marks of this module."""
    return _MARKER.sub("", node)


def call_of(function: Callable[..., Any], x: Any, y: Any) -> tuple[Any, ...]:
    """Returns the arguments to call a function with.

    Args:
        function: The function.
        x: The first argument, or a tuple of all where the function takes as many.
        y: The second argument; None if there is none.
    """
    if y is not None:
        return (x, y)
    if not isinstance(x, tuple):
        return (x,)
    try:
        signature = inspect.signature(getattr(function, "python_function", function))
        required = [
            p
            for p in signature.parameters.values()
            if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
        ]
    except (TypeError, ValueError):
        return (x,)
    return x if len(required) == len(x) > 1 else (x,)


def layer_name(layer: Any) -> str | None:
    """Returns the path of a layer, None for no layer."""
    return None if layer is None else layer_path(layer)
