"""`tfamp.rewrite`: signatures, traces, state and errors."""

import warnings
from collections import Counter

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp
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

        monkeypatch.setattr("tfamp.rewriting.pipeline.convert_prepared", fail)

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
