"""A bound on the error: what stays float32 for it, and that the written file has that error."""

import json

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp
from tfamp.rewriting import bounded

DATA = {"x": 10 * np.random.default_rng(0).random((32, 64))}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A model whose second layer alone has products too large for float16."""
    keras.utils.set_random_seed(0)
    layers = keras.layers
    first, second = layers.Dense(64, "relu", name="first"), layers.Dense(64, name="second")
    parts = [first, second, layers.Rescaling(1e-4, name="scaled"), layers.Dense(10, name="head")]
    model = keras.Sequential([keras.Input((64,), name="x"), *parts])
    second.kernel.assign(3e4 * second.kernel)
    path = tmp_path_factory.mktemp("bounded") / "model"
    model.export(path, verbose=False)
    return path


def outputs_of(path):
    serve = tf.saved_model.load(str(path)).signatures["serving_default"]
    (value,) = serve(x=tf.constant(DATA["x"], "float32")).values()
    return value.numpy().astype("float64")


def error_of(path, source):
    exact = outputs_of(source)
    return np.abs(outputs_of(path) - exact).max() / np.abs(exact).max()


@pytest.mark.parametrize("freeze", [False, True])
def test_a_few_scopes_stay_float32_and_the_file_has_the_proved_error(source, tmp_path, freeze):
    plain, kept = tmp_path / "plain", tmp_path / "kept"
    tfamp.rewrite_saved_model(source, plain, dtype="float16", freeze=freeze)
    assert not error_of(plain, source) < 0.01
    plan = tfamp.rewrite_saved_model(
        source, kept, dtype="float16", freeze=freeze, bound=0.01, data=DATA
    )
    found = plan.accuracy
    assert not found.error_of_all < 0.01
    assert found.error == error_of(kept, source) < 0.01
    assert any("second" in scope for scope in found.float32_scopes)
    assert not any("first" in scope for scope in found.float32_scopes)
    products = {node.name: node.dtype for node in plan.nodes if node.op == "MatMul"}
    assert {dtype for name, dtype in products.items() if "second" in name} == {"float32"}
    assert {dtype for name, dtype in products.items() if "first" in name} == {"float16"}
    assert 0 < plan.summary.low_products < plan.summary.products == len(products)
    written = json.loads(plan.to_json(), parse_constant=pytest.fail)["accuracy"]
    assert (written["bound"], float(written["error_of_all"])) == (0.01, found.error_of_all)
    assert "error on the data" in plan.to_text()
    # The weights are files of its own, not links to the model it was made of.
    assert not any(path.is_symlink() for path in kept.rglob("*"))


def test_nothing_is_kept_where_the_bound_holds_already(source, tmp_path):
    plan = tfamp.rewrite_saved_model(
        source, tmp_path / "low", dtype="bfloat16", bound=0.1, data=[DATA, DATA]
    )
    assert plan.accuracy.float32_scopes == ()
    assert plan.summary.low_products == plan.summary.products == 3
    assert 0 < plan.accuracy.error == error_of(tmp_path / "low", source) < 0.1


def test_what_cannot_be_measured_or_reached_is_an_error_and_writes_nothing(source, tmp_path):
    class Noise(tf.Module):
        @tf.function(input_signature=[tf.TensorSpec((None, 64), name="x")])
        def __call__(self, x):
            return {
                "y": tf.matmul(x, tf.raw_ops.RandomStandardNormal(shape=(64, 64), dtype=tf.float32))
            }

    class Words(tf.Module):
        @tf.function(input_signature=[tf.TensorSpec((None, 64), name="x")])
        def __call__(self, x):
            return {"y": tf.argmax(tf.matmul(x, tf.eye(64)), -1)}

    made = {}
    for module in (Noise(), Words()):
        made[type(module)] = str(tmp_path / type(module).__name__)
        tf.saved_model.save(module, made[type(module)], signatures=module.__call__)
    target = tmp_path / "out"
    for src, choices, error, message in (
        (source, {"bound": 0.1}, ValueError, "bound and data go together"),
        (source, {"data": DATA}, ValueError, "bound and data go together"),
        (source, {"bound": -1.0, "data": DATA}, ValueError, r"number in \[0, inf"),
        (source, {"bound": "1%", "data": DATA}, TypeError, "bound must be a number"),
        (source, {"bound": 0.1, "data": {"y": 1}}, tfamp.SavedModelError, "No signature of"),
        (source, {"bound": 0.1, "data": {"x": [1.0]}}, ValueError, "Data batch 0: the input x"),
        (made[Noise], {"bound": 0.01, "data": DATA}, tfamp.SavedModelError, "two runs in float32"),
        (made[Words], {"bound": 0.01, "data": DATA}, tfamp.SavedModelError, "nothing to measure"),
    ):
        with pytest.raises(error, match=message):
            tfamp.rewrite_saved_model(src, target, dtype="bfloat16", **choices)
        assert not target.exists()


def test_many_scopes_are_searched_by_their_outer_scopes(monkeypatch):
    class Node:
        def __init__(self, name):
            self.name = name

    names = ["block_1/a/MatMul", "PartitionedCall/block_1/b/MatMul", "block_2/a/MatMul", "MatMul"]
    nodes = [Node(name) for name in names]
    assert list(bounded._units(nodes)) == ["block_1/a", "block_1/b", "block_2/a", "MatMul"]
    monkeypatch.setattr(bounded, "_MOST_UNITS", 3)
    assert list(bounded._units(nodes)) == ["block_1", "block_2", "MatMul"]
