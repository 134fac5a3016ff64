"""Graphs from strings: one letter is one node of a colour, an upper-case one must end low.

"x>A>d A>C" is a placeholder x, an allow node computed from it that must end low, a deny node behind
it that must stay float32, and a clear node behind the same allow node that must end low. A digit
tells nodes of one colour apart: "x>A1>A2". Letters: a(llow), i(nfer), d(eny), c(lear), n(o list).
A node has one or two inputs, in the order they are written. Every node that feeds no other is
fetched through an Identity.
"""

from __future__ import annotations

from dataclasses import dataclass

import tensorflow as tf
from hypothesis import strategies as st

SIZE = 4
# Letter -> op with one input and with two; the same colour in Grappler's lists of both dtypes.
OPS = {
    "a": ("MatMul", "MatMul"),
    "i": ("Sigmoid", "AddV2"),
    "d": ("Exp", "Pow"),
    "c": ("Relu", "Maximum"),
    "n": ("Cosh", "Atan2"),
}

# What the coloring tests expect; the parity tests run the same graphs through TensorFlow's pass.
TABLE = [
    # An allow node alone; two in a row share no Cast.
    "x>A",
    "x>A1>A2",
    # Infer and clear between allow nodes join.
    "x>A1>I>A2",
    "x>A1>C>A2",
    "x>A1>I1>C1>I2>A2",
    # Infer directly behind a converted node joins, and so the next one; before one it stays.
    "x>A>I",
    "x>A>I1>I2",
    "x>i>A",
    "x>i1>i2>A",
    # Clear joins from both sides, through clear nodes only.
    "x>C1>C2>A>C3>C4",
    "x>c>i>A",
    "x>A>n>c",
    # Infer behind a clear node: the clear node is converted only later.
    "x>A>C>i",
    # Deny spreads to infer, through clear, and not past the last infer or deny node.
    "x>A1>d>i>C>A2",
    "x>d>c>i x>A",
    "x>d1>c>d2>A",
    "x>d>i1>C1>A>I2",
    "x>d>i1>c1>i2>C2>A>I3",
    "x>d>C>A",
    # A node behind a denied and an allowed node is denied.
    "x>A>i x>d>i",
    "x>A>C x>d>C",
    "x>d>c>i x>A>c",
    # Diamonds.
    "x>A1>I1>A2 A1>C1>A2",
    "x>A1>i>A2 A1>d>i",
    "x>A1>I1>d A1>C1>d",
    "x>A1>n>A2 A1>I>A2",
    # Nothing to do with an allow node.
    "x>i>c>d>n x>A",
    # What is on no list stops everything.
    "x>n>A>n1>i>c",
    "x>A1>n>i>A2",
]


@dataclass(frozen=True)
class DslGraph:
    """A graph made from a string.

    Attributes:
        graph_def: The graph.
        fetches: Its outputs.
        feeds: Its input.
        low: Names of the nodes that must end low.
        nodes: Names of all nodes written.
    """

    graph_def: tf.compat.v1.GraphDef
    fetches: list[str]
    feeds: list[str]
    low: set[str]
    nodes: list[str]


def graph(text: str) -> DslGraph:
    """Makes the graph a string describes."""
    inputs: dict[str, list[str]] = {}
    low = set()
    for chain in text.split():
        tokens = chain.split(">")
        names = [token.lower() for token in tokens]
        low |= {token.lower() for token in tokens if token[0].isupper()}
        for name in names:
            inputs.setdefault(name, [])
        for source, target in zip(names, names[1:], strict=False):
            inputs[target].append(source)
    return from_inputs(inputs, low)


def from_inputs(inputs: dict[str, list[str]], low=frozenset()) -> DslGraph:
    """Makes a graph from the inputs of every node; those without any are placeholders' readers."""
    nodes = [name for name in inputs if name != "x"]
    used = {source for name in nodes for source in inputs[name]}
    made = tf.compat.v1.GraphDef()
    _add(made, "Placeholder", "x", [], "dtype")
    for name in nodes:
        sources = inputs[name] or ["x"]
        op = OPS[name[0]][len(sources) - 1]
        _add(made, op, name, sources * 2 if op == "MatMul" and len(sources) == 1 else sources)
    fetches = []
    for name in nodes:
        if name not in used:
            fetches.append(f"out_{name}:0")
            _add(made, "Identity", f"out_{name}", [name])
    return DslGraph(_with_defaults(made), fetches, ["x:0"], set(low), nodes)


def _with_defaults(graph_def):
    """The graph with every attribute written out, as TensorFlow's optimizers want it."""
    with tf.Graph().as_default() as complete:
        tf.graph_util.import_graph_def(graph_def, name="")
    return complete.as_graph_def()


def _add(graph_def, op, name, inputs, attr="T"):
    node = graph_def.node.add(name=name, op=op, input=inputs)
    node.attr[attr].type = tf.float32.as_datatype_enum


def low_nodes(graph_def, dtype) -> set[str]:
    """Names of the nodes, Casts left out, whose attribute T is the low dtype."""
    number = tf.as_dtype(dtype).as_datatype_enum
    return {
        node.name
        for node in graph_def.node
        if node.op != "Cast" and "T" in node.attr and node.attr["T"].type == number
    }


def casts(graph_def) -> int:
    """Number of Casts, those in functions included."""
    nodes = [*graph_def.node, *(n for f in graph_def.library.function for n in f.node_def)]
    return sum(node.op == "Cast" for node in nodes)


@st.composite
def random_graphs(draw):
    """A DAG of up to 14 nodes of all colours with one or two inputs each."""
    inputs = {"x": []}
    for position in range(draw(st.integers(1, 14))):
        sources = st.sampled_from(list(inputs))
        name = f"{draw(st.sampled_from('aaiiiddcccn'))}{position}"
        inputs[name] = draw(st.lists(sources, min_size=1, max_size=2))
    order = list(inputs)
    if draw(st.booleans()):  # The order of a graph's nodes says nothing.
        order = draw(st.permutations(order))
    return from_inputs({name: inputs[name] for name in order})
