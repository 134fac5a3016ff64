"""The functions of a graph: which are called, by which names, and calls that are inlined."""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import sys
from collections.abc import Container, Iterable, Iterator, Mapping
from typing import Any

import tensorflow as tf

from tfamp.core.errors import RewriteError
from tfamp.graph.editor import (
    GraphEditor,
    attribute,
    control_inputs_of,
    is_control,
    replace_nodes,
    tensor_inputs,
)
from tfamp.interop import tf_private
from tfamp.planning.structures import BRANCHING, MAIN_GRAPH, node_name, reach

_FUNCTION_TYPES = ("func", "list(func)")
_NUMBERS = itertools.count(1)


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """Pauses garbage collection: a rewrite makes millions of objects and no cycles."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def copied(graph_def: Any) -> Any:
    """Returns a copy of a `tf.compat.v1.GraphDef`."""
    copy = tf.compat.v1.GraphDef()
    copy.CopyFrom(graph_def)
    return copy


def library_of(graph_def: Any) -> dict[str, Any]:
    """Returns the functions of a graph by name."""
    return {function.signature.name: function for function in graph_def.library.function}


def attribute_text(node: Any, attr: str) -> str:
    """Returns the text that an attribute of a node holds, "" if it has none."""
    return _decoded(node, attr, attribute(node, attr).s)


def _decoded(node: Any, attr: str, text: bytes) -> str:
    """Text of an attribute of a node; a RewriteError if it is not UTF-8."""
    try:
        return text.decode()
    except UnicodeDecodeError as error:
        raise RewriteError(
            f"Node {node.name!r} ({node.op}): the attribute {attr} holds {text!r:.200}, which is "
            "not UTF-8 text: the graph is damaged. Export it again."
        ) from error


def bodies(graph_def: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yields name, nodes and function of the graph itself (None) and of each function."""
    yield MAIN_GRAPH, graph_def.node, None
    for function in graph_def.library.function:
        yield function.signature.name, function.node_def, function


def new_suffix() -> str:
    """Returns a suffix that no function's name has had in this process."""
    return f"_tfamp_{next(_NUMBERS)}"


def rename_functions(graph_def: Any, suffix: str) -> Any:
    """Appends a suffix to the name of every function that is reached, in place.

    Functions that no node calls are dropped. Returns the graph. In a process a function's name is
    unique: rename the functions before importing a changed graph into the process that it comes
    from. A suffix of `new_suffix()` makes the names unique.

    Example:
        >>> import tensorflow as tf
        >>> loop = tf.function(lambda n: tf.while_loop(lambda i: i < n, lambda i: [i + 1], [0]))
        >>> graph = loop.get_concrete_function(tf.TensorSpec((), tf.int32)).graph.as_graph_def()
        >>> names = {function.signature.name for function in graph.library.function}
        >>> renamed = rename_functions(graph, "_2").library.function
        >>> names == {function.signature.name.removesuffix("_2") for function in renamed}
        True
    """
    library = graph_def.library
    reached = reached_functions(library_of(graph_def), calls_in(graph_def.node))
    kept = [each for each in library.function if each.signature.name in reached]
    pairs = [each for each in library.gradient if each.function_name in reached]
    replace_nodes(library.function, kept)
    replace_nodes(library.gradient, [each for each in pairs if each.gradient_func in reached])
    for _, nodes, function in bodies(graph_def):
        for node in nodes:
            for _, called in _named_functions(node):
                called.name += suffix if called.name in reached else ""
            node.op += suffix if node.op in reached else ""
        if function is not None:
            function.signature.name += suffix
    for gradient in library.gradient:
        gradient.function_name += suffix
        gradient.gradient_func += suffix
    return graph_def


def flattened(graph_def: Any, keep: Iterable[str]) -> GraphEditor:
    """Inlines calls, and gives every loop and conditional functions of its own, in place.

    Inlining a function twice makes two nodes of each loop in it. TensorFlow names the gradient of a
    loop's body after the body: there would be two functions of one name.
    """
    graph = inlined(graph_def, keep)
    taken: set[str] = set()

    def own_branches(scope: str) -> Iterator[str]:
        for node in graph.body(scope).of_types(*sorted(BRANCHING)):
            for _, called in _named_functions(node):
                if called.name in taken:
                    called.name = graph.copy_function(called.name)
                if called.name in graph.library:
                    taken.add(called.name)
                    yield called.name

    reach([MAIN_GRAPH], own_branches)
    return graph


def function_attributes(node: Any) -> Iterator[tuple[str, str]]:
    """The attributes that hold names of functions, with each name, in the order of attributes."""
    return ((attr, called.name) for attr, called in _named_functions(node))


def _named_functions(node: Any) -> Iterator[tuple[str, Any]]:
    """The messages with those names, by attribute; `func` of other kinds would become this kind."""
    for attr, value in sorted(node.attr.items()) if _may_name_functions(node.op) else ():
        for called in [value.func] if value.HasField("func") else value.list.func:
            yield attr, called


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

    def called(name: str) -> Iterator[str]:
        return filter(library.__contains__, calls_in(library[name].node_def))

    return set(reach(filter(library.__contains__, names), called))


def reached_bodies(graph: GraphEditor, names: Iterable[str]) -> list[GraphEditor]:
    """The functions of a graph that these call, directly or not, with their own names."""
    library = graph.library

    def called(name: str) -> Iterator[str]:
        return filter(library.__contains__, calls_of(library[name]))

    return [library[name] for name in reach(filter(library.__contains__, names), called)]


def calls_of(body: GraphEditor) -> Iterator[str]:
    """The names by which a body may call functions."""
    calling = (op for op in list(body.by_op) if op in body.library or _may_name_functions(op))
    return calls_in(node for op in calling for node in body.of_types(op))


def calls_in(nodes: Iterable[Any]) -> Iterator[str]:
    """The names by which nodes may call functions: ops, and attributes that hold names."""
    for node in nodes:
        yield node.op
        yield from (name for _, name in function_attributes(node))


# ---- Inlining ------------------------------------------------------------------------------------


# Attribute of inlined nodes with a custom gradient: the prefix that their function's nodes got.
INLINED_INTO = "_tfamp_inlined_into"
GRADIENT = "_gradient_op_type"

# Functions that call one another twice double at every level: a small graph could fill the memory.
# A call that would add nodes beyond this stays a call. Large models have some ten thousand.
MOST_NEW_NODES = 100_000

CALLS = frozenset({"PartitionedCall", "StatefulPartitionedCall"})
_OPAQUE = ("_noinline", "_XlaMustCompile", "_XlaCompile", "_tpu_replicate")
# Loops and conditionals of TensorFlow 1. Nodes belong to a frame through their inputs, so that
# inlined constants would be outside of it.
FRAMES = frozenset({"Enter", "RefEnter"})
_OLD_CONTROL_FLOW = FRAMES | {"Merge", "Switch", "RefMerge", "RefSwitch"}


def inline_calls(graph_def: Any, keep: Iterable[str] = ()) -> Any:
    """Replaces calls with the nodes of the called functions, in functions also; in place.

    The nodes of function `f` called by node "c" are named "c/...". What must wait for the call
    waits for "c", a NoOp then. A call stays where inlining would change what it means: it is
    recursive, compiled by XLA, marked `_noinline`, between loops of TensorFlow 1, or one of so many
    that the graph would grow by more than 100,000 nodes. The names of the tensors ("c:0") or nodes
    ("c") to keep remain. Functions no longer called are still in the library.

    Raises RewriteError if a call does not fit its function, if it is its own argument, or if
    functions call each other hundreds deep.

    Example:
        >>> import tensorflow as tf
        >>> double = tf.function(lambda x: x + x)
        >>> outer = tf.function(lambda x: double(x) * 2.0)
        >>> graph = outer.get_concrete_function(tf.TensorSpec(())).graph.as_graph_def()
        >>> [node.name for node in inline_calls(graph).node]
        ['x', 'PartitionedCall/add', 'PartitionedCall/Identity', 'mul/y', 'mul', 'Identity']
    """
    return inlined(graph_def, keep).graph


@collector_paused()
def inlined(graph_def: Any, keep: Iterable[str]) -> GraphEditor:
    """Inlines calls as `inline_calls` does; returns the editor of the graph."""
    graph = GraphEditor(graph_def, keep)
    inliner = _Inliner(graph)
    try:
        for name in graph.library:
            inliner.expand_function(name)
    except RecursionError:
        raise RewriteError(
            "The functions of the graph call each other hundreds deep, deeper than Python's "
            f"recursion limit of {sys.getrecursionlimit()} allows. Call fewer functions inside "
            "functions, or raise the limit with sys.setrecursionlimit."
        ) from None
    inliner.expand(graph)
    return graph


class _Inliner:
    """Expands each function of a graph once, callees before callers."""

    def __init__(self, graph: GraphEditor) -> None:
        self._functions = graph.library
        self._is_expanded: dict[str, bool] = {}  # False while it is being expanded.
        self._room = MOST_NEW_NODES

    def expand_function(self, name: str) -> None:
        """Expands a function, if that has not begun."""
        if name not in self._is_expanded:
            self._is_expanded[name] = False
            self.expand(self._functions[name])
            self._is_expanded[name] = True

    def expand(self, body: GraphEditor) -> None:
        """Replaces the calls of a graph or a function with the nodes of the functions."""
        if has_old_control_flow(body):
            return
        ops = [op for op in body.by_op if op in CALLS or op in self._functions]
        calls = ((node, self._called(body, node)) for node in body.of_types(*ops))
        functions = {node.name: function for node, function in calls if function is not None}
        if not functions:
            return
        taken = set(body.by_name)
        moved: dict[str, str] = {}
        nodes: list[Any] = []
        for node in body.nodes:
            function = functions.get(node.name)
            if function is None:
                nodes.append(node)
                continue
            copy = _Copy(body, node, function, taken)
            made = list(copy.nodes())
            taken |= {each.name for each in made}
            moved |= copy.results
            nodes += made
        resolve = functools.partial(_resolve, moved)
        for node in nodes:
            node.input[:] = map(resolve, node.input)
        awaited = {name[1:] for node in nodes for name in control_inputs_of(node)}
        controls = body.graph.control_ret.values() if body.is_function else body.kept
        unused = functions.keys() - awaited - set(controls)
        body.replace_nodes(node for node in nodes if node.name not in unused)
        for output, tensor in list(body.graph.ret.items() if body.is_function else ()):
            body.graph.ret[output] = resolve(tensor)

    def _called(self, body: GraphEditor, node: Any) -> GraphEditor | None:
        """The expanded function to inline for a node; None if the node must stay."""
        name = node.attr["f"].func.name if node.op in CALLS else node.op
        function = self._functions.get(name)
        if function is None:
            return None
        given, taken = len(tensor_inputs(node)), len(function.graph.signature.input_arg)
        if given != taken:
            cause = f"it has {given} inputs, and the function {name!r} takes {taken}"
            raise body.error(node, cause)
        marks = (each.attr for each in (node, function.graph))
        opaque = any(mark in attr and attr[mark].b for attr in marks for mark in _OPAQUE)
        recursive = self._is_expanded.get(name) is False
        if opaque or recursive or has_old_control_flow(function):
            return None
        self.expand_function(name)
        if len(function.nodes) > self._room:
            return None
        self._room -= len(function.nodes)
        return function


def _resolve(moved: Mapping[str, str], tensor: str) -> str:
    """The tensor that replaces an output of an inlined call."""
    if tensor not in moved:
        return tensor
    *_, end = reach([tensor], lambda name: filter(None, [moved.get(name)]))
    if end in moved:
        raise RewriteError(
            f"The tensor {tensor!r} is computed from nothing but itself: a call is its own "
            "argument. The graph is damaged; export it again."
        )
    return end


class _Copy:
    """The nodes of a function, renamed for the caller they are inlined into.

    Attributes:
        results: For each output of the call the tensor that replaces it.
    """

    def __init__(
        self, caller: GraphEditor, call: Any, function: GraphEditor, taken: Container[str]
    ) -> None:
        self._caller, self._call, self._function = caller, call, function
        numbers = itertools.chain([call.name], (f"{call.name}_{n}" for n in itertools.count(1)))
        names = function.by_name
        free = (p for p in numbers if not any(f"{p}/{name}" in taken for name in names))
        self._prefix = f"{next(free)}/"
        self._signature = function.graph.signature
        arguments = (arg.name for arg in self._signature.input_arg)
        self._given = dict(zip(arguments, tensor_inputs(call), strict=True))
        outputs = [self._tensor(function.graph.ret[arg.name]) for arg in self._signature.output_arg]
        self.results = {caller.tensor(call, port): made for port, made in enumerate(outputs)}
        if not caller.is_function and outputs:
            self.results[f"{call.name}:0"] = outputs[0]

    def nodes(self) -> Iterator[Any]:
        """The copies, Identities of the arguments where they are needed, and the stand-in."""
        call, waits = self._call, control_inputs_of(self._call)
        has_gradient = False
        for node in self._function.nodes:
            copy = self._copied(node)
            has_gradient |= GRADIENT in node.attr
            if _has_side_effects(copy.op):
                copy.input.extend(each for each in waits if each not in copy.input)
            yield copy
        # A custom gradient may use the arguments.
        for position, arg in enumerate(self._signature.input_arg if has_gradient else ()):
            name = argument_name(self._prefix, position)
            node = tf.compat.v1.NodeDef(name=name, op="Identity", device=call.device)
            node.input.append(self._given[arg.name])
            node.attr["T"].type = arg.type
            yield node
        stands_in = tf.compat.v1.NodeDef(name=call.name, op="NoOp", device=call.device)
        if not self._caller.is_function and call.name in self._caller.kept and self.results:
            stands_in.op = "IdentityN"
            outputs = self._signature.output_arg
            tensors = (self.results[self._caller.tensor(call, i)] for i in range(len(outputs)))
            stands_in.input.extend(tensors)
            given = call.attr["Tout"].list.type if call.op in CALLS else ()
            stands_in.attr["T"].list.type.extend(given or [each.type for each in outputs])
        # The order of a protobuf map differs between processes.
        controls = sorted(self._function.graph.control_ret.values())
        ends = [self._control(f"^{name}") for name in controls]
        stands_in.input.extend(dict.fromkeys(ends or waits))
        yield stands_in

    def _copied(self, node: Any) -> Any:
        copy = tf.compat.v1.NodeDef()
        copy.CopyFrom(node)
        copy.name = f"{self._prefix}{node.name}"
        copy.device = node.device or self._call.device
        copy.input[:] = [
            self._control(name) if is_control(name) else self._tensor(name) for name in node.input
        ]
        for name, value in node.attr.items():
            if value.placeholder:  # The caller gives the attribute of a polymorphic function.
                copy.attr[name].CopyFrom(self._call.attr[value.placeholder])
        if "_class" in copy.attr:
            places = (_decoded(node, "_class", each) for each in node.attr["_class"].list.s)
            names = (each.removeprefix("loc:@") for each in places)
            inner = [name for name in names if name in self._function.by_name]
            copy.attr["_class"].list.s[:] = [f"loc:@{self._prefix}{n}".encode() for n in inner]
        if GRADIENT in node.attr:
            before = attribute_text(node, INLINED_INTO)
            copy.attr[INLINED_INTO].s = f"{self._prefix}{before}".encode()
        return copy

    def _tensor(self, name: str) -> str:
        """The name in the caller of a tensor of the function."""
        if name in self._given:
            return self._given[name]
        if self._caller.is_function:
            return f"{self._prefix}{name}"
        port = self._function.port(name)  # -1 of a wrong name, which the index refuses.
        made = f"{self._prefix}{node_name(name)}"
        return f"{made}:{port}" if port else made

    def _control(self, name: str) -> str:
        """The name in the caller of a control input of the function."""
        name = name.removeprefix("^")
        if name in self._given:
            return f"^{node_name(self._given[name])}"
        return f"^{self._prefix}{name}"


def argument_name(prefix: str, position: int) -> str:
    """Returns the name of the node that stands for an argument of an inlined function."""
    return f"{prefix}argument/{position}"


def _has_side_effects(op: str) -> bool:
    """Whether an op is stateful, or unknown."""
    definition = tf_private.op_definition(op)
    return definition is None or definition.is_stateful


def has_old_control_flow(body: GraphEditor) -> bool:
    """Whether a body has control flow of TensorFlow 1."""
    return not _OLD_CONTROL_FLOW.isdisjoint(body.by_op)
