"""The owner of a graph: its bodies, which read and change their nodes, and its functions."""

from __future__ import annotations

import contextlib
import gc
import itertools
from collections.abc import Container, Iterable, Iterator

import tensorflow as tf

from tfamp.core.kinds import FunctionDef, GraphDef, NodeDef
from tfamp.graph.body import Body, refill
from tfamp.graph.inlining import inline
from tfamp.graph.loops import Loop, changeable_loops
from tfamp.graph.nodes import named_functions
from tfamp.planning.structures import BRANCHING, MAIN_GRAPH, free_name, reach

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


def new_suffix() -> str:
    """Returns a suffix that no function's name has had in this process."""
    return f"_tfamp_{next(_NUMBERS)}"


class Graph:
    """A GraphDef and all reads and changes of it, in place.

    Args:
        graph_def: A `tf.compat.v1.GraphDef`.
        kept: Tensors ("c:0") or nodes ("c") that are used from outside: their names remain.

    Attributes:
        graph_def: The GraphDef.
        main: The nodes of the graph itself.
        functions: Its functions by name, in the order of the library.
        weights: Arguments of loops' functions that hold weights, as (function, argument).
    """

    def __init__(self, graph_def: GraphDef, kept: Iterable[str] = ()) -> None:
        self.graph_def = graph_def
        self.functions: dict[str, Body] = {}
        self.main = Body(graph_def, self.functions, kept)
        self.weights: set[tuple[str, str]] = set()
        self._read_functions()

    def copy(self) -> Graph:
        """Returns a deep copy."""
        graph_def = tf.compat.v1.GraphDef()
        graph_def.CopyFrom(self.graph_def)
        copy = Graph(graph_def, self.main.kept)
        copy.weights |= self.weights
        for body in self.bodies:
            copy.body(body.scope).replaced |= body.replaced
        return copy

    # ---- Bodies ----------------------------------------------------------------------------------

    @property
    def bodies(self) -> tuple[Body, ...]:
        """The graph itself and its functions."""
        return self.main, *self.functions.values()

    def body(self, scope: str) -> Body:
        """Returns a function by name, or the graph itself for ""."""
        return self.functions[scope] if scope else self.main

    @property
    def nodes(self) -> Iterator[NodeDef]:
        """The nodes of the graph and of its functions."""
        return (node for body in self.bodies for node in body.nodes)

    def reached(self, names: Iterable[str]) -> list[Body]:
        """The functions that these call, directly or not, by their names in the graph."""
        return self.main.reached(names)

    def changeable_loops(self) -> Iterator[Loop]:
        """Yields the valid loops of the graph itself whose functions nothing else calls."""
        return changeable_loops(self.main)

    # ---- Functions -------------------------------------------------------------------------------

    def add_function(self, definition: FunctionDef, wanted: str) -> str:
        """Adds a copy of a function under a free name; returns the name."""
        name = free_name(wanted, self.functions)
        self._store(definition, name)
        return name

    def copy_function(self, name: str) -> str:
        """Copies a function; returns the name of the copy."""
        copied = self.add_function(self.functions[name].definition, name)
        self.functions[copied].replaced |= self.functions[name].replaced
        return copied

    def put_function(self, definition: FunctionDef) -> None:
        """Adds a copy of a function under its name, instead of one that has the name."""
        self._store(definition, str(definition.signature.name))

    def _store(self, definition: FunctionDef, name: str) -> None:
        known = self.functions.get(name)
        stored = self.graph_def.library.function.add() if known is None else known.definition
        stored.CopyFrom(definition)
        stored.signature.name = name
        self.functions[name] = Body(stored, self.functions)

    def keep_functions(self, names: Container[str]) -> None:
        """Drops all other functions."""
        library = self.graph_def.library
        pairs = [pair for pair in library.gradient if pair.function_name in names]
        refill(library.gradient, [pair for pair in pairs if pair.gradient_func in names])
        if not all(name in names for name in self.functions):
            refill(library.function, [f for f in library.function if f.signature.name in names])
            self._read_functions()

    def drop_uncalled_functions(self) -> None:
        """Drops the functions that no node of the graph calls, directly or not."""
        self.keep_functions({body.scope for body in self.reached(self.main.calls())})

    def rename_functions(self, suffix: str) -> Graph:
        """Appends a suffix to the name of every function that is reached, and drops the others.

        Returns the graph itself. In a process a function's name is unique: rename the functions
        before importing a changed graph into the process that it comes from. A suffix of
        `new_suffix()` makes the names unique.

        Example:
            >>> import tensorflow as tf
            >>> def count(n):
            ...     return tf.while_loop(lambda i: i < n, lambda i: [i + 1], [0])
            >>> traced = tf.function(count).get_concrete_function(tf.TensorSpec((), tf.int32))
            >>> graph = Graph(traced.graph.as_graph_def())
            >>> names = list(graph.functions)
            >>> [f"{name}_2" for name in names] == list(graph.rename_functions("_2").functions)
            True
        """
        self.drop_uncalled_functions()
        for body in self.bodies:
            body.rename_calls(self.functions, suffix)
        renamed = list(self.functions.values())
        self.functions.clear()
        for body in renamed:
            body.definition.signature.name += suffix
            self.functions[body.scope] = body
        for gradient in self.graph_def.library.gradient:
            gradient.function_name += suffix
            gradient.gradient_func += suffix
        return self

    def _read_functions(self) -> None:
        known = dict(self.functions)
        self.functions.clear()
        for definition in self.graph_def.library.function:
            body = self.functions[definition.signature.name] = Body(definition, self.functions)
            if body.scope in known:
                body.replaced |= known[body.scope].replaced

    # ---- Inlining --------------------------------------------------------------------------------

    @collector_paused()
    def inline_calls(self) -> Graph:
        """Replaces calls with the nodes of the called functions, in functions also.

        The nodes of function `f` called by node "c" are named "c/...". What must wait for the
        call waits for "c", a NoOp then. A call stays where inlining would change what it means:
        it is recursive, compiled by XLA, marked `_noinline`, between loops of TensorFlow 1, or
        one of so many that the graph would grow by more than 100,000 nodes. Kept names remain.
        Functions no longer called are still in the library. Returns the graph itself.

        Raises RewriteError if a call does not fit its function, if it is its own argument, or
        if functions call each other hundreds deep.

        Example:
            >>> import tensorflow as tf
            >>> double = tf.function(lambda x: x + x)
            >>> outer = tf.function(lambda x: double(x) * 2.0)
            >>> traced = outer.get_concrete_function(tf.TensorSpec(())).graph
            >>> graph = Graph(traced.as_graph_def()).inline_calls()
            >>> [node.name for node in graph.main.nodes]
            ['x', 'PartitionedCall/add', 'PartitionedCall/Identity', 'mul/y', 'mul', 'Identity']
        """
        inline(self.main)
        return self

    def flatten(self) -> Graph:
        """Inlines calls, and gives every loop and conditional functions of its own.

        Inlining a function twice makes two nodes of each loop in it. TensorFlow names the
        gradient of a loop's body after the body: there would be two functions of one name.
        Returns the graph itself.
        """
        self.inline_calls()
        taken: set[str] = set()

        def branches_of(scope: str) -> Iterator[str]:
            for node in self.body(scope).of_types(*sorted(BRANCHING)):
                for _, called in named_functions(node):
                    if called.name in taken:
                        called.name = self.copy_function(called.name)
                    if called.name in self.functions:
                        taken.add(called.name)
                        yield called.name

        reach([MAIN_GRAPH], branches_of)
        return self
