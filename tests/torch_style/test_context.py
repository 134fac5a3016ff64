"""autocast as a context and a decorator: nesting, gradients, traces, control flow, user's casts."""

from __future__ import annotations

import asyncio
import contextlib
import re
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp
from helpers.cases import first_of, one_in
from helpers.graph_asserts import assert_computes_in, op_dtypes
from helpers.tolerances import assert_close
from tfamp.machine import hardware

DTYPES = ("float16", "bfloat16")
DTYPES = ("bfloat16", "float16")
both_dtypes = pytest.mark.parametrize("dtype", first_of(DTYPES, pytest.mark.nightly))
eager_and_traced = pytest.mark.parametrize(
    "run", [lambda f: f, tf.function], ids=["eager", "traced"]
)


@pytest.fixture
def a():
    return tf.constant(np.random.default_rng(0).uniform(-1, 1, (4, 4)), tf.float32)


def matmul_dtype(a):
    return tf.matmul(a, a).dtype.name


# ---- Arguments -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "dtype", ["float16", tf.float16, np.dtype("float16"), np.float16, tf.bfloat16]
)
def test_dtype_is_a_name_or_a_dtype(a, dtype):
    with tfamp.autocast(dtype):
        assert tf.matmul(a, a).dtype == dtype


@pytest.mark.parametrize("dtype", ["float32", "half", tf.float32, 16, "mixed_float16"])
def test_another_dtype_is_an_error_that_says_what_to_do(dtype):
    with pytest.raises(ValueError, match="dtype must be one of float16, bfloat16, auto; got"):
        tfamp.autocast(dtype)


def test_the_error_about_a_policy_names_its_dtype():
    for give in (tfamp.autocast, lambda dtype: tfamp.rewrite(lambda x: x, dtype=dtype)):
        with pytest.raises(ValueError, match=r"'mixed_float16'\. That is a policy; give 'float16'"):
            give("mixed_float16")


def test_a_disabled_autocast_takes_any_float_dtype(a):
    with tfamp.autocast("float32", enabled=False):
        assert matmul_dtype(a) == "float32"
    with pytest.raises(ValueError, match="dtype must be one of"):
        tfamp.autocast("int32", enabled=False)


@pytest.mark.parametrize("name", ["enabled", "cache_casts", "op_lists"])
def test_flags_must_be_bools_and_op_lists_op_lists(name):
    with pytest.raises(TypeError, match=f"{name} must be .*; got 'yes'"):
        tfamp.autocast("bfloat16", **{name: "yes"})


@pytest.mark.parametrize("bfloat16", [True, False])
def test_no_dtype_is_what_the_hardware_multiplies_and_off_where_it_multiplies_neither(
    monkeypatch, a, bfloat16
):
    found = hardware.Hardware("", cpu_bfloat16=bfloat16, cpu_float16=False, gpus=(), tpu=False)
    monkeypatch.setattr(hardware, "detect", lambda: found)
    for context in (tfamp.autocast(enabled=False), tfamp.autocast("bfloat16")):
        with context, tfamp.autocast():
            assert matmul_dtype(a) == ("bfloat16" if bfloat16 else "float32")
    assert matmul_dtype(a) == "float32"


# ---- Nesting and leaving -------------------------------------------------------------------------


@eager_and_traced
def test_nested_dtypes_and_islands(a, run):
    @run
    def dtypes(a):
        found.append(matmul_dtype(a))
        with tfamp.autocast("bfloat16"):
            found.append(matmul_dtype(a))
            with tfamp.autocast("float16", enabled=False):
                found.append(matmul_dtype(a))
                with tfamp.autocast("float16"):
                    found.append(matmul_dtype(a))
                found.append(matmul_dtype(a))
            found.append(matmul_dtype(a))
        return a

    found = []
    dtypes(a)
    assert found == ["float32", "bfloat16", "float32", "float16", "float32", "bfloat16"]


def test_low_tensors_run_low_in_an_island_and_in_the_inner_of_two_low_dtypes(a):
    with tfamp.autocast("float16"):
        half = tf.matmul(a, a)
        with tfamp.autocast(enabled=False):
            assert matmul_dtype(half) == "float16"
            assert tf.exp(half).dtype == tf.float16
        with tfamp.autocast("bfloat16"):
            assert matmul_dtype(half) == "bfloat16"
            assert (half + tf.matmul(a, a)).dtype == tf.float32


def test_one_object_can_be_entered_again_while_in_force(a):
    context = tfamp.autocast("bfloat16")

    @context
    def recursive(depth):
        inner = recursive(depth - 1) if depth else []
        return [matmul_dtype(a), *inner, matmul_dtype(a)]

    with context, context:
        assert recursive(3) == ["bfloat16"] * 8
        assert matmul_dtype(a) == "bfloat16"
    assert matmul_dtype(a) == "float32"


# ---- Decorator -----------------------------------------------------------------------------------


def test_decorated_function_keeps_its_name_and_returns(a):
    class Thing:
        @tfamp.autocast("bfloat16")
        def product(self, x, *, scale=1.0):
            """Mine."""
            return tf.matmul(x, x) * scale

    assert (Thing.product.__name__, Thing.product.__doc__) == ("product", "Mine.")
    assert Thing().product(a, scale=2.0).dtype == tf.bfloat16
    assert matmul_dtype(a) == "float32"


def test_a_coroutine_can_be_decorated_and_a_generator_not(a):
    def work():
        yield

    @tfamp.autocast("bfloat16")
    async def wait():
        await asyncio.sleep(0)
        return matmul_dtype(a)

    assert asyncio.run(wait()) == "bfloat16"
    assert matmul_dtype(a) == "float32"
    for function in (work, 3):
        with pytest.raises(
            TypeError, match=rf"got {re.escape(repr(function))}\..*with tfamp\.autocast\("
        ):
            tfamp.autocast("bfloat16")(function)


@pytest.mark.parametrize("outer", ["autocast", "tf.function"])
def test_decorator_order_with_tf_function(a, outer):
    def function(x):
        if tf.reduce_sum(x) > 1e9:  # AutoGraph makes a tf.cond of it
            x = x + 1.0
        return tf.matmul(x, x)

    cast = tfamp.autocast("bfloat16")
    made = cast(tf.function(function)) if outer == "autocast" else tf.function(cast(function))
    assert made(a).dtype == tf.bfloat16
    assert_close(made(a), function(a), "bfloat16", depth=4)


# ---- Layers and models ---------------------------------------------------------------------------


def test_the_call_of_a_model_or_of_one_layer_can_be_decorated():
    class Cast(keras.Model):
        def __init__(self):
            super().__init__()
            self.hidden = keras.layers.Dense(8, activation="relu")

        @tfamp.autocast("bfloat16")
        def call(self, x):
            return self.hidden(x)

    layer = keras.layers.Dense(3)
    layer.call = tfamp.autocast("bfloat16")(layer.call)
    for made in (Cast(), layer):
        assert_computes_in("bfloat16", lambda x, made=made: made(x), tf.ones((2, 4)))
        assert {v.dtype for v in made.variables} == {"float32"}


# ---- Gradients -----------------------------------------------------------------------------------


@both_dtypes
@pytest.mark.parametrize("place", ["inside", "outside", "around"])
def test_gradients_are_low_and_arrive_in_the_variables_dtype_wherever_the_tape_is(a, dtype, place):
    v = tf.Variable(a)

    def gradient(cast=True):
        tape, context = tf.GradientTape(), tfamp.autocast(dtype, enabled=cast)
        first, second = (tape, context) if place == "around" else (context, tape)
        with first, second:
            loss = tf.reduce_sum(tf.tanh(tf.matmul(a, v)))
        with context if place == "inside" else contextlib.nullcontext():
            return tape.gradient(loss, v)

    traced, expected = tf.function(gradient), gradient(cast=False)
    assert op_dtypes(traced)["MatMul"] == {dtype}
    for found in (gradient(), traced()):
        assert found.dtype == tf.float32
        assert_close(found, expected, dtype, depth=16)


@pytest.mark.parametrize("name", ["jacobian", "batch_jacobian"])
def test_jacobians(a, name):
    def jacobian(cast, inside):
        with tfamp.autocast("bfloat16", enabled=cast), tf.GradientTape() as tape:
            tape.watch(a)
            out = tf.tanh(tf.matmul(a, tf.constant(a.numpy())))
        with tfamp.autocast("bfloat16") if inside else contextlib.nullcontext():
            return getattr(tape, name)(out, a)

    for inside in (True, False):
        found = jacobian(True, inside)
        assert found.dtype == tf.float32
        assert_close(found, jacobian(False, False), "bfloat16", depth=16)


@both_dtypes
@eager_and_traced
def test_custom_gradient_runs_in_the_mode_of_its_forward_pass(a, dtype, run):
    v = tf.Variable(a)
    seen = []

    @tf.custom_gradient
    def product(x, w):
        def gradient(dy):
            seen.append(matmul_dtype(a))
            with tfamp.autocast(enabled=False):
                seen.append(matmul_dtype(a))
            return tf.matmul(dy, w, transpose_b=True), tf.matmul(x, dy, transpose_a=True)

        return tf.matmul(x, w), gradient

    @run
    def gradients():
        with tfamp.autocast(dtype), tf.GradientTape() as tape:
            tape.watch(a)
            loss = tf.reduce_sum(product(a, v))
        return tape.gradient(loss, [a, v])

    found = gradients()
    assert set(seen[::2]) == {dtype}
    assert set(seen[1::2]) == {"float32"}
    assert [g.dtype for g in found] == [tf.float32] * 2
    assert_close(found[1], tf.matmul(a, tf.ones((4, 4)), transpose_a=True), dtype, depth=4)
    assert matmul_dtype(a) == "float32"


# ---- No stale casts ------------------------------------------------------------------------------


def test_an_assignment_inside_is_seen_by_the_next_op():
    v = tf.Variable(tf.ones((2, 2)))
    k = keras.Variable(np.ones((2, 2), "float32"))
    with tfamp.autocast("bfloat16"):
        for value in (1.0, 3.0, 5.0):
            v.assign(tf.fill((2, 2), value))
            k.assign(tf.fill((2, 2), value))
            assert tf.matmul(v, v).numpy().tolist() == [[2 * value**2] * 2] * 2
            assert tf.matmul(k, v).numpy().tolist() == [[2 * value**2] * 2] * 2


# ---- Traces --------------------------------------------------------------------------------------


def test_a_function_is_traced_for_every_mode_and_kept(a):
    product = tf.function(lambda x: tf.matmul(x, x))

    def count_after(context):
        with context:
            result = product(a)
        return result.dtype.name, product.experimental_get_tracing_count()

    lists = tfamp.OpLists.default("bfloat16").with_changes(deny_add=["MatMul"])
    assert count_after(contextlib.nullcontext()) == ("float32", 1)
    assert count_after(tfamp.autocast("bfloat16")) == ("bfloat16", 2)
    assert count_after(tfamp.autocast("float16")) == ("float16", 3)
    assert count_after(tfamp.autocast("bfloat16", op_lists=lists)) == ("float32", 4)
    assert count_after(contextlib.nullcontext()) == ("float32", 4)
    assert count_after(tfamp.autocast("bfloat16")) == ("bfloat16", 4)
    assert count_after(tfamp.autocast("bfloat16", enabled=False)) == ("float32", 4)


def test_a_function_inside_a_function_is_traced_for_the_mode_or_takes_low_arguments(a):
    inner = tf.function(lambda x: tf.matmul(x, x))
    declared = tf.function(lambda x: x + x, input_signature=[tf.TensorSpec((4, 4))])

    @tf.function
    def outer(x):
        with tfamp.autocast("bfloat16"):
            low = inner(x)
            return low, declared(low), tfamp.autocast(enabled=False)(inner)(x)

    with tfamp.autocast("bfloat16"):
        assert declared(tf.matmul(a, a)).dtype == tf.float32
    assert [each.dtype.name for each in outer(a)] == ["bfloat16", "float32", "float32"]


def test_a_concrete_function_stays_what_it_is_and_takes_low_arguments(a):
    def twice(x):
        return tf.nn.softmax(x @ tf.einsum("ij,jk->ik", x, tf.tanh(x) @ x))

    product = tf.function(twice).get_concrete_function(a)
    with tfamp.autocast("bfloat16"):
        message = "leaves it as it is, with 1 Einsum, 2 MatMul in float32. Call the tf.function"
        with pytest.warns(tfamp.TfampWarning, match=message):
            assert product(a).dtype == tf.float32
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # It has been said once.
            assert product(tf.matmul(a, a)).dtype == tf.float32


@eager_and_traced
@pytest.mark.parametrize("signature", [True, False])
def test_a_loaded_function_warns_that_it_stays_float32(a, tmp_path, run, signature):
    module = tf.Module()
    module.product = tf.function(
        lambda x: {"y": tf.matmul(x, x)}, input_signature=[tf.TensorSpec((4, 4), name="x")]
    )
    tf.saved_model.save(module, str(tmp_path), signatures=module.product)
    loaded = tf.saved_model.load(str(tmp_path))
    call = loaded.signatures["serving_default"] if signature else loaded.product
    call(x=a)
    with tfamp.autocast("bfloat16"), pytest.warns(tfamp.TfampWarning, match="finished graph"):
        assert run(lambda x: call(x=x))(a)["y"].dtype == tf.float32


def test_finished_graphs_that_autocast_would_leave_alone_do_not_warn(a):
    softmax = tf.function(tf.nn.softmax).get_concrete_function(a)
    rewritten = tfamp.rewrite(lambda x: tf.matmul(x, x), dtype="bfloat16", placement="lists")
    low = rewritten.concrete(a)
    assert op_dtypes(rewritten, a)["MatMul"] == {"bfloat16"}
    with tfamp.autocast("bfloat16"), warnings.catch_warnings():
        warnings.simplefilter("error")
        assert softmax(a).dtype == tf.float32
        assert low(a).dtype == tf.float32
        with tfamp.autocast(enabled=False):
            tf.function(lambda x: tf.matmul(x, x)).get_concrete_function(a)(a)


def test_compiled_by_xla(a):
    v = tf.Variable(a)

    @tfamp.autocast("bfloat16")
    @tf.function(jit_compile=True)
    def step(x):
        with tf.GradientTape() as tape:
            product = tf.matmul(x, v)
            loss = tf.reduce_sum(product)
        return product, tape.gradient(loss, v)

    product, gradient = step(a)
    assert (product.dtype, gradient.dtype) == (tf.bfloat16, tf.float32)
    assert_close(product, tf.matmul(a, a), "bfloat16", depth=4)


def test_tf_data_map_vectorized_map_and_functions_run_eagerly_inside(a):
    dataset = tf.data.Dataset.from_tensors(a)
    with tfamp.autocast("bfloat16"):
        low = dataset.map(lambda x: tf.matmul(x, x))
        assert tf.vectorized_map(lambda row: tf.linalg.matvec(a, row), a).dtype == tf.bfloat16
        tf.config.run_functions_eagerly(True)
        assert tf.function(lambda x: tf.matmul(x, x))(a).dtype == tf.bfloat16
        tf.config.run_functions_eagerly(False)
    assert next(iter(low)).dtype == tf.bfloat16
    assert next(iter(dataset.map(lambda x: tf.matmul(x, x)))).dtype == tf.float32


# ---- Control flow --------------------------------------------------------------------------------


def products(x):
    return tf.matmul(x, x)


CONTROL_FLOW = {
    "while_loop": lambda x: tf.while_loop(
        lambda i, x: i < 3, lambda i, x: (i + 1, products(x)), (0, x)
    )[1],
    "while_loop of one variable": lambda x: tf.while_loop(
        lambda x: tf.reduce_max(x) < -9.0, products, [x]
    )[0],
    "while_loop with a limit": lambda x: tf.while_loop(
        lambda x: True, lambda x: [products(x)], [x], maximum_iterations=2
    )[0],
    "map_fn": lambda x: tf.map_fn(lambda row: tf.linalg.matvec(x, row), x),
    "scan": lambda x: tf.scan(lambda state, row: tf.linalg.matvec(x, row) + state, x),
    "TensorArray": lambda x: (
        tf.TensorArray(tf.float32, 2).write(0, products(x)).write(1, x).stack()
    ),
    "TensorArray.unstack": lambda x: tf.TensorArray(tf.float32, 4).unstack(products(x)).stack(),
}


@both_dtypes
@pytest.mark.parametrize("name", one_in(3, CONTROL_FLOW))
def test_loops_keep_the_dtype_of_their_variables(a, dtype, name):
    body = CONTROL_FLOW[name]
    expected, traced = body(a), tf.function(body)
    with tfamp.autocast(dtype):
        assert_computes_in(dtype, traced, a)
        for found in (body(a), traced(a)):
            assert found.dtype == tf.float32
            assert_close(found, expected, dtype, depth=64)


@pytest.mark.parametrize("first", [True, False])
def test_branches_meet_in_the_widest_dtype(a, first):
    p = tf.constant(first)

    @tf.function
    @tfamp.autocast("bfloat16")
    def branches(p, x):
        i = tf.cast(p, tf.int32)
        return {
            "one low": tf.cond(p, lambda: products(x), lambda: x),
            "both low": tf.cond(p, lambda: products(x), lambda: products(x + 1.0)),
            "asked for": tf.cond(p, lambda: tf.cast(x, "bfloat16"), lambda: tf.cast(x, "bfloat16")),
            "switch": tf.switch_case(i, [lambda: x, lambda: products(x), lambda: products(x)]),
            "case": tf.case([(p, lambda: products(x))], default=lambda: x),
            "nested": tf.cond(p, lambda: (x, [products(x)]), lambda: (x, [x]))[1][0],
        }

    wide = {"one low", "switch", "case", "nested"}
    found = branches(p, a)
    assert {k for k, v in found.items() if v.dtype == tf.float32} == wide
    assert_close(found["one low"], products(a) if first else a, "bfloat16", depth=4)


@both_dtypes
def test_python_control_flow_in_a_decorated_function(a, dtype):
    @tf.function
    @tfamp.autocast(dtype)
    def work(x, n):
        y = x
        for i in tf.range(n):
            if i % 2 == 0:  # noqa: SIM108 - AutoGraph makes a tf.cond of the statement
                y = products(y)
            else:
                y = y + x
            if tf.reduce_sum(y) > 1e9:
                break
        while tf.reduce_max(y) > 1e9:
            y = products(y)
        return y

    expected = products(products(a) + a)
    found = work(a, tf.constant(3))
    assert found.dtype == tf.float32
    assert_close(found, expected, dtype, depth=64)


@pytest.mark.parametrize("name", first_of(["LSTM", "GRU", "Bidirectional"]))
def test_recurrent_layers_train(name):
    layer = keras.layers.GRU(4) if name == "GRU" else keras.layers.LSTM(4)
    layer = keras.layers.Bidirectional(layer) if name == "Bidirectional" else layer
    x = tf.constant(np.random.default_rng(0).uniform(-1, 1, (2, 5, 3)), tf.float32)
    expected = layer(x)

    @tf.function
    def step(x):
        with tfamp.autocast("bfloat16"), tf.GradientTape() as tape:
            out = layer(x)
            loss = tf.reduce_sum(out)
        return out, tape.gradient(loss, [v.value for v in layer.trainable_variables])

    out, gradients = step(x)
    assert all(g.dtype == tf.float32 for g in gradients)
    assert "bfloat16" in op_dtypes(step, x)["MatMul"]
    assert_close(out, expected, "bfloat16", depth=32)


# ---- Choices of the user -------------------------------------------------------------------------


@both_dtypes
@eager_and_traced
def test_a_cast_the_user_wrote_is_respected(a, dtype, run):
    other = "bfloat16" if dtype == "float16" else "float16"

    @run
    def work(x):
        low = tf.matmul(x, x)
        up = tf.cast(low, tf.float32)
        keras_up = keras.ops.cast(low, "float32")
        return (
            tf.matmul(up, up),
            tf.matmul(keras_up, x),
            tf.exp(tf.cast(x, dtype)),
            tf.matmul(tf.cast(x, other), x),
        )

    with tfamp.autocast(dtype):
        dtypes = [result.dtype.name for result in work(a)]
    assert dtypes == ["float32", "float32", dtype, other]


@eager_and_traced
def test_other_kinds_of_tensors_are_untouched(a, run):
    @run
    def work(wide, whole):
        with tfamp.autocast("bfloat16"):
            return (
                *(tf.matmul(each, each) for each in (wide, tf.cast(wide, tf.complex64), whole)),
                *(tf.reduce_sum(wide), whole + whole, whole > 0, tf.strings.as_string(whole)),
                (tf.ragged.constant([[1.0], [2.0, 3.0]]) * 2.0).flat_values,
                tf.sparse.from_dense(tf.cast(wide, tf.float32)).values,
            )

    found = work(tf.cast(a, tf.float64), tf.ones((4, 4), tf.int32))
    expected = "float64 complex64 int32 float64 int32 bool string float32 float32"
    assert [each.dtype.name for each in found] == expected.split()
    wide = tf.cast(a, tf.float64)
    for context in (contextlib.nullcontext(), tfamp.autocast("bfloat16")):
        with context, pytest.raises((tf.errors.InvalidArgumentError, TypeError), match="double"):
            tf.raw_ops.MatMul(a=a, b=wide)  # Fails as without autocast.


def test_custom_lists(a):
    lists = tfamp.OpLists.default("bfloat16").with_changes(
        allow_add=["Tanh"], deny_add=["MatMul"], infer_add=["Exp"]
    )
    with tfamp.autocast("bfloat16", op_lists=lists):
        assert tf.tanh(a).dtype == tf.bfloat16
        assert matmul_dtype(a) == "float32"
        assert matmul_dtype(tf.tanh(a)) == "float32"
        assert tf.exp(tf.tanh(a)).dtype == tf.bfloat16
        assert tf.exp(a).dtype == tf.float32


def test_a_variable_keeps_its_dtype_whatever_is_assigned(a):
    v, low_v = tf.Variable(a), tf.Variable(tf.cast(a, tf.bfloat16))
    k = keras.Variable(a.numpy())
    with tfamp.autocast("bfloat16"):
        low = tf.matmul(a, a)
        for variable in (v, low_v, k):
            variable.assign(low)
            variable.assign_add(low)
        assert tf.Variable(low).dtype == tf.bfloat16
        assert tf.Variable(low, dtype=tf.float32).dtype == tf.float32
    assert (v.dtype, low_v.dtype, k.dtype) == (tf.float32, tf.bfloat16, "float32")


@pytest.mark.parametrize("dilations", [[1, np.int64(1), np.int64(1), 1], np.ones(4, "int32")])
def test_attributes_the_fast_path_does_not_take_do_not_lose_the_inputs(dilations):
    with tfamp.autocast("bfloat16"):
        result = tf.raw_ops.Conv2D(
            input=tf.ones((1, 1, 1, 1)),
            filter=tf.ones((1, 1, 1, 1)),
            strides=[1, 1, 1, 1],
            padding="SAME",
            dilations=list(dilations),
        )
    assert result.dtype == tf.bfloat16
    assert float(tf.squeeze(result)) == 1.0


# ---- float16 on a CPU that has none --------------------------------------------------------------


@pytest.mark.parametrize("library", [tf, keras.ops], ids=["tensorflow", "keras"])
@pytest.mark.parametrize("traced", [False, True], ids=["eager", "function"])
def test_a_cast_to_the_dtype_a_tensor_has_is_respected(library, traced):
    def products(x):
        with tfamp.autocast("bfloat16"):
            return library.cast(x, "float32") @ x, x @ x

    products = tf.function(products) if traced else products
    kept, plain = products(tf.random.normal((4, 4)))
    assert (kept.dtype, plain.dtype) == (tf.float32, tf.bfloat16)


NORMS = {
    "norm": tf.norm,
    "norm of rows": lambda x: tf.norm(x, axis=-1),
    "l2_normalize": lambda x: tf.math.l2_normalize(x, axis=-1),
    "clip_by_norm": lambda x: tf.clip_by_norm(x, 1.0),
}


@pytest.mark.parametrize("function", NORMS.values(), ids=NORMS)
@pytest.mark.parametrize("size", [300.0, 1e-4])
def test_norms_square_in_float32(function, size):
    # In float16 the square of 300 is inf and the square of 1e-4 is 0.
    with tfamp.autocast("float16"):
        low = tf.matmul(tf.fill((4, 4), size / 4), tf.ones((4, 4)))
        result = function(low)
    assert (low.dtype, result.dtype) == (tf.float16, tf.float32)
    np.testing.assert_allclose(result, function(tf.cast(low, tf.float32)), rtol=1e-6)
