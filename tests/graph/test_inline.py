"""Inlining of function calls: same results, same order of side effects, calls that must stay."""

import pytest
import tensorflow as tf

from helpers.graph_models import runnable
from tfamp.graph.graph import Graph
from tfamp.rewriting.pipeline import in_topological_order

X = tf.TensorSpec((), tf.float32)


def inlined(function, *specs):
    traced = tf.function(function).get_concrete_function(*specs)
    names = [tensor.name for tensor in traced.outputs]
    graph = Graph(traced.graph.as_graph_def(add_shapes=True), names)
    return traced, graph.inline_calls().graph_def


def calls(graph_def):
    return [node.name for node in graph_def.node if "PartitionedCall" in node.op]


def run(traced, graph_def, *args):
    return [float(each) for each in runnable(traced, graph_def)(*args)]


def test_nested_calls_with_several_outputs_and_shared_arguments():
    inner = tf.function(lambda a, b: (a + b, b, tf.split(tf.stack([a, b]), 2)[1][0]))

    @tf.function
    def outer(a):
        total, given, part = inner(a, 2.0 * a)
        return inner(total, part), given

    traced, graph_def = inlined(lambda x: outer(x), X)
    assert calls(traced.graph.as_graph_def())
    assert not calls(graph_def)
    (total, given, part), other = traced(tf.constant(3.0))
    assert run(traced, graph_def, tf.constant(3.0)) == [
        float(each) for each in (total, given, part, other)
    ]


def test_names_start_with_the_call():
    double = tf.function(lambda x: x + x)
    _, graph_def = inlined(lambda x: double(double(x)), X)
    names = [node.name for node in graph_def.node]
    assert "PartitionedCall/add" in names
    assert "PartitionedCall_1/add" in names
    assert len(set(names)) == len(names)


def test_calls_in_loop_bodies_are_inlined():
    double = tf.function(lambda x: x + x)

    def loop(x):
        return tf.while_loop(lambda i, _: i < 3, lambda i, x: (i + 1, double(x)), (0, x))[1]

    _, graph_def = inlined(loop, X)
    (body,) = [f for f in graph_def.library.function if "while_body" in f.signature.name]
    assert not [node for node in body.node_def if "PartitionedCall" in node.op]
    assert "while/PartitionedCall/add" in [node.name for node in body.node_def]


def test_what_waits_for_a_call_waits_for_its_side_effects():
    count = tf.Variable(1.0)

    @tf.function
    def add(x):
        count.assign_add(x)
        return x

    def fn(x):
        add(x)
        count.assign(count * 10.0)
        add(x)
        return count.read_value()

    traced, graph_def = inlined(fn, X)
    assert not calls(graph_def)
    assert run(traced, graph_def, tf.constant(2.0)) == [32.0]


def test_a_fetched_call_keeps_its_name_and_values():
    double = tf.function(lambda x: x + x)
    graph_def = tf.function(lambda x: double(x)).get_concrete_function(X).graph.as_graph_def()
    kept = Graph(graph_def, ["PartitionedCall:0"]).inline_calls().graph_def
    (node,) = [node for node in kept.node if node.name == "PartitionedCall"]
    assert (node.op, list(node.input)) == ("IdentityN", ["PartitionedCall/Identity"])


@pytest.mark.parametrize("options", [{"jit_compile": True}, {"noinline": True}])
def test_compiled_and_marked_calls_stay(options):
    attributes = {"_noinline": True} if options.pop("noinline", False) else None
    double = tf.function(lambda x: x + x, experimental_attributes=attributes, **options)
    _, graph_def = inlined(lambda x: double(x), X)
    assert len(calls(graph_def)) == 1


def test_a_second_inlining_changes_nothing():
    double = tf.function(lambda x: x + x)
    _, graph_def = inlined(lambda x: double(double(x)), X)
    before = graph_def.SerializeToString(deterministic=True)
    Graph(graph_def).inline_calls()
    assert graph_def.SerializeToString(deterministic=True) == before


def test_calls_among_loops_of_tensorflow_1_stay():
    double = tf.function(lambda x: x + 1.0)
    with tf.Graph().as_default() as graph:
        tf.compat.v1.disable_control_flow_v2()
        try:
            x = tf.compat.v1.placeholder(tf.float32, (), name="x")
            tf.while_loop(lambda x: x < 9.0, lambda x: [double(x)], [x])
        finally:
            tf.compat.v1.enable_control_flow_v2()
    graph_def = graph.as_graph_def()
    assert any(node.op == "Enter" for node in graph_def.node)
    before = calls(graph_def)
    assert before
    assert calls(Graph(graph_def).inline_calls().graph_def) == before


def test_order_follows_data_and_control_inputs():
    def node(name, *inputs):
        return tf.compat.v1.NodeDef(name=name, op="NoOp", input=inputs)

    nodes = [node("c", "a", "^b"), node("a"), node("d", "loop"), node("b", "a:1"), node("e")]
    assert [each.name for each in in_topological_order(nodes)] == ["a", "b", "c", "d", "e"]
    cycle = [node("merge", "a", "next"), node("next", "merge"), node("a")]
    assert {each.name for each in in_topological_order(cycle)} == {"merge", "next", "a"}
