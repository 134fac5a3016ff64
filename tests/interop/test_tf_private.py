"""Each private TensorFlow symbol, so that a release that changes one says which."""

import contextlib
import os
import tempfile
import types

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.framework import op_def_registry
from tensorflow.python.util import _pywrap_util_port

import tfamp
from tfamp.core.device_names import device_kind_of
from tfamp.interop import op_calls, tf_private
from tfamp.interop.patching import SYMBOLS, locate


def test_replicas_share_the_graph_in_which_they_run_but_not_that_of_a_nested_function(two_replicas):
    answers = []

    def replica():
        for fn in (lambda f: f, tf.function):
            fn(lambda: answers.append(tf_private.replicas_share_graph()))()

    tf.function(lambda: two_replicas.run(replica))()
    assert answers == [True, False] * 2
    assert not tf_private.replicas_share_graph()


def test_a_tape_records():
    assert not op_calls.may_record()
    with tf.GradientTape() as tape:
        assert op_calls.may_record()
        with tape.stop_recording():
            assert not op_calls.may_record()
    assert not op_calls.may_record()


def test_mirrored_strategy_on_cpus_needs_merge_call_and_no_strategy_none(two_replicas):
    assert not tf_private.strategy_needs_merge_call()
    answers = []
    two_replicas.run(lambda: answers.append(tf_private.strategy_needs_merge_call()))
    assert answers == [True, True]


def test_ops_are_known_with_inputs_and_attributes_internal_ones_too():
    matmul = tf_private.op_definition("MatMul")
    assert [argument.type_attr for argument in matmul.input_arg] == ["T", "T"]
    (attr,) = [attr for attr in matmul.attr if attr.name == "T"]
    allowed = {tf.as_dtype(value).name for value in attr.allowed_values.list.type}
    assert {"float16", "bfloat16", "float32"} <= allowed
    assert tf_private.op_definition("_FusedBatchNormEx").name == "_FusedBatchNormEx"
    assert tf_private.op_definition("MatMull") is None
    public = {name for name in dir(tf.raw_ops) if not name.startswith("_")}
    assert public | {"_FusedBatchNormEx"} <= tf_private.known_ops()
    kinds = tf_private.attr_kinds("LRN")
    assert (kinds["alpha"], kinds["depth_radius"], kinds["T"]) == ("float", "int", "type")
    assert tf_private.attr_kinds("MatMull") == {}


def test_onednn_is_in_use_as_the_environment_says_and_needs_no_switch_on_other_cpus(monkeypatch):
    wanted = os.environ["TF_ENABLE_ONEDNN_OPTS"] == "1"
    assert not _pywrap_util_port.IsX86Available() or tf_private.uses_onednn() == wanted
    for name in ("IsMklEnabled", "IsX86Available"):
        monkeypatch.setattr(_pywrap_util_port, name, lambda: False)
    assert tf_private.uses_onednn()


def test_a_missing_symbol_names_itself_and_the_versions(monkeypatch):
    monkeypatch.delattr(op_def_registry, "get")
    message = rf"get.* is not in TensorFlow {tf.__version__}"
    with pytest.raises(tfamp.UnsupportedVersionError, match=message):
        tf_private.op_definition("MatMul")


# ---- What autocast replaces, and what it asks --------------------------------------------------


# How each symbol is reached through the public API.
X = np.eye(2, dtype="float32")
FLOATS = tf.TensorSpec((2, 2))


def _trace(function, *specs):
    return tf.function(function).get_concrete_function(*specs)


def _tape():
    x = tf.Variable(X)
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(x)
        y = tf.tanh(x)
    return tape, y, x


def _reach_custom_gradient():
    return tf.custom_gradient(lambda x: (x, lambda dy: dy))(tf.constant(X))


def _reach_if(x):
    if tf.reduce_sum(x) > 0:  # noqa: SIM108 - AutoGraph makes a tf.cond of the statement
        y = x
    else:
        y = x + 1.0
    return y


def _reach_for(x):
    for _ in tf.range(2):
        x = x + 1.0
    return x


def _loaded():
    module = tf.Module()
    module.run = tf.function(lambda x: tf.tanh(x), input_signature=[FLOATS])
    with tempfile.TemporaryDirectory() as directory:
        tf.saved_model.save(module, directory)
        return tf.saved_model.load(directory).run


def _recorded(x):
    with tf.GradientTape() as tape:
        tape.watch(x)
        return tf.tanh(x)


def _accumulate():
    x = tf.constant(X)
    with tf.autodiff.ForwardAccumulator(x, x) as accumulator:
        return accumulator.jvp(tf.tanh(x))


REACHED_BY = {
    "TFE_Py_FastPathExecute": lambda: tf.matmul(X, X),
    "_apply_op_helper": lambda: _trace(lambda x: tf.matmul(x, x), FLOATS),
    "record_gradient": lambda: _trace(_recorded, FLOATS),
    "cast": lambda: tf.cast(tf.constant(X), tf.float64),
    "linalg.expm": lambda: tf.linalg.expm(X),
    "linalg.eig": lambda: tf.linalg.eig(X),
    "linalg.eigvals": lambda: tf.linalg.eigvals(X),
    "eig": lambda: tf.eig(X),
    "eigvals": lambda: tf.eigvals(X),
    "foldl": lambda: tf.foldl(tf.add, tf.constant(X)),
    "foldr": lambda: tf.foldr(tf.add, tf.constant(X)),
    "scan": lambda: tf.scan(tf.add, tf.constant(X)),
    "dtypes.cast": lambda: tf.dtypes.cast(tf.constant(X), tf.float64),
    "_create_graph_constant": lambda: _trace(lambda: tf.constant(1.0)),
    "GradientTape.gradient": lambda: (lambda tape, y, x: tape.gradient(y, x))(*_tape()),
    "imperative_grad": lambda: (lambda tape, y, x: tape.gradient(y, x))(*_tape()),
    "GradientTape._push_tape": _tape,
    "GradientTape.watch": _tape,
    "ForwardAccumulator._push_accumulator": _accumulate,
    "ForwardAccumulator._watch": _accumulate,
    "GradientTape.jacobian": lambda: (lambda tape, y, x: tape.jacobian(y, x))(*_tape()),
    "GradientTape.batch_jacobian": lambda: (lambda tape, y, x: tape.batch_jacobian(y, x))(*_tape()),
    "_GradientsHelper": lambda: _trace(lambda x: tf.gradients(tf.tanh(x), x), FLOATS),
    "PFor.convert": lambda: tf.vectorized_map(tf.tanh, tf.constant(X)),
    "_eager_mode_decorator": _reach_custom_gradient,
    "_graph_mode_decorator": lambda: _trace(_reach_custom_gradient),
    "_internal_py_func": lambda: tf.py_function(tf.tanh, [X], tf.float32),
    "py_func_common": lambda: tf.numpy_function(np.tanh, [X], tf.float32),
    "make_function_context": lambda: tf.function(lambda x: x)(tf.constant(X)),
    "Function.get_concrete_function": lambda: _trace(tf.tanh, FLOATS),
    "Function.__call__": lambda: tf.function(lambda x: x)(tf.constant(X)),
    "ConcreteFunction.__call__": lambda: _trace(tf.tanh, FLOATS)(tf.constant(X)),
    "_call_concrete_function": lambda: _loaded()(tf.constant(X)),
    "while_loop": lambda: tf.while_loop(lambda i: i < 2, lambda i: [i + 1], [tf.constant(0)]),
    "_verify_single_loop_var": lambda: _trace(_reach_for, FLOATS),
    "verify_single_cond_var": lambda: _trace(_reach_if, FLOATS),
    "_make_indexed_slices_indices_types_match": lambda: _trace(_reach_if, FLOATS),
    "convert_to_tensor": lambda: tf.Variable(X).assign(X),
    "convert_to_tensor_or_ragged_tensor": lambda: tf.matmul(tf.ragged.stack([X]), [X]),
    "_result_value_flat_to_batchable": lambda: tf.map_fn(tf.tanh, X),
    "_autopacking_helper": lambda: _trace(lambda x: tf.convert_to_tensor([x, x]), FLOATS),
    "convert_n_to_tensor_or_indexed_slices": lambda: tf.math.accumulate_n([X, X]),
    "TensorSpec.cast": lambda: tf.function(lambda x: x, input_signature=[FLOATS])(X),
    "_truediv_python3": lambda: tf.constant(X) / 2.0,
    "sparse_matmul": lambda: tf.matmul(X, X, a_is_sparse=True),
    "softmax_cross_entropy_with_logits_v2_helper": lambda: tf.nn.softmax_cross_entropy_with_logits(
        X, X
    ),
    "_dropout": lambda: tf.nn.experimental.stateless_dropout(X, 0.5, seed=[1, 2]),
    "sparse_softmax_cross_entropy_with_logits": lambda: (
        tf.nn.sparse_softmax_cross_entropy_with_logits([0, 1], X)
    ),
    "TensorArray.write": lambda: tf.TensorArray(tf.float32, 1).write(0, X).stack(),
    "TensorArray.scatter": lambda: tf.TensorArray(tf.float32, 2).scatter([0, 1], X).stack(),
    "TensorArray.unstack": lambda: tf.TensorArray(tf.float32, 2).unstack(X).stack(),
    "TensorArray.split": lambda: tf.TensorArray(tf.float32, 2).split(X, [1, 1]).concat(),
}


@pytest.mark.parametrize(
    "symbol", [symbol for _, symbol in SYMBOLS if not symbol.startswith("keras")]
)
def test_a_patched_symbol_exists_and_is_what_the_public_api_calls(monkeypatch, symbol):
    owner, name = locate(symbol)
    original = getattr(owner, name)
    assert callable(original)
    calls = []

    @tf.autograph.experimental.do_not_convert
    def replacement(*args, **kwargs):
        calls.append(name)
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, replacement)
    REACHED_BY[symbol.partition(":")[2]]()
    assert calls


def test_place_in_trace_is_the_order_in_which_operations_were_made():
    graph = _trace(lambda x: tf.exp(tf.tanh(x)), FLOATS).graph
    places = {op.type: tf_private.place_in_trace(op) for op in graph.get_operations()}
    assert places["Tanh"] < places["Exp"]


def test_op_inputs_are_in_order_with_their_dtypes():
    condition, then, otherwise = tf_private.op_inputs("SelectV2")
    assert (condition.name, condition.type_attr, condition.dtype) == ("condition", None, tf.bool)
    assert then.type_attr == otherwise.type_attr == "T"
    assert {"float16", "bfloat16", "float32", "float64"} <= then.floats
    values, axis = tf_private.op_inputs("ConcatV2")
    assert values.is_list
    assert not axis.is_list
    assert not axis.floats
    assert tf_private.op_inputs("MatMull") == ()


def test_op_inputs_leave_out_dtypes_without_a_kernel_or_a_shape_function():
    (given,) = tf_private.op_inputs("Erfinv")
    assert given.floats == {"float32", "float64"}
    (given,) = tf_private.op_inputs("Softsign")
    assert given.floats == {"float16", "bfloat16", "float32", "float64"}
    assert {each.floats for each in tf_private.op_inputs("Range")} == {
        frozenset({"bfloat16", "float32", "float64"})
    }


@pytest.mark.skipif(not tf.test.is_built_with_cuda(), reason="no kernels of GPUs are registered")
def test_op_inputs_on_a_gpu_are_those_of_its_kernels_where_it_has_any():
    (given,) = tf_private.op_inputs("Softsign", "gpu")
    assert given.floats == {"float16", "float32", "float64"}
    # There is none, so that TensorFlow runs the op on the CPU.
    (given,) = tf_private.op_inputs("Betainc", "gpu")[:1]
    assert given.floats == tf_private.op_inputs("Betainc")[0].floats


def test_the_name_of_a_device_gives_its_kind():
    names = "/job:cpu_worker CPU:0 /gpu:1 /job:worker/replica:0/task:0/device:GPU:3"
    kinds = [device_kind_of(each) for each in names.split()]
    assert kinds == ["", "cpu", "gpu", "gpu"]
    assert device_kind_of("/device:TPU_REPLICATED_CORE:0") == "tpu"


def test_the_device_in_force_is_that_of_the_innermost_block():
    kind = tf_private.device_kind_in_force
    found = []

    def traced():
        found.append(kind())
        with tf.device("CPU:0"):
            with tf.device("/task:0"):
                found.append(kind())
            with tf.device(tf.DeviceSpec(device_type="GPU", device_index=0)):
                tf.function(lambda: found.append(kind()))()
            with tf.device(None):
                found.append(kind())

    assert kind() == ""
    for around, function in (("", traced), ("", tf.function(traced)), ("cpu", tf.function(traced))):
        found.clear()
        with tf.device("CPU:0") if around else contextlib.nullcontext():
            assert kind() == around
            function()
        assert found == [around, "cpu", "gpu", ""]
    with tf.Graph().as_default(), tf.compat.v1.device(lambda op: "/gpu:0"):
        assert kind() == ""


def test_a_handle_tells_what_it_is_of_and_the_dtype_of_its_variable():
    variable = tf.Variable(tf.ones(2, tf.bfloat16))
    assert tf_private.held_dtype(variable.handle) == "bfloat16"
    seen = []
    tf.function(lambda: seen.append(tf_private.held_dtype(variable.handle)))()
    assert seen == ["bfloat16"]
    assert tf_private.held_dtype(tf.raw_ops.StackV2(max_size=1, elem_type=tf.float32)) == ""
    table = tf.lookup.experimental.DenseHashTable(tf.int64, tf.int64, 0, -1, -2)
    assert tf_private.held_dtype(table.resource_handle) == ""
    assert tf_private.resource_kind(variable.handle) == "tensorflow::Var"
    (handle,) = tf.nest.flatten(iter(tf.data.Dataset.range(2)), expand_composites=True)
    assert tf_private.resource_kind(handle) == "tensorflow::data::IteratorResource"
    assert tf_private.resource_kind(table.resource_handle) == "tensorflow::lookup::LookupInterface"


def test_seeds_of_eager_ops_can_be_drawn_again():
    tf.random.set_seed(1)
    seeds = tf_private.operation_seeds()
    before = seeds.getstate()
    tf.random.uniform(())
    after = seeds.getstate()
    assert after != before
    seeds.setstate(before)
    tf.random.uniform(())
    assert seeds.getstate() == after


# ---- For the graph rewrite ---------------------------------------------------------------------


def test_kernels_tell_device_and_dtypes():
    matmul = tf_private.kernels("MatMul")
    assert any(k.device == "cpu" and "bfloat16" in k.dtypes["T"] for k in matmul)
    assert any(k.device == "default" for k in tf_private.kernels("Merge"))
    assert tf_private.kernels("MatMull") == ()


def test_dtypes_have_names_and_numbers_of_graphs():
    assert tf_private.dtype_of_number(1) == "float32"
    assert tf_private.dtype_of_number(101) == "float32"  # a reference to one
    assert tf_private.dtype_of_number(tf_private.dtype_number("bfloat16")) == "bfloat16"
    assert tf_private.dtype_of_number(0) == "dtype 0"


# ---- For SavedModels -----------------------------------------------------------------------------


def test_a_saved_model_is_read_and_its_fingerprint_written(tmp_path):
    tf.saved_model.save(tf.Module(), str(tmp_path))
    message = tf_private.saved_model_message()
    message.ParseFromString((tmp_path / "saved_model.pb").read_bytes())
    assert [list(graph.meta_info_def.tags) for graph in message.meta_graphs] == [["serve"]]
    (tmp_path / "fingerprint.pb").unlink()
    tf_private.write_fingerprint(str(tmp_path))
    assert tf.saved_model.experimental.read_fingerprint(str(tmp_path)).saved_model_checksum
    with pytest.raises(tf_private.message_error()):
        tf_private.saved_model_message().ParseFromString(b"\x12\xff\xff")


def test_details_are_those_of_a_device_and_the_runtime_has_started_once_an_op_has_run():
    (cpu,) = tf.config.list_physical_devices("CPU")
    assert isinstance(tf_private.device_details(cpu), dict)
    npu = tf.config.PhysicalDevice("/physical_device:NPU:0", "NPU")
    assert tf_private.device_details(npu) == {}
    tf.ones(())
    assert tf_private.runtime_has_started()


# ---- Traced functions ----------------------------------------------------------------------------


def test_capture_gives_the_tensor_of_the_function_being_traced():
    outside = tf.constant([1.0, 2.0])
    captured = []

    @tf.function
    def fn():
        captured.append(tf_private.capture_into_graph(outside))
        return captured[0] * 2.0

    assert fn().numpy().tolist() == [2.0, 4.0]
    assert captured[0].graph is fn.get_concrete_function().graph
    assert fn.get_concrete_function().captured_inputs[0] is outside


def test_registered_gradient_finds_a_function_and_says_when_there_is_none():
    @tf.RegisterGradient("TfampTestGradient")
    def gradient(op, upstream):
        return upstream

    assert tf_private.registered_gradient("TfampTestGradient") is gradient
    with pytest.raises(LookupError, match="TfampNoSuchGradient"):
        tf_private.registered_gradient("TfampNoSuchGradient")


@pytest.mark.parametrize("jit", [True, None])
def test_options_of_a_function(jit):
    signature = [tf.TensorSpec((None,))]
    function = tf.function(
        lambda x: x, signature, autograph=False, jit_compile=jit, reduce_retracing=True
    )
    options = tf_private.function_options(function)
    assert list(options.pop("input_signature")) == signature
    assert options == {
        "jit_compile": jit, "reduce_retracing": True, "autograph": False,
        "experimental_autograph_options": None,
    }  # fmt: skip
    changed = types.SimpleNamespace(input_signature=None)
    with pytest.raises(tfamp.UnsupportedVersionError, match="_jit_compile is not in TensorFlow"):
        tf_private.function_options(changed)


def test_marked_ops_and_set_attributes_are_in_the_graph():
    def function(x):
        with tf_private.ops_marked("_tfamp_test", "here"):
            y = tf.exp(x)
        z = tf.sqrt(y)
        tf_private.set_attribute(z.op, "_tfamp_value", tf.make_tensor_proto(3.0))
        return z

    graph = tf.function(function).get_concrete_function(tf.TensorSpec(())).graph.as_graph_def()
    nodes = {node.op: node for node in graph.node}
    assert nodes["Exp"].attr["_tfamp_test"].s == b"here"
    assert "_tfamp_test" not in nodes["Sqrt"].attr
    assert tf.make_ndarray(nodes["Sqrt"].attr["_tfamp_value"].tensor) == 3.0


def test_saved_functions_have_their_signatures_with_defaults_and_saveable_ones_run(tmp_path):
    module = tf.Module()
    module.fn = tf.function(lambda x, flag=False, *, bias=None: x)
    own = type("Function", (tf_private.SaveableFunction,), {})
    module.saveable = own(lambda x: x + 1.0, name="saveable")  # It is one of TensorFlow's.
    x = tf.ones(2)
    module.fn(x), module.saveable(x)
    tf.saved_model.save(module, tmp_path)
    loaded = tf.saved_model.load(tmp_path)
    for each in (module, loaded):
        signature = tf_private.function_signature(each.fn)
        assert str(signature) == "(x, flag=False, *, bias=None)"
    assert loaded.saveable(x).numpy().tolist() == [2.0, 2.0]


def test_calls_of_a_function_and_of_those_around_it_call_back_once():
    calls = []

    def step(x):
        for _ in tf.range(3):
            tf_private.call_at_calls(lambda: calls.append(1), "key")
            x += 1.0
        return x

    inner = tf.function(step)
    found = [float(inner(tf.constant(1.0))) for _ in range(3)]
    assert (found, len(calls)) == ([4.0] * 3, 3)
    outer = tf.function(lambda x: inner(x) * 2, jit_compile=True)
    assert [float(outer(tf.constant(1.0))) for _ in range(2)] == [8.0] * 2
    assert len(calls) == 5
    with tf.Graph().as_default():
        tf_private.call_at_calls(lambda: calls.append(1), "key")
    assert len(calls) == 5


def test_a_scratch_graph_takes_tensors_from_outside_and_runs_nothing():
    variable, outside = tf.Variable(1.0), tf.constant(2.0)
    with tf_private.scratch_graph():
        variable.assign(tf_private.placeholder("float32", ()) + outside)
    assert float(variable) == 1
