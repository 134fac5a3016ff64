"""Every dtype of a node is a slot, and every tensor is an edge between two."""

import tensorflow as tf

from helpers import graph_models, loops
from tfamp.graph.index import build_indexes
from tfamp.interop.tf_private import has_kernel
from tfamp.planning.structures import ARGUMENT, RESULT


def indexes(function, dtype="float16", device="cpu"):
    return build_indexes(function.graph.as_graph_def(), dtype=dtype, device=device)


def slots_of(index, op):
    (node,) = [node for node in index.nodes if node.op == op]
    return [
        (slot.attr, slot.entry, slot.dtype, slot.can_be_low)
        for slot in (index.slots[i] for i in node.slots)
    ]


def test_every_type_attribute_is_a_slot():
    (index,) = indexes(graph_models.concrete("cnn", train=False))
    assert slots_of(index, "FusedBatchNormV3") == [
        ("T", None, "float32", True),
        ("U", None, "float32", False),
    ]
    (index,) = indexes(loops.gather_and_friends())
    assert slots_of(index, "GatherV2") == [
        ("Tparams", None, "float32", True),
        ("Tindices", None, "int32", False),
        ("Taxis", None, "int32", False),
    ]
    assert slots_of(index, "TopKV2")[-2:] == [
        ("Tk", None, "int32", False),
        ("index_type", None, "int32", False),
    ]


def test_a_list_of_types_is_a_slot_for_each_and_n_inputs_share_one():
    (index,) = indexes(loops.identity_n())
    assert slots_of(index, "IdentityN") == [
        ("T", 0, "float32", True),
        ("T", 1, "float32", True),
        ("T", 2, "int32", False),
    ]
    (index,) = indexes(loops.gather_and_friends())
    (position,) = [i for i, node in enumerate(index.nodes) if node.op == "ConcatV2"]
    ends = [edge.target for edge in index.edges if index.slots[edge.target].node == position]
    assert [index.slots[slot].attr for slot in ends] == ["T", "T", "Tidx"]


def test_the_element_dtype_of_a_tensor_list_is_a_slot_though_no_tensor_has_it():
    (index,) = indexes(loops.tensor_list())
    assert ("element_dtype", None, "float32", True) in slots_of(index, "TensorListReserve")


def test_functions_have_arguments_and_results_as_nodes():
    graph, *functions = indexes(loops.nested_functions())
    assert graph.scope == ""
    assert len(functions) == 2
    for index in functions:
        assert [node.op for node in index.nodes].count(ARGUMENT) == 1
        assert [node.op for node in index.nodes].count(RESULT) == 1
    assert [node.op for node in graph.nodes if node.calls] == ["PartitionedCall", "PartitionedCall"]


def test_edges_know_port_input_and_spelling():
    _, *functions = indexes(loops.nested_functions())
    spelled = {edge.tensor for index in functions for edge in index.edges}
    assert any(":product:0" in tensor for tensor in spelled)
    (index,) = indexes(graph_models.concrete("cnn", train=True))
    ports = {
        (edge.port, edge.tensor)
        for edge in index.edges
        if index.node_of(edge.source).op == "FusedBatchNormV3"
    }
    assert {port for port, _ in ports} >= {0, 3, 4}
    assert all(tensor.endswith(f":{port}") for port, tensor in ports if port)


def test_unreached_functions_are_left_out():
    graph_def = loops.nested_functions().graph.as_graph_def()
    copy = graph_def.library.function.add()
    copy.CopyFrom(graph_def.library.function[0])
    copy.signature.name = "nobody_calls_it"
    found = build_indexes(graph_def, dtype="float16", device="cpu")
    assert "nobody_calls_it" not in {index.scope for index in found}


def test_kernels_are_those_of_the_device():
    def pool(dtype):
        return (("T", (dtype,)),)

    assert has_kernel("AvgPool3D", "cpu", pool("bfloat16"))
    assert not has_kernel("AvgPool3D", "cpu", pool("float16"))
    assert has_kernel("AvgPool3D", "gpu", pool("float16"))
    assert has_kernel("AvgPool3D", "tpu", pool("float16"))
    assert has_kernel("NextIteration", "cpu", pool("float16"))  # registered for every device


def test_sizes_come_from_shapes_that_are_known():
    with tf.Graph().as_default() as graph:
        x = tf.compat.v1.placeholder(tf.float32, (None, 3), name="x")
        tf.identity(x, name="y")
        tf.ones((2, 3), name="z")
    (index,) = build_indexes(graph.as_graph_def(add_shapes=True), dtype="float16", device="cpu")
    assert [index.size((node, 0)) for node in range(3)] == [None, None, 6]


def test_einsums_have_their_equation_and_arguments_their_shapes():
    inner = tf.function(lambda x: tf.einsum("ab,bc->ac", x, x), autograph=False)
    function = tf.function(lambda x: inner(x), autograph=False)
    graph = function.get_concrete_function(tf.TensorSpec((2, 2))).graph
    _, index = build_indexes(graph.as_graph_def(add_shapes=True), dtype="float16", device="cpu")
    assert [node.equation for node in index.nodes if node.op == "Einsum"] == ["ab,bc->ac"]
    assert index.nodes[0].op == ARGUMENT
    assert index.shapes[0, 0] == (2, 2)
