"""Custom gradients of a traced function, in a graph with copies of its nodes.

The function of a `tf.custom_gradient` is a closure over tensors of the graph it was traced in.
In a graph with copies of the nodes, the closure is traced again when its gradient is needed,
with the copies substituted for the captured tensors; that trace is converted as well.
"""

from __future__ import annotations

import copy
import functools
import itertools
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import tensorflow as tf

from tfamp.core.errors import NothingConvertedWarning, RewriteError
from tfamp.core.kinds import Nest, NodeDef, Op, Tensor
from tfamp.graph.graph import Graph
from tfamp.graph.inlining import INLINED_INTO, argument_name
from tfamp.graph.nodes import GRADIENT, attribute_text
from tfamp.graph.ops import CALLS
from tfamp.interop import imported_graphs, tf_private
from tfamp.interop.tf_private import as_written
from tfamp.planning.options import RewriteOptions
from tfamp.planning.structures import RewritePlan
from tfamp.rewriting.traced_function import FlatCall, TracedFunction, enclosing

_NUMBERS = itertools.count(1)
_CUSTOM = "CustomGradient-"
# Attribute of a node with a custom gradient: the dtypes of its outputs before conversion.
DTYPES = "_tfamp_gradient_dtypes"

# Maps a captured tensor to the one to use instead.
Counterpart: TypeAlias = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Host:
    """The graph that the nodes of a trace are copied to; looks up the copies.

    TensorFlow registers gradients for the life of the process, so this does not keep the graph.

    Attributes:
        graph: Returns the graph while it exists.
        scope: The name scope of the copies.
        inputs: Names of the tensors that replace the inputs of the trace, by name.
        replaced: Names of the tensors of the trace that replace the outputs of inlined calls, for
            each function, "" for the graph itself.
        traced: The `FuncGraph` that was traced.
        options: How gradients are converted.
        convert: Calls a function, converted by options, in the current graph, with counterparts
            of the tensors that it captures; returns the result and the plan.
    """

    graph: weakref.ref[tf.Graph]
    scope: str
    inputs: Mapping[str, str]
    replaced: Mapping[str, Mapping[str, str]]
    traced: tf.Graph
    options: RewriteOptions
    convert: Callable[
        [TracedFunction, FlatCall, RewriteOptions, Counterpart],
        tuple[Nest, RewritePlan | None],
    ]

    def counterpart(self, name: str) -> Tensor | Op:
        """Returns the copy of a tensor or operation of the trace; KeyError if there is none."""
        name = self.replaced[""].get(name, name)
        graph, copied = self.graph(), f"{self.scope}/{name}" if self.scope else name
        if graph is None:
            raise KeyError(f"The graph with the copy of {name!r} has been deleted.")
        return graph.as_graph_element(self.inputs.get(name, copied))

    def operation(self, name: str, function: str) -> Op:
        """Returns the copy of an operation of the trace, or of a function of it."""
        graph = self.graph()
        if not function or graph is None:
            return self.counterpart(name)
        return imported_graphs.graph_of_function(graph, function).get_operation_by_name(name)


@dataclass(frozen=True)
class _CustomGradient:
    """A gradient function for the copies of one node.

    Attributes:
        node: The node as it was traced: its attributes hold the closure's name, the prefix by
            which it was inlined, and the dtypes of its outputs.
        host: The graph with the copies.
        function: Name of the host's function that the node is in; "" for the graph itself.
    """

    node: NodeDef
    host: Host
    function: str

    def __call__(self, op: Op | None, *gradients: Tensor | None) -> list[Tensor | None]:
        """Returns a gradient for each input of the op, or None.

        When a model is saved, TensorFlow traces it without an op, and only for ops of the
        graph.
        """
        op = self.host.operation(self.node.name, self.function) if op is None else op
        name = attribute_text(self.node, GRADIENT)
        closure = tf_private.registered_gradient(name)
        dtypes = self.node.attr[DTYPES].list.type
        pairs = zip(gradients, dtypes, strict=True)
        dense = tuple(_dense(gradient, dtype) for gradient, dtype in pairs)
        call = FlatCall(dense, {})
        function = TracedFunction.of(as_written(functools.partial(closure, op)))
        counterpart = functools.partial(self._counterpart, op)
        with warnings.catch_warnings():
            # Many gradients have nothing to convert.
            warnings.simplefilter("ignore", NothingConvertedWarning)
            results, _ = self.host.convert(function, call, self.host.options, counterpart)
        pairs = zip(results, op.inputs, strict=True)
        return [_like(gradient, tensor) for gradient, tensor in pairs]

    def _counterpart(self, op: Op, tensor: Tensor) -> Tensor:
        """Returns the tensor to use in the copy for one that the closure captures."""
        graph = getattr(tensor, "graph", None)
        current = tf.compat.v1.get_default_graph()
        if graph is None or any(graph is outer for outer in enclosing(current)):
            return tensor
        try:
            same = self._find(op, tensor, graph)
        except (KeyError, ValueError) as error:
            if self.host.options.placement == "fused" and tensor.op.inputs:
                return self._again(op, tensor)
            raise RewriteError(
                f"Node {op.name!r} ({op.type}): its custom gradient uses the tensor "
                f"{tensor.name!r} of {graph.name!r}, which the rewritten graph does not have. "
                "Pass it to the function with the custom gradient as an argument."
            ) from error
        return same if same.dtype == tensor.dtype else tf.cast(same, tensor.dtype)

    def _again(self, op: Op, tensor: Tensor) -> Tensor:
        """Computes a tensor again that a compiled function computes but does not return."""
        node = tensor.op
        attrs = {name: value for name, value in node.node_def.attr.items() if name[0] != "_"}
        inputs = [self._counterpart(op, source) for source in node.inputs]
        dtypes = [output.dtype for output in node.outputs]
        graph = tf.compat.v1.get_default_graph()
        made = graph.create_op(node.type, inputs, dtypes, attrs=attrs)
        return made.outputs[tensor.value_index]

    def _find(self, op: Op, tensor: Tensor, graph: tf.Graph) -> Tensor:
        """Returns the copy of a tensor of the traced graph, or of a function inlined there.

        The trace of a gradient has captured tensors of the trace that it is the gradient of.
        """
        if graph is self.host.traced:
            return self.host.counterpart(tensor.name)
        captured = tf_private.captured_in(self.host.traced, tensor)
        if captured is not None:
            return self.host.counterpart(captured.name)
        # Inlined nodes of its function have this prefix.
        prefix = attribute_text(self.node, INLINED_INTO)
        if not prefix and not self.function:  # Another tensor may have the name.
            raise KeyError(f"{tensor.name!r} is not of the trace.")
        position = next((i for i, argument in enumerate(graph.inputs) if argument is tensor), None)
        if position is not None and not prefix:
            return op.graph.inputs[position]
        name = tensor.name if position is None else f"{argument_name('', position)}:0"
        if not self.function:
            return self.host.counterpart(f"{prefix}{name}")
        replaced = self.host.replaced[self.function]
        return op.graph.get_tensor_by_name(replaced.get(f"{prefix}{name}", f"{prefix}{name}"))


def note_dtypes(graph: Graph) -> None:
    """Notes the output dtypes of nodes with a custom gradient, before a conversion."""
    for _, node in custom_nodes(graph):
        node.attr[DTYPES].CopyFrom(node.attr["T"])


def adopt_gradients(graph: Graph, host: Host) -> None:
    """Registers gradients for the nodes of a graph to import, to which the nodes then refer."""
    for function, node in custom_nodes(graph):
        adopted = f"Tfamp{_CUSTOM}{next(_NUMBERS)}"
        gradient = _CustomGradient(copy.deepcopy(node), host, function)
        tf.RegisterGradient(adopted)(as_written(gradient))
        node.attr[GRADIENT].s = adopted.encode()
    for node in graph.nodes:
        if node.op in CALLS or node.op in graph.functions:
            node.attr[GRADIENT].s = _call_gradient().encode()


@functools.cache
def _call_gradient() -> str:
    """Registers the gradient of imported calls when it is first needed."""
    name = f"TfampCallGradient-{next(_NUMBERS)}"
    tf.RegisterGradient(name)(as_written(_differentiate_call))
    return name


def _differentiate_call(op: Op | None, *gradients: Tensor | None) -> Sequence[Tensor | None]:
    # TensorFlow passes no op while a model is saved. Calls get new gradients on loading.
    return [] if op is None else imported_graphs.differentiate_call(op, gradients)


def custom_nodes(graph: Graph) -> Iterator[tuple[str, NodeDef]]:
    """Nodes with a custom gradient, and their functions' names, "" for the graph itself."""
    for body in graph.bodies:
        for node in body.nodes:
            # Most nodes lack the attribute, and reading its text takes many times as long.
            if GRADIENT in node.attr and attribute_text(node, GRADIENT).startswith(_CUSTOM):
                yield body.scope, node


def _dense(gradient: Tensor | None, dtype: int) -> Tensor | None:
    return None if gradient is None else tf.cast(tf.convert_to_tensor(gradient), dtype)


def _like(gradient: Tensor | None, tensor: Tensor) -> Tensor | None:
    """Returns a gradient in the dtype of its tensor; of a resource as it is."""
    if gradient is None or not tensor.dtype.is_floating or gradient.dtype == tensor.dtype:
        return gradient
    return tf.cast(gradient, tensor.dtype)
