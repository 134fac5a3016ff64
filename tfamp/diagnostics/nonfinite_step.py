"""Traces the step of a model or a function as one graph that has the layer of every op."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import keras
import numpy as np
import tensorflow as tf

from tfamp.core.dtypes import FLOAT_DTYPES, LOW_PRECISION
from tfamp.core.kinds import Function, Layer, Model, Nest, Tensor, Trace, Variable
from tfamp.diagnostics.model_runs import computing_in
from tfamp.graph.graph import Graph
from tfamp.graph.observe import UNROUNDED, low_dtypes, observed_scopes, seed
from tfamp.interop import keras_hooks, tf_private
from tfamp.interop.keras_hooks import layers_of
from tfamp.interop.patching import patched_here, rewrap_methods, wrapped_methods
from tfamp.layers.layer_dtypes import in_float32
from tfamp.layers.model_calls import add_losses_in_float32
from tfamp.planning.structures import node_name
from tfamp.rewriting.function import RewrittenFunction, rewrite
from tfamp.rewriting.traced_function import FlatCall, TracedFunction

Place: TypeAlias = tuple[str, str]  # Scope and name of a node.
# The calls that an op runs in, the outermost first, then the op itself.
Path: TypeAlias = tuple[Place, ...]

# A function of tensors in nested structures, such as a step.
_Function: TypeAlias = Callable[..., Any]
_Loss: TypeAlias = Callable[[Nest, Nest], Tensor]

LOSS_SCOPE = "tfamp_loss"
_LAYER = "_tfamp_layer"
_OF_A_TAPE = re.compile(r"(?:^|.*/)(?:gradient_tape|gradients)/")
_SCALE = re.compile(r"(^|/)(dynamic_scale|loss_scale)(_\d+)?$")


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """A traced step."""

    graph: Graph  # Its calls are inlined.
    inputs: tuple[str, ...]
    # The inputs' values: arguments, then captured tensors and handles.
    values: tuple[Tensor, ...]
    outputs: tuple[str, ...]
    gradients: Mapping[str, str]  # Gradient tensor -> name of its variable.
    operations: tuple[str, ...]  # Ops that run for their effects.
    layers: tuple[Layer, ...]  # In the order of their first calls.
    # Name and `tf.Variable`, which has to be finite.
    variables: tuple[tuple[str, Variable], ...]
    # Input that is the handle or value of a variable -> name of the variable.
    reads: Mapping[str, str]
    rewritten_by: str = ""
    scale: Variable = None  # The variable that holds the loss scale, if one does.
    scale_adapts: bool = True

    def layer_of(self, path: Path) -> Layer:
        """Returns the innermost layer around an op; None if it is in none.

        Tracing marks the ops of a layer with an attribute. Others, of a tape or of a rewrite,
        are named after marked ops: such an op is in the layer of these that share its name, or,
        if they are of several layers, the next shorter part of it.
        """
        marks: dict[Place, int] = {}
        by_name: dict[str, set[int]] = defaultdict(set)
        for body in self.graph.bodies:
            for node in body.nodes:
                if _LAYER in node.attr:
                    marks[body.scope, node.name] = number = int(node.attr[_LAYER].s)
                    for name in (node.name, node.name.rpartition("/")[0]):
                        by_name[name].add(number)
        for place in reversed(path):
            numbers = {marks[place]} if place in marks else set()
            name = _OF_A_TAPE.sub("", place[1])
            while len(numbers) != 1 and "/" in name:
                name = name.rpartition("/")[0]
                numbers = by_name[name]
            if len(numbers) == 1:
                return self.layers[next(iter(numbers))]
        return None


def trace_step(model_or_fn: Any, x: Nest, y: Nest, loss: Any, dtype: str | None) -> Step:
    """Traces the step that the arguments of `find_nonfinite` describe."""
    if not isinstance(model_or_fn, keras.Layer):
        return _trace_function(model_or_fn, x, y, loss, dtype)
    sizes = {leaf.shape[0] for leaf in keras.tree.flatten(x) if len(getattr(leaf, "shape", ()))}
    if sizes == {0}:
        raise ValueError(
            "x is an empty batch, whose mean loss is NaN in any precision. Give an example or more."
        )
    if not model_or_fn.built:
        model_or_fn(keras.tree.map_structure(keras.ops.convert_to_tensor, x))
    train_step_of_class: Any = getattr(type(model_or_fn), "train_step", None)
    has_own_step = train_step_of_class not in (None, keras.Model.train_step)
    if y is not None and loss is None and has_own_step:
        # Its results are logs: metrics add up all steps.
        def train_step(*data: Nest) -> None:
            train_step_of_class(model_or_fn, data)

        return _trace_as_in_fit(model_or_fn, train_step, (x, y), (), dtype)
    return _trace_model(model_or_fn, x, y, loss, dtype)


# ---- A model -------------------------------------------------------------------------------------


def _trace_model(model: Model, x: Nest, y: Nest, loss: Any, dtype: str | None) -> Step:
    """Traces the training step of a built model: forward, loss, scaled loss, gradients.

    Without targets and a loss only the forward pass is traced. At level O1 it is rewritten,
    like the steps of `fit`.
    """
    compute_loss = _loss_of_model(model, y, loss)
    optimizer = getattr(model, "optimizer", None)

    def forward(x: Nest) -> Nest:
        outputs = model(x, training=compute_loss is not None)
        # Under one of tfamp's policies outputs are float32.
        return outputs if dtype is None else keras.tree.map_structure(in_float32, outputs)

    function, trained, args = forward, [], [x]
    if compute_loss is not None:
        scaled: Callable[[Tensor], Tensor] = tf.identity
        # Keras's LossScaleOptimizer has no scale before it is built.
        names = ("dynamic_scale", "loss_scale_factor")
        if optimizer and any(getattr(optimizer, name, None) is not None for name in names):
            scaled = optimizer.scale_loss
        trained = [variable.value for variable in model.trainable_variables]
        function, args = _with_loss(forward, compute_loss, scaled, trained), [x, y]
    step = _trace_as_in_fit(model, function, args, trained, dtype)
    return dataclasses.replace(step, scale_adapts=getattr(optimizer, "dynamic", True))


def _trace_as_in_fit(
    model: Model,
    function: _Function,
    args: Nest,
    trained: Sequence[Variable],
    dtype: str | None,
) -> Step:
    """Traces a step of a model; at level O1 it is rewritten."""
    # As in `fit`, AutoGraph leaves the code of layers as it is.
    function = tf.autograph.experimental.do_not_convert(function)
    rewrite: Any = getattr(wrapped_methods(model).get("train_step"), "rewrite", None)
    is_rewritten = rewrite is not None and dtype is None and not model.run_eagerly
    is_rewritten = is_rewritten and model.distribute_strategy.num_replicas_in_sync == 1
    if is_rewritten:
        function = rewrite(tf.function(function, autograph=False))
    with computing_in(model, dtype), _losses_kept(model):
        inputs = tuple(keras.tree.map_structure(_as_input, args))
        step = _trace(function, inputs, trained)
    variables = [*model.variables, *getattr(getattr(model, "optimizer", None), "variables", ())]
    by = "prepare" if is_rewritten else ""
    return dataclasses.replace(step, rewritten_by=by, variables=tuple(_named(variables)))


def _loss_of_model(model: Model, y: Nest, loss_argument: Any) -> _Function | None:
    """Returns the loss as a function of outputs, inputs and targets; None without one."""
    if loss_argument is not None:
        loss = _checked_loss(loss_argument)

        def with_regularizers(outputs: Nest, x: Nest, y: Nest) -> Nest:
            value = tf.reduce_mean(loss(y, outputs))
            return sum((tf.cast(extra, value.dtype) for extra in model.losses), value)

        return with_regularizers
    compute_loss = getattr(type(model), "compute_loss", keras.Model.compute_loss)
    has_loss = y is not None or compute_loss is not keras.Model.compute_loss
    if has_loss and getattr(model, "compiled", False):
        return lambda outputs, x, y: model.compute_loss(x, y, outputs, training=True)
    if y is not None:
        raise ValueError(
            "find_nonfinite got targets y, but no loss: the model is not compiled. Give loss=, "
            "as for compile, or leave y out to check the forward pass only."
        )
    return None


def _checked_loss(loss: Any) -> _Loss:
    """Returns a loss as a function of targets and outputs."""
    if not isinstance(loss, str) and not callable(loss):
        raise TypeError(
            "loss must be the name of a Keras loss, a keras.losses.Loss or a function of "
            f"targets and outputs; got {loss!r}. For losses of several outputs compile the "
            "model with them, and leave loss out."
        )
    checked: _Loss = keras.losses.get(loss)
    return checked


def _with_loss(
    forward: _Function,
    loss: _Function,
    scaled: Callable[[Tensor], Tensor] = tf.identity,
    trained: Sequence[Variable] | None = None,
) -> _Function:
    """Returns a step: arguments of the forward pass and targets -> results and gradients.

    The gradients are with respect to `trained`; None is all variables that the forward pass
    uses.
    """

    def step(*args: Nest) -> tuple[list[Tensor], Nest]:
        with tf.GradientTape() as tape:
            outputs = forward(*args[:-1])
            with tf.name_scope(LOSS_SCOPE):
                value = loss(outputs, *args)
            total = scaled(value)
        variables = tape.watched_variables() if trained is None else trained
        results = [*tf.nest.flatten(outputs, expand_composites=True), value, total]
        return results, tape.gradient(total, variables) if variables else []

    return step


@contextlib.contextmanager
def _losses_kept(model: Model) -> Iterator[None]:
    """Drops the losses that layers add during tracing: they are symbolic tensors of the trace.

    They are float32, as in every model that tfamp converted.
    """
    with contextlib.ExitStack() as undo:
        for layer in layers_of(model):
            undo.callback(keras_hooks.replace_losses(layer))
            undo.callback(rewrap_methods, layer, wrapped_methods(layer))
            add_losses_in_float32(layer)
        yield


def _as_input(value: Tensor) -> Tensor:
    """Returns a value as Keras would feed it: not as float64, which NumPy makes of floats."""
    if value is None or tf.is_tensor(value):
        return value
    array = np.asarray(value)
    return array.astype(keras.config.floatx()) if array.dtype == np.float64 else array


# ---- A function ----------------------------------------------------------------------------------


def _trace_function(function: Function, x: Nest, y: Nest, loss: Any, dtype: str | None) -> Step:
    """Traces a function; a float32 one is rewritten if a low dtype is given."""
    rewritten = isinstance(function, RewrittenFunction)
    low = dtype if dtype in LOW_PRECISION else None
    if rewritten and low is not None:
        function = function.copy(low)
    args = _arguments(function, x, None if loss is not None else y)

    def traced(function: _Function) -> Step:
        if loss is None:
            return _trace(function, args)
        loss_of = _checked_loss(loss)

        def mean_loss(outputs: Nest, *args: Nest) -> Tensor:
            return tf.reduce_mean(loss_of(args[-1], outputs))

        return _trace(_with_loss(function, mean_loss), (*args, y))

    step = traced(function)
    if not rewritten and low is not None and not low_dtypes(observed_scopes(step.graph)):
        rewritten = True
        step = traced(rewrite(function, dtype=low, placement="lists"))
    return dataclasses.replace(step, rewritten_by="rewrite" if rewritten else "")


def check_arguments(model_or_fn: Any, x: Nest, y: Nest) -> None:
    """Raises a TypeError if `x` is left out, an empty tuple, and something needs it."""
    if not isinstance(x, tuple) or x:
        return
    is_model = isinstance(model_or_fn, keras.Layer)
    needed = ["x"] if is_model or y is not None else _needed_arguments(model_or_fn)
    if needed:
        raise TypeError(
            "find_nonfinite got no batch x, which is for functions without arguments; "
            f"{needed[0]} is missing here. Give one batch: find_nonfinite(model_or_fn, x, y)."
        )


def _arguments(function: _Function, x: Nest, y: Nest) -> tuple[Nest, ...]:
    """Returns `x` and `y` as arguments; a tuple `x` if the function takes as many."""
    if y is not None or not isinstance(x, tuple):
        return (x,) if y is None else (x, y)
    return x if not x or len(x) == len(_parameters(function)) > 1 else (x,)


def _needed_arguments(function: _Function) -> list[str]:
    """Returns the names of a function's arguments without a default."""
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [
        parameter.name
        for parameter in _parameters(function)
        if parameter.kind in positional and parameter.default is parameter.empty
    ]


def _parameters(function: _Function) -> Sequence[inspect.Parameter]:
    function = getattr(function, "python_function", function)
    return tuple(inspect.signature(function).parameters.values())


# ---- Tracing -------------------------------------------------------------------------------------


@dataclass(eq=False)
class _Notes:
    """Layers called and gradients taken during tracing.

    Its methods replace functions of Keras and TensorFlow, which they get as `original`.
    """

    layers: dict[int, Layer] = field(default_factory=dict)  # By `id`.
    gradients: list[tuple[Variable, Tensor]] = field(default_factory=list)

    def call_layer(self, original: _Function, layer: Layer, *args: Any, **kwargs: Any) -> Nest:
        """Marks the ops of a layer with its number."""
        if tf.executing_eagerly():
            return original(layer, *args, **kwargs)
        self.layers.setdefault(id(layer), layer)
        number = list(self.layers).index(id(layer))
        with tf_private.ops_marked(_LAYER, str(number)):
            return original(layer, *args, **kwargs)

    def gradient(
        self,
        original: _Function,
        tape: tf.GradientTape,
        target: Nest,
        sources: Nest,
        *args: Any,
        **kwargs: Any,
    ) -> Nest:
        """Notes gradients: a graph does not record which variable a gradient belongs to."""
        gradients = original(tape, target, sources, *args, **kwargs)
        self.add_gradients(sources, gradients)
        return gradients

    def add_gradients(self, sources: Nest, gradients: Nest) -> None:
        """Notes gradients, which have the structure of their sources."""
        pairs = zip(tf.nest.flatten(sources), tf.nest.flatten(gradients), strict=False)
        self.gradients += pairs


def _trace(function: _Function, args: tuple[Nest, ...], sources: Sequence[Variable] = ()) -> Step:
    """Traces a function; with `sources`, it returns results and gradients by these."""
    notes = _Notes()
    call = FlatCall(tf.nest.map_structure(_as_tensor, args), {})
    with patched_here(
        layer_call=notes.call_layer,
        gradient=notes.gradient,
        constant=_with_exact,
    ):
        traced = _traced(function, call)
    graph, captured = traced.graph, traced.captured_inputs
    layers = tuple(notes.layers.values())
    paths = {id(variable): path for layer in layers for path, variable in _named(layer.variables)}
    variables = [
        (paths.get(id(variable), bare_name(variable)), variable) for variable in graph.variables
    ]
    handles = {id(variable.handle): name for name, variable in variables}
    inputs = [tensor.name for tensor in traced.inputs]
    values = (*call.tensors, *captured)
    outputs = tuple(dict.fromkeys(tensor.name for tensor in traced.outputs))
    if sources:
        notes.add_gradients(sources, traced.structured_outputs[1])
    gradients = dict(_gradients(graph, notes.gradients, paths))
    operations = tuple(operation.name for operation in graph.control_outputs)
    kept = [*outputs, *gradients, *operations]
    flat = Graph(graph.as_graph_def(add_shapes=False), kept).flatten()
    seed(flat)
    reads = {
        node_name(tensor): handles[id(value)]
        for tensor, value in zip(inputs, values, strict=True)
        if id(value) in handles
    }
    scales = (variable for variable in graph.variables if _SCALE.search(bare_name(variable)))
    scale = next(scales, None)
    # The state of a loss scale that a step updates; a fixed scale is not part of it.
    writes = (node.input[0] for node in flat.main.of_types("AssignVariableOp"))
    written = {reads.get(node_name(handle), "").rpartition("/")[2] for handle in writes}
    return Step(
        graph=flat,
        inputs=tuple(inputs),
        values=values,
        outputs=outputs,
        gradients=gradients,
        operations=operations,
        layers=layers,
        variables=tuple(variables),
        reads=reads,
        scale=scale,
        scale_adapts="skipped_steps" not in written or "dynamic_scale" in written,
    )


def _with_exact(original: _Function, value: Any, *args: Any, **kwargs: Any) -> Tensor:
    """Creates a constant; one of low precision keeps its unrounded value as an attribute."""
    tensor = original(value, *args, **kwargs)
    if tensor.dtype.name in LOW_PRECISION:
        with np.errstate(over="ignore"):
            exact = np.asarray(value).astype(np.float32)
        # One value stands for all elements of a filled constant.
        proto = tf.make_tensor_proto(exact, shape=tensor.shape)
        tf_private.set_attribute(tensor.op, UNROUNDED, proto)
    return tensor


def _traced(function: Function, call: FlatCall) -> Trace:
    """Returns the concrete function of a call; it takes the call's tensors, then captures."""
    if isinstance(function, RewrittenFunction):
        function = function.copy().concrete(*call.args)  # Traced now, with notes.
    # Arguments that are not tensors here may be constants or tensors of a concrete function.
    is_concrete = isinstance(function, tf.types.experimental.ConcreteFunction)
    takes = len(function.inputs) - len(function.captured_inputs) if is_concrete else None
    if takes == len(call.tensors):
        return function
    return TracedFunction.of(function).trace(call)


def _as_tensor(value: Nest) -> Nest:
    return tf.convert_to_tensor(value) if isinstance(value, np.ndarray | np.generic) else value


def _gradients(
    graph: tf.Graph, noted: Sequence[tuple[Variable, Tensor]], paths: Mapping[int, str]
) -> Iterator[tuple[str, str]]:
    for source, gradient in noted:
        values = gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient
        variable = keras_hooks.native(source)
        is_here = tf.is_tensor(values) and getattr(values, "graph", None) is graph
        if is_here and isinstance(variable, tf.Variable) and values.dtype.name in FLOAT_DTYPES:
            with graph.as_default():  # Fetched tensors have to be the output of an Identity.
                yield tf.identity(values).name, paths.get(id(variable), bare_name(variable))


def _named(variables: Iterable[Variable]) -> list[tuple[str, Variable]]:
    """Returns paths of Keras variables, or names of others, with their `tf.Variable`s."""
    return [
        (getattr(variable, "path", None) or bare_name(variable), keras_hooks.native(variable))
        for variable in variables
    ]


def bare_name(variable: Variable) -> str:
    """Returns the name of a `tf.Variable` without ":0"."""
    return str(variable.name).partition(":")[0]
