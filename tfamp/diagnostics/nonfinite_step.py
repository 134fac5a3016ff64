"""The step of a model or a function as one graph that says which layer each op belongs to."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import keras
import numpy as np
import tensorflow as tf

import tfamp
from tfamp.core.dtypes import FLOAT_DTYPES, LOW_PRECISION
from tfamp.diagnostics.model_runs import all_layers, computing_in, float_tensors, observing_layers
from tfamp.graph.functions import bodies, inline_calls, unshare_branches
from tfamp.graph.observe import observed_scopes
from tfamp.graph.retype import UNROUNDED, low_dtypes, seeded
from tfamp.interop import keras_hooks, tf_private
from tfamp.interop.patching import rewrap_methods, wrapped_methods
from tfamp.layers.layer_dtypes import in_float32
from tfamp.layers.model_calls import add_losses_in_float32
from tfamp.planning.structures import node_name
from tfamp.rewriting.function import RewrittenFunction, rewrite
from tfamp.rewriting.pipeline import FlatCall, TracedFunction

Place: TypeAlias = tuple[str, str]  # Scope and name of a node.
# Of the nodes whose functions an op runs in, the outermost first, then of the op.
Path: TypeAlias = tuple[Place, ...]

LOSS_SCOPE, SCALE_SCOPE = "tfamp_loss", "tfamp_loss_scale"
_LAYER = "_tfamp_layer"
_MARKER = re.compile(r"tfamp_layer_(\d+)(?:_\d+)?(?:/|$)")
_SCALE = re.compile(r"(^|/)(dynamic_scale|loss_scale)(_\d+)?$")


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """A traced step."""

    graph_def: Any  # Its calls are inlined.
    traced: Any  # The `FuncGraph` it is from.
    inputs: tuple[str, ...]
    values: tuple[Any, ...]  # Of the inputs, handles of variables included.
    given: int  # How many of these are arguments; the rest is captured.
    outputs: tuple[str, ...]
    gradients: Mapping[str, str]  # Names of variables by the tensors that are their gradients.
    operations: tuple[str, ...]  # What has to run as well.
    layers: tuple[Any, ...]  # In the order of their first calls.
    variables: tuple[tuple[str, Any], ...]  # Name and `tf.Variable` of what has to be finite.
    reads: Mapping[str, str]  # Names of variables by the input that is their handle or value.
    rewritten_by: str = ""
    scale: float = 1.0  # The loss scale; 1 where there is none.
    scale_name: str | None = None  # That of the variable that holds it.
    scale_adapts: bool = True
    scale_at: int | None = None  # Its position, or that of its handle, among the values.

    def layer_of(self, path: Path) -> Any:
        """Returns the layer of an op, by the marks of the tracing; None if it is in none."""
        marks: dict[Place, int] = {}
        by_name_scope: dict[str, set[int]] = defaultdict(set)
        for scope, nodes, _ in bodies(self.graph_def):
            for node in nodes:
                if _LAYER in node.attr:
                    marks[scope, node.name] = int(node.attr[_LAYER].s)
                    by_name_scope[node.name.rpartition("/")[0]].add(marks[scope, node.name])
        for place in reversed(path):
            found = marks.get(place)
            if found is None and (named := _MARKER.findall(place[1])):
                found = int(named[-1])
            scope = place[1].rpartition("gradient_tape/")[2]
            while found is None and "/" in scope:
                scope = scope.rpartition("/")[0]
                if len(by_name_scope[scope]) == 1:
                    (found,) = by_name_scope[scope]
            if found is not None:
                return self.layers[found]
        return None

    def owner_of(self, variable: Any) -> Any:
        """Returns the innermost layer that holds a `tf.Variable`; None if no layer does."""
        holders = [
            layer for layer in self.layers if any(v is variable for _, v in _named(layer.variables))
        ]
        return min(holders, key=lambda layer: len(all_layers(layer)), default=None)

    def where_made(self, node: str) -> str | None:
        """Returns the line of the user's code that made an op, if it is known."""
        try:
            operation = self.traced.get_operation_by_name(node)
        except (KeyError, ValueError):  # It was inlined, and has another name where it was made.
            return None
        modules = (tf, keras, tfamp)
        libraries = tuple(os.path.dirname(os.path.abspath(str(m.__file__))) for m in modules)
        for frame in reversed(operation.traceback or ()):
            file = frame.filename
            installed = "site-packages" in file or "dist-packages" in file
            # TensorFlow and others name code that they generate "<...>", and put it into no folder.
            if not (installed or file.startswith(("<", *libraries))):
                return f"{file}:{frame.lineno} in {frame.name}"
        return None


# ---- A model -------------------------------------------------------------------------------------


def trace_model(model: Any, x: Any, y: Any, loss: Any, dtype: str | None) -> Step:
    """Traces the training step of a built model: forward, loss, scaled loss, gradients.

    Without targets and a loss only the forward pass is traced. At level O1 it is rewritten, as the
    steps of `fit` are.
    """
    compute_loss = _loss_function(model, y, loss)
    trained = [variable.value for variable in model.trainable_variables]

    def body(x: Any, y: Any, scale: Any) -> tuple[list[Any], list[Any]]:
        with tf.GradientTape() as tape:
            outputs = model(x, training=compute_loss is not None)
            if dtype is not None:  # As a policy of tfamp's would have it.
                outputs = keras.tree.map_structure(in_float32, outputs)
            results = float_tensors(outputs)
            if compute_loss is None:
                return results, []
            with tf.name_scope(LOSS_SCOPE):
                loss = compute_loss(x, y, outputs)
            with tf.name_scope(SCALE_SCOPE):
                # In float32, as a scaled loss easily exceeds float16's range.
                scaled = tf.cast(loss, tf.float32) * scale
        gradients = tape.gradient(scaled, trained)
        return [*results, loss, scaled], gradients

    optimizer = getattr(model, "optimizer", None)
    variables = [*model.variables, *(optimizer.variables if optimizer is not None else ())]
    scale, scale_name = _loss_scale(optimizer)
    args = (*keras.tree.map_structure(_as_input, (x, y)), tf.constant(1.0))
    # As in `fit`, AutoGraph leaves the code of layers as it is.
    body = tf.autograph.experimental.do_not_convert(body)
    rewrite = _rewrite_of(model) if dtype is None else None
    if rewrite is not None:
        body = rewrite(tf.function(body, autograph=False))
    with computing_in(model, dtype), _losses_kept(model):
        step = _trace(body, args, trained)
    return dataclasses.replace(
        step,
        rewritten_by="" if rewrite is None else "prepare",
        variables=tuple(_named(variables)),
        scale=scale,
        scale_name=scale_name,
        scale_adapts=hasattr(optimizer, "dynamic_scale") and getattr(optimizer, "dynamic", True),
        scale_at=step.given - 1,
    )


def _rewrite_of(model: Any) -> Callable[..., Any] | None:
    """What rewrites the steps of `fit` at level O1; not where autocast runs them instead."""
    if model.run_eagerly or model.distribute_strategy.num_replicas_in_sync > 1:
        return None
    return getattr(wrapped_methods(model).get("train_step"), "rewrite", None)


def _loss_function(model: Any, y: Any, loss: Any) -> Callable[[Any, Any, Any], Any] | None:
    """What computes the loss from inputs, targets and outputs; None if there is none."""
    if loss is not None:
        given = _checked_loss(loss)
        return lambda x, y, outputs: _mean_loss(model, given(y, outputs))
    own = getattr(type(model), "compute_loss", keras.Model.compute_loss)
    has_loss = y is not None or own is not keras.Model.compute_loss
    if has_loss and getattr(model, "compiled", False):
        return lambda x, y, outputs: model.compute_loss(x, y, outputs, training=True)
    if y is not None:
        raise ValueError(
            "find_nonfinite got targets y, but no loss: the model is not compiled. Give loss=, as "
            "for compile, or leave y out to look at the forward pass only."
        )
    return None


def _mean_loss(model: Any, values: Any) -> Any:
    mean = tf.reduce_mean(values) if values.shape.rank != 0 else values
    return sum((tf.cast(extra, mean.dtype) for extra in model.losses), mean)


def _checked_loss(given: Any) -> Callable[[Any, Any], Any]:
    """A loss of targets and outputs; of outputs alone where it takes one argument only."""
    if not isinstance(given, str) and not callable(given):
        raise TypeError(
            f"loss must be the name of a Keras loss, a keras.losses.Loss or a function of targets "
            f"and outputs; got {given!r}."
        )
    loss: Any = keras.losses.get(given)

    def call(y: Any, outputs: Any) -> Any:
        takes_y = y is not None or isinstance(loss, keras.losses.Loss)
        args = (y, outputs) if takes_y or _required_arguments(loss) != 1 else (outputs,)
        return tf.convert_to_tensor(loss(*args))

    return call


def _required_arguments(function: Callable[..., Any]) -> int:
    return sum(
        each.default is each.empty
        and each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)
        for each in inspect.signature(function).parameters.values()
    )


def _loss_scale(optimizer: Any) -> tuple[float, str | None]:
    dynamic = getattr(optimizer, "dynamic_scale", None)
    if dynamic is not None:
        return float(keras.ops.convert_to_numpy(dynamic)), str(dynamic.path)
    fixed = getattr(optimizer, "loss_scale_factor", None)
    return (float(fixed), "loss_scale_factor") if fixed else (1.0, None)


@contextlib.contextmanager
def _losses_kept(model: Any) -> Iterator[None]:
    """Drops the losses that layers add while they are traced: these belong to the trace.

    They are float32, as where the model computes in a low dtype because of tfamp.
    """
    with contextlib.ExitStack() as undo:
        for layer in all_layers(model):
            undo.callback(keras_hooks.replace_losses(layer))
            undo.callback(rewrap_methods, layer, wrapped_methods(layer))
            add_losses_in_float32(layer)
        yield


def _as_input(value: Any) -> Any:
    """A value as Keras would feed it."""
    if value is None or tf.is_tensor(value):
        return value
    array = np.asarray(value)
    is_wide = array.dtype == np.float64
    return tf.convert_to_tensor(array.astype(keras.config.floatx()) if is_wide else array)


# ---- A function ----------------------------------------------------------------------------------


def trace_function(function: Any, x: Any, y: Any, loss: Any, dtype: str | None) -> Step:
    """Traces a function for a call; one that is float32 is rewritten for a low dtype."""
    rewritten = isinstance(function, RewrittenFunction)
    low = dtype if dtype in LOW_PRECISION else None
    if rewritten and low is not None:
        function = function.copy(low)
    args = _arguments(function, x, None if loss is not None else y)
    step = _trace(*_with_loss(function, args, y, loss))
    if not rewritten and low is not None and not low_dtypes(observed_scopes(step.graph_def)):
        rewritten = True
        function = rewrite(function, dtype=low, placement="lists")
        step = _trace(*_with_loss(function, args, y, loss))
    return dataclasses.replace(step, rewritten_by="rewrite" if rewritten else "")


def _arguments(function: Callable[..., Any], x: Any, y: Any) -> tuple[Any, ...]:
    """`x` and `y` as arguments; a tuple `x` is all of them where the function takes as many."""
    if y is not None:
        return (x, y)
    if not isinstance(x, tuple):
        return (x,)
    try:
        count = _required_arguments(getattr(function, "python_function", function))
    except (TypeError, ValueError):
        return (x,)
    return x if len(x) == count > 1 else (x,)


def _with_loss(function: Any, args: tuple[Any, ...], y: Any, loss: Any) -> tuple[Any, Any]:
    """A function of outputs, loss and gradients where a loss is given, and its arguments."""
    if loss is None:
        return function, args
    loss = _checked_loss(loss)

    def step(*given: Any) -> Any:
        with tf.GradientTape() as tape:
            outputs = function(*given[:-1])
            with tf.name_scope(LOSS_SCOPE):
                value = tf.reduce_mean(loss(given[-1], outputs))
        if variables := tape.watched_variables():
            tape.gradient(value, variables)
        return [*tf.nest.flatten(outputs, expand_composites=True), value]

    return step, (*args, y)


# ---- Tracing -------------------------------------------------------------------------------------


@dataclass(eq=False)
class _Notes:
    """What is noted while a step is traced."""

    mark_names: bool
    layers: dict[int, Any] = field(default_factory=dict)  # By `id`.
    gradients: list[tuple[Any, Any]] = field(default_factory=list)

    def call_layer(self, layer: Any, call: Callable[[], Any]) -> Any:
        if tf.executing_eagerly():
            return call()
        self.layers.setdefault(id(layer), layer)
        number = list(self.layers).index(id(layer))
        # What a tape computes from these ops is named after their name scope, and has no attribute.
        name = f"tfamp_layer_{number}"
        scope = tf.name_scope(name) if self.mark_names else contextlib.nullcontext()
        with tf_private.ops_marked(_LAYER, str(number)), scope:
            return call()

    def take_gradient(self, sources: Any, gradients: Any) -> None:
        flat = tf.nest.flatten(gradients, expand_composites=False)
        self.gradients += zip(tf.nest.flatten(sources), flat, strict=False)


def _trace(function: Any, args: tuple[Any, ...], sources: Sequence[Any] = ()) -> Step:
    """Traces a function for a call; with sources, it returns results and their gradients."""
    notes = _Notes(mark_names=not isinstance(function, RewrittenFunction))
    call = FlatCall(tf.nest.map_structure(_as_tensor, args), {})
    with (
        observing_layers(notes.call_layer),
        tf_private.constants_noted(_note_rounding),
        tf_private.gradients_noted(notes.take_gradient),
    ):
        traced = _traced(function, call)
    graph, captured = traced.graph, traced.captured_inputs
    layers = tuple(notes.layers.values())
    paths = {id(v): path for layer in layers for path, v in _named(layer.variables)}
    variables = [(paths.get(id(v), _bare(v)), v) for v in graph.variables]
    handles = {id(variable.handle): name for name, variable in variables}
    scale = next((v for v in graph.variables if _SCALE.search(_bare(v))), None)
    inputs = [tensor.name for tensor in traced.inputs]
    values = (*call.tensors, *captured)
    places = (i for i, value in enumerate(values) if scale is not None and value is scale.handle)
    outputs = tuple(dict.fromkeys(tensor.name for tensor in traced.outputs))
    if sources:
        notes.take_gradient(sources, traced.structured_outputs[1])
    gradients = dict(_gradients(graph, notes.gradients, paths))
    operations = tuple(operation.name for operation in graph.control_outputs)
    graph_def = inline_calls(
        graph.as_graph_def(add_shapes=False), keep=[*outputs, *gradients, *operations]
    )
    return Step(
        graph_def=seeded(unshare_branches(graph_def)),
        traced=graph,
        inputs=tuple(inputs),
        values=values,
        given=len(call.tensors),
        outputs=outputs,
        gradients=gradients,
        operations=operations,
        layers=layers,
        variables=tuple(variables),
        reads={
            node_name(tensor): handles[id(value)]
            for tensor, value in zip(inputs, values, strict=True)
            if id(value) in handles
        },
        scale=1.0 if scale is None else float(scale.numpy()),
        scale_name=None if scale is None else _bare(scale),
        scale_at=next(places, None),
    )


def _note_rounding(value: Any, tensor: Any) -> None:
    """Keeps what a low-precision constant was before it was rounded."""
    if tensor.dtype.name not in LOW_PRECISION:
        return
    with np.errstate(all="ignore"):
        given = np.asarray(value, np.float64)
        rounded = given.astype(tensor.dtype.as_numpy_dtype).astype(np.float64)
    if given.size and not np.array_equal(given, rounded, equal_nan=True):
        shaped = np.broadcast_to(given, tensor.shape) if given.size == 1 else given
        proto = tf.make_tensor_proto(shaped.reshape(tensor.shape).astype(np.float32))
        tf_private.set_attribute(tensor.op, UNROUNDED, proto)


def _traced(function: Any, call: FlatCall) -> Any:
    """The concrete function of a call; its inputs are the call's tensors, then what it captures."""
    if isinstance(function, RewrittenFunction):
        function = function.copy().concrete(*call.args)  # Traced now, with notes.
    elif not isinstance(function, tf.types.experimental.ConcreteFunction):
        return TracedFunction.of(function).trace(call)
    given = len(function.inputs) - len(function.captured_inputs)
    if given == len(call.tensors):
        return function
    # It has arguments that are no tensors: what was made of them is known inside a call only.
    return TracedFunction.of(lambda *args: function(*args)).trace(call)


def _as_tensor(value: Any) -> Any:
    return tf.convert_to_tensor(value) if isinstance(value, np.ndarray | np.generic) else value


def _gradients(
    graph: Any, noted: Sequence[tuple[Any, Any]], paths: Mapping[int, str]
) -> Iterator[tuple[str, str]]:
    for source, gradient in noted:
        values = gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient
        variable = keras_hooks.native(source)
        is_here = tf.is_tensor(values) and getattr(values, "graph", None) is graph
        if is_here and isinstance(variable, tf.Variable) and values.dtype.name in FLOAT_DTYPES:
            with graph.as_default():  # What is fetched is made by an Identity.
                yield tf.identity(values).name, paths.get(id(variable), _bare(variable))


def _named(variables: Iterable[Any]) -> list[tuple[str, Any]]:
    """The paths of Keras variables, and names of others, with the `tf.Variable`s behind them."""
    return [(getattr(v, "path", None) or _bare(v), keras_hooks.native(v)) for v in variables]


def _bare(variable: Any) -> str:
    return str(variable.name).partition(":")[0]


def shown_name(node: str) -> str:
    """Returns a node's name as it would be without the marks of the tracing."""
    return _MARKER.sub("", node)
