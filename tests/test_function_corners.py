"""`tfamp.rewrite` where Python, Keras or TensorFlow look at a function in ways of their own."""

import copy
import gc
import inspect
import logging
import weakref

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp
from helpers.graph_asserts import graph_op_dtypes, op_dtypes
from helpers.tolerances import assert_close

X = tf.constant(np.random.default_rng(1).standard_normal((3, 4)).astype("float32"))


class Module(tf.Module):
    def __init__(self):
        super().__init__()
        self.weight = tf.Variable(tf.eye(4))

    def plain(self, x):
        return x @ self.weight

    @tfamp.rewrite(dtype="bfloat16")
    def method(self, x, factor=2.0):
        return x @ self.weight * factor

    @tfamp.rewrite(dtype="bfloat16")
    @tf.function(input_signature=[tf.TensorSpec((None, 4))])
    def with_signature(self, x):
        return x @ self.weight


class Pair(tf.experimental.ExtensionType):
    tensor: tf.Tensor
    number: int


def test_an_object_with_a_rewritten_method_is_freed():
    module = Module()
    module.method(X)
    module.with_signature(X)
    references = [weakref.ref(module), weakref.ref(module.weight)]
    del module
    gc.collect()
    assert [reference() for reference in references] == [None, None]


def test_a_method_keeps_its_object():
    method = Module().method
    gc.collect()
    assert_close(method(X, factor=3.0), X * 3, "bfloat16")


@pytest.mark.parametrize("around", ["float16", "bfloat16"])
def test_an_autocast_around_the_call_changes_nothing(around):
    weight = tf.Variable(tf.eye(4))

    def product(x):
        return tf.matmul(x, weight) + x

    def inside(x):
        with tfamp.autocast("float16"):
            return tf.matmul(x, weight)

    fast, own = tfamp.rewrite(product, dtype="bfloat16"), tfamp.rewrite(inside, dtype="bfloat16")
    with tfamp.autocast(around):
        result, nested = fast(X), tf.function(lambda x: fast(x))(X)
        graph_def = fast.concrete(X).graph.as_graph_def()
        assert graph_op_dtypes(graph_def)["MatMul"] == {"bfloat16"}
        assert own(X).dtype == "float16"
    assert result.dtype == nested.dtype == "float32"
    np.testing.assert_array_equal(result, fast(X))
    np.testing.assert_array_equal(nested, result)


def test_methods_have_the_signature_of_methods():
    module = Module()
    assert module.method is module.method
    assert str(inspect.signature(module.method)) == "(x, factor=2.0)"
    assert inspect.getfullargspec(Module.method).args == ["self", "x", "factor"]
    assert module.with_signature.concrete().inputs[0].shape.as_list() == [None, 4]
    assert_close(Module.method(module, X), module.method(X), "float32")


def test_a_copy_of_an_object_has_a_rewritten_function_of_its_own():
    module = Module()
    module.attribute = tfamp.rewrite(module.plain, dtype="bfloat16")
    module.attribute(X)
    copied = copy.deepcopy(module)
    copied.weight.assign(2 * tf.eye(4))
    assert op_dtypes(copied.attribute.concrete(X))["MatMul"] == {"bfloat16"}
    assert_close(copied.attribute(X), 2 * X, "bfloat16")
    assert_close(module.attribute(X), X, "bfloat16")


def test_a_keras_lambda_takes_a_rewritten_function():
    fast = tfamp.rewrite(lambda x: x @ tf.eye(4), dtype="bfloat16")
    assert_close(keras.layers.Lambda(fast)(X), X, "bfloat16")


def test_an_extension_type_is_an_argument_and_a_result():
    weight = tf.Variable(tf.eye(4))

    @tfamp.rewrite(dtype="bfloat16")
    def fast(pair):
        return Pair(pair.tensor @ weight, pair.number + 1)

    with tf.GradientTape() as tape:
        tape.watch(X)
        result = fast(Pair(X, 3))
    assert result.number == 4
    assert_close(result.tensor, X, "bfloat16")
    for gradient in tape.gradient(result.tensor, [X, weight]):
        assert gradient.dtype == tf.float32
    assert fast.concrete(Pair(X, 3)) is fast.concrete(Pair(X + 1, 3))


def test_a_data_set_is_a_result():
    fast = tfamp.rewrite(lambda x: tf.data.Dataset.from_tensors(x @ tf.eye(4)), dtype="bfloat16")
    (value,) = fast(X)
    assert_close(value, X, "bfloat16")


def test_a_tensor_array_is_refused_as_a_result():
    fast = tfamp.rewrite(lambda x: tf.TensorArray(tf.float32, 1).write(0, x @ x), dtype="bfloat16")
    with pytest.raises(TypeError, match=r"Return its stack\(\)"):
        fast(X[:, :3])


def test_where_functions_are_run_eagerly_it_says_that_nothing_is_rewritten():
    fast = tfamp.rewrite(lambda x: x @ x, dtype="bfloat16")
    tf.config.run_functions_eagerly(True)
    with pytest.warns(tfamp.core.errors.TfampWarning, match="run_functions_eagerly"):
        result = fast(X[:, :3])
    np.testing.assert_array_equal(result, X[:, :3] @ X[:, :3])


def test_many_rewritten_functions_are_not_taken_for_one_that_is_traced_again(caplog):
    logger = tf.get_logger()
    logger.addHandler(caplog.handler)
    try:
        with caplog.at_level(logging.WARNING, logger.name):
            for number in range(8):
                tfamp.rewrite(lambda x, number=number: x @ x + number, dtype="bfloat16")(X[:, :3])
    finally:
        logger.removeHandler(caplog.handler)
    assert "retracing" not in caplog.text


def test_second_derivatives_go_through_a_rewritten_loop_that_reads_a_variable():
    weight, start = tf.Variable(0.5 * tf.eye(4)), tf.constant(np.full((3, 4), 0.3, "float32"))

    def loop(x):
        loop = tf.while_loop(lambda i, _: i < 2, lambda i, y: (i + 1, tf.tanh(y @ weight)), (0, x))
        return tf.map_fn(lambda row: row + tf.reduce_sum(weight), loop[1])

    def second_derivatives(function):
        with tf.GradientTape() as outer:
            outer.watch(start)
            with tf.GradientTape() as inner:
                inner.watch(start)
                result = function(start)
            loss = tf.reduce_sum(inner.gradient(result, start) ** 2)
        return outer.gradient(loss, [start, weight])

    fast = tfamp.rewrite(loop, dtype="bfloat16")
    assert op_dtypes(fast.concrete(start))["MatMul"] == {"bfloat16"}
    expected = second_derivatives(tf.function(loop))
    for actual, wanted in zip(second_derivatives(fast), expected, strict=True):
        assert_close(actual, wanted, "bfloat16", depth=16)
