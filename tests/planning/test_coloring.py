"""Colours by the table: one letter is one node, see helpers/graph_dsl.py."""

import functools

import pytest
import tensorflow as tf

from helpers import graph_dsl
from tfamp.graph import rewrite_graph_def
from tfamp.graph.op_lists import OpLists

# These tests are about what the lists decide.
rewrite_by_lists = functools.partial(rewrite_graph_def, placement="lists")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("text", graph_dsl.TABLE)
def test_table(text, dtype):
    made = graph_dsl.graph(text)
    result = rewrite_by_lists(
        made.graph_def,
        made.fetches,
        feeds=made.feeds,
        dtype=dtype,
        op_lists=OpLists.grappler(dtype),
        device="cpu",
    )
    assert graph_dsl.low_nodes(result.graph_def, dtype) == made.low
    assert {n.name for n in result.plan.nodes if n.dtype == dtype} == made.low


def reasons(text, **choices):
    made = graph_dsl.graph(text)
    plan = rewrite_by_lists(made.graph_def, made.fetches, device="cpu", **choices).plan
    return {node.name: node.reason.text for node in plan.nodes}


def test_every_rule_names_its_cause():
    found = reasons("x>A1>I1>A2>C>d>i>A6 x>n A1>n6>i3>A7 x>i7>A8 x>A2>I2>C4>n4>A4>n5>c5>n1>A9")
    assert found["a1"] == "MatMul is on the allow list"
    assert found["i1"] == "it is between converted nodes"
    assert found["i2"] == "it is computed from a2, which is converted"
    assert found["c"] == "it is next to a2, which is converted"
    assert found["d"] == "Exp is on the deny list"
    assert found["i"] == "it is computed from d, which needs float32"
    assert found["n"] == "Cosh is on no list"
    assert found["i3"] == "it is neither between nor behind converted nodes"
    assert found["i7"] == "it computes with given data, which only products round"
    assert found["c5"] == "no node next to it is converted"
    assert found["x"] == "it has no inputs: its value is given"
    assert found["out_a6"] == "its result is fetched"


def test_a_node_with_float32_statistics_gives_the_cause_of_its_data():
    with tf.Graph().as_default() as graph:
        x = tf.compat.v1.placeholder(tf.float32, (2, 4, 4, 4))
        x = tf.exp(tf.matmul(x, x), name="d")
        one = tf.ones(4)
        norm, *_ = tf.raw_ops.FusedBatchNormV3(
            x=x, scale=one, offset=one, mean=one, variance=one, is_training=False, name="norm"
        )
        tf.identity(tf.matmul(norm, norm), name="out")
    plan = rewrite_by_lists(graph.as_graph_def(), ["out:0"], dtype="bfloat16", device="cpu").plan
    found = {node.name: node.reason.text for node in plan.nodes}
    assert found["norm"] == "it is computed from d, which needs float32"


def test_a_kept_node_stays_and_does_not_deny_what_follows():
    found = reasons("x>A1>I1>A2>I2>d>A3", keep_float32=["^a1$"])
    assert found["a1"] == "its name matches keep_float32 '^a1$'"
    assert found["i2"] == "it is computed from a2, which is converted"


def test_a_forced_node_is_converted_whatever_its_list_and_stops_deny():
    found = reasons("x>A1>d>i>A2", force_low=["^d$"])
    assert found["d"] == "its name matches force_low"
    assert found["i"] == "it is between converted nodes"


def test_a_node_both_kept_and_forced_is_kept():
    found = reasons("x>A1>A2", keep_float32=["a1"], force_low=["a"])
    assert found["a1"] == "its name matches keep_float32 'a1'"
    assert found["a2"] == "its name matches force_low"
