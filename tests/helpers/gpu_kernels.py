"""Where the ops of a graph would run on a machine with a GPU, and what would be copied for them.

TensorFlow's Linux wheel registers its GPU kernels on machines without a GPU too. An op without one
runs on the CPU, and some kernels for GPUs take or return tensors in the memory of the host: int32
of most kinds. What goes from the one memory to the other is copied, and to the host the step waits
for it.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import tensorflow as tf
from tensorflow.python.framework import kernels, op_def_registry

# They decide on the host what runs next; what they call is looked at as all functions are.
CONTROL_FLOW = frozenset(
    {"Case", "If", "PartitionedCall", "StatefulPartitionedCall", "StatelessCase", "StatelessIf"}
    | {"NoOp", "StatelessWhile", "While"}
)
# Handles and strings are always in the host's memory, and int32 that functions take and return.
_NEVER_COPIED = frozenset({tf.resource, tf.string, tf.variant})
_OF_THE_HOST = _NEVER_COPIED | {tf.int32}


class Copy(NamedTuple):
    """A tensor that is made in one memory and used in the other."""

    producer: str  # Its op and name, as "Max largest".
    consumer: str
    to_host: bool
    size: float  # In bytes; inf where the shape is unknown.


class Placement(NamedTuple):
    """The ops of a graph without a GPU kernel, and the copies between memories."""

    without_kernel: list[str]  # Op and dtypes of every node that would run on the CPU.
    copies: list[Copy]

    def to_host(self) -> list[Copy]:
        """The copies a step would wait for."""
        return [copy for copy in self.copies if copy.to_host]


def placement(function, *args) -> Placement:
    """Looks at the graph of a `tf.function`, and at all functions that it calls.

    Functions that XLA compiles are left out.
    """
    graph_def = function.get_concrete_function(*args).graph.as_graph_def(add_shapes=True)
    library = {each.signature.name: each for each in graph_def.library.function}
    found = _look(graph_def.node, {})
    pending, seen = [graph_def.node], set()
    while pending:
        for name in _called(pending.pop()) & library.keys() - seen:
            seen.add(name)
            called = library[name]
            if not called.attr["_XlaMustCompile"].b:
                given = {each.name: tf.as_dtype(each.type) for each in called.signature.input_arg}
                further = _look(called.node_def, given)
                found = Placement(*(a + b for a, b in zip(found, further, strict=True)))
                pending.append(called.node_def)
    return found


def _called(nodes) -> set[str]:
    compiled = {name for node in nodes if node.attr["_XlaMustCompile"].b for name in _names(node)}
    return {name for node in nodes for name in _names(node)} - compiled


def _names(node) -> set[str]:
    lists = (func for attr in node.attr.values() for func in attr.list.func)
    alone = (attr.func for attr in node.attr.values() if attr.HasField("func"))
    return {func.name for func in (*lists, *alone)}


def _look(nodes, given) -> Placement:
    """The nodes of one graph; `given` are a function's arguments with their dtypes."""
    by_name = {node.name: node for node in nodes}
    without = [
        f"{node.op} {' '.join(sorted({d.name for ds in _types(node).values() for d in ds}))}"
        for node in nodes
        if not (_is_passed_on(node) or _kernel(node))
    ]
    copies = {}
    for node in nodes:
        if _is_passed_on(node):
            continue
        inputs = [name for name in node.input if not name.startswith("^")]
        definition = op_def_registry.get(node.op)
        for source, (arg, _, dtype) in zip(inputs, _ports(node, definition.input_arg), strict=True):
            name, *output = source.split(":")
            if dtype in _NEVER_COPIED:
                continue
            producer = by_name.get(name)
            if producer is None:
                made_on_host, size = given[name] in _OF_THE_HOST, math.inf
                label = f"argument {name}"
            else:
                made_on_host, size = _made(producer, output)
                label = f"{producer.op} {name}"
            if made_on_host != _in_host_memory(node, arg):
                copy = Copy(label, f"{node.op} {node.name}", not made_on_host, size)
                copies.setdefault((source, copy.to_host), copy)
    return Placement(without, list(copies.values()))


def _is_passed_on(node) -> bool:
    return node.op in CONTROL_FLOW or node.op == "Placeholder"


def _made(node, output) -> tuple[bool, float]:
    """Whether an output is in the host's memory, and its size; `output` is what stands behind ":".

    Graphs number outputs; functions name the argument and number what it consists of.
    """
    ports = _ports(node, op_def_registry.get(node.op).output_arg)
    if len(output) == 2:
        index = next(
            i for i, (arg, n, _) in enumerate(ports) if (arg, n) == (output[0], int(output[1]))
        )
    else:
        index = int(output[0]) if output else 0
    arg, _, dtype = ports[index]
    shapes = node.attr["_output_shapes"].list.shape
    shape = tf.TensorShape(shapes[index]) if shapes else tf.TensorShape(None)
    size = shape.num_elements() * dtype.size if shape.is_fully_defined() else math.inf
    on_host = dtype in _OF_THE_HOST if _is_passed_on(node) else _in_host_memory(node, arg)
    return on_host, size


def _in_host_memory(node, arg) -> bool:
    kernel = _kernel(node)
    return kernel is None or arg in kernel.host_memory_arg


def _ports(node, args) -> list[tuple[str, int, tf.DType]]:
    """The name, the number in it and the dtype of every input, or output, of a node."""
    ports = []
    for arg in args:
        if arg.type_list_attr:
            dtypes = _types(node)[arg.type_list_attr]
        else:
            dtype = tf.as_dtype(arg.type) if arg.type else _types(node)[arg.type_attr][0]
            dtypes = (dtype,) * (node.attr[arg.number_attr].i if arg.number_attr else 1)
        ports += [(arg.name, number, dtype) for number, dtype in enumerate(dtypes)]
    return ports


def _types(node) -> dict[str, tuple[tf.DType, ...]]:
    return {
        name: tuple(map(tf.as_dtype, attr.list.type or [attr.type]))
        for name, attr in node.attr.items()
        if attr.type or attr.list.type
    }


def _kernel(node):
    return _registered(node.op, tuple(sorted(_types(node).items())))


@functools.cache
def _registered(op, types):
    """The kernel of an op on a GPU; None where there is none."""

    def fits(kernel) -> bool:
        allowed = {each.name: set(each.allowed_values.list.type) for each in kernel.constraint}
        return not kernel.label and all(
            allowed[name].issuperset(dtype.as_datatype_enum for dtype in dtypes)
            for name, dtypes in types
            if name in allowed
        )

    found = [each for each in kernels.get_registered_kernels_for_op(op).kernel if fits(each)]
    for device in ("GPU", "DEFAULT"):
        own = [each for each in found if each.device_type == device]
        if own:
            return max(own, key=lambda each: each.priority)
    return None
