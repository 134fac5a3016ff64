"""SavedModels: what is rewritten, what is kept, and that nothing is left half done."""

import errno
import functools
import logging
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf

import tfamp
from helpers import saved_models
from helpers.cases import one_of_each
from helpers.graph_asserts import assert_computes_in, assert_has_low_precision
from helpers.tolerances import assert_close
from tfamp.interop import tf_private
from tfamp.machine import hardware
from tfamp.rewriting.saved_model import inspect_saved_model

DTYPES = ["float16", "bfloat16"]


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """Writes a model once; returns its directory."""
    written = {}

    def write(name):
        if name not in written:
            written[name] = tmp_path_factory.mktemp("models") / name
            saved_models.MODELS[name][0](written[name])
        return written[name]

    return write


def call(path, name, key="serving_default"):
    model = tf.saved_model.load(str(path))
    function = model.signatures[key]
    inputs = {key: tf.constant(value) for key, value in saved_models.MODELS[name][1].items()}
    return function, function(**inputs)


def size(path):
    return sum(each.stat().st_size for each in path.rglob("*") if each.is_file())


def contents(path):
    return {str(f.relative_to(path)): f.read_bytes() for f in path.rglob("*") if f.is_file()}


def specs(function):
    given = function.structured_input_signature[1]
    inputs = {k: (v.shape, v.dtype, v.name) for k, v in given.items()}
    outputs = {k: (v.shape, v.dtype) for k, v in function.structured_outputs.items()}
    # Protobuf gives the entries of a map in any order.
    return sorted(map(str, inputs.items())), sorted(map(str, outputs.items()))


def no_ops(path):
    """The names of nodes of the main graph that compute nothing."""
    message = tf_private.saved_model_message()
    message.ParseFromString(graph_of(path).read_bytes())
    nodes = message.meta_graphs[0].graph_def.node
    return sorted(node.name for node in nodes if node.op == "NoOp")


@pytest.mark.parametrize(
    ("name", "freeze", "dtype"), one_of_each(saved_models.MODELS, [False, True], DTYPES, quick=2)
)
def test_models_are_converted_and_used_as_before(source, tmp_path, name, freeze, dtype):
    src, dst = source(name), tmp_path / "low"
    before = contents(src)
    plan = tfamp.rewrite_saved_model(src, dst, dtype=dtype, freeze=freeze)
    assert plan.summary == inspect_saved_model(src, dtype=dtype, freeze=freeze).summary
    assert plan.dtype == dtype
    assert plan.summary.low_nodes > 0
    assert contents(src) == before
    (function, actual), (original, expected) = call(dst, name), call(src, name)
    assert_has_low_precision(function)
    if name != "loop":
        assert_computes_in(dtype, function)
    assert specs(function) == specs(original)
    assert actual.keys() == expected.keys()
    for key, value in expected.items():
        assert actual[key].dtype == value.dtype
        if value.dtype == tf.float32:
            assert_close(actual[key], value, dtype, depth=256)
        else:
            assert (actual[key].numpy() == value.numpy()).all()


def test_signatures_objects_files_and_what_only_objects_refer_to(source, tmp_path, caplog):
    src, dst = source("module"), tmp_path / "low"
    plan = tfamp.rewrite_saved_model(src, dst, dtype="bfloat16")
    with caplog.at_level(logging.WARNING):
        before, after = (tf.saved_model.load(str(path)) for path in (src, dst))
    assert not caplog.records
    assert list(after.signatures) == list(before.signatures)
    assert set(dir(after)) == set(dir(before))
    kept, now = contents(src), contents(dst)
    assert now.keys() == kept.keys()
    changed = {name for name in kept if now[name] != kept[name]}
    assert changed == {"saved_model.pb", "fingerprint.pb"}
    prints = [tf.saved_model.experimental.read_fingerprint(str(path)) for path in (src, dst)]
    assert prints[0].saved_model_checksum != prints[1].saved_model_checksum
    assert prints[0].checkpoint_hash == prints[1].checkpoint_hash
    # Functions that only objects refer to hang on a node, which goes again.
    assert no_ops(dst) == no_ops(src)
    # "inner" ends in a Relu, which "outer" multiplies by a weight: low on both sides.
    outer = [node for node in plan.nodes if "__inference_outer" in node.scope]
    assert [n.dtype for n in outer if n.op in ("MatMul", "Relu")] == ["bfloat16"] * 3
    x = tf.constant(saved_models.FLOATS)
    assert len(after.by_objects_only.concrete_functions) == 2
    for function in after.by_objects_only.concrete_functions:
        assert_computes_in("bfloat16", function)
    for negative in (False, True):
        actual, (same,) = after.by_objects_only(x, negative=negative)
        assert_close(actual, before.by_objects_only(x, negative=negative)[0], "bfloat16", depth=64)
        assert (same.numpy() == saved_models.FLOATS).all()
    rows = tf.RaggedTensor.from_row_lengths(tf.reshape(x, (-1,)), [64, 60, 63, 64, 5])
    assert_computes_in("bfloat16", after.ragged.concrete_functions[0])
    assert_close(after.ragged(rows), before.ragged(rows), "bfloat16", depth=64)


def test_custom_gradients_are_kept_and_variables_can_be_trained_on(tmp_path):
    @tf.custom_gradient
    def clip(y):
        return tf.identity(y), lambda dy: tf.clip_by_value(dy, -0.25, 0.25)

    @tf.function
    def inside(x):
        return clip(tf.nn.relu(x @ made.weight)) @ made.weight

    made = tf.Module()
    made.weight = tf.Variable(tf.eye(8) * 0.5)
    made.call = tf.function(lambda x: tf.nn.relu(inside(x)), [tf.TensorSpec((None, 8), name="x")])
    options = tf.saved_model.SaveOptions(experimental_custom_gradients=True)
    tf.saved_model.save(made, str(tmp_path / "a"), options=options)
    tfamp.rewrite_saved_model(tmp_path / "a", tmp_path / "b", dtype="bfloat16")
    gradients = []
    for name in ("a", "b"):
        model = tf.saved_model.load(str(tmp_path / name))
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model.call(tf.ones((2, 8))))
        gradients.append(tape.gradient(loss, model.weight))
    assert_computes_in("bfloat16", model.call.concrete_functions[0])
    assert_close(gradients[1], gradients[0], "bfloat16", depth=8)
    before = model.call(tf.ones((2, 8)))
    model.weight.assign(2.0 * model.weight)
    assert_close(model.call(tf.ones((2, 8))), 4.0 * before, "bfloat16", depth=8)


def test_a_frozen_model_takes_half_the_bytes_and_its_signatures_share_them(source, tmp_path):
    src, dst = source("keras_export"), tmp_path / "low"
    tfamp.rewrite_saved_model(src, dst, dtype="bfloat16", freeze=True)
    assert size(dst) < 0.6 * size(src)
    assert not (dst / "variables").exists()
    assert set(tf.saved_model.load(str(dst)).signatures) == {"serve", "serving_default"}
    weights = 8 * 8 * 8 * 64 * 2  # The first Dense layer, once, in two bytes a number.
    assert weights < size(dst) < 1.6 * weights


def test_what_keep_float32_names_is_stored_in_float32(source, tmp_path):
    plan = tfamp.rewrite_saved_model(
        source("module"), tmp_path / "low", dtype="bfloat16", freeze=True, keep_float32=["back$"]
    )
    matmuls = {n.name.rpartition("/")[2]: n.dtype for n in plan.nodes if n.op == "MatMul"}
    assert matmuls == {"matmul": "bfloat16", "back": "float32"}
    weight = 64 * 256
    assert (4 + 2) * weight < size(tmp_path / "low") < (4 + 3) * weight
    with pytest.raises(ValueError, match="keep_float32: no node's name matches 'nonsense'"):
        inspect_saved_model(source("module"), dtype="bfloat16", keep_float32=["nonsense"])


def test_patterns_reach_branches_by_the_names_of_their_callers(tmp_path):
    weight = tf.Variable(tf.eye(4))

    @tf.function(experimental_attributes={"_noinline": True})
    def gate(x):
        return tf.cond(x[0, 0] > 0.0, lambda: x @ weight, lambda: weight @ x)

    @tf.function(input_signature=[tf.TensorSpec((4, 4))])
    def call(x):
        with tf.name_scope("gate"):
            x = gate(x)
        return x @ weight

    module = tf.Module()
    module.weight, module.call = weight, call
    tf.saved_model.save(module, tmp_path / "a", signatures=call)
    plan = inspect_saved_model(tmp_path / "a", dtype="bfloat16", keep_float32=["gate/"])
    dtypes = [node.dtype for node in plan.nodes if node.op == "MatMul"]
    assert sorted(dtypes) == ["bfloat16", "float32", "float32"]
    with pytest.warns(tfamp.TfampWarning, match="'gate/.*cond.' has no effect.*cond/matmul"):
        inspect_saved_model(tmp_path / "a", dtype="bfloat16", keep_float32=["gate/.*cond$"])


def test_what_saves_restores_and_initialises_is_left_alone_and_tables_can_be_calibrated(source):
    for name in ("module", "table", "text"):
        data = saved_models.MODELS[name][1]
        data = [data["words"]] if name == "text" else data  # Its only input needs no name.
        plan = inspect_saved_model(source(name), dtype="bfloat16", calibration=data)
        scopes = {node.scope for node in plan.nodes}
        assert any("inference" in scope for scope in scopes)
        for word in ("save", "restore", "initializer", "creator", "destroyer"):
            assert not any(word in scope for scope in scopes), scopes
    for name, data, message in (
        ("module", {"y": saved_models.FLOATS}, "No signature of .* takes arrays named"),
        ("tensorflow_1", {"x": saved_models.FLOATS}, "cannot be run on the calibration data"),
    ):
        with pytest.raises(tfamp.SavedModelError, match=message):
            inspect_saved_model(source(name), dtype="bfloat16", calibration=data)


@pytest.mark.parametrize("freeze", [False, True])
def test_a_model_with_nothing_to_convert_says_so(tmp_path, freeze):
    made = tf.Module()
    made.call = tf.function(lambda x: {"y": tf.exp(x)}, [tf.TensorSpec((2,), name="x")])
    tf.saved_model.save(made, str(tmp_path / "a"), signatures=made.call)
    message = "no op that can be converted to bfloat16"
    with pytest.warns(tfamp.NothingConvertedWarning, match=message):
        tfamp.rewrite_saved_model(tmp_path / "a", tmp_path / "b", dtype="bfloat16", freeze=freeze)
    y = tf.saved_model.load(str(tmp_path / "b")).signatures["serving_default"](x=tf.zeros(2))["y"]
    assert y.numpy().tolist() == [1.0, 1.0]


def test_a_frozen_model_is_calibrated_with_its_tables_in_a_new_process(source, tmp_path):
    # Here the table that was saved may still exist, and has the name of the loaded one.
    np.savez(tmp_path / "data.npz", **saved_models.MODELS["table"][1])
    options = ["--dtype", "bfloat16", "--freeze", "--calibrate", tmp_path / "data.npz"]
    command = [sys.executable, "-m", "tfamp", "rewrite", source("table"), tmp_path / "low"]
    done = subprocess.run([*command, *options], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    _, result = call(tmp_path / "low", "table")
    assert result["number"].numpy().tolist() == [0, 2, -1, 1]


@pytest.mark.parametrize("freeze", [False, True])
def test_assets_go_along_and_the_directory_can_be_moved(source, tmp_path, freeze):
    shutil.copytree(source("table"), tmp_path / "model")
    tfamp.rewrite_saved_model(tmp_path / "model", tmp_path / "low", dtype="float16", freeze=freeze)
    shutil.rmtree(tmp_path / "model")
    (tmp_path / "low").rename(tmp_path / "moved")
    assert [path.name for path in (tmp_path / "moved" / "assets").iterdir()] == ["table.txt"]
    _, result = call(tmp_path / "moved", "table")
    assert result["number"].numpy().tolist() == [0, 2, -1, 1]


# ---- What cannot be done -------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [None, "auto"])
def test_without_a_dtype_it_takes_the_machines(source, monkeypatch, dtype):
    monkeypatch.setattr(hardware, "detect", lambda: hardware.Hardware("", True, False, (), False))
    assert inspect_saved_model(source("module"), dtype=dtype).dtype == "bfloat16"
    monkeypatch.setattr(hardware, "detect", lambda: hardware.Hardware("", False, False, (), False))
    with pytest.raises(ValueError, match="multiplies natively, and that is float32: this CPU"):
        inspect_saved_model(source("module"), dtype=dtype)
    with pytest.raises(ValueError, match="dtype must be one of float16, bfloat16, auto; got"):
        inspect_saved_model(source("module"), dtype="float64")


@pytest.fixture
def model(source, tmp_path):
    """A copy of a model, alone in a directory."""
    shutil.copytree(source("module"), tmp_path / "model")
    return tmp_path / "model"


def refused(model, dst, message, error=tfamp.SavedModelError, **options):
    """Asserts that a rewrite is refused and leaves all as it was."""
    before = contents(model.parent), sorted(model.parent.rglob("*"))
    with pytest.raises(error, match=message):
        tfamp.rewrite_saved_model(model, dst, dtype="bfloat16", **options)
    assert (contents(model.parent), sorted(model.parent.rglob("*"))) == before


@pytest.mark.parametrize("freeze", [False, True])
def test_an_equation_that_is_not_text_names_its_node(tmp_path, freeze):
    module = tf.Module()
    module.call = tf.function(lambda x: tf.einsum("ij,jk->ik", x, x), [tf.TensorSpec((2, 2))])
    tf.saved_model.save(module, tmp_path / "model", signatures=module.call)
    path = tmp_path / "model" / "saved_model.pb"
    message = tf_private.saved_model_message()
    message.ParseFromString(path.read_bytes())
    functions = message.meta_graphs[0].graph_def.library.function
    for node in (each for function in functions for each in function.node_def):
        if node.op == "Einsum":
            node.attr["equation"].s = b"\xff\xfe"
    path.write_bytes(message.SerializeToString())
    error = r"Node '.*einsum/Einsum' \(Einsum\): the attribute equation holds .* not UTF-8 text"
    refused(tmp_path / "model", tmp_path / "low", error, tfamp.RewriteError, freeze=freeze)


@pytest.mark.parametrize("overwrite", [False, True])
def test_it_never_writes_onto_its_input(model, overwrite):
    (model.parent / "link").symlink_to(model)
    for dst in (model, model.parent / "link", model.parent / "x" / ".." / "model"):
        refused(model, dst, "is the input", overwrite=overwrite)
    for dst in (model / "low", model.parent):
        refused(model, dst, "inside one another", overwrite=overwrite)
    refused(model / "saved_model.pb", model.parent / "low", "not a SavedModel", overwrite=overwrite)


def test_what_exists_is_refused_unless_it_may_be_overwritten(model):
    dst = model.parent / "low"
    shutil.copytree(model, dst)
    refused(model, dst, "exists; give another directory, or overwrite=True to replace it")
    (dst / "old").touch()
    tfamp.rewrite_saved_model(model, dst, dtype="bfloat16", overwrite=True)
    assert not (dst / "old").exists()
    assert_computes_in("bfloat16", tf.saved_model.load(str(dst)).signatures["also"])
    assert sorted(path.name for path in model.parent.iterdir()) == ["low", "model"]
    (dst / "saved_model.pb").rename(dst / "thesis.tex")
    for precious in (dst, dst / "thesis.tex"):
        refused(model, precious, "exists and is not a SavedModel", overwrite=True)


def graph_of(model):
    return model / "saved_model.pb"


def drop_values(model):
    message = tf_private.saved_model_message()
    message.ParseFromString(graph_of(model).read_bytes())
    for node in message.meta_graphs[0].graph_def.node:
        node.attr.pop("value", None)
    graph_of(model).write_bytes(message.SerializeToString())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda model: graph_of(model).write_bytes(graph_of(model).read_bytes()[:-100]),
            r"saved_model\.pb is broken .*Save the model again",
        ),
        (lambda model: graph_of(model).write_bytes(b""), "is broken: it holds no graph"),
        (drop_values, r"saved_model\.pb is broken: .*constant '.*Save the model again"),
        (lambda model: graph_of(model).unlink(), "is not a SavedModel: it has no saved_model.pb"),
        (lambda model: shutil.rmtree(model / "variables"), "The variables of .* cannot be read"),
        (shutil.rmtree, "There is no directory"),
    ],
)
@pytest.mark.parametrize("freeze", [False, True])
def test_a_broken_or_missing_input_is_named_and_nothing_is_written(model, change, message, freeze):
    change(model)
    refused(model, model.parent / "low", message, freeze=freeze)


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), tfamp.SavedModelError),
        (KeyboardInterrupt(), KeyboardInterrupt),
    ],
)
@pytest.mark.parametrize("overwrite", [False, True])
def test_what_stops_it_midway_leaves_nothing_behind(model, monkeypatch, error, raised, overwrite):
    dst = model.parent / "low" if overwrite else model.parent / "new" / "deep" / "low"
    if overwrite:
        shutil.copytree(model, dst)
    original = shutil.copytree

    def copy_and_stop(*args, **kwargs):
        original(*args, **kwargs)
        raise error

    monkeypatch.setattr(shutil, "copytree", copy_and_stop)
    message = "could not be written: .*No space left" if raised is tfamp.SavedModelError else None
    refused(model, dst, message, raised, overwrite=overwrite)


def test_a_variable_that_is_written_cannot_be_frozen(tmp_path):
    def count(x):
        made.count.assign_add(1.0)
        return {"y": x @ x + made.count}

    made = tf.Module()
    made.count = tf.Variable(0.0)
    made.call = tf.function(count, [tf.TensorSpec((2, 2), name="x")])
    tf.saved_model.save(made, str(tmp_path / "model"), signatures=made.call)
    message = "AssignAddVariableOp.*more with it than read"
    refused(tmp_path / "model", tmp_path / "low", message, freeze=True)
    tfamp.rewrite_saved_model(tmp_path / "model", tmp_path / "low", dtype="bfloat16")
    function = tf.saved_model.load(str(tmp_path / "low")).signatures["serving_default"]
    assert [float(function(x=tf.eye(2))["y"][0, 0]) for _ in range(2)] == [2.0, 3.0]


def test_a_model_without_signatures_is_rewritten_but_not_frozen(tmp_path):
    made = tf.Module()
    made.call = tf.function(lambda x: x @ x)
    made.call(tf.eye(2))
    tf.saved_model.save(made, str(tmp_path / "model"))
    refused(tmp_path / "model", tmp_path / "low", "has no signatures", freeze=True)
    tfamp.rewrite_saved_model(tmp_path / "model", tmp_path / "low", dtype="bfloat16")
    loaded = tf.saved_model.load(str(tmp_path / "low"))
    assert_computes_in("bfloat16", loaded.call.concrete_functions[0])


def test_all_graphs_of_a_model_are_converted_and_the_plan_has_those_of_each(tmp_path):
    v1, x = tf.compat.v1, np.random.default_rng(0).normal(size=(8, 64)).astype("float32")
    tags = (["serve"], ["serve", "wide"])
    expected = []
    builder = v1.saved_model.Builder(str(tmp_path / "model"))
    for layers, names in enumerate(tags, start=1):
        with tf.Graph().as_default(), v1.Session() as session:
            given = hidden = v1.placeholder(tf.float32, (None, 64), name="x")
            for layer in range(layers):
                initial = tf.random.stateless_normal((64, 64), (layers, layer), stddev=0.1)
                hidden = hidden @ v1.get_variable(f"w{layer}", initializer=initial)
            result = tf.identity(hidden, name="y")
            session.run(v1.global_variables_initializer())
            info = v1.saved_model.build_tensor_info
            signature = v1.saved_model.build_signature_def(
                {"x": info(given)}, {"y": info(result)}, "tensorflow/serving/predict"
            )
            if layers == 1:
                add = functools.partial(builder.add_meta_graph_and_variables, session)
                expected.append(session.run(result, {given: x}))
            else:
                add = builder.add_meta_graph
            add(names, {"serving_default": signature})
    builder.save()

    plan = tfamp.rewrite_saved_model(tmp_path / "model", tmp_path / "low", dtype="bfloat16")

    assert (plan.summary.products, plan.summary.low_products) == (3, 3)
    assert len([node for node in plan.nodes if node.op == "MatMul"]) == 3
    message = tf_private.saved_model_message()
    message.ParseFromString((tmp_path / "low" / "saved_model.pb").read_bytes())
    low = [
        sum(node.op == "MatMul" and node.attr["T"].type == 14 for node in graph.graph_def.node)
        for graph in message.meta_graphs
    ]
    assert low == [1, 2]
    with tf.Graph().as_default(), v1.Session() as session:
        v1.saved_model.load(session, tags[0], str(tmp_path / "low"))
        assert_close(session.run("y:0", {"x:0": x}), expected[0], "bfloat16", depth=64)


@pytest.mark.slow
def test_models_of_tf_keras_are_converted(tmp_path):
    tf_keras = pytest.importorskip("tf_keras")
    layers = tf_keras.layers
    made = tf_keras.Sequential(
        [layers.Input((8, 8)), layers.LSTM(16), layers.Dense(16, "relu"), layers.Dense(4)]
    )
    made.save(tmp_path / "model", save_format="tf")
    tfamp.rewrite_saved_model(tmp_path / "model", tmp_path / "low", dtype="bfloat16")
    loaded = tf.saved_model.load(str(tmp_path / "low"))
    assert_computes_in("bfloat16", loaded.signatures["serving_default"])
    x = np.random.default_rng(0).normal(size=(3, 8, 8)).astype("float32")
    assert_close(loaded(x), made(x), "bfloat16", depth=64)
