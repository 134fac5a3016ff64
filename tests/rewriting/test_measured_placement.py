"""`placement="measured"`: what is timed of a graph, what the plan tells, and what it is for."""

import json
import os
import subprocess
import sys
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp
from helpers import saved_models
from helpers.graph_asserts import assert_computes_in
from tfamp.cli import main
from tfamp.core.profile import builtin_profile
from tfamp.graph import rewrite_graph_def
from tfamp.machine import op_times, op_timing

WEIGHTS = tf.Variable(tf.random.stateless_normal((256, 256), (1, 2)) / 16.0)
BIAS = tf.Variable(tf.zeros((256,)))
X = tf.random.stateless_normal((64, 256), (3, 4))


def step(x):
    with tf.GradientTape() as tape:
        hidden = tf.nn.tanh(x @ WEIGHTS + BIAS)
        loss = tf.reduce_mean(tf.nn.softmax(hidden @ WEIGHTS) ** 2)
    return loss, tape.gradient(loss, [WEIGHTS, BIAS])


class Clock:
    """Stands for a machine: by default float32 takes 1 ms and low precision half of it."""

    def __init__(self):
        self.timed, self.low = [], {}

    def time_by_turns(self, turns):
        self.timed.append(turns)
        return {work: self.seconds(work) for work in turns.works}

    def seconds(self, work):
        op = tf.compat.v1.NodeDef.FromString(work.node).op
        if op == "Cast":
            return 1e-6
        is_low = any(given.dtype == "bfloat16" for given in work.inputs)
        return self.low.get(op, 5e-4) if is_low else 1e-3

    @property
    def ops(self):
        return [tf.compat.v1.NodeDef.FromString(each.works[0].node).op for each in self.timed]


@pytest.fixture
def clock(times_folder, monkeypatch):
    made = Clock()
    monkeypatch.setattr(op_timing, "time_by_turns", made.time_by_turns)
    return made


def rewritten(fn=step, **options):
    options = {"dtype": "bfloat16", "placement": "measured", "profile": "builtin", **options}
    return tfamp.rewrite(fn, **options)


def test_the_machine_itself_is_measured_and_the_result_is_right(times_folder):
    variables = [each.numpy() for each in (WEIGHTS, BIAS)]
    fast = rewritten()
    loss, gradients = fast(X)
    expected, expected_gradients = step(X)
    np.testing.assert_allclose(loss, expected, rtol=0.05)
    np.testing.assert_allclose(gradients[0], expected_gradients[0], atol=0.05)
    plan = fast.plan(X)
    assert {node.measured for node in plan.nodes if node.op == "MatMul"} == {True}
    assert all(node.cost >= 0 for node in plan.nodes if node.measured)
    for variable, before in zip((WEIGHTS, BIAS), variables, strict=True):
        np.testing.assert_array_equal(variable, before)
    (path,) = times_folder.iterdir()
    assert path.name.startswith("ops-")


def test_the_plan_tells_what_was_measured(clock):
    plan = rewritten().plan(X)
    by_op = {}
    for node in plan.nodes:
        by_op.setdefault(node.op, set()).add(node.measured)
    assert by_op["MatMul"] == by_op["TanhGrad"] == by_op["Softmax"] == {True}
    # These take no time, or touch a variable.
    assert by_op["ReadVariableOp"] == by_op["Identity"] == by_op["Placeholder"] == {False}
    # TensorFlow makes these part of the product: they are low where it is.
    parts = [node for node in plan.nodes if node.op in ("AddV2", "Tanh")]
    assert [(node.dtype, node.measured) for node in parts] == [("bfloat16", False)] * 2
    assert not {"AddV2", "Tanh"} & set(clock.ops)
    costs = {node.cost for node in plan.nodes if node.op == "MatMul"}
    assert costs == {5e-4}
    lines = [line for line in plan.to_text().splitlines() if " MatMul " in line]
    assert lines
    assert all("500 us, measured" in line for line in lines)
    assert "us, estimated" in plan.to_text()
    told = {node["name"]: node["measured"] for node in json.loads(plan.to_json())["nodes"]}
    assert told == {node.name: node.measured for node in plan.nodes}
    assert '"measured":true' in plan.to_html()


def test_the_cut_goes_by_the_measured_times(clock):
    def product_dtypes():
        fast = rewritten()
        assert_computes_in("bfloat16" if clock.low == {} else "float32", fast.concrete(X))
        return {node.dtype for node in fast.plan(X).nodes if node.op == "MatMul"}

    assert product_dtypes() == {"bfloat16"}
    clock.low = dict.fromkeys(("MatMul",), 3e-3)
    op_times._store.cache_clear()
    for path in op_times.cache_folder().iterdir():
        path.unlink()
    assert product_dtypes() == {"float32"}


def test_equal_works_are_timed_once_and_what_decides_first(clock):
    rewritten().plan(X)
    distinct = set(clock.timed)
    assert len(clock.timed) == 2 * len(distinct)  # twice each, as two times are to agree
    assert clock.ops.count("MatMul") == 2 * 3  # its gradients are other works
    low = [len(each.works) == 2 for each in clock.timed[: len(distinct)]]
    assert low == sorted(low, reverse=True)


def test_constants_have_their_values_and_nothing_with_a_state_is_run(clock):
    generator = tf.random.Generator.from_seed(1)

    def function(x):
        kept = x + generator.normal((64, 256)) + tf.random.normal((64, 256))
        WEIGHTS.assign_add(0.0 * WEIGHTS)
        tf.print("not to be seen", output_stream="file:///dev/null")
        y = tf.while_loop(lambda y: tf.reduce_sum(y) < 0, lambda y: [y @ WEIGHTS], [kept])
        return tf.reduce_sum(tf.transpose(y[0] @ WEIGHTS, [1, 0]), axis=0)

    plan = rewritten(function).plan(X)
    assert any(node.op == "MatMul" and node.measured and node.scope for node in plan.nodes)
    stateful = {"RandomStandardNormal", "AssignAddVariableOp", "StatefulStandardNormalV2"}
    assert not stateful & set(clock.ops)
    assert not {"While", "StatelessWhile", "PrintV2", "ReadVariableOp"} & set(clock.ops)
    transposes = [
        each for each, op in zip(clock.timed, clock.ops, strict=True) if op == "Transpose"
    ]
    assert transposes
    assert all(each.works[0].inputs[1].value for each in transposes)


def test_gradients_of_biases_are_timed_as_what_they_are_in_float32(clock):
    def function(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.nn.bias_add(x @ WEIGHTS, BIAS) ** 2)
        return tape.gradient(loss, BIAS)

    plan = rewritten(function).plan(X)
    ops = {
        tuple(tf.compat.v1.NodeDef.FromString(work.node).op for work in turns.works)
        for turns in clock.timed
    }
    assert ("BiasAddGrad", "Sum") in ops
    assert [n.measured for n in plan.nodes if n.op == "BiasAddGrad"] == [True]


def test_builtin_measures_nothing_and_is_min_cut(clock, monkeypatch):
    monkeypatch.setenv("TFAMP_PROFILE", "builtin")
    measured, estimated = (
        rewritten(profile=None, placement=each).plan(X) for each in ("measured", "min_cut")
    )
    assert measured == estimated
    assert not any(node.measured for node in measured.nodes)
    assert not clock.timed


def test_no_seconds_measure_nothing_and_a_second_process_neither(clock):
    nothing = rewritten(measure_seconds=0).plan(X)
    assert not any(node.measured for node in nothing.nodes)
    first = rewritten().plan(X)
    clock.timed.clear()
    op_times._store.cache_clear()
    assert rewritten(measure_seconds=0).plan(X) == rewritten().plan(X) == first
    assert not clock.timed


PROCESS = """
import os, sys
import tensorflow as tf, tfamp
from tfamp.machine import op_timing
timed, time_by_turns = [], op_timing.time_by_turns
op_timing.time_by_turns = lambda turns: timed.append(turns) or time_by_turns(turns)
weights = tf.Variable(tf.ones((128, 128)))
for environment in sys.argv[1:]:
    os.environ.update([environment.split("=")] if environment else [])
    timed.clear()
    fast = tfamp.rewrite(
        lambda x: tf.nn.softmax(x @ weights),
        dtype="bfloat16",
        placement="measured",
        profile="builtin",
    )
    plan = fast.plan(tf.ones((8, 128)))
    print(len(timed), sum(node.measured for node in plan.nodes))
"""


@pytest.mark.slow
def test_a_real_second_process_measures_nothing(tmp_path):
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    environment.pop("TFAMP_PROFILE", None)

    def run(*settings):
        command = [sys.executable, "-c", PROCESS, *settings]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        return [int(each) for each in done.stdout.split()]

    timed, measured = run("")
    assert timed > 0
    assert measured > 0
    assert run("", "TFAMP_PROFILE=builtin") == [0, measured, 0, 0]


def test_it_is_in_every_function_that_rewrites(clock, tmp_path, capsys):
    graph = tf.function(step).get_concrete_function(tf.TensorSpec((64, 256))).graph
    outputs = [tensor.name for tensor in graph.outputs]
    plan = rewrite_graph_def(
        graph.as_graph_def(add_shapes=True),
        outputs,
        dtype="bfloat16",
        placement="measured",
        profile=builtin_profile("cpu"),
    ).plan
    assert any(node.measured for node in plan.nodes)
    saved_models.module(tmp_path / "model")
    options = {"dtype": "bfloat16", "placement": "measured"}
    plan = tfamp.rewrite_saved_model(tmp_path / "model", tmp_path / "low", **options)
    assert any(node.measured for node in plan.nodes)
    command = ["inspect", str(tmp_path / "model"), "--dtype", "bfloat16", "--json"]
    clock.timed.clear()
    op_times._store.cache_clear()
    for path in op_times.cache_folder().iterdir():
        path.unlink()
    for seconds, expected in (("0", set()), ("10", {True})):
        arguments = ["--placement", "measured", "--measure-seconds", seconds]
        assert main([*command, *arguments]) == 0
        nodes = json.loads(capsys.readouterr().out)["nodes"]
        assert {each["measured"] for each in nodes if each["op"] == "MatMul"} - {False} == expected
        assert bool(clock.timed) == bool(expected)


def test_level_o1_takes_it(clock):
    model = keras.Sequential([keras.Input((256,)), keras.layers.Dense(64), keras.layers.Dense(4)])
    model.compile("sgd", "mse")
    model, _ = tfamp.prepare(model, level="O1", dtype="bfloat16", placement="measured")
    model.fit(X, tf.zeros((64, 4)), verbose=0)
    assert "MatMul" in clock.ops
    config = tfamp.PrecisionConfig(level="O1", placement="measured", measure_seconds=2)
    assert tfamp.PrecisionConfig.from_dict(config.to_dict()) == config
    assert config.placement_options() == {"placement": "measured", "measure_seconds": 2.0}
    found = tfamp.PrecisionConfig.from_env(
        {"TFAMP_LEVEL": "O1", "TFAMP_PLACEMENT": "measured", "TFAMP_MEASURE_SECONDS": "2"}
    )
    assert found == config


@pytest.mark.parametrize("level", ["O0", "O2", "O3"])
def test_a_level_without_a_rewrite_has_no_placement(level):
    with pytest.raises(ValueError, match="rewrites no graph; give level='O1'"):
        tfamp.PrecisionConfig(level=level, placement="measured")


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"measure_seconds": -1}, ValueError, "finite and not negative; got -1"),
        ({"measure_seconds": float("nan")}, ValueError, "finite and not negative"),
        ({"measure_seconds": "10"}, TypeError, "must be a number; got '10'"),
        ({"placement": "fastest"}, ValueError, "lists, fused, tune; got 'fastest'"),
    ],
)
def test_wrong_arguments_are_refused(options, error, text):
    with pytest.raises(error, match=text):
        rewritten(**options)


def test_a_device_that_is_not_here_cannot_be_measured(tmp_path):
    saved_models.module(tmp_path / "model")
    options = {"dtype": "bfloat16", "placement": "measured", "device": "tpu"}
    with pytest.raises(ValueError, match="has no tpu. Give placement='min_cut'"):
        tfamp.rewrite_saved_model(tmp_path / "model", tmp_path / "low", **options)


@pytest.mark.slow
def test_models_of_every_kind_of_layer_are_measured_without_a_warning(times_folder, monkeypatch):
    monkeypatch.setattr(op_timing, "_SECONDS", 0.0)  # How long it takes is not what is looked at.
    keras.utils.set_random_seed(0)
    inputs = keras.Input((8, 8, 4))
    x = keras.layers.Conv2D(8, 3, padding="same")(inputs)
    x = keras.layers.MaxPooling2D()(keras.layers.BatchNormalization()(x))
    x = keras.layers.Reshape((16, 8))(keras.layers.DepthwiseConv2D(3, padding="same")(x))
    x = keras.layers.LayerNormalization()(keras.layers.MultiHeadAttention(2, 4)(x, x))
    x = keras.layers.Dense(8, "gelu")(keras.layers.GlobalAveragePooling1D()(x))
    model = keras.Model(inputs, keras.layers.Dense(3)(x))
    images, labels = tf.random.stateless_normal((4, 8, 8, 4), (1, 2)), tf.constant([0, 1, 2, 0])
    loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def function(x, y):
        with tf.GradientTape() as tape:
            loss = loss_fn(y, model(x, training=True))
        return tape.gradient(loss, [each.value for each in model.trainable_variables])

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan = rewritten(function, measure_seconds=120).plan(images, labels)
    could = {"Conv2D", "Conv2DBackpropFilter", "DepthwiseConv2dNative", "FusedBatchNormV3"}
    could |= {"FusedBatchNormGradV3", "MaxPool", "MaxPoolGrad", "Einsum", "BatchMatMulV2", "MatMul"}
    could |= {"Sum", "Mean", "Softmax", "Rsqrt", "SquaredDifference", "Tile"}
    left = {node.op for node in plan.nodes if node.op in could and not node.measured}
    assert not left
