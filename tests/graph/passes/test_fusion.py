"""Arithmetic between products, as functions that XLA compiles; the products are not."""

import numpy as np
import pytest
import tensorflow as tf

from helpers.cases import first_of
from helpers.tolerances import tolerance
from tfamp.graph import rewrite_graph_def
from tfamp.graph.graph import Graph
from tfamp.graph.passes import fusion
from tfamp.interop import tf_private

v1 = tf.compat.v1
RULES = {"dtype": "bfloat16", "device": "cpu", "placement": "lists"}
ROWS, WIDTH = 256, 64


def step(x, w):
    for _ in range(3):
        hidden = tf.nn.gelu(x @ w)
        x = hidden - tf.reduce_mean(hidden, -1, keepdims=True)
    return tf.nn.relu(x @ w)


def graph_of(function=step, *specs):
    specs = specs or [tf.TensorSpec((ROWS, WIDTH)), tf.TensorSpec((WIDTH, WIDTH))]
    concrete = tf.function(function).get_concrete_function(*specs)
    graph = concrete.graph.as_graph_def(add_shapes=True)
    return rewrite_graph_def(graph, ["Identity:0"], **RULES).graph_def


def fuse(graph, keep=("Identity:0",), **choices):
    """Fuses a graph in place; returns how many calls there are."""
    return fusion.fuse(Graph(graph, keep), **choices)


def calls(graph):
    return [node for node in graph.node if node.op == "PartitionedCall"]


def compiled(graph):
    """The op types of each function."""
    return [{node.op for node in each.node_def} for each in graph.library.function]


def run(graph_def, *values):
    """Runs a graph; returns its result."""
    with tf.Graph().as_default() as graph, v1.Session(graph=graph) as session:
        tf.graph_util.import_graph_def(graph_def, name="")
        return session.run("Identity:0", dict(zip(("x:0", "w:0"), values, strict=True)))


def random(*shape):
    return np.random.default_rng(0).standard_normal(shape).astype("float32") / shape[-1] ** 0.5


def test_arithmetic_is_compiled_and_once_for_layers_that_are_alike():
    graph = graph_of()
    values = random(ROWS, WIDTH), random(WIDTH, WIDTH)
    expected = run(graph, *values)
    names = {node.name for node in graph.node if node.op == "MatMul"}
    assert fuse(graph) == len(calls(graph)) == 3
    assert {node.name for node in graph.node if node.op == "MatMul"} == names
    (ops,) = compiled(graph)
    assert {"Mul", "Mean", "Erfc"} <= ops
    assert "MatMul" not in ops
    assert all(each.attr["_XlaMustCompile"].b for each in graph.library.function)
    error = np.linalg.norm(run(graph, *values) - expected) / np.linalg.norm(expected)
    assert error < tolerance("bfloat16", depth=8)


def test_what_is_used_keeps_its_name_and_shape():
    graph = graph_of()
    inner = next(node.name for node in graph.node if node.op == "Sub")
    fuse(graph, ["Identity:0", f"{inner}:0"])
    with tf.Graph().as_default() as made:
        tf.graph_util.import_graph_def(graph, name="")
        assert made.get_tensor_by_name(f"{inner}:0").shape == (ROWS, WIDTH)


def train_step(x, w):
    with tf.GradientTape() as tape:
        tape.watch(w)
        hidden = tf.nn.gelu(x @ w, approximate=True)
        loss = tf.reduce_sum(tf.square(hidden @ w))
    return tape.gradient(loss, w)


def test_a_gradient_computes_again_what_it_need_not_store():
    graph = graph_of(train_step)
    values = random(ROWS, WIDTH), random(WIDTH, WIDTH)
    expected = run(graph, *values)
    fuse(graph)
    forward = next(f for f in graph.library.function if any(n.op == "Tanh" for n in f.node_def))
    stored = len(forward.signature.output_arg)
    assert stored <= 3, "the product with its bias, the tanh and the result"
    error = np.linalg.norm(run(graph, *values) - expected) / np.linalg.norm(expected)
    assert error < tolerance("bfloat16", depth=8)


def test_two_tensors_computed_of_a_product_are_not_stored():
    def exact(x, w):
        with tf.GradientTape() as tape:
            tape.watch(w)
            loss = tf.reduce_sum(tf.square(tf.nn.gelu(x @ w) @ w))
        return tape.gradient(loss, w)

    graph = graph_of(exact)
    product = next(node.name for node in graph.node if node.op == "MatMul")
    fuse(graph)
    taken = [name.removesuffix(":0") for call in calls(graph) for name in call.input]
    assert taken.count(product) == 2, "forward and by the gradient"
    forward = next(f for f in graph.library.function if any(n.op == "Erfc" for n in f.node_def))
    assert len(forward.signature.output_arg) <= 2, "the error function and the result"


def test_all_arithmetic_in_a_function_is_float32_and_what_leaves_it_is_low():
    graph = graph_of()
    fuse(graph)
    (function,) = graph.library.function
    computed = {n.attr["T"].type for n in function.node_def if n.op in ("Mul", "Mean", "Sub")}
    assert computed == {tf.float32.as_datatype_enum}
    low = tf.bfloat16.as_datatype_enum
    assert [each.type for each in function.signature.input_arg] == [low]
    assert low in {each.type for each in function.signature.output_arg}


@pytest.mark.parametrize("dtype", [tf.int32, tf.int64], ids=lambda dtype: dtype.name)
def test_cross_entropy_is_that_of_tensorflow(dtype):
    def losses(x, labels):
        with tf.GradientTape() as tape:
            tape.watch(x)
            each = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, x * 2.0 - 1000.0)
        return tf.concat([each[:, tf.newaxis], tape.gradient(each, x)], -1)

    rows = np.random.default_rng(0).standard_normal((ROWS, WIDTH)).astype("float32") * 8
    labels = np.arange(ROWS, dtype=dtype.as_numpy_dtype) % WIDTH
    specs = tf.TensorSpec((ROWS, WIDTH)), tf.TensorSpec((ROWS,), dtype)
    graph = tf.function(losses).get_concrete_function(*specs).graph.as_graph_def(add_shapes=True)
    expected = losses(tf.constant(rows), labels).numpy()
    assert fuse(graph) == 1
    assert not any("SparseSoftmaxCrossEntropyWithLogits" in ops for ops in compiled(graph))

    def run_with(labels):
        with tf.Graph().as_default() as made, v1.Session(graph=made) as session:
            tf.graph_util.import_graph_def(graph, name="")
            return session.run("Identity:0", {"x:0": rows, "labels:0": labels})

    # Of numbers around 1000, where float32 has this spacing.
    assert np.abs(run_with(labels) - expected).max() < 1000 * 8 * np.finfo("float32").eps
    labels[3] = WIDTH
    (unknown,) = np.isnan(run_with(labels)).all(-1).nonzero()
    assert unknown.tolist() == [3], "no class"


def test_without_xla_it_is_refused(monkeypatch):
    monkeypatch.setattr(tf_private, "xla_works", lambda device: False)
    with pytest.raises(ValueError, match="XLA does not work here. Give placement='min_cut'"):
        rewrite_graph_def(v1.GraphDef(), [], **{**RULES, "placement": "fused"})


def test_small_groups_small_tensors_and_integers_stay():
    graph = graph_of(lambda x, w: tf.nn.relu(x @ w))
    assert fuse(graph) == 0
    assert fuse(graph, least=1) > 0
    small = [tf.TensorSpec((4, WIDTH)), tf.TensorSpec((WIDTH, WIDTH))]
    assert fuse(graph_of(step, *small)) == 0
    counts = tf.function(lambda n: ((n + 1) * 2 - n) * n).get_concrete_function(
        tf.TensorSpec((1 << 16,), tf.int32)
    )
    assert fuse(counts.graph.as_graph_def(add_shapes=True)) == 0


kinds = (
    lambda x, y, w: x + y,
    lambda x, y, w: x * 0.5 - y,
    lambda x, y, w: tf.tanh(x) + tf.reduce_mean(y, -1, keepdims=True),
    lambda x, y, w: tf.reshape(tf.reshape(x, (WIDTH, ROWS)) * 2.0, (ROWS, WIDTH)) - y,
    lambda x, y, w: tf.nn.relu(x) * tf.cast(y > 0, tf.float32),
    lambda x, y, w: x @ w,
)


@pytest.mark.parametrize("seed", first_of(range(3)))
def test_random_graphs_have_no_cycle_and_the_same_values(seed):
    chance = np.random.default_rng(seed)

    def random_graph(x, w):
        values = [x, x @ w]
        for _ in range(24):
            operands = (values[i] for i in chance.integers(0, len(values), 2))
            values.append(kinds[chance.integers(0, len(kinds))](*operands, w))
        return tf.add_n(values)

    graph = graph_of(random_graph)
    values = random(ROWS, WIDTH), random(WIDTH, WIDTH)
    expected = run(graph, *values)
    fuse(graph, least=1)
    found = run(graph, *values)
    error = np.linalg.norm(found - expected) / np.linalg.norm(expected)
    assert error < tolerance("bfloat16", depth=24)


def by_itself(function):
    """The graph of a function of x and w, both of one shape, as it is."""
    specs = [tf.TensorSpec((ROWS, WIDTH))] * 2
    concrete = tf.function(function).get_concrete_function(*specs)
    return concrete.graph.as_graph_def(add_shapes=True)


def test_what_is_rounded_on_purpose_is_rounded():
    def rest(x, w):
        hidden = tf.tanh(x) * w
        return (hidden - tf.cast(tf.cast(hidden, tf.bfloat16), tf.float32)) * 2.0 - 1.0

    graph = by_itself(rest)
    values = random(ROWS, WIDTH), random(ROWS, WIDTH)
    expected = run(graph, *values) + 1.0
    assert fuse(graph, least=2) == 2
    error = np.linalg.norm(run(graph, *values) + 1.0 - expected)  # Some are halfway between two.
    assert error < 0.1 * np.linalg.norm(expected)


def test_nan_is_seen_by_what_chooses():
    def chosen(x, w):
        best = tf.maximum(x * 2.0, w) + tf.maximum(tf.minimum(w, x - 1.0), 0.5)
        return best * tf.reduce_max(x * 2.0, 0) + tf.reduce_min(best + 1.0, 0)

    graph = by_itself(chosen)
    values = random(ROWS, WIDTH), random(ROWS, WIDTH)
    values[0][3, 5] = values[1][7, 9] = values[0][8, 11] = np.nan
    values[0][9, 13] = np.inf
    expected = run(graph, *values)
    assert fuse(graph, least=2)
    assert not set().union(*compiled(graph)) & {"Max", "Min"}
    np.testing.assert_allclose(run(graph, *values), expected, rtol=1e-5, atol=1e-6)


def test_what_was_taken_from_a_tensor_is_equal_to_it():
    def largest(x, w):
        hidden = tf.tanh(x @ w * 1.3 + 0.2) * x
        best = tf.math.top_k(hidden, 1).values
        return tf.reduce_sum(tf.cast(hidden >= best, tf.float32) * 2.0, -1) - 1.0

    graph = graph_of(largest)
    assert fuse(graph, least=2)
    assert run(graph, random(ROWS, WIDTH), random(WIDTH, WIDTH)).min() >= 1.0


def test_nodes_beside_one_that_is_compiled():
    with tf.Graph().as_default() as built:
        x, w = (v1.placeholder(tf.float32, (ROWS, WIDTH), name) for name in "xw")
        inner = tf.tanh(x) * 2.0
        with v1.colocate_with(inner.op):
            ones = tf.linalg.cholesky(tf.eye(WIDTH))
        tf.identity((tf.sigmoid(inner + 1.0) - w) @ ones, name="Identity")
    graph = built.as_graph_def(add_shapes=True)
    values = random(ROWS, WIDTH), random(ROWS, WIDTH)
    expected = run(graph, *values)
    assert fuse(graph, least=2)
    np.testing.assert_allclose(run(graph, *values), expected, rtol=1e-5, atol=1e-6)
