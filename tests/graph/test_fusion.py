"""Arithmetic between products, compiled by XLA; the products are not."""

import numpy as np
import tensorflow as tf

from helpers.tolerances import tolerance
from tfamp.graph import rewrite_graph_def
from tfamp.graph.fusion import mark_fusible

v1 = tf.compat.v1
RULES = {"dtype": "bfloat16", "device": "cpu", "placement": "lists"}


def step(x, w):
    hidden = tf.nn.gelu(x @ w)
    centred = hidden - tf.reduce_mean(hidden, -1, keepdims=True)
    return tf.nn.relu(centred @ w)


def graph_of(function=step):
    specs = [tf.TensorSpec((16, 32)), tf.TensorSpec((32, 32))]
    concrete = tf.function(function).get_concrete_function(*specs)
    return rewrite_graph_def(concrete.graph.as_graph_def(add_shapes=True), ["Identity:0"], **RULES)


def marks(graph):
    return {node.name: node.op for node in graph.node if "_XlaCompile" in node.attr}


def computed(marked):
    return {name: op for name, op in marked.items() if op != "Const"}


def run(graph_def, *values):
    """What a graph gives, and the op types that ran."""
    found = v1.RunMetadata()
    options = v1.RunOptions(output_partition_graphs=True)
    with tf.Graph().as_default() as graph, v1.Session(graph=graph) as session:
        tf.graph_util.import_graph_def(graph_def, name="")
        fed = dict(zip(("x:0", "w:0"), values, strict=True))
        result = session.run("Identity:0", fed, options=options, run_metadata=found)
    return result, {node.op for part in found.partition_graphs for node in part.node}


def test_arithmetic_is_compiled_and_products_are_not():
    graph = graph_of().graph_def
    numbers = np.random.default_rng(0)
    values = [numbers.standard_normal(s).astype("float32") for s in ((16, 32), (32, 32))]
    expected, plain = run(graph, *values)
    count = mark_fusible(graph)
    marked = marks(graph)
    assert count == len(computed(marked)) >= 4
    assert "Const" in marked.values()
    assert {"Mul", "Sub"} <= set(marked.values())
    assert "MatMul" not in marked.values()
    found, ran = run(graph, *values)
    assert any("Xla" in op for op in ran)
    assert not any("Xla" in op for op in plain)
    assert any("MatMul" in op for op in ran)
    error = np.linalg.norm(found - expected) / np.linalg.norm(expected)
    assert error < tolerance("bfloat16", depth=4)


def test_small_groups_and_integers_stay():
    graph = graph_of(lambda x, w: tf.nn.relu(x @ w)).graph_def
    assert mark_fusible(graph) == 0
    assert not marks(graph)
    counts = tf.function(lambda n: ((n + 1) * 2 - n) * n).get_concrete_function(
        tf.TensorSpec((4,), tf.int32)
    )
    assert mark_fusible(counts.graph.as_graph_def()) == 0


def test_how_many_make_a_group_can_be_chosen():
    graph = graph_of(lambda x, w: tf.nn.relu(x @ w)).graph_def
    assert mark_fusible(graph, least=1) >= 1
