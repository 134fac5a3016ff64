"""Einsums of attention become batches of products between Transposes, on CPUs."""

from collections import Counter

import pytest
import tensorflow as tf

from helpers.graph_asserts import graph_op_dtypes
from helpers.rewritten_graphs import random, rewritten, run, traced
from helpers.tolerances import assert_close

SIZES = {"B": 32, "T": 24, "S": 32, "N": 16, "H": 8, "C": 4}
SCORES, VALUES = "BTNH,BSNH->BNTS", "BNTS,BSNH->BTNH"
Q, K = (32, 24, 16, 8), (32, 32, 16, 8)


def attention(q, k, v):
    return tf.einsum(VALUES, tf.nn.softmax(tf.einsum(SCORES, q, k)), v)


def gradients(q, k, v):
    with tf.GradientTape() as tape:
        tape.watch([q, k, v])
        loss = tf.reduce_sum(attention(q, k, v) ** 2)
    return tape.gradient(loss, [q, k, v])


def counts(result):
    graph = result.graph_def
    nodes = [*graph.node, *(node for each in graph.library.function for node in each.node_def)]
    return Counter(node.op for node in nodes if node.op in ("Einsum", "BatchMatMulV2", "Transpose"))


def product_of(equation, sizes):
    operands = equation.partition("->")[0].replace("...", "B").split(",")
    shapes = [tuple(sizes[label] for label in labels) for labels in operands]
    fn = lambda a, b: tf.raw_ops.Einsum(inputs=[a, b], equation=equation)  # noqa: E731
    return traced(fn, *shapes), shapes


def assert_same_values(concrete, result, dtype, depth, *shapes):
    args = random(*shapes)
    expected = tf.nest.flatten(concrete(*args))
    for got, wanted in zip(run(concrete, result, *args), expected, strict=True):
        assert_close(got, wanted, dtype, depth=depth)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_training_step_transposes_each_operand_once(dtype):
    concrete = traced(gradients, *((None, *shape[1:]) for shape in (Q, K, K)))
    result = rewritten(concrete, dtype)
    # Queries, keys, values, the gradient of the result; then three gradients and the result.
    assert counts(result) == {"BatchMatMulV2": 6, "Transpose": 8}
    assert graph_op_dtypes(result.graph_def)["BatchMatMulV2"] == {dtype}
    assert_same_values(concrete, result, dtype, 64, Q, K, K)


@pytest.mark.parametrize(
    "equation", [VALUES, "BNTS,BTNH->BSNH", "TBNH,SBNH->TSBN", "BNTH,BNSH->BTSN"]
)
def test_an_einsum_that_permutes_its_result_is_a_product(equation):
    concrete, shapes = product_of(equation, SIZES)
    result = rewritten(concrete)
    assert counts(result)["Einsum"] == 0
    assert graph_op_dtypes(result.graph_def)["BatchMatMulV2"] == {"bfloat16"}
    assert_same_values(concrete, result, "bfloat16", 32, *shapes)


@pytest.mark.parametrize(
    "equation",
    [
        SCORES,  # Only operands would be transposed.
        "BNTH,BNSH->BNTS",  # Nothing would be.
        "BTNH,HC->BTNC",  # No batch.
        "BTNH,BSNC->BTS",  # A label of one operand alone is summed.
        "BTNHC,BSNHC->TSBN",  # Two labels are summed.
        "...TH,...SH->TS...",  # Any batch.
        "BTNN,BSN->TSB",  # A diagonal.
    ],
)
def test_other_einsums_stay(equation):
    concrete, _ = product_of(equation, SIZES)
    assert counts(rewritten(concrete)) == {"Einsum": 1}


def test_small_and_fetched_einsums_and_those_on_gpus_stay():
    def on_gpu(p, v):
        with tf.device("/GPU:0"):
            return tf.einsum(VALUES, p, v)

    def body(i, q):
        return i + 1, q + 0.1 * attention(q, q, q)

    small, shapes = product_of(VALUES, SIZES | {"B": 1, "T": 4})
    large, shapes = product_of(VALUES, SIZES)
    (name,) = (node.name for node in large.graph.as_graph_def().node if node.op == "Einsum")
    fetched = rewritten(large, fetches=[f"{name}:0"])
    for each in (rewritten(small), fetched, rewritten(traced(on_gpu, *shapes))):
        assert counts(each) == {"Einsum": 1}
    loop = traced(lambda q: tf.while_loop(lambda i, _: i < 3, body, (0, q))[1], Q)
    # The scores are not permuted: alone they stay.
    assert counts(rewritten(loop)) == {"Einsum": 1, "BatchMatMulV2": 1, "Transpose": 2}
