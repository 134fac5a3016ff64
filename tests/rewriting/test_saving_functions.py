"""Functions that `tfamp.rewrite` returns are saved and tracked as a `tf.function` is."""

import json

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp
from helpers import saved_models
from helpers.cases import first_of
from helpers.graph_asserts import op_dtypes
from helpers.tolerances import assert_close

WIDTH = 8
X = tf.constant(np.random.default_rng(1).standard_normal((4, WIDTH)).astype("float32"))
SPEC = tf.TensorSpec((None, WIDTH))


@tf.custom_gradient
def quarter(x):
    return x, lambda gradient: gradient / 4


@tf.function(experimental_attributes={"_noinline": True})
def apart(x):
    return tf.nn.relu(x)


class Module(tf.Module):
    def __init__(self):
        super().__init__()
        self.weight = tf.Variable(np.random.default_rng(2).random((WIDTH, WIDTH), "float32") / 4)
        self.attribute = tfamp.rewrite(lambda x: apart(x @ self.weight), dtype="bfloat16")
        self.cached = tfamp.rewrite(lambda x: x @ self.weight, dtype="bfloat16")
        self.listed = [tfamp.rewrite(lambda x: quarter(x @ self.weight), dtype="bfloat16")]

    @tfamp.rewrite(dtype="bfloat16")
    def __call__(self, x, flag=False):
        return x @ self.weight * (2.0 if flag else 1.0)

    @tfamp.rewrite(dtype="bfloat16")
    @tf.function(input_signature=[SPEC])
    def signed(self, x):
        """Never called."""
        y = tf.cond(tf.reduce_sum(x) > 1e6, lambda: x, lambda: x @ self.weight)
        return tf.while_loop(lambda i, a: i < 2, lambda i, a: (i + 1, a @ self.weight), [0, y])[1]

    def calls(self):
        return {
            "attribute": self.attribute(X),
            "listed": self.listed[0](X),
            "cached": self.cached(X),
            "plain": self(X),
            "flag": self(X, flag=True),
            "smaller": self(X[:1]),
        }


# In a process that has no tfamp: results, gradients, dtypes and whether variables are shared.
_ELSEWHERE = """
import json, sys
import numpy as np
import tensorflow as tf

loaded = tf.saved_model.load(path + "/model")
x, floats = (tf.constant(np.load(path + "/" + name)) for name in ("x.npy", "floats.npy"))
served = loaded.signatures["serving_default"]
calls = {
    "attribute": loaded.attribute, "listed": loaded.listed[0], "cached": loaded.cached,
    "plain": loaded, "flag": lambda x: loaded(x, flag=True), "smaller": lambda x: loaded(x[:1]),
    "signed": loaded.signed, "signature": lambda x: served(x)["output_0"],
}
results, gradients = {}, {}
for name, call in calls.items():
    with tf.GradientTape() as tape:
        result = call(x)
    results[name] = result
    gradients[name + "_gradient"] = tape.gradient(result, loaded.weight)
np.savez(path + "/found.npz", **results, **gradients)
loaded.weight.assign(2 * loaded.weight)
doubled = bool(np.allclose(loaded(x), 2 * results["plain"]))
functions = [loaded.attribute, loaded.listed[0], loaded.cached, loaded.__call__, loaded.signed]
traces = [trace for each in functions for trace in each.concrete_functions]
dtypes = set()
for trace in [*traces, served]:
    graph = trace.graph.as_graph_def()
    bodies = [graph.node, *(each.node_def for each in graph.library.function)]
    dtypes |= {n.attr["T"].type for nodes in bodies for n in nodes if n.op == "MatMul"}
facts = {
    "doubled": doubled, "dtypes": [tf.as_dtype(each).name for each in dtypes],
    "traces": len(traces), "tfamp": "tfamp" in sys.modules,
}
with open(path + "/facts.json", "w") as file:
    json.dump(facts, file)
for name in ("kept", "frozen"):
    function = tf.saved_model.load(path + "/" + name).signatures["also"]
    np.save(path + "/" + name + ".npy", function(floats)["output_0"])
"""


@pytest.mark.slow
def test_a_module_is_loaded_where_there_is_no_tfamp(tmp_path, without_tfamp):
    module = Module()
    expected = module.calls()
    np.save(tmp_path / "x.npy", X)
    tf.saved_model.save(module, tmp_path / "model", signatures=module.signed)
    np.save(tmp_path / "floats.npy", saved_models.FLOATS)
    saved_models.module(tmp_path / "source")
    for name in ("kept", "frozen"):
        options = {"dtype": "bfloat16", "freeze": name == "frozen"}
        tfamp.rewrite_saved_model(tmp_path / "source", tmp_path / name, **options)
    without_tfamp(_ELSEWHERE, path=str(tmp_path))
    facts = json.loads((tmp_path / "facts.json").read_text("utf-8"))
    assert facts == {"doubled": True, "dtypes": ["bfloat16"], "traces": 7, "tfamp": False}
    found = np.load(tmp_path / "found.npz")
    expected |= {"signed": module.signed(X), "signature": module.signed(X)}
    for name, result in expected.items():
        np.testing.assert_array_equal(found[name], result, err_msg=name)
    plain = saved_models.Module()
    inner = plain.inner(tf.constant(saved_models.FLOATS))
    for name in ("kept", "frozen"):
        assert_close(np.load(tmp_path / f"{name}.npy"), inner, "bfloat16", depth=64)
    for name, call in (("attribute", module.attribute), ("listed", module.listed[0])):
        with tf.GradientTape() as tape:
            result = call(X)
        gradient = tape.gradient(result, module.weight)
        assert_close(found[f"{name}_gradient"], gradient, "bfloat16", depth=WIDTH)


def _in_a_loop(x, step):
    return tf.while_loop(lambda i, _: i < 3, lambda i, a: (i + 1, step(a)), (0, x))[1]


INSIDE = {
    "branch": lambda x, step: tf.cond(tf.reduce_sum(x) > -1e6, lambda: step(x), lambda: x),
    "loop": _in_a_loop,
    "loop in a branch": lambda x, step: tf.cond(
        tf.reduce_sum(x) > -1e6, lambda: _in_a_loop(x, step), lambda: x
    ),
    "map_fn": lambda x, step: tf.map_fn(lambda row: step(row[None])[0], x),
}


@pytest.mark.parametrize("kind", first_of(INSIDE))
def test_custom_gradients_inside_of_control_flow_are_saved(tmp_path, kind):
    module = tf.Module()
    module.weight = tf.Variable(np.random.default_rng(2).random((WIDTH, WIDTH), "float32") / 4)
    step = lambda x: quarter(x @ module.weight)  # noqa: E731
    function = tf.function(
        lambda x: INSIDE[kind](x, step) @ module.weight, input_signature=[tf.TensorSpec((4, WIDTH))]
    )
    module.call = tfamp.rewrite(function, dtype="bfloat16")

    def values(call, weight):
        with tf.GradientTape() as tape:
            result = call(X)
        return result, tape.gradient(result, weight)

    exact = values(function, module.weight)
    expected = values(module.call, module.weight)
    tf.saved_model.save(module, tmp_path)
    loaded = tf.saved_model.load(tmp_path)
    assert "bfloat16" in op_dtypes(loaded.call.concrete_functions[0])["MatMul"]
    found = values(loaded.call, loaded.weight)
    for actual, wanted, without in zip(found, expected, exact, strict=True):
        np.testing.assert_array_equal(actual, wanted)
        assert_close(actual, without, "bfloat16", depth=4 * WIDTH)


@pytest.mark.parametrize("kind", first_of(["named", "concrete", "bound method"]))
def test_signatures_are_taken_as_those_of_a_function(tmp_path, kind):
    module = Module()
    signatures = {
        "concrete": module.attribute.get_concrete_function(SPEC),
        "named": {"low": module.attribute.get_concrete_function(SPEC)},
        "bound method": {"low": module.signed},
    }[kind]
    tf.saved_model.save(module, tmp_path, signatures=signatures)
    loaded = tf.saved_model.load(tmp_path)
    ((name, served),) = loaded.signatures.items()
    assert name == ("serving_default" if kind == "concrete" else "low")
    assert op_dtypes(served)["MatMul"] == {"bfloat16"}
    expected = module.signed(X) if kind == "bound method" else module.attribute(X)
    np.testing.assert_array_equal(served(X)["output_0"], expected)


def test_without_a_signature_tensorflow_says_what_it_says_of_a_function(tmp_path):
    module = Module()
    with pytest.raises(ValueError, match="input signature or concrete functions"):
        tf.saved_model.save(module, tmp_path, signatures=module.attribute)


def test_keras_models_and_checkpoints_take_it(tmp_path):
    model = keras.Sequential([keras.Input((WIDTH,)), keras.layers.Dense(4, "silu")])
    model.fast = tfamp.rewrite(model, dtype="bfloat16")
    expected = model.fast(X)
    archive = keras.export.ExportArchive()
    archive.track(model)
    archive.add_endpoint("serve", model.fast)
    archive.write_out(tmp_path / "exported", verbose=False)
    served = tf.saved_model.load(tmp_path / "exported")
    np.testing.assert_array_equal(served.serve(X), expected)
    assert op_dtypes(served.serve.concrete_functions[0])["MatMul"] == {"bfloat16"}
    module = Module()
    path = tf.train.Checkpoint(module=module, function=module.attribute).save(tmp_path / "values")
    before = module.weight.numpy()
    module.weight.assign(0 * module.weight)
    status = tf.train.Checkpoint(module=module, function=module.attribute).restore(path)
    status.assert_existing_objects_matched()
    np.testing.assert_array_equal(module.weight, before)


def test_variables_made_by_a_method_at_its_first_call_are_saved(tmp_path):
    class Lazy(tf.Module):
        weight = None

        @tfamp.rewrite(dtype="bfloat16")
        def __call__(self, x):
            if self.weight is None:
                self.weight = tf.Variable(tf.eye(WIDTH))
            return x @ self.weight

    module = Lazy()
    expected = module(X)
    module(X[:1])
    assert module.__call__.experimental_get_tracing_count() == 2
    tf.saved_model.save(module, tmp_path)
    loaded = tf.saved_model.load(tmp_path)
    np.testing.assert_array_equal(loaded(X), expected)
    assert loaded.weight.shape == (WIDTH, WIDTH)
