"""Regions: slots that must agree, and slots that must not change."""

import tensorflow as tf

from helpers import graph_models, loops
from tfamp.graph.index import build_indexes
from tfamp.planning.coloring import find_regions, neighbours
from tfamp.planning.structures import Reason


def regions_of(graph_def, chosen=None):
    index = build_indexes(graph_def, dtype="bfloat16", device="cpu")[0]
    positions = {node.name: position for position, node in enumerate(index.nodes)}
    return index, find_regions(index, {positions[name]: chosen[name] for name in chosen or ()})


def fixed(index, regions):
    return {index.node_of(slot).name: reason.rule for slot, reason in regions.fixed.items()}


def test_a_tensor_list_is_a_group_with_its_values_way_and_unsafe_with_a_fixed_member():
    index, regions = regions_of(loops.tensor_list().graph.as_graph_def())
    (group,) = regions.lists
    ops = sorted(index.node_of(slot).op for slot in group)
    assert ops == ["TensorListGetItem"] * 2 + ["TensorListReserve"] + ["TensorListSetItem"] * 2
    assert not regions.unsafe
    name = next(node.name for node in index.nodes if node.op == "TensorListReserve")
    fetched = {name: Reason("fetches", "it is fetched")}
    _, unsafe = regions_of(loops.tensor_list().graph.as_graph_def(), fetched)
    assert all("which is fixed" in reason.text for reason in unsafe.unsafe.values())
    assert unsafe.unsafe.keys() == set(group)
    fanin, fanout = neighbours(index)
    written = {index.node_of(slot).op for slot in group if set(fanout[slot]) & set(group)}
    assert written == {"TensorListSetItem"}
    assert all(set(fanin[s]) & set(group) for s in group if index.ops[s] == "TensorListGetItem")


def test_a_tensor_list_that_goes_into_a_loop_is_unsafe():
    index, regions = regions_of(loops.mapped().graph.as_graph_def())
    unsafe = {index.node_of(slot).op: reason.text for slot, reason in regions.unsafe.items()}
    assert unsafe.keys() >= {"TensorListFromTensor", "TensorListStack"}
    assert all("goes through map/while (StatelessWhile)" in text for text in unsafe.values())


def test_sources_calls_resources_and_chosen_nodes_are_fixed():
    graph_def = loops.nested_functions().graph.as_graph_def()
    index, regions = regions_of(graph_def, {"Identity": Reason("fetches", "it is fetched")})
    assert set(fixed(index, regions).values()) == {"source", "boundary", "fetches"}
    assert fixed(index, regions)["x"] == "source"
    index, regions = regions_of(graph_models.concrete("mlp", train=True).graph.as_graph_def())
    rules = {index.node_of(s).op: r.rule for s, r in regions.fixed.items()}
    assert rules["ReadVariableOp"] == rules["AssignSubVariableOp"] == "variable"


def test_a_loop_of_tensorflow_1_ties_next_iteration_to_merge():
    index, regions = regions_of(loops.loop_v1())
    ((following, *merges),) = regions.loops
    assert index.node_of(following).op == "NextIteration"
    assert [index.node_of(merge).op for merge in merges] == ["Merge"]


def test_a_variable_of_tensorflow_1_is_fixed():
    with tf.Graph().as_default() as graph:
        variable = tf.raw_ops.VariableV2(shape=(4, 4), dtype=tf.float32, name="v")
        tf.identity(variable, name="read")
    index, regions = regions_of(graph.as_graph_def())
    assert fixed(index, regions) == {"v": "variable"}
