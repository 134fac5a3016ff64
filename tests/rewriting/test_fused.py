"""The placement "fused": XLA compiles what is between products, and only that."""

import functools
import re

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp
from helpers.cases import first_of
from helpers.tolerances import assert_close
from tfamp.rewriting import measured_runs, tuning

WIDTH = 64
ROWS = 256


@pytest.fixture
def fused_wins(monkeypatch):
    """Makes the candidate the fastest: all run, and the clock is made up."""

    def together(call, count):
        del count
        call()
        return 1.0 if placement_of(call.func) == "fused" else 2.0

    monkeypatch.setattr(measured_runs, "together", together)


def placement_of(function):
    return getattr(getattr(function, "settings", None), "placement", None)


def tuned(function, *args, candidates=("min_cut", "fused")):
    options = {"dtype": "bfloat16", "rounds": 1}
    return tfamp.tune(function, *args, candidates=candidates, **options)


def compiled(function, *args):
    """Op types that XLA compiles, and those that it does not."""
    graph = function.concrete(*args).graph.as_graph_def()
    called = {node.attr["f"].func.name for node in graph.node if node.op == "PartitionedCall"}
    functions = [each for each in graph.library.function if each.signature.name in called]
    assert all(each.attr["_XlaMustCompile"].b for each in functions)
    inside = {node.op for each in functions for node in each.node_def}
    return inside, {node.op for node in graph.node}


def data(*shape):
    return tf.constant(np.random.default_rng(0).standard_normal(shape).astype("float32"))


@tf.custom_gradient
def gate(x):
    """Its gradient uses a tensor that a compiled function computes and does not return."""
    inner = 1.0 + tf.tanh(0.5 * x)
    return x * inner, lambda gradient: gradient * inner


class Layer(tf.Module):
    """A product on either side of an activation and a normalization."""

    def __init__(self, activation=tf.nn.gelu):
        self.activation = activation
        self.weights = tf.Variable(data(WIDTH, WIDTH) / WIDTH**0.5)

    def __call__(self, x):
        hidden = self.activation(x @ self.weights)
        centred = hidden - tf.reduce_mean(hidden, -1, keepdims=True)
        return tf.nn.relu(centred @ self.weights)


def test_a_tuned_function_computes_the_same(fused_wins):
    layer, x = Layer(), data(ROWS, WIDTH)
    report = tuned(layer, x)
    by_name = {row.candidate: row for row in report.rows}
    assert report.chosen.candidate == "fused"
    assert by_name["fused"].low_nodes == by_name["min_cut"].low_nodes > 0
    assert by_name["fused"].error < 2 * by_name["min_cut"].error
    inside, outside = compiled(report.best, x)
    assert {"Sub", "Mul"} <= inside
    assert "MatMul" in outside - inside
    assert_close(report.best(x), layer(x), "bfloat16", depth=4)


@pytest.mark.parametrize("activation", first_of([gate, tf.nn.gelu]))
def test_gradients_are_the_same_inside_and_around(fused_wins, activation):
    layer, x = Layer(activation), data(ROWS, WIDTH)

    def gradient_of(function):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(function(x) ** 2)
        return tape.gradient(loss, layer.weights)

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(layer(x) ** 2)
        return tape.gradient(loss, layer.weights)

    expected = gradient_of(layer)
    around, inside = tuned(layer, x).best, tuned(step, x).best
    assert "Sum" in compiled(inside, x)[0], "gradients of broadcasts are compiled too"
    assert_close(gradient_of(around), expected, "bfloat16", depth=8)
    assert_close(inside(x), expected, "bfloat16", depth=8)
    twice = tf.function(inside, jit_compile=True)
    assert_close(twice(x), expected, "bfloat16", depth=8)


def test_where_nothing_is_to_be_compiled_there_is_no_such_candidate(fused_wins, monkeypatch):
    layer, x = Layer(), data(4, WIDTH)

    def looped(x):
        return tf.while_loop(lambda i, _: i < 3, lambda i, x: (i + 1, layer(x)), (0, x))[1]

    assert [row.candidate for row in tuned(looped, x).rows] == ["float32", "min_cut"]
    monkeypatch.setattr(tuning, "xla_works", lambda device: False)
    rows = tuned(layer, data(ROWS, WIDTH)).rows
    assert [row.candidate for row in rows] == ["float32", "min_cut"]


def test_what_overflows_when_it_is_stored_is_not_finite_inside():
    def product(x):
        hidden = x @ tf.eye(WIDTH)
        squares = tf.nn.relu(hidden * hidden) + hidden - tf.abs(hidden)
        return squares @ tf.eye(WIDTH), tf.reduce_all(tf.math.is_finite(squares))

    options = {"dtype": "float16", "placement": "fused", "force_low": ["."]}
    fused = tfamp.rewrite(product, **options)
    for value, finite in ((100.0, True), (300.0, False)):  # float32 has the square of both.
        x = tf.fill((2 * ROWS, WIDTH), value)
        assert bool(fused(x)[1]) == finite == bool(np.isfinite(fused(x)[0]).all())
    assert "IsFinite" in compiled(fused, x)[0]
    # XLA for GPUs takes casts to float16 and back away, and with them the overflow.
    whole = tf.function(lambda x: fused(x), jit_compile=True)
    hlo = whole.experimental_get_compiler_ir(x)(stage="hlo", platform_name="GPU")
    rounded = re.findall(r"(%\S+) = f16\S+ convert\(f32", hlo)
    widened = re.findall(r"= f32\S+ convert\(f16\S+ (%[^)]+)\)", hlo)
    assert rounded
    assert widened
    assert not set(rounded) & set(widened)


@pytest.mark.slow
def test_fit_runs_what_level_auto_found(fused_wins):
    model = keras.Sequential([keras.Input((WIDTH,)), *(block() for _ in range(2))])
    model.compile(keras.optimizers.SGD(0.01), "mse")
    x, y = data(ROWS, WIDTH), data(ROWS, WIDTH)
    prepared = tfamp.prepare(model, level="auto", dtype="bfloat16", example_batch=(x, y))
    assert "(fused)" in str(prepared.settings)
    losses = model.fit(x, y, epochs=3, batch_size=ROWS, verbose=0).history["loss"]
    assert losses[-1] < losses[0]


def block():
    return keras.Sequential([keras.layers.Dense(WIDTH, "gelu"), keras.layers.LayerNormalization()])


def test_it_is_saved_and_loaded(fused_wins, tmp_path):
    layer, x = Layer(), data(ROWS, WIDTH)
    module = tf.Module()
    module.layer, module.run = layer, tuned(layer, x).best
    tf.saved_model.save(module, str(tmp_path))
    loaded = tf.saved_model.load(str(tmp_path))
    graph = loaded.run.get_concrete_function(x).graph.as_graph_def()
    assert any(each.attr["_XlaMustCompile"].b for each in graph.library.function)
    assert_close(loaded.run(x), layer(x), "bfloat16", depth=4)


def test_a_saved_model_is_compiled_where_it_is_frozen(tmp_path):
    layer, x = Layer(), data(ROWS, WIDTH)
    module = tf.Module()
    module.layer = layer
    module.run = tf.function(layer.__call__, [tf.TensorSpec((ROWS, WIDTH))])
    tf.saved_model.save(module, str(tmp_path / "from"), signatures=module.run)
    rewrite = functools.partial(
        tfamp.rewrite_saved_model, tmp_path / "from", tmp_path / "to", dtype="bfloat16"
    )
    with pytest.raises(ValueError, match="give freeze=True too, or placement='min_cut'"):
        rewrite(placement="fused")
    assert not (tmp_path / "to").exists()
    rewrite(placement="fused", freeze=True)
    run = tf.saved_model.load(str(tmp_path / "to")).signatures["serving_default"]
    assert any(op.type == "PartitionedCall" for op in run.graph.get_operations())
    (found,) = run(x).values()
    assert_close(found, layer(x), "bfloat16", depth=4)
