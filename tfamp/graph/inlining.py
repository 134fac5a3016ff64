"""Inlining: calls become the nodes of the called functions."""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Container, Iterator, Mapping

import tensorflow as tf

from tfamp.core.errors import RewriteError
from tfamp.core.kinds import NodeDef
from tfamp.graph.body import Body
from tfamp.graph.nodes import (
    GRADIENT,
    attribute_text,
    control_inputs_of,
    decoded,
    is_control,
    tensor_inputs,
)
from tfamp.graph.ops import CALLS, has_side_effects
from tfamp.planning.structures import node_name, reach

# Attribute of inlined nodes with a custom gradient: the prefix that their function's nodes got.
INLINED_INTO = "_tfamp_inlined_into"

# Functions that call one another twice double at every level: a small graph could fill the
# memory. A call that would add nodes beyond this stays a call. Large models have some ten
# thousand.
MOST_NEW_NODES = 100_000

_OPAQUE = ("_noinline", "_XlaMustCompile", "_XlaCompile", "_tpu_replicate")


def inline(main: Body) -> None:
    """Replaces calls in a graph and its functions with the functions' nodes, in place.

    `Graph.inline_calls` describes it.
    """
    inliner = _Inliner(main.functions)
    try:
        for name in main.functions:
            inliner.expand_function(name)
    except RecursionError:
        raise RewriteError(
            "The functions of the graph call each other hundreds deep, deeper than Python's "
            f"recursion limit of {sys.getrecursionlimit()} allows. Call fewer functions inside "
            "functions, or raise the limit with sys.setrecursionlimit."
        ) from None
    inliner.expand(main)


class _Inliner:
    """Expands each function of a graph once, callees before callers."""

    def __init__(self, functions: Mapping[str, Body]) -> None:
        self._functions = functions
        self._is_expanded: dict[str, bool] = {}  # False while it is being expanded.
        self._room = MOST_NEW_NODES

    def expand_function(self, name: str) -> None:
        """Expands a function, if that has not begun."""
        if name not in self._is_expanded:
            self._is_expanded[name] = False
            self.expand(self._functions[name])
            self._is_expanded[name] = True

    def expand(self, body: Body) -> None:
        """Replaces the calls of a graph or a function with the nodes of the functions."""
        if body.has_old_control_flow:
            return
        ops = [op for op in body.by_op if op in CALLS or op in self._functions]
        calls = ((node, self._called(body, node)) for node in body.of_types(*ops))
        functions = {node.name: function for node, function in calls if function is not None}
        if not functions:
            return
        taken = set(body.by_name)
        moved: dict[str, str] = {}
        copies: list[_Copy] = []
        nodes: list[NodeDef] = []
        for node in body.nodes:
            function = functions.get(node.name)
            if function is None:
                nodes.append(node)
                continue
            copy = _Copy(body, node, function, taken)
            made = list(copy.nodes())
            taken |= {inner.name for inner in made}
            moved |= copy.results
            copies.append(copy)
            nodes += made
        resolve = functools.partial(_resolve, moved)
        for node in nodes:
            node.input[:] = map(resolve, node.input)
        awaited = {name[1:] for node in nodes for name in control_inputs_of(node)}
        controls = body.definition.control_ret.values() if body.is_function else body.kept
        unused = functions.keys() - awaited - set(controls)
        body.replace_nodes(node for node in nodes if node.name not in unused)
        for output, tensor in list(body.returned.items()):
            body.returned[output] = resolve(tensor)
        for copy in copies:
            for output, tensor in copy.replaced():
                body.replaced[output] = body.traced(resolve(tensor))

    def _called(self, body: Body, node: NodeDef) -> Body | None:
        """The expanded function to inline for a node; None if the node must stay."""
        name = node.attr["f"].func.name if node.op in CALLS else node.op
        function = self._functions.get(name)
        if function is None:
            return None
        inputs, arguments = len(tensor_inputs(node)), len(function.arguments)
        if inputs != arguments:
            cause = f"it has {inputs} inputs, and the function {name!r} takes {arguments}"
            raise body.error(node, cause)
        attributes = (node.attr, function.definition.attr)
        opaque = any(mark in attrs and attrs[mark].b for attrs in attributes for mark in _OPAQUE)
        recursive = self._is_expanded.get(name) is False
        if opaque or recursive or function.has_old_control_flow:
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

    def __init__(self, caller: Body, call: NodeDef, function: Body, taken: Container[str]) -> None:
        self._caller, self._call, self._function = caller, call, function
        numbers = itertools.chain([call.name], (f"{call.name}_{n}" for n in itertools.count(1)))
        names = function.by_name
        free = (p for p in numbers if not any(f"{p}/{name}" in taken for name in names))
        self._prefix = f"{next(free)}/"
        self._signature = function.definition.signature
        arguments = (arg.name for arg in self._signature.input_arg)
        self._arguments = dict(zip(arguments, tensor_inputs(call), strict=True))
        returned = function.returned
        outputs = [self._tensor(returned[arg.name]) for arg in self._signature.output_arg]
        self.results = {caller.tensor(call, port): made for port, made in enumerate(outputs)}
        if not caller.is_function and outputs:
            self.results[f"{call.name}:0"] = outputs[0]

    def nodes(self) -> Iterator[NodeDef]:
        """The copies, Identities of the arguments where they are needed, and the stand-in."""
        call, waits = self._call, control_inputs_of(self._call)
        has_gradient = False
        for node in self._function.nodes:
            copy = self._copied(node)
            has_gradient |= GRADIENT in node.attr
            if has_side_effects(copy.op):
                copy.input.extend(control for control in waits if control not in copy.input)
            yield copy
        # A custom gradient may use the arguments.
        for position, arg in enumerate(self._signature.input_arg if has_gradient else ()):
            name = argument_name(self._prefix, position)
            node = tf.compat.v1.NodeDef(name=name, op="Identity", device=call.device)
            node.input.append(self._arguments[arg.name])
            node.attr["T"].type = arg.type
            yield node
        stands_in = tf.compat.v1.NodeDef(name=call.name, op="NoOp", device=call.device)
        if not self._caller.is_function and call.name in self._caller.kept and self.results:
            stands_in.op = "IdentityN"
            outputs = self._signature.output_arg
            tensors = (self.results[self._caller.tensor(call, i)] for i in range(len(outputs)))
            stands_in.input.extend(tensors)
            dtypes = call.attr["Tout"].list.type if call.op in CALLS else ()
            stands_in.attr["T"].list.type.extend(dtypes or [arg.type for arg in outputs])
        # The order of a protobuf map differs between processes.
        controls = sorted(self._function.definition.control_ret.values())
        ends = [self._control(f"^{name}") for name in controls]
        stands_in.input.extend(dict.fromkeys(ends or waits))
        yield stands_in

    def replaced(self) -> Iterator[tuple[str, str]]:
        """The outputs of the call, and of calls inlined into the function, with what they are now.

        The outputs are named as in a graph that is traced, what they are as in the caller.
        """
        function = self._function
        for port, output in enumerate(self._signature.output_arg):
            yield f"{self._call.name}:{port}", self._tensor(function.returned[output.name])
        for inner, tensor in function.replaced.items():
            yield f"{self._prefix}{inner}", self._tensor(function.spelled(tensor))

    def _copied(self, node: NodeDef) -> NodeDef:
        copy = tf.compat.v1.NodeDef()
        copy.CopyFrom(node)
        copy.name = f"{self._prefix}{node.name}"
        copy.device = node.device or self._call.device
        copy.input[:] = map(self._input, node.input)
        for name, value in node.attr.items():
            if value.placeholder:  # The caller gives the attribute of a polymorphic function.
                copy.attr[name].CopyFrom(self._call.attr[value.placeholder])
        if "_class" in copy.attr:
            places = (decoded(node, "_class", text) for text in node.attr["_class"].list.s)
            names = (place.removeprefix("loc:@") for place in places)
            inner = [name for name in names if name in self._function.by_name]
            copy.attr["_class"].list.s[:] = [f"loc:@{self._prefix}{n}".encode() for n in inner]
        if GRADIENT in node.attr:
            before = attribute_text(node, INLINED_INTO)
            copy.attr[INLINED_INTO].s = f"{self._prefix}{before}".encode()
        return copy

    def _input(self, name: str) -> str:
        """The name in the caller of an input of a node of the function."""
        return self._control(name) if is_control(name) else self._tensor(name)

    def _tensor(self, name: str) -> str:
        """The name in the caller of a tensor of the function."""
        if name in self._arguments:
            return self._arguments[name]
        if self._caller.is_function:
            return f"{self._prefix}{name}"
        port = self._function.port(name)  # -1 of a wrong name, which the index refuses.
        made = f"{self._prefix}{node_name(name)}"
        return f"{made}:{port}" if port else made

    def _control(self, name: str) -> str:
        """The name in the caller of a control input of the function."""
        name = name.removeprefix("^")
        if name in self._arguments:
            return f"^{node_name(self._arguments[name])}"
        return f"^{self._prefix}{name}"


def argument_name(prefix: str, position: int) -> str:
    """Returns the name of the node that stands for an argument of an inlined function."""
    return f"{prefix}argument/{position}"
