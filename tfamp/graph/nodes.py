"""One node of a graph: its inputs, its attributes, and the functions that they name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from tfamp.core.errors import RewriteError
from tfamp.core.kinds import AttrValue, NodeDef
from tfamp.interop import tf_private

# The attribute that holds the shapes of a node's outputs, in a graph exported with shapes.
SHAPES = "_output_shapes"
# The attribute that holds the name of a node's own gradient.
GRADIENT = "_gradient_op_type"
_FUNCTION_TYPES = ("func", "list(func)")
_NOTHING = tf.compat.v1.AttrValue()


def is_control(name: str) -> bool:
    """Whether an input is a node that is waited for ("^node"), not a tensor."""
    return name.startswith("^")


def tensor_inputs(node: NodeDef) -> list[str]:
    """Returns the tensors that a node takes."""
    # Without a call for each: a graph has tens of thousands.
    return [name for name in node.input if not name.startswith("^")]


def control_inputs_of(node: NodeDef) -> list[str]:
    """Returns the inputs that a node only waits for."""
    return [name for name in node.input if is_control(name)]


def attribute(node: NodeDef, name: str) -> AttrValue:
    """Returns an attribute of a node; an empty one, as reading `attr` would add it, if none."""
    return node.attr.get(name, _NOTHING)


def attribute_text(node: NodeDef, attr: str) -> str:
    """Returns the text that an attribute of a node holds, "" if it has none."""
    return decoded(node, attr, attribute(node, attr).s)


def decoded(node: NodeDef, attr: str, text: bytes) -> str:
    """Text of an attribute of a node; a RewriteError if it is not UTF-8."""
    try:
        return text.decode()
    except UnicodeDecodeError as error:
        raise RewriteError(
            f"Node {node.name!r} ({node.op}): the attribute {attr} holds {text!r:.200}, which "
            "is not UTF-8 text: the graph is damaged. Export it again."
        ) from error


def function_attributes(node: NodeDef) -> Iterator[tuple[str, str]]:
    """The attributes that hold names of functions, with the names, in order of attributes."""
    return ((attr, called.name) for attr, called in named_functions(node))


def named_functions(node: NodeDef) -> Iterator[tuple[str, Any]]:
    """The messages with those names; reading `func` of another kind would change the kind."""
    for attr, value in sorted(node.attr.items()) if may_name_functions(node.op) else ():
        for called in [value.func] if value.HasField("func") else value.list.func:
            yield attr, called


@tf_private.cache_of_ops
def may_name_functions(op: str) -> bool:
    """Whether nodes of an op type may have attributes that hold names of functions.

    A NoOp may: with it a SavedModel's graph holds the functions that only its objects refer to.
    """
    definition = tf_private.op_definition(op)
    if definition is None or op == "NoOp":
        return True
    return any(attr.type in _FUNCTION_TYPES for attr in definition.attr)


def called_by(node: NodeDef) -> Iterator[str]:
    """The names by which a node may call functions: its op, and attributes that hold names."""
    yield node.op
    yield from (name for _, name in function_attributes(node))
