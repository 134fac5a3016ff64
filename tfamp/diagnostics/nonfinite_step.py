"""The step of a model or a function as one graph whose ops are marked with their layers."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import keras
import numpy as np
import tensorflow as tf

from tfamp.core.dtypes import FLOAT_DTYPES, LOW_PRECISION
from tfamp.diagnostics.model_runs import computing_in, observing_layers
from tfamp.graph.functions import bodies, flattened
from tfamp.graph.observe import UNROUNDED, low_dtypes, observed_scopes, seeded
from tfamp.interop import keras_hooks, tf_private
from tfamp.interop.keras_hooks import layers_of
from tfamp.interop.patching import rewrap_methods, wrapped_methods
from tfamp.layers.layer_dtypes import in_float32
from tfamp.layers.model_calls import add_losses_in_float32
from tfamp.planning.structures import node_name
from tfamp.rewriting.function import RewrittenFunction, rewrite
from tfamp.rewriting.pipeline import FlatCall, TracedFunction

Place: TypeAlias = tuple[str, str]  # Scope and name of a node.
# Of the nodes whose functions an op runs in, the outermost first, then of the op.
Path: TypeAlias = tuple[Place, ...]

LOSS_SCOPE = "tfamp_loss"
_LAYER = "_tfamp_layer"
_MARKER = re.compile(r"tfamp_layer_(\d+)(?:_\d+)?(?:/|$)")
_SCALE = re.compile(r"(^|/)(dynamic_scale|loss_scale)(_\d+)?$")


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """A traced step."""

    graph_def: Any  # Its calls are inlined.
    inputs: tuple[str, ...]
    values: tuple[Any, ...]  # Of the inputs: arguments, then captures with handles of variables.
    outputs: tuple[str, ...]
    gradients: Mapping[str, str]  # Names of variables by the tensors that are their gradients.
    operations: tuple[str, ...]  # What has to run as well.
    layers: tuple[Any, ...]  # In the order of their first calls.
    variables: tuple[tuple[str, Any], ...]  # Name and `tf.Variable` of what has to be finite.
    reads: Mapping[str, str]  # Names of variables by the input that is their handle or value.
    rewritten_by: str = ""
    scale: Any = None  # The variable that holds the loss scale, if one does.
    scale_adapts: bool = True

    def layer_of(self, path: Path) -> Any:
        """Returns the layer of an op; None if it is in none.

        It is the mark of the tracing: an attribute or, of the ops of a tape, which have the name
        scopes of those that they are the gradients of, a name scope. In a rewritten function, whose
        names stay as they are, it is that of other ops in the name scope.
        """
        marks: dict[Place, int] = {}
        by_name_scope: dict[str, set[int]] = defaultdict(set)
        for scope, nodes, _ in bodies(self.graph_def):
            for node in nodes:
                if _LAYER in node.attr:
                    marks[scope, node.name] = int(node.attr[_LAYER].s)
                    by_name_scope[node.name.rpartition("/")[0]].add(marks[scope, node.name])
        for place in reversed(path):
            marked = [marks[place]] if place in marks else _MARKER.findall(place[1])[-1:]
            found = set(map(int, marked))
            scope = place[1].rpartition("gradient_tape/")[2]
            while len(found) != 1 and "/" in scope:
                scope = scope.rpartition("/")[0]
                found = by_name_scope[scope]
            if len(found) == 1:
                return self.layers[next(iter(found))]
        return None


# ---- A model -------------------------------------------------------------------------------------


def trace_model(model: Any, x: Any, y: Any, loss: Any, dtype: str | None) -> Step:
    """Traces the training step of a built model: forward, loss, scaled loss, gradients.

    Without targets and a loss only the forward pass is traced. At level O1 it is rewritten, as the
    steps of `fit` are.
    """
    compute_loss = _loss_of_model(model, y, loss)
    optimizer = getattr(model, "optimizer", None)

    def forward(x: Any) -> Any:
        outputs = model(x, training=compute_loss is not None)
        # As a policy of tfamp's would have it.
        return outputs if dtype is None else keras.tree.map_structure(in_float32, outputs)

    function, trained, args = forward, [], [x]
    if compute_loss is not None:
        scaled: Callable[[Any], Any] = tf.identity
        # Keras's optimizer with a loss scale has none before it is built.
        names = ("dynamic_scale", "loss_scale_factor")
        if optimizer and any(getattr(optimizer, name, None) is not None for name in names):
            scaled = optimizer.scale_loss
        trained = [variable.value for variable in model.trainable_variables]
        function, args = _with_loss(forward, compute_loss, scaled, trained), [x, y]
    # As in `fit`, AutoGraph leaves the code of layers as it is.
    function = tf.autograph.experimental.do_not_convert(function)
    is_alone = model.distribute_strategy.num_replicas_in_sync == 1 and not model.run_eagerly
    train_step = wrapped_methods(model).get("train_step") if is_alone and dtype is None else None
    rewrite = getattr(train_step, "rewrite", None)
    if rewrite is not None:
        function = rewrite(tf.function(function, autograph=False))
    with computing_in(model, dtype), _losses_kept(model):
        inputs = tuple(keras.tree.map_structure(_as_input, args))
        step = _trace(function, inputs, trained)
    variables = [*model.variables, *(optimizer.variables if optimizer is not None else ())]
    return dataclasses.replace(
        step,
        rewritten_by="" if rewrite is None else "prepare",
        variables=tuple(_named(variables)),
        scale_adapts=getattr(optimizer, "dynamic", True),
    )


def _loss_of_model(model: Any, y: Any, given: Any) -> Callable[..., Any] | None:
    """A function of outputs, inputs and targets that returns the loss; None if there is none."""
    if given is not None:
        loss = _checked_loss(given)

        def with_regularizers(outputs: Any, x: Any, y: Any) -> Any:
            value = tf.reduce_mean(loss(y, outputs))
            return sum((tf.cast(extra, value.dtype) for extra in model.losses), value)

        return with_regularizers
    own = getattr(type(model), "compute_loss", keras.Model.compute_loss)
    has_loss = y is not None or own is not keras.Model.compute_loss
    if has_loss and getattr(model, "compiled", False):
        return lambda outputs, x, y: model.compute_loss(x, y, outputs, training=True)
    if y is not None:
        raise ValueError(
            "find_nonfinite got targets y, but no loss: the model is not compiled. Give loss=, as "
            "for compile, or leave y out to look at the forward pass only."
        )
    return None


def _checked_loss(given: Any) -> Callable[[Any, Any], Any]:
    """A loss of targets and outputs."""
    if not isinstance(given, str) and not callable(given):
        raise TypeError(
            f"loss must be the name of a Keras loss, a keras.losses.Loss or a function of targets "
            f"and outputs; got {given!r}."
        )
    loss: Callable[[Any, Any], Any] = keras.losses.get(given)
    return loss


def _with_loss(
    forward: Callable[..., Any],
    loss: Callable[..., Any],
    scaled: Callable[[Any], Any] = tf.identity,
    trained: Sequence[Any] | None = None,
) -> Callable[..., Any]:
    """A step of a forward pass's arguments and the targets: results, and gradients.

    They are those of the variables that are trained; None is all that the forward pass uses.
    """

    def step(*given: Any) -> tuple[list[Any], Any]:
        with tf.GradientTape() as tape:
            outputs = forward(*given[:-1])
            with tf.name_scope(LOSS_SCOPE):
                value = loss(outputs, *given)
            total = scaled(value)
        variables = tape.watched_variables() if trained is None else trained
        results = [*tf.nest.flatten(outputs, expand_composites=True), value, total]
        return results, tape.gradient(total, variables) if variables else []

    return step


@contextlib.contextmanager
def _losses_kept(model: Any) -> Iterator[None]:
    """Drops the losses that layers add while they are traced: these belong to the trace.

    They are float32, as where the model computes in a low dtype because of tfamp.
    """
    with contextlib.ExitStack() as undo:
        for layer in layers_of(model):
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

    def traced(function: Any) -> Step:
        if loss is None:
            return _trace(function, args)
        given = _checked_loss(loss)
        step = _with_loss(function, lambda out, *all_: tf.reduce_mean(given(all_[-1], out)))
        return _trace(step, (*args, y))

    step = traced(function)
    if not rewritten and low is not None and not low_dtypes(observed_scopes(step.graph_def)):
        rewritten = True
        step = traced(rewrite(function, dtype=low, placement="lists"))
    return dataclasses.replace(step, rewritten_by="rewrite" if rewritten else "")


def _arguments(function: Callable[..., Any], x: Any, y: Any) -> tuple[Any, ...]:
    """`x` and `y` as arguments; a tuple `x` is all of them where the function takes as many."""
    if y is not None or not isinstance(x, tuple):
        return (x,) if y is None else (x, y)
    parameters = inspect.signature(getattr(function, "python_function", function)).parameters
    return x if len(x) == len(parameters) > 1 else (x,)


# ---- Tracing -------------------------------------------------------------------------------------


@dataclass(eq=False)
class _Notes:
    """The layers that are called and the gradients that are taken while a step is traced."""

    mark_names: bool
    layers: dict[int, Any] = field(default_factory=dict)  # By `id`.
    gradients: list[tuple[Any, Any]] = field(default_factory=list)

    def call_layer(self, layer: Any, call: Callable[[], Any]) -> Any:
        if tf.executing_eagerly():
            return call()
        self.layers.setdefault(id(layer), layer)
        number = list(self.layers).index(id(layer))
        scope = tf.name_scope(f"tfamp_layer_{number}") if self.mark_names else nullcontext()
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
    variables = [(paths.get(id(v), bare_name(v)), v) for v in graph.variables]
    handles = {id(variable.handle): name for name, variable in variables}
    inputs = [tensor.name for tensor in traced.inputs]
    values = (*call.tensors, *captured)
    outputs = tuple(dict.fromkeys(tensor.name for tensor in traced.outputs))
    if sources:
        notes.take_gradient(sources, traced.structured_outputs[1])
    gradients = dict(_gradients(graph, notes.gradients, paths))
    operations = tuple(operation.name for operation in graph.control_outputs)
    kept = [*outputs, *gradients, *operations]
    graph_def = flattened(graph.as_graph_def(add_shapes=False), kept).graph
    return Step(
        graph_def=seeded(graph_def),
        inputs=tuple(inputs),
        values=values,
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
        scale=next((v for v in graph.variables if _SCALE.search(bare_name(v))), None),
    )


def _note_rounding(value: Any, tensor: Any) -> None:
    """Keeps what a low-precision constant was before it was rounded."""
    if tensor.dtype.name not in LOW_PRECISION:
        return
    with np.errstate(all="ignore"):
        given = np.asarray(value, np.float64)
        rounded = given.astype(tensor.dtype.as_numpy_dtype).astype(np.float64)
    if not np.array_equal(given, rounded, equal_nan=True):
        # One value stands for all elements of a filled constant.
        proto = tf.make_tensor_proto(given.astype(np.float32), shape=tensor.shape)
        tf_private.set_attribute(tensor.op, UNROUNDED, proto)


def _traced(function: Any, call: FlatCall) -> Any:
    """The concrete function of a call; its inputs are the call's tensors, then its captures."""
    if isinstance(function, RewrittenFunction):
        function = function.copy().concrete(*call.args)  # Traced now, with notes.
    # Arguments that are not tensors here may be constants or tensors of a concrete function.
    is_concrete = isinstance(function, tf.types.experimental.ConcreteFunction)
    if is_concrete and len(function.inputs) - len(function.captured_inputs) == len(call.tensors):
        return function
    return TracedFunction.of(function).trace(call)


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
                yield tf.identity(values).name, paths.get(id(variable), bare_name(variable))


def _named(variables: Iterable[Any]) -> list[tuple[str, Any]]:
    """The paths of Keras variables, and names of others, with the `tf.Variable`s behind them."""
    return [(getattr(v, "path", None) or bare_name(v), keras_hooks.native(v)) for v in variables]


def bare_name(variable: Any) -> str:
    """Returns the name of a `tf.Variable` without its output."""
    return str(variable.name).partition(":")[0]


def shown_name(node: str) -> str:
    """Returns a node's name without the marks of the tracing."""
    return _MARKER.sub("", node)
