"""The call that the table of kernels reads is one value, whatever it is made from."""

import pytest
import tensorflow as tf

from tfamp.graph.graph import Graph
from tfamp.graph.index import index_bodies
from tfamp.planning.kernel_calls import (
    call_before_it_runs,
    call_of_indexed_node,
    call_of_recorded_shapes,
)
from tfamp.planning.kernels import OpCall, fact_about


@pytest.mark.parametrize("rows", [64, None])
def test_sources_agree_about_the_gradient_of_a_bias(rows):
    function = tf.function(lambda x: tf.raw_ops.BiasAddGrad(out_backprop=x))
    traced = function.get_concrete_function(tf.TensorSpec((rows, 8)))
    graph = Graph(traced.graph.as_graph_def(add_shapes=True), ["Identity"])
    (index,) = index_bodies(graph, "bfloat16", "cpu")
    (node,) = [each for each in index.nodes if each.op == "BiasAddGrad"]
    (op,) = [each for each in traced.graph.get_operations() if each.type == "BiasAddGrad"]
    body = graph.main
    found = [
        call_of_indexed_node(index, index.nodes.index(node)),
        call_of_recorded_shapes(
            "BiasAddGrad", [body.dims(op.inputs[0].name)], body.dims(op.outputs[0].name), node.attrs
        ),
        call_before_it_runs("BiasAddGrad", [(rows, 8)], lambda number: None, node.attrs),
    ]
    assert [call.inputs for call in found] == [[(rows, 8)]] * 3
    assert [call.output for call in found] == [(8,), (8,), None]
    facts = {fact_about(call, "bfloat16", "cpu", frozenset()) for call in found}
    assert len(facts) == 1
    assert facts != {None}


@pytest.mark.parametrize(
    ("op", "inputs", "integers", "output"),
    [
        ("Sum", [(8, 4, 2), (2,)], {1: (0, -1)}, (1, 4, 1)),
        ("Mean", [(8, 4), ()], {}, None),
        ("Sum", [None, ()], {1: (0,)}, None),
        ("Conv2DBackpropFilter", [(1, 8, 8, 3)], {1: (3, 3, 3, 4)}, (3, 3, 3, 4)),
        ("ResizeNearestNeighborGrad", [(2, 8, 8, 3)], {1: (4, 4)}, (2, 4, 4, 3)),
        ("MatMul", [(2, 3), (3, 4)], {1: (2,)}, None),
    ],
)
def test_the_output_of_an_op_that_has_not_run_is_told_by_its_inputs(op, inputs, integers, output):
    call = call_before_it_runs(op, inputs, integers.get, {"T": "half"})
    assert call == OpCall(op, inputs, output, {"T": "half"})
