"""Random graphs: the result is valid, runs, keeps what must stay, and is its own rewrite."""

import functools
import warnings

import tensorflow as tf
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from helpers import graph_dsl
from tfamp.core.errors import NothingConvertedWarning
from tfamp.graph import rewrite
from tfamp.graph.op_lists import OpLists

# These tests are about what the lists decide.
rewrite_graph_def = functools.partial(rewrite.rewrite_graph_def, placement="lists")


def rewritten(made, dtype, graph_def=None):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NothingConvertedWarning)
        return rewrite_graph_def(
            made.graph_def if graph_def is None else graph_def,
            made.fetches,
            feeds=made.feeds,
            dtype=dtype,
            op_lists=OpLists.grappler(dtype),
            device="cpu",
        )


@settings(max_examples=200, suppress_health_check=[HealthCheck.too_slow])
@given(made=graph_dsl.random_graphs(), dtype=st.sampled_from(["float16", "bfloat16"]))
def test_random_graphs_stay_valid_and_as_they_must(made, dtype):
    before = made.graph_def.SerializeToString(deterministic=True)
    result = rewritten(made, dtype)
    assert made.graph_def.SerializeToString(deterministic=True) == before

    # TensorFlow itself compares the dtypes of both ends of every edge.
    with tf.Graph().as_default() as graph:
        tf.graph_util.import_graph_def(result.graph_def, name="")
    for name in (*made.fetches, *made.feeds):
        assert graph.get_tensor_by_name(name).dtype == tf.float32
    low = graph_dsl.low_nodes(result.graph_def, dtype)
    assert {name for name in made.nodes if name[0] == "a"} <= low
    assert not {name for name in low if name[0] in "dn"}
    old = {node.name: node for node in made.graph_def.node}
    assert old.keys() <= {node.name for node in result.graph_def.node}

    casts = [node for node in result.graph_def.node if node.op == "Cast"]
    assert len({(node.input[0], node.attr["DstT"].type) for node in casts}) == len(casts)

    assert rewritten(made, dtype, result.graph_def).graph_def == result.graph_def
