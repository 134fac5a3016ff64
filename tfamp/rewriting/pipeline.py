"""A trace, converted to low precision, as part of the function that is being traced now.

trace -> flat graph -> measured ranges -> converted graph -> nodes of the current graph

The nodes become nodes of the current graph, so TensorFlow differentiates them like any others. What
names alone do not carry over is put right here: functions get names of their own, and custom
gradients use the copies of what they refer to.

The function of a `tf.custom_gradient` is a closure over tensors of the graph it was traced in. In a
graph that holds copies of the nodes, the closure is traced once more when its gradient is asked
for, with the copies in the place of the tensors it refers to; that trace is converted as well.
"""

from __future__ import annotations

import copy
import functools
import itertools
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from tfamp.core.errors import NothingConvertedWarning, RewriteError
from tfamp.graph.functions import (
    CALLS,
    GRADIENT,
    INLINED_INTO,
    argument_name,
    attribute_text,
    bodies,
    called_functions,
    inline_calls,
    library_of,
    new_suffix,
    reached_functions,
    rename_functions,
    unshare_branches,
)
from tfamp.graph.rewrite import convert_prepared, prepare, resolved
from tfamp.graph.spelling import SHAPES
from tfamp.interop import tf_private
from tfamp.interop.tf_private import as_written
from tfamp.planning.options import GraphUse, RewriteOptions
from tfamp.planning.ranges import Ranges
from tfamp.planning.structures import FLOAT32, LOOPS, RewritePlan, node_name, producers_first
from tfamp.rewriting.traced_function import FlatCall, TracedFunction, made_of

_NUMBERS = itertools.count(1)
_CUSTOM = "CustomGradient-"
# Of a node with a custom gradient: the dtypes of its outputs as it was traced.
_DTYPES = "_tfamp_gradient_dtypes"
# What is left out when nodes are added to a graph. Shapes are inferred again; what a node is
# colocated with may have been an input.
_LEFT_OUT = (SHAPES, "_class", INLINED_INTO, _DTYPES)


@dataclass(frozen=True)
class FlatGraph:
    """The graph of a trace with its calls inlined; its owner may change it.

    Attributes:
        traced: The `tf.types.experimental.ConcreteFunction`.
        graph_def: The graph.
        inputs: Names of its inputs, captured ones included.
        outputs: Names of its outputs.
    """

    traced: Any
    graph_def: Any
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    @classmethod
    def of(cls, traced: Any) -> FlatGraph:
        """Returns the graph of a trace."""
        made = made_of(traced)
        if "flat" not in made:
            inputs = tuple(tensor.name for tensor in traced.inputs)
            outputs = tuple(tensor.name for tensor in traced.outputs)
            graph_def = traced.graph.as_graph_def(add_shapes=True)  # A new message each time.
            inline_calls(graph_def, (*outputs, *inputs))
            for node in _custom_nodes(graph_def):
                node.attr[_DTYPES].CopyFrom(node.attr["T"])
            made["flat"] = cls(traced, unshare_branches(graph_def), inputs, outputs)
        flat: FlatGraph = made["flat"]
        return flat

    def converted(self, options: RewriteOptions, ranges: Ranges | None) -> tuple[Any, RewritePlan]:
        """Returns the graph in low precision, and the plan; its passes run on it in place.

        Rewrites that share the trace share the graph behind its passes, and its index.
        """
        options, use = resolved(options), graph_use(self.outputs, self.inputs, options, ranges)
        made = made_of(self.traced)
        is_shared = "flat" in made
        if "prepared" not in made:
            made["prepared"] = prepare(self.graph_def, options, use)
        prepared = made["prepared"].copy() if is_shared else made["prepared"]
        return prepared.graph_def, convert_prepared(prepared, options, use).plan


def graph_use(
    fetches: Iterable[str],
    feeds: Iterable[str],
    options: RewriteOptions,
    ranges: Ranges | None = None,
) -> GraphUse:
    """Returns the use of one graph; the ranges are those on the calibration data."""
    limits = None if options.calibration is None else options.calibration.limits(options.dtype)
    return GraphUse(fetches, feeds, ranges, limits)


def into_current_graph(
    graph: FlatGraph,
    values: Sequence[Any],
    options: RewriteOptions,
    ranges: Ranges | None = None,
) -> tuple[list[Any], RewritePlan | None]:
    """Converts a graph and adds it to the function that is being traced.

    The graph is changed. There is a tensor for each of its inputs, of the dtype it has there; the
    ranges are those on the calibration data. Returns what stands for the outputs, and the plan.
    """
    graph_def, plan = graph.graph_def, None
    if options.dtype != FLOAT32:
        graph_def, plan = graph.converted(options, ranges)
    graph_def = rename_functions(graph_def, new_suffix())
    captured = [tf_private.capture_into_graph(value) for value in values]
    inputs = dict(zip(graph.inputs, captured, strict=True))
    current = tf.compat.v1.get_default_graph()
    scope = _free_scope(graph_def, current, graph.inputs)
    host = _Host(current, scope, inputs, graph.traced.graph, options.for_gradients())
    _adopt_gradients(graph_def, host)
    results = _import_graph_def(graph_def, inputs, graph.outputs, scope)
    tf_private.note_variables(graph.traced.graph.variables)
    return results, plan


# ---- Custom gradients ----------------------------------------------------------------------------


@dataclass(frozen=True)
class _Host:
    """The graph that the nodes of a trace are copied to; finds the copies.

    Attributes:
        graph: The graph.
        scope: The name scope of the copies.
        inputs: What stands for the inputs of the trace, by name.
        traced: The `FuncGraph` that was traced.
        options: How gradients are converted.
    """

    graph: Any
    scope: str
    inputs: Mapping[str, Any]
    traced: Any
    options: RewriteOptions

    def counterpart(self, name: str) -> Any:
        """Returns what stands for a tensor or operation of the trace; KeyError if nothing does."""
        if name in self.inputs:
            return self.inputs[name]
        return self.graph.as_graph_element(f"{self.scope}/{name}" if self.scope else name)


@dataclass(frozen=True)
class _CustomGradient:
    """A gradient function for the copies of one node.

    Attributes:
        node: The node as it was traced: its attributes name the closure, where it was inlined and
            the dtypes of its outputs.
        host: Where the copy of its graph is.
    """

    node: Any
    host: _Host

    def __call__(self, op: Any, *gradients: Any) -> list[Any]:
        """Returns a gradient for each input of the op, or None.

        When a model is saved, TensorFlow traces it without an op, and only for ops of the graph.
        """
        op = self.host.counterpart(self.node.name) if op is None else op
        closure = tf_private.registered_gradient(attribute_text(self.node, GRADIENT))
        given = zip(gradients, self.node.attr[_DTYPES].list.type, strict=True)
        call = FlatCall(tuple(None if x is None else _dense(x, dtype) for x, dtype in given), {})
        function = TracedFunction.of(as_written(functools.partial(closure, op)))
        traced = function.trace(call)
        captures = [self._counterpart(op, each) for each in traced.captured_inputs]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", NothingConvertedWarning)  # There is often nothing.
            graph, values = FlatGraph.of(traced), [*call.tensors, *captures]
            made, _ = into_current_graph(graph, values, self.host.options)
        results = function.packed(traced, made)
        return [_like(result, taken) for result, taken in zip(results, op.inputs, strict=True)]

    def _counterpart(self, op: Any, tensor: Any) -> Any:
        """The tensor to use in the copy for one that the closure refers to."""
        graph = getattr(tensor, "graph", None)
        if graph is None or _is_around(graph, tf.compat.v1.get_default_graph()):
            return tensor
        try:
            found = self._find(op, tensor, graph)
        except (KeyError, ValueError) as error:
            if self.host.options.placement == "fused" and tensor.op.inputs:
                return self._again(op, tensor)
            raise RewriteError(
                f"Node {op.name!r} ({op.type}): its custom gradient uses the tensor "
                f"{tensor.name!r} of {graph.name!r}, which the rewritten graph does not have. Pass "
                "it to the function with the custom gradient as an argument."
            ) from error
        return found if found.dtype == tensor.dtype else tf.cast(found, tensor.dtype)

    def _again(self, op: Any, tensor: Any) -> Any:
        """Computes what a compiled function computes and does not return."""
        node = tensor.op
        attrs = {name: value for name, value in node.node_def.attr.items() if name[0] != "_"}
        inputs = [self._counterpart(op, each) for each in node.inputs]
        dtypes = [output.dtype for output in node.outputs]
        graph = tf.compat.v1.get_default_graph()
        made = graph.create_op(node.type, inputs, dtypes, attrs=attrs)
        return made.outputs[tensor.value_index]

    def _find(self, op: Any, tensor: Any, graph: Any) -> Any:
        if graph is self.host.traced:
            return self.host.counterpart(tensor.name)
        # What the names of its function's nodes start with where it was inlined.
        prefix = attribute_text(self.node, INLINED_INTO)
        position = next((i for i, each in enumerate(graph.inputs) if each is tensor), None)
        if position is None:
            return op.graph.get_tensor_by_name(f"{prefix}{tensor.name}")
        if prefix:
            return op.graph.get_tensor_by_name(f"{argument_name(prefix, position)}:0")
        return op.graph.inputs[position]


def _adopt_gradients(graph_def: Any, host: _Host) -> None:
    """Registers gradients for the nodes of a graph to import and makes the nodes refer to them."""
    for node in _custom_nodes(graph_def):
        adopted = f"Tfamp{_CUSTOM}{next(_NUMBERS)}"
        tf.RegisterGradient(adopted)(as_written(_CustomGradient(copy.deepcopy(node), host)))
        node.attr[GRADIENT].s = adopted.encode()
    library = library_of(graph_def)
    for node in all_nodes(graph_def):
        if node.op in CALLS or node.op in library:
            node.attr[GRADIENT].s = _call_gradient().encode()


@functools.cache
def _call_gradient() -> str:
    """Registers the gradient of imported calls when it is first needed."""
    name = f"TfampCallGradient-{next(_NUMBERS)}"
    tf.RegisterGradient(name)(as_written(_differentiate_call))
    return name


def _differentiate_call(op: Any, *gradients: Any) -> Sequence[Any]:
    # Without an op a model is being saved. Calls get their gradients anew when it is loaded.
    return [] if op is None else tf_private.differentiate_call(op, gradients)


def all_nodes(graph_def: Any) -> Iterator[Any]:
    """The nodes of a graph and of its functions."""
    return (node for _, nodes, _ in bodies(graph_def) for node in nodes)


def _custom_nodes(graph_def: Any) -> Iterator[Any]:
    for node in all_nodes(graph_def):
        if attribute_text(node, GRADIENT).startswith(_CUSTOM):
            yield node


def _is_around(outer: Any, graph: Any) -> bool:
    """Whether a graph is another one or one that this is traced in."""
    while graph is not None and graph is not outer:
        graph = getattr(graph, "outer_graph", None)
    return graph is not None


def _dense(gradient: Any, dtype: Any) -> Any:
    return tf.cast(tf.convert_to_tensor(gradient), dtype)


def _like(gradient: Any, given: Any) -> Any:
    """A gradient in the dtype of the tensor it belongs to; a resource's is its variable's."""
    if gradient is None or not given.dtype.is_floating or gradient.dtype == given.dtype:
        return gradient
    return tf.cast(gradient, given.dtype)


# ---- Import --------------------------------------------------------------------------------------


def _import_graph_def(
    graph_def: Any, values: Mapping[str, Any], outputs: Sequence[str], scope: str
) -> list[Any]:
    """Adds a graph to the current one, with tensors in the place of some of its own, by name."""
    fed = {node_name(name) for name in values}
    nodes = [node for node in graph_def.node if node.name not in fed]
    bare = tf.compat.v1.GraphDef(versions=graph_def.versions, library=graph_def.library)
    bare.node.extend(in_topological_order(nodes))
    for node in all_nodes(bare):
        for attr in _LEFT_OUT:
            if attr in node.attr:
                del node.attr[attr]
    tf_private.register_functions(bare.library.function, tf.compat.v1.get_default_graph())
    used = {name for node in bare.node for name in node.input}
    mapped = {
        name: value
        for name, value in values.items()
        if name in used or name.removesuffix(":0") in used
    }
    mapped |= {f"^{name}": values[f"{name}:0"] for name in fed if f"^{name}" in used}
    made = [name for name in dict.fromkeys(outputs) if name not in values]
    loops = _single_loops(bare)
    imported = tf.graph_util.import_graph_def(
        bare, input_map=mapped, return_elements=[*made, *loops], name=scope
    )
    for loop in imported[len(made) :]:
        tf_private.copy_handle_data(loop.inputs, loop.outputs)
    found = dict(zip(made, imported, strict=False))
    return [found[name] if name in found else tf.identity(values[name]) for name in outputs]


def _single_loops(graph_def: Any) -> list[str]:
    """Names of the loops with no loop inside.

    Only these learn what their handles know of variables, which a gradient of a gradient asks for.
    An imported loop in a loop has lost it for good, and TensorFlow would take the inner gradient to
    be zero; without the outer loop's it raises an error.
    """
    library = library_of(graph_def)
    looping = {scope for scope, nodes, _ in bodies(graph_def) if any(n.op in LOOPS for n in nodes)}
    return [
        node.name
        for node in graph_def.node
        if node.op in LOOPS
        and looping.isdisjoint(reached_functions(library, called_functions(node)))
    ]


def in_topological_order(nodes: Sequence[Any]) -> list[Any]:
    """Returns nodes in an order in which each follows its inputs, as given as far as possible.

    TensorFlow adds control edges between ops with side effects in the order they are in, so an op
    must not come before one that it waits for.
    """
    by_name = {node.name: node for node in nodes}
    ordered = producers_first(by_name, lambda name: map(node_name, by_name[name].input))
    return [by_name[name] for name in ordered]


def _free_scope(graph_def: Any, host: Any, inputs: Sequence[str]) -> str:
    """A name scope for the nodes: none, so that names stay, unless one of them is taken."""
    fed = {node_name(name) for name in inputs}
    taken = {op.name for op in host.get_operations()}
    if not any(node.name in taken and node.name not in fed for node in graph_def.node):
        return ""
    return f"rewritten_{next(_NUMBERS)}"
