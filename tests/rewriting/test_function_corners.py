"""`tfamp.rewrite` where Python, Keras or TensorFlow look at a function in ways of their own."""

import copy
import functools
import gc
import inspect
import logging
import weakref

import numpy as np
import pytest
import tensorflow as tf

import tfamp
from helpers.cases import first_of
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


def test_a_method_keeps_its_object_and_its_function_does_not_and_both_have_a_signature():
    module, other = Module(), Module()
    method = module.method
    other.weight.assign(2.0 * other.weight)
    gc.collect()
    assert_close(method(X, factor=3.0), X * 3, "bfloat16")
    assert_close(other.method(X), X * 4, "bfloat16")
    assert other.method is other.method
    assert str(inspect.signature(method)) == "(x, factor=2.0)"
    assert inspect.getfullargspec(Module.method).args == ["self", "x", "factor"]
    assert other.with_signature.concrete().inputs[0].shape.as_list() == [None, 4]
    assert_close(Module.method(other, X), other.method(X), "float32")
    other.with_signature(X)
    references = [weakref.ref(other), weakref.ref(other.weight)]
    del other
    gc.collect()
    assert [reference() for reference in references] == [None, None]


@pytest.mark.parametrize("around", ["float16", "bfloat16"])
def test_an_autocast_around_the_call_changes_nothing(around):
    weight = tf.Variable(tf.eye(4))

    def inside(x):
        with tfamp.autocast("float16"):
            return tf.matmul(x, weight)

    fast = tfamp.rewrite(lambda x: tf.matmul(x, weight) + x, dtype="bfloat16")
    own = tfamp.rewrite(inside, dtype="bfloat16")
    with tfamp.autocast(around):
        result, nested = fast(X), tf.function(lambda x: fast(x))(X)
        graph_def = fast.concrete(X).graph.as_graph_def()
        assert graph_op_dtypes(graph_def)["MatMul"] == {"bfloat16"}
        assert own(X).dtype == "float16"
    assert result.dtype == nested.dtype == "float32"
    np.testing.assert_array_equal(result, fast(X))
    np.testing.assert_array_equal(nested, result)


def test_a_copy_of_an_object_has_a_rewritten_function_of_its_own():
    module = Module()
    module.attribute = tfamp.rewrite(module.plain, dtype="bfloat16")
    module.attribute(X)
    copied = copy.deepcopy(module)
    copied.weight.assign(2 * tf.eye(4))
    assert op_dtypes(copied.attribute.concrete(X))["MatMul"] == {"bfloat16"}
    assert_close(copied.attribute(X), 2 * X, "bfloat16")
    assert_close(module.attribute(X), X, "bfloat16")


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


# ---- Arguments: as TensorFlow binds them ---------------------------------------------------------


THREE = tf.constant(3.0)


class Poly(tf.Module):
    def __init__(self):
        super().__init__()
        self.weight = tf.Variable(tf.eye(4))

    @tf.function
    def poly(self, x, scale=2.0, flag=False, *, bias=None):
        y = x @ self.weight * scale + (1.0 if flag else 0.0)
        return {"y": y if bias is None else y + bias}

    @tf.function(input_signature=[tf.TensorSpec((None, 4)), tf.TensorSpec(())])
    def signed(self, x, scale=THREE):
        return x @ self.weight * scale

    @tf.function
    def variadic(self, *xs, **named):
        return tf.add_n(xs) @ self.weight + named.get("bias", 0.0)


def calls_of(module):
    """Functions with calls that they were traced for."""
    bias, scale = tf.ones(4), THREE
    yield module.poly, [((X,), {}), ((X,), {"flag": True}), ((), {"bias": bias, "x": X})]
    yield module.poly, [((X, scale), {"flag": True}), ((X,), {"flag": True, "scale": scale})]
    yield functools.partial(module.poly, flag=True), [((X,), {}), ((X,), {"flag": False})]
    yield module.signed, [((X,), {}), ((X,), {"scale": scale}), ((), {"scale": 2.0, "x": X})]
    yield module.variadic, [((X, X), {}), ((X,), {"bias": bias})]


def assert_same_calls(module):
    for function, calls in calls_of(module):
        fast = tfamp.rewrite(function, dtype="bfloat16")
        for args, kwargs in calls:
            expected = tf.nest.flatten(function(*args, **kwargs))[0]
            assert_close(tf.nest.flatten(fast(*args, **kwargs))[0], expected, "bfloat16", depth=4)
            assert op_dtypes(fast.concrete(*args, **kwargs))["MatMul"] == {"bfloat16"}


@pytest.mark.slow
def test_arguments_are_bound_as_by_the_function_also_where_it_is_restored(tmp_path):
    module = Poly()
    assert_same_calls(module)
    for function, calls in calls_of(module):
        for args, kwargs in calls:
            function(*args, **kwargs)
    tf.saved_model.save(module, tmp_path, signatures=module.signed)
    loaded = tf.saved_model.load(tmp_path)
    assert_same_calls(loaded)
    fast = tfamp.rewrite(loaded.poly, dtype="float16", calibration=[{"x": X, "flag": True}])
    assert str(inspect.signature(fast)) == "(x, scale=2.0, flag=False, *, bias=None)"
    assert_close(fast(X, flag=True)["y"], 2 * X + 1, "float16", depth=4)
    with pytest.raises(TypeError, match="unexpected keyword argument 'nosuch'"):
        fast(X, nosuch=1)
    traced = module.poly.get_concrete_function(tf.TensorSpec((None, 4)), bias=tf.TensorSpec(4))
    (result,) = tfamp.rewrite(traced, dtype="bfloat16")(x=X, bias=tf.ones(4)).values()
    assert_close(result, 2 * X + 1, "bfloat16", depth=4)
    served = tfamp.rewrite(loaded.signatures["serving_default"], dtype="bfloat16")
    (result,) = served(x=X, scale=tf.constant(2.0)).values()
    assert_close(result, 2 * X, "bfloat16", depth=4)


def generate(x):
    yield x


async def wait(x):
    return x


async def generate_later(x):
    yield x


class Generating:
    def __call__(self, x):
        yield x


@pytest.mark.parametrize(
    ("fn", "kind"),
    [
        (generate, "a generator function"),
        (functools.partial(generate, 1), "a generator function"),
        (tf.function(generate), "a generator function"),
        (Generating(), "a generator function"),
        (wait, "a coroutine function"),
        (generate_later, "an asynchronous generator function"),
    ],
)
def test_functions_that_tensorflow_cannot_trace_are_refused_at_once(fn, kind):
    message = f"rewrite takes functions that return their result.*got {kind}, .*Rewrite the funct"
    for use in (tfamp.rewrite(dtype="bfloat16"), lambda fn: tfamp.tune(fn, X)):
        with pytest.raises(TypeError, match=message):
            use(fn)


def _graphs():
    gc.collect()
    kind = type(tf.function(lambda: None).get_concrete_function().graph)
    return sum(isinstance(each, kind) for each in gc.get_objects())


def _graphs_left(wrap):
    """The graphs that remain of traces of a function with a custom gradient."""

    @tf.custom_gradient
    def twice(x):
        return x + x, lambda upstream: 3.0 * upstream

    before = _graphs()
    for size in (2, 3, 4):
        function, x = wrap(lambda x: twice(x @ x)), tf.ones((size, size))
        with tf.GradientTape() as tape:
            tape.watch(x)
            result = function(x)
        np.testing.assert_array_equal(tape.gradient(result, x), np.full((size, size), 6.0 * size))
        del function, tape, result
    return _graphs() - before


def test_traces_with_custom_gradients_keep_no_more_graphs_than_tensorflows():
    rewrite = tfamp.rewrite(dtype="bfloat16", placement="lists")
    assert _graphs_left(rewrite) <= _graphs_left(tf.function)


def test_sums_of_tensors_of_several_devices_are_float32_as_all_reduces_are():
    @tfamp.rewrite(dtype="bfloat16", placement="lists")
    def function(x):
        parts = []
        for device in ("CPU:0", "CPU:1"):
            with tf.device(device):
                parts.append(tf.matmul(x, x, transpose_b=True))
        return tf.matmul(tf.add_n(parts), x) + tf.matmul(tf.add_n(parts[:1] * 2), x)

    sums = [node for node in function.plan(X).nodes if node.op == "AddN"]
    assert [node.dtype for node in sums] == ["float32", "bfloat16"]
    assert "adds tensors of several devices" in sums[0].reason


@pytest.mark.parametrize("dtype", first_of(["bfloat16", "float16"]))
@pytest.mark.parametrize("placement", ["lists", "min_cut"])
def test_the_elements_of_a_list_that_is_a_result_are_float32(dtype, placement):
    def collected(x):
        def body(i, values):
            return i + 1, values.write(i, x @ tf.transpose(x) + tf.cast(i, tf.float32))

        values = tf.while_loop(lambda i, _: i < 2, body, [0, tf.TensorArray(tf.float32, 2)])[1]
        return values.write(1, x @ tf.transpose(x))

    fast = tfamp.rewrite(collected, dtype=dtype, placement=placement, force_low=["matmul"])
    expected = tf.function(collected)(X)
    stacked = [
        tf.raw_ops.TensorListStack(
            input_handle=handle, element_shape=(3, 3), element_dtype=tf.float32
        )
        for handle in (fast(X), expected)
    ]
    assert_close(*stacked, dtype, depth=4)
    assert dtype in op_dtypes(fast.concrete(X))["MatMul"]
