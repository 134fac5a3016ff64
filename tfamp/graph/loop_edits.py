"""Loops of a GraphDef with one more variable, in place."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import tensorflow as tf

from tfamp.graph.editor import SHAPES, first_output
from tfamp.graph.functions import calls_in, function_attributes, reached_functions
from tfamp.planning.structures import LOOPS, free_name, reach

# How many of a loop's first results TensorFlow differentiates: those behind them are what the loop
# keeps for a gradient that is in the graph already.
_ORIGINAL = "_num_original_outputs"


def copies_in(body: Any, argument: str) -> Collection[str]:
    """An argument of a body, and what Identities make of it."""

    def made_of(name: str) -> Iterator[str]:
        for node in body.node_def:
            if node.op == "Identity" and name in node.input:
                yield first_output(node.name, True)

    return reach([argument], made_of)


def add_loop_variable(
    graph: Any, loop: Any, functions: tuple[Any, Any], start: Any, dtype: int, wanted: str
) -> str:
    """Gives a loop one more variable, which starts as what a node makes; its body returns it as is.

    Returns the name of the argument, of the body's result and of the condition's argument.
    """
    place = new_place(loop)
    _extend_loop(loop, place, start, dtype)
    _renumber(graph.node, loop.name, place)
    name = _free_argument(wanted, functions)
    for function in functions:
        for table in (function.arg_attr, function.resource_arg_unique_id):
            _make_room(table, place)
        _insert_argument(function.signature.input_arg, place, name, dtype)
        if SHAPES in start.attr:
            function.arg_attr[place].attr[SHAPES].CopyFrom(start.attr[SHAPES])
    body = functions[0]
    _insert_argument(body.signature.output_arg, place, name, dtype)
    body.ret[name] = name
    return name


def _insert_argument(arguments: Any, position: int, name: str, dtype: int) -> None:
    arguments.insert(position, type(arguments[0])(name=name, type=dtype))


def new_place(loop: Any) -> int:
    """Where a new variable of a loop goes: TensorFlow differentiates those before it only."""
    attrs = loop.attr
    return int(attrs[_ORIGINAL].i) if _ORIGINAL in attrs else len(attrs["T"].list.type)


def _extend_loop(loop: Any, place: int, start: Any, dtype: int) -> None:
    loop.input.insert(place, start.name)
    loop.attr["T"].list.type.insert(place, dtype)
    for name in ("output_shapes", SHAPES):
        if name in loop.attr and len(loop.attr[name].list.shape):
            loop.attr[name].list.shape.insert(place, _shape(start))
    if _ORIGINAL in loop.attr:
        loop.attr[_ORIGINAL].i += 1


def _shape(node: Any) -> Any:
    if SHAPES in node.attr and len(node.attr[SHAPES].list.shape):
        return node.attr[SHAPES].list.shape[0]
    return tf.TensorShape(None).as_proto()


def _renumber(nodes: Iterable[Any], loop: str, place: int) -> None:
    """Follows the results of a loop that a new one came before."""
    for node in nodes:
        for i, name in enumerate(node.input):
            made, _, port = name.partition(":")
            if made == loop and port and int(port) >= place:
                node.input[i] = f"{loop}:{int(port) + 1}"


def _make_room(table: Any, place: int) -> None:
    """Moves what a map of protobuf says of arguments from a place on."""
    for position in sorted((each for each in table if each >= place), reverse=True):
        value = table.pop(position)
        if hasattr(value, "SerializeToString"):
            table[position + 1].CopyFrom(value)
        else:
            table[position + 1] = value


def _free_argument(wanted: str, functions: Iterable[Any]) -> str:
    """A name that functions have for no argument, result or node, for a new argument."""
    parts = ((f.signature.input_arg, f.signature.output_arg, f.node_def) for f in functions)
    taken = {each.name for part in itertools.chain(*parts) for each in part}
    return free_name(wanted.replace("/", "_").lower(), taken)


def own_functions(graph: Any, library: Mapping[str, Any]) -> Iterator[tuple[Any, Any, list[Any]]]:
    """Each body and condition with the loops of the graph that run them, if nothing else does.

    Several loops share those of one model where a graph has several signatures.
    """
    groups = defaultdict[tuple[str, ...], list[Any]](list)
    for loop in graph.node:
        if loop.op in LOOPS:
            functions = dict(function_attributes(loop))
            groups[functions.get("body", ""), functions.get("cond", "")].append(loop)
    if not groups:
        return
    reached = reached_functions(library, calls_in(graph.node))
    uses = Counter(calls_in(itertools.chain(graph.node, *(library[n].node_def for n in reached))))
    for names, loops in groups.items():
        if all(name in library and uses[name] == len(loops) for name in names):
            yield library[names[0]], library[names[1]], loops
