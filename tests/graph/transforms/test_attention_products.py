"""Einsums of attention become batches of products between Transposes, on CPUs."""

from collections import Counter

import numpy as np
import pytest
import tensorflow as tf

import tfamp
from helpers.graph_asserts import graph_op_dtypes
from helpers.rewritten_graphs import random, rewritten, run, traced
from helpers.tolerances import tolerance
from tfamp import OpLists

BATCH, TOKENS, KEYS, HEADS, WIDTH = 32, 24, 32, 16, 8
SIZES = {"B": BATCH, "T": TOKENS, "S": KEYS, "N": HEADS, "H": WIDTH, "C": 4}
SCORES, VALUES = "BTNH,BSNH->BNTS", "BNTS,BSNH->BTNH"


def attention(q, k, v):
    return tf.einsum(VALUES, tf.nn.softmax(tf.einsum(SCORES, q, k)), v)


def gradients(q, k, v):
    with tf.GradientTape() as tape:
        tape.watch([q, k, v])
        loss = tf.reduce_sum(attention(q, k, v) ** 2)
    return tape.gradient(loss, [q, k, v])


def shapes_of(equation):
    operands = equation.partition("->")[0].split(",")
    return [tuple(SIZES[label] for label in labels) for labels in operands]


QKV = [shapes_of(SCORES)[0], *[shapes_of(SCORES)[1]] * 2]


def counts(result):
    graph = result.graph_def
    nodes = [node for each in (graph, *graph.library.function) for node in nodes_of(each)]
    return Counter(node.op for node in nodes if node.op in ("Einsum", "BatchMatMulV2", "Transpose"))


def nodes_of(graph):
    return getattr(graph, "node", None) or graph.node_def


def flat(results):
    return tf.nest.flatten(results)


def errors(concrete, result, *args):
    for found, expected in zip(run(concrete, result, *args), flat(concrete(*args)), strict=True):
        assert found.shape == expected.shape
        yield np.linalg.norm(found - expected) / np.linalg.norm(expected)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_training_step_transposes_each_operand_once(dtype):
    shapes = [(None, *shape[1:]) for shape in QKV]
    concrete = traced(gradients, *shapes)
    result = rewritten(concrete, dtype)
    # Queries, keys, values and the gradient by what attention gives, which is not asked for itself
    # here but as twice that; then three gradients and that.
    assert counts(result) == {"BatchMatMulV2": 6, "Transpose": 8}
    dtypes = graph_op_dtypes(result.graph_def)
    assert dtypes["BatchMatMulV2"] == {dtype}
    args = random(*QKV)
    assert max(errors(concrete, result, *args)) < tolerance(dtype, depth=4)


def test_in_float32_it_is_the_same_to_rounding():
    concrete = traced(gradients, *QKV)
    with pytest.warns(tfamp.NothingConvertedWarning):
        result = rewritten(concrete, keep_float32=["insum"])
    assert counts(result)["Einsum"] == 0
    assert graph_op_dtypes(result.graph_def)["BatchMatMulV2"] == {"float32"}
    with pytest.warns(tfamp.NothingConvertedWarning):
        kept = rewritten(concrete, op_lists=OpLists.grappler("bfloat16"), keep_float32=["."])
    assert counts(kept)["Einsum"] == 6
    args = random(*QKV)
    for found, expected in zip(run(concrete, result, *args), flat(concrete(*args)), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "equation",
    [
        VALUES,
        "BNTS,BTNH->BSNH",
        "TBNH,SBNH->TSBN",
        "BNTH,BNSH->BTSN",
        "HTN,SNH->STN",
    ],
)
def test_what_moves_its_result_is_a_product(equation):
    factor = 1 if "BNT" in equation or "TBN" in equation else 3
    shapes = [tuple(factor * size for size in shape) for shape in shapes_of(equation)]
    concrete = traced(lambda a, b: tf.einsum(equation, a, b), *shapes)
    result = rewritten(concrete)
    found = counts(result)
    assert (found["Einsum"], found["BatchMatMulV2"]) == (0, 1)
    assert graph_op_dtypes(result.graph_def)["BatchMatMulV2"] == {"bfloat16"}
    assert max(errors(concrete, result, *random(*shapes))) < tolerance("bfloat16")


def test_in_the_body_of_a_loop():
    def steps(q, k, v):
        def body(i, q):
            return i + 1, q + 0.1 * attention(q, k, v)

        return tf.while_loop(lambda i, _: i < 3, body, (0, q))[1]

    concrete = traced(steps, *QKV)
    result = rewritten(concrete)
    # Scores transpose no result: alone they stay.
    assert counts(result) == {"Einsum": 1, "BatchMatMulV2": 1, "Transpose": 2}
    assert max(errors(concrete, result, *random(*QKV))) < tolerance("bfloat16", depth=6)


@pytest.mark.parametrize(
    "equation",
    [
        SCORES,  # Its result is not moved.
        "BNTH,BNSH->BNTS",  # Nothing is.
        "BTNH,HC->BTNC",  # No batch.
        "BTNH,BTNC->HC",
        "BTNH,BSNC->BTS",  # What one operand alone has is summed.
        "BTNHC,BSNHC->TSBN",  # Two are.
        "...TH,...SH->TS...",  # Any batch.
        "BTNN,BSN->TSB",  # A diagonal.
    ],
)
def test_what_does_not_pay_or_is_no_batch_of_products_stays(equation):
    sizes = SIZES | {"B": 16, "H": HEADS}
    operands = equation.partition("->")[0].replace("...", "B").split(",")
    shapes = [tuple(sizes[label] for label in labels) for labels in operands]
    concrete = traced(lambda a, b: tf.raw_ops.Einsum(inputs=[a, b], equation=equation), *shapes)
    assert counts(rewritten(concrete)) == {"Einsum": 1}


@pytest.mark.filterwarnings("ignore::tfamp.NothingConvertedWarning")
def test_small_ones_fetched_ones_and_those_of_gpus_stay():
    def on_gpu(p, v):
        with tf.device("/GPU:0"):
            return tf.einsum(VALUES, p, v)

    shapes = shapes_of(VALUES)
    small = traced(lambda p, v: tf.einsum(VALUES, p, v), (2, 2, 8, 8), (2, 8, 2, 8))
    assert counts(rewritten(small)) == {"Einsum": 1}
    large = traced(lambda p, v: tf.einsum(VALUES, p, v) + 1.0, *shapes)
    (name,) = (node.name for node in large.graph.as_graph_def().node if node.op == "Einsum")
    assert counts(rewritten(large, fetches=[f"{name}:0"])) == {"Einsum": 1}
    assert counts(rewritten(large)) == {"BatchMatMulV2": 1, "Transpose": 2}
    assert counts(rewritten(traced(on_gpu, *shapes))) == {"Einsum": 1}
