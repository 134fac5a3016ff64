"""Times from shapes: the roofline, Casts, and what is not known."""

import dataclasses

import pytest
import tensorflow as tf

from tfamp.core.profile import KINDS
from tfamp.graph import MachineProfile
from tfamp.graph.index import build_indexes
from tfamp.planning.cost import UNKNOWN_DIMENSION, crossing_tensors, estimate, scope_seconds

# So slow in arithmetic that memory does not count, and the other way round.
PEAKS = {kind: {"float32": 1.0, "bfloat16": 2.0, "float16": 0.1} for kind in KINDS}
ARITHMETIC = MachineProfile("arithmetic", PEAKS, 1e30, 1e30, 0.0)
FAST = {kind: dict.fromkeys(peaks, 1e30) for kind, peaks in PEAKS.items()}
MEMORY = MachineProfile("memory", FAST, 1.0, 1.0, 0.0)


def indexes_of(build, dtype="bfloat16", shapes=True):
    with tf.Graph().as_default() as graph:
        build()
    graph_def = graph.as_graph_def(add_shapes=shapes)
    return build_indexes(graph_def, dtype=dtype, device="cpu")


def times(index, costs, name):
    (position,) = [i for i, node in enumerate(index.nodes) if node.name == name]
    every_slot = range(len(index.slots))
    return costs.node(index, position, ()), costs.node(index, position, every_slot)


def dense(rows=4):
    def build():
        x = tf.compat.v1.placeholder(tf.float32, (rows, 8), name="x")
        y = tf.raw_ops.MatMul(a=x, b=tf.ones((8, 5)), name="y")
        z = tf.raw_ops.Tanh(x=tf.raw_ops.Reshape(tensor=y, shape=[-1], name="r"), name="z")
        tf.identity(z)

    return build


def test_arithmetic_is_counted_by_dtype():
    (index,) = indexes_of(dense())
    costs = estimate(index, ARITHMETIC, "bfloat16")
    assert times(index, costs, "y") == pytest.approx((320, 160))
    assert times(index, costs, "z") == pytest.approx((20, 10))
    assert times(index, costs, "r") == times(index, costs, "x") == (0, 0)
    (index,) = indexes_of(dense(), "float16")
    assert times(index, estimate(index, ARITHMETIC, "float16"), "y") == pytest.approx((320, 3200))


def test_an_op_with_figures_of_its_own_does_not_count_by_its_kind():
    own = {
        "MatMul": {"float32": 4.0, "bfloat16": 1.0, "float16": 1.0},
        "Tanh": {"float32": 1.0, "bfloat16": 0.5, "float16": 0.5},
    }
    (index,) = indexes_of(dense())
    costs = estimate(index, dataclasses.replace(ARITHMETIC, ops=own), "bfloat16")
    assert times(index, costs, "y") == pytest.approx((80, 320))
    assert times(index, costs, "z") == pytest.approx((20, 40))
    assert times(index, costs, "r") == (0, 0)


def depthwise_gradients(size, kernel, stride, padding, axes=2):
    def build():
        # A layer for sequences computes with images of one row.
        image, window = ((1,) * (2 - axes) + (each,) * axes for each in (size, kernel))
        x = tf.compat.v1.placeholder(tf.float32, (2, *image, 4), name="x")
        w = tf.zeros((*window, 4, 1))
        y = tf.nn.depthwise_conv2d(x, w, [1, stride, stride, 1], padding)
        by_input, by_filter = tf.gradients(y, [x, w])
        tf.identity(by_input, name="i")
        tf.identity(by_filter, name="f")

    return build


def test_forms_of_depthwise_gradients_have_figures_of_their_own():
    by_filter, by_input = (f"DepthwiseConv2dNativeBackprop{end}" for end in ("Filter", "Input"))
    slow = {"float32": 1.0, "bfloat16": 0.5, "float16": 0.5}
    own = {f"{by_filter} wide": slow, f"{by_input} strided": slow}
    profile = dataclasses.replace(ARITHMETIC, ops=own)

    def slower(*form):
        (index,) = indexes_of(depthwise_gradients(*form))
        costs = estimate(index, profile, "bfloat16")
        names = {node.op: node.name for node in index.nodes}
        pairs = [times(index, costs, names[op]) for op in (by_input, by_filter)]
        return [low > high for high, low in pairs]

    assert slower(16, 3, 1, "SAME") == slower(16, 3, 1, "VALID") == [False, False]
    assert slower(16, 3, 2, "SAME") == slower(17, 3, 2, "VALID") == [True, False]
    assert slower(16, 5, 1, "SAME") == slower(7, 7, 1, "VALID") == [False, True]
    assert slower(16, 3, 1, "SAME", 1) == [False, False]
    assert slower(16, 3, 2, "SAME", 1) == slower(17, 3, 2, "VALID", 1) == [True, False]


def test_memory_is_counted_by_dtype():
    (index,) = indexes_of(dense())
    costs = estimate(index, MEMORY, "bfloat16")
    moved = 4 * 8 + 8 * 5 + 4 * 5
    assert times(index, costs, "y") == pytest.approx((4 * moved, 2 * moved))
    assert times(index, costs, "z") == pytest.approx((4 * 40, 2 * 40))


def test_every_op_has_the_overhead_and_a_cast_has_it_too():
    (index,) = indexes_of(dense())
    costs = estimate(index, dataclasses.replace(MEMORY, op_overhead=1000.0), "bfloat16")
    assert times(index, costs, "z") == pytest.approx((1160, 1080))
    (y,) = [i for i, node in enumerate(index.nodes) if node.name == "y"]
    assert costs.casts[y, 0] == pytest.approx(1000 + 20 * (4 + 2))
    low = set(index.nodes[y].slots)
    assert len(crossing_tensors(index, low)) == 3
    added = scope_seconds(index, costs, low) - scope_seconds(index, costs, ())
    gained = 2 * (4 * 8 + 8 * 5 + 4 * 5)
    assert added == pytest.approx(2000 + 6 * (4 * 8 + 4 * 5) - gained), "constants are folded"


def test_constants_and_reads_of_variables_cost_nothing():
    weight = tf.Variable(tf.ones((8, 5)))
    function = tf.function(lambda x: x @ weight + tf.fill((4, 5), 2.0), autograph=False)
    graph = function.get_concrete_function(tf.TensorSpec((4, 8))).graph
    (index,) = build_indexes(graph.as_graph_def(add_shapes=True), dtype="bfloat16", device="cpu")
    profile = MachineProfile("launches", FAST, 1e30, 1e30, op_overhead=1.0)
    costs = estimate(index, profile, "bfloat16")
    taken = {node.op: times(index, costs, node.name)[0] for node in index.nodes}
    assert (taken["Const"], taken["ReadVariableOp"]) == (0, 0)
    assert (taken["MatMul"], taken["AddV2"]) == pytest.approx((1, 1))


def test_a_cast_of_the_graph_costs_what_an_inserted_one_costs_and_nothing_between_equals():
    def build():
        x = tf.compat.v1.placeholder(tf.float32, (10,), name="x")
        tf.identity(tf.cast(x, tf.bfloat16, name="down"))

    (index,) = indexes_of(build)
    costs = estimate(index, MEMORY, "bfloat16")
    assert times(index, costs, "down") == (10 * (4 + 2), 0)


def test_an_unknown_dimension_counts_as_a_batch():
    indexes = [indexes_of(dense(rows=rows))[0] for rows in (None, UNKNOWN_DIMENSION)]
    found = [times(each, estimate(each, ARITHMETIC, "bfloat16"), "y") for each in indexes]
    assert found[0] == found[1]


def test_without_shapes_times_are_not_known():
    (index,) = indexes_of(dense(), shapes=False)
    costs = estimate(index, ARITHMETIC, "bfloat16")
    (y,) = [i for i, node in enumerate(index.nodes) if node.name == "y"]
    assert not costs.is_known(index.nodes[y])
    assert costs.unshaped.issuperset(index.nodes[y].slots)


def test_shapes_inside_functions_are_known():
    inner = tf.function(lambda x: tf.matmul(x, x), autograph=False)
    outer = tf.function(lambda x: inner(x) + 1.0, autograph=False)
    graph = outer.get_concrete_function(tf.TensorSpec((6, 6))).graph
    _, index = build_indexes(graph.as_graph_def(add_shapes=True), dtype="bfloat16", device="cpu")
    costs = estimate(index, ARITHMETIC, "bfloat16")
    (name,) = [node.name for node in index.nodes if node.op == "MatMul"]
    assert times(index, costs, name) == pytest.approx((2 * 6**3, 6**3))


def test_what_a_reshape_leaves_open_follows_from_what_it_is_given():
    def build():
        x = tf.compat.v1.placeholder(tf.float32, (None, 100, 8), name="x")
        rows = tf.raw_ops.Reshape(tensor=x, shape=[-1, 8], name="r")
        tf.identity(tf.raw_ops.MatMul(a=rows, b=rows, transpose_a=True, name="y"))

    (index,) = indexes_of(build)
    costs = estimate(index, ARITHMETIC, "bfloat16")
    assert times(index, costs, "y")[0] == pytest.approx(2 * UNKNOWN_DIMENSION * 100 * 8 * 8)
