"""Gradients of nodes whose gradient function is not that of their op.

The function of a `tf.custom_gradient` is a closure over tensors of the graph it was traced in. In a
graph that holds copies of the nodes, the closure is traced once more, with the copies in the place
of the tensors it refers to.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import tensorflow as tf

from tfamp.core.errors import RewriteError
from tfamp.graph.functions import GRADIENT, INLINED_INTO, argument_name
from tfamp.interop import tf_functions
from tfamp.interop.tracing import as_written

_CALLS = frozenset({"PartitionedCall", "StatefulPartitionedCall"})
_CUSTOM = "CustomGradient-"
_CALL_GRADIENT = "TfampCallGradient"
_NUMBERS = itertools.count(1)

# Traced gradient function, tensors for its inputs -> tensors for its outputs
Differentiate: TypeAlias = Callable[[Any, Sequence[Any]], list[Any]]


class Host(Protocol):
    """The graph the nodes are copied to."""

    graph: Any

    def counterpart(self, name: str) -> Any:
        """Returns the copy of a tensor of the traced graph."""

    def operation(self, name: str) -> Any:
        """Returns the copy of a node of the traced graph itself."""


def gradient_dtypes(graph_def: Any) -> dict[tuple[str, str], tuple[int, ...]]:
    """Returns the dtypes of nodes with custom gradients, by their function's name and their own."""
    return {(i, n.name): tuple(n.attr["T"].list.type) for i, n in _custom_nodes(graph_def)}


def adopt_gradients(
    graph_def: Any,
    dtypes: Mapping[tuple[str, str], Sequence[int]],
    traced: Any,
    host: Host,
    differentiate: Differentiate,
) -> None:
    """Registers gradients for the copies and makes the nodes refer to them.

    Args:
        graph_def: The `tf.compat.v1.GraphDef` to import; it is changed.
        dtypes: What `gradient_dtypes` says of it as it was traced, with the names of now.
        traced: The `FuncGraph` that was traced.
        host: The graph it is imported to.
        differentiate: Adds a traced function to the current graph.
    """
    for scope, node in _custom_nodes(graph_def):
        name = node.attr[GRADIENT].s.decode()
        prefix = node.attr[INLINED_INTO].s.decode() if INLINED_INTO in node.attr else ""
        wanted = [tf.as_dtype(each) for each in dtypes[scope, node.name]]
        adopted = _AdoptedGradient(name, node.name, prefix, wanted, traced, host, differentiate)
        node.attr[GRADIENT].s = _register(adopted).encode()
    library = {function.signature.name for function in graph_def.library.function}
    for _, node in _nodes(graph_def):
        if node.op in _CALLS or node.op in library:
            node.attr[GRADIENT].s = _call_gradient().encode()


@dataclass(frozen=True)
class _AdoptedGradient:
    """A gradient function for the copies of one node.

    Attributes:
        name: The name under which the closure is registered.
        node: The node's name.
        prefix: What the names of its function's nodes start with where it was inlined.
        dtypes: Dtypes of the node's outputs in the graph that was traced.
        traced: That graph.
        host: Where its copy is.
        differentiate: Adds a traced function to the current graph.
    """

    name: str
    node: str
    prefix: str
    dtypes: Sequence[Any]
    traced: Any
    host: Host
    differentiate: Differentiate

    def __call__(self, op: Any, *gradients: Any) -> list[Any]:
        """Returns a gradient for each input of the op, or None.

        When a model is saved, TensorFlow traces it without an op, and only for ops of the graph.
        """
        op = self.host.operation(self.node) if op is None else op
        closure = tf_functions.registered_gradient(self.name)
        present = [i for i, gradient in enumerate(gradients) if gradient is not None]
        dense = [tf.cast(tf.convert_to_tensor(gradients[i]), self.dtypes[i]) for i in present]
        structure: list[Any] = []

        def call(*given: Any) -> list[Any]:
            full: list[Any] = [None] * len(gradients)
            for i, gradient in zip(present, given, strict=True):
                full[i] = gradient
            structure[:] = closure(op, *full)
            return [
                each
                for each in tf.nest.flatten(structure, expand_composites=True)
                if each is not None
            ]

        specs = [tf.TensorSpec(each.shape, each.dtype) for each in dense]
        traced = tf.function(call, autograph=False).get_concrete_function(*specs)
        captures = [self._counterpart(op, each) for each in traced.captured_inputs]
        flat = iter(self.differentiate(traced, [*dense, *captures]))
        filled = [
            None if each is None else next(flat)
            for each in tf.nest.flatten(structure, expand_composites=True)
        ]
        results = tf.nest.pack_sequence_as(structure, filled, expand_composites=True)
        return [_like(result, given) for result, given in zip(results, op.inputs, strict=True)]

    def _counterpart(self, op: Any, tensor: Any) -> Any:
        """The tensor to use in the copy for one that the closure refers to."""
        graph = getattr(tensor, "graph", None)
        if graph is None or graph in _enclosing(tf.compat.v1.get_default_graph()):
            return tensor
        try:
            found = self._find(op, tensor, graph)
        except (KeyError, ValueError) as error:
            raise RewriteError(
                f"Node {op.name!r} ({op.type}): its custom gradient uses the tensor "
                f"{tensor.name!r} of {graph.name!r}, which the rewritten graph does not have. Pass "
                "it to the function with the custom gradient as an argument."
            ) from error
        return found if found.dtype == tensor.dtype else tf.cast(found, tensor.dtype)

    def _find(self, op: Any, tensor: Any, graph: Any) -> Any:
        if graph is self.traced:
            return self.host.counterpart(tensor.name)
        position = next((i for i, each in enumerate(graph.inputs) if each is tensor), None)
        if position is None:
            return op.graph.get_tensor_by_name(f"{self.prefix}{tensor.name}")
        if self.prefix:
            return op.graph.get_tensor_by_name(f"{argument_name(self.prefix, position)}:0")
        return op.graph.inputs[position]


def _register(gradient: Callable[..., Any]) -> str:
    name = f"Tfamp{_CUSTOM}{next(_NUMBERS)}"
    tf.RegisterGradient(name)(as_written(gradient))
    return name


def _call_gradient() -> str:
    """Registers the gradient of imported calls when it is first needed."""
    try:
        tf_functions.registered_gradient(_CALL_GRADIENT)
    except LookupError:
        tf.RegisterGradient(_CALL_GRADIENT)(as_written(_differentiate_call))
    return _CALL_GRADIENT


def _differentiate_call(op: Any, *gradients: Any) -> Sequence[Any]:
    # Without an op a model is being saved. Calls get their gradients anew when it is loaded.
    return [] if op is None else tf_functions.differentiate_call(op, gradients)


def _nodes(graph_def: Any) -> Iterator[tuple[str, Any]]:
    """All nodes, each with the name of its function; "" for the graph itself."""
    functions = ((each.signature.name, each.node_def) for each in graph_def.library.function)
    for scope, nodes in itertools.chain([("", graph_def.node)], functions):
        for node in nodes:
            yield scope, node


def _custom_nodes(graph_def: Any) -> Iterator[tuple[str, Any]]:
    for scope, node in _nodes(graph_def):
        if GRADIENT in node.attr and node.attr[GRADIENT].s.decode().startswith(_CUSTOM):
            yield scope, node


def _enclosing(graph: Any) -> list[Any]:
    chain = []
    while graph is not None:
        chain.append(graph)
        graph = getattr(graph, "outer_graph", None)
    return chain


def _like(gradient: Any, given: Any) -> Any:
    """A gradient in the dtype of the tensor it belongs to; a resource's is its variable's."""
    if gradient is None or not given.dtype.is_floating or gradient.dtype == given.dtype:
        return gradient
    return tf.cast(gradient, given.dtype)
