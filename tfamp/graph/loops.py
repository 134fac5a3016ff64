"""Loops whose functions nothing else calls, so that they can be changed."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import tensorflow as tf

from tfamp.core.kinds import ArgDef, NodeDef
from tfamp.graph.body import Body
from tfamp.graph.nodes import SHAPES, attribute, function_attributes, tensor_inputs
from tfamp.planning.structures import LOOPS, node_name, reach

# Number of a loop's first results that TensorFlow differentiates. The others are stored for a
# gradient that is in the graph already.
_ORIGINAL = "_num_original_outputs"


@dataclass(frozen=True)
class Loop:
    """A loop of a graph.

    Attributes:
        graph: The graph.
        nodes: The loop; several where a model's signatures share its functions.
        body: The function of an iteration.
        condition: The function that decides whether another iteration runs.
    """

    graph: Body
    nodes: Sequence[NodeDef]
    body: Body
    condition: Body

    @property
    def node(self) -> NodeDef:
        """The first loop node."""
        return self.nodes[0]

    @property
    def is_single(self) -> bool:
        """Whether there is one node, not used from outside: variables can be added."""
        return len(self.nodes) == 1 and self.node.name not in self.graph.kept

    @property
    def variables(self) -> list[tuple[ArgDef, ArgDef]]:
        """The body's arguments, with the results that are their next values."""
        return list(zip(self.body.arguments, self.body.results, strict=True))

    def is_tested(self, position: int) -> bool:
        """Whether the condition uses a variable."""
        return self.condition.uses(self.condition.arguments[position].name) > 0

    @property
    def fits(self) -> bool:
        """Whether the numbers of arguments and results agree, as in a valid graph."""
        body = self.body
        counts = {len(body.arguments), len(body.results), len(self.condition.arguments)}
        for node in self.nodes:
            counts |= {len(attribute(node, "T").list.type), len(tensor_inputs(node))}
        return len(counts) == 1 and set(body.returned) == {arg.name for arg in body.results}

    def copies(self, argument: str) -> Collection[str]:
        """An argument of the body, and its copies by Identities."""

        def made_of(name: str) -> Iterator[str]:
            for user in self.body.consumers[node_name(name)]:
                node = self.body.by_name[user]
                if node.op == "Identity" and name in node.input:
                    yield self.body.tensor(node)

        return reach([argument], made_of)

    @property
    def new_place(self) -> int:
        """Position of a new variable, behind the differentiated ones."""
        attrs = self.node.attr
        return int(attrs[_ORIGINAL].i) if _ORIGINAL in attrs else len(attrs["T"].list.type)

    def add_variable(self, start: str, dtype: int, wanted: str) -> str:
        """Adds an invariant variable, whose initial value is a tensor of the graph.

        Returns the name of the argument, of the body's result and of the condition's argument.
        """
        place, made = self.new_place, self.graph.by_name[node_name(start)]
        self._extend(place, start, made, dtype)
        name = self._free_argument(wanted)
        for function in (self.body, self.condition):
            function.add_argument(name, dtype, place, made.attr.get(SHAPES))
        self.body.add_result(name, dtype, name, place)
        return name

    def _extend(self, place: int, start: str, made: NodeDef, dtype: int) -> None:
        node, graph = self.node, self.graph
        graph.set_inputs(node, [*node.input[:place], start, *node.input[place:]])
        node.attr["T"].list.type.insert(place, dtype)
        shapes = attribute(made, SHAPES).list.shape
        shape = shapes[0] if len(shapes) else tf.TensorShape(None).as_proto()
        for name in ("output_shapes", SHAPES):
            if len(attribute(node, name).list.shape):
                node.attr[name].list.shape.insert(place, shape)
        if _ORIGINAL in node.attr:
            node.attr[_ORIGINAL].i += 1
        # Later results have other numbers now.
        count = len(node.attr["T"].list.type)
        shifted = range(place, count)
        spelled = {graph.tensor(node, i): graph.tensor(node, i + 1) for i in shifted}
        if place == 0:
            spelled |= {f"{node.name}:0": f"{node.name}:1"}
        graph.rewire(spelled)

    def _free_argument(self, wanted: str) -> str:
        """A name that is free in both functions."""
        name = wanted.replace("/", "_").lower()
        while (free := self.condition.free_name(self.body.free_name(name))) != name:
            name = free
        return name


def changeable_loops(graph: Body) -> Iterator[Loop]:
    """Yields the valid loops of a graph whose functions nothing else calls."""
    groups = defaultdict[tuple[str, ...], list[NodeDef]](list)
    for loop in graph.of_types(*sorted(LOOPS)):
        functions = dict(function_attributes(loop))
        groups[functions.get("body", ""), functions.get("cond", "")].append(loop)
    if not groups:
        return
    uses = Counter(graph.calls())
    for body in graph.reached(graph.calls()):
        uses.update(body.calls())
    for names, loops in groups.items():
        if all(name in graph.functions and uses[name] == len(loops) for name in names):
            loop = Loop(graph, loops, *(graph.functions[name] for name in names))
            if loop.fits:
                yield loop
