"""`model_report`: the plan of files and models of every kind, in words, and what is refused."""

import json
import re

import keras
import pytest
import tensorflow as tf

import tfamp
from tfamp.cli import main
from tfamp.diagnostics import ModelReport, model_report


def dense(units=64, inputs=64) -> keras.Model:
    layers = [keras.layers.Dense(units, "relu", name="wide"), keras.layers.Dense(10, name="head")]
    return keras.Sequential([keras.Input((inputs,)), *layers], name="net")


def report(source, **options) -> ModelReport:
    return model_report(source, **{"dtype": "bfloat16", **options})


def kept(found) -> dict[str, int]:
    return {each.op: each.nodes for each in found.float32_ops}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """The same model as a SavedModel and as a .keras file."""
    folder, model = tmp_path_factory.mktemp("models"), dense()
    model.export(folder / "saved", verbose=False)
    model.save(folder / "model.keras")
    return {"saved": folder / "saved", "keras": folder / "model.keras"}


def test_it_is_the_plan_of_a_rewrite():
    inputs = {name: keras.Input((512, 64), name=name) for name in "ab"}
    added = keras.layers.Add()(list(inputs.values()))
    outputs = keras.layers.Lambda(keras.ops.exp)(keras.layers.Dense(64)(added))
    model = keras.Model(inputs, outputs, name="net")
    with tfamp.policy_scope("mixed_bfloat16"):
        found = report(model)
    specs = {name: tf.TensorSpec((None, 512, 64)) for name in "ab"}
    plan = tfamp.rewrite(model, dtype="bfloat16").plan(specs)
    assert found.source == "net"
    assert found.plan.summary == plan.summary
    assert plan.summary.low_nodes > 0
    assert kept(found)["Exp"] == 1
    assert "Const" not in kept(found)
    assert {layer.dtype_policy.name for layer in model.layers} == {"float32"}


def test_functions_and_models_that_are_not_built_need_example_arguments():
    model = keras.Sequential([keras.layers.Dense(12)])
    with pytest.raises(ValueError, match="give example_args"):
        report(model)
    assert report(model, example_args=(tf.TensorSpec((4, 16)),)).plan.summary.nodes
    function = tf.function(lambda x: tf.matmul(x, x, name="m"))
    assert report(function, example_args=(tf.ones((4, 4)),)).plan.nodes[1].name == "m"


def test_text_and_json_say_the_same():
    found = report(lambda x: tf.exp(x @ x) + tf.math.log(x), example_args=(tf.ones((64, 64)),))
    facts, text = json.loads(found.to_json()), found.to_text()
    assert {each["op"] for each in facts["float32_ops"]} == {*kept(found)} >= {"Exp", "Log"}
    assert all(f"{each.op}: {each.reason}" in text for each in found.float32_ops)
    assert "tfamp.tune(step, x, y)" in text


@pytest.mark.parametrize(
    ("source", "options", "error", "message"),
    [
        ("nowhere", {}, tfamp.SavedModelError, "There is no directory nowhere"),
        ("nowhere.keras", {}, tfamp.SavedModelError, "nowhere.keras cannot be loaded"),
        (3, {}, TypeError, "takes the path.*got int"),
        (tf.matmul, {"dtype": "int8"}, ValueError, "one of float16, bfloat16, auto; got 'int8'"),
    ],
)
def test_what_cannot_be_done_is_refused(source, options, error, message):
    with pytest.raises(error, match=message):
        report(source, **options)


def test_a_file_that_would_run_code_is_not_loaded(tmp_path):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Lambda(lambda x: x + 1)])
    model.save(tmp_path / "code.keras")
    (tmp_path / "broken.keras").write_bytes(b"no zip")
    for name in ("code.keras", "broken.keras"):
        with pytest.raises(tfamp.SavedModelError, match="cannot be loaded"):
            report(tmp_path / name)


@pytest.mark.parametrize("kind", ["saved", "keras"])
def test_a_file_is_reported_in_python_and_by_doctor(files, kind, capsys):
    found = report(str(files[kind]))
    assert [node.dtype for node in found.plan.nodes if node.op == "MatMul"] == ["bfloat16"] * 2
    assert main(["doctor", str(files[kind]), "--dtype", "bfloat16"]) == 0
    text = capsys.readouterr().out
    assert "policy auto" in text
    low, computing = map(int, re.search(r"(\d+) of (\d+) float ops that compute", text).groups())
    assert low >= 2
    assert computing - low == sum(row.nodes for row in found.float32_ops)
    # Variables compute nothing.
    assert not [row for row in found.float32_ops if "Var" in row.op]
    assert main(["doctor", str(files[kind]), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["model"]["source"] == str(files[kind])
    assert facts["auto_policy"]["name"]
    assert main(["doctor", "nowhere"]) == 1
    assert capsys.readouterr().err.startswith("tfamp: error: There is no directory nowhere")
