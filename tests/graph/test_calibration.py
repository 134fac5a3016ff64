"""Measuring a graph on data, and what a rewrite makes of it."""

import itertools
import warnings

import numpy as np
import pytest
import tensorflow as tf

import tfamp
from helpers import graph_models, loops
from helpers.tolerances import assert_close
from tfamp.graph import Calibration, RewriteResult
from tfamp.graph.calibration import measure
from tfamp.graph.graph import Graph
from tfamp.graph.rewrite import convert_graph, resolved
from tfamp.planning.options import GraphUse, RewriteOptions
from tfamp.planning.ranges import Limits


def names(tensors):
    return [each.name for each in tensors]


def measured(function, *batches):
    return measure(
        Graph(function.graph.as_graph_def()),
        names(function.inputs),
        batches,
        function.captured_inputs,
        names(function.outputs),
    )


def calibrated(function, ranges, dtype="float16", force_low=(), limits=None, **options):
    options = RewriteOptions(dtype, force_low=force_low, device="cpu", profile="builtin", **options)
    limits = limits or Limits.default(dtype)
    use = GraphUse(names(function.outputs), names(function.inputs), ranges, limits)
    graph = Graph(function.graph.as_graph_def(), use.names).inline_calls()
    return RewriteResult(graph.graph_def, convert_graph(graph, resolved(options), use))


def traced(function, *shapes):
    specs = [tf.TensorSpec(shape) for shape in shapes]
    return tf.function(function, autograph=False).get_concrete_function(*specs)


def largest(ranges, name):
    """Largest magnitude of the first output of every node of a name, in all scopes."""
    return max(found.max_abs for (_, node, _), found in ranges.items() if node == name)


def in_functions(ranges):
    return {scope for scope, _, _ in ranges if scope}


def filled(value, *shape):
    return np.full(shape, value, "float32")


def overflowing():
    """Its first product is 120,000 for ones, its second one is small again."""

    def function(x):
        big = tf.matmul(x, filled(3e4, 4, 4), name="big")
        return tf.matmul(tf.multiply(big, 1e-5, name="small"), x, name="last")

    return traced(function, (4, 4))


def test_a_large_value_stays_float32_with_its_number_and_the_result_is_finite():
    function = overflowing()
    x = tf.ones((4, 4))
    without = calibrated(function, None)
    assert not np.isfinite(graph_models.runnable(function, without.graph_def)(x)[0]).any()
    ranges = measured(function, (x,))
    result = calibrated(function, ranges)
    nodes = {node.name: node for node in result.plan.nodes}
    dtypes = [nodes[name].dtype for name in ("big", "small", "last")]
    assert dtypes == ["float32", "float32", "float16"]
    text = "a value of 120000 in its output exceeds data_max 512"
    assert (nodes["big"].reason.rule, nodes["big"].reason.text) == ("calibration", text)
    assert_close(graph_models.runnable(function, result.graph_def)(x)[0], function(x), "float16")

    def products(*args, **options):
        plan = calibrated(function, ranges, *args, **options).plan
        return [node.dtype for node in plan.nodes if node.op == "MatMul"]

    assert products("float16", ["^big$"]) == ["float16", "float16"]
    assert products("bfloat16") == ["bfloat16", "bfloat16"]
    limits = Calibration([1.0], data_max=1000).limits("bfloat16")
    assert products("bfloat16", limits=limits) == ["float32", "bfloat16"]


def test_values_in_a_loop_are_seen_over_all_iterations_and_the_graph_is_not_modified():
    graph_def = loops.loop_v2().graph.as_graph_def()
    before = graph_def.SerializeToString(deterministic=True)
    ranges = measure(Graph(graph_def), ["x:0"], [(3.0 * np.eye(4),)], (), ["Identity:0"])
    assert len(in_functions(ranges)) == 1
    assert largest(ranges, "while/matmul") == 81.0
    assert graph_def.SerializeToString(deterministic=True) == before
    with pytest.raises(tfamp.RewriteError, match="loop or a conditional of TensorFlow 1"):
        measure(Graph(loops.loop_v1()), ["x:0"], [(filled(1.0, 4, 4),)], (), ["out:0"])


def test_values_in_nested_functions_and_in_the_branch_that_was_taken_are_seen():
    ranges = measured(loops.nested_functions(), (2.0 * np.eye(4),))
    assert len(in_functions(ranges)) == 2
    ranges = measured(loops.conditional(), (2.0 * np.eye(4),))
    assert len(in_functions(ranges)) == 1
    both = measured(loops.conditional(), (2.0 * np.eye(4),), (-np.eye(4),))
    assert len(in_functions(both)) == 2


def test_a_compiled_function_in_the_body_of_a_loop_in_a_branch_is_seen():
    inner = tf.function(lambda y: tf.matmul(y, y, name="inner"), jit_compile=True)

    def looped(x):
        return tf.while_loop(lambda i, _: i < 2, lambda i, y: (i + 1, inner(y)), (0, x))[1]

    function = traced(lambda x: tf.cond(x[0, 0] > 0.0, lambda: looped(x), lambda: x), (4, 4))
    ranges = measured(function, (3.0 * np.eye(4),))
    assert largest(ranges, "inner") == 81.0


def test_measuring_while_a_function_is_traced_runs_then_and_there():
    function, found = overflowing(), []

    @tf.function(autograph=False)
    def tracing(x):
        found.append(measured(function, (np.ones((4, 4)),)))
        return x + 1.0

    assert tracing(tf.constant(1.0)).numpy() == 2.0
    assert largest(found[0], "big") == pytest.approx(1.2e5)
    ops = {
        node.op
        for node in tracing.get_concrete_function(tf.constant(1.0)).graph.as_graph_def().node
    }
    assert not any("Call" in op for op in ops)


def test_what_a_function_captures_is_given_be_it_a_resource_or_a_small_tensor():
    pairs = tf.lookup.KeyValueTensorInitializer(["a", "b"], [1.0, 2.0])
    table = tf.lookup.StaticHashTable(pairs, default_value=-5.0)
    words = tf.TensorSpec([None], tf.string)
    function = tf.function(lambda key: table.lookup(key) * 3.0).get_concrete_function(words)
    assert len(function.captured_inputs) == 2
    assert largest(measured(function, (["a", "c"],)), "mul") == 15.0
    indices = tf.TensorSpec((1,), tf.int32)
    function = tf.function(lambda i: tf.gather(filled(1, 4), i)).get_concrete_function(indices)
    assert largest(measured(function, (np.array([1]),)), "GatherV2") == 1.0
    with pytest.raises(ValueError, match=r"takes int32 of shape \(1,\); got float64"):
        measured(function, (np.array([1.5]),))


def test_negative_values_count_by_magnitude_and_empty_tensors_not_at_all():
    function = traced(lambda x: tf.identity(tf.nn.elu(-x) - 900.0), (None, 4))
    ranges = measured(function, (filled(1, 2, 4),), (filled(7, 5, 4),), (filled(3, 3, 4),))
    assert 900.9 < largest(ranges, "sub") < 901.0  # The largest of batches of several sizes.
    assert ranges["", "sub", 0].shape == (5, 4)
    ranges = measured(function, (np.zeros((0, 4), "float32"),))
    assert largest(ranges, "sub") == 0.0
    assert not any(found.nonfinite for found in ranges.values())


@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_data_that_is_not_finite_keeps_what_it_reaches_and_the_first_nan_is_named(value):
    function = traced(lambda x: -(x @ filled(1, 4, 4)) @ filled(1, 4, 4), (2, 4))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", tfamp.TfampWarning)
        bad = filled(value, 2, 4)
        ranges = measured(function, (filled(1, 2, 4),), (bad,), (bad,))
    assert len(caught) == np.isnan(value)  # An infinity may be a mask: the reason names it.
    assert all("batch 1: the input x:0 holds NaN" in str(each.message) for each in caught)
    reasons = {n.op: n.reason for n in calibrated_nodes(function, ranges)}
    assert "not finite in float32 already" in reasons["MatMul"].text
    # The finite batch's result is still known where a NaN's says nothing.
    assert np.isinf(value) or largest(ranges, "matmul") == 4.0


def calibrated_nodes(function, ranges, dtype="float16", **choices):
    """The nodes that calibration keeps float32; nothing may be left to lower."""
    with pytest.warns(tfamp.NothingConvertedWarning):
        plan = calibrated(function, ranges, dtype, **choices).plan
    return [node for node in plan.nodes if node.reason.rule == "calibration"]


def test_a_constant_out_of_range_stays_float32_though_its_branch_never_ran():
    def function(x):
        return tf.cond(x[0, 0] > 0.0, lambda: x @ x, lambda: (x @ x) * 1e6 @ x)

    traced_function = traced(function, (4, 4))
    ranges = measured(traced_function, (np.eye(4),))
    plan = calibrated(traced_function, ranges).plan
    (kept,) = [node for node in plan.nodes if node.reason.rule == "calibration"]
    assert (kept.op, kept.dtype) == ("Mul", "float32")
    assert "a value of 1e+06 in the constant" in kept.reason.text
    assert "exceeds constant_max 65504" in kept.reason.text


def test_weights_may_be_larger_than_data():
    weight = tf.Variable(filled(1000, 4, 4))
    function = traced(lambda x: tf.identity(x @ weight), (2, 4))
    ranges = measured(function, (filled(1e-3, 2, 4),))
    assert largest(ranges, "matmul/ReadVariableOp") == 1000.0
    plan = calibrated(function, ranges).plan
    assert {node.op: node.dtype for node in plan.nodes}["MatMul"] == "float16"


def test_a_reduction_that_is_too_deep_stays_float32_with_its_number():
    function = traced(lambda x: tf.identity(x @ filled(1e-3, 3000, 4)), (2, 3000))
    ranges = measured(function, (filled(1, 2, 3000),))
    assert {n.op: n.dtype for n in calibrated(function, ranges).plan.nodes}["MatMul"] == "float16"
    limits = Calibration([1.0], reduction_depth=1024).limits("float16")
    (kept,) = calibrated_nodes(function, ranges, limits=limits)
    text = "it adds up 3000 values for each result, more than reduction_depth 1024"
    assert (kept.op, kept.reason.text) == ("MatMul", text)


def test_a_train_step_leaves_variables_as_they_were_and_sees_its_gradients():
    function = graph_models.concrete("lstm", train=True)
    variables = function.graph.kept_variables
    before = [variable.numpy() for variable in variables]
    batch = graph_models.example(function)
    ranges = measured(function, (batch,), (batch,))
    for variable, value in zip(variables, before, strict=True):
        np.testing.assert_array_equal(variable.numpy(), value)
    # The bodies of the loop and of its gradient; the conditions compute no floats.
    assert len(in_functions(ranges)) == 2
    function(batch)
    assert any((v.numpy() != old).any() for v, old in zip(variables, before, strict=True))


def test_a_batch_that_fails_leaves_variables_as_they_were():
    def function(x):
        with tf.control_dependencies([steps.assign_add(1)]):
            tf.debugging.assert_less(x, 2.0)
            return x @ x

    steps = tf.Variable(5)
    traced_function = traced(function, (4, 4))
    with pytest.raises(tf.errors.InvalidArgumentError, match="assertion failed"):
        measured(traced_function, (np.eye(4),), (9.0 * np.eye(4),))
    assert steps.numpy() == 5
    with pytest.raises(ValueError, match="batch 1 "):
        measured(traced_function, (np.eye(4),), ())
    assert steps.numpy() == 5


@pytest.mark.parametrize(
    ("batches", "message"),
    [
        ([(1.0, 2.0)], "batch 0 has 2 values; the graph takes 1: x:0"),
        ([(np.ones((3, 4), "float32"),)], r"x:0 takes float32 of shape \(4, 4\); got float32 of s"),
        ([(tf.ones((4, 4), tf.int32),)], r"takes float32 .* got int32 of shape \(4, 4\)"),
        ([(np.eye(4, dtype="float32"),), ("text",)], "batch 1: the input x:0 .* got str"),
    ],
)
def test_batches_that_do_not_fit_are_refused(batches, message):
    with pytest.raises(ValueError, match=message):
        measured(loops.loop_v2(), *batches)


# ---- The data --------------------------------------------------------------------------------


def test_elements_become_arguments():
    x, y = np.ones(2), np.zeros(2)
    calls = list(Calibration([(x, y), {"x": x, "training": False}, x]).calls())
    assert calls == [((x, y), {}), ((), {"x": x, "training": False}), ((x,), {})]


def test_iterators_and_datasets_can_be_read_twice_and_a_calibration_stays_one():
    for data in (iter([1.0, 2.0]), tf.data.Dataset.from_tensor_slices([1.0, 2.0])):
        calibration = Calibration.of(data)
        for _ in range(2):
            assert [float(args[0]) for args, _ in calibration.calls()] == [1.0, 2.0]
        assert Calibration.of(calibration) is calibration
    limits = Calibration([1.0], data_max=100.0).limits("float16")
    assert (limits.data_max, limits.constant_max) == (100.0, 65504.0)


@pytest.mark.parametrize(
    ("data", "error", "message"),
    [
        ([], ValueError, "at least one call's data"),
        (iter([]), ValueError, "at least one call's data"),
        ({"x": 1.0}, TypeError, r"got dict. For one call put it into a list: \[x\]"),
        (np.ones((8, 4)), TypeError, r"got ndarray.*into a list: \[x\]"),
        (tf.ones(3), TypeError, "into a list"),
        ("batch.npz", TypeError, "got str"),
        (3, TypeError, "data must be an iterable"),
    ],
)
def test_data_of_the_wrong_form_is_refused(data, error, message):
    with pytest.raises(error, match=message):
        list(Calibration.of(data).calls())


def test_a_dataset_without_elements_or_without_end_is_refused():
    numbers = tf.data.Dataset.range(3)
    with pytest.raises(ValueError, match="at least one call"):
        list(Calibration(numbers.filter(lambda n: n > 5)).calls())
    with pytest.raises(ValueError, match=r"repeats for ever. Use dataset.take\(n\)"):
        Calibration(numbers.repeat())
    finite = itertools.islice(Calibration(numbers.repeat().take(4)).calls(), 9)
    assert len(list(finite)) == 4


@pytest.mark.parametrize("limit", ["data_max", "reduction_depth"])
def test_limits_must_be_positive_numbers(limit):
    for value, error in ((0, ValueError), (float("nan"), ValueError), ("512", TypeError)):
        with pytest.raises(error, match=f"{limit} must be a number"):
            Calibration([1.0], **{limit: value})


def test_an_npz_file_is_one_call_by_name(tmp_path):
    np.savez(tmp_path / "batch.npz", x=filled(2, 8, 4), y=np.arange(8))
    calibration = Calibration.from_npz(tmp_path / "batch.npz", data_max=9.0)
    ((args, kwargs),) = calibration.calls()
    assert (args, set(kwargs), calibration.data_max) == ((), {"x", "y"}, 9.0)
    np.testing.assert_array_equal(kwargs["x"], filled(2, 8, 4))


def test_files_that_hold_no_arrays_by_name_are_refused(tmp_path):
    np.save(tmp_path / "one.npy", np.ones(3))
    np.savez(tmp_path / "none.npz")
    np.savez(tmp_path / "objects.npz", x=np.array([{}], dtype=object))
    (tmp_path / "text.npz").write_text("no numbers")
    for name in ("one.npy", "none.npz", "objects.npz", "text.npz"):
        with pytest.raises(ValueError, match=f"{name} does not hold named arrays of numbers"):
            Calibration.from_npz(tmp_path / name)
    with pytest.raises(FileNotFoundError, match=r"missing\.npz"):
        Calibration.from_npz(tmp_path / "missing.npz")
