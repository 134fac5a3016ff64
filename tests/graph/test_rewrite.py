"""The rewrite as a whole: what it computes, what it keeps, what it refuses."""

import dataclasses
import functools
import json
import warnings

import numpy as np
import pytest
import tensorflow as tf

import tfamp
from helpers import graph_dsl, graph_models, loops
from helpers.cases import first_of, one_of_each
from helpers.tolerances import assert_close
from tfamp import OpLists
from tfamp.core.profile import builtin_profile
from tfamp.graph import rewrite
from tfamp.interop import tf_private
from tfamp.machine import hardware

# These tests are about what the lists decide.
rewrite_graph_def = functools.partial(rewrite.rewrite_graph_def, placement="lists")

DTYPES = ["float16", "bfloat16"]
MATRIX_OPS = {"MatMul", "Conv2D", "BatchMatMulV2", "Einsum", "Conv2DBackpropFilter"}


# By which the minimum cut converts all that it may, as if everything were large.
NATIVE = builtin_profile("cpu", bfloat16=True, float16=True)
CUT = {"placement": "min_cut", "profile": NATIVE}
# By which it decides about small graphs too, as Casts and memory cost nothing.
FREE = {"least_gain": 0.0, "bandwidth": 1e15, "cast_bandwidth": 1e15, "op_overhead": 0.0}
SMALL_CUT = {**CUT, "profile": dataclasses.replace(NATIVE, **FREE)}


def rewritten(function, dtype, **choices):
    return rewrite_graph_def(
        function.graph.as_graph_def(add_shapes=bool(choices)),
        [each.name for each in function.outputs],
        feeds=[each.name for each in function.inputs],
        dtype=dtype,
        device="cpu",
        **choices,
    )


def assert_converted_as_a_whole(plan, dtype):
    found = {(node.op, node.dtype) for node in plan.nodes if node.op in MATRIX_OPS}
    assert found, "no matmul or convolution"
    # oneDNN's filter gradients in float16 take hundreds of times as long as float32's.
    slow = ("Conv2DBackpropFilter", "float16")
    assert {(op, low) for op, low in found if (op, dtype) == slow} <= {(slow[0], "float32")}
    assert {low for op, low in found if (op, dtype) != slow} == {dtype}


def assert_second_rewrite_changes_nothing(function, result, dtype, **choices):
    with warnings.catch_warnings():
        warnings.simplefilter("error", tfamp.NothingConvertedWarning)
        again = rewrite_graph_def(
            result.graph_def,
            [each.name for each in function.outputs],
            feeds=[each.name for each in function.inputs],
            dtype=dtype,
            device="cpu",
            **choices,
        )
    assert again.graph_def == result.graph_def
    assert again.plan.casts == ()


@pytest.mark.usefixtures("exact_kernels")
@pytest.mark.parametrize(
    ("train", "choices"), [(False, {}), (True, {}), (True, CUT)], ids=["forward", "step", "cut"]
)
@pytest.mark.parametrize(("name", "dtype"), one_of_each(graph_models.MODELS, DTYPES, quick=2))
def test_models_are_converted_and_close_to_float32(name, train, dtype, choices):
    function = graph_models.concrete(name, train=train)
    result = rewritten(function, dtype, **choices)
    assert_converted_as_a_whole(result.plan, dtype)
    assert_second_rewrite_changes_nothing(function, result, dtype, **choices)
    batch, variables = graph_models.example(function), function.graph.kept_variables
    before = [variable.numpy() for variable in variables]
    actual = graph_models.runnable(function, result.graph_def)(batch)
    for variable, value in zip(variables, before, strict=True):
        variable.assign(value)
    expected = tf.nest.flatten(function(batch))
    for got, wanted in zip(actual, expected, strict=True):
        assert got.dtype == wanted.dtype
        assert_close(got, wanted, dtype, depth=64)


@pytest.mark.parametrize("choices", first_of([{}, SMALL_CUT]), ids=["lists", "cut"])
@pytest.mark.parametrize(("name", "dtype"), one_of_each(loops.FUNCTIONS, DTYPES))
def test_structures_are_converted_valid_and_close_to_float32(name, dtype, choices):
    function = loops.FUNCTIONS[name]()
    result = rewritten(function, dtype, **choices)
    assert result.plan.summary.low_nodes
    if not choices:
        assert_converted_as_a_whole(result.plan, dtype)
        assert_second_rewrite_changes_nothing(function, result, dtype)
    x = tf.constant(np.random.default_rng(2).uniform(0.1, 0.4, (4, 4)).astype("float32"))
    (actual,) = graph_models.runnable(function, result.graph_def)(x)
    assert_close(actual, function(x), dtype, depth=16)


@pytest.mark.parametrize("dtype", first_of(reversed(DTYPES)))
@pytest.mark.parametrize("lists", [OpLists.default, OpLists.grappler])
def test_a_loop_of_tensorflow_1_is_converted_as_one(dtype, lists):
    graph_def = loops.loop_v1()
    result = rewrite_graph_def(
        graph_def, ["out:0"], dtype=dtype, device="cpu", op_lists=lists(dtype)
    )
    low = {node.op for node in result.plan.nodes if node.dtype == dtype}
    assert {"MatMul", "Merge", "NextIteration", "Switch"} <= low
    assert {cast.producer for cast in result.plan.casts} == {"x", "while/mul/y", "while/Exit_1"}
    x = np.full((4, 4), 0.3, "float32")

    def run(graph_def):
        with tf.Graph().as_default(), tf.compat.v1.Session() as session:
            tf.graph_util.import_graph_def(graph_def, name="")
            return session.run("out:0", {"x:0": x})

    assert_close(run(result.graph_def), run(graph_def), dtype, depth=16)


@pytest.mark.parametrize("dtype", first_of(DTYPES))
@pytest.mark.parametrize("grappler", [False, True])
def test_what_a_loop_carries_is_converted_with_its_body(dtype, grappler):
    function = loops.loop_v2()
    lists = OpLists.grappler(dtype) if grappler else None
    result = rewritten(function, dtype, op_lists=lists)
    (loop,) = [node for node in result.plan.nodes if "While" in node.op]
    # Grappler has loops on its list for bfloat16 only.
    low = dtype == "bfloat16" or not grappler
    assert loop.dtype == (dtype if low else "float32")
    x = tf.eye(4) * 0.5
    assert_close(*graph_models.runnable(function, result.graph_def)(x), function(x), dtype)


def test_an_op_without_a_kernel_stays_float32():
    lists = OpLists.grappler("float16")  # tfamp's own have no AvgPool3D on CPUs.
    plan = rewritten(loops.average_pool_3d(), "float16", op_lists=lists).plan
    (pool,) = [node for node in plan.nodes if node.op == "AvgPool3D"]
    assert (pool.dtype, pool.reason.rule) == ("float32", "no kernel")


def test_a_node_pinned_to_another_device_is_judged_by_its_kernels():
    made = loops.average_pool_3d().graph.as_graph_def()
    for node in made.node:
        node.device = "/device:GPU:0"
    lists = {"dtype": "float16", "op_lists": OpLists.grappler("float16")}
    plan = rewrite_graph_def(made, ["Identity:0"], device="cpu", **lists).plan
    (pool,) = [node for node in plan.nodes if node.op == "AvgPool3D"]
    assert pool.dtype == "float16"
    assert {cast.device for cast in plan.casts} == {"/device:GPU:0"}


@pytest.mark.parametrize(
    ("builder", "dtype"), [("tensor_list", "bfloat16"), ("tensor_list_with_denied_element", None)]
)
def test_a_tensor_list_is_one_colour(builder, dtype):
    plan = rewritten(loops.FUNCTIONS[builder](), "bfloat16").plan
    assert {n.dtype for n in plan.nodes if "TensorList" in n.op} == {dtype or "float32"}


def test_casts_of_the_user_take_the_dtypes_around_them():
    plan = rewritten(loops.casts(), "bfloat16").plan
    assert plan.summary.casts == 2  # x, and the result


def _scaled_step(learning_rate=0.5, scale=2.0**15):
    weight = tf.Variable(tf.eye(4))

    def step(x):
        with tf.GradientTape() as tape:
            # Gradients of about 2**-27: with the scale they are float16 numbers, without it none.
            loss = tf.reduce_sum(x @ weight) * 2.0**-30 * scale
        gradient = tape.gradient(loss, weight) * (1 / scale)
        weight.assign_sub(learning_rate * gradient)
        return gradient

    function = tf.function(step).get_concrete_function(tf.TensorSpec((4, 4)))
    function.graph.kept_variables = [weight]
    return function


@pytest.mark.parametrize("placement", ["lists", "min_cut"])
def test_taking_the_loss_scale_off_stays_float32_in_float16(placement):
    function = _scaled_step()
    profile = builtin_profile("cpu", float16=True)
    result = rewritten(function, "float16", placement=placement, profile=profile)
    assert_converted_as_a_whole(result.plan, "float16")
    (gradient,) = graph_models.runnable(function, result.graph_def)(tf.ones((4, 4)))
    assert_close(gradient, function(tf.ones((4, 4))), "float16", depth=4)


@pytest.mark.parametrize("placement", ["lists", "min_cut"])
def test_optimizers_compute_in_float32(placement):
    weight, momentum = tf.Variable(tf.zeros((4, 4))), tf.Variable(tf.zeros((4, 4)))

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(x @ weight)
        gradient = tape.gradient(loss, weight)
        momentum.assign(0.9 * momentum - 2.0**-10 * gradient)
        weight.assign_add(momentum)
        return loss

    function = tf.function(step).get_concrete_function(tf.TensorSpec((4, 4)))
    profile = builtin_profile("cpu", bfloat16=True)
    result = rewritten(function, "bfloat16", placement=placement, profile=profile)
    assert {node.dtype for node in result.plan.nodes if node.op == "MatMul"} == {"bfloat16"}
    arithmetic = [node for node in result.plan.nodes if node.op in ("Mul", "Sub")]
    assert len(arithmetic) == 3
    assert {node.dtype for node in arithmetic} == {"float32"}
    run = graph_models.runnable(function, result.graph_def)
    for _ in range(3):
        run(tf.ones((4, 4)))
    # m = -2**-8 (1, 1.9, 2.71): digits that bfloat16 does not have.
    np.testing.assert_allclose(momentum, np.full((4, 4), -2.71 * 2.0**-8), rtol=1e-6)
    np.testing.assert_allclose(weight, np.full((4, 4), -5.61 * 2.0**-8), rtol=1e-6)


def _casts_of_weights(assigns):
    weight = tf.Variable(tf.eye(4))

    def tied(x):
        x = x @ weight
        if assigns:
            weight.assign(weight * 3.0)
        return x @ weight @ tf.transpose(weight)

    function = tf.function(tied).get_concrete_function(tf.TensorSpec((4, 4)))
    function.graph.kept_variables = [weight]
    result = rewritten(function, "bfloat16")
    (actual,) = graph_models.runnable(function, result.graph_def)(tf.ones((4, 4)))
    weight.assign(tf.eye(4))
    expected = function(tf.ones((4, 4)))
    assert_close(actual, expected, "bfloat16")
    assert float(actual[0, 0]) == (9.0 if assigns else 1.0)
    return [cast for cast in result.plan.casts if "ReadVariableOp" in cast.producer]


def test_a_weight_is_cast_once_however_often_it_is_read():
    (cast,) = _casts_of_weights(assigns=False)
    assert len(cast.consumers) == 3


def test_a_weight_is_cast_again_after_it_was_assigned():
    assert len(_casts_of_weights(assigns=True)) == 2


def test_batch_normalization_keeps_its_statistics():
    result = rewritten(graph_models.concrete("cnn", train=True), "bfloat16")
    nodes = [n for n in result.graph_def.node if n.op.startswith("FusedBatchNorm")]
    assert len(nodes) == 2
    for node in nodes:
        assert tf.as_dtype(node.attr["T"].type) == tf.bfloat16
        assert tf.as_dtype(node.attr["U"].type) == tf.float32


def test_the_first_fused_batch_norm_becomes_the_one_with_float32_statistics():
    with tf.Graph().as_default() as graph:
        x = tf.compat.v1.placeholder(tf.float32, (2, 4, 4, 3), name="x")
        y = tf.nn.conv2d(x, tf.ones((1, 1, 3, 3)), 1, "SAME")
        y, *_ = tf.raw_ops.FusedBatchNorm(
            x=y, scale=tf.ones(3), offset=tf.zeros(3), mean=tf.zeros(0), variance=tf.zeros(0)
        )
        y = tf.nn.conv2d(y, tf.ones((1, 1, 3, 3)), 1, "SAME")
        tf.identity(y, name="out")
    result = rewrite_graph_def(graph.as_graph_def(), ["out:0"], device="cpu")
    (node,) = [n for n in result.graph_def.node if n.op.startswith("FusedBatchNorm")]
    assert node.op == "FusedBatchNormV2"
    assert tf.as_dtype(node.attr["U"].type) == tf.float32
    again = rewrite_graph_def(result.graph_def, ["out:0"], device="cpu")
    assert again.graph_def == result.graph_def


def test_the_input_is_not_modified_and_functions_keep_their_names():
    function = loops.nested_functions()
    graph_def = function.graph.as_graph_def()
    before = graph_def.SerializeToString(deterministic=True)
    result = rewrite_graph_def(graph_def, ["Identity:0"], dtype="bfloat16", device="cpu")
    assert graph_def.SerializeToString(deterministic=True) == before
    names = [[f.signature for f in g.library.function] for g in (graph_def, result.graph_def)]
    assert names[0] == names[1]
    assert all(
        each.op == "MatMul"
        for each in result.plan.nodes
        if each.dtype == "bfloat16" and each.name.startswith("matmul")
    )


def test_one_cast_serves_all_consumers_of_a_tensor():
    made = graph_dsl.graph("x>A1>D1 x>A2>D1 x>A3 A1>n A1>n1 A2>n2".replace("D1", "d1"))
    plan = rewrite_graph_def(made.graph_def, made.fetches, dtype="bfloat16", device="cpu").plan
    assert len({(cast.tensor, cast.to) for cast in plan.casts}) == len(plan.casts)
    (down,) = [cast for cast in plan.casts if cast.tensor == "x"]
    assert {name for name, _ in down.consumers} == {"a1", "a2", "a3"}


def test_control_inputs_stay_and_names_of_casts_avoid_nodes():
    made = graph_dsl.graph("x>A")
    graph_def = tf.compat.v1.GraphDef.FromString(made.graph_def.SerializeToString())
    graph_def.node.add(name="x-0-CastTo-float16", op="NoOp")
    (node,) = [node for node in graph_def.node if node.name == "a"]
    node.input.append("^x-0-CastTo-float16")
    result = rewrite_graph_def(graph_def, made.fetches, device="cpu")
    (node,) = [node for node in result.graph_def.node if node.name == "a"]
    assert list(node.input) == [*["x-0-CastTo-float16_1"] * 2, "^x-0-CastTo-float16"]


def test_a_graph_with_nothing_to_convert_says_so_and_stays_as_it_is():
    made = graph_dsl.graph("x>i>c>d")
    match = "no op that can be converted to float16"
    with pytest.warns(tfamp.NothingConvertedWarning, match=match) as warned:
        result = rewrite_graph_def(made.graph_def, made.fetches, device="cpu")
    assert warned[0].filename == __file__, "the caller's line"
    assert result.graph_def == made.graph_def
    assert result.plan.casts == ()


CHAIN = "x>A>i"


@pytest.mark.parametrize(
    ("choices", "error", "message"),
    [
        ({"placement": "best"}, ValueError, "lists, fused; got 'best'"),
        ({"profile": {"matmul": 1}}, TypeError, "must be a .*MachineProfile, None.*got {'matmul'"),
        ({"op_lists": {"MatMul"}}, TypeError, "op_lists must be a tfamp.OpLists or None; got set"),
        ({"dtype": "float64"}, ValueError, "dtype must be one of float16, bfloat16; got"),
        ({"device": "npu"}, ValueError, "device must be one of auto, cpu, gpu, tpu; got 'npu'"),
        ({"fetches": ["out_j:0"]}, ValueError, r"fetches: .* no node 'out_j:0'.*\['out_i'"),
        ({"feeds": ["y:0"]}, ValueError, "feeds: the graph has no node 'y:0'"),
        ({"feeds": ["x:0:9"]}, ValueError, "'x:0:9' is not the name of a tensor; give 'x:0'"),
        ({"fetches": "out_i:0"}, TypeError, "fetches must be a collection of strings"),
        ({"keep_float32": ["conv"]}, ValueError, "keep_float32: no node's name matches 'conv'"),
        (
            {"force_low": ["("]},
            ValueError,
            r"force_low holds '\(', which is not a regular expression",
        ),
        ({"force_low": "a"}, TypeError, "force_low must be a collection of strings"),
        ({"keep_float32": [3]}, TypeError, "keep_float32 must hold strings; got 3"),
    ],
)
def test_wrong_arguments_are_refused(choices, error, message):
    made = graph_dsl.graph(CHAIN)
    choices = {"fetches": made.fetches, **choices}
    with pytest.raises(error, match=message):
        rewrite_graph_def(made.graph_def, **choices)


def test_what_is_no_graph_def_is_refused():
    function = loops.loop_v2()
    with pytest.raises(TypeError, match=r"must be a tf.compat.v1.GraphDef; .*as_graph_def\(\)"):
        rewrite_graph_def(function.graph, ["Identity:0"])


def _broken(change):
    made = graph_dsl.graph(CHAIN)
    graph_def = tf.compat.v1.GraphDef.FromString(made.graph_def.SerializeToString())
    change({node.name: node for node in graph_def.node})
    return graph_def


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda nodes: setattr(nodes["a"], "op", "Nonsense"), r"'a' \(Nonsense\): .* not know"),
        (lambda nodes: nodes["a"].input.pop(), r"'a' \(MatMul\): it has 1 inputs, not 2"),
        (
            lambda nodes: nodes["i"].input.__setitem__(0, "b"),
            r"'i' .*: its input 'b' is not the output",
        ),
        (
            lambda nodes: nodes["i"].input.__setitem__(0, "a:1"),
            r"'i' .*: .* is not an output of 'a'",
        ),
        (lambda nodes: setattr(nodes["i"].attr["T"], "type", 2), r"'i' .* is float32, not float64"),
        (lambda nodes: nodes["i"].attr.pop("T"), r"'i' \(Sigmoid\): the attribute T is missing"),
        (lambda nodes: setattr(nodes["i"], "name", "a"), r"'a' .*: another node has the same name"),
    ],
)
def test_a_graph_that_is_not_valid_is_refused_by_node_op_and_cause(change, message):
    with pytest.raises(tfamp.RewriteError, match=message):
        rewrite_graph_def(_broken(change), ["x:0"], device="cpu")


def test_the_plan_as_json_and_text():
    made = graph_dsl.graph("x>A1>I>A2>d")
    plan = rewrite_graph_def(made.graph_def, made.fetches, dtype="bfloat16", device="cpu").plan
    data = json.loads(plan.to_json())
    assert [node["name"] for node in data["nodes"]] == [node.name for node in plan.nodes]
    assert data["casts"][0]["from"] == "float32"
    assert data["summary"]["casts"] == len(plan.casts) == 2
    assert data["summary"]["estimated_speed_up"] is None  # the graph has no shapes
    assert {node["cost"] for node in data["nodes"] if node["op"] == "MatMul"} == {None}
    assert "a1" in plan.to_text()
    assert "3 of 6 float nodes in bfloat16; 2 Casts inserted" in plan.to_text()


def test_the_plan_counts_the_bytes_that_casts_read_and_write():
    specs = [tf.TensorSpec(shape) for shape in ((4, 8), (None, 4))]
    concrete = tf.function(lambda x, y: y @ x).get_concrete_function(*specs)
    graph = concrete.graph.as_graph_def(add_shapes=True)
    choices = {"dtype": "bfloat16", "device": "cpu", "placement": "lists"}
    plan = rewrite_graph_def(graph, ["Identity:0"], **choices).plan
    sizes = {cast.producer: cast.bytes for cast in plan.casts}
    assert sizes == {"x": 4 * 8 * (4 + 2), "y": None, "matmul": None}
    summary = plan.summary
    assert (summary.cast_bytes, summary.casts_of_unknown_size) == (sizes["x"], 2)


def batch_matmul(device):
    """The decision about a batched product, an op with float16 kernels on GPUs only."""
    with tf.Graph().as_default() as graph:
        x = tf.compat.v1.placeholder(tf.float32, (2, 8, 8), name="x")
        tf.identity(tf.raw_ops.BatchMatMulV3(x=x, y=x, Tout=tf.float32), name="y")
    plan = rewrite_graph_def(graph.as_graph_def(), ["y:0"], device=device).plan
    (node,) = [node for node in plan.nodes if node.op == "BatchMatMulV3"]
    return node


def sees_a_gpu(monkeypatch):
    machine = hardware.Hardware("", cpu_bfloat16=False, cpu_float16=False, gpus=(), tpu=False)
    monkeypatch.setattr(hardware, "detect", lambda: machine)
    for name in ("list_physical_devices", "get_visible_devices"):
        monkeypatch.setattr(tf.config, name, lambda kind: [kind] if kind == "GPU" else [])


@pytest.mark.filterwarnings("ignore::tfamp.NothingConvertedWarning")
def test_auto_takes_the_lists_of_the_device_that_it_stands_for(monkeypatch):
    assert batch_matmul("auto") == batch_matmul("cpu")
    assert "is on no list" in batch_matmul("auto").reason.text
    sees_a_gpu(monkeypatch)
    assert batch_matmul("auto") == batch_matmul("gpu")
    assert "is on no list" not in batch_matmul("auto").reason.text


@pytest.mark.filterwarnings("ignore::tfamp.NothingConvertedWarning")
def test_a_wheel_without_gpu_kernels_is_named(monkeypatch):
    every = tf_private.kernels
    monkeypatch.setattr(
        tf_private, "kernels", lambda op: tuple(k for k in every(op) if k.device != "gpu")
    )
    wheel = rf"'gpu', but this TensorFlow {tf.__version__} .*device='cpu'"
    with pytest.raises(ValueError, match=wheel):
        batch_matmul("gpu")
    sees_a_gpu(monkeypatch)
    with pytest.raises(ValueError, match=wheel):
        tfamp.rewrite(lambda x: x @ x, dtype="float16")(tf.ones((2, 2)))
    assert batch_matmul("cpu").dtype == "float32"
