"""Node by node, the painting equals TensorFlow's own pass with its lists."""

import functools
import random

import pytest
import tensorflow as tf

from helpers import graph_dsl, graph_models, grappler
from helpers.cases import first_of
from tfamp.graph import rewrite_graph_def
from tfamp.graph.op_lists import OpLists

# These tests are about what the lists decide.
rewrite_by_lists = functools.partial(rewrite_graph_def, placement="lists")

MODEL_CASES = [f"{name} {kind}" for name in graph_models.MODELS for kind in ("forward", "step")]
RANDOM_CASES = [f"random {seed}" for seed in range(60)]
# Those that the passes are for, as far as TensorFlow has their kernels.
DEVICES = {"float16": "gpu" if tf.test.is_built_with_cuda() else "cpu", "bfloat16": "cpu"}
CASES = [*graph_dsl.TABLE, *MODEL_CASES, *RANDOM_CASES]


def model_case(case):
    name, kind = case.split()
    function = graph_models.concrete(name, train=kind == "step")
    graph_def = function.graph.as_graph_def()
    fetches = [each.name for each in function.outputs]
    fetches += [node.name for node in graph_def.node if node.op == "AssignSubVariableOp"]
    feeds = [each.name for each in function.inputs]
    # Functions inlined and loops in the form of TensorFlow 1, as mixed precision finds them.
    return grappler.optimized(graph_def, fetches, feeds, "function"), fetches, feeds


def dsl_case(case):
    made = random_graph(case) if case in RANDOM_CASES else graph_dsl.graph(case)
    return made.graph_def, made.fetches, made.feeds


def random_graph(case):
    """A DAG of up to 25 nodes of all colours, at least one of them allowed."""
    choose = random.Random(case)
    inputs = {"x": [], "a": ["x"]}
    for position in range(choose.randint(1, 24)):
        names = list(inputs)
        sources = [choose.choice(names) for _ in range(choose.randint(1, 2))]
        inputs[f"{choose.choice('aaiiiddcccn')}{position}"] = sources
    return graph_dsl.from_inputs(inputs)


@pytest.fixture(scope="module")
def cases():
    return {case: (model_case if case in MODEL_CASES else dsl_case)(case) for case in CASES}


def references(case, dtype):
    """Grappler's result for a case: float16 for GPUs of each capability, bfloat16 for the CPU."""
    capabilities = grappler.CAPABILITIES if dtype == "float16" else [None]
    return [grappler.painted_by_grappler([case], dtype, each)[0] for each in capabilities]


def dtypes(graph_def):
    """Type attributes of every node but Casts, in plain values."""
    return {
        node.name: {
            name: value.type or tuple(value.list.type)
            for name, value in node.attr.items()
            if not name.startswith("_") and (value.type or value.list.type)
        }
        for node in graph_def.node
        if node.op != "Cast"
    }


@functools.cache
def infer_joins_behind_allow():
    """Whether the float16 pass converts an infer op behind a product: 2.19's does not."""
    (painted,) = references(dsl_case("x>A>I"), "float16")[:1]
    return dtypes(painted)["i"] == {"T": tf.float16.as_datatype_enum}


@pytest.mark.parametrize("dtype", first_of(reversed(grappler.PASSES)))
@pytest.mark.parametrize("case", CASES)
def test_same_dtypes_and_no_more_casts(case, dtype, cases):
    if dtype == "float16" and not infer_joins_behind_allow():
        pytest.skip("the float16 pass of this TensorFlow converts infer ops only between others")
    assert_painted_alike(cases[case], dtype)


def assert_painted_alike(case, dtype):
    graph_def, fetches, feeds = case
    result = rewrite_by_lists(
        graph_def,
        fetches,
        feeds=feeds,
        dtype=dtype,
        op_lists=OpLists.grappler(dtype),
        device=DEVICES[dtype],
    )
    assert result.plan.summary.low_nodes
    for expected in references(case, dtype):
        assert dtypes(result.graph_def) == dtypes(expected)
        assert graph_dsl.casts(result.graph_def) <= graph_dsl.casts(expected)


def test_grappler_itself_leaves_gpus_without_tensor_cores_alone(cases):
    graph_def, *_ = case = cases["cnn step"]
    (painted,) = grappler.painted_by_grappler([case], "float16", "6.1")
    assert dtypes(painted) == dtypes(graph_def)


def variables_of_tensorflow_1(resource, loop):
    """Products with a variable, one through an Identity more, also in a loop."""
    with tf.Graph().as_default() as graph:
        x = tf.compat.v1.placeholder(tf.float32, (4, 4), name="x")
        weights = tf.compat.v1.get_variable("w", (4, 4), use_resource=resource)
        again = tf.identity(tf.identity(weights))

        def products(x):
            return tf.matmul(tf.matmul(x, again), weights)

        if loop:
            x = tf.compat.v1.while_loop(lambda x: tf.reduce_sum(x) < 1e9, products, [x])
        tf.identity(products(x), name="y")
    return graph.as_graph_def(), ["y:0"], ["x:0"]


@pytest.mark.parametrize("dtype", grappler.PASSES)
@pytest.mark.parametrize("loop", [False, True])
@pytest.mark.parametrize("resource", [False, True])
def test_reads_of_variables_have_grapplers_dtypes(resource, loop, dtype, monkeypatch):
    from tensorflow.python.ops import control_flow_util

    # Loops of TensorFlow 1, as Grappler finds them.
    monkeypatch.setattr(control_flow_util, "ENABLE_CONTROL_FLOW_V2", False)
    case = variables_of_tensorflow_1(resource, loop)
    ops = {node.name: node.op for node in case[0].node}
    assert ("VariableV2" in ops.values()) == (not resource)
    assert ("Enter" in ops.values()) == loop
    assert_painted_alike(case, dtype)
    if not resource:
        result = rewrite_by_lists(case[0], case[1], feeds=case[2], dtype=dtype)
        assert dtypes(result.graph_def)["w/read"] == {"T": tf.float32.as_datatype_enum}


def test_a_product_whose_kernels_are_joint_stays_as_grappler_leaves_it():
    # BatchMatMulV3 has kernels for Ta, Tb and Tout in float16, none for only one of them.
    with tf.Graph().as_default() as graph:
        x = tf.compat.v1.placeholder(tf.float32, (2, 8, 8), name="x")
        y = tf.raw_ops.BatchMatMulV3(x=x, y=x, Tout=tf.float32, name="joint")
        tf.identity(tf.raw_ops.BatchMatMulV2(x=y, y=y, name="one"), name="y")
    case = graph.as_graph_def(), ["y:0"], ["x:0"]
    for expected in references(case, "float16"):
        types = {node.name: node.attr for node in expected.node}
        assert types["one"]["T"].type == tf.float16.as_datatype_enum
        assert types["joint"]["Tout"].type == tf.float32.as_datatype_enum
    assert_painted_alike(case, "float16")


# ---- Train steps of Keras models -----------------------------------------------------------------
