"""Batches of products that are summed become one product."""

import numpy as np
import pytest
import tensorflow as tf

import tfamp
from helpers.graph_asserts import graph_op_dtypes
from helpers.rewritten_graphs import RULES, random, rewritten, run, traced
from helpers.tolerances import tolerance
from tfamp import OpLists
from tfamp.graph import rewrite_graph_def

BATCH, ROWS, WIDTH, OUT = 16, 24, 32, 20


def gradients(x, w):
    """What a step of training computes of a projection: gradients by both operands."""
    with tf.GradientTape() as tape:
        tape.watch([x, w])
        y = tf.matmul(x, w)
        loss = tf.reduce_sum(y * y)
    return tape.gradient(loss, [x, w])


def counts(result):
    ops = [node.op for node in result.graph_def.node]
    return {op: ops.count(op) for op in ("BatchMatMulV2", "MatMul", "Sum")}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    "shape", [(BATCH, ROWS, WIDTH), (None, None, WIDTH), (None, 2, ROWS, WIDTH)], ids=str
)
def test_the_gradient_of_a_weight_is_one_product(shape, dtype):
    concrete = traced(gradients, shape, (WIDTH, OUT))
    result = rewritten(concrete, dtype)
    dtypes = graph_op_dtypes(result.graph_def)
    assert dtypes["MatMul"] == {dtype}
    # Forward and the gradient by what the weight multiplies are as they were.
    assert counts(result)["BatchMatMulV2"] == 2
    named = {node.name: node.op for node in result.graph_def.node}
    assert named["gradient_tape/MatMul/MatMul_1"] == "MatMul"
    assert named["gradient_tape/MatMul/Sum_1"] == "Identity"
    x, w = random([BATCH if dim is None else dim for dim in shape], (WIDTH, OUT))
    for found, expected in zip(run(concrete, result, x, w), concrete(x, w), strict=True):
        assert found.shape == expected.shape
        error = np.linalg.norm(found - expected) / np.linalg.norm(expected)
        assert error < tolerance(dtype)


def test_in_float32_it_is_the_same_to_rounding():
    concrete = traced(gradients, (None, ROWS, WIDTH), (WIDTH, OUT))
    with pytest.warns(tfamp.NothingConvertedWarning):
        result = rewritten(concrete, keep_float32=["MatMul"])
    assert graph_op_dtypes(result.graph_def)["MatMul"] == {"float32"}
    # An empty batch and a batch of one are batches too.
    for batch in (BATCH, 1, 0):
        x, w = random((batch, ROWS, WIDTH), (WIDTH, OUT))
        for found, expected in zip(run(concrete, result, x, w), concrete(x, w), strict=True):
            np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


def test_in_the_body_of_a_loop():
    def steps(x, w):
        def body(i, w):
            return i + 1, w - 0.001 * gradients(x, w)[1]

        return tf.while_loop(lambda i, _: i < 3, body, (0, w))[1]

    concrete = traced(steps, (BATCH, ROWS, WIDTH), (WIDTH, OUT))
    result = rewritten(concrete)
    bodies = [each.node_def for each in result.graph_def.library.function]
    assert any(node.op == "MatMul" for nodes in bodies for node in nodes)
    x, w = random((BATCH, ROWS, WIDTH), (WIDTH, OUT))
    (found,) = run(concrete, result, x, w)
    error = np.linalg.norm(found - concrete(x, w)) / np.linalg.norm(concrete(x, w))
    assert error < tolerance("bfloat16", depth=3)


def products(axes, keep_dims=False, **adjoint):
    def function(x, y):
        product = tf.raw_ops.BatchMatMulV2(x=x, y=y, **adjoint)
        return tf.raw_ops.Sum(input=product, axis=axes, keep_dims=keep_dims)

    return function


SAME = [(BATCH, ROWS, WIDTH), (BATCH, ROWS, OUT)]
TRANSPOSED = {"adj_x": True}


def test_a_sum_over_given_axes_is_one_product_too():
    concrete = traced(products([-3], **TRANSPOSED), *SAME)
    result = rewritten(concrete)
    assert counts(result) == {"BatchMatMulV2": 0, "MatMul": 1, "Sum": 0}
    x, y = random(*SAME)
    (found,) = run(concrete, result, x, y)
    np.testing.assert_allclose(found, concrete(x, y), rtol=0.02, atol=0.5)


@pytest.mark.parametrize(
    ("function", "specs"),
    [
        (products([1], **TRANSPOSED), SAME),
        (products([0, 1], **TRANSPOSED), SAME),
        (products([0], keep_dims=True, **TRANSPOSED), SAME),
        (products([0]), [(BATCH, ROWS, WIDTH), (BATCH, WIDTH, OUT)]),
        (products([0], adj_x=True, adj_y=True), [(BATCH, ROWS, WIDTH), (BATCH, OUT, ROWS)]),
        (products([0], **TRANSPOSED), [(1, ROWS, WIDTH), (BATCH, ROWS, OUT)]),
        (products([0], **TRANSPOSED), [(ROWS, WIDTH), (BATCH, ROWS, OUT)]),
        (products([0], **TRANSPOSED), [(None, ROWS, WIDTH), (None, ROWS, OUT)]),
        (products([0], **TRANSPOSED), [(BATCH, ROWS, None), (BATCH, ROWS, OUT)]),
        (products([0], **TRANSPOSED), [tf.TensorSpec(None), (BATCH, ROWS, OUT)]),
    ],
    ids=[
        "an axis of the matrices",
        "all but one axis",
        "axes kept",
        "not transposed",
        "both transposed",
        "one of a batch",
        "one without a batch",
        "batches not known",
        "a width not known",
        "a rank not known",
    ],
)
@pytest.mark.filterwarnings("ignore::tfamp.TfampWarning")
def test_other_sums_stay(function, specs):
    found = counts(rewritten(traced(function, *specs)))
    assert found == {"BatchMatMulV2": 1, "MatMul": 0, "Sum": 1}


def test_products_that_are_used_otherwise_stay():
    def twice(x, w):
        by_x, by_w = gradients(x, w)
        return by_x, by_w

    concrete = traced(twice, (BATCH, ROWS, WIDTH), (WIDTH, OUT))
    fetched = rewritten(concrete, fetches=["gradient_tape/MatMul/MatMul_1:0"])
    assert counts(fetched)["BatchMatMulV2"] == 3

    def used(x, y):
        product = tf.raw_ops.BatchMatMulV2(x=x, y=y, adj_x=True)
        return tf.reduce_sum(product, 0) + product[0]

    assert counts(rewritten(traced(used, *SAME)))["BatchMatMulV2"] == 1


def test_sums_that_are_fetched_keep_name_and_dtype():
    concrete = traced(gradients, (BATCH, ROWS, WIDTH), (WIDTH, OUT))
    result = rewritten(concrete, fetches=["gradient_tape/MatMul/Sum_1:0"])
    assert counts(result)["MatMul"] == 1
    (node,) = [each for each in result.plan.nodes if each.name == "gradient_tape/MatMul/Sum_1"]
    assert node.dtype == "float32"


def test_a_rewritten_graph_is_its_own_rewrite():
    concrete = traced(gradients, (BATCH, ROWS, WIDTH), (WIDTH, OUT))
    graph = rewritten(concrete).graph_def
    again = rewrite_graph_def(
        graph, [each.name for each in concrete.outputs], dtype="bfloat16", **RULES
    )
    assert again.graph_def == graph


def test_with_grapplers_lists_it_is_as_grappler_leaves_it():
    concrete = traced(gradients, (BATCH, ROWS, WIDTH), (WIDTH, OUT))
    result = rewritten(concrete, op_lists=OpLists.grappler("bfloat16"))
    assert counts(result)["BatchMatMulV2"] == 3


def test_a_batch_that_is_not_known_counts_in_the_cost_of_the_one_product():
    known, unknown = (
        {node.name: node for node in rewritten(concrete).plan.nodes}
        for concrete in (
            traced(gradients, (32, 1024, WIDTH), (WIDTH, OUT)),
            traced(gradients, (None, 1024, WIDTH), (WIDTH, OUT)),
        )
    )
    name = "gradient_tape/MatMul/MatMul_1"
    assert unknown[name].cost == pytest.approx(known[name].cost)
