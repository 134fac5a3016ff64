"""`find_misfits`: sizes of matmuls, convolutions and einsums that are no multiples of 8."""

from __future__ import annotations

import pytest
import tensorflow as tf

from tfamp.diagnostics.expected_gain import find_misfits
from tfamp.graph.index import build_indexes


def misfits(function, *shapes):
    specs = [tf.TensorSpec(shape) for shape in shapes]
    graph = tf.function(function).get_concrete_function(*specs).graph
    (index, *_) = build_indexes(graph.as_graph_def(add_shapes=True), dtype="float16", device="gpu")
    return [misfit for _, misfit in find_misfits(index)]


def test_sizes_that_fit_are_not_named():
    assert misfits(tf.matmul, (64, 128), (128, 256)) == []


@pytest.mark.parametrize("transpose_a", [False, True])
@pytest.mark.parametrize("transpose_b", [False, True])
def test_a_matmul_names_rows_inner_and_columns(transpose_a, transpose_b):
    a, b = (30, 100), (100, 333)
    (found,) = misfits(
        lambda x, y: tf.matmul(x, y, transpose_a=transpose_a, transpose_b=transpose_b, name="m"),
        a[::-1] if transpose_a else a,
        b[::-1] if transpose_b else b,
    )
    assert found.sizes == {"rows": 30, "inner": 100, "columns": 333}
    assert found.padded == {"rows": 32, "inner": 104, "columns": 336}
    assert (found.node, found.op) == ("m", "MatMul")


def test_an_unknown_batch_is_passed_over():
    (found,) = misfits(tf.matmul, (None, 100), (100, 64))
    assert found.sizes == {"rows": None, "inner": 100, "columns": 64}
    assert found.padded == {"inner": 104}


def test_a_batch_of_matmuls_counts_the_matrices():
    (found,) = misfits(tf.matmul, (4, 17, 64), (4, 64, 24))
    assert found.padded == {"rows": 24}


def test_a_convolution_names_channels():
    (found,) = misfits(lambda x, f: tf.nn.conv2d(x, f, 1, "SAME"), (1, 8, 8, 3), (3, 3, 3, 30))
    assert found.sizes == {"input channels": 3, "output channels": 30}
    assert found.padded == {"input channels": 8, "output channels": 32}


def test_an_einsum_joins_the_sizes_of_each_side():
    (found,) = misfits(lambda q, k: tf.einsum("aecd,abcd->acbe", k, q), *[(2, 8, 3, 5)] * 2)
    assert found.sizes == {"rows": 8, "inner": 5, "columns": 8}
    assert found.padded == {"inner": 8}


def test_a_vector_and_other_ops_are_no_tiles():
    assert misfits(tf.matmul, (8, 16), (16, 1)) == []
    assert misfits(lambda x: tf.nn.relu(x), (3, 3)) == []


def test_the_backward_pass_is_not_named_again():
    def step(x, w):
        with tf.GradientTape() as tape:
            tape.watch(w)
            y = tf.reduce_sum(tf.matmul(x, w, name="m") ** 2)
        return tape.gradient(y, w)

    assert [found.node for found in misfits(step, (16, 100), (100, 24))] == ["m"]


def test_the_layer_is_the_scope_without_the_calls():
    def scoped(x, y):
        with tf.name_scope("encoder"), tf.name_scope("dense"):
            return tf.matmul(x, y)

    (found,) = misfits(scoped, (8, 9), (9, 8))
    assert found.layer == "encoder/dense"
    assert found.node == "encoder/dense/MatMul"
