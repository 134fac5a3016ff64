"""`tfamp.rewrite`: signatures, traces, state, errors and gradients."""

import gc
import sys
import warnings
from collections import Counter

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp
from helpers.cases import first_of, one_of_each
from helpers.graph_asserts import assert_computes_in, op_dtypes
from helpers.tolerances import assert_close
from tfamp.machine import hardware

DTYPES = ["float16", "bfloat16"]
WIDTH = 8


@pytest.fixture
def weights():
    random = np.random.default_rng(1)
    kernel = random.standard_normal((WIDTH, WIDTH)) / np.sqrt(WIDTH)
    return tf.Variable(kernel.astype("float32"))


@pytest.fixture
def x():
    return tf.constant(np.random.default_rng(2).standard_normal((4, WIDTH)).astype("float32"))


@pytest.mark.parametrize("dtype", DTYPES)
class TestKindsOfFunctions:
    def _check(self, fast, reference, dtype, x):
        assert_computes_in(dtype, fast.concrete(x))
        result = fast(x)
        assert result.dtype == tf.float32
        assert_close(result, reference, dtype, depth=WIDTH)

    def test_decorator(self, dtype, weights, x):
        @tfamp.rewrite(dtype=dtype)
        def layer(x):
            """A layer."""
            return x @ weights

        assert (layer.__name__, layer.__doc__) == ("layer", "A layer.")
        self._check(layer, x @ weights, dtype, x)

    def test_tf_function_keeps_its_options_and_a_concrete_one_is_taken(self, dtype, weights, x):
        @tf.function(input_signature=[tf.TensorSpec((None, WIDTH))], autograph=False)
        def layer(x):
            return x @ weights

        fast = tfamp.rewrite(layer, dtype=dtype)
        self._check(fast, x @ weights, dtype, x)
        fast(x[:1])
        assert fast.experimental_get_tracing_count() == 1
        function = layer.get_concrete_function()
        concrete = tfamp.rewrite(function, dtype=dtype, example_args=(x,))
        assert concrete.experimental_get_tracing_count() == 1
        self._check(concrete, x @ weights, dtype, x)

    def test_called_from_a_function_and_from_another_rewritten_one(self, dtype, weights, x):
        inner = tfamp.rewrite(lambda x: x @ weights, dtype=dtype)
        outer = tf.function(lambda x: inner(x) + 1.0)
        assert_computes_in(dtype, outer, x)
        assert_close(outer(x), x @ weights + 1.0, dtype, depth=WIDTH)
        both = tfamp.rewrite(lambda x: inner(x) @ weights, dtype=dtype)
        assert_computes_in(dtype, both.concrete(x))
        assert_close(both(x), x @ weights @ weights, dtype, depth=WIDTH)


class TestArguments:
    def test_nested_keyword_default_and_python_arguments(self, weights, x):
        def fn(batch, scale=2.0, *, key="y", extra=None):
            y = batch["x"][0] @ weights
            return {key: y * scale, "given": extra, "none": None, "number": 3}

        fast = tfamp.rewrite(fn, dtype="bfloat16")
        result = fast({"x": [x]})
        assert result["given"] is None
        assert result["none"] is None
        assert int(result["number"]) == 3
        assert_close(result["y"], 2 * (x @ weights), "bfloat16", depth=WIDTH)
        other = fast({"x": [x]}, 3.0, key="z", extra=tf.constant([1, 2]))
        assert other["given"].numpy().tolist() == [1, 2]
        assert_close(other["z"], 3 * (x @ weights), "bfloat16", depth=WIDTH)

    def test_unknown_shapes_are_taken_and_other_dtypes_are_not_touched(self, weights, x):
        def fn(x, wide, whole, flag, name):
            y = tf.reshape(x, (-1, WIDTH)) @ weights
            return wide @ wide, whole + 1, flag, tf.strings.join([name, "!"]), y

        given = (tf.ones((2, 2), tf.float64), tf.constant(1), tf.constant(True), tf.constant("a"))
        concrete = tfamp.rewrite(fn, dtype="bfloat16").concrete(tf.TensorSpec(None), *given)
        assert op_dtypes(concrete)["MatMul"] == {"bfloat16", "float64"}
        results = concrete(x, *given)
        found = " ".join(each.dtype.name for each in results)
        assert found == "float64 int32 bool string float32"
        assert results[0].numpy().tolist() == [[2.0, 2.0], [2.0, 2.0]]
        assert_close(results[-1], x @ weights, "bfloat16", depth=WIDTH)

    def test_structures_come_back_as_they_are(self, weights):
        ragged = tf.ragged.constant([[1.0, 2.0], [3.0]])

        def fn(ragged):
            slices = tf.IndexedSlices(weights[:1] @ weights, tf.constant([4]))
            return ragged * 2.0, [tf.sparse.from_dense([[0.0, 1.0]]), (slices,)], "text"

        doubled, (sparse, (slices,)), text = tfamp.rewrite(fn, dtype="bfloat16")(ragged)
        assert doubled.to_list() == [[2.0, 4.0], [6.0]]
        assert isinstance(sparse, tf.SparseTensor)
        assert slices.indices.numpy().tolist() == [4]
        assert text.numpy() == b"text"

    def test_each_kind_of_argument_has_its_trace_and_plan(self, weights):
        fast = tfamp.rewrite(lambda x, power: tf.linalg.matmul(x, weights) * power, dtype="float16")
        fast(tf.ones((1, WIDTH)), 1.0)
        fast(tf.ones((2, WIDTH)), 1.0)
        fast(tf.ones((2, WIDTH)), 3.0)
        assert fast.experimental_get_tracing_count() == 3
        fast.plan(tf.ones((2, WIDTH)), 3.0)
        assert fast.experimental_get_tracing_count() == 3

    def test_autograph_is_applied_as_by_tf_function(self, weights, x):
        def fn(x, flag):
            if flag:
                for _ in tf.range(2):
                    x = x @ weights
            return x

        fast = tfamp.rewrite(fn, dtype="bfloat16")
        assert_close(fast(x, tf.constant(True)), x @ weights @ weights, "bfloat16", depth=WIDTH)
        assert fast(x, tf.constant(False)).numpy().tolist() == x.numpy().tolist()
        assert "bfloat16" in op_dtypes(fast.concrete(x, tf.constant(True)))["MatMul"]


class TestState:
    def test_side_effects_keep_their_order(self, weights, x):
        count = tf.Variable(1.0)

        @tf.function
        def add(amount):
            count.assign_add(amount)
            return count.read_value()

        @tfamp.rewrite(dtype="bfloat16")
        def fn(x):
            before = count.read_value()
            after = add(1.0)
            count.assign(count * 3.0)
            return before, after, add(2.0), x @ weights

        assert [float(each) for each in fn(x)[:3]] == [1.0, 2.0, 8.0]
        assert float(count) == 8.0
        assert [float(each) for each in fn(x)[:3]] == [8.0, 9.0, 29.0]


class TestChoices:
    def test_branches_bodies_and_calls_are_reached_by_the_names_of_their_callers(self, weights, x):
        @tf.function(experimental_attributes={"_noinline": True})
        def apart(x):
            return tf.exp(x @ weights)

        @tf.function
        def branches(x):
            return tf.cond(x[0, 0] > 0.0, lambda: tf.exp(x @ weights), lambda: x @ weights)

        def fn(x):
            with tf.name_scope("gate"):
                x = apart(branches(x))
            with tf.name_scope("rounds"):
                body = lambda i, y: (i + 1, branches(y))  # noqa: E731
                x = tf.while_loop(lambda i, _: i < 2, body, [0, x])[1]
            return tf.reduce_sum(x @ weights)

        def dtypes(op, **choices):
            fast = tfamp.rewrite(fn, dtype="bfloat16", placement="lists", **choices)
            return Counter(node.dtype for node in fast.plan(x).nodes if node.op == op)

        with warnings.catch_warnings():
            warnings.simplefilter("error", tfamp.TfampWarning)
            assert dtypes("MatMul") == {"bfloat16": 6}
            assert dtypes("MatMul", keep_float32=["^gate/"]) == {"float32": 3, "bfloat16": 3}
            for kept in ("gate/.*cond/", "rounds/while/.*/cond/matmul$"):
                assert dtypes("MatMul", keep_float32=[kept]) == {"float32": 2, "bfloat16": 4}
            assert dtypes("Exp", force_low=["^rounds/"]) == {"bfloat16": 1, "float32": 2}
            kept_and_forced = {"keep_float32": ["gate/.*cond/Exp"], "force_low": ["Exp"]}
            assert dtypes("Exp", **kept_and_forced) == {"bfloat16": 2, "float32": 1}
        for choices, message in (
            # The conditional itself is float32 in any case: its branches have longer names.
            ({"keep_float32": ["gate/.*cond$"]}, r"gate/.*cond.* has no effect: .*cond/matmul"),
            ({"keep_float32": ["^gate/", "Exp"]}, "keep_float32: 'Exp' has no effect: without it"),
            ({"force_low": ["Variable"]}, "force_low: 'Variable' has no effect.*a resource"),
        ):
            with pytest.warns(tfamp.TfampWarning, match=message) as warned:
                dtypes("MatMul", **choices)
            assert len(warned) == 1

    def test_lists_can_be_given(self, weights, x):
        lists = tfamp.OpLists.default("bfloat16").with_changes(deny_add=["MatMul"])
        with pytest.warns(tfamp.NothingConvertedWarning, match="no op that can be converted"):
            tfamp.rewrite(lambda x: x @ weights, dtype="bfloat16", op_lists=lists)(x)

    def test_without_a_dtype_that_the_machine_multiplies_nothing_is_converted(
        self, weights, x, monkeypatch
    ):
        machine = hardware.Hardware("", cpu_bfloat16=False, cpu_float16=False, gpus=(), tpu=False)
        monkeypatch.setattr(hardware, "detect", lambda: machine)
        with pytest.warns(tfamp.NothingConvertedWarning, match="neither float16 nor bfloat16"):
            fast = tfamp.rewrite(lambda x: x @ weights, dtype="auto")
        assert fast.dtype is None
        assert_close(fast(x), x @ weights, "float32", depth=WIDTH)
        with pytest.raises(tfamp.RewriteError, match="it runs in float32"):
            fast.plan(x)
        for dtype in (tf.bfloat16, np.float16):
            assert tfamp.rewrite(lambda x: x, dtype=dtype).dtype == tf.as_dtype(dtype).name

    @pytest.mark.parametrize(
        ("choices", "error", "match"),
        [
            ({"dtype": "float32"}, ValueError, "dtype must be one of float16, bfloat16, auto"),
            ({"dtype": "bfloat16", "on_error": "ignore"}, ValueError, "on_error must be one of"),
            ({"dtype": "bfloat16", "keep_float32": "x"}, TypeError, "keep_float32 must be"),
            ({"example_args": 3}, TypeError, "example_args must be a list or tuple .* got int"),
        ],
    )
    def test_wrong_arguments_are_refused_before_any_call(self, choices, error, match):
        with pytest.raises(error, match=match):
            tfamp.rewrite(lambda x: x, **choices)

    def test_what_is_no_function_and_a_name_that_matches_nothing_are_refused(self, weights, x):
        with pytest.raises(TypeError, match="takes a tf.function, a concrete function"):
            tfamp.rewrite(3, dtype="bfloat16")
        with pytest.raises(TypeError, match="got the class Dense"):
            tfamp.rewrite(keras.layers.Dense, dtype="bfloat16")

        fast = tfamp.rewrite(lambda x: x @ weights, dtype="bfloat16", keep_float32=["logits"])
        with pytest.raises(ValueError, match="no node's name matches 'logits'"):
            fast(x)


def test_large_values_stay_float32_and_the_number_is_told(weights, x):
    """They are found by running the function on data."""

    def fn(x):
        with tf.name_scope("large"):
            large = (1e4 * x) @ weights
        with tf.name_scope("small"):
            return (1e-4 * large) @ weights

    fast = tfamp.rewrite(fn, dtype="float16", calibration=[x.numpy(), (x,), {"x": x}])
    plan = {node.name: node for node in fast.plan(x).nodes}
    assert plan["large/matmul"].dtype == "float32"
    assert plan["large/matmul"].reason.rule == "calibration"
    largest = float(tf.reduce_max(tf.abs((1e4 * x) @ weights)))
    assert f"{largest:g}" in plan["large/matmul"].reason.text
    assert plan["small/matmul"].dtype == "float16"
    assert_close(fast(x), fn(x), "float16", depth=WIDTH)


class TestErrors:
    @pytest.fixture
    def broken(self, monkeypatch):
        def fail(*args, **kwargs):
            raise tfamp.RewriteError("Node 'a' (MatMul): it is broken.")

        monkeypatch.setattr("tfamp.rewriting.pipeline.carry_out", fail)

    def test_raise_raises_and_keep_warns_and_runs_float32(self, broken, weights, x):
        with pytest.raises(tfamp.RewriteError, match="Node 'a'"):
            tfamp.rewrite(lambda x: x @ weights, dtype="bfloat16")(x)
        fast = tfamp.rewrite(lambda x: x @ weights, dtype="bfloat16", on_error="keep")
        with pytest.warns(tfamp.TfampWarning, match="stays in float32: Node 'a'"):
            result = fast(x)
        assert_computes_in("float32", fast.concrete(x))
        assert_close(result, x @ weights, "float32", depth=WIDTH)
        with pytest.raises(tfamp.RewriteError, match="was not rewritten"):
            fast.plan(x)

    def test_errors_of_the_function_itself_come_through(self, x):
        def fn(x):
            raise KeyError("mine")

        with pytest.raises(KeyError, match="mine"):
            tfamp.rewrite(fn, dtype="bfloat16", on_error="keep")(x)


# ---- Gradients, also of functions with a gradient of their own -----------------------------------


def gradients(fn, x, variables):
    with tf.GradientTape() as tape:
        tape.watch(x)
        loss = tf.reduce_sum(fn(x) ** 2)
    return tape.gradient(loss, [x, *variables])


def check(fn, x, variables, dtype, depth=WIDTH):
    """Values and gradients of a function agree with those of its rewritten self."""
    fast = tfamp.rewrite(fn, dtype=dtype)
    assert_computes_in(dtype, fast.concrete(x))
    assert_close(fast(x), fn(x), dtype, depth=depth)
    mine, expected = gradients(fast, x, variables), gradients(fn, x, variables)
    for one, other in zip(mine, expected, strict=True):
        assert one.dtype == other.dtype == tf.float32
        assert_close(tf.convert_to_tensor(one), other, dtype, depth=4 * depth)


@tf.custom_gradient
def softplus_times_three(x):
    """The gradient is three times softplus's, so that a lost custom gradient is seen."""
    exponential = tf.exp(x)

    def gradient(upstream):
        return 3.0 * upstream * (1.0 - 1.0 / (1.0 + exponential))

    return tf.math.log1p(exponential), gradient


def loop_with_tensor_array(x, weights):
    def body(i, h, states):
        h = tf.tanh(h @ weights)
        return i + 1, h, states.write(i, h)

    start = (0, x, tf.TensorArray(tf.float32, 3))
    return tf.while_loop(lambda i, *_: i < 3, body, start)[2].stack()


def compiled_inside_and_in_a_loop(x, weights):
    inner = tf.function(lambda x: tf.tanh(x @ weights), jit_compile=True)
    return 2.0 * tf.while_loop(lambda i, _: i < 2, lambda i, x: (i + 1, inner(x)), (0, inner(x)))[1]


def a_function_with_a_loop_called_twice(x, weights):
    @tf.function
    def inner(x):
        states = tf.TensorArray(tf.float32, 2)

        def body(i, x, states):
            x = tf.tanh(x @ weights)
            return i + 1, x, states.write(i, x)

        found = tf.while_loop(lambda i, *_: i < 2, body, (0, x, states))
        return found[1], tf.reduce_sum(found[2].stack(), 0)

    return inner(inner(x)[0])[1]


def calls_that_stay_calls_with_a_loop_that_reads_a_variable(x, weights):
    @tf.function(experimental_attributes={"_noinline": True})
    def inner(x, y):
        rows = tf.map_fn(lambda row: tf.tanh(tf.linalg.matvec(weights, row)), x)
        return rows + y, tf.reduce_sum(y)

    once, _ = inner(x, x)
    twice, total = inner(x, once)
    return twice + total


def custom_gradient_in_nested_functions(x, weights):
    inner = tf.function(softplus_times_three)
    outer = tf.function(lambda x: inner(x @ weights) + inner(x))
    return outer(x) * 2.0


def custom_gradient_in_a_loop(x, weights):
    def body(i, x):
        return i + 1, 0.2 * softplus_times_three(x @ weights)

    return tf.while_loop(lambda i, _: i < 2, body, (0, x))[1]


def custom_gradient_of_variables(x, weights):
    @tf.custom_gradient
    def layer(x):
        def gradient(upstream, variables=None):
            (kernel,) = variables
            to_x = upstream @ tf.transpose(kernel)
            return to_x, [2.0 * tf.transpose(x) @ upstream]

        return x @ weights, gradient

    return tf.tanh(layer(x))


def custom_gradient_over_tensors_of_the_caller(x, weights):
    scale = tf.reduce_mean(tf.abs(x))

    @tf.custom_gradient
    def scaled(x):
        return x * scale, lambda upstream: upstream * scale * 2.0

    return tf.function(scaled)(x @ weights)


@tf.custom_gradient
def thrice_the_gradient_of_a_square(x):
    return x * x, lambda upstream: 6.0 * upstream * x


def custom_gradients_of_results_of_calls(x, weights):
    product = tf.function(lambda x: x @ weights)
    both = tf.function(lambda x: (x, product(x)))
    square = thrice_the_gradient_of_a_square
    squared = tf.function(lambda x: square(product(x)))

    def body(i, x):
        return i + 1, 0.2 * square(product(x))

    looped = tf.while_loop(lambda i, _: i < 2, body, (0, x))[1]
    same, result = both(x)
    return square(same) + square(result) + squared(x) + looped


def recomputed(x, weights):
    block = tf.recompute_grad(lambda x: tf.tanh(x @ weights))
    return block(block(x))


def activation_with_a_custom_gradient(x, weights):
    return tf.nn.silu(x @ weights)


# How many values are added up on the way, in widths.
FUNCTIONS = {
    loop_with_tensor_array: 4,
    custom_gradient_in_a_loop: 4,
    custom_gradient_of_variables: 1,
    activation_with_a_custom_gradient: 1,
    a_function_with_a_loop_called_twice: 8,
    compiled_inside_and_in_a_loop: 3,
    custom_gradient_in_nested_functions: 1,
    calls_that_stay_calls_with_a_loop_that_reads_a_variable: 8,
    recomputed: 2,
    custom_gradient_over_tensors_of_the_caller: 1,
    custom_gradients_of_results_of_calls: 4,
}


@pytest.mark.parametrize(("fn", "dtype"), one_of_each(FUNCTIONS, DTYPES, quick=4))
def test_values_and_gradients(fn, dtype, weights, x):
    check(lambda x: fn(x, weights), x, [weights], dtype, depth=FUNCTIONS[fn] * WIDTH)


@pytest.mark.parametrize("dtype", first_of(DTYPES))
def test_compiled_as_a_whole(dtype, weights, x):
    fn = tf.function(lambda x: tf.nn.relu(x @ weights) @ weights, jit_compile=True)
    check(fn, x, [weights], dtype)
    assert tfamp.rewrite(fn, dtype=dtype).concrete(x).function_def.attr["_XlaMustCompile"].b


@pytest.mark.parametrize("dtype", first_of(DTYPES))
def test_embedding(dtype, weights):
    table = tf.Variable(tf.reshape(tf.range(40.0) / 40.0, (5, WIDTH)))
    fn = tf.function(lambda ids: tf.nn.embedding_lookup(table, ids) @ weights)
    fast = tfamp.rewrite(fn, dtype=dtype)
    ids = tf.constant([3, 1, 3])
    assert_computes_in(dtype, fast.concrete(ids))
    with tf.GradientTape(persistent=True) as tape:
        mine, other = tf.reduce_sum(fast(ids)), tf.reduce_sum(fn(ids))
    gradient, expected = tape.gradient(mine, table), tape.gradient(other, table)
    assert isinstance(gradient, tf.IndexedSlices)
    assert gradient.indices.numpy().tolist() == expected.indices.numpy().tolist()
    assert_close(gradient.values, expected.values, dtype, depth=WIDTH)


@tf.custom_gradient
def slope_of_tanh(x):
    slope = 1 - tf.tanh(x) ** 2
    return slope, lambda upstream: -2 * upstream * tf.tanh(x) * slope


@tf.custom_gradient
def tanh_with_a_slope_of_its_own(x):
    return tf.tanh(x), lambda upstream: upstream * slope_of_tanh(x)


def _once(x, weights):
    return tanh_with_a_slope_of_its_own(x @ weights * 0.5)


def _twice(x, weights):
    return _once(_once(x, weights), weights)


@pytest.mark.parametrize("fn", [_once, _twice])
@pytest.mark.parametrize("dtype", first_of(DTYPES))
def test_custom_gradients_that_have_one_of_their_own_are_differentiated_twice(
    fn, dtype, weights, x
):
    def twice(fn):
        with tf.GradientTape() as outer:
            outer.watch(x)
            first = gradients(fn, x, [weights])[0]
            norm = tf.reduce_sum(first**2)
        return first, *outer.gradient(norm, [x, weights])

    fast = tfamp.rewrite(lambda x: fn(x, weights), dtype=dtype)
    assert_computes_in(dtype, fast.concrete(x))
    expected = twice(lambda x: fn(x, weights))
    for found in (twice(fast), tf.function(lambda: twice(fast))()):
        for one, other in zip(found, expected, strict=True):
            assert_close(one, other, dtype, depth=4 * WIDTH)


@pytest.mark.parametrize("dtype", first_of(DTYPES))
def test_tapes_around_it_in_a_function_and_inside_and_second_order(dtype, weights, x):
    def fn(x):
        return tf.tanh(x @ weights)

    def penalty(fn):
        with tf.GradientTape() as outer:
            with tf.GradientTape() as tape:
                tape.watch(x)
                value = tf.reduce_sum(fn(x))
            norm = tf.reduce_sum(tape.gradient(value, x) ** 2)
        return outer.gradient(norm, weights)

    fast = tfamp.rewrite(fn, dtype=dtype)
    assert_computes_in(dtype, fast.concrete(x))
    expected = gradients(fn, x, [weights])
    around = tf.function(lambda x: gradients(fast, x, [weights]))
    inside = tfamp.rewrite(lambda x: gradients(fn, x, [weights]), dtype=dtype)
    assert_computes_in(dtype, inside.concrete(x))
    for found in (around(x), inside(x)):
        for one, other in zip(found, expected, strict=True):
            assert_close(one, other, dtype, depth=4 * WIDTH)
    assert_close(penalty(fast), penalty(fn), dtype, depth=4 * WIDTH)


def test_a_closure_that_cannot_be_followed_is_named(weights, x):
    """Two levels up: neither the function of the node nor the one that is rewritten."""

    @tf.function
    def middle(x):
        scale = tf.reduce_mean(x)

        @tf.function
        def inner(x):
            @tf.custom_gradient
            def scaled(x):
                return x + 0.0, lambda upstream: upstream * scale

            return scaled(x @ weights)

        return inner(x)

    fast = tfamp.rewrite(lambda x: middle(x), dtype="bfloat16")
    assert_close(fast(x), x @ weights, "bfloat16", depth=WIDTH)
    with pytest.raises(tfamp.RewriteError, match="Pass it to the function with the custom"):
        gradients(fast, x, [weights])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", first_of(DTYPES))
def test_second_derivatives_go_through_a_loop_and_through_two(dtype, weights, x):
    def repeat(body):
        return lambda x: tf.while_loop(lambda i, _: i < 2, lambda i, x: (i + 1, body(x)), (0, x))[1]

    nested = repeat(repeat(lambda x: tf.tanh(x @ weights)))

    def penalty(fn):
        with tf.GradientTape() as outer:
            to_x = gradients(fn, x, [])[0]
            norm = tf.reduce_sum(to_x**2)
        return outer.gradient(norm, weights)

    check(nested, x, [weights], dtype, depth=4 * WIDTH)
    one = repeat(lambda x: tf.tanh(x @ weights))
    second = penalty(tfamp.rewrite(one, dtype=dtype))
    assert_close(second, penalty(tf.function(one)), dtype, depth=16 * WIDTH)
    second = penalty(tfamp.rewrite(nested, dtype=dtype))
    assert_close(second, penalty(tf.function(nested)), dtype, depth=64 * WIDTH)
    # The tapes inside.
    inside = tfamp.rewrite(lambda: penalty(nested), dtype=dtype)
    assert_close(inside(), penalty(tf.function(nested)), dtype, depth=16 * WIDTH)


def test_nothing_is_collected_while_the_new_graph_is_made(weights, x):
    """A collection would go through the model and the trace, again for every few nodes."""

    def step(x):
        for _ in range(20):
            x = tf.nn.relu(x @ weights)
        return x

    def stages():
        frame = sys._getframe(1)
        while frame is not None:
            yield frame.f_code.co_name
            frame = frame.f_back

    where = Counter()
    thresholds = gc.get_threshold()
    fast = tfamp.rewrite(step, dtype="bfloat16", placement="lists")
    note = lambda phase, info: where.update(set(stages()) if phase == "start" else ())  # noqa: E731
    gc.callbacks.append(note)
    gc.set_threshold(50)
    try:
        concrete = fast.concrete(x)
    finally:
        gc.callbacks.remove(note)
        gc.set_threshold(*thresholds)
    assert gc.isenabled()
    assert where["call_converted"] > 0  # The trace itself runs as anywhere else.
    assert where["import_graph_def"] == where["guard_gradients"] == 0
    assert_close(concrete(x), step(x), "bfloat16", depth=20 * WIDTH)
