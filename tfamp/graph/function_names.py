"""New names for the functions of a graph: a process knows one function by each name."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import tensorflow as tf

from tfamp.interop import tf_private
from tfamp.planning.control_flow import BRANCHING

_FUNCTION_TYPES = ("func", "list(func)")
_NUMBERS = itertools.count(1)


def new_suffix() -> str:
    """Returns an ending that no function's name has had in this process."""
    return f"_tfamp_{next(_NUMBERS)}"


def rename_functions(graph_def: Any, suffix: str) -> Any:
    """Returns a copy in which the name of every function that is reached has another ending.

    Functions that no node calls are left out. Needed before a graph whose functions were changed is
    imported in the process that they come from.

    Args:
        graph_def: A `tf.compat.v1.GraphDef`; it is not modified.
        suffix: What to add to the names; `new_suffix()` makes them unique.

    Example:
        >>> import tensorflow as tf
        >>> loop = tf.function(lambda n: tf.while_loop(lambda i: i < n, lambda i: [i + 1], [0]))
        >>> graph = loop.get_concrete_function(tf.TensorSpec((), tf.int32)).graph.as_graph_def()
        >>> names = {function.signature.name for function in graph.library.function}
        >>> renamed = rename_functions(graph, "_2").library.function
        >>> names == {function.signature.name.removesuffix("_2") for function in renamed}
        True
    """
    result = tf.compat.v1.GraphDef()
    result.CopyFrom(graph_def)
    library = {function.signature.name: function for function in result.library.function}
    called = (name for node in result.node for name in called_functions(node))
    reached = reached_functions(library, called)
    functions = [function for name, function in library.items() if name in reached]
    bodies = [result.node, *(function.node_def for function in functions)]
    for node in itertools.chain.from_iterable(bodies):
        node.op += suffix if node.op in reached else ""
        for value in node.attr.values():
            # Writing to `func` of a value of another kind would make it one of this kind.
            names = [value.func] if value.HasField("func") else value.list.func
            for each in names:
                each.name += suffix if each.name in reached else ""
    for function in functions:
        function.signature.name += suffix
    kept = tf.compat.v1.GraphDef(node=result.node, versions=result.versions)
    kept.library.function.extend(functions)
    for gradient in result.library.gradient:
        if gradient.function_name in reached and gradient.gradient_func in reached:
            gradient.function_name += suffix
            gradient.gradient_func += suffix
            kept.library.gradient.append(gradient)
    return kept


def unshare_branches(graph_def: Any) -> Any:
    """Gives every loop and conditional functions of its own, in place; returns the graph.

    Inlining a function twice makes two nodes of each loop in it. TensorFlow names what it makes of
    a loop's body, to take its gradient, after the body: there would be two functions of one name.

    Args:
        graph_def: A `tf.compat.v1.GraphDef`.
    """
    library = {function.signature.name: function for function in graph_def.library.function}
    taken: set[str] = set()
    pending = [graph_def.node]
    while pending:
        for node in pending.pop():
            for called in _branches(node):
                if called.name in taken:
                    copy = graph_def.library.function.add()
                    copy.CopyFrom(library[called.name])
                    called.name = _free_name(called.name, library)
                    copy.signature.name = called.name
                    library[called.name] = copy
                if called.name in library:
                    taken.add(called.name)
                    pending.append(library[called.name].node_def)
    return graph_def


def _branches(node: Any) -> Iterator[Any]:
    """What a loop or a conditional runs: messages with the names of functions."""
    if node.op in BRANCHING:
        for _, value in sorted(node.attr.items()):
            yield from [value.func] if value.HasField("func") else value.list.func


def _free_name(name: str, taken: Collection[str]) -> str:
    return next(f"{name}_{i}" for i in itertools.count(2) if f"{name}_{i}" not in taken)


def called_functions(node: Any) -> Iterator[str]:
    """The names by which a node may call functions: its op and its attributes that hold names."""
    yield node.op
    for _, name in function_attributes(node):
        yield name


def function_attributes(node: Any) -> Iterator[tuple[str, str]]:
    """The attributes that hold names of functions, with each name, in the order of attributes."""
    if not _may_name_functions(node.op):
        return
    for attr, value in sorted(node.attr.items()):
        if value.HasField("func"):
            yield attr, value.func.name
        for called in value.list.func:
            yield attr, called.name


@functools.cache
def _may_name_functions(op: str) -> bool:
    """Whether nodes of an op type may have attributes that hold names of functions.

    A NoOp may: with it a SavedModel's graph holds the functions that only its objects refer to.
    """
    definition = tf_private.op_definition(op)
    if definition is None or op == "NoOp":
        return True
    return any(each.type in _FUNCTION_TYPES for each in definition.attr)


def reached_functions(library: Mapping[str, Any], names: Iterable[str]) -> set[str]:
    """Returns the functions of a library that these call, directly or not, with their own names."""
    pending, found = list(names), set()
    while pending:
        name = pending.pop()
        if name in library and name not in found:
            found.add(name)
            pending += [each for node in library[name].node_def for each in called_functions(node)]
    return found
