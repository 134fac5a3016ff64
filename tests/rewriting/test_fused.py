"""The candidate "fused" of `tfamp.tune`: XLA compiles what is between products, and only that."""

import numpy as np
import pytest
import tensorflow as tf

import tfamp
from helpers.tolerances import assert_close
from tfamp.rewriting import tuning

WIDTH = 32


@pytest.fixture
def fused_wins(monkeypatch):
    """Makes the candidate the fastest: all run, and the clock is made up."""

    def together(call, count):
        del count
        call()
        settings = getattr(call.func, "settings", None)
        return 1.0 if getattr(settings, "fuse", False) else 2.0

    monkeypatch.setattr(tuning, "together", together)


def tuned(function, *args, candidates=("min_cut", "fused")):
    report = tfamp.tune(function, *args, dtype="bfloat16", candidates=candidates, rounds=1)
    assert report.chosen.candidate == "fused"
    return report


def marks(function, *args):
    """Op types that XLA is to compile: of the graph, and of its functions."""
    graph = function.concrete(*args).graph.as_graph_def()
    bodies = (graph.node, [node for each in graph.library.function for node in each.node_def])
    return [[node.op for node in nodes if "_XlaCompile" in node.attr] for nodes in bodies]


def data(*shape):
    return tf.constant(np.random.default_rng(0).standard_normal(shape).astype("float32"))


class Layer(tf.Module):
    """A product on either side of a normalization and GELU."""

    def __init__(self):
        self.weights = tf.Variable(data(WIDTH, WIDTH) / WIDTH**0.5)

    def __call__(self, x):
        hidden = tf.nn.gelu(x @ self.weights)
        centred = hidden - tf.reduce_mean(hidden, -1, keepdims=True)
        return tf.nn.relu(centred @ self.weights)


def test_a_tuned_function_computes_the_same(fused_wins):
    layer, x = Layer(), data(16, WIDTH)
    report = tuned(layer, x)
    by_name = {row.candidate: row for row in report.rows}
    assert by_name["fused"].low_nodes == by_name["min_cut"].low_nodes > 0
    assert by_name["fused"].error < 2 * by_name["min_cut"].error
    marked, _ = marks(report.best, x)
    assert {"Sub", "Mul"} <= set(marked)
    assert not any("MatMul" in op for op in marked)
    assert_close(report.best(x), layer(x), "bfloat16", depth=4)


def test_gradients_are_the_same_inside_and_around(fused_wins):
    layer, x = Layer(), data(16, WIDTH)

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
    assert "Sum" in marks(inside, x)[0], "gradients of broadcasts are compiled too"
    assert_close(gradient_of(around), expected, "bfloat16", depth=8)
    assert_close(inside(x), expected, "bfloat16", depth=8)


def test_loops_are_left_alone(fused_wins):
    layer, x = Layer(), data(4, WIDTH)

    def looped(x):
        return tf.while_loop(lambda i, _: i < 3, lambda i, x: (i + 1, layer(x)), (0, x))[1]

    best = tuned(looped, x).best
    assert marks(best, x) == [[], []]
    assert_close(best(x), layer(layer(layer(x))), "bfloat16", depth=12)


def test_what_other_candidates_are_of_a_fused_function(fused_wins):
    layer, x = Layer(), data(16, WIDTH)
    fused = tuned(layer, x).best
    again = tfamp.tune(fused, x, candidates=("min_cut",), rounds=1)
    assert again.best is not fused
    assert not getattr(getattr(again.best, "settings", None), "fuse", False)


def test_it_is_saved_and_loaded(fused_wins, tmp_path):
    layer, x = Layer(), data(16, WIDTH)
    module = tf.Module()
    module.layer, module.run = layer, tuned(layer, x).best
    tf.saved_model.save(module, str(tmp_path))
    loaded = tf.saved_model.load(str(tmp_path))
    graph = loaded.run.get_concrete_function(x).graph.as_graph_def()
    bodies = [graph.node, *(each.node_def for each in graph.library.function)]
    assert any("_XlaCompile" in node.attr for nodes in bodies for node in nodes)
    assert_close(loaded.run(x), layer(x), "bfloat16", depth=4)
