"""Sums of low kernels are float32's, wherever and whenever their gradients are taken.

The rows of the table are in tests/kernels. Here are the ways in which an op is run and
differentiated, each with the gradient of a bias, of which a kernel loses 97 %, and what the guard
leaves as it is.
"""

import pickle
import threading

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.eager import execute

import tfamp
from helpers.cases import first_of
from helpers.graph_asserts import graph_op_dtypes
from tfamp import kernel_guard

ROWS = 16384
DTYPES = ["float16", "bfloat16"]


@pytest.fixture(params=first_of(DTYPES))
def low(request):
    return request.param


@pytest.fixture
def biased(low):
    """A function that adds a low bias to a low product, and the bias."""
    images, bias = tf.ones((ROWS, 4)), tf.Variable(tf.zeros(4))

    def run():
        with tfamp.autocast(low):
            product = tf.cast(tf.matmul(images, tf.eye(4)), low)
            result = product + tf.nn.bias_add(tf.zeros_like(product), tf.cast(bias, low))
            assert result.dtype == low
            return tf.reduce_sum(result)

    return run, bias


def by_function(run, bias):
    def step():
        with tf.GradientTape() as tape:
            total = run()
        return tape.gradient(total, bias)

    return tf.function(step)()


def by_xla(run, bias):
    def step():
        with tf.GradientTape() as tape:
            total = run()
        return tape.gradient(total, bias)

    return tf.function(step, jit_compile=True)()


def after_the_context(run, bias):
    with tf.GradientTape() as tape:
        total = run()
    return tape.gradient(total, bias)


def inside_the_context(run, bias):
    with tfamp.autocast("bfloat16"):
        return after_the_context(run, bias)


def of_a_function(run, bias):
    with tf.GradientTape() as tape:
        total = tf.function(run)()
    return tape.gradient(total, bias)


def of_a_persistent_tape(run, bias):
    with tf.GradientTape(persistent=True) as tape:
        total = run()
    assert tape.gradient(total, bias) is not None
    return tape.gradient(total, bias)


def in_a_loop(run, bias):
    @tf.function
    def step():
        with tf.GradientTape() as tape:
            (total,) = tf.while_loop(lambda x: x < 1.0, lambda x: [x + run()], [0.5])
        return tape.gradient(total, bias)

    return step()


def in_a_branch(run, bias):
    @tf.function
    def step(taken):
        with tf.GradientTape() as tape:
            total = tf.cond(taken, run, lambda: tf.constant(0.0))
        return tape.gradient(total, bias)

    return step(tf.constant(True))


def recomputed(run, bias):
    with tf.GradientTape() as tape:
        total = tf.recompute_grad(run)()
    return tape.gradient(total, bias)


def by_graph_gradients(run, bias):
    @tf.function
    def step():
        return tf.gradients(run(), bias)[0]

    return step()


def on_a_replica(run, bias):
    strategy = tf.distribute.MirroredStrategy(["CPU:0"])
    step = tf.function(lambda: strategy.run(lambda: after_the_context(run, bias)))
    return strategy.experimental_local_results(step())[0]


WAYS = [
    after_the_context, by_function, by_graph_gradients, by_xla, in_a_branch, in_a_loop,
    inside_the_context, of_a_function, of_a_persistent_tape, on_a_replica, recomputed,
]  # fmt: skip


@pytest.mark.parametrize("differentiate", WAYS)
def test_gradient_of_a_bias_has_every_row(biased, differentiate):
    np.testing.assert_allclose(differentiate(*biased), [ROWS] * 4, rtol=4e-3)


@pytest.mark.parametrize("differentiate", WAYS)
def test_rows_gathered_behind_a_cast_of_an_activation_are_all_counted(low, differentiate):
    table = tf.Variable(tf.ones((3, 4)))

    def run():
        with tfamp.autocast(low):
            hidden = tf.matmul(table, tf.eye(4))
            assert hidden.dtype == low
            rows = tf.gather(tf.cast(hidden, tf.float32), tf.fill([ROWS], 1))
        return tf.reduce_sum(rows)

    np.testing.assert_array_equal(differentiate(run, table), [[0] * 4, [ROWS] * 4, [0] * 4])


@pytest.mark.parametrize("traced", [False, True])
def test_rows_gathered_behind_a_cast_in_a_layer_of_a_policy_are_all_counted(low, traced):
    class Looked(keras.layers.Layer):
        def call(self, x):
            hidden = x * 1
            assert hidden.dtype == low
            return tf.gather(tf.cast(hidden, tf.float32), tf.fill([ROWS], 1))

    with tfamp.policy_scope(f"mixed_{low}"):
        layer = Looked()

    def gradient(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            total = tf.reduce_sum(layer(x))
        return tape.gradient(total, x)

    found = (tf.function(gradient) if traced else gradient)(tf.ones((2, 3)))
    np.testing.assert_array_equal(found, [[0] * 3, [ROWS] * 3])


def test_forward_mode_goes_through_a_cast_of_a_low_tensor(low):
    x = tf.fill((3,), 0.5)
    with tf.autodiff.ForwardAccumulator(x, tf.ones(3)) as accumulator, tfamp.autocast(low):
        raised = tf.cast(tf.cast(x, low) * 2, tf.float32)
    np.testing.assert_array_equal(accumulator.jvp(raised), [2, 2, 2])


def test_second_derivatives_are_exact_and_defined(low):
    bias = tf.Variable(tf.zeros(4))
    with tf.GradientTape() as outer:
        with tf.GradientTape() as inner, tfamp.autocast(low):
            given = tf.cast(tf.fill((ROWS, 4), 0.25), low)
            shifted = tf.nn.bias_add(given, tf.cast(bias, low))
            total = tf.reduce_sum(tf.cast(shifted, tf.float32) ** 3)
        first = inner.gradient(total, bias)
        summed = tf.reduce_sum(first)
    np.testing.assert_allclose(first, [3 / 16 * ROWS] * 4, rtol=1e-2)
    np.testing.assert_allclose(outer.gradient(summed, bias), [6 / 4 * ROWS] * 4, rtol=1e-2)


def test_forward_mode_goes_through_a_raised_op(low):
    image = tf.fill((1, 128, 128, 1), 0.75)
    forward = tf.autodiff.ForwardAccumulator(image, tf.fill(image.shape, 0.5))
    with forward as accumulator, tfamp.autocast(low):
        pooled = tf.nn.avg_pool2d(tf.cast(image, low), 128, 1, "VALID")
    assert pooled.dtype == low
    assert float(tf.reshape(pooled, [])) == 0.75
    assert float(tf.reshape(accumulator.jvp(pooled), [])) == 0.5


def test_slices_of_a_variable_stay_slices_and_those_of_activations_are_added_up(low):
    table, rows = tf.Variable(tf.ones((3, 4))), tf.zeros(ROWS, tf.int32)
    with tf.GradientTape() as tape, tfamp.autocast(low):
        found = tf.gather(tf.cast(table, low), rows)
    slices = tape.gradient(found, table)
    assert isinstance(slices, tf.IndexedSlices)
    assert slices.dtype == tf.float32
    with tf.GradientTape() as tape, tfamp.autocast(low):
        found = tf.gather(tf.cast(table, low) * tf.constant(1, low), rows)
    assert float(tf.convert_to_tensor(tape.gradient(found, table))[0, 0]) == ROWS


@pytest.mark.parametrize("nested", [False, True])
def test_nothing_is_left_behind(biased, nested):
    before = execute.record_gradient
    with tfamp.autocast("bfloat16"):
        assert execute.record_gradient is not before
        if nested:
            with tfamp.policy_scope("mixed_bfloat16"):
                keras.layers.Dense(4)(tf.ones((2, 4)))
            by_function(*biased)
    assert execute.record_gradient is before
    after_the_context(*biased)
    assert execute.record_gradient is before
    assert kernel_guard.hooks.users == 0


@pytest.mark.parametrize("traced", [False, True])
def test_tensors_of_two_dtypes_are_tensorflows_error_in_a_layer_of_a_policy(traced, low):
    class Adding(keras.layers.Layer):
        def call(self, x):
            return tf.add(x, tf.ones((1, 8))), tf.nn.bias_add(x, tf.ones(8))

    with tfamp.policy_scope(f"mixed_{low}"):
        layer = Adding()
    call = tf.function(layer) if traced else layer
    with pytest.raises((TypeError, ValueError, tf.errors.InvalidArgumentError), match="float"):
        call(tf.ones((4, 8)))


def test_an_island_and_other_threads_run_ops_as_they_are(low):
    image = tf.cast(tf.fill((1, 256, 256, 1), 0.75), low)
    results = {}

    def pool(name):
        results[name] = float(tf.reshape(tf.nn.avg_pool2d(image, 256, 1, "VALID"), []))

    pool("outside")
    with tfamp.autocast(low):
        pool("inside")
        with tfamp.autocast(enabled=False):
            pool("island")
        thread = threading.Thread(target=pool, args=("thread",))
        thread.start()
        thread.join()
    assert results["inside"] == 0.75
    assert results["outside"] == results["island"] == results["thread"]


def test_a_function_traced_elsewhere_is_traced_again_in_a_layer_of_a_policy(low):
    pool = tf.function(lambda x: tf.nn.avg_pool2d(x, 256, 1, "VALID"))
    image = tf.cast(tf.fill((1, 256, 256, 1), 0.75), low)
    pool(image)

    class Pooling(keras.layers.Layer):
        def call(self, x):
            return pool(x)

    with tfamp.policy_scope(f"mixed_{low}"):
        layer = Pooling()
    assert layer(image).dtype == low
    assert float(tf.reshape(layer(image), [])) == 0.75


def test_another_gradient_of_the_user_is_kept(low):
    @tf.RegisterGradient(f"Fives_{low}")
    def fives(op, upstream):
        return upstream, tf.fill([4], tf.cast(5, upstream.dtype))

    with tf.Graph().as_default() as graph, tfamp.autocast(low):
        bias = tf.zeros(4, low)
        with graph.gradient_override_map({"BiasAdd": f"Fives_{low}"}):
            result = tf.nn.bias_add(tf.ones((ROWS, 4), low), bias)
        (gradient,) = tf.gradients(result, bias)
        with tf.compat.v1.Session() as session:
            assert session.run(gradient).astype("float32").tolist() == [5] * 4


def _in(x, value, *shape):
    return tf.fill(shape, tf.cast(value, x.dtype))


def _spread(x):
    return tf.broadcast_to(x, (ROWS, 4))


# Gradients that add up, or count, what one value was used for.
SHARED = {
    "clipped": lambda x: tf.clip_by_value(_in(x, 3, ROWS, 4), 0 * x, x),
    "filled": lambda x: tf.fill((ROWS,), x[0]),
    "largest": lambda x: tf.reduce_max(_spread(x), 0),
    "largest of a segment": lambda x: tf.math.segment_max(_spread(x), tf.zeros(ROWS, tf.int32)),
    "largest of an unsorted segment": lambda x: tf.math.unsorted_segment_max(
        _spread(x), tf.zeros(ROWS, tf.int32), 1
    ),
    "product of matrices": lambda x: tf.matmul(_in(x, 1, ROWS, 1, 4), x[:, tf.newaxis]),
    "remainder": lambda x: tf.math.floormod(_in(x, 3, ROWS, 4), x),
    "x log y": lambda x: tf.math.xlogy(x, _in(x, np.e, ROWS, 4)),
}


@pytest.mark.parametrize("name", SHARED)
@pytest.mark.parametrize("by", ["eager", "function"])
def test_gradients_add_up_and_count_what_was_shared_out(low, name, by):
    run, x = SHARED[name], tf.Variable(tf.fill((4,), 2.0))

    def gradient(dtype):
        with tf.GradientTape() as tape:
            with kernel_guard.guarded():
                value = tf.cast(x, dtype)
                result = run(tf.convert_to_tensor(value))
            total = tf.reduce_sum(tf.cast(result, tf.float32))
        return tape.gradient(total, x)

    wrap = tf.function if by == "function" else lambda function: function
    np.testing.assert_allclose(wrap(gradient)(low), wrap(gradient)("float32"), rtol=1e-2)


# Layers of Keras whose own name says nothing of the ops they run, and inputs for a row.
LAYERS = {
    "RNN": (lambda: keras.layers.RNN(keras.layers.LSTMCell(4)), (2, 4)),
    "RNN of two cells": (
        lambda: keras.layers.RNN([keras.layers.SimpleRNNCell(4), keras.layers.GRUCell(4)]),
        (2, 4),
    ),
    "PReLU": (lambda: keras.layers.PReLU(alpha_initializer="ones"), (4,)),
    "ConvLSTM1D": (lambda: keras.layers.ConvLSTM1D(2, 1), (2, 1, 4)),
    "EinsumDense": (lambda: keras.layers.EinsumDense("abc,cde->abde", (1, 2, 2)), (1, 4)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layers_that_run_what_others_define_are_guarded(low, name):
    make, shape = LAYERS[name]
    x = -np.random.default_rng(0).uniform(0.5, 1.5, (ROWS // 2, *shape)).astype("float32")

    def gradients(policy):
        keras.utils.set_random_seed(0)
        with tfamp.policy_scope(policy):
            layer = make()
        with tf.GradientTape() as tape:
            total = tf.reduce_sum(tf.cast(layer(x), tf.float32))
        return tape.gradient(total, layer.trainable_variables)

    for found, expected in zip(gradients(f"mixed_{low}"), gradients("float32"), strict=True):
        error = np.abs(found - expected).max() / np.abs(expected).max()
        assert error < (3e-3 if low == "float16" else 3e-2)


BETWEEN_LAYERS = {
    "cumulative sum": lambda h: keras.ops.cumsum(h, axis=0),
    "product with the largest": lambda h: h * keras.ops.max(h, axis=0, keepdims=True),
    "sum": lambda h: keras.ops.sum(h, axis=0, keepdims=True),
}


@pytest.mark.parametrize("name", BETWEEN_LAYERS)
def test_ops_between_the_layers_of_a_functional_are_guarded(low, name):
    x = np.random.default_rng(0).uniform(0.5, 1.5, (ROWS // 4, 4)).astype("float32") / 64

    def results(policy):
        with tfamp.policy_scope(policy):
            inputs = keras.Input((4,))
            h = keras.layers.Dense(4, kernel_initializer="ones")(inputs)
            h = BETWEEN_LAYERS[name](h)
            model = keras.Model(inputs, keras.layers.Dense(2, kernel_initializer="ones")(h))
        with tf.GradientTape() as tape:
            result = model(x)
            total = tf.reduce_sum(result) / 1024  # within the range of float16
        return [result, *tape.gradient(total, model.trainable_variables)]

    for found, expected in zip(results(f"mixed_{low}"), results("float32"), strict=True):
        np.testing.assert_allclose(found, expected, rtol=2e-2)


def test_the_gradient_of_a_vectorized_function_is_guarded(low):
    bias = tf.Variable(tf.zeros(4))

    @tf.function
    def gradient():
        with tf.GradientTape() as tape, tfamp.autocast(low):
            x, low_bias = tf.ones((4, ROWS // 4, 4), low), tf.cast(bias, low)
            result = tf.vectorized_map(lambda row: tf.nn.bias_add(row, low_bias) + low_bias, x)
            total = tf.reduce_sum(tf.cast(result, tf.float32))
        return tape.gradient(total, bias)

    np.testing.assert_allclose(gradient(), [2 * ROWS] * 4, rtol=4e-3)


def test_a_lambda_is_guarded(low):
    with tfamp.policy_scope(f"mixed_{low}"):
        pool = keras.layers.Lambda(lambda x: tf.nn.avg_pool2d(x, 256, 1, "VALID"))
    assert float(tf.reshape(pool(tf.fill((1, 256, 256, 1), 0.75)), [])) == 0.75


def test_a_quantized_layer_is_guarded():
    with tfamp.policy_scope("mixed_bfloat16"):
        layer = keras.layers.Dense(4)
    layer.build((None, 4))
    layer.quantize("int8")
    with tf.GradientTape() as tape:
        total = tf.reduce_sum(tf.cast(layer(tf.ones((ROWS, 4))), tf.float32))
    (gradient,) = tape.gradient(total, layer.trainable_variables)
    np.testing.assert_allclose(gradient, [ROWS] * 4, rtol=4e-3)


@pytest.mark.parametrize("by", ["custom gradient", "recomputation"])
def test_a_gradient_of_the_user_in_a_layer_of_a_policy_is_guarded(low, by):
    class Biased(keras.layers.Layer):
        def build(self, shape):
            self.bias = self.add_weight(shape=(4,), initializer="zeros")

        def call(self, x):
            def add(x, bias):
                return tf.nn.bias_add(x, bias) + bias

            @tf.custom_gradient
            def added(x, bias):
                def gradient(upstream):
                    total = tf.raw_ops.BiasAddGrad(out_backprop=upstream)
                    return upstream, total + tf.reduce_sum(upstream, 0)

                return add(x, bias), gradient

            bias = tf.convert_to_tensor(self.bias)
            return added(x, bias) if by == "custom gradient" else tf.recompute_grad(add)(x, bias)

    with tfamp.policy_scope(f"mixed_{low}"):
        layer = Biased()
    with tf.GradientTape() as tape:
        total = tf.reduce_sum(tf.cast(layer(tf.ones((ROWS, 4))), tf.float32))
    (gradient,) = tape.gradient(total, layer.trainable_variables)
    np.testing.assert_allclose(gradient, [2 * ROWS] * 4, rtol=4e-3)


@pytest.mark.parametrize("where", [tfamp.autocast, lambda _: kernel_guard.guarded()])
def test_empty_lists_are_integers_where_ops_take_integers(low, where):
    with where(low):
        number = tf.constant(2, low)
        results = [tf.broadcast_to(number, []), tf.tile(number, []), tf.fill([], number)]
        results += [tf.reduce_sum(number, []), tf.reduce_mean(number, axis=[])]
    assert [float(each) for each in results] == [2] * 5


def small_model():
    layers = [keras.layers.Conv2D(4, 3), keras.layers.AveragePooling2D(2)]
    return keras.Sequential([keras.Input((8, 8, 3)), *layers, keras.layers.Flatten()])


def test_a_guarded_model_is_saved_exported_and_copied(low, tmp_path):
    with tfamp.policy_scope(f"mixed_{low}"):
        model = small_model()
    x = np.ones((2, 8, 8, 3), "float32")
    expected = model.predict(x, verbose=0)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    copied = pickle.loads(pickle.dumps(model))
    for each in (loaded, copied):
        np.testing.assert_allclose(each.predict(x, verbose=0), expected, rtol=2e-2)
    tf.saved_model.save(model, tmp_path / "saved")
    served = tf.saved_model.load(tmp_path / "saved").signatures["serving_default"]
    (result,) = served(tf.constant(x)).values()
    np.testing.assert_allclose(result, expected, rtol=1e-6)


def test_no_custom_gradient_gets_into_a_saved_graph(low):
    @tf.function
    def add(x, bias):
        with tfamp.autocast(low):
            return tf.nn.bias_add(tf.cast(x, low), tf.cast(bias, low))

    graph = add.get_concrete_function(tf.ones((4, 4)), tf.ones(4)).graph.as_graph_def()
    assert "BiasAdd" in {node.op for node in graph.node}
    assert not any("_gradient_op_type" in node.attr for node in graph.node)


@pytest.mark.parametrize("way", ["policy", "autocast"])
@pytest.mark.parametrize("name", ["Add", "Average"])
@pytest.mark.parametrize("number", [9, 512])
def test_sums_and_averages_of_many_tensors_are_exact(low, name, number, way):
    values = np.random.default_rng(0).uniform(0.5, 1.5, (number, 4, 8))
    low_values = [tf.cast(each, low) for each in values]
    layer_class = getattr(keras.layers, name)
    with tf.GradientTape() as tape:
        tape.watch(low_values)
        if way == "policy":
            with tfamp.policy_scope(f"mixed_{low}"):
                found = layer_class()(low_values)
            assert found.dtype == low
        else:
            with tfamp.autocast(low):
                found = layer_class()(low_values)
    gradients = tape.gradient(found, low_values)
    mean = tf.add_n([tf.cast(each, tf.float64) for each in low_values]) / number
    expected, slope = (mean, 1 / number) if name == "Average" else (mean * number, 1.0)
    np.testing.assert_allclose(tf.cast(found, tf.float64), expected, rtol=4e-3)
    np.testing.assert_allclose(np.float64(tf.cast(gradients, tf.float64)), slope, rtol=4e-3)


@pytest.mark.parametrize("number", [2, 8])
def test_residual_connections_are_added_in_the_low_dtype(low, number):
    with tfamp.policy_scope(f"mixed_{low}"):
        layer = keras.layers.Add()
    inputs = [tf.ones((2, 2), low)] * number

    @tf.function
    def by_policy():
        return layer(inputs)

    @tf.function
    def by_autocast():
        with tfamp.autocast(low):
            return keras.layers.Add()(inputs)

    for function in (by_policy, by_autocast):
        graph = function.get_concrete_function().graph
        assert function().dtype == low
        assert "Cast" not in {node.op for node in graph.as_graph_def().node}


def bias_gradient(low, shape):
    """A function of an upstream value of a shape that returns the gradient of a bias."""

    @tf.function(input_signature=[tf.TensorSpec(shape, low)])
    def step(x):
        bias = tf.zeros(4, low)
        with tf.GradientTape() as tape:
            tape.watch(bias)
            with tfamp.autocast(low):
                shifted = tf.nn.bias_add(x, bias)
        return tape.gradient(shifted, bias)

    return step


def test_a_bias_gradient_in_a_graph_is_a_sum_without_a_cast_where_that_is_exact():
    step = bias_gradient("bfloat16", (ROWS, 4))
    ops = graph_op_dtypes(step.get_concrete_function().graph.as_graph_def())
    assert ops["Sum"] == {"bfloat16"}
    assert "Cast" not in ops
    found = step(tf.ones((ROWS, 4), tf.bfloat16))
    np.testing.assert_allclose(tf.cast(found, tf.float32), [ROWS] * 4, rtol=4e-3)


def test_a_bias_gradient_of_unknown_rank_is_exact(low):
    found = bias_gradient(low, None)(tf.ones((ROWS, 4), low))
    np.testing.assert_allclose(tf.cast(found, tf.float32), [ROWS] * 4, rtol=4e-3)


def test_second_derivatives_in_a_graph_go_through_the_sum(low):
    @tf.function
    def step():
        bias = tf.zeros(4)
        with tf.GradientTape() as outer:
            outer.watch(bias)
            with tf.GradientTape() as inner, tfamp.autocast(low):
                inner.watch(bias)
                given = tf.cast(tf.fill((ROWS, 4), 0.25), low)
                shifted = tf.nn.bias_add(given, tf.cast(bias, low))
                total = tf.reduce_sum(tf.cast(shifted, tf.float32) ** 3)
            summed = tf.reduce_sum(inner.gradient(total, bias))
        return outer.gradient(summed, bias)

    np.testing.assert_allclose(step(), [6 / 4 * ROWS] * 4, rtol=1e-2)


def test_dimensions_that_are_unknown_may_be_broadcast():
    rows = tf.TensorSpec((None, 4), tf.float16)

    @tf.function(input_signature=[rows, rows])
    def gradient(x, bias):
        with tf.GradientTape() as tape:
            tape.watch(bias)
            with tfamp.autocast("float16"):
                total = x + bias
        return tape.gradient(total, bias)

    found = gradient(tf.ones((16384, 4), tf.float16), tf.ones((1, 4), tf.float16))
    np.testing.assert_array_equal(found, np.full((1, 4), 16384.0))
    same = gradient(tf.ones((3, 4), tf.float16), tf.ones((3, 4), tf.float16))
    np.testing.assert_array_equal(same, np.ones((3, 4)))


def test_the_first_bias_op_and_second_derivatives_of_biases_add_up_in_float32(low):
    bias, upstream = tf.ones(4), tf.ones((ROWS, 4))
    with tf.GradientTape() as outer:
        outer.watch(upstream)
        with tf.GradientTape() as tape:
            tape.watch(bias)
            with tfamp.autocast(low):
                product = tf.matmul(upstream, tf.eye(4))
                total = tf.raw_ops.BiasAddV1(value=product, bias=tf.cast(bias, low))
        np.testing.assert_array_equal(tape.gradient(total, bias), [ROWS] * 4)
    scale = tf.ones(4)
    with tf.GradientTape() as tape:
        tape.watch(scale)
        with tfamp.autocast(low):
            rows = tf.cast(upstream, low)
            summed = tf.raw_ops.BiasAddGrad(out_backprop=rows * tf.cast(scale, low))
    np.testing.assert_array_equal(tape.gradient(summed, scale), [ROWS] * 4)
