"""The check after the rewrite finds what the stages before it could get wrong."""

import functools
import sys
import types

import pytest
import tensorflow as tf

import tfamp
from helpers import graph_dsl
from tfamp import OpLists
from tfamp.graph import rewrite
from tfamp.graph.graph import Graph
from tfamp.graph.index import build_indexes
from tfamp.planning.decision import decide
from tfamp.planning.options import GraphUse, RewriteOptions

# These tests are about what the lists decide.
rewrite_graph_def = functools.partial(rewrite.rewrite_graph_def, placement="lists")

BFLOAT16, FLOAT32 = (dtype.as_datatype_enum for dtype in (tf.bfloat16, tf.float32))


def decided(indexes, use, op_lists):
    options = RewriteOptions("bfloat16", op_lists, placement="lists", device="cpu")
    return decide(indexes, (), rewrite.resolved(options), use)


def check(change):
    made = graph_dsl.graph("x>d>A>I>n")
    indexes = build_indexes(made.graph_def, dtype="bfloat16", device="cpu")
    use = GraphUse(made.fetches, made.feeds)
    decision = decided(indexes, use, OpLists.grappler("bfloat16"))
    lists = OpLists.grappler("bfloat16")
    how = {"dtype": "bfloat16", "op_lists": lists}
    after = rewrite_graph_def(made.graph_def, made.fetches, **how).graph_def
    change({node.name: node for node in after.node}, after)
    rewrite.verify_rewrite(Graph(after), decision.scopes, decision.plan)


def test_a_correct_rewrite_passes():
    check(lambda nodes, graph: None)


def lower_a_whole_denied_chain(nodes, graph):
    nodes["d"].attr["T"].type = BFLOAT16
    cast = nodes["d-0-CastTo-bfloat16"]
    cast.attr["SrcT"].type = BFLOAT16
    nodes["x"].attr["dtype"].type = BFLOAT16


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda nodes, graph: setattr(nodes["a"].attr["T"], "type", FLOAT32),
            r"Internal error.*node 'a' .*T became float32, but must be bfloat16",
        ),
        (lower_a_whole_denied_chain, r"Internal error.*'x' \(Placeholder\).*must be float32"),
        (
            lambda nodes, graph: nodes["d"].input.__setitem__(0, "d-0-CastTo-bfloat16"),
            r"Internal error.*node 'd': its input 'x' has another dtype",
        ),
        (lambda nodes, graph: setattr(nodes["out_n"], "name", "y"), r"Internal error.*was lost"),
        (lambda nodes, graph: graph.node.add(name="new", op="NoOp"), "was lost or added"),
    ],
)
def test_a_violation_is_named(change, message):
    with pytest.raises(tfamp.RewriteError, match=message):
        check(change)


def test_a_lost_function_is_named():
    function = tf.function(lambda x: tf.function(lambda y: y @ y)(x)).get_concrete_function(
        tf.TensorSpec((2, 2))
    )
    before = function.graph.as_graph_def()
    indexes = build_indexes(before, dtype="bfloat16", device="cpu")
    decision = decided(indexes, GraphUse(()), OpLists())
    after = tf.compat.v1.GraphDef(node=before.node)
    with pytest.raises(tfamp.RewriteError, match="function .* was lost"):
        rewrite.verify_rewrite(Graph(after), decision.scopes, decision.plan)


def test_a_low_node_that_adds_up_low_is_found(monkeypatch):
    @tf.function
    def pooled(x):
        x = tf.nn.avg_pool2d(tf.nn.conv2d(x, tf.ones((1, 1, 4, 4)), 1, "SAME"), 32, 32, "SAME")
        return tf.nn.conv2d(x, tf.ones((1, 1, 4, 4)), 1, "SAME")

    graph = pooled.get_concrete_function(tf.TensorSpec((1, 64, 64, 4))).graph.as_graph_def()
    how = {"dtype": "float16", "device": "cpu"}
    lists = OpLists.default("float16", "cpu")
    plan = rewrite_graph_def(graph, ["Identity:0"], **how, op_lists=lists).plan
    assert {node.op: node.dtype for node in plan.nodes}["AvgPool"] == "float32"
    forced = rewrite_graph_def(graph, ["Identity:0"], **how, force_low=["AvgPool"]).plan
    assert {node.op: node.dtype for node in forced.nodes}["AvgPool"] == "float16"
    # A decision that forgets the table.
    monkeypatch.setattr("tfamp.planning.decision.inexact_nodes", lambda index, options: ())
    with pytest.raises(tfamp.RewriteError, match=r"AvgPool.*it is low: Eigen's kernel.*1024"):
        rewrite_graph_def(graph, ["Identity:0"], **how)


# ---- What the last passes give ------------------------------------------------------------------


def _damaged(monkeypatch, change):
    """Rewrites a graph with a last pass that changes it wrongly."""
    made = graph_dsl.graph("x>d>A>I>n")
    damage = rewrite.Pass("damage", None, lambda options: True, carries_plan=True)
    monkeypatch.setattr(rewrite, "PASSES", (*rewrite.PASSES, damage))
    module = types.ModuleType("tfamp.graph.passes.damage")
    module.run = lambda graph, options, plan: change(graph.main)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    how = {"dtype": "bfloat16", "op_lists": OpLists.grappler("bfloat16")}
    return rewrite_graph_def(made.graph_def, made.fetches, **how)


def _lower(name):
    def change(body):
        node = body.by_name[name]
        cast = body.by_name[f"{name}-0-CastTo-bfloat16"]
        node.attr["T"].type = cast.attr["SrcT"].type = BFLOAT16
        body.by_name["x"].attr["dtype"].type = BFLOAT16

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda body: None, None),
        (
            lambda body: setattr(body.by_name["a"].attr["T"], "type", FLOAT32),
            r"the result: .*'a'.* its input '.*' is bfloat16, not float32",
        ),
        (
            lambda body: body.by_name["a"].input.__setitem__(0, "nowhere"),
            r"the result: .*'a'.* its input 'nowhere' is not the output of a node",
        ),
        (_lower("d"), r"node 'x' \(Placeholder\): it is bfloat16, but must be float32"),
    ],
    ids=["right", "dtypes", "missing", "denied"],
)
def test_what_the_last_passes_give_is_verified(monkeypatch, change, message):
    if message is None:
        assert _damaged(monkeypatch, change).plan.summary.low_nodes
        return
    with pytest.raises(tfamp.RewriteError, match=message):
        _damaged(monkeypatch, change)


def test_a_result_that_is_used_from_outside_is_still_there(monkeypatch):
    def drop(body):
        body.drop({"out_n"})

    with pytest.raises(tfamp.RewriteError, match="node 'out_n': it was lost"):
        _damaged(monkeypatch, drop)
